"""The next action for one replica: a function of the published model, the last observation, and the time.

    | observed                                          | action                                        |
    |---------------------------------------------------|-----------------------------------------------|
    | the last call failed less than its back-off ago   | `Wait` for its end                            |
    | never observed, in doubt, or observed too long ago| `Observe`                                     |
    | a version behind what its log allows              | `Apply` to exactly that version, newest first |
    | the same, but this replica refused the delta      | `Apply` to the end of another, smaller one    |
    | the same, and pacing asks for a pause             | `Wait` for its end, then `Apply` one delta    |
    | the same, and there is no other delta             | `Wait` for the refused delta's retry          |
    | current, and the last audit is too long ago       | `Audit` its values                            |
    | a version is loading, or is due                   | `Wait` for a short time, then `Observe`       |
    | anything else                                     | `Wait` for the next observation               |

This module reads no clock, file or network. Positions and spans are those of `exporter.delta`; the graph
plans its own way to a position, by the same rule as `plan_chain`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from exporter.delta.spans import Span
from exporter.publish.model import Log, Model
from exporter.publish.served import Served, newest_available
from serving.status import VersionState

FIRST_BACK_OFF_S = 0.1
LONGEST_BACK_OFF_S = 5.0
"""Seconds within which the agent notices a server that comes back, or gets the model."""
FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0
"""The time until a refused delta is tried again; it doubles after each refusal, up to the second value."""
_LOADING_S = 0.05
"""Seconds between observations of a server that loads a version. Once the version is AVAILABLE it gets
requests, and it stays at the position of its warm-up until the agent has observed it."""
_NOTICED_S = 10.0
"""Seconds for which a new version is expected: by default, servers list their directory each second."""
_MEASURING_S = 0.1
"""Seconds between checks whether the idle replica is measured."""


class Refusal(Struct, frozen=True):
    """A delta that a replica refused, `count` times in a row, the last time at `at` (monotonic seconds).

    `reason` is the replica's own, or, with `is_damaged`, the damage of the delta's files.
    """

    lineage: str
    delta: Span
    reason: str
    at: float
    count: int = 1
    is_damaged: bool = False

    @property
    def retry_at(self) -> float:
        """Return the time of the next try (monotonic seconds), 1 s to 60 s after the last refusal.

        A network file system may show a file late, and an operator may repair it.
        """
        return self.at + min(_LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(self.count - 1, 30))


class Observed(Struct, frozen=True):
    """The last observation of a replica. Times are seconds of a monotonic clock.

    `seen_at` is None before the first response, and after a call without a response. `was_away` is True if
    the first of the failed calls since then was never sent, because nothing accepted a connection.
    """

    seen_at: float | None = None
    versions: tuple[Served, ...] = ()
    failures: int = 0
    retry_at: float = 0.0
    error: str = ""
    refusals: tuple[Refusal, ...] = ()
    was_away: bool = False

    @property
    def was_asked(self) -> bool:
        """Return True after the first call, whatever its result."""
        return self.seen_at is not None or bool(self.failures or self.versions)

    @property
    def was_left_out(self) -> bool:
        """Return True if the server has unloaded every version of the model, without an error.

        False if no version is known.
        """
        ended = (known.state is VersionState.END and not known.message for known in self.versions)
        return bool(self.versions) and all(ended)

    @property
    def served(self) -> Served | None:
        """Return the newest available version at the last response; None if none was available.

        It answers requests without a version.
        """
        return newest_available(self.versions)

    def standing(self, lineage: str) -> Served | None:
        """Return the newest available version of the log of this lineage.

        None if the last call failed, or if there is none.
        """
        if self.failures:
            return None
        return newest_available(version for version in self.versions if version.lineage == lineage)

    def answered(self, versions: Sequence[Served], now: float) -> Observed:
        """Return the observation after the replica reported `versions`, which it holds with the newest first.

        Failures are forgotten, and refusals of deltas that no version still needs. `now` is in monotonic
        seconds.
        """
        newest_first = sorted(versions, key=lambda version: -version.number)
        answered = replace(
            self, seen_at=now, versions=tuple(newest_first), failures=0, retry_at=0.0, error=""
        )
        return answered._forget_passed()

    def moved(self, version: int, position: int, step: int) -> Observed:
        """Return the observation after `version` confirmed that it is at `position`, with the values of
        `step`.

        If the version is unknown, no position changes. Failures are forgotten, and refusals of deltas that no
        version still needs.
        """
        moved = (
            replace(known, position=position, step=step) if known.number == version else known
            for known in self.versions
        )
        return replace(self, versions=tuple(moved), failures=0, retry_at=0.0, error="")._forget_passed()

    def failed(self, error: str, now: float, jitter: float, *, was_sent: bool = True) -> Observed:
        """Return the observation after a call failed: one failure more, a later retry, and `seen_at` None.

        `error` is the reason, `now` in monotonic seconds. `jitter` is in 0..1, and spreads the retries of
        replicas that failed together over half of the back-off. `was_sent` is False if the call cannot have
        reached the server.
        """
        # The exponent is bounded: after a thousand failures a float overflows.
        longest = min(LONGEST_BACK_OFF_S, FIRST_BACK_OFF_S * 2 ** min(self.failures, 30))
        retry_at = now + longest * (0.5 + jitter / 2)
        was_away = self.was_away if self.failures else not was_sent
        failures = self.failures + 1
        return replace(
            self, seen_at=None, failures=failures, retry_at=retry_at, error=error, was_away=was_away
        )

    def refused(self, refusal: Refusal) -> Observed:
        """Return the observation after the replica refused a delta: refused once more, and `seen_at` None."""
        others = tuple(r for r in self.refusals if (r.lineage, r.delta) != (refusal.lineage, refusal.delta))
        before = sum(r.count for r in self.refusals if r not in others)
        again = replace(refusal, count=before + 1)
        return replace(self, seen_at=None, refusals=(*others, again), error=refusal.reason)

    def refusals_of(self, lineage: str, now: float) -> tuple[Span, ...]:
        """Return the refused deltas of a log whose next try is later than `now` (monotonic seconds)."""
        return tuple(
            refusal.delta
            for refusal in self.refusals
            if refusal.lineage == lineage and now < refusal.retry_at
        )

    def _forget_passed(self) -> Observed:
        """Return the observation without refusals of deltas that no version still needs.

        All are kept while no position is known.
        """
        standing = [(v.lineage, v.position) for v in self.versions if v.position is not None]
        kept = (
            refusal
            for refusal in self.refusals
            if not standing  # the server may be starting
            or any(refusal.lineage == lineage and refusal.delta.accepts(at) for lineage, at in standing)
        )
        return replace(self, refusals=tuple(kept))


class Wait(Struct, frozen=True):
    """Do nothing before a time, unless something changes."""

    until: float


class Observe(Struct, frozen=True):
    """Ask for the versions and their positions."""


class Apply(Struct, frozen=True):
    """Update exactly this version to a position; `chain` are the deltas expected on the way."""

    version: int
    lineage: str
    up_to: int
    chain: tuple[Span, ...]


class Audit(Struct, frozen=True):
    """Compare this version's values with the published ones at its position."""

    version: int
    lineage: str
    position: int


