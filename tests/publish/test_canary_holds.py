"""A canary's hold: servers go no further by themselves, the trainer goes on, a rollback takes its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from exporter.errors import ModelHeld, PositionMoved, TargetBusy
from exporter.options import ExportRequest, Updates
from exporter.pipeline import log_maintenance
from exporter.pipeline.full import export
from exporter.pipeline.incremental import export_incremental
from exporter.pipeline.rebase import rebase
from exporter.publish.approval import approve
from exporter.publish.commit import model_lock
from exporter.publish.delta_log import DeltaLog, read_log
from exporter.publish.hold import Hold
from exporter.publish.retention import retire_deltas
from exporter.storage.layout import CANARY_LOCK_FILE
from tests.support.commands import export_model
from tests.support.logs import set_hold, values_at
from tests.support.step_models import published, save, versions
from tests.support.updatable import loaded_quickly

LATER = 1e12


@pytest.fixture
def request_(tmp_path: Path) -> ExportRequest:
    """A log of base 10 and deltas to 20 and 30, of which a canary approved 20."""
    given = published(tmp_path, 10, 20, 30)
    assert approve(log_of(given).path, given.out, expected=None, position=20)
    return given


def publish(given: ExportRequest, step: int) -> None:
    save(given.ckpt_dir, step)
    export_incremental(given)


def log_of(given: ExportRequest) -> DeltaLog:
    return read_log(given.out)


def test_the_file_tells_the_kind_and_every_reader_the_position(tmp_path: Path) -> None:
    hold = Hold(tmp_path)
    hold.path.write_text("000000000000000020\n")
    assert (hold.read(), hold.is_canary, hold.binds) == (20, True, False)
    hold.path.write_text("0123456789012345678\n")
    assert (hold.read(), hold.is_canary, hold.binds) == (123456789012345678, True, False)
    for text in ("20\n", "0\n", "00020\n", "123456789012345678\n", "", "soon\n", f"{20:020d}\n"):
        hold.path.write_text(text)
        assert (hold.is_canary, hold.binds) == (False, True), text
    hold.path.unlink()
    assert (hold.is_canary, hold.binds) == (False, False)
    hold.path.symlink_to("nowhere")
    assert (hold.is_canary, hold.binds) == (False, True)


@pytest.mark.landing
def test_a_server_goes_no_further_than_what_is_approved_unless_it_is_told_to(request_: ExportRequest) -> None:
    with loaded_quickly(request_.out / "10") as server:
        assert server.update(-1)["position"] == 20
        assert server.update(30)["position"] == 30
    assert approve(log_of(request_).path, request_.out, expected=20, position=30)
    with loaded_quickly(request_.out / "10") as server:
        assert server.update(-1)["position"] == 30


def test_approval_is_refused_where_others_decided(request_: ExportRequest) -> None:
    log = log_of(request_)
    assert not approve(log.path, request_.out, expected=None, position=30), "another canary began"
    assert not approve(log.path, request_.out, expected=10, position=30), "another canary approved"
    assert log.approved == 20
    set_hold(log, 20)
    assert not approve(log.path, request_.out, expected=20, position=30), "a person holds it"
    assert log.hold.read() == 20
    set_hold(log, None)
    assert not approve(log.path, request_.out, expected=20, position=30), "a person lifted it"
    assert log.hold.read() is None


def test_publishers_go_on_behind_it(request_: ExportRequest) -> None:
    done = export_model(
        *("--ckpt-dir", request_.ckpt_dir, "--out", request_.out, "--model", request_.model, "--incr")
    )
    assert done.code == 0, done.err
    publish(request_, 40)
    assert log_of(request_).at.position == 40
    assert log_of(request_).approved == 20
    export(
        request_.__class__(
            request_.ckpt_dir, request_.out, model=request_.model, updates=Updates(), again=True
        )
    )
    assert len(versions(request_.out)) == 2


def test_a_new_base_of_its_log_stands_at_what_is_approved(request_: ExportRequest) -> None:
    """Servers load it by themselves: it must not hold what no canary has seen."""
    done = rebase(request_.out)
    assert done is not None
    assert (done.published.position, done.deltas) == (20, 1)
    assert log_of(request_).at.position == 30
    assert rebase(request_.out) is None
    with loaded_quickly(request_.out / "20") as server:
        assert server.update(-1)["position"] == 20
        assert server.update(30)["position"] == 30
    values_at(log_of(request_), 30)


def test_tidying_leaves_the_way_to_what_is_approved(request_: ExportRequest) -> None:
    for step in range(40, 130, 10):
        publish(request_, step)
    log = log_of(request_)
    assert not [delta for delta in log.deltas if delta.start < 20 < delta.end], "nothing passes it"
    assert not [delta for delta in log.deltas if delta.merged_count > 1]
    retire_deltas(log, now=LATER, rollback_positions=1)
    assert {delta.end for delta in log_of(request_).chain(10, 20)} == {20}
    assert approve(log.path, request_.out, expected=20, position=120)
    log_maintenance.tidy(request_.out)
    assert [delta for delta in log_of(request_).deltas if delta.merged_count > 1], (
        "what is approved is merged"
    )


def test_the_rollback_of_a_canary_keeps_its_reason_and_binds(request_: ExportRequest) -> None:
    before = values_at(log_of(request_), 20)
    done = log_maintenance.rollback(request_.out, 20, reason="scores: NaN", if_canary=True)
    log = log_of(request_)
    assert (done.position, log.hold.read(), log.hold.is_canary) == (31, 31, False)
    assert log.newest.entry.reason == "scores: NaN"
    after = values_at(log, 31)
    assert all((after[name] == before[name]).all() for name in before)
    with pytest.raises(ModelHeld):
        rebase(request_.out)
    told = export_model("history", request_.out, "--json").document
    assert told["events"][-1]["reason"] == "scores: NaN"
    assert "scores: NaN" in export_model("history", request_.out).out


def test_a_reason_that_is_not_unicode_is_kept_escaped(request_: ExportRequest) -> None:
    done = export_model("rollback", request_.out, "--to", 20, "--reason", "caf\udce9: NaN")  # Latin-1 in argv
    assert done.code == 0, done.err
    told = export_model("history", request_.out, "--json").document
    assert told["events"][-1]["reason"] == "caf\\udce9: NaN"


def test_a_rollback_that_was_killed_before_it_held_is_done_again(request_: ExportRequest) -> None:
    """Its delta is there, and the canary's hold stays: nobody goes anywhere until it is known who decides."""
    log_maintenance.rollback(request_.out, 20, if_canary=True)
    log = log_of(request_)
    set_hold(log, None)
    assert approve(log.path, request_.out, expected=None, position=20)
    with loaded_quickly(request_.out / "10") as server, loaded_quickly(request_.out / "10") as canary:
        assert server.update(-1)["position"] == 20
        assert canary.update(30)["position"] == 30
        log_maintenance.rollback(request_.out, 20, if_canary=True)
        assert server.update(-1)["position"] == canary.update(-1)["position"] == 32
        after, before = values_at(log_of(request_), 32), values_at(log_of(request_), 20)
        assert all((after[name] == before[name]).all() for name in before)


