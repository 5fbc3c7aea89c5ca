"""`make matrix`: its versions, the tests that it runs, and the table that it writes."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def matrix():
    spec = importlib.util.spec_from_file_location("matrix", ROOT / "tests/matrix/matrix.py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module in `sys.modules`.
    sys.modules["matrix"] = module
    spec.loader.exec_module(module)
    return module


def test_the_support_window_is_tested_from_its_newest_version_on(matrix):
    names = [str(version) for version in matrix.versions()]
    assert names[0] == "torch==2.15"
    assert {"torch==2.9", "tensorflow==2.16", "tensorflow==2.21"} <= set(names)
    assert "torch==2.8" not in names


def test_the_suite_names_tests_that_exist(matrix):
    for suite in matrix.SUITES.values():
        for test in (test for part in suite.values() for test in part):
            path, _, name = test.partition("::")
            text = (ROOT / path).read_text()
            assert not name or re.search(rf"^def {name.partition('[')[0]}\(", text, re.MULTILINE), test


def test_rows_are_replaced_and_kept_in_order(matrix, monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{matrix.BEGIN}{matrix.END}\nafter\n")
    monkeypatch.setattr(matrix, "PAGE", page)
    parts = dict.fromkeys(matrix.SUITES["torch"], "yes")
    installed = ["Python 3.11.7", "torch 2.9.1+cpu", "transformers 5.23.0"]
    matrix.write("torch", matrix.row("torch", parts, installed))
    matrix.write("torch", matrix.row("torch", parts, [installed[0], "torch 2.15.0"]))
    matrix.write("torch", matrix.row("torch", parts, ["Python 3.10.13", "torch 2.15.0"]))
    matrix.write("torch", matrix.row("torch", parts | {"hvd": "fails"}, installed))
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    rows = [line for line in text.splitlines() if line.startswith("| PyTorch")]
    assert [row.split(" | ")[0] for row in rows] == ["| PyTorch 2.15.0", "| PyTorch 2.15.0", "| PyTorch 2.9.1+cpu"]
    assert ["Python 3.11.7" in row for row in rows] == [True, False, True], "each version of Python must have a row"
    assert rows[2].endswith("| fails |")
    assert "| Python 3.11.7, transformers 5.23.0 |" in rows[2]
    header = "| version | with | collectives | tape | fit | hvd | smp |"
    assert header not in text, "a table without rows must be left out"
    parts = dict.fromkeys(matrix.SUITES["tensorflow"], "yes")
    matrix.write("tensorflow", matrix.row("tensorflow", parts, [installed[0], "tensorflow 2.21.0"]))
    assert header in page.read_text()


def test_parts_that_do_not_run_keep_the_results_of_the_same_packages(matrix, monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"{matrix.BEGIN}{matrix.END}")
    monkeypatch.setattr(matrix, "PAGE", page)
    parts = dict.fromkeys(matrix.SUITES["torch"], "yes")
    rerun = dict.fromkeys(parts, matrix.NOT_RUN) | {"hvd": "yes"}
    installed = ["Python 3.11.7", "torch 2.15.0", "transformers 5.23.0"]
    matrix.write("torch", matrix.row("torch", parts | {"hvd": "fails"}, installed))
    matrix.write("torch", matrix.row("torch", rerun, installed))
    assert "| yes | yes | yes | yes | yes |" in page.read_text()
    matrix.write("torch", matrix.row("torch", rerun, [*installed[:2], "transformers 5.24.0"]))
    assert "| not run | not run | not run | not run | yes |" in page.read_text()


def test_patience_lengthens_the_limits_of_tests_and_of_their_jobs(tmp_path):
    test = tmp_path / "test_slow.py"
    test.write_text(
        "import time, pytest\nfrom support import run_ranks\n"
        "def slow():\n    time.sleep(3)\n"
        "@pytest.mark.timeout(2)\ndef test_slow():\n    assert run_ranks(slow, 1, launcher='raw', timeout=1) == [None]\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", "--confcutdir", ROOT / "tests"]
    command += ["-p", "tests.conftest", "-p", "no:cacheprovider"]
    # 60 s for what takes 3 s: where other tests fill the machine, 20 s were once too few.
    found = [
        subprocess.run([*command, *more, test], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
        for more in ([], ["--patience", "60"])
    ]
    assert "the job was still running after 1 s" in found[0].stdout, found[0].stdout
    assert found[1].returncode == 0, found[1].stdout
