"""`export-model history`, and the newest position in `inspect`: what was published and where a model is."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.options import ExportRequest, Updates
from exporter.pipeline import log_maintenance
from exporter.pipeline.full import export
from exporter.pipeline.incremental import export_incremental
from exporter.pipeline.rebase import rebase
from exporter.publish.delta_log import read_log
from exporter.publish.retention import Keep, retire
from exporter.publish.versions import version_dirs
from tests.support.commands import export_model
from tests.support.step_models import published, request_of, save


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of base 10 and deltas to 20, 30 and 40, the last two of them merged."""
    directory = tmp_path_factory.mktemp("history")
    log_maintenance.merge(published(directory, 10, 20, 30, 40).out, 20, 40)
    return directory


@pytest.fixture
def request_(origin: Path, tmp_path: Path) -> ExportRequest:
    shutil.copytree(origin, tmp_path, dirs_exist_ok=True)
    return request_of(tmp_path)


def history(model: Path, *options: object) -> dict[str, Any]:
    ran = export_model("history", model, "--json", *options)
    assert ran.code == 0, ran.err
    document: dict[str, Any] = ran.document
    return document


def story(document: dict[str, Any]) -> list[tuple[str, int | None, int]]:
    return [(event["what"], event["from_position"], event["position"]) for event in document["events"]]


def test_what_happened_is_told_in_the_order_of_positions(request_: ExportRequest) -> None:
    model = request_.out
    log_maintenance.rollback(model, 30)
    log_maintenance.resume(model)
    rebase(model)
    save(request_.ckpt_dir, 50)
    export_incremental(request_)
    log_maintenance.rollback(model, 40)
    found = history(model)
    assert story(found) == [
        ("base", None, 10),
        ("delta", 10, 20),
        ("delta", 20, 30),
        ("delta", 30, 40),
        ("merge", 20, 40),
        ("rollback", 20, 41),
        ("resume", 41, 42),
        ("rebase", None, 42),
        ("delta", 42, 50),
        ("rollback", 20, 51),
    ]
    assert (found["position"], found["step"], found["log"], found["hold"]) == (51, 40, 10, 51)
    assert [event["back_to"] for event in found["events"] if event["what"] == "rollback"] == [30, 40]
    assert [e["merged_into"] for e in found["events"][:5]] == [None, None, "20-40", "20-40", None]
    times = [event["created"] for event in found["events"]]
    assert times == sorted(times)
    shown = export_model("history", model)
    assert "51 (step 40)" in shown.out
    assert "values of 40 again; changes since 20" in shown.out
    assert f"export-model resume {model}" in shown.out
    assert [event["position"] for event in history(model, "--last", 2)["events"]] == [50, 51]


def test_what_was_merged_away_is_counted(request_: ExportRequest) -> None:
    for delta in (request_.out / "deltas").glob("*/*30-*40"):
        shutil.rmtree(delta)
    (merger,) = [event for event in history(request_.out)["events"] if event["what"] == "merge"]
    assert (merger["parts"], merger["merged_away"]) == (2, 1)


def test_what_waits_behind_a_hold_is_marked(request_: ExportRequest) -> None:
    model = request_.out
    log_maintenance.rollback(model, 20)
    save(request_.ckpt_dir, 60)
    export_incremental(request_)
    waiting = [event["position"] for event in history(model)["events"] if event["is_past_hold"]]
    assert waiting == [60]
    told = export_model("history", model).out
    assert "at 41, set by " in told
    assert "; 1 published beyond it" in told


def test_a_hold_that_cannot_be_read_is_shown_as_such(request_: ExportRequest) -> None:
    model = request_.out
    read_log(model).hold.path.write_text("soon")
    told, lifts = "it cannot be read, and servers follow no delta", f"export-model resume {model}"
    shown = export_model("history", model).out
    assert re.search(f"(?m)^hold +{told}$", shown)
    assert re.search(f"(?m)^to lift it +{lifts}$", shown)
    assert f"; its hold: {told}" in export_model("inspect", model).out
    save(request_.ckpt_dir, 60)
    typed = ("--ckpt-dir", request_.ckpt_dir, "--model", request_.model, "--out", model, "--incr")
    exported = export_model(*typed).out
    assert re.search(f"(?m)^hold +{told}$", exported)
    assert "serve-model update" not in exported
    for command in ("history", "inspect"):
        assert export_model(command, model, "--json").document["hold"] is None


