"""Incremental exports: publish the changes since the newest position as a delta; the first time, a base.

A plan has the published position, the trainer's state, and the changes between them; executing it publishes a
delta. A log begins with a base that takes deltas, which a full export makes: TensorFlow is imported only for
that.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from exporter.catalog import Catalog
from exporter.checkpoint import is_named, open_checkpoint
from exporter.delta.deviation import Budgeted, Divided, LeftOut, Rounded, Tolerance, WildRows
from exporter.delta.format import Change, Rows, Schema, count_rows
from exporter.delta.layered_state import Changes, CheckedFiles, LayeredState
from exporter.delta.layers import fold_whole, merge_changes, needs_folding
from exporter.delta.spans import Position, Span
from exporter.errors import (
    CheckpointChanged,
    CheckpointError,
    ExportError,
    ManifestError,
    NotUpdatable,
    OverlayFull,
    PositionError,
    PositionMoved,
    PublishError,
    SchemaChanged,
    TableFull,
)
from exporter.mapping.mapping_rules import MappingRules, parse_admission, parse_rules, read_renames
from exporter.mapping.mapping_spec import MappingSpec
from exporter.options import DeltaBudget, ExportRequest, OnWild, Updates, Verify, require_local
from exporter.pipeline.log_maintenance import tidy
from exporter.pipeline.overlay_room import OverlaidRows, asked_room
from exporter.pipeline.same_graph import SameGraph, SourceFiles, check_same_graph
from exporter.pipeline.table_deltas import has_room, ordinary, table_changes, without_index
from exporter.pipeline.trainer_state import TrainerState, read_trainer
from exporter.publish.commit import PublishedDelta, Staging, next_delta_position
from exporter.publish.delta_log import DeltaLog, log_of, read_log
from exporter.publish.delta_publication import Publication, header_of, publish_changes
from exporter.publish.manifest import DeltaEntry, DeltaOrigin, overwritten_notes
from exporter.publish.permission import require_not_taken_back
from exporter.publish.versions import (
    VersionDir,
    is_trusting,
    newest_of,
    newest_version,
    require_signer,
    version_dirs,
)
from exporter.storage import mirror
from exporter.storage.files import writing
from exporter.storage.layout import CACHES_DIRECTORY, CHECKED_DIRECTORY, HASHES_DIRECTORY
from exporter.terminal.progress import ProgressFactory, no_progress
from exporter.wire.dtypes import Array

if TYPE_CHECKING:
    from exporter.delta.residual import Waiting
    from exporter.delta.row_hashes import HashIndex
    from exporter.jobs.runner import Runner
    from exporter.pipeline.delta_budget import Allowance
    from exporter.pipeline.full import Exported


def is_begun(request: ExportRequest) -> bool:
    """True if a version with a manifest is published under the request's target already.

    Raises ManifestError if the target cannot be listed.
    """
    return newest_version(request.out) is not None


def export_base(
    request: ExportRequest,
    progress: ProgressFactory = no_progress,
    *,
    beyond: int = 0,
    is_watching: bool = False,
) -> Exported:
    """Begin a log by a full export, and return its result.

    A base whose checkpoint's step is below `beyond` also gets the trainer's increments.

    Raises:
        CheckpointNotFound: there is no checkpoint; or, in a watch, the graph beside it, which a trainer
            writes last, does not exist yet.
        ExportError: any other of errors.py; nothing was published.
        OSError: the operating system refuses to read a file; nothing was published.
    """
    # The stages of a full export take as long to import as a delta to make.
    from exporter.pipeline.full import export
    from exporter.pipeline.trainer_graph import require_graph

    if is_watching:
        require_graph(request, open_checkpoint(request.ckpt_dir))
    return export(as_base(request), progress, beyond=beyond)


def as_base(request: ExportRequest) -> ExportRequest:
    """Return a request for a base, with the previous base's options where this request has none of its own.

    The options are those of deltas (`updates`), the servers' version, and mapped tables; without a previous
    base, or if its manifest is damaged, none are added. `again` is set: the checkpoint may be published
    already, as after a broken log.
    """
    request = replace(request, again=True)
    before, mapped, server = Updates(), None, None
    with suppress(NotUpdatable, ManifestError):
        base = read_log(request.out).base
        before, mapped, server = base.entry.updates, base.manifest.mapped, base.manifest.for_server
    request = replace(request, for_server=request.for_server or server)
    if mapped is not None and mapped.tables and not request.map_tables:
        place, room = str(Path(mapped.directory).parent), asked_room(base.entry.schema, mapped)
        # In the form in which `mapped_record` writes a path.
        is_out = place == os.fsencode(request.out.absolute()).decode(errors="backslashreplace")
        served_at = None if is_out else place
        request = replace(request, map_tables=True, served_at=served_at, overlay_rows=room)
    return request if request.updates not in (None, Updates()) else replace(request, updates=before)


class IncrementalPlan(Struct, frozen=True):
    """The plan of an incremental export; `position` is the log's position after it.

    `waiting` are the rows that were left out so far: applied to the published state, they give the trainer's;
    None if there are none, or they are lost. With `resends` they compete for the next delta, even if the
    trainer has nothing new. `lookups` are the changed contents of lookup tables, which increments lack.
    `is_nothing`: the trainer's newest state is published, or the budget (`allowance`) says to wait. `allowed`
    is the tolerated difference between served and trained values.
    """

    request: ExportRequest
    log: DeltaLog
    trainer: TrainerState
    position: int
    is_nothing: bool
    allowed: Tolerance
    allowance: Allowance | None = None
    waiting: Waiting | None = None
    resends: bool = False
    graph: SameGraph = field(default_factory=SameGraph)
    lookups: Changes = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for people on the log's deltas, options for the next base, setbacks and overwritten files."""
        base = self.log.base
        written = overwritten_notes(base.manifest, base.path)
        return (*self.log.schema.notes, *self._for_the_next_base, *self.setbacks, *written)

    @property
    def _for_the_next_base(self) -> tuple[str, ...]:
        """Notes on options that the present base was made without, as deltas cannot change tables' layout."""
        mapped = self.log.base.manifest.mapped
        has_hot = mapped is not None and any(table.hot_rows for table in mapped.tables)
        asked = {
            "--map-tables": self.request.map_tables and mapped is None,
            "--hot-rows": self.request.hot_rows and not has_hot,
        }
        return tuple(
            f"{option} is for the next base (--new-base always --again): the present one was made without"
            for option, is_asked in asked.items()
            if is_asked
        )

    @property
    def setbacks(self) -> tuple[str, ...]:
        """Notes if the model goes back to an earlier step or an abandoned increment is left out; else ()."""
        step, published = self.trainer.plan.step, self.log.at.step
        full, abandoned = self.trainer.catalog, self.trainer.abandoned
        is_back = not self.is_nothing and full.step is not None and step < (published or 0)
        back = f"the model goes back from step {published}, which is published, to step {step}"
        left_out = (
            f"{abandoned} is left out: it is older than {full.prefix.name}, so the trainer went back in "
            "between; or a copy lost the files' times: copy with them (cp -p, rsync -t)"
        )
        return (*([back] if is_back else []), *([left_out] if abandoned else []))

    @property
    def listed_rows(self) -> int | None:
        """The number of changed rows of served tables that the increments list, by their manifests alone.

        None if rows have to be compared. A row that several increments list counts several times.
        """
        return self.trainer.listed_rows(self.log.base.entry.mapping_spec)

    @property
    def step(self) -> int | None:
        """The training step at the end of the next delta; None if the checkpoint does not record steps."""
        return self.trainer.step

    @property
    def span(self) -> Span:
        """The positions at which the next delta starts and ends."""
        return Span(self.log.at.position, self.position)


