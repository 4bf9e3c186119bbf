"""Help as plain lines of 80 columns: the most used options, those of one topic, or all by heading.

Typer's own help has panels, which cut long names off and break examples: no command here prints them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import typer
from msgspec import Struct
from typer.core import TyperCommand, TyperGroup, TyperOption

from exporter.errors import Exit, UsageError, nearest

_WIDTH = 80
_COLUMN = 24
_OUTPUT, _EXIT_CODES = "output", "exit-codes"
"""The topic of options without a heading, and the topic of exit codes."""


_COMMANDS = {
    "export-model": frozenset(
        (
            "init",
            "inspect",
            "history",
            "merge",
            "rollback",
            "resume",
            "tag",
            "diff",
            "verify",
            "push",
            "pull",
            "doctor",
        )
    ),
    "serve-model": frozenset(("run", "status", "reload", "agent", "predict", "update")),
}
"""Commands that only one of the programs has: what is typed at the other one leads there."""


def program_of(word: str) -> str | None:
    """Return the program that has a command named `word`, of those that only one has; None if none has it."""
    return next((name for name, commands in _COMMANDS.items() if word in commands), None)


class Help(Struct, frozen=True):
    """A program's short help, and its topics."""

    usage: Sequence[str]
    """Lines that show how the program is called."""
    examples: Sequence[str]
    options: Sequence[str]
    """The options that most runs need, in their order."""
    topics: Mapping[str, str]
    """The topic of each heading."""

    def short(self, context: typer.Context) -> Iterator[str]:
        """Yield the lines of `--help`: usage, examples, the most used options, commands and topics.

        KeyError, while iterating, if the program lacks an option in `options`. It imports all commands.
        """
        root = context.find_root()
        command: Any = root.command
        yield from (f"{'Usage: ' if at == 0 else '       '}{line}" for at, line in enumerate(self.usage))
        yield from ("", *textwrap.wrap(command.help.partition("\n")[0], _WIDTH), "", "Examples:")
        yield from (f"  {line}" for line in self.examples)
        yield from ("", "Options:")
        by_name = {name: one for one in command.params for name in one.opts}
        yield from _options((by_name[name] for name in self.options), root, is_brief=True)
        yield from ("", "Commands:", *_commands(command, root))
        more = f"More: {root.info_name} --help-all, {root.info_name} help TOPIC:"
        yield from ("", *textwrap.wrap(f"{more} {', '.join(self.names())}", _WIDTH))

    def names(self) -> list[str]:
        """Return the names of all topics, in the order of their headings."""
        return [*self.topics.values(), _OUTPUT, _EXIT_CODES]

    def topic(self, context: typer.Context, topic: str) -> Iterator[str]:
        """Yield the lines of a topic's page, or of a command's.

        UsageError, at the first line, if `topic` is neither.
        """
        root = context.find_root()
        command: Any = root.command
        if topic == _EXIT_CODES:
            yield from ("Exit codes:", *(f"  {int(code):<5}{code.meaning}" for code in Exit))
        elif topic in self.names():
            heading = next((heading for heading, name in self.topics.items() if name == topic), None)
            found = [one for one in command.params if one.rich_help_panel == heading]
            yield f"{heading or 'Output'}:"
            yield from _options(found, root)
        elif (other := command.get_command(root, topic)) is not None:
            yield other.get_help(typer.Context(other, info_name=topic, parent=root))
        else:
            close = nearest(topic, [*self.names(), *command.list_commands(root)])
            hint = f"{root.info_name} help {close}" if close else f"{root.info_name} --help lists the topics"
            hint = hint if (other := program_of(topic)) is None else f"{other} help {topic}"
            raise UsageError(f"there is no topic {topic!r}", hint=hint)


