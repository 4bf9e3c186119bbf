"""The state of each replica and of each model of a fleet, and its findings, the worst first.

A model is fresh only if every replica answers from its newest publication. Replicas at a hold lack nothing
that they may apply; but they are not fresh.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import few
from exporter.publish.judge import (
    Code,
    Finding,
    Level,
    Limits,
    code_of,
    command,
    silent,
    two_publishers,
)
from exporter.publish.made_by import new_base
from exporter.storage.local_paths import quoted
from exporter.terminal.progress import count, human_time
from serving.agent.puller import Trouble
from serving.agent.view import FleetView, ModelView, ReplicaView, StoreView, VersionView
from serving.documents import FleetFinding
from serving.status import VersionState

_LONG_WAIT_S = 60.0
"""Seconds after which publications that a canary has not approved are trouble."""
_NAMED = 3
_MANY_RESTARTS = 3
"""The number of restarts in ten minutes from which a server counts as failing."""
SKEW_S = 60.0
"""Seconds by which the clocks of two machines may differ without a finding."""
_NEARLY_FULL_PERCENT = 80


_OF_REPLICAS = {
    Code.DIFFERS: ("does not hold what was published", "do not hold what was published"),
    Code.DOWN: ("is down", "are down"),
    Code.ABSENT: ("serves no version", "serve no version"),
    Code.NOT_UPDATABLE: ("is not updatable", "are not updatable"),
    Code.REFUSES: ("refuses a delta", "refuse a delta"),
    Code.LATE: ("is late", "are late"),
    Code.BEYOND_HOLD: ("is beyond what it may serve", "are beyond what they may serve"),
    Code.LOADING: ("loads a version", "load a version"),
    Code.UNASKED: ("was not asked yet", "were not asked yet"),
    Code.UPDATING: ("takes the newest publication now", "take the newest publication now"),
}
"""The words for one replica in a state, and for several; the other states are findings of their model."""


class Standing(Struct, frozen=True):
    """The state of a replica; `why` adds the reason, empty if the state says it all."""

    code: Code
    why: str = ""


def document(finding: Finding) -> FleetFinding:
    """Return a finding in the form of `/status.json`."""
    code, level = finding.code, finding.level.on_page
    return FleetFinding(
        finding.model, level, code.word, finding.text, finding.why, finding.command, code.value
    )


class Row(Struct, frozen=True):
    """A replica and its state."""

    replica: ReplicaView
    standing: Standing


class ModelStanding(Struct, frozen=True):
    """A model, its replicas and its findings, each with the worst first."""

    model: ModelView
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]

    @property
    def fresh(self) -> int:
        """Return the number of replicas that answer from the newest publication."""
        return sum(row.standing.code is Code.FRESH for row in self.rows)


class FleetStanding(Struct, frozen=True):
    """All models; `findings` has the findings of all, the worst first, empty if every replica is fresh."""

    models: tuple[ModelStanding, ...]
    findings: tuple[Finding, ...]

    @property
    def level(self) -> Level:
        """Return the level of the worst finding; GOOD without any."""
        return self.findings[0].level if self.findings else Level.GOOD

    @property
    def headline(self) -> str:
        """Return the worst finding as a sentence; `Every replica is fresh` without any."""
        return self.sentence(self.findings[0]) if self.findings else "Every replica is fresh"

    def sentence(self, finding: Finding) -> str:
        """Return a finding as a sentence, after the model's name if there are several models."""
        if len(self.models) > 1:
            return f"{finding.model}: {finding.text}"
        return finding.text[:1].upper() + finding.text[1:]


def assess(view: FleetView, fresh_within_s: float) -> FleetStanding:
    """Return the states of all models, the worst first.

    A replica that lacks a publication for more than `fresh_within_s` is late. UsageError if trusted keys
    cannot be read.
    """
    models = [_assess(model, fresh_within_s) for model in view.models]
    findings = [finding for model in models for finding in model.findings]
    return FleetStanding(
        tuple(sorted(models, key=_worst)), tuple(sorted(findings, key=lambda finding: finding.code.rank))
    )


def _worst(model: ModelStanding) -> int:
    """Return the rank of a model's worst finding, the lowest being the worst; len(Code) without any."""
    return min((finding.code.rank for finding in model.findings), default=len(Code))


