"""Rollback and resume: several of them, two at once, beside an exporter, with damage, on a full disk."""

from __future__ import annotations

import os
import resource
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from exporter.errors import CorruptFile, DiskFull, ManifestError, ModelHeld, UsageError
from exporter.pipeline import log_maintenance, restoration
from exporter.pipeline.incremental import export_incremental
from exporter.pipeline.rebase import rebase
from exporter.pipeline.restoration import Restored
from exporter.publish.commit import PublishedDelta
from exporter.publish.delta_log import DeltaLog, read_log
from exporter.publish.hold import Hold
from exporter.storage.layout import VARIABLES_PREFIX
from tests.support.logs import (
    Serving,
    Trainer,
    assert_same_bits,
    damage_tensor,
    request,
    set_hold,
    values_at,
)
from tests.support.setting import followed

Values = dict[str, np.ndarray]
SERVING = Serving(parts=2)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer]:
    """Published: a base at 10, deltas to 20 and 30; the trainer has written an increment to 40."""
    directory = tmp_path_factory.mktemp("origin")
    trainer = followed(directory, (20, 30, 40), published=30, serving=SERVING)
    return directory, trainer


@pytest.fixture
def trainer(origin: tuple[Path, Trainer], tmp_path: Path) -> Trainer:
    shutil.copytree(origin[0], tmp_path, dirs_exist_ok=True)
    return Trainer(tmp_path / "train")


@pytest.fixture
def model(trainer: Trainer) -> Path:
    return trainer.directory.parent / "model"


@pytest.fixture
def known(model: Path) -> dict[int, Values]:
    log = read_log(model)
    return {position: values_at(log, position) for position in (10, 20, 30)}


def is_at(log: DeltaLog, expected: Values) -> None:
    assert_same_bits(values_at(log), expected)


def test_after_two_rollbacks_resume_publishes_what_the_trainer_had(
    model: Path, known: dict[int, Values]
) -> None:
    log_maintenance.rollback(model, 20)
    second = log_maintenance.rollback(model, 10)
    assert (second.before.position, second.hold) == (31, 32)
    is_at(read_log(model), known[10])
    done = log_maintenance.resume(model)
    assert (done.values_of.position, done.hold) == (30, None)
    is_at(read_log(model), known[30])
    assert read_log(model).trained == read_log(model).trained_at(30)[0]


def test_a_rollback_past_a_base_that_no_delta_leads_to(model: Path, known: dict[int, Values]) -> None:
    """As in a copy that withheld a delta of its store: what changed on the way there is in no delta."""
    rebase(model)
    shutil.rmtree(read_log(model).path / f"{20:020}-{30:020}")
    log = read_log(model)
    assert (log.base.at.position, [delta.end for delta in log.deltas]) == (30, [20])
    done = log_maintenance.rollback(model, 10, reason="bad values")
    assert (done.made, done.position) == (Restored.BASE, 31)
    is_at(read_log(model), known[10])
    assert log.hold.read() == 30, "servers of the old log go on by loading the new base alone"
    resumed = log_maintenance.resume(model)
    assert (resumed.values_of.position, resumed.hold) == (30, None)
    is_at(read_log(model), known[30])


def test_a_rollback_of_a_rollback_needs_no_resumption_of_values(
    model: Path, known: dict[int, Values]
) -> None:
    log_maintenance.rollback(model, 20)
    log_maintenance.rollback(model, 30)
    is_at(read_log(model), known[30])
    done = log_maintenance.resume(model)
    assert (done.published, read_log(model).at.position) == (None, 32)
    is_at(read_log(model), known[30])


def test_a_rollback_that_was_resumed_is_not_in_force_any_more(model: Path, known: dict[int, Values]) -> None:
    log_maintenance.rollback(model, 10)
    log_maintenance.resume(model)
    log_maintenance.rollback(model, 20)
    assert log_maintenance.resume(model).values_of.position == 32
    is_at(read_log(model), known[30])


def test_resume_publishes_nothing_where_newer_values_are_there(trainer: Trainer, model: Path) -> None:
    log_maintenance.rollback(model, 10)
    export_incremental(request(trainer, model))
    newest = values_at(read_log(model))
    assert log_maintenance.resume(model).published is None
    is_at(read_log(model), newest)
    log_maintenance.rollback(model, 10)
    log_maintenance.rollback(model, 20)
    assert log_maintenance.resume(model).values_of.position == 40
    is_at(read_log(model), newest)


