"""`serve-model status`: where versions stand, how far behind what is published, how old the values are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict
from typer.testing import CliRunner

from exporter.options import ExportRequest
from exporter.pipeline import log_maintenance
from exporter.pipeline.full import export
from exporter.pipeline.incremental import export_incremental
from exporter.publish.delta_log import log_path, read_log
from exporter.publish.model import Model
from exporter.publish.versions import read_manifest
from exporter.transfer.push import plan_push, push
from serving.cli import app
from serving.documents import ServedVersion
from serving.server import ModelServer
from serving.server_options import ServerOptions
from serving.status_command import compare
from tests.support.object_stores import Bucket
from tests.support.printed_documents import checked
from tests.support.setting import Setting, followed
from tests.support.step_models import MODEL, request_of, save


@pytest.fixture
def request_(tmp_path: Path) -> ExportRequest:
    (tmp_path / "model.py").write_text(MODEL)
    save(tmp_path / "train", 10)
    return request_of(tmp_path)


@pytest.fixture
def server(request_: ExportRequest) -> Iterator[ModelServer]:
    """It has loaded base 10, before the deltas to 20 and 30."""
    export_incremental(request_)
    with ModelServer(request_.out, name="ranker", options=ServerOptions(poll_seconds=0.05)) as server:
        server.wait_available(60)
        for step in (20, 30):
            save(request_.ckpt_dir, step)
            export_incremental(request_)
        yield server


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def status(server: ModelServer, *options: object) -> dict[str, Any]:
    done = call("status", server.address, "--model-name", "ranker", "--json", *options)
    assert done.exit_code == 0, done.stderr
    document: dict[str, Any] = checked(json.loads(done.stdout))
    return document


def test_a_version_tells_where_it_stands(server: ModelServer) -> None:
    (version,) = status(server)["versions"]
    assert (version["version"], version["position"], version["step"]) == (10, 10, 10)
    assert (version["behind_deltas"], version["age_seconds"]) == (None, None)
    assert (len(version["lineage"]), version["unsettled"]) == (32, 0)
    assert "--model-base-path" in call("status", server.address, "--model-name", "ranker").stderr


def test_what_is_published_in_a_store(server: ModelServer, request_: ExportRequest, bucket: Bucket) -> None:
    push(plan_push(request_.out, bucket.url("m")))
    found, here = (status(server, "--model-base-path", place) for place in (bucket.url("m"), request_.out))
    assert found["published"] == here["published"]
    assert found["versions"][0]["behind_deltas"] == 2


def test_how_far_behind_and_how_old(server: ModelServer, request_: ExportRequest) -> None:
    document = status(server, "--model-base-path", request_.out)
    (version,) = document["versions"]
    assert document["published"] == {"position": 30, "step": 30, "hold": None, "held_by": None}
    assert (version["behind_deltas"], version["behind_steps"], version["problem"]) == (2, 20, None)
    assert version["age_seconds"] > 0
    shown = call("status", server.address, "--model-name", "ranker", "--model-base-path", request_.out)
    assert "2 deltas, 20 steps" in shown.stdout
    assert "--model-base-path" not in shown.stderr, "it was given"
    assert call("update", server.address, "--model-name", "ranker").exit_code == 0
    (after,) = status(server, "--model-base-path", request_.out)["versions"]
    assert (after["position"], after["behind_deltas"], after["behind_steps"]) == (30, 0, 0)
    assert after["published"] > version["published"]


def test_a_hold_and_a_rollback(server: ModelServer, request_: ExportRequest) -> None:
    call("update", server.address, "--model-name", "ranker")
    log_maintenance.rollback(request_.out, 20)
    save(request_.ckpt_dir, 40)
    export_incremental(request_)
    document = status(server, "--model-base-path", request_.out)
    assert document["published"]["hold"] == 31
    (version,) = document["versions"]
    assert (version["position"], version["behind_deltas"]) == (30, 1), "to the hold, no further"
    assert (
        "1 delta, 10 steps"
        in call("status", server.address, "--model-name", "ranker", "--model-base-path", request_.out).stdout
    )
    call("update", server.address, "--model-name", "ranker")
    (version,) = status(server, "--model-base-path", request_.out)["versions"]
    assert (version["position"], version["behind_deltas"], version["behind_steps"]) == (31, 0, 20)
    shown = call("status", server.address, "--model-name", "ranker", "--model-base-path", request_.out).stdout
    assert "held at 31" in shown
    read_log(request_.out).hold.path.write_text("soon")
    shown = call("status", server.address, "--model-name", "ranker", "--model-base-path", request_.out).stdout
    assert "; its hold: it cannot be read, and servers follow no delta" in shown


def test_what_is_published_elsewhere_is_not_compared(
    server: ModelServer, request_: ExportRequest, tmp_path: Path
) -> None:
    other = ExportRequest(**(asdict(request_) | {"out": tmp_path / "other"}))
    export_incremental(other, full_on_mismatch=False)
    (version,) = status(server, "--model-base-path", other.out)["versions"]
    assert version["behind_deltas"] is None
    assert "not published there" in version["problem"]
    assert (
        call(
            "status", server.address, "--model-name", "ranker", "--model-base-path", tmp_path / "none"
        ).exit_code
        == 5
    )


def test_versions_without_deltas_have_a_position_and_an_age(request_: ExportRequest) -> None:
    export(request_)
    with ModelServer(request_.out, name="ranker", options=ServerOptions(poll_seconds=0.05)) as server:
        server.wait_available(60)
        (version,) = status(server, "--model-base-path", request_.out)["versions"]
        assert (version["position"], version["step"], version["newer_version"]) == (10, 10, None)
        assert version["age_seconds"] > 0
        created = read_manifest(request_.out / "10").created
        assert datetime.fromisoformat(version["published"]) == created


def test_a_server_of_another_log_under_the_same_number_is_not_compared(tmp_path: Path) -> None:
    """The model was removed and begun anew: the position means something else."""
    followed(tmp_path, (20,), published=20)
    published = Model.history(Setting(tmp_path).model)
    assert published.current is not None
    served = (
        ServedVersion(10, "AVAILABLE", "OK", "", position=10, step=10, lineage=lineage)
        for lineage in (published.current.lineage, "another")
    )
    own, other = compare(list(served), published, datetime.now(timezone.utc))
    assert (own.behind_deltas, other.behind_deltas) == (1, None)
    assert other.problem is not None and "belongs to another log" in other.problem


def test_nothing_is_behind_a_hold_that_cannot_be_read(tmp_path: Path) -> None:
    """No server moves then; a hold of the model itself binds publishers alone."""
    followed(tmp_path, (20,), published=20)
    model = Setting(tmp_path).model
    found = []
    for hold in (model / "hold", log_path(model, 10) / "hold"):
        hold.write_text("no position\n")
        published = Model.history(model)
        assert published.current is not None
        lineage = published.current.lineage
        served = ServedVersion(10, "AVAILABLE", "OK", "", position=10, step=10, lineage=lineage)
        found += compare([served], published, datetime.now(timezone.utc))
    assert [(each.behind_deltas, each.problem) for each in found] == [(1, None), (0, None)]
