"""Sharded data parallelism of smp on a Llama, compared with PyTorch's `fully_shard` over NCCL and over `smddp`.

    smdrun -n 2 benches/gpu/sharded.py                      # 1.1 B parameters, bfloat16
    smdrun -n 2 benches/gpu/sharded.py --compile            # with compiled layers, for all variants
    # A small trial:
    smdrun -n 2 benches/gpu/sharded.py --device cpu --layers 2 --width 64 --sequence 32 --vocabulary 100

The model is transformers' Llama with its defaults. All variants shard each of its layers and train with fused AdamW.
They are in one process and take turns.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
import torch.distributed as c10d
from rounds import Rounds, Step, start
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import smdistributed.modelparallel.torch as smp


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "sequences of each rank", 4)
    parser.add_argument("--variants", nargs="+", default=["smp", "fsdp2 nccl", "fsdp2 smddp"])
    arguments = parser.parse_args()
    device = start(arguments.device)
    bench = Bench(arguments, device)
    makers = {"smp": bench.ours, "fsdp2 nccl": bench.fsdp_over_nccl, "fsdp2 smddp": bench.fsdp_over_smddp}
    ranks = c10d.get_world_size()
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    Rounds(arguments.rounds, arguments.steps, arguments.trace).run(
        {name: makers[name] for name in arguments.variants},
        ranks * arguments.batch * arguments.sequence,
        f"{ranks} x {name}, Llama of {bench.elems / 1e9:.2f} B, batch {arguments.batch} x {arguments.sequence}"
        f"{', compiled layers' if arguments.compile else ''}",
    )
    c10d.destroy_process_group()


def add_arguments(parser: argparse.ArgumentParser, batch_help: str, batch: int) -> None:
    """Adds the arguments of the model and of the rounds."""
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--batch", type=int, default=batch, help=batch_help)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--compile", action="store_true", help="compile each layer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--trace", help="write a profile of one step of each variant into this folder")


class Bench:
    """Makes the variants, which train on the same data."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.arguments, self.device = arguments, device
        width = arguments.width
        heads = width // 64 if width >= 128 else 2
        self.config = LlamaConfig(
            hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=arguments.layers,
            num_attention_heads=heads, num_key_value_heads=max(min(4, heads), width // 512),
            vocab_size=arguments.vocabulary, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(c10d.get_rank())
        shape = arguments.batch, arguments.sequence
        self.positions = torch.arange(arguments.sequence, device=device)[None]
        self.ids = torch.randint(3, arguments.vocabulary, shape, generator=generator).to(device)
        with torch.device("meta"):
            self.elems = sum(each.numel() for each in LlamaForCausalLM(self.config).parameters())

    def model(self, is_compiled: bool | None = None) -> nn.Module:
        """Makes the whole model, with the same initial values for each variant; compiles its layers if chosen."""
        torch.manual_seed(0)
        with self.device:
            model = LlamaForCausalLM._from_config(copy.deepcopy(self.config), dtype=torch.bfloat16)
        if self.arguments.compile if is_compiled is None else is_compiled:
            for layer in model.model.layers:
                layer.compile()
        return model

    def ours(self) -> Step:
        """Sharded data parallelism of smp."""
        # Gradient clipping is off, as in the FSDP2 variants.
        smp.init({
            "ddp": True, "sharded_data_parallel_degree": c10d.get_world_size(), "microbatches": 1,
            "sdp_gradient_clipping": 0,
        })  # fmt: skip
        return self.smp_step(smp.DistributedModel(self.model()), self.ids)

    def smp_step(self, model: Any, ids: torch.Tensor) -> Step:
        """Returns the training step of a distributed model on this rank's batch."""
        optimizer = smp.DistributedOptimizer(self._adamw(model))

        @smp.step
        def step(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
            loss = model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
            model.backward(loss)
            return loss

        def train() -> torch.Tensor:
            optimizer.zero_grad()
            loss = step(model, ids).reduce_mean()
            optimizer.step()
            return loss

        return train

    def torch_step(self, model: nn.Module, ids: torch.Tensor) -> Step:
        """Returns the training step of a model of PyTorch on this rank's batch."""
        optimizer = self._adamw(model)

        def train() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            return loss.detach()

        return train

    def fsdp_over_nccl(self) -> Step:
        """PyTorch's `fully_shard` on the default group."""
        return self.fully_sharded(DeviceMesh.from_group(c10d.group.WORLD, self.device.type), self.ids)

    def fsdp_over_smddp(self) -> Step:
        """The same over the backend of this library."""
        import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

        group = c10d.new_group(backend="smddp")
        return self.fully_sharded(DeviceMesh.from_group(group, self.device.type), self.ids)

    def fully_sharded(self, mesh: DeviceMesh, ids: torch.Tensor) -> Step:
        """PyTorch's `fully_shard` of each layer on a mesh."""
        model = self.model()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return self.torch_step(model, ids)

    def _adamw(self, model: nn.Module) -> torch.optim.Optimizer:
        # A fused optimizer accepts either tensors or distributed tensors in one parameter group.
        kinds: dict[type, list[torch.Tensor]] = {}
        for parameter in model.parameters():
            kinds.setdefault(type(parameter.data), []).append(parameter)
        return torch.optim.AdamW([{"params": kind} for kind in kinds.values()], lr=1e-4, fused=True)


if __name__ == "__main__":
    main()
