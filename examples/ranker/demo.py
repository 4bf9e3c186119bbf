"""A cluster goes on training, and servers that are never reloaded answer with each new step."""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.cluster import Cluster, ClusterError, started_cluster
from examples.commands import Background, Words, background, run, serve_replicas, show, workspace
from serving.client import ModelClient

HERE = Path(__file__).parent
USERS, ITEMS = 200_000, 20_000
MODEL = "ranker"

_ASKED = {"user": np.arange(1_000), "item": np.arange(1_000) % 50}
_POLL_S = 0.02
_LAST_S = 60.0
"""Replicas have so long to serve what was trained last."""
_ROW = "   {:>5}  {:>13}  {:>8}  {:>12}  {:>12}  {:>15}  {:>11}"
_HEADINGS = (
    "step",
    f"rows of {USERS + ITEMS:,}",
    "delta",
    "of the model",
    "served after",
    "answers changed",
    "click(0, 0)",
)


def main() -> int:
    """Run the whole demonstration; 0 if what is served at the end is what was trained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in DIR and leave everything there")
    parser.add_argument("--updates", type=int, default=8, help="positions to serve before training ends")
    parser.add_argument("--replicas", type=int, default=2, help="how many servers there are")
    options = parser.parse_args()
    with workspace(options.keep) as directory:
        return demonstrate(directory, options.updates, options.replicas)


def demonstrate(directory: Path, updates: int, replicas: int) -> int:
    """Train, publish and serve at the same time in `directory`."""
    begun = time.monotonic()
    print(
        "Keep it fresh: 2 parameter servers, a chief and a worker keep training, an increment a second",
        flush=True,
    )
    source, stop, answers = Source(directory), directory / "stop", directory / "expected.npz"
    stop.unlink(missing_ok=True)
    trainer = [HERE / "online.py", "--ckpt-dir", source.checkpoints, "--expected", answers, "--until", stop]
    size = ["--users", str(USERS), "--items", str(ITEMS)]
    with (
        started_cluster([*trainer, *size], logs=directory / "logs", workers=1) as cluster,
        ExitStack() as stack,
    ):
        source.await_checkpoint(cluster)
        show(source.command)
        full_bytes = json.loads(run([*source.command, "--json"]))["bytes"]
        addresses = stack.enter_context(serve_replicas(source.model, replicas))
        fleet = Fleet([stack.enter_context(Replica(address)) for address in addresses], full_bytes)
        targets = [word for address in addresses for word in ("--target", address)]
        agent: Words = ["serve-model", "agent", "--model-base-path", source.model, *targets, "--port", "0"]
        show(agent)
        stack.enter_context(background(agent)).await_note("http://")
        watch: Words = [*source.command, "--watch", "--interval", "0.05"]
        show(watch)
        publications = Publications(stack.enter_context(background([*watch, "--json"])))
        print(_ROW.format(*_HEADINGS))
        while not fleet.serves(answers):
            if (delta := publications.next()) is None:
                source.require_training(cluster, answers)
                continue
            fleet.follow(delta, source.committed(delta))
            updates -= 1
            if updates == 0:
                stop.touch()
        with np.load(answers) as expected:
            is_equal = fleet.report(dict(expected))
    print(f"   {time.monotonic() - begun:.0f} s, start-up of 4 nodes and {replicas} servers included")
    return 0 if is_equal else 1


@dataclass(frozen=True)
class Source:
    """What the trainer leaves in `directory`, and what is published of it."""

    directory: Path

    @property
    def checkpoints(self) -> Path:
        """The chief's checkpoint directory."""
        return self.directory / "checkpoints"

    @property
    def model(self) -> Path:
        """The model base path."""
        return self.directory / "models" / MODEL

    @property
    def command(self) -> Words:
        """Publishes what is new: the first time a base, then deltas."""
        builder = f"{os.path.relpath(HERE / 'model.py')}:serving"
        size: Words = ["--model-arg", f"users={USERS}", "--model-arg", f"items={ITEMS}"]
        what: Words = ["--ckpt-dir", self.checkpoints, "--model", builder, *size]
        # Room for all rows: on a slow machine training touches most of them before the demonstration ends.
        room: Words = ["--map-tables", "--overlay-rows", str(USERS)]
        return ["export-model", *what, "--out", self.model, "--incr", "--add=stamp", *room]

    def await_checkpoint(self, cluster: Cluster) -> None:
        """Return when there is a full checkpoint of a trained model."""
        state = self.checkpoints / "checkpoint"
        while not (state.exists() and re.search(r'_path: ".*-[1-9]\d*"', state.read_text())):
            if not cluster.is_training():
                sys.exit("error: training has ended without a checkpoint")
            time.sleep(_POLL_S)

    def require_training(self, cluster: Cluster, answers: Path) -> None:
        """End this process if training has ended, and left no answers."""
        if not cluster.is_training() and not answers.exists():
            sys.exit("error: training has ended without its own answers")

    def committed(self, delta: dict[str, Any]) -> float:
        """When the trainer had written the newest file that a delta was made from, in seconds since 1970."""
        for increment in reversed(delta["increments"]):
            return (self.checkpoints / "increments" / increment / "manifest.json").stat().st_mtime
        return Path(delta["checkpoint"] + ".index").stat().st_mtime


