"""Kills the ranks of a divided Keras model that save checkpoints at random moments. Whenever that is, the latest complete checkpoint
restores, bit by bit; so it does with other numbers of partitions, and in plain TensorFlow.

    python tests/faults/kill_tensorflow_saves.py --runs 200 --seed 0

Two partitions save one checkpoint after another into one folder, which later runs go on with, as a job that is started again does.
The values of a variable follow from its name and the checkpoint's number, so whoever restores knows what must be there. Each run
begins with that comparison.
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
#: What ranks get: TensorFlow on one processor.
LAUNCHER = Forked("tensorflow")
_LAYERS, _UNITS = 4, 96


def _made(base):
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


def _divided(partitions):
    """A model after its first step, with its optimizer, in a checkpoint."""
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.init({"partitions": partitions, "microbatches": 1})
    model, optimizer = _made(smp.DistributedModel)

    @smp.step
    def gradients(x):
        return optimizer.get_gradients(tf.reduce_mean(model(x)), model.trainable_variables)

    found = gradients(tf.ones([2, _UNITS]))
    optimizer.apply_gradients(zip([each.reduce_mean() for each in found], model.trainable_variables, strict=True))
    return tf.train.Checkpoint(model=model, optimizer=optimizer)


def _content(name, number, shape, dtype):
    import numpy as np

    dice = np.random.default_rng([zlib.crc32(name.encode()), number])
    return dice.integers(-1000, 1000, size=shape).astype(dtype) / dtype.type(7)


def _own(checkpoint):
    """Names and variables of floats that are here."""
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
        assert np.array_equal(value, _content(name, number, value.shape, value.dtype)), f"`{name}` of {number}"
        count += value.size
    return count


def restored(folder, form, partitions):
    """A rank: restores the latest and compares; returns its number, or 0, and how many numbers it has compared."""
    import smdistributed.modelparallel.tensorflow as smp

    return _restored(smp.CheckpointManager(_divided(partitions), folder, max_to_keep=3, format=form))


def _restored(manager):
    path = manager.restore()
    if path is None:
        return 0, 0
    number = int(path.rpartition("-")[2])
    return number, _compare(number, _own(manager.checkpoint))


def saves(folder, form):
    """A rank: compares, then saves until it is killed."""
    import smdistributed.modelparallel.tensorflow as smp

    checkpoint = _divided(2)
    manager = smp.CheckpointManager(checkpoint, folder, max_to_keep=3, format=form)
    number, _ = _restored(manager)
    told = Path(folder, "told")
    assert number >= (int(told.read_text()) if told.exists() else 0), (
        f"{number} is the latest, {told.read_text()} was saved"
    )
    announce(f"restored-{smp.rank()}")
    while True:
        number += 1
        for name, variable in _own(checkpoint):
            variable.assign(_content(name, number, variable.shape, variable.numpy().dtype))
        manager.save(number)
        if smp.rank() == 0:
            Path(folder, "telling").write_text(str(number))
            Path(folder, "telling").rename(told)
        if number % 2 == 0:
            announce("saving")


def plain(folder, form):
    """TensorFlow alone reads what two partitions have saved."""
    import tensorflow as tf

    assert form == "tensorflow"
    model, optimizer = _made(tf.keras.Model)
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
    """One run: ranks restore, and some time after their first saves they are killed."""
    dice = random.Random(f"{seed} {form} {number}")
    with start_ranks(saves, 2, folder, form, launcher=LAUNCHER, env=ENV, timeout=120) as job:
        job.wait_for("saving")
        time.sleep(dice.uniform(0, 0.15))
        for rank in dice.sample(range(2), 2):
            job.kill(rank)
            time.sleep(dice.choice([0, 0, 0.02]))
        job.wait()


def check(folder, form, sizes=(1, 2, 3)):
    """The latest with other numbers of partitions, and in TensorFlow alone; returns its number."""
    found = {}
    for partitions in sizes:
        ranks = run_ranks(restored, partitions, folder, form, partitions, launcher=LAUNCHER, env=ENV, timeout=120)
        found[partitions] = {number for number, _ in ranks}, sum(count for _, count in ranks)
    if form == "tensorflow":
        [(number, count)] = run_ranks(plain, 1, folder, form, launcher=LAUNCHER, env=ENV, timeout=120)
        found["plain"] = {number}, count
    numbers = set.union(*(numbers for numbers, _ in found.values()))
    assert len(numbers) == 1, found
    # Weights, biases and two slots for each of them; what all ranks have is compared by each.
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
                    told = Path(folder, "told").read_text()
                    print(f"{form}: {number + 1} runs, {told} saves, {time.monotonic() - start:.0f} s", flush=True)
            print(f"{form}: number {check(folder, form)} restores with 1, 2 and 3 partitions")


if __name__ == "__main__":
    main()
