"""One model of one server: a thread observes it, applies deltas and audits it, as `rollout` decides.

With pacing, a second thread probes its predictions; their latencies determine the pause between deltas.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timezone
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from exporter.errors import CallFailed, ExportError, ServerError
from exporter.publish.model import Model
from exporter.publish.served import Served
from exporter.terminal.progress import count
from exporter.terminal.server_access import WITHOUT_TLS, ServerAccess
from exporter.wire.protos import Proto
from serving.agent import rollout
from serving.agent.audit import Audited, audit
from serving.agent.journal import AgentEvent, EventKind, Journal
from serving.agent.labels import Labelled, LabelRules, follow_tags
from serving.agent.pacing import Latencies, PacePolicy, Waiting, next_pause
from serving.agent.probe import Prober
from serving.agent.publications import FollowedModel, Publications
from serving.agent.readiness import Readiness
from serving.agent.rebuild import Rebuilder
from serving.agent.rollout import (
    Apply,
    Audit,
    Observe,
    Observed,
    Paced,
    Refusal,
    RolloutPolicy,
    Wait,
)
from serving.client import ModelClient
from serving.updates import Updated, call_until_there, read_served

BYTES_A_SECOND = 20e6
"""Bytes of deltas per second by which a catch-up's deadline is extended."""
_AFTER_A_SURPRISE_S = 1.0
RESTARTS_S = 600.0
_MOST_RESTARTS = 1000
_LONGEST_WAIT_S = 60.0
_REFUSED = "INVALID_ARGUMENT"
_MAY_BE_DAMAGE = frozenset(
    {"UNKNOWN", "INTERNAL", "DATA_LOSS", "OUT_OF_RANGE", "NOT_FOUND", "FAILED_PRECONDITION"}
)
"""Codes of a call that the server ran, and that failed there."""
_NOT_CONNECTED = "failed to connect to all addresses"
"""gRPC's text for a call that it has not sent."""

Allowed = Callable[[str, str, Model], Model]
"""A function from a model's name, an address and the published logs to what that replica may apply."""


