"""Restore the values of an earlier position: by a delta in a log, by a version if there is no log.

`exporter.pipeline.log_maintenance` decides when. A rollback goes forward: it publishes the values of an
earlier position as the next one, and holds the model there, so that the trainer's next publication does not
overrun it. Resuming publishes the values before the rollback again, and lifts the hold.

*In a log* it is a delta, so that servers apply it like any other. What servers see of a rollback from B to G,
which becomes position R = B + 1: they follow `up_to = -1`, and of the deltas that fit they apply the one with
the greatest end that is not beyond the hold.

1. The model is locked: no other process publishes, merges or tidies until the end. That may take as long as
   the rows since G take to read; a watch waits, or reports it and tries again.
2. The hold goes to G, unless it is lower. Servers at G or before stop there; the others stay where they are.
3. The delta to R is staged. It fits every server from the earliest position on at which some delta past G
   starts, and has all rows touched since then: so no server passes B on the way to R.
4. The hold becomes a link to the file `hold` of the staged delta's future place. It cannot be read: no server
   moves by itself.
5. The delta is renamed into place. With this one call it becomes visible, and the hold is R: all servers go
   to R, at once, and no further.
6. The link is replaced by a file with the same content.

A process that is killed in 1-4 has not rolled back, and no server has moved towards B; running the command
again, or `resume`, continues from there. Killed in 5-6, it has. A server lists the deltas after it has read
the hold: one that knows the hold of 5 sees the delta, too. Where links cannot be made, 4 sets the hold to R,
and until 5 a server before G can go on to B; its next call brings it to R.

*Under a canary's hold* at G all servers except the canary stop there already, and publishers go on: a
rollback may then only be requested for this hold (`by_canary`). It skips 2 and 4; killed between 5 and 6, the
canary is judged again.

*Where versions take no deltas* an older one is published again as the newest. Its files are linked, not
copied, after they were compared with their manifest and checksums. Servers load the newest version by
themselves; a rollback must only block the trainer's next export. So the model is held before the version
appears, and a resumption lifts the hold after its version appears: if a process is killed in between, the
same command again completes it.

*Values of a log that has ended*, as after a change of structure, come back by a base that begins a new log:
the old graph, with base and deltas merged (`exporter.pipeline.rebase`). So do those of the newest log if no
deltas lead from them to its newest base: what changed on the way there is not known. First servers of the
newest log are held where they are, which binds publishers, too; then the new log is held, which has no base
yet; then the base appears. After a kill in between, publishers stay bound until the command, or `resume`, is
run again. Resuming brings the newer values back in the same way.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, Literal

from msgspec import Struct
from msgspec.structs import replace

from exporter.bundle.link import link_or_copy
from exporter.checkpoint.tensor_bundle import index_path, read_catalog
from exporter.delta.format import DeltaHeader
from exporter.delta.layers import restoring
from exporter.delta.spans import Position, Span, merged, reached
from exporter.errors import (
    ManifestError,
    ModelHeld,
    OverlayFull,
    PositionUnknown,
    PublishError,
    UsageError,
)
from exporter.newer_python import StrEnum
from exporter.options import LOCALLY, DeltaDtype
from exporter.pipeline.overlay_room import OverlaidRows
from exporter.publish.approval import did_fail
from exporter.publish.commit import (
    PublishedDelta,
    PublishedVersion,
    Staging,
    UnderLock,
    VersionRule,
    next_delta_position,
    publish_version,
    reserve_position,
)
from exporter.publish.delta_log import DeltaLog, LogDelta, log_path
from exporter.publish.delta_publication import Publication, publish_changes
from exporter.publish.finite import require_finite, require_merger_finite
from exporter.publish.hold import Hold
from exporter.publish.manifest import DeltaOrigin, Manifest, ManifestDraft, RestoredValues
from exporter.publish.permission import Permission
from exporter.publish.tags import Standing
from exporter.publish.versions import (
    VersionDir,
    greatest,
    last_position,
    newest_of,
    read_manifest,
    require_signed_bytes,
    taken,
)
from exporter.storage import mirror
from exporter.storage.layout import PAIR_NAME, VARIABLES_PREFIX
from exporter.storage.local_paths import quoted
from exporter.version import __version__


class Restored(StrEnum):
    """The form in which earlier values come back."""

    DELTA = "delta"
    BASE = "base"
    VERSION = "version"


class Restoration(Struct, frozen=True):
    """Values of an earlier position or version, to be published as the next one in a `way`.

    `before` is the position to which resuming returns. `is_canaried`: a canary decides about the log, or did
    until it was rolled back. `by_canary`: the canary itself rolls back, because it rejected the values.
    """

    of: int
    made: DeltaOrigin
    before: int
    way: Way
    reason: str | None = None
    is_canaried: bool = False
    by_canary: bool = False

    @property
    def told(self) -> RestoredValues:
        """The rollback or resumption as a version's manifest records it, with its reason."""
        made: Literal["rollback", "resume"] = "rollback" if self.is_rollback else "resume"
        return RestoredValues(made, self.of, self.before, self.reason)

    @property
    def is_rollback(self) -> bool:
        """True for a rollback, which holds the model at the published position; False for a resumption."""
        return self.made is DeltaOrigin.ROLLBACK

    def plan(self) -> Planned:
        """Read and check the input of `Restorer.publish`, and return its plan; nothing is published.

        Raises OverlayFull or NotFinite if servers would refuse the values; VersionExists or PositionError if
        no position is left, or deltas do not connect; UsageError for hot rows in a store; and
        CheckpointError, VerificationError or OSError if published files are damaged or cannot be read.
        """
        return self.way.plan(self)


