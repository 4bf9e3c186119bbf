"""Do what `canary` decides: a thread for each model, which asks, approves and rolls back.

If several agents have a canary for a model, the one that holds a lock in its directory decides; the lock ends
with its process. The others keep their replicas behind the hold. The rollback is done by `export-model
rollback`, in a process and session of its own, so that it ends what it began if the agent is killed.

Ask a model server golden requests.

`--canary`: which model's canary is asked what. What is wrong with that ends the command at its start.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import CallFailed, ExportError, TargetBusy, UsageError
from exporter.golden import Answer, Gates, GoldenRequest, check_signatures, read_golden, told
from exporter.layout import CANARY_LOCK_FILE
from exporter.local_paths import local_path
from exporter.progress import count
from exporter.publish.approval import approve
from exporter.publish.commit import model_lock
from exporter.publish.versions import newest_version
from exporter.terminal.server_access import WITHOUT_TLS, ServerAccess
from exporter.wire.rest_json import predict_inputs
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
from serving.agent.journal import EventKind, FleetEvent, Journal
from serving.agent.publications import Publications
from serving.agent.replica import BYTES_A_SECOND
from serving.agent.rollout import Observed, PublishedLog, PublishedLogs
from serving.client import ModelClient
from serving.updates import read_incremental_status

_REFUSALS = frozenset(
    {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "INTERNAL", "UNIMPLEMENTED", "OUT_OF_RANGE"}
)
"""Codes that answer a request; any other tells of the server, or of the way there."""


def ask_golden(client: ModelClient, requests: Sequence[GoldenRequest], version: int) -> tuple[Answer, ...]:
    """Each request's answer by a version.

    Raises:
        CallFailed: the server did not answer, or does not have the version any more.
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


_BUSY_S, _IDLE_S = 0.1, 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_SILENT_S = 60.0
"""How long the same is not told again."""

_KEPT = 32
_LONGEST_REASON = 500
_NEWS = frozenset(
    {EventKind.APPLIED, EventKind.REFUSED, EventKind.RESTARTED, EventKind.VERSION, EventKind.FAILED}
)


class CanaryRules(Struct, frozen=True):
    """The gates of a model's canary, and for how long one replica may be the one that goes first."""

    gates: Gates
    patience_s: float = 30.0
    deadline_s: float = 10.0
    access: ServerAccess = WITHOUT_TLS


