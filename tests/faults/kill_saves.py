"""Kills processes at random moments while they save checkpoints.

The newest complete checkpoint must then be intact, and files of others must be unchanged.

    python tests/faults/kill_saves.py --runs 500 --seed 0

Two ranks save one step after another into one folder. Later runs continue in the same folder, like a job that is
restarted. The bytes of each tensor follow from its name and the step, so a reader can compute the expected content.
Sharded checkpoints agree on their names either by an exchange or without one. Between them, ranks save partial and full
checkpoints.

The folder also holds files of the user, some under names that the ranks try to save to, and older checkpoints of every
kind. Their bytes are compared after each kill. No framework is needed.
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
#: Offset of the attempt numbers of each kind of checkpoint, so that no two attempts share a number.
_NUMBERS = {"sharded": 0, "partial": 1 << 62, "full": 1 << 61}
#: Files of the user in the folder, with their content.
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
#: Names at which a save must be refused, each with the kind of the checkpoint.
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
    """Names and sizes in bytes of the tensors of a rank. Some are larger than a chunk of the format."""
    return [(f"rank{rank}.{index}", (1 << 12) << (2 * index)) for index in range(TENSORS)]


def _tensors_of(rank: int, step: int) -> tuple[list[tuple], dict[str, bytearray]]:
    """Describes the tensors that a rank saves in a step; also returns their memory, which must outlive the save."""
    import ctypes

    buffers = {name: _content(name, step, size) for name, size in _names(rank)}
    tensors = []
    for name, memory in buffers.items():
        address = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
        tensors.append((name, "U8", [len(memory)], [0], [len(memory)], address, False))
    return tensors, buffers


def _archive(text: str) -> bytes:
    """Content that ends like a file of `torch.save`: with the end record of an empty zip archive."""
    return text.encode() * 4096 + b"PK\5\6" + bytes(18)


def _attempt(folder: str, kind: str, tag: str, rank: int, world: int, number: int) -> object:
    from smdistributed import _core

    return _core.CheckpointAttempt(folder, tag, kind, _NUMBERS[kind] | number, rank, world, True, 30.0)


def _save_partial(folder: str, tag: str, rank: int, number: int, step: int) -> None:
    """Saves a partial checkpoint; both ranks call it. Rank 0 commits when rank 1 has reported its file, and rank 1
    returns without waiting.
    """
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


def write_foreign(folder: str) -> None:
    """Fills the folder of checkpoints with files, links and older checkpoints that later saves must not touch."""
    from smdistributed import _core

    for name, content in _FOREIGN.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for name, target in _LINKS.items():
        Path(folder, name).symlink_to(target)
    saver = _core.CheckpointSaver(folder, 0, 1, 2, True, None, 30.0)
    tensors, _buffers = _tensors_of(0, 0)
    saver.save("older", 0, 1, "{}", "0", tensors, False)
    # The user's file within it keeps a job that keeps three checkpoints from deleting this one.
    Path(folder, "older/notes.txt").write_bytes(b"by hand")
    attempt = _attempt(folder, "partial", "older-partial", 0, 1, 1)
    Path(attempt.folder, "model_0_0.pt").write_bytes(b"older")
    attempt.report(["model_0_0.pt"])
    attempt.commit()
    attempt.leave()
    _save_full(folder, "older-full", 1, 0)
    Path(folder, "newest").unlink()


def read_foreign(folder: str) -> dict[str, object]:
    """Reads everything that :func:`write_foreign` has made, as it is now."""
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
    """Tries to save at names that are taken, each of which must be refused."""
    from smdistributed._common.errors import InvalidArgumentError

    for number, (kind, tag) in enumerate(_REFUSED):
        try:
            _attempt(folder, kind, tag, 0, 1, 1 << 60 | number)
        except InvalidArgumentError:
            continue
        raise AssertionError(f"a {kind} checkpoint was not refused at `{tag}`")


def _save(folder: str, rank: int, first: int, run: int) -> None:
    """The main function of a rank: saves until it is killed."""
    from smdistributed import _core

    if rank == 0:
        _refuse(folder)
    # Runs alternate: durable or not, with or without an exchange of names.
    saver = _core.CheckpointSaver(folder, rank, RANKS, 2, bool(run % 2), 3, 30.0, bool(run % 4 < 2))
    for step in range(first, first + 10_000):
        tensors, _buffers = _tensors_of(rank, step)
        number = run << 32 | step
        # In every third run all steps have the same tag: each save replaces the previous checkpoint.
        saver.save(f"step-{step}" if run % 3 else "again", step, number, "{}", str(step), tensors, bool(step % 2))
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
    assert reader.content == str(reader.step), (
        f"content of step {reader.content} in the checkpoint of step {reader.step}"
    )
    for name, size in expected.items():
        memory = bytearray(size)
        address = ctypes.addressof((ctypes.c_char * size).from_buffer(memory))
        reader.read([(name, [0], [size], address, size)], 2)
        assert memory == _content(name, reader.step, size), (
            f"`{name}` of step {reader.step} differs from what was saved"
        )
    return reader.step


def _check_files(folder: str) -> None:
    """Checks that each partial and full checkpoint is complete and that all its files are of one step."""
    from smdistributed import _core

    for tag in ("t0_partial", "t2_partial"):
        place = _core.checkpoint_folder(folder, tag)
        if not os.path.exists(place):
            continue
        reader = _core.CheckpointReader(folder, tag)
        names = [f"model_{rank}_0.pt" for rank in range(RANKS)]
        reader.check_files(names)
        steps = {Path(place, name).read_bytes().split()[0] for name in names}
        assert len(steps) == 1, f"`{tag}` has files of several steps: {steps}"
    for tag in ("full0", "full1"):
        if not Path(folder, tag).exists():
            continue
        content = _core.checkpoint_content(folder, tag)
        assert content is not None, f"`{tag}` has lost its `user_content` file"
        files = [str(Path(folder, tag)), content]
        for file in files:
            _core.checkpoint_verify_file(file)
        steps = {Path(file).read_bytes().split()[0] for file in files}
        assert len(steps) == 1, f"`{tag}` has files of several steps: {steps}"


def run(folder: str, number: int, seed: int) -> int:
    """Starts the ranks and kills one after the other some time after their first save.

    Returns: |    The step of the newest checkpoint, which was intact.
    """
    from smdistributed import _core

    rng = random.Random(f"{seed} {number}")
    if not Path(folder, "older").exists():
        write_foreign(folder)
    expected = read_foreign(folder)
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
        time.sleep(rng.uniform(0, 0.25))
    finally:
        victims = list(ranks)
        rng.shuffle(victims)
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
            time.sleep(rng.choice([0, 0, 0.03]))
        outputs = [rank.communicate()[0].split() for rank in ranks]
    assert read_foreign(folder) == expected, "a save has touched what is not its own"
    # Readers must find it both before and after the next job cleans up the attempts that were interrupted.
    found = _check(folder)
    _check_files(folder)
    _core.checkpoint_clean(folder)
    assert _check(folder) == found
    _check_files(folder)
    assert read_foreign(folder) == expected, "cleaning has touched what is not its own"
    leftovers = [each for each in Path(folder).glob(".*.smd-attempt") if any(each.glob("*.status"))]
    assert not leftovers, f"cleaning left interrupted attempts: {leftovers}"
    # A step that a rank has printed was saved. Saves of odd steps are asynchronous, so the last of these may be
    # incomplete.
    reported = max((int(steps[-1]) for steps in outputs if steps), default=before)
    assert found >= reported - reported % 2, f"step {reported - reported % 2} was saved, and the newest is {found}"
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
                    f"{number + 1} runs, at step {step}: the newest checkpoint was always complete, and no other file "
                    f"changed ({time.monotonic() - start:.0f} s)"
                )


if __name__ == "__main__":
    main()
