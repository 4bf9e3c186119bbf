"""Convert the values that a Python program gives for fields: strings for enums and paths, lists for tuples.

A value that fits no field is refused here, with the field's name, the value and what is expected. Otherwise
it would be an AttributeError of a later stage.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from msgspec import Struct, StructMeta
from msgspec.structs import force_setattr, replace

from exporter.errors import ExportError, UsageError, nearest
from exporter.newer_python import StrEnum
from exporter.options.old_names import OLD_ARGUMENTS, renew_named
from exporter.storage.local_paths import local_path, without_secrets

if TYPE_CHECKING:
    from inspect import Signature

StrPath: TypeAlias = "str | os.PathLike[str]"
"""A local path or, where a URL is taken, a URL."""

GivenT = TypeVar("GivenT", bound=Struct)
CallT = TypeVar("CallT", bound=Callable[..., Any])
_SHOWN = 80
_LISTED = 12
"""The most names of arguments that an error lists."""


class Checked(StructMeta):
    """The metaclass of structs that convert the values they are made of, by their method `_take`.

    Values that msgspec decodes, or that `replace` copies, have the fields' types: they are not converted
    again.
    """

    made: ClassVar[list[StructMeta]] = []
    """The structs of this kind."""

    def __init__(cls, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        Checked.made.append(cls)

    def __call__(cls, *values: Any, **named: Any) -> Any:
        """Return a struct with converted values."""
        named = _renewed(named, lambda: cls.__struct_fields__)
        try:
            made = super().__call__(*values, **named)
        except TypeError:
            if error := _misfit(cls, values, named):
                raise error from None
            raise
        made._take()
        return made

    @property
    def __signature__(cls) -> Signature:
        """The signature with the fields' types, without the annotations for the command line."""
        told = super().__signature__
        plain = (
            one.replace(annotation=get_args(one.annotation)[0])
            if get_origin(one.annotation) is Annotated
            else one
            for one in told.parameters.values()
        )
        return told.replace(parameters=[*plain])

    def __dir__(cls) -> list[str]:
        """Return the names that `help` shows: fields and methods, without the operators of every struct."""
        return [name for name in super().__dir__() if not name.startswith("__")]


class Given(Struct, frozen=True, metaclass=Checked):
    """A struct of values that a Python program gives."""

    def _take(self) -> None:
        take(self)


def changed(values: GivenT, **changes: Any) -> GivenT:
    """Return a copy of a struct with the fields in `changes` set, and all values converted as in a call.

    Values of a struct that does not convert its values are copied as they are.

    Raises:
        UsageError: a value does not fit its field.
    """
    made = replace(values, **changes)
    if isinstance(type(made), Checked):
        made._take()  # type: ignore[attr-defined]  # each of its structs has one
    return made


def take(values: Struct, own: Collection[str] = ()) -> None:
    """Convert the value of each field of a struct to the field's type, in place; fields in `own` stay.

    Raises:
        UsageError: a value cannot be converted.
    """
    for name, kind in _kinds(type(values)).items():
        if name not in own:
            given = getattr(values, name)
            taken = _taken(name, kind, given)
            if taken is not given:
                force_setattr(values, name, taken)


def place(name: str, given: Any, parse: Callable[[str, StrPath], Path] = local_path) -> Path:
    """Return the Path that `parse` makes of a string or a path given for the argument `name`.

    `parse` gets the name and the value.

    Raises:
        UsageError: it is neither string nor path, it is empty, or `parse` refuses it.
    """
    if isinstance(given, os.PathLike) and isinstance(text := os.fspath(given), str):
        return parse(name, given if isinstance(given, Path) else text)
    if not isinstance(given, str):
        raise wrong(name, given, "a path: a string or a Path", f'as in {name}="some/directory"')
    if not given:
        raise UsageError(f"{name} is empty: expected a path", hint=f'{name}="." is the working directory')
    return parse(name, given)