class Planned(Struct, frozen=True):
    """The place of a restoration, and the training step of its values."""

    path: Path
    position: int
    step: int | None


class Restorer:
    """A published model at one moment, from which earlier values can be published again.

    `versions` are as `version_dirs` lists them, at least one of them published by this program; `published`
    is the newest version's log; None if that takes no deltas. `at` is the model's position, `hold` the hold
    that a rollback sets first.
    """

    def __init__(self, model: Path, versions: Sequence[VersionDir], published: DeltaLog | None) -> None:
        newest = newest_of(versions)
        assert newest is not None
        self.model, self.published, self.versions = model, published, versions
        if published is not None:
            self.at, self.hold = published.at, published.hold
            self._manifest = published.newest.manifest
        else:
            self._manifest = read_manifest(newest.path)
            self.at, self.hold = Position(newest.version, self._manifest.step), Hold(model)

    @property
    def log(self) -> int | None:
        """The number of the newest version's log; None if that takes no deltas."""
        return None if self.published is None else self.published.number

    def rollback_of(self, to: int) -> Restoration:
        """Return the rollback to the values of position `to`, still without a reason; nothing is written.

        Raises:
            UsageError: `to` is the newest position.
            PositionUnknown: it is not a published position, or its values cannot be restored.
            ModelHeld: a canary decides about the log, and rejected the values.
            ManifestError: a manifest, or the hold, cannot be read.
        """
        at = self.at.position
        if to == at:
            raise UsageError(
                f"{'version' if self.published is None else 'position'} {to} is the newest: there is nothing "
                "to roll back",
                hint=f"list earlier ones: export-model history {quoted(self.model)}",
            )
        way, judged = self._way(to), self.published is not None and is_canaried(self.published)
        if judged and isinstance(way, _ByDelta | _ByBase) and did_fail(way.log, to):
            raise ModelHeld(
                f"the canary of an agent judged the values of {to}, and they did not pass",
                hint="let it judge again what was reverted: export-model resume "
                f"{quoted(self.model)}; to do without it: --lift-canary",
            )
        before = self.before_rollbacks() if self.hold.binds else None  # lifted rollbacks are accepted
        if before is None:
            # All servers load a base: so it must not restore values that no canary has approved.
            approved = None if way.made is Restored.DELTA else self.approved_by_canary()
            before = at if approved is None else min(at, approved)
        return Restoration(to, DeltaOrigin.ROLLBACK, before, way, is_canaried=judged)

    def resumption_of(self, to: int) -> Restoration:
        """Return the resumption with the values of position `to`; nothing is written.

        Raises PositionUnknown if they cannot be restored, ManifestError if a manifest cannot be read.
        """
        return Restoration(to, DeltaOrigin.RESUME, self.at.position, self._way(to))

    def before_rollbacks(self) -> int | None:
        """Return the model's position before the first of the rollbacks in force.

        None if the newest publication is not a rollback. For a delta of an earlier release, which does not
        record the position, it is the delta's start. Raises ManifestError if a delta's manifest cannot be
        read.
        """
        if self.published is None:
            return _before(self._manifest)
        at, before = self.published.newest, None
        while isinstance(at, LogDelta) and at.entry.made is DeltaOrigin.ROLLBACK:
            if at.entry.before is not None:
                return at.entry.before
            before = at.start
            ending = [delta for delta in self.published.deltas if delta.end == before]
            at = max(ending, key=lambda delta: delta.start, default=self.published.base)
        return _before(at.manifest) if before is None else before

    def leads_back_to(self, position: int) -> bool:
        """True if the newest publication restored the values of this position.

        Raises ManifestError if its manifest cannot be read.
        """
        newest = None if self.published is None else self.published.newest
        if isinstance(newest, LogDelta):
            return newest.entry.back_to == position
        told = self._manifest.taken_back
        return told is not None and told.back_to == position

    def approved_by_canary(self) -> int | None:
        """Return the position that a canary has approved, also if a rollback holds the log there.

        None without a canary's approval, or if the model takes no deltas. Raises ManifestError if the hold
        cannot be read.
        """
        return None if self.published is None else approved_by_canary(self.published)

    def publish(self, restoration: Restoration, staging: Staging) -> PublishedDelta | PublishedVersion:
        """Publish the values of a restoration; for a rollback the model is held before they are visible.

        Scratch files are written beside `staging`. The caller has the model's lock, and puts the hold back if
        this fails (`put_back_on_failure`).

        Raises:
            OverlayFull, NotFinite: servers would refuse the values.
            VersionExists, PositionError: no position is left, or deltas do not connect.
            UsageError: a base has hot rows, and is in a store; or the log is signed, and this publication
                would not be.
            PositionMoved: the position was used meanwhile.
            CheckpointError, VerificationError, OSError: published files are damaged or cannot be read.
            PublishError: and subclasses: something cannot be written.
        """
        way = restoration.way
        if restoration.is_rollback:
            self._stop(way, staging, restoration.reason)
        done = way.publish(restoration, staging)
        if restoration.is_rollback and self.published is None and way.made is Restored.BASE:
            with suppress(PublishError, OSError):  # the new log's hold is in force
                self.hold.lift()
        return done

    def _way(self, of: int) -> Way:
        """Return the object that restores the values of position `of`: by a delta, a base or a version.

        Raises PositionUnknown if they cannot be restored, ManifestError if a manifest or directory that
        decides this cannot be read.
        """
        if self.published is not None and self.published.has(of):
            way = _ByDelta(self.published)
            return way if way.reaches_newest_base(of) else _ByBase(self.published)
        there = Standing(self.model, self.published, self.versions)
        if why := there.loss(of):
            for child in self.versions:
                if child.version == of and child.has_manifest:
                    read_manifest(child.path)  # raises the more exact error if it is damaged
            known = ", ".join(map(str, sorted(there.paths)[-20:]))
            hint = f"list the positions: export-model history {quoted(self.model)}"
            if self.hold.binds:
                hint += (
                    f"; to leave the values as they are: export-model resume {quoted(self.model)} --lift-only"
                )
            is_log = self.published is not None
            raise PositionUnknown(
                f"nothing is published at position {of}" if is_log else f"there is no version {of}",
                cause=f"{why}; published positions: {known}",
                hint=hint,
            )
        log = there.log_at(of)
        return _ByVersion(self.model, self.versions, self.published) if log is None else _ByBase(log)

    def _stop(self, way: Way, staging: Staging, why: str | None) -> None:
        """Hold the model before a base or version replaces the served values; do nothing before a delta.

        `way` is the way of the restoration. The hold is at the present position, or at that of a canary's
        hold, which it replaces; a person's hold, or an unreadable one, stays. Of a model without a log, it is
        at the base's future position, and nothing is done for a version, which `_ByVersion.publish` precedes
        by its hold. `why` is recorded as the reason. In the mirror of a store, the hold is uploaded at once.
        Raises PublishError if it cannot be written; ManifestError, PositionError or VersionExists if the
        base's position cannot be known.
        """
        if isinstance(way, _ByDelta):
            return  # `_ByDelta.publish` begins with its own hold
        if self.published is None:
            if isinstance(way, _ByBase):
                self.hold.put(way.next_position(), staging, why=why)
                mirror.held(self.model)
            return
        try:
            held = self.hold.read()
        except ManifestError:
            return  # no server passes it
        if held is None or not self.hold.binds:
            self.hold.put(self.at.position if held is None else held, staging, why=why)
            mirror.held(self.model)


