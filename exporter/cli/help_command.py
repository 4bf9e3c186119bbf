"""`export-model --help`, `--help-all` and `export-model help TOPIC`.

Typer prints every option of a command in panels: that is `--help-all`. `--help` is a page of plain lines that
fits a screen: the options of most runs; `help TOPIC` has those of one topic.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from msgspec import Struct

from exporter.errors import Exit, UsageError, nearest
from exporter.options import HEADINGS
from exporter.terminal.edge import AS_TEXT, command
from exporter.terminal.server_access import GROUP

_WIDTH = 80
_COLUMN = 24
_OUTPUT, _EXIT_CODES = "output", "exit-codes"
"""The topic of options without a heading, and one that has no options."""


class Help(Struct, frozen=True):
    """What a program's short help and its topics are."""

    usage: Sequence[str]
    """Lines that show how the program is called."""
    examples: Sequence[str]
    options: Sequence[str]
    """The options that most runs need, in their order."""
    topics: Mapping[str, str]
    """The topic of each heading."""

    def short(self, context: typer.Context) -> Iterator[str]:
        """The page of `--help`."""
        root = context.find_root()
        command: Any = root.command
        yield from (f"{'Usage: ' if at == 0 else '       '}{line}" for at, line in enumerate(self.usage))
        yield from ("", *textwrap.wrap(command.help.partition("\n")[0], _WIDTH), "", "Examples:")
        yield from (f"  {line}" for line in self.examples)
        yield from ("", "Options:")
        by_name = {name: one for one in command.params for name in one.opts}
        yield from _options((by_name[name] for name in self.options), root)
        yield from ("", "Commands:")
        for name in command.list_commands(root):
            text = command.get_command(root, name).help.partition("\n")[0]
            yield f"  {name:<10} {_clause(text, _WIDTH - 13)}"
        more = f"More: {root.info_name} --help-all, {root.info_name} help TOPIC:"
        yield from ("", *textwrap.wrap(f"{more} {', '.join(self.names())}", _WIDTH))

    def names(self) -> list[str]:
        """All topics."""
        return [*self.topics.values(), _OUTPUT, _EXIT_CODES]

    def topic(self, context: typer.Context, topic: str) -> Iterator[str]:
        """The page of a topic, or of a command by its name.

        Raises:
            UsageError: there is no such topic.
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
            raise UsageError(f"there is no topic {topic!r}", hint=hint)


def _clause(text: str, width: int) -> str:
    """A sentence, or as many of its clauses as fit."""
    if len(text) <= width:
        return text
    first = re.split("[:;]", text)[0]
    return (first if len(first) <= width else first[:width].rpartition(",")[0]) + "."


def _options(parameters: Iterable[Any], context: Any) -> Iterator[str]:
    """Lines with the names of options, and in a column of their own what they do."""
    for one in parameters:
        if (record := one.get_help_record(context)) is None:
            continue
        name, text = record
        first, *others = textwrap.wrap(text, _WIDTH - _COLUMN - 2)
        if len(name) < _COLUMN:
            yield f"  {name:<{_COLUMN}}{first}"
        else:
            yield from (f"  {name}", f"  {'':<{_COLUMN}}{first}")
        yield from (f"  {'':<{_COLUMN}}{line}" for line in others)


HELP = Help(
    usage=("export-model --ckpt-dir DIR --out MODEL [OPTIONS]", "export-model COMMAND ..."),
    examples=(
        "export-model --ckpt-dir train/ --model my_model.py:serving --out models/m",
        "export-model --ckpt-dir train/ --model my_model.py:serving --out m --incr",
    ),
    options=(
        "--ckpt-dir",
        "--out",
        "--model",
        "--input",
        "--output",
        "--incr",
        "--watch",
        "--verify",
        "--dry-run",
        "--keep",
        "--json",
        "--quiet",
    ),
    topics={**HEADINGS, GROUP: "tls"},
)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)


def _short(context: typer.Context, is_asked: bool) -> None:
    if is_asked:
        _print(HELP.short(context))
        raise typer.Exit


def _all(context: typer.Context, is_asked: bool) -> None:
    if is_asked:
        _print([context.get_help()])
        raise typer.Exit


HelpFlag = Annotated[
    bool,
    typer.Option(
        "--help", "-h", callback=_short, is_eager=True, help="Show the options that most runs need."
    ),
]
HelpAllFlag = Annotated[
    bool, typer.Option("--help-all", callback=_all, is_eager=True, help="Show all options.")
]


def help(
    context: typer.Context,
    topic: Annotated[
        str | None,
        typer.Argument(metavar="TOPIC", help="A topic or a command.", autocompletion=HELP.names),
    ] = None,
) -> None:
    """Show the options of a topic, or the help of a command.

    \b
    Examples:
      export-model help deltas
      export-model help merge
    """
    with command(AS_TEXT):
        _print(HELP.short(context) if topic is None else HELP.topic(context, topic))
