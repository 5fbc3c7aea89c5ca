"""Kills processes that save checkpoints at random moments. Whenever that is, the newest complete checkpoint is whole, and what saves did
not write is as it was.

    python tests/faults/kill_saves.py --runs 500 --seed 0

Two ranks save one step after another into one folder, which later runs go on with, as a job that is started again does. Every
tensor's bytes follow from its name and the step, so whoever loads knows what must be there. Sharded checkpoints get their names by an exchange and without one;
between them, ranks save partial and full ones. The folder also holds files of the user's, under names that the ranks try to save to as well, and
older checkpoints of every kind: their bytes are compared after each kill. It needs no framework.
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
#: Attempts of saves have numbers that no two share: of each kind in a range of its own.
_NUMBERS = {"sharded": 0, "partial": 1 << 62, "full": 1 << 61}
#: What a user has in the folder: files, and under `links` where links lead to.
_FOREIGN = {
    "notes.txt": b"by hand",
    "photos/one.jpg": b"a photo",
    ".cache/x": b"somebody's",
    ".step-3.0123456789abcdef/data/rank-00000-0.safetensors": b"has a name like ours",
    "occupied/one.jpg": b"another photo",
    "occupied_partial/model_0_0.pt": b"somebody else's state",
    "occupied-file": b"no archive",
    "user_content_occupied-content": b"no archive",
}
_LINKS = {"best": "older", "occupied-link": "photos", "occupied-nowhere": "nowhere"}
#: Names that a save must refuse, each with its kind.
_REFUSED = [
    ("sharded", "occupied"),
    ("sharded", "occupied-file"),
    ("sharded", "occupied-link"),
    ("sharded", "occupied-nowhere"),
    ("sharded", "older"),
    ("sharded", "older-partial"),
    ("sharded", "older-full"),
    ("partial", "occupied_partial"),
    ("partial", "older"),
    ("full", "occupied"),
    ("full", "occupied-file"),
    ("full", "occupied-content"),
    ("full", "older"),
    ("full", "older-partial"),
    ("full", "newest"),
    ("full", "../evil"),
]


def _content(name: str, step: int, size: int) -> bytearray:
    return bytearray(random.Random(f"{name} {step}").randbytes(1 << 12) * (size // (1 << 12)))


def _names(rank: int) -> list[tuple[str, int]]:
    """Some larger than a chunk of the format."""
    return [(f"rank{rank}.{index}", (1 << 12) << (2 * index)) for index in range(TENSORS)]


def _places(rank: int, step: int) -> tuple[list[tuple], dict[str, bytearray]]:
    """What a rank saves of a step, and the memory of it."""
    import ctypes

    held = {name: _content(name, step, size) for name, size in _names(rank)}
    places = []
    for name, memory in held.items():
        address = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
        places.append((name, "U8", [len(memory)], [0], [len(memory)], address, False))
    return places, held


def _archive(text: str) -> bytes:
    """What ends as a file of `torch.save` does."""
    return text.encode() * 4096 + b"PK\5\6" + bytes(18)


def _attempt(folder: str, kind: str, tag: str, rank: int, world: int, number: int) -> object:
    from smdistributed import _core

    return _core.CheckpointAttempt(folder, tag, kind, _NUMBERS[kind] | number, rank, world, True, 30.0)


def _save_partial(folder: str, tag: str, rank: int, number: int, step: int) -> None:
    """Both ranks: the second one goes on when it has written its part."""
    attempt = _attempt(folder, "partial", tag, rank, RANKS, number)
    name = f"model_{rank}_0.pt"
    Path(attempt.folder, name).write_bytes(f"{step} ".encode() * 50_000)
    attempt.report([name])
    if rank == 0:
        while not Path(attempt.folder).with_name("rank-00001.json").exists():
            time.sleep(0.001)
        attempt.commit()
        attempt.leave()


def _save_full(folder: str, tag: str, number: int, step: int) -> None:
    attempt = _attempt(folder, "full", tag, 0, 1, number)
    for name in ("model", "user_content"):
        Path(attempt.folder, name).write_bytes(_archive(f"{step} "))
    attempt.commit()
    attempt.leave()


def plant(folder: str) -> None:
    """Puts what nobody may touch into the folder of checkpoints."""
    from smdistributed import _core

    for name, content in _FOREIGN.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for name, target in _LINKS.items():
        Path(folder, name).symlink_to(target)
    saver = _core.CheckpointSaver(folder, 0, 1, 2, True, None, 30.0)
    places, _held = _places(0, 0)
    saver.save("older", 0, 1, "{}", "0", places, False)
    # So a job that keeps three checkpoints keeps this one, too.
    Path(folder, "older/notes.txt").write_bytes(b"by hand")
    attempt = _attempt(folder, "partial", "older-partial", 0, 1, 1)
    Path(attempt.folder, "model_0_0.pt").write_bytes(b"older")
    attempt.report(["model_0_0.pt"])
    attempt.commit()
    attempt.leave()
    _save_full(folder, "older-full", 1, 0)
    Path(folder, "newest").unlink()


def planted(folder: str) -> dict[str, object]:
    """What :func:`plant` has made, as it is now."""
    found: dict[str, object] = {name: os.readlink(Path(folder, name)) for name in _LINKS}
    roots = {name.partition("/")[0] for name in _FOREIGN} | {
        "older",
        "older-partial",
        "older-full",
        "user_content_older-full",
    }
    for root in roots:
        path = Path(folder, root)
        for each in [path, *path.rglob("*")]:
            found[str(each.relative_to(folder))] = each.read_bytes() if each.is_file() else "a folder"
    return found


def _refuse(folder: str) -> None:
    """Tries to save to names that are taken."""
    from smdistributed._common.errors import InvalidArgumentError

    for number, (kind, tag) in enumerate(_REFUSED):
        try:
            _attempt(folder, kind, tag, 0, 1, 1 << 60 | number)
        except InvalidArgumentError:
            continue
        raise AssertionError(f"a {kind} checkpoint was begun at `{tag}`")


def _save(folder: str, rank: int, first: int, run: int) -> None:
    """A rank: saves until it is killed."""
    from smdistributed import _core

    if rank == 0:
        _refuse(folder)
    # Each way in turns: durable or not, by an exchange of names or without.
    saver = _core.CheckpointSaver(folder, rank, RANKS, 2, bool(run % 2), 3, 30.0, bool(run % 4 < 2))
    for step in range(first, first + 10_000):
        places, _held = _places(rank, step)
        number = run << 32 | step
        # A tag that is used again replaces what was there.
        saver.save(f"step-{step}" if run % 3 else "again", step, number, "{}", str(step), places, bool(step % 2))
        if step % 2 == 0:
            _save_partial(folder, f"t{step % 4}_partial", rank, number, step)
        if rank == 0 and step % 3 == 0:
            _save_full(folder, f"full{step % 2}", number, step)
        print(step, flush=True)


def _check(folder: str) -> int:
    """Loads the newest checkpoint; returns its step, or -1 if there is none yet."""
    import ctypes

    from smdistributed import _core

    if _core.checkpoint_newest(folder) in (None, "older"):
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


def _check_files(folder: str) -> None:
    """What partial and full checkpoints there are is whole, and of one step each."""
    from smdistributed import _core

    for tag in ("t0_partial", "t2_partial"):
        place = _core.checkpoint_folder(folder, tag)
        if not os.path.exists(place):
            continue
        reader = _core.CheckpointReader(folder, tag)
        names = [f"model_{rank}_0.pt" for rank in range(RANKS)]
        reader.check_files(names)
        steps = {Path(place, name).read_bytes().split()[0] for name in names}
        assert len(steps) == 1, f"`{tag}` is of the steps {steps}"
    for tag in ("full0", "full1"):
        if not Path(folder, tag).exists():
            continue
        content = _core.checkpoint_content(folder, tag)
        assert content is not None, f"`{tag}` has lost its content"
        files = [str(Path(folder, tag)), content]
        for file in files:
            _core.checkpoint_verify_file(file)
        steps = {Path(file).read_bytes().split()[0] for file in files}
        assert len(steps) == 1, f"`{tag}` is of the steps {steps}"


def run(folder: str, number: int, seed: int) -> int:
    """
    One run: ranks start, and some time after their first save one or both are killed.

    Returns:
        The step of the newest checkpoint, which was found whole.
    """
    from smdistributed import _core

    dice = random.Random(f"{seed} {number}")
    if not Path(folder, "older").exists():
        plant(folder)
    expected = planted(folder)
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
    assert planted(folder) == expected, "a save has touched what is not its own"
    # Readers find all of it before the next job takes away what this one has left, and after.
    found = _check(folder)
    _check_files(folder)
    _core.checkpoint_clean(folder)
    assert _check(folder) == found
    _check_files(folder)
    assert planted(folder) == expected, "cleaning has touched what is not its own"
    rests = [each for each in Path(folder).glob(".*.smd-attempt") if any(each.glob("*.status"))]
    assert not rests, f"a broken attempt has left {rests}"
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
                    f"{number + 1} runs, at step {step}: every newest checkpoint was whole, and nothing else was touched ({time.monotonic() - start:.0f} s)"
                )


if __name__ == "__main__":
    main()