def wrong(name: str, given: Any, expected: str, hint: str = "") -> UsageError:
    """Return the error for an argument's value that does not fit; the message has value and expectation.

    The value is shortened, and secrets in it are hidden. Without a `hint` it is to read the help.
    """
    text = without_secrets(repr(given))
    shown = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
    return UsageError(
        f"{name}={shown}: expected {expected}", hint=hint or "help(exporter.ExportRequest) has each argument"
    )


def flag(name: str, given: Any) -> bool:
    """Return the value of the argument `name` if it is True or False.

    Raises:
        UsageError: it is neither.
    """
    if not isinstance(given, bool):
        raise wrong(name, given, "True or False", f"{name}=True")
    return given


def whole(name: str, given: Any, example: str) -> int:
    """Return the value of the argument `name` as an int; `example` is the error's hint.

    Raises:
        UsageError: it is not a whole number; True and False are not.
    """
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise wrong(name, given, "a whole number", example)
    return int(given)


def number(name: str, given: Any, example: str) -> float:
    """Return the value of the argument `name` as a float; `example` is the error's hint.

    Raises:
        UsageError: it is not a real number, as True and False are not; or it is NaN. Infinity is accepted.
    """
    if isinstance(given, bool) or not isinstance(given, Real) or math.isnan(given):
        raise wrong(name, given, "a number", example)
    return float(given)


