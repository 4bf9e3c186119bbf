"""What the two command lines share: one sink, errors to exit codes, signals, and their common options."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn

import click
from msgspec import Struct

from exporter.errors import Exit, ExportError, UsageError, unreachable
from exporter.terminal import interrupt_by_exception
from exporter.terminal.output import Output, OutputMode, silence
from exporter.terminal.parameters import App, Option, Options
from exporter.terminal.quiet_import import quiet_tensorflow
from exporter.version import __version__


class OutputFlags(Struct, frozen=True):
    """How a command prints: the options that all of them have."""

    json_: Annotated[
        bool, Option("--json", help="Print one JSON document on stdout, and errors as JSON on stderr.")
    ] = False
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print nothing but errors.")] = False
    debug: Annotated[bool, Option("--debug", help="Show tracebacks.")] = False

    @property
    def mode(self) -> OutputMode:
        """What the sink makes of what it is given."""
        return OutputMode.JSON if self.json_ else OutputMode.QUIET if self.quiet else OutputMode.HUMAN


OutputOptions = Annotated[OutputFlags, Options()]
AS_TEXT = OutputFlags()
"""Nothing was typed: text for a person."""


def _print_version(is_asked: bool) -> None:
    if is_asked:
        click.echo(f"export-model {__version__}")
        raise click.exceptions.Exit


VersionFlag = Annotated[
    bool,
    Option("-V", callback=_print_version, help="Print the program's version."),
]


def _exit_codes() -> str:
    """The table of exit codes at the end of a help text, in two columns."""
    texts = [f"{int(code):<2} {code.meaning}" for code in Exit]
    half = (len(texts) + 1) // 2
    rows = (f"  {left:<36}{right}" for left, right in zip(texts[:half], texts[half:], strict=True))
    return "\b\nExit codes:\n" + "\n".join(rows)


EXIT_CODES = _exit_codes()


def pairs(option: str, values: Iterable[str]) -> dict[str, str]:
    """Repeated `NAME=VALUE` options as a dict.

    Raises:
        UsageError: no `=`, an empty side, or a name given twice.
    """
    result: dict[str, str] = {}
    for text in values:
        name, _, value = text.partition("=")
        if not name or not value:
            raise UsageError(f"{option} {text!r} is not of the form NAME=VALUE")
        if name in result:
            raise UsageError(f"{option} names {name!r} twice")
        result[name] = value
    return result


@contextmanager
def command(flags: OutputFlags) -> Iterator[Output]:
    """Run a command's body with its sink; whatever it raises ends in a message and an exit code.

    SIGTERM is treated as SIGINT is: the body is unwound, so that staging is removed.
    """
    sink = Output(flags.mode)
    quiet_tensorflow()
    interrupt_by_exception()
    try:
        yield sink
    except ExportError as error:
        _finish(sink, error, flags.debug)
    except KeyboardInterrupt:
        _finish(sink, Interrupted("interrupted"), flags.debug)
    except BrokenPipeError:  # the reader of stdout has gone (`| head`): nothing is left to say
        silence(sys.stdout)
        raise click.exceptions.Exit(Exit.FAILURE) from None
    except OSError as error:  # of some look at a path: whether it is there, or a file
        _finish(sink, unreachable(error), flags.debug)
    except Exception as error:  # noqa: BLE001 - the edge of the program: no traceback without --debug
        _finish(sink, ExportError(f"unexpected {type(error).__name__}: {error}"), flags.debug)
    finally:
        sink.close()


def outlived(sink: Output, error: ExportError) -> None:
    """Say what went wrong, or is waited for, and that the command goes on all the same."""
    if error.may_pass:
        sink.note(f"waiting: {error.message}")
    else:
        sink.error(error)


def watch_ended(sink: Output, why: str) -> None:
    """The last line of a watch."""
    sink.note(f"the watch has ended: {why}")


class Interrupted(ExportError):
    """SIGINT or SIGTERM."""

    exit_code = Exit.INTERRUPTED
    default_hint = "nothing is half-written; run the command again"


def _finish(sink: Output, error: ExportError, debug: bool) -> NoReturn:
    if debug:
        import traceback

        traceback.print_exc(file=sink.stderr)
    sink.error(error)
    raise click.exceptions.Exit(int(error.exit_code))


def _say_all_characters() -> None:
    """Write what a stream's encoding lacks as an escape: no name of a file is to fail what is done."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _open_closed_streams() -> None:
    """Give closed standard streams (`>&-`) their descriptors back: a file that is opened next would get them,
    and with them what is printed. Writing to such a stream still fails, as it should.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)  # the lowest free descriptor, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115  for good


def run(app: App, arguments: list[str] | None = None) -> NoReturn:
    """Run an application as a program; Click's usage errors leave by the same door as all others."""
    arguments = sys.argv[1:] if arguments is None else arguments
    _open_closed_streams()
    _say_all_characters()
    try:
        code = app.main(arguments, prog_name=app.name, standalone_mode=False)
    except UsageError as error:  # of an option's own parser
        Output(OutputMode.JSON if "--json" in arguments else OutputMode.HUMAN).error(error)
        sys.exit(Exit.USAGE)
    except click.UsageError as error:
        sink = Output(OutputMode.JSON if "--json" in arguments else OutputMode.HUMAN)
        asked = error.ctx.command_path if error.ctx is not None else app.name
        sink.error(UsageError(error.format_message(), hint=f"see {asked} --help"))
        sys.exit(Exit.USAGE)
    sys.exit(code if isinstance(code, int) else Exit.DONE)