def standing(model: ModelView, replica: ReplicaView, fresh_within_s: float) -> Standing:
    """Return the state of one replica of `model`.

    A replica that lacks a publication for more than `fresh_within_s` seconds is late.
    """
    if not replica.is_answering:
        if not replica.error:
            return Standing(Code.UNASKED)
        is_absent = replica.error.startswith("NOT_FOUND")
        return Standing(Code.ABSENT if is_absent else Code.DOWN, replica.error)
    served = replica.served
    if replica.audited is not None and replica.audited.differing:
        return Standing(Code.DIFFERS, "its values differ from what was published: restart this server")
    if served is None:
        messages = "; ".join(version.message for version in replica.versions if version.message)
        return Standing(Code.LOADING if _is_loading(replica) else Code.ABSENT, messages)
    if _is_beyond(model, replica, served):
        return Standing(Code.BEYOND_HOLD, f"{model.position} is the newest that it may serve")
    code, why = code_of(served, model, Limits(fresh_within_s), replica.error, is_loading=_is_loading(replica))
    return Standing(code, _joined(why, replica) if why and why != replica.error else why)


def _is_beyond(model: ModelView, replica: ReplicaView, served: VersionView) -> bool:
    """Return True if a replica serves a position beyond the hold, and is not the one that a canary judges."""
    if served.position is None or served.behind_deltas is None or served.superseded_s:
        return False
    if model.position is None or served.position <= model.position or (model.hold or 0) < 0:
        return False
    on_trial = None if model.canary is None else model.canary.replica
    return model.is_held or on_trial not in (None, replica.address)


def _is_loading(replica: ReplicaView) -> bool:
    loading = (VersionState.START.name, VersionState.LOADING.name)
    return any(version.state in loading for version in replica.versions)


def _joined(why: str, replica: ReplicaView) -> str:
    messages = [version.message for version in replica.versions if version.message]
    return ": ".join([why, *messages])


def _assess(model: ModelView, fresh_within_s: float) -> ModelStanding:
    rows = [Row(replica, standing(model, replica, fresh_within_s)) for replica in model.replicas]
    rows.sort(key=lambda row: (row.standing.code.rank, natural(row.replica.address)))
    findings = [replace(finding, model=model.name) for finding in _findings(model, rows)]
    findings.sort(key=lambda finding: finding.code.rank)
    return ModelStanding(model, tuple(rows), tuple(findings))


def natural(address: str) -> list[tuple[str, int]]:
    """Return a key for sorting addresses: r2 before r10."""
    return [
        (text, int(number or 0))
        for text, number in re.findall(r"([^0-9]*)([0-9]{1,18})?", address)
        if text or number
    ]


def _findings(model: ModelView, rows: Sequence[Row]) -> Iterator[Finding]:
    yield from _of_publications(model)
    yield from _of_canary(model)
    if not rows:
        yield Finding(Code.NO_REPLICA, "no replica is known", "does the name that --target gives resolve?")
        return
    yield from _of_restarts(model, rows)
    if all(row.standing.code is Code.DOWN for row in rows) and len(rows) > 1:
        text = f"none of {len(rows)} replicas answers"
        yield Finding(Code.SILENT, text, rows[0].standing.why, _ask(Code.SILENT, model, rows[0]))
        return
    for code, (of_one, of_several) in _OF_REPLICAS.items():
        found = [row for row in rows if row.standing.code is code]
        if not found:
            continue
        names = few([row.replica.address for row in found], _NAMED)
        said = of_one if len(found) == 1 else of_several
        text = f"{len(found)} of {count(len(rows), 'replica')} {said}: {names}"
        yield Finding(code, text, command=_ask(code, model, found[0]))


def _ask(code: Code, model: ModelView, row: Row) -> str:
    """Return the shell command to type for a replica in this state; "" if nobody has to do anything."""
    address, name = row.replica.address, model.name
    if code.level is Level.BUSY:
        return ""
    if code is Code.BEYOND_HOLD:
        return command("export-model", "rollback", _where_held(model), "--to", str(model.position))
    if code is Code.DIFFERS:
        return command("serve-model", "reload", address, "--model-name", name)
    return command("serve-model", "status", address, "--model-name", name, "--model-base-path", model.path)


def _doctor(model: ModelView) -> str:
    return command("export-model", "doctor", model.path)


def _where_held(model: ModelView) -> str:
    """Return the directory, or the URL of the store, in which the hold was set."""
    return model.path if model.held_by is None else str(model.held_by.place(Path(model.path)))


def _lifting(model: ModelView) -> list[str]:
    """Return the words of the command that lifts the hold, in the directory or store where it was set."""
    by, path = model.held_by, Path(model.path)
    return ["export-model", "resume", model.path] if by is None else by.lifting(path)