def require_names(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse names in `given` that are not among a function's arguments, `known`.

    `function` is the function's name, for the error.

    Raises:
        UsageError: there is one; the hint has the nearest name.
    """
    if error := _unknown(function, given, known):
        raise error


def _unknown(function: str, given: Iterable[str], known: Collection[str]) -> UsageError | None:
    for name in given:
        if name not in known:
            return UsageError(f"{function} has no argument {name!r}", hint=_nearest(function, name, known))
    return None


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return the known name nearest to a misspelt one, ignoring case and dashes; "" if none is near."""
    folded = {each.casefold().replace("-", "_"): each for each in known}
    return folded.get(nearest(name.casefold().lstrip("-").replace("-", "_"), folded), "")


IN_COMMAND: ContextVar[bool] = ContextVar("IN_COMMAND", default=False)
"""True inside a command, where errors name options as they are typed."""


def named_misfit(function: CallT) -> CallT:
    """Wrap a function: a call that does not fit its signature raises UsageError, not TypeError.

    The error lists the arguments. Old names of arguments are accepted, with a DeprecationWarning. Texts of
    the function's own ExportErrors name its arguments as in Python, not as options, unless a command calls
    it.
    """

    @wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        named = _renewed(named, lambda: _parameters(function))
        try:
            return function(*values, **named)
        except ExportError as failed:
            if not IN_COMMAND.get():
                _name_arguments(failed, function)
            raise
        except TypeError:
            if error := _misfit(function, values, named):
                raise error from None
            raise

    return cast(CallT, call)


def _renewed(named: dict[str, Any], known: Callable[[], Iterable[str]]) -> dict[str, Any]:
    """Return arguments by name, with old names replaced; issue a DeprecationWarning for each old name.

    `known` returns the names of the arguments that exist.
    """
    if OLD_ARGUMENTS.isdisjoint(named):
        return named
    found, notes = renew_named(named, {f"--{name.replace('_', '-')}" for name in known()})
    for note in notes:
        warnings.warn(note, DeprecationWarning, stacklevel=3)  # at the caller of our caller: the user's line
    return found


def _parameters(function: Callable[..., Any]) -> Iterable[str]:
    from inspect import signature  # late: it takes longer to import than this module

    return signature(function).parameters


FIELDS = {("--despite", "hold"): "despite_hold", ("--despite", "deltas"): "plain"}
"""The argument in Python for an option's word; the words of declared options are added."""
_AN_OPTION = re.compile(r"--([a-z][a-z-]*)(?:[ =]([^\s,;:)]+(?::[^\s,;:)]+)*))?")


def _name_arguments(error: ExportError, function: Callable[..., Any]) -> None:
    """Replace `--name value` by `name=value` in an error's texts, for each argument of a function.

    The text from a command (`export-model ...`) on is unchanged.
    """
    takes = _parameters(function)
    known = {name.rstrip("_") for name in takes}
    if "options" in takes:
        known.update(*(kind.__struct_fields__ for kind in Checked.made))

    def as_argument(found: re.Match[str]) -> str:
        name, value = found[1].replace("-", "_"), found[2]
        word, _, text = (value or "").partition("=")
        if field := FIELDS.get((f"--{found[1]}", word)):
            return f"{field}={text}" if text else field
        if name not in known:
            return found[0]
        if value and ":" in value:
            return f'{name}="{value}"'
        return f"{name}={value}" if value and value[0].isdigit() else f"{name} {value}" if value else name

    if error.hint == UsageError.default_hint:
        error.hint = f"help(exporter.{function.__name__})"
    parts = {"message": error.message, "cause": error.cause, "hint": error.hint}
    for part, text in parts.items():
        command = re.search(r"(?:export|serve)-model [a-z-]", text)
        at = command.start() if command else len(text)
        setattr(error, part, _AN_OPTION.sub(as_argument, text[:at]) + text[at:])
    error.args = (error.message, *error.args[1:])  # what a traceback prints


def _misfit(called: Callable[..., Any], values: Sequence[Any], named: Mapping[str, Any]) -> UsageError | None:
    """Return the error of a call that does not fit the signature of `called`; None if it fits.

    `values` are the call's arguments by place, `named` those by name.
    """
    from inspect import signature  # late: it takes longer to import than this module

    takes, name = signature(called), called.__name__
    try:
        takes.bind(*values, **named)
    except TypeError:
        pass
    else:
        return None
    each = [one for one in takes.parameters.values() if one.kind is not one.VAR_KEYWORD]
    if len(each) == len(takes.parameters) and (error := _unknown(name, named, takes.parameters)):
        return error
    places = [one.name for one in each if one.kind is one.POSITIONAL_OR_KEYWORD]
    done = places[: len(values)]
    what = " and ".join(
        one.name for one in each if one.default is one.empty and one.name not in {*done, *named}
    )
    what = f"{name} needs {what}"
    if len(values) > len(places):
        what = f"{name} takes {len(places)} arguments by place, and {len(values)} are given"
    elif twice := [one for one in done if one in named]:
        what = f"{name} is given {twice[0]} twice"
    shown = (str(one.replace(annotation=one.empty, default=one.empty)) for one in takes.parameters.values())
    return UsageError(what, hint=f"{name}({', '.join(shown)})")


_SAID_OTHERWISE = {
    "incr": "export(..., save_incr_model=True), or export_incremental(...)",
    "updatable": "updates=Updates()",
    "dry_run": "plan(...) says what would be done",
    "watch": "watch(...) follows the training",
    "notify": "serve-model agent, or serve-model update, tells servers",
    "rebase": "rebase(model)",
    "interval": "watch(..., watching=Watching(interval_seconds=5))",
    "until": "watch(..., watching=Watching(stop=StopWhen(after_seconds=3600)))",
    "any_role": "is_chief() says whether this node exports: export on any",
}
"""What replaces options of the command in Python, if they are not arguments."""


def _nearest(function: str, name: str, known: Collection[str]) -> str:
    if name in _SAID_OTHERWISE:
        return _SAID_OTHERWISE[name]
    if found := nearest_name(name, known):
        return f"did you mean {found}?"
    return (
        f"it takes {', '.join(known)}" if len(known) <= _LISTED else f"help(exporter.{function}) lists them"
    )


@cache
def _kinds(struct: type[Struct]) -> Mapping[str, Any]:
    hints = get_type_hints(struct)
    return {name: hints[name] for name in struct.__struct_fields__}


def _taken(name: str, kind: Any, given: Any) -> Any:
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if given is None and NoneType in members:
        return None
    (kind, *_) = (member for member in members if member is not NoneType)
    if get_origin(kind) is tuple:
        return several(name, get_args(kind)[0], given)
    if isinstance(origin := get_origin(kind), type) and issubclass(origin, Mapping):
        return _pairs(name, given)
    if kind is Path:
        return place(name, given)
    if get_origin(kind) or not isinstance(kind, type):  # Python 3.10 takes frozenset[str] for a type
        return given  # a field of a struct that is made from another one, and never of what a program gives
    if issubclass(kind, StrEnum):
        return _member(name, kind, given)
    if issubclass(kind, Struct):
        if not isinstance(given, kind):
            raise wrong(name, given, f"exporter.{kind.__name__}(...)", f"{name}={kind.__name__}()")
        return given
    return _plain(name, kind, given)


def _plain(name: str, kind: type, given: Any) -> Any:
    """Return the value of the argument `name` as a bool, an int, a float or a str, as `kind` says.

    UsageError for another value; True is not a number, and 1 is not a flag.
    """
    if kind is bool:
        return flag(name, given)
    if kind is int:
        is_meant = isinstance(given, str) and len(given) < 20 and given.strip().isdecimal()
        return whole(name, given, f"{name}={int(given) if is_meant else 1}")
    if kind is float:
        return number(name, given, f"{name}=0.5")
    if not isinstance(given, str):
        raise wrong(name, given, "a string")
    return given


def _member(name: str, kind: type[StrEnum], given: Any) -> StrEnum:
    names = [member.value for member in kind]
    if isinstance(given, str) and given in names:
        return kind(given)
    *others, last = map(repr, names)
    near = nearest_name(given, names) if isinstance(given, str) else ""
    raise wrong(
        name, given, f"{', '.join(others)} or {last}", f'did you mean {name}="{near}"?' if near else ""
    )


def several(name: str, kind: type, given: Any) -> tuple[Any, ...]:
    """Return the values of a list or tuple as a tuple, each converted to `kind`; `name` is the argument.

    A single string or path is one value.

    Raises:
        UsageError: it is none of these, or a value does not fit.
    """
    alone = isinstance(given, str | os.PathLike)
    if not alone and not isinstance(given, tuple | list):
        raise wrong(name, given, "a list of paths" if kind is Path else "a list of strings")
    values = (given,) if alone else given
    return tuple(_taken(f"{name}[{number}]", kind, value) for number, value in enumerate(values))


def _pairs(name: str, given: Any) -> dict[str, str]:
    """Return a mapping from names to strings or numbers with its values as texts.

    UsageError, which names the argument `name`, for anything else.
    """
    if not isinstance(given, Mapping):
        raise wrong(name, given, 'a dict: {"name": value}')
    for key, value in given.items():
        if not isinstance(key, str) or not isinstance(value, str | Real):
            raise wrong(f"{name}[{key!r}]", value, "a string, a number, True or False, by a name")
    return {key: str(value) for key, value in given.items()}


_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", re.ASCII)
MOST_SECONDS = 1e9
"""The longest duration that an option may name, 31 years: clocks, locks and gRPC can count no further."""

_UNIT_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(option: str, text: str) -> float:
    """Parse `90`, `90s`, `15m`, `2h` or `1d` into seconds.

    UsageError, which names `option`, for other texts, and for more than `MOST_SECONDS`.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise UsageError(f"{option} {text!r} is not a duration", hint="as in 90 (seconds), 15m, 2h, 1d")
    return require_seconds(option, float(match[1]) * _UNIT_SECONDS[match[2]])


def require_seconds(option: str, seconds: float) -> float:
    """Return the same number of seconds; UsageError, which names `option`, for more than `MOST_SECONDS`."""
    if seconds > MOST_SECONDS:
        raise UsageError(
            f"{option} is {seconds:g} seconds, which is too long",
            hint=f"at most {MOST_SECONDS:.0f}, which is 31 years",
        )
    return seconds
