"""What a model's canary does next: a function of the log, the replicas, the trial under way, and the time.

A base that servers have loaded by themselves is asked the golden requests, too, but nobody can hold it back.

One replica goes first. The log's hold is how far the canary approved: it keeps the others back, and every
replica that starts. Who stands beyond it is the canary, so that nothing else has to be remembered.

    | the log's hold     | replicas                                | action                            |
    |--------------------|-----------------------------------------|-----------------------------------|
    | a person's         | -                                       | `Idle`: a person decides          |
    | cannot be read     | -                                       | `Idle`                            |
    | none               | one was never asked                     | `Idle`                            |
    | none               | some serve the log, not on trial        | `Approve` what they serve already |
    | none               | the one on trial alone, or nobody, does | `Approve` where the trial began   |
    | none               | none does, all answer                   | `Approve` where its base stands   |
    | the canary's, at G | one stands beyond G                     | `Judge` it there; it stays there  |
    | the canary's, at G | answers at G are unknown, one stands so | `Learn` them                      |
    | the canary's, at G | nothing is published beyond             | `Idle`                            |
    | the canary's, at G | one was never asked, none is on trial   | `Idle`: it may stand beyond G     |
    | the canary's, at G | two in a row did not survive it         | `RollBack`                        |
    | the canary's, at G | somebody can go further                 | `Go`: first, for a bounded time   |
    | the canary's, at G | nobody can                              | `Idle`: they refuse, or are down  |

A replica that has not passed the hold within its time gives way to the next; refusals make others eligible
at once. Nothing here reads a clock, a file or the network.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from serving.agent.rollout import Observed, PublishedLog, Version

LOST_MEANS_BAD = 2
"""So many replicas that stop answering, each after it was sent to take the same deltas, condemn these."""


class Trial(Struct, frozen=True):
    """Who goes first from the approved position, and since when.

    `lost` did not pass it in time; of these, `dead` in a row did not answer at the end.
    """

    approved: int
    address: str
    began: float
    lost: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()


class Idle(Struct, frozen=True):
    """Nothing to do before something happens. `is_stuck`: something is published, and nobody goes first."""

    reason: str
    is_stuck: bool = False


class Approve(Struct, frozen=True):
    """Move the canary's hold, if it is where it was."""

    expected: int | None
    position: int


class Learn(Struct, frozen=True):
    """Ask what is answered at the approved position: by a new base, and before the next deltas."""

    address: str
    version: int
    position: int


class Go(Struct, frozen=True):
    """Let a replica pass the hold."""

    address: str
    target: int


class Judge(Struct, frozen=True):
    """Ask the canary, which stands beyond the hold, and decide."""

    address: str
    version: int
    position: int
    approved: int


class RollBack(Struct, frozen=True):
    """Publish the approved values again, as the next position."""

    to: int
    reason: str


Action = Idle | Approve | Learn | Go | Judge | RollBack


def decide(
    log: PublishedLog,
    replicas: Mapping[str, Observed],
    trial: Trial | None,
    now: float,
    *,
    patience_s: float,
    knows: bool,
) -> tuple[Action, Trial | None]:
    """What to do, and the trial from now on; see the module's table.

    `patience_s` is how long one replica may take to go first; `knows` says that the answers at the approved
    position are known, or cannot be.
    """
    replicas = dict(sorted(replicas.items()))
    if log.limit is None:
        return _begin(log, replicas, trial), trial
    if not log.is_canary:
        where = "cannot be read" if log.limit < 0 else f"is at {log.limit}"
        return Idle(f"a person decides: the hold {where}"), None
    approved, beyond = log.limit, replace(log, limit=None)
    if trial is not None and trial.approved != approved:
        trial = None
    ahead = _ahead(replicas, log.lineage, approved, trial)
    if ahead is not None:
        address, version, position = ahead
        if trial is None or trial.address != address:
            trial = replace(trial or Trial(approved, "", now), address=address, began=now)
        return Judge(address, version.number, position, approved), trial
    held = None if knows else at_position(replicas, log.lineage, approved)
    if held is not None:
        return Learn(*held, approved), trial
    if beyond.newest <= approved:
        return Idle(f"all is approved, up to {approved}"), None
    if trial is None and not _were_asked(replicas):  # one may stand beyond the hold: it was the canary
        return Idle("not every replica was asked yet"), None
    able = [address for address, observed in replicas.items() if _can_pass(beyond, observed, approved, now)]
    return _send(beyond, approved, replicas, able, trial, now, patience_s)


