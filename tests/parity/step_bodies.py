"""Random step bodies on partitions beside the same bodies in plain PyTorch: results, gradients, parameters and buffers.

    python tests/parity/step_bodies.py [--runs 1000] [--seed 0] [--partitions 2,3] [--only SEED] [--show 10]

Every program ends as one of:

- equal: all numbers are those of one process,
- raises: an error of this library on all ranks,
- rounding: numbers differ, but in one process they differ as much after a change of the parameters in the last places,
- DIFFERENT, hang, crash (an error that is none of this library's), uneven (an error of this library on some ranks, and others do not
  know it): defects. The script prints the smallest program that it finds with
  the same end, and fails.

``tests/multiproc/modelparallel_torch/test_bodies.py`` runs a part.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import Forked, start_ranks
from support.step_bodies import Program, draw
from support.step_runs import is_valid, run_programs

DEFECTS = ("DIFFERENT", "hang", "crash", "uneven")
#: Programs of one job, and how long its ranks may leave nothing.
_BATCH, _SECONDS = 100, 20.0


def drawn(seed: int, runs: int, partitions: int) -> list[Program]:
    """So many programs that plain PyTorch accepts, from ``seed`` on."""
    found: list[Program] = []
    while len(found) < runs:
        program = draw(seed, partitions)
        if is_valid(program.text()):
            found.append(program)
        seed += 1
    return found


def run_all(programs: Mapping[int, Program], partitions: int) -> dict[int, tuple[str, str]]:
    """The end of each program: its kind and its story."""
    ends: dict[int, tuple[str, str]] = {}
    left = {number: program.text() for number, program in programs.items()}
    # What ended in a job that other programs had used may be the end of another one: then it runs in a job of its own.
    unsure: list[int] = []
    while left:
        is_alone = next(iter(left)) in unsure
        batch = dict(list(left.items())[: 1 if is_alone else _BATCH])
        found = _job(batch, partitions)
        for number, end in found.items():
            if end is None or ((end[0] == "hang" or "PeerFailed" in end[1]) and not is_alone):
                if end is not None or number == next(iter(batch)):
                    unsure.append(number)
                if end is None and is_alone:
                    ends[number] = ("hang", "no rank has come to an end")
                    del left[number]
                break
            ends[number] = end
            del left[number]
    return ends


def _job(texts: Mapping[int, str], partitions: int) -> dict[int, tuple[str, str] | None]:
    with tempfile.TemporaryDirectory(prefix="smd-bodies-") as folder:
        _run_job(folder, texts, partitions)
        return {number: _end(Path(folder), number, partitions) for number in texts}


def _run_job(folder: str, texts: Mapping[int, str], partitions: int) -> None:
    # A wait that would take for ever ends before this script takes it for a hang.
    env = {"SMD_TIMEOUT_SECONDS": str(_SECONDS / 2)}
    with start_ranks(
        run_programs, partitions, folder, texts, _SECONDS * 0.75, launcher=Forked("torch"), env=env, timeout=3600
    ) as job:
        files, since = 0, time.monotonic()
        while any(process.poll() is None for process in job._processes):
            now = sum(1 for _ in Path(folder).iterdir())
            if now != files:
                files, since = now, time.monotonic()
            elif time.monotonic() - since > _SECONDS + 10 * (files == 0):
                break
            time.sleep(0.01)
        if not files:
            print(job.output())


def _end(folder: Path, number: int, partitions: int) -> tuple[str, str] | None:
    """What the ranks have left of a program; the worst counts. An error that only tells of another rank's tells nothing."""
    files = {rank: folder / f"{number}.{rank}" for rank in range(partitions)}
    left = {rank: file.read_text().split("\n", 1) for rank, file in files.items() if file.exists()}
    if not left:
        return None
    stories = "; ".join(f"rank {rank} {kind}: {story}" for rank, (kind, story) in left.items())
    if "Timeout" in stories:
        return "hang", stories
    if " died (" in stories:
        return "crash", stories
    for kind in ("crash", "DIFFERENT", "raises", "invalid"):
        for found, story in left.values():
            if found == kind and "PeerFailed" not in story:
                if kind == "raises" and not (len(left) == partitions and all(map(_knows_error, left.values()))):
                    return "uneven", stories
                return kind, story
    kinds = {found for found, _ in left.values()}
    if len(left) == partitions and kinds <= {"equal", "rounding"}:
        return ("equal", "") if kinds == {"equal"} else ("rounding", stories)
    return "hang", stories


def _knows_error(end: list[str]) -> bool:
    """Whether a rank has raised an error, and not only that of a rank that had left."""
    kind, story = end
    return kind == "raises" and ("PeerFailed" not in story or " failed (" in story)


def smallest(program: Program, kind: str) -> tuple[Program, str]:
    """The smallest program that is found with the same kind of end, and its story."""
    story = ""
    while True:
        candidates = {place: each for place, each in enumerate(program.smaller()) if is_valid(each.text())}
        ends = run_all(candidates, program.partitions)
        found = [(candidates[place], end[1]) for place, end in ends.items() if end[0] == kind]
        if not found:
            return program, story
        program, story = found[0]


def summary(story: str) -> str:
    """A story without what differs between programs."""
    text = re.sub(r"`[^`]*`", "`..`", story.split("\n")[0])
    return re.sub(r"\d+", "N", re.sub(r"\(.*\)", "(..)", text))[:160]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000, help="programs for each number of partitions")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="the first; from 1000000 on, programs have statements of all kinds, from 9000000 on changed contents, from 20000000 on "
        "changed state",
    )
    parser.add_argument("--partitions", default="2,3")
    parser.add_argument("--only", type=int, help="the one program of this seed, as it was drawn")
    parser.add_argument("--show", type=int, default=10, help="how many defects are made small and printed")
    arguments = parser.parse_args()
    shown = defects = 0
    for partitions in map(int, arguments.partitions.split(",")):
        start = time.monotonic()
        if arguments.only is not None:
            programs = {arguments.only: draw(arguments.only, partitions)}
            print(programs[arguments.only].text())
        else:
            programs = {each.seed: each for each in drawn(arguments.seed, arguments.runs, partitions)}
        ends = run_all(programs, partitions)
        counts = Counter(kind for kind, _ in ends.values())
        seconds = time.monotonic() - start
        print(
            f"{partitions} partitions, {len(ends)} programs, {seconds:.0f} s: {dict(counts.most_common())}", flush=True
        )
        for kind in ("raises", *DEFECTS):
            stories = Counter(summary(story) for found, story in ends.values() if found == kind)
            for story, count in stories.most_common(40):
                seeds = [seed for seed, end in ends.items() if end[0] == kind and summary(end[1]) == story]
                print(f"  {count:4d} {kind}: {story} (seeds {', '.join(map(str, seeds[:6]))})", flush=True)
        seen: set[str] = set()
        for seed, (kind, story) in ends.items():
            if kind not in DEFECTS:
                continue
            defects += 1
            if shown >= arguments.show or (kind == "crash" and summary(story) in seen):
                continue
            seen.add(summary(story))
            shown += 1
            program, smaller_story = smallest(programs[seed], kind)
            print(
                f"\n===== seed {seed}, {partitions} partitions: {kind}: {smaller_story or story}\n{program.text()}",
                flush=True,
            )
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
