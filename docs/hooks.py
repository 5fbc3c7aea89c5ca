"""Hooks of MkDocs.

- Links to files outside of docs/ become the files' paths, since the site does not have these files.
- `::: horovod.*` documents what the package imports as `name as name`, since these packages have no `__all__`.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

PYTHON = Path(__file__).parents[1] / "python"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Changes a page before it is rendered."""
    markdown = re.sub(
        r"^::: (horovod\.\S+)$", lambda match: match[0] + _members(match[1]), markdown, flags=re.MULTILINE
    )
    folder = os.path.dirname(page.file.src_uri)

    def replaced(match: re.Match[str]) -> str:
        text, target = match[1], match[2].partition("#")[0]
        path = os.path.normpath(os.path.join(folder, target))
        return f"{text} (`{path[3:]}`)" if path.startswith("../") else match[0]

    return re.sub(r"\[([^\]]*)\]\((\.\./[^)\s]*)\)", replaced, markdown)


def _members(package: str) -> str:
    """The option that names a package's exports; nothing for a module."""
    source = PYTHON / package.replace(".", "/") / "__init__.py"
    if not source.is_file():
        return ""
    imports = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in imports for alias in node.names if alias.name == alias.asname}
    return f"\n    options:\n      members: [{', '.join(sorted(names))}]" if names else ""
