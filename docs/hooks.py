"""Hooks of MkDocs: links to files outside of docs/ become their paths, since the site does not have these files."""

from __future__ import annotations

import os
import re
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replaces the links of a page that lead out of docs/."""
    folder = os.path.dirname(page.file.src_uri)

    def replaced(match: re.Match[str]) -> str:
        text, target = match[1], match[2].partition("#")[0]
        path = os.path.normpath(os.path.join(folder, target))
        return f"{text} (`{path[3:]}`)" if path.startswith("../") else match[0]

    return re.sub(r"\[([^\]]*)\]\((\.\./[^)\s]*)\)", replaced, markdown)
