"""The groups of `--help`, the program's own version, and completion as a real bash does it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from exporter.cli.app import app
from exporter.terminal.parameters import OTHER
from serving import cli as serving_cli
from tests.support.commands import export_model, run_app

BIN = Path(sys.executable).parent


def sections(text: str) -> dict[str, set[str]]:
    """The options under each heading of a help text."""
    found: dict[str, set[str]] = {}
    heading = ""
    for line in text.splitlines():
        if re.fullmatch(r"[A-Z][A-Za-z, ]*:", line):
            heading = line[:-1]
        for option in re.findall(r"^  (?:-q, )?(?:-h, )?--([a-z-]+)", line):
            found.setdefault(heading, set()).add(option)
    return found


def test_every_option_stands_in_its_group() -> None:
    ran = export_model("--help")
    found = sections(ran.out)
    names = {max(option.opts, key=len).lstrip("-") for option in app.params}
    assert set().union(*found.values()) == names - {"V"} | {"help"}
    assert found[OTHER] == {"json", "quiet", "debug", "help"}, "a new option needs a group"
    assert found["Checks"] == {"verify", "verify-inputs", "tolerance", "golden", "dry-run"}
    assert not set(ran.out) & set("│╭╰─"), "plain text, also in a terminal"


def test_the_programs_own_version() -> None:
    for ran in (export_model("-V"), run_app(serving_cli.app, "-V")):
        assert (ran.code, ran.out.strip()) == (0, f"export-model {version('export-model')}")


def completed(directory: Path, program: str, line: str) -> list[str]:
    """What a real bash offers at the end of a line."""
    script = subprocess.run([BIN / program, "completion", "bash"], capture_output=True, text=True, check=True)
    (directory / "script").write_text(script.stdout)
    words = line.split(" ")
    ask = (
        f"source {directory / 'script'}; COMP_WORDS=({' '.join(words)!s} ); COMP_CWORD={len(words) - 1}; "
        f"_{program.replace('-', '_')}_completion {program}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", ask], capture_output=True, text=True, check=True, env={"PATH": path}
    )
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("program", "line", "expected"),
    [
        ("export-model", "export-model ro", ["rollback"]),
        ("export-model", "export-model --stop-i", ["--stop-idle"]),
        ("export-model", "export-model rollback --t", ["--to"]),
        ("export-model", "export-model --verify o", ["outputs"]),
        ("serve-model", "serve-model st", ["status"]),
    ],
)
def test_a_real_bash_completes(tmp_path: Path, program: str, line: str, expected: list[str]) -> None:
    assert completed(tmp_path, program, line) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_script_for_each_shell(shell: str) -> None:
    ran = export_model("completion", shell)
    assert (ran.code, "export-model" in ran.out) == (0, True)


def test_other_shells_are_usage_errors() -> None:
    assert export_model("completion", "tcsh").code == 2
