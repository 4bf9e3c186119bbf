"""Carry out the decisions of `canary`: a thread per model sends golden requests, approves and rolls back.

If several agents have a canary for a model, the agent with a lock in the model's directory decides; the lock
ends with its process. The other agents keep their replicas behind the hold. A rollback runs `export-model
rollback` in a process and session of its own, so that it completes even if the agent is killed.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import CallFailed, ExportError, TargetBusy, UsageError
from exporter.newer_python import module_command
from exporter.publish.approval import approve
from exporter.publish.commit import model_lock
from exporter.publish.judge import command
from exporter.publish.model import Log, Model
from exporter.publish.versions import newest_version
from exporter.storage.layout import CANARY_LOCK_FILE
from exporter.storage.local_paths import local_path
from exporter.terminal.progress import count
from exporter.terminal.server_access import WITHOUT_TLS, ServerAccess
from exporter.verify.golden import Answer, Gates, GoldenRequest, check_signatures, read_golden, summary
from exporter.wire.rest_json import predict_inputs
from serving.agent.by_model import by_model
from serving.agent.canary import (
    Action,
    Approve,
    Go,
    Idle,
    Judge,
    Learn,
    RollBack,
    Trial,
    at_position,
    decide,
)
from serving.agent.journal import AgentEvent, EventKind, Journal
from serving.agent.publications import Publications
from serving.agent.replica import BYTES_A_SECOND
from serving.agent.rollout import Observed
from serving.client import ModelClient
from serving.updates import read_incremental_status

_REFUSALS = frozenset(
    {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "INTERNAL", "UNIMPLEMENTED", "OUT_OF_RANGE"}
)
"""Codes by which a model refuses a request; any other code concerns the server or the network."""

_BUSY_S, _IDLE_S = 0.1, 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_SILENT_S = 60.0
"""The time within which the same event is not reported again."""

_HANGS_S = 5.0
"""A replica that goes first and answers no question of its state for so long is replaced by the next."""
_ASK_S = 1.0

_KEPT = 32
_LONGEST_REASON = 500
_NEWS = frozenset(
    {EventKind.APPLIED, EventKind.REFUSED, EventKind.RESTARTED, EventKind.VERSION, EventKind.FAILED}
)
"""Events after which a canary decides again at once."""


def ask_golden(client: ModelClient, requests: Sequence[GoldenRequest], version: int) -> tuple[Answer, ...]:
    """Send golden requests to a version, one at a time; return its answers in order, which may be refusals.

    A signature that the version lacks, inputs that do not fit it, and codes by which a model refuses are
    refusals. CallFailed if a call fails with another code, or the version's metadata cannot be had.
    """
    signatures = client.metadata(version).signatures
    answers = []
    for request in requests:
        signature = signatures.get(request.signature_name)
        if signature is None:
            answers.append(Answer(refused=f"there is no signature {request.signature_name!r}"))
            continue
        try:
            inputs = predict_inputs(request.document, signature)
            found = client.predict(inputs, signature=request.signature_name, version=version)
            answers.append(Answer(found.outputs))
        except ValueError as error:
            answers.append(Answer(refused=str(error)))
        except CallFailed as error:
            if error.code not in _REFUSALS:
                raise
            answers.append(Answer(refused=error.cause or error.message))
    return tuple(answers)


class CanaryRules(Struct, frozen=True):
    """The gates of a model's canary, and the time that a replica may take to go first (`patience_s`).

    `deadline_s` limits each call to a replica; `access` has the files for TLS and a token.
    """

    gates: Gates
    patience_s: float = 30.0
    deadline_s: float = 10.0
    access: ServerAccess = WITHOUT_TLS


class Canary:
    """The canary of one model. `current` is a log's lineage and the action; None while another agent decides.

    `failing` lists the gates that the answers at the approved position fail; empty if none do, or if unknown.
    """

    def __init__(
        self,
        publications: Publications,
        replicas: Callable[[], Mapping[str, Observed]],
        journal: Journal,
        rules: CanaryRules,
    ) -> None:
        self.publications = publications
        self.current: tuple[str, Action] | None = None
        self.failing = ""
        self._replicas = replicas
        self._journal = journal
        self._rules = rules
        self._trial: Trial | None = None
        self._answers: dict[tuple[str, int], tuple[Answer, ...]] = {}
        self._reported_kinds: tuple[str, frozenset[tuple[str, str, str]]] = ("", frozenset())
        self._waiting_since: dict[str, float] = {}
        self._reported: dict[tuple[EventKind, str, str | None], float] = {}
        self._troubles = 0
        self._stop = threading.Event()
        self._clients: dict[str, ModelClient] = {}
        self._asked_at = 0.0
        self._seen = 0

    @property
    def scores(self) -> tuple[str, ...]:
        """Return a sentence for each golden output of numbers: its mean at the last two known positions.

        Known are positions with answers; the result is empty if there are fewer than two. Outputs that the
        earlier answer lacks, and empty ones, are left out.
        """
        known = list(self._answers.items())
        if len(known) < 2:
            return ()
        ((_, before), old), ((_, after), new) = known[-2:]
        return tuple(
            f"{request.name}, {name}: mean {earlier.mean():.4g} at {before}, {output.mean():.4g} at {after}"
            for request, was, answer in zip(self._rules.gates.requests, old, new, strict=False)
            for name, output in answer.outputs.items()
            if (earlier := was.outputs.get(name)) is not None and output.dtype.kind in "fiu" and output.size
        )

    def allowed(self, address: str, published: Model) -> Model:
        """Return `published`, with its newest log limited to the position that a replica may reach.

        `address` is the replica's. Before the canary's first hold it may apply no delta (limit -1). With an
        operator's hold, or without a log, `published` is returned unchanged.
        """
        newest = published.newest_log
        if newest is None or (newest.limit is not None and not newest.is_canary):
            return published
        return replace(published, logs={**published.logs, newest.lineage: self._limited(address, newest)})

    def _limited(self, address: str, log: Log) -> Log:
        lineage, action = self.current or ("", None)
        if lineage == log.lineage and log.limit is not None:
            match action:
                case Go(chosen, target) if chosen == address:
                    return replace(log, limit=target)
                case Judge(chosen, _, position) if chosen == address:
                    return replace(log, limit=max(position, log.limit))
        # Before the first hold no replica moves: the hold is set to the position that replicas serve by then.
        return replace(log, limit=-1) if log.limit is None else log

    def follow(self, stop: threading.Event) -> None:
        """Decide for the model whenever no other agent does, until `stop` is set; then close all connections.

        Errors are reported as events, except while the model's directory cannot be read, and it tries again
        after a second. While it decides, it holds a lock in that directory.
        """
        self._stop = stop
        while not stop.is_set():
            try:
                with model_lock(self.publications.model.path, seconds=0, name=CANARY_LOCK_FILE):
                    self._lead()
            except TargetBusy:
                pass
            except Exception as error:  # noqa: BLE001  a dead thread would keep replicas back for ever
                if not self.publications.current.problem:
                    self._report(EventKind.CANARY_STUCK, f"the canary cannot decide: {error}")
            self.current, self.failing = None, ""
            stop.wait(_IDLE_S)
        for client in self._clients.values():
            client.close()

    def _lead(self) -> None:
        """Decide until stopped, the directory cannot be read, or no replica could go first for `patience_s`.

        UsageError or LfsPointer if a file for TLS or the token cannot be used; OSError if the model's lock
        cannot be opened, or the process of a rollback not be started.
        """
        stuck_since: float | None = None
        while not self._stop.is_set() and not self.publications.current.problem:
            pause = self._step()
            is_stuck = (
                self.current is not None and isinstance(found := self.current[1], Idle) and found.is_stuck
            )
            stuck_since = (stuck_since or time.monotonic()) if is_stuck else None
            if stuck_since is not None and time.monotonic() - stuck_since > self._rules.patience_s:
                return  # another agent may have replicas that can
            if pause:
                self._seen = self.publications.wait(self._seen, pause)

    def _step(self) -> float:
        """Decide and act once, which may call servers, move the hold or roll back.

        Returns the seconds to sleep afterwards unless something changes; 0 to go on at once. A failed call,
        approval or rollback is not an exception. UsageError or LfsPointer if a file for TLS or the token
        cannot be used; OSError if the model's lock cannot be opened, or the process of a rollback not be
        started.
        """
        log = self.publications.current.newest_log
        if log is None:
            self.current = None
            return _IDLE_S
        approved = log.limit if log.is_canary else None
        key = (log.lineage, approved if approved is not None else -1)
        pending = tuple(span for span in log.deltas if approved is not None and span.end > approved)
        size = log.size(pending)
        replicas = self._replicas()
        is_there = approved is not None and at_position(replicas, log.lineage, approved) is not None
        action, self._trial = decide(
            log,
            replicas,
            self._trial,
            time.monotonic(),
            patience_s=self._rules.patience_s + size / BYTES_A_SECOND,
            knows=key in self._answers or (is_there and self._has_waited("learn", key)),
            hangs=self._hangs(),
        )
        if self.current != (log.lineage, action):
            # Before the announcement: that wakes the replica, which reads its limit here.
            self.current = (log.lineage, action)
            self._announce(action)
        match action:
            case Idle(_, is_stuck):
                return _BUSY_S if is_stuck else _IDLE_S
            case Go():
                return _BUSY_S
            case Approve(expected, position):
                return self._approve(log, expected, position, "replicas serve it already")
            case Learn(address, version, position):
                return 0.0 if self._learn(log, address, version, position) else _BUSY_S
            case Judge():
                return self._judge(log, action)
            case RollBack(to, reason):
                return self._roll_back(log, to, reason)

    def _hangs(self) -> bool:
        """Ask the replica that goes first for its state; return True if it does not answer in 5 s.

        It is asked at most once a second; that it does not answer is also reported as an event. The replica's
        own thread waits meanwhile for the update, whose deadline grows with the deltas; a server reports its
        state during any update. False if no replica goes first, if it was asked within the last second, or if
        the server refuses or is down. UsageError or LfsPointer if a file for TLS or the token cannot be used.
        """
        _, action = self.current or ("", None)
        if not isinstance(action, Go) or time.monotonic() < self._asked_at + _ASK_S:
            return False
        self._asked_at = time.monotonic()
        try:
            self._client(action.address).status(deadline_s=_HANGS_S)
        except CallFailed as error:
            if error.code != "DEADLINE_EXCEEDED":  # it refuses, or is down: its own thread finds that
                return False
            text = f"hangs: no answer in {_HANGS_S:g} s, so another goes first"
            self._report(EventKind.CANARY, text, action.address)
            return True
        return False

    def _client(self, address: str) -> ModelClient:
        if address not in self._clients:
            model, rules = self.publications.model.name, self._rules
            self._clients[address] = ModelClient(
                address, model, deadline_s=rules.deadline_s, access=rules.access
            )
        return self._clients[address]

    def _announce(self, action: Action) -> None:
        match action:
            case Go(address, target):
                self._report(EventKind.CANARY, f"goes first, to {target}", address, target)
                self.publications.wake()
            case Idle(reason, True):
                self._report(EventKind.CANARY_STUCK, reason)

    def _learn(self, log: Log, address: str, version: int, position: int) -> bool:
        """Ask a replica for its answers at the approved position and keep them; False if it has none.

        The first answers of a new log are also compared with the last ones of the previous log. `failing`
        becomes a summary of the gates that the answers fail; if these are other gates than at the last call,
        they are reported as an event. UsageError or LfsPointer if a file for TLS or the token cannot be used.
        """
        answers = self._ask(log, address, version, position)
        if answers is None:
            return False
        before = self._of_log_before(log)
        self._keep(log, position, answers)
        wrong, text = self._rules.gates.wrong(answers), f"golden requests fail at {position} before any new "
        if before is not None:  # servers load a base by themselves: the canary can only report it
            wrong += self._rules.gates.drifted(answers, before)
            text = f"version {version}, a new base, does not pass the golden requests: "
        else:
            text += "delta, so no delta is the cause: "
        kinds = log.lineage, frozenset(failure.kind for failure in wrong)
        if wrong and kinds != self._reported_kinds:
            self._report(EventKind.GOLDEN, text + summary(wrong), address, position)
        self._reported_kinds, self.failing = kinds, summary(wrong)
        return True

    def _of_log_before(self, log: Log) -> tuple[Answer, ...] | None:
        """Return the last known answers of another log; None if there are none.

        None, too, if answers of this log are known.
        """
        if any(lineage == log.lineage for lineage, _ in self._answers):
            return None
        return next(reversed(self._answers.values()), None)

    def _judge(self, log: Log, action: Judge) -> float:
        before = self._answers.get((log.lineage, action.approved))
        if before is None:
            held = at_position(self._replicas(), log.lineage, action.approved)
            if held is not None and self._learn(log, *held, action.approved):
                return 0.0
            others = any(address != action.address for address in self._replicas())
            if others and not self._has_waited("compare", action):
                return _BUSY_S
            text = f"no replica is at {action.approved}: scores are not compared with those before"
            self._report(EventKind.CANARY, text, action.address)
        answers = self._ask(log, action.address, action.version, action.position)
        if answers is None:
            return _BUSY_S
        failures = self._rules.gates.failures(answers, before)
        if failures:
            return self._roll_back(log, action.approved, summary(failures))
        self._keep(log, action.position, answers)
        wrong = self._rules.gates.wrong(answers)
        self.failing, failing = summary(wrong), {failure.request for failure in wrong}
        passed = f"{action.address} passed {count(len(answers) - len(failing), 'golden request')}"
        why = f"{passed}; {len(failing)} failed as before" if failing else passed
        return self._approve(log, action.approved, action.position, why)

    def _ask(self, log: Log, address: str, version: int, position: int) -> tuple[Answer, ...] | None:
        """Send the golden requests to a replica at a position; return its answers, or None without any.

        None if it is gone or has moved, which its own thread will notice. None, too, while a replica reports
        its position but does not answer the requests: the caller asks again until `patience_s` is over; then
        it counts as refusing all requests. UsageError or LfsPointer if a file for TLS or the token cannot be
        used.
        """
        client = self._client(address)
        answers: tuple[Answer, ...] = ()
        try:
            # Before and after: a delta between two requests would mix the answers of two positions.
            before = read_incremental_status(client, version)
            with suppress(CallFailed):
                answers = ask_golden(client, self._rules.gates.requests, version)
            after = read_incremental_status(client, version)
        except CallFailed:
            return None
        stood = {(at.lineage, at.position) for at in (before, after) if at is not None}
        if stood != {(log.lineage, position)}:
            return None
        if answers or not self._has_waited("answers", (address, version, position)):
            return answers or None
        silence = Answer(refused=f"no response in {self._rules.patience_s:g} s")
        return tuple(silence for _ in self._rules.gates.requests)

    def _approve(self, log: Log, expected: int | None, position: int, why: str) -> float:
        try:
            model = self.publications.model.path
            done = approve(log.path, model, expected=expected, position=position)
        except ExportError as error:
            self._report(EventKind.CANARY_STUCK, f"{position} cannot be approved: {error}", position=position)
            return self._pause()
        self._troubles = 0
        if done is not None:
            if done < position:
                why = "a canary rolled back what lies beyond, so that is judged first"
            self._report(EventKind.APPROVED, f"position {done} is approved: {why}", position=done)
        self.publications.look()  # or the next step decides on the log of before
        return _BUSY_S if done is None else 0.0

    def _roll_back(self, log: Log, to: int, reason: str) -> float:
        reason = reason[:_LONGEST_REASON]
        self._report(EventKind.CANARY, f"rolling back what lies beyond {to}: {reason}")
        done = _run_rollback(self.publications.model.path, to, f"canary: {reason}")
        self._waiting_since.clear()
        self.publications.look()  # or the next step decides on the log of before
        if done.returncode == 0:
            self._troubles = 0
            path = self.publications.model.path
            self._report(
                EventKind.ROLLED_BACK,
                f"rolled back to the values of {to}: {reason}",
                position=to,
                why=f"canary: {reason}",
                command=command("export-model", "resume", path, "--lift-only"),
            )
            return 0.0
        now = self.publications.current.logs.get(log.lineage)
        if now is not None and now.is_canary:  # no operator has decided meanwhile
            text = f"the rollback to {to} failed: {done.stderr.strip()[-_LONGEST_REASON:]}"
            self._report(EventKind.CANARY_STUCK, text)
        return self._pause()

    def _pause(self) -> float:
        """Sleep after a failure, from 1 s up to 60 s, twice as long each time, unless stopped; return 0."""
        self._stop.wait(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**self._troubles))
        self._troubles = min(self._troubles + 1, 10)
        return 0.0

    def _has_waited(self, what: str, about: object) -> bool:
        """Return True if the first call with these arguments was at least `patience_s` ago.

        `what` and `about` identify the wait, which the first call begins. Beside a new one only the last 32
        are remembered.
        """
        key, now = f"{what} {about}", time.monotonic()
        if key not in self._waiting_since:
            self._waiting_since = {**dict(list(self._waiting_since.items())[-_KEPT:]), key: now}
        return now - self._waiting_since[key] >= self._rules.patience_s

    def _keep(self, log: Log, position: int, answers: tuple[Answer, ...]) -> None:
        """Keep the answers at a position beside the answers that were kept last; forget all earlier ones."""
        kept = list(self._answers.items())[-1:]
        self._answers = {**dict(kept), (log.lineage, position): answers}

    def _report(
        self,
        what: EventKind,
        message: str,
        replica: str | None = None,
        position: int | None = None,
        *,
        why: str = "",
        command: str = "",
    ) -> None:
        key, now = (what, message, replica), time.monotonic()
        if now - self._reported.get(key, -_SILENT_S) < _SILENT_S:
            return
        self._reported = {**dict(list(self._reported.items())[-_KEPT:]), key: now}
        self._journal.write(
            AgentEvent(
                what,
                message,
                self.publications.model.name,
                replica,
                position=position,
                why=why,
                command=command,
            )
        )


class Canaries:
    """The canaries of a fleet, by the model's name."""

    def __init__(self, rules: Mapping[str, CanaryRules], journal: Journal) -> None:
        self._rules = rules
        self._journal = journal
        self.models = frozenset(rules)
        self.of: dict[str, Canary] = {}

    def allowed(self, model: str, address: str, published: Model) -> Model:
        """Return the published logs, limited to the deltas that the replica at `address` may apply.

        For a model without a canary these are all; before its canary has started there are none.
        """
        if model not in self._rules:
            return published
        canary = self.of.get(model)
        return Model() if canary is None else canary.allowed(address, published)

    @contextmanager
    def running(
        self, publications: Sequence[Publications], replicas: Callable[[str], Mapping[str, Observed]]
    ) -> Iterator[None]:
        """Run a thread for each model's canary inside the block; at its end each has up to a second to end.

        `publications` are those of all models; `replicas` returns a model's replicas by address, given its
        name.
        """
        stop = threading.Event()
        for one in publications:
            name = one.model.name
            if name in self._rules:
                self.of[name] = Canary(one, partial(replicas, name), self._journal, self._rules[name])
        self._journal.read_by(self._hear)
        threads = [
            threading.Thread(target=canary.follow, args=(stop,), daemon=True) for canary in self.of.values()
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for canary in self.of.values():
                canary.publications.wake()  # its thread may sleep in `wait`, and looks at `stop` only then
            for thread in threads:
                thread.join(1.0)

    def _hear(self, event: AgentEvent) -> None:
        """Wake the canary of the event's model if the event may change its decision."""
        if event.what in _NEWS and event.model in self.of:
            self.of[event.model].publications.wake()


def _run_rollback(model: Path, to: int, reason: str) -> subprocess.CompletedProcess[str]:
    """Run this installation's rollback command and wait for its end; the result has its exit code and output.

    `model` is the model's directory, `to` the position whose values are published again, `reason` is kept
    with them. The command fails if no canary's hold is at `to`. A failed rollback is not an exception;
    OSError if the process cannot be started. The working directory does not matter.
    """
    import exporter

    packages = Path(exporter.__file__).parent.parent
    search = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [
            *module_command("exporter"),
            *("rollback", str(model), "--to", str(to), "--if-canary", "--reason", reason),
        ],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        start_new_session=True,  # signals to the agent's group, as Ctrl-C, end no rollback
        check=False,
    )


