"""The next action of a model's canary: a function of the log, the replicas, the current trial and the time.

One replica goes first. The log's hold is the position that the canary has approved: it stops the other
replicas, and every replica that starts. A replica beyond the hold is the canary, so no other state is needed.
Golden requests are also sent to a base that servers load by themselves, but nothing can hold it back.

    | the log's hold     | replicas                                | action                            |
    |--------------------|-----------------------------------------|-----------------------------------|
    | an operator's      | -                                       | `Idle`: an operator decides       |
    | cannot be read     | -                                       | `Idle`                            |
    | none               | one was never asked                     | `Idle`                            |
    | none               | some serve the log, not on trial        | `Approve` what they serve already |
    | none               | none does, or only the one on trial     | `Approve` where the trial began   |
    | none               | none does, all respond                  | `Approve` the base's position     |
    | of the store's     | -                                       | `Idle`: a canary there decides    |
    | the canary's, at G | one is beyond G                         | `Judge` it there; it stays there  |
    | the canary's, at G | one is at G, its responses are unknown  | `Learn` them                      |
    | the canary's, at G | nothing is published beyond             | `Idle`                            |
    | the canary's, at G | one was never asked, none is on trial   | `Idle`: it may be beyond G        |
    | the canary's, at G | two in a row stopped responding         | `RollBack`                        |
    | the canary's, at G | one can take a delta beyond G           | `Go`: first, for a limited time   |
    | the canary's, at G | none can, and one loads or was never up | `Idle`: it is loading             |
    | the canary's, at G | none can                                | `Idle`: they refuse, or are down  |

A replica that has not passed the hold within its time is replaced by the next; if it refuses the delta,
hangs, or ended before it was sent beyond the hold, the next one goes at once. This module reads no clock,
file or network.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from exporter.delta.spans import Span
from exporter.publish.model import Log
from exporter.publish.served import Served
from serving.agent.rollout import Observed
from serving.status import VersionState

LOST_MEANS_BAD = 2
"""If this many replicas in a row stop responding after they were sent to take the same deltas, the deltas are
rolled back."""


class Trial(Struct, frozen=True):
    """The replica that goes first from the approved position, and since when (monotonic seconds).

    `address` is "" while none is chosen. The replicas in `lost` did not pass the hold in time; the last ones
    of them, in `dead`, had stopped responding.
    """

    approved: int
    address: str
    began: float
    lost: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()


class Idle(Struct, frozen=True):
    """Nothing to do until something changes. `is_stuck`: there are deltas, and no replica goes first."""

    reason: str
    is_stuck: bool = False


class Approve(Struct, frozen=True):
    """Move the canary's hold to `position`, if it is still at `expected` (None: if there is no hold)."""

    expected: int | None
    position: int


class Learn(Struct, frozen=True):
    """Record the responses at the approved position: of a new base, and before the next deltas."""

    address: str
    version: int
    position: int


class Go(Struct, frozen=True):
    """Let a replica pass the hold, up to `target`."""

    address: str
    target: int


class Judge(Struct, frozen=True):
    """Send the golden requests to the canary beyond the hold, and decide from its responses."""

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
    log: Log,
    replicas: Mapping[str, Observed],
    trial: Trial | None,
    now: float,
    *,
    patience_s: float,
    knows: bool,
    hangs: bool = False,
) -> tuple[Action, Trial | None]:
    """Return the next action, and the trial from now on, None if there is none; see the module's table.

    `log` is the newest published log, `replicas` are by address; `trial` is the trial that the last call
    returned; `now` is in monotonic seconds. `patience_s` is the time that a replica may take to pass the
    hold; `knows` is True if the responses at the approved position are known, or cannot be learnt; `hangs` is
    True if the replica on trial accepts calls and does not answer them.
    """
    replicas = dict(sorted(replicas.items()))
    if log.limit is None:
        return _begin(log, replicas, trial), trial
    if not log.is_canary:
        where = "cannot be read" if log.limit < 0 else f"is at {log.limit}"
        return Idle(f"an operator decides: the hold {where}"), None
    if log.held_by is not None and log.held_by.url:  # otherwise it would approve the same repeatedly
        return Idle(f"a canary in {log.held_by.url} decides: the hold is at {log.limit}"), None
    approved, beyond = log.limit, replace(log, limit=log.bound)
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
    if trial is None and not _were_asked(replicas):  # one may be beyond the hold: the previous canary
        return Idle("some replicas have not been asked yet"), None
    able = [
        address
        for address, _, at in _placed(replicas, log.lineage)
        if _can_pass(beyond, at, approved, replicas[address].refusals_of(log.lineage, now))
    ]
    return _send(beyond, approved, replicas, able, trial, now, patience_s, hangs=hangs)


def at_position(replicas: Mapping[str, Observed], lineage: str, position: int) -> tuple[str, int] | None:
    """Return address and version of the first replica that serves a position of a log; None if none does.

    `lineage` is the log's; a replica whose last call failed does not count.
    """
    found = (
        (address, version.number) for address, version, at in _placed(replicas, lineage) if at == position
    )
    return next(found, None)


def _placed(replicas: Mapping[str, Observed], lineage: str) -> Iterator[tuple[str, Served, int]]:
    """Yield address, version and position of each replica that reports its position in the log `lineage`.

    They are in the order of `replicas`; a replica whose last call failed is left out.
    """
    for address, observed in replicas.items():
        version = observed.standing(lineage)
        if version is not None and version.position is not None:
            yield address, version, version.position


