"""Parameters of a command that stand together as one struct.

    class NameFlags(Struct, frozen=True):
        rename: Annotated[list[str], typer.Option(metavar="PATTERN=NAME", help="...")] = []

    @app.command()
    @with_structs
    def export(names: NameFlags) -> None:

Typer reads the signature that `with_structs` gives a function: the fields take the struct's place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from msgspec import Struct
from msgspec.structs import replace


def with_structs(function: Callable[..., None]) -> Callable[..., None]:
    """A command with the fields of its structs as parameters.

    A default of the command's own has other values than the struct's.
    """
    hints = get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    structs: dict[str, tuple[Struct, list[str]]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        if isinstance(hint, type) and issubclass(hint, Struct):
            values = hint() if parameter.default is parameter.empty else parameter.default
            fields = options_of(values)
            structs[name] = values, [field.name for field in fields]
            parameters += fields
        else:
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))

    def command(**given: Any) -> None:
        for name, (values, fields) in structs.items():
            given[name] = replace(values, **{field: given.pop(field) for field in fields})
        function(**given)

    command.__name__, command.__doc__ = function.__name__, help_of(function.__doc__ or "")
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # inspect reads it
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def help_of(text: str) -> str:
    """A help text with a line for each paragraph, as Typer wants it; after a `\\b` lines are kept."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        each.removeprefix("\b\n") if each.startswith("\b") else " ".join(each.split()) for each in paragraphs
    )


def options_of(values: Struct) -> list[inspect.Parameter]:
    """The fields of a struct that are annotated as options, with its values as their defaults."""
    hints = get_type_hints(type(values), include_extras=True)
    return [
        inspect.Parameter(
            field, inspect.Parameter.KEYWORD_ONLY, default=getattr(values, field), annotation=hints[field]
        )
        for field in values.__struct_fields__
        if hasattr(hints[field], "__metadata__")
    ]
