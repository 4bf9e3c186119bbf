"""The same checkpoint exported again is nothing to do: which plans are the same, what may come between."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.errors import NothingChanged
from exporter.options import ExportRequest, Updates
from exporter.pipeline import log_maintenance
from exporter.pipeline.full import execute, export, plan
from exporter.pipeline.incremental import export_incremental
from exporter.pipeline.watch import watch
from exporter.pipeline.watch_loop import StopWhen, Watching
from exporter.publish.model import PublishedAlready
from exporter.publish.versions import version_dirs
from tests.support.commands import export_model
from tests.support.step_models import MODEL, request_of, save

EXPORT = ("--ckpt-dir", "train", "--model", "model.py:build", "--out", "models/ranker")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    save(tmp_path / "train", 10)
    return tmp_path


def ran(*options: object) -> dict[str, Any]:
    done = export_model(*EXPORT, *options, "--json")
    assert done.code == 0, done.err
    document: dict[str, Any] = done.document
    return document


def versions() -> list[int]:
    return [child.version for child in version_dirs(Path("models/ranker"))]


def test_the_second_time_there_is_nothing_to_do(directory: Path) -> None:
    first = ran()
    again = ran()
    assert (first["status"], again["status"]) == ("published", "nothing_to_do")
    assert {key: again[key] for key in ("path", "version", "position")} == {
        key: first[key] for key in ("path", "version", "position")
    }
    assert ran("--dry-run")["status"] == "nothing_to_do"
    assert versions() == [10]
    told = export_model(*EXPORT)
    assert "nothing to do" in told.out
    assert "model.ckpt-10 is published already: models/ranker/10" in told.out
    assert (ran("--again")["version"], versions()) == (11, [11, 10])


@pytest.mark.landing
def test_it_is_known_in_another_process_also_where_functions_count_up(directory: Path) -> None:
    (directory / "model.py").write_text(
        """
import tensorflow as tf

def build():
    v1 = tf.compat.v1
    ids = v1.placeholder(tf.int64, [None], "ids")
    table = v1.get_variable("table", [6, 2], use_resource=True)
    double = tf.function(lambda x: tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y * 2), [0, x])[1])
    return {"ids": ids}, {"rows": double(tf.gather(table, ids))}
