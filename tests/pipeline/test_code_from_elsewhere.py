"""A delta is refused if code of its base's builder was edited, wherever it is; moved code is the same."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Ran
from tests.support.edited_jobs import Job, refused

ACT = "import tensorflow as tf\n\ndef act(x):\n    return tf.nn.relu(x)\n"

BUILDER = '''
import importlib, importlib.util, json, os, runpy, sys
import tensorflow as tf
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "src"))
from inserted.part.act import act as inserted          # a namespace package that the builder puts on the path
from named import act as named                         # on PYTHONPATH
from editable.act import act as editable               # an editable installation
from packed.act import act as packed                   # in an archive on the path
from compiled import act as compiled                   # without its source
from library import act as library                     # installed

def by_hand():
    spec = importlib.util.spec_from_file_location("anything", os.path.join(HERE, "../by_hand.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.act

def serving():
    """Scores."""
    from lazy import act as lazy
    computed = importlib.import_module("comp" + "uted").act
    executed = {}
    with open(os.path.join(HERE, "executed.txt")) as file:
        exec(file.read(), executed)
    ran = runpy.run_path(os.path.join(HERE, "ran.py"))["act"]
    with open(os.path.join(HERE, "../config.json")) as file:
        scale = json.load(file)["scale"]
    with tf.io.gfile.GFile(os.path.join(HERE, "config.yaml")) as file:
        bias = float(file.read().partition(":")[2])
    word = tf.compat.v1.placeholder(tf.int64, [None], name="word")
    y = tf.gather(tf.compat.v1.get_variable("weights", [4, 2], use_resource=True), word)
    used = [inserted, named, editable, packed, compiled, library, by_hand(), lazy, computed, ran]
    for each in [*used, executed["act"]]:
        y = each(y)
    return {"word": word}, {"y": y * scale + bias}
'''

FILES = {
    "inserted.part.act": "src/inserted/part/act.py",
    "named": "path/named.py",
    "editable.act": "team/src/editable/act.py",
    "anything": "by_hand.py",
    "lazy.py": "code/lazy.py",
    "computed": "path/computed.py",
}
"""What a refusal names, and the file that is edited."""

READ = {"executed.txt": "code/executed.txt", "ran.py": "code/ran.py"}
"""The same of files that are not imported: the graph is built again, and differs."""


class Elsewhere(Job):
    """A builder whose code comes from many places."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.code = directory / "code/model.py"

    @classmethod
    def begin(cls, directory: Path) -> Elsewhere:
        job = cls(directory)
        texts = dict.fromkeys((*FILES.values(), *READ.values()), ACT)
        texts |= {"code/model.py": BUILDER, "config.json": '{"scale": 2.0}', "code/config.yaml": "bias: 1.0"}
        texts |= {"site-packages/library.py": ACT, "site-packages/library-1.0.dist-info/METADATA": METADATA}
        texts |= {"site-packages/library-1.0.dist-info/top_level.txt": "library\n"}
        texts |= {"site-packages/team.pth": f"{directory}/team/src\n", "compiled.py": ACT}
        for name, text in texts.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)
        job.pack(ACT)
        py_compile.compile(str(directory / "compiled.py"), str(directory / "path/compiled.pyc"))
        (directory / "compiled.py").unlink()
        (directory / "train").mkdir()
        job.save(10)
        ran = job.program("--new-base=always")
        assert ran.returncode == 0, ran.stderr
        job.save(20)
        return job

    def copy(self, directory: Path) -> Elsewhere:
        """All that a job has, somewhere else, with the caches beside the log as they were."""
        shutil.copytree(self.directory, directory, dirs_exist_ok=True)
        (directory / "site-packages/team.pth").write_text(f"{directory}/team/src\n")
        return Elsewhere(directory)

    def export(self, *options: object, model: str | None = "code/model.py:serving") -> Ran:
        return super().export(*options, model=model)

    def pack(self, text: str) -> None:
        with zipfile.ZipFile(self.directory / "packed.zip", "w") as archive:
            archive.writestr("packed/__init__.py", "")
            archive.writestr("packed/act.py", text)

    @property
    def origin(self) -> dict[str, Any]:
        document = json.loads((self.directory / "model/10/manifest.json").read_text())
        found: dict[str, Any] = document["incremental"]["graph"]
        return found

    def program(self, *options: str) -> subprocess.CompletedProcess[str]:
        """The export as a process of its own, on whose path the code is."""
        places = ["path", "packed.zip"]
        path = os.pathsep.join(str(self.directory / place) for place in places)
        code = (
            f"import site; site.addsitedir({str(self.directory / 'site-packages')!r})\n"
            "from exporter.cli import main; main()"
        )
        command = ["--ckpt-dir", "train", "--out", "model", "--model", "code/model.py:serving", *options]
        return subprocess.run(
            [sys.executable, "-c", code, *command],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}{os.pathsep}{path}"},
            capture_output=True,
            text=True,
            timeout=300,
        )


