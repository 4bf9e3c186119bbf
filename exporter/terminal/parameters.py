"""Parameters of a command that are grouped in structs.

    class NameFlags(Struct, frozen=True):
        renames: Annotated[tuple[str, ...], Option("...", name="--rename", metavar="PATTERN=NAME")] = ()

    @app.command()
    @with_structs
    def export(names: NameFlags) -> None:

Typer reads the signature that `with_structs` gives a function: the struct's options replace it.

Values that are not typed come from environment variables, and from a file of options. An option's variable is
the program's name and the option's, `EXPORT_MODEL_CKPT_DIR`; for a subcommand with the subcommand between
them, `EXPORT_MODEL_MERGE_KEEP`. `--config` names the file (`exporter.terminal.options_file`). Typed values
come first, then variables, then the file. Values from variables and files count like typed ones, with one
exception: where a value would have no effect, it is ignored instead of refused.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from msgspec import Struct

from exporter.errors import ExportError, UsageError, nearest
from exporter.newer_python import type_hints
from exporter.options import HEADINGS, DeclaredOption, declared, lacking_company, require_company
from exporter.options.given import changed, require_seconds
from exporter.options.old_names import renew_named
from exporter.options.words import Fields
from exporter.storage.local_paths import local_path, quoted, without_secrets

OPTIONS_FILE = "--config"
_NEARLY = 0.7
_OF_KUBERNETES = re.compile(r"SERVICE_(HOST|PORT)(_\w+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_\w+)?)?")
"""Variables that Kubernetes sets after EXPORT_MODEL_ if there is a service `export-model`: not mistakes."""
_BadParameter: type[Any] = typer.BadParameter


class Taken(Struct, frozen=True):
    """An option that was not typed, and has its value from elsewhere."""

    option: str
    """Its name."""
    value: str
    """Its value, in the form in which it would be typed."""
    source: str
    """The environment variable or the file with the value."""


TAKEN: ContextVar[tuple[Taken, ...]] = ContextVar("TAKEN", default=())
"""The options of the command that come from elsewhere and have an effect."""
MISSPELT: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("MISSPELT", default=())
"""Environment variables that nothing reads, each with the one that was probably meant."""
RENAMED: ContextVar[tuple[str, ...]] = ContextVar("RENAMED", default=())
"""Notes on the old names of options that were given."""


def untyped(context: Any, given: dict[str, Any]) -> dict[str, Taken]:
    """Return the options that an environment variable or a file of options sets, by parameter name.

    `context` is Click's; `given` has its parsed values by parameter name, and gets the file's values. Notes
    on old names in the file are added to `RENAMED`.

    Raises:
        UsageError: the file cannot be read, has an unknown option, or a value of the wrong kind.
        LfsPointer: the file is a Git LFS pointer.
        typer.BadParameter: a value in the file cannot be parsed.
    """
    by_name = {max(one.opts, key=len): one for one in context.command.params}
    found = {}
    for name, one in by_name.items():
        if (variable := variable_of(context, one)) is not None:
            found[one.name] = Taken(name, without_secrets(os.environ[variable]), variable)
    file = by_name.get(OPTIONS_FILE)
    is_alone = context.invoked_subcommand is None  # else it refuses what stands before it
    if file is not None and is_alone and (path := given.get(file.name)) is not None:
        from exporter.terminal.options_file import options_in  # late: few commands have one

        options, notes = renew_named(options_in(path), by_name)
        RENAMED.set((*RENAMED.get(), *(f"{path}: {note}" for note in notes)))
        for name, value in options.items():
            one = by_name.get(option := f"--{name.lstrip('-').replace('_', '-')}")
            if one is None or one is file:
                close = nearest(option, by_name.keys() - {OPTIONS_FILE})
                hint = (
                    f"did you mean {close.lstrip('-')!r}?" if close else "export-model --help-all lists all"
                )
                raise UsageError(f"unknown option {name!r} in {path}", hint=hint)
            if _source(context, one) == "DEFAULT":
                _require_fit(path, name, value, one)
                texts = list(_arguments_of(value))
                typed = _cast(path, context, one, texts if one.multiple else texts[0])
                given[one.name] = list(typed) if one.multiple else typed
                found[one.name] = Taken(option, without_secrets(" ".join(map(str, texts))), str(path))
    return found


def variable_of(context: Any, parameter: Any) -> str | None:
    """Return the environment variable that gave an option its value; None if the value has another source.

    `context` and `parameter` are Click's.
    """
    is_one = _source(context, parameter) == "ENVIRONMENT"
    return f"{context.auto_envvar_prefix}_{parameter.name.upper()}" if is_one else None


def _cast(path: Path, context: Any, parameter: Any, text: Any) -> Any:
    """Return a value from a file of options, `text`, parsed as if it had been typed for Click's `parameter`.

    typer.BadParameter if it cannot be parsed, with the path as `file_of_options`.
    """
    try:
        return parameter.type_cast_value(context, text)
    except _BadParameter as error:
        error.file_of_options = str(path)
        raise


def misspelt(context: Any) -> Iterator[tuple[str, str]]:
    """Yield pairs of an environment variable that nothing reads, and the variable that was probably meant.

    They are sorted by name. `context` is Click's; all commands are imported if any variable that begins with
    the program's name is not an option of the program itself.
    """
    root = context.find_root()
    prefix = f"{root.auto_envvar_prefix}_"
    known = {one.name.upper() for one in root.command.params}
    names = [name.removeprefix(prefix) for name in sorted(os.environ) if name.startswith(prefix)]
    if known.issuperset(names):
        return
    for name, command in root.command.commands.items():  # which makes each command
        known.update(f"{name}_{one.name}".upper() for one in command.params)
    for name in names:
        if _OF_KUBERNETES.fullmatch(name):
            continue
        if name not in known and (close := nearest(name, known, _NEARLY)):
            yield f"{prefix}{name}", f"{prefix}{close}"


def _require_fit(path: Path, name: str, value: Any, parameter: Any) -> None:
    """Raise UsageError for a value in a file of options that Click's `parameter` would misread.

    Such are `true` for a number, null, or a list or table for one value. `path` is the file, `name` the
    option's name in it.
    """
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


def _require_numbers(context: Any, given: Mapping[str, Any]) -> None:
    """Raise UsageError if an option's value is NaN, or infinite and its help does not name `inf`.

    Also for too many seconds (`require_seconds`).
    `given` has the parsed values by parameter name; `context` is Click's.
    """
    for one in context.command.params:
        value = given.get(one.name)
        if isinstance(value, float) and not math.isfinite(value):
            if value > 0 and "inf" in (one.help or "").split():
                continue
            raise UsageError(f"{max(one.opts, key=len)} {value} is not a number", hint="as in 0.5")
        if one.metavar == "SECONDS" and value is not None:
            require_seconds(max(one.opts, key=len), value)


def _source(context: Any, parameter: Any) -> str:
    return str(getattr(context.get_parameter_source(parameter.name), "name", ""))


def _arguments_of(value: Any) -> Iterator[Any]:
    """Yield the arguments that a file's value stands for: one, or one for each element of a list or table.

    A flag stays a boolean, a table's names and values become `NAME=VALUE`, all others become text.
    """
    if isinstance(value, dict):
        yield from (f"{name}={each}" for name, each in value.items())
    elif isinstance(value, list):
        yield from map(str, value)
    else:
        yield value if isinstance(value, bool) else str(value)


_TYPED: ContextVar[Mapping[str, str] | None] = ContextVar("_TYPED", default=None)
"""The typed values, by the words for them in hints."""
_CONTEXT = "typer_context"
ARGUMENTS: ContextVar[tuple[str, ...]] = ContextVar("ARGUMENTS", default=())
"""The arguments that were typed after the program's name."""
COMMAND = ContextVar("COMMAND", default="export-model")
"""The typed command: the name of the program and of its subcommand."""
_WORDS = {word: word for word in ("MODEL", "WHAT", "PATH")} | {"DIR|PREFIX": "DIR"}
"""The words in hints that stand for a parameter, by its metavar."""


