"""Commands made of functions: the annotation of a parameter says which option or argument it is.

    app = App("export-model")

    @app.subcommand()
    def merge(model: Annotated[Path, Argument("MODEL", "Model base path.")], keep: KeepOption = None) -> None:

Click parses and prints help. The parameters of a command are made when it is asked for. What is
annotated as a `Path` is a local one, and as an enum one of its values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import click
from msgspec.structs import replace

from exporter.local_paths import path_parser

F = TypeVar("F", bound=Callable[..., Any])

SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Of every command: plain text that looks the same in a pipe."""

OTHER = "Output"
"""The heading of options that name no group, in a command that has groups."""


class Option:
    """Annotates a parameter that is an option; its name is the parameter's unless `names` are given.

    `parser` turns text into a value; `callback` takes the value of an `is_eager` flag before all others.
    """

    def __init__(
        self,
        *names: str,
        help: str,
        metavar: str | None = None,
        min: float | None = None,
        max: float | None = None,
        parser: Callable[[str], Any] | None = None,
        callback: Callable[[Any], None] | None = None,
        group: str = OTHER,
    ) -> None:
        self.names, self.help, self.metavar, self.group = names, help, metavar, group
        self.min, self.max = min, max
        self.parser, self.callback = parser, callback

    def made(self, name: str, hint: Any, default: Any) -> click.Option:
        """The option of a parameter that is called `name`."""
        names = self.names or (f"--{name.replace('_', '-')}",)
        kind, is_repeated = _kind(hint)
        settings: dict[str, Any] = {"help": self.help, "metavar": self.metavar}
        if self.callback is not None:
            settings |= {"is_eager": True, "expose_value": False, "callback": _of_value(self.callback)}
        if kind is bool:
            settings |= {"is_flag": True, "default": False}
        elif default is inspect.Parameter.empty:
            settings |= {"required": True, "multiple": is_repeated, "type": self._type(kind, names[0])}
        else:
            shown = default.value if isinstance(default, Enum) else default
            settings |= {"default": shown or None if is_repeated else shown, "show_default": not is_repeated}
            settings |= {"multiple": is_repeated, "type": self._type(kind, names[0])}
        made = _GroupedOption([name, *names], **settings)
        made.group = self.group
        return made

    def _type(self, kind: Any, name: str) -> Any:
        if self.min is not None or self.max is not None:
            ranges: Any = click.IntRange if kind is int else click.FloatRange
            return ranges(self.min, self.max)
        return self.parser or _type(kind, name)


class Argument:
    """Annotates a parameter that is given by its place."""

    def __init__(self, metavar: str, help: str, parser: Callable[[str], Any] | None = None) -> None:
        self.metavar, self.help, self.parser = metavar, help, parser

    def made(self, name: str, hint: Any, default: Any) -> click.Argument:
        """The argument of a parameter that is called `name`."""
        type_ = self.parser or _type(_kind(hint)[0], self.metavar.strip("[]"))
        is_required = default is inspect.Parameter.empty
        made = _ExplainedArgument([name], type=type_, metavar=self.metavar, required=is_required)
        made.explanation = self.help
        return made


class Options:
    """Annotates a parameter that is a `Struct` of options: each field is annotated with its `Option`.

    A default of the parameter's own has other defaults of the fields.
    """

    def __init__(self, group: str = OTHER) -> None:
        self.group = group

    def made(self, values: Any) -> list[click.Option]:
        """The options of the fields that are annotated; `values` is a struct of their defaults."""
        made = []
        for name, (hint, option) in _declared(type(values)).items():
            made.append(option.made(name, hint, getattr(values, name)))
            if self.group != OTHER:
                made[-1].group = self.group
        return made


def _declared(kind: Any) -> dict[str, Any]:
    """For each field of a struct that is an option: its type, and how it is declared."""
    hints = get_type_hints(kind, include_extras=True)
    parts = {name: get_args(hints[name])[:2] for name in kind.__struct_fields__}
    return {name: part for name, part in parts.items() if len(part) == 2 and isinstance(part[1], Option)}


class _GroupedOption(click.Option):
    group: str


class _ExplainedArgument(click.Argument):
    explanation: str

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx), self.explanation


