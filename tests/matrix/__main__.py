"""`python -m tests.matrix [--short]`: every supported TensorFlow makes a base, every one loads it.

Each environment has one Python and one TensorFlow. In each: install TensorFlow, then this package with its
dependencies (TensorFlow must not move); train by a session with the hook, by an Estimator where there are
any, and by Keras with the callback, and take DeepRec's files of twelve tables by keys, whose lookups are
joined; export a base, train on, publish a delta. Then every environment serves
every base: the first answers have to be the trainer's, an update while predictions run has to lead to the
trainer's next, and no answer may mix the two. The C++ loader of each TensorFlow, which is that of TensorFlow
Serving, loads each base, too. Each also makes two versions and two bases whose table is mapped
(`--map-tables`), one of each in 8 bits: every loader has to map it, and to answer as the trainer does; the
bases get a delta, too.

TensorFlow 1.12 to 2.13, on which this package does not run, train with the trainer's side alone: see
`tests/integration/test_trainers_of_any_age.py`. So do libraries on top of it: `test_libraries_of_trainers.py`
(EASYREC names a checkout of EasyRec, which is on no package index). C++ loaders of 1.15 to 2.22 load what
`--for-server` made for them: `tests/integration/test_old_servers.py`.

Two more environments have no TensorFlow. They take the training and the base of another one, publish the
delta, a version of the training's own graph (`.meta`) and the mapped versions, and update servers themselves.

It takes a quarter of an hour, downloads and keeps 2 GB an environment. `--short` makes two, without Keras:
the oldest TensorFlow with the oldest libraries that pyproject.toml allows, where a sample of the tests runs,
too; and one on a new Python. Interpreters come from PATH or pyenv; environments without one are left out and
named. `--only 2.15.1` and `--kind joined`, each of them several times, choose TensorFlows and models. It ends
with 1 if a cell fails, and writes `matrix.json` and `matrix.md`.
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
from serving.updates import update
from tests.support.environments import interpreter
from tests.support.project import requirements

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = (
    ("3.10", "2.15.1"),
    ("3.11", "2.16.2"),
    ("3.12", "2.18.1"),
    ("3.13", "2.20.0"),
    ("3.11", "2.21.0"),
    ("3.13", "2.22.0rc0"),
)
SHORT = ("2.15.1", "2.20.0")
"""The oldest TensorFlow, there with the lowest bounds of all libraries; and one on a new Python."""
NONE = "none"
ESTIMATORS = "2.15."
"""The last TensorFlow that has Estimators."""
WITHOUT = ("3.13", "3.14")
"""The Pythons of environments without TensorFlow; also one for which no released TensorFlow has wheels."""
FOLLOWED = "2.20.0"
"""Whose training and base these take."""
BESIDE = {"2.20.0": ["protobuf<7"]}
"""What a TensorFlow needs that its wheel does not say: 2.20's own saver hook fails with protobuf 7."""
EXTRAS = ("server", "agent", "stores")
"""Those of the environments; extras of engines have tests of their own, each in an environment with it."""
MODELS = {
    "session": "examples/ranker/model.py:serving",
    "estimator": "examples/ranker/model.py:serving",
    "keras": "tests/matrix/trainer.py:tower",
    "mapped": "tests/matrix/trainer.py:wide",
    "joined": "tests/matrix/trainer.py:many",
}
MAPPED = {"mapped": ["--map-tables"], "mapped-int8": ["--map-tables", "--cast", "table=int8"]}
"""Versions that are made of the training `mapped`, and how."""
BASES = {f"{name}-base": [*options, "--overlay-rows", "80000"] for name, options in MAPPED.items()}
"""Bases of it, which have room for a change of every row. They are served where they were made."""
META = ["--input", "user=Placeholder:0", "--input", "item=Placeholder_1:0", "--output", "click=Sigmoid:0"]
"""What to serve of the session's own graph."""
SAMPLE = (
    "tests/wire",
    "tests/publish/test_manifest.py",
    "tests/cli/test_help.py",
    "tests/cli/test_wrong_uses.py",
    "tests/agent/test_agent_threads.py",
    "tests/agent/test_agent_view.py",
    "tests/transfer/test_outdated_views.py",
)
FIRST, LAST = 10, 30
TOLERANCE = 1e-5
"""Kernels of two TensorFlows sum in other orders; the two states differ by 0.01 and more."""
ROUNDED = {"mapped-int8": 0.005, "mapped-int8-base": 0.005}
"""How far answers may be off where values are rounded."""
_WAIT_S = 600.0


