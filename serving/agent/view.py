"""The state of the fleet at one time: values for metrics, readiness, the status page and JSON.

A `Recorder` keeps each replica's delay during the last ten minutes, for the page's plots.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from msgspec import Struct, field, to_builtins
from msgspec.structs import replace

from exporter.publish.hold import HeldBy, this_user
from exporter.publish.judge import Code, Silence, lag, seconds_since, superseded_since
from exporter.publish.model import Model, Published, Rollback
from exporter.publish.served import Served, ServedTables
from exporter.publish.spared import Spared
from serving.agent import rollout
from serving.agent.audit import Audited
from serving.agent.canary import Action, Go, Idle, Judge
from serving.agent.canary_keeper import Canaries
from serving.agent.chart import SPAN_S, Hour
from serving.agent.fleet import Fleet
from serving.agent.publications import Publications
from serving.agent.puller import Puller, Trouble
from serving.agent.replica import Replica
from serving.agent.rollout import Quarantined
from serving.status import VersionState


class VersionView(Struct, frozen=True):
    """A version on a replica.

    Times are seconds. `served_age_s`: since the publication of the values that it serves. `event_age_s`:
    since the newest event in their training data; None if the trainer does not record it. `stale_s`: since
    the publication of the oldest delta that it has not applied, 0 if there is none. `superseded_s`: since the
    start of a newer log, so that only another version can become fresh; 0 if the version belongs to the
    newest log. `unsettled`: its responses since loading that may mix positions. `tables`: the tables made for
    mapping. A field is None if the version takes no deltas, or if it is unknown.
    """

    number: int
    state: str
    position: int | None
    step: int | None
    behind_deltas: int | None
    stale_s: float | None
    served_age_s: float | None
    event_age_s: float | None
    message: str
    superseded_s: float | None = None
    unsettled: int | None = None
    tables: ServedTables | None = None


class PaceView(Struct, frozen=True):
    """The pause between two deltas, and the p99 of probes; None with too few probes."""

    pause_s: float
    idle_p99_s: float | None
    applying_p99_s: float | None


class ReplicaView(Struct, frozen=True):
    """One model of one server.

    `is_answering` is False after a call without a response; `audited` is the result of the last audit; `pace`
    is None without pacing. `is_ready`: it serves a version, and has caught up once since it started (see
    `readiness`). `restarts` is the number of times that it came back in the last ten minutes, after nothing
    had listened, at an earlier position or loading again, `restarted_s` the seconds since the last of them;
    None without one.
    """

    model: str
    address: str
    is_answering: bool
    error: str
    versions: tuple[VersionView, ...]
    audited: Audited | None = None
    pace: PaceView | None = None
    is_ready: bool = False
    restarts: int = 0
    restarted_s: float | None = None

    @property
    def others(self) -> tuple[VersionView, ...]:
        """Return all versions except the served one, and except versions that ended without an error."""
        ended = VersionState.END.name
        return tuple(
            version
            for version in self.versions
            if version != self.served and (version.state != ended or version.message)
        )

    @property
    def trouble(self) -> str:
        """Return the reason why the replica's state is unknown; "" if it responds."""
        if self.is_answering:
            return ""
        what = "does not serve this model" if self.error.startswith("NOT_FOUND") else "does not answer"
        return f"{what}: {self.error or 'not asked yet'}"

    @property
    def served(self) -> VersionView | None:
        """Return the newest available version, which answers requests without a version; None without one."""
        available = [version for version in self.versions if version.state == VersionState.AVAILABLE.name]
        return max(available, key=lambda version: version.number, default=None)


class CanaryView(Struct, frozen=True):
    """The state of a model's canary.

    `approved` is the limit of the other replicas; `waiting_s` is the age of the oldest delta that is not
    approved, 0 if there is none. `doing` describes its current action; `failing` lists the gates that the
    answers at the approved position fail, empty if none or unknown; `scores` has the golden outputs' means at
    the last two positions.
    """

    approved: int | None
    waiting_s: float
    replica: str | None
    doing: str
    failing: str = ""
    scores: tuple[str, ...] = ()


