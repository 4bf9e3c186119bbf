"""Several models in one file: `export-model --config FILE`, as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import export_model
from tests.support.printed_documents import checked
from tests.support.step_models import MODEL, save

FILE = """
model = "model.py:build"
keep = 2

[models.first]
ckpt-dir = "a"
out = "models/a"

[models.second]
ckpt-dir = "b"
out = "models/b"
verify = "bytes"
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    Path("export.toml").write_text(FILE)
    Path("x.json").write_text("{}")
    save(Path("a"), 10)
    save(Path("b"), 20)
    return tmp_path


def typed(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "exporter", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


def test_one_model_of_a_file(place: Path) -> None:
    document = export_model("--options", "export.toml#second", "--dry-run", "--json").document
    taken = {one["option"]: one["value"] for one in document["taken"]}
    assert taken == {
        "--model": "model.py:build",
        "--keep": "2",
        "--ckpt-dir": "b",
        "--out": "models/b",
        "--verify": "bytes",
    }


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        (FILE, ["--options", "export.toml"], "has the options of several models: first, second"),
        (FILE, ["--options", "export.toml#third"], "has no model 'third'"),
        ("keep = 3", ["--config", "export.toml"], "has no models"),
        ("models = 3", ["--config", "export.toml"], "'models' is not a table of tables"),
        ("keep = ", ["--config", "export.toml"], "cannot be read as options"),
        (FILE, ["--config", "none.toml"], "none.toml cannot be read as options"),
        (FILE, ["--config", "exprt.toml"], "did you mean export.toml?"),
        (FILE, ["--config", "export.toml#first"], "--options export.toml#first"),
        (FILE, ["--config", "export.toml", "--out", "models/c"], "first and second have one place"),
        (FILE.replace("models/b", "models/a"), ["--config", "export.toml"], "one place to be published in"),
        (FILE, ["--config", "export.toml", "--options=x.json"], "leave one of them out"),
        ("config = 'export.toml'\n" + FILE, ["--config", "export.toml"], "has an option 'config'"),
    ],
)
def test_a_file_that_does_not_say_enough(place: Path, text: str, arguments: list[str], says: str) -> None:
    Path("export.toml").write_text(text)
    done = typed(*arguments)
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert not Path("models").exists()


@pytest.mark.landing
def test_each_model_is_exported_and_one_failure_ends_no_other(place: Path) -> None:
    done = typed("--json", EXPORT_MODEL_CONFIG="export.toml")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    checked(printed)
    runs = printed["models"]
    assert [(run["model"], run["exit_code"]) for run in runs] == [("first", 0), ("second", 0)]
    assert [run["document"]["verified"] for run in runs] == ["files", "bytes"]
    (place / "a" / "checkpoint").unlink()
    for file in (place / "a").glob("model*"):
        file.unlink()
    save(Path("b"), 30)
    done = typed("--config", "export.toml")
    assert done.returncode == 3
    assert "1 model of 2 failed: first" in done.stderr
    assert "export-model --options export.toml#first" in done.stderr
    assert {path.name for path in Path("models/b").glob("[0-9]*")} == {"20", "30"}


@pytest.mark.landing
def test_one_watch_follows_all_of_them(place: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "exporter",
        "--config=export.toml",
        "--watch",
        "--interval",
        "0.1",
        "--json",
    ]
    watch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert watch.stdout is not None
        first = [json.loads(watch.stdout.readline()) for _ in range(2)]
        assert {(one["name"], one["version"]) for one in first} == {("first", 10), ("second", 20)}
        save(Path("a"), 40)
        one = json.loads(watch.stdout.readline())
        assert (one["name"], one["version"]) == ("first", 40)
        children = Path(f"/proc/{watch.pid}/task/{watch.pid}/children").read_text().split()
        assert len(children) == 2
        watch.send_signal(signal.SIGTERM)
        assert watch.wait(60) == 130
        deadline = time.monotonic() + 60
        while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(Path(f"/proc/{child}").exists() for child in children), "no watch outlives its parent"
    finally:
        watch.kill()
        watch.wait()