def _were_asked(replicas: Mapping[str, Observed]) -> bool:
    return all(observed.was_asked for observed in replicas.values())


def _begin(log: Log, replicas: Mapping[str, Observed], trial: Trial | None) -> Action:
    """Return the action for a log without a hold: approve the greatest position that a replica serves.

    The replica on trial does not count: if an operator lifted the hold during a trial, that does not approve
    its position. If no other replica reports a position, the position at which the trial began is approved,
    or without a trial (None) the base's.

    The action is Idle if there are no replicas or one was not asked yet; also, without a trial, if none
    reports a position, one does not respond, and none is loading.
    """
    if not replicas or not _were_asked(replicas):
        return Idle("some replicas have not been asked yet")
    on_trial = None if trial is None else trial.address
    positions = [at for address, _, at in _placed(replicas, log.lineage) if address != on_trial]
    if not positions and trial is not None:
        return Approve(None, max(trial.approved, log.base))
    if positions:
        return Approve(None, max(positions))
    loads = any(replicas[address].versions for address in _starting(replicas))
    if any(observed.failures for observed in replicas.values()) and not loads:
        return Idle("no replica reports its position", is_stuck=True)
    return Approve(None, log.base)  # also for a server that loads it now, which would apply everything


def _ahead(
    replicas: Mapping[str, Observed], lineage: str, approved: int, trial: Trial | None
) -> tuple[str, Served, int] | None:
    """Return address, version and position of the replica furthest beyond `approved`; None if none is beyond.

    Of several at that position it is the one on trial, else the first of `replicas`.
    """
    on_trial = None if trial is None else trial.address
    beyond = (one for one in _placed(replicas, lineage) if one[2] > approved)
    return max(beyond, key=lambda one: (one[2], one[0] == on_trial), default=None)


def _send(
    log: Log,
    approved: int,
    replicas: Mapping[str, Observed],
    able: list[str],
    trial: Trial | None,
    now: float,
    patience_s: float,
    *,
    hangs: bool,
) -> tuple[Action, Trial | None]:
    """Choose or keep the replica that goes first; return the action and the trial from now on.

    `log` is without the canary's hold; `able` are the addresses of the replicas that can take a delta beyond
    `approved`, in order; `now`, `patience_s` and `hangs` are as for `decide`. The action is Go, Idle while
    none can go, or RollBack if too many stopped responding.
    """
    if trial is None:
        trial = Trial(approved, "", now)
    if _never_took(trial.address, replicas, approved):  # not the delta's fault, so it is not `lost`
        trial = replace(trial, address="", began=now)
    elif trial.address and (hangs or now - trial.began >= patience_s):
        trial = _lose(trial, now, is_dead=hangs or _is_silent(trial.address, replicas))
    if len(trial.dead) >= LOST_MEANS_BAD and any(
        observed.standing(log.lineage) for observed in replicas.values()
    ):
        names = " and ".join(trial.dead)
        reason = f"{names} stopped answering, one after the other, when they were sent beyond {approved}"
        return RollBack(approved, reason), trial
    fresh = [address for address in able if address not in trial.lost]
    if trial.address not in able and _is_silent(trial.address, replicas):
        return Idle(f"waiting for {trial.address}, which goes first", is_stuck=True), trial
    if able and not fresh:  # every replica had its turn: start with the first again
        trial, fresh = replace(trial, lost=()), able
    if not fresh:
        if starting := _starting(replicas):
            is_loading = any(replicas[address].versions for address in starting)
            what = "load the base" if is_loading else "start"
            return Idle(f"waiting for {' and '.join(starting)} to {what}", is_stuck=not is_loading), trial
        return Idle("no replica can go first: they refuse, or do not answer", is_stuck=True), trial
    if trial.address not in fresh:
        trial = replace(trial, address=fresh[0], began=now)
    return Go(trial.address, log.newest), trial


def _lose(trial: Trial, now: float, *, is_dead: bool) -> Trial:
    """Return the trial without its replica, whose time has ended; `_send` then chooses the next one.

    The replica is added to `lost`, and to `dead` if `is_dead`; otherwise `dead` becomes empty. The next one's
    time begins at `now`.
    """
    dead = tuple(dict.fromkeys((*trial.dead, trial.address))) if is_dead else ()
    return replace(trial, address="", began=now, lost=(*trial.lost, trial.address), dead=dead)


def _is_silent(address: str, replicas: Mapping[str, Observed]) -> bool:
    return address in replicas and bool(replicas[address].failures)


def _starting(replicas: Mapping[str, Observed]) -> list[str]:
    """Return the addresses of replicas that load a version, or have served none since the agent began."""
    loading = (VersionState.START, VersionState.LOADING)
    return [
        address
        for address, observed in replicas.items()
        if observed.served is None
        and (not observed.versions or any(version.state in loading for version in observed.versions))
    ]


def _never_took(address: str, replicas: Mapping[str, Observed], approved: int) -> bool:
    """Return True if a replica ended before it was sent anything beyond the approved position.

    That is known if nothing accepted the first of its failed calls, and no version was beyond it before.
    """
    observed = replicas.get(address)
    if observed is None or not observed.failures or not observed.was_away:
        return False
    return all((version.position or 0) <= approved for version in observed.versions)


def _can_pass(log: Log, position: int, approved: int, refused: Collection[Span]) -> bool:
    """Return True if published deltas, except the `refused` ones, lead from `position` beyond `approved`."""
    way = log.reach(position, without=refused)
    return bool(way) and way[-1].end > approved
