"""An environment as deploy/requirements-slim.txt installs it, and what works there without TensorFlow.

The environment has the libraries of that file and what they need, linked from this one, and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from exporter.publish.delta_log import read_log
from exporter.terminal.tensorflow_import import needed, require_tensorflow
from tests.support.object_stores import Bucket
from tests.support.project import requirements

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests/golden/0.1.1"
SLIM = ROOT / "deploy/requirements-slim.txt"
TENSORFLOW = "'tensorflow>=2.15,<2.23'"


def slim() -> list[str]:
    return [line for line in SLIM.read_text().splitlines() if line and not line.startswith("#")]


def test_the_file_has_what_the_package_needs_but_tensorflow() -> None:
    wanted = requirements("agent", "stores", "signing")
    assert [*map(Requirement, slim())] == [each for each in wanted if each.name != "tensorflow"]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory like `site-packages`, with links to what the requirements lead to."""
    place = tmp_path_factory.mktemp("slim")
    pending, seen = [Requirement(each) for each in slim()], set[str]()
    while pending:
        wanted = pending.pop()
        if wanted.name.lower() in seen or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        seen.add(wanted.name.lower())
        found = distribution(wanted.name)
        pending += [Requirement(each) for each in found.requires or ()]
        for top in {
            file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")
        }:
            source, link = Path(str(found.locate_file(top))), place / top
            if source.exists() and source.is_dir() and top == "google":  # a namespace of several
                link.mkdir(exist_ok=True)
                for each in source.iterdir():
                    if not (link / each.name).exists():
                        (link / each.name).symlink_to(each)
            elif source.exists() and not link.exists():
                link.symlink_to(source)
    assert not (place / "tensorflow").exists() and (place / "numpy").exists()
    return place


class Machine:
    """Commands in the environment."""

    def __init__(self, libraries: Path, directory: Path) -> None:
        self.directory = directory
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(libraries)])}

    def start(self, program: str, *words: object) -> subprocess.Popen[str]:
        module = {"export-model": "exporter", "serve-model": "serving"}[program]
        command = [sys.executable, "-S", "-m", module, *map(str, words)]
        return subprocess.Popen(
            command,
            cwd=self.directory,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, program: str, *words: object, code: int = 0) -> str:
        """What a command prints; on stderr if it fails as it should."""
        return self._said(self.start(program, *words), code)

    def python(self, text: str, code: int = 0) -> str:
        """What some lines of Python print; on stderr if they fail as they should."""
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", text],
            cwd=self.directory,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return self._said(process, code)

    def _said(self, process: subprocess.Popen[str], code: int) -> str:
        out, err = process.communicate(timeout=300)
        assert process.returncode == code, f"{process.args}: {out}{err}"
        return err if code else out


@pytest.fixture
def machine(libraries: Path, tmp_path: Path) -> Machine:
    shutil.copytree(GOLDEN / "train", tmp_path / "train")
    shutil.copytree(GOLDEN / "models", tmp_path / "models")
    return Machine(libraries, tmp_path)


def test_the_environment_has_no_tensorflow(machine: Machine) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import numpy, grpc, h5py, typer; import tensorflow"],
        env=machine.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "No module named 'tensorflow'" in done.stderr


def test_it_is_small(libraries: Path) -> None:
    """Without bytecode, which is a third more, and pip's 17 MB: the agent's image stays below 250 MB."""
    files = (Path(at, name) for at, _, names in os.walk(libraries, followlinks=True) for name in names)
    own = [*(ROOT / "exporter").rglob("*.py"), *(ROOT / "serving").rglob("*.py")]
    sizes = (path.stat().st_size for path in (*files, *own) if path.suffix != ".pyc")
    assert 50e6 < sum(sizes) < 170e6


def test_what_does_not_run_tensorflow(machine: Machine) -> None:
    run = machine.run
    for what in ("train", "models/ranker"):
        assert json.loads(run("export-model", "inspect", what, "--json"))
    run("export-model", "diff", "train/model.ckpt-10", "train/model.ckpt-40")
    export = ("export-model", "--ckpt-dir", "train")
    run(*export, "--model", "models/plain/40", "--out", "models/pair", "--format", "metagraph")
    run(*export, "--model", "models/plain/40", "--out", "models/saved")
    run(*export, "--model", "models/plain/40", "--out", "models/mapped", "--map-tables")
    assert not (machine.directory / "models/mapped/40/assets.extra").exists(), "no requests are tried out"
    meta = next((machine.directory / "models/pair").rglob("*.meta"))
    shutil.copy(meta, machine.directory / "train/model.ckpt-40.meta")
    run(*export, "--out", "models/from-meta")
    for delta in (machine.directory / "models/ranker/deltas").glob("*/*-*"):
        if int(delta.name.partition("-")[2]) > 60:
            shutil.rmtree(delta)
    assert json.loads(run(*export, "--out", "models/ranker", "--incr", "--json"))["status"] == "published"
    run("export-model", "merge", "models/ranker")
    run("export-model", "rollback", "models/ranker", "--to", "10")
    run("export-model", "history", "models/ranker")
    run("export-model", "verify", "models/ranker", "--bytes")
    run("export-model", "doctor", "models/ranker")
    run("export-model", "resume", "models/ranker")


@pytest.mark.landing
def test_stores(machine: Machine, bucket: Bucket) -> None:
    machine.environment |= bucket.environment
    url = bucket.url("models/ranker")
    machine.run("export-model", "push", "models/ranker", url)
    machine.run("export-model", "pull", url, "pulled/ranker")
    machine.run("export-model", "verify", "pulled/ranker")


