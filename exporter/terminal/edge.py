"""What the two command lines share: one sink, errors to exit codes, signals, and their common options."""

from __future__ import annotations

import io
import os
import re
import sys
from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from itertools import pairwise, takewhile
from typing import Annotated, Any, NoReturn

import typer
from msgspec import Struct

from exporter.errors import Exit, ExportError, UsageError, in_lines, nearest, unreachable
from exporter.options import Option
from exporter.storage.local_paths import quoted
from exporter.terminal import Leave, interrupt_by_exception
from exporter.terminal.commands import without_variables
from exporter.terminal.output import Output, OutputMode, silence
from exporter.terminal.parameters import COMMAND, MISSPELT, TAKEN, variable_of, with_names
from exporter.terminal.progress import count
from exporter.terminal.tensorflow_import import needed, on_import_of_tensorflow
from exporter.version import __version__


class OutputFlags(Struct, frozen=True):
    """How a command prints: the options that all of them have."""

    json_: Annotated[bool, Option("Print JSON: one document on stdout, errors on stderr.", name="--json")] = (
        False
    )
    quiet: Annotated[bool, Option("Print nothing but errors.", letter="-q")] = False
    debug: Annotated[bool, Option("Show tracebacks.")] = False

    @property
    def mode(self) -> OutputMode:
        """The reader that the flags ask for."""
        return OutputMode.JSON if self.json_ else OutputMode.QUIET if self.quiet else OutputMode.HUMAN


AS_TEXT = OutputFlags()
"""Nothing was typed: text for a person."""


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"export-model {__version__}")
        raise typer.Exit


VersionFlag = Annotated[
    bool,
    typer.Option("-V", callback=_print_version, is_eager=True, help="Print the program's version."),
]


def _exit_codes() -> str:
    """The table of exit codes at the end of a help text, a code a line: two columns do not fit a terminal."""
    rows = (f"  {int(code):<5}{code.meaning}" for code in Exit)
    return "\b\nExit codes:\n" + "\n".join(rows)


EXIT_CODES = _exit_codes()

NOTES = "notes"
"""Where the context has what is to be said of the arguments: see `run`."""


@contextmanager
def command(flags: OutputFlags) -> Iterator[Output]:
    """Run a command's body with its sink; whatever it raises ends in a message and an exit code.

    SIGTERM is treated as SIGINT is: the body is unwound, so that staging is removed.
    """
    sink = Output(flags.mode)
    if taken := TAKEN.get():
        sink.note("not typed: " + ", ".join(f"{one.option} {one.value} ({one.source})" for one in taken))
    for variable, meant in MISSPELT.get():
        sink.warn(f"{variable} is read by nothing: did you mean {meant}?")
    on_import_of_tensorflow()
    interrupt_by_exception()
    try:
        with redirect_stdout(sys.stderr), sink.at_work(COMMAND.get()):  # what a user's code prints is talk
            yield sink
    except ExportError as error:
        _finish(sink, error, flags.debug)
    except KeyboardInterrupt:
        _finish(sink, Interrupted("interrupted"), flags.debug)
    except BrokenPipeError:  # the reader of stdout has gone (`| head`): nothing is left to say
        silence(sys.stdout)
        raise typer.Exit(Exit.FAILURE) from None
    except ModuleNotFoundError as error:
        _finish(sink, needed(error), flags.debug)
    except OSError as error:  # of some look at a path: whether it is there, or a file
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
    """Say what went wrong, or is waited for, and that the command goes on all the same."""
    if error.may_pass:
        sink.note(f"waiting: {error.message}")
    else:
        sink.error(error)


def watch_ended(sink: Output, why: str) -> None:
    """Print the last line of a watch: why it ended."""
    sink.note(f"the watch has ended: {why}")


class PublishedSoFar(Struct):
    """The number of a watch's publications, and the newest of them."""

    count: int = 0
    newest: str = ""

    def add(self, place: object) -> None:
        """Count a publication."""
        self.count, self.newest = self.count + 1, str(place)


@contextmanager
def until_interrupted(sink: Output) -> Iterator[PublishedSoFar]:
    """Run a watch, which Ctrl-C and SIGTERM end as its own limits do: what is under way is unwound, and it is
    no error. Its last line says what was published.
    """
    published = PublishedSoFar()
    try:
        yield published
    except KeyboardInterrupt:
        newest = f", the newest {published.newest}" if published.count else ""
        watch_ended(sink, f"interrupted after {count(published.count, 'publication')}{newest}")


