"""Ends steps of Keras models on several partitions midway and checks the errors of all ranks.

A rank dies, runs another step than the others, or cannot trace the step. Every rank must get an error that names that
rank.

    python tests/faults/end_tensorflow_steps.py --runs 100 --seed 0
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support import Forked, start_ranks
from support.rank_main import announce
from support.tf_env import ENV

LAUNCHER = Forked("tensorflow")


def steps(partitions, replicas, victim, differs_at, raises):
    """The function of a rank: trains until an error. In step ``differs_at`` the victim runs another step function than
    the others or, with ``raises``, fails to trace it.
    """
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    smp.init({"partitions": partitions, "microbatches": 4, **({"ddp": True} if replicas > 1 else {})})

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.parts = [tf.keras.layers.Dense(32, "tanh") for _ in range(partitions)]

        def call(self, x):
            for part in self.parts:
                x = part(x)
            return x

    model = Model()

    def make_step(last):
        @smp.step
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(last(model(x)))
            return tape.gradient(loss, model.trainable_variables), loss

        return step

    def failing_loss(_):
        raise KeyError("no such thing")

    def differing_loss(x):
        if smp.rank() == victim:
            return failing_loss(x) if raises else tf.exp(x)
        return tf.sin(x)

    step, other = make_step(tf.square), make_step(differing_loss)
    x = tf.ones([8, 32])
    for number in range(1 << 30):
        if number == differs_at:
            try:
                other(x)
            except Exception:
                # The error must reach all ranks before any of them exits.
                smp.barrier()
                raise
        step(x)
        if number == 2 and smp.rank() == victim:
            announce("training")


def run(partitions, victim, kind, delay, limit, replicas=1):
    """Runs one job and checks the errors of all ranks.

    Args:
        kind: "dies": the victim is killed ``delay`` seconds into training. "differs": it runs another step function.
            "raises first" and "raises": tracing fails on it, in its first or in a later step.

    Returns:
        Seconds from the failure, or the first error, to the last rank's error.
    """
    # A victim that dies must not run another step first: -1 is the number of no step.
    differs_at = {"dies": -1, "raises first": 0}.get(kind, 4 + int(100 * delay))
    arguments = partitions, replicas, victim, differs_at, kind.startswith("raises")
    with start_ranks(steps, partitions * replicas, *arguments, launcher=LAUNCHER, env=ENV, timeout=150) as job:
        if kind != "raises first":
            job.wait_for("training")
        began = None
        if kind == "dies":
            time.sleep(delay)
            began = job.kill(victim)
        outcome = job.wait()
    assert not outcome.timed_out, outcome.describe()
    if kind.startswith("raises"):
        assert outcome.ranks[victim].error_types[:1] == ("KeyError",), outcome.describe()
    informed = [rank for rank in outcome.ranks if kind == "differs" or rank.rank != victim]
    error, name = ("SMPPeerFailedError", "rank") if kind == "dies" else ("SMPMismatchError", "partition")
    for rank in informed:
        assert rank.error_types[:1] == (error,), outcome.describe()
        assert f"{name} {victim} " in rank.error, outcome.describe()
        assert "no such thing" in rank.error or not kind.startswith("raises"), outcome.describe()
    ends = [rank.ended_at for rank in informed]
    seconds = max(ends) - (min(ends) if began is None else began)
    assert seconds < limit, f"it took {seconds:.1f} s\n{outcome.describe()}"
    return seconds


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=5.0, help="longest time until the last rank's error, in seconds")
    arguments = parser.parse_args()
    rng, longest = random.Random(arguments.seed), dict.fromkeys(("dies", "differs", "raises", "raises first"), 0.0)
    start = time.monotonic()
    for number in range(arguments.runs):
        partitions, kind = rng.choice([2, 2, 3]), list(longest)[number % 4]
        # Rank 0 serves the rendezvous. Without `smdrun`, the death of rank 0 also ends the service that reports deaths.
        victim = rng.randrange(1 if kind == "dies" else 0, partitions)
        seconds = run(partitions, victim, kind, rng.uniform(0, 0.2), arguments.limit)
        longest[kind] = max(longest[kind], seconds)
        if (number + 1) % 10 == 0:
            latest = ", ".join(f"{kind} {1e3 * most:.0f} ms" for kind, most in longest.items())
            print(
                f"{number + 1} runs, longest time to an error: {latest} ({time.monotonic() - start:.0f} s)", flush=True
            )


if __name__ == "__main__":
    main()
