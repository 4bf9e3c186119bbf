"""How commands of the guide are run: our own where TensorFlow is imported already, others in a shell."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from examples.cluster import ClusterError, run_cluster
from serving.cli import app as serve_app
from tests.support.commands import Ran, export_model, run_app
from tests.support.forks import FORKS, WarmNode, run_warm

_WITHOUT_A_SHELL = re.compile(r"[\w./-]+(?: (?:[^\s|&;<>$`'\"*]|'[^']*')+)+")
"""Nothing in it that a shell would do, but take quotes away."""


def run_command(text: str, directory: Path) -> Ran:
    """Run what a reader types in `directory`."""
    if not _WITHOUT_A_SHELL.fullmatch(text):
        return _in_a_shell(text, directory)
    program, *arguments = shlex.split(text)
    with contextlib.chdir(directory):
        if program == "export-model":
            return export_model(*arguments)
        if program == "serve-model":
            return run_app(serve_app, *arguments)
        if program == "python" and arguments[0] == "examples/cluster.py":
            return _cluster(arguments[1:])
        if program == "python" and arguments[0].startswith("examples/"):
            return _warm(*arguments)
    return _in_a_shell(text, directory)


def _warm(script: str, *arguments: str) -> Ran:
    try:
        return Ran(0, run_warm(Path(script), *arguments), "")
    except subprocess.CalledProcessError as error:
        return Ran(error.returncode, error.stdout, error.stderr)


def _cluster(command: list[str]) -> Ran:
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as logs:
        try:
            run_cluster(command, logs=Path(logs), on_line=lines.append, start=WarmNode)
        except ClusterError as error:
            return Ran(1, "\n".join(lines), f"error: {error}")
    return Ran(0, "\n".join(lines), "")


def _in_a_shell(text: str, directory: Path) -> Ran:
    run = subprocess.run(
        text, shell=True, cwd=directory, env=_environment(), capture_output=True, text=True, timeout=300
    )
    return Ran(run.returncode, run.stdout, run.stderr)


def _environment() -> dict[str, str]:
    """The console scripts of this environment come first, as in an activated one."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def start_server(text: str, directory: Path) -> BaseProcess:
    """Start `serve-model run MODEL --port PORT`, and wait until the model answers."""
    _, *words = shlex.split(text)
    with contextlib.chdir(directory):
        server = FORKS.Process(target=run_app_as_main, args=(words,))
        server.start()
    address = f"127.0.0.1:{words[words.index('--port') + 1]}"
    deadline = time.monotonic() + 120
    while run_app(serve_app, "status", address, "--model-name", Path(words[1]).name).code != 0:
        assert server.is_alive(), f"{text}: ended"
        assert time.monotonic() < deadline, f"{text}: was never available"
        time.sleep(0.1)
    return server


def run_app_as_main(words: list[str]) -> None:
    sys.argv = ["serve-model", *words]
    from serving.cli import main

    main()
