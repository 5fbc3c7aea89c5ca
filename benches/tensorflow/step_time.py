"""Communication time that data parallelism adds to a TensorFlow step, compared with tf.distribute and PyTorch.

    TF_USE_LEGACY_KERAS=1 OMP_NUM_THREADS=1 smdrun -n 2 benches/tensorflow/step_time.py
    TF_USE_LEGACY_KERAS=1 smdrun -n 2 benches/tensorflow/step_time.py --gpu --models encoder

Each round runs a few steps of every mode, one mode after the other, so that other load on the machine affects all
alike:

- `alone`: the model in a tf.function, in all processes at the same time, without communication.
- `opensmd`: the same with DistributedGradientTape.
- `mwms`: the same in MultiWorkerMirroredStrategy, with a ring over gRPC, or NCCL on GPUs.
- `mirrored`: on GPUs, MirroredStrategy over NCCL: rank 0 drives all GPUs, and the other processes wait.
- `torch alone`, `torch opensmd`: the same shapes in PyTorch, without and with DistributedDataParallel of this package.

Exposed communication is the median step of a mode minus that of its `alone`, each on the slowest rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
# MultiWorkerMirroredStrategy does not support Keras 3.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import numpy as np
import tensorflow as tf
from models import batch, keras_model, torch_model

import smdistributed.dataparallel.tensorflow as sdp
from smdistributed import _core

MODES = ("alone", "opensmd", "mwms", "mirrored", "torch alone", "torch opensmd")
BASE = {"opensmd": "alone", "mwms": "alone", "mirrored": "alone", "torch opensmd": "torch alone"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=("cnn", "mlp", "encoder"), default=["cnn", "mlp"])
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, help="default: all except `mirrored`; on GPUs, none of PyTorch's"
    )
    parser.add_argument("--gpu", action="store_true", help="one GPU for each process")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps of each mode in a round")
    parser.add_argument("--inter-op", type=int, default=2, help="inter-op threads, intra-op is always 1; on CPUs")
    parser.add_argument(
        "--memory-steps", type=int, default=0, help="only print the resident size over this number of eager steps"
    )
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()

    if arguments.modes is None:
        arguments.modes = (
            ["alone", "opensmd", "mwms"] if arguments.gpu else [mode for mode in MODES if mode != "mirrored"]
        )
    if {"mwms", "mirrored"} <= set(arguments.modes):
        parser.error("rank 0 drives one GPU in `mwms` and all GPUs in `mirrored`: run them separately")
    if arguments.gpu and any(mode.startswith("torch") for mode in arguments.modes):
        parser.error("PyTorch's modes are for CPUs")
    if not arguments.gpu and "mirrored" in arguments.modes:
        parser.error("`mirrored` is for GPUs")
    sdp.init()
    if arguments.gpu:
        gpus = tf.config.list_physical_devices("GPU")
        # In `mirrored`, rank 0 drives all GPUs; in the other modes, it drives its own.
        drives_all = sdp.rank() == 0 and "mirrored" in arguments.modes
        tf.config.set_visible_devices(gpus if drives_all else gpus[sdp.local_rank()], "GPU")
    else:
        tf.config.set_visible_devices([], "GPU")
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(arguments.inter_op)
    if arguments.memory_steps:
        memory(arguments.memory_steps)
        return
    strategy = worker_strategy("NCCL" if arguments.gpu else "RING") if "mwms" in arguments.modes else None
    results = {name: measure(name, arguments, strategy) for name in arguments.models}
    if sdp.rank() == 0:
        place = "a GPU each" if arguments.gpu else "one intra-op thread each"
        print(f"{sdp.size()} processes, {place}, TensorFlow {tf.__version__}")
        for name, medians in results.items():
            print(table(name, medians))
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump(results, file)


def worker_strategy(implementation: str) -> tf.distribute.Strategy:
    """Makes a MultiWorkerMirroredStrategy over the ranks of the job."""
    # The cluster must be configured before TensorFlow runs its first operation, so the ranks cannot agree on ports by a
    # collective. The session id, which all ranks know, gives the ports.
    first = 20_000 + _core.session_id() % 10_000
    cluster = {"worker": [f"127.0.0.1:{first + rank}" for rank in range(sdp.size())]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": sdp.rank()}})
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation[implementation]
    )
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def measure(name: str, arguments: argparse.Namespace, strategy: tf.distribute.Strategy | None) -> dict[str, float]:
    """Returns the median step of each mode on the slowest rank, in milliseconds."""
    steps: dict[str, Callable[[], None]] = {}
    for mode in arguments.modes:
        if mode.startswith("torch"):
            steps[mode] = torch_step(name, mode == "torch opensmd")
        elif mode == "mwms":
            steps[mode] = strategy_step(name, strategy)
        elif mode == "mirrored":
            steps[mode] = strategy_step(name, tf.distribute.MirroredStrategy()) if sdp.rank() == 0 else lambda: None
        else:
            steps[mode] = keras_step(name, mode == "opensmd")
    times: dict[str, list[float]] = {mode: [] for mode in steps}
    gc.disable()
    for index in range(arguments.rounds + 1):
        for mode, run in steps.items():
            for at in range(arguments.steps + 1):
                _core.barrier()
                start = time.perf_counter()
                run()
                elapsed = time.perf_counter() - start
                # The first round and the first step after another mode are warm-up.
                if index > 0 and at > 0:
                    times[mode].append(elapsed * 1e3)
    gc.enable()
    medians = tf.constant([statistics.median(times[mode]) for mode in steps], dtype=tf.float64)
    slowest = sdp.oob_allreduce(medians, op=sdp.ReduceOp.MAX).numpy().tolist()
    return dict(zip(steps, slowest, strict=True))


def keras_step(name: str, reduce: bool) -> Callable[[], None]:
    model = keras_model(name, tf.keras)
    optimizer = tf.keras.optimizers.SGD(0.01)
    losses = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, labels = map(tf.constant, batch(name, sdp.rank()))

    @tf.function
    def step(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = losses(labels, model(x, training=True))
        if reduce:
            tape = sdp.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return lambda: step(x, labels).numpy()


def strategy_step(name: str, strategy: tf.distribute.Strategy) -> Callable[[], None]:
    with strategy.scope():
        model = keras_model(name, tf.keras)
        optimizer = tf.keras.optimizers.SGD(0.01)
        losses = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    devices = strategy.extended.worker_devices

    def on_replica(array: np.ndarray) -> tf.distribute.DistributedValues:
        def make(context: tf.distribute.experimental.ValueContext) -> tf.Tensor:
            with tf.device(devices[context.replica_id_in_sync_group % len(devices)]):
                return tf.identity(array)

        return strategy.experimental_distribute_values_from_function(make)

    x, labels = map(on_replica, batch(name, sdp.rank()))

    def replica(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(losses(labels, model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return strategy.run(replica, args=(x, labels))

    return lambda: [loss.numpy() for loss in strategy.experimental_local_results(step(x, labels))]


def torch_step(name: str, reduce: bool) -> Callable[[], None]:
    import torch

    import smdistributed.dataparallel.torch.distributed as dist
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

    torch.set_num_threads(1)
    model = torch_model(name)
    if reduce:
        assert dist.is_initialized()
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, labels = map(torch.from_numpy, batch(name, sdp.rank()))
    if x.dim() == 4:
        x = x.permute(0, 3, 1, 2).contiguous()

    def run() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return run


def table(name: str, medians: dict[str, float]) -> str:
    """Formats the figures of a model."""
    exposed = {mode: medians[mode] - medians[base] for mode, base in BASE.items() if {mode, base} <= set(medians)}
    lines = [f"{name}:"]
    for mode, milliseconds in medians.items():
        line = f"  {mode:14} {milliseconds:8.1f} ms a step"
        if mode in exposed:
            line += f", {exposed[mode]:+7.1f} ms exposed"
        lines.append(line)
    for other in ("mwms", "mirrored", "torch opensmd"):
        if {"opensmd", other} <= set(exposed):
            ours, others = exposed["opensmd"], exposed[other]
            # Noise makes a step with communication the faster one now and then.
            ratio = f"{ours / others:.2f}" if min(ours, others) > 0 else "none, as a time is negative"
            lines.append(f"  exposed, opensmd / {other}: {ratio}")
    return "\n".join(lines)


def memory(steps: int) -> None:
    """Prints the resident size after each tenth of the eager steps."""
    model = tf.keras.Sequential([tf.keras.layers.Dense(256, activation="relu"), tf.keras.layers.Dense(10)])
    optimizer = tf.keras.optimizers.SGD(0.01)
    x, labels = map(tf.constant, batch("mlp", sdp.rank()))
    sizes = []
    for step in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(x, training=True)))
        gradients = sdp.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if step % max(1, steps // 10) == max(1, steps // 10) - 1:
            sizes.append(resident_bytes() >> 20)
    if sdp.rank() == 0:
        print(f"resident MiB after each tenth of {steps} eager steps: {sizes}")


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


if __name__ == "__main__":
    main()
