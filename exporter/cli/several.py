"""`export-model --config FILE`: the exports of several models, each in a process of its own.

Without `--watch` they run one after another, and the result is one document. With it they run in parallel,
and each line that they print has the model's name. If one fails, the others continue.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from exporter.cli.documents.exported import ModelRun, SeveralRuns
from exporter.errors import Exit, ExportError, UsageError
from exporter.newer_python import module_command
from exporter.storage.local_paths import local_name, quoted
from exporter.storage.url import Url
from exporter.terminal.output import Output, OutputMode
from exporter.terminal.progress import count

_LONGEST_LINE = 16 << 20  # a longer one is printed in pieces


class SomeFailed(ExportError):
    """Some exports of a file of models failed; the exit code is the first failed one's."""

    default_hint = "run the command again for one: export-model --config FILE#NAME"


def run_all(
    config: Path,
    models: Mapping[str, Mapping[str, Any]],
    arguments: Sequence[str],
    sink: Output,
    *,
    watch: bool,
    out: Path | None = None,
) -> None:
    """Export each model of a file, `config`, in a process of its own, and print their output.

    `models` has the options of each model by name; `arguments` are the words of this command line, which the
    processes get without `--config`. With `watch` the processes run in parallel, and this waits until all
    end; otherwise one after another, also after a failure.

    Raises:
        UsageError: two models would be published to the same place; `out`, if given, counts for all of them.
        SomeFailed: an export failed; all others were run. Its exit code is the first failed one's,
            or `Exit.FAILURE` if a signal ended that.
        OSError: a process cannot be started.
    """
    _require_apart(config, {name: out or options.get("out") for name, options in models.items()}, out)
    words = {name: [*_left(arguments), "--config", f"{config}#{name}"] for name in models}
    commands = {name: [*module_command("exporter"), *typed] for name, typed in words.items()}
    as_json = sink.mode is OutputMode.JSON
    runs = _watch(commands, as_json=as_json) if watch else [*_one_by_one(commands, sink, as_json=as_json)]
    if as_json and not watch:
        sink.result(SeveralRuns(models=runs))
    failed = [run for run in runs if run.exit_code != Exit.DONE]
    if failed:
        error = SomeFailed(
            f"{count(len(failed), 'model')} of {len(runs)} failed: {', '.join(run.model for run in failed)}",
            hint=" ".join(map(quoted, ["export-model", *words[failed[0].model]])),
        )
        # a process killed by a signal has a negative exit code
        error.exit_code = next((one for one in Exit if one == failed[0].exit_code), Exit.FAILURE)
        raise error


def _require_apart(config: Path, places: Mapping[str, object], out: Path | None) -> None:
    found: dict[str, str] = {}
    for name, place in places.items():
        if place is not None and (other := found.setdefault(_resolved(str(place)), name)) != name:
            raise UsageError(
                f"models {other} and {name} of {config} would be published to one place, {place}",
                hint='give each its own: out = "..." below [models.NAME]'
                + (", and leave out --out" if out else ""),
            )


def _resolved(place: str) -> str:
    """Return one text for all names of a place: a path without links and `..`, or a store's URL.

    Raises UsageError for a URL of an unknown kind, or of a file on another machine.
    """
    url = Url.parse(place)
    return os.path.realpath(local_name("out", place)) if url is None else str(url)


def _left(arguments: Sequence[str]) -> list[str]:
    """Return the command-line arguments for the processes: all but `--config` and its value."""
    left, words = [], iter(arguments)
    for word in words:
        if word == "--config":
            next(words, None)
        elif not word.startswith("--config="):
            left.append(word)
    return left


def _one_by_one(commands: dict[str, list[str]], sink: Output, *, as_json: bool) -> Iterator[ModelRun]:
    for name, command in commands.items():
        sink.note(f"{name}:")
        with _running() as started:
            # Not `sys.stdout`: inside a command that is stderr.
            process = _start(started, command, stdout=subprocess.PIPE if as_json else sys.__stdout__)
            content, _ = process.communicate()
        yield ModelRun(name, process.returncode, _document(content) if as_json else None)


def _watch(commands: dict[str, list[str]], *, as_json: bool) -> list[ModelRun]:
    turn = threading.Lock()
    with _running() as started:
        for command in commands.values():
            _start(started, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        # a thread for each stream: a process whose full pipe nobody reads would block
        readers = [
            threading.Thread(target=_relay, args=(name, source, target, turn, as_json))
            for name, process in zip(commands, started, strict=True)
            for source, target in ((process.stdout, sys.__stdout__), (process.stderr, sys.__stderr__))
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return [ModelRun(name, process.wait()) for name, process in zip(commands, started, strict=True)]


def _relay(name: str, source: IO[bytes], target: IO[str], turn: threading.Lock, as_json: bool) -> None:
    """Print the lines of a process, `source`, to `target` with the model's name before each, until its end.

    With `as_json`, a line that is a JSON object gets the name as its first field instead. `turn` is held
    while a line is written, so that lines of several processes do not mix. Errors of printing are ignored: a
    process whose output is not read would block for ever.
    """
    for line in iter(partial(source.readline, _LONGEST_LINE), b""):
        document = _document(line) if as_json else None
        told = f"{name}: ".encode() + line
        if isinstance(document, dict):
            told = json.dumps({"name": name} | document).encode() + b"\n"
        with turn, suppress(OSError, ValueError):
            target.buffer.write(told if told.endswith(b"\n") else told + b"\n")  # type: ignore[attr-defined]
            target.flush()


def _document(content: bytes) -> Any:
    """Return the JSON document that a process printed; None if its output is not JSON, or incomplete."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _start(started: list[subprocess.Popen[bytes]], command: list[str], **streams: Any) -> Any:
    """Start a process, append it to `started`, and return it.

    Its stdin is empty, SIGINT is blocked in it, and it does not get EXPORT_MODEL_CONFIG. `streams` are
    `stdout` and `stderr` as for Popen. A terminal sends Ctrl-C to all processes: together with the SIGTERM of
    `_running`, it would interrupt the work twice, the second time during the clean-up. Raises OSError if the
    process cannot be started.
    """
    environment = {name: value for name, value in os.environ.items() if name != "EXPORT_MODEL_CONFIG"}
    # A process inherits the mask of the thread that starts it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, **streams))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return started[-1]


@contextmanager
def _running() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yield an empty list for processes; if the block raises, send them SIGTERM, and wait until they end."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        yield processes
    except BaseException:
        # To all before the first wait: so they end at the same time.
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait()
        raise
