"""Standard output that is closed, full or left: what was published is a success, the rest a named error."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from exporter.terminal.output import Output

COMMAND = [sys.executable, "-m", "exporter"]


def run(shell: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`export-model ARGUMENTS` behind a piece of shell, such as `"$@" >/dev/full`."""
    command = ["bash", "-o", "pipefail", "-c", shell, "bash", *COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


LOST = {
    "closed": ('"$@" >&-', "Bad file descriptor"),
    "full": ('"$@" >/dev/full', "No space left on device"),
    "left": ('"$@" | sleep 0', "Broken pipe"),
}


@pytest.mark.landing
@pytest.mark.parametrize(
    ("how", "mode"), [("closed", []), ("full", ["--json"]), ("left", []), ("left", ["--json"])]
)
def test_what_was_published_is_a_success(
    how: str, mode: list[str], ranker: Path, ranker_graph: Path, tmp_path: Path
) -> None:
    shell, why = LOST[how]
    ran = run(shell, "--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path / "m", *mode)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "m" / "20" / "manifest.json").is_file()
    said = f"all is done, but the result could not be written to standard output: {why}"
    assert ran.stderr.strip() == f"warning: {said}"


def test_a_name_that_the_terminal_cannot_write_fails_nothing(
    ranker: Path, ranker_graph: Path, tmp_path: Path
) -> None:
    ran = run(
        'PYTHONIOENCODING=ascii "$@"', "--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path / "é"
    )
    assert ran.returncode == 0, ran.stderr
    assert "/\\xe9/20 in" in ran.stdout


@pytest.mark.landing
def test_deltas_and_merges_are_successes_too(ranker: Path, ranker_graph: Path, tmp_path: Path) -> None:
    request = ("--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path / "m", "--incr")
    for arguments in (request, request, ("merge", tmp_path / "m")):
        ran = run('"$@" >/dev/full', *arguments)
        assert (ran.returncode, "all is done" in ran.stderr) == (0, True), ran.stderr


@pytest.mark.landing
@pytest.mark.parametrize("how", ["closed", "full"])
def test_what_only_shows_fails_with_a_named_error(how: str, ranker: Path, ranker_graph: Path) -> None:
    shell, why = LOST[how]
    for arguments in (
        ("inspect", ranker, "--json"),
        ("--ckpt-dir", ranker, "--model", ranker_graph, "--out", "m", "--dry-run"),
    ):
        ran = run(shell, *arguments)
        assert ran.returncode == 1
        assert "the result could not be written to standard output" in ran.stderr
        assert why in ran.stderr
        assert "Exception ignored" not in ran.stderr


@pytest.mark.landing
@pytest.mark.parametrize("shell", ['"$@" 2>/dev/full', '"$@" 2>&-'])
def test_talk_that_nobody_hears_fails_nothing(
    shell: str, ranker: Path, ranker_graph: Path, tmp_path: Path
) -> None:
    updatable = run('"$@"', "--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path / "m", "--incr")
    assert updatable.returncode == 0
    ran = run(
        shell,
        *("--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path / "m", "--json"),
        *("--despite=deltas",),
    )
    assert ran.returncode == 0
    assert json.loads(ran.stdout)["version"] == 21
    missing = run(shell, "inspect", tmp_path / "nothing")
    assert missing.returncode == 3


def test_files_never_take_the_place_of_closed_streams(
    ranker: Path, ranker_graph: Path, tmp_path: Path
) -> None:
    """A file that gets descriptor 1 or 2 would have in it what libraries print."""
    ran = run('"$@" <&- >&- 2>&-', "--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path / "m")
    assert ran.returncode == 0
    verified = run('"$@"', "verify", tmp_path / "m", "--bytes")
    assert verified.returncode == 0, verified.stderr


@pytest.mark.landing
def test_a_link_that_leads_nowhere_is_named(ranker: Path, ranker_graph: Path, tmp_path: Path) -> None:
    (tmp_path / "m").symlink_to("gone")
    for out in (tmp_path / "m", tmp_path / "m" / "below"):
        for more in (["--dry-run"], ["--incr"]):
            request = ("--ckpt-dir", ranker, "--model", ranker_graph, "--out", out, "--json", *more)
            error = json.loads(run('"$@"', *request).stderr)
            assert error["error"] == "TargetNotWritable"
            assert error["message"] == f"{tmp_path / 'm'} is a symbolic link that leads nowhere"
            assert error["cause"] == "it names gone"
    (tmp_path / "gone").mkdir()
    request = ("--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path / "m")
    assert run('"$@"', *request).returncode == 0
    assert (tmp_path / "gone" / "20").is_dir()


@pytest.mark.landing
def test_the_directory_of_the_checkpoint_is_no_model(
    ranker: Path, ranker_graph: Path, tmp_path: Path
) -> None:
    train = tmp_path / "train"
    train.mkdir()
    for path in ranker.iterdir():
        if path.is_file():
            os.link(path, train / path.name)
    before = sorted(train.iterdir())
    for ckpt_dir in (train, train / "model.ckpt-20"):
        for out in (train, train / ".." / "train"):
            ran = run('"$@"', "--ckpt-dir", ckpt_dir, "--model", ranker_graph, "--out", out)
            assert ran.returncode == 2, ran.stderr
            assert "is the directory of the checkpoint" in ran.stderr
    assert sorted(train.iterdir()) == before
    ran = run('"$@"', "--ckpt-dir", train, "--model", ranker_graph, "--out", train / "served")
    assert ran.returncode == 0, ran.stderr


def test_a_table_in_a_pipe_keeps_its_lines_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever searches the output finds a name, and the title, in one line; COLUMNS narrows it."""
    name, title = "a" * 120, "published: position 400 (step 400)"
    for columns, is_whole in (("", True), ("60", False)):
        monkeypatch.setenv("COLUMNS", columns)
        stream = io.StringIO()
        Output(stdout=stream).table(title, {"variable": "left"}, [[name]])
        lines = [line.strip() for line in stream.getvalue().splitlines()]
        assert lines[0] == title
        assert (name in lines) == is_whole


@pytest.mark.landing
def test_a_directory_whose_name_is_not_utf_8(ranker: Path, ranker_graph: Path, tmp_path: Path) -> None:
    train = tmp_path / os.fsdecode(b"mod\xe8le")
    shutil.copytree(ranker, train)
    out = tmp_path / os.fsdecode(b"sorti\xe8")
    for options in ((), ("--new-base=always", "--again")):
        ran = run('"$@"', "--ckpt-dir", train, "--model", ranker_graph, "--out", out, "-q", *options)
        assert ran.returncode == 0, ran.stderr
    manifest = json.loads((out / "20" / "manifest.json").read_text())
    assert manifest["source"]["directory"] == "mod\\xe8le"


CTRL_C_WHILE_IMPORTING = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from {module} import main
main()
"""


@pytest.mark.parametrize("module", ["exporter.cli", "serving.__main__"])
def test_ctrl_c_while_a_command_starts_prints_no_traceback(module: str) -> None:
    script = CTRL_C_WHILE_IMPORTING.replace("{module}", module)
    ran = subprocess.run([sys.executable, "-c", script, "-V"], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (-signal.SIGINT, "")