def at_position(replicas: Mapping[str, Observed], lineage: str, position: int) -> tuple[str, int] | None:
    """A replica that serves a log at a position, and by which version; None if none does."""
    for address, observed in replicas.items():
        version = observed.standing(lineage)
        if version is not None and version.position == position:
            return address, version.number
    return None


def _were_asked(replicas: Mapping[str, Observed]) -> bool:
    return all(observed.was_asked for observed in replicas.values())


def _begin(log: PublishedLog, replicas: Mapping[str, Observed], trial: Trial | None) -> Action:
    """Set the first hold: nobody is to be sent back by it, and nobody sent on.

    If somebody lifted the hold during a trial, what the replica on trial serves is not approved by that.
    """
    if not replicas or not _were_asked(replicas):
        return Idle("not every replica was asked yet")
    positions = [
        version.position
        for address, observed in replicas.items()
        if (version := observed.standing(log.lineage)) is not None
        and version.position is not None
        and (trial is None or address != trial.address)
    ]
    if not positions and trial is not None:
        return Approve(None, max(trial.approved, log.base))
    if positions:
        return Approve(None, max(positions))
    if any(observed.failures for observed in replicas.values()):
        return Idle("no replica tells where it stands", is_stuck=True)
    return Approve(None, log.base)


def _ahead(
    replicas: Mapping[str, Observed], lineage: str, approved: int, trial: Trial | None
) -> tuple[str, Version, int] | None:
    """The replica that stands furthest beyond what is approved, if one does; of several the one on trial."""
    found = [
        (version.position, trial is not None and address == trial.address, address, version)
        for address, observed in replicas.items()
        if (version := observed.standing(lineage)) is not None
        and version.position is not None
        and version.position > approved
    ]
    if not found:
        return None
    position, _, address, version = max(found, key=lambda one: (one[0], one[1]))
    return address, version, position


def _send(
    log: PublishedLog,
    approved: int,
    replicas: Mapping[str, Observed],
    able: list[str],
    trial: Trial | None,
    now: float,
    patience_s: float,
) -> tuple[Action, Trial | None]:
    """Choose who goes first of those that can, or go on with who was chosen. `log` is without its hold."""
    if trial is None:
        trial = Trial(approved, "", now)
    if trial.address and now - trial.began >= patience_s:
        trial = _lose(trial, replicas, now)
    if len(trial.dead) >= LOST_MEANS_BAD and any(
        observed.standing(log.lineage) for observed in replicas.values()
    ):
        names = " and ".join(trial.dead)
        reason = f"{names} stopped answering, one after the other, when they were to go beyond {approved}"
        return RollBack(approved, reason), trial
    fresh = [address for address in able if address not in trial.lost]
    if trial.address not in able and _is_silent(trial.address, replicas):
        return Idle(f"waiting for {trial.address}, which was to go first", is_stuck=True), trial
    if able and not fresh:  # all had their time: once more from the beginning
        trial, fresh = replace(trial, lost=()), able
    if not fresh:
        return Idle("no replica can go first: they refuse, or do not answer", is_stuck=True), trial
    if trial.address not in fresh:
        trial = replace(trial, address=fresh[0], began=now)
    return Go(trial.address, log.newest), trial


def _lose(trial: Trial, replicas: Mapping[str, Observed], now: float) -> Trial:
    """The trial after who went first had its time; the next one begins when it is chosen."""
    is_dead = _is_silent(trial.address, replicas)
    dead = tuple(dict.fromkeys((*trial.dead, trial.address))) if is_dead else ()
    return replace(trial, address="", began=now, lost=(*trial.lost, trial.address), dead=dead)


def _is_silent(address: str, replicas: Mapping[str, Observed]) -> bool:
    return address in replicas and bool(replicas[address].failures)


def _can_pass(log: PublishedLog, observed: Observed, approved: int, now: float) -> bool:
    """True if published deltas that it has not refused lately lead it beyond what is approved."""
    version = observed.standing(log.lineage)
    if version is None or version.position is None:
        return False
    refused = observed.refusals_of(log.lineage, now)
    way = log.reach(version.position, without=refused)
    return bool(way) and way[-1].end > approved