class Environment:
    """A virtual environment with one TensorFlow, or with none."""

    def __init__(self, work: Path, python: str, tensorflow: str, *, lowest: bool = False) -> None:
        self.name = f"{tensorflow} (Python {python})"
        self.python, self.tensorflow = python, tensorflow
        self.has_tensorflow = tensorflow != NONE
        self.bounds = ["--constraint", str(work / "lowest.txt")] if lowest else []
        self.kinds = [kind for kind in MODELS if kind != "estimator" or tensorflow.startswith(ESTIMATORS)]
        name = f"{python}-{tensorflow}" + ("-lowest" if lowest else "")  # else both forms would share it
        self.directory = work / f"env-{name}"
        self.models = work / "made" / name
        self.facts: dict[str, Any] = {}

    def install(self, interpreter: str, wheel: Path) -> None:
        """TensorFlow first, as where people train; then this package, which must leave it alone."""
        if not (self.directory / "bin/python").exists():
            subprocess.run([interpreter, "-m", "venv", self.directory], check=True)
            if self.has_tensorflow:
                beside = BESIDE.get(self.tensorflow, ())
                self._pip("install", f"tensorflow=={self.tensorflow}", *beside, *self.bounds)
        began = time.monotonic()
        before = self._frozen()
        self._pip("install", "--force-reinstall", "--no-deps", str(wheel))
        if self.has_tensorflow:
            self._pip("install", f"{wheel}[{','.join(EXTRAS)}]", *self.bounds)
            self._pip("check")
        else:
            self._pip("install", "-r", str(ROOT / "deploy/requirements-slim.txt"))
        after = self._frozen()
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
        if kind == "mapped":
            return self._make_mapped(work)
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
        return {"seconds": round(time.monotonic() - began), **_made(work / "models" / kind)}

    def _make_mapped(self, work: Path, model: str | None = None) -> dict[str, Any]:
        """What maps a table, of a builder after a training; without TensorFlow versions, of a SavedModel."""
        began, made = time.monotonic(), {**MAPPED}
        if model is None:
            trainer = (self.directory / "bin/python", ROOT / "tests/matrix/trainer.py", "mapped")
            model = str(ROOT / MODELS["mapped"])
            for step in (FIRST, LAST):
                self.run(*trainer, "train", str(step), f"{step}.npz", cwd=work)
                for name, options in BASES.items():
                    named = ["--model", model, "--out", f"models/{name}", "--incr"]
                    self.run("export-model", "--ckpt-dir", "train", *named, *options, cwd=work)
            made |= BASES
            for name in BASES:  # by its warm-up a server would apply the delta before it answers
                shutil.rmtree(_version(work / "models" / name) / "assets.extra")
        for name, options in MAPPED.items():
            named = ["--model", model, "--out", f"models/{name}"]
            self.run("export-model", "--ckpt-dir", "train", *named, *options, cwd=work)
        versions = [_version(work / "models" / name) for name in made]
        mapped = [json.loads((version / "manifest.json").read_text())["mapped"] for version in versions]
        assert all(len(each["tables"]) == 1 for each in mapped), f"not mapped: {mapped}"
        return {"seconds": round(time.monotonic() - began)}

    def sample(self) -> None:
        """Tests of the command line and of formats, which an older Python or library may read otherwise.

        Raises:
            RuntimeError: one fails.
        """
        self._pip(
            "install", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "jsonschema", *self.bounds
        )
        python = self.directory / "bin/python"
        self.run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SAMPLE, cwd=ROOT)

    def follow(self, trained: Path) -> dict[str, Any]:
        """The delta to the base of another environment's training; of a session's graph also a version."""
        kind, work = trained.name, self.models / trained.name
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(trained, work)
        if kind == "mapped":
            plain = (work / "models").rename(work / "before") / kind
            return self._make_mapped(work, str(_version(plain)))
        (delta,) = (work / "models" / kind / "deltas").glob("*/*-*")
        shutil.rmtree(delta)
        began = time.monotonic()
        self.run("export-model", "--ckpt-dir", "train", "--out", f"models/{kind}", "--incr", cwd=work)
        if kind == "session":
            named = ["--model", f"train/model.ckpt-{LAST}.meta", *META]
            self.run("export-model", "--ckpt-dir", "train", *named, "--out", "models/meta", cwd=work)
        return {"seconds": round(time.monotonic() - began), **_made(work / "models" / kind)}

    @contextmanager
    def served(self, config: Path) -> Iterator[tuple[str, list[str]]]:
        """The address of a server of the environment, and the lines that it prints."""
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
            yield match[1], said
        finally:
            process.terminate()
            process.wait(60)

    def _pip(self, *words: str) -> str:
        pip = [self.directory / "bin/python", "-m", "pip", "--disable-pip-version-check", *words]
        return subprocess.run(pip, check=True, stdout=subprocess.PIPE, text=True, cwd="/").stdout

    def _frozen(self) -> dict[str, str]:
        listed = json.loads(self._pip("list", "--format", "json"))
        return {found["name"].lower().replace("_", "-"): found["version"] for found in listed}