Action = Wait | Observe | Apply | Audit


class RolloutPolicy(Struct, frozen=True):
    """The pace of observing, auditing and updating a replica; times in seconds.

    `refresh_s`: between two observations without changes. `step_s`: the least time between two deltas (None:
    all at once). `audit_s`: between two audits (None: never). `longest_delay_s`: the longest delay of a paced
    delta (None: no pacing, see `pacing`).
    """

    refresh_s: float = 5.0
    step_s: float | None = None
    audit_s: float | None = None
    longest_delay_s: float | None = None


class Paced(Struct, frozen=True):
    """The state of pacing for a replica: the pause between two deltas, and how long one has been pending.

    Both are in seconds. `is_measured` is False until enough probes of the idle replica are known.
    """

    pause_s: float = 0.0
    waited_s: float = 0.0
    is_measured: bool = True


_UNPACED = Paced()


def next_action(
    observed: Observed,
    published: Model,
    policy: RolloutPolicy,
    now: float,
    *,
    last_applied: float = 0.0,
    last_audit: float = 0.0,
    new_version_at: float = -math.inf,
    paced: Paced = _UNPACED,
) -> Action:
    """Return the next action for a replica; see the module's table.

    `observed` is the last observation of the replica, `published` are the logs, limited to the deltas that it
    may apply. Times are in monotonic seconds: `now`, `last_applied` (the last update), `last_audit`, and
    `new_version_at`, when the newest version was first seen. `paced` matters only if `policy` has pacing.
    """
    if observed.failures and now < observed.retry_at:
        return Wait(observed.retry_at)
    if observed.seen_at is None:
        return Observe()
    may_change = _is_loading(observed) or (
        now < new_version_at + _NOTICED_S and _is_due(observed, published.newest_version)
    )
    look_again = observed.seen_at + min(policy.refresh_s, _LOADING_S if may_change else policy.refresh_s)
    if now >= look_again:
        return Observe()
    retries = [refusal.retry_at for refusal in observed.refusals]
    look_again = min([look_again, *(at for at in retries if at > now)])
    for version in observed.versions:
        action = _advance(version, observed, published, policy, paced, now)
        if action is None:
            continue
        until = _pause_ends(policy, paced, now, last_applied)
        return action if now >= until else Wait(min(look_again, until))
    if policy.audit_s is None:
        return Wait(look_again)
    due = last_audit + policy.audit_s
    if now < due:
        return Wait(min(look_again, due))
    for version in observed.versions:
        if version.position is not None and version.lineage in published.logs:
            return Audit(version.number, version.lineage, version.position)
    return Wait(look_again)


def _is_loading(observed: Observed) -> bool:
    return any(version.state in (VersionState.START, VersionState.LOADING) for version in observed.versions)


def _is_due(observed: Observed, newest: int | None) -> bool:
    return newest is not None and all(version.number != newest for version in observed.versions)


