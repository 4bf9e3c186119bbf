"""A published model, by one listing of its directories; each manifest is read once.

`Model.read` raises if there is nothing to read. `Model.look` is for callers that look repeatedly, as the
agent does: it never raises, and keeps the manifests it has read.

`publications` are all versions and deltas in the order of positions, also of logs that have ended: `history`
prints them. `logs` are those with an existing base, each as servers see it: its deltas and its hold.
Retention may have removed some publications; a merged delta says how many it holds.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from exporter.delta.deviation import Budgeted, LeftOut, WildRows
from exporter.delta.spans import Position, Span, furthest
from exporter.errors import (
    ExportError,
    ManifestError,
    NothingChanged,
    NotTrusted,
    NotUpdatable,
    VerificationError,
)
from exporter.newer_python import StrEnum
from exporter.publish.delta_log import DeltaLog, LogBase, LogDelta, list_deltas, log_path
from exporter.publish.hold import HeldAt, HeldBy, Hold
from exporter.publish.manifest import BaseEntry, DeltaEntry, DeltaOrigin, Manifest, ManifestHead
from exporter.publish.tags import ListedTag, listed_tags
from exporter.publish.variable_change import VariableChange
from exporter.publish.versions import (
    MAX_MANIFEST_BYTES,
    VersionDir,
    log_directories,
    newest_of,
    nothing_published,
    read_head,
    read_manifest,
    require_signed_bytes,
    trust_of,
    version_dirs,
)
from exporter.storage.files import FileIdentity, is_gone, read_record
from exporter.storage.layout import DELTAS_DIRECTORY, MANIFEST_FILE

_MOST_COMMITS = 20_000
_LAST_PUBLISHERS = 16
_OF_PERSONS = frozenset({DeltaOrigin.MERGE, DeltaOrigin.ROLLBACK, DeltaOrigin.RESUME})
"""Deltas that a person publishes, maybe from another machine than the exporter's."""


class PublicationKind(StrEnum):
    """The kind of an event; a `version` takes no deltas, a `rebase` is a base in the middle of its log."""

    VERSION = "version"
    BASE = "base"
    REBASE = "rebase"
    DELTA = "delta"
    MERGE = "merge"
    ROLLBACK = "rollback"
    RESUME = "resume"
    DAMAGED = "damaged"


class Event(Struct, frozen=True):
    """A publication; of a damaged one only the name is known."""

    what: PublicationKind
    """`version` (takes no deltas), `base`, `rebase`, `delta`, `merge`, `rollback`, `resume` or `damaged`."""
    path: Path
    """Its directory."""
    position: int
    """The position of a server after loading or applying it."""
    from_position: int | None = None
    """The position at which a delta starts; null for a version."""
    created: datetime | None = None
    """The time of publication; null if damaged."""
    publisher: str | None = None
    """Who published it, as `user@machine`; null if that is not recorded."""
    step: int | None = None
    """The training step of its values."""
    log: int | None = None
    """The log to which it belongs; null if it belongs to none."""
    checkpoint: str = ""
    """The checkpoint from which it was made."""
    rows: int | None = None
    """The number of rows in a delta."""
    compared: bool = False
    """True if a delta's rows were found by comparing checkpoints."""
    parts: int = 1
    """The number of publications that a merger holds."""
    merged_away: int = 0
    """The number of those that no longer exist by themselves."""
    merged_into: str | None = None
    """The longest merger that spans this delta, as START-END; null if there is none."""
    back_to: int | None = None
    """The position or version whose values a rollback or resumption brought back."""
    reason: str = ""
    """The reason that was given; empty if none was."""
    is_past_hold: bool = False
    """True if it is beyond the hold, so that servers do not go there by themselves."""
    is_current: bool = True
    """False if it belongs to a log that has ended."""
    problem: str = ""
    """The damage; empty if there is none."""
    event_time: datetime | None = None
    """The time of the newest event in the training data of its values; null if unknown."""
    left_out: LeftOut | None = None
    """Rows that are held back, and by how much the served values differ from the trainer's."""
    budget: Budgeted | None = None
    """A delta's use of its budget; null if it had none."""
    wild: tuple[WildRows, ...] = ()
    """Its rows beyond `--max-norm`, by table."""
    tags: tuple[str, ...] = ()
    """The tags that name its position."""
    changes: tuple[VariableChange, ...] | None = None
    """A delta's changes, with `--changes`; null if they were not asked for, or cannot be read."""


