"""`export-model --help`, `--help-all` and `export-model help TOPIC`.

`--help` fits a screen: the options of most runs; `help TOPIC` has those of one topic, `--help-all` all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from typing import Annotated

import typer

from exporter.options import HEADINGS
from exporter.terminal.edge import AS_TEXT, command
from exporter.terminal.help import Help
from exporter.terminal.server_access import GROUP

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


def echo(lines: Iterable[str]) -> None:
    """Print lines on stdout, one after another."""
    for line in lines:
        typer.echo(line)


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
    out = sys.stdout
    with command(AS_TEXT), redirect_stdout(out):  # inside a command, prints go to stderr; help is a result
        echo(HELP.short(context) if topic is None else HELP.topic(context, topic))
