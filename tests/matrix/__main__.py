"""`python -m tests.matrix [--work DIR]`: every supported TensorFlow makes a base, every one loads it.

Each environment has one Python and one TensorFlow. In each: install TensorFlow, then this package with its
dependencies (TensorFlow must not move); train by a session with the hook, and by Keras with the callback;
export a base, train on, publish a delta. Then every environment serves every base: the first answers have to
be the trainer's, an update while predictions run has to lead to the trainer's next, and no answer may mix the
two. The C++ loader of each TensorFlow, which is that of TensorFlow Serving, loads each base, too.

It takes half an hour, and downloads and keeps 2 GB an environment. Interpreters come from PATH or pyenv;
environments without one are left out and named. It ends with 1 if a cell fails, and writes `matrix.json` and
`matrix.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from serving.client import ModelClient

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = (
    ("3.10", "2.15.1"),
    ("3.11", "2.16.2"),
    ("3.12", "2.18.1"),
    ("3.13", "2.20.0"),
    ("3.11", "2.21.0"),
)
BESIDE = {"2.20.0": ["protobuf<7"]}
"""What a TensorFlow needs that its wheel does not say: 2.20's own saver hook fails with protobuf 7."""
MODELS = {"session": "examples/ranker/model.py:serving", "keras": "tests/matrix/trainer.py:tower"}
FIRST, LAST = 10, 30
TOLERANCE = 1e-5
"""Kernels of two TensorFlows sum in other orders; the two states differ by 0.01 and more."""
_WAIT_S = 600.0