def with_names(error: ExportError) -> ExportError:
    """Replace words such as MODEL in an error's hint, in place, by the typed values; return the same error.

    So the hint can be run. Words for which nothing was typed stay. The hint `see --help` gets the command's
    name.
    """
    typed = _TYPED.get() or {}
    if error.hint == UsageError.default_hint:
        error.hint = f"see {COMMAND.get()} --help"
    error.hint = re.sub(
        r"(?<!\S)([A-Z_]+)(?![\w/.@])", lambda found: typed.get(found[1], found[1]), error.hint
    )
    return error


def with_structs(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function for Typer that takes single options in place of the structs that `function` takes.

    The function's parameters are the structs' options, sorted by heading; a call fills the structs from typed
    values, environment variables and a file, notes these in `TAKEN`, and calls `function`. A default of the
    struct's parameter replaces the struct's own default values.

    Raises (the returned function):
        UsageError: an option is given without one that it goes with; or a value, or the file, is wrong.
        LfsPointer: the file is a Git LFS pointer.
        typer.BadParameter: a value in the file cannot be parsed.
    """
    structs, parameters = _taken_apart(function)
    context_name = next((one.name for one in parameters if one.annotation is typer.Context), "")
    if not context_name:
        parameters.append(
            inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        )
    words = {parameter.name: word for parameter in parameters if (word := _hint_word(parameter))}

    def command(**given: Any) -> None:
        context = given[context_name] if context_name else given.pop(_CONTEXT)
        elsewhere = untyped(context, given)
        _require_numbers(context, given)
        typed_words = {word: given[name] for name, word in words.items() if given[name] is not None}
        _TYPED.set({word: quoted(value) for word, value in typed_words.items()})
        found = {
            one.name: (one, name, given.pop(_parameter_name(one)))
            for name, (values, _) in structs.items()
            for one in declared(type(values))
        }
        # Before `TAKEN` is set, which has only what takes effect.
        _drop_ineffective(found, elsewhere)
        TAKEN.set(tuple(elsewhere.values()))
        MISSPELT.set(tuple(misspelt(context)))
        typed: dict[str, dict[tuple[str, ...], Any]] = {name: {} for name in structs}
        for one, name, value in found.values():
            typed[name][one.path] = _read(one, value, elsewhere)
        for name, (values, fields) in structs.items():
            given[name] = _filled(values, typed[name] | {(field,): given.pop(field) for field in fields})
        require_company([given[name] for name in structs])
        function(**given)

    command.__name__, command.__doc__ = function.__name__, help_of(function.__doc__ or "")
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # inspect reads it
    return command


def _taken_apart(
    function: Callable[..., None],
) -> tuple[dict[str, tuple[Struct, list[str]]], list[inspect.Parameter]]:
    """Return the structs that a function takes, and its parameters with options in their place, by heading.

    The structs are by the parameter's name, each with its default values and the names of the fields that
    `typer.Option` annotates.
    """
    structs: dict[str, tuple[Struct, list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    hints = type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        if isinstance(hint, type) and issubclass(hint, Struct):
            values = hint() if parameter.default is parameter.empty else parameter.default
            own = _typer_options(values)
            structs[name] = values, [field.name for field in own]
            parameters += [*(_parameter(one, one.value(values)) for one in declared(hint)), *own]
        else:
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
    return structs, sorted(parameters, key=_sort_key)


def _drop_ineffective(found: dict[str, tuple[DeclaredOption, str, Any]], elsewhere: dict[str, Taken]) -> None:
    """Reset options that were not typed, and would have no effect, to their defaults, in both mappings.

    `found` has each option, its struct's parameter and its value, by name; `elsewhere` has the options from
    variables and files, by parameter name, and loses the reset ones. UsageError if a value is wrong.
    """
    # Again after each round: an option that goes with a reset one is now alone, too.
    while True:
        values = [
            (one, one.default if value is None else _read(one, value, elsewhere))
            for one, _, value in found.values()
        ]
        alone = [one for one in lacking_company(values) if _parameter_name(one) in elsewhere]
        if not alone:
            return
        for one in alone:
            del elsewhere[_parameter_name(one)]
            default = one.default
            found[one.name] = one, found[one.name][1], [] if _is_several(one) else default


def _hint_word(parameter: inspect.Parameter) -> str:
    """Return the word in hints for a parameter's value, such as `MODEL`, by its metavar; "" without one."""
    metavars = (getattr(one, "metavar", None) for one in getattr(parameter.annotation, "__metadata__", ()))
    return next((_WORDS[one] for one in metavars if one in _WORDS), "")


def _sort_key(parameter: inspect.Parameter) -> int:
    """Return the index of a parameter's heading in `HEADINGS`; their number for another heading, or none."""
    places = {heading: place for place, heading in enumerate(HEADINGS)}
    headings = (
        getattr(one, "rich_help_panel", None) for one in getattr(parameter.annotation, "__metadata__", ())
    )
    return next((places[one] for one in headings if one in places), len(places))


def _parameter(one: DeclaredOption, default: Any) -> inspect.Parameter:
    """Return a declared option as a parameter with Typer's annotation, and with `default`.

    If the option has a parser of its own, or an empty or infinite default, the parsed value is None unless it
    was typed; a repeatable option's value is a list of texts.
    """
    option, parser = one.option, None
    kind: Any = option.typed or one.type
    if option.parse is not None:
        parser = partial(option.parse, one.name)
    elif Path in get_args(one.type) and get_origin(one.type) is not tuple:
        parser = partial(local_path, one.name)
    shown: Any = option.default or True
    if _is_several(one):
        kind, parser = list[str], None
        default = [*map(str, default)] if isinstance(default, tuple) else []
    elif parser is not None or default in ("", math.inf):
        kind, default = kind | None, None
    annotation = Annotated[
        kind,
        typer.Option(
            *filter(None, (one.name, option.letter)),
            help=option.lines,
            autocompletion=_completions(option.words) if option.words else None,
            rich_help_panel=option.heading,
            metavar=option.metavar,
            min=option.least,
            parser=None if parser is None else _named(parser),
            show_default=shown,
        ),
    ]
    return inspect.Parameter(
        _parameter_name(one), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _completions(words: Mapping[str, str]) -> Callable[[str], list[tuple[str, str]]]:
    """Return a shell completion function for an option's words, each given with its meaning.

    It returns the words, with their meanings, that begin with the typed text; for `files=DIR`, `files=`.
    """

    def completions(incomplete: str) -> list[tuple[str, str]]:
        typed = ((word[: word.find("=") + 1] or word, meaning) for word, meaning in words.items())
        return [(word, meaning) for word, meaning in typed if word.startswith(incomplete)]

    return completions


def _named(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the parser as a function that has a name, as Click requires."""

    def value(text: str) -> Any:
        return parse(text)

    return value


def _parameter_name(one: DeclaredOption) -> str:
    """Return the Python name of an option's parameter: `model_arg` for `--model-arg`."""
    return one.name.lstrip("-").replace("-", "_")


def _enum(kind: Any) -> type[Enum] | None:
    members = (kind, *get_args(kind))
    return next((one for one in members if isinstance(one, type) and issubclass(one, Enum)), None)


def _is_several(one: DeclaredOption) -> bool:
    """True if the option `one` may be repeated: its type is a tuple or a mapping."""
    kind = one.option.typed or one.type
    return get_origin(kind) is tuple or _is_mapping(kind)


def _is_mapping(kind: Any) -> bool:
    return isinstance(origin := get_origin(kind), type) and issubclass(origin, Mapping)


def _typer_options(values: Struct) -> list[inspect.Parameter]:
    """Return the fields of a struct that `typer.Option` annotates, as parameters; defaults are its values."""
    hints = type_hints(type(values))
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(field, kind, default=getattr(values, field), annotation=hints[field])
        for field in values.__struct_fields__
        if any(
            isinstance(each, typer.models.OptionInfo) for each in getattr(hints[field], "__metadata__", ())
        )
    ]


def _filled(values: Struct, typed: dict[tuple[str, ...], Any]) -> Struct:
    """Return a copy of the struct `values` with the typed values set; a value of None leaves its field alone.

    `typed` has the values by the path of field names to each field. A `Fields` value sets several fields of
    the struct. UsageError if a value does not fit its field.
    """
    changes: dict[str, Any] = {}
    parts: dict[str, dict[tuple[str, ...], Any]] = {}
    for (name, *inner), value in typed.items():
        if inner:
            parts.setdefault(name, {})[tuple(inner)] = value
        elif isinstance(value, Fields):
            changes.update(value)
        elif value is not None:
            changes[name] = value
    changes |= {name: _filled(getattr(values, name), part) for name, part in parts.items()}
    return changed(values, **changes)


def _read(one: DeclaredOption, typed: Any, elsewhere: Mapping[str, Taken]) -> Any:
    """Return the value of an option's field, converted from the typed value; UsageError if it is wrong.

    `elsewhere` has the options from variables and files, by parameter name: the error for one of them names
    its variable or file.
    """
    try:
        return _value(one, typed)
    except UsageError as error:
        if (taken := elsewhere.get(_parameter_name(one))) is not None:
            place = taken.source
            where = f"correct {place}, or unset it" if place in os.environ else f"correct it in {place}"
            error.message, error.hint = f"{place}: {error.message}", f"{where}; {error.hint}"
        raise


def _value(one: DeclaredOption, typed: Any) -> Any:
    """Return the value of an option's field, converted from the typed value; UsageError if it is wrong."""
    if isinstance(typed, str) and (kind := _enum(one.type)) is not None:
        return kind(typed)  # from a file; Typer converts typed ones
    if _is_several(one) and one.option.parse is not None:
        return one.option.parse(one.name, typed)
    for text in typed if one.option.words else ():
        one.option.require_word(one.name, text)
    if _is_mapping(one.type):
        return pairs(one.name, typed)
    if get_origin(one.type) is tuple:
        return tuple(map(get_args(one.type)[0], typed))
    return typed


def pairs(option: str, values: Iterable[str]) -> dict[str, str]:
    """Return repeated `NAME=VALUE` options as a dict from name to value; `option` is their name, for errors.

    Raises:
        UsageError: no `=`, an empty side, or a name given twice.
    """
    result: dict[str, str] = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not name or not value:
            meant = f"{name or 'x'}={value or 'VALUE'}" if equals else f"x={text or 'VALUE'}"
            raise UsageError(
                f"{option} {text!r} is not of the form NAME=VALUE", hint=f"as in {option} {meant}"
            )
        if name in result:
            raise UsageError(f"{option} names {name!r} twice")
        result[name] = value
    return result


def help_of(text: str) -> str:
    r"""Return a docstring as a help text with one line per paragraph, as Typer wants it.

    Lines of a paragraph that begins with `\b` are kept.
    """
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        each.removeprefix("\b\n") if each.startswith("\b") else " ".join(each.split()) for each in paragraphs
    )
