"""Completion of commands and options in bash, zsh and fish: `export-model completion bash` prints the script.

The script asks the program itself, by environment variables that Click answers. Nothing is installed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import click

from exporter.terminal.parameters import App, Argument


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


def register(app: App, name: str) -> None:
    """Add the subcommand `completion` to an application."""

    def completion(shell: Annotated[Shell, Argument("bash|zsh|fish", "The shell.")]) -> None:
        """Print the script."""
        from click.shell_completion import get_completion_class

        asked_by = f"_{name.replace('-', '_').upper()}_COMPLETE"
        script = get_completion_class(shell.value)
        assert script is not None
        click.echo(script(app, {}, name, asked_by).source())

    app.subcommand("completion", help=_HELP.format(name=name))(completion)
