"""Steps of Keras models on partitions: memory, speed-up of pipelining, exposed averaging, time of the first step.

    smdrun -n 4 benches/modelparallel/keras_steps.py memory --microbatches 2
    smdrun -n 4 benches/modelparallel/keras_steps.py memory --microbatches 16
    smdrun -n 2 benches/modelparallel/keras_steps.py pipelining
    smdrun -n 2 benches/modelparallel/keras_steps.py replicas --microbatches 2
    smdrun -n 2 benches/modelparallel/keras_steps.py first --layers 12 --width 64 --rows 2 --microbatches 4

The model is a row of equal dense layers; for ``first``, of equal transformer blocks.

- ``memory`` prints each rank's share of the variables, and the growth of its process through the variables and steps.
  The size of a microbatch does not depend on their number.
- ``pipelining`` compares a step with plain Keras in one process, over as many microbatches, in alternating rounds.
  Each process computes in one thread. With GPUs, each process uses one (`--threads 0`).
- ``replicas`` compares steps of replicas of the whole model (`"ddp": True`) with steps that average all gradients at
  the end, and with steps that do not average. Time beyond the latter is exposed.
- ``first`` compares the time of the first step, in which everything is traced, built and optimized, with plain Keras
  in one process, whose time includes the model's first call.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

import smdistributed.modelparallel.tensorflow as smp
from smdistributed.dataparallel.tensorflow.collectives import ops as core_ops


def dense(width: int, name: str) -> Any:
    """Makes one of the equal dense layers."""
    return tf.keras.layers.Dense(width, "relu", use_bias=False, name=name)


def block(width: int, name: str) -> Any:
    """Makes a transformer block, which takes rows of numbers as sequences of one vector."""
    layers = tf.keras.layers

    class Block(layers.Layer):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__(name=name)
            self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
            self.attention = layers.MultiHeadAttention(4, width // 4)
            self.wide, self.narrow = layers.Dense(4 * width, activation="gelu"), layers.Dense(width)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            y = self.norms[0](x[:, None])
            x += self.attention(y, y, use_causal_mask=True)[:, 0]
            return x + self.narrow(self.wide(self.norms[1](x)))

    return Block()


def trainer(
    base: type,
    layers: int,
    width: int,
    rows: int,
    microbatches: int,
    finish: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
    layer: Callable[[int, str], Any] = dense,
) -> tuple[Any, Callable[[], Any]]:
    """Makes a model of such layers, and a function that runs a step. ``finish`` is applied to the gradients before the
    optimizer. With plain Keras, microbatches run one after the other.
    """
    keras = tf.keras
    distributed = issubclass(base, smp.DistributedModel)

    class Model(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.row = [layer(width, f"layer{i}") for i in range(layers)]

        def call(self, x: tf.Tensor) -> tf.Tensor:
            for layer in self.row:
                x = layer(x)
            return tf.reduce_mean(tf.square(x), 1)

    model, optimizer = Model(), keras.optimizers.SGD(1e-3)
    batch = tf.random.stateless_normal([rows * microbatches, width], [1, 2])

    def gradients_of(x: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
        return tape.gradient(loss, model.trainable_variables), loss

    if distributed:
        step = smp.step(gradients_of)

        @tf.function
        def train() -> tf.Tensor:
            gradients, loss = step(batch)
            gradients = [finish(each.accumulate()) for each in gradients]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss.reduce_mean()
    else:

        @tf.function
        def train() -> tf.Tensor:
            sums, loss = None, tf.zeros([])
            for part in tf.split(batch, microbatches):
                with tf.control_dependencies([loss] if sums is None else sums):
                    gradients, loss = gradients_of(tf.identity(part))
                sums = gradients if sums is None else [a + b for a, b in zip(sums, gradients, strict=True)]
            mean = [each / microbatches for each in sums]
            optimizer.apply_gradients(zip(mean, model.trainable_variables, strict=True))
            return loss

    return model, train


def resident(what: str) -> int:
    """Bytes of this process: `VmRSS` (now) or `VmHWM` (peak)."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def held(model: Any) -> float:
    """Returns the share of the model's variables that this rank holds."""
    with model._smp_all_variables():
        every = list(model.trainable_variables)
    inner = [getattr(each, "value", each) for each in every]
    here = sum(int(tf.size(tf.raw_ops.ReadVariableOp(resource=each.handle, dtype=each.dtype))) for each in inner)
    return here / sum(each.shape.num_elements() for each in inner)


def peak(partitions: int, microbatches: int, layers: int, width: int, rows: int) -> tuple[float, int, int | None]:
    """Trains three steps on this rank.

    Returns:
        The share of the variables, the growth of the process's peak size in bytes, and the peak bytes of tensors in
        later steps. TensorFlow's CPU allocator counts the latter only with oneDNN; else it is ``None``.
    """
    smp.shutdown()
    gc.collect()
    base = resident("VmRSS")
    smp.init({"partitions": partitions, "microbatches": microbatches})
    model, train = trainer(smp.DistributedModel, layers, width, rows, microbatches)
    counts = tf.config.experimental
    train()
    with contextlib.suppress(ValueError):
        counts.reset_memory_stats("CPU:0")
    for _ in range(2):
        train()
    tensors = None
    with contextlib.suppress(ValueError):
        tensors = counts.get_memory_info("CPU:0")["peak"]
    return held(model), resident("VmHWM") - base, tensors


