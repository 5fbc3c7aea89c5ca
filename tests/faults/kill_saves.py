"""Kills processes that save checkpoints at random moments. Whenever that is, the newest complete checkpoint is whole.

    python tests/faults/kill_saves.py --runs 500 --seed 0

Two ranks save one step after another into one folder, which later runs go on with, as a job that is started again does. Every
tensor's bytes follow from its name and the step, so whoever loads knows what must be there. It needs no framework.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS = 2
TENSORS = 6


def _content(name: str, step: int, size: int) -> bytearray:
    return bytearray(random.Random(f"{name} {step}").randbytes(1 << 12) * (size // (1 << 12)))


def _names(rank: int) -> list[tuple[str, int]]:
    """Some larger than a chunk of the format."""
    return [(f"rank{rank}.{index}", (1 << 12) << (2 * index)) for index in range(TENSORS)]


def _save(folder: str, rank: int, first: int, run: int) -> None:
    """A rank: saves until it is killed."""
    import ctypes

    from smdistributed import _core

    saver = _core.CheckpointSaver(folder, rank, RANKS, 2, bool(run % 2), 3, 30.0)
    for step in range(first, first + 10_000):
        held = {name: _content(name, step, size) for name, size in _names(rank)}
        places = []
        for name, memory in held.items():
            address = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
            places.append((name, "U8", [len(memory)], [0], [len(memory)], address))
        # Each way in turns; a tag that is used again replaces what was there.
        tag = f"step-{step}" if run % 3 else "again"
        saver.save(tag, step, run << 32 | step, "{}", str(step), places, bool(step % 2))
        print(step, flush=True)


def _check(folder: str) -> int:
    """Loads the newest checkpoint; returns its step, or -1 if there is none yet."""
    import ctypes

    from smdistributed import _core

    if not (Path(folder) / "newest").exists():
        return -1
    reader = _core.CheckpointReader(folder)
    reader.verify(2)
    expected = dict(pair for rank in range(RANKS) for pair in _names(rank))
    assert [name for name, _, _ in reader.tensors()] == sorted(expected), "tensors are missing"
    assert reader.content == str(reader.step), f"content {reader.content} in step {reader.step}"
    for name, size in expected.items():
        memory = bytearray(size)
        address = ctypes.addressof((ctypes.c_char * size).from_buffer(memory))
        reader.read([(name, [0], [size], address, size)], 2)
        assert memory == _content(name, reader.step, size), f"`{name}` of step {reader.step} is not as it was saved"
    return reader.step


def run(folder: str, number: int, seed: int) -> int:
    """
    One run: ranks start, and some time after their first save one or both are killed.

    Returns:
        The step of the newest checkpoint, which was found whole.
    """
    from smdistributed import _core

    dice = random.Random(f"{seed} {number}")
    _core.checkpoint_clean(folder)
    before = _check(folder)
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--save", folder, str(rank), str(before + 1), str(number + 1)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        assert ranks[0].stdout.readline() == f"{before + 1}\n", "the first save failed"
        time.sleep(dice.uniform(0, 0.25))
    finally:
        victims = list(ranks)
        dice.shuffle(victims)
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
            time.sleep(dice.choice([0, 0, 0.03]))
        said = [rank.communicate()[0].split() for rank in ranks]
    found = _check(folder)
    # What a rank was told is saved, is: saves with odd numbers may be under way, in the background.
    told = max((int(steps[-1]) for steps in said if steps), default=before)
    assert found >= told - told % 2, f"step {told - told % 2} was saved, and the newest is {found}"
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.save:
        folder, rank, first, number = arguments.save
        _save(folder, int(rank), int(first), int(number))
        return
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.runs):
            step = run(folder, number, arguments.seed)
            if (number + 1) % 50 == 0:
                print(
                    f"{number + 1} runs, at step {step}: every newest checkpoint was whole ({time.monotonic() - start:.0f} s)"
                )


if __name__ == "__main__":
    main()
