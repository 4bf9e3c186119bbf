"""The loop around `rollout`: a thread watches each model's directory, another cares for each replica.

Paces one replica: what probes took gives the pause between its deltas (see `pacing`).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from exporter.errors import CallFailed, ServerError
from exporter.progress import count
from exporter.terminal.server_access import WITHOUT_TLS, ServerAccess
from exporter.wire.protos import Proto
from serving.agent import rollout
from serving.agent.audit import Audited
from serving.agent.canary import Member
from serving.agent.journal import Event, Journal, What
from serving.agent.pacing import Latencies, PacePolicy, Waiting, next_pause
from serving.agent.probe import Prober
from serving.agent.publications import Model, Publications
from serving.agent.rebuild import Rebuilder, was_left_out
from serving.agent.replica import Replica
from serving.agent.rollout import (
    Apply,
    Audit,
    Observe,
    Observed,
    Paced,
    Policy,
    Published,
    Refusal,
    Rest,
    Version,
)
from serving.agent.targets import Resolved, Targets
from serving.status import VersionState
from serving.updates import Updated


class Pacer:
    """The pause of one replica; `version` tells which version requests get that name none."""

    def __init__(
        self,
        address: str,
        model: Model,
        policy: PacePolicy,
        access: ServerAccess,
        version: Callable[[], int | None],
    ) -> None:
        self.pause_s = 0.0
        self._policy = policy
        self._access = access
        self._waiting = Waiting()
        self._prober = Prober(address, model.name, model.path, policy.probe_s, version)

    def start(self, stop: threading.Event) -> None:
        """Probe until `stop`, in a thread."""
        threading.Thread(target=self._prober.run, args=(self._access, stop), daemon=True).start()

    def paced(self, versions: Sequence[Version], published: Published, now: float) -> Paced:
        """The pause, and how long a delta has waited that one of the versions may take."""
        logs = published.logs
        pairs = [(version, logs[version.lineage]) for version in versions if version.lineage in logs]
        return Paced(self.pause_s, self._waiting.longest_s(pairs, now), not self._prober.is_measuring)

    def applying(self) -> AbstractContextManager[None]:
        """Deltas are applied inside the block."""
        return self._prober.applying()

    @property
    def latencies(self) -> Latencies:
        """What probes took."""
        return self._prober.latencies()

    def adapt(self) -> str:
        """Choose the pause before the next delta; what there is to tell: pauses begin, or end."""
        before, found = self.pause_s, self.latencies
        self.pause_s = next_pause(before, found, self._policy)
        if found.applying_p99_s is None or found.idle_p99_s is None:
            return ""
        self._prober.begin_anew()
        if (before > 0) == (self.pause_s > 0):
            return ""
        what = "pauses between deltas begin" if self.pause_s else "no more pauses between deltas"
        p99s = f"{found.applying_p99_s * 1000:.1f} ms, {found.idle_p99_s * 1000:.1f} ms when idle"
        return f"{what}: p99 of predictions is {p99s}"


_AFTER_A_SURPRISE_S = 1.0
_LONGEST_WAIT_S = 60.0
_REFUSED = "INVALID_ARGUMENT"

Allowed = Callable[[str, str, Published], Published]
"""What a replica may take, by model, address and what is published of it."""


class Settings(Struct, frozen=True):
    """How the fleet is looked after; times in seconds.

    `poll_s`: between two listings of a directory where nothing tells of changes. `resolve_s`: between two
    looks at what names stand for. `deadline_s`: of any call, to which the time of a catch-up is added.
    `audit_chunks`: how many chunks an audit compares. `pace`: how far predictions are spared (None: not
    at all). `access`: files for TLS, a certificate, a token.
    """

    policy: Policy = field(default_factory=Policy)
    poll_s: float = 1.0
    resolve_s: float = 10.0
    deadline_s: float = 10.0
    audit_chunks: int = 16
    pace: PacePolicy | None = None
    rebuild: Proto | None = None
    access: ServerAccess = WITHOUT_TLS


class Worker:
    """Looks after one model of one server, in a thread of its own."""

    def __init__(
        self,
        address: str,
        publications: Publications,
        journal: Journal,
        settings: Settings,
        allowed: Allowed,
        rebuilder: Rebuilder | None = None,
    ) -> None:
        self.address = address
        self.publications = publications
        self.observed = Observed()
        self.last_applied = 0.0
        self.last_audit = time.monotonic()
        self.audited: Audited | None = None
        self._rebuilder = rebuilder
        self._why_not_rebuilt = ""
        self._journal = journal
        self._settings = settings
        self._allowed = allowed
        self._stop = threading.Event()
        self._seen = 0
        self._newest_version: int | None = None
        self._new_version_at = 0.0
        self.pacer = self._pacer()
        self._thread = threading.Thread(target=self._run, name=f"replica {address}", daemon=True)

    @property
    def model(self) -> str:
        """The model's name."""
        return self.publications.model.name

    def start(self) -> None:
        """Begin."""
        self._thread.start()
        if self.pacer is not None:
            self.pacer.start(self._stop)

    def end(self) -> None:
        """Make no more calls after the one under way."""
        self._stop.set()
        self.publications.wake()

    def join(self, timeout_s: float) -> bool:
        """Wait for the call under way; True if it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def published(self) -> Published:
        """What this replica may take of what is published."""
        return self._allowed(self.model, self.address, self.publications.current)

    @property
    def served_version(self) -> int | None:
        """The version that requests get which name none."""
        available = (v.number for v in self.observed.versions if v.state is VersionState.AVAILABLE)
        return max(available, default=None)

    def _pacer(self) -> Pacer | None:
        pace, access = self._settings.pace, self._settings.access
        if pace is None:
            return None
        return Pacer(self.address, self.publications.model, pace, access, lambda: self.served_version)

    def _run(self) -> None:
        settings = self._settings
        while not self._stop.is_set():
            try:
                with Replica(self.address, self.model, settings.deadline_s, settings.access) as replica:
                    while not self._stop.is_set():
                        self._act(replica)
            except Exception as error:  # noqa: BLE001 - else nobody would look after this replica any more
                self._failed(CallFailed("INTERNAL", f"{type(error).__name__}: {error}"))
                self._stop.wait(_AFTER_A_SURPRISE_S)

    def _act(self, replica: Replica) -> None:
        now, published, pacer = time.monotonic(), self.published, self.pacer
        if published.newest_version != self._newest_version:
            self._newest_version, self._new_version_at = published.newest_version, now
        action = rollout.next_action(
            self.observed,
            published,
            self._settings.policy,
            now,
            last_applied=self.last_applied,
            last_audit=self.last_audit,
            new_version_at=self._new_version_at,
            paced=Paced() if pacer is None else pacer.paced(self.observed.versions, published, now),
        )
        match action:
            case Rest(until):
                pause = min(max(0.0, until - now), _LONGEST_WAIT_S)
                self._seen = self.publications.wait(self._seen, pause)
            case Observe():
                self._observe(replica)
            case Apply():
                self._apply(replica, action)
            case Audit():
                self._audit(replica, action)

    def _observe(self, replica: Replica) -> None:
        try:
            versions = replica.observe()
        except CallFailed as error:
            self._failed(error)
            return
        before = self.observed
        self.observed = before.answered(versions, time.monotonic())
        for version, what, message in rollout.differences(before.versions, self.observed.versions):
            if What(what) is What.RESTARTED:
                self.audited = None
            self._tell(What(what), message, version=version.number, position=version.position)
        self._restore()

    def _apply(self, replica: Replica, action: Apply) -> None:
        bytes_ = self.publications.directory.size(action.lineage, action.chain)
        began = time.monotonic()
        try:
            with self.pacer.applying() if self.pacer else nullcontext():
                done = replica.apply(action, bytes_)
        except CallFailed as error:
            if error.code == _REFUSED:
                self._refused(replica, action, error.cause or error.message)
            else:
                self._failed(error)
            return
        if done.found_another:  # perhaps it leads as far: nothing is wrong, and where it stands is seen anew
            self._observe(replica)
            return
        self.last_applied = now = time.monotonic()
        if done.position < action.up_to:
            self._refused(replica, action, f"it stopped at {done.position}: {done.status}")
            return
        self.observed = self.observed.moved(done.version, done.position, done.step)
        self._applied(action, done, now - began)
        if self.pacer is not None and (told := self.pacer.adapt()):
            self._tell(What.PACED, told)

    def _applied(self, action: Apply, done: Updated, seconds: float) -> None:
        commit = self.publications.directory.commit(action.lineage, done.position)
        now = datetime.now(UTC)
        age = None if commit is None else (now - commit.created).total_seconds()
        newest = None if commit is None else commit.event_time
        took = f"{count(done.deltas, 'delta')}, {count(done.rows, 'row')}"
        self._tell(
            What.APPLIED,
            f"version {done.version} is at position {done.position}: {took}",
            version=done.version,
            position=done.position,
            step=done.step,
            rows=done.rows,
            deltas=done.deltas,
            seconds=seconds,
            behind_seconds=age,
            event_age_seconds=None if newest is None else (now - newest).total_seconds(),
        )

    def _refused(self, replica: Replica, action: Apply, reason: str) -> None:
        """Note which delta was not taken: the first one from where the version stands now, for those before
        it on the way were applied.
        """
        self._observe(replica)
        at = next((v.position for v in self.observed.versions if v.number == action.version), None)
        log = self.publications.current.logs.get(action.lineage)
        way = () if at is None or log is None else log.up_to(action.up_to).reach(at)
        if not way:  # it is there by now, or gone, or nobody knows
            return
        refusal = Refusal(action.lineage, way[0], reason, time.monotonic())
        self.observed = self.observed.refused(refusal)
        self._tell(What.REFUSED, f"delta {way[0]} was not taken: {reason}", version=action.version)

    def _audit(self, replica: Replica, action: Audit) -> None:
        self.last_audit = time.monotonic()
        try:
            suspects = () if self.audited is None else self.audited.differing
            chunks = self._settings.audit_chunks
            found = replica.audit(action, self.publications.model.path, chunks, suspects)
        except CallFailed as error:
            self._failed(error)
            return
        before, self.audited = self.audited, found
        if found.skipped and suspects:  # nothing is known that would clear it
            self.audited = replace(found, differing=suspects)
        elif found.differing:
            chunk = found.differing[0]
            self._tell(
                What.DIFFERS,
                f"version {action.version} at position {found.position} does not hold what was published: "
                f"{chunk.variable}, rows {chunk.start} to {chunk.stop}; start this server anew",
                version=action.version,
                position=found.position,
            )
            self._rebuild(replica)
        elif found.skipped and (before is None or before.skipped != found.skipped):
            self._tell(What.AUDIT, f"no audit of version {action.version}: {found.skipped}")

    def _rebuild(self, replica: Replica) -> None:
        """Load the model anew where that may be done, and look at it with new eyes."""
        if self._rebuilder is None:
            return
        before = self._why_not_rebuilt
        try:
            self._why_not_rebuilt = self._rebuilder.rebuild(self, self.publications.model.path)
        except ServerError as error:
            self._failed(CallFailed("ABORTED", error.message, cause=f"it was not rebuilt: {error}"))
            return
        if self._why_not_rebuilt:
            if self._why_not_rebuilt != before:
                self._tell(What.AUDIT, f"it is not rebuilt: {self._why_not_rebuilt}")
            return
        self._tell(What.REBUILT, "it was loaded anew from its base")
        self.audited, self.last_audit = None, 0.0
        self._observe(replica)

    def _restore(self) -> None:
        """Put a model back that somebody took out, and did not live to put back."""
        if self._rebuilder is None or not was_left_out(self.observed):
            return
        try:
            self._rebuilder.restore(self)
            self._tell(What.REBUILT, "it was out of the server, and is back")
        except ServerError as error:
            self._failed(CallFailed("ABORTED", error.message, cause=f"it is not back: {error}"))

    def _failed(self, error: CallFailed) -> None:
        before = self.observed
        text = error.cause or error.message
        self.observed = before.failed(text, time.monotonic(), random.random())
        if not before.failures or before.error != text:
            self._tell(What.FAILED, text)

    def _tell(self, what: What, message: str, **told: Any) -> None:
        self._journal.write(Event(what, message, self.model, self.address, **told))


class Fleet:
    """Every model on every server."""

    def __init__(
        self,
        models: Sequence[Model],
        targets: Targets,
        journal: Journal,
        settings: Settings,
        *,
        allowed: Allowed = lambda model, address, published: published,
    ) -> None:
        self.journal = journal
        self._allowed = allowed
        self.settings = settings
        self.publications = [Publications(model, journal, settings.poll_s) for model in models]
        self._targets = targets
        self._workers: dict[tuple[str, str], Worker] = {}
        self._lock = threading.Lock()
        self._resolved = Resolved(())
        self._rebuilder: Rebuilder | None = None
        if (config := settings.rebuild) is not None:
            self._rebuilder = Rebuilder(config, settings.access, settings.deadline_s, self.workers_of)

    @property
    def workers(self) -> list[Worker]:
        """Those who look after a replica now, by address."""
        with self._lock:
            return [self._workers[key] for key in sorted(self._workers)]

    def workers_of(self, model: str) -> list[Worker]:
        """Those of one model."""
        return [worker for worker in self.workers if worker.model == model]

    def members(self, model: str) -> list[Member]:
        """The replicas of a model, as a canary sees them."""
        return [Member(worker.address, worker.observed) for worker in self.workers_of(model)]

    @contextmanager
    def running(self, grace_s: float) -> Iterator[None]:
        """Look after all of them inside the block; at its end each call under way has `grace_s` to end."""
        stop = threading.Event()
        threads = [
            threading.Thread(target=publications.follow, args=(stop,), daemon=True)
            for publications in self.publications
        ]
        threads.append(threading.Thread(target=self._follow_names, args=(stop,), daemon=True))
        self.resolve()
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            self._end(self.workers, grace_s)
            for thread in threads:
                thread.join(1.0)

    def resolve(self) -> None:
        """See who is there: begin with new servers, leave those that are gone."""
        found = self._targets.resolve()
        if found.problems != self._resolved.problems:
            for problem in found.problems:
                self.journal.write(Event(What.TARGETS, problem))
        self._resolved = found
        wanted = {
            (address, publications.model.name): publications
            for address in found.addresses
            for publications in self.publications
        }
        with self._lock:
            gone = [self._workers.pop(key) for key in self._workers.keys() - wanted.keys()]
            new = {
                key: Worker(key[0], publications, self.journal, self.settings, self._allowed, self._rebuilder)
                for key, publications in wanted.items()
                if key not in self._workers
            }
            self._workers |= new
        for worker in new.values():
            worker.start()
        for worker in gone:
            worker.end()

    def _follow_names(self, stop: threading.Event) -> None:
        while not stop.wait(self.settings.resolve_s):
            self.resolve()

    @staticmethod
    def _end(workers: Sequence[Worker], grace_s: float) -> None:
        until = time.monotonic() + grace_s
        for worker in workers:
            worker.end()
        for worker in workers:
            worker.join(max(0.0, until - time.monotonic()))