def memory(arguments: argparse.Namespace) -> None:
    """See the module's docstring. TensorFlow does not release memory, so each number of microbatches needs new
    processes.
    """
    part, grown, tensors = peak(smp.size(), arguments.microbatches, arguments.layers, arguments.width, arguments.rows)
    taken = "" if tensors is None else f", of which tensors took {tensors / 2**20:.1f}"
    print(
        f"rank {smp.rank()}: {part:.3f} of the variables; larger by at most {grown / 2**20:.0f} MiB in steps of "
        f"{arguments.microbatches} microbatches{taken}",
        flush=True,
    )


def pipelining(arguments: argparse.Namespace) -> None:
    """See the module's docstring."""
    tf.config.threading.set_intra_op_parallelism_threads(arguments.threads)
    tf.config.threading.set_inter_op_parallelism_threads(arguments.threads)
    shape = arguments.layers, arguments.width, arguments.rows, arguments.microbatches
    ranks = smp.size()
    smp.shutdown()
    smp.init({"partitions": ranks, "microbatches": arguments.microbatches, "pipeline": arguments.schedule})
    _, train = trainer(smp.DistributedModel, *shape)
    _, alone = trainer(tf.keras.Model, *shape)
    times: dict[str, list[float]] = {"alone": [], "divided": []}
    for warm in (True, *([False] * arguments.rounds)):
        for name, step in (("alone", alone), ("divided", train)):
            smp.barrier()
            start = time.perf_counter()
            if name == "divided" or smp.rank() == 0:
                for _ in range(arguments.steps):
                    float(step())
            smp.barrier()
            if not warm:
                times[name].append((time.perf_counter() - start) / arguments.steps)
    if smp.rank() == 0:
        ratios = sorted(b / a for a, b in zip(times["alone"], times["divided"], strict=True))
        one, other = (1e3 * statistics.median(times[name]) for name in ("alone", "divided"))
        print(
            f"{arguments.microbatches} microbatches, {arguments.schedule}: {other:.0f} ms on {ranks} partitions, {one:.0f} ms in "
            f"one process; ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} .. {ratios[-1]:.3f})",
            flush=True,
        )


def first(arguments: argparse.Namespace) -> None:
    """See the module's docstring."""
    tf.config.threading.set_intra_op_parallelism_threads(arguments.threads)
    tf.config.threading.set_inter_op_parallelism_threads(arguments.threads)
    ranks, times = smp.size(), {}
    smp.shutdown()
    smp.init({"partitions": ranks, "microbatches": arguments.microbatches, "pipeline": arguments.schedule})
    shape = arguments.layers, arguments.width, arguments.rows, arguments.microbatches
    # Excludes one-time work of TensorFlow and Keras from the measurement.
    trainer(tf.keras.Model, 1, arguments.width, arguments.rows, 1, layer=block)[1]()
    for name, base in (("alone", tf.keras.Model), ("divided", smp.DistributedModel)):
        if name == "divided" or smp.rank() == 0:
            model, train = trainer(base, *shape, layer=block)
            if name == "divided":
                smp.barrier()
            start = time.perf_counter()
            if name == "alone":
                # Builds the variables first: a tf.function that creates variables is traced twice.
                model(tf.zeros([1, arguments.width]))
            float(train())
            times[name] = time.perf_counter() - start
    smp.barrier()
    if smp.rank() == 0:
        one, other = times["alone"], times["divided"]
        print(
            f"{arguments.layers} blocks, {arguments.microbatches} microbatches: first step {other:.1f} s on {ranks} partitions, "
            f"{one:.1f} s in one process; ratio {other / one:.2f}",
            flush=True,
        )


def replicas(arguments: argparse.Namespace) -> None:
    """See the module's docstring."""
    tf.config.threading.set_intra_op_parallelism_threads(arguments.threads)
    tf.config.threading.set_inter_op_parallelism_threads(arguments.threads)
    shape = arguments.layers, arguments.width, arguments.rows, arguments.microbatches

    def mean_of_all(gradient: tf.Tensor) -> tf.Tensor:
        return core_ops.smd_all_reduce(tensor=gradient, op="average", group=0)

    steps: dict[str, Callable[[], Any]] = {}
    for name, ddp, finish in (
        ("alone", False, tf.identity),
        ("after", False, mean_of_all),
        ("while", True, tf.identity),
    ):
        # `smp` supports one model at a time, but functions that were traced for earlier ones still run.
        smp.shutdown()
        smp.init({"partitions": 1, "microbatches": arguments.microbatches, "ddp": ddp})
        _, steps[name] = trainer(smp.DistributedModel, *shape, finish)
        for _ in range(3):
            steps[name]()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            smp.barrier()
            start = time.perf_counter()
            for _ in range(arguments.steps):
                float(step())
            smp.barrier()
            times[name].append(1e3 * (time.perf_counter() - start) / arguments.steps)
    if smp.rank() == 0:
        medians = {name: statistics.median(found) for name, found in times.items()}
        print(
            f"{smp.size()} replicas, {arguments.microbatches} microbatches: {medians['alone']:.1f} ms without a mean",
            flush=True,
        )
        for name, what in (("while", "mean while the rest is computed"), ("after", "mean after it")):
            more = sorted(other - alone for alone, other in zip(times["alone"], times[name], strict=True))
            print(
                f"  {what}: {medians[name]:.1f} ms, exposed {statistics.median(more):.1f} ms ({more[0]:.1f} .. {more[-1]:.1f})",
                flush=True,
            )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("memory", "pipelining", "replicas", "first"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=64, help="rows of a microbatch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", default="interleaved", choices=("simple", "interleaved", "zero_bubble"))
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of each process, except in `memory`; 0: TensorFlow's default"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps in each round")
    arguments = parser.parse_args()
    smp.init()
    modes = {"memory": memory, "pipelining": pipelining, "replicas": replicas, "first": first}
    modes[arguments.what](arguments)


if __name__ == "__main__":
    main()
