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

from exporter.cli import several
from exporter.errors import ExportError
from exporter.terminal.options_file import models_in
from exporter.terminal.output import Output, OutputMode
from tests.support.commands import export_model
from tests.support.printed_documents import checked
from tests.support.step_models import MODEL, save

CONFIG = Path("export.toml")
TYPED = ["--config", "export.toml"]
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
    Path("linked").symlink_to("models")
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
    document = export_model("--config", "export.toml#second", "--dry-run", "--json").document
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
        (FILE, ["--config", "export.toml#third"], "has no model 'third'"),
        ("keep = 3", ["--config", "export.toml"], "--ckpt-dir is missing"),
        ("models = 3", ["--config", "export.toml"], "'models' is not a table of tables"),
        ("keep = ", ["--config", "export.toml"], "cannot be read as options"),
        (FILE, ["--config", "none.toml"], "none.toml cannot be read as options"),
        (FILE, ["--config", "exprt.toml"], "did you mean export.toml?"),
        (FILE, ["--config", "export.toml", "--out", "models/one"], "published to one place, models/one"),
        (FILE.replace("models/b", "models/a"), ["--config", "export.toml"], "to one place, models/a"),
        (FILE.replace("models/b", "./models/../models/a/"), ["--config", "export.toml"], "to one place"),
        (FILE.replace("models/b", "linked/a"), ["--config", "export.toml"], "to one place, linked/a"),
        (FILE.replace("models/a", "s3://b/m").replace("models/b", "s3://b/m/"), TYPED, "one place"),
        ("a" + ".a" * 100_000 + " = 1\n" + FILE, ["--config", "export.toml"], "cannot be read as options"),
        (f"[{'.'.join('a' * 100_000)}]", ["--config", "export.toml"], "cannot be read as options"),
        (
            "config = 'export.toml'\n" + FILE,
            ["--config", "export.toml"],
            "'config' is only valid on the command line",
        ),
    ],
)
def test_a_file_that_does_not_say_enough(place: Path, text: str, arguments: list[str], says: str) -> None:
    Path("export.toml").write_text(text)
    done = typed(*arguments)
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert not Path("models").exists()


def test_a_file_of_another_editor_in_a_directory_of_any_name(place: Path) -> None:
    """A byte order mark and carriage returns are Windows'; a `#` may stand in a path, too."""
    (place / "a#1").mkdir()
    (place / "a#1" / "export.toml").write_bytes(b"\xef\xbb\xbf" + FILE.replace("\n", "\r\n").encode())
    document = export_model("--config", "a#1/export.toml#second", "--dry-run", "--json").document
    assert {"option": "--out", "value": "models/b", "source": "a#1/export.toml#second"} in document["taken"]


def run_programs(
    monkeypatch: pytest.MonkeyPatch, program: str, *arguments: str, watch: bool = False
) -> ExportError | None:
    """Run a program in place of each model's export, whatever a library in it may print."""
    monkeypatch.setattr(several, "module_command", lambda module: [sys.executable, "-c", program])
    sink = Output(OutputMode.JSON)
    try:
        several.run_all(CONFIG, models_in(CONFIG), arguments, sink, watch=watch)
    except ExportError as error:
        return error
    return None


def test_what_a_process_prints_is_no_document(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_programs(monkeypatch, r"import os; os.write(1, b'{rubbish \xff}\n')") is None
    runs = json.loads(capfd.readouterr().out)["models"]
    assert [(run["model"], run["exit_code"], run["document"]) for run in runs] == [
        ("first", 0, None),
        ("second", 0, None),
    ]


def test_a_watch_passes_on_whatever_its_processes_print(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A line that could not be passed on would block its process, whose pipe nobody reads any more."""
    program = (
        r"import os; [os.write(1, b'{rubbish \xff}\n' * 1000) for _ in range(20)]; os.write(1, b'{\"a\": 1}')"
    )
    assert run_programs(monkeypatch, program, "--watch", watch=True) is None
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 2 * 20_001
    assert json.loads(next(line for line in lines if line.startswith("{"))) in (
        {"name": "first", "a": 1},
        {"name": "second", "a": 1},
    )


def test_a_process_that_is_killed_has_failed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = run_programs(monkeypatch, "import os; os.kill(os.getpid(), 9)", "--model", "export")
    assert error is not None and (error.exit_code, "2 models of 2 failed" in error.message) == (1, True)
    assert error.hint == "export-model --model export --config 'export.toml#first'", "it can be typed"


def test_processes_do_not_share_what_is_typed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    before = os.dup(0)
    os.dup2(reader, 0)
    try:
        assert run_programs(monkeypatch, "import sys; sys.stdin.read()") is None, "else it waits for ever"
    finally:
        os.dup2(before, 0)
        for descriptor in (reader, writer, before):
            os.close(descriptor)


_CHILD = """
import signal, time
told = []
def tell(number, frame):
    told.append(number)
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, tell)
open("ready", "a").write("x")
while not told:
    time.sleep(0.01)
time.sleep(0.3)
open("told", "a").write(f"{told} ")
"""
_PARENT = f"""
import sys
from pathlib import Path
from exporter.cli import several
from exporter.terminal import interrupt_by_exception
from exporter.terminal.options_file import models_in
from exporter.terminal.output import Output, OutputMode
if "stopped" in sys.argv:
    interrupt_by_exception()
several.module_command = lambda module: [sys.executable, "-c", {_CHILD!r}]
file = Path("export.toml")
several.run_all(file, models_in(file), (), Output(OutputMode.JSON), watch=True)
"""


def test_ctrl_c_interrupts_each_process_once(place: Path) -> None:
    """A terminal sends it to all processes of the group, and the first of them tells the others."""
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], start_new_session=True, stderr=subprocess.PIPE)
    wait_for_two("ready", parent)
    os.killpg(parent.pid, signal.SIGINT)
    parent.communicate(timeout=60)
    assert Path("told").read_text().split("] ") == ["[15", "[15", ""]


_UNWINDING_CHILD = """
import time
from exporter.terminal import interrupt_by_exception
interrupt_by_exception()
try:
    open("ready", "a").write("x")
    time.sleep(60)
finally:
    open("unwinding", "a").write("x")
    time.sleep(0.5)
    open("unwound", "a").write("x")
"""


def wait_for_two(name: str, parent: subprocess.Popen[bytes]) -> None:
    """Wait until both children have written a mark into this file."""
    deadline = time.monotonic() + 60
    while not (Path(name).exists() and len(Path(name).read_text()) == 2):
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.01)


def test_a_stop_of_the_whole_unit_interrupts_no_unwinding(place: Path) -> None:
    """systemd sends SIGTERM to all processes of a unit, and the first of them tells the others once more."""
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT.replace(repr(_CHILD), repr(_UNWINDING_CHILD)), "stopped"],
        stderr=subprocess.PIPE,
    )
    wait_for_two("ready", parent)
    for child in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split():
        os.kill(int(child), signal.SIGTERM)
    wait_for_two("unwinding", parent)
    parent.send_signal(signal.SIGTERM)
    parent.communicate(timeout=60)
    assert Path("unwound").read_text() == "xx"


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
    assert "export-model --config 'export.toml#first'" in done.stderr
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