@pytest.mark.parametrize("held", [30, 20, None])
def test_the_rollback_of_a_canary_gives_way_to_whoever_decided_before(
    request_: ExportRequest, held: int | None
) -> None:
    set_hold(log_of(request_), held)
    done = export_model("rollback", request_.out, "--to", 20, "--if-canary", "--json")
    assert (done.code, done.error["error"]) == (5, PositionMoved.__name__)
    assert log_of(request_).at.position == 30
    assert log_of(request_).hold.read() == held
    dry = export_model("rollback", request_.out, "--to", 20, "--if-canary", "--dry-run")
    assert dry.code == 5


def test_a_canary_that_approved_more_is_not_rolled_back(request_: ExportRequest) -> None:
    assert approve(log_of(request_).path, request_.out, expected=20, position=30)
    publish(request_, 40)
    with pytest.raises(PositionMoved):
        log_maintenance.rollback(request_.out, 20, if_canary=True)


def test_a_person_rolls_back_past_a_canary_and_resumes(request_: ExportRequest) -> None:
    """The hold is the rollback's then; what is resumed is to be approved anew."""
    log_maintenance.rollback(request_.out, 10)
    log = log_of(request_)
    assert (log.hold.read(), log.hold.binds) == (31, True)
    log_maintenance.rollback(request_.out, 20)
    done = log_maintenance.resume(request_.out)
    assert (done.hold, log_of(request_).approved) == (32, 32), "not for an instant may servers pass it"
    assert log_of(request_).at.position == 33
    with loaded_quickly(request_.out / "10") as server:
        assert server.update(-1)["position"] == 32
    log_maintenance.resume(request_.out, lift_canary=True)
    assert log_of(request_).hold.read() is None
    log_maintenance.rollback(request_.out, 32)
    log_maintenance.resume(request_.out)
    assert log_of(request_).hold.read() is None, "there is no canary any more"


