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
    # Its classes look for the annotations' module there.
    sys.modules["matrix"] = module
    spec.loader.exec_module(module)
    return module


def test_the_window_is_tried_from_its_newest_version_on(matrix):
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
    held = ["Python 3.11.7", "torch 2.9.1+cpu", "transformers 5.23.0"]
    matrix.write("torch", matrix.row("torch", parts, held))
    matrix.write("torch", matrix.row("torch", parts, [held[0], "torch 2.15.0"]))
    matrix.write("torch", matrix.row("torch", parts, ["Python 3.10.13", "torch 2.15.0"]))
    matrix.write("torch", matrix.row("torch", parts | {"hvd": "fails"}, held))
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    rows = [line for line in text.splitlines() if line.startswith("| PyTorch")]
    assert [row.split(" | ")[0] for row in rows] == ["| PyTorch 2.15.0", "| PyTorch 2.15.0", "| PyTorch 2.9.1+cpu"]
    assert ["Python 3.11.7" in row for row in rows] == [True, False, True], "each Python has a row"
    assert rows[2].endswith("| fails |")
    assert "| Python 3.11.7, transformers 5.23.0 |" in rows[2]
    header = "| version | with | collectives | tape | fit | hvd | smp |"
    assert header not in text, "a table without rows is left out"
    parts = dict.fromkeys(matrix.SUITES["tensorflow"], "yes")
    matrix.write("tensorflow", matrix.row("tensorflow", parts, [held[0], "tensorflow 2.21.0"]))
    assert header in page.read_text()


def test_parts_that_do_not_run_keep_what_the_same_packages_gave(matrix, monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"{matrix.BEGIN}{matrix.END}")
    monkeypatch.setattr(matrix, "PAGE", page)
    parts = dict.fromkeys(matrix.SUITES["torch"], "yes")
    again = dict.fromkeys(parts, matrix.NOT_RUN) | {"hvd": "yes"}
    held = ["Python 3.11.7", "torch 2.15.0", "transformers 5.23.0"]
    matrix.write("torch", matrix.row("torch", parts | {"hvd": "fails"}, held))
    matrix.write("torch", matrix.row("torch", again, held))
    assert "| yes | yes | yes | yes | yes |" in page.read_text()
    matrix.write("torch", matrix.row("torch", again, [*held[:2], "transformers 5.24.0"]))
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
    found = [
        subprocess.run([*command, *more, test], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
        for more in ([], ["--patience", "20"])
    ]
    assert "the job was still running after 1 s" in found[0].stdout, found[0].stdout
    assert found[1].returncode == 0, found[1].stdout
