"""Print results, notes and errors: for people, as JSON, or not at all. Nothing else in the program prints.

stdout has results, stderr has notes and errors. Colour is decided for each stream: NO_COLOR > FORCE_COLOR >
isatty. Lines contain styled words, `[bold]label[/] text`, for a stream with colours or without. A backslash
makes the next character plain text. All other control characters are escaped. Importing rich takes longer
than many a command: it is imported only for tables and progress bars.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from enum import Enum
from pathlib import Path
from threading import Timer
from typing import IO, TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import asdict

from exporter.errors import DiskFull, ExportError, bounded, in_lines, printable
from exporter.storage.mirror import shown
from exporter.terminal.progress import NoProgress, Progress, human_bytes

if TYPE_CHECKING:
    from rich.console import Console


_SPECIAL = re.compile(r"[\\\[]")
_CODES = {"/": "0", "bold": "1", "red": "31", "yellow": "33"}
_STYLE = "|".join(_CODES)
_ESCAPED_OR_STYLE = re.compile(rf"\\([\\\[])|\[((?:{_STYLE})(?: (?:{_STYLE}))*)\]")


def escape(value: Any) -> str:
    """Return a value as text with markup's special characters, `[` and backslash, escaped."""
    return _SPECIAL.sub(r"\\\g<0>", str(value))


def labelled(label: str, value: Any) -> str:
    """Return a line of a result, with markup: a bold label, and an escaped value in the second column."""
    return f"[bold]{label:<14}[/]{escape(value)}"


def rendered(line: str, *, coloured: bool) -> str:
    """Return a line with its markup as terminal escape sequences, or without styles unless `coloured`.

    Other control characters are escaped.
    """

    def style(found: re.Match[str]) -> str:
        literal, words = found.groups()
        if words is None:
            return str(literal)
        return f"\x1b[{';'.join(_CODES[word] for word in words.split())}m" if coloured else ""

    return _ESCAPED_OR_STYLE.sub(style, printable(line))


def plain(*lines: str) -> bytes:
    """Return the body of a text/plain response in UTF-8, each text on a line; control characters are escaped.

    People read it on terminals.
    """
    return "".join(f"{printable(line)}\n" for line in lines).encode()


def quote_logs() -> None:
    """Let `logging` escape control characters in lines that it prints without a configured handler.

    For the whole process, from now on.
    """
    import logging

    class Quoted(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return in_lines(super().format(record))

    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Quoted())


_SILENCE_S = 2.0
"""Seconds without output on a terminal after which a command says that it is at work."""

FORMAT_VERSION = 1
"""The version of every JSON document; it comes first in each."""


class Failure(Struct, frozen=True):
    """The object in the last line of stderr when a command fails with `--json`."""

    error: str
    """The error's class, as in [troubleshooting](troubleshooting.md)."""
    message: str
    """What was found, and what was expected."""
    cause: str
    """The cause, if it is known; otherwise empty."""
    hint: str
    """The next command, or what to change."""
    exit_code: int
    """The command's exit code."""


class OutputMode(Enum):
    """The reader of the output: a person, a program, or none."""

    HUMAN = "human"
    JSON = "json"
    QUIET = "quiet"


