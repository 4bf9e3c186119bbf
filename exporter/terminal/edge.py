"""The common part of both command lines: one sink, errors to exit codes, signals, and common options."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from typing import Annotated, Any, NoReturn

import typer
from msgspec import Struct

from exporter.errors import Exit, ExportError, UsageError, in_lines, unreachable
from exporter.options import Option
from exporter.options.given import IN_COMMAND
from exporter.options.old_names import renew_variables, renew_words
from exporter.terminal import Leave, interrupt_by_exception
from exporter.terminal.commands import without_variables
from exporter.terminal.output import Output, OutputMode, silence
from exporter.terminal.parameters import ARGUMENTS, COMMAND, MISSPELT, RENAMED, TAKEN, with_names
from exporter.terminal.progress import count
from exporter.terminal.tensorflow_import import needed, on_import_of_tensorflow
from exporter.version import __version__


class OutputFlags(Struct, frozen=True):
    """The options of every command about its output."""

    json_: Annotated[bool, Option("Print JSON: one document on stdout, errors on stderr.", name="--json")] = (
        False
    )
    quiet: Annotated[bool, Option("Print nothing but errors.", letter="-q")] = False
    debug: Annotated[bool, Option("Show tracebacks.")] = False

    @property
    def mode(self) -> OutputMode:
        """The output mode that the flags ask for."""
        return OutputMode.JSON if self.json_ else OutputMode.QUIET if self.quiet else OutputMode.HUMAN


AS_TEXT = OutputFlags()
"""The default: text for a person."""


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"export-model {__version__}")
        raise typer.Exit


_version_option = partial(
    typer.Option, callback=_print_version, is_eager=True, help="Print the program's version."
)
VersionFlag = Annotated[bool, _version_option("-V")]
"""For commands whose `--version` means something else."""
VersionOption = Annotated[bool, _version_option("--version", "-V")]


def _exit_codes() -> str:
    """Return the list of exit codes for the end of a help text, one on each line."""
    rows = (f"  {int(code):<5}{code.meaning}" for code in Exit)
    return "\b\nExit codes:\n" + "\n".join(rows)


EXIT_CODES = _exit_codes()

NOTES = "notes"
"""The key, in the context's object, of notes about the arguments: see `run`."""


@contextmanager
def command(flags: OutputFlags) -> Iterator[Output]:
    """Run a command's body, the block, with its output; any exception ends in a message and an exit code.

    Yields the output, in the mode of `flags`; with `debug` in them, tracebacks are printed, too. Notes on the
    command line are printed before. In the block, `sys.stdout` is redirected to stderr, but results are
    printed on stdout; SIGTERM raises KeyboardInterrupt like SIGINT, so that staging is removed. From then on
    imports of TensorFlow are silent: see `on_import_of_tensorflow`.

    Raises:
        typer.Exit: the block has failed or was interrupted; with the exit code. The error is printed, unless
            the reader of stdout has ended.
        Leave: as the block raised it.
    """
    # before the redirection below: an output keeps the stdout that it finds
    sink = Output(flags.mode)
    for note in RENAMED.get():
        sink.warn(note)
    if taken := TAKEN.get():
        sink.note("not typed: " + ", ".join(f"{one.option} {one.value} ({one.source})" for one in taken))
    for variable, meant in MISSPELT.get():
        sink.warn(f"{variable} is read by nothing: did you mean {meant}?")
    on_import_of_tensorflow()
    interrupt_by_exception()
    try:
        with redirect_stdout(sys.stderr), sink.at_work(COMMAND.get()):  # what a user's code prints is talk
            typed = IN_COMMAND.set(True)
            try:
                yield sink
            finally:
                IN_COMMAND.reset(typed)
    except ExportError as error:
        _finish(sink, error, flags.debug)
    except KeyboardInterrupt:
        _finish(sink, Interrupted("interrupted"), flags.debug)
    except BrokenPipeError:  # the reader of stdout has ended (`| head`): print nothing more
        silence(sys.stdout)
        raise typer.Exit(Exit.FAILURE) from None
    except ModuleNotFoundError as error:
        _finish(sink, needed(error), flags.debug)
    except OSError as error:  # from some look at a path: whether it exists, or is a file
        _finish(sink, unreachable(error), flags.debug)
    except Leave:
        raise
    except SystemExit as error:  # a library's: our own commands leave by `Leave`, or return
        _finish(sink, ExportError(f"a library ended the program: SystemExit({error.code!r})"), flags.debug)
    except Exception as error:  # noqa: BLE001 - the edge of the program: no traceback without --debug
        _finish(sink, ExportError(f"unexpected {type(error).__name__}: {error}"), flags.debug)
    finally:
        sink.close()


def outlived(sink: Output, error: ExportError) -> None:
    """Print an error that the command survives, on stderr.

    An error that time may repair (`may_pass`) is printed as a note that the command is waiting.
    """
    if error.may_pass:
        sink.note(f"waiting: {error.message}")
    else:
        sink.error(error)