class StoreView(Struct, frozen=True):
    """The store of a model's directory.

    `age_s`: seconds since the directory last held everything in the store; the agent does not know later
    publications. `trouble` says why the last look into the store failed, or is pending, and since when; None
    if it succeeded. `newest` is the newest position that was seen in the store; `waiting` lists publications
    that do not fit after a rollback here, and `way_on` is the shell command that gets past them; empty if
    only the store's next publications do. `read_by` is the user and machine of the agent.
    `spared` tells how the newest version came; None if all of it was fetched since the agent began, or none
    came.
    """

    url: str
    age_s: float
    trouble: Trouble | None
    waiting: tuple[str, ...]
    newest: int | None = None
    read_by: str = ""
    spared: Spared | None = None
    way_on: str = ""

    @property
    def problem(self) -> str:
        """Return the reason why the last look into the store failed, or is pending; "" if it succeeded."""
        if self.trouble is None:
            return ""
        said = [f"{self.url} cannot be fetched", self.trouble.text, self.trouble.why]
        return ": ".join(filter(None, said))


class ModelView(Struct, frozen=True):
    """A published model, and its replicas.

    `published` is the newest published position, whatever the hold; `position` is the newest one that the
    hold allows, and `waiting` is the number of publications between them. `hold` is the position of the hold,
    `is_held` is True unless only a canary set it, `held_by` says who did. `rollback` is the rollback at which
    the model is held. `store` is None without `--pull`. `silence` is the publisher's; its limit is learned
    from the publisher's habit, or was given. `recent` are the last publications, by time. `skew_s` is the
    least number of seconds by which the publisher's clock is ahead, negative if it is behind. `untrusted` has
    the reasons why publications are not used, the newest first. `publishers` are the users that publish it in
    turn, empty if only one does. `overwritten` warns if a trainer wrote into files of a version.
    """

    name: str
    path: str
    problem: str
    newest_version: int | None
    position: int | None
    hold: int | None
    quarantined: tuple[Quarantined, ...]
    base_wanted: bool
    replicas: tuple[ReplicaView, ...]
    canary: CanaryView | None = None
    rollback: Rollback | None = None
    store: StoreView | None = None
    published: int | None = None
    waiting: int = 0
    is_held: bool = False
    held_by: HeldBy | None = None
    silence: Silence = Silence()
    silence_is_learned: bool = True
    recent: tuple[Published, ...] = ()
    skew_s: float | None = None
    untrusted: tuple[str, ...] = ()
    publishers: tuple[str, ...] = ()
    overwritten: str = ""

    @property
    def stale_s(self) -> float | None:
        """Return the largest `stale_s` of all served versions, in seconds; None if unknown for all."""
        return self._worst(lambda served: served.stale_s)

    @property
    def served_age_s(self) -> float | None:
        """Return the largest `served_age_s` of all served versions, in seconds; None if unknown for all."""
        return self._worst(lambda served: served.served_age_s)

    @property
    def event_age_s(self) -> float | None:
        """Return the largest `event_age_s` of all served versions, in seconds; None if unknown for all."""
        return self._worst(lambda served: served.event_age_s)

    def _worst(self, seconds: Callable[[VersionView], float | None]) -> float | None:
        found = (seconds(replica.served) for replica in self.replicas if replica.served is not None)
        return max((each for each in found if each is not None), default=None)