class Output(Struct):
    """A command's output. Streams default to the process's own at the time of the call.

    With `json_lines` each document is one line, and people see the time of each result and note: for a
    command that runs on and has many results. After a failure to write, the next result is then tried
    again. With `is_brief` people get one line for each result that has one. `has_spoken` is true once
    anything was printed for a person.
    """

    mode: OutputMode = OutputMode.HUMAN
    json_lines: bool = False
    is_brief: bool = False
    has_spoken: bool = False
    stdout: IO[str] = field(default_factory=lambda: sys.stdout)
    stderr: IO[str] = field(default_factory=lambda: sys.stderr)
    _bars: Any = None

    def result(
        self, document: Struct, lines: Iterable[str] = (), *, brief: str = "", is_done: bool = False
    ) -> None:
        """Print the command's result on stdout, as JSON or as lines for people, and flush it.

        `document` is one of `exporter.cli.documents` or `serving.documents`; people get `lines` instead, or,
        if the output is brief, the one line `brief`. Both may contain markup. Nothing is printed with
        --quiet. `is_done`: the result has happened already, so that a failure to print it is only a warning.
        After a failure stdout is redirected to /dev/null, unless `json_lines`.

        Raises:
            BrokenPipeError: the reader of stdout has ended; not with `is_done`.
            ExportError: the result cannot be written for another reason; not with `is_done`.
        """
        with self._writing_stdout(is_done=is_done):
            if self.mode is OutputMode.JSON:
                indent = None if self.json_lines else 2
                whole = {"format_version": FORMAT_VERSION, **asdict(document)}
                # In one call: other threads may print documents, too.
                self.stdout.write(as_json(whole, indent=indent) + "\n")
            elif self.mode is OutputMode.HUMAN:
                self.has_spoken = True
                coloured = use_colour(self.stdout)
                if self.is_brief and brief:
                    lines = [" ".join([*self._time(), brief])]
                else:
                    lines = [*self._time(), *lines]
                for line in lines:
                    self.stdout.write(shown(rendered(line, coloured=coloured), printable) + "\n")
            self.stdout.flush()  # inside the block: a full disk is noticed here, not by `write`

    def _time(self) -> list[str]:
        return [time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())] if self.json_lines else []

    @contextmanager
    def _writing_stdout(self, *, is_done: bool) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._give_up(self.stdout)
            cause = error.strerror or str(error)
            if is_done:
                self.warn(f"all is done, but the result could not be written to standard output: {cause}")
                return
            if isinstance(error, BrokenPipeError):
                raise
            raise ExportError(
                "the result could not be written to standard output",
                cause=cause,
                hint="run the command again with standard output going where it can be written",
            ) from error

    def table(self, title: str, columns: Mapping[str, str], rows: Iterable[Iterable[Any]]) -> None:
        """Print a table for people on stdout; nothing with --json or --quiet.

        `columns` maps headings to "left" or "right", the alignment of cells; `rows` have a cell for each
        column. Cells contain no markup. An empty title is not printed.

        Raises:
            BrokenPipeError: the reader of stdout has ended.
            ExportError: the table cannot be written for another reason.
        """
        if self.mode is not OutputMode.HUMAN:
            return
        from rich import box
        from rich.table import Table
        from rich.text import Text

        cells = [[printable(shown(str(cell))) for cell in row] for row in rows]
        widths = [max((len(row[at]) for row in cells), default=0) for at in range(len(columns))]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for at, (heading, justify) in enumerate(columns.items()):
            table.add_column(
                heading,
                justify="right" if justify == "right" else "left",
                overflow="fold",  # rich cuts a long name off otherwise
                no_wrap=at != widths.index(max(widths)),  # in a narrow terminal the longest gives way
            )
        for row in cells:
            table.add_row(*map(Text, row))
        console = self._console(self.stdout)
        with self._writing_stdout(is_done=False):
            if title:
                console.print(Text(printable(shown(title)), "italic"), soft_wrap=True)
            console.print(table)
            self.stdout.flush()  # inside the block: a full disk is noticed here, not by `write`

    def note(self, text: str) -> None:
        """Print a note for people on stderr, not with --json or --quiet; a failure to write is ignored."""
        if self.mode is OutputMode.HUMAN:
            self._say(escape(" ".join([*self._time(), bounded(text)])))

    def warn(self, text: str) -> None:
        """Print a warning on stderr, unless --quiet; a failure to write is ignored."""
        if self.mode is not OutputMode.QUIET:
            self._say(f"[yellow]warning:[/] {escape(bounded(text))}")

    def _say(self, *lines: str) -> None:
        """Print lines, which may contain markup, on stderr; a failure to write is ignored.

        After a failure stderr is redirected to /dev/null, unless `json_lines`.
        """
        self.has_spoken = True
        try:
            for line in lines:
                self.stderr.write(shown(rendered(line, coloured=use_colour(self.stderr)), printable) + "\n")
            self.stderr.flush()
        except OSError:
            self._give_up(self.stderr)

    @contextmanager
    def at_work(self, what: str) -> Iterator[None]:
        """Print a note that the block is at work if it has printed nothing for its first two seconds.

        `what` names the command. Nothing with --json or --quiet, or if stderr is not a terminal. The note
        comes from a thread of its own.
        """
        if self.mode is not OutputMode.HUMAN or not self.stderr.isatty():
            yield
            return

        def speak() -> None:
            if not self.has_spoken:
                self.note(f"{what} is at work")

        timer = Timer(_SILENCE_S, speak)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def trouble(self, text: str) -> None:
        """Print the text of an error that does not end the command: on stderr, also with --quiet.

        A failure to write is ignored.
        """
        self._say(escape(" ".join([*self._time(), bounded(text)])))

    def close(self) -> None:
        """Flush both streams; one that cannot be flushed is redirected to /dev/null, without an error."""
        for stream in (self.stdout, self.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                silence(stream)

    def _give_up(self, stream: IO[str]) -> None:
        if not self.json_lines:  # else keep it: a full disk may have space for the next result
            silence(stream)

    def error(self, error: ExportError) -> None:
        """Print an error with its cause and hint on stderr, also with --quiet.

        With --json it is one object, the last line of stderr. A failure to write is ignored. Cause and hint
        of a DiskFull error may be changed in place before.
        """
        _explain(error)
        if self.mode is OutputMode.JSON:
            failure = Failure(
                type(error).__name__, error.message, error.cause, error.hint, int(error.exit_code)
            )
            with suppress(OSError):
                whole = {"format_version": FORMAT_VERSION, **asdict(failure)}
                self.stderr.write(as_json(whole) + "\n")
                self.stderr.flush()
        else:
            self._say(f"[bold red]error:[/] {escape(error.message)}")
            if error.cause:
                first, *others = in_lines(error.cause).split("\n")
                self._say(f"[bold]cause:[/] {escape(first)}", *map(escape, others))
            self._say(f"[bold]hint:[/]  {escape(error.hint)}")

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Progress]:
        """Show a progress bar on stderr for the block, if that is a terminal; not with --json or --quiet.

        Yields the receiver of progress, to which the block reports the bytes done, of `total`. A bar inside
        the block of another one is shown below that.
        """
        if self.mode is not OutputMode.HUMAN or not self.stderr.isatty():
            yield NoProgress()
            return
        if self._bars is not None:
            task = self._bars.add_task(printable(shown(label)), total=total)
            yield _Bar(self._bars, task)
            self._bars.remove_task(task)
            return
        self.has_spoken = True
        from rich import progress as bars
        from rich.text import Text

        class Bytes(bars.ProgressColumn):
            """A column of bytes done and speed, in the units of final results, which rich's own lacks."""

            def render(self, task: Any) -> Any:
                speed = f", {human_bytes(task.speed)}/s" if task.speed else ""
                return Text(f"{human_bytes(task.completed)} of {human_bytes(task.total)}{speed}")

        columns = (
            bars.TextColumn("{task.description}", markup=False),  # a label may have brackets: `items[0:4]`
            bars.BarColumn(),
            Bytes(),
            bars.TimeRemainingColumn(),
        )
        with bars.Progress(*columns, console=self._console(self.stderr), transient=True) as bar:
            self._bars = bar
            try:
                yield _Bar(bar, bar.add_task(printable(shown(label)), total=total))
            finally:
                self._bars = None

    def _console(self, stream: IO[str]) -> Console:
        from rich.console import Console

        class Raising(Console):
            """A console that raises BrokenPipeError; rich's own ends the program with exit code 1."""

            def on_broken_pipe(self) -> None:
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

        is_wide = not (stream.isatty() or os.environ.get("COLUMNS"))
        return Raising(
            file=stream,
            width=_PIPE_WIDTH if is_wide else None,
            force_terminal=(use_colour(stream) and stream.isatty()) or None,
            no_color=not use_colour(stream),
            color_system="standard" if use_colour(stream) else None,
            highlight=False,
        )