def test_a_log_that_has_ended_is_said_so(request_: ExportRequest) -> None:
    export(replace(request_, updates=Updates(stamp=True)))
    found = history(request_.out)
    assert (found["position"], found["log"]) == (41, 41)
    assert {event["position"] for event in found["events"] if event["is_current"]} == {41}
    assert "which has ended" in export_model("history", request_.out).out


def test_a_tag_of_a_log_that_has_ended_says_which_version_it_keeps(request_: ExportRequest) -> None:
    model, delete = request_.out, ("tag", request_.out, "prod", "--delete")
    assert export_model("tag", model, "prod", 20).code == 0
    (tag,) = history(model)["tags"]
    assert (tag["gone"], tag["keeps"]) == ("", None)  # the newest version stays anyway
    export(replace(request_, updates=Updates(stamp=True)))
    (tag,) = history(model)["tags"]
    assert (tag["gone"], tag["keeps"]) == ("", 10)  # `rollback --to prod` publishes its values as a base
    (delta,) = model.glob("deltas/*/*10-*20")
    shutil.rmtree(delta)
    for merged in model.glob("deltas/*/*10-*40"):
        shutil.rmtree(merged)
    (tag,) = history(model)["tags"]
    assert ("nothing is published there" in tag["gone"], tag["keeps"]) == (True, 10)
    assert "prod 20 (gone, but keeps version 10)" in export_model("history", model).out
    for command in ("tag", "doctor"):
        assert "version 10 stays until the tag is deleted" in " ".join(
            export_model(command, model).out.split()
        )
    kept = retire(version_dirs(model), keep=Keep(1), now=1e12, grace_seconds=0).kept
    assert [(one.version, one.reason) for one in kept] == [(10, "the tag prod needs it")]
    assert export_model(*delete).code == 0
    assert retire(version_dirs(model), keep=Keep(1), now=1e12, grace_seconds=0).removed == (10,)


def test_damage_is_shown_beside_what_is_whole(request_: ExportRequest) -> None:
    for delta in (request_.out / "deltas").glob("*/*10-*20"):
        (delta / "manifest.json").write_text("{")
    events = history(request_.out)["events"]
    assert [event["what"] for event in events] == ["base", "damaged", "delta", "delta", "merge"]
    (request_.out / "10" / "manifest.json").write_text("{")
    found = history(request_.out)
    assert (found["position"], found["events"][0]["what"]) == (None, "damaged")


def test_plain_versions_have_a_history_too(request_: ExportRequest) -> None:
    request = replace(request_, out=request_.out.with_name("plain"))
    for step in (70, 80):
        save(request.ckpt_dir, step)
        export(request)
    log_maintenance.rollback(request.out, 70)
    found = history(request.out)
    assert story(found) == [("version", None, 70), ("version", None, 80), ("rollback", None, 81)]
    assert (found["position"], found["step"], found["hold"], found["log"]) == (81, 70, 81, None)


def test_nothing_published_is_an_error(tmp_path: Path) -> None:
    assert export_model("history", tmp_path).code == 5


def test_inspect_shows_the_newest_position(request_: ExportRequest) -> None:
    ran = export_model("inspect", request_.out)
    assert "newest position 40 (step 40)" in ran.out
    document = json.loads(export_model("inspect", request_.out, "--json").out)
    assert (document["position"], document["step"], document["hold"]) == (40, 40, None)
    assert document["versions"][0]["position"] == 10
    log_maintenance.rollback(request_.out, 30)
    assert "newest position 41 (step 30), held at 41" in export_model("inspect", request_.out).out
