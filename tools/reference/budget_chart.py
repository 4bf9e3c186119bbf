"""The chart of docs/delta-budgets.md, made of the benchmark's figures: bytes against the gain that is kept.

`docs/assets/delta-budgets.json` has what the jobs of `make bench ONLY=budget` returned, by stream.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

FIGURES = Path("docs/assets/delta-budgets.json")
_COLOURS = {"synthetic": "var(--a)", "flights": "var(--b)", "films": "var(--c)"}
_STYLE = (
    "<style>svg { --a: #0969da; --b: #bc4c00; --c: #1a7f37; --d: #6e7781 } "
    "@media (prefers-color-scheme: dark) { svg { "
    "--a: #58a6ff; --b: #f0883e; --c: #3fb950; --d: #9198a1 } }</style>"
)
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 620, 20, 300
_MOST = 400.0
_TITLE = "What is kept of the gain of full freshness, by how many times fewer bytes"
_DESCRIPTION = (
    "Three streams of events. With ten times fewer bytes, as rows of 8 bits, 97 to 98 percent is kept; with "
    "350 times fewer, 52 to 71 percent. Rows that chance chooses keep much less."
)


def chart(figures: dict[str, Any]) -> str:
    """The SVG: a line for each stream and type of rows, and one for rows that chance chooses."""
    parts = [*_axes()]
    for number, (name, found) in enumerate(figures.items()):
        colour = _COLOURS[name]
        for dtype, width in (("float32", ""), ("int8", ' stroke-width="2.5"')):
            points = [(one["fewer"], one["kept"]) for one in found["ranked"] if one["dtype"] == dtype]
            parts += _line(points, colour, width)
        points = [(one["fewer"], one["kept"]) for one in found["random"]]
        parts += _line([(1.0, 1.0), *points[::-1]], colour, ' stroke-dasharray="3 4"')
        y = _TOP + 8 + 18 * number
        parts.append(f'<text x="{_RIGHT + 14}" y="{y + 4}" fill="{colour}">{name}</text>')
    for number, (text, style) in enumerate(
        (
            ("rows of 8 bits", 'stroke-width="2.5"'),
            ("rows of float32", ""),
            ("by chance", 'stroke-dasharray="3 4"'),
        )
    ):
        y = _TOP + 90 + 20 * number
        parts.append(
            f'<path d="M{_RIGHT + 14} {y} h26" stroke="var(--d)" fill="none" {style}/>'
            f'<text x="{_RIGHT + 46}" y="{y + 4}" fill="var(--d)">{text}</text>'
        )
    body = "\n".join(parts)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 350" font-family="sans-serif" '
        'font-size="13" role="img" aria-labelledby="title desc">\n'
        f'<title id="title">{_TITLE}</title>\n<desc id="desc">{_DESCRIPTION}</desc>\n'
        f"{_STYLE}\n{body}\n</svg>\n"
    )


def _axes() -> Iterator[str]:
    for kept in (0, 0.25, 0.5, 0.75, 0.95, 1):
        y = _y(kept)
        yield f'<path d="M{_LEFT} {y:.1f} H{_RIGHT}" stroke="#8c959f" stroke-opacity="0.35"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="var(--d)">{kept:.0%}</text>'
    for fewer in (1, 3, 10, 30, 100, 300):
        x = _x(fewer)
        yield f'<path d="M{x:.1f} {_TOP} V{_BOTTOM}" stroke="#8c959f" stroke-opacity="0.35"/>'
        yield f'<text x="{x:.1f}" y="{_BOTTOM + 18}" text-anchor="middle" fill="var(--d)">{fewer} x</text>'
    place = f'x="{(_LEFT + _RIGHT) / 2}" y="{_BOTTOM + 40}" text-anchor="middle"'
    yield f'<text {place} fill="var(--d)">times fewer bytes</text>'


def _line(points: Iterable[tuple[float, float]], colour: str, style: str) -> Iterator[str]:
    places = " ".join(f"{_x(fewer):.1f},{_y(max(0.0, kept)):.1f}" for fewer, kept in sorted(points))
    yield f'<polyline points="{places}" fill="none" stroke="{colour}"{style}/>'


def _x(fewer: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * math.log(max(1.0, min(fewer, _MOST))) / math.log(_MOST)


def _y(kept: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * kept


def made() -> str:
    """The chart of the figures that are kept in the repository."""
    return chart(json.loads((Path(__file__).parents[2] / FIGURES).read_text()))