# Without it rich takes the terminal of stdin, or 80 columns, in which it folds names.
_PIPE_WIDTH = 200


class _Bar(Struct, frozen=True):
    bar: Any
    task: Any

    def advance(self, amount: int) -> None:
        self.bar.advance(self.task, amount)


def as_json(document: Any, indent: int | None = None) -> str:
    """Return a document as ASCII JSON without control characters; structs, times and paths may be in it.

    `indent` is as in `json.dumps`: None is one line. Paths of mirrors are replaced by their URLs. TypeError
    for a value of another type.
    """
    # JSON escapes all control characters except one, DEL.
    text = json.dumps(document, indent=indent, default=to_json)
    return shown(text, lambda url: json.dumps(url)[1:-1]).replace("\x7f", "\\u007f")


def to_json(value: Any) -> Any:
    """Return a value for `json` in place of one that it cannot write: a path's text, a time's ISO form.

    For a struct, a dictionary of its fields. TypeError for any other value.
    """
    if isinstance(value, Path):
        return str(value)
    return value.isoformat() if isinstance(value, datetime) else asdict(value)


def silence(stream: IO[str]) -> None:
    """Redirect a stream's descriptor to /dev/null, for after a failure: its buffer is then written there.

    A failure to do so is ignored.
    """
    with suppress(OSError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        # Not closed: Python flushes it once more at exit, and a failure there makes the exit code 120.
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)


def use_colour(stream: IO[str]) -> bool:
    """True if a stream gets colours: NO_COLOR turns them off, else FORCE_COLOR on, else a terminal has them.

    An empty variable counts as unset.
    """
    # no-color.org
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty()


def _explain(error: ExportError) -> None:
    """Name the temporary directory in the cause and hint of a DiskFull error, in place, if mirrors fill it.

    Other errors are left as they are.
    """
    import tempfile

    if isinstance(error, DiskFull) and shown(error.message) != error.message:
        error.cause = f"the temporary directory is full: {tempfile.gettempdir()}"
        error.advise("free space there, or set TMPDIR to a directory with more")