class Canary:
    """The canary of one model. `current` is what it does now, of which log; None while it does not decide.
    `failing` is what the answers at the approved position do not pass; empty if they do, or nobody knows.
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
        self._told_wrong: tuple[str, frozenset[tuple[str, str, str]]] = ("", frozenset())
        self._waiting_since: dict[str, float] = {}
        self._told: dict[tuple[EventKind, str, str | None], float] = {}
        self._troubles = 0
        self._stop = threading.Event()
        self._clients: dict[str, ModelClient] = {}
        self._seen = 0

    def allowed(self, address: str, published: PublishedLogs) -> PublishedLogs:
        """What a replica may take of what is published."""
        newest = published.newest_log
        if newest is None or (newest.limit is not None and not newest.is_canary):
            return published
        return replace(published, logs={**published.logs, newest.lineage: self._limited(address, newest)})

    def _limited(self, address: str, log: PublishedLog) -> PublishedLog:
        lineage, action = self.current or ("", None)
        if lineage == log.lineage and log.limit is not None:
            match action:
                case Go(chosen, target) if chosen == address:
                    return replace(log, limit=target)
                case Judge(chosen, _, position) if chosen == address:
                    return replace(log, limit=max(position, log.limit))
        # Before the first hold nobody moves: what others serve by then is approved.
        return replace(log, limit=-1) if log.limit is None else log

    def follow(self, stop: threading.Event) -> None:
        """Decide for the model while no other agent does, until `stop`."""
        self._stop = stop
        while not stop.is_set():
            try:
                with model_lock(self.publications.model.path, seconds=0, name=CANARY_LOCK_FILE):
                    self._lead()
            except TargetBusy:
                pass
            except Exception as error:  # noqa: BLE001  a thread that died would hold replicas back unseen
                if not self.publications.current.problem:
                    self._tell(EventKind.CANARY_STUCK, f"the canary cannot decide: {error}")
            self.current, self.failing = None, ""
            stop.wait(_IDLE_S)
        for client in self._clients.values():
            client.close()

    def _lead(self) -> None:
        """Decide until the end, until the directory is gone, or until nobody here can go first for long."""
        stuck_since: float | None = None
        while not self._stop.is_set() and not self.publications.current.problem:
            pause = self._step()
            is_stuck = (
                self.current is not None and isinstance(found := self.current[1], Idle) and found.is_stuck
            )
            stuck_since = (stuck_since or time.monotonic()) if is_stuck else None
            if stuck_since is not None and time.monotonic() - stuck_since > self._rules.patience_s:
                return  # perhaps another agent sees replicas that can
            if pause:
                self._seen = self.publications.wait(self._seen, pause)

    def _step(self) -> float:
        """Decide and do it; for how long to sleep then, unless something happens."""
        log = self.publications.current.newest_log
        if log is None:
            self.current = None
            return _IDLE_S
        approved = log.limit if log.is_canary else None
        key = (log.lineage, approved if approved is not None else -1)
        pending = tuple(span for span in log.deltas if approved is not None and span.end > approved)
        size = self.publications.directory.size(log.lineage, pending)
        replicas = self._replicas()
        is_there = approved is not None and at_position(replicas, log.lineage, approved) is not None
        action, self._trial = decide(
            log,
            replicas,
            self._trial,
            time.monotonic(),
            patience_s=self._rules.patience_s + size / BYTES_A_SECOND,
            knows=key in self._answers or (is_there and self._has_waited("learn", key)),
        )
        if self.current != (log.lineage, action):
            self.current = (log.lineage, action)
            self._announce(action)
        match action:
            case Idle(_, is_stuck):
                return _BUSY_S if is_stuck else _IDLE_S
            case Go():
                return _BUSY_S
            case Approve(expected, position):
                return self._approve(log, expected, position, "what replicas serve already is approved")
            case Learn(address, version, position):
                return 0.0 if self._learn(log, address, version, position) else _BUSY_S
            case Judge():
                return self._judge(log, action)
            case RollBack(to, reason):
                return self._roll_back(log, to, reason)

    def _announce(self, action: Action) -> None:
        match action:
            case Go(address, target):
                self._tell(EventKind.CANARY, f"goes first, to {target}", address, target)
                self.publications.wake()
            case Idle(reason, True):
                self._tell(EventKind.CANARY_STUCK, reason)

    def _learn(self, log: PublishedLog, address: str, version: int, position: int) -> bool:
        """Ask what is answered at the approved position; True if it is known now."""
        answers = self._ask(log, address, version, position)
        if answers is None:
            return False
        before = self._of_log_before(log)
        self._keep(log, position, answers)
        wrong, text = self._rules.gates.wrong(answers), f"golden requests fail at {position} without any new "
        if before is not None:  # what servers load by themselves: it cannot be held back, only told of
            wrong += self._rules.gates.drifted(answers, before)
            text = f"version {version}, a new base, does not pass the golden requests: "
        else:
            text += "delta, which is not blamed for it: "
        kinds = log.lineage, frozenset(failure.kind for failure in wrong)
        if wrong and kinds != self._told_wrong:
            self._tell(EventKind.GOLDEN, text + told(wrong), address, position)
        self._told_wrong, self.failing = kinds, told(wrong)
        return True

    def _of_log_before(self, log: PublishedLog) -> tuple[Answer, ...] | None:
        """What was answered last of another log; None once something is known of this one."""
        if any(lineage == log.lineage for lineage, _ in self._answers):
            return None
        return next(reversed(self._answers.values()), None)

    def _judge(self, log: PublishedLog, action: Judge) -> float:
        before = self._answers.get((log.lineage, action.approved))
        if before is None:
            held = at_position(self._replicas(), log.lineage, action.approved)
            if held is not None and self._learn(log, *held, action.approved):
                return 0.0
            others = any(address != action.address for address in self._replicas())
            if others and not self._has_waited("compare", action):
                return _BUSY_S
            text = f"no replica stands at {action.approved}: scores are not compared with those before"
            self._tell(EventKind.CANARY, text, action.address)
        answers = self._ask(log, action.address, action.version, action.position)
        if answers is None:
            return _BUSY_S
        failures = self._rules.gates.failures(answers, before)
        if failures:
            return self._roll_back(log, action.approved, told(failures))
        self._keep(log, action.position, answers)
        wrong = self._rules.gates.wrong(answers)
        self.failing, failing = told(wrong), {failure.request for failure in wrong}
        passed = f"{action.address} passed {count(len(answers) - len(failing), 'golden request')}"
        why = f"{passed}; {len(failing)} failed as before" if failing else passed
        return self._approve(log, action.approved, action.position, why)

    def _ask(self, log: PublishedLog, address: str, version: int, position: int) -> tuple[Answer, ...] | None:
        """What a replica answers at a position; None if it is gone or stands elsewhere by now, as who looks
        after it finds out.

        One that tells where it stands and does not answer is asked again, as long as one may take to go
        first; then that is its answer.
        """
        if address not in self._clients:
            model = self.publications.model.name
            self._clients[address] = ModelClient(
                address, model, deadline_s=self._rules.deadline_s, access=self._rules.access
            )
        client = self._clients[address]
        answers: tuple[Answer, ...] = ()
        try:
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
        silence = Answer(refused=f"no answer in {self._rules.patience_s:g} s")
        return tuple(silence for _ in self._rules.gates.requests)

    def _approve(self, log: PublishedLog, expected: int | None, position: int, why: str) -> float:
        path = self.publications.directory.log_path(log.lineage)
        try:
            model = self.publications.model.path
            done = None if path is None else approve(path, model, expected=expected, position=position)
        except ExportError as error:
            self._tell(EventKind.CANARY_STUCK, f"{position} cannot be approved: {error}", position=position)
            return self._pause()
        self._troubles = 0
        if done is not None:
            if done < position:
                why = "a canary took back what lies beyond, and it is to be judged first"
            self._tell(EventKind.APPROVED, f"position {done} is approved: {why}", position=done)
        self.publications.look()
        return _BUSY_S if done is None else 0.0

    def _roll_back(self, log: PublishedLog, to: int, reason: str) -> float:
        reason = reason[:_LONGEST_REASON]
        self._tell(EventKind.CANARY, f"what lies beyond {to} is rolled back: {reason}")
        done = _run_rollback(self.publications.model.path, to, f"canary: {reason}")
        self._waiting_since.clear()
        self.publications.look()
        if done.returncode == 0:
            self._troubles = 0
            self._tell(EventKind.ROLLED_BACK, f"rolled back to the values of {to}: {reason}", position=to)
            return 0.0
        now = self.publications.current.logs.get(log.lineage)
        if now is not None and now.is_canary:  # nobody else has decided
            text = f"the rollback to {to} failed: {done.stderr.strip()[-_LONGEST_REASON:]}"
            self._tell(EventKind.CANARY_STUCK, text)
        return self._pause()

    def _pause(self) -> float:
        """After trouble that is not over at once; whatever happens meanwhile."""
        self._stop.wait(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**self._troubles))
        self._troubles = min(self._troubles + 1, 10)
        return 0.0

    def _has_waited(self, what: str, about: object) -> bool:
        """True once this was asked for as long as one replica may take."""
        key, now = f"{what} {about}", time.monotonic()
        if key not in self._waiting_since:
            self._waiting_since = {**dict(list(self._waiting_since.items())[-_KEPT:]), key: now}
        return now - self._waiting_since[key] >= self._rules.patience_s

    def _keep(self, log: PublishedLog, position: int, answers: tuple[Answer, ...]) -> None:
        """Remember answers, and those of the position before."""
        kept = list(self._answers.items())[-1:]
        self._answers = {**dict(kept), (log.lineage, position): answers}

    def _tell(
        self, what: EventKind, message: str, replica: str | None = None, position: int | None = None
    ) -> None:
        key, now = (what, message, replica), time.monotonic()
        if now - self._told.get(key, -_SILENT_S) < _SILENT_S:
            return
        self._told = {**dict(list(self._told.items())[-_KEPT:]), key: now}
        self._journal.write(
            FleetEvent(what, message, self.publications.model.name, replica, position=position)
        )


class Canaries:
    """The canaries of a fleet, by the model's name."""

    def __init__(self, rules: Mapping[str, CanaryRules], journal: Journal) -> None:
        self._rules = rules
        self._journal = journal
        self.models = frozenset(rules)
        self.of: dict[str, Canary] = {}

    def allowed(self, model: str, address: str, published: PublishedLogs) -> PublishedLogs:
        """What a replica may take; all of it where the model has no canary, nothing before that begins."""
        if model not in self._rules:
            return published
        canary = self.of.get(model)
        return PublishedLogs() if canary is None else canary.allowed(address, published)

    @contextmanager
    def running(
        self, publications: Sequence[Publications], replicas: Callable[[str], Mapping[str, Observed]]
    ) -> Iterator[None]:
        """Decide inside the block; at its end what is under way may end within a second."""
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
                canary.publications.wake()
            for thread in threads:
                thread.join(1.0)

    def _hear(self, event: FleetEvent) -> None:
        """Whatever a replica does may be what a canary waits for."""
        if event.what in _NEWS and event.model in self.of:
            self.of[event.model].publications.wake()