class Environment:
    """A virtual environment with one TensorFlow."""

    def __init__(self, work: Path, python: str, tensorflow: str) -> None:
        self.name = f"{tensorflow} (Python {python})"
        self.python, self.tensorflow = python, tensorflow
        self.directory = work / f"env-{python}-{tensorflow}"
        self.models = work / "made" / f"{python}-{tensorflow}"
        self.facts: dict[str, Any] = {}

    def install(self, interpreter: str, wheel: Path) -> None:
        """TensorFlow first, as where people train; then this package, which must leave it alone."""
        if not (self.directory / "bin/python").exists():
            subprocess.run([interpreter, "-m", "venv", self.directory], check=True)
            self._pip("install", f"tensorflow=={self.tensorflow}", *BESIDE.get(self.tensorflow, ()))
        began = time.monotonic()
        before = self._frozen()
        self._pip("install", "--force-reinstall", "--no-deps", str(wheel))
        self._pip("install", f"{wheel}[server]")
        after = self._frozen()
        self._pip("check")
        moved = {name: (old, after.get(name)) for name, old in before.items() if after.get(name) != old}
        moved.pop("export-model", None)
        assert not moved, f"installing moved {moved}"
        self.facts["install_s"] = round(time.monotonic() - began)
        self.facts["mb"] = int(subprocess.check_output(["du", "-smD", self.directory]).split()[0])
        names = ("numpy", "protobuf", "ml-dtypes", "h5py", "grpcio", "keras")
        self.facts["libraries"] = {name: after.get(name) for name in names}

    def run(self, *words: str | Path, cwd: Path) -> str:
        """What a command of the environment prints.

        Raises:
            RuntimeError: it fails.
        """
        path = f"{self.directory / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": ""}
        done = subprocess.run(
            [str(word) for word in words],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_WAIT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, words))}\n{(done.stdout + done.stderr)[-2000:]}")
        return done.stdout

    def make(self, kind: str) -> dict[str, Any]:
        """A base at the first step, a delta to the last; what they are."""
        work = self.models / kind
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        python, model = self.directory / "bin/python", ROOT / MODELS[kind]
        export = [
            "export-model",
            "--ckpt-dir",
            "train",
            "--model",
            model,
            "--out",
            f"models/{kind}",
            "--incr",
        ]
        began = time.monotonic()
        for step in (FIRST, LAST):
            self.run(
                python, ROOT / "tests/matrix/trainer.py", kind, "train", str(step), f"{step}.npz", cwd=work
            )
            self.run(*export, cwd=work)
        (delta,) = (work / "models" / kind / "deltas").glob("*/*-*")
        base = next(path for path in (work / "models" / kind).iterdir() if path.name.isdigit())
        read = [json.loads((path / "manifest.json").read_text()) for path in (base, delta)]
        return {
            "seconds": round(time.monotonic() - began),
            "made": read[1]["incremental"]["made"],
            "tensorflow": read[0].get("tensorflow"),
            "delta_bytes": sum(file["bytes"] for file in read[1]["files"]),
        }

    @contextmanager
    def served(self, config: Path) -> Iterator[str]:
        """The address of a server of the environment."""
        command = [
            self.directory / "bin/serve-model",
            "run",
            "--model-config-file",
            config,
            "--port",
            "0",
            "--wait",
            "inf",
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said: list[str] = []
        found = threading.Event()

        def read() -> None:
            for line in process.stdout or ():
                said.append(line)
                if re.search(r" on \S+:\d+", line):
                    found.set()
            found.set()

        threading.Thread(target=read, daemon=True).start()
        try:
            found.wait(_WAIT_S)
            match = re.search(r" on (\S+:\d+)", "".join(said))
            if match is None:
                raise RuntimeError("".join(said)[-2000:])
            yield match[1]
        finally:
            process.terminate()
            process.wait(60)

    def _pip(self, *words: str) -> str:
        pip = [self.directory / "bin/python", "-m", "pip", "--disable-pip-version-check", *words]
        return subprocess.run(pip, check=True, stdout=subprocess.PIPE, text=True, cwd="/").stdout

    def _frozen(self) -> dict[str, str]:
        listed = json.loads(self._pip("list", "--format", "json"))
        return {found["name"].lower().replace("_", "-"): found["version"] for found in listed}


def load(loader: Environment, makers: list[Environment], work: Path) -> dict[str, str]:
    """How a loader fares with each base: `ok`, or what is wrong."""
    here = work / "loaded" / loader.directory.name
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir(parents=True)
    cells, config = {}, ["model_config_list {"]
    for maker in makers:
        for kind in MODELS:
            if not (maker.models / kind / f"{LAST}.npz").exists():
                continue
            name = f"{maker.directory.name}-{kind}"
            shutil.copytree(maker.models / kind / "models" / kind, here / name)
            (delta,) = (here / name / "deltas").glob("*/*-*")
            delta.rename(here / f"{name}.delta")
            (here / f"{name}.delta.path").write_text(str(delta))
            config.append(
                f'config {{ name: "{name}" base_path: "{here / name}" model_platform: "tensorflow" }}'
            )
            cells[name] = maker.models / kind
    config_file = here / "models.config"
    config_file.write_text("\n".join([*config, "}"]))
    results: dict[str, str] = {}
    with loader.served(config_file) as address:
        for name, made in cells.items():
            try:
                results[name] = _updated(address, name, here, made)
            except Exception as error:  # noqa: BLE001 - a cell of the matrix
                results[name] = f"{type(error).__name__}: {error}"[:300]
    bases = {name: next(path for path in (here / name).iterdir() if path.name.isdigit()) for name in cells}
    python = loader.directory / "bin/python"
    lines = loader.run(python, ROOT / "tests/matrix/stock_load.py", *bases.values(), cwd=here).splitlines()
    for name, line in zip(bases, lines, strict=True):
        if said := json.loads(line)["error"]:
            results[name] += f"; C++: {said[:200]}"
    return results


def _updated(address: str, name: str, here: Path, made: Path) -> str:
    before, after = np.load(made / f"{FIRST}.npz"), np.load(made / f"{LAST}.npz")
    asked = {key.removeprefix("in_"): value for key, value in before.items() if key.startswith("in_")}
    output = next(key for key in before if key.startswith("out_"))
    client = ModelClient(address, name, deadline_s=120)

    def answer() -> Any:
        return np.asarray(client.predict(asked).outputs[output.removeprefix("out_")]).reshape(
            before[output].shape
        )

    def off(expected: Any, found: Any) -> float:
        return float(np.abs(expected[output] - found).max())

    if off(before, answer()) > TOLERANCE:
        return f"the base's answers are off by {off(before, answer()):.2g}"
    mixed, seen, done = [], 0, threading.Event()

    def watch() -> None:
        nonlocal seen
        while not done.is_set():
            found, seen = answer(), seen + 1
            if min(off(before, found), off(after, found)) > TOLERANCE:
                mixed.append(found)

    watching = threading.Thread(target=watch)
    watching.start()
    (here / f"{name}.delta").rename((here / f"{name}.delta.path").read_text())
    client.predict({"position": np.array([-1], np.int64)}, signature="incremental_update")
    time.sleep(0.2)
    done.set()
    watching.join()
    if off(after, answer()) > TOLERANCE:
        return f"the update's answers are off by {off(after, answer()):.2g}"
    return f"{len(mixed)} of {seen} answers mixed" if mixed else "ok"


def interpreter(version: str) -> str | None:
    """A Python of that version."""
    if found := shutil.which(f"python{version}"):
        done = subprocess.run([found, "-V"], capture_output=True, text=True, check=False)
        if done.returncode == 0 and f" {version}." in done.stdout:
            return found
    versions = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))
    return str(versions[-1]) if versions else None