class PlainCommand(TyperCommand):
    """A command whose help is plain lines, by heading; names of options are whole at any width."""

    short: Sequence[str] = ()
    """The options that most runs need, if `--help` shows them alone, and `--help-all` the others."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help into Click's `formatter`: the short page if `short` is set, else the whole page."""
        lines = _short_of(self, ctx) if self.short else _all_of(self, ctx)
        formatter.write("".join(f"{line}\n" for line in lines))

    def shorten(self, short: Sequence[str]) -> None:
        """Let `--help` show only the options in `short`; add an option `--help-all`, which shows all."""

        def show_all(context: typer.Context, parameter: object, is_asked: bool) -> None:
            if is_asked:
                typer.echo("\n".join(_all_of(self, context)))
                raise typer.Exit

        self.short = short
        self.params.append(
            TyperOption(
                param_decls=["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=show_all,
                help="Show all options.",
            )
        )


class PlainGroup(TyperGroup):
    """A program whose help is plain lines: its options by heading, then its commands."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the whole help page into Click's `formatter`."""
        formatter.write("".join(f"{line}\n" for line in _all_of(self, ctx)))


def _short_of(command: PlainCommand, context: Any) -> Iterator[str]:
    """Yield the lines of a command's short page: usage, first sentence, examples, arguments, some options.

    The options are those in `command.short`, in that order.
    """
    text = (command.help or "").partition("\n\n")
    examples = text[2].partition("Examples:\n")[2].splitlines()
    yield from (command.get_usage(context), "", *textwrap.wrap(text[0], _WIDTH), "", "Examples:", *examples)
    places = {name: place for place, name in enumerate(command.short)}
    shown = [one for one in command.get_params(context) if places.keys() & {*one.opts}]
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    if arguments:
        yield from ("", "Arguments:", *_options(arguments, context))
    shown.sort(key=lambda one: min(places.get(name, len(places)) for name in one.opts))
    yield from ("", "Options:", *_options(shown, context, is_brief=True))
    yield from ("", f"More: {context.command_path} --help-all")


def _all_of(command: Any, context: Any) -> Iterator[str]:
    """Yield the lines of a command's whole page: its text, its options by heading, a group's commands."""
    yield from (
        re.sub(r"\{(\S+)\}", r"\1", command.get_usage(context)),
        "",
    )  # without the braces that Click puts around required parameters
    for line in command.help.splitlines():
        is_example = line.startswith(" ")  # not wrapped, so that it can be copied
        yield from ("",) if not line else (line,) if is_example else textwrap.wrap(line, _WIDTH)
    by_heading: dict[str, list[Any]] = {}
    for one in command.get_params(context):
        heading = "Arguments" if one.param_type_name == "argument" else one.rich_help_panel or "Options"
        by_heading.setdefault(heading, []).append(one)
    for heading, found in by_heading.items():
        yield from ("", f"{heading}:", *_options(found, context))
    if isinstance(command, TyperGroup):
        yield from ("", "Commands:", *_commands(command, context))


def _commands(group: Any, context: Any) -> Iterator[str]:
    for name in group.list_commands(context):
        yield f"  {name:<10} {_clause(group.commands.summary(name), _WIDTH - 13)}"


def _clause(text: str, width: int) -> str:
    """Return a help text of one line, shortened to `width` characters: only clauses that fit stay.

    A shortened text ends with a full stop.
    """
    if len(text) <= width:
        return text
    first = re.split("[:;]", text)[0]
    return (first if len(first) <= width else first[:width].rpartition(",")[0]) + "."


def brief(text: str) -> str:
    """Return a help text as one line.

    Lines after the first explain a word each, `WORD: meaning`: only these words are kept, with commas.
    """
    first, *words = text.split("\n")
    return " ".join([first, ", ".join(word.partition(": ")[0] for word in words)]).strip()


def _options(parameters: Iterable[Any], context: Any, *, is_brief: bool = False) -> Iterator[str]:
    """Yield the help lines of options or arguments, Click's parameters: name, and text in a second column.

    Hidden parameters are left out. A text of several lines explains a word on each line but the first: with
    `is_brief`, only the words are shown.
    """
    for one in parameters:
        if (record := one.get_help_record(context)) is None:
            continue
        name, text = record
        text, *words = text.split("\n")
        if is_brief and words:
            text, words = brief("\n".join([text, *words])), []
        first, *others = textwrap.wrap(text, _WIDTH - _COLUMN - 2)
        for word in words:
            others += textwrap.wrap(word, _WIDTH - _COLUMN - 2, subsequent_indent="  ")
        if len(name) < _COLUMN:
            yield f"  {name:<{_COLUMN}}{first}"
        else:
            yield from (f"  {name}", f"  {'':<{_COLUMN}}{first}")
        yield from (f"  {'':<{_COLUMN}}{line}" for line in others)
