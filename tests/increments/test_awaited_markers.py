"""Between a full checkpoint and the hook's marker of it: a moment in which nothing is compared."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from exporter.checkpoint.tensor_bundle import index_path
from exporter.increments.history import CheckpointMarker, History
from exporter.increments.increment import CheckpointId
from exporter.increments.trained import TrainerVersion
from exporter.options import ExportRequest
from exporter.pipeline.incremental import ExportedDelta
from exporter.publish.delta_log import read_log
from exporter.publish.manifest import DeltaEntry, DeltaOrigin
from tests.support.agents import Published
from tests.support.commands import export_model
from tests.support.increments import A, checkpoint
from tests.support.publishing import delta_of

NOON = datetime(2026, 1, 31, 12, 0, tzinfo=timezone.utc)
LONG_S, SHORT_S = 60.0, 0.3
CLOCKS = {"": 0, "400 days behind": -400, "20 years ahead": 7300}


@pytest.fixture
def published(tmp_path: Path) -> Published:
    """A base and a delta of an increment; the trainer goes on."""
    published = Published(tmp_path, event_time=lambda: NOON)
    published.publish()
    published.trainer.train()
    return published


def save(published: Published, days_off: int = 0) -> None:
    """The saver has named a full checkpoint, and the hook not come to it; by clocks that differ from ours."""
    trainer = published.trainer
    assert trainer.session is not None
    trainer.save_files(trainer.session.variables)
    at = (datetime.now(timezone.utc) + timedelta(days=days_off)).timestamp()
    os.utime(index_path(trainer.directory / trainer.named), (at, at))


def mark(published: Published) -> None:
    """The hook has come to it."""
    session = published.trainer.session
    assert session is not None
    session.publisher.notice(published.trainer.step)


def looked(published: Published, *, is_watching: bool, seconds: float = LONG_S) -> ExportedDelta:
    request = ExportRequest(published.trainer.directory, published.model)
    return delta_of(request, is_watching=is_watching, marker_seconds=seconds)


def made(published: Published) -> tuple[DeltaOrigin, datetime | None]:
    """How the newest delta was made, and the time of its newest event."""
    entry = read_log(published.model).newest.manifest.incremental
    assert isinstance(entry, DeltaEntry)
    return entry.made, entry.trained.newest_event


def after(seconds: float, happening: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, happening)
    timer.start()
    return timer


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_watch_waits_for_the_marker_and_then_for_the_increment(published: Published, clock: str) -> None:
    save(published, CLOCKS[clock])
    assert looked(published, is_watching=True).published is None
    mark(published)
    assert looked(published, is_watching=True).published is None
    published.trainer.train()
    published.trainer.increment()
    done = looked(published, is_watching=True)
    assert (done.compared_bytes, made(published)) == (0, (DeltaOrigin.INCREMENTS, NOON))


def test_a_watch_that_a_user_starts_does_so(published: Published) -> None:
    def go_on() -> None:
        mark(published)
        published.trainer.train()
        published.trainer.increment()

    save(published)
    coming = after(1.0, go_on)
    done = export_model(*published.arguments(), "--watch", "--until", "count=1", "--json")
    coming.join()
    assert done.code == 0, done.err
    assert (done.document["compares"], made(published)[1]) == (False, NOON)


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_single_export_waits_and_knows_why_it_compares(published: Published, clock: str) -> None:
    """No increment follows: all rows are compared, but with the marker's event time and the true reason."""
    save(published, CLOCKS[clock])
    coming = after(0.5, lambda: mark(published))
    done = export_model(*published.arguments(), "--json")
    coming.join()
    assert done.code == 0, done.err
    assert "no increment tells yet what changed until" in done.document["why"]
    assert made(published) == (DeltaOrigin.COMPARISON, NOON)


def test_a_trainer_that_died_stalls_nothing_for_long(published: Published) -> None:
    save(published)
    published.trainer.kill()
    assert looked(published, is_watching=True, seconds=SHORT_S).published is None
    time.sleep(SHORT_S)
    found = looked(published, is_watching=True, seconds=SHORT_S)
    assert found.published is not None
    assert "nothing says where model.ckpt-" in found.plan.trainer.plan.reason


def test_a_trainer_without_its_hook_is_waited_for_once(published: Published) -> None:
    trainer = published.trainer
    for seconds in (SHORT_S, LONG_S):
        save(published)
        began = time.monotonic()
        assert looked(published, is_watching=False, seconds=seconds).published is not None
        assert time.monotonic() - began < LONG_S / 2
        trainer.train()
    save(published)
    assert looked(published, is_watching=True).published is not None


def test_a_checkpoint_that_is_named_and_not_the_newest_is_not_waited_for(published: Published) -> None:
    save(published)
    older = published.trainer.directory / published.trainer.named
    published.trainer.train()
    save(published)
    request = ExportRequest(older, published.model)
    done = delta_of(request, marker_seconds=10 * LONG_S)
    assert done.published is not None


def marked(at: CheckpointId) -> CheckpointMarker:
    return CheckpointMarker(checkpoint=at, run=A.increment.run, after=None, is_equal=False)


OLD, NEW = checkpoint(10), checkpoint(25)
AWAITED = {
    "no hook was ever here": (History(), TrainerVersion(OLD), False),
    "an increment was published": (History((A,)), TrainerVersion(OLD, A.increment.id), True),
    "a full one that the hook had marked": (History((), (marked(OLD),)), TrainerVersion(OLD), True),
    "one that it had not": (History((A,)), TrainerVersion(OLD), False),
    "it is marked": (History((A,), (marked(NEW),)), TrainerVersion(OLD, A.increment.id), False),
}


@pytest.mark.parametrize("case", AWAITED)
def test_whether_a_marker_may_come(case: str) -> None:
    history, before, expected = AWAITED[case]
    assert history.awaits_marker(NEW, before.state) is expected