@pytest.mark.landing
def test_clients_and_the_agent(machine: Machine) -> None:
    from serving.server import ModelServer

    base = machine.directory / "models/ranker"
    deltas = base.rename(machine.directory / "there") / "deltas"
    base.mkdir()
    shutil.copytree(machine.directory / "there/10", base / "10")
    with ModelServer(base) as server:
        server.wait_available(120)
        asked = json.dumps({"instances": [{"user": 1, "item": 2, "word": "red"}]})
        (machine.directory / "asked.json").write_text(asked)
        told = ("--model", "ranker")
        machine.run("serve-model", "predict", server.address, *told, "--json-input", "asked.json")
        shutil.copytree(deltas, base / "deltas")
        newest = read_log(base).at.position
        assert f"is at position {newest} " in machine.run("serve-model", "update", server.address, *told)
        machine.run("serve-model", "status", server.address, *told)
        agent = machine.start(
            *("serve-model", "agent", "--model-base-path", base, "--target", server.address),
            *("--port", "0", "--json"),
        )
        assert agent.stdout is not None
        assert json.loads(agent.stdout.readline())
        agent.send_signal(signal.SIGTERM)
        assert agent.communicate(timeout=60)[1] == "" and agent.returncode == 0


@pytest.mark.parametrize(
    "command",
    [
        "export-model --ckpt-dir train --model builder.py:serving --out models/built",
        "export-model --ckpt-dir train --model models/plain/40 --out models/new --incr",
        "export-model --ckpt-dir train --model models/plain/40 --out models/new --verify outputs",
        "serve-model run models/ranker",
    ],
)
def test_what_runs_tensorflow_says_so(machine: Machine, command: str) -> None:
    (machine.directory / "builder.py").write_text("import tensorflow as tf\ndef serving():\n    pass\n")
    said = machine.run(*command.split(), "--json", code=1)
    error = json.loads(said.splitlines()[-1])
    assert error["error"] == "TensorFlowNeeded"
    assert "runs in TensorFlow" in error["message"] and TENSORFLOW in error["hint"]


@pytest.mark.landing
def test_functions_of_python_say_so_too(machine: Machine) -> None:
    (machine.directory / "builder.py").write_text("import tensorflow as tf\ndef serving():\n    pass\n")
    for call in (
        "export('train', 'models/built', 'builder.py:serving')",
        "export('train', 'models/new', 'models/plain/40', verify='outputs')",
        "export_incremental('train', 'models/new', 'models/plain/40')",
        "plan('train', 'models/built', 'builder.py:serving')",
        "execute(plan('train', 'models/new', 'models/plain/40', verify='outputs'))",
        "next(watch('train', 'models/built', 'builder.py:serving'))",
    ):
        said = machine.python(f"from exporter import *; {call}", code=1)
        assert "exporter.errors.TensorFlowNeeded: " in said, said
    said = machine.python("import exporter.training; print(exporter.training.is_chief())")
    assert said == "True\n"


@pytest.fixture(params=["tensorflow", "tensorflow-cpu"])
def with_tensorflow(
    request: pytest.FixtureRequest, machine: Machine, tmp_path: Path
) -> Callable[[str], None]:
    """Install something of some version that is called TensorFlow, under the name of one of its wheels."""

    def install(version: str) -> None:
        other = tmp_path / "other"
        (other / "tensorflow").mkdir(parents=True)
        (other / "tensorflow/__init__.py").write_text("raise RuntimeError('it was imported')")
        info = other / f"{request.param.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {request.param}\nVersion: {version}\n")
        machine.environment["PYTHONPATH"] += f"{os.pathsep}{other}"

    return install


@pytest.mark.landing
@pytest.mark.parametrize(
    "version, said",
    [
        ("2.14.1", "TensorFlow 2.14 is too old: 2.15 to 2.22"),
        ("2.23.0rc1", "TensorFlow 2.23 is too new: 2.15 to 2.22"),
    ],
)
def test_a_tensorflow_that_does_not_fit(
    machine: Machine, with_tensorflow: Callable[[str], None], version: str, said: str
) -> None:
    with_tensorflow(version)
    for command in (
        "export-model --ckpt-dir train --model models/plain/40 --out models/new --incr",
        "serve-model run models/ranker",
    ):
        assert said in machine.run(*command.split(), code=1)
    for code in (
        "from exporter import *; export_incremental('train', 'models/new', 'models/plain/40')",
        "from exporter.training import IncrementHook",
    ):
        assert f"TensorFlowNeeded: {said}" in machine.python(code, code=1)
    machine.run("export-model", "--ckpt-dir", "train", "--model", "models/plain/40", "--out", "models/new")


def test_a_tensorflow_that_fits_is_taken(machine: Machine, with_tensorflow: Callable[[str], None]) -> None:
    with_tensorflow("2.15.1")
    command = "export-model --ckpt-dir train --model models/plain/40 --out models/new --incr"
    assert "it was imported" in machine.run(*command.split(), code=1)


@pytest.mark.parametrize("with_tensorflow", ["tf-nightly"], indirect=True)
def test_a_nightly_may_be_newer_than_any_release(
    with_tensorflow: Callable[[str], None], machine: Machine
) -> None:
    with_tensorflow("2.99.0.dev20261127")
    command = "export-model --ckpt-dir train --model models/plain/40 --out models/new --incr"
    assert "it was imported" in machine.run(*command.split(), code=1)


def test_the_tensorflow_of_this_environment_fits() -> None:
    require_tensorflow("this test")


def test_other_libraries_are_not_taken_for_tensorflow() -> None:
    error = needed(ModuleNotFoundError("No module named 'mine'", name="mine"))
    assert "unexpected" in error.message
