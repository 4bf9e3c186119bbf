"""Turn an `ExportRequest` into arguments of `export-model`, for an export in another process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from exporter.errors import UsageError
from exporter.local_paths import checkpoint_path, local_path
from exporter.options import ExportRequest, Jobs, require_exact

What = ExportRequest | Sequence[str | os.PathLike[str]]
"""What to export: a request, or the command's own arguments."""

_CKPT_DIR, _OUT, _WATCH = "--ckpt-dir", "--out", "--watch"
_NAMES = {
    "model_args": "--model-arg",
    "inputs": "--input",
    "outputs": "--output",
    "feeds": "--feed",
    "absent_keys": "--absent-key",
    "renames": "--rename",
    "casts": "--cast",
    "partition_strategies": "--partition-strategy",
}
"""Fields that are not called like their options, which are repeated for each value."""

_NOT_PASSED = ("ckpt_dir", "updates", "jobs", "again")
"""Fields that are no arguments of their own; a training that is restarted publishes no checkpoint again."""

_UPDATE_NAMES = {"digest": "--with-digest", "finite": "--require-finite"}
_JOB_NAMES = {"address": "--engine-address", "settings": "--engine-option", "directory": "--job-dir"}


class ExportArguments(Struct, frozen=True):
    """The directory whose checkpoints are exported, and all other arguments of the command."""

    ckpt_dir: Path
    rest: tuple[str, ...]

    @classmethod
    def of(cls, what: What) -> ExportArguments:
        """Take a request, or a list of arguments with `--ckpt-dir DIR`, apart.

        Raises:
            UsageError: no `--ckpt-dir` or `--out`, a `--watch`, a request that a command line cannot express,
                or that is for deltas, or one string.
        """
        if isinstance(what, ExportRequest):
            require_exact(what, 'pass arguments with "--incr": ["--ckpt-dir", "train", "--incr", ...]')
            return cls(local_path(_CKPT_DIR, what.ckpt_dir), tuple(_options(what)))
        given = [] if isinstance(what, str) else [os.fspath(argument) for argument in what]
        if _WATCH in given:
            raise UsageError(
                f"{_WATCH} never ends beside a training", hint="leave it out: each checkpoint is seen"
            )
        for at, text in enumerate(given):
            name, equals, value = text.partition("=")
            if name == _CKPT_DIR and (equals or at + 1 < len(given)):
                after = at + (1 if equals else 2)
                _check_out(given)
                place = local_path(_CKPT_DIR, value or given[at + 1])
                return cls(place, (*given[:at], *given[after:]))
        raise UsageError(
            f"expected an ExportRequest, or arguments with {_CKPT_DIR} DIR; found {what!r}",
            hint='["--ckpt-dir", "train", "--model", "my_model.py:serving", "--out", "models/ranker"]',
        )

    def at(self, checkpoint: Path) -> tuple[str, ...]:
        """The arguments that export one checkpoint."""
        return (_CKPT_DIR, str(checkpoint), *self.rest)


def _check_out(given: Sequence[str]) -> None:
    """Find out before the training that no model is named, not when its first checkpoint is there."""
    places = [
        text.partition("=")[2] or following
        for text, following in pairwise((*given, ""))
        if text.partition("=")[0] == _OUT
    ]
    if not places:
        raise UsageError(f"{_OUT} is missing", hint='name the model to publish: "--out", "models/ranker"')
    for place in places:
        checkpoint_path(_OUT, place)  # or a model's URL


def _options(request: ExportRequest) -> Iterator[str]:
    if request.model is not None and not isinstance(request.model, str):
        raise UsageError(
            "an export in a process of its own needs the builder's name, found a function",
            hint='model="my_model.py:serving", or "package.module:serving"',
        )
    yield from _fields(request, _NAMES, _NOT_PASSED)
    if request.updates is not None:
        yield "--updatable"
        yield from _fields(request.updates, _UPDATE_NAMES)
    yield from _fields(request.jobs, _JOB_NAMES, ("task_bytes",))
    if request.jobs.task_bytes != Jobs().task_bytes:
        yield f"--task-size={request.jobs.task_bytes}B"


def _fields(struct: Struct, names: Mapping[str, str], left_out: Sequence[str] = ()) -> Iterator[str]:
    """The fields that are not as by default; `names` are of those that are not called like options."""
    for field in fields(struct):
        value = getattr(struct, field.name)
        if field.name not in left_out and value != _default(field):
            yield from _option(names.get(field.name) or f"--{field.name.replace('_', '-')}", value)


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not NODEFAULT else field.default


def _option(option: str, value: Any) -> Iterator[str]:
    """One option as `--name=value`, so that a value may begin with a dash."""
    match value:
        case True:
            yield option
        case Mapping():
            yield from (f"{option}={name}={text}" for name, text in value.items())
        case tuple():
            yield from (f"{option}={text}" for text in value)
        case _:
            yield f"{option}={value}"
