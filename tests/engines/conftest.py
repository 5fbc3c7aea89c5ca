"""`--record` writes the numbers of tests that passed and were skipped into the support matrix, for the files that ran whole.

make test-engines test-clients ARGS=--record
"""

from __future__ import annotations

import re
from collections import Counter
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "support-matrix.md"
BEGIN, END = (
    "<!-- Written by `make test-engines test-clients ARGS=--record`. -->\n\n",
    "\n<!-- End of these results. -->\n",
)
#: The packages whose versions a row names, by the first word of its file.
PACKAGES = {
    "ray": ["ray"],
    "spark": ["pyspark", "pyarrow"],
    "sagemaker": ["sagemaker-training"],
    "kubernetes": ["kubernetes-validate", "kubeflow-training", "kubeflow-trainer-api"],
    "client": ["accelerate", "transformers", "lightning", "torchtitan", "torchrec", "keras-tuner"],
}
#: Where `make test-engines` and `make test-clients` install packages beside those of the environment.
FOLDERS = ["build/clients", *(str(path) for path in ROOT.glob("build/sagemaker/lib/python*/site-packages"))]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write the results into docs/reference/support-matrix.md")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: pytest.ExitCode, config: pytest.Config
) -> None:
    """Updates the rows of the files of this folder."""
    if not config.getoption("--record"):
        return
    # `make` runs the tests without those marked `more`; the page says so.
    left_out = [item for item in terminalreporter.stats.get("deselected", []) if not item.get_closest_marker("more")]
    if left_out or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        terminalreporter.write_line("not recorded: not all tests of the files ran")
        return
    counts: dict[str, Counter[str]] = {}
    reasons: dict[str, set[str]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            path = Path(report.nodeid.split("::")[0])
            if path.parent.name != "engines":
                continue
            counts.setdefault(path.stem, Counter())[outcome] += 1
            if outcome == "skipped" and isinstance(report.longrepr, tuple):
                reasons.setdefault(path.stem, set()).add(report.longrepr[2].removeprefix("Skipped: "))
    before, rest = PAGE.read_text().split(BEGIN)
    table, after = rest.split(END)
    head, rows = table.splitlines()[:2], dict(re.findall(r"(?m)^\| `(\w+)\.py` (.*)$", table))
    for stem, count in counts.items():
        failed = count["failed"] + count["error"]
        why = f" ({'; '.join(sorted(reasons[stem]))})" if stem in reasons else ""
        rows[stem] = f"| {count['passed']} | {failed} | {count['skipped']}{why} | {_versions(stem)} |"
    lines = [*head, *(f"| `{stem}.py` {row}" for stem, row in sorted(rows.items()))]
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)


def _versions(stem: str) -> str:
    names = PACKAGES.get(stem.split("_")[0], [])
    everywhere = [*distributions(), *distributions(path=FOLDERS)]
    found = {each.name.replace("_", "-"): each.version for each in everywhere}
    return ", ".join(f"{name} {found[name]}" for name in names if name in found)
