"""Values of options that are not typed: from environment variables, and from a file of options.

An option's variable is the program's name and the option's, `EXPORT_MODEL_CKPT_DIR`; that of a subcommand has
the subcommand between them, `EXPORT_MODEL_MERGE_KEEP`. `--options FILE` names a JSON object of options. What
is typed goes first, then variables, then the file. Such a value counts like one that is typed, with one
exception: where it would have no effect, it is left out instead of refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import typer
from msgspec import Struct

from exporter.errors import UsageError, nearest
from exporter.storage.files import read_regular
from exporter.storage.local_paths import without_secrets

OPTIONS_FILE = "--options"
_MAX_BYTES = 1 << 20
_NEARLY = 0.7
"""Kubernetes sets EXPORT_MODEL_PORT where there is a service `export-model`: less alike is no mistake."""
_BadParameter: type[Any] = typer.BadParameter


class Taken(Struct, frozen=True):
    """An option that was not typed."""

    option: str
    """Its name."""
    value: str
    """Its value, as it would be typed."""
    source: str
    """The environment variable or the file that it comes from."""


TAKEN: ContextVar[tuple[Taken, ...]] = ContextVar("TAKEN", default=())
"""The options of the command that were not typed, and have an effect."""
MISSPELT: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("MISSPELT", default=())
"""Variables that nothing reads, each with the one that was probably meant."""


def untyped(context: Any, given: dict[str, Any]) -> dict[str, Taken]:
    """The options that come from elsewhere, by their parameter; `given` gets the values of the file.

    Raises:
        UsageError: the file cannot be used.
    """
    by_name = {max(one.opts, key=len): one for one in context.command.params}
    found = {}
    for name, one in by_name.items():
        if (variable := variable_of(context, one)) is not None:
            found[one.name] = Taken(name, without_secrets(os.environ[variable]), variable)
    file = by_name.get(OPTIONS_FILE)
    if file is not None and (path := given.get(file.name)) is not None:
        for name, value in _read(path).items():
            one = by_name.get(option := f"--{name.lstrip('-').replace('_', '-')}")
            if one is None or one is file:
                close = nearest(option, by_name)
                hint = (
                    f"did you mean {close.lstrip('-')!r}?" if close else "export-model --help-all lists all"
                )
                raise UsageError(f"{path} has an option {name!r}, which there is not", hint=hint)
            if _source(context, one) == "DEFAULT":
                _require_fit(path, name, value, one)
                texts = list(_texts(value))
                typed = _typed(path, context, one, texts if one.multiple else texts[0])
                given[one.name] = list(typed) if one.multiple else typed
                found[one.name] = Taken(option, without_secrets(" ".join(map(str, texts))), str(path))
    return found


def variable_of(context: Any, parameter: Any) -> str | None:
    """The environment variable that an option's value comes from; None if it does not come from one."""
    is_one = _source(context, parameter) == "ENVIRONMENT"
    return f"{context.auto_envvar_prefix}_{parameter.name.upper()}" if is_one else None


def _typed(path: Path, context: Any, parameter: Any, text: Any) -> Any:
    """A value of a file of options, as if it had been typed; an error knows the file."""
    try:
        return parameter.type_cast_value(context, text)
    except _BadParameter as error:
        error.file_of_options = str(path)
        raise


def misspelt(context: Any) -> Iterator[tuple[str, str]]:
    """Environment variables that are nearly those of options, each with the one that was probably meant."""
    root = context.find_root()
    prefix = f"{root.auto_envvar_prefix}_"
    known = {one.name.upper() for one in root.command.params}
    for name, command in root.command.commands.items():
        known.update(f"{name}_{one.name}".upper() for one in command.params)
    for variable in sorted(os.environ):
        name = variable.removeprefix(prefix)
        if name != variable and name not in known and (close := nearest(name, known, _NEARLY)):
            yield variable, f"{prefix}{close}"


def _require_fit(path: Path, name: str, value: Any, parameter: Any) -> None:
    """Refuse what would be taken for another value: `True` is 1, and of a list the first would count."""
    if value is None or (isinstance(value, bool) and not parameter.is_flag):
        expected = "true or false" if parameter.is_flag else "a text or a number"
    elif isinstance(value, list | dict) and not parameter.multiple:
        expected = "one value"
    else:
        return
    raise UsageError(
        f"{path}: {name!r} is {json.dumps(value)[:80]}: expected {expected}",
        hint=f"write one, or leave {name!r} out of the file",
    )


def _source(context: Any, parameter: Any) -> str:
    return str(getattr(context.get_parameter_source(parameter.name), "name", ""))


def _read(path: Path) -> Mapping[str, Any]:
    form = f'write {{"model": "my_model.py:serving", "keep": 3, "input": {{"x": "X:0"}}}} into {path}'
    try:
        found = json.loads(read_regular(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{OPTIONS_FILE} {path} cannot be read", cause=str(error), hint=form) from error
    if not isinstance(found, dict):
        raise UsageError(f"{OPTIONS_FILE} {path}: expected a JSON object", hint=form)
    return found


def _texts(value: Any) -> Iterator[Any]:
    """What would be typed: a flag stays one, names and values become `NAME=VALUE`."""
    if isinstance(value, dict):
        yield from (f"{name}={each}" for name, each in value.items())
    elif isinstance(value, list):
        yield from map(str, value)
    else:
        yield value if isinstance(value, bool) else str(value)
