"""`--watch` and the roles of nodes, as their users meet them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from exporter.publish.delta_log import list_deltas, log_path
from exporter.training.roles import VARIABLES
from tests.support.commands import Ran, export_model
from tests.support.logs import Serving
from tests.support.printed_documents import checked
from tests.support.setting import followed

WORKER = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def lines_of(ran: Ran) -> list[dict[str, object]]:
    return [checked(json.loads(line)) for line in ran.out.splitlines()]


def test_each_export_is_one_line_of_json(ranker: Path, ranker_graph: Path, tmp_path: Path) -> None:
    options = [
        "--ckpt-dir",
        ranker,
        "--model",
        ranker_graph,
        "--out",
        tmp_path,
        "--watch",
        "--until",
        "0",
    ]
    ran = export_model(*options, "--json")
    (document,) = lines_of(ran)
    assert (ran.code, document["format_version"], document["version"]) == (0, 1, 20)
    again = export_model(*options, "--json")
    assert (again.code, again.out, again.err) == (0, "", "")


def test_it_says_what_it_waits_for(ranker_graph: Path, tmp_path: Path) -> None:
    options = ["--ckpt-dir", tmp_path / "train", "--model", ranker_graph, "--out", tmp_path / "m"]
    ran = export_model(*options, "--watch", "--interval", "0.05", "--until", "idle=0.2s")
    assert ran.code == 0
    assert ran.err.count("waiting: ") == 1
    assert export_model(*options, "--watch", "--until", "0", "--json").err == ""


def test_increments_are_followed_until_their_step(tmp_path: Path) -> None:
    trainer, model = followed(tmp_path, serving=Serving(parts=2, cast=True), parts=3), tmp_path / "model"
    trainer.train()
    trainer.step = 20
    trainer.increment()
    options = ["--ckpt-dir", tmp_path / "train", "--out", model, "--incr", "--watch", "--json"]
    for _ in range(2):
        ran = export_model(*options, "--until", "step=20")
        assert ran.code == 0, ran.err
    assert [delta.end for delta in list_deltas(log_path(model, 10))] == [20]
    damaged = next((tmp_path / "train/increments").glob("0*")) / "delta.index"
    damaged.write_bytes(b"damaged")
    trainer.train()
    trainer.step = 30
    trainer.increment()
    index = next(path for path in (tmp_path / "train/increments").glob(f"*{30:020d}*")) / "delta.index"
    index.write_bytes(b"damaged")
    ran = export_model(*options, "--until", "0")
    assert (ran.code, ran.err.count("error")) == (3, 2), "told when it happened, and again as the end"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--until", "1h"], "goes with --watch"),
        (["--until", "count=1"], "goes with --watch"),
        (["--incr", "--until", "step=1"], "goes with --watch"),
        (["--until", "idle=1m"], "goes with --watch"),
        (["--watch", "--until", "soon"], "--until 'soon' is not a duration"),
        (["--watch", "--until", "idle=-1"], "--until '-1' is not a duration"),
        (["--watch", "--until", "count=0"], "--until 'count=0' names no end"),
        (["--watch", "--version", "3"], "--version 3 names one version"),
    ],
)
def test_usage_errors(options: list[str], message: str, tmp_path: Path) -> None:
    ran = export_model("--ckpt-dir", tmp_path, "--out", tmp_path / "m", *options)
    assert ran.code == 2
    assert message in ran.err


@pytest.mark.parametrize(
    "mode", [[], ["--incr"], ["--watch"], ["--incr", "--watch"], ["--dry-run"], ["--new-base=always"]]
)
def test_a_node_that_is_not_the_chief_writes_nothing(
    ranker: Path, ranker_graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: list[str]
) -> None:
    monkeypatch.setenv("TF_CONFIG", WORKER)
    options = ["--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path / "m", *mode]
    ran = export_model(*options)
    assert (ran.code, ran.err) == (0, "")
    assert "this node is worker 1 (TF_CONFIG), and the chief exports" in ran.out
    ran = export_model(*options, "--json")
    document = ran.document
    assert len(ran.out.splitlines()) == 1 or "--watch" not in mode, "each document of a watch is one line"
    told = {"status": "nothing_to_do", "path": None, "role": "worker", "index": 1, "role_source": "TF_CONFIG"}
    assert document == {"format_version": 1, **told}
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("environ", "options"),
    [
        ({}, []),
        ({"TF_CONFIG": ""}, []),
        ({"TF_CONFIG": WORKER.replace("1}", "0}")}, []),
        ({"JOB_NAME": "nightly export"}, []),
        ({"TF_CONFIG": WORKER}, ["--despite=role"]),
        ({"TF_CONFIG": "broken"}, ["--despite=role"]),
    ],
)
def test_chiefs_and_nodes_alone_export(
    ranker: Path,
    ranker_graph: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    options: list[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    ran = export_model("--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path, "-q", *options)
    assert (ran.code, ran.err) == (0, "")
    assert (tmp_path / "20").is_dir()


def test_an_environment_that_contradicts_itself_is_no_guess(
    ranker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", "broken")
    ran = export_model("--ckpt-dir", ranker, "--out", tmp_path / "m", "--json")
    assert (ran.code, ran.error["error"]) == (2, "RoleUnknown")
    assert "--despite role" in ran.error["hint"]
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("mode", [[], ["--incr"]])
@pytest.mark.parametrize("model", ["typo.py:fn", "models/typo.meta"])
def test_a_wrong_model_is_told_at_once(tmp_path: Path, mode: list[str], model: str) -> None:
    """There is no checkpoint yet that it would be needed for."""
    options = ["--ckpt-dir", tmp_path / "train", "--model", model, "--out", tmp_path / "m", *mode]
    ran = export_model(*options, "--watch", "--until", "1h")
    assert (ran.code, "typo" in ran.err) in {(1, True), (2, True)}
    assert "waiting" not in ran.err


def test_people_read_times_and_why_a_watch_ended(ranker: Path, ranker_graph: Path, tmp_path: Path) -> None:
    out = tmp_path / "my models"
    options = ["--ckpt-dir", ranker, "--model", ranker_graph, "--out", out, "--watch"]
    ran = export_model(*options, "--until", "count=1", "-v")
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\n", ran.out)
    last = ran.err.strip().splitlines()[-1]
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ the watch has ended: 1 publication, as --until", last)
    assert f"serve-model run '{out}'" in ran.out
    again = export_model(*options, "--until", "idle=0.1s")
    assert "as --until says" in again.err


def test_a_publication_is_one_line(ranker: Path, ranker_graph: Path, tmp_path: Path) -> None:
    options = ["--ckpt-dir", ranker, "--model", ranker_graph, "--out", tmp_path / "m", "--watch"]
    ran = export_model(*options, "--until", "count=1")
    assert re.fullmatch(rf"\S+Z {tmp_path}/m/20: 6 variables, 443.8 KiB, in \d+\.\d\d s\n", ran.out)


def test_a_watch_says_once_whom_it_notifies_and_each_failure(tmp_path: Path) -> None:
    trainer = followed(tmp_path)
    trainer.train()
    trainer.step = 20
    trainer.increment()
    gone = "127.0.0.1:9"
    options = ["--ckpt-dir", tmp_path / "train", "--out", tmp_path / "model", "--incr", "--watch"]
    ran = export_model(*options, "--notify", gone, "--until", "step=20")
    assert ran.code == 0, ran.err
    assert ran.err.count(f"each delta is announced to {gone}\n") == 1
    assert f"{gone} did not take it: UNAVAILABLE" in ran.err


def test_deltas_are_a_line_each_and_ctrl_c_is_no_error(tmp_path: Path) -> None:
    trainer, model = followed(tmp_path, serving=Serving(parts=2, cast=True), parts=3), tmp_path / "model"
    command = [sys.executable, "-m", "exporter", "--ckpt-dir", str(tmp_path / "train"), "--out", str(model)]
    command += ["--incr", "--watch", "--interval", "0.05"]
    for stop in (signal.SIGINT, signal.SIGTERM):
        trainer.train()
        trainer.step += 10
        trainer.increment()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                said = process.stdout.readline()
                process.send_signal(stop)
                out, err = process.communicate(timeout=60)
            finally:
                process.kill()
        assert (process.returncode, out) == (0, "")
        path = re.escape(str(list_deltas(log_path(model, 10))[-1].path))
        assert re.search(rf"{path} \(step {trainer.step}\): \d+ rows in \d+ variables, .*, in .* s$", said)
        assert re.search(rf"the watch has ended: interrupted after 1 publication, the newest {path}\n", err)
        assert "error" not in err