def _before(manifest: Manifest) -> int | None:
    """Return the position before the rollback that a version's manifest records; None if it records none."""
    told = manifest.taken_back
    return told.before if told is not None and told.made == "rollback" else None


class Way(ABC):
    """A way to restore the values of one position."""

    made: ClassVar[Restored]

    @abstractmethod
    def plan(self, restoration: Restoration) -> Planned:
        """Read and check the input of `publish`, and return its plan; nothing is published.

        Raises PositionError, OverlayFull, NotFinite, VersionExists, UsageError, CheckpointError,
        VerificationError and OSError, as `Restoration.plan` says.
        """

    @abstractmethod
    def publish(self, restoration: Restoration, staging: Staging) -> PublishedDelta | PublishedVersion:
        """Publish the values through `staging`, and return the publication; a rollback holds the model first.

        Raises PositionError, OverlayFull, NotFinite, VersionExists, UsageError, CheckpointError,
        VerificationError, PublishError and OSError, as `Restorer.publish` says.
        """


class _ByDelta(Way):
    """Restore values of the newest version's log by a delta."""

    made = Restored.DELTA

    def __init__(self, log: DeltaLog) -> None:
        self.log, self.hold = log, log.hold

    def plan(self, restoration: Restoration) -> Planned:
        """Plan a delta; if the base wants finite values, all restored values are read.

        Raises OverlayFull or NotFinite if servers would refuse the values; PositionUnknown, DeltaGap,
        StaleDelta, ForeignLineage or SchemaChanged if deltas do not connect; VersionExists or PositionError
        if no position is left; CheckpointError or VerificationError if a delta is damaged; OSError if scratch
        files cannot be written.
        """
        log, of = self.log, restoration.of
        _, step = log.trained_at(of)
        taken_back, values = [log.open(delta).changes for delta in self._since(restoration)], log.state(of)
        span = self._span(restoration)
        self._require_room(restoration)
        if log.base.entry.updates.finite:
            with TemporaryDirectory() as scratch:
                changes = restoring(taken_back, values, log.schema, Path(scratch))
                require_finite(log, changes, span, self._instead(restoration))
        return Planned(LogDelta(log.path, span.start, span.end).path, span.end, step)

    def publish(self, restoration: Restoration, staging: Staging) -> PublishedDelta:
        """Hold the log (for a rollback), and publish a delta with the values.

        Scratch files are beside the staged bundle. Raises OverlayFull, PositionUnknown and DeltaGap before
        the hold; NotFinite, VersionExists, PositionMoved or another PositionError, UsageError (the log is
        signed, this delta would not be), CheckpointError, VerificationError or PublishError after it: the
        caller puts the hold back.
        """
        log, of = self.log, restoration.of
        # Before the hold: a delta that servers refuse would leave them held at the values to be replaced.
        self._require_room(restoration)
        if restoration.is_rollback:
            self._stop_at(of, staging, restoration.reason)
        trained, step = log.trained_at(of)
        taken_back = [log.open(delta) for delta in self._since(restoration)]
        touched = [delta.changes for delta in taken_back]
        scratch = staging.path.with_name("scratch")
        scratch.mkdir()  # beside the bundle, all of which is published
        what = Publication.of(
            log,
            self._span(restoration),
            step,
            restoration.made,
            trained,
            packing_of(delta.header for delta in taken_back),
            self._instead(restoration),
            back_to=of,
            before=restoration.before,
            reason=restoration.reason,
            canary=restoration.is_canaried,
            failed=restoration.by_canary,
        )
        how = UnderLock(
            is_ours=True,
            holds=restoration.is_rollback,
            follows_canary=restoration.by_canary,
            why=restoration.reason,
        )
        changes = restoring(touched, log.state(of), log.schema, scratch)
        return publish_changes(log, staging, changes, what, last=log.last, under_lock=how)

    def _require_room(self, restoration: Restoration) -> None:
        """Raise OverlayFull if the restored rows do not fit into the overlays of mapped tables in servers.

        Rows that changed before the base may come back. Nothing is read unless the base maps tables: the hold
        must not wait. Raises, if the base maps tables, CheckpointError or VerificationError if a delta is
        damaged, PositionUnknown, DeltaGap or another PositionError if deltas are missing or do not connect,
        VersionExists or PositionError if no next position is left.
        """
        overlaid = OverlaidRows.of(self.log)
        for delta in self._since(restoration) if overlaid.room else ():
            overlaid.add(self.log.row_numbers(delta, overlaid.room.keys()))
        try:
            overlaid.require_room()
        except OverlayFull as error:
            error.hint = (
                "publish a base of that checkpoint (--ckpt-dir CHECKPOINT --new-base always --again), or go "
                f"back less far: export-model history {quoted(self.log.model)}"
            )
            raise

    def reaches_newest_base(self, of: int) -> bool:
        """True if the deltas that restore position `of` begin at the newest base or later, or reach it.

        In a copy that withheld deltas of its store, and in a log that lost some, a base can stand beyond all
        of them. The rows that changed on the way there are then in no delta, so a restoring delta would lack
        them: a server that has loaded this base would mix two positions.
        """
        return self.log.base.at.position <= reached(self.log.deltas, self._earliest(of))

    def _span(self, restoration: Restoration) -> Span:
        """Return the start and end of the restoring delta; the end is the log's next position.

        A resumption's delta starts at the newest position; a rollback's so early that no server can apply a
        merged delta past these values first. Raises VersionExists or PositionError if no next position is
        left.
        """
        log = self.log
        start = self._earliest(restoration.of) if restoration.is_rollback else log.at.position
        return Span(start, next_delta_position(log, None))

    def _earliest(self, of: int) -> int:
        """Return the lowest start of a delta that begins before position `of` and ends after it; or `of`."""
        return min([of, *(delta.start for delta in self.log.deltas if delta.start < of < delta.end)])

    def _since(self, restoration: Restoration) -> tuple[LogDelta, ...]:
        """Return the deltas, in order, whose rows get the restored values; they end at the newest position.

        They begin at the restored position or, if lower, at the start of the restoring delta. Raises
        PositionUnknown if there are none, DeltaGap if some are missing, VersionExists or PositionError if no
        next position is left.
        """
        chain = self.log.chain(min(restoration.of, self._span(restoration).start))
        if not chain:
            raise PositionUnknown(f"no delta leads on from position {restoration.of}")
        return chain

    def _stop_at(self, to: int, staging: Staging, why: str | None) -> None:
        """Hold the log at `to`, and record the reason `why`; a hold at `to`, before it, or unreadable stays.

        In the mirror of a store, the hold is uploaded at once. Raises PublishError if it cannot be written.
        """
        try:
            held = self.hold.read()
        except ManifestError:
            return  # no server passes it
        if held is None or held > to:
            self.hold.put(to, staging, why=why)
            mirror.held(self.log.model)

    def _instead(self, restoration: Restoration) -> str:
        """Return the hint of the error for restored values that are NaN or infinite."""
        model = self.log.model
        if restoration.is_rollback:
            return f"go back further: export-model history {quoted(model)} lists the positions"
        return f"accept the rollback, and train on: export-model resume {quoted(model)} --lift-only"