def _made(model: Path) -> dict[str, Any]:
    (delta,) = (model / "deltas").glob("*/*-*")
    read = [json.loads((path / "manifest.json").read_text()) for path in (_version(model), delta)]
    return {
        "made": read[1]["incremental"]["made"],
        "tensorflow": read[0].get("tensorflow"),
        "delta_bytes": sum(file["bytes"] for file in read[1]["files"]),
    }


def _version(model: Path) -> Path:
    return next(path for path in model.iterdir() if path.name.isdigit())


def load(loader: Environment, makers: list[Environment], work: Path) -> dict[str, str]:
    """How a loader fares with each model: `ok`, or what is wrong."""
    here = work / "loaded" / loader.directory.name
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir(parents=True)
    cells: dict[str, tuple[Environment, Path]] = {}
    bases: dict[str, Path] = {}
    config = ["model_config_list {"]
    for maker in makers:
        for model in sorted(maker.models.glob("*/models/*")):
            if not any(path.name.isdigit() for path in model.iterdir()):
                continue  # its maker failed, and a server would wait for it
            name = f"{maker.directory.name}-{model.name}"
            served = model  # where it was made, which is where a mapped table has to lie
            if model.name not in {*MAPPED, *BASES}:
                served = Path(shutil.copytree(model, here / name))
                for delta in (served / "deltas").glob("*/*-*"):
                    delta.rename(here / f"{name}.delta")
                    (here / f"{name}.delta.path").write_text(str(delta))
            config.append(f'config {{ name: "{name}" base_path: "{served}" model_platform: "tensorflow" }}')
            cells[name] = maker, model.parents[1]
            bases[name] = _version(served)
    config_file = here / "models.config"
    config_file.write_text("\n".join([*config, "}"]))
    results: dict[str, str] = {}
    with loader.served(config_file) as (address, said):
        for name, (maker, made) in cells.items():
            try:
                results[name] = _updated(address, name, here, made, maker)
            except Exception as error:  # noqa: BLE001 - a cell of the matrix
                results[name] = f"{type(error).__name__}: {error}, {getattr(error, 'cause', '')}"[:500]
        for name in cells:
            version = bases[name].name
            if _is_mapped(name) and f"{name} version {version}: tables mapped" not in "".join(said):
                results[name] += "; the server does not map it"
    python = loader.directory / "bin/python"
    lines = loader.run(python, ROOT / "tests/matrix/stock_load.py", *bases.values(), cwd=here).splitlines()
    for name, line in zip(bases, lines, strict=True):
        found = json.loads(line)
        if found["error"]:
            results[name] += f"; C++: {found['error'][:200]}"
        elif _is_mapped(name) and not found["mapped"]:
            results[name] += "; C++: it is not mapped"
    return results


