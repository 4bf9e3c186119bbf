"""Repeat an export while training goes on: when to look, which errors to survive, when to stop.

An error that another checkpoint or time may repair is reported once, and the watch continues, with longer
pauses while nothing changes. An error that only a person can repair (the graph, its mapping, options,
permissions, a log that ends) ends the watch, as it would end every further try. A hold is reported once and
waited out: lifting it needs no command to the watch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Generic, TypeVar

from msgspec import Struct

from exporter.errors import (
    ExportError,
    GraphError,
    LinkRefused,
    ManifestError,
    MappingError,
    ModelHeld,
    PositionError,
    PositionMoved,
    TargetNotWritable,
    UnsafeArchive,
    UnsupportedFormat,
    UsageError,
    VersionExists,
    as_export_error,
)
from exporter.options import FOLLOWING, Option
from exporter.options.given import Given, parse_duration
from exporter.terminal.progress import count

T = TypeVar("T")

_FOR_A_PERSON = (
    UsageError,
    GraphError,
    MappingError,
    PositionError,
    ManifestError,
    TargetNotWritable,
    LinkRefused,
    VersionExists,
    UnsafeArchive,
    UnsupportedFormat,
)
_LONGEST_PAUSE_SECONDS = 30.0  # a person who repairs the cause waits at most this long for the next look


_ENDS = {
    "2h": "after this time: 90 (seconds), 15m, 2h, 1d",
    "step=N": "once this step is published",
    "count=N": "after N publications",
    "idle=1h": "after this time without news",
}


class WatchProgress(Struct, frozen=True):
    """The progress of a watch: the number of its publications, the published step, and its seconds until now.

    `step` is None while no publication is known; `idle_seconds` counts since the last publication, or since
    the watch began.
    """

    count: int = 0
    step: int | None = None
    seconds: float = 0.0
    idle_seconds: float = 0.0


class StopWhen(Given, frozen=True, repr_omit_defaults=True):
    """Conditions that end a watch, whichever is met first; by default none.

    After a time; after a number of publications; once a step is published (training's planned end); once
    there was nothing to publish for a while (as after the training died).
    """

    after_seconds: float = math.inf
    count: float = math.inf
    step: float = math.inf
    idle_seconds: float = math.inf

    @classmethod
    def parse(cls, option: str, texts: Sequence[str]) -> StopWhen:
        """Return the limits that texts such as `2h`, `step=1000`, `count=5` and `idle=1h` name.

        Of two texts of one kind the last counts. Raises UsageError, which names `option`, for other texts.
        """
        limits: dict[str, float] = {}
        for text in texts:
            name, equals, value = text.rpartition("=")
            if not equals:
                limits["after_seconds"] = parse_duration(option, text)
            elif name == "idle":
                limits["idle_seconds"] = parse_duration(option, value)
            elif name in ("count", "step") and value.isdecimal() and int(value) >= (name == "count"):
                limits[name] = int(value)
            else:
                raise UsageError(f"{option} {text!r} names no end", hint=f"one of {', '.join(_ENDS)}")
        return cls(**limits)

    def is_met(self, progress: WatchProgress) -> bool:
        """True if the watch should end now: one of the limits is reached."""
        is_at_step = progress.step is not None and progress.step >= self.step
        return progress.count >= self.count or is_at_step or self.seconds_left(progress) <= 0

    def why(self, progress: WatchProgress) -> str:
        """Return a phrase for people on the limit that ended a watch; one of the limits must be reached."""
        if progress.count >= self.count:
            return f"{count(progress.count, 'publication')}, as --until says"
        if progress.step is not None and progress.step >= self.step:
            return f"step {progress.step} is published, as --until says"
        if progress.idle_seconds >= self.idle_seconds:
            return f"nothing new for {self.idle_seconds:g} s, as --until says"
        return f"{self.after_seconds:g} s are over, as --until says"

    def seconds_left(self, progress: WatchProgress) -> float:
        """Return the seconds until a watch ends if nothing more is published; not positive if it should end.

        Infinite if no limit is a time.
        """
        return min(self.after_seconds - progress.seconds, self.idle_seconds - progress.idle_seconds)


class Watching(Given, frozen=True, repr_omit_defaults=True):
    """Settings of a watch: look every `interval_seconds`, until `stop`."""

    interval_seconds: Annotated[
        float,
        Option(
            "Longest pause of --watch between looks.",
            FOLLOWING,
            name="--interval",
            metavar="SECONDS",
            least=0.05,
            goes_with="--watch",
        ),
    ] = 1.0
    stop: Annotated[
        StopWhen,
        Option(
            "End --watch at the first of these; repeatable:",
            FOLLOWING,
            name="--until",
            metavar="2h|step=N",
            words=_ENDS,
            goes_with="--watch",
            typed=tuple[str, ...],
            parse=StopWhen.parse,
        ),
    ] = StopWhen()

    def pause_seconds(self, progress: WatchProgress, failures: int) -> float:
        """Return the seconds until the next look: doubled for each failure, but never beyond the watch's end.

        `failures` is the number of failed looks in a row; for them the pause grows to at most 30 s, or the
        interval if that is longer.
        """
        # At most 30, as 2.0 ** 1024 is an OverflowError.
        slower = min(self.interval_seconds * 2.0 ** min(failures, 30), _LONGEST_PAUSE_SECONDS)
        return max(0.0, min(max(self.interval_seconds, slower), self.stop.seconds_left(progress)))


EVERY_SECOND = Watching()
"""Look every second, until an error or an interrupt ends the watch."""


class Poll(Struct, Generic[T], frozen=True):
    """The result of one look: `done` is the publication, None if there was nothing new.

    `step` is the training step that is published now.
    """

    done: T | None
    step: int | None


def is_for_a_person(error: ExportError) -> bool:
    """True if neither time nor the next checkpoint repairs the error, so that it ends a watch."""
    return isinstance(error, _FOR_A_PERSON) and not isinstance(error, PositionMoved | ModelHeld)


def follow(
    look: Callable[[], Poll[T]],
    watching: Watching,
    tell: Callable[[ExportError], None],
    *,
    ended: Callable[[str], None] = lambda why: None,
    looked: Callable[[ExportError | None], None] = lambda error: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[T]:
    """Look repeatedly until the watch ends, and yield each look's publication.

    `watching` has the pauses and the limits that end the watch. Nothing is done before the first item is
    asked for. `tell` gets each error that the watch survives, the same message once in a row; `looked` the
    error of each look, or None, after its publication was yielded; `ended` the reason why it ends, unless an
    error ends it. `clock` returns seconds, and `sleep` waits for a number of seconds. When the time is over,
    there is one last look.

    Raises:
        ExportError: of a look, if only a person can repair it; or, when a limit ends the watch, the error of
            the last look, unless time may repair it (`may_pass`).
    """
    began = last = clock()
    progress, said, failures = WatchProgress(), "", 0
    while True:
        failure = None
        try:
            found = look()
        except (ExportError, OSError) as caught:
            error = as_export_error(caught)
            if is_for_a_person(error):
                raise
            if error.message != said:
                said = error.message
                tell(error)
            failure = None if error.may_pass else error
            is_repeated = failure is not None and not isinstance(failure, ModelHeld)  # that ends at any time
            failures = failures + 1 if is_repeated else 0
            looked(error)
        else:
            said, failures = "", 0
            progress = WatchProgress(progress.count + (found.done is not None), found.step)
            if found.done is not None:
                yield found.done
                last = clock()  # after the caller's work with the publication, which is not idleness
            looked(None)
        now = clock()
        progress = WatchProgress(progress.count, progress.step, now - began, now - last)
        if watching.stop.is_met(progress):
            if failure is not None:
                raise failure
            ended(watching.stop.why(progress))
            return
        sleep(watching.pause_seconds(progress, failures))
