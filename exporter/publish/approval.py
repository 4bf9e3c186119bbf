"""A canary's approval of a log: its hold, advanced by compare-and-set under the model's lock.

The agent's canary lets one server pass the hold, and advances the hold when that server answers as it should.
If the hold is not where the canary expects it, a person, a rollback or another agent decided meanwhile.

Values that a canary rejected are never approved without a new judgement. Its rollbacks stay in the log and
are marked (`DeltaEntry.failed`): a canary that begins without a hold begins no later than at the newest of
them, whatever servers have by then.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from exporter.errors import ManifestError
from exporter.publish.commit import model_lock
from exporter.publish.delta_log import DeltaLog, LogDelta, read_log
from exporter.publish.hold import Hold
from exporter.publish.staging import Staging


def approve(log: Path, model: Path, *, expected: int | None, position: int) -> int | None:
    """Move the canary's hold in the log's directory `log` from `expected` to `position`.

    Return the position at which the hold is now. `model` is the model's base path; its lock is held
    meanwhile. With `expected` None there is no hold yet: then the new hold is at most at the position of the
    canary's newest rollback.

    None, with nothing changed, if the hold is not at `expected`, a person's or a rollback's hold is in force,
    the hold came from the store of this copy (no canary here moves that one), or, with `expected` None,
    another log is the newest.

    Raises:
        ManifestError, NotUpdatable: with `expected` None: the newest version cannot be read, or takes no
            deltas.
        TargetBusy: another process held the model's lock for a minute.
        OSError: the lock's file cannot be opened.
        TargetNotWritable, DiskFull, PublishError: the hold cannot be written, or not be synced to disk.
    """
    hold = Hold(log)
    # the staging before the lock: it deletes what killed runs left, which may be many gigabytes
    with Staging(model) as staging, model_lock(model):
        by = hold.by
        if hold.approved() != expected or hold.binds or (by is not None and by.url):
            return None
        if expected is None:
            found = read_log(model)
            if found.path != log:
                return None
            position = min([position, *_last_rollback(found)])
        hold.put(position, staging, canary=True)
    return position


def did_fail(log: DeltaLog, position: int) -> bool:
    """True if a canary rejected the values of a published position, and no canary has approved them since.

    A resumption that publishes such values again counts as rejected until a canary approves it. Rollbacks
    whose manifests are damaged are left out.

    Raises:
        PositionUnknown: no base of the log is at the position, and no delta ends there.
        ManifestError: the manifest of that delta is damaged.
    """
    taken_back = [(delta.entry.back_to or 0, delta.end) for delta in _failed(log)]
    found = log.standing(position)
    values_of = found.entry.back_to if isinstance(found, LogDelta) else None
    judged = [position]
    if values_of is not None and position > max([log.approved or 0, *(end for _, end in taken_back)]):
        judged.append(values_of)
    return any(to < one < end for one in judged for to, end in taken_back)


def _last_rollback(log: DeltaLog) -> list[int]:
    """The position of the canary's newest rollback, as a list; [] if there is none since the oldest base.

    Rollbacks whose manifests are damaged are left out.
    """
    oldest = min(base.at.position for base in log.bases)
    ends = [delta.end for delta in _failed(log) if delta.end >= oldest]
    return [max(ends)] if ends else []


def _failed(log: DeltaLog) -> list[LogDelta]:
    found = []
    for delta in log.deltas:
        with suppress(ManifestError):
            if delta.entry.failed:
                found.append(delta)
    return found
