"""`export-model --config FILE`: the exports of several models, each as a process of its own.

Without `--watch` they run one after another, and the result is one document; with it they run side by side,
and each line that they print carries the model's name. A failure of one ends no other.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import IO

from exporter.cli.documents.exported import ModelRun, SeveralRuns
from exporter.errors import Exit, ExportError, UsageError
from exporter.terminal.options_file import models_in
from exporter.terminal.output import Output, OutputMode
from exporter.terminal.progress import count


class SomeFailed(ExportError):
    """Exports of a file of models that failed; the exit code is that of the first."""

    default_hint = "run the command again for one: export-model --options FILE#NAME"


def run_all(config: Path, arguments: Sequence[str], sink: Output, *, watch: bool) -> None:
    """Export each model of a file with what was typed besides, and print what each prints.

    Raises:
        UsageError: the file cannot be read, has no models, or two would be published as one.
        SomeFailed: an export failed; all others were done.
    """
    models = models_in(config)
    commands = {name: _command(config, name, arguments) for name in models}
    typed = any(word.split("=")[0] == "--out" for word in arguments)
    _require_apart({name: "--out" if typed else own.get("out") for name, own in models.items()})
    as_json = sink.mode is OutputMode.JSON
    runs = _watch(commands, as_json=as_json) if watch else [*_one_by_one(commands, sink, as_json=as_json)]
    if as_json and not watch:
        sink.result(SeveralRuns(models=runs))
    failed = [run for run in runs if run.exit_code != Exit.DONE]
    if failed:
        error = SomeFailed(
            f"{count(len(failed), 'model')} of {len(runs)} failed: {', '.join(run.model for run in failed)}",
            hint=f"export-model --options {config}#{failed[0].model}",
        )
        # a signal has no exit code of ours
        error.exit_code = next((one for one in Exit if one == failed[0].exit_code), Exit.FAILURE)
        raise error


def _require_apart(places: Mapping[str, object]) -> None:
    """Refuse models that would be published as versions of one."""
    for one, other in combinations(places, 2):
        if places[one] is not None and places[one] == places[other]:
            raise UsageError(
                f"the models {one} and {other} have one place to be published in: {places[one]}",
                hint="give each an out of its own in the file, and type no --out",
            )


def _command(config: Path, name: str, arguments: Sequence[str]) -> list[str]:
    if any(word.split("=")[0] == "--options" for word in arguments):
        raise UsageError("--config and --options both name a file of options", hint="leave one of them out")
    left, words = [], iter(arguments)
    for word in words:
        if word == "--config":
            next(words, None)
        elif not word.startswith("--config=") and word != "export":
            left.append(word)
    return [sys.executable, "-m", "exporter", *left, "--options", f"{config}#{name}"]


def _environment() -> dict[str, str]:
    """Our own, without the variable that names the file: each process would begin with it again."""
    return {name: value for name, value in os.environ.items() if name != "EXPORT_MODEL_CONFIG"}


def _one_by_one(commands: dict[str, list[str]], sink: Output, *, as_json: bool) -> Iterator[ModelRun]:
    for name, command in commands.items():
        sink.note(f"{name}:")
        out = subprocess.PIPE if as_json else sys.__stdout__
        with _ended_with_us([subprocess.Popen(command, stdout=out, text=True, env=_environment())]) as (
            process,
        ):
            text, _ = process.communicate()
        document = json.loads(text) if as_json and text else None
        yield ModelRun(name, process.returncode, document)


def _watch(commands: dict[str, list[str]], *, as_json: bool) -> list[ModelRun]:
    started = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=_environment(),
        )
        for command in commands.values()
    ]
    turn = threading.Lock()
    with _ended_with_us(started):
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


def _relay(name: str, source: IO[str], target: IO[str], turn: threading.Lock, as_json: bool) -> None:
    """Print the lines of a process under its model's name: a document has it as its first field."""
    for line in source:
        document = json.loads(line) if as_json and line.startswith("{") and line.endswith("}\n") else None
        text = f"{name}: {line}" if document is None else f"{json.dumps({'name': name} | document)}\n"
        with turn:
            target.write(text)
            target.flush()


@contextmanager
def _ended_with_us(processes: list[subprocess.Popen[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Ask the processes to end when this one is interrupted, and wait until they have."""
    try:
        yield processes
    except BaseException:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait()
        raise