def canary_rules(
    options: Sequence[str],
    models: Mapping[str, Path],
    *,
    drift: float | None,
    patience_s: float,
    deadline_s: float,
    access: ServerAccess,
) -> dict[str, CanaryRules]:
    """Read the files of golden requests; return the rules of each model that has a canary, by its name.

    `options` are `[NAME=]FILE`; NAME may be left out if there is one model. `models` has the directories.
    `drift` is the limit of `Gates` (None: no limit); `patience_s` limits a canary's time to go first,
    `deadline_s` each call; `access` has the files for TLS and a token.

    Raises:
        UsageError: a file cannot be read or does not fit the published version, a model is unknown or named
            twice, or its directory is not writable.
        LfsPointer: a file, or the graph of the published version, is a pointer of Git LFS.
    """
    rules: dict[str, CanaryRules] = {}
    for name, file in by_model("--canary", options, models).items():
        requests = read_golden(local_path("--canary", file))
        _check_published(name, models[name], requests)
        rules[name] = CanaryRules(Gates(requests, drift), patience_s, deadline_s, access)
    return rules


def _check_published(name: str, model: Path, requests: Sequence[GoldenRequest]) -> None:
    """Raise UsageError if a model cannot be written, or the requests do not fit its newest version.

    UsageError, too, if that version has no readable graph; LfsPointer if the graph is a pointer of Git LFS. A
    model that does not exist yet, or whose versions cannot be listed, passes. `name` is for errors.
    """
    if not model.is_dir():
        return
    if not os.access(model, os.W_OK):
        raise UsageError(
            f"the canary of {name!r} cannot write {model}",
            cause="the canary writes its hold and publishes rollbacks there",
            hint="mount it writable for the agent, or leave out --canary",
        )
    try:
        newest = newest_version(model)
    except ExportError:
        return
    if newest is not None:
        check_signatures(requests, newest.path)