def _pause_ends(policy: RolloutPolicy, paced: Paced, now: float, last_applied: float) -> float:
    """Return the time at which the next delta may be applied, which may be past.

    Times are in monotonic seconds; `last_applied` is the time of the last delta.
    """
    until = last_applied + (policy.step_s or 0.0)
    if policy.longest_delay_s is None:
        return until
    in_time = now + policy.longest_delay_s - paced.waited_s
    if not paced.is_measured and in_time > now:
        return min(in_time, now + _MEASURING_S)
    return max(until, min(last_applied + paced.pause_s, in_time))


def _advance(
    version: Served,
    observed: Observed,
    published: Model,
    policy: RolloutPolicy,
    paced: Paced,
    now: float,
) -> Apply | None:
    log = published.logs.get(version.lineage)
    if log is None or version.position is None or not version.is_available:
        return None
    refused = observed.refusals_of(version.lineage, now)
    chain = log.reach(version.position, without=refused)
    if not chain:
        return None
    # The graph plans by itself and does not know refusals: only single steps can bypass a refused delta.
    is_paced = policy.longest_delay_s is not None and paced.waited_s < policy.longest_delay_s
    has_refused = any(span.accepts(version.position) for span in refused)
    if policy.step_s is not None or is_paced or has_refused:
        small = smallest_step(log, version.position, refused)
        chain = (small,)
    return Apply(version.number, version.lineage, chain[-1].end, chain)


def smallest_step(log: Log, position: int, without: Collection[Span]) -> Span:
    """Return the delta with the smallest end that applies at a position; a call to its end selects it.

    Deltas in `without` are not used. ValueError if no other delta applies.
    """
    return min(log.fitting(position, without), key=lambda span: (span.end, -span.start))


class Quarantined(Struct, frozen=True):
    """A delta that every replica refuses, and the last reason.

    `is_damaged` is True if the agent found damage in the delta's files.
    """

    lineage: str
    delta: Span
    reason: str
    is_damaged: bool = False


def quarantined(replicas: Iterable[Observed], published: Model) -> tuple[Quarantined, ...]:
    """Return the published deltas that every replica at a position before them has refused, with a reason.

    The reason is that of the last of `replicas`. Replicas without a known version are left out.

    Such a delta is damaged or does not fit, so other replicas would refuse it, too. If no other delta spans
    it, a new base has to be published.
    """
    answering = [replica for replica in replicas if replica.versions]
    found: dict[tuple[str, Span], Quarantined] = {}
    for replica in answering:
        for refusal in replica.refusals:
            log = published.logs.get(refusal.lineage)
            if log is None or refusal.delta not in log.deltas:
                continue
            if all(_refused_or_past(other, refusal) for other in answering):
                key = (refusal.lineage, refusal.delta)
                found[key] = Quarantined(*key, refusal.reason, refusal.is_damaged)
    return tuple(found.values())


def _refused_or_past(replica: Observed, refusal: Refusal) -> bool:
    if any((r.lineage, r.delta) == (refusal.lineage, refusal.delta) for r in replica.refusals):
        return True
    standing = [v for v in replica.versions if v.lineage == refusal.lineage and v.position is not None]
    return not any(refusal.delta.accepts(v.position) for v in standing if v.position is not None)


def needs_base(replicas: Iterable[Observed], published: Model) -> bool:
    """Return True if quarantined deltas keep a replica from its log's newest position.

    That is so if the other published deltas do not lead there.
    """
    replicas = tuple(replicas)
    stopping = quarantined(replicas, published)
    for found in stopping:
        log = published.logs[found.lineage]
        bad = [other.delta for other in stopping if other.lineage == found.lineage]
        for replica in replicas:
            for version in replica.versions:
                if version.lineage != found.lineage or version.position is None:
                    continue
                way = log.reach(version.position, without=bad)
                if (way[-1].end if way else version.position) < log.newest:
                    return True
    return False


def differences(before: Sequence[Served], now: Sequence[Served]) -> tuple[tuple[Served, str, str], ...]:
    """Return the events between two observations of a replica, each as (version, kind of event, text).

    They are in the order of `now`. A kind is `version` for a new version or state, `restarted` for an earlier
    position. A version that is gone has no event.
    """
    known = {version.number: version for version in before}
    events = []
    for version in now:
        old = known.get(version.number)
        if old is None or old.state is not version.state:
            text = f"version {version.number} is {version.state.name}"
            events.append((version, "version", f"{text}: {version.message}" if version.message else text))
        elif version.position is not None and old.position is not None and version.position < old.position:
            text = f"version {version.number} went back to position {version.position}, from {old.position}"
            events.append((version, "restarted", text))
    return tuple(events)


def began_anew(before: Sequence[Served], now: Sequence[Served]) -> bool:
    """Return True if a version has an earlier position, or loads again though it was available.

    Either the server has restarted, or somebody had it load the model again.
    """
    known = {version.number: version for version in before if version.is_available}
    both = [(known[version.number], version) for version in now if version.number in known]
    return any(
        version.state in (VersionState.START, VersionState.LOADING)
        or (version.position is not None and old.position is not None and version.position < old.position)
        for old, version in both
    )
