"""Files of options, JSON or TOML: for one command, or for several models with shared options.

    keep = 3                           # of all models
    [models.ranker]
    ckpt-dir = "train/ranker"
    out = "models/ranker"

`--config FILE` uses a table of options, or exports all models; `--config FILE#ranker` uses one model's
options, with the shared ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from exporter.errors import UsageError, nearest
from exporter.storage.files import read_regular
from exporter.storage.local_paths import quoted

_MAX_BYTES = 1 << 20
_MOST_DOTS = 64
_MODELS = "models"
_SEVERAL = 'write [models.NAME], and below it ckpt-dir = "..." and out = "..."'


def options_in(path: Path) -> Mapping[str, Any]:
    """Return the options in a JSON or TOML file, by name; for `FILE#NAME`, a model's and the shared options.

    Empty if the file has models and none is named: each is exported by itself, see `models_in`.

    Raises:
        UsageError: it cannot be read, is not a file of options, or has no such model.
        LfsPointer: it is a Git LFS pointer.
    """
    file, name = _parted(str(path))
    found = _read(Path(file))
    models = _models(Path(file), found)
    if not name:
        if models:
            return {}
        if hint := _meant(found):
            raise UsageError(f"{file}: the option 'model' is a table, expected a name", hint=hint)
        return found
    if name not in models:
        raise UsageError(
            f"{file} has no model {name!r}",
            cause=f"it has {', '.join(models) or 'none'}",
            hint=_meant(found)
            or (f"name one of them: {quoted(f'{file}#{next(iter(models))}')}" if models else _SEVERAL),
        )
    return _with_shared(found, models[name])


def _with_shared(found: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key != _MODELS} | {**own}


def _parted(text: str) -> tuple[str, str]:
    """Split `FILE#NAME` into the file's path and the model's name, "" without one.

    The path may contain a `#`, too. The longest part that is an existing file counts as the path.
    """
    parts = text.split("#")
    ends = [end for end in range(1, len(parts) + 1) if Path("#".join(parts[:end])).is_file()]
    end = ends[-1] if ends else 1
    return "#".join(parts[:end]), "#".join(parts[end:])


def models_in(path: Path) -> dict[str, dict[str, Any]]:
    """Return the options of each model in a file, with the shared ones; by model, in the file's order.

    Empty if the file has no models, or if `path` names one of them: `FILE#NAME`.

    Raises:
        UsageError: it cannot be read, or is not a file of options.
        LfsPointer: it is a Git LFS pointer.
    """
    file, name = _parted(str(path))
    if name:
        return {}
    found = _read(Path(file))
    return {name: _with_shared(found, own) for name, own in _models(path, found).items()}


def _meant(found: Mapping[str, Any]) -> str:
    """Return the hint for a file's content with `[model.NAME]` in place of `[models.NAME]`; else ""."""
    named = found.get("model")
    return f"write [{_MODELS}.{next(iter(named), 'NAME')}]: with an s" if isinstance(named, dict) else ""


def _models(path: Path, found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    models = found.get(_MODELS, {})
    if not isinstance(models, dict) or not all(isinstance(one, dict) for one in models.values()):
        raise UsageError(f"{path}: 'models' is not a table of tables", hint="write [models.NAME]")
    return models


def _read(path: Path) -> Mapping[str, Any]:
    is_toml = path.suffix == ".toml"
    form = 'write {"model": "my_model.py:serving", "keep": 3, "input": {"x": "X:0"}} into a file'
    form = 'write model = "my_model.py:serving" and keep = 3 into a file, a line each' if is_toml else form
    try:
        content = read_regular(path, _MAX_BYTES)
        # A mark (BOM) of a Windows editor: TOML's libraries refuse it, `json.loads` skips it in bytes.
        found = _toml(content.decode("utf-8-sig")) if is_toml else json.loads(content)
    except FileNotFoundError:
        beside = (each.name for each in path.parent.glob(f"*{path.suffix}"))
        close = nearest(path.name, beside)
        hint = f"did you mean {quoted(path.with_name(close))}?" if close else form
        raise UsageError(
            f"{path} cannot be read as options", cause="there is no such file", hint=hint
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as options", cause=str(error), hint=form) from error
    if not isinstance(found, dict):
        raise UsageError(f"{path}: expected a JSON object", hint=form)
    for name in found.keys() & {"config", "options"}:  # new and old name; each model would start all again
        raise UsageError(f"{name!r} is only valid on the command line", hint=f"remove it from {path}")
    return found


def _toml(text: str) -> Any:
    # the library's time grows with the square of a key's parts
    if any(line.count(".") > _MOST_DOTS for line in text.splitlines()):
        raise ValueError(f"a line has more than {_MOST_DOTS} dots: write one value a line")
    return import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(text)
