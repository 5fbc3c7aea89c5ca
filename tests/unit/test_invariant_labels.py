"""Labels of invariants, such as ``RED-3``: each is defined once in the tree, and each cited one is defined.

A label is defined by an item of a list in a comment or docstring, ``- RED-3: ...``. In the docstring at the top of a Python
module a sentence may define one instead, by ending in ``(PROBE-1)``.
"""

from __future__ import annotations

import collections
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = (
    "benches",
    "cpp-shims",
    "docs",
    "examples",
    "fuzz",
    "loom",
    "mpi-plugin",
    "python",
    "rust-core",
    "tests",
    "tf_ops",
    "torch_ext",
)
SUFFIXES = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".md", ".py", ".pyi", ".rs")
# Words that look like labels but are none.
OTHER_WORDS = ("AVX", "BERT", "CRC", "CVE", "FP", "GPL", "GPT", "ISO", "LGPL", "PEP", "RFC", "SHA", "UTF")

LABEL = re.compile(r"\b([A-Z]{2,6})-([1-9]\d?)(?:\.\.(\d+))?(?![\w-])")
DEFINITION = re.compile(r"^\s*(?://!|///|//|#|\*)?\s*- ([A-Z]{2,6}-[1-9]\d?):", re.MULTILINE)
MODULE_DOCSTRING = re.compile(r'\A\s*r?"""(.*?)"""', re.DOTALL)


def _texts():
    paths = [*ROOT.glob("*.md")]
    for folder in FOLDERS:
        paths += (path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)
    this = pathlib.Path(__file__).resolve()
    built = {"build", "target", "goldens", "__pycache__", "node_modules"}
    for path in sorted(paths):
        if path != this and path.name != "CHANGELOG.md" and not built & set(path.relative_to(ROOT).parts):
            yield path.relative_to(ROOT), path.read_text(encoding="utf-8", errors="replace")


def _labels(text):
    """Yields every label that a text cites; a range such as ``SAV-1..3`` cites all in it."""
    for kind, first, last in LABEL.findall(text):
        if kind not in OTHER_WORDS:
            for number in range(int(first), int(last or first) + 1):
                yield f"{kind}-{number}"


def test_each_label_is_defined_once_and_each_cited_label_is_defined():
    defined = collections.defaultdict(list)
    in_docstrings = collections.defaultdict(list)
    cited = collections.defaultdict(set)
    for path, text in _texts():
        for label in _labels(text):
            cited[label].add(path)
        if path.suffix == ".md":
            continue
        for label in DEFINITION.findall(text):
            defined[label].append(path)
        docstring = MODULE_DOCSTRING.match(text) if path.suffix == ".py" else None
        for inner in re.findall(r"\(([^()]*)\)", docstring[1] if docstring else ""):
            for label in _labels(inner):
                in_docstrings[label].append(path)
    for label, paths in in_docstrings.items():
        if label not in defined:
            defined[label] = paths
    assert len(defined) > 200, "the pattern finds almost no definitions: it is out of date"
    twice = {label: sorted(map(str, paths)) for label, paths in defined.items() if len(paths) > 1}
    assert not twice, f"labels that are defined more than once: {twice}"
    undefined = {label: sorted(map(str, paths)) for label, paths in cited.items() if label not in defined}
    assert not undefined, f"labels that are cited but not defined: {undefined}"