def plan_incremental(
    request: ExportRequest,
    versions: Sequence[VersionDir] | None = None,
    *,
    is_watching: bool = False,
    marker_seconds: float = 0.0,
    look_seconds: float = 0.0,
) -> IncrementalPlan:
    """Read the newest position of the target's log and the trainer's files, and plan the next delta.

    The target's `versions` are listed unless they are given. In a watch, a plan after a full checkpoint does
    nothing while the next increment is due, instead of comparing. For `marker_seconds` after this process
    first saw a full checkpoint, the plan reports whether a marker may still come: a file by which the
    trainer's hook says which increments the checkpoint follows. A watch looks again after `look_seconds`:
    rows that would then have waited too long are sent now.

    Raises:
        NotUpdatable: nothing is published that takes deltas.
        SchemaChanged: the checkpoint, or the rules of the request, do not fit the published base.
        ModelHeld: in place of NotUpdatable and SchemaChanged, if the newest publication is a rollback that
            holds the model, and the hold is not overridden.
        PositionError, VersionExists: there is no next position.
        UsageError, CheckpointError, GraphError, ManifestError, TensorFlowNeeded: see errors.py.
        OSError: a file of the graph cannot be read.
    """
    require_local(request)
    try:
        log = read_log(request.out) if versions is None else log_of(request.out, versions)
        return _plan(log, request, is_watching, marker_seconds, look_seconds)
    except (SchemaChanged, NotUpdatable) as error:
        if not request.despite_hold:
            require_not_taken_back(request.out, error)
        raise