def is_canaried(log: DeltaLog) -> bool:
    """True if a canary's hold is in force, or was when the log was rolled back.

    False if the hold cannot be read, or no publication ends at its position; ManifestError if a manifest
    there cannot be read.
    """
    if log.hold.is_canary or not log.hold.binds:
        return log.hold.is_canary
    try:
        held = log.standing(log.hold.read() or 0)
    except (ManifestError, PositionUnknown):  # the hold cannot be read, or no rollback set it
        return False
    return isinstance(held, LogDelta) and held.entry.canary


def approved_by_canary(log: DeltaLog) -> int | None:
    """Return the position of a log that a canary has approved; None if no canary decides about the log.

    It is the hold's position, also if a rollback has set the hold. Raises ManifestError if the hold, or the
    manifest at its position, cannot be read.
    """
    return log.hold.read() if is_canaried(log) else None


def packing_of(headers: Iterable[DeltaHeader]) -> DeltaDtype | None:
    """Return the form (dtype) in which the newest packed delta has its rows; None if no delta is packed.

    Rows from these deltas can be packed in that form. `headers` are the deltas', oldest first.
    """
    return next((header.packing for header in reversed(list(headers)) if header.packing), None)


class _ByBase(Way):
    """Restore values of a log that has ended by a base that begins a new log."""

    made = Restored.BASE

    def __init__(self, log: DeltaLog) -> None:
        self.log = log

    def plan(self, restoration: Restoration) -> Planned:
        """Plan a base of a new log; deltas are checked, the base's values are not read.

        Raises NotFinite if the log refuses the values; UsageError for hot rows in a store; PositionError if
        deltas are missing; VersionExists or PositionError if no position is left; CheckpointError or
        VerificationError if a delta is damaged.
        """
        self._check(restoration.of)
        self.log.state(restoration.of)
        position, step = self.next_position(), self.log.trained_at(restoration.of)[1]
        return Planned(self.log.model / str(position), position, step)

    def publish(self, restoration: Restoration, staging: Staging) -> PublishedVersion:
        """Publish a base that begins a new log; a rollback holds the new log first.

        The new log's hold is put back if the publication fails. Raises NotFinite if the log refuses the
        values; UsageError for hot rows in a store; PositionError or VersionExists if deltas are missing or
        no position is left; PositionMoved if the position was used meanwhile; CheckpointError,
        VerificationError or OSError if a published file is damaged or cannot be read; PublishError if nothing
        can be written.
        """
        from exporter.pipeline.merged_base import BasePlace, write_base
        from exporter.pipeline.same_graph import SourceFiles

        self._check(restoration.of)
        log, model, of = self.log, self.log.model, self.log.standing(restoration.of)
        place = reserve_position(model, None)
        new_log = BasePlace(place.position, place.position, secrets.token_hex(16))
        draft, _ = write_base(log, of, new_log, staging, LOCALLY.task_bytes)
        draft = replace(draft, taken_back=restoration.told)
        hold = Hold(log_path(model, place.position))
        with hold.put_back_on_failure(staging):
            if restoration.is_rollback:
                hold.put(place.position, staging, why=restoration.reason)
            done = publish_version(staging, draft, place, permission=_RESTORING, is_locked=True)
        SourceFiles.read(log.path).save(hold.directory)
        return done

    def next_position(self) -> int:
        """Return the position that the base will have: greater than all used ones; nothing is reserved.

        Raises VersionExists or PositionError if no position is left, ManifestError if the used ones cannot be
        known.
        """
        return reserve_position(self.log.model, None).position

    def _check(self, of: int) -> None:
        """Raise an error if the values of position `of` cannot be merged into a base.

        NotFinite if the log refuses NaN or infinity in them, UsageError if the base has hot rows and is in a
        store, PositionUnknown if no base reaches the position, CheckpointError if a delta is damaged. Nothing
        is raised if a base is at `of`.
        """
        from exporter.pipeline.merged_base import require_local, way_to

        base, chain = way_to(self.log, of)
        if chain:
            require_local(base)
            require_merger_finite(self.log, chain, merged(chain), "go back to another position")