class FleetView(Struct, frozen=True):
    """The state of all models at one time."""

    at: datetime
    models: tuple[ModelView, ...]

    def why_not_ready(self) -> tuple[str, ...]:
        """Return the reasons why replicas of this agent should not get requests; empty if all may.

        Wrong values are a reason, and so is a model without a known replica. The published model, and whether
        it can be read, is not a reason: all replicas share it.
        """
        return (
            *self.wrong(),
            *self._without_replicas(),
            *(why for name, each in self._replicas() if (why := _why_unready(name, each))),
        )

    def why_not_fresh(self, fresh_within_s: float) -> tuple[str, ...]:
        """Return the reasons why this agent's replicas are not fresh; empty if they are.

        A fresh replica responds, serves a version, has the right values, and has not lacked a published delta
        for longer than `fresh_within_s` seconds. A directory that cannot be read is a reason, and so are a
        model without a known replica, and a store from which nothing could be fetched for that long: later
        publications are unknown.
        """
        return (
            *self.wrong(),
            *(why for model in self.models for why in _unseen(model, fresh_within_s)),
            *self._without_replicas(),
            *(why for name, each in self._replicas() if (why := _why_stale(name, each, fresh_within_s))),
        )

    def _replicas(self) -> Iterator[tuple[str, ReplicaView]]:
        """Yield each replica, after a phrase that names it: `MODEL on ADDRESS`."""
        for model in self.models:
            for replica in model.replicas:
                yield f"{model.name} on {replica.address}", replica

    def _without_replicas(self) -> Iterator[str]:
        for model in self.models:
            if not model.replicas:  # a name may resolve to no address, or not yet
                yield f"no replica of {model.name} is known"

    def wrong(self) -> tuple[str, ...]:
        """Return a sentence for each replica with wrong values, which only a restart repairs."""
        return tuple(
            f"{name} does not hold what was published"
            for name, replica in self._replicas()
            if replica.audited is not None and replica.audited.differing
        )

    def document(self) -> dict[str, Any]:
        """Return the document of `/status.json`, without `format_version` and `findings`."""
        return {
            "at": self.at.isoformat(timespec="milliseconds"),
            "models": [
                {
                    **{name: value for name, value in to_builtins(model).items() if name != "recent"},
                    "quarantined": [
                        {"delta": str(found.delta), "reason": found.reason} for found in model.quarantined
                    ],
                    "store": model.store
                    and {**to_builtins(model.store), "problem": model.store.problem},  # as of 0.2
                }
                for model in self.models
            ],
        }


def _unseen(model: ModelView, fresh_within_s: float) -> Iterator[str]:
    """Yield the reasons why the published model is unknown; nothing if it is known.

    A store that cannot be read is a reason after `fresh_within_s`, or at once if the directory cannot be
    read, either.
    """
    if model.problem:
        yield model.problem
    store = model.store
    if store is not None and store.trouble is not None and (model.problem or store.age_s > fresh_within_s):
        yield f"{store.problem}; {model.name} is as its store was {store.age_s:.0f} s ago"


def _why_unready(name: str, replica: ReplicaView) -> str:
    if replica.is_ready:
        return ""
    at = None if replica.served is None else replica.served.position
    return _why_unserved(name, replica) or f"{name} is at {at}, and has not caught up since it started"


def _why_stale(name: str, replica: ReplicaView, fresh_within_s: float) -> str:
    stale_s = 0.0 if replica.served is None else replica.served.stale_s or 0.0
    behind = f"{name} is {stale_s:.1f} s behind what is published"
    return _why_unserved(name, replica) or (behind if stale_s > fresh_within_s else "")


def _why_unserved(name: str, replica: ReplicaView) -> str:
    if not replica.is_answering:
        return f"{name} {replica.trouble}"
    return f"{name} has no version available" if replica.served is None else ""


def view(
    fleet: Fleet, canaries: Canaries, pullers: Mapping[str, Puller], expected_s: float | None = None
) -> FleetView:
    """Return the fleet's present state; `canaries` and `pullers` are by model.

    A publication is expected every `expected_s` seconds, or by the publisher's habit if that is None.
    """
    now = datetime.now(timezone.utc)
    models = [
        replace(
            _with_store(_model(fleet, each, canaries, now), puller := pullers.get(each.model.name)),
            silence=_silence(each, puller, now, expected_s),
            silence_is_learned=expected_s is None,
            recent=each.recent,
            skew_s=each.current.skew_s,
        )
        for each in fleet.publications
    ]
    return FleetView(now, tuple(models))