def watch_ended(sink: Output, why: str) -> None:
    """Print the last line of a watch, a note with `why`, the reason of its end."""
    sink.note(f"the watch has ended: {why}")


class PublishedSoFar(Struct):
    """The number of a watch's publications, and the newest of them."""

    count: int = 0
    newest: str = ""

    def add(self, place: object) -> None:
        """Count a publication, whose path or URL is `place`, as the newest."""
        self.count, self.newest = self.count + 1, str(place)


@contextmanager
def until_interrupted(sink: Output) -> Iterator[PublishedSoFar]:
    """Run a watch, the block; a KeyboardInterrupt, as of Ctrl-C or SIGTERM, ends it without an error.

    Yields a count of publications, which the block keeps up to date. After an interruption the last line
    printed has their number, and names the newest.
    """
    published = PublishedSoFar()
    try:
        yield published
    except KeyboardInterrupt:
        newest = f", the newest {published.newest}" if published.count else ""
        watch_ended(sink, f"interrupted after {count(published.count, 'publication')}{newest}")


class Interrupted(ExportError):
    """The command was ended by SIGINT or SIGTERM."""

    exit_code = Exit.INTERRUPTED
    default_hint = "nothing is half-written; run the command again"


def _finish(sink: Output, error: ExportError, debug: bool) -> NoReturn:
    if debug:
        import traceback

        # before the error, which with --json is the last line of stderr
        for part in traceback.format_exception(*sys.exc_info()):
            sink.stderr.write(in_lines(part.rstrip("\n")) + "\n")
    sink.error(with_names(error))
    raise typer.Exit(int(error.exit_code))


def _say_all_characters() -> None:
    """Let stdout and stderr escape characters that their encodings lack, so that printing never fails."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _keep_stderr() -> None:
    """Give `sys.stderr` its own descriptor, since number 2 is redirected while a thread imports TensorFlow.

    Otherwise another thread's messages at that time, perhaps the reason why the program ends, would be lost.
    A failure is ignored.
    """
    with suppress(OSError, ValueError):  # it has no descriptor, or there are no more
        if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr.fileno() == 2:
            # 1: line by line, as Python's own stderr
            sys.stderr = os.fdopen(os.dup(2), "w", 1, sys.stderr.encoding, sys.stderr.errors)


def _open_closed_streams() -> None:
    """Open the descriptors of closed standard streams (`>&-`) again, on /dev/null for reading.

    Otherwise the next file to be opened would get them, and with them the program's output. Writing to such a
    stream still fails, as it should.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)  # the lowest free descriptor, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115  for good


# Click's own class, of whichever Click: from 0.26 on Typer contains one.
_ClickUsageError: type[Any] = typer.BadParameter.__mro__[1]


Rewrite = Callable[[list[str]], tuple[list[str], list[str]]]
"""A function from the typed arguments to the arguments to parse, and notes to print about them."""


def run(
    app: typer.Typer,
    name: str,
    arguments: list[str] | None = None,
    rewrite: Rewrite | None = None,
    *,
    takes: Sequence[str] = (),
) -> NoReturn:
    """Run an application as a program, and exit; Typer's usage errors are printed like all others.

    `name` is the program's, `arguments` are its arguments (None: the arguments of the process), `rewrite`
    changes them before they are parsed. `takes` are the options, or a command, for words that are typed in
    place of a command: see `wrong_use`. Environment variables and arguments with old names are renamed, also
    in `os.environ`.

    Raises:
        SystemExit: always; with the exit code.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    # First: a copy of stderr takes the lowest free number, which may be that of a closed stdin.
    _open_closed_streams()
    _keep_stderr()
    _say_all_characters()
    if arguments == ["--version"]:  # alone; as an export's option it has a version number
        arguments = ["-V"]
    program = without_variables(typer.main.get_command(app))
    prefix = name.replace("-", "_").upper()
    renamed = renew_variables(program, prefix, os.environ)
    arguments, notes = renew_words(program, arguments)
    RENAMED.set((*renamed, *notes))
    ARGUMENTS.set(tuple(arguments))
    COMMAND.set(" ".join([name, *(each for each in arguments[:1] if each in program.commands)]))
    try:
        arguments, notes = rewrite(arguments) if rewrite else (arguments, [])
        code = program.main(
            arguments,
            prog_name=name,
            standalone_mode=False,  # else Click prints errors in its own way, and exits
            obj={NOTES: notes},
            auto_envvar_prefix=prefix,
        )
    except (UsageError, _ClickUsageError) as error:  # a UsageError: of an option's own parser
        sink = Output(OutputMode.JSON if "--json" in arguments else OutputMode.HUMAN)
        if isinstance(error, UsageError):
            sink.error(with_names(error))
        else:
            from exporter.terminal.wrong_use import wrong_use  # late: most command lines are right

            sink.error(wrong_use(error, program, name, arguments, takes))
        sys.exit(Exit.USAGE)
    sys.exit(code if isinstance(code, int) else Exit.DONE)
