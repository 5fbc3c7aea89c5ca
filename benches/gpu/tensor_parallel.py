"""Tensor parallelism of smp on a Llama, compared with PyTorch's `parallelize_module`.

    smdrun -n 2 benches/gpu/tensor_parallel.py                      # 1.1 B parameters, bfloat16
    smdrun -n 2 benches/gpu/tensor_parallel.py --compile            # with compiled layers, for all variants
    # A small trial:
    smdrun -n 2 benches/gpu/tensor_parallel.py --device cpu --layers 2 --width 64 --sequence 32 --vocabulary 100

The model is transformers' Llama with its defaults, trained with fused AdamW. All ranks have the same batch. *half the
batch* trains the same model on each GPU alone, with a part of the batch. It has as many products for each GPU, so the
difference to its time is communication. The variants are in one process and take turns.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as c10d
from rounds import Rounds, Step, start
from sharded import Bench as ShardedBench
from sharded import add_arguments
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.nn import functional

import smdistributed.modelparallel.torch as smp


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "sequences that all ranks train on together", 8)
    parser.add_argument("--optimize", default="speed", choices=["speed", "memory"], help="the key `optimize` of smp")
    parser.add_argument("--variants", nargs="+")
    arguments = parser.parse_args()
    device = start(arguments.device)
    bench = Bench(arguments, device)
    makers = {
        "half the batch": bench.alone,
        "smp": bench.ours,
        "parallelize_module": lambda: bench.torch_tensor_parallel(shards_sequence=False),
        "parallelize_module, sequence": lambda: bench.torch_tensor_parallel(shards_sequence=True),
    }
    if arguments.compile:
        makers["parallelize_module, async_tp"] = lambda: bench.torch_tensor_parallel(
            shards_sequence=True, is_async=True
        )
    ranks = c10d.get_world_size()
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    Rounds(arguments.rounds, arguments.steps, arguments.trace).run(
        {name: make for name, make in makers.items() if arguments.variants is None or name in arguments.variants},
        arguments.batch * arguments.sequence,
        f"{ranks} x {name}, Llama of {bench.elems / 1e9:.2f} B, batch {arguments.batch} x {arguments.sequence}"
        f"{', compiled layers' if arguments.compile else ''}, optimize: {arguments.optimize}",
    )
    c10d.destroy_process_group()


class Bench(ShardedBench):
    """Makes the variants, which train on the same data."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        super().__init__(arguments, device)
        # All ranks have the same batch.
        c10d.broadcast(self.ids, 0)

    def alone(self) -> Step:
        """Trains on one GPU with a part of the batch, without communication."""
        return self.torch_step(self.model(), self.ids.chunk(c10d.get_world_size())[c10d.get_rank()])

    def ours(self) -> Step:
        """Tensor parallelism of smp."""
        smp.init({
            "ddp": True, "tensor_parallel_degree": c10d.get_world_size(), "microbatches": 1, "prescaled_batch": True,
            "optimize": self.arguments.optimize,
        })  # fmt: skip
        return self.smp_step(self.tensor_parallel_model(), self.ids)

    def tensor_parallel_model(self) -> Any:
        """Makes a distributed model whose layers are tensor parallel, and compiles them if chosen."""
        with smp.tensor_parallelism():
            module = self.model(is_compiled=False)
        model = smp.DistributedModel(module)
        if self.arguments.compile:
            for layer in model.get_module().transformer.seq_layers:
                layer.compile()
        return model

    def torch_tensor_parallel(self, shards_sequence: bool, is_async: bool = False, degree: int | None = None) -> Step:
        """PyTorch's tensor parallelism: column-wise, then row-wise products, and a loss over sharded logits. With a
        smaller degree than there are ranks, `fully_shard` uses the other dimension of the mesh.
        """
        degree = degree or c10d.get_world_size()
        replicas = c10d.get_world_size() // degree
        both = init_device_mesh(self.device.type, (replicas, degree), mesh_dim_names=("data", "tensor"))
        mesh = both["tensor"]
        ids = self.ids.chunk(replicas)[both.get_local_rank("data")]
        model = self.model(is_compiled=False)
        between = Shard(1) if shards_sequence else Replicate()
        plan: dict[str, Any] = {
            "model.embed_tokens": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "lm_head": tp.ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
        }
        layer: dict[str, Any] = {
            "self_attn.q_proj": tp.ColwiseParallel(),
            "self_attn.k_proj": tp.ColwiseParallel(),
            "self_attn.v_proj": tp.ColwiseParallel(),
            "self_attn.o_proj": tp.RowwiseParallel(output_layouts=between),
            "mlp.gate_proj": tp.ColwiseParallel(),
            "mlp.up_proj": tp.ColwiseParallel(),
            "mlp.down_proj": tp.RowwiseParallel(output_layouts=between),
        }
        if shards_sequence:
            plan["model.norm"] = tp.SequenceParallel()
            layer |= {
                "input_layernorm": tp.SequenceParallel(),
                "post_attention_layernorm": tp.SequenceParallel(),
                "self_attn": tp.PrepareModuleInput(
                    input_kwarg_layouts={"hidden_states": Shard(1)},
                    desired_input_kwarg_layouts={"hidden_states": Replicate()},
                ),
                "mlp": tp.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            }
        tp.parallelize_module(model, mesh, plan)
        for each in model.model.layers:
            tp.parallelize_module(each, mesh, layer)
        if is_async:
            from torch.distributed._symmetric_memory import enable_symm_mem_for_group

            enable_symm_mem_for_group(mesh.get_group().group_name)
            torch._inductor.config._micro_pipeline_tp = True
        if self.arguments.compile:
            for each in model.model.layers:
                each.compile()
        if replicas > 1:
            for each in model.model.layers:
                fully_shard(each, mesh=both["data"])
            fully_shard(model, mesh=both["data"])
        optimizer = self._adamw(model)
        targets = functional.pad(ids, (0, 1), value=-100)[:, 1:].flatten()

        def train() -> torch.Tensor:
            optimizer.zero_grad()
            with tp.loss_parallel():
                logits = model(input_ids=ids, use_cache=False, position_ids=self.positions).logits
                loss = functional.cross_entropy(logits.flatten(0, 1), targets)
                loss.backward()
            optimizer.step()
            return loss.detach().full_tensor()

        return train


if __name__ == "__main__":
    main()
