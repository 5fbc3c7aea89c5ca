"""Runs random step bodies on partitions and in plain PyTorch; compares results, gradients, parameters and buffers.

    python tests/parity/step_bodies.py [--runs 1000] [--seed 0] [--partitions 2,3] [--only SEED] [--show 10]

Every program has one of these results:

- equal: all values are those of plain PyTorch.
- raises: all ranks raise an error of this library.
- rounding: values differ, but those of plain PyTorch also differ after a change of the parameters in the last places.

The others are defects. The script prints the smallest program with the same result that it finds, and fails.

- DIFFERENT: values differ by more than rounding.
- hang: a rank does not finish, or an operation times out.
- crash: a rank dies, or raises an error that is not an error of this library.
- uneven: some ranks raise an error of this library, and the others do not report it.

``tests/multiproc/modelparallel_torch/test_bodies.py`` runs a few of the programs.
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
#: Number of programs that one job runs, and the seconds without a new result file after which the job counts as hung.
_BATCH, _SECONDS = 100, 20.0


def drawn(seed: int, runs: int, partitions: int) -> list[Program]:
    """Draws valid programs.

    Args:
        seed: First seed. Seeds whose program plain PyTorch cannot run are skipped.
        runs: Number of programs.
        partitions: Number of partitions of each program.
    """
    found: list[Program] = []
    while len(found) < runs:
        program = draw(seed, partitions)
        if is_valid(program.text()):
            found.append(program)
        seed += 1
    return found


def run_all(programs: Mapping[int, Program], partitions: int) -> dict[int, tuple[str, str]]:
    """Runs programs; returns the result of each: its kind and a description."""
    results: dict[int, tuple[str, str]] = {}
    left = {number: program.text() for number, program in programs.items()}
    # A hang or a failed peer may be the effect of an earlier program of the same job. Such a program runs again, in a job
    # of its own.
    unsure: list[int] = []
    while left:
        is_alone = next(iter(left)) in unsure
        batch = dict(list(left.items())[: 1 if is_alone else _BATCH])
        found = _job(batch, partitions)
        for number, result in found.items():
            if result is None or ((result[0] == "hang" or "PeerFailed" in result[1]) and not is_alone):
                if result is not None or number == next(iter(batch)):
                    unsure.append(number)
                if result is None and is_alone:
                    results[number] = ("hang", "no rank has finished")
                    del left[number]
                break
            results[number] = result
            del left[number]
    return results


def _job(texts: Mapping[int, str], partitions: int) -> dict[int, tuple[str, str] | None]:
    with tempfile.TemporaryDirectory(prefix="smd-bodies-") as folder:
        _run_job(folder, texts, partitions)
        return {number: _combined(Path(folder), number, partitions) for number in texts}


def _run_job(folder: str, texts: Mapping[int, str], partitions: int) -> None:
    # The library's timeout is shorter than the limit of this script, so a rank reports where it hangs.
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


def _combined(folder: Path, number: int, partitions: int) -> tuple[str, str] | None:
    """Combines the results of a program's ranks, of which the worst counts. ``None`` if no rank has written a result.

    Errors that only report the failure of another rank are not counted.
    """
    files = {rank: folder / f"{number}.{rank}" for rank in range(partitions)}
    left = {rank: file.read_text().split("\n", 1) for rank, file in files.items() if file.exists()}
    if not left:
        return None
    descriptions = "; ".join(f"rank {rank} {kind}: {description}" for rank, (kind, description) in left.items())
    if "Timeout" in descriptions:
        return "hang", descriptions
    if " died (" in descriptions:
        return "crash", descriptions
    for kind in ("crash", "DIFFERENT", "raises", "invalid"):
        for found, description in left.values():
            if found == kind and "PeerFailed" not in description:
                if kind == "raises" and not (len(left) == partitions and all(map(_knows_error, left.values()))):
                    return "uneven", descriptions
                return kind, description
    kinds = {found for found, _ in left.values()}
    if len(left) == partitions and kinds <= {"equal", "rounding"}:
        return ("equal", "") if kinds == {"equal"} else ("rounding", descriptions)
    return "hang", descriptions


def _knows_error(result: list[str]) -> bool:
    """Whether a rank has raised the error itself, or reports the error that another rank has raised."""
    kind, description = result
    return kind == "raises" and ("PeerFailed" not in description or " failed (" in description)


def smallest(program: Program, kind: str) -> tuple[Program, str]:
    """Reduces a program step by step while its result stays of the same kind; returns the program and the description."""
    description = ""
    while True:
        candidates = {place: each for place, each in enumerate(program.smaller()) if is_valid(each.text())}
        results = run_all(candidates, program.partitions)
        found = [(candidates[place], result[1]) for place, result in results.items() if result[0] == kind]
        if not found:
            return program, description
        program, description = found[0]


def summary(description: str) -> str:
    """Replaces the names and numbers of a description, so that programs with the same defect are counted together."""
    text = re.sub(r"`[^`]*`", "`..`", description.split("\n")[0])
    return re.sub(r"\d+", "N", re.sub(r"\(.*\)", "(..)", text))[:160]


def main() -> int:
    """Runs the command line; returns 1 if there are defects."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000, help="programs for each number of partitions")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="first seed. From 1000000 on, programs have statements of all kinds; from 9000000 on, they change the contents "
        "of attributes; from 20000000 on, modules have state that is not a parameter",
    )
    parser.add_argument("--partitions", default="2,3")
    parser.add_argument("--only", type=int, help="run only the program of this seed, and print it")
    parser.add_argument("--show", type=int, default=10, help="number of defects to reduce and print")
    arguments = parser.parse_args()
    shown = defects = 0
    for partitions in map(int, arguments.partitions.split(",")):
        start = time.monotonic()
        if arguments.only is not None:
            programs = {arguments.only: draw(arguments.only, partitions)}
            print(programs[arguments.only].text())
        else:
            programs = {each.seed: each for each in drawn(arguments.seed, arguments.runs, partitions)}
        results = run_all(programs, partitions)
        counts = Counter(kind for kind, _ in results.values())
        seconds = time.monotonic() - start
        print(
            f"{partitions} partitions, {len(results)} programs, {seconds:.0f} s: {dict(counts.most_common())}",
            flush=True,
        )
        for kind in ("raises", *DEFECTS):
            descriptions = Counter(summary(description) for found, description in results.values() if found == kind)
            for description, count in descriptions.most_common(40):
                seeds = [
                    seed for seed, result in results.items() if result[0] == kind and summary(result[1]) == description
                ]
                print(f"  {count:4d} {kind}: {description} (seeds {', '.join(map(str, seeds[:6]))})", flush=True)
        seen: set[str] = set()
        for seed, (kind, description) in results.items():
            if kind not in DEFECTS:
                continue
            defects += 1
            if shown >= arguments.show or (kind == "crash" and summary(description) in seen):
                continue
            seen.add(summary(description))
            shown += 1
            program, smaller_description = smallest(programs[seed], kind)
            print(
                f"\n===== seed {seed}, {partitions} partitions: {kind}: {smaller_description or description}\n{program.text()}",
                flush=True,
            )
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
