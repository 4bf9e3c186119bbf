"""The last hour of a model as lines and bars: paths for SVGs of the status page, drawn without a script.

Published positions, rows and bytes come from the published model, so that an agent that has just started has
them; served positions and their delay come from the agent's own samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import TypeAlias

from msgspec import Struct

from exporter.publish.model import Published

SPAN_S = 3600.0
_LEAST_SPAN_S = 60.0
"""The shortest span that is shown, when an agent has just started."""
WIDTH, HEIGHT = 720, 56
_EDGE = 3
_LEAST_BAR = 1.5

Points: TypeAlias = Sequence[tuple[float, float | None]]
"""Values by x; None where there is none."""


class Hour(Struct, frozen=True):
    """The lowest and highest served position at one time, and the age of the oldest missing publication.

    None where a value was unknown.
    """

    at: datetime
    lowest: int | None
    highest: int | None
    stale_s: float | None


class Mark(Struct, frozen=True):
    """An event: `kind` is `rollback` or `swap`, `x` its time in pixels from the left, `text` its label."""

    kind: str
    x: float
    text: str


class Panel(Struct, frozen=True):
    """A part of the chart: `lines` are pairs of CSS class and SVG path.

    `least` and `most` are the values at its lower and upper edge, as texts.
    """

    title: str
    lines: tuple[tuple[str, str], ...]
    least: str
    most: str


class Chart(Struct, frozen=True):
    """The panels from top to bottom, the marks in all of them, and the time that they span."""

    panels: tuple[Panel, ...]
    marks: tuple[Mark, ...]
    span_s: float = SPAN_S
    width: int = WIDTH
    height: int = HEIGHT


def chart(
    now: datetime,
    published: Sequence[Published],
    samples: Sequence[Hour],
    swaps: Iterable[tuple[datetime, str]],
    seconds: Callable[[float], str],
    size: Callable[[float], str],
) -> Chart | None:
    """Return the chart of the hour before `now`, or of the known part of it; None if nothing is known.

    Args: now: the time at its right edge. published: all publications, by time. samples: the served
    positions, by time. swaps: the times at which a replica began to serve another version, each with a text.
    seconds: formats a duration. size: formats a number of bytes.
    """
    began = now - timedelta(seconds=SPAN_S)
    recent = [one for one in published if one.created >= began]
    taken = [one for one in samples if one.at >= began]
    if not recent and not taken:
        return None

    before = max((one.position for one in published if one.created < began), default=None)
    span_s = SPAN_S
    if before is None:
        first = min([one.created for one in recent] + [one.at for one in taken])
        span_s = max(_LEAST_SPAN_S, (now - first).total_seconds())
        began = now - timedelta(seconds=span_s)

    def x(at: datetime) -> float:
        return round(WIDTH * max(0.0, min(1.0, (at - began).total_seconds() / span_s)), 1)

    rolled = [one for one in recent if one.is_rollback]
    marks = [Mark("rollback", x(one.created), f"rollback at {one.position}") for one in rolled]
    marks += [Mark("swap", x(at), text) for at, text in swaps if at >= began]
    return Chart(tuple(_panels(x, before, recent, taken, seconds, size)), tuple(marks), span_s)


def _panels(
    x: Callable[[datetime], float],
    before: int | None,
    recent: Sequence[Published],
    taken: Sequence[Hour],
    seconds: Callable[[float], str],
    size: Callable[[float], str],
) -> Iterator[Panel]:
    """Yield the panels: positions, delay, and, if known, rows and bytes of deltas.

    `x` gives the place of a time, in pixels from the left; `before` is the position published at the left
    edge, None if there is none. `recent` and `taken` are the publications and samples to show, by time;
    `seconds` and `size` format a duration and a number of bytes.
    """
    steps = [
        *([] if before is None else [(0.0, before)]),
        *((x(one.created), one.position) for one in recent),
    ]
    lowest, highest = [(x(one.at), one.lowest) for one in taken], [(x(one.at), one.highest) for one in taken]
    yield _positions([*steps, *((WIDTH, at) for _, at in steps[-1:])], lowest, highest)
    yield _behind([(x(one.at), one.stale_s) for one in taken], seconds)
    rows = [(x(one.created), one.rows) for one in recent]
    yield from _sizes("Rows a delta", rows, lambda count: f"{count:,.0f}")
    yield from _sizes("Bytes a delta", [(x(one.created), one.bytes_) for one in recent], size)


def _positions(published: Points, lowest: Points, highest: Points) -> Panel:
    known = [value for _, value in (*published, *lowest, *highest) if value is not None]
    least, most = min(known, default=0.0), max(known, default=0.0)
    lines = (
        ("published", line(published, least, most, is_step=True)),
        ("served", line(highest, least, most)),
        ("served", line(lowest, least, most)),
    )
    return Panel("Position", lines, f"{least:.0f}", f"{most:.0f}")


def _behind(stale: Points, seconds: Callable[[float], str]) -> Panel:
    worst = max((value for _, value in stale if value is not None), default=0.0)
    most = max(1.0, worst)
    return Panel("Behind", (("stale", line(stale, 0.0, most)),), "0 s", seconds(most))


def _sizes(title: str, found: Points, write: Callable[[float], str]) -> Iterator[Panel]:
    heights = [(at, value) for at, value in found if value is not None]
    if heights:
        top = float(max(value for _, value in heights))
        yield Panel(title, (("bar", _bars(heights, top)),), write(0), write(top))


def line(
    points: Points,
    least: float,
    most: float,
    *,
    height: int = HEIGHT,
    is_step: bool = False,
) -> str:
    """Return the SVG path of a line through (x, value), in pixels; `least` and `most` are at its edges.

    `height` is that of the picture; the edges are 3 pixels inside it. A value of None makes a gap. Without
    values the path is empty. With `is_step` each value lasts until the next.
    Points inside level lines are left out: most points are, and a page has hundreds of lines.
    """

    def y(value: float) -> float:
        part = 0.5 if most == least else (value - least) / (most - least)
        return round(height - _EDGE - (height - 2 * _EDGE) * part, 1)

    found, pen, before = [], "M", None
    for index, (at, value) in enumerate(points):
        if value is None:
            pen, before = "M", None
            continue
        now = y(value)
        if is_step and before is not None and now != before:
            found.append(f"L{at:g} {before:g}")
        following = points[index + 1][1] if index + 1 < len(points) else None
        is_level = before == now and following is not None and y(following) == now
        if pen == "M" or not is_level:
            found.append(f"{pen}{at:g} {now:g}")
        pen, before = "L", now
    return "".join(found)


def _bars(points: Sequence[tuple[float, float]], top: float) -> str:
    """Return the SVG path of a bar for each (x, value) of `points`, from the lower edge.

    A bar of `top` has the full height; a bar of a small value is still visible. If `top` is 0, all bars are
    as low as that.
    """
    full = HEIGHT - _EDGE
    heights = (
        (at, max(_LEAST_BAR, (full - _EDGE) * value / top) if top else _LEAST_BAR) for at, value in points
    )
    return "".join(f"M{at:g} {full}V{full - height:.1f}" for at, height in heights)
