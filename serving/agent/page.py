"""The status page: HTML made here, whole, without scripts or anything from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from serving.agent.journal import Journal
from serving.agent.recorder import PERIOD_S, Recorder
from serving.agent.view import FleetView

if TYPE_CHECKING:
    from jinja2 import Template

_EVENTS, _REASONS = 30, 12
_WIDTH, _HEIGHT = 600, 48


def page(view: Callable[[], FleetView], recorder: Recorder, journal: Journal, fresh_within_s: float) -> str:
    """The page as it is now."""
    now = view()
    return _template().render(
        view=now,
        reasons=now.why_not_ready(fresh_within_s),
        most_reasons=_REASONS,
        events=journal.last()[:_EVENTS],
        plot=lambda replica: plot(recorder.series(replica.model, replica.address)),
        seconds=seconds,
    )


def seconds(value: float | None) -> str:
    """A span of time for people: `120 ms`, `4.2 s`, `3 min`, `2 h`."""
    if value is None:
        return ""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.0f} h"


def plot(series: Sequence[float | None]) -> dict[str, object]:
    """An SVG path of the values, the newest at the right, `top` at its upper edge, gaps for None."""
    top = max([1.0, *(value for value in series if value is not None)])
    heights = [
        None if value is None else f"{_HEIGHT - 2 - (_HEIGHT - 4) * value / top:.1f}" for value in series
    ]
    commands, pen = [], "M"
    for index, height in enumerate(heights):
        if height is None:
            pen = "M"
            continue
        # A point on a level line says nothing: a fleet of hundreds is level most of the time.
        if not (pen == "L" and heights[index - 1 : index + 2] == [height] * 3):
            commands.append(f"{pen}{_WIDTH - (len(series) - 1 - index):.0f} {height}")
        pen = "L"
    return {
        "path": "".join(commands),
        "top": top,
        "width": _WIDTH,
        "height": _HEIGHT,
        "span": seconds(_WIDTH * PERIOD_S),
    }


@cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template(
        "page.html"
    )
