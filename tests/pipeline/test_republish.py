"""Rollback and resume of versions that take no deltas: published again, linked, checked, held."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from msgspec.structs import asdict

from exporter.errors import ModelHeld, PositionUnknown, UsageError, VerificationError
from exporter.options import ExportRequest, Updates
from exporter.pipeline import log_maintenance
from exporter.pipeline.full import export
from exporter.publish.hold import Hold
from exporter.publish.versions import read_manifest
from exporter.verify.log import verify_model
from tests.support.commands import export_model
from tests.support.kills import count_steps, killed_at, points
from tests.support.publishing import hidden
from tests.support.step_models import published, request_of, save, versions

SHARD = "variables/variables.data-00000-of-00001"


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 10, 20 and 30, none of which takes deltas."""
    directory = tmp_path_factory.mktemp("plain")
    published(directory, 10, 20, 30, plain=True)
    return directory


@pytest.fixture
def request_(origin: Path, tmp_path: Path) -> ExportRequest:
    shutil.copytree(origin, tmp_path, dirs_exist_ok=True)
    return request_of(tmp_path)


def holds(model: Path, version: int) -> int:
    """The step whose values a version holds."""
    shard = model / str(version) / SHARD
    return next(
        step for step in (10, 20, 30) if shard.read_bytes() == (model / str(step) / SHARD).read_bytes()
    )


def test_a_version_comes_back_as_the_newest_without_a_copy(request_: ExportRequest) -> None:
    model = request_.out
    back = export_model("rollback", model, "--to", 10, "--json").document
    assert (back["position"], back["values_of"], back["hold"]) == (31, 10, 31)
    assert versions(model) == [31, 30, 20, 10]
    assert (model / "31" / SHARD).samefile(model / "10" / SHARD)
    assert read_manifest(model / "31").step == 10
    verified = export_model("verify", model, "--bytes", "--json").document
    assert (verified["problems"], verified["hold"]) == ([], 31)
    lifted = export_model("resume", model, "--json").document
    assert (lifted["position"], lifted["values_of"], lifted["hold"]) == (32, 30, None)
    assert holds(model, 32) == 30


def test_the_trainers_next_export_does_not_overrun_it(request_: ExportRequest) -> None:
    log_maintenance.rollback(request_.out, 20)
    save(request_.ckpt_dir, 40)
    with pytest.raises(ModelHeld, match="is held at 31"):
        export(request_)
    log_maintenance.resume(request_.out)
    assert export(request_).published.version == 40


def test_after_several_the_first_one_counts(request_: ExportRequest) -> None:
    model = request_.out
    log_maintenance.rollback(model, 20)
    log_maintenance.rollback(model, 10)
    assert holds(model, versions(model)[0]) == 10
    assert log_maintenance.resume(model).values_of.position == 30
    assert holds(model, versions(model)[0]) == 30
    log_maintenance.rollback(model, 10)
    assert log_maintenance.resume(model, lift_only=True).published is None
    assert holds(model, versions(model)[0]) == 10
    log_maintenance.rollback(model, 20)
    log_maintenance.rollback(model, versions(model)[1])
    assert log_maintenance.resume(model).published is None, "the second led back to where the first began"


def test_what_cannot_come_back_is_said(request_: ExportRequest) -> None:
    model = request_.out
    with pytest.raises(PositionUnknown, match="no version 25") as caught:
        log_maintenance.rollback(model, 25)
    assert "10" in caught.value.cause
    with pytest.raises(UsageError, match="is the newest"):
        log_maintenance.rollback(model, 30)
    assert not log_maintenance.resume(model).was_held
    assert versions(model) == [30, 20, 10]
    assert not Hold(model).is_set


@pytest.mark.parametrize("name", [SHARD, "saved_model.pb", "manifest.json", "variables/variables.index"])
def test_damage_does_not_come_back(request_: ExportRequest, name: str) -> None:
    file = request_.out / "10" / name
    content = bytearray(file.read_bytes())
    content[content.find(b"crc32c") if file.suffix == ".json" else len(content) // 2] ^= 0x10
    file.unlink()
    file.write_bytes(content)
    with pytest.raises(VerificationError):
        log_maintenance.rollback(request_.out, 10)
    assert versions(request_.out) == [30, 20, 10]
    assert not Hold(request_.out).is_set


def test_resume_where_the_version_of_before_is_gone(request_: ExportRequest) -> None:
    log_maintenance.rollback(request_.out, 10)
    shutil.rmtree(request_.out / "30")
    with pytest.raises(PositionUnknown) as caught:
        log_maintenance.resume(request_.out)
    assert "--lift-only" in caught.value.hint
    assert Hold(request_.out).is_set
    log_maintenance.resume(request_.out, lift_only=True)


def test_a_hold_of_plain_versions_binds_a_log_that_follows_and_is_lifted_with_it(
    request_: ExportRequest,
) -> None:
    log_maintenance.rollback(request_.out, 10)
    export(ExportRequest(**(asdict(request_) | {"updates": Updates(), "despite_hold": True})))
    ran = export_model("merge", request_.out, "--rebase")
    assert ran.code == 5
    log_maintenance.resume(request_.out)
    assert export_model("merge", request_.out, "--rebase").code == 0


def roll_back(model: Path) -> None:
    log_maintenance.rollback(model, 10)


def resume(model: Path) -> None:
    log_maintenance.resume(model)


@pytest.mark.landing
@pytest.mark.parametrize("action", [roll_back, resume])
def test_a_kill_at_any_step_leaves_whole_versions_and_a_hold(request_: ExportRequest, action: object) -> None:
    assert callable(action)
    origin, model = request_.out.with_name("origin"), request_.out
    if action is resume:
        roll_back(model)
    before = versions(model)[0]
    shutil.copytree(model, origin)
    steps = count_steps(action, model)
    outcomes: dict[int, bool] = {}
    for point in points(steps, 1 if action is roll_back else 3, outcomes):
        shutil.rmtree(model)
        shutil.copytree(origin, model)
        assert killed_at(point, action, model) == -signal.SIGKILL
        assert verify_model(model, bytes_=True).problems == ()
        is_done = versions(model)[0] > before
        outcomes[point] = is_done
        if is_done and action is roll_back:
            assert Hold(model).is_set, "what is rolled back is held"
        if not is_done and action is resume:
            assert Hold(model).is_set, "what is not resumed is held"
        action(model)
        assert holds(model, versions(model)[0]) == (10 if action is roll_back else 30)
        assert hidden(model) == []
    assert {*outcomes.values()} == {True, False}
