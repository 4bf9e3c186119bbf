"""Explain that nothing is published at a path: a mistyped name, or a level too high or too low."""

from __future__ import annotations

from pathlib import Path

from exporter.errors import ExportError, NotUpdatable
from exporter.files import nearest
from exporter.local_paths import quoted
from exporter.publish.versions import newest_version


def nothing_published(model: Path) -> NotUpdatable:
    """The error for a model base path without a version; its hint names the model that was probably meant."""
    what = f"nothing is published under {model}" if model.exists() else f"there is no model {model}"
    if found := likely_model(model):
        return NotUpdatable(what, hint=f"did you mean {quoted(found)}?")
    return NotUpdatable(what)


def likely_model(model: Path) -> Path | None:
    """The model base path that is nearest to one under which nothing is published."""
    place = model if model.exists() else nearest(model)
    if place is None:
        return None
    try:
        within = sorted(place.iterdir()) if place.is_dir() else []
        for found in (place, place.parent, *within):
            if found != model and _is_model(found):
                return found
    except (OSError, ExportError):
        return None
    return place if place != model else None


def _is_model(path: Path) -> bool:
    return path.is_dir() and newest_version(path) is not None