class Interrupted(ExportError):
    """SIGINT or SIGTERM."""

    exit_code = Exit.INTERRUPTED
    default_hint = "nothing is half-written; run the command again"


def _finish(sink: Output, error: ExportError, debug: bool) -> NoReturn:
    if debug:
        import traceback

        for part in traceback.format_exception(*sys.exc_info()):
            sink.stderr.write(in_lines(part.rstrip("\n")) + "\n")
    sink.error(with_names(error))
    raise typer.Exit(int(error.exit_code))


def _say_all_characters() -> None:
    """Write what a stream's encoding lacks as an escape: no name of a file is to fail what is done."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _keep_stderr() -> None:
    """Give `sys.stderr` a descriptor of its own: number 2 leads elsewhere while some thread imports
    TensorFlow, and what another thread said meanwhile, perhaps why the program ends, would be lost.
    """
    with suppress(OSError, ValueError):  # it has no descriptor, or there are no more
        if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr.fileno() == 2:
            sys.stderr = os.fdopen(os.dup(2), "w", 1, sys.stderr.encoding, sys.stderr.errors)


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


# Click's own class, whichever Click there is: from 0.26 on Typer carries one along.
_ClickUsageError: type[Any] = typer.BadParameter.__mro__[1]


Rewrite = Callable[[list[str]], tuple[list[str], list[str]]]
"""What is typed, made into what is parsed, and what the command is to say of it."""


def run(
    app: typer.Typer,
    name: str,
    arguments: list[str] | None = None,
    rewrite: Rewrite | None = None,
    *,
    takes: Sequence[str] = (),
) -> NoReturn:
    """Run an application as a program; Typer's usage errors leave by the same door as all others.

    `takes` are options, or a command, for words that stand where a command is expected: see `wrong_use`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    _open_closed_streams()
    _keep_stderr()
    _say_all_characters()
    if arguments == ["--version"]:  # alone; an export's version number stands behind it
        arguments = ["-V"]
    program = without_variables(typer.main.get_command(app))
    COMMAND.set(" ".join([name, *(each for each in arguments[:1] if each in program.commands)]))
    try:
        arguments, notes = rewrite(arguments) if rewrite else (arguments, [])
        code = program.main(
            arguments,
            prog_name=name,
            standalone_mode=False,
            obj={NOTES: notes},
            auto_envvar_prefix=name.replace("-", "_").upper(),
        )
    except (UsageError, _ClickUsageError) as error:  # a UsageError: of an option's own parser
        sink = Output(OutputMode.JSON if "--json" in arguments else OutputMode.HUMAN)
        if isinstance(error, UsageError):
            sink.error(with_names(error))
        else:
            sink.error(wrong_use(error, program, name, arguments, takes))
        sys.exit(Exit.USAGE)
    sys.exit(code if isinstance(code, int) else Exit.DONE)


_PLAINLY = {
    "is not a valid int range": "is not a whole number",
    "is not a valid int": "is not a whole number",
    "is not a valid float range": "is not a number",
    "is not a valid float": "is not a number",
}
_SUGGESTIONS = re.compile(r" (?:\(Possible options: .*\)|Did you mean .*)$")
_EXTRA = re.compile(r"extra argument.*\((.*)\)")
_UNKNOWN_COMMAND = re.compile(r"No such command (.*?)\.(?: Did you mean .*)?", re.DOTALL)