METADATA = "Metadata-Version: 2.1\nName: library\nVersion: 1.0\n"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    return Elsewhere.begin(tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture
def job(first: Elsewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    """Moved: only what lies beside the builder, or is found by its name, is found."""
    job = first.copy(tmp_path / "moved")
    hidden = first.directory.with_name("hidden")
    first.directory.rename(hidden)
    places = ("path", "packed.zip", "site-packages", "team/src")
    monkeypatch.setattr(sys, "path", [*(str(job.directory / place) for place in places), *sys.path])
    try:
        yield job
    finally:
        hidden.rename(first.directory)


def test_a_base_knows_the_code_it_is_made_of(first: Elsewhere) -> None:
    origin = first.origin
    assert [file["path"] for file in origin["files"]] == ["model.py", "lazy.py"]
    known = {module["name"] for module in origin["modules"]}
    assert known == {*FILES} - {"lazy.py"} | {"packed", "packed.act", "compiled"}
    assert {*origin["opened"]} == {*READ, "config.json", "config.yaml"}
    assert {"library": "1.0"}.items() <= origin["libraries"].items()
    assert "tensorflow" in origin["libraries"]
    assert str(first.directory) not in (first.directory / "model/10/manifest.json").read_text()


def test_edited_code_is_refused_and_moved_code_is_the_same(job: Elsewhere) -> None:
    as_it_was = "of base 10; as it was, as far as its own files tell"
    assert job.export("--dry-run").document["graph"] == as_it_was
    for name, place in FILES.items():
        path = job.directory / place
        path.write_text(ACT + "# a comment is no difference\n")
        assert job.export("--dry-run").document["graph"] == as_it_was
        path.write_text(ACT.replace("relu", "tanh"))
        refused(job.export(), f"{name} has changed")
        path.write_text(ACT)
    job.pack(ACT.replace("relu", "tanh"))
    refused(job.export(), "packed.act has changed")
    job.pack(ACT)
    compiled = job.directory / "path/compiled.pyc"
    before = compiled.read_bytes()
    compiled.write_bytes(before.replace(b"relu", b"tanh"))
    refused(job.export(), "compiled has changed")
    compiled.write_bytes(before)
    assert job.export().document["position"] == 20


def test_another_module_of_a_name_is_found_first(job: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    (job.directory / "other").mkdir()
    (job.directory / "other/named.py").write_text(ACT.replace("relu", "tanh"))
    monkeypatch.setattr(sys, "path", [str(job.directory / "other"), *sys.path])
    refused(job.export(), "named has changed")


def test_a_change_of_a_library_is_a_note(job: Elsewhere) -> None:
    installed = job.directory / "site-packages"
    (installed / "library-1.0.dist-info").rename(installed / "library-1.1.dist-info")
    assert job.export().document["graph"].endswith("; library was 1.0, is 1.1")


@pytest.mark.landing
def test_what_files_do_not_tell_is_found_by_building_again(job: Elsewhere) -> None:
    """Files that are read, not imported, may hold anything; so may a module that is not found."""
    config = job.directory / "config.json"
    config.write_text('{"scale": 2.0, "made": "today"}')
    ran = job.program("--incr", "--json")
    assert ran.returncode == 0, ran.stderr
    again = "of base 10; built again, because of config.json, and the same"
    assert json.loads(ran.stdout)["graph"] == again
    job.save(30)
    assert "as it was" in job.export().document["graph"]  # and remembered
    job.save(40)
    for place, before, after in (
        ("config.json", "2.0", "3.0"),
        ("code/config.yaml", "1.0", "2.0"),
        *((place, "relu", "tanh") for place in READ.values()),
    ):
        path = job.directory / place
        text = path.read_text()
        path.write_text(text.replace(before, after))
        ran = job.program("--incr", "--json")
        assert (ran.returncode, json.loads(ran.stderr.splitlines()[-1])["error"]) == (5, "SchemaChanged")
        path.write_text(text)
    (kept,) = job.directory.glob("model/deltas/*/.state/sources.json")
    kept.unlink()  # as in a container that is made for each export
    ran = job.program("--incr", "--json")
    assert ran.returncode == 0, ran.stderr
    assert "built again, because of anything, inserted.part.act" in json.loads(ran.stdout)["graph"]
    job.save(50)
    (job.directory / "path/named.py").unlink()
    ran = job.program("--incr", "--json")
    assert (ran.returncode, json.loads(ran.stderr.splitlines()[-1])["error"]) == (1, "BuilderError")
    assert "No module named 'named'" in ran.stderr