def _run_rollback(model: Path, to: int, reason: str) -> subprocess.CompletedProcess[str]:
    """Run the command of this very installation, in whatever directory the agent was started."""
    import exporter

    packages = Path(exporter.__file__).parent.parent
    search = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [
            *(sys.executable, "-m", "exporter", "rollback", str(model)),
            *("--to", str(to), "--if-canary", "--reason", reason),
        ],
        env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": search},
        capture_output=True,
        text=True,
        start_new_session=True,
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
    """The rules by model; `options` are `[NAME=]FILE`, and may leave out the name if there is one model.

    Raises:
        UsageError: a file cannot be read or does not fit what is published, a model is not known, or its
            directory may not be written.
    """
    rules: dict[str, CanaryRules] = {}
    for text in options:
        name, file = _named(text, models)
        if name in rules:
            raise UsageError(f"--canary names a file for {name!r} twice", hint="put all requests into one")
        requests = read_golden(local_path("--canary", file))
        _check_published(name, models[name], requests)
        rules[name] = CanaryRules(Gates(requests, drift), patience_s, deadline_s, access)
    return rules


def _named(text: str, models: Mapping[str, Path]) -> tuple[str, str]:
    name, separator, file = text.partition("=")
    if separator and name in models:
        return name, file
    if len(models) > 1:
        raise UsageError(
            f"--canary {text} does not say for which model",
            cause=f"there are {', '.join(models)}",
            hint="name one of them: --canary NAME=FILE",
        )
    return next(iter(models)), text


def _check_published(name: str, model: Path, requests: Sequence[GoldenRequest]) -> None:
    """Compare with what is published, as far as it can be seen; the agent waits for the rest."""
    if not model.is_dir():
        return
    if not os.access(model, os.W_OK):
        raise UsageError(
            f"the canary of {name!r} cannot write {model}",
            cause="its hold lies there, and rollbacks are published there",
            hint="mount it so that the agent may write, or leave out --canary",
        )
    try:
        newest = newest_version(model)
    except ExportError:
        return
    if newest is not None:
        check_signatures(requests, newest.path)
