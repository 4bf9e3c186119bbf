"""Publishing: numbers only grow, readers see whole versions, nothing of a failure stays."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.errors import (
    DiskFull,
    Exit,
    ManifestError,
    PositionError,
    PositionMoved,
    PublishError,
    TargetBusy,
    TargetNotWritable,
    UsageError,
    VerificationError,
    VersionExists,
)
from exporter.pipeline import log_maintenance
from exporter.pipeline.incremental import execute_incremental, export_incremental, plan_incremental
from exporter.publish import staging as staging_module
from exporter.publish.commit import (
    Staging,
    VersionRule,
    model_lock,
    next_position,
    publish_version,
    reserve_position,
)
from exporter.publish.delta_log import read_log
from exporter.publish.permission import Permission
from exporter.publish.staging import remove_leftovers
from exporter.publish.versions import last_position, lease, read_manifest, served_version, version_dirs
from exporter.storage.files import open_lock, remove_tree, try_lock, writing
from exporter.storage.layout import TURN_FILE
from exporter.wire.crc32c import masked_crc
from tests.support.logs import Trainer, request
from tests.support.publishing import (
    FILES,
    SHARD,
    draft,
    fill,
    hidden,
    names,
    publish,
    versions,
    whole_versions,
)
from tests.support.setting import Setting, followed

GREATEST = 2**63 - 1
NUMBERS = st.integers(0, GREATEST - 1)


def test_failures_of_two_tries_have_one_message(tmp_path: Path) -> None:
    said = set()
    for _ in range(2):
        with pytest.raises(DiskFull) as caught, Staging(tmp_path) as staging, writing(staging.path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(staging.path / SHARD))
        said.add(str(caught.value))
    assert len(said) == 1, "a watch would report each try"


# --- numbers -----------------------------------------------------------------------------------------------


@given(st.none() | NUMBERS, st.none() | NUMBERS)
def test_positions_only_grow_and_follow_the_step_while_it_does(step: int | None, last: int | None) -> None:
    position = next_position(step, last)
    assert position > (-1 if last is None else last)
    if step is not None and (last is None or step > last) and step <= GREATEST // 2:
        assert position == step
    else:
        assert position == (last or 0) + 1


RULES = st.sampled_from([VersionRule(), VersionRule("time")]) | NUMBERS.map(VersionRule)


@given(RULES, st.none() | NUMBERS, st.none() | NUMBERS, st.none() | NUMBERS, st.floats(0, 1e12))
def test_whatever_names_a_version_it_is_the_newest(
    rule: VersionRule, step: int | None, newest: int | None, last: int | None, now: float
) -> None:
    try:
        version, position = rule.choose(step, newest=newest, last=last, now=now)
    except VersionExists:
        assert newest is not None and isinstance(rule.choice, int) and rule.choice <= newest
        return
    assert version > (-1 if newest is None else newest)
    assert position > (-1 if last is None else last)
    if rule.choice == "position":
        assert version == position
    elif rule.choice == "time":
        assert version == max(int(now), -1 if newest is None else newest + 1)
    else:
        assert version == rule.choice


@pytest.mark.parametrize("rule", [VersionRule(), VersionRule("time")])
def test_beyond_the_greatest_version_there_is_none(rule: VersionRule) -> None:
    with pytest.raises(VersionExists):
        rule.choose(None, newest=GREATEST, last=GREATEST, now=0)
    assert rule.choose(None, newest=GREATEST - 1, last=GREATEST - 1, now=0) == (GREATEST, GREATEST)


@pytest.mark.parametrize(
    ("text", "choice"),
    [(None, "position"), ("time", "time"), ("0", 0), ("17", 17), (str(GREATEST // 2), GREATEST // 2)],
)
def test_version_option(text: str | None, choice: int | str) -> None:
    assert VersionRule.parse(text).choice == choice


@pytest.mark.parametrize(
    "text", ["", "-1", "1.5", "newest", "1_000", " 7", "٣", str(GREATEST // 2 + 1), str(GREATEST), "9" * 40]
)
def test_version_option_refused(text: str) -> None:
    with pytest.raises(UsageError):
        VersionRule.parse(text)


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("7", 7),
        ("007", 7),
        ("-3", -3),
        (" 12 ", 12),
        (str(GREATEST), GREATEST),
        (str(GREATEST + 1), None),
        ("7.tmp", None),
        (".staging-7", None),
        ("", None),
        ("0x10", None),
        ("1_000", None),
        ("٣", None),
    ],
)
def test_names_that_a_server_takes_for_versions(name: str, version: int | None) -> None:
    assert served_version(name) == version


# --- one publication ---------------------------------------------------------------------------------------


def test_a_version_holds_what_was_staged_and_its_manifest(tmp_path: Path) -> None:
    model = tmp_path / "models" / "ranker"
    done = publish(model, step=4200, now=1_700_000_000.25)
    assert (done.path, done.version, done.position) == (model / "4200", 4200, 4200)
    assert [manifest.position for manifest in whole_versions(model)] == [4200]
    assert read_manifest(done.path) == done.manifest
    assert done.manifest.created.timestamp() == 1_700_000_000.25
    assert names(model) == [".lock", ".turn", "4200"]


def test_files_that_we_wrote_have_a_checksum_and_data_shards_have_none(tmp_path: Path) -> None:
    found = {file.path: file.crc32c for file in publish(tmp_path).manifest.files}
    expected = {
        name: None if name == SHARD else f"{masked_crc(content):08x}" for name, content in FILES.items()
    }
    assert found == expected


def test_versions_follow_the_step_and_then_only_grow(tmp_path: Path) -> None:
    steps = [None, 100, 100, 50, None, 200]
    assert [publish(tmp_path, step).version for step in steps] == [1, 100, 101, 102, 103, 200]


def test_step_zero_is_a_position(tmp_path: Path) -> None:
    assert [publish(tmp_path, 0).version for _ in range(2)] == [0, 1]


def test_a_chosen_version_does_not_move_the_position(tmp_path: Path) -> None:
    done = publish(tmp_path, 1000, version=1)
    assert (done.version, done.position) == (1, 1000)
    done = publish(tmp_path, 1000, version=2)
    assert (done.version, done.position) == (2, 1001)
    done = publish(tmp_path, 1000)
    assert (done.version, done.position) == (1002, 1002)


def test_a_version_named_by_the_clock(tmp_path: Path) -> None:
    found = [publish(tmp_path, 5, version="time", now=now) for now in (1_700_000_000.9, 1_700_000_000.9, 5)]
    assert [done.version for done in found] == [1_700_000_000, 1_700_000_001, 1_700_000_002]
    assert [done.position for done in found] == [5, 6, 7]
    assert publish(tmp_path, 6).version == 1_700_000_003, "TF Serving serves the greatest number"


@pytest.mark.parametrize("taken", [7, 6])
def test_a_version_is_never_overwritten_and_never_backwards(tmp_path: Path, taken: int) -> None:
    publish(tmp_path, version=7)
    before = (tmp_path / "7" / "manifest.json").read_bytes()
    with pytest.raises(VersionExists) as caught:
        publish(tmp_path, version=taken)
    assert caught.value.exit_code is Exit.USAGE
    assert "--version 8" in caught.value.hint
    assert versions(tmp_path) == [7]
    assert (tmp_path / "7" / "manifest.json").read_bytes() == before
    assert hidden(tmp_path) == []


def test_whatever_a_server_takes_for_a_version_is_taken(tmp_path: Path) -> None:
    (tmp_path / "0000500").write_text("a plain file")
    assert publish(tmp_path, step=3).version == 501
    (tmp_path / "600").symlink_to(tmp_path / "nowhere")
    assert publish(tmp_path, step=3).version == 601


def test_deltas_move_the_position(tmp_path: Path) -> None:
    publish(tmp_path, 100)
    delta = tmp_path / "deltas" / f"{100:020}" / f"{100:020}-{180:020}"
    delta.mkdir(parents=True)
    (delta.parent / "hold").touch()
    (delta.parent / ".staging-7").mkdir()
    assert last_position(tmp_path, version_dirs(tmp_path)) == 180
    assert publish(tmp_path, 150).version == 181


def test_a_damaged_newest_manifest_stops_the_next_export(tmp_path: Path) -> None:
    (publish(tmp_path, 5).path / "manifest.json").write_text("{")
    with pytest.raises(ManifestError, match=r"5/manifest\.json"):
        publish(tmp_path, 6)
    assert versions(tmp_path) == [5]


def test_published_files_are_readable_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with Staging(tmp_path) as staging:
            fill(staging.path)
            (staging.path / "saved_model.pb").chmod(0o600)
            (staging.path / "variables").chmod(0o700)
            path = publish_version(staging, draft()).path
    finally:
        os.umask(before)
    assert {stat.S_IMODE(p.stat().st_mode) for p in path.rglob("*") if p.is_file()} == {0o640}
    assert {stat.S_IMODE(p.stat().st_mode) for p in (path, path / "variables")} == {0o750}


def test_a_linked_shard_keeps_the_trainers_mode(tmp_path: Path) -> None:
    trainers = tmp_path / "model.ckpt.data-00000-of-00001"
    trainers.write_bytes(FILES[SHARD])
    trainers.chmod(0o600)
    model = tmp_path / "model"
    with Staging(model) as staging:
        fill(staging.path)
        (staging.path / SHARD).unlink()
        (staging.path / SHARD).hardlink_to(trainers)
        publish_version(staging, draft())
    assert stat.S_IMODE(trainers.stat().st_mode) == 0o600
    assert len(list(whole_versions(model))) == 1


@pytest.mark.parametrize("kind", ["link to a file", "link to a directory", "pipe"])
def test_only_files_and_directories_are_published(tmp_path: Path, kind: str) -> None:
    with pytest.raises(VerificationError, match="odd"), Staging(tmp_path / "model") as staging:
        odd = staging.path / "odd"
        if kind == "pipe":
            os.mkfifo(odd)
        else:
            odd.symlink_to(tmp_path if "directory" in kind else "/etc/hostname")
        publish_version(staging, draft())
    assert names(tmp_path / "model") == []


# --- staging -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), Staging(tmp_path / "model") as staging:
        fill(staging.path)
        assert hidden(tmp_path / "model")
        raise error
    assert names(tmp_path / "model") == []


def test_what_was_staged_and_not_published_is_removed(tmp_path: Path) -> None:
    with Staging(tmp_path) as staging:
        fill(staging.path)
    assert names(tmp_path) == []


def test_leftovers_of_killed_runs_go_and_live_staging_stays(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    model = tmp_path / "model"
    with Staging(model) as live:
        fill(live.path)
        for name in (".staging-1-dead", ".staging-2-died-before-its-lock", ".trash-7-dead"):
            (model / name / "bundle").mkdir(parents=True)
            (model / name / "bundle" / "link").symlink_to(outside)
        (model / ".staging-1-dead" / "lock").touch()
        (model / ".staging-link").symlink_to(outside)
        (model / ".trash-link").symlink_to(outside)
        (model / ".staging-file").touch()
        remove_leftovers(model)
        left = {name for name in hidden(model) if (model / name).is_dir() and not (model / name).is_symlink()}
        assert left == {live.path.parent.name}
        assert (live.path / "saved_model.pb").exists()
    assert (outside / "precious").exists()


# --- retention ---------------------------------------------------------------------------------------------


def test_keep_removes_all_but_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        publish(tmp_path, step)
    done = publish(tmp_path, 4, keep=2)
    assert done.removed == (1, 2)
    assert versions(tmp_path) == [3, 4]
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("keep", [0, -1])
def test_the_newest_version_cannot_be_retired(tmp_path: Path, keep: int) -> None:
    with pytest.raises(UsageError):
        publish(tmp_path, keep=keep)


def test_a_version_that_someone_reads_stays_until_they_are_done(tmp_path: Path) -> None:
    first = publish(tmp_path, 1).path
    with lease(first) as manifest, lease(first):
        assert manifest.position == 1
        done = publish(tmp_path, 2, keep=1)
        assert [(kept.version, kept.reason) for kept in done.kept] == [(1, "a reader has it open")]
        assert (first / "saved_model.pb").read_bytes() == FILES["saved_model.pb"]
    assert publish(tmp_path, 3, keep=1).removed == (1, 2)


def test_a_superseded_version_stays_for_the_grace_period(tmp_path: Path) -> None:
    publish(tmp_path, 1, now=1000)
    publish(tmp_path, 2, now=2000, keep=1, grace_seconds=60)
    publish(tmp_path, 3, now=2059, keep=1, grace_seconds=60)
    assert versions(tmp_path) == [1, 2, 3]
    done = publish(tmp_path, 4, now=2060, keep=1, grace_seconds=60)
    assert done.removed == (1,)
    assert [kept.version for kept in done.kept] == [2, 3]
    assert all("60 s ago" in kept.reason for kept in done.kept)


def test_what_others_put_there_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    elsewhere = publish(tmp_path / "elsewhere", 1).path
    model = tmp_path / "model"
    publish(model, 1)
    (model / "2").mkdir()
    (model / "2" / "saved_model.pb").touch()
    (model / "3").touch()
    (model / "4").symlink_to(elsewhere)
    publish(model, 5)
    assert publish(model, 6, keep=2).removed == (1,)
    assert versions(model) == [2, 3, 4, 5, 6]
    assert elsewhere.exists()


def test_a_version_whose_age_is_unknown_stays(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    damaged = publish(tmp_path, 2).path
    publish(tmp_path, 3)
    (damaged / "manifest.json").write_text("{")
    done = publish(tmp_path, 4, keep=2, grace_seconds=1, now=1_800_000_000)
    assert done.removed == (2,)
    assert [kept.version for kept in done.kept] == [1]
    assert "damaged" in done.kept[0].reason


def test_a_version_on_its_way_out_gives_no_lease(tmp_path: Path) -> None:
    path = publish(tmp_path, 1).path
    with (path / "manifest.json").open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ManifestError, match="being removed"), lease(path):
            pass
    publish(tmp_path, 2, keep=1)
    with pytest.raises(ManifestError, match="cannot be opened"), lease(path):
        pass


# --- locks and failures of the system ----------------------------------------------------------------------


def test_waiting_for_another_exporter_ends_and_names_it(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    with (tmp_path / ".lock").open("rb+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(TargetBusy) as caught, model_lock(tmp_path, 0.05):
            pass
    assert f"process {os.getpid()} on " in caught.value.cause, "the last holder signed the lock"


def test_who_waits_gets_the_lock_before_who_had_it(tmp_path: Path) -> None:
    order: list[str] = []

    def wait() -> None:
        with model_lock(tmp_path):
            order.append("waited")

    with model_lock(tmp_path):
        waiting = Thread(target=wait)
        waiting.start()
        turn = open_lock(tmp_path / TURN_FILE)
        while try_lock(turn):  # until the thread has it
            fcntl.flock(turn, fcntl.LOCK_UN)
            time.sleep(0.001)
        os.close(turn)
    with model_lock(tmp_path):
        order.append("again")
    waiting.join()
    assert order == ["waited", "again"]


@pytest.mark.parametrize("place", ["", "below"])
def test_a_target_that_is_a_file(tmp_path: Path, place: str) -> None:
    (tmp_path / "model").touch()
    with pytest.raises(TargetNotWritable, match="model"):
        publish(tmp_path / "model" / place)


MAPPED = {
    errno.EACCES: TargetNotWritable,
    errno.EPERM: TargetNotWritable,
    errno.EROFS: TargetNotWritable,
    errno.ENOTDIR: TargetNotWritable,
    errno.ENAMETOOLONG: TargetNotWritable,
    errno.ELOOP: TargetNotWritable,
    errno.ENOLCK: TargetNotWritable,
    errno.ENOSPC: DiskFull,
    errno.EDQUOT: DiskFull,
    errno.EFBIG: DiskFull,
    errno.EIO: PublishError,
}


@pytest.mark.parametrize("code", MAPPED, ids=errno.errorcode.get)
def test_every_refusal_of_the_system_has_a_name(code: int) -> None:
    with pytest.raises(PublishError) as caught, writing(Path("/target")):
        raise OSError(code, os.strerror(code), "/target/file")
    assert type(caught.value) is MAPPED[code]
    assert "/target/file" in caught.value.message
    assert errno.errorcode[code] in caught.value.cause


@pytest.fixture
def no_big_files() -> Iterator[None]:
    """A quota that the kernel enforces here and now: no file may grow beyond 1 KiB."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_manifest_that_does_not_fit_publishes_nothing(tmp_path: Path, no_big_files: None) -> None:
    with pytest.raises(DiskFull, match=r"manifest\.json"), Staging(tmp_path) as staging:
        for number in range(20):
            (staging.path / f"file-{number:02}-with-a-name-that-fills-a-line").touch()
        publish_version(staging, draft())
    assert names(tmp_path) == [".lock", ".turn"]


