"""A copy's own hold and that of its store: servers get the lesser, and each is changed where it was set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exporter.pipeline.log_maintenance import rollback
from exporter.publish.approval import approve as move_on
from exporter.publish.delta_log import read_log
from exporter.publish.model import Model
from exporter.publish.staging import Staging
from exporter.storage.layout import HEAD_FILE
from exporter.transfer.pull import pull
from serving.agent.canary import Idle, decide
from tests.support.commands import export_model
from tests.support.machines import Machine, files, pushed
from tests.support.object_stores import BASE, Bucket

LOG = f"deltas/{10:020d}"


@pytest.fixture
def copy(machine: Machine, url: str, tmp_path: Path) -> Path:
    """A copy of what is published, 10 to 30."""
    pushed(machine.model, url)
    pull(url, tmp_path / "copy")
    return tmp_path / "copy"


def approve(model: Path, position: int) -> None:
    with Staging(model) as staging:
        read_log(model).hold.put(position, staging, canary=True)


def go_on(machine: Machine, url: str, *steps: int) -> None:
    for step in steps:
        machine.go_on(step)
    pushed(machine.model, url)


def write_hold(bucket: Bucket, position: int | None, **fields: object) -> None:
    """Write a hold into the store, as anybody can who may write there; None removes it."""
    number, document = f"{LOG}/hold", f"{LOG}/hold.json"
    key = f"{BASE}/{HEAD_FILE}"
    head = json.loads(bucket.keys(key)[key]) | {"holds": {}, "hold_documents": {}}
    if position is None:
        bucket.delete(f"{BASE}/{number}")
        bucket.delete(f"{BASE}/{document}")
    else:
        said = {"position": position, "who": "ann@mars", "when": "2026-11-01T00:00:00Z", **fields}
        head |= {"holds": {number: f"{position}\n"}, "hold_documents": {document: json.dumps(said)}}
        bucket.put(f"{BASE}/{document}", json.dumps(said).encode())
        bucket.put(f"{BASE}/{number}", f"{position}\n".encode())
    bucket.put(key, json.dumps(head).encode())


@pytest.mark.parametrize("then", [10**17, 30, None])
def test_a_hold_of_the_store_that_says_what_the_canarys_says_does_not_take_its_place(
    machine: Machine, bucket: Bucket, url: str, copy: Path, then: int | None
) -> None:
    approve(copy, 20)
    go_on(machine, url, 40)
    for position in (20, then):
        write_hold(bucket, position, canary=True)
        for _ in range(2):
            pull(url, copy)
        assert Model.read(copy).hold == 20


def test_a_canary_of_the_store_is_not_the_one_of_the_copy(
    machine: Machine, bucket: Bucket, url: str, copy: Path
) -> None:
    """It is waited for: a canary here would approve the same delta again and again."""
    write_hold(bucket, 20, canary=True)
    pull(url, copy)
    log = read_log(copy)
    assert (log.hold.read(), log.approved) == (20, 20)
    assert move_on(log.path, copy, expected=20, position=30) is None
    there = Model.read(copy).newest_log
    assert there is not None
    assert decide(there, {}, None, 0.0, patience_s=1.0, knows=True) == (
        Idle(f"a canary in {url} decides: the hold is at 20"),
        None,
    )
    lift = f"export-model resume {url} --lift-canary"
    assert lift in export_model("history", copy).out
    assert lift in export_model("resume", copy, "--json").error["hint"]
    assert export_model(*lift.split()[1:]).code == 0
    pull(url, copy)
    assert Model.read(copy).hold is None


def test_a_store_is_not_believed_that_its_hold_is_of_another_place(
    machine: Machine, bucket: Bucket, url: str
) -> None:
    pushed(machine.model, url)
    write_hold(
        bucket,
        20,
        url="s3://elsewhere/ranker",
        beside={"position": 10, "who": "", "when": "2026-11-01T00:00:00Z"},
    )
    assert "elsewhere" not in export_model("history", url).out
    for words in (("rollback", url, "--to", 10), ("resume", url)):
        ran = export_model(*words, "--json")
        assert ran.code == 0, ran.err


@pytest.mark.parametrize("position", [10**17, 40, 35])
def test_a_hold_of_the_store_beyond_what_the_canary_approved_frees_nothing(
    machine: Machine, bucket: Bucket, url: str, copy: Path, position: int
) -> None:
    approve(copy, 20)
    go_on(machine, url, 40, 50)
    bucket.put(f"{BASE}/{LOG}/hold", f"{position}\n".encode())
    for _ in range(2):
        pull(url, copy)
        found = Model.read(copy)
        assert found.newest_log is not None
        assert (found.hold, found.newest_log.is_canary) == (20, True)
        assert found.newest_log.reach(20) == ()
        assert (copy / LOG / "hold").read_text() == "20\n", "which is all that graphs in servers read"
    assert found.newest_log.bound == position, "the canary does not pass it either"
    assert found.decided().logs[found.newest_log.lineage].limit == position
    approve(copy, 30)
    assert Model.read(copy).hold == 30
    bucket.delete(f"{BASE}/{LOG}/hold")
    pull(url, copy)
    found = Model.read(copy)
    assert found.newest_log is not None
    assert (found.hold, found.newest_log.bound) == (30, None)


def test_a_hold_of_the_store_before_what_the_canary_approved_binds_and_goes(
    machine: Machine, bucket: Bucket, url: str, copy: Path
) -> None:
    approve(copy, 30)
    bucket.put(f"{BASE}/{LOG}/hold", b"20\n")
    pull(url, copy)
    found = Model.read(copy)
    assert found.newest_log is not None and found.held_by is not None
    assert (found.hold, found.newest_log.is_canary, found.held_by.url) == (20, False, url)
    approve(copy, 20)
    assert Model.read(copy).hold == 20
    bucket.delete(f"{BASE}/{LOG}/hold")
    pull(url, copy)
    assert read_log(copy).approved == 20


@pytest.mark.parametrize("approved", [20, 30])
def test_a_rollback_of_the_store_to_what_the_canary_approved_needs_no_other_judgement(
    machine: Machine, url: str, copy: Path, approved: int
) -> None:
    """Its servers go to where those values are published again; what comes back after it is judged."""
    approve(copy, approved)
    assert export_model("rollback", url, "--to", 20, "--reason", "scores fell").code == 0
    pull(url, copy)
    found = Model.read(copy)
    assert found.newest_log is not None and found.held_by is not None
    assert (found.hold, found.held_by.why, found.held_by.values_of) == (31, "scores fell", 20)
    assert found.newest_log.reach(20)[-1].end == 31
    assert export_model("resume", url).code == 0
    pull(url, copy)
    assert read_log(copy).approved == 31
    found = Model.read(copy)
    assert found.newest_log is not None
    assert found.newest_log.reach(31) == (), "nobody has judged what came back"


def test_a_rollback_of_the_store_to_what_the_canary_has_not_approved_waits_for_it(
    machine: Machine, url: str, copy: Path
) -> None:
    approve(copy, 10)
    assert export_model("rollback", url, "--to", 20).code == 0
    pull(url, copy)
    log = Model.read(copy).newest_log
    assert log is not None
    assert (log.limit, log.is_canary, log.bound) == (10, True, 31)


def test_a_rollback_of_the_store_to_what_the_canary_has_failed_is_not_approved(
    machine: Machine, url: str, copy: Path
) -> None:
    go_on(machine, url, 40)
    pull(url, copy)
    approve(copy, 20)
    rollback(copy, 20, if_canary=True)  # 30 and 40 did not pass
    assert export_model("resume", copy, "--lift-only").code == 0
    assert read_log(copy).approved == 41
    assert export_model("rollback", url, "--to", 30).code == 0
    pull(url, copy)
    found = Model.read(copy)
    assert found.held_by is not None
    assert (found.hold, found.held_by.values_of) == (41, None)


@pytest.mark.parametrize("words", [("resume",), ("resume", "--lift-only"), ("rollback", "--to", "10")])
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_what_the_store_holds_is_decided_there(
    machine: Machine, url: str, copy: Path, words: tuple[str, ...], dry: tuple[str, ...]
) -> None:
    assert export_model("rollback", url, "--to", 20, "--reason", "NaN").code == 0
    pull(url, copy)
    before = files(copy)
    ran = export_model(words[0], copy, *words[1:], *dry, "--json")
    assert (ran.code, ran.error["error"]) == (5, "ModelHeld"), ran.err
    assert url in ran.error["cause"] and "NaN" in ran.error["cause"]
    hint = f"export-model {words[0]} {url}"
    assert hint in ran.error["hint"]
    assert files(copy) == before
    typed = ran.error["hint"].partition("export-model ")[2].split()
    assert export_model(*typed).code == 0, "the command of the hint ends it"
    pull(url, copy)
    if words[0] == "resume":
        assert Model.read(copy).hold is None


def test_history_and_doctor_name_the_store(machine: Machine, url: str, copy: Path) -> None:
    assert export_model("rollback", url, "--to", 20).code == 0
    pull(url, copy)
    found = export_model("history", copy).out
    assert f"in {url}" in found
    assert f"export-model resume {url}" in found
    assert export_model("history", copy, "--json").document["held_by"]["url"] == url
    diagnosis = export_model("doctor", copy, "--json").document
    (held,) = [each for each in diagnosis["findings"] if each["code"] == "held"]
    assert held["command"] == f"export-model resume {url}"


def test_a_copy_pushes_no_hold_of_its_store_as_its_own(
    machine: Machine, bucket: Bucket, url: str, copy: Path
) -> None:
    assert export_model("rollback", url, "--to", 20).code == 0
    pull(url, copy)
    before = bucket.keys()
    ran = export_model("push", copy, url, "--json")
    assert (ran.code, ran.document["status"]) == (0, "nothing_to_do"), (ran.out, ran.err)
    assert bucket.keys() == before
    other = bucket.url("models/other")
    assert export_model("push", copy, other).code == 0
    assert Model.read(_pulled(other, copy.with_name("third"))).hold == 31


def _pulled(url: str, directory: Path) -> Path:
    pull(url, directory)
    return directory


def test_a_base_of_the_store_waits_for_the_canary_that_deltas_lead_to_it(
    machine: Machine, url: str, copy: Path
) -> None:
    """Servers load a base by themselves."""
    approve(copy, 20)
    go_on(machine, url, 40)
    assert export_model("merge", url, "--rebase").code == 0
    for approved, versions in ((20, {"10"}), (30, {"10"}), (40, {"10", "40"})):
        approve(copy, approved)
        pull(url, copy)
        assert {path.name for path in copy.iterdir() if path.name.isdecimal()} == versions


def test_what_a_rollback_of_the_store_took_back_was_not_approved(
    machine: Machine, url: str, copy: Path
) -> None:
    """The canary's hold is beyond it, where the values of 20 are: it has never judged 30."""
    approve(copy, 20)
    for to in (20, 30):
        assert export_model("rollback", url, "--to", to).code == 0
        pull(url, copy)
    log = Model.read(copy).newest_log
    assert log is not None
    assert (log.limit, log.is_canary, log.bound) == (31, True, 32)