"""
    )
    command = [sys.executable, "-m", "exporter", *EXPORT, "--json"]
    told = [subprocess.run(command, capture_output=True, check=True, timeout=300).stdout for _ in range(2)]
    assert [json.loads(text)["status"] for text in told] == ["published", "nothing_to_do"]
    assert ran()["status"] == "nothing_to_do"


@pytest.mark.landing
@pytest.mark.parametrize(
    "options",
    [
        ["--cast", "bfloat16"],
        ["--format", "both"],
        ["--data", "compact"],
        ["--verify", "bytes"],
        ["--new-base=always"],
        ["--version", "30"],
    ],
)
def test_other_options_make_another_version_and_these_again_none(directory: Path, options: list[str]) -> None:
    ran()
    assert ran(*options)["status"] == "published"
    assert ran(*options)["status"] == "nothing_to_do"
    assert len(versions()) == 2


def test_another_graph_or_vocabulary_makes_another_version(directory: Path) -> None:
    ran()
    (directory / "model.py").write_text(MODEL.replace("tf.gather(table, ids)", "tf.gather(table, ids) * 2.0"))
    assert ran()["status"] == "published"
    assert ran()["status"] == "nothing_to_do"
    (directory / "requests").write_text('{"inputs": {"ids": [1]}}')
    assert ran("--requests", "requests")["status"] == "published"
    (directory / "requests").write_text('{"inputs": {"ids": [2]}}')
    assert ran("--requests", "requests")["status"] == "published"
    assert ran("--requests", "requests")["status"] == "nothing_to_do"


def test_options_that_come_back_make_a_version_of_their_own(directory: Path) -> None:
    """What is served is told by the newest version of the checkpoint, not by any."""
    ran()
    ran("--cast", "bfloat16")
    assert ran()["status"] == "published"


def test_a_retry_after_newer_ones_publishes_nothing_over_them(directory: Path) -> None:
    ran()
    save(directory / "train", 20)
    ran()
    retry = ran("--ckpt-dir", "train/model.ckpt-10")
    assert (retry["status"], retry["version"], retry["newest_version"]) == ("nothing_to_do", 10, 20)
    assert "--again" in export_model(*EXPORT, "--ckpt-dir", "train/model.ckpt-10").out
    assert versions() == [20, 10]


def test_the_version_that_is_named_is_there_already(directory: Path) -> None:
    ran("--version", 7)
    assert ran("--version", 7)["status"] == "nothing_to_do"
    assert ran("--version", "time")["status"] == "nothing_to_do"
    save(directory / "train", 20)
    assert export_model(*EXPORT, "--version", 7).code == 2


def test_a_rollback_stays_and_a_hold_does_not_fail_the_retry(directory: Path) -> None:
    ran()
    save(directory / "train", 20)
    ran()
    back = log_maintenance.rollback(Path("models/ranker"), 10)
    assert back.hold == 21
    retry = ran()
    assert (retry["status"], retry["version"], retry["hold"]) == ("nothing_to_do", 20, 21)
    assert "at 21, until export-model resume models/ranker\n" in export_model(*EXPORT).out
    assert export_model(*EXPORT, "--again").code == 5, "what is to be published is held"
    assert export_model(*EXPORT, "--cast", "bfloat16").code == 5
    log_maintenance.resume(Path("models/ranker"), lift_only=True)
    assert ran()["status"] == "nothing_to_do", "what was taken back does not come back by a retry"
    assert versions() == [21, 20, 10]


def test_versions_of_earlier_releases_are_known_by_their_checkpoint(directory: Path) -> None:
    ran()
    manifest = Path("models/ranker/10/manifest.json")
    document = json.loads(manifest.read_text())
    del document["plan_digest"]
    manifest.write_text(json.dumps(document))
    assert ran()["status"] == "nothing_to_do"
    assert ran("--new-base=always")["status"] == "published"


def test_a_retry_of_the_first_increment_goes_on_with_the_log(directory: Path) -> None:
    assert ran("--incr")["status"] == "published"
    assert ran("--incr")["status"] == "nothing_to_do"
    assert ran("--new-base=always")["status"] == "nothing_to_do", "a second base would end the log"
    assert ran("--incr", "--new-base=if-needed", "--add=stamp")["status"] == "published"


def test_two_at_once_publish_one_version(directory: Path) -> None:
    request = replace(request_of(directory), again=False)
    plans = [plan(request) for _ in range(2)]
    start = threading.Barrier(2)

    def publish(number: int) -> str:
        start.wait(60)
        try:
            execute(plans[number])
        except PublishedAlready:
            return "already"
        return "published"

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(publish, range(2))) == ["already", "published"]
    assert [child.version for child in version_dirs(request.out)] == [10]
    assert not [*request.out.glob(".staging-*")]


def test_those_that_begin_a_log_at_once_begin_one(directory: Path) -> None:
    all_built = threading.Barrier(4)

    def build() -> Any:
        import tensorflow as tf

        all_built.wait(60)  # nobody has published yet, and all of them are to begin a log
        ids = tf.compat.v1.placeholder(tf.int64, [None], "ids")
        return {"ids": ids}, {"rows": tf.gather(tf.compat.v1.get_variable("table", [6, 2]), ids)}

    request = replace(request_of(directory), model=build)
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: export_incremental(request), range(4)))
    assert sum(each.published is not None for each in done) == 1
    assert [child.version for child in version_dirs(request.out)] == [10]
    assert not [*request.out.glob(".staging-*")]


def test_a_watch_has_the_same_rule(directory: Path) -> None:
    request, once = request_of(directory), Watching(0.01, StopWhen(after_seconds=0))
    assert len([*watch(request, once)]) == 1
    export(replace(request, again=True))
    assert [*watch(request, once)] == []
    assert len([*watch(replace(request, updates=Updates()), once)]) == 1, "other options"
    with pytest.raises(NothingChanged):
        export(replace(request, updates=Updates(), again=False))


@pytest.mark.parametrize("options", [["--watch"], ["--incr"]])
def test_again_is_for_one_version(directory: Path, options: list[str]) -> None:
    done = export_model(*EXPORT, "--again", *options)
    assert (done.code, "--again" in done.err) == (2, True)


def test_a_request_publishes_once_unless_it_says_otherwise() -> None:
    assert not ExportRequest(Path("a"), Path("b")).again