def _is_mapped(name: str) -> bool:
    return any(name.endswith(f"-{kind}") for kind in (*MAPPED, *BASES))


def _updated(address: str, name: str, here: Path, made: Path, maker: Environment) -> str:
    after = np.load(made / f"{LAST}.npz")
    delta = here / f"{name}.delta"
    takes_deltas = delta.exists() or any(name.endswith(f"-{kind}") for kind in BASES)
    # Else it is a version of the last step.
    before = np.load(made / f"{FIRST}.npz") if takes_deltas else after
    tolerance = next((far for kind, far in ROUNDED.items() if name.endswith(f"-{kind}")), TOLERANCE)
    asked = {key.removeprefix("in_"): value for key, value in before.items() if key.startswith("in_")}
    (output,) = (key for key in before if key.startswith("out_"))
    updated, answered = threading.Event(), threading.Event()

    def off(expected: Any, found: Any) -> float:
        return float(np.abs(expected[output].ravel() - found.ravel()).max())

    with ModelClient(address, name, deadline_s=120) as client, ThreadPoolExecutor(1) as pool:

        def answer() -> Any:
            return client.predict(asked).outputs[output.removeprefix("out_")]

        def watch() -> tuple[int, int]:
            mixed = seen = 0
            while not updated.is_set():
                found = answer()
                answered.set()
                seen, mixed = seen + 1, mixed + (min(off(before, found), off(after, found)) > tolerance)
            return mixed, seen

        if (wrong := off(before, answer())) > tolerance:
            return f"the base's answers are off by {wrong:.2g}"
        if not takes_deltas:
            return "ok"
        if off(before, after[output]) < 2 * tolerance:
            return "both states answer alike, so that nothing is tested"
        watching = pool.submit(watch)
        try:
            answered.wait(_WAIT_S)
            if delta.exists():
                delta.rename((here / f"{name}.delta.path").read_text())
            if not maker.has_tensorflow:
                maker.run("serve-model", "update", address, "--model-name", name, cwd=here)
            position = update(client).position
            time.sleep(0.2)
        finally:
            updated.set()
        mixed, seen = watching.result()
        if position != LAST:
            return f"the update led to {position}"
        if (wrong := off(after, answer())) > tolerance:
            return f"the update's answers are off by {wrong:.2g}"
    return f"{mixed} of {seen} answers mixed" if mixed else "ok"


