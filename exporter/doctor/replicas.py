"""Judge a model server's answers: does it run, does it serve the newest version, how far behind is it?

Nothing here calls a server: answers in, findings out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct, field

from exporter.delta.spans import plan_chain
from exporter.doctor.finding import Check, Finding, Level, command
from exporter.errors import CallFailed, ManifestError, PositionError
from exporter.progress import count
from exporter.publish.delta_log import LogDelta
from exporter.publish.versions import newest_version, read_head
from exporter.verify.log import VerifiedModel

AVAILABLE = "AVAILABLE"


class Answer(Struct, frozen=True):
    """What a server says of one version: its state, the error that it ended with, and where it stands.

    `position` and `lineage` are None where it takes no deltas, or was not asked.
    """

    state: str
    error: str = ""
    position: int | None = None
    lineage: str | None = None


class Replica(Struct, frozen=True):
    """A server's answers by version; `failure` says why there are none."""

    address: str
    name: str
    versions: Mapping[int, Answer] = field(default_factory=dict)
    failure: CallFailed | None = None


def judge(
    model: Path, found: VerifiedModel, replica: Replica, *, now: float, patience: float
) -> Iterator[Finding]:
    """Find what is wrong with a replica of `model`; it is not late within `patience` seconds of a
    publication.
    """
    where = f"{replica.name} on {replica.address}"
    if (failure := replica.failure) is not None:
        is_gone = failure.code == "UNAVAILABLE"
        start = command("serve-model", "run", model, "--port", replica.address.rpartition(":")[2])
        remedy = start if is_gone else command("serve-model", "status", replica.address, "--model", "NAME")
        yield Finding(Check.REPLICAS, Level.WRONG, failure.message, remedy, failure.cause)
        return
    newest = newest_version(model)
    if newest is None:
        return
    answer = replica.versions.get(newest.version)
    status = command("serve-model", "status", replica.address, "--model", replica.name)
    if answer is None or answer.state != AVAILABLE:
        serves = [str(version) for version, other in replica.versions.items() if other.state == AVAILABLE]
        state = "is not known there" if answer is None else f"is in state {answer.state}"
        what = f"version {newest.version} {state}; it serves {', '.join(serves) or 'nothing'}"
        level = Level.WRONG
        if serves and not (answer and answer.error) and _age(newest.path, now) < patience:
            level = Level.WARNING
        yield Finding(Check.REPLICAS, level, f"{where}: {what}", status, answer.error if answer else "")
        return
    if answer.position is None or found.log is None:
        return
    if answer.lineage is not None and answer.lineage != found.log.lineage:
        yield Finding(
            Check.REPLICAS,
            Level.WRONG,
            f"{where}: version {newest.version} is not the one published under {model}: it takes no delta of "
            "its log",
            status,
            f"its lineage is {answer.lineage}, expected {found.log.lineage}",
        )
        return
    yield from _behind(found, replica, answer.position, now=now, patience=patience)


def _behind(
    found: VerifiedModel, replica: Replica, position: int, *, now: float, patience: float
) -> Iterator[Finding]:
    assert found.log is not None
    log, where = found.log, f"{replica.name} on {replica.address}"
    update = command("serve-model", "update", replica.address, "--model", replica.name)
    if found.hold is not None and position > found.hold and not log.held.is_canary:
        yield Finding(
            Check.REPLICAS,
            Level.WARNING,
            f"{where} stands at {position}, beyond the hold at {found.hold}: only a rollback leads back",
            command("export-model", "rollback", log.model, "--to", str(found.hold)),
        )
        return
    within = [delta for delta in log.deltas if found.hold is None or delta.end <= found.hold]
    try:
        missing = plan_chain(within, position)
    except PositionError as error:
        yield Finding(
            Check.REPLICAS,
            Level.WRONG,
            f"{where} stands at {position}, from where no delta leads on",
            command("export-model", "verify", log.model),
            error.message,
        )
        return
    if missing:
        oldest = max(_age(delta.path, now) for delta in _lacking(within, position))
        level = Level.WARNING if oldest < patience else Level.WRONG
        goal, many = missing[-1].end, count(len(missing), "delta")
        message = f"{where} stands at {position}, {many} behind {goal}; the oldest is {_duration(oldest)} old"
        yield Finding(Check.REPLICAS, level, message, update)


def _lacking(deltas: list[LogDelta], position: int) -> list[LogDelta]:
    return [delta for delta in deltas if delta.end > position]


def _age(published: Path, now: float) -> float:
    """Seconds since a version or delta was published; 0 if it does not say."""
    try:
        return max(0.0, now - read_head(published).created.timestamp())
    except ManifestError:
        return 0.0


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
