"""Programs of several commands, each imported, with its options, only when it is called.

Building all commands of `export-model` takes longer than a small delta, and half as long as its `--help`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import typer
from msgspec import Struct, field

from exporter.terminal.help import PlainCommand, PlainGroup
from exporter.terminal.parameters import help_of, with_structs


class LateCommand(Struct, frozen=True):
    """A command that is not imported yet."""

    module: str
    function: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `typer.Typer.command`."""
    short: tuple[str, ...] = ()
    """The options that `--help` shows, if it is not all."""

    def load(self) -> Callable[..., None]:
        """Import the command's module and return the function that runs the command.

        ImportError or AttributeError if there is none.
        """
        function: Callable[..., None] = getattr(import_module(self.module), self.function)
        return function


class Commands(Mapping[str, Any]):
    """Click's commands by their names, made when they are first used."""

    def __init__(self, late: Mapping[str, LateCommand]) -> None:
        self._late = late
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        late = self._late[name]
        if name not in self._made:
            app = typer.Typer(add_completion=False)
            app.command(name, cls=PlainCommand, **late.settings)(with_structs(late.load()))
            made: Any = typer.main.get_command(app)
            if late.short:
                made.shorten(late.short)
            self._made[name] = without_variables(made)
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._late

    def __iter__(self) -> Iterator[str]:
        return iter(self._late)

    def __len__(self) -> int:
        return len(self._late)

    def summary(self, name: str) -> str:
        """Return the first paragraph of a command's help as one line; "" without any help.

        It imports the command's module. KeyError for an unknown name.
        """
        return help_of(self._late[name].load().__doc__ or "").partition("\n")[0]


def application(
    help: str, late: Mapping[str, LateCommand], *, invoke_without_command: bool = False
) -> typer.Typer:
    """Make the Typer application of a program with the commands `late`, by name, in the order of help.

    `help` is the help text of the program, or of its callback. With `invoke_without_command` the callback
    runs without a command, too, and has its own help options; otherwise the help is printed then.
    """

    class Program(PlainGroup):
        """A group of commands that are made when they are used."""

        def __init__(self, **settings: Any) -> None:
            commands: Any = Commands(late)
            super().__init__(**{**settings, "commands": commands})

        def list_commands(self, ctx: object) -> list[str]:
            """The names of all commands, in the order in which they were given."""
            return [*late]

    return typer.Typer(
        cls=Program,
        help=help_of(help),
        context_settings={"help_option_names": ["-h", "--help"]},
        add_help_option=not invoke_without_command,
        no_args_is_help=not invoke_without_command,
        invoke_without_command=invoke_without_command,
        pretty_exceptions_enable=False,  # `command` has an exit code for every error
    )


def without_variables(command: Any) -> Any:
    """Change a Click command, in place, to not name environment variables in its help, and return it.

    One rule gives all their names, and help is long.
    """
    for one in command.params:
        one.show_envvar = False
    return command
