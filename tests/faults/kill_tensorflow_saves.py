"""Kills the ranks of a Keras model on two partitions at random moments while they save checkpoints.

The latest complete checkpoint must restore bit by bit, also with other numbers of partitions and in plain TensorFlow.

    python tests/faults/kill_tensorflow_saves.py --runs 200 --seed 0

The ranks save one checkpoint after another into one folder. Later runs continue in the same folder, like a job that is
restarted. The values of a variable follow from its name and the number of the checkpoint, so a reader can compute them.
Each run begins with that comparison.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import zlib
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support import Forked, run_ranks, start_ranks
from support.rank_main import announce
from support.tf_env import ENV

FORMATS = ("tensorflow", "sharded")
#: Ranks are forked with TensorFlow imported; they use CPUs only.
LAUNCHER = Forked("tensorflow")
_LAYERS, _UNITS = 4, 96


def _make_model(base):
    import tensorflow as tf

    class Model(base):
        def __init__(self):
            super().__init__()
            self.parts = [tf.keras.layers.Dense(_UNITS, "tanh") for _ in range(_LAYERS)]

        def call(self, x):
            for part in self.parts:
                x = part(x)
            return x

    return Model(), tf.keras.optimizers.Adam()


def _make_checkpoint(partitions):
    """Makes the distributed model, runs one step so that the optimizer has its variables, and returns a
    `tf.train.Checkpoint` of both.
    """
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.init({"partitions": partitions, "microbatches": 1})
    model, optimizer = _make_model(smp.DistributedModel)

    @smp.step
    def gradients(x):
        return optimizer.get_gradients(tf.reduce_mean(model(x)), model.trainable_variables)

    found = gradients(tf.ones([2, _UNITS]))
    optimizer.apply_gradients(zip([each.reduce_mean() for each in found], model.trainable_variables, strict=True))
    return tf.train.Checkpoint(model=model, optimizer=optimizer)


def _content(name, number, shape, dtype):
    import numpy as np

    rng = np.random.default_rng([zlib.crc32(name.encode()), number])
    return rng.integers(-1000, 1000, size=shape).astype(dtype) / dtype.type(7)


def _local_floats(checkpoint):
    """Yields the names and variables of floating-point type that this rank holds."""
    from smdistributed.dataparallel.tensorflow.keras_variable import underlying
    from smdistributed.modelparallel.tensorflow.checkpoint import saving
    from smdistributed.modelparallel.tensorflow.state import state

    rank = state.groups.rank_in("pp")
    for name, _, trackable, home, _ in saving.serialized(checkpoint):
        variable = underlying(trackable)
        if home in (None, rank) and hasattr(variable, "handle") and variable.dtype.is_floating:
            yield name, variable


def _compare(number, variables):
    import numpy as np

    count = 0
    for name, variable in variables:
        value = variable.numpy()
        assert np.array_equal(value, _content(name, number, value.shape, value.dtype)), (
            f"`{name}` of checkpoint {number} differs"
        )
        count += value.size
    return count


def restored(folder, form, partitions):
    """The function of a rank: restores the latest checkpoint and compares it. Returns its number, 0 if there is none,
    and how many values were compared.
    """
    import smdistributed.modelparallel.tensorflow as smp

    return _restored(smp.CheckpointManager(_make_checkpoint(partitions), folder, max_to_keep=3, format=form))


def _restored(manager):
    path = manager.restore()
    if path is None:
        return 0, 0
    number = int(path.rpartition("-")[2])
    return number, _compare(number, _local_floats(manager.checkpoint))


def saves(folder, form):
    """The function of a rank: restores and compares, then saves until it is killed."""
    import smdistributed.modelparallel.tensorflow as smp

    checkpoint = _make_checkpoint(2)
    manager = smp.CheckpointManager(checkpoint, folder, max_to_keep=3, format=form)
    number, _ = _restored(manager)
    saved = Path(folder, "saved")
    assert number >= (int(saved.read_text()) if saved.exists() else 0), (
        f"the latest checkpoint is {number}, but {saved.read_text()} was saved"
    )
    announce(f"restored-{smp.rank()}")
    while True:
        number += 1
        for name, variable in _local_floats(checkpoint):
            variable.assign(_content(name, number, variable.shape, variable.numpy().dtype))
        manager.save(number)
        if smp.rank() == 0:
            Path(folder, "saved.part").write_text(str(number))
            Path(folder, "saved.part").rename(saved)
        if number % 2 == 0:
            announce("saving")


def restored_by_tensorflow(folder, form):
    """The function of a single process: reads with plain TensorFlow what two partitions have saved, and compares it."""
    import tensorflow as tf

    assert form == "tensorflow"
    model, optimizer = _make_model(tf.keras.Model)
    model(tf.ones([1, _UNITS]))
    optimizer.build(model.trainable_variables)
    path = tf.train.latest_checkpoint(folder)
    number = int(path.rpartition("-")[2])
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    checkpoint.restore(path).assert_existing_objects_matched()
    gathered, *_ = checkpoint._saver._gather_serialized_tensors(None)
    named = [
        (name, getattr(each, "value", each)) for each, values in gathered.items() if each is not None for name in values
    ]
    floats = [(name, each) for name, each in named if hasattr(each, "handle") and each.dtype.is_floating]
    return number, _compare(number, floats)


def run(folder, form, number, seed):
    """Starts the ranks, waits until they have restored and saved, and kills them at a random moment."""
    rng = random.Random(f"{seed} {form} {number}")
    with start_ranks(saves, 2, folder, form, launcher=LAUNCHER, env=ENV, timeout=120) as job:
        job.wait_for("saving")
        time.sleep(rng.uniform(0, 0.15))
        for rank in rng.sample(range(2), 2):
            job.kill(rank)
            time.sleep(rng.choice([0, 0, 0.02]))
        job.wait()


def check(folder, form, sizes=(1, 2, 3)):
    """Restores the latest checkpoint with other numbers of partitions and in plain TensorFlow; returns its number."""
    found = {}
    for partitions in sizes:
        ranks = run_ranks(restored, partitions, folder, form, partitions, launcher=LAUNCHER, env=ENV, timeout=120)
        found[partitions] = {number for number, _ in ranks}, sum(count for _, count in ranks)
    if form == "tensorflow":
        [(number, count)] = run_ranks(restored_by_tensorflow, 1, folder, form, launcher=LAUNCHER, env=ENV, timeout=120)
        found["plain"] = {number}, count
    numbers = set.union(*(numbers for numbers, _ in found.values()))
    assert len(numbers) == 1, found
    # Weights and biases, each with two slots of Adam. Variables that all ranks hold are counted on each of them.
    assert all(count >= 3 * _LAYERS * _UNITS * (_UNITS + 1) for _, count in found.values()), found
    return numbers.pop()


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = time.monotonic()
    for form in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(arguments.runs):
                run(folder, form, number, arguments.seed)
                if (number + 1) % 20 == 0:
                    saved = Path(folder, "saved").read_text()
                    print(f"{form}: {number + 1} runs, {saved} saves, {time.monotonic() - start:.0f} s", flush=True)
            print(f"{form}: number {check(folder, form)} restores with 1, 2 and 3 partitions")


if __name__ == "__main__":
    main()