def _silence(found: Publications, puller: Puller | None, now: datetime, expected_s: float | None) -> Silence:
    """Return the publisher's silence at `now`; of a copy, since the newest publication in its store.

    The silence of a copy is unknown while the store cannot be read. `puller` is None unless the model is a
    copy. A publication is expected every `expected_s` seconds, or by the publisher's habit if that is None.
    """
    if puller is None:
        return found.habit.silence(now, expected_s)
    fetched = puller.fetched
    if fetched.trouble is not None and fetched.trouble.code is Code.STORE:
        return Silence()
    return found.habit.silence(now, expected_s, None if fetched.newest is None else fetched.newest[1])


def _with_store(model: ModelView, puller: Puller | None) -> ModelView:
    if puller is None:
        return model
    fetched = puller.fetched
    age = max(0.0, time.monotonic() - fetched.complete)
    newest = None if fetched.newest is None else fetched.newest[0]
    waiting, spared, way_on = fetched.waiting, fetched.spared, fetched.way_on
    store = StoreView(fetched.url, age, fetched.trouble, waiting, newest, this_user(), spared, way_on)
    return replace(model, store=store, untrusted=fetched.untrusted)


def _model(fleet: Fleet, publications: Publications, canaries: Canaries, now: datetime) -> ModelView:
    published = publications.current
    decided = published.decided()
    replicas = fleet.replicas_of(publications.model.name)
    observed = [replica.observed for replica in replicas]
    log = published.newest_log
    return ModelView(
        publications.model.name,
        str(publications.model.path),
        published.problem,
        published.newest_version,
        None if log is None else log.released,
        None if log is None else log.limit,
        rollout.quarantined(observed, decided),
        rollout.needs_base(observed, decided),
        tuple(_replica(replica, now) for replica in replicas),
        _canary(canaries, publications, now),
        None if log is None else log.rollback,
        published=published.newest_position,
        waiting=0 if log is None else log.waiting,
        is_held=log is not None and log.limit is not None and not log.is_canary,
        held_by=None if log is None else log.held_by,
        untrusted=tuple(error.message for error in published.untrusted),
        publishers=published.publishers,
        overwritten=publications.overwritten(),
    )


def _canary(canaries: Canaries, publications: Publications, now: datetime) -> CanaryView | None:
    if publications.model.name not in canaries.models:
        return None
    log, canary = publications.current.newest_log, canaries.of.get(publications.model.name)
    if log is None:
        return CanaryView(None, 0.0, None, "no published version takes deltas")
    current = None if canary is None else canary.current
    replica, doing = _doing(None if current is None else current[1])
    if log.rollback is not None:
        doing = f"waits: the model is rolled back to the values of {log.rollback.back_to}"
    approved = log.limit if log.is_canary else None
    waiting = [] if approved is None else log.created(log.beyond(approved))
    waited = max((seconds_since(created, now) for created in waiting), default=0.0)
    if canary is None:
        return CanaryView(approved, waited, replica, doing)
    return CanaryView(approved, waited, replica, doing, canary.failing, canary.scores)


def _doing(action: Action | None) -> tuple[str | None, str]:
    """Return the replica that goes first now, None if none does, and a phrase for the action."""
    match action:
        case Go(address, target):
            return address, f"goes first, to {target}"
        case Judge(address, _, position, _):
            return address, f"is judged at {position}"
        case Idle(reason):
            return None, reason
        case None:
            return None, "another agent decides, or none can"
        case _:
            return None, "decides"


def _replica(replica: Replica, now: datetime) -> ReplicaView:
    observed, restarts = replica.observed, replica.restarts
    published = replica.publications.current
    versions = tuple(_version(version, published, now) for version in observed.versions)
    answering = bool(observed.versions) and not observed.failures
    return ReplicaView(
        replica.model,
        replica.address,
        answering,
        observed.error,
        versions,
        replica.audited,
        _pace(replica),
        replica.readiness.is_ready,
        len(restarts),
        restarts[0] if restarts else None,
    )