def wrong_use(
    error: Any, command: Any, program: str, arguments: Sequence[str], takes: Sequence[str]
) -> UsageError:
    """The error of a command line that Click refused; `command` is the program's root.

    `takes` are the options, or the command, for words that stand where a command is expected, in their order:
    such a word is probably a path.
    """
    message = error.format_message()
    for technical, plain in _PLAINLY.items():
        message = message.replace(technical, plain)
    context = error.ctx or _context(command, program, arguments)
    hint = f"see {context.command_path} --help"
    if (option := _option_without_value(context, arguments)) is not None:
        name, value, follows = option
        message = f"{name} has no value: {follows} follows"
        hint = _command_line(program, _with_correction(arguments, name, f"{name} {value}"))
    elif (unknown := _UNKNOWN_COMMAND.fullmatch(message)) is not None:
        word = literal_eval(unknown[1])
        message = f"there is no command {word!r}"
        hint = _unknown_word(word, context, program, arguments, takes)
    elif (wrong := getattr(error, "option_name", None)) and "No such option" in message:
        options = (one for one in context.command.params if one.param_type_name == "option")
        names = [max(one.opts, key=len) for one in options]
        message = _SUGGESTIONS.sub("", message)
        if close := nearest(wrong, names):
            hint = _command_line(program, _with_correction(arguments, wrong, close))
    elif (parameter := getattr(error, "param", None)) is not None:
        if message.startswith("Missing"):
            hint = _with_missing(program, arguments, parameter, context)
        else:
            hint = _nearest_choice(parameter, message) or f"{_usage_of(parameter, context)}: {parameter.help}"
        if (file := getattr(error, "file_of_options", None)) is not None:
            message, hint = f"{file}: {message}", f"correct it in {file}; {hint}"
        elif (variable := variable_of(context, parameter)) is not None:
            message, hint = f"{variable}: {message}", f"correct {variable}, or unset it; {hint}"
    elif (lacks := getattr(error, "option_name", None)) is not None:
        found = next((one for one in context.command.params if lacks in one.opts), None)
        hint = hint if found is None else f"{_usage_of(found, context)}: {found.help}"
    elif (extra := _EXTRA.search(message)) is not None:
        too_many = extra[1].split(" ")
        hint = _command_line(program, [each for each in arguments if each not in too_many])
    return UsageError(message, hint=hint)


def _context(command: Any, program: str, arguments: Sequence[str]) -> Any:
    """The context of the command that was asked for, as Click makes it while it parses nothing."""
    root = command.make_context(program, [], resilient_parsing=True)
    sub = next((one for each in arguments if (one := command.get_command(root, each))), None)
    return root if sub is None else sub.make_context(sub.name, [], parent=root, resilient_parsing=True)


def _with_missing(program: str, arguments: Sequence[str], parameter: Any, context: Any) -> str:
    """The command line with its missing parameter; an extra word at its end becomes the parameter's value."""
    own = sum(one.param_type_name == "argument" for one in context.command.params)
    is_value = len(arguments) == 2 + own and not any(each.startswith("-") for each in arguments)
    if is_value and parameter.param_type_name == "option":
        return _command_line(program, [*arguments[:-1], max(parameter.opts, key=len), arguments[-1]])
    return f"{_command_line(program, arguments)} {_usage_of(parameter, context)}"


def _option_without_value(context: Any, arguments: Sequence[str]) -> tuple[str, str, str] | None:
    """The first option without its value: name, metavar, and the option that follows; or None."""
    known = {name: one for one in context.command.params for name in getattr(one, "opts", ())}
    for name, follows in pairwise(arguments):
        one = known.get(name)
        if one is not None and not getattr(one, "is_flag", True) and follows in known:
            return name, one.make_metavar(context).partition("|")[0], follows
    return None


def _unknown_word(
    word: str, context: Any, program: str, arguments: Sequence[str], takes: Sequence[str]
) -> str:
    """The command line with the nearest command for an unknown word, or with options that take the word."""
    if close := nearest(word, context.command.list_commands(context)):
        return _command_line(program, _with_correction(arguments, word, close))
    at = arguments.index(word)
    words = list(takewhile(lambda each: not each.startswith("-"), arguments[at:]))[: len(takes)]
    named = [part for option, each in zip(takes, words, strict=False) for part in (option, each)]
    return _command_line(program, [*named, *arguments[:at], *arguments[at + len(words) :]])


def _usage_of(parameter: Any, context: Any) -> str:
    """An option or argument as it is typed: `--keep N`, `MODEL`."""
    metavar = str(parameter.make_metavar(context))
    if parameter.param_type_name == "argument":
        return metavar.strip("{}[]")
    return f"{max(parameter.opts, key=len)} {metavar}"


def _nearest_choice(parameter: Any, message: str) -> str:
    """The option with the choice nearest to the one that was typed; empty if none is near."""
    typed = re.search(r"'([^']*)' is not one of", message)
    close = nearest(typed[1], getattr(parameter.type, "choices", ())) if typed else ""
    return f"{max(parameter.opts, key=len)} {close}" if close else ""


def _with_correction(arguments: Sequence[str], wrong: str, right: str) -> Iterator[str]:
    for each in arguments:
        name, equals, value = each.partition("=")
        if name != wrong:
            yield each
        else:
            yield from (f"{right}={value}",) if equals else right.split(" ")


def _command_line(program: str, arguments: Any) -> str:
    return " ".join([program, *map(quoted, arguments)])