def main() -> int:
    """Run the matrix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "build/matrix", help="environments and models")
    parser.add_argument("--jobs", type=int, default=2, help="environments at once")
    parser.add_argument("--only", action="append", help="one TensorFlow: 2.15.1")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    work = options.work.resolve()
    wheel = _wheel(work)
    asked = [each for each in ENVIRONMENTS if not options.only or each[1] in options.only]
    there = [each for each in asked if interpreter(each[0])]
    for python, tensorflow in (each for each in asked if each not in there):
        print(f"left out: TensorFlow {tensorflow}, there is no Python {python}", flush=True)
    makers = [Environment(work, python, tensorflow) for python, tensorflow in there]
    report: dict[str, Any] = {"makers": {}, "cells": {}}
    with ThreadPoolExecutor(options.jobs) as pool:
        failed = not all([*pool.map(partial(_prepare, wheel=wheel), makers)])
        report["makers"] = {maker.name: maker.facts for maker in makers}
        for loader, cells in zip(
            makers, pool.map(partial(_load_all, makers=makers, work=work), makers), strict=True
        ):
            report["cells"][loader.name] = cells
            failed |= any(cell != "ok" for cell in cells.values())
    (work / "matrix.json").write_text(json.dumps(report, indent=1))
    (work / "matrix.md").write_text(_table(makers, report["cells"]))
    print((work / "matrix.md").read_text())
    return int(failed)


def _wheel(work: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", work / "wheel", ROOT]
    shutil.rmtree(work / "wheel", ignore_errors=True)
    subprocess.run(pip, check=True)
    return next((work / "wheel").glob("*.whl"))


def _prepare(maker: Environment, wheel: Path) -> bool:
    facts, succeeded = maker.facts, True
    try:
        maker.install(interpreter(maker.python) or "", wheel)
    except (AssertionError, subprocess.CalledProcessError) as error:
        facts["install"], succeeded = f"FAILED {error}", False
    for kind in MODELS if succeeded else ():
        try:
            facts[kind] = maker.make(kind)
        except (RuntimeError, ValueError, StopIteration, subprocess.TimeoutExpired) as error:
            facts[kind], succeeded = f"FAILED {error}", False
    print(maker.name, json.dumps(facts, indent=1), flush=True)
    return succeeded


def _load_all(loader: Environment, makers: list[Environment], work: Path) -> dict[str, str]:
    began = time.monotonic()
    try:
        cells = load(loader, makers, work)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        cells = {"all": str(error)}
    print("loader", loader.name, f"{time.monotonic() - began:.0f} s", json.dumps(cells, indent=1), flush=True)
    return cells


def _table(makers: list[Environment], cells: dict[str, dict[str, str]]) -> str:
    rows = [["made by, loaded by", *(loader.name for loader in makers)], ["---"] * (len(makers) + 1)]
    for maker in makers:
        found = []
        for loader in makers:
            names = [f"{maker.directory.name}-{kind}" for kind in MODELS]
            said = [cells[loader.name].get(name, "not made") for name in names]
            found.append("ok" if set(said) == {"ok"} else "; ".join(said))
        rows.append([maker.name, *found])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
