"""A trainer, an exporter, an agent, servers and clients as real processes, and accidents in random order.

Each accident is mended after a while, and others happen meanwhile. All the time:

* a client of each server sees no position go back, except when the answer says that another version gave it,
  or when the server was started anew while a delta could not be read, or a rollback held the log;
* two servers that stand at one position answer with the same bits;
* no process ends by itself, unless the accident of that moment says why.

Operators push the model into a store now and then, from which one more process pulls a copy.

At the end everything is mended, and each server holds what the trainer has, bit by bit, and so does the copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from exporter.delta.chunk_digest import chunk_digest, chunks, served_digests
from exporter.errors import CallFailed, Exit, ExportError
from exporter.options import Isolation
from exporter.publish.delta_log import DeltaLog, LogBase, LogDelta, list_deltas, read_log
from exporter.publish.tags import tags_of
from exporter.wire.dtypes import DType
from exporter.wire.int8_codes import beside_codes, to_codes
from serving.client import ModelClient
from serving.status import VersionState
from serving.updates import read_incremental_status
from tests.integration.chaos_world import GOLDEN, ITEMS, USERS, damaged, served, write_graph
from tests.support.agents import ROOT, publishing
from tests.support.clocks import Clock
from tests.support.directory_store import BUCKET, directory_store
from tests.support.failing_calls import ERRORS, Failure, failing, failing_calls
from tests.support.proxy import Network, Proxy

SLOWNESS = float(os.environ.get("FAULT_SLOWNESS", "1"))
"""How many times slower than two idle cores this machine is: all waits, and the trainer's, are longer so."""
SETTLED_WITHIN_S = 120.0 * SLOWNESS
_STARTED_WITHIN_S = 120.0 * SLOWNESS
_ASK_EVERY_S = 0.05
_LONGEST_ACCIDENT_S = 4.0
_TO_NOTICE_S = 5.0 * SLOWNESS
"""A process may end so long after what it ends of."""
EXPORTER = "tests.support.small_tables"
"""The module of every `export-model`: small tables are mapped, too."""
TAG = "prod"
URL = f"s3://{BUCKET}/ranker"
NAME = "ranker"
"""What servers call the model, wherever it lies."""


class Fault(AssertionError):
    """Something that must not happen, did."""