def _plan(
    log: DeltaLog, request: ExportRequest, is_watching: bool, marker_seconds: float, look_seconds: float
) -> IncrementalPlan:
    """Plan the next delta of a log from the trainer's files; nothing is written.

    `is_watching`, `marker_seconds` and `look_seconds` are as for `plan_incremental`.

    Raises:
        SchemaChanged: the checkpoint, or the rules of the request, do not fit the base.
        PositionError, VersionExists: there is no next position.
        UsageError, CheckpointError, GraphError, ManifestError, TensorFlowNeeded: see errors.py.
        OSError: a file of the graph cannot be read.
    """
    require_signer(log.model, log.newest.manifest)  # early: publishing would refuse it after all the work
    entry = log.base.entry
    rules = _rules(request)
    entry.mapping_spec.check_rules(rules, parse_admission(request))
    entry.check_updates(request.updates)
    _check_server(request, log)
    published, now = log.trained.exact_but_for(request.delta_dtype), time.time()
    waiting = _waiting(log, request, now)
    overdue = None if request.max_row_age is None else now - request.max_row_age + look_seconds
    is_overdue = overdue is not None and waiting is not None and waiting.oldest <= overdue
    resends = is_overdue or _competes(request, published.left_out, is_watching=is_watching)
    files = SourceFiles.read(log.path)  # `read_trainer` adds digests to it, which `graph` saves
    trainer = read_trainer(
        request.ckpt_dir,
        entry.mapping_spec,
        log.schema,
        published if waiting is None else replace(published, left_out=None),
        -math.inf if resends else math.inf,  # with `resends` no row may stay behind
        files.archives,
        is_watching=is_watching,
        marker_seconds=marker_seconds,
        is_alone=is_named(request.ckpt_dir),
        ignored=rules.ignored,
    )
    lookups = trainer.changed_lookups(log)
    is_nothing = trainer.plan.is_nothing and not lookups and not resends
    allowed, allowance = Tolerance(request.min_change, request.delta_dtype, overdue=overdue), None
    if request.delta_budget is not None and not is_nothing:
        from exporter.pipeline.delta_budget import Allowance  # late: few deltas have a budget

        allowance = Allowance.of(log, request.delta_budget, now)
        allowed = replace(allowed, room=allowance.room)
        is_nothing = is_watching and not allowance.is_worth and not is_overdue
    # A watch may idle while the next model is being prepared; only a delta needs the same graph.
    is_idle = is_watching and is_nothing
    graph = SameGraph() if is_idle else check_same_graph(log, request, trainer.catalog, files)
    # With nothing to do, no other log has to be listed.
    position = log.at.position if is_nothing else next_delta_position(log, trainer.step)
    return IncrementalPlan(
        request, log, trainer, position, is_nothing, allowed, allowance, waiting, resends, graph, lookups
    )


def _state_key(log: DeltaLog) -> dict[str, Any]:
    """Return the lineage, position and state id of a log's newest state: the key of its caches.

    They are arguments by name.
    """
    return {"lineage": log.lineage, "position": log.at.position, "state": log.newest.manifest.state_id}


def _check_server(request: ExportRequest, log: DeltaLog) -> None:
    """Raise SchemaChanged if the request names another version of servers than the base was made for.

    A request that names none fits any base.
    """
    made_for = log.base.manifest.for_server
    if request.for_server not in (None, made_for):
        was = f"--for-server {made_for}" if made_for else "without --for-server"
        raise SchemaChanged(
            f"--for-server {request.for_server}: the base was exported {was}",
            hint=f"leave it out, or {SchemaChanged.default_hint}",
        )


