"""Draws the plots of docs/performance.md from the figures in ``figures.json``; ``make generated`` calls it.

A test checks that the figures equal those of the page's tables.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parent / "figures.json"
PLOTS = Path(__file__).parents[1] / "docs" / "plots"

_WIDTH, _LABELS, _VALUES = 720, 220, 70
_TOP, _BAR, _GAP = 58, 13, 12
_COLOURS = ("#2a6fbb", "#a9b4c0")


def plots() -> list[dict[str, Any]]:
    """Read the plots: title, series and rows of each."""
    return json.loads(FIGURES.read_text())


def draw(plot: dict[str, Any]) -> str:
    """Draw horizontal bars, one group for each row.

    Args:
        plot: An entry of ``figures.json``.

    Returns:
        The picture as SVG.
    """
    reference = plot.get("reference")
    largest = max(value for row in plot["rows"] for value in row["values"])
    scale = (_WIDTH - _LABELS - _VALUES) / max(largest, reference["value"] if reference else 0)
    group = _BAR * len(plot["series"]) + _GAP
    height = _TOP + group * len(plot["rows"]) + (18 if reference else 4)
    at = _LABELS + round(reference["value"] * scale, 1) if reference else 0
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="12" y="20" font-size="14" font-weight="bold">{escape(plot["title"])}</text>',
    ]
    x = 12
    for name, colour in zip(plot["series"], _COLOURS, strict=True):
        lines.append(f'<rect x="{x}" y="32" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 18}" y="42">{escape(name)}</text>')
        x += 40 + 7 * len(name)
    for number, row in enumerate(plot["rows"]):
        y = _TOP + number * group
        middle = y + _BAR * len(row["values"]) / 2 + 4
        lines.append(f'<text x="{_LABELS - 8}" y="{middle:g}" text-anchor="end">{escape(row["label"])}</text>')
        for place, (value, colour) in enumerate(zip(row["values"], _COLOURS, strict=True)):
            top, width = y + place * _BAR, round(value * scale, 1)
            lines.append(f'<rect x="{_LABELS}" y="{top}" width="{width:g}" height="{_BAR - 1}" fill="{colour}"/>')
            end = _LABELS + width
            # The number must not overlap the line of the reference.
            text = (at if at - 36 < end < at else end) + 5
            lines.append(f'<text x="{text:g}" y="{top + 10}" font-size="11">{value:g}{plot["unit"]}</text>')
    if reference:
        end = height - 16
        lines.append(f'<line x1="{at:g}" y1="{_TOP - 6}" x2="{at:g}" y2="{end}" stroke="#444" stroke-dasharray="4 3"/>')
        lines.append(f'<text x="{at:g}" y="{height - 4}" text-anchor="middle">{escape(reference["label"])}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PLOTS.mkdir(exist_ok=True)
    for each in plots():
        (PLOTS / each["file"]).write_text(draw(each))
