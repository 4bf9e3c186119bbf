"""`--on-event`: run a person's command for events that somebody should know of.

The agent never waits for it: events are queued, and a thread handles one at a time. A command that takes too
long is ended with all processes that it has started. It inherits only the variables that a program needs to
be found and to speak (`PATH`, `HOME`, the locale), so that it gets no credential of the agent; it reads its
own from a file. Some of an event's text was written by others: it is passed as variables and on stdin, never
as part of a command line.
"""

from __future__ import annotations

import os
import queue
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from msgspec import to_builtins
from msgspec.structs import asdict

from exporter.errors import UsageError
from exporter.terminal.output import FORMAT_VERSION, as_json
from serving.agent.journal import AgentEvent, EventKind

KINDS = (
    EventKind.ROLLED_BACK,
    EventKind.HELD,
    EventKind.BASE_WANTED,
    EventKind.SILENT,
    EventKind.DAMAGED,
)
_INHERITED = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "SHELL")
_WAITING = 64
_LONGEST_VALUE = 4096
_LOOK_S, _GRACE_S = 0.05, 2.0
"""Seconds between two looks at a running command, and from SIGTERM to SIGKILL."""


def parse_command(text: str) -> tuple[str, ...]:
    """Split the text of `--on-event` into words, as a shell would; the first is an existing program.

    UsageError if the text is not a command line, or if there is no such program.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"--on-event {text} is no command", cause=str(error), hint="quote it as a shell would"
        ) from error
    if not words or shutil.which(words[0]) is None:
        found = f"there is no program {words[0]!r}" if words else "it is empty"
        raise UsageError(
            "--on-event names no program that can be run",
            cause=found,
            hint="name a program; for a line of a shell: --on-event \"sh -c 'LINE'\"",
        )
    return tuple(words)


class EventCommand:
    """A runner of a command for each event of `KINDS`, one at a time; other events are ignored.

    `fail` gets a text for each command that failed, was ended, or was not run.
    """

    def __init__(self, command: Sequence[str], deadline_s: float, fail: Callable[[str], None]) -> None:
        self._command = command
        self._deadline_s = deadline_s
        self._fail = fail
        self._waiting: queue.Queue[AgentEvent | None] = queue.Queue(_WAITING)
        self._dropped = 0
        self._stop = threading.Event()

    def __call__(self, event: AgentEvent) -> None:
        """Queue an event of `KINDS` without waiting; if the queue is full, drop and count the event."""
        if event.what in KINDS:
            try:
                self._waiting.put_nowait(event)
            except queue.Full:
                self._dropped += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run commands in a thread inside the block; at its end, end the running one and begin no other.

        The end of the block waits for that, up to 4 seconds.
        """
        thread = threading.Thread(target=self._follow, name="on-event", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            with suppress(queue.Full):  # then the thread has an event to handle, and sees `_stop` after it
                self._waiting.put_nowait(None)
            thread.join(2 * _GRACE_S)

    def _follow(self) -> None:
        while (event := self._waiting.get()) is not None and not self._stop.is_set():
            if why := self._run(event):
                self._fail(f"--on-event for {event.what} of {event.model}: {why}")
            if dropped := self._dropped:
                self._dropped = 0
                self._fail(f"--on-event was not run for {dropped} events: {_WAITING} waited already")

    def _run(self, event: AgentEvent) -> str:
        """Run the command for an event and wait for it; return the reason if that failed, else "".

        The event is passed as variables and as JSON on standard input. After `deadline_s`, or when this
        runner is stopped, the command is ended; the latter is not a failure.
        """
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=2,  # standard output is the agent's own, perhaps one of JSON
                env=environment(event),
                start_new_session=True,
            )
        except OSError as error:
            return f"it cannot be run: {error.strerror}"
        document = as_json({"format_version": FORMAT_VERSION, **asdict(event)})
        # In a thread: a command that reads nothing blocks the write once the pipe is full (64 KiB).
        threading.Thread(target=_give, args=(process, f"{document}\n".encode()), daemon=True).start()
        until = time.monotonic() + self._deadline_s
        while (code := process.poll()) is None and time.monotonic() < until and not self._stop.wait(_LOOK_S):
            pass
        if code is None:
            _end(process)
            return "" if self._stop.is_set() else f"it was ended after {self._deadline_s:g} s"
        return f"it ended with exit code {code}" if code else ""


def environment(event: AgentEvent) -> dict[str, str]:
    """Return a command's environment: a few variables of the agent, and `EVENT_WHAT`, `EVENT_MODEL`, ...

    Fields of the event that are None or empty are left out.
    """
    values = {name: value for name, value in to_builtins(event).items() if value not in (None, "")}
    of_event = {f"EVENT_{name.upper()}": _variable(str(value)) for name, value in values.items()}
    return {name: os.environ[name] for name in _INHERITED if name in os.environ} | of_event


def _variable(text: str) -> str:
    """Return a text as an environment variable can hold it: without NUL, encodable, not too long.

    Of more than 4096 characters only the first 4096 remain.
    """
    return text.replace("\0", "").encode(errors="replace").decode()[:_LONGEST_VALUE]


def _give(process: subprocess.Popen[bytes], document: bytes) -> None:
    """Write a document to a command's standard input and close it; a command may end without reading it."""
    assert process.stdin is not None
    with suppress(OSError), process.stdin:  # in this order: closing writes what is buffered, and may fail
        process.stdin.write(document)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and all processes of its group, and wait for the command.

    It sends the group SIGTERM; after the command's end, or after 2 seconds, it sends the rest SIGKILL.
    """
    with suppress(ProcessLookupError):
        # `start_new_session` made the command's id that of its group.
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