def _rules(request: ExportRequest) -> MappingRules:
    """Return all mapping rules of a request, including those in its file of names.

    Raises UsageError if a rule or the file is malformed, LfsPointer if the file is a Git LFS pointer.
    """
    rules = parse_rules(request)
    if request.rename_file is None:
        return rules
    return replace(rules, renames=(*rules.renames, *read_renames(request.rename_file).rules))


def _waiting(log: DeltaLog, request: ExportRequest, now: float) -> Waiting | None:
    """Return the rows that earlier deltas left out; None if there are none, or every row must be compared.

    Every row must be compared if the record of the rows is lost, or if they were left out only by a bound
    (`--delta-budget change=X`) that is lower now. `now` is in seconds since 1970.
    """
    left_out = log.trained.left_out
    if left_out is None:
        return None
    is_by_bound = left_out.since is None and not left_out.wild and request.delta_budget is None
    if is_by_bound and left_out.bound > request.min_change:
        return None
    from exporter.delta.residual import load_residual

    unknown = _since(left_out, now)
    return load_residual(log.path / CACHES_DIRECTORY, log.schema, **_state_key(log), now=now, unknown=unknown)


def _since(left_out: LeftOut, now: float) -> float:
    """Return the earliest time at which a left-out row can have begun to wait, in seconds since 1970.

    It is `now` if no time is recorded, or a clock was set back.
    """
    return now if left_out.since is None else min(now, left_out.since.timestamp())


def _competes(request: ExportRequest, left_out: LeftOut | None, *, is_watching: bool) -> bool:
    """True if rows that were left out are to be sent although the trainer has nothing new.

    `left_out` describes the rows; None: there are none. Rows within `--delta-budget change=X`, and rows that
    `--on-wild` holds back, do not count. False in a watch with a budget per delta: the rows wait for the next
    delta, or each look would use up a budget. UsageError if the budget is malformed.
    """
    if left_out is None:
        return False
    keeps_wild = bool(request.max_norm) and request.on_wild is OnWild.HOLD_ROW
    if left_out.rows <= (left_out.wild if keeps_wild else 0) or left_out.bound <= request.min_change:
        return False
    if request.delta_budget is None or not is_watching:
        return True
    return DeltaBudget.parse("--delta-budget", request.delta_budget).is_rate


_REMOVE_EVERY_S = 10  # however many deltas a watch publishes meanwhile
_MARKER_POLL_S = 0.25
"""Seconds between looks where the kernel reports no changes: network file systems, object stores."""
_ATTEMPTS = 3
"""The number of tries if the trainer prunes, or another exporter publishes, meanwhile."""


class ExportedDelta(Struct, frozen=True):
    """The result of an incremental export; `published` is None if there was nothing to do.

    `compared_bytes` are the served bytes that were compared; 0 if increments list the changes. `warnings` are
    failures after the delta was published.
    """

    plan: IncrementalPlan
    published: PublishedDelta | None = None
    rows: int = 0
    variables: int = 0
    compared_bytes: int = 0
    seconds: float = 0.0
    warnings: tuple[ExportError, ...] = ()

    def __repr__(self) -> str:
        what = "nothing new" if self.published is None else repr(str(self.published.path))
        return f"ExportedDelta({what}, position={self.at.position}, rows={self.rows})"

    @property
    def _entry(self) -> DeltaEntry | None:
        """The incremental entry in the published delta's manifest; None if no delta was published."""
        entry = None if self.published is None else self.published.manifest.incremental
        return entry if isinstance(entry, DeltaEntry) else None

    @property
    def left_out(self) -> LeftOut | None:
        """The record of the rows that are held back: their number, and their distance from the trainer's.

        None if there are none. Without a new delta, the record of the log's newest position.
        """
        return (self._entry or self.plan.log).trained.left_out

    @property
    def rounded(self) -> Rounded | None:
        """The record of this delta's rows that are served rounded; without a new delta, of all such rows.

        None if there are none.
        """
        return self.plan.log.trained.rounded if self._entry is None else self._entry.rounded

    @property
    def budgeted(self) -> Budgeted | None:
        """The delta's use of its budget; None without a delta, or a budget."""
        return None if self._entry is None else self._entry.budget

    @property
    def wild(self) -> tuple[WildRows, ...]:
        """The new delta's rows beyond `--max-norm`, one record per table that has any; () without a delta."""
        return () if self._entry is None else self._entry.wild

    @property
    def at(self) -> Position:
        """The log's newest position after the export, with its training step."""
        if self.published is None:
            return self.plan.log.at
        return Position(self.published.manifest.position, self.published.manifest.step)


