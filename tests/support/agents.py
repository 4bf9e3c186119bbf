"""A trainer whose increments are published, model servers and agents: real processes on loopback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from exporter.errors import CallFailed
from exporter.increments.history import read_history
from exporter.publish.delta_log import read_log
from exporter.publish.versions import version_dirs
from serving.client import ModelClient
from serving.updates import read_incremental_status
from tests.integration.chaos_world import write_graph
from tests.support.commands import export_model
from tests.support.forks import Warm, started_warm
from tests.support.numpy_trainer import STEP, NumpyTrainer

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 120.0
T = TypeVar("T")


@dataclass
class Published:
    """A trainer, and what is published of it by real commands with `options`."""

    directory: Path
    options: tuple[str, ...] = ()
    plain: bool = False
    event_time: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        self.model, self.graph = self.directory / "ranker", self.directory / "graph.meta"
        write_graph(self.graph)
        self.trainer = NumpyTrainer(self.directory / "train", 0)
        self.trainer.event_time = self.event_time
        self.trainer.begin(restores=False, saver_first=False, is_live=False)
        self.publish()

    @property
    def position(self) -> int:
        return read_log(self.model).at.position

    @property
    def is_current(self) -> bool:
        """True if nothing is left to publish."""
        newest = max(stored.increment.to_step for stored in read_history(self.trainer.directory).increments)
        return read_log(self.model).at.step == newest

    def train(self) -> None:
        """Change some rows, and leave them on disk: an increment, or for plain versions a full checkpoint."""
        self.trainer.train()
        self.trainer.save() if self.plain else self.trainer.increment()

    def change(self, made: Callable[[Any], Any]) -> None:
        """A step by which every row of the users is what `made` makes of it."""
        session = self.trainer.session
        assert session is not None
        values = session.variables.values
        values["net/users"] = made(values["net/users"]).astype(np.float32)
        values[STEP] = values[STEP] + 1
        session.variables.touched["net/users"].update(range(len(values["net/users"])))

    def arguments(self) -> list[str]:
        """Those of the command that publishes what is new."""
        found = publishing(self.trainer.directory, self.model, self.graph)
        return [*found, *self.options, *([] if self.plain else ["--incr"])]

    @property
    def place(self) -> str:
        """Where it is published: a path, or a URL."""
        return str(self.model)

    def publish(self, *more: str) -> int:
        """Train on and publish; the newest position."""
        self.train()
        done = export_model(*self.arguments(), *more)
        assert done.code == 0, done.err
        return newest_version(self.model) if self.plain else self.position


def publishing(ckpt_dir: Path, model: Path, graph: Path) -> list[str]:
    """Arguments that publish what a `NumpyTrainer` has left, with the graph of `write_graph`."""
    tensors = ("user_rows", "item_rows", "dense")
    given = (
        *("--ckpt-dir", ckpt_dir, "--out", model, "--model", graph),
        *("--input", "user=user:0", "--input", "item=item:0"),
        *[part for name in tensors for part in ("--output", f"{name}={name}:0")],
        *("--rename", r"s/(.*)=net/\1"),
    )
    return [*map(str, given)]


def newest_version(model: Path) -> int:
    return version_dirs(model)[0].version


@contextmanager
def process(*arguments: object, module: str = "serving.cli") -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate(timeout=DEADLINE_S)


@dataclass
class Server:
    """A `serve-model run` that can be killed and started again on its port."""

    base: Path
    port: int = 0
    poll_s: float = 0.1
    stack: ExitStack = field(default_factory=ExitStack)
    more: tuple[str, ...] = ()
    rest_port: int | None = None
    _client: ModelClient | None = None

    def start(self) -> Server:
        arguments = (
            "run",
            self.base,
            "--port",
            self.port,
            "--poll-seconds",
            self.poll_s,
            "--json",
            *self.more,
        )
        self.process = self.stack.enter_context(started_warm("serving.cli", *arguments))
        told = document(self.process)
        self.port, self.rest_port = told["port"], told["rest_port"]
        return self

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self._hang_up()

    def _hang_up(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def position(self, version: int) -> int:
        """Where it stands. Asked often: it keeps its connection for as long as calls succeed."""
        if self._client is None:
            self._client = self.stack.enter_context(ModelClient(self.address, self.base.name))
        try:
            found = read_incremental_status(self._client, version)
        except CallFailed:
            self._hang_up()
            raise
        assert found is not None
        return found.position


@dataclass
class Agent:
    """A `serve-model agent --json`, its events as they come, and its port."""

    process: subprocess.Popen[str] | Warm
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        self.port = wait(lambda: next((e["port"] for e in self.events if e["what"] == "started"), None))

    def of(self, what: str) -> list[dict[str, Any]]:
        return [event for event in list(self.events) if event["what"] == what]

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))


@contextmanager
def agent(model: Path, *targets: str, more: tuple[str, ...] = ()) -> Iterator[Agent]:
    wanted = [part for target in targets for part in ("--target", target)]
    often = ("--every", "refresh=0.5", "--deadline", "5")
    arguments = ("agent", "--model-base-path", model, *wanted, "--port", "0", "--json", *often, *more)
    with started_warm("serving.cli", *arguments) as started:
        yield Agent(started)


def wait(happened: Callable[[], T], seconds: float = DEADLINE_S) -> T:
    """The first true answer; calls that fail are made again."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if found := happened():
                return found
        except CallFailed:
            pass
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds:g} s")


def document(started: subprocess.Popen[str] | Warm) -> Any:
    """The first JSON document on stdout, which takes several lines."""
    assert started.stdout is not None
    lines = []
    for line in started.stdout:
        lines.append(line)
        if line.rstrip() == "}":
            return json.loads("".join(lines))
    assert started.stderr is not None
    raise AssertionError(started.stderr.read())


def give_other_values(version: Path) -> None:
    """Another variable is as good as any, in a bundle whose checksums are right."""
    import tensorflow as tf

    from tests.support import bundles

    prefix = version / "variables" / "variables"
    reader = tf.train.load_checkpoint(str(prefix))
    tensors = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    name = next(name for name, value in tensors.items() if value.shape == (23, 3))
    tensors[name] = tensors[name] + np.float32(1)
    shutil.rmtree(version / "variables")
    (version / "variables").mkdir()
    bundles.save(prefix, tensors)