class Publications:
    """What `export-model --watch` has published, as it says so."""

    def __init__(self, watch: Background) -> None:
        self._watch = watch
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> dict[str, Any] | None:
        """The next one, None if there is none for a moment."""
        try:
            found = self._said.get(timeout=_POLL_S)
        except queue.Empty:
            return None
        if found is None:
            raise self._watch.ended()
        return found

    def _read(self) -> None:
        for line in self._watch.lines():
            if "increments" in (said := json.loads(line)):  # a failure that the watch repeats is no delta
                self._said.put(said)
        self._said.put(None)


@dataclass(frozen=True)
class Seen:
    """The first answer from a position: when it came, the training step, and `click` for each pair."""

    at: float
    step: int
    click: NDArray[np.float32]


class Replica:
    """A running server, that is asked all the time; every answer must come from one position."""

    def __init__(self, address: str) -> None:
        self._client = ModelClient(address, MODEL)
        self.version = self._client.metadata().version
        self.seen: dict[int, Seen] = {}
        self._ask(**_ASKED)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Replica:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()

    @property
    def position(self) -> int:
        """Where it stands."""
        return max(self.seen)

    def versions(self) -> list[int]:
        """The versions that the server has loaded."""
        return [status.version for status in self._client.status()]

    def first_from(self, position: int) -> Seen:
        """The first answer from a position, or beyond it."""
        return self.seen[min(at for at in self.seen if at >= position)]

    def ask(self, user: NDArray, item: NDArray) -> NDArray[np.float32]:
        """`click` for each pair."""
        return self._ask(user=user, item=item)

    def _follow(self) -> None:
        while not self._stop.wait(_POLL_S):
            self._ask(**_ASKED)

    def _ask(self, **inputs: NDArray) -> NDArray[np.float32]:
        answer = self._client.predict(inputs)
        outputs, now = answer.outputs, time.time()
        (position,), (step,) = (set(outputs[f"model_{name}"].tolist()) for name in ("position", "step"))
        self.seen = {position: Seen(now, step, outputs["click"])} | self.seen
        return outputs["click"]


class Fleet:
    """The running servers: brought to each new position by the agent, never reloaded."""

    def __init__(self, replicas: Sequence[Replica], full_bytes: int) -> None:
        self._replicas = replicas
        self._full_bytes = full_bytes
        self._before = replicas[0].seen[replicas[0].position]
        self._seconds: list[float] = []

    def serves(self, answers: Path) -> bool:
        """True if all serve the step at which training has ended."""
        if not answers.exists():
            return False
        with np.load(answers) as expected:
            return all(replica.seen[replica.position].step == expected["step"] for replica in self._replicas)

    def follow(self, delta: dict[str, Any], committed: float) -> None:
        """Wait until every replica serves a delta, and say how it went."""
        position, until = delta["position"], time.monotonic() + _LAST_S
        while not all(replica.position >= position for replica in self._replicas):
            if time.monotonic() > until:
                sys.exit(f"error: {delta['path']} is not served after {_LAST_S:g} s")
            time.sleep(_POLL_S)
        seconds = max(replica.first_from(position).at for replica in self._replicas) - committed
        self._seconds.append(seconds)
        size = sum(file.stat().st_size for file in Path(delta["path"]).iterdir())
        before, now = self._before, self._replicas[0].first_from(position)
        self._before = now
        cells = (
            delta["step"],
            f"{delta['rows']:,}",
            f"{size / 1024:,.0f} KiB",
            f"{size / self._full_bytes:.1%}",
            f"{seconds:.2f} s",
            f"{(before.click != now.click).sum():,} of {len(now.click):,}",
            f"{now.click[0]:.4f}",
        )
        print(_ROW.format(*cells), flush=True)

    def report(self, expected: dict[str, NDArray]) -> bool:
        """Compare with the trainer's own answers; True if all is as it should be."""
        median, longest = statistics.median(self._seconds), max(self._seconds)
        print(
            f"   from the trainer's increment to the answers of all {len(self._replicas)} servers: "
            f"{median:.2f} s (median), {longest:.2f} s (longest)"
        )
        served = [replica.ask(expected["user"], expected["item"]) for replica in self._replicas]
        difference = max(float(np.abs(click - expected["click"]).max()) for click in served)
        verdict = "equal to" if difference == 0 else "DIFFERENT from"
        print(
            f"   training ended at step {expected['step']}: served answers for {len(served[0]):,} pairs are"
        )
        print(f"   {verdict} the trainer's own, largest difference {difference:.1e}")
        loaded = {version for replica in self._replicas for version in replica.versions()}
        print(f"   the servers have loaded version {', '.join(map(str, sorted(loaded)))} and nothing else")
        return difference == 0 and loaded == {self._replicas[0].version}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ClusterError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