Incremental: TypeAlias = "Exported | ExportedDelta"


def execute_incremental(planned: IncrementalPlan, progress: ProgressFactory = no_progress) -> ExportedDelta:
    """Publish the planned delta, and write caches for the next delta beside the log.

    `published` in the result is None if there is nothing to publish. A hold does not prevent a delta: servers
    stop before it.

    Raises:
        TableFull, OverlayFull: the published base has no room for the changes.
        SchemaChanged: the checkpoint has other tables than the base.
        PositionMoved: another process published meanwhile.
        DeltaGap, ForeignLineage, StaleDelta: published deltas, which are read, do not connect.
        EngineFailed: the engine that compares failed.
        CheckpointChanged: the trainer replaced files since the plan was made.
        WildValues, NotFinite: rows are beyond `--max-norm`, or not finite, and are to be refused.
        UsageError: the log is signed, and this delta would not be.
        NotUpdatable: the newest version takes no deltas any more.
        CheckpointError, MappingError, VerificationError, PublishError: see errors.py; nothing was published.
    """
    started = time.monotonic()
    nothing = partial(ExportedDelta, planned)
    if planned.is_nothing:
        planned.graph.save(planned.log.path)
        return nothing(seconds=time.monotonic() - started)
    log, plan = planned.log, planned.trainer.plan
    with Staging(planned.request.out) as staging, writing(staging.path):
        scratch = staging.path.with_name("scratch")
        scratch.mkdir()  # beside the bundle, all of which is published
        found = _changes(planned, scratch, progress)
        sent = found.divided
        if plan.is_nothing and not sent.changes:  # the budget has no room for any of the rows that wait
            return nothing(seconds=time.monotonic() - started)
        overlaid = OverlaidRows.of(log)
        overlaid.add({name: each.ids for name, each in sent.changes.items() if isinstance(each, Rows)})
        overlaid.require_room()  # before anything is published: servers would refuse the delta
        used = sent.used and planned.allowance and planned.allowance.told(sent.used)
        what = Publication.of(
            log,
            replace(planned.span, only_from=bool(sent.left_out or sent.rounded)),
            planned.step,
            DeltaOrigin.INCREMENTS if plan.is_known else DeltaOrigin.COMPARISON,
            replace(plan.target, left_out=sent.left_out, rounded=_rounded_so_far(planned, sent.rounded)),
            planned.request.delta_dtype,
            rounded=sent.rounded,
            budget=used,
            wild=sent.wild,
        )
        check = _verify_bytes if planned.request.verify is Verify.BYTES else None
        published = publish_changes(log, staging, sent.changes, what, last=log.last, check=check)
        # Inside the staging, as changes may be in its scratch files.
        _keep_for_next_time(planned, found, overlaid, what, published.manifest.state_id)
    rows = count_rows(without_index(sent.changes, log.base.entry.mapping_spec))
    seconds = time.monotonic() - started
    variables, compared, warnings = len(sent.changes), found.compared_bytes, published.warnings
    return ExportedDelta(planned, published, rows, variables, compared, seconds, warnings)


def _verify_bytes(written: Catalog) -> None:
    from exporter.verify.version_files import verify_bytes  # few ask for it, and a delta is made in no time

    verify_bytes(written)


def _keep_for_next_time(
    planned: IncrementalPlan, found: _Found, overlaid: OverlaidRows, what: Publication, state: str
) -> None:
    """Write the caches of the state that was just published, whose id is `state`.

    The caches are the graph's record, changed rows of mapped tables (`overlaid`), hashes of rows, and rows
    held back. `found` are the changes that were sent, `what` the delta's description. A failure to write a
    cache is ignored.
    """
    log, sent = planned.log, found.divided
    planned.graph.save(log.path)
    with suppress(OSError, PublishError):
        overlaid.save(log, planned.position, state)
        if found.hashes is not None:
            from exporter.delta.row_hashes import write_index

            write_index(log.path / HASHES_DIRECTORY, replace(found.hashes, state=state))
        if sent.held_back:
            from exporter.delta.residual import save_residual

            caches, header = log.path / CACHES_DIRECTORY, replace(header_of(log, what), packing=None)
            save_residual(caches, log.schema, header, state, sent.held_back, sent.since)