def test_resume_can_leave_the_values_as_they_are(model: Path, known: dict[int, Values]) -> None:
    log_maintenance.rollback(model, 10)
    done = log_maintenance.resume(model, lift_only=True)
    assert (done.published, done.values_of.position) == (None, 31)
    assert not read_log(model).hold.is_set
    is_at(read_log(model), known[10])


def test_resume_again_finds_nothing_to_do(model: Path, known: dict[int, Values]) -> None:
    """Whoever was killed, or did not see the answer, may give the command again."""
    log_maintenance.rollback(model, 10)
    position = log_maintenance.resume(model).position
    assert not log_maintenance.resume(model, dry_run=True).was_held
    assert not log_maintenance.resume(model).was_held
    assert read_log(model).at.position == position


def test_a_rollback_by_an_earlier_release_is_resumed(model: Path, known: dict[int, Values]) -> None:
    """It did not say where the log stood before: its delta begins there, as a resumption's does."""
    with log_maintenance._operating(model) as (restorer, staging):
        done = restorer.publish(replace(restorer.resumption_of(20), before=30), staging)
    set_hold(read_log(model), 31)
    manifest = done.path / "manifest.json"
    assert ',"before":30' in manifest.read_text()
    told = manifest.read_text().replace(',"before":30', "")
    manifest.write_text(told.replace('"made":"resume"', '"made":"rollback"'))
    log_maintenance.rollback(model, 10)
    assert log_maintenance.resume(model).values_of.position == 30
    is_at(read_log(model), known[30])


@pytest.mark.parametrize("content", ["", "soon", "99999999999999999999", "-1"])
def test_a_damaged_hold_hinders_nobody_who_sets_it_or_lifts_it(
    model: Path, known: dict[int, Values], content: str
) -> None:
    log = read_log(model)
    log.hold.path.write_text(content)
    with pytest.raises(ManifestError, match="expected a position") as caught:
        log.hold.read()
    assert "resume" in caught.value.hint
    log_maintenance.tidy(model, clock=lambda: 1e12)
    assert log_maintenance.rollback(model, 20).hold == 31
    assert log.hold.read() == 31
    log.hold.path.write_text(content)
    log_maintenance.resume(model)
    assert not log.hold.is_set
    is_at(read_log(model), known[30])


def test_values_that_are_damaged_do_not_come_back(model: Path) -> None:
    """Every delta has rows of every table; the rows to which the rollback leads are the base's."""
    log = read_log(model)
    damage_tensor(log.base.path / VARIABLES_PREFIX, "s/users")
    with pytest.raises(CorruptFile, match="s/users"):
        log_maintenance.rollback(model, 10)
    assert read_log(model).deltas == log.deltas
    assert not read_log(model).hold.is_set


def test_a_hold_that_is_a_pipe_does_not_block(model: Path) -> None:
    log = read_log(model)
    os.mkfifo(log.hold.path)
    with pytest.raises(ManifestError):
        log.hold.read()
    assert log_maintenance.rollback(model, 20).hold == 31


def test_a_lower_hold_stays_until_the_rollback_is_there(model: Path) -> None:
    log = read_log(model)
    set_hold(log, 10)
    with pytest.raises(UsageError):
        log_maintenance.rollback(model, 30)
    assert log.hold.read() == 10
    assert log_maintenance.rollback(model, 20).hold == log.hold.read() == 31


def test_what_killed_rollbacks_of_earlier_releases_left_is_removed(model: Path) -> None:
    log = read_log(model)
    left, other = log.path / ".hold.0123abcd", log.path / ".hold.mine"
    for path in (left, other):
        path.write_text("30\n")
    log_maintenance.rollback(model, 20)
    assert (left.exists(), other.exists()) == (False, True)
    left.write_text("30\n")
    log_maintenance.resume(model)
    assert not left.exists()
    left.write_text("30\n")
    log_maintenance.tidy(model)
    assert not left.exists()


def test_a_rollback_beside_an_exporter_that_never_rests(trainer: Trainer, model: Path) -> None:
    """Nobody is to run the command again."""
    ended = threading.Event()

    def publish() -> None:
        while not ended.is_set():
            trainer.train()
            trainer.parent, trainer.touched = None, {}
            trainer.save()
            export_incremental(request(trainer, model))

    with ThreadPoolExecutor(1) as pool:
        exporting = pool.submit(publish)
        try:
            for _ in range(8):
                to = read_log(model).at.position
                expected = values_at(read_log(model), to)
                while read_log(model).at.position == to:
                    exporting.done() and exporting.result()
                done = log_maintenance.rollback(model, to)
                assert done.hold is not None
                assert_same_bits(values_at(read_log(model), done.hold), expected)
                log_maintenance.resume(model)
        finally:
            ended.set()
        exporting.result(60)


