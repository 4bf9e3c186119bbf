"""Completion of commands and options in bash, zsh and fish: `export-model completion bash` prints the script.

The script asks the program itself, by environment variables that Typer answers. Nothing is installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer


class Shell(StrEnum):
    """The shells that can be helped."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


_HELP = """Print a script that completes commands and options in a shell.

\b
Examples:
  {name} completion bash > ~/.local/share/bash-completion/completions/{name}
  source <({name} completion zsh)
  {name} completion fish > ~/.config/fish/completions/{name}.fish"""


def register(app: typer.Typer, name: str) -> None:
    """Add the subcommand `completion` to an application."""
    app.command("completion", help=_HELP.format(name=name))(_command(name))


def _command(name: str) -> Callable[..., None]:
    def completion(
        shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish", help="The shell.")],
    ) -> None:
        """Print the script."""
        from typer._completion_shared import get_completion_script

        script = get_completion_script(prog_name=name, complete_var=_variable(name), shell=shell.value)
        typer.echo(script)

    return completion


def prepare(name: str) -> None:
    """Let Typer answer if a shell asks; otherwise nothing of this is loaded."""
    if _variable(name) in os.environ:
        from typer._completion_classes import completion_init

        completion_init()


def _variable(name: str) -> str:
    return f"_{name.replace('-', '_').upper()}_COMPLETE"
