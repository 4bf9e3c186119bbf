"""Old names of options go on working, wherever options are given, and nothing proposes them any more."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer

from exporter import ExportRequest
from exporter.cli.app import app
from exporter.options.old_names import NEW_NAMES, renew_named, renew_variables, renew_words
from exporter.publish.kept_export import export_kept_of
from exporter.storage.layout import MADE_BY_FILE
from serving import cli as serving_cli
from tests.support.commands import export_model

ROOT = Path(__file__).parents[2]
PROGRAMS: tuple[Any, ...] = (typer.main.get_command(app), typer.main.get_command(serving_cli.app))
COMMANDS = [*PROGRAMS, *(one for program in PROGRAMS for one in program.commands.values())]
NAMES = [{name for one in command.params for name in one.opts} for command in COMMANDS]


def test_the_new_name_of_each_is_an_option_without_the_old_one_beside_it() -> None:
    for old, new in NEW_NAMES.items():
        option, _, _ = new.partition(" ")
        assert any(option in names and old not in names for names in NAMES), old
        assert option not in NEW_NAMES or any(option in names for names in NAMES), old


@pytest.mark.parametrize(
    ("typed", "renewed"),
    [
        ("--allow-code --out m", "--allow=code --out m"),
        ("--allow-files=/a --allow-files /b", "--allow=files=/a --allow=files=/b"),
        ("--out --allow-code", "--out --allow-code"),
        ("--out m -- --allow-code", "--out m -- --allow-code"),
        ("merge m --allow-code", "merge m --allow-code"),
        ("export --allow-dropout", "--allow=dropout"),
        ("export --keep 3", "--keep 3"),
        ("--allow-files", "--allow"),
        ("--updatable --incr --rebase", "--new-base=always --incr --new-base=merged"),
        ("merge m --rebase", "merge m --rebase"),
        (
            "merge m --engine dask --engine-address tcp://h:1",
            "merge m --engine dask --engine=address=tcp://h:1",
        ),
        ("--stop-after 2h --stop-step=7", "--until=2h --until=step=7"),
        ("--keep 3 --keep-daily=7", "--keep 3 --keep=daily=7"),
        ("--stamp --plain --rename-file n", "--add=stamp --despite=deltas --rename=n"),
        ("merge m --despite-hold", "merge m --despite=hold"),
        ("--min-change 0.1 --max-row-age=60", "--delta-budget=change=0.1 --delta-budget=age=60"),
        ("--grpc-ca system --model m", "--grpc=ca=system --model m"),
    ],
)
def test_words_of_a_command_line(typed: str, renewed: str) -> None:
    found, notes = renew_words(PROGRAMS[0], typed.split(" "))
    assert found == renewed.split(" ")
    assert len(notes) == (
        0
        if typed == renewed
        else len(
            re.findall(
                "--(?:allow-|stop-|upd|reb|engine-|keep-|sta|plain|rename-|desp|min-|max-|grpc-)|^export",
                typed,
            )
        )
    )


@pytest.mark.parametrize(
    ("typed", "renewed"),
    [
        ("status h --model r --published m", "status h --model-name=r --model-base-path=m"),
        ("run m --no-model-warmup", "run m --flag=enable_model_warmup=false"),
        ("run m --rest-api-timeout-in-ms 7", "run m --flag=rest_api_timeout_in_ms=7"),
        ("agent --audit-seconds 60 --pace-factor=2", "agent --every=audit=60 --pace=factor=2"),
        ("run --model_name=r", "run --model_name=r"),
    ],
)
def test_words_for_servers(typed: str, renewed: str) -> None:
    assert renew_words(PROGRAMS[1], typed.split(" "))[0] == renewed.split(" ")


@pytest.mark.parametrize(
    ("given", "renewed"),
    [
        ({"ALLOW_CODE": "1"}, {"ALLOW": "code"}),
        ({"ALLOW_CODE": "false"}, {}),
        ({"ALLOW_FILES": "/a /b", "ALLOW": "code"}, {"ALLOW": "code files=/a files=/b"}),
        ({"KEEP_HOURLY": "24", "KEEP": "5"}, {"KEEP": "5 hourly=24"}),
        ({"MERGE_ALLOW_CODE": "1"}, {"MERGE_ALLOW_CODE": "1"}),
        ({"NO_SUCH_ALLOW_CODE": "1"}, {"NO_SUCH_ALLOW_CODE": "1"}),
    ],
)
def test_variables(given: dict[str, str], renewed: dict[str, str]) -> None:
    environment = {f"EXPORT_MODEL_{name}": value for name, value in given.items()}
    renew_variables(PROGRAMS[0], "EXPORT_MODEL", environment)
    assert environment == {f"EXPORT_MODEL_{name}": value for name, value in renewed.items()}


def test_files() -> None:
    found, notes = renew_named({"allow-code": True, "allow_files": ["/a"], "keep": 3}, NAMES[0])
    assert sorted(found.pop("allow")) == ["code", "files=/a"]
    assert (found, len(notes)) == ({"keep": 3}, 2)
    found, _ = renew_named({"keep": 3, "keep-daily": 7, "stamp": True, "plain": False}, NAMES[0])
    assert found == {"keep": [3, "daily=7"], "add": "stamp"}
    found, _ = renew_named({"rename": {"a": "b"}, "rename_file": "names"}, NAMES[0])
    assert found == {"rename": ["a=b", "names"]}


def test_arguments_in_python() -> None:
    with pytest.warns(DeprecationWarning, match="allow_files has a new name: allow=files=/a") as told:
        made = ExportRequest("train", "m", allow_code=True, allow_files=[Path("/a")], allow_dropout=False)  # type: ignore[call-arg]  # old names
    assert sorted(made.allow) == ["code", "files=/a"]
    assert {Path(each.filename).name for each in told} == {Path(__file__).name}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ExportRequest("train", "m", allow="code").allow == ("code",)


def test_an_old_name_is_a_note_and_the_hint_has_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"allow_dropout": True}))
    done = subprocess.run(
        [sys.executable, "-m", "exporter", "--allow-code", "--config", file, "--dry-run", "--ouf=m"],
        capture_output=True,
        text=True,
        env={**os.environ, "EXPORT_MODEL_ALLOW_FILE_OPS": "1"},
    )
    assert "hint:  export-model --allow=code" in done.stderr
    ran = export_model("--allow-code", "--config", file, "--ckpt-dir", tmp_path, "--out", tmp_path / "m")
    assert "warning: --allow-code has a new name: --allow=code\n" in ran.err
    assert "options.json: allow_dropout has a new name: allow=dropout" in " ".join(ran.err.split())


def test_the_command_of_an_earlier_release_is_proposed_with_new_names(tmp_path: Path) -> None:
    kept = {"directory": "/work", "arguments": ["--out=m", "--no-warmup", "--allow-files=/a b", "--model=f"]}
    (tmp_path / MADE_BY_FILE).write_text(json.dumps(kept))
    assert "--out=m --requests=none '--allow=files=/a b' --model=f" in export_kept_of(tmp_path)


def test_a_word_that_there_is_not() -> None:
    ran = export_model("--ckpt-dir", "a", "--out", "b", "--allow", "drop-out")
    assert (ran.code, "hint:  --allow dropout" in ran.err) == (2, True)
    for option, wrong in (("--new-base", "nevr"), ("--add", "stmp"), ("--keep", "daily"), ("--keep", "-1")):
        assert export_model("--ckpt-dir", "a", "--out", "b", "--incr", f"{option}={wrong}").code == 2
    for wrong in ("files", "files=", "code=1"):
        assert export_model("--ckpt-dir", "a", "--out", "b", "--allow", wrong).code == 2


def test_nothing_proposes_an_old_name() -> None:
    """Of what people read: hints, help, guides, scripts; a name that another command has still is none."""
    gone = [name for name in NEW_NAMES if not any(name in names for names in NAMES)]
    old = re.compile(rf"(?:{'|'.join(gone)})(?![\w-])|--(?:allow|stop)-\*")
    files = [
        *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
        ROOT / "Makefile",
        *(path for room in ("docs", "examples", "deploy") for path in (ROOT / room).rglob("*")),
    ]
    files += [path for room in ("exporter", "serving", "tools") for path in (ROOT / room).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        if path.is_file()
        and path.suffix in ("", ".md", ".py", ".sh", ".yaml", ".yml", ".toml", ".json", ".html", ".ipynb")
        and path.name != "old_names.py"
        for name in old.findall(path.read_text(errors="replace"))
    ]
    assert found == []


_OF_EVERY_PROGRAM = {"--help", "--help-all", "--install-completion", "--show-completion", "-V"}
MAIN, DISTINCT = 65, 127
"""How many options there are; fewer are written down in the same commit, and more are not taken."""


def test_how_many_options_there_are() -> None:
    options = [
        {max(one.opts, key=len) for one in command.params if one.param_type_name == "option"}
        for command in COMMANDS
    ]
    found = (len(options[0] - _OF_EVERY_PROGRAM), len(set().union(*options) - _OF_EVERY_PROGRAM))
    assert found == (MAIN, DISTINCT)
