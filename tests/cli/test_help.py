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
import typer

from exporter.cli.app import app
from serving import cli as serving_cli
from tests.support.commands import export_model, run_app

BIN = Path(sys.executable).parent


def panels(text: str) -> dict[str, set[str]]:
    """The options in each panel of a help text."""
    found: dict[str, set[str]] = {}
    heading = ""
    for line in text.splitlines():
        if title := re.match(r"╭─ (.*?) ─+╮", line):
            heading = title[1]
        for option in re.findall(r"^│ (?:\* )? {0,5}--([a-z-]+)", line):
            found.setdefault(heading, set()).add(option)
    return found


def test_every_option_stands_in_its_group() -> None:
    found = panels(export_model("--help").out)
    names = {max(option.opts, key=len).lstrip("-") for option in typer.main.get_command(app).params}
    assert set().union(*found.values()) == names - {"V"} | {"help"}
    own = {"json", "quiet", "debug", "help", "install-completion", "show-completion"}
    assert found["Options"] == own, "a new option needs a group"
    assert found["Checks"] == {"verify", "verify-inputs", "tolerance", "golden", "dry-run"}


@pytest.mark.parametrize("application", [app, serving_cli.app], ids=["export-model", "serve-model"])
def test_a_flag_has_one_name(application: typer.Typer) -> None:
    """Typer gives a flag without a name a second one: `--no-plain`."""
    root = typer.main.get_command(application)
    options = [option for command in (root, *root.commands.values()) for option in command.params]
    assert len(options) > 50
    assert not [option.name for option in options if option.secondary_opts]


def test_the_programs_own_version() -> None:
    for ran in (export_model("-V"), run_app(serving_cli.app, "-V")):
        assert (ran.code, ran.out.strip()) == (0, f"export-model {version('export-model')}")


def completed(directory: Path, program: str, line: str) -> list[str]:
    """What a real bash offers at the end of a line."""
    path = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    asked = {**path, f"_{program.replace('-', '_').upper()}_COMPLETE": "source_bash"}
    script = subprocess.run([BIN / program], capture_output=True, text=True, check=True, env=asked)
    (directory / "script").write_text(script.stdout)
    words = line.split(" ")
    ask = (
        f"source {directory / 'script'}; COMP_WORDS=({' '.join(words)!s} ); COMP_CWORD={len(words) - 1}; "
        f"_{program.replace('-', '_')}_completion {program}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "--norc", "-c", ask], capture_output=True, text=True, check=True, env=path)
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
