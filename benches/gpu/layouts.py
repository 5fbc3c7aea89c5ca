"""Combinations of tensor, pipeline and sharded data parallelism on a Llama, compared with PyTorch's `fully_shard` and
`parallelize_module`, and with their combination.

    smdrun -n 4 benches/gpu/layouts.py                      # 1.1 B parameters, bfloat16
    # A small run on CPUs:
    smdrun -n 4 benches/gpu/layouts.py --device cpu --layers 4 --width 256 --sequence 32 --vocabulary 100

All variants start with the same model and train on the same batch, so their losses are equal but for rounding. Those of
a variant that divides the batch are averaged over the ranks. The variants are in one process and take turns.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as c10d
from rounds import Rounds, Step, close_states, several_states, start
from sharded import add_arguments
from tensor_parallel import Bench as TensorParallelBench
from torch.distributed.device_mesh import init_device_mesh

import smdistributed.modelparallel.torch as smp


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "sequences that all ranks train on together", 16)
    parser.add_argument("--microbatches", type=int, default=4, help="of the variants with a pipeline")
    parser.add_argument("--variants", nargs="+")
    arguments = parser.parse_args()
    arguments.optimize = "speed"
    device = start(arguments.device)
    bench, ranks = Bench(arguments, device), c10d.get_world_size()
    assert ranks % 4 == 0, "tensor parallelism of degree 2 in a pipeline of 2 partitions needs a multiple of 4 ranks"
    half = ranks // 2
    microbatches = arguments.microbatches
    layouts: dict[str, dict[str, Any]] = {
        f"smp tensor 2, pipeline 2, data {ranks // 4}": {
            "tensor_parallel_degree": 2, "partitions": 2, "microbatches": microbatches, "prescaled_batch": True,
        },
        f"smp tensor 2, data {half}": {"tensor_parallel_degree": 2, "microbatches": 1, "prescaled_batch": True},
        f"smp sharded {ranks}": {"sharded_data_parallel_degree": ranks, "microbatches": 1, "sdp_gradient_clipping": 0},
        f"smp sharded {half} x 2": {
            "sharded_data_parallel_degree": half, "microbatches": 1, "sdp_gradient_clipping": 0,
        },
    }  # fmt: skip
    makers = {name: lambda more=more: several_states(lambda: bench.layout(more)) for name, more in layouts.items()}
    makers |= {
        f"fully_shard {ranks}": lambda: bench.replicated_shards(1),
        f"fully_shard {half} x 2": lambda: bench.replicated_shards(2),
        f"parallelize_module {ranks}": lambda: bench.torch_tensor_parallel(shards_sequence=False),
        f"parallelize_module 2, fully_shard {half}": lambda: bench.torch_tensor_parallel(
            shards_sequence=False, degree=2
        ),
    }
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    Rounds(arguments.rounds, arguments.steps, arguments.trace).run(
        {name: make for name, make in makers.items() if arguments.variants is None or name in arguments.variants},
        arguments.batch * arguments.sequence,
        f"{ranks} x {name}, Llama of {bench.elems / 1e9:.2f} B, batch {arguments.batch} x {arguments.sequence}"
        f"{', compiled layers' if arguments.compile else ''}",
    )
    close_states()
    c10d.destroy_process_group()


class Bench(TensorParallelBench):
    """Makes the variants, which train on the same batch."""

    def layout(self, settings: dict[str, Any]) -> Step:
        """A layout of smp, given by keys of its configuration."""
        smp.init({"ddp": True, "optimize": "speed", **settings})
        if "tensor_parallel_degree" in settings:
            return self.smp_step(self.tensor_parallel_model(), self.ids.chunk(smp.rdp_size())[smp.rdp_rank()])
        return self.smp_step(smp.DistributedModel(self.model()), self.ids.chunk(smp.dp_size())[smp.dp_rank()])

    def replicated_shards(self, replicas: int) -> Step:
        """PyTorch's `fully_shard`, with replicas of the shards if asked for."""
        ranks = c10d.get_world_size()
        mesh = init_device_mesh(self.device.type, (replicas, ranks // replicas), mesh_dim_names=("replicas", "shards"))
        return self.fully_sharded(mesh if replicas > 1 else mesh["shards"], self.ids.chunk(ranks)[c10d.get_rank()])


if __name__ == "__main__":
    main()
