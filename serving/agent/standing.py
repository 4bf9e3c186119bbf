"""What to say of a fleet first: the state of each replica and of each model, the worst first.

A model is fresh only if every replica answers from its newest publication. A hold keeps replicas at what it
allows, so that they lack nothing that they may take; they are not fresh all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from exporter.newer_python import StrEnum
from exporter.storage.local_paths import quoted
from exporter.terminal.progress import count
from serving.agent.view import FleetView, ModelView, ReplicaView
from serving.documents import FleetFinding
from serving.status import VersionState

_LONG_WAIT_S = 60.0
"""Publications that a canary keeps back for longer than this are trouble; until then it is at work."""
_NAMED = 3
_NEARLY_FULL_PERCENT = 80


class Level(StrEnum):
    """How bad a state is: an operator has to act, may have to act, need not act, all is well."""

    BAD = "bad"
    WARNING = "warning"
    BUSY = "busy"
    GOOD = "good"


class State(Enum):
    """The states of replicas and of models, the worst first: a word for a row of a table, and the level."""

    SILENT = ("silent", Level.BAD)
    GOLDEN = ("golden requests fail", Level.BAD)
    ROLLED_BACK = ("rolled back", Level.BAD)
    DIFFERS = ("wrong values", Level.BAD)
    PUBLICATIONS_HELD = ("held", Level.BAD)
    UNSEEN = ("unseen", Level.BAD)
    BASE_WANTED = ("base wanted", Level.BAD)
    QUARANTINED = ("delta refused", Level.BAD)
    NO_REPLICA = ("no replica", Level.BAD)
    DOWN = ("down", Level.BAD)
    ABSENT = ("serves nothing", Level.BAD)
    NOT_UPDATABLE = ("not updatable", Level.BAD)
    REFUSES = ("refuses a delta", Level.BAD)
    LATE = ("late", Level.BAD)
    OVERLAY = ("overlay fills", Level.WARNING)
    CANARY_LATE = ("canary waits", Level.WARNING)
    STORE = ("store unseen", Level.WARNING)
    WITHHELD = ("withheld", Level.WARNING)
    HELD = ("held", Level.WARNING)
    LOADING = ("loading", Level.WARNING)
    UNKNOWN = ("unknown", Level.WARNING)
    UNASKED = ("not asked yet", Level.BUSY)
    CANARY = ("waits for canary", Level.BUSY)
    UPDATING = ("updating", Level.BUSY)
    FRESH = ("fresh", Level.GOOD)

    def __init__(self, word: str, level: Level) -> None:
        self.word = word
        self.level = level
        self.rank = len(self.__class__.__members__)


_OF_REPLICAS = {
    State.DIFFERS: ("does not hold what was published", "do not hold what was published"),
    State.DOWN: ("is down", "are down"),
    State.ABSENT: ("serves no version", "serve no version"),
    State.NOT_UPDATABLE: ("is not updatable", "are not updatable"),
    State.REFUSES: ("refuses a delta", "refuse a delta"),
    State.LATE: ("is late", "are late"),
    State.LOADING: ("loads a version", "load a version"),
    State.UNASKED: ("was not asked yet", "were not asked yet"),
    State.UPDATING: ("takes the newest publication now", "take the newest publication now"),
}
"""What is said of one replica in a state, and of several; the other states are findings of their model."""


class Standing(Struct, frozen=True):
    """The state of a replica; `why` has more words, empty if the state says it all."""

    state: State
    why: str = ""


class Finding(Struct, frozen=True):
    """What there is to say about a model, with details, and the command that helps; both may be empty."""

    state: State
    text: str
    details: str = ""
    command: str = ""
    model: str = ""

    @property
    def document(self) -> FleetFinding:
        """Its part of `/status.json`."""
        state = self.state
        return FleetFinding(self.model, state.level, state.word, self.text, self.details, self.command)


class Row(Struct, frozen=True):
    """A replica and its state."""

    replica: ReplicaView
    standing: Standing


class ModelStanding(Struct, frozen=True):
    """A model, its replicas with the worst first, and what there is to say, the worst first."""

    model: ModelView
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]

    @property
    def fresh(self) -> int:
        """How many replicas answer from the newest publication."""
        return sum(row.standing.state is State.FRESH for row in self.rows)


class FleetStanding(Struct, frozen=True):
    """All models; `findings` are those of all of them, the worst first, empty if every replica is fresh."""

    models: tuple[ModelStanding, ...]
    findings: tuple[Finding, ...]

    @property
    def level(self) -> Level:
        """That of the worst finding."""
        return self.findings[0].state.level if self.findings else Level.GOOD

    @property
    def headline(self) -> str:
        """The worst finding as a sentence."""
        return self.sentence(self.findings[0]) if self.findings else "Every replica is fresh"

    def sentence(self, finding: Finding) -> str:
        """A finding as a sentence, which names the model if there are several."""
        if len(self.models) > 1:
            return f"{finding.model}: {finding.text}"
        return finding.text[:1].upper() + finding.text[1:]


def assess(view: FleetView, fresh_within_s: float) -> FleetStanding:
    """The states of all models; a replica that lacks a publication for longer than `fresh_within_s` is
    late.
    """
    models = tuple(_assess(model, fresh_within_s) for model in view.models)
    findings = [finding for model in models for finding in model.findings]
    return FleetStanding(models, tuple(sorted(findings, key=lambda finding: finding.state.rank)))


def standing(model: ModelView, replica: ReplicaView, fresh_within_s: float) -> Standing:
    """The state of one replica."""
    if not replica.is_answering:
        if not replica.error:
            return Standing(State.UNASKED)
        is_absent = replica.error.startswith("NOT_FOUND")
        return Standing(State.ABSENT if is_absent else State.DOWN, replica.error)
    served = replica.served
    if replica.audited is not None and replica.audited.differing:
        return Standing(State.DIFFERS, "its values differ from what was published: restart this server")
    if served is None:
        messages = "; ".join(version.message for version in replica.versions if version.message)
        return Standing(State.LOADING if _is_loading(replica) else State.ABSENT, messages)
    is_of_log = served.position is not None and served.behind_deltas is not None
    at = served.position if served.position is not None else served.number
    if model.published is None:  # its directory cannot be read
        return Standing(State.UNKNOWN)
    is_newest = at >= model.published
    if is_newest and (is_of_log or served.position is None):
        return Standing(State.FRESH)
    if replica.error:
        return Standing(State.REFUSES, replica.error)
    if served.superseded_s:
        state = State.LATE if served.superseded_s > fresh_within_s else State.UPDATING
        return Standing(state, _joined("it has not loaded the newest base", replica))
    if not is_of_log:
        is_newer = model.newest_version is not None and model.newest_version > served.number
        if is_newer and model.position is None:  # no version takes deltas: the server loads each by itself
            state = State.UPDATING if _is_loading(replica) else State.LATE
            return Standing(state, _joined(f"version {model.newest_version} is newer", replica))
        why = "its version takes no deltas" if served.position is None else "its log is not published here"
        return Standing(State.NOT_UPDATABLE, _joined(why, replica))
    if (served.stale_s or 0.0) > fresh_within_s:
        return Standing(State.LATE)
    if not served.behind_deltas and model.waiting:
        return Standing(State.HELD if model.is_held else State.CANARY)
    return Standing(State.UPDATING)


def _is_loading(replica: ReplicaView) -> bool:
    loading = (VersionState.START.name, VersionState.LOADING.name)
    return any(version.state in loading for version in replica.versions)


def _joined(why: str, replica: ReplicaView) -> str:
    messages = [version.message for version in replica.versions if version.message]
    return ": ".join([why, *messages])


def _assess(model: ModelView, fresh_within_s: float) -> ModelStanding:
    rows = [Row(replica, standing(model, replica, fresh_within_s)) for replica in model.replicas]
    rows.sort(key=lambda row: (row.standing.state.rank, natural(row.replica.address)))
    findings = [replace(finding, model=model.name) for finding in _findings(model, rows)]
    findings.sort(key=lambda finding: finding.state.rank)
    return ModelStanding(model, tuple(rows), tuple(findings))


def natural(address: str) -> list[tuple[str, int]]:
    """A key for sorting: r2 before r10."""
    return [
        (text, int(number or 0))
        for text, number in re.findall(r"([^0-9]*)([0-9]{1,18})?", address)
        if text or number
    ]


def _findings(model: ModelView, rows: Sequence[Row]) -> Iterator[Finding]:
    yield from _of_publications(model)
    yield from _of_canary(model)
    if not rows:
        yield Finding(State.NO_REPLICA, "no replica is known", "does the name that --target gives resolve?")
        return
    if all(row.standing.state is State.DOWN for row in rows) and len(rows) > 1:
        yield Finding(State.SILENT, f"none of {len(rows)} replicas answers", rows[0].standing.why)
        return
    for state, (of_one, of_several) in _OF_REPLICAS.items():
        found = [row for row in rows if row.standing.state is state]
        if not found:
            continue
        names = ", ".join(row.replica.address for row in found[:_NAMED])
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        said = of_one if len(found) == 1 else of_several
        yield Finding(state, f"{len(found)} of {count(len(rows), 'replica')} {said}: {names}{more}")


def _of_publications(model: ModelView) -> Iterator[Finding]:
    """What is wrong with what is published, or with taking it."""
    waits = "nothing waits yet" if not model.waiting else _waits(model)
    if model.rollback is not None:
        yield Finding(
            State.ROLLED_BACK,
            f"rolled back to the values of {model.rollback.back_to}: {waits}",
            model.rollback.reason,
            f"export-model resume {quoted(model.path)}",
        )
    elif model.is_held and model.hold is not None and model.hold < 0:
        yield Finding(
            State.PUBLICATIONS_HELD,
            "the hold cannot be read, so no replica is updated",
            command=f"export-model doctor {quoted(model.path)}",
        )
    elif model.is_held:
        state = State.PUBLICATIONS_HELD if model.waiting else State.HELD
        yield Finding(
            state, f"held at {model.hold}: {waits}", command=f"export-model resume {quoted(model.path)}"
        )
    if model.problem:
        yield Finding(State.UNSEEN, "what is published cannot be seen", model.problem)
    if model.base_wanted:
        yield Finding(
            State.BASE_WANTED,
            "a new base is needed: replicas refuse a delta, and no other leads past it",
            command=f"export-model ... --out {quoted(model.path)} --updatable --again",
        )
    yield from _of_overlays(model)
    for found in model.quarantined:
        yield Finding(State.QUARANTINED, f"every replica refuses delta {found.delta}", found.reason)
    if model.store is not None and model.store.problem:
        yield Finding(State.STORE, "the store cannot be read", model.store.problem)
    if model.store is not None and model.store.waiting:
        yield Finding(
            State.WITHHELD,
            f"{count(len(model.store.waiting), 'publication')} of the store cannot be fetched after the "
            "rollback here",
            command=f"export-model merge {quoted(model.store.url)}",
        )


def _of_overlays(model: ModelView) -> Iterator[Finding]:
    fills = [
        replica.served.tables.overlay_percent
        for replica in model.replicas
        if replica.served is not None and replica.served.tables is not None
    ]
    if max(fills, default=0) >= _NEARLY_FULL_PERCENT:
        yield Finding(
            State.OVERLAY,
            f"the overlay of mapped tables is {max(fills)} % full",
            "a watch publishes a new base when it is; --overlay-rows N makes it larger",
            f"export-model ... --out {quoted(model.path)} --updatable --again",
        )


def _of_canary(model: ModelView) -> Iterator[Finding]:
    canary = model.canary
    if canary is None:
        if model.waiting and not model.is_held:
            yield Finding(State.CANARY, f"{_waiting(model)} for a canary")
        return
    if canary.failing:
        at = "" if canary.approved is None else f" at {canary.approved}"
        yield Finding(State.GOLDEN, f"golden requests fail{at}", canary.failing)
    if model.waiting and not model.is_held and model.rollback is None:
        state = State.CANARY_LATE if canary.waiting_s > _LONG_WAIT_S else State.CANARY
        doing = canary.doing if canary.replica is None else f"{canary.replica} {canary.doing}"
        yield Finding(state, f"the canary decides: {_waits(model)}", doing)


def _waits(model: ModelView) -> str:
    return f"{_waiting(model)} (newest {model.published}, serving {serving(model)})"


def _waiting(model: ModelView) -> str:
    return f"{count(model.waiting, 'publication')} {'waits' if model.waiting == 1 else 'wait'}"


def serving(model: ModelView) -> str:
    """The positions that replicas serve: `65`, or `60 to 65`; `nothing` if none serves any."""
    at = {
        replica.served.position if replica.served.position is not None else replica.served.number
        for replica in model.replicas
        if replica.served is not None and replica.is_answering
    }
    if not at:
        return "nothing"
    return f"{min(at)} to {max(at)}" if len(at) > 1 else str(*at)
