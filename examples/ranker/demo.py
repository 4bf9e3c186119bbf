"""A cluster goes on training, and a server that is never reloaded answers with each new step."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.cluster import Cluster, ClusterError, started_cluster
from examples.commands import Words, run, serve, show, workspace
from serving.client import ModelClient

HERE = Path(__file__).parent
USERS, ITEMS = 200_000, 20_000
MODEL = "ranker"

_ASKED = {"user": np.arange(1_000), "item": np.arange(1_000) % 50}
_POLL_S = 0.02
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
    options = parser.parse_args()
    with workspace(options.keep) as directory:
        return demonstrate(directory, options.updates)


def demonstrate(directory: Path, updates: int) -> int:
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
    with started_cluster([*trainer, *size], logs=directory / "logs", workers=1) as cluster:
        source.await_checkpoint(cluster)
        show(source.command)
        full_bytes = json.loads(run([*source.command, "--json"]))["bytes"]
        with serve(source.model) as address, ModelClient(address, MODEL) as client:
            replica = Replica(address, client, full_bytes)
            replica.introduce()
            while source.await_increment(cluster, replica.step):
                replica.refresh(source)
                updates -= 1
                if updates == 0:
                    stop.touch()
            with np.load(answers) as expected:
                is_equal = replica.report(dict(expected))
    print(f"   {time.monotonic() - begun:.0f} s, start-up of 4 nodes and the server included")
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
        return ["export-model", *what, "--out", self.model, "--incr", "--stamp"]

    def await_checkpoint(self, cluster: Cluster) -> None:
        """Return when there is a full checkpoint of a trained model."""
        state = self.checkpoints / "checkpoint"
        while not (state.exists() and re.search(r'_path: ".*-[1-9]\d*"', state.read_text())):
            if not cluster.is_training():
                sys.exit("error: training has ended without a checkpoint")
            time.sleep(_POLL_S)

    def await_increment(self, cluster: Cluster, step: int) -> bool:
        """Wait for an increment that leads beyond a step; False if training has ended and there is none."""
        is_training = True
        while is_training and max(self._increments(), default=0) <= step:
            time.sleep(_POLL_S)
            is_training = cluster.is_training()
        return max(self._increments(), default=0) > step

    def _increments(self) -> Iterator[int]:
        """The steps that increments lead to."""
        for manifest in self.checkpoints.glob("increments/*/manifest.json"):
            yield int(manifest.parent.name.split("-")[1])  # <from>-<to>

    def committed(self, delta: dict[str, Any]) -> float:
        """When the newest file that a delta was made from was written, in seconds since 1970."""
        for increment in reversed(delta["increments"]):
            return (self.checkpoints / "increments" / increment / "manifest.json").stat().st_mtime
        return Path(delta["checkpoint"] + ".index").stat().st_mtime


class Replica:
    """The running server: brought to each new position, never reloaded."""

    def __init__(self, address: str, client: ModelClient, full_bytes: int) -> None:
        self._client = client
        self._full_bytes = full_bytes
        self._command: Words = ["serve-model", "update", address, "--model", MODEL]
        self._position = self._version = client.metadata().version
        self._answers = self._ask(**_ASKED)
        self.step = self._version

    def introduce(self) -> None:
        """Say what is done for each position."""
        print("   then, for each new increment, the first command once more, and")
        show(self._command)
        print(_ROW.format(*_HEADINGS))

    def refresh(self, source: Source) -> None:
        """Publish what the trainer has written, apply it, ask, and say how it went."""
        delta = json.loads(run([*source.command, "--json"]))
        done = json.loads(run([*self._command, "--json"]))
        if delta["path"] is None or done["position"] != delta["position"]:
            sys.exit(f"error: published {delta}, applied {done}")
        self.step, self._position = delta["step"], delta["position"]
        before, self._answers = self._answers, self._ask(**_ASKED)
        seconds = time.time() - source.committed(delta)
        size = sum(file.stat().st_size for file in Path(delta["path"]).iterdir())
        cells = (
            self.step,
            f"{delta['rows']:,}",
            f"{size / 1024:,.0f} KiB",
            f"{size / self._full_bytes:.1%}",
            f"{seconds:.2f} s",
            f"{(before != self._answers).sum():,} of {len(before):,}",
            f"{self._answers[0]:.4f}",
        )
        print(_ROW.format(*cells), flush=True)

    def report(self, expected: dict[str, NDArray]) -> bool:
        """Compare with the trainer's own answers; True if all is as it should be."""
        served = self._ask(expected["user"], expected["item"])
        difference = float(np.abs(served - expected["click"]).max())
        is_equal = difference == 0 and self.step == expected["step"]
        verdict = "equal to" if is_equal else "DIFFERENT from"
        print(f"   training ended at step {expected['step']}: served answers for {len(served):,} pairs are")
        print(f"   {verdict} the trainer's own, largest difference {difference:.1e}")
        versions = [status.version for status in self._client.status()]
        print(f"   the server has loaded version {', '.join(map(str, versions))} and nothing else")
        return is_equal and versions == [self._version]

    def _ask(self, user: NDArray, item: NDArray) -> NDArray[np.float32]:
        """`click` for each pair; every answer must come from the version and the position we are at."""
        answer = self._client.predict({"user": user, "item": item})
        positions = set(answer.outputs["model_position"].tolist())
        if (answer.version, positions) != (self._version, {self._position}):
            sys.exit(
                f"error: asked version {self._version} at {self._position}, it answered from {positions}"
            )
        return answer.outputs["click"]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ClusterError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
