"""A pulled copy over time: killed, behind, without room, beside a canary, while the store forgets."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from exporter.errors import DiskFull, ForeignLineage, PublicationDamaged, UsageError
from exporter.pipeline.log_maintenance import merge
from exporter.pipeline.tagging import delete_tag, set_tag
from exporter.publish.delta_log import read_log
from exporter.publish.hold import Hold
from exporter.storage.objects import ObjectReader
from exporter.transfer.pull import LocalCopy, pull
from tests.support.commands import export_model
from tests.support.logs import Serving, assert_same_bits, served_now, values_at
from tests.support.machines import Machine, files, grow_old, killed_at, pushed, take_back
from tests.support.object_stores import Bucket
from tests.support.publishers import Killed
from tests.support.remote_models import incr, went_on
from tests.support.setting import followed

LOG = f"deltas/{10:020d}"


def delta(start: int, end: int) -> str:
    return f"{LOG}/{start:020d}-{end:020d}"


def forget(machine: Machine, url: str, *paths: str) -> None:
    """The publisher removes these, as retention does in time, and so does the store."""
    for path in paths:
        shutil.rmtree(machine.model / path)
    assert export_model("push", machine.model, url, "--prune").code == 0


def rolled_back_copy(machine: Machine, url: str, directory: Path, to: int) -> Path:
    """A copy of what `machine` pushed, in which a canary's agent has rolled back to the position `to`."""
    copy = directory / "copy"
    pushed(machine.model, url)
    pull(url, copy)
    take_back(copy, to)
    return copy


def deltas(copy: Path) -> set[str]:
    return {path.relative_to(copy).as_posix() for path in (copy / LOG).glob("*-*")}


def test_a_copy_forgets_while_deltas_go_on(machine: Machine, url: str, tmp_path: Path) -> None:
    """A trainer that publishes all the time must not fill the disks of servers."""
    copy = tmp_path / "copy"
    pushed(machine.model, url)
    pull(url, copy)
    grow_old(copy)
    merge(machine.model)
    forget(machine, url, delta(10, 20), delta(20, 30))
    assert pull(url, copy, prune=True).removed == (), (
        "the merger has only come: servers may have listed its parts"
    )
    grow_old(copy)
    machine.go_on(40)
    pushed(machine.model, url)
    assert pull(url, copy, prune=True).removed == (delta(10, 20), delta(20, 30))
    assert deltas(copy) == {delta(10, 30), delta(30, 40)}
    assert not list(copy.glob(".trash-*")), "out of sight is not enough: the disk has to have room again"


