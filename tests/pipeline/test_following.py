"""When a watch looks, what it outlives and when it stops, as decisions on values."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from exporter import errors
from exporter.errors import ExportError
from exporter.pipeline.watch_loop import (
    Poll,
    StopWhen,
    Watching,
    WatchProgress,
    follow,
    is_for_a_person,
    parse_duration,
)

NEVER = StopWhen()


@pytest.mark.parametrize(
    ("stop", "before", "there"),
    [
        (StopWhen(after_seconds=60), WatchProgress(seconds=59), WatchProgress(seconds=60)),
        (StopWhen(count=2), WatchProgress(count=1), WatchProgress(count=2)),
        (StopWhen(step=300), WatchProgress(step=299), WatchProgress(step=300)),
        (StopWhen(step=0), WatchProgress(step=None), WatchProgress(step=0)),
        (StopWhen(idle_seconds=5), WatchProgress(seconds=90, idle_seconds=4), WatchProgress(idle_seconds=5)),
        (StopWhen(count=3, step=9), WatchProgress(count=2, step=8), WatchProgress(count=2, step=9)),
    ],
)
def test_a_watch_stops(stop: StopWhen, before: WatchProgress, there: WatchProgress) -> None:
    assert (stop.is_met(before), stop.is_met(there)) == (False, True)
    assert not NEVER.is_met(there)


@pytest.mark.parametrize(
    ("watching", "progress", "failures", "seconds"),
    [
        (Watching(2), WatchProgress(), 0, 2),
        (Watching(2), WatchProgress(), 1, 4),
        (Watching(2), WatchProgress(), 3, 16),
        (Watching(2), WatchProgress(), 4, 30),
        (Watching(2), WatchProgress(), 10**9, 30),
        (Watching(90), WatchProgress(), 2, 90),
        (Watching(2, StopWhen(after_seconds=10)), WatchProgress(seconds=9), 3, 1),
        (Watching(2, StopWhen(idle_seconds=10)), WatchProgress(idle_seconds=9.5), 0, 0.5),
        (Watching(2, StopWhen(after_seconds=10)), WatchProgress(seconds=11), 0, 0),
    ],
)
def test_pauses_grow_with_failures_and_end_with_the_watch(
    watching: Watching, progress: WatchProgress, failures: int, seconds: float
) -> None:
    assert watching.pause_seconds(progress, failures) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1.5", 1.5), ("0", 0), ("45s", 45), ("15m", 900), ("2h", 7200), ("1d", 86400)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration("--until", text) == seconds


@pytest.mark.parametrize(
    "text", ["", "-1", "soon", "1 h", "1h30m", "1w", "nan", "inf", "٣", "9" * 12, "99999d"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(errors.UsageError, match="--until"):
        parse_duration("--until", text)


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        (errors.CheckpointNotFound, False),
        (errors.CheckpointChanged, False),
        (errors.MissingShard, False),
        (errors.TruncatedFile, False),
        (errors.CorruptFile, False),
        (errors.DiskFull, False),
        (errors.TargetBusy, False),
        (errors.PublishError, False),
        (errors.PositionMoved, False),
        (errors.VerificationError, False),
        (errors.UsageError, True),
        (errors.RoleUnknown, True),
        (errors.BuilderError, True),
        (errors.MissingTensors, True),
        (errors.ShapeMismatch, True),
        (errors.SchemaChanged, True),
        (errors.ManifestError, True),
        (errors.TargetNotWritable, True),
        (errors.VersionExists, True),
        (errors.UnsafeArchive, True),
    ],
)
def test_errors_that_only_a_person_mends_end_a_watch(kind: type[ExportError], ends: bool) -> None:
    assert is_for_a_person(kind("x")) is ends


# --- the loop ----------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """A clock that only sleeping moves."""

    now: float = 1000.0
    slept: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)


@dataclass
class Script:
    """What looks find, one after another; then nothing more."""

    steps: list[int | Exception | None]
    told: list[str] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    newest: int | None = None

    def look(self) -> Poll[int]:
        found = self.steps.pop(0) if self.steps else None
        if isinstance(found, Exception):
            raise found
        self.newest = self.newest if found is None else found
        return Poll(found, self.newest)

    def run(self, watching: Watching) -> Iterator[int]:
        tell: Callable[[ExportError], None] = lambda error: self.told.append(error.message)  # noqa: E731
        return follow(self.look, watching, tell, clock=lambda: self.clock.now, sleep=self.clock.sleep)


def test_what_the_system_refuses_is_outlived() -> None:
    refused = OSError(errno.EROFS, "Read-only file system", "/models/ranker/.lock")
    script = Script([refused, refused, 10])
    assert list(script.run(Watching(1, StopWhen(count=1)))) == [10]
    assert script.told == ["cannot reach /models/ranker/.lock"]


def test_each_publication_is_yielded_until_the_count() -> None:
    script = Script([None, 10, None, 20, 30])
    assert list(script.run(Watching(1, StopWhen(count=2)))) == [10, 20]
    assert script.clock.slept == [1, 1, 1]


def test_the_end_of_training_is_a_step_or_silence() -> None:
    assert list(Script([10, 20, 30]).run(Watching(1, StopWhen(step=15)))) == [10, 20]
    script = Script([10, None, None, 20])
    assert list(script.run(Watching(1, StopWhen(idle_seconds=5)))) == [10, 20]
    assert script.clock.now == 1008, "five seconds after the last"


def test_a_step_that_is_published_already_ends_a_watch_that_has_nothing_to_do() -> None:
    script = Script([None], newest=40)
    assert list(script.run(Watching(1, StopWhen(step=40)))) == []


def test_a_last_look_is_taken_when_the_time_is_over() -> None:
    script = Script([None, None, None, 10])
    assert list(script.run(Watching(2, StopWhen(after_seconds=5)))) == [10]
    assert script.clock.slept == [2, 2, 1]


def test_errors_are_told_once_and_outlived() -> None:
    waiting, damaged = errors.CheckpointNotFound("nothing yet"), errors.CorruptFile("damaged")
    script = Script([waiting, waiting, damaged, damaged, damaged, 10, damaged, 20])
    assert list(script.run(Watching(1, StopWhen(count=2)))) == [10, 20]
    assert script.told == ["nothing yet", "damaged", "damaged"]
    assert script.clock.slept == [1, 1, 2, 4, 8, 1, 2], "slower after failures, not while waiting"


def test_a_watch_that_ends_in_failure_says_so() -> None:
    script = Script([10, errors.CorruptFile("damaged"), errors.CorruptFile("damaged")])
    with pytest.raises(errors.CorruptFile):
        list(script.run(Watching(1, StopWhen(after_seconds=2))))
    waited = Script([errors.CheckpointNotFound("nothing yet")] * 9)
    assert list(waited.run(Watching(1, StopWhen(after_seconds=2)))) == []


def test_what_needs_a_person_ends_a_watch_at_once() -> None:
    script = Script([errors.MissingTensors("no tensor"), 10])
    with pytest.raises(errors.MissingTensors):
        list(script.run(Watching(1)))
    assert (script.told, script.clock.slept) == ([], [])


def test_nothing_stops_a_watch_unless_told() -> None:
    assert not NEVER.is_met(WatchProgress(10**6, 10**9, 10**9, 10**9))
    assert NEVER.seconds_left(WatchProgress()) == math.inf