def _past(model: ModelView) -> str:
    """Return the shell command that ends a rollback.

    After a canary's rollback, the rejected values are not published again.
    """
    words = ["export-model", "resume", _where_held(model)]
    return command(*words, *(["--lift-only"] if model.rollback and model.rollback.is_canary else []))


def _of_publications(model: ModelView) -> Iterator[Finding]:
    """Yield findings about the published model, and about replicas that cannot apply it.

    UsageError if trusted keys cannot be read.
    """
    trouble = None if model.store is None else model.store.trouble
    yield from _of_hold(model)
    if model.problem and trouble is None:
        yield Finding(Code.UNSEEN, "what is published cannot be seen", model.problem, _doctor(model))
    if model.base_wanted:
        yield Finding(
            Code.BASE_WANTED,
            "a new base is needed: replicas refuse a delta, and no other leads past it",
            command=_new_base(model),
        )
    yield from _of_publishers(model)
    yield from _of_overlays(model)
    for found in model.quarantined:
        code, what = Code.QUARANTINED, f"every replica refuses delta {found.delta}"
        if found.is_damaged:
            code, what = Code.DAMAGED, f"delta {found.delta} is damaged, and every replica refuses it"
        yield Finding(code, what, found.reason, _doctor(model))
    if model.overwritten:
        yield Finding(Code.OVERWRITTEN, model.overwritten, command=_doctor(model))
    if model.untrusted:
        yield Finding(
            Code.UNTRUSTED,
            f"{count(len(model.untrusted), 'publication')} that no trusted key has signed",
            model.untrusted[0],
            f"export-model history {quoted(_place(model))}",
        )
    if model.store is not None and trouble is not None:
        yield _of_store(model, model.store, trouble)
    if model.store is not None and model.store.waiting:
        yield Finding(
            Code.WITHHELD,
            f"{count(len(model.store.waiting), 'publication')} of the store cannot be fetched after the "
            "rollback here",
            "" if model.store.way_on else "they wait for what the store publishes next",
            model.store.way_on,
        )


def _of_hold(model: ModelView) -> Iterator[Finding]:
    """Yield the finding about a hold that a person or a rollback set, if there is one."""
    waits = "what is published from now on waits" if not model.waiting else _waits(model)
    by = model.held_by
    if model.rollback is not None:
        why = [model.rollback.reason if by is None else by.text]
        why += ["replicas stay there until this is typed, once the cause is mended"]
        yield Finding(
            Code.ROLLED_BACK,
            f"rolled back to the values of {model.rollback.back_to}: {waits}",
            "; ".join(filter(None, why)),
            _past(model),
        )
    elif model.is_held and model.hold is not None and model.hold < 0:
        yield Finding(
            Code.HOLD_UNREADABLE,
            "the hold cannot be read, so no replica is updated",
            command=f"export-model doctor {quoted(model.path)}",
        )
    elif model.is_held:
        code = Code.PUBLICATIONS_HELD if model.waiting else Code.HELD
        yield Finding(
            code,
            f"held at {model.hold}: {waits}",
            "" if by is None else by.text,
            command(*_lifting(model)),
        )


def _of_publishers(model: ModelView) -> Iterator[Finding]:
    """Yield findings about the machines that publish: their silence, their number and their clocks."""
    if model.silence.is_too_long:
        yield silent(
            _place(model),
            model.silence,
            is_learned=model.silence_is_learned,
            takes_deltas=model.position is not None,
        )
    if model.publishers:
        yield two_publishers(_place(model), model.publishers)
    if abs(skew := model.skew_s or 0.0) > SKEW_S:
        way = "ahead of" if skew > 0 else "behind"
        text = f"the publisher's clock is {human_time(abs(skew))} {way} this machine's"
        why = "what appears here has another time in its manifest; ages are measured by this machine's clock"
        yield Finding(Code.CLOCK, text, why, "timedatectl status")


def _of_store(model: ModelView, store: StoreView, trouble: Trouble) -> Finding:
    """Return the finding that a store's publications are not here: the reason, since when, and a command.

    `trouble` is the failure of the last look into the store. UsageError if trusted keys cannot be read.
    """
    since = f"since {trouble.since:%H:%M:%S} UTC"
    text = f"{trouble.text}, {since}"
    doctor = command("export-model", "doctor", store.url)
    level = Level.WRONG if model.problem else None
    match trouble.code:
        case Code.DAMAGED:
            why = f"{trouble.why}; servers stay where they are until something takes its place: {doctor}"
            return Finding(Code.DAMAGED, text, why, _new_base(model))
        case Code.DISK_FULL:
            return Finding(Code.DISK_FULL, text, trouble.why, trouble.hint)
        case Code.UNTRUSTED:
            return Finding(Code.UNTRUSTED, text, trouble.why, command("export-model", "history", store.url))
    why = f"{trouble.why or trouble.hint}; from elsewhere it may be seen: type this as {store.read_by}"
    return Finding(trouble.code, text, why, doctor, known_level=level)


