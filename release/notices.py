"""The licenses of the crates in the library: which apply, and the notices that a wheel carries for them.

Usage: notices.py [--check]

Writes `THIRD_PARTY_NOTICES.txt`; with `--check`, only says whether it is current. Either fails if a crate has no
license that `ACCEPTED` names.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "THIRD_PARTY_NOTICES.txt"
TARGET = "x86_64-unknown-linux-gnu"
#: The crate that is the library.
LIBRARY = "smd-python"
#: Where a crate leaves the choice, the first of these is taken.
ACCEPTED = (
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "MIT",
    "ISC",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "Zlib",
    "Unicode-3.0",
)
_HEAD = """\
The compiled library of OpenSMD contains the standard library of Rust (Apache-2.0) and the crates below. OpenSMD itself
is under the license in the file LICENSE, the Apache License 2.0, which is also the text of what is used under it.

"""


def chosen(expression: str) -> frozenset[str]:
    """The licenses that apply to a crate.

    Args:
        expression: The SPDX expression of its manifest; `/` is an old spelling of OR.

    Returns:
        Those of the best alternative.

    Raises:
        ValueError: No alternative consists of accepted licenses.
    """
    words = re.findall(r"\(|\)|[^\s()]+", re.sub(r"\s*/\s*", " OR ", expression))
    alternatives = list(_alternatives(words))
    assert not words, f"`{expression}` continues after its end"
    accepted = [each for each in alternatives if each <= set(ACCEPTED)]
    if not accepted:
        raise ValueError(f"none of `{', '.join(ACCEPTED)}` is enough for `{expression}`")
    return min(accepted, key=lambda each: sorted(map(ACCEPTED.index, each), reverse=True))


def _alternatives(words: list[str]) -> Iterator[frozenset[str]]:
    """What OR separates; takes its words off the list."""
    yield from _all_of(words)
    while words and words[0] == "OR":
        del words[0]
        yield from _all_of(words)


def _all_of(words: list[str]) -> list[frozenset[str]]:
    """What AND joins."""
    found = _one(words)
    while words and words[0] == "AND":
        del words[0]
        others = _one(words)
        found = [each | other for each in found for other in others]
    return found


def _one(words: list[str]) -> list[frozenset[str]]:
    word = words.pop(0)
    if word == "(":
        found = list(_alternatives(words))
        assert words.pop(0) == ")", "a parenthesis is open"
        return found
    if words and words[0] == "WITH":
        word = f"{word} WITH {words[1]}"
        del words[:2]
    return [frozenset([word])]


def crates() -> list[dict[str, Any]]:
    """The crates of others that are linked into the library, by name and version."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", TARGET]
    known = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    packages = {package["id"]: package for package in known["packages"]}
    nodes = {node["id"]: node for node in known["resolve"]["nodes"]}
    pending = [key for key, package in packages.items() if package["name"] == LIBRARY]
    reached = set(pending)
    while pending:
        for dependency in nodes[pending.pop()]["deps"]:
            # Of the kinds, none is the one of what is linked: others are `build` and `dev`.
            is_linked = any(kind["kind"] is None for kind in dependency["dep_kinds"])
            is_macro = any("proc-macro" in target["kind"] for target in packages[dependency["pkg"]]["targets"])
            if is_linked and not is_macro and dependency["pkg"] not in reached:
                reached.add(dependency["pkg"])
                pending.append(dependency["pkg"])
    found = (packages[key] for key in reached if packages[key]["source"] is not None)
    return sorted(found, key=lambda package: (package["name"], package["version"]))


def notices() -> str:
    """The text of the page."""
    parts = [_HEAD]
    texts: dict[str, list[str]] = {}
    for package in crates():
        title = f"{package['name']} {package['version']}"
        try:
            licenses = chosen(package["license"] or "none")
        except ValueError as error:
            raise ValueError(f"{title}: {error}") from error
        parts.append(f"{title}: {' and '.join(sorted(licenses))} ({package['repository'] or 'no repository'})\n")
        folder = Path(package["manifest_path"]).parent
        for text in _texts(folder, licenses):
            texts.setdefault(text, []).append(title)
        if licenses != {"Apache-2.0"} and not any(title in titles for titles in texts.values()):
            raise ValueError(f"{title}: its package has no text of {licenses}")
    for text, titles in texts.items():
        parts.append(f"\n{'-' * 80}\n{', '.join(titles)}\n{'-' * 80}\n\n{text}\n")
    return "".join(parts)


def _texts(folder: Path, licenses: frozenset[str]) -> Iterator[str]:
    """The texts that go with a crate: those of its licenses, but the one that is OpenSMD's own, and its notices."""
    wanted = re.compile(r"(?i)licen[cs]e|copying|notice")
    files = sorted(path for path in folder.iterdir() if path.is_file() and wanted.match(path.name))
    others = {each.split("-")[0].split()[0].lower() for each in licenses} - {"apache"}
    for path in files:
        name = path.name.lower()
        is_named = any(other in name for other in others)
        is_only = others and not any(word in name for word in ("apache", "mit", "bsd", "zlib", "unicode", "unlicense"))
        if name.startswith("notice") or is_named or is_only:
            lines = (line.rstrip() for line in path.read_text(errors="replace").strip().splitlines())
            yield "\n".join(lines)


def main() -> int:
    """Writes or compares the page; the exit code is 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args()
    try:
        text = notices()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if not options.check:
        PAGE.write_text(text)
    elif not PAGE.is_file() or PAGE.read_text() != text:
        print(f"{PAGE.name} is not current: run {Path(__file__).relative_to(ROOT)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
