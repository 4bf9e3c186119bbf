"""`doctor --target`: what servers serve, beside what is published. Real servers, and every kind of answer."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from exporter.delta.format import span_name
from exporter.publish.delta_log import log_path
from exporter.publish.judge import Level, Limits, Server, judge
from exporter.publish.model import Model
from exporter.publish.served import Served, VersionState
from exporter.storage.layout import MANIFEST_FILE
from serving.cli import app as serve_model
from serving.server import ModelServer
from tests.support.commands import Ran, export_model, run_app
from tests.support.setting import followed
from tests.support.step_models import MODEL, save


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ModelServer]]:
    """A base at 10 that is served, with a delta to 20 that is not applied."""
    directory = tmp_path_factory.mktemp("served")
    (directory / "model.py").write_text(MODEL.replace("[6, 2]", "[6, 2], use_resource=True"))
    publish(directory, 10)
    with ModelServer(directory / "model") as server:
        server.wait_available(60)
        publish(directory, 20)
        yield directory / "model", server


def publish(directory: Path, step: int) -> None:
    save(directory / "train", step)
    builder = f"{directory / 'model.py'}:build"
    options = ("--ckpt-dir", directory / "train", "--model", builder, "--out", directory / "model")
    assert export_model(*options, "--incr", "-q").code == 0


def doctor(model: Path, address: str, *options: object) -> Ran:
    return export_model("doctor", model, "--target", address, "--json", *options)


def replicas(ran: Ran) -> list[dict[str, str]]:
    return [found for found in ran.document["findings"] if found["check"] == "replicas"]


@pytest.mark.landing
def test_a_replica_that_is_behind_and_the_command_that_brings_it_on(
    served: tuple[Path, ModelServer],
) -> None:
    model, server = served
    fresh = doctor(model, server.address, "--patience", 3600)
    assert (fresh.code, replicas(fresh)[0]["level"]) == (0, "warning")
    late = doctor(model, server.address, "--patience", 0)
    (found,) = replicas(late)
    assert (late.code, late.error["error"], found["level"]) == (7, "ServerError", "wrong")
    assert "stands at 10, 1 delta behind 20" in found["message"]
    (target,) = late.document["targets"]
    assert (target["versions"], target["positions"]) == ({"10": "AVAILABLE"}, {"10": 10})
    words = shlex.split(found["command"])
    assert words[0] == "serve-model"
    assert run_app(serve_model, *words[1:]).code == 0
    assert replicas(doctor(model, server.address, "--patience", 0)) == []


def test_a_server_that_is_gone(served: tuple[Path, ModelServer]) -> None:
    ran = doctor(served[0], "127.0.0.1:9")
    (found,) = replicas(ran)
    assert (ran.code, found["message"]) == (7, "no model server answers at 127.0.0.1:9")
    assert found["command"] == f"serve-model run {served[0]} --port 9"


def test_a_model_that_the_server_does_not_know(served: tuple[Path, ModelServer]) -> None:
    ran = doctor(served[0], served[1].address, "--model-name", "other")
    assert ran.code == 7
    assert "other" in replicas(ran)[0]["message"]


def test_a_server_that_serves_another_model_of_that_name(
    served: tuple[Path, ModelServer], tmp_path: Path
) -> None:
    directory = tmp_path / "again"
    directory.mkdir()
    shutil.copy(served[0].parent / "model.py", directory)
    publish(directory, 10)
    ran = doctor(directory / "model", served[1].address)
    (found,) = replicas(ran)
    assert ran.code == 7
    assert "is not the one published" in found["message"]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base at 10, deltas to 20 and 30."""
    directory = tmp_path_factory.mktemp("published")
    trainer, model = followed(directory), directory / "model"
    for step in (20, 30):
        trainer.train()
        trainer.step = step
        trainer.increment()
        assert export_model("--ckpt-dir", trainer.directory, "--out", model, "--incr", "-q").code == 0
    return model


AVAILABLE = VersionState.AVAILABLE


def judged(model: Model, *answers: Served) -> tuple[Level, str] | None:
    """The finding an hour after the last publication, with a minute's patience; None if there is none."""
    server, now = Server("server:8500", "model", answers), datetime.now(timezone.utc) + timedelta(hours=1)
    findings = judge(model, [server], now, Limits(60))
    assert len(findings) <= 1
    return (findings[0].level, findings[0].text) if findings else None


def lineage_of(model: Model) -> str:
    assert model.current is not None
    return model.current.lineage


def test_answers_are_judged_by_what_is_published(published: Path) -> None:
    model = Model.read(published)

    def at(position: int) -> Served:
        return Served(10, AVAILABLE, position, lineage=lineage_of(model))

    assert judged(model, at(30)) is None
    assert judged(model, at(10)) == (
        Level.WRONG,
        "model on server:8500 stands at 10, 2 deltas behind 30; the oldest is 60 min old",
    )
    assert judged(model, at(20)) == (
        Level.WRONG,
        "model on server:8500 stands at 20, 1 delta behind 30; the oldest is 60 min old",
    )
    assert judged(model, Served(10, AVAILABLE)) is None, "it takes no deltas, or does not tell"
    assert judged(model, Served(9, AVAILABLE)) == (
        Level.WRONG,
        "model on server:8500: version 10 is not known there; it serves 9",
    )
    broken = judged(model, Served(10, VersionState.END, message="DATA_LOSS: a shard"), Served(9, AVAILABLE))
    assert broken == (Level.WRONG, "model on server:8500: version 10 is in state END; it serves 9")
    ahead = judged(model, at(5))
    assert ahead is not None
    assert "from where no delta leads on" in ahead[1]


def test_a_hold_is_where_replicas_should_be(published: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(published, path)
    (path / "deltas" / f"{10:020d}" / "hold").write_text("20\n")
    model = Model.read(path)
    assert judged(model, Served(10, AVAILABLE, 20, lineage=lineage_of(model))) is None
    beyond = judged(model, Served(10, AVAILABLE, 30, lineage=lineage_of(model)))
    assert beyond is not None
    assert (beyond[0], "beyond the hold at 20" in beyond[1]) == (Level.WARNING, True)


def test_a_delta_whose_manifest_is_damaged_ends_no_judgement(published: Path, tmp_path: Path) -> None:
    """Whether it fits a server in its middle stands in its manifest."""
    path = tmp_path / "model"
    shutil.copytree(published, path)
    (log_path(path, 10) / span_name(10, 20) / MANIFEST_FILE).write_text("{")
    model = Model.read(path)
    found = judged(model, Served(10, AVAILABLE, 15, lineage=lineage_of(model)))
    assert found is not None
    assert (found[0], "stands at 15, from where no delta leads on" in found[1]) == (Level.WRONG, True)