class _Choice(click.Choice[str]):
    """One of an enum's values."""

    def __init__(self, kind: type[Enum]) -> None:
        super().__init__([member.value for member in kind])
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self.kind(super().convert(value, param, ctx))


def group_of(parameter: click.Parameter) -> str:
    """The heading that a parameter stands under in help."""
    return "Arguments" if isinstance(parameter, click.Argument) else getattr(parameter, "group", OTHER)


Rewrite = Callable[[click.Context, list[str]], list[str]]
"""What is typed, made into what is parsed."""


class Command(click.Command):
    """A command whose help explains its arguments, too, and shows its options in groups if they have any."""

    rewrite: Rewrite | None = None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what is typed, or what `rewrite` makes of it."""
        return super().parse_args(ctx, self.rewrite(ctx, args) if self.rewrite else args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the command takes."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                groups.setdefault(group_of(parameter), []).append(record)
        others = groups.pop(OTHER, [])
        groups["Options" if len(groups) == 1 else OTHER] = others
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class App(Command, click.Group):
    """A program of several commands; with `root` one without a name, too."""

    def __init__(self, name: str) -> None:
        click.Group.__init__(self, name, context_settings=SETTINGS)
        self._makers: dict[str, tuple[Callable[..., Any], Mapping[str, Any], Rewrite | None]] = {}

    def root(self, *, help: str, invoke_without_command: bool = False) -> Callable[[F], F]:
        """Decorates the function whose options stand before a subcommand, or without one."""

        def register(function: F) -> F:
            self.help, self.invoke_without_command = help, invoke_without_command
            self.no_args_is_help = not invoke_without_command
            self.callback, self.params = _taken_apart(function)
            return function

        return register

    def subcommand(
        self,
        name: str | None = None,
        help: str | None = None,
        short_help: str | None = None,
        rewrite: Rewrite | None = None,
    ) -> Callable[[F], F]:
        """Decorates the function of a subcommand; its docstring is the help unless another is given."""

        def register(function: F) -> F:
            texts = {"help": inspect.cleandoc(help or function.__doc__ or ""), "short_help": short_help}
            self._makers[name or function.__name__] = (function, texts, rewrite)
            return function

        return register

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The subcommands in the order in which they were added."""
        return list(self._makers)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand, made now."""
        if cmd_name not in self._makers:
            return None
        function, texts, rewrite = self._makers[cmd_name]
        callback, params = _taken_apart(function)
        command = Command(cmd_name, SETTINGS, callback, params, **texts)
        command.rewrite = rewrite
        return command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options and then the subcommands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


def _taken_apart(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[click.Parameter]]:
    """What Click calls for a function, and its parameters."""
    hints = get_type_hints(function, include_extras=True)
    made: list[click.Parameter] = []
    callback: Callable[..., Any] = function
    for name, parameter in inspect.signature(function).parameters.items():
        if get_origin(hints[name]) is not Annotated:
            callback = click.pass_context(callback)
            continue
        hint, declared = get_args(hints[name])[:2]
        if isinstance(declared, Options):
            values = hint() if parameter.default is inspect.Parameter.empty else parameter.default
            made += declared.made(values)
            callback = _gathered(callback, name, values)
        else:
            made.append(declared.made(name, hint, parameter.default))
    return callback, made


def _gathered(function: Callable[..., Any], name: str, values: Any) -> Callable[..., Any]:
    """`function` called with the struct `name`: `values`, with what was typed."""

    def call(*arguments: Any, **given: Any) -> Any:
        fields = {field: given.pop(field) for field in _declared(type(values))}
        return function(*arguments, **given, **{name: replace(values, **fields)})

    return call


def _kind(hint: Any) -> tuple[Any, bool]:
    """The type of one value, and whether there may be several: of `X`, `X | None` or `tuple[X, ...]`."""
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return _kind(kinds[0]) if kinds else (hint, False)


def _type(kind: Any, name: str) -> Any:
    if kind is Path:
        return path_parser(name)
    return _Choice(kind) if issubclass(kind, Enum) else kind


def _of_value(function: Callable[[Any], None]) -> Callable[..., None]:
    return lambda context, parameter, value: function(value)
