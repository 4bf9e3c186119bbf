"""Parameters of a command that stand together as one struct.

    class NameFlags(Struct, frozen=True):
        renames: Annotated[tuple[str, ...], Option("...", name="--rename", metavar="PATTERN=NAME")] = ()

    @app.command()
    @with_structs
    def export(names: NameFlags) -> None:

Typer reads the signature that `with_structs` gives a function: the struct's options take its place.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import UsageError
from exporter.local_paths import local_path
from exporter.options import HEADINGS, DeclaredOption, declared, require_company


def with_structs(function: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of its structs as parameters, by heading.

    A default of the command's own has other values than the struct's.

    Raises (the command that is returned):
        UsageError: an option is given without one that it goes with.
    """
    parameters: list[inspect.Parameter] = []
    structs: dict[str, tuple[Struct, list[str]]] = {}
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        if isinstance(hint, type) and issubclass(hint, Struct):
            values = hint() if parameter.default is parameter.empty else parameter.default
            own = _typers(values)
            structs[name] = values, [field.name for field in own]
            parameters += [*(_parameter(one, one.value(values)) for one in declared(hint)), *own]
        else:
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
    parameters.sort(key=_place)

    def command(**given: Any) -> None:
        for name, (values, fields) in structs.items():
            typed = {one.path: _value(one, given.pop(_field(one))) for one in declared(type(values))}
            given[name] = _filled(values, typed | {(field,): given.pop(field) for field in fields})
        require_company([given[name] for name in structs])
        function(**given)

    command.__name__, command.__doc__ = function.__name__, help_of(function.__doc__ or "")
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # inspect reads it
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _place(parameter: inspect.Parameter) -> int:
    """Where its heading stands; others, and parameters without one, stay in their order behind those."""
    headings = (
        getattr(one, "rich_help_panel", None) for one in getattr(parameter.annotation, "__metadata__", ())
    )
    return next((HEADINGS.index(one) for one in headings if one in HEADINGS), len(HEADINGS))


def _parameter(one: DeclaredOption, default: Any) -> inspect.Parameter:
    """A declared option as Typer takes it; what is parsed here is None unless it is typed."""
    option, parser = one.option, None
    kind: Any = option.typed or one.type
    if option.parse is not None:
        parser = partial(option.parse, one.name)
    elif Path in get_args(one.type) and get_origin(one.type) is not tuple:
        parser = partial(local_path, one.name)
    shown: Any = option.default or True
    if get_origin(kind) is tuple or _is_mapping(kind):
        kind, default = list[str], [*map(str, default)]
    elif parser is not None or default in ("", math.inf):
        kind, default = kind | None, None
    annotation = Annotated[
        kind,
        typer.Option(
            one.name,
            help=option.help,
            rich_help_panel=option.heading,
            metavar=option.metavar,
            min=option.least,
            parser=None if parser is None else _named(parser),
            show_default=shown,
        ),
    ]
    return inspect.Parameter(
        _field(one), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _named(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser with a name of its own, which Click asks for."""

    def value(text: str) -> Any:
        return parse(text)

    return value


def _field(one: DeclaredOption) -> str:
    """What the parameter is called: `model_arg` for `--model-arg`."""
    return one.name.lstrip("-").replace("-", "_")


def _is_mapping(kind: Any) -> bool:
    return isinstance(origin := get_origin(kind), type) and issubclass(origin, Mapping)


def _typers(values: Struct) -> list[inspect.Parameter]:
    """The fields of a struct that are annotated as Typer's own options, with its values as their defaults."""
    hints = get_type_hints(type(values), include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(field, kind, default=getattr(values, field), annotation=hints[field])
        for field in values.__struct_fields__
        if any(
            isinstance(each, typer.models.OptionInfo) for each in getattr(hints[field], "__metadata__", ())
        )
    ]


def _filled(values: Struct, typed: dict[tuple[str, ...], Any]) -> Struct:
    """The struct with what was typed, by the path to each field; what is None was not."""
    changes: dict[str, Any] = {}
    parts: dict[str, dict[tuple[str, ...], Any]] = {}
    for (name, *inner), value in typed.items():
        if inner:
            parts.setdefault(name, {})[tuple(inner)] = value
        elif value is not None:
            changes[name] = value
    changes |= {name: _filled(getattr(values, name), part) for name, part in parts.items()}
    return replace(values, **changes)


def _value(one: DeclaredOption, typed: Any) -> Any:
    """What is typed as the field's value."""
    if _is_mapping(one.type):
        return pairs(one.name, typed)
    if get_origin(one.type) is tuple:
        return tuple(map(get_args(one.type)[0], typed))
    return typed


def pairs(option: str, values: Iterable[str]) -> dict[str, str]:
    """Repeated `NAME=VALUE` options as a dict.

    Raises:
        UsageError: no `=`, an empty side, or a name given twice.
    """
    result: dict[str, str] = {}
    for text in values:
        name, _, value = text.partition("=")
        if not name or not value:
            raise UsageError(f"{option} {text!r} is not of the form NAME=VALUE")
        if name in result:
            raise UsageError(f"{option} names {name!r} twice")
        result[name] = value
    return result


def help_of(text: str) -> str:
    """A help text with a line for each paragraph, as Typer wants it; after a `\\b` lines are kept."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        each.removeprefix("\b\n") if each.startswith("\b") else " ".join(each.split()) for each in paragraphs
    )