def test_a_step_after_which_nothing_could_be_published_names_no_version(tmp_path: Path) -> None:
    assert [publish(tmp_path, GREATEST).version, publish(tmp_path, GREATEST).version] == [1, 2]


@pytest.mark.parametrize("step", [10**18, GREATEST // 2])
def test_a_position_beyond_those_of_deltas_is_refused_for_what_takes_them(tmp_path: Path, step: int) -> None:
    with pytest.raises(PositionError, match="deltas count to"):
        reserve_position(tmp_path, step)
    assert publish(tmp_path, step).version == step  # a plain version may have it


def test_a_version_directory_that_may_not_be_looked_into_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, 7)
    lstat = Path.lstat

    def denied(path: Path) -> os.stat_result:
        if path.parent.name == "7":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", denied)  # permission bits do not bind root
    with pytest.raises(ManifestError, match="cannot be looked at") as caught:
        version_dirs(tmp_path)
    assert caught.value.cause == "Permission denied"


@pytest.fixture
def log_at_13(tmp_path: Path) -> tuple[Trainer, Path]:
    """A base at 10, a delta to 13, and a trainer that is at 16."""
    trainer = followed(tmp_path, (13, 16), published=13, by_saving=True)
    return trainer, Setting(tmp_path).model


def test_a_position_that_was_reserved_before_a_delta_came_is_lost(log_at_13: tuple[Trainer, Path]) -> None:
    """It is baked into what is published: two things would stand where servers take them for one."""
    trainer, model = log_at_13
    place = reserve_position(model, 20)
    export_incremental(request(trainer, model))
    with Staging(model) as staging, pytest.raises(PositionMoved, match="is the newest now, it was 13"):
        fill(staging.path)
        publish_version(staging, draft(20), place, permission=Permission(plain=True))
    assert versions(model) == [10]


def test_a_delta_that_was_planned_before_another_came_is_not_published(
    log_at_13: tuple[Trainer, Path],
) -> None:
    """It would lead servers past the other one, whose rows it does not have."""
    trainer, model = log_at_13
    planned = plan_incremental(request(trainer, model))
    log_maintenance.rollback(model, 10)
    with pytest.raises(PositionMoved, match="is the newest now, it was 13"):
        execute_incremental(planned)
    assert [delta.end for delta in read_log(model).deltas] == [13, 14]


def test_a_reserved_version_that_somebody_made_meanwhile_is_lost(tmp_path: Path) -> None:
    model = tmp_path / "model"
    publish(model, step=10)
    place = reserve_position(model, 20)
    (model / "20").mkdir()
    with Staging(model) as staging, pytest.raises(VersionExists):
        fill(staging.path)
        publish_version(staging, draft(20), place)
    assert list((model / "20").iterdir()) == []


def test_a_staging_that_is_cleaned_away_as_it_begins_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process took it for what a killed run left: it had no lock yet."""
    model, cleaned = tmp_path / "model", []

    def late(path: Path, *flags: int) -> int:
        lock = open_lock(path, *flags)
        if not cleaned:
            cleaned.append(path.parent)
            remove_tree(path.parent)
        return lock

    monkeypatch.setattr(staging_module, "open_lock", late)
    with Staging(model) as staging:
        assert staging.path.is_dir()
        assert staging.path.parent not in cleaned
    assert len(cleaned) == 1 and hidden(model) == []
