"""A model's publications, kept current by a thread that lists its directory after each change."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from msgspec import Struct

from exporter.delta.spans import Span
from exporter.errors import LfsPointer, ManifestError
from exporter.publish.delta_log import LogDelta
from exporter.publish.judge import Habit
from exporter.publish.manifest import overwritten_notes
from exporter.publish.mapped_state import read_ahead
from exporter.publish.model import Model
from exporter.publish.versions import read_manifest
from exporter.storage.arrivals import CHANGED, Arrivals
from exporter.storage.files import FileIdentity, identity_of
from exporter.verify.log import delta_damage
from serving.agent.journal import AgentEvent, EventKind, Journal

_MOST_RECENT = 2000
"""The most publications in the chart of an hour."""
_EVER = datetime.min.replace(tzinfo=timezone.utc)


class FollowedModel(Struct, frozen=True):
    """A model's name on the servers, and its base path for the agent; `is_copy`: `--pull` fetches it."""

    name: str
    path: Path
    is_copy: bool = False


class Publications:
    """The published logs of one model, kept current by a thread; replicas wait here for changes."""

    def __init__(
        self, model: FollowedModel, journal: Journal, poll_s: float, *, reads_ahead: bool = True
    ) -> None:
        self.model = model
        self._journal = journal
        self._poll_s = poll_s
        self._reads_ahead = reads_ahead
        self._changed = threading.Condition()
        self._looking = threading.Lock()
        self._reported = self._untrusted = ""
        self._count = 0
        self._looked = _EVER
        self._examining = threading.Lock()
        self._examined: dict[Path, tuple[FileIdentity | None, ...]] = {}
        self._damage: dict[Path, str] = {}
        self.current = self._listed(None)
        self._learn(self.current)
        if self.current.problem:
            self._report(EventKind.UNSEEN, self.current.problem)
        self._tell_untrusted()

    def wait(self, seen: int, timeout_s: float) -> int:
        """Sleep until there is a change after number `seen`, or for `timeout_s`; return the newest number.

        Changes are numbered from 1. Returns at once if the last change has another number.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._count != seen, timeout_s)
            return self._count

    def overwritten(self) -> str:
        """Return a warning that a trainer wrote into files of the newest version; "" if file times show none.

        It is "", too, for a copy, without a version, and if the version's manifest cannot be read.
        """
        newest = self.current.newest_version
        if newest is None or self.model.is_copy:
            return ""
        version = self.model.path / str(newest)
        with suppress(ManifestError):
            return next(iter(overwritten_notes(read_manifest(version), version)), "")
        return ""

    def wake(self) -> None:
        """Wake all threads in `wait`, as a change does."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def follow(self, stop: threading.Event) -> None:
        """List the directory when something appears in it, at least every `poll_s`, until `stop` is set.

        Changes are reported as `look` does; that the directory cannot be watched, once.
        """
        arrivals = Arrivals(kind=CHANGED)
        while not stop.is_set():
            # Before listing, so that nothing is missed in between.
            if why := arrivals.watch(self.current.places()):
                self._report_once(
                    f"changes under {self.model.path} cannot be watched, so the agent polls: {why}"
                )
            self.look()
            arrivals.wait(self._poll_s, stop)

    def look(self) -> None:
        """List the directory now; report changes as events, and wake all threads in `wait` if there are any.

        With `reads_ahead` a new version's mapped tables are read in a thread.
        """
        with self._looking:  # of two looks at once, the older listing could replace the newer one
            before = self.current
            found = self.current = self._listed(before)
        self._tell_untrusted()
        if found == before:
            return
        self._learn(found)
        if found.problem != before.problem:
            what = EventKind.UNSEEN if found.problem else EventKind.SEEN
            self._report(what, found.problem or f"{self.model.path} can be read again")
        self.wake()
        if self._reads_ahead and found.newest_version not in (None, before.newest_version):
            threading.Thread(target=self._read_ahead, args=(found.newest_version,), daemon=True).start()

    def _learn(self, found: Model) -> None:
        """Update `habit` and `recent` from the listed model, which is slow with thousands of deltas."""
        self.habit, self.recent = Habit.of(found), tuple(found.published[-_MOST_RECENT:])

    def damage(self, lineage: str, delta: Span) -> str:
        """Return the damage of a listed delta's files; "" if there is none, or if they cannot be listed.

        It is also "" for a delta that is not listed. Servers do not name the damaged file, and some only say
        that a function failed. All files are read once, and again when one changes; other calls wait.
        """
        log = self.current.logs.get(lineage)
        if log is None or delta not in log.deltas:
            return ""
        path = LogDelta(log.path, delta.start, delta.end).path
        with self._examining:  # replicas refuse it at the same time
            try:
                files = tuple(map(identity_of, sorted(path.iterdir())))
            except OSError:
                return ""
            if self._examined.get(path) != files:
                self._damage[path], self._examined[path] = delta_damage(path), files
            return self._damage[path]

    def _listed(self, before: Model | None) -> Model:
        """List the model and return it; `before` is the previous listing, None for the first.

        New publications count as published since the last look or, in a copy, at any time.
        """
        since, now = self._looked, datetime.now(timezone.utc)
        found = Model.look(self.model.path, before, since=since)
        if not (self.model.is_copy or found.problem):
            self._looked = now
        return found

    def _tell_untrusted(self) -> None:
        """Report once, as an event, that a publication is not followed: no trusted key has signed it."""
        message = next((error.message for error in self.current.untrusted), "")
        if message != self._untrusted:
            self._untrusted = message
            if message:
                self._report(EventKind.FAILED, f"not followed: {message}")

    def _read_ahead(self, number: int) -> None:
        """Have the kernel read the mapped tables of version `number`, until there is a newer one.

        Errors are ignored.
        """
        version = self.model.path / str(number)
        with suppress(OSError, ManifestError, LfsPointer):  # only an optimization
            record = read_manifest(version).mapped
            if record is not None:
                read_ahead(version, record, lambda: self.current.newest_version == number)

    def _report_once(self, message: str) -> None:
        if message != self._reported:
            self._reported = message
            self._report(EventKind.FAILED, message)

    def _report(self, what: EventKind, message: str) -> None:
        self._journal.write(AgentEvent(what, message, self.model.name))
