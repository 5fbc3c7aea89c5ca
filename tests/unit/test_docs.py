"""README.md, CONTRIBUTING.md and docs/: line lengths, sizes, links, and statements that follow from the code."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MOST_CHARACTERS = 100
#: Pages that are generated from texts in the code, where other rules hold.
GENERATED = ("docs/reference/environment.md", "docs/reference/errors.md", "docs/reference/smdrun.md")


def pages():
    """Every Markdown file that is tracked or would be added by git, except the changelog."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in sorted(set(names)) if name != "CHANGELOG.md" and (ROOT / name).is_file()]


def prose(text):
    """The lines outside of tables and code blocks, with their numbers."""
    is_fenced = is_indented = is_list = False
    was_blank = True
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip().startswith("```"):
            is_fenced = not is_fenced
            continue
        if line.strip():
            is_list = bool(re.match(r"\s*([-*]|\d+\.) ", line)) or (is_list and (line.startswith(" ") or not was_blank))
            is_indented = line.startswith("    ") and not is_list and (was_blank or is_indented)
        was_blank = not line.strip()
        if not (is_fenced or is_indented or line.lstrip().startswith("|")):
            yield number, line


def anchors(path):
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#{1,6} (.*)$", path.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each)) for each in headings]
    return {each.strip().lower().replace(" ", "-") for each in plain}


def test_the_first_screen_of_the_readme_names_the_two_commands():
    screen = (ROOT / "README.md").read_text().splitlines()[:24]
    for command in ("make demo", "make test", "pip install ."):
        assert any(line.startswith(f"{command} ") for line in screen), command


def test_lines_are_short():
    long = [
        f"{path.relative_to(ROOT)}:{number}: {len(line)}"
        for path in pages()
        if str(path.relative_to(ROOT)) not in GENERATED
        for number, line in prose(path.read_text())
        # A long line without spaces is a link, which cannot be wrapped.
        if len(line) > MOST_CHARACTERS and " " in line.strip()
    ]
    assert long == []


def test_pages_are_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80
    assert (ROOT / "ARCHITECTURE.md").stat().st_size <= 12 * 1024
    assert len((DOCS / "performance.md").read_text().splitlines()) <= 150


def test_relative_links_lead_somewhere():
    broken = []
    for path in [*pages(), ROOT / "CHANGELOG.md"]:
        text = re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert broken == []


def test_every_page_is_in_the_navigation():
    navigation = re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def load(path):
    """Loads a script as a module."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_plots_show_the_figures_of_the_page():
    benches = load(ROOT / "benches" / "plots.py")
    page = (DOCS / "performance.md").read_text()
    for plot in benches.plots():
        file = benches.PLOTS / plot["file"]
        assert file.read_text() == benches.draw(plot), f"{file.relative_to(ROOT)}: run `make generated`"
        section = re.search(rf"^## {plot['section']}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)[1]
        table = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", section, re.M)
        ]
        columns = [
            place for name in dict.fromkeys(plot["columns"]) for place, head in enumerate(table[0]) if head == name
        ]
        found = {tuple(row[: len(plot["rows"][0]["cells"])]): [row[column] for column in columns] for row in table[2:]}
        plotted = {tuple(row["cells"]): row["values"] for row in plot["rows"]}
        shown = {cells: [float(value.split()[0]) for value in values] for cells, values in found.items()}
        assert plotted == shown


def test_generated_pages_are_current():
    generate = load(DOCS / "generate.py")
    for name, page in generate.PAGES.items():
        assert (DOCS / "reference" / name).read_text() == page(), f"docs/reference/{name}: run `make generated`"


def test_the_configuration_has_every_key_and_its_default():
    core = pytest.importorskip("smdistributed._core")
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \|", (DOCS / "reference" / "smp-config.md").read_text(), re.MULTILINE)
    assert {name: json.loads(default.strip("`")) for name, default in rows} == json.loads(core.parameter_defaults())


def test_the_architecture_has_every_thread():
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("## Threads")[2]
    found = set()
    for pattern, folder in (("*.rs", "rust-core/src"), ("*.py", "python")):
        for path in (ROOT / folder).rglob(pattern):
            text = path.read_text()
            found |= set(re.findall(r'(?:\.name\(|spawn\(|name=)(?:format!\()?"((?:smd|smp)-[a-z-]+)', text))
    assert len(found) > 15
    assert [name for name in sorted(found) if f"`{name}" not in table] == []
