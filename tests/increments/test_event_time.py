"""The time of the newest event that was trained on: from the trainer to every delta, base and replica."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.delta.spans import plan_chain
from exporter.increments.history import read_history
from exporter.increments.increment import CheckpointId
from exporter.increments.trained import TrainerVersion
from exporter.publish.delta_log import read_log
from exporter.training import MonitoredTrainingSession
from exporter.training.trainer_side import EventClock
from exporter.wire.json_documents import encode
from tests.support.agents import Published
from tests.support.commands import export_model

NOON = datetime(2026, 1, 31, 12, 0, tzinfo=timezone.utc)
TOLD: dict[str, tuple[Any, datetime | None]] = {
    "a time": (NOON, NOON),
    "another zone": (NOON.astimezone(timezone(timedelta(hours=5))), NOON),
    "seconds": (NOON.timestamp(), NOON),
    "a feature's values": (np.array([[1.0], [NOON.timestamp()]]), NOON),
    "nothing yet": (None, None),
    "a variable that nobody has set": (np.int64(0), None),
    "no rows": (np.zeros([0]), None),
    "no zone": (NOON.replace(tzinfo=None), None),
    "milliseconds": (NOON.timestamp() * 1000, None),
    "not a number": (float("nan"), None),
    "a text": ("yesterday", None),
    "ahead of every clock": (datetime.max.replace(tzinfo=timezone.utc), None),
}


@pytest.mark.parametrize("case", TOLD)
def test_a_function_tells_the_event_time(case: str, caplog: pytest.LogCaptureFixture) -> None:
    value, expected = TOLD[case]
    clock = EventClock(lambda: value)
    assert clock.read(None) == expected
    assert clock.read(None) == expected
    is_wrong = case in ("no zone", "milliseconds", "not a number", "a text", "ahead of every clock")
    assert len(caplog.records) == is_wrong, "it is said once"


def test_clocks_may_differ_a_little(caplog: pytest.LogCaptureFixture) -> None:
    """An event of next year would count as the newest one until then, whatever is trained meanwhile."""
    ahead = iter([NOON + timedelta(minutes=4), NOON + timedelta(days=365), NOON + timedelta(days=366), NOON])
    clock = EventClock(lambda: next(ahead), now=NOON.timestamp)
    assert [clock.read(None) for _ in range(4)] == [NOON + timedelta(minutes=4), None, None, NOON]
    assert len(caplog.records) == 1, "it is said once, whatever the time is"


def test_a_function_that_fails_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    assert EventClock(lambda: 1 // 0).read(None) is None
    assert "ZeroDivisionError" in caplog.text


def test_a_variable_tells_it_where_it_can_be_read(caplog: pytest.LogCaptureFixture) -> None:
    """An eager one always, one of a graph in a session alone."""
    assert EventClock(tf.Variable(NOON.timestamp(), dtype=tf.float64)).read(None) == NOON
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        newest = tf.compat.v1.get_variable("newest", [], tf.float64)
        clock = EventClock(newest)
        assert clock.read(None) is None
        session.run(newest.assign(NOON.timestamp()))
        assert clock.read(session) == NOON
    assert not caplog.records


def test_without_one_it_is_the_time_of_the_newest_step() -> None:
    times = iter([100.0, 200.0, 300.0])
    clock = EventClock(now=lambda: next(times))
    clock.begin(7)
    clock.notice(7)
    assert clock.read(None) is None, "what was restored was trained at another time"
    clock.notice(8)
    clock.notice(8)
    assert clock.read(None) == datetime.fromtimestamp(100, timezone.utc)
    clock.notice(9)
    assert clock.read(None) == datetime.fromtimestamp(200, timezone.utc)


def test_the_hook_reads_a_variable_that_training_writes(tmp_path: Path) -> None:
    """Each step sees a later event; an increment says which was the newest of the steps that it covers."""
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        table = v1.get_variable("table", [4, 2], use_resource=True)
        newest = v1.get_variable("newest_event", [], tf.float64, v1.zeros_initializer(), trainable=False)
        loss = tf.reduce_sum(v1.nn.embedding_lookup(table, [0]))
        trained = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.control_dependencies([trained, newest.assign_add(1000.0)]):
            train_op = v1.assign_add(step, 1)
        with MonitoredTrainingSession(
            checkpoint_dir=str(tmp_path),
            save_checkpoint_steps=100,
            save_increment_steps=2,
            event_time=newest,
        ) as session:
            for _ in range(7):
                session.run(train_op)
    found = [stored.increment for stored in read_history(tmp_path).increments]
    assert len(found) > 2
    for increment in found:
        assert increment.event_time == datetime.fromtimestamp(1000.0 * increment.to_step, timezone.utc)


def test_what_is_not_known_is_not_written() -> None:
    checkpoint = CheckpointId("model.ckpt-1", 1, "0" * 64)
    assert b"event_time" not in encode(TrainerVersion(checkpoint))
    known = TrainerVersion.of(checkpoint, None, NOON)
    assert b'"event_time":"2026-01-31T12:00:00Z"' in encode(known)
    assert known.newest_event == NOON


NOW: list[datetime | None] = [None]
"""What the trainer of `published` says is its newest event."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """A base without a known event time, and five deltas, of events an hour apart."""
    published = Published(tmp_path_factory.mktemp("events"), event_time=lambda: NOW[0])
    for hour in range(5):
        NOW[0] = NOON + timedelta(hours=hour)
        published.publish()
    return published


def test_deltas_mergers_rollbacks_and_resumptions_keep_their_own(published: Published) -> None:
    model = published.model
    log = read_log(model)
    chain = plan_chain(log.deltas, log.base.at.position)
    hours = [NOON + timedelta(hours=hour) for hour in range(5)]
    assert [delta.entry.trained.newest_event for delta in chain] == hours
    merged = export_model("merge", model, "--from", chain[1].start, "--to", chain[3].end)
    assert merged.code == 0, merged.err
    (merger,) = [delta for delta in read_log(model).deltas if delta.merged_count > 1]
    assert merger.entry.trained.newest_event == hours[3]
    assert export_model("rollback", model, "--to", chain[0].end).code == 0
    assert read_log(model).trained.newest_event == hours[0]
    assert export_model("resume", model).code == 0
    assert read_log(model).trained.newest_event == hours[4]
    published.publish("--new-base=merged")
    assert read_log(model).base.entry.trained.newest_event == hours[4], "a base made of deltas has it, too"
    document = export_model("history", model, "--json").document
    assert datetime.fromisoformat(document["events"][-1]["event_time"]) == hours[4]
    assert "trained on events up to 2026-01-31 16:00:00" in " ".join(
        export_model("history", model).out.split()
    )
    text = (read_log(model).newest.path / "manifest.json").read_text()
    assert '"event_time":"2026-01-31T16:00:00Z"' in text


def test_older_events_than_before_are_no_news(published: Published) -> None:
    """A trainer that reads a late event after newer ones has still been trained on the newer ones."""
    before = read_log(published.model).trained.newest_event
    NOW[0] = NOON - timedelta(days=1)
    published.publish()
    assert read_log(published.model).trained.newest_event == before


def test_a_base_has_the_time_of_its_checkpoint(tmp_path: Path) -> None:
    """A full checkpoint that the hook saw written; one from before it began has none."""
    published = Published(tmp_path)
    assert read_log(published.model).base.entry.trained.newest_event is None
    before = datetime.now(timezone.utc)
    published.trainer.train()
    published.trainer.save()
    done = export_model(
        *[part for part in published.arguments() if part != "--incr"], "--new-base=always", "--again"
    )
    assert done.code == 0, done.err
    found = read_log(published.model).base.entry.trained.newest_event
    assert found is not None
    assert before <= found <= datetime.now(timezone.utc)