class Pacer:
    """A prober of one replica, and its pause; `version` returns the version that clients get by default."""

    def __init__(
        self,
        address: str,
        model: FollowedModel,
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
        """Send probes in a thread until `stop` is set."""
        threading.Thread(target=self._prober.run, args=(self._access, stop), daemon=True).start()

    def paced(self, versions: Sequence[Served], published: Model, now: float) -> Paced:
        """Return the pause, the wait of the oldest applicable delta, and True if enough was measured.

        `versions` are the replica's; `published` are the logs, limited to the deltas that it may apply; `now`
        is in monotonic seconds. Records since when deltas are pending.
        """
        logs = published.logs
        pairs = [(version, logs[version.lineage]) for version in versions if version.lineage in logs]
        return Paced(self.pause_s, self._waiting.longest_s(pairs, now), not self._prober.is_measuring)

    def applying(self) -> AbstractContextManager[None]:
        """Return a context manager for a block in which deltas are applied; probes in it count as such."""
        return self._prober.applying()

    @property
    def latencies(self) -> Latencies:
        """Return the latencies of the last probes."""
        return self._prober.latencies()

    def adapt(self) -> str:
        """Choose the next pause between deltas and set `pause_s`; return the text of an event, or "".

        There is an event if pauses begin or end. Too few probes change nothing; with enough of them, those
        taken while deltas were applied are forgotten.
        """
        before, found = self.pause_s, self.latencies
        self.pause_s = next_pause(before, found, self._policy)
        if found.applying_p99_s is None or found.idle_p99_s is None:
            return ""
        self._prober.restart()
        if (before > 0) == (self.pause_s > 0):
            return ""
        what = "pauses between deltas begin" if self.pause_s else "no more pauses between deltas"
        p99s = f"{found.applying_p99_s * 1000:.1f} ms, {found.idle_p99_s * 1000:.1f} ms when idle"
        return f"{what}: p99 of predictions is {p99s}"


class Settings(Struct, frozen=True):
    """The settings of a fleet; times in seconds.

    `poll_s`: the longest time between two listings of a directory. `reads_ahead`: whether tables that servers
    map are read in advance. `resolve_s`: the time between two look-ups of names. `deadline_s`: the deadline
    of a call, to which the time of a catch-up is added. `audit_chunks`: the number of chunks that an audit
    compares. `pace`: the limits of pacing (None: no pacing). `rebuild` reads the servers' present
    configuration (None: no rebuilds). `labels`: the tags that labels follow (None: labels are left alone).
    `access`: files for TLS, a certificate and a token.
    """

    policy: RolloutPolicy = field(default_factory=RolloutPolicy)
    poll_s: float = 1.0
    reads_ahead: bool = True
    resolve_s: float = 10.0
    deadline_s: float = 10.0
    audit_chunks: int = 16
    pace: PacePolicy | None = None
    rebuild: Callable[[], Proto] | None = None
    labels: LabelRules | None = None
    access: ServerAccess = WITHOUT_TLS


class Replica:
    """One model of one server, and the thread that keeps it fresh."""

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
        self.readiness = Readiness()
        self.last_applied = 0.0
        self.last_audit = time.monotonic()
        self.audited: Audited | None = None
        self._restarted = deque[float](maxlen=_MOST_RESTARTS)
        self._is_gone = False
        self._rebuilder = rebuilder
        self._why_not_rebuilt = ""
        self._why_not_labelled: Sequence[str] = ()
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
        """Return the model's name."""
        return self.publications.model.name

    def start(self) -> None:
        """Start the replica's thread, and with pacing the prober's; may be called once."""
        self._thread.start()
        if self.pacer is not None:
            self.pacer.start(self._stop)

    def end(self) -> None:
        """Make no more calls after the present one; does not wait for it."""
        self._stop.set()
        self.publications.wake()  # after `_stop` is set: the thread may sleep in `wait`

    def join(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for the present call; return True if the thread has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def published(self) -> Model:
        """Return the published logs, limited to the deltas that this replica may apply."""
        return self._allowed(self.model, self.address, self.publications.current)

    @property
    def served_version(self) -> int | None:
        """Return the version that answers requests without a version; None if none is served."""
        served = self.observed.served
        return None if served is None else served.number

    @property
    def serves_rightly(self) -> bool:
        """Return True if it responds and serves a version that passed its last audit, or was not audited."""
        is_wrong = self.audited is not None and bool(self.audited.differing)
        return self.served_version is not None and not is_wrong and not self.observed.failures

    @property
    def restarts(self) -> list[float]:
        """Return the seconds since each restart of the last ten minutes, the last restart first.

        A restart is counted if the server answers again after nothing had listened there, or has begun anew
        (`rollout.began_anew`). One that has loaded all again before the next observation is not noticed.
        """
        now = time.monotonic()
        return [now - at for at in reversed(tuple(self._restarted)) if now - at <= RESTARTS_S]

    def _pacer(self) -> Pacer | None:
        pace, access = self._settings.pace, self._settings.access
        if pace is None:
            return None
        return Pacer(self.address, self.publications.model, pace, access, lambda: self.served_version)

    def _run(self) -> None:
        settings = self._settings
        while not self._stop.is_set():
            try:
                with ModelClient(
                    self.address, self.model, deadline_s=settings.deadline_s, access=settings.access
                ) as client:
                    while not self._stop.is_set():
                        self._act(client)
            except Exception as error:  # noqa: BLE001 - a dead thread would leave this replica without updates
                self._failed(CallFailed("INTERNAL", f"{type(error).__name__}: {error}"))
                self._stop.wait(_AFTER_A_SURPRISE_S)

    def _act(self, client: ModelClient) -> None:
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
            case Wait(until):
                pause = min(max(0.0, until - now), _LONGEST_WAIT_S)
                # `_seen` is of the last wait: a change since `published` was read ends this one at once.
                self._seen = self.publications.wait(self._seen, pause)
            case Observe():
                self._observe(client)
            case Apply():
                self._apply(client, action)
            case Audit():
                self._audit(client, action)

    def _observe(self, client: ModelClient, *, is_rebuilt: bool = False) -> None:
        before = self.observed
        try:
            versions = [read_served(client, status, before.versions) for status in client.status()]
        except CallFailed as error:
            self._failed(error)
            self.readiness = Readiness()
            return
        now = time.monotonic()
        self._saw(before.answered(versions, now))
        is_new = rollout.began_anew(before.versions, self.observed.versions)
        if (self._is_gone and before.versions) or (is_new and not is_rebuilt):
            self._restarted.append(now)
        self._is_gone = False
        if is_new:
            self.audited = None
        for version, what, message in rollout.differences(before.versions, self.observed.versions):
            self._report(EventKind(what), message, version=version.number, position=version.position)
        self._restore()
        self._label(client)

    def _saw(self, observed: Observed) -> None:
        self.observed = observed
        self.readiness = self.readiness.seen(observed, self.published)

    def _apply(self, client: ModelClient, action: Apply) -> None:
        log = self.publications.current.logs.get(action.lineage)
        bytes_ = 0 if log is None else log.size(action.chain)
        began = time.monotonic()
        try:
            with self.pacer.applying() if self.pacer else nullcontext():
                done = self._bring(client, action, bytes_)
        except CallFailed as error:
            reason = error.cause or error.message
            if error.code == _REFUSED or (error.code in _MAY_BE_DAMAGE and self._is_damaged(action)):
                self._refused(client, action, reason)
            else:
                self.readiness = self.readiness.sent_in_vain(action.version)
                self._failed(error)
            return
        if done.found_another:  # that update may have got as far: ask for the position again
            self.readiness = self.readiness.sent_in_vain(action.version)
            self._observe(client)
            return
        self.last_applied = now = time.monotonic()
        if done.position < action.up_to:
            self._refused(client, action, f"the update stopped at {done.position}: {done.status}")
            return
        self._saw(self.observed.moved(done.version, done.position, done.step))
        self._applied(action, done, now - began)
        if self.pacer is not None and (text := self.pacer.adapt()):
            self._report(EventKind.PACED, text)

    def _bring(self, client: ModelClient, action: Apply, bytes_: int) -> Updated:
        """Bring a version to the action's position by calls of `client`, and return where the update stopped.

        `bytes_`, the size of the deltas to apply, extends the deadline of each call. `Updated.found_another`
        is true if another update ran until the deadline. CallFailed if the server did not respond, or
        refused.
        """
        client.deadline_s = self._settings.deadline_s + bytes_ / BYTES_A_SECOND
        try:
            return call_until_there(client, action.up_to, action.version)
        finally:
            client.deadline_s = self._settings.deadline_s

    def _applied(self, action: Apply, done: Updated, seconds: float) -> None:
        log = self.publications.current.logs.get(action.lineage)
        commit = None if log is None else log.commits.get(done.position)
        now = datetime.now(timezone.utc)
        age = None if commit is None else (now - commit.created).total_seconds()
        newest = None if commit is None else commit.event_time
        took = f"{count(done.deltas, 'delta')}, {count(done.rows, 'row')}"
        self._report(
            EventKind.APPLIED,
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

    def _is_damaged(self, action: Apply) -> bool:
        """Read the files of the deltas to apply, and return True if one is damaged.

        Bases of earlier releases fail at a damaged delta without naming it.
        """
        return any(self.publications.damage(action.lineage, delta) for delta in action.chain)

    def _refused(self, client: ModelClient, action: Apply, reason: str) -> None:
        """Ask for the position again, and record and report the refused delta, the first after that position.

        Earlier ones of the action were applied. If the delta's files are damaged, the damage replaces
        `reason`. Nothing is recorded if the position was reached or is unknown.
        """
        self._observe(client)
        if self.observed.failures:  # not asked: the delta after its last known position may be applied by now
            return
        at = next((v.position for v in self.observed.versions if v.number == action.version), None)
        log = self.publications.current.logs.get(action.lineage)
        way = () if at is None or log is None else log.up_to(action.up_to).reach(at)
        if not way:  # it has got there, or is gone, or its position is unknown
            return
        damage = self.publications.damage(action.lineage, way[0])
        reason = damage or reason
        refusal = Refusal(action.lineage, way[0], reason, time.monotonic(), is_damaged=bool(damage))
        self._saw(self.observed.refused(refusal))
        self._report(EventKind.REFUSED, f"delta {way[0]} was refused: {reason}", version=action.version)

    def _audit(self, client: ModelClient, action: Audit) -> None:
        # At the beginning: an audit that fails is not repeated at once.
        self.last_audit = time.monotonic()
        try:
            suspects = () if self.audited is None else self.audited.differing
            chunks = self._settings.audit_chunks
            found = audit(client, self.publications.model.path, action, chunks, suspects)
        except CallFailed as error:
            self._failed(error)
            return
        before, self.audited = self.audited, found
        if found.skipped and suspects:  # without a result, keep the old one
            self.audited = replace(found, differing=suspects)
        elif found.differing:
            chunk = found.differing[0]
            self._report(
                EventKind.DIFFERS,
                f"version {action.version} at position {found.position} does not hold what was published: "
                f"{chunk.variable}, rows {chunk.start} to {chunk.stop}; restart this server",
                version=action.version,
                position=found.position,
            )
            self._rebuild(client)
        elif found.skipped and (before is None or before.skipped != found.skipped):
            self._report(EventKind.AUDIT, f"no audit of version {action.version}: {found.skipped}")

    def _rebuild(self, client: ModelClient) -> None:
        """Have the model loaded again if there is a rebuilder, and ask for the versions anew.

        If the server does not answer or fails (ServerError), that is recorded like a failed call; the reason
        why nothing was done is reported as an event once. UsageError, LfsPointer or OSError if a file for TLS
        or the token, the configuration, or another model's path cannot be read.
        """
        if self._rebuilder is None:
            return
        before = self._why_not_rebuilt
        try:
            self._why_not_rebuilt = self._rebuilder.rebuild(
                self.address, self.model, self.publications.model.path
            )
        except ServerError as error:
            self._failed(CallFailed("ABORTED", error.message, cause=f"the rebuild failed: {error}"))
            return
        if self._why_not_rebuilt:
            if self._why_not_rebuilt != before:
                self._report(EventKind.AUDIT, f"not rebuilt: {self._why_not_rebuilt}")
            return
        self._report(EventKind.REBUILT, "the server loaded the model again from its base")
        self.audited, self.last_audit = None, 0.0  # 0: the next audit is due now
        self._observe(client, is_rebuilt=True)

    def _restore(self) -> None:
        """Add a model again that a killed agent had removed from the server, if there is a rebuilder.

        A ServerError is recorded like a failed call. UsageError, LfsPointer or OSError if a file for TLS or
        the token, the configuration (a pointer of Git LFS), or another model's path cannot be read.
        """
        if self._rebuilder is None or not self.observed.was_left_out:
            return
        try:
            self._rebuilder.restore(self.address, self.model)
            self._report(EventKind.REBUILT, "the server lacked the model, and serves it again")
        except ServerError as error:
            self._failed(
                CallFailed("ABORTED", error.message, cause=f"the model could not be added again: {error}")
            )

    def _label(self, client: ModelClient) -> None:
        """Move the server's labels to the versions of their tags; report once why one does not move.

        An ExportError is such a reason, too. Does nothing without rules of labels.
        """
        settings = self._settings
        if settings.labels is None:
            return
        try:
            done = follow_tags(client, settings.labels, settings.access, settings.deadline_s)
        except ExportError as error:
            cause = f": {error.cause}" if error.cause else ""
            done = Labelled({}, [f"labels do not move: {error.message}{cause}"])
        for label, version in done.moved.items():
            self._report(EventKind.LABELLED, f"the label {label} names version {version}", version=version)
        for problem in done.problems:
            if problem not in self._why_not_labelled:
                self._report(EventKind.FAILED, problem)
        self._why_not_labelled = done.problems

    def _failed(self, error: CallFailed) -> None:
        before = self.observed
        text = error.cause or error.message
        was_sent = _NOT_CONNECTED not in error.cause
        self._is_gone = self._is_gone or not was_sent
        self.observed = before.failed(text, time.monotonic(), random.random(), was_sent=was_sent)
        if not before.failures or before.error != text:
            self._report(EventKind.FAILED, text)

    def _report(self, what: EventKind, message: str, **fields: Any) -> None:
        self._journal.write(AgentEvent(what, message, self.model, self.address, **fields))
