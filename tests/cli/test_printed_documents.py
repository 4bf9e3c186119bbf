"""Each command's JSON, and each failure's, has `format_version` and fits the published schema."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from serving import cli as serving_cli
from tests.support.commands import export_model, run_app
from tests.support.printed_documents import checked, checked_error
from tools.reference.documents import PRINTED_BY

GOLDEN = Path(__file__).parents[1] / "golden/0.1.1"
NEED_A_STORE_OR_A_SERVER = {
    "export-model push",
    "export-model pull",
    *(command for command in PRINTED_BY if command.startswith("serve-model")),
    "/status.json of the agent",
    "export-model --config",  # which runs processes
}
"""Where these are run, the same is checked: `tests/support/commands.py`."""


@pytest.fixture
def place(tmp_path: Path, ranker: Path, ranker_graph: Path) -> Path:
    """A directory with a training, models of each kind, and a graph."""
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    (tmp_path / "ranker").symlink_to(ranker)
    (tmp_path / "graph").symlink_to(ranker_graph)
    return tmp_path


EXPORT = "--ckpt-dir ranker --model graph --out models/new"
RUNS = {
    "export-model": [f"{EXPORT} --dry-run", EXPORT, EXPORT],
    "export-model --incr": [
        f"{EXPORT} --new-base always --despite deltas",
        f"{EXPORT} --new-base always --again",
        f"{EXPORT} --incr --dry-run",
        f"{EXPORT} --incr",
    ],
    "export-model init": ["init ranker", "init train", "init nothere"],
    "export-model inspect": [
        "inspect train",
        "inspect train --tensors",
        "inspect ranker/model.ckpt-20.meta",
        "inspect models/plain/40",
        "inspect models/ranker",
        "inspect models/plain",
        "inspect ranker --unmatched graph",
        "inspect nothere",
    ],
    "export-model history": ["history models/ranker", "history models/plain", "history models"],
    "export-model merge": [
        "merge models/ranker --dry-run",
        "merge models/ranker --from 10 --to 30",
        "merge models/deeprec",
        "merge models/plain",
        "merge models/ranker --rebase --despite hold",
    ],
    "export-model rollback, export-model resume": [
        "rollback models/plain --to 10 --dry-run",
        "rollback models/plain --to 10",
        "resume models/plain --dry-run",
        "resume models/plain",
        "resume models/ranker",
        "rollback models/ranker --to 35",
    ],
    "export-model tag": [
        "tag models/ranker",
        "tag models/ranker good --dry-run",
        "tag models/ranker good @previous",
        "tag models/ranker",
        "tag models/ranker good --delete",
        "tag models/ranker 2h",
    ],
    "export-model diff": ["diff models/ranker@30 models/ranker", "diff train models/ranker", "diff train x"],
    "export-model verify": ["verify models/ranker", "verify models/plain --bytes", "verify train"],
    "export-model doctor": [
        "doctor models/ranker",
        "doctor models/plain --ckpt-dir nothere",
        "doctor models/ranker --target 127.0.0.1:1 --deadline 0.1",
    ],
}


def test_no_command_is_left_out() -> None:
    assert RUNS.keys() | NEED_A_STORE_OR_A_SERVER == PRINTED_BY.keys()


@pytest.mark.parametrize("command", RUNS)
def test_documents_and_failures_fit_the_schema(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    for line in RUNS[command]:
        ran = export_model(*line.split(" "), "--json")
        assert ran.out or ran.code, line
        if ran.out:
            checked(json.loads(ran.out))
        if ran.code:
            checked_error(json.loads(ran.err.strip().splitlines()[-1]))


@pytest.mark.parametrize("line", ["status 127.0.0.1:1", "update x:y", "predict", "run models", "rnu"])
def test_failures_of_the_other_program_too(line: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    ran = run_app(serving_cli.app, *line.split(" "), "--json")
    assert (ran.out, ran.error["exit_code"]) == ("", ran.code)
    assert ran.code
