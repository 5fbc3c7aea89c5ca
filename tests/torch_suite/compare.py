"""Runs PyTorch's own suite for gloo and for smddp and says what passes with the one and not with the other.

python tests/torch_suite/compare.py [--backends gloo,smddp] [--world-size 3] [-k EXPRESSION]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

SUITE = Path(__file__).with_name("suite.py")


def run(backend: str, world_size: int, selection: str | None) -> dict[str, str]:
    """Outcome of each test: passed, skipped or failed."""
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as scratch:
        report = Path(scratch) / "report.xml"
        # Tests start processes that import the suite by its name.
        options = ["-q", "--import-mode=prepend", "--timeout=400", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *options, str(SUITE)]
        if selection:
            command += ["-k", selection]
        environment = {**os.environ, "SUITE_BACKEND": backend, "WORLD_SIZE": str(world_size)}
        environment.setdefault("OMP_NUM_THREADS", "1")
        subprocess.run(command, env=environment, check=False)
        if not report.is_file():
            sys.exit(f"the suite did not run for {backend}")
        return {case.attrib["name"]: _outcome(case) for case in ElementTree.parse(report).iter("testcase")}


def _outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="gloo,smddp", help="which ones, separated by commas")
    parser.add_argument("--world-size", type=int, default=3, help="processes of each test")
    parser.add_argument("-k", dest="selection", help="run only tests that match, as pytest's -k")
    arguments = parser.parse_args()
    outcomes = {
        backend: run(backend, arguments.world_size, arguments.selection) for backend in arguments.backends.split(",")
    }
    print(f"\nPyTorch's suite at world size {arguments.world_size}")
    for backend, tests in outcomes.items():
        counts = {kind: list(tests.values()).count(kind) for kind in ("passed", "skipped", "failed")}
        print(f"  {backend:6} " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    reference, *others = outcomes
    worse = 0
    for backend in others:
        for test, outcome in sorted(outcomes[backend].items()):
            expected = outcomes[reference].get(test)
            if outcome != expected:
                worse += expected == "passed" or outcome == "failed"
                print(f"  {test}: {expected} with {reference}, {outcome} with {backend}")
    sys.exit(min(worse, 1))


if __name__ == "__main__":
    main()