def export_incremental(
    request: ExportRequest,
    progress: ProgressFactory = no_progress,
    *,
    full_on_mismatch: bool = False,
    is_watching: bool = False,
    marker_seconds: float = 0.0,
    look_seconds: float = 0.0,
) -> Incremental:
    """Publish the next delta, or a base if nothing is published yet or a new log may begin.

    With `full_on_mismatch`, a base is published where no delta fits the log (PositionError). A trainer's hook
    marks each full checkpoint a moment after it was saved; without the marker all rows are compared. If a
    hook has written here before, the marker is awaited for up to `marker_seconds`: in this call, or by a
    watch, which gets nothing published and looks again. A process that also trains must not wait in the
    thread that trains. A watch looks again after `look_seconds`: rows that would then have waited too long
    are sent now.

    A watch begins a new log by itself if a dynamic table or an overlay has no room for changes. A log that
    replaces another begins with the trainer's increments, so that no server goes back. Due deltas are merged
    and removed after a publication; errors of that are in `warnings`.

    Without a new base the result is an `ExportedDelta`; its `published` is None if there is nothing new.
    Up to three tries are made if others publish, or the trainer prunes, meanwhile.

    Raises:
        PositionError: and subclasses: no delta fits the log, and no base may replace it.
        ExportError: any other of errors.py; nothing was published.
        OSError: the operating system refuses to read a file; nothing was published.
    """
    versions: Sequence[VersionDir] | None = version_dirs(request.out)
    if newest_of(versions or ()) is None:
        try:
            return export_base(request, progress, is_watching=is_watching)
        except PositionMoved:
            # Another process began the log at the same time, often with this checkpoint: a delta follows,
            # or nothing. `carry` looks again by itself, and builders run once.
            if mirror.is_remote(request.out) or request.check_graph or not is_begun(request):
                raise
        versions = None
    look = partial(
        plan_incremental,
        request,
        is_watching=is_watching,
        marker_seconds=marker_seconds,
        look_seconds=look_seconds,
    )
    attempts = 1
    while True:
        try:
            planned = look(versions)
            if not is_watching:
                planned = _marked(planned, look)
            done = execute_incremental(planned, progress)
            break
        except (PositionMoved, CheckpointChanged) as error:  # others published or removed something
            if attempts == _ATTEMPTS or _is_final(error, request):
                raise
            attempts, versions = attempts + 1, None  # to be listed again
        except PositionError as error:
            is_full = isinstance(error, TableFull | OverlayFull)
            if not (full_on_mismatch or (is_full and is_watching)):
                raise
            if isinstance(error, TableFull) and has_room(planned.log, planned.trainer):
                raise
            # An increment too large for the overlay would be so again: the new base includes it.
            beyond = planned.trainer.plan.step if isinstance(error, OverlayFull) else 0
            return _new_log(request, progress, error, is_watching=is_watching, beyond=beyond)
    if done.published is None:
        return done
    return replace(done, warnings=(*done.warnings, *_tidied(done.plan.log, done.published)))


def _is_final(error: PositionMoved | CheckpointChanged, request: ExportRequest) -> bool:
    """True if no further try is made after an error.

    CheckpointChanged is final if the request names one checkpoint: it would fail again. PositionMoved is
    final in the mirror of a store, which must be refreshed first.
    """
    return (
        is_named(request.ckpt_dir) if isinstance(error, CheckpointChanged) else mirror.is_remote(request.out)
    )


def _marked(planned: IncrementalPlan, look: Callable[[], IncrementalPlan]) -> IncrementalPlan:
    """Return the plan; while it awaits a marker, sleep and plan anew by `look`.

    A marker is the file by which a trainer's hook says which increments a checkpoint follows. Each sleep
    lasts until files arrive; 0.25 s where the system does not report that. Raises what `look` raises.
    """
    if planned.trainer.awaits_marker:
        from exporter.storage.arrivals import Arrivals  # few deltas wait for anything

        arrivals = Arrivals.of_trainer(planned.trainer.catalog.prefix.parent)
        while planned.trainer.awaits_marker:
            arrivals.sleep(_MARKER_POLL_S)
            planned = look()
    return planned