def test_two_operators_at_once_are_one_after_the_other(model: Path, known: dict[int, Values]) -> None:
    with ThreadPoolExecutor(4) as pool:
        rollbacks = [pool.submit(log_maintenance.rollback, model, to) for to in (10, 20, 10, 20)]
        done = [each.result(60) for each in rollbacks]
    log = read_log(model)
    last = max(done, key=lambda each: each.hold or 0)
    assert log.hold.read() == last.hold == log.at.position == 34
    is_at(log, known[last.values_of.position])
    assert log_maintenance.resume(model).values_of.position == 30
    is_at(read_log(model), known[30])


@contextmanager
def no_file_longer_than(bytes_: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("held", [None, 10])
def test_a_full_disk_leaves_log_and_hold_as_they_were(
    model: Path, known: dict[int, Values], held: int | None
) -> None:
    log = read_log(model)
    if held is not None:
        set_hold(log, held)
    for bytes_ in (0, 2, 3, 40, 200, 1000):
        with pytest.raises(DiskFull), no_file_longer_than(bytes_):
            log_maintenance.rollback(model, 20)
        assert (log.hold.read(), read_log(model).at.position) == (held, 30)
    log_maintenance.rollback(model, 20)
    for bytes_ in (0, 100, 1000):
        with pytest.raises(DiskFull), no_file_longer_than(bytes_):
            log_maintenance.resume(model)
        assert (log.hold.read(), read_log(model).at.position) == (31, 31)
    log_maintenance.resume(model)
    is_at(read_log(model), known[30])


def test_resume_needs_no_space_to_lift_a_hold(model: Path) -> None:
    log = read_log(model)
    set_hold(log, 20)
    with no_file_longer_than(0):
        log_maintenance.resume(model)
    assert not log.hold.is_set


def test_a_merger_does_not_lead_servers_past_a_rollback_again(model: Path) -> None:
    log_maintenance.rollback(model, 20)
    log = read_log(model)
    with pytest.raises(ModelHeld, match="would lead servers to 30 again"):
        log_maintenance.merge(model, 10, 30)
    assert read_log(model).deltas == log.deltas
    assert log_maintenance.merge(model) is not None, "to the rollback's own position everybody may go"
    log_maintenance.resume(model)
    assert log_maintenance.merge(model, 10, 30) is not None


def test_what_comes_after_the_delta_is_there_does_not_undo_its_hold(
    model: Path, known: dict[int, Values], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interruption between the delta and the end: servers have it already, and are to go no further."""

    def interrupted(hold: Hold, prepared: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Hold, "settle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        log_maintenance.rollback(model, 10)
    log = read_log(model)
    assert log.at.position == log.hold.read() == 31
    is_at(log, known[10])


def test_a_rollback_lets_nobody_past_a_lower_hold_while_it_works(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_hold(read_log(model), 10)
    held: list[int | None] = []
    publish = restoration.publish_changes

    def noting(log: DeltaLog, *more: Any, **options: Any) -> PublishedDelta:
        held.append(log.hold.read())
        return publish(log, *more, **options)

    monkeypatch.setattr(restoration, "publish_changes", noting)
    log_maintenance.rollback(model, 20)
    assert held == [10]
    assert read_log(model).hold.read() == 31


def test_nothing_is_removed_of_a_log_that_is_held_while_it_is_tidied(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is held may still be taken back, delta by delta."""

    def held_meanwhile(spans: object) -> tuple[()]:
        set_hold(read_log(model), 20)
        return ()

    monkeypatch.setattr(log_maintenance, "merge_due", held_meanwhile)
    monkeypatch.setattr(log_maintenance, "retire_deltas", lambda log, now: pytest.fail("it is held"))
    _, retired = log_maintenance.tidy(model, clock=lambda: 1e12)
    assert retired.removed == ()


def test_a_hold_beyond_every_position_is_none(model: Path) -> None:
    """Positions have 18 digits: a server reads more of them as what nobody can publish."""
    log = read_log(model)
    set_hold(log, 10**18 - 1)
    assert log.hold.read() == 10**18 - 1
    set_hold(log, 10**18)
    with pytest.raises(ManifestError, match="expected a position"):
        log.hold.read()