def test_only_a_flag_of_its_own_lifts_a_canarys_hold_and_it_changes_nothing_else(
    request_: ExportRequest,
) -> None:
    """Also where a rollback that was resumed lies before: it is not to come back."""
    log_maintenance.rollback(request_.out, 20, if_canary=True)
    dry = export_model("resume", request_.out, "--lift-only", "--dry-run", "--json").document
    lifted = export_model("resume", request_.out, "--lift-only", "--json").document
    assert (dry["hold"], lifted["hold"], log_of(request_).approved) == (31, 31, 31)
    for given in ((), ("--lift-only",), ("--dry-run",), ("--lift-only", "--dry-run")):
        done = export_model("resume", request_.out, "--json", *given)
        assert (done.code, done.document["status"], done.document["hold"]) == (0, "nothing_to_do", 31)
        assert log_of(request_).approved == 31
    assert "--lift-canary" in export_model("resume", request_.out).out
    lift = ("resume", request_.out, "--lift-canary", "--json")
    assert export_model(*lift, "--dry-run").document["hold"] is None
    assert log_of(request_).approved == 31
    done = export_model(*lift)
    assert (done.code, done.document["status"]) == (0, "hold_lifted")
    assert log_of(request_).at.position == 31
    assert log_of(request_).hold.read() is None
    again = export_model("resume", request_.out, "--lift-only", "--json")
    assert (again.code, again.document["status"]) == (0, "nothing_to_do")
    refused = export_model("resume", request_.out)
    assert refused.code == 2
    assert f"export-model rollback {request_.out} --to 30" in refused.err


def rolled_back_by_canary(given: ExportRequest) -> None:
    """A canary has failed what lies beyond 20; the log stands at 31, with the values of 20."""
    log_maintenance.rollback(given.out, 20, reason="canary: scores: NaN", if_canary=True)


def test_what_a_canary_failed_does_not_come_back_to_servers_by_resuming_twice(
    request_: ExportRequest,
) -> None:
    rolled_back_by_canary(request_)
    said = export_model("resume", request_.out, "--dry-run")
    assert "at 31: the agent's canary decides about what lies beyond" in said.out
    with loaded_quickly(request_.out / "10") as server:
        for _ in range(2):
            assert export_model("resume", request_.out).code == 0
            assert (log_of(request_).at.position, log_of(request_).approved) == (32, 31)
            assert server.update(-1)["position"] == 31
        assert export_model("resume", request_.out, "--lift-canary").code == 0
        assert server.update(-1)["position"] == 32


def test_a_canary_that_begins_again_approves_nothing_that_one_failed(request_: ExportRequest) -> None:
    """Whichever way it came back meanwhile: resumed, merged, merged into a base, and trained on."""
    rolled_back_by_canary(request_)
    log_maintenance.resume(request_.out, lift_canary=True)
    log = log_of(request_)
    for position in (32, 40, 50):
        log.hold.lift()
        assert approve(log.path, request_.out, expected=None, position=position) == 31
        assert log.approved == 31
        log.hold.lift()
        if position == 32:
            publish(request_, 40)
            assert log_maintenance.merge(request_.out) is not None
        if position == 40:
            rebase(request_.out)
    assert approve(log.path, request_.out, expected=None, position=20) == 20, "nobody is sent on"
    assert approve(log.path, request_.out, expected=20, position=40) == 40, "a canary judged it"
    publish(request_, 50)
    log_maintenance.rollback(request_.out, 40, if_canary=True)
    log_maintenance.resume(request_.out, lift_canary=True)
    assert approve(log.path, request_.out, expected=None, position=60) == 51, "the newest of its rollbacks"