def test_a_copy_keeps_what_its_own_tags_need(machine: Machine, url: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    pushed(machine.model, url)
    pull(url, copy)
    set_tag(copy, "here", 20)
    merge(machine.model)
    forget(machine, url, delta(10, 20), delta(20, 30))
    pull(url, copy)
    grow_old(copy)
    assert pull(url, copy, prune=True).removed == (delta(20, 30),)
    delete_tag(copy, "here")
    assert pull(url, copy, prune=True).removed == (delta(10, 20),)


def test_the_last_base_stays_while_a_model_is_removed_from_the_store(
    machine: Machine, bucket: Bucket, url: str, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    pushed(machine.model, url)
    pull(url, copy)
    grow_old(copy)
    before = files(copy)
    for key in bucket.names():  # as `aws s3 rm --recursive` does, in the order of keys
        if key.startswith("models/ranker/10/"):
            bucket.delete(key)
    assert pull(url, copy, prune=True).removed == ()
    assert files(copy) == before


def test_what_is_exported_anew_to_a_url_is_not_mixed_in(
    machine: Machine, bucket: Bucket, url: str, tmp_path: Path
) -> None:
    copy, other = tmp_path / "copy", Machine(tmp_path / "other")
    pushed(machine.model, url)
    following = LocalCopy(url, copy, prune=True)
    following.update()
    before = files(copy)
    for key in bucket.names():
        bucket.delete(key)
    followed(other.directory, (), published=0)
    pushed(other.model, url)
    with pytest.raises(ForeignLineage) as refused:
        following.update()
    assert str(copy) in refused.value.hint
    assert files(copy) == before
    shutil.rmtree(copy)  # as the hint says, while it is followed
    following.update()
    assert files(copy) == files(other.model)


def test_a_pull_that_was_killed_goes_on_after_the_store_has_forgotten(
    machine: Machine, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had fetched is the store's, and none of its own, though the store has it no more."""
    pushed(machine.model, url)
    count = len([name for name in files(machine.model) if not name.endswith("manifest.json")])
    for call in range(count):
        with killed_at(monkeypatch, ObjectReader, ("copy",), call), pytest.raises(Killed):
            pull(url, tmp_path / f"copy-{call}")
    machine.go_on(40)
    merge(machine.model)
    forget(machine, url, delta(10, 20), delta(20, 30), delta(30, 40))
    for call in range(count):
        assert pull(url, tmp_path / f"copy-{call}").position == 40
        assert_same_bits(
            values_at(read_log(tmp_path / f"copy-{call}")), served_now(machine.trainer, Serving())
        )


def test_what_finds_no_room_is_not_fetched(
    machine: Machine, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent looks each second: it must not fetch gigabytes each time, only to find the disk full."""
    pushed(machine.model, url)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 100))  # type: ignore[attr-defined]
        patch.setattr(ObjectReader, "copy", None)
        with pytest.raises(DiskFull, match="no space left to fetch") as full:
            pull(url, tmp_path / "copy")
    assert "100 B are free" in (full.value.cause or "")
    assert pull(url, tmp_path / "copy").position == 30


def test_nothing_is_fetched_to_where_it_cannot_be_served(machine: Machine, url: str, tmp_path: Path) -> None:
    pushed(machine.model, url)
    with pytest.raises(UsageError, match="pattern"):
        pull(url, tmp_path / "a[b]")
    assert not (tmp_path / "a[b]").exists()


def test_the_same_may_be_merged_in_a_copy_and_in_its_store(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    """Each merger has its own time; the copy keeps its own, and goes on."""
    copy = tmp_path / "copy"
    pushed(machine.model, url)
    pull(url, copy)
    for place in (copy, url):
        assert export_model("merge", place).code == 0
    assert pull(url, copy).position == 30
    went_on(machine.trainer, 40)
    assert incr(machine.trainer, url).code == 0
    assert pull(url, copy).position == 40
    assert_same_bits(values_at(read_log(copy)), served_now(machine.trainer, Serving()))


def test_a_canarys_rollback_stays_when_the_store_has_merged(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    """Until a person lifts it, whatever the store has forgotten meanwhile; then the copy forgets it, too."""
    copy = rolled_back_copy(machine, url, tmp_path, 20)
    grow_old(copy)
    assert pull(url, copy, prune=True).removed == ()
    machine.go_on(40)
    pushed(machine.model, url)
    assert pull(url, copy, prune=True).waiting == (delta(30, 40),)
    merge(machine.model)
    forget(machine, url, delta(10, 20), delta(20, 30), delta(30, 40))
    for _ in range(2):
        done = pull(url, copy, prune=True)
        grow_old(copy)
        assert (done.waiting, done.removed) == ((), ())
        assert read_log(copy).hold.read() == 31
        assert {delta(20, 31), delta(10, 40)} <= deltas(copy)
    assert export_model("resume", copy, "--lift-only", "--lift-canary").code == 0
    assert pull(url, copy, prune=True).removed == (delta(10, 20), delta(20, 30), delta(20, 31))
    assert_same_bits(values_at(read_log(copy)), served_now(machine.trainer, Serving()))


def test_a_merger_that_is_called_as_a_canarys_rollback_waits_for_the_next(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    """A trainer's step that is one further, merged from the base on, has the name of the rollback to it."""
    copy = rolled_back_copy(machine, url, tmp_path, 10)
    went_on(machine.trainer, 31)
    assert incr(machine.trainer, url).code == 0
    assert pull(url, copy, prune=True).waiting == (delta(30, 31),)
    assert export_model("merge", url).code == 0
    for _ in range(2):
        assert pull(url, copy, prune=True).waiting == (delta(30, 31), delta(10, 31))
    went_on(machine.trainer, 40)
    assert incr(machine.trainer, url).code == 0
    assert export_model("merge", url).code == 0
    assert pull(url, copy, prune=True).waiting == ()
    assert export_model("resume", copy, "--lift-only", "--lift-canary").code == 0
    pull(url, copy, prune=True)
    assert_same_bits(values_at(read_log(copy)), served_now(machine.trainer, Serving()))


def test_what_a_canary_took_back_stays_while_its_merger_has_to_wait(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    """The store has merged what was taken back; the copy cannot have that, and goes back by the parts."""
    copy = tmp_path / "copy"
    machine.go_on(35)
    machine.go_on(40)
    pushed(machine.model, url)
    pull(url, copy)
    take_back(copy, 20)
    merge(machine.model, start=30)
    forget(machine, url, delta(30, 35), delta(35, 40))
    grow_old(copy)
    done = pull(url, copy, prune=True)
    assert (done.waiting, done.removed) == ((delta(30, 40),), ())
    resumed = export_model("resume", copy)
    assert resumed.code == 0, resumed.err
    assert_same_bits(values_at(read_log(copy)), served_now(machine.trainer, Serving()))


def test_damage_keeps_a_copy_until_a_merger_takes_its_place(
    machine: Machine, url: str, bucket: Bucket, tmp_path: Path
) -> None:
    copy, watching = tmp_path / "copy", tmp_path / "watching"
    pushed(machine.model, url)
    pull(url, copy)
    following = LocalCopy(url, watching)
    machine.go_on(40)
    machine.go_on(50)
    pushed(machine.model, url)
    key = next(key for key in bucket.names() if delta(30, 40) in key and "delta.data" in key)
    whole = bucket.keys(key)[key]
    bucket.put(key, bytes([*whole[:-1], whole[-1] ^ 1]))
    for _ in range(2):  # it is not fetched again while it is the same
        with pytest.raises(PublicationDamaged, match="publication 40 is damaged") as damaged:
            following.update()
    assert key in damaged.value.cause
    assert following.newest is not None
    assert following.newest[0] == 50, "the store has more than the copy"
    assert read_log(watching).at.position == 30
    merge(machine.model)
    pushed(machine.model, url)
    done = following.update()
    assert read_log(watching).at.position == 50
    assert delta(30, 40) not in done.fetched
    assert delta(40, 50) not in done.fetched, "nobody can take it"
    assert pull(url, copy).position == 50


def test_a_new_log_is_held_at_its_base_before_anything_follows(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    pushed(machine.model, url)
    LocalCopy(url, copy, holds_new_logs=True).update()
    held = Hold(copy / LOG).for_servers()
    assert held is not None
    assert (held.position, held.is_canary) == (10, True)
    Hold(copy / LOG).lift()
    machine.go_on(40)
    pushed(machine.model, url)
    LocalCopy(url, copy, holds_new_logs=True).update()
    assert Hold(copy / LOG).for_servers() is None, "servers follow it already"
