"""Sizes of the tree: how long a source may grow, and how many files a folder may have."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 700
MOST_FILES = 25
SUFFIXES = {".py", ".rs", ".cc", ".h", ".cu", ".cuh"}


@pytest.fixture(scope="module")
def sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("this is no checkout of git: files that are built could not be told from sources")
    paths = (ROOT / line for line in listed.stdout.splitlines())
    found = sorted(path for path in paths if path.suffix in SUFFIXES and path.exists())
    assert len(found) > 500, "the sources have moved"
    return found


def test_a_source_is_at_most_700_lines_long(sources):
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources}
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


def test_a_folder_has_at_most_25_sources(sources):
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in sources)
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}