def test_nobody_rolls_back_to_what_a_canary_failed(request_: ExportRequest) -> None:
    rolled_back_by_canary(request_)
    for made, again in ((31, 30), (31, 30), (32, 32)):
        refused = export_model("rollback", request_.out, "--to", again, "--json")
        if refused.code == 2:  # the newest one
            publish(request_, 40)
            refused = export_model("rollback", request_.out, "--to", again, "--json")
        assert (refused.code, refused.error["error"]) == (5, ModelHeld.__name__), made
        assert export_model("rollback", request_.out, "--to", again, "--dry-run").code == 5
        log_maintenance.resume(request_.out)
    approve(log_of(request_).path, request_.out, expected=31, position=32)
    log_maintenance.rollback(request_.out, 32)  # a canary passed it at last
    assert log_of(request_).hold.read() == 41


def test_no_base_is_merged_from_what_a_canary_failed_despite_the_hold(request_: ExportRequest) -> None:
    rolled_back_by_canary(request_)
    set_hold(log_of(request_), 31)
    publish(request_, 40)
    done = rebase(request_.out, despite_hold=True)
    assert done is not None
    assert done.published.position == 31


def test_the_hold_of_a_canary_at_work_is_not_lifted(request_: ExportRequest) -> None:
    with model_lock(request_.out, name=CANARY_LOCK_FILE):
        for more in ((), ("--dry-run",)):
            refused = export_model("resume", request_.out, "--lift-canary", "--json", *more)
            assert (refused.code, refused.error["error"]) == (1, TargetBusy.__name__)
            assert "without --canary" in refused.error["hint"]
        assert log_of(request_).approved == 20
        assert export_model("resume", request_.out).code == 0
    assert export_model("resume", request_.out, "--lift-canary").code == 0
    assert log_of(request_).hold.read() is None


def test_an_accepted_rollback_is_not_what_a_later_one_leads_back_to(request_: ExportRequest) -> None:
    log_maintenance.rollback(request_.out, 20, if_canary=True)
    log_maintenance.resume(request_.out, lift_only=True)
    assert log_of(request_).approved == 31
    publish(request_, 40)
    log_maintenance.rollback(request_.out, 31, if_canary=True)
    assert log_of(request_).newest.entry.before == 40


def test_the_doctor_tells_of_a_canary_that_decides_nothing(request_: ExportRequest) -> None:
    (request_.out / CANARY_LOCK_FILE).touch()
    done = export_model("doctor", request_.out, "--json")
    assert done.code == 0
    told = {one["check"] for one in done.document["findings"]}
    assert not told & {"hold", "strangers", "left-overs"}
    manifest = next(log_of(request_).path.glob("*-*30")) / "manifest.json"
    document = json.loads(manifest.read_text())
    text = manifest.read_text().replace(document["created"][:4], "2020", 1)
    manifest.chmod(0o644)
    manifest.write_text(text)
    found = export_model("doctor", request_.out, "--json").document["findings"]
    assert any("approved position 20, and 1 delta wait" in one["message"] for one in found)
    told = export_model("history", request_.out).out
    assert "at 20, set by the agent's canary (" in told
    assert "; 1 published beyond it" in told


def test_a_field_that_says_nothing_is_left_out_and_zero_says_something(request_: ExportRequest) -> None:
    entry = log_of(request_).deltas[0].entry
    assert not {"before", "state", "reason", "canary"} & to_builtins(entry).keys()
    told = to_builtins(replace(entry, before=0, reason="", canary=True))
    assert (told["before"], told["reason"], told["canary"]) == (0, "", True)