class Published(Struct, frozen=True):
    """A publication's time, training step and position, from its manifest.

    `event_time` is the time of the newest event in its training data; None if unknown. A delta has `rows` and
    `bytes_`. `is_rollback`: it restored earlier values.
    """

    created: datetime
    step: int | None
    event_time: datetime | None = None
    rows: int | None = None
    bytes_: int | None = None
    is_rollback: bool = False
    position: int = 0


class Rollback(Struct, frozen=True):
    """A published rollback: the delta, or base, at `position` restores the values of `back_to`.

    `is_canary`: a canary made it, because it rejected the values before.
    """

    position: int
    back_to: int
    reason: str
    is_canary: bool = False


class Log(Struct, frozen=True, dict=True):
    """A log at one time: its deltas, and its hold as the limit of all replicas.

    `limit` is the position of the hold; None without one, and -1 if it cannot be read, which stops all
    replicas. `bound` is the position of the store's hold behind a canary's, which the canary may not pass
    either; None without one. `is_canary`: the limit is a position that a canary approved. `held_by` says who
    set the hold, why and when; None if that is not known. `base` is the position of the log's newest base,
    `rollback` the rollback at which the log is held.

    `path` is the directory of its deltas, which need not exist; `begun` is when the oldest existing base was
    published. `commits` has the first publication at each position, also of deltas that retention has
    removed: a replica may still be there. `sizes` are those of deltas, in bytes.
    """

    lineage: str
    deltas: tuple[Span, ...] = ()
    limit: int | None = None
    is_canary: bool = False
    base: int = 0
    rollback: Rollback | None = None
    path: Path = Path()
    begun: datetime | None = None
    commits: Mapping[int, Published] = field(default_factory=dict)
    sizes: Mapping[Span, int] = field(default_factory=dict)
    held_by: HeldBy | None = None
    bound: int | None = None

    @property
    def number(self) -> int:
        """The position of its first base, which names its directory; ValueError if `path` is not a log's."""
        return int(self.path.name)

    def up_to(self, position: int) -> Log:
        """Return the log with `position` as its limit in place of its hold.

        For a call that names a position: the hold does not apply to it.
        """
        return replace(self, limit=position)

    def reach(self, position: int, *, without: Collection[Span] = ()) -> tuple[Span, ...]:
        """Return the deltas, in order, that bring a state at `position` as far as the log's limit allows.

        Empty if none applies. Deltas in `without` are not used.
        """
        within = [span for span in self.beyond(position) if self._allows(span.end) and span not in without]
        return furthest(within, position)

    @property
    def within(self) -> list[Span]:
        """The deltas within the limit, in the order of `deltas`."""
        return [span for span in self.deltas if self._allows(span.end)]

    def fitting(self, position: int, without: Collection[Span] = ()) -> list[Span]:
        """The deltas within the log's limit that apply to a state at `position`, except those in `without`.

        They are sorted by their ends.
        """
        beyond = (span for span in self.beyond(position) if self._allows(span.end))
        return [span for span in beyond if span.accepts(position) and span not in without]

    def beyond(self, position: int) -> Sequence[Span]:
        """Return the deltas that end beyond `position`, whatever the limit, sorted by their ends.

        They are usually few of the thousands there are.
        """
        return self._by_end[bisect_right(self._by_end, position, key=lambda span: span.end) :]

    @cached_property
    def _by_end(self) -> list[Span]:
        return sorted(self.deltas, key=lambda span: span.end)

    def _allows(self, position: int) -> bool:
        return self.limit is None or position <= self.limit

    @property
    def newest(self) -> int:
        """The greatest end of a delta within the limit; -1 if there is none."""
        return next((span.end for span in reversed(self._by_end) if self._allows(span.end)), -1)

    @property
    def last(self) -> int:
        """The greatest position of the newest base and all deltas, whatever the limit."""
        return max([self.base, *(span.end for span in self._by_end[-1:])])

    @property
    def released(self) -> int:
        """The position of a server after the newest base and all deltas within the limit."""
        return max(self.newest, self.base)

    @property
    def waiting(self) -> int:
        """The number of positions beyond `released` at which deltas end."""
        return len({span.end for span in self.beyond(self.released)})

    def created(self, spans: Iterable[Span]) -> list[datetime]:
        """The times at which these deltas were published, in their order; unknown ones are left out."""
        found = (self.commits.get(span.end) for span in spans)
        return [commit.created for commit in found if commit is not None]

    def size(self, spans: Iterable[Span]) -> int:
        """Return the total size of these deltas in bytes; a delta of unknown size counts as 0."""
        return sum(self.sizes.get(span, 0) for span in spans)