def _pace(replica: Replica) -> PaceView | None:
    if replica.pacer is None:
        return None
    found = replica.pacer.latencies
    return PaceView(replica.pacer.pause_s, found.idle_p99_s, found.applying_p99_s)


def _version(version: Served, published: Model, now: datetime) -> VersionView:
    found = lag(published, version)
    is_known = found.log is not None
    event_time = None if found.at is None else found.at.event_time
    return VersionView(
        version.number,
        version.state.name,
        version.position,
        version.step,
        len(found.left) if is_known else None,
        seconds_since(found.since, now) if is_known else None,
        None if found.at is None else seconds_since(found.at.created, now),
        None if event_time is None else seconds_since(event_time, now),
        version.message,
        superseded_s(version, published, now),
        version.unsettled,
        version.tables,
    )


def superseded_s(version: Served, published: Model, now: datetime) -> float | None:
    """Return the seconds since a newer log began, 0 if the version is of the newest log (see `VersionView`).

    None for a version that is not available, if no published base takes deltas, or if the time is unknown.
    """
    if published.newest_log is None or not version.is_available:
        return None
    if version.lineage == published.newest_log.lineage:
        return 0.0
    since = superseded_since(published, version)
    return None if since is None else seconds_since(since, now)


PERIOD_S = 1.0
_KEPT = 600  # as many as the plot of the status page has pixels
_COARSE_S = 10.0


def _hour(at: datetime, model: ModelView) -> Hour:
    served = [each.served for each in model.replicas if each.is_answering and each.served is not None]
    positions = [each.number if each.position is None else each.position for each in served]
    stale = [each.stale_s for each in served if each.stale_s is not None]
    return Hour(at, min(positions, default=None), max(positions, default=None), max(stale, default=None))


class Sample(Struct, frozen=True):
    """Each replica's delay at one time, in seconds, by (model, address); None if unknown."""

    at: datetime
    stale_s: dict[tuple[str, str], float | None]


class Recorder(Struct):
    """A recorder of the fleet: every second for the last ten minutes, every ten seconds for the last hour."""

    view: Callable[[], FleetView]
    tell: Callable[[FleetView], None] = lambda view: None
    """A function that gets each recorded view."""
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=_KEPT))
    hours: deque[tuple[datetime, dict[str, Hour]]] = field(
        default_factory=lambda: deque(maxlen=int(SPAN_S / _COARSE_S) + 1)
    )

    def follow(self, stop: threading.Event) -> None:
        """Record a sample every second, until `stop` is set.

        A second in which `view` or `tell` fails has no sample; the first such failure is logged.
        """
        is_logged = False
        while not stop.wait(PERIOD_S):
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - a dead thread would end charts and events for good
                if not is_logged:
                    logging.getLogger(__name__).error("a sample for charts and events is missing: %s", error)
                is_logged = True

    def look(self) -> None:
        """Record one sample of a new view, after the function `tell` got the view.

        The served positions are recorded only every ten seconds. Errors of `view` and `tell` pass.
        """
        view = self.view()
        self.tell(view)
        stale = {
            (model.name, replica.address): None
            if not replica.is_answering or replica.served is None
            else replica.served.stale_s
            for model in view.models
            for replica in model.replicas
        }
        self.samples.append(Sample(view.at, stale))
        if not self.hours or (view.at - self.hours[-1][0]).total_seconds() >= _COARSE_S:
            self.hours.append((view.at, {model.name: _hour(view.at, model) for model in view.models}))

    def hour(self, model: str) -> list[Hour]:
        """Return the served positions and delays of a model in the last hour, one each ten seconds.

        The oldest is first; empty for an unknown model.
        """
        # `tuple`: an iteration over the deque itself fails when the recorder's thread appends meanwhile.
        return [found[model] for _, found in tuple(self.hours) if model in found]

    def series(self, model: str, address: str) -> list[float | None]:
        """Return the delays of one replica in the last ten minutes, one each second, the oldest first.

        They are in seconds; a delay is None if it is unknown, or if the replica was not there.
        """
        return [sample.stale_s.get((model, address)) for sample in tuple(self.samples)]
