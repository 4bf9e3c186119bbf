"""The headings of `--help`, the program's own version, and completion as a real bash does it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from exporter.cli.app import app
from exporter.cli.help_command import HELP
from exporter.options import HEADINGS
from exporter.version import __version__
from serving import cli as serving_cli
from tests.support.commands import export_model, run_app

GOLDEN = Path(__file__).parents[1] / "golden/0.1.1"
BIN = Path(sys.executable).parent


def headings(text: str) -> dict[str, set[str]]:
    """The options below each heading of a help text."""
    found: dict[str, set[str]] = {}
    heading = ""
    for line in text.splitlines():
        if title := re.fullmatch(r"(\w.*):", line):
            heading = title[1]
        for option in re.findall(r"^  (?:-\w, )?--([a-z-]+)", line):
            found.setdefault(heading, set()).add(option)
    return found


def test_help_is_short() -> None:
    ran = export_model("--help")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert len(lines) < 47
    assert max(map(len, lines)) <= 80
    for word in ("--ckpt-dir", "--out", "--model", "--incr", "--watch", "--verify", "--dry-run", "--keep"):
        assert f"  {word}" in ran.out
    assert "--help-all" in ran.out
    assert all(topic in lines[-2] + lines[-1] for topic in HEADINGS.values())
    for arguments in (["export", "--help"], ["help"], ["-h"]):
        assert export_model(*arguments).out == ran.out
    for command in ((), ("run",), ("predict",)):
        assert (
            run_app(serving_cli.app, "help", *command).out == run_app(serving_cli.app, *command, "--help").out
        )
    assert "serve-model status" in run_app(serving_cli.app, "help", "statsu").err


def test_the_help_of_servers_is_short_too() -> None:
    lines = run_app(serving_cli.app, "--help").out.splitlines()
    assert len(lines) < 45
    for line in lines:  # a line that is broken goes on without the spaces that it begins with
        assert not re.match(r" [a-z]", line), line


@pytest.mark.parametrize("application", [app, serving_cli.app], ids=["export-model", "serve-model"])
def test_every_help_has_one_form(application: typer.Typer) -> None:
    program: Any = typer.main.get_command(application)
    for command in program.list_commands(None):
        if command == "help":  # which prints the short page
            continue
        whole = "--help-all" if program.commands[command].short else "--help"
        shown = run_app(application, command, whole).out
        names = [max(one.opts, key=len) for one in program.commands[command].params if one.opts[0][0] == "-"]
        assert [name for name in names if not re.search(rf"^  .*{name}\b", shown, re.MULTILINE)] == []
        assert not re.search(r"[…╭│]|\{[A-Z:]+\}|^  [A-Z:]+ +<", shown, re.MULTILINE)
        examples = re.findall(
            "^  .*", shown.partition("Arguments:")[0].partition("Options:")[0], re.MULTILINE
        )
        wide = [line for line in shown.splitlines() if len(line) > 80 and line not in examples]
        assert wide == []


@pytest.mark.parametrize("command", ["run", "agent"])
def test_a_command_of_many_options_shows_a_handful(command: str) -> None:
    ran = run_app(serving_cli.app, command, "--help")
    lines = ran.out.splitlines()
    assert (ran.code, lines[-1]) == (0, f"More: serve-model {command} --help-all")
    assert len(lines) < 47
    short = typer.main.get_command(serving_cli.app).commands[command].short  # type: ignore[attr-defined]  # of ours
    assert [*re.findall(r"^  (?:-\w, )?(--[a-z-]+)", ran.out, re.MULTILINE)] == [*short]
    assert "Examples:\n  serve-model" in ran.out


def test_a_program_without_a_command_says_which_there_are() -> None:
    done = subprocess.run([BIN / "serve-model"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: a command is missing: run, status, reload, agent, predict, update\n"
    )
    assert "serve-model --help" in done.stderr


def test_every_option_has_a_topic() -> None:
    root = typer.main.get_command(app)
    told = [export_model("help", topic).out for topic in HELP.names()]
    for option in root.params:
        for name in option.opts:
            assert any(re.search(rf"{name}[ ,\n]", text) for text in told), name
    assert "130  interrupted" in export_model("help", "exit-codes").out
    assert "Usage: export-model merge" in export_model("help", "merge").out


def test_a_topic_that_is_not_there() -> None:
    ran = export_model("help", "delts")
    assert (ran.code, "there is no topic 'delts'" in ran.err) == (2, True)
    assert "hint:  export-model help deltas" in ran.err
    assert "export-model --help lists the topics" in export_model("help", "xyzzy").err
    assert "hint:  serve-model help predict\n" in export_model("help", "predict").err


def test_every_option_stands_in_its_group() -> None:
    found = headings(export_model("--help-all").out)
    names = {max(option.opts, key=len).lstrip("-") for option in typer.main.get_command(app).params}
    assert set().union(*found.values()) == names - {"V"}
    own = {"json", "quiet", "debug", "help", "help-all", "install-completion", "show-completion"}
    assert found["Options"] == own, "a new option needs a group"
    assert {"sign-key", "trust"} <= found["Signing"], "Signatures are a model's"
    assert found["Checks"] == {"verify", "tolerance", "golden", "dry-run"}


@pytest.mark.parametrize("application", [app, serving_cli.app], ids=["export-model", "serve-model"])
def test_a_flag_has_one_name(application: typer.Typer) -> None:
    """Typer gives a flag without a name a second one: `--no-plain`."""
    root = typer.main.get_command(application)
    options = [option for command in (root, *root.commands.values()) for option in command.params]
    assert len(options) > 50
    assert not [option.name for option in options if option.secondary_opts]


def test_the_programs_own_version() -> None:
    for ran in (run_app(one, flag) for one in (app, serving_cli.app) for flag in ("-V", "--version")):
        assert (ran.code, ran.out.strip()) == (0, f"export-model {__version__}")


def completed(directory: Path, program: str, line: str) -> list[str]:
    """What a real bash offers at the end of a line."""
    path = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    asked = {**path, f"_{program.replace('-', '_').upper()}_COMPLETE": "source_bash"}
    script = subprocess.run([BIN / program], capture_output=True, text=True, check=True, env=asked)
    (directory / "script").write_text(script.stdout)
    assert "complete -o default " in script.stdout, "bash completes paths where the program offers nothing"
    words = line.split(" ")
    files = f"COMPREPLY=( $(compgen -f -- '{words[-1]}') )"
    ask = (
        f"source {directory / 'script'}; COMP_WORDS=({' '.join(words)!s} ); COMP_CWORD={len(words) - 1}; "
        f"_{program.replace('-', '_')}_completion {program}; "
        f"[[ ${{#COMPREPLY[@]}} -gt 0 || '{words[-1]}' == '' ]] || {files}; "
        "printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", ask], capture_output=True, text=True, check=True, env=path, cwd=directory
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.landing
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("program", "line", "expected"),
    [
        ("export-model", "export-model ro", ["rollback"]),
        ("export-model", "export-model --unt", ["--until"]),
        ("export-model", "export-model rollback --t", ["--to", "--trust"]),
        ("export-model", "export-model rollback models/ranker --to 8", ["80", "81", "82", "83"]),
        (
            "export-model",
            "export-model rollback models/plain --to ",
            ["10", "40", "41", "@latest", "@previous", "@yesterday"],
        ),
        ("export-model", "export-model rollback nothere --to ", []),
        ("export-model", "export-model merge models/ranker --from 1", ["10"]),
        ("export-model", "export-model diff models/ranker@3", ["models/ranker@30"]),
        ("export-model", "export-model diff s3://b/../x@", []),
        ("export-model", "export-model help del", ["deltas"]),
        ("export-model", "export-model --ckpt-dir tr", ["train"]),
        ("export-model", "export-model inspect models/r", ["models/ranker"]),
        ("export-model", "export-model --model gr", ["graph.meta"]),
        ("serve-model", "serve-model run models/pl", ["models/plain"]),
        ("export-model", "export-model --verify o", ["outputs"]),
        ("serve-model", "serve-model st", ["status"]),
    ],
)
def test_a_real_bash_completes(tmp_path: Path, program: str, line: str, expected: list[str]) -> None:
    shutil.copytree(GOLDEN / "models", tmp_path / "models")
    (tmp_path / "train").mkdir()
    (tmp_path / "graph.meta").touch()
    assert sorted(completed(tmp_path, program, line)) == expected