class _Known(Struct):
    """The manifests of one model, kept from one reading to the next.

    Another model may take its place: a base counts as long as its manifest is the same file. What is read now
    appeared after `since`, by this machine's clock; None: times are the publisher's. `skew_s` is the least by
    which the publisher's clock was ahead at the newest publication, in seconds; negative: behind.
    `publishers` are the users that last published a trainer's values, by position.
    """

    bases: dict[Path, tuple[FileIdentity, LogBase | None]] = field(default_factory=dict)
    deltas: dict[str, dict[tuple[int, int], tuple[Span, int]]] = field(default_factory=dict)
    commits: dict[str, dict[int, Published]] = field(default_factory=dict)
    rollbacks: dict[tuple[str, int], Rollback] = field(default_factory=dict)
    plain: dict[Path, datetime] = field(default_factory=dict)
    since: datetime | None = None
    skew_s: float | None = None
    untrusted: dict[Path, NotTrusted] = field(default_factory=dict)
    publishers: dict[int, str] = field(default_factory=dict)

    def base(self, path: Path) -> LogBase | None:
        """The base in a version's directory, read again only if its manifest is another file than before.

        None if the version takes no deltas, is not trusted, or has no manifest that can be read (`doctor`
        reports that). What was read is remembered: bases, rollbacks, times, and errors about untrusted
        versions. OSError if the manifest exists but cannot be looked at; CheckpointError if it cannot be
        fetched from its store; UsageError if a file of trusted keys cannot be read.
        """
        try:
            # before it is read: a manifest that is replaced in between is read again at the next look
            file = FileIdentity.of((path / MANIFEST_FILE).stat())
            known = self.bases.get(path)
            if known is not None and known[0] == file:
                return known[1]
            base = LogBase.read(path)
        except NotUpdatable:
            self.bases[path] = file, None
            with suppress(ManifestError):
                self.plain[path] = self._seen(read_head(path).created)
            return None
        except NotTrusted as error:
            self.untrusted[path] = error
            return None
        except (FileNotFoundError, ManifestError):
            return None
        self.bases[path] = file, base
        if (told := base.manifest.taken_back) is not None and told.made == "rollback":
            lineage, position = base.manifest.lineage or "", base.at.position
            self.rollbacks[lineage, position] = Rollback(position, told.back_to, told.reason or "")
        self._remember(base.manifest, base.entry, base.manifest.lineage or "")
        return base

    def bases_of(self, lineage: str) -> list[LogBase]:
        """Return the remembered bases of the log with the id `lineage`, in the order of reading."""
        found = (base for _, base in self.bases.values() if base is not None)
        return [base for base in found if base.manifest.lineage == lineage]

    def log(self, base: LogBase, hold: HeldAt | None, listed: Sequence[LogDelta]) -> Log:
        """Return the log of `base`, its newest base, with the `listed` deltas that can be read.

        `base` was returned by `_Known.base` before. `hold` is the log's, or None. Deltas are read once and
        remembered; after an untrusted delta there are none. CheckpointError if a signed file of a delta
        is a pointer of Git LFS, or a file of one cannot be fetched from its store.
        """
        lineage, is_canary = base.manifest.lineage or "", hold is not None and hold.is_canary
        limit = None if hold is None else hold.position
        known, found, bases = self.deltas.get(lineage, {}), {}, self.bases_of(lineage)
        begun = min(base.at.position for base in bases)
        for delta in listed:
            # what is published never changes: each delta is read once
            read = known.get((delta.start, delta.end)) or self._delta(delta, lineage)
            if read is not None:
                found[delta.start, delta.end] = read
        # Servers list the directory themselves, and would apply a forged delta: so they stop before it.
        # only beyond the oldest base: no server is before it
        forged = [delta.end for delta in listed if delta.end > begun and delta.path in self.untrusted]
        if forged:
            found = {span: read for span, read in found.items() if span[1] < min(forged)}
        self.deltas[lineage] = found
        return Log(
            lineage,
            tuple(span for span, _ in found.values()),
            limit,
            is_canary,
            base.at.position,
            None if limit is None or is_canary else self.rollbacks.get((lineage, limit)),
            log_path(base.path.parent, base.entry.log),
            min(base.manifest.created for base in bases),
            self.commits[lineage],
            dict(found.values()),
            None if hold is None else hold.by,
            None if hold is None else hold.bound,
        )

    def forget_all_but(self, lineages: Collection[str]) -> None:
        """Forget the deltas of all logs but `lineages`.

        The publication times of other logs are forgotten, too, if no base of the log is remembered. KeyError
        if one of `lineages` was not read by `log` before.
        """
        self.deltas = {lineage: self.deltas[lineage] for lineage in lineages}
        self.commits = {
            lineage: found
            for lineage, found in self.commits.items()
            if lineage in lineages or self.bases_of(lineage)
        }

    def forget_versions_but(self, there: Collection[Path]) -> None:
        """Forget versions whose paths are not among `there`, and all errors about untrusted publications."""
        self.bases = {path: base for path, base in self.bases.items() if path in there}
        self.plain = {path: created for path, created in self.plain.items() if path in there}
        self.untrusted = {}

    def _delta(self, delta: LogDelta, lineage: str) -> tuple[Span, int] | None:
        """Read a delta: return its span, and its size in bytes; None if it was just removed, or is damaged.

        Its publication is remembered, or the error if keys are trusted there and it fails their check.
        CheckpointError if a signed file of it is a pointer of Git LFS, or a file of it cannot be fetched from
        its store.
        """
        try:
            manifest, entry = delta.manifest, delta.entry
            require_signed_bytes(delta.path, manifest)
        except (VerificationError, OSError) as error:
            if trust_of(delta.path) is not None and not is_gone(delta.path):  # servers need no manifest
                self.untrusted[delta.path] = _not_trusted(delta.path, error)
            return None
        self._remember(manifest, entry, lineage)
        if entry.made is DeltaOrigin.ROLLBACK and entry.back_to is not None:
            found = Rollback(delta.end, entry.back_to, entry.reason or "", entry.failed)
            self.rollbacks[lineage, delta.end] = found
        return Span(delta.start, delta.end, entry.only_from, entry.parts), manifest.bytes_

    def _seen(self, created: datetime) -> datetime:
        """Return when a publication that is read now was made: the publisher's time, if our clock allows it.

        `created` is the publisher's time. If it is not possible, the nearest time that is possible is
        returned: not before `since`, not later than now. For a publication that appeared between two looks,
        the difference of the two clocks is noted in `skew_s`.
        """
        if self.since is None:
            return created
        seen = min(max(created, self.since), datetime.now(timezone.utc))
        if self.since.year > 1:  # it appeared between two looks
            self.skew_s = (created - seen).total_seconds()
        return seen

    def _remember(self, manifest: Manifest, entry: BaseEntry | DeltaEntry, lineage: str) -> None:
        commits, position = self.commits.setdefault(lineage, {}), manifest.position
        created, event_time = self._seen(manifest.created), entry.trained.newest_event
        new = Published(created, manifest.step, event_time, position=position)
        if isinstance(entry, DeltaEntry):
            back = entry.made is DeltaOrigin.ROLLBACK
            new = replace(new, rows=entry.rows, bytes_=manifest.bytes_, is_rollback=back)
        made = entry.made if isinstance(entry, DeltaEntry) else DeltaOrigin.COMPARISON
        if manifest.publisher and made not in _OF_PERSONS:
            self.publishers[position] = manifest.publisher
            if len(self.publishers) > _MOST_COMMITS:
                for old in sorted(self.publishers)[:-_LAST_PUBLISHERS]:
                    del self.publishers[old]
        # two may end at one position, a delta and a merger or base: replicas have had it since the first
        first, later = sorted((commits.get(position, new), new), key=lambda commit: commit.created)
        commits[position] = replace(first, event_time=first.event_time or later.event_time)
        if len(commits) > _MOST_COMMITS:  # a replica may serve a merged position, but not one this old
            for position in list(commits)[: _MOST_COMMITS // 2]:
                del commits[position]


class _Lost(ManifestError):
    """A log that was read before no longer exists, as if its volume were not mounted."""


def _not_trusted(path: Path, error: VerificationError | OSError) -> NotTrusted:
    if isinstance(error, OSError):
        return NotTrusted(f"{path} cannot be read", cause=error.strerror or "")
    if isinstance(error, NotTrusted):
        return error
    return NotTrusted(error.message, cause=error.cause, hint=error.hint)


class Model(Struct, frozen=True, dict=True):
    """A published model at one time: its `logs` by lineage, the newest first.

    `problem` says why it cannot be read; there are no logs then. `hold` is the position that servers do not
    pass by themselves; None without a hold, or if it cannot be read: `is_hold_unread` then. `held_by` says
    who set it; None if that is not known. `versions` are as `version_dirs` lists them, `deltas` those of each
    log's directory.
    """

    logs: Mapping[str, Log] = field(default_factory=dict)
    newest_version: int | None = None
    problem: str = ""
    path: Path = Path()
    hold: int | None = None
    versions: tuple[VersionDir, ...] = ()
    deltas: Mapping[Path, tuple[LogDelta, ...]] = field(default_factory=dict)
    known: _Known = field(default_factory=_Known)
    held_by: HeldBy | None = None
    is_hold_unread: bool = False

    def __repr__(self) -> str:
        if self.problem:
            return f"Model({str(self.path)!r}, problem={self.problem!r})"
        held = "" if self.hold is None else f", hold={self.hold}"
        return f"Model({str(self.path)!r}, publications: {len(self.publications)}, at={self.at}{held})"

    @classmethod
    def read(cls, path: Path, before: Model | None = None) -> Model:
        """Read the model under a base path; manifests that were read `before` are not read again.

        The result and `before` share one memory of manifests, which this updates.

        Raises:
            NotUpdatable: nothing is published.
            ManifestError: the model cannot be looked at, or the log of its newest version has vanished.
            OSError: a manifest exists but cannot be looked at.
            CheckpointError: a signed file is a pointer of Git LFS; or a manifest, a hold or a signed file
                cannot be fetched.
            UsageError: keys are trusted there, and a file of keys cannot be read.
        """
        known = _Known() if before is None else before.known
        versions = version_dirs(path)
        newest = newest_of(versions)
        if newest is None:
            raise nothing_published(path)
        # The holds before the deltas, as the graph reads them: then the delta of a rollback is there if its
        # hold is (`_list_and_hold` in subgraph/update.py).
        held = Hold(path).for_servers()
        holds = {place: Hold(place).for_servers() for place in log_directories(path)}
        deltas = {place: list_deltas(place) for place in holds}
        known.forget_versions_but({child.path for child in versions})  # a log begins with its oldest base
        bases = {child.version: known.base(child.path) for child in versions if child.has_manifest}
        if (base := bases[newest.version]) is not None:
            place = log_path(path, base.entry.log)
            # deltas were read before: a volume that is not mounted must not look like a log without deltas
            if place not in holds and known.deltas.get(base.manifest.lineage or ""):
                raise _Lost(f"{place} has vanished: is its volume mounted?")
            held = held or holds.get(place)
        logs: dict[str, Log] = {}
        # newest first, as versions are listed: the first base of each log is its newest
        for base in bases.values():
            if base is not None and (lineage := base.manifest.lineage) and lineage not in logs:
                place = log_path(path, base.entry.log)
                logs[lineage] = known.log(base, holds.get(place), deltas.get(place, ()))
        known.forget_all_but(logs)
        is_unread = held is not None and held.position < 0
        limit, by = (None, None) if held is None or is_unread else (held.position, held.by)
        return cls(logs, newest.version, "", path, limit, versions, deltas, known, by, is_unread)

    @classmethod
    def history(cls, path: Path) -> Model:
        """Read the model and all its manifests now, so that `publications` and `at` read nothing later.

        Raises:
            NotUpdatable: nothing is published.
            ManifestError: the model cannot be looked at.
            OSError: a manifest exists but cannot be looked at.
            CheckpointError: a signed file is a pointer of Git LFS; or a manifest, a hold or a signed file
                cannot be fetched.
            UsageError: keys are trusted there, and a file of keys cannot be read.
        """
        found = cls.read(path)
        _ = found.publications, found.at  # now: in a store, files that move later would be read anew
        return found

    @classmethod
    def look(cls, path: Path, before: Model | None = None, *, since: datetime | None = None) -> Model:
        """Read the model; if it cannot be read, return it without logs, and with the reason as its `problem`.

        Manifests that were read `before` are not read again; its memory of manifests is updated and shared.
        With `since`, what was not there before counts as published after that time and not later than now. It
        raises no ExportError or OSError.
        """
        seen = cls(path=path) if before is None else before
        seen.known.since = since
        was_seen = bool(seen.versions)
        try:
            return cls.read(path, seen)
        except NotUpdatable:
            problem = f"nothing is published under {path}" + (": is its volume mounted?" if was_seen else "")
            if not path.is_dir():
                is_there = path.exists()
                begun = "" if was_seen or is_there else "has anything been published, and "
                what = "is not a directory" if is_there else "does not exist"
                problem = f"{path} {what}: {begun}is its volume mounted?"
        except _Lost as lost:
            problem = lost.message
        except (OSError, ExportError) as error:
            problem = f"{path} cannot be read: {error}"
        return replace(seen, logs={}, newest_version=None, problem=problem)

    def places(self) -> list[Path]:
        """The paths of the directories that change with a publication; some may not exist."""
        found = [self.path, self.path / DELTAS_DIRECTORY]
        with suppress(OSError, ManifestError):
            found += log_directories(self.path)
        return found

    @property
    def untrusted(self) -> tuple[NotTrusted, ...]:
        """The errors that keep replicas from getting further, the newest version or delta first.

        Empty if there is none. Publications before the first version that a trusted key has signed are left
        out.
        """
        signed = [path.name for path, (_, base) in self.known.bases.items() if base is not None]
        first = min((int(name) for name in signed if name.isdecimal()), default=-1)
        found = {int(re.split("[-/]", path.name)[-1]): error for path, error in self.known.untrusted.items()}
        return tuple(found[end] for end in sorted(found, reverse=True) if end > first)

    @property
    def newest_log(self) -> Log | None:
        """The log of the newest base, which the exporter continues; None if no version takes deltas."""
        return next(iter(self.logs.values()), None)

    @property
    def newest_position(self) -> int | None:
        """The newest position, whatever the hold; a version that takes no deltas counts by its number.

        None if nothing is published.
        """
        ends = [] if self.newest_log is None else [self.newest_log.last]
        if self.newest_version is not None:
            ends.append(self.newest_version)
        return max(ends, default=None)

    @property
    def times(self) -> list[datetime]:
        """The known publication times of all logs and versions, unsorted.

        Empty if the model cannot be read.
        """
        if self.problem:
            return []
        # a copy: another thread's look may add to the same memory
        of_logs = (commit.created for log in self.logs.values() for commit in tuple(log.commits.values()))
        return [*of_logs, *self.known.plain.values()]

    @property
    def publishers(self) -> tuple[str, ...]:
        """The users that publish this model in turn, as `user@machine`, sorted; empty if only one does.

        A user that took over from another for good is not in turn. Only the last publications of trainers
        count.
        """
        # a copy, as in `times`
        known = dict(self.known.publishers)
        last = [known[position] for position in sorted(known)[-_LAST_PUBLISHERS:]]
        turns = [name for name, before in zip(last, [None, *last], strict=False) if name != before]
        again = [number for number, name in enumerate(turns) if turns.count(name) > 1]
        return tuple(sorted({*turns[again[0] :]})) if again else ()

    @property
    def skew_s(self) -> float | None:
        """The least number of seconds by which the publisher's clock is ahead; None if that is not known.

        It is negative if the clock is behind.
        """
        return self.known.skew_s

    @property
    def published(self) -> list[Published]:
        """The known publications of all logs, sorted by time, the oldest first."""
        found = [one for log in self.logs.values() for one in tuple(log.commits.values())]
        return sorted(found, key=lambda one: one.created)

    def decided(self) -> Model:
        """Return the model as if the canary had approved its logs to their ends, or to the store's hold.

        Logs that a person or a rollback holds are unchanged.
        """
        logs = {
            lineage: replace(log, limit=log.bound, is_canary=False) if log.is_canary else log
            for lineage, log in self.logs.items()
        }
        return replace(self, logs=logs)

    @cached_property
    def current(self) -> DeltaLog | None:
        """The log of the newest version; None if that takes no deltas, or its manifest cannot be read.

        OSError if the manifest exists but cannot be looked at, CheckpointError if it cannot be fetched from
        its store.
        """
        newest = newest_of(self.versions)
        base = None if newest is None else self.known.base(newest.path)
        if base is None:
            return None
        listed = self.deltas.get(log_path(self.path, base.entry.log), ())
        return DeltaLog(self.path, base, self.versions, listed)

    @cached_property
    def at(self) -> Position | None:
        """The newest position of the newest version's log, or of a version without a log, and its step.

        None if its manifest cannot be read. OSError if the manifest exists but cannot be looked at,
        CheckpointError if it cannot be fetched from its store.
        """
        if self.current is not None:
            with suppress(ManifestError):
                return self.current.at
            return None
        newest = newest_of(self.versions)
        event = None if newest is None else _version(newest, self.known)
        is_readable = event is not None and event.what is not PublicationKind.DAMAGED and event.log is None
        return Position(event.position, event.step) if event is not None and is_readable else None

    @cached_property
    def publications(self) -> tuple[Event, ...]:
        """All versions and deltas as events, also damaged ones, sorted by position, then by time.

        Their manifests are read at the first use. OSError if one exists but cannot be looked at,
        CheckpointError if one cannot be fetched from its store.
        """
        events = [_version(child, self.known) for child in self.versions if child.has_manifest]
        for deltas in self.deltas.values():
            events += _deltas(deltas)
        # Damaged and gone: retention has removed it meanwhile.
        there = (one for one in events if one.what is not PublicationKind.DAMAGED or not is_gone(one.path))
        number = None if self.current is None else self.current.number
        names: dict[int, list[str]] = {}
        for tag in self.listed_tags:
            names.setdefault(tag.position, []).append(tag.name)
        return tuple(sorted((_placed(one, number, self.hold, names) for one in there), key=_order))

    @cached_property
    def listed_tags(self) -> tuple[ListedTag, ...]:
        """The tags of the model, sorted by name; () if they cannot be read, which the doctor reports.

        NotUpdatable if there are tags and nothing is published any more; CheckpointError if a manifest or
        the tags cannot be fetched from their store.
        """
        with suppress(ManifestError):
            return listed_tags(self.path)
        return ()


def _order(event: Event) -> tuple[int, float, int]:
    return event.position, event.created.timestamp() if event.created else 0.0, event.from_position or 0


def _placed(event: Event, log: int | None, hold: int | None, names: Mapping[int, list[str]]) -> Event:
    is_current = event.log == log
    past = hold is not None and is_current and event.position > hold
    position = event.position if event.log is not None else _number_of(event)
    tags = tuple(names.get(position, ()))
    return replace(event, is_current=is_current, is_past_hold=past, tags=tags)


def _number_of(event: Event) -> int:
    """The number of a version that takes no deltas, by its directory's name: rollbacks name it by that."""
    return int(event.path.name) if event.path.name.isdecimal() else event.position


def _version(child: VersionDir, known: _Known) -> Event:
    try:
        base = known.base(child.path)
        manifest = read_manifest(child.path) if base is None else base.manifest
    except ManifestError as error:
        return Event(PublicationKind.DAMAGED, child.path, child.version, problem=error.message)
    entry, back = manifest.incremental, manifest.taken_back
    log = entry.log if isinstance(entry, BaseEntry) else None
    what = PublicationKind.VERSION
    if back is not None:
        what = PublicationKind(back.made)
    elif log is not None:
        what = PublicationKind.BASE if log == manifest.position else PublicationKind.REBASE
    found = replace(_event(what, child.path, manifest), log=log)
    return found if back is None else replace(found, back_to=back.back_to, reason=back.reason or "")


def _event(what: PublicationKind, path: Path, manifest: Manifest) -> Event:
    trained = None if manifest.incremental is None else manifest.incremental.trained
    return Event(
        what,
        path,
        manifest.position,
        created=manifest.created,
        publisher=manifest.publisher,
        step=manifest.step,
        from_position=manifest.from_position,
        checkpoint=manifest.source.checkpoint,
        event_time=trained.newest_event if trained else None,
        left_out=trained.left_out if trained else None,
    )


def _deltas(deltas: Sequence[LogDelta]) -> Iterator[Event]:
    events = [_delta(delta) for delta in deltas]
    mergers = [event for event in events if event.what is PublicationKind.MERGE]
    for event in events:
        around = [one for one in mergers if _leads_past(one, event)]
        longest = max(around, key=lambda one: one.position - (one.from_position or 0), default=None)
        into = None if longest is None else f"{longest.from_position}-{longest.position}"
        away = 0
        if event.what is PublicationKind.MERGE:
            inside = (
                one for one in events if one.what is not PublicationKind.MERGE and _leads_past(event, one)
            )
            away = max(0, event.parts - sum(one.parts for one in inside))
        yield replace(event, merged_away=away, merged_into=into)


def _leads_past(merger: Event, other: Event) -> bool:
    """True if `merger` spans the delta `other`: it starts no later and ends no earlier.

    False for a version.
    """
    if merger.from_position is None or other.from_position is None or other.path == merger.path:
        return False
    return merger.from_position <= other.from_position and other.position <= merger.position


def _delta(delta: LogDelta) -> Event:
    try:
        manifest, entry = delta.manifest, delta.entry
    except ManifestError as error:
        log = int(delta.path.parent.name) if delta.path.parent.name.isdecimal() else None
        return Event(
            PublicationKind.DAMAGED, delta.path, delta.end, delta.start, log=log, problem=error.message
        )
    is_compared = entry.made is DeltaOrigin.COMPARISON
    is_plain = is_compared or entry.made is DeltaOrigin.INCREMENTS
    return replace(
        _event(PublicationKind.DELTA if is_plain else PublicationKind(entry.made), delta.path, manifest),
        log=entry.log,
        rows=entry.rows,
        compared=is_compared,
        parts=entry.parts,
        back_to=entry.back_to,
        reason=entry.reason or "",
        budget=entry.budget,
        wild=entry.wild,
    )


class MadeVersion(Struct, frozen=True):
    """A version that was made from a checkpoint, and the greatest version number in use."""

    version: int
    path: Path
    head: ManifestHead
    newest: int

    def is_by(self, plan_digest: str, *, takes_deltas: bool, number: int | None) -> bool:
        """True if an export by a plan would make this version again, so that it can be spared.

        `plan_digest` and `takes_deltas` are the plan's; `number` is the version number that the export asks
        for, or None. Versions of earlier releases have no plan digest: they only need to take deltas as the
        plan does.
        """
        if number is not None and number != self.version:
            return False
        if self.head.plan_digest is None:
            return (self.head.log is not None) == takes_deltas
        return self.head.plan_digest == plan_digest


class PublishedAlready(NothingChanged):
    """The checkpoint was published before by the same plan; `made` is that version."""

    def __init__(self, made: MadeVersion) -> None:
        super().__init__(
            f"{made.head.source.checkpoint} is published already: {made.path}",
            hint="publish it once more, as the newest version: --again",
        )
        self.made = made


def newest_made_from(model: Path, digest: str) -> MadeVersion | None:
    """Return the newest version that was made from the checkpoint with this SHA-256; None if there is none.

    Versions whose manifests cannot be read are skipped.

    Raises:
        ManifestError: the model cannot be listed, or the manifest that has the digest is damaged.
        CheckpointError: a manifest is a pointer of Git LFS, or an object that cannot be fetched.
    """
    versions = version_dirs(model)
    for child in versions:
        if child.has_manifest and _mentions(child.path, digest):
            # the text alone may have the digest in another field
            head = read_head(child.path)
            if head.source.digest == digest:
                return MadeVersion(child.version, child.path, head, versions[0].version)
    return None


def _mentions(version: Path, digest: str) -> bool:
    """True if a version's manifest, unparsed, contains a digest; False also if it cannot be read.

    Parsing the manifests of many versions would take long. CheckpointError if the manifest is an object that
    cannot be fetched.
    """
    try:
        return digest.encode("ascii") in read_record(version / MANIFEST_FILE, MAX_MANIFEST_BYTES)
    except OSError:
        return False
