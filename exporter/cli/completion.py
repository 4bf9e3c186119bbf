"""What the shell offers behind an option: positions of a published model. Paths are left to the shell.

Nothing is asked over a network, and an error is no completion.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from exporter.storage.url import Url


def positions(context: typer.Context, incomplete: str) -> list[str]:
    """The positions, or plain versions, of the model that was typed."""
    words = context.args  # an option without its value ends Click's parsing: what comes before is left
    model = context.params.get("model") or next((word for word in words if not word.startswith("-")), None)
    return _starting(incomplete, _positions_of(model))


def states(incomplete: str) -> list[str]:
    """The positions of `MODEL@`, whole."""
    model, at, position = incomplete.rpartition("@")
    return [f"{model}@{each}" for each in _starting(position, _positions_of(model))] if at else []


def _starting(incomplete: str, found: list[int]) -> list[str]:
    return [text for text in map(str, found) if text.startswith(incomplete)]


def _positions_of(model: Any) -> list[int]:
    if not model or Url.parse(str(model)) is not None:
        return []
    with suppress(Exception):
        from exporter.publish.timeline import read_timeline

        return sorted({event.position for event in read_timeline(Path(model)).events}, reverse=True)
    return []