def _new_log(
    request: ExportRequest,
    progress: ProgressFactory,
    why: PositionError,
    *,
    is_watching: bool,
    beyond: int = 0,
) -> Exported:
    """Publish a base that begins a new log, because a delta failed with `why`; the result's notes say so.

    Unless the request names one checkpoint, the base also gets the trainer's increments if its checkpoint is
    from an earlier step than the published position, or than `beyond`. `is_watching` is as for `export_base`.
    Raises ExportError or OSError; nothing was published then.
    """
    if is_named(request.ckpt_dir):
        beyond = 0
    else:
        with suppress(NotUpdatable, ManifestError, CheckpointError):
            beyond = max(beyond, read_log(request.out).at.step or 0)
    done = export_base(request, progress, beyond=beyond, is_watching=is_watching)
    said = f"a new base, not a delta: {why.message}" + (f" ({why.cause})" if why.cause else "")
    return replace(done, plan=replace(done.plan, target_notes=(said, *done.plan.target_notes)))


def _tidied(log: DeltaLog, published: PublishedDelta) -> tuple[ExportError, ...]:
    """Merge and remove the deltas that are due after `published`; return the error of that in a tuple, or ().

    An error of reading the hold is returned, too, and one of the operating system as PublishError. Nothing is
    raised: the delta is published in any case, and the next one tries again. Deltas are removed at most once
    in ten seconds, however quickly they follow each other, as spare files stay for minutes anyway.
    """
    try:
        with writing(log.path):
            times = (log.newest.manifest.created, published.manifest.created)
            before, now = (int(time.timestamp() // _REMOVE_EVERY_S) for time in times)
            tidy(log.model, published.log, removes=before != now)
            log.hold.read()
    except ExportError as error:
        return (error,)
    return ()


class _Found(Struct, frozen=True):
    """The changes to send, the number of bytes that were compared, and the hashes of all rows."""

    divided: Divided
    compared_bytes: int = 0
    hashes: HashIndex | None = None


def _changes(planned: IncrementalPlan, scratch: Path, progress: ProgressFactory) -> _Found:
    """Return the changes to send: all, or only the changes that the request's tolerance does not hold back.

    Large intermediate files are written in `scratch`; checksums that were verified are kept beside the log.

    Raises:
        WildValues: rows are beyond `--max-norm`, and are to be refused.
        TableFull, SchemaChanged: the changes do not fit the base.
        CheckpointError, MappingError, VerificationError, PositionError, PublishError: see errors.py.
        UsageError: `--max-norm`, or an option of the engine, is malformed.
        EngineFailed: the engine that compares failed.
        OSError: scratch files cannot be written.
    """
    published, request, log = cache(planned.log.state), planned.request, planned.log
    found = _all_changes(planned, published, scratch, progress)
    if planned.allowed.is_nothing and not request.max_norm:
        return found
    from exporter.delta.residual import Waiting  # late: of exact deltas, which are most
    from exporter.delta.tolerance import divide

    changes = found.divided.changes
    state, allowed, spec = published(), planned.allowed, log.base.entry.mapping_spec
    files = CheckedFiles.of(log.path / CHECKED_DIRECTORY, state.stored.values())
    state.trust(known := files.known(state.stored.values()))
    coded = {part.served_name for each in spec.sources() if each.is_in_8_bits for part in each.variables}
    if request.max_norm:
        from exporter.pipeline.norm_bounds import norm_bounds

        allowed = replace(allowed, norms=norm_bounds(log, request.max_norm, coded), on_wild=request.on_wild)
    lost, now = log.trained.left_out if planned.waiting is None else None, time.time()
    divided = divide(
        changes,
        state,
        log.schema,
        allowed,
        scratch,
        planned.waiting or Waiting(otherwise=now if lost is None else _since(lost, now)),
        coded=coded,
        first=_new_rows(changes, spec),
    )
    if state.checked:
        files.save(state.checked | known)  # the file is replaced: what was known stays known
    hashes = None if found.hashes is None else _of_published(found.hashes, divided.stale, log.schema)
    return replace(found, divided=divided, hashes=hashes)


def _new_rows(changes: Mapping[str, Change], spec: MappingSpec) -> dict[str, Array]:
    """Return the row numbers of new keys in dynamic tables, by the name of the variable of values.

    `changes` are by variable. The published rows at these numbers are another key's, or of none, so that
    distances from them mean nothing.
    """
    found = ((table.keys[3], changes.get(table.keys[2])) for table in spec.dynamic)
    return {values: change.ids for values, change in found if isinstance(change, Rows)}


def _rounded_so_far(planned: IncrementalPlan, rounded: Rounded | None) -> Rounded | None:
    """Return the record of all rows that are served rounded after this delta; None if there are none.

    `rounded` is the record of this delta's rows, None without any. Where increments list the changes, earlier
    deltas' rows are included; a comparison sends every row that differs.
    """
    before = planned.log.trained.rounded
    if not planned.trainer.plan.is_known:
        return rounded
    return before if rounded is None else rounded.since(before)


def _of_published(index: HashIndex, stale: Mapping[str, Array], schema: Schema) -> HashIndex:
    """Return the hashes of the published rows: the trainer's hashes without the rows that stay `stale`.

    `index` has the trainer's hashes, `stale` the numbers of the rows that are served otherwise, by variable.
    """
    from exporter.delta.row_hashes import without_rows

    tables = dict(index.tables)
    for variable in schema.variables:
        if variable.name in stale and variable.name in tables:
            rows = stale[variable.name]
            tables[variable.name] = without_rows(tables[variable.name], rows, variable.row_bytes)
    return replace(index, tables=tables)


def _all_changes(
    planned: IncrementalPlan, published: Callable[[], LayeredState], scratch: Path, progress: ProgressFactory
) -> _Found:
    """Return all changes since the newest position: from increments, or else by comparing every row.

    `published` returns the published state, which is read only if needed. Large intermediate files are
    written in `scratch`. Raises CheckpointError, VerificationError, TableFull, SchemaChanged, MappingError,
    NotFinite or PublishError; EngineFailed or UsageError from an engine; OSError if scratch files cannot be
    written.
    """
    log, trainer = planned.log, planned.trainer
    if trainer.plan.is_known:
        remembered = () if planned.waiting is None else (planned.waiting.changes,)
        # held-back rows first: increments have newer values of them
        layers = (*remembered, *trainer.layers())
        if needs_folding(layers, log.schema):
            layers = fold_whole(layers, log.schema, published())
        layers = (*layers, table_changes(log, trainer, scratch).changes)
        return _Found(Divided({**merge_changes(layers, log.schema, scratch), **planned.lookups}))
    from exporter.delta.diff import Comparison, diff
    from exporter.delta.row_hashes import BlockHasher, HashIndex, most_bytes, read_index

    spec = log.base.entry.mapping_spec
    # Workers on other machines cannot see the bundle that an archive becomes here.
    runner = _runner(planned.request) if trainer.archive is None else None
    trainer = trainer.in_bundle(spec, scratch / "source" / "model.ckpt", progress)
    compared = ordinary(log.schema, spec)
    # What is in the place of the cache may be of any size.
    limit = most_bytes({each.name: each.bytes_ for each in compared.variables if each.is_table})
    known = read_index(log.path / HASHES_DIRECTORY, **_state_key(log), limit=limit)
    with progress("compare", trainer.mapping.bytes_) as bar:
        hasher = known.hasher if known else BlockHasher.fresh()
        if known is None and runner is not None:  # a fixed seed, so that a later run can continue the job
            hasher = BlockHasher.of(f"{log.lineage} {log.at.position}")
        how = Comparison(scratch, known, hasher, progress=bar, runner=runner)
        found = diff(published(), trainer.state(), compared, how)
    tables = table_changes(log, trainer, scratch)
    # Without the state's id, which only the published delta has.
    hashes = HashIndex(log.lineage, planned.position, hasher, found.hashes, state="")
    compared_bytes = found.bytes_ + tables.compared_bytes
    return _Found(Divided(found.changes | tables.changes), compared_bytes, hashes)


def _runner(request: ExportRequest) -> Runner | None:
    """Return a runner whose tasks compare, if the request names an engine; else None.

    Raises UsageError for an unknown engine or option of it.
    """
    if request.jobs.engine is None:
        return None
    from exporter.jobs.runner import Runner

    return Runner.of(request.jobs, request.out, resumes=not is_trusting(request.out))