@dataclass
class Program:
    """A process that is started again whenever it has ended."""

    name: str
    command: Sequence[object]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    started_at: float = 0.0
    killed: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self) -> None:
        self.killed = False
        self.starts += 1
        self.started_at = time.monotonic()
        with self.log.open("ab") as log:
            log.write(f"--- start {self.starts}\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                [sys.executable, "-m", *map(str, self.command)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, **self.environment},
            )

    @property
    def code(self) -> int | None:
        """None while it runs."""
        return None if self.process is None else self.process.poll()

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.killed = self.killed or number in (signal.SIGKILL, signal.SIGTERM)
            self.process.send_signal(number)

    def stop(self) -> None:
        if self.process is not None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
            self.process.wait(60)

    def said(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def said_last(self) -> str:
        """What it has printed since its last start, as far as one wants to read it."""
        return self.said().rpartition("--- start")[2][-2000:]


@dataclass
class Accident:
    """Something that is so for a while, perhaps several times at once."""

    now: int = 0
    ended_at: float = 0.0

    def begin(self) -> None:
        self.now += 1

    def end(self) -> None:
        self.now -= 1
        self.ended_at = time.monotonic()

    def was(self, since: float) -> bool:
        """True if it was so at any time since then."""
        return bool(self.now) or self.ended_at >= since


@dataclass(frozen=True)
class Seen:
    """An answer: of which start of the server, of which version, and from which position."""

    start: int
    version: int
    position: int


class Client:
    """Asks one server all the time, and notes what is wrong in what it sees."""

    def __init__(self, server: Program, port: int, model: str, world: World) -> None:
        self.last: Seen | None = None
        self.answers = self.unknown = self.back = 0
        self._server = server
        self._world = world
        self._client = ModelClient(f"127.0.0.1:{port}", model, deadline_s=10)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        inputs = {"user": np.arange(USERS), "item": np.arange(ITEMS)}
        while not self._world.ended.is_set():
            start = self._server.starts
            with suppress(CallFailed):
                answer = self._client.predict(inputs)
                if self._server.starts == start:
                    self._see(start, answer.version, dict(answer.outputs))
            time.sleep(_ASK_EVERY_S)

    def _see(self, start: int, version: int, outputs: dict[str, Any]) -> None:
        positions = set(outputs.pop("model_position").tolist())
        outputs.pop("model_step")
        self.answers += 1
        mixes = self._world.mixes(version)
        if len(positions) != 1 and mixes:
            return
        if len(positions) != 1:
            self._world.fault(f"{self._server.name} answered from positions {positions}")
        (position,) = positions
        if position < 0:  # an update that died half-way: the next one repairs
            self.unknown += 1
            return
        seen, last = Seen(start, version, position), self.last
        self.last = seen
        bits = hashlib.sha256(b"".join(outputs[name].tobytes() for name in sorted(outputs))).hexdigest()
        known = bits if mixes else self._world.answers.setdefault(position, bits)
        if known != bits:
            self._world.fault(f"{self._server.name} at {position} answers otherwise than another did")
        if last is not None and position < last.position:
            self.back += 1
            is_said = seen.version != last.version
            reasons = (self._world.unreadable, self._world.held)
            began = self._server.started_at
            is_restart = seen.start != last.start and any(reason.was(began) for reason in reasons)
            if not (is_said or is_restart):
                self._world.fault(f"{self._server.name} went back: {last}, then {seen}")


class World:
    """One model and everybody around it; `dice` decides what happens."""

    def __init__(
        self,
        directory: Path,
        seed: int,
        *,
        replicas: int = 3,
        pace_s: float = 0.3 * SLOWNESS,
        disk: Path | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.dice = random.Random(seed)
        self.replicas = replicas
        self.began = time.monotonic()
        self._say = say
        self.faults: list[str] = []
        self.answers: dict[int, str] = {}
        self.happened: dict[str, int] = {}
        self.unreadable = Accident()
        self.full = Accident()
        self.held = Accident()
        self.closed = Accident()
        self.ended = threading.Event()
        self.stack = ExitStack()
        self.stack.callback(self.ended.set)
        self._heal: list[tuple[float, str, Callable[[], None]]] = []
        self.commands: list[tuple[float, Program]] = []
        self._logs = directory
        self.clocks: list[tuple[str, Clock]] = []
        root = directory if disk is None else disk
        self.disk = disk
        self.places = 1
        self.options: tuple[str, ...] = self.MAPPED[seed % len(self.MAPPED)]
        self._mixing: dict[int, bool] = {}
        self.calls = self.stack.enter_context(failing_calls())
        (directory / "bucket").mkdir()
        self.store, _ = self.stack.enter_context(directory_store(directory / "bucket"))
        self.model, self.train = root / NAME, root / "train"
        self.until, self.final = directory / "until", directory / "final.npz"
        self.ill, self.golden, self.graph = (directory / name for name in ("ill", "golden", "graph.meta"))
        self.golden.write_text(json.dumps(GOLDEN))
        write_graph(self.graph)

        def program(name: str, *command: object) -> Program:
            return Program(name, command, directory / f"{name}.log")

        told = (self.train, seed, pace_s, self.until, self.final, self.ill)
        self.trainer = program("trainer", "tests.integration.fault_trainer", *told)
        self.exporter, self.agent = program("exporter"), program("agent")
        self.pulled = root / "pulled"
        pull = (EXPORTER, "pull", URL, self.pulled, "--watch", "--prune", "--interval", "0.2", "--json")
        self.puller = program("puller", *pull)
        self.puller.environment = self.store
        self.clocks = [(name, Clock(directory / f"{name}.clock")) for name in ("exporter", "agent")]
        self._ports = [_free_port() for _ in range(replicas)]
        self._agent_port = _free_port()
        self.servers = [program(f"server{number}") for number in range(replicas)]
        self.proxies = [self.stack.enter_context(Proxy(port)) for port in self._ports]
        self._set_commands()
        for each in self.programs:
            self.stack.callback(each.stop)
        self.stack.callback(lambda: [program.stop() for _, program in self.commands])

    def _set_commands(self) -> None:
        """What everybody runs from the next start on: where the model is now, with the options of now."""
        exporter, agent = (("tests.support.clocks", clock.file) for _, clock in self.clocks)
        watching = ("--incr", "--new-base=if-needed", "--watch", "--interval", "0.1")
        self.exporter.command = [*exporter, EXPORTER, *self._publishing(), *watching]
        for server, port in zip(self.servers, self._ports, strict=True):
            server.command = [
                *("serving.cli", "run", self.model, "--model-name", NAME, "--port", port),
                *("--poll-seconds", "0.2", "--wait", _STARTED_WITHIN_S),
            ]
        targets = [part for proxy in self.proxies for part in ("--target", proxy.address)]
        self.agent.command = [
            *(
                *agent,
                "serving.cli",
                "agent",
                "--model-base-path",
                f"{NAME}={self.model}",
                *targets,
                "--json",
            ),
            *(
                "--port",
                self._agent_port,
                "--every",
                "refresh=1",
                "--deadline",
                "2",
                "--every",
                "audit=0.5",
            ),
        ]

    def _publishing(self) -> list[str]:
        return [*publishing(self.train, self.model, self.graph), "--add=stamp", "--add=digest", *self.options]

    def mixes(self, version: int) -> bool:
        """True if responses of a version may mix positions: its base was exported so, or is not there."""
        if version not in self._mixing:
            try:
                updates = LogBase.read(self.model / str(version)).entry.updates
            except ExportError:
                return True
            self._mixing[version] = updates.isolation is Isolation.ROW or updates.snapshot_max_rows < USERS
        return self._mixing[version]

    @property
    def programs(self) -> list[Program]:
        return [self.trainer, self.exporter, *self.servers, self.agent, self.puller]

    def say(self, line: str) -> None:
        self._say(f"{time.monotonic() - self.began:7.2f}  {line}")

    def fault(self, what: str) -> None:
        """Note that something must not have happened."""
        self.say(f"FAULT {what}")
        self.faults.append(what)

    def begin(self) -> None:
        """Start everybody, and wait until each server answers."""
        self.trainer.start()
        self.exporter.start()
        self._wait("a base", lambda: any(self.model.glob("[0-9]*/manifest.json")), _STARTED_WITHIN_S)
        for server in self.servers:
            server.start()
        self.agent.start()
        self.puller.start()
        self.clients = [
            Client(server, port, NAME, self) for server, port in zip(self.servers, self._ports, strict=True)
        ]
        self._wait(
            "every server", lambda: all(client.last is not None for client in self.clients), _STARTED_WITHIN_S
        )

    def play(self, seconds: float) -> None:
        """Let accidents happen for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._happen()
            pause = self.dice.uniform(0.1, 1.2)
            while pause > 0:
                self._mend(time.monotonic())
                self._tend_commands(time.monotonic())
                self._restart()
                time.sleep(min(0.1, pause))
                pause -= 0.1
            if self.faults:
                raise Fault("\n".join(self.faults))

    def close(self) -> None:
        with self.stack:
            self._mend(None)

    # --- what may happen ---------------------------------------------------------------------------------

    HAPPENINGS: ClassVar[dict[str, int]] = {
        "kill_trainer": 3,
        "kill_exporter": 4,
        "kill_agent": 4,
        "kill_puller": 3,
        "kill_server": 3,
        "end_server": 1,
        "pause": 4,
        "network": 8,
        "damage": 4,
        "spoil": 1,
        "fill_disk": 2,
        "clock_jump": 3,
        "read_only": 2,
        "operate": 6,
        "sicken": 3,
        "other_options": 2,
        "move": 1,
        "copy": 1,
    }
    MAPPED: ClassVar[list[tuple[str, ...]]] = [
        (),
        ("--map-tables", "--overlay-rows", "12"),
        ("--map-tables", "--overlay-rows", "18", "--cast", "int8"),
        ("--cast", "s/users=int8"),
        ("--map-tables", "--overlay-rows", str(USERS)),
    ]
    OPTIONS: ClassVar[list[tuple[str, ...]]] = [
        *MAPPED,
        ("--add=nan-check",),
        ("--cast", "s/items=bfloat16"),
        ("--cast", "s/users=float16", "--add=nan-check"),
        ("--isolation", "row"),
        ("--isolation", "snapshot=4"),
        ("--data", "compact", "--verify", "bytes"),
    ]

    def _happen(self) -> None:
        what = self.dice.choices(list(self.HAPPENINGS), list(self.HAPPENINGS.values()))[0]
        detail = getattr(self, what)()
        if detail is not None:
            self.happened[what] = self.happened.get(what, 0) + 1
            self.say(f"{what} {detail}")

    def kill_trainer(self) -> str:
        self.trainer.signal(signal.SIGKILL)
        return ""

    def kill_exporter(self) -> str:
        self.exporter.signal(signal.SIGKILL)
        return ""

    def kill_agent(self) -> str:
        number = self.dice.choice([signal.SIGKILL, signal.SIGTERM])
        self.agent.signal(number)
        return number.name

    def kill_puller(self) -> str:
        self.puller.signal(signal.SIGKILL)
        return ""

    def kill_server(self) -> str:
        server = self.dice.choice(self.servers)
        server.signal(signal.SIGKILL)
        return server.name

    def end_server(self) -> str:
        server = self.dice.choice(self.servers)
        server.signal(signal.SIGTERM)
        return server.name

    def pause(self) -> str:
        """A process hangs for a while."""
        program = self.dice.choice([self.exporter, self.agent, self.puller, *self.servers])
        program.signal(signal.SIGSTOP)
        self._mend_later(f"{program.name} goes on", lambda: program.signal(signal.SIGCONT))
        return program.name

    def network(self) -> str:
        """Between the agent and a server."""
        number = self.dice.randrange(self.replicas)
        proxy, network = self.proxies[number], self.dice.choice(list(Network)[1:])
        proxy.be(network)
        self._mend_later(f"network of server{number} is good", lambda: proxy.be(Network.GOOD))
        return f"of server{number} is {network.value}"

    def damage(self) -> str | None:
        """A delta is damaged, or missing, and healed after a while."""
        if self.full.now:  # it could not be healed
            return None
        with suppress(OSError, ExportError):
            deltas = list_deltas(read_log(self.model).path)
            delta = self.dice.choice(deltas[-3:]) if deltas else None
            files = [] if delta is None else [path for path in sorted(delta.path.iterdir()) if path.is_file()]
            if delta is None or not files:
                return None
            self.unreadable.begin()
            if self.dice.random() < 0.25:
                aside = delta.path.with_name(f".aside-{delta.path.name}")
                delta.path.rename(aside)
                self._mend_later(
                    f"{delta.path.name} is back", lambda: _put_back(aside, delta.path), self.unreadable
                )
                return f"{delta.path.name} is gone"
            path = self.dice.choice(files)
            damage = damaged(path, self.dice)
            how = damage.__enter__()
            self._mend_later(f"{path.name} is healed", lambda: _leave(damage), self.unreadable)
            return f"{how} {delta.path.name}/{path.name}"
        return None

    def spoil(self) -> str | None:
        """A delta is damaged before a server has it: all stay where good ones lead, and ready, until a base.

        Nothing else happens meanwhile.
        """
        self._mend(None)
        self._wait("the end of every command", self._is_idle)
        if read_log(self.model).hold.is_set:
            return None
        self._wait("a ready agent", self._is_ready)
        self.exporter.signal(signal.SIGSTOP)
        try:
            with suppress(OSError, ExportError):
                log = read_log(self.model)
                self._wait("every server at the newest position", lambda: self._all_at(log))
                return self._spoil_after(log)
        finally:
            for program in (self.exporter, self.agent):
                program.signal(signal.SIGCONT)
        return None

    def _spoil_after(self, log: DeltaLog) -> str | None:
        """Let the exporter go on, damage what it publishes beyond a position, and mend that by a base."""
        self.agent.signal(signal.SIGSTOP)
        self.exporter.signal(signal.SIGCONT)
        newer = self._published_after(log)
        self.exporter.signal(signal.SIGSTOP)
        if not newer:
            return None
        chosen = self.dice.randrange(len(newer))
        good = newer[chosen - 1].end if chosen else log.at.position
        files = [path for path in newer[chosen].path.iterdir() if path.is_file() and path.suffix != ".json"]
        damage = damaged(path := self.dice.choice(sorted(files)), self.dice)
        self.unreadable.begin()
        how = damage.__enter__()
        try:
            self.agent.signal(signal.SIGCONT)
            self._wait("a ready agent beside the damage", self._is_ready)
            self._stay(log, good)
            self.exporter.signal(signal.SIGCONT)
            for attempt in ((), ("merge", self.model), (*self._publishing(), "--new-base=always", "--again")):
                if attempt:
                    self._command(*attempt, limit_s=SETTLED_WITHIN_S)
                    self._wait("the end of every command", self._is_idle)
        finally:
            _leave(damage)
            self.unreadable.end()
        return f"{newer[chosen].path.name}/{path.name} ({how})"

    def _published_after(self, log: DeltaLog, seconds: float = 30.0 * SLOWNESS) -> list[LogDelta]:
        """The deltas beyond a log's position; none if none comes, or if another base does."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._restart()
            time.sleep(0.1)
            with suppress(OSError, ExportError):
                now = read_log(self.model)
                newer = [delta for delta in now.deltas if delta.end > log.at.position]
                if now.base.path != log.base.path:
                    return []
                if newer:
                    return newer
        return []

    def _stay(self, log: DeltaLog, good: int) -> None:
        """For some seconds no server passes a position, and the agent is ready."""
        version, until, ready_at = int(log.base.path.name), time.monotonic() + 5, time.monotonic()
        while time.monotonic() < until:
            for server, port in zip(self.servers, self._ports, strict=True):
                with suppress(CallFailed):
                    position = _standing(port, NAME, version)
                    if position is not None and not log.at.position <= position <= good:
                        self.fault(f"{server.name} is at {position}: the delta after {good} is damaged")
            if self._is_ready():
                ready_at = time.monotonic()
            elif time.monotonic() - ready_at > 3 * SLOWNESS:
                self.fault("the agent is not ready for a damaged delta that no server needs to answer")
                return
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        """What the agent's probe says of all replicas."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._agent_port}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def fill_disk(self) -> str | None:
        """No space is left, for trainer and exporter."""
        if self.full.now or self.unreadable.now:
            return None
        self.full.begin()
        if self.disk is None:  # as full as a process can be told that it is
            limited = [program for program in (self.trainer, self.exporter) if program.code is None]
            for program in limited:
                _limit_files(program, 512)
            self._mend_later("space is left again", lambda: _unlimit(limited), self.full)
            return "by limits"
        ballast = self.disk / "ballast"
        _fill(ballast)
        self._mend_later("space is left again", ballast.unlink, self.full)
        return "to the last byte"

    def clock_jump(self) -> str:
        """The clock of the exporter or the agent is set."""
        name, clock = self.dice.choice(self.clocks)
        days = self.dice.choice([-400, -1, 1, 400, 20 * 365])
        ahead_s = self.dice.choice([-3600, -5, 5, 3600, days * 86400])
        clock.set(ahead_s)
        return f"of the {name} by {ahead_s} s"

    def read_only(self) -> str | None:
        """Nobody can write, as after an error of the disk; where somebody just does, it cannot be had."""
        disk = self.disk
        if disk is None or self.full.now or self.unreadable.now or not _remount(disk, "ro"):
            return None
        self.full.begin()
        self.closed.begin()

        def mend() -> None:
            _remount(disk, "rw")
            self.closed.end()

        self._mend_later("the disk can be written", mend, self.full)
        return "is the disk"

    def sicken(self) -> str | None:
        """Some rows are trained to NaN, and are numbers again after a while."""
        if self.ill.exists():
            return None
        self.ill.touch()
        self._mend_later("rows are numbers again", self.ill.unlink)
        return "rows"

    def other_options(self) -> str:
        """The exporter is started with others; where they make another schema, it begins a new log."""
        self.options = self.dice.choice(self.OPTIONS)
        if self.dice.random() < 0.5:
            self.options = (*self.options, "--golden", str(self.golden))
        self.exporter.signal(signal.SIGKILL)
        self._set_commands()
        return " ".join(self.options)

    def move(self) -> str | None:
        """The model's directory is renamed, and everybody is told."""
        return self._go_to(lambda place: self.model.rename(place))

    def copy(self) -> str | None:
        """The model is copied, everybody is told, and the old directory is gone."""

        def copied(place: Path) -> None:
            shutil.copytree(self.model, place, symlinks=True)
            shutil.rmtree(self.model)

        return self._go_to(copied)

    def _go_to(self, bring: Callable[[Path], object]) -> str | None:
        if self.commands or self.unreadable.now or self.full.now:
            return None
        for program in (self.exporter, *self.servers, self.agent):
            program.stop()
        place = self.model.with_name(f"{NAME}{self.places}")
        bring(place)
        self.places += 1
        self.model = place
        self._set_commands()
        return place.name

    def operate(self) -> str | None:
        """Somebody rolls back, resumes, tags, merges, pushes, or publishes a base; calls may fail."""
        with suppress(OSError, ExportError):
            log = read_log(self.model)
            if log.hold.is_set or self.held.now:
                return None
            positions = [delta.end for delta in log.deltas[-8:-1]]
            choices: list[tuple[object, ...]] = [("merge", self.model), ("merge", self.model, "--rebase")]
            choices += [("push", self.model, URL, "--prune")] * 3
            choices += [("tag", self.model, TAG)]
            base = (*self._publishing(), "--new-base=always", "--again")
            choices += [base, (*base, "--golden", self.golden)] if "--golden" not in base else [base]
            named = [tag.name for tag in tags_of(self.model) if not tag.gone]
            if positions:
                to = self.dice.choice([*positions, *named])
                choices += [("rollback", self.model, "--to", to)] * 2
                choices += [("tag", self.model, TAG, positions[-1])]
            chosen = self.dice.choice(choices)
            if chosen[0] == "rollback":
                self.held.begin()
                self._mend_later("the hold is lifted", self._resume)
            return self._command(*chosen)
        return None

    def _is_idle(self) -> bool:
        self._tend_commands(time.monotonic())
        return not self.commands

    def _resume(self) -> None:
        """Lift the hold, if there is one; while a file is damaged that fails, and `finish` does it."""
        with suppress(OSError, ExportError):
            if read_log(self.model).hold.is_set:
                self._command("resume", self.model)

    def _command(self, *arguments: object, limit_s: float | None = None) -> str:
        """Run `export-model` beside everything; it may be killed, and may fail while something is damaged."""
        is_last = limit_s is not None
        limit_s = limit_s or self.dice.choice([0.5, 2.0, 30.0, 30.0])
        usual = {*publishing(self.train, self.model, self.graph), str(self.model)}
        words = " ".join(word for word in map(str, arguments) if word not in usual)
        log = self._logs / f"operator{len(self.commands)}.log"
        environment = dict(self.store)
        if self.calls is not None and not is_last and self.dice.random() < 0.4:
            failure = Failure(self.dice.randint(1, 400), self.dice.choice(ERRORS), self.dice.random() < 0.3)
            environment |= failing(self.calls, self.model, failure)
            words += f" ({failure})"
        program = Program(f"export-model {words}", (EXPORTER, *arguments), log, environment=environment)
        program.start()
        self.commands.append((time.monotonic() + limit_s, program))
        return words

    def _tend_commands(self, now: float) -> None:
        """Kill those that take too long; those that have ended must have said why in words of their own."""
        with suppress(OSError, ExportError):
            if self.held.now and not self.commands and not read_log(self.model).hold.is_set:
                self.held.end()
        for command in list(self.commands):
            until, program = command
            if program.code is None and now < until:
                continue
            program.stop()
            self.commands.remove(command)
            self.say(f"{program.name} ended with {program.code}")
            is_told = program.killed or program.code in {*Exit} - {Exit.INTERRUPTED}
            said = program.said()
            if not is_told or "Traceback" in said or "unexpected" in said:
                self.fault(f"{program.name}: {said}")

    # --- what is done about it ---------------------------------------------------------------------------

    def _mend_later(self, what: str, mend: Callable[[], None], accident: Accident | None = None) -> None:
        def end() -> None:
            mend()
            if accident is not None:
                accident.end()

        self._heal.append((time.monotonic() + self.dice.uniform(0.3, _LONGEST_ACCIDENT_S), what, end))

    def _mend(self, now: float | None) -> None:
        """Mend what is due; everything if `now` is None."""
        due = [entry for entry in self._heal if now is None or entry[0] <= now]
        for entry in reversed(due):  # the last damage first: each puts back what it found
            self._heal.remove(entry)
            entry[2]()
            self.say(entry[1])

    def _restart(self) -> None:
        """Start those again that have ended; who ended by itself must have had a reason."""
        for program in self.programs:
            if program.process is None or (code := program.code) is None:
                continue
            if program is self.trainer and code == 0:
                continue
            if not program.killed and not self._may_end(program):
                raise Fault(f"{program.name} ended with {code}: {program.said_last()}")
            program.start()

    def _may_end(self, program: Program) -> bool:
        """The trainer, when it cannot save; the exporter, when a person is needed."""
        lately = time.monotonic() - _TO_NOTICE_S
        return (program is self.trainer and self.full.was(lately)) or (
            program is self.exporter and (self.unreadable.was(lately) or self.closed.was(lately))
        )

    # --- the end -----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Mend everything, let training end, and compare what is served with what was trained."""
        self._mend(None)
        for _, clock in self.clocks:
            clock.set(0)
        self.say("everything is mended")
        self._restart()
        self._wait("the end of every command", self._is_idle)
        if read_log(self.model).hold.is_set:
            self.say(self._command("resume", self.model, limit_s=SETTLED_WITHIN_S))
            self._wait(
                "the end of the hold", lambda: self._is_idle() and not read_log(self.model).hold.is_set
            )
        self.until.touch()
        self._wait("the end of training", self.final.exists)
        with np.load(self.final) as arrays:
            trained = served(dict(arrays))
            step = int(arrays["global_step"])
        self._wait(f"step {step} to be published", lambda: read_log(self.model).at.step == step)
        log = read_log(self.model)
        self._wait("every server at the newest position", lambda: self._all_at(log))
        for server, port in zip(self.servers, self._ports, strict=True):
            self._compare(server, port, log, trained)
        self._require_copy(log)
        for place in (self.model, self.pulled):
            done = subprocess.run(
                [sys.executable, "-m", "exporter", "verify", str(place)],
                capture_output=True,
                text=True,
                cwd=ROOT,
                check=False,
            )
            if done.returncode:
                self.fault(f"verify: {done.stderr}")
        for tag in tags_of(self.model):
            if tag.gone and tag.position >= log.number:
                self.fault(f"the position of the tag {tag.name} was not kept: {tag.gone}")
        differing = [event for event in self.events() if event["what"] == "differs"]
        for program in (self.exporter, *self.servers, self.agent, self.puller):
            if "Traceback" in (said := program.said()):
                self.fault(f"{program.name}: {said[said.index('Traceback') :][:3000]}")
        if differing:
            self.fault(f"an audit found a difference: {differing[0]}")
        if self.faults:
            raise Fault("\n".join(self.faults))

    def _require_copy(self, log: DeltaLog) -> None:
        """Push what is published, and wait until the copy has it; its values are what was published."""
        self._command("push", self.model, URL, "--prune", limit_s=SETTLED_WITHIN_S)
        self._wait("the end of the push", self._is_idle)
        self._wait("a copy", lambda: read_log(self.pulled).at == log.at)
        schema, every = log.schema, list(chunks(log.schema))
        states = [served_digests(schema, found.state(), every) for found in (log, read_log(self.pulled))]
        if states[0] != states[1]:
            self.fault("the copy does not hold what was published")

    def events(self) -> Iterator[dict[str, Any]]:
        """What the agents said, all of them one after the other."""
        for line in self.agent.said().splitlines():
            with suppress(ValueError):
                if isinstance(event := json.loads(line), dict) and "what" in event:
                    yield event

    def _all_at(self, log: DeltaLog) -> bool:
        version = int(log.base.path.name)
        return all(_standing(port, NAME, version) == log.at.position for port in self._ports)

    def _compare(self, server: Program, port: int, log: DeltaLog, trained: dict[str, np.ndarray]) -> None:
        """Each chunk of it is what was published, and what was published is what was trained."""
        every = list(chunks(log.schema))
        published = served_digests(log.schema, log.state(), every)
        own, dtypes = [], {variable.name: variable.dtype for variable in log.schema.variables}
        for chunk in every:
            value = _as_served(trained[chunk.variable], dtypes[chunk.variable])
            own.append(chunk_digest(value[chunk.start : chunk.stop] if value.ndim else value))
        with ModelClient(f"127.0.0.1:{port}", NAME) as client:
            rows = {"rows": np.arange(len(every))}
            version = int(log.base.path.name)
            answer = client.predict(rows, signature="incremental_digest", version=version).outputs
        told = [int(bytes(text)) for text in answer["digest"]]
        if published != own:
            self.fault("what is published is not what was trained")
        if told != own:
            self.fault(f"{server.name} does not serve what was trained")

    def _wait(self, what: str, happened: Callable[[], bool], seconds: float = SETTLED_WITHIN_S) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._restart()
            with suppress(CallFailed, ExportError, OSError):
                if happened():
                    self.say(f"there is {what}")
                    return
            time.sleep(0.05)
        tails = "\n".join(f"== {program.name}\n{program.said_last()}" for program in self.programs)
        raise Fault("\n".join([*self.faults, f"not within {seconds:g} s: {what}", tails]))


def _standing(port: int, model: str, version: int) -> int | None:
    with ModelClient(f"127.0.0.1:{port}", model, deadline_s=5) as client:
        newest = client.status()[0]
        if newest.version != version or newest.state is not VersionState.AVAILABLE:
            return None
        found = read_incremental_status(client, version)
    return None if found is None else found.position


def _as_served(values: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype is not DType.INT8:
        return values.astype(dtype.numpy)
    codes, scales, _ = to_codes(values)
    return beside_codes(codes, scales)


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _put_back(aside: Path, path: Path) -> None:
    if aside.exists() and not path.exists() and path.parent.exists():
        aside.rename(path)


def _leave(damage: Any) -> None:
    with suppress(FileNotFoundError):  # retention has removed the delta meanwhile
        damage.__exit__(None, None, None)


def _limit_files(program: Program, bytes_: int) -> None:
    assert program.process is not None
    with suppress(ProcessLookupError):
        _, hard = resource.prlimit(program.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(program.process.pid, resource.RLIMIT_FSIZE, (bytes_, hard))


def _unlimit(programs: Sequence[Program]) -> None:
    for program in programs:
        if program.code is None:
            _limit_files(program, resource.RLIM_INFINITY)


def _remount(disk: Path, how: str) -> bool:
    command = ["mount", "-o", f"remount,{how}", str(disk)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 16, 4096, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


@contextmanager
def small_disk(directory: Path, megabytes: int = 64) -> Iterator[Path | None]:
    """A file system of its own, where one may mount; else None."""
    place = directory / "disk"
    place.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False)
