"""Decide which publications are permitted: a hold binds, and no log ends by accident.

A command that publishes a version asks twice: before the work, to refuse at once, and under the model's lock,
where nothing can come in between. Deltas need no permission: servers do not follow them past a hold. A merged
delta does, which could carry servers past a rollback (`require_on_way`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from exporter.delta.spans import Span, SpanLike, plan_chain
from exporter.errors import ChainEnds, ManifestError, ModelHeld, PositionError
from exporter.publish.delta_log import DeltaLog, LogDelta, log_path
from exporter.publish.hold import HeldAt, Hold
from exporter.publish.versions import (
    VersionDir,
    newest_of,
    newest_version,
    read_head,
    read_manifest,
    require_signer,
    version_dirs,
)
from exporter.storage.local_paths import quoted


class Permission(Struct, frozen=True):
    """Options that permit publishing against a hold or a log.

    `despite_hold` permits a version, which every server would load, while the model is held. `plain` permits
    a version that takes no deltas, after one that does.
    """

    despite_hold: bool = False
    plain: bool = False

    def check(self, model: Path, *, takes_deltas: bool, versions: Sequence[VersionDir] | None = None) -> None:
        """Refuse to publish a version over a hold, or to end a log, unless an option permits it.

        `takes_deltas`: the new version does. The model's `versions` are listed unless they are given.

        Raises:
            ModelHeld: the model, or the newest version's log, is held by a person or a rollback.
            ChainEnds: the newest version takes deltas, and this one would not.
            UsageError: the newest version is signed, and this one would not be (`require_signer`).
            ManifestError: the versions cannot be listed.
            CheckpointError: the newest version's manifest cannot be fetched.
        """
        newest = newest_of(version_dirs(model) if versions is None else versions)
        log = None if newest is None else _log_of(newest)
        if newest is not None and newest.has_manifest:
            with suppress(ManifestError):
                require_signer(model, read_manifest(newest.path))
        if not self.despite_hold:
            for hold in binding(model, log):
                raise _held(model, hold)
        if log is not None and newest is not None and not takes_deltas and not self.plain:
            raise ChainEnds(
                f"{newest.path} takes deltas, and this version would not: servers that load it stop updating",
                hint="publish what changed: --incr; a new base: --new-base always; or, if this is meant: "
                "--despite deltas",
            )


REFUSING = Permission()
"""The default: no exception from a hold or a log."""


def binding(model: Path, log: int | None) -> tuple[Hold, ...]:
    """The holds that bind publishers: the model's own, then the hold of its log with number `log`.

    There may be none. With `log` None only the model's own counts.
    """
    return tuple(hold for hold in _holds(model, log) if hold.binds)


def hold_in_force(model: Path) -> Hold | None:
    """The hold that servers do not pass by themselves: the model's own, or else the hold of its newest log.

    It may be a person's or a canary's. None without one, or if the model's directory cannot be listed.
    CheckpointError if the newest version's manifest cannot be fetched.
    """
    with suppress(ManifestError):
        newest = newest_version(model)
        return next(iter(_holds(model, None if newest is None else _log_of(newest))), None)
    return None


def require_not_taken_back(model: Path, misfit: PositionError) -> None:
    """Raise ModelHeld, caused by `misfit`, if the newest version is a rollback's and the model is held.

    The trainer's next publication does not fit the restored values; it fits again after `resume`. Otherwise
    it returns. ManifestError if that version's manifest, or the model's directory, cannot be read;
    CheckpointError if the manifest cannot be fetched.
    """
    newest = newest_version(model)
    if newest is None or (told := read_manifest(newest.path).taken_back) is None or told.made != "rollback":
        return
    for hold in binding(model, _log_of(newest)):
        held = _held(model, hold)
        raise ModelHeld(
            f"{held.message.partition(',')[0]}, after a rollback to what the trainer does not continue",
            cause="; ".join(filter(None, (held.cause, misfit.message))),
            hint=f"go on with what the trainer has: export-model resume {quoted(model)}",
        ) from misfit


def require_on_way(log: DeltaLog, span: Span) -> None:
    """Refuse a merged delta that would bring servers to a position from which the model was rolled back.

    `span` is the merged delta's. Nothing is refused without a hold; nor if the delta ends beyond the hold, or
    the hold cannot be read, as no server follows the delta then.

    Raises:
        ModelHeld: it would.
        ManifestError: a delta's manifest cannot be read.
    """
    try:
        hold = log.hold.read()
    except ManifestError:
        return  # no server moves
    if hold is None or not span.end <= hold:
        return
    known: list[SpanLike] = [delta for delta in log.deltas if delta.end <= hold]
    # only what is newly reached: positions that servers pass already are none of the merger's doing
    passed, then = (_passed(spans, span.start) for spans in (known, [*known, span]))
    if span.end in then - passed:
        raise ModelHeld(
            f"{log.path} is held at {hold}: a delta {span} would lead servers to {span.end} again"
        )


def _passed(spans: Sequence[SpanLike], start: int) -> set[int]:
    try:
        return {span.end for span in plan_chain(spans, start)}
    except PositionError:
        return set()


def judged(log: DeltaLog) -> tuple[LogDelta, ...]:
    """The deltas up to a canary's approval, or all without a canary, in order.

    Only these are merged automatically.
    """
    approved = log.approved
    return tuple(delta for delta in log.deltas if approved is None or delta.end <= approved)


def _holds(model: Path, log: int | None) -> list[Hold]:
    holds = [Hold(model), *([] if log is None else [Hold(log_path(model, log))])]
    return [hold for hold in holds if hold.is_set]


def _log_of(version: VersionDir) -> int | None:
    """The number of the log of a base that takes deltas; None if it takes none, or its manifest is damaged.

    Publishing reports the damage then. CheckpointError if the manifest cannot be fetched.
    """
    with suppress(ManifestError):
        return read_head(version.path).log
    return None


def _held(model: Path, hold: Hold) -> ModelHeld:
    """Return the error for a hold that binds publishers.

    The hold is read once, as it may be lifted meanwhile.
    """
    held = hold.for_servers() or HeldAt(-1)
    where = f" ({hold.path} cannot be read)" if held.position < 0 else f" at {held.position}"
    place = model if held.by is None else held.by.place(model)
    return ModelHeld(
        f"{model} is held{where}, and servers would load a new version in spite of that",
        cause="" if held.by is None else held.by.text,
        hint=f"lift the hold: export-model resume {quoted(place)}; or publish anyway: --despite hold",
    )