def _place(model: ModelView) -> str:
    """Return where the model is published: the URL of its store, or its directory."""
    return model.path if model.store is None else model.store.url


def _new_base(model: ModelView) -> str:
    return new_base(_place(model), manifests=Path(model.path))


def _of_overlays(model: ModelView) -> Iterator[Finding]:
    fills = [
        replica.served.tables.overlay_percent
        for replica in model.replicas
        if replica.served is not None and replica.served.tables is not None
    ]
    if max(fills, default=0) >= _NEARLY_FULL_PERCENT:
        yield Finding(
            Code.OVERLAY,
            f"the overlay of mapped tables is {max(fills)} % full",
            "a watch publishes a new base when it is; --overlay-rows N makes it larger",
            _new_base(model),
        )


def _of_restarts(model: ModelView, rows: Sequence[Row]) -> Iterator[Finding]:
    """Yield the finding about replicas that restarted three times or more in ten minutes, if any did."""
    found = [row for row in rows if row.replica.restarts >= _MANY_RESTARTS]
    if found:
        found.sort(key=lambda row: -row.replica.restarts)
        names = few([f"{row.replica.address} ({row.replica.restarts} times)" for row in found], _NAMED)
        said = "restarts" if len(found) == 1 else "restart"
        ages = [row.replica.restarted_s for row in found if row.replica.restarted_s is not None]
        latest = f", the last time {human_time(min(ages))} ago" if ages else ""
        yield Finding(
            Code.RESTARTS,
            f"{len(found)} of {count(len(rows), 'replica')} {said} again and again: {names}",
            f"in the last ten minutes{latest}; its log says why it ended, the machine's whether it had "
            "memory; this goes by itself within ten minutes once it stays up",
            _ask(Code.RESTARTS, model, found[0]),
        )


def _of_canary(model: ModelView) -> Iterator[Finding]:
    canary = model.canary
    if canary is None:
        if model.waiting and not model.is_held:
            yield Finding(Code.CANARY, f"{_waiting(model)} for a canary")
        return
    if canary.failing:
        at = "" if canary.approved is None else f" at {canary.approved}"
        history = command("export-model", "history", model.path)
        yield Finding(Code.GOLDEN, f"golden requests fail{at}", canary.failing, history)
    if model.waiting and not model.is_held and model.rollback is None:
        code = Code.CANARY_LATE if canary.waiting_s > _LONG_WAIT_S else Code.CANARY
        doing = canary.doing if canary.replica is None else f"{canary.replica} {canary.doing}"
        told = _doctor(model) if code is Code.CANARY_LATE else ""
        if told and model.held_by is not None and model.held_by.url:
            doing, told = f"{doing}; if no agent has that canary, lift its hold", command(*_lifting(model))
        yield Finding(code, f"the canary decides: {_waits(model)}", doing, told)


def _waits(model: ModelView) -> str:
    return f"{_waiting(model)} (newest {model.published}, serving {serving(model)})"


def _waiting(model: ModelView) -> str:
    return f"{count(model.waiting, 'publication')} {'waits' if model.waiting == 1 else 'wait'}"


def ages(model: ModelView, seconds: Callable[[float], str]) -> str:
    """Return the age of the values that answering replicas serve: `1.2 s`, `1.2 s to 3 min`, or `unknown`.

    `seconds` formats a duration.
    """
    served = [replica.served for replica in model.replicas if replica.served and replica.is_answering]
    found = [version.served_age_s for version in served if version.served_age_s is not None]
    if not found:
        return "unknown"
    youngest, oldest = seconds(min(found)), seconds(max(found))
    return youngest if youngest == oldest else f"{youngest} to {oldest}"


def serving(model: ModelView) -> str:
    """Return the positions that answering replicas serve: `65`, or `60 to 65`; `nothing` if none serves any.

    A version without positions counts by its number.
    """
    at = {
        replica.served.position if replica.served.position is not None else replica.served.number
        for replica in model.replicas
        if replica.served is not None and replica.is_answering
    }
    if not at:
        return "nothing"
    return f"{min(at)} to {max(at)}" if len(at) > 1 else str(*at)