_RESTORING = Permission(despite_hold=True, plain=True)  # the hold is its own, or one that it resumes from


class _ByVersion(Way):
    """Restore values of a version that takes no deltas by a version."""

    made = Restored.VERSION

    def __init__(self, model: Path, versions: Sequence[VersionDir], published: DeltaLog | None) -> None:
        self._model, self.versions, self.hold = model, versions, Hold(model)

    def plan(self, restoration: Restoration) -> Planned:
        """Verify all bytes of the version, and plan its publication under the next number.

        Raises VerificationError if it is damaged, CheckpointError or OSError if a file cannot be read,
        VersionExists if no number is left, ManifestError if published positions cannot be read.
        """
        manifest = self._whole(restoration.of)
        number = self._next(manifest)
        return Planned(self._model / str(number), number, manifest.step)

    def publish(self, restoration: Restoration, staging: Staging) -> PublishedVersion:
        """Verify the version and publish it again, its files linked (or copied).

        A rollback holds the model at the new number first; in the mirror of a store, the hold is uploaded at
        once. The hold is put back if this fails. Raises VerificationError if the version is damaged,
        CheckpointError or OSError if a file cannot be read, and PublishError and subclasses (VersionExists if
        no number is left) if something cannot be written.
        """
        manifest = self._whole(restoration.of)
        with self.hold.put_back_on_failure(staging):
            if restoration.is_rollback:
                self.hold.put(self._next(manifest), staging, why=restoration.reason)
                mirror.held(self._model)
            for entry in manifest.files:
                target = staging.path / entry.path
                target.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(self._model / str(restoration.of) / entry.path, target)
            draft = ManifestDraft(
                tensors=manifest.tensors,
                source=manifest.source,
                exporter=__version__,
                step=manifest.step,
                taken_back=restoration.told,
                plan_digest=manifest.plan_digest,
                tensorflow=manifest.tensorflow,
                mapped=manifest.mapped,
                for_server=manifest.for_server,
                oldest_server=manifest.oldest_server,
                opened_batch=manifest.opened_batch,
            )
            return publish_version(staging, draft, permission=_RESTORING, is_locked=True)

    def _next(self, manifest: Manifest) -> int:
        """Return the number that `publish_version` will give a version with this manifest's step.

        Raises VersionExists if none is free, ManifestError if the published positions cannot be read.
        """
        last = last_position(self._model, self.versions)
        newest = greatest(self.versions[0].version, taken(self._model).version)
        return VersionRule().choose(manifest.step, newest=newest, last=last, now=0)[0]

    def _whole(self, number: int) -> Manifest:
        """Return the manifest of version `number`, which must exist, after comparing all its bytes with it.

        Raises VerificationError if they differ, CheckpointError or OSError if a file cannot be read.
        """
        path = next(child.path for child in self.versions if child.version == number)
        manifest = read_manifest(path)
        from exporter.verify.version_files import verify_bytes, verify_published  # late: deltas need neither

        verify_published(path)
        require_signed_bytes(path, manifest)
        for prefix in (VARIABLES_PREFIX, PAIR_NAME):
            if index_path(path / prefix).exists():
                verify_bytes(read_catalog(path / prefix))
        return manifest