def _others() -> bool:
    """Train and serve with TensorFlows on which this package does not run; True if all is well."""
    names = ("test_trainers_of_any_age", "test_libraries_of_trainers", "test_old_servers")
    command = [sys.executable, "-m", "pytest", "-q", *(f"tests/integration/{name}.py" for name in names)]
    environment = {**os.environ, "OLD_TRAINERS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def main() -> int:
    """Run the matrix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "build/matrix", help="environments and models")
    parser.add_argument("--jobs", type=int, default=2, help="environments at once")
    parser.add_argument("--short", action="store_true", help=f"{' and '.join(SHORT)} alone")
    parser.add_argument("--only", action="append", help="one TensorFlow: 2.15.1")
    parser.add_argument("--kind", action="append", choices=[*MODELS], help="one kind of model alone")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    work = options.work.resolve()
    wheel = _wheel(work)
    only = options.only or (SHORT if options.short else None)
    asked = [each for each in ENVIRONMENTS if only is None or each[1] in only]
    asked += [(python, NONE) for python in WITHOUT if any(each[1] == FOLLOWED for each in asked)]
    there = [each for each in asked if interpreter(each[0])]
    for python, tensorflow in (each for each in asked if each not in there):
        which = "no TensorFlow" if tensorflow == NONE else f"TensorFlow {tensorflow}"
        print(f"left out: {which} on Python {python}, which is not on the path or of pyenv")
    makers = [
        Environment(work, python, tensorflow, lowest=options.short and tensorflow == SHORT[0])
        for python, tensorflow in there
        if tensorflow != NONE
    ]
    without = [Environment(work, python, NONE) for python, tensorflow in there if tensorflow == NONE]
    (work / "lowest.txt").write_text("\n".join(_lowest()))
    for maker in makers:
        wanted = options.kind or [kind for kind in MODELS if kind != "keras" or not options.short]
        maker.kinds = [kind for kind in maker.kinds if kind in wanted]
    followed = next((maker for maker in makers if maker.tensorflow == FOLLOWED), None)
    report: dict[str, Any] = {"makers": {}, "cells": {}}
    with ThreadPoolExecutor(options.jobs) as pool:
        failed = not all([*pool.map(partial(_prepare, wheel=wheel), makers)])
        loaders = [*makers]
        for each in without if followed else ():
            makers.append(each)
            each.kinds = followed.kinds
            failed |= not _prepare(each, wheel, followed)
        report["makers"] = {maker.name: maker.facts for maker in makers}
        for loader, cells in zip(
            loaders, pool.map(partial(_load_all, makers=makers, work=work), loaders), strict=True
        ):
            report["cells"][loader.name] = cells
            failed |= any(cell != "ok" for cell in cells.values())
    if only is None and options.kind is None:
        report["others"] = _others()
        failed |= not report["others"]
    (work / "matrix.json").write_text(json.dumps(report, indent=1))
    (work / "matrix.md").write_text(_table(makers, report["cells"]))
    print((work / "matrix.md").read_text())
    return int(failed)


def _lowest() -> Iterator[str]:
    """Each library at the lower bound that pyproject.toml has for it."""
    for wanted in requirements(*EXTRAS):
        if wanted.name != "tensorflow":
            (least,) = (each.version for each in wanted.specifier if each.operator == ">=")
            yield f"{wanted.name}=={least}"


def _wheel(work: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", work / "wheel", ROOT]
    shutil.rmtree(work / "wheel", ignore_errors=True)
    subprocess.run(pip, check=True)
    return next((work / "wheel").glob("*.whl"))


def _prepare(maker: Environment, wheel: Path, followed: Environment | None = None) -> bool:
    facts, succeeded = maker.facts, True
    try:
        maker.install(interpreter(maker.python) or "", wheel)
    except (AssertionError, subprocess.CalledProcessError) as error:
        facts["install"], succeeded = f"FAILED {error}", False
    for kind in maker.kinds if succeeded else ():
        try:
            facts[kind] = maker.follow(followed.models / kind) if followed else maker.make(kind)
        except (AssertionError, RuntimeError, ValueError, StopIteration, subprocess.TimeoutExpired) as error:
            facts[kind], succeeded = f"FAILED {error}", False
    if maker.bounds and succeeded:
        try:
            maker.sample()
        except (RuntimeError, subprocess.SubprocessError) as error:
            facts["tests"], succeeded = f"FAILED {error}", False
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
    rows = [["made by, loaded by", *cells], ["---"] * (len(cells) + 1)]
    for maker in makers:
        found = []
        for loaded in cells.values():
            kinds = [kind for kind in maker.kinds if kind != "mapped"]
            if "mapped" in maker.kinds:
                kinds += [*MAPPED, *BASES] if maker.has_tensorflow else [*MAPPED]
            if "session" in maker.kinds and not maker.has_tensorflow:
                kinds.append("meta")
            names = [f"{maker.directory.name}-{kind}" for kind in kinds]
            said = [loaded.get(name, "not made") for name in names]
            found.append("ok" if set(said) == {"ok"} else "; ".join(said))
        rows.append([maker.name, *found])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
