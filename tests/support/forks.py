"""Processes that cost milliseconds: forked from one that has imported what they need, TensorFlow too.

A process has one fork server, whoever asks for it, and that takes the last list of modules it is given. So
there is one list: without it a killed process imports for longer than it lives.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

_PRELOADED = [
    "tensorflow",
    "pytest",
    "exporter.pipeline.full",
    "exporter.pipeline.incremental",
    "exporter.verify.log",
    "tests.support.logs",
    "tests.support.publishing",
    "tests.integration.increment_nodes",
]
if gone := [name for name in _PRELOADED if find_spec(name) is None]:  # a server passes over it in silence
    raise ImportError(f"there is no module {gone[0]}")

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(_PRELOADED)


def run_warm(program: Path | str, *arguments: object, timeout_s: float = 300) -> str:
    """Run a script, or a module by its name, as `python` does; its stdout.

    Raises:
        subprocess.CalledProcessError: it failed, or took too long.
    """
    with tempfile.TemporaryDirectory() as directory:
        talk = Path(directory)
        process = FORKS.Process(target=_as_main, args=(talk, program, [*map(str, arguments)]))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
        out, err = ((talk / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    if process.exitcode:
        sys.stderr.write(err)  # pytest shows it
        raise subprocess.CalledProcessError(process.exitcode, [str(program), *map(str, arguments)], out, err)
    return out


def _as_main(talk: Path, program: Path | str, arguments: list[str]) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(talk / name, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = [str(program), *arguments]
    if isinstance(program, Path):
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
