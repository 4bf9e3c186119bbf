"""Random lives of a publisher, its store and a copy: whatever happens, nothing wrong may ever be visible.

`python -m tests.support.copy_lives FIRST LAST` plays the seeds from FIRST to before LAST, signed and not.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from exporter.errors import ExportError
from exporter.jobs import runner
from exporter.options import Jobs
from exporter.pipeline import merged_base
from exporter.pipeline.log_maintenance import merge, resume, rollback, tidy
from exporter.pipeline.rebase import rebase
from exporter.publish.delta_log import read_log
from exporter.publish.retention import Keep
from exporter.publish.signing import Signer, Trust
from exporter.publish.versions import in_force
from exporter.transfer import pull as pulling
from exporter.transfer.pull import pull
from exporter.verify.log import verify_model
from tests.support import kills
from tests.support.directory_store import BUCKET, reached
from tests.support.key_pairs import key_pair
from tests.support.machines import files, grow_old, machine_in, pushed
from tests.support.mergers import merge_at_once
from tests.support.publishers import Killed, killed_at

PLACE = "models/m"
URL = f"s3://{BUCKET}/{PLACE}"
_ROUNDS = 14
_STEPS = 400  # about as many as a process takes that pulls: see `kills`
_LOCKS = (".lock", ".pull", ".pushed", ".identity", "lock", "head.json")


def altered(path: Path) -> None:
    """Write into a file, and set its times back."""
    found, content = path.stat(), path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def with_parts(change: Callable[[list[dict[str, str]]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda record: change(record["parts"])


RECORDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a delta less": with_parts(lambda parts: parts.pop()),
    "the base alone": with_parts(lambda parts: parts.__delitem__(slice(1, None))),
    "nothing": with_parts(lambda parts: parts.clear()),
    "the other order": with_parts(lambda parts: parts.reverse()),
    "a delta twice": with_parts(lambda parts: parts.append(parts[-1])),
    "another delta": with_parts(lambda parts: parts[-1].update(manifest="0" * 64)),
    "a path that leads out": with_parts(lambda parts: parts[-1].update(path="../../etc")),
    "tasks of nothing": lambda record: record.update(task_bytes=0),
    "tasks of a byte": lambda record: record.update(task_bytes=1),
}


def environment() -> dict[str, str]:
    """How another process reaches the store."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def take(copy: Path, store: Mapping[str, str], key: str = "", prune: bool = False) -> None:
    """Pull in a process of its own."""
    os.environ |= store
    merge_at_once()
    with suppress(ExportError):
        pull(URL, copy, prune=prune, trust=Trust.of([key], "m") if key else None)


class Life:
    """A publisher, its store and a copy, to which things happen."""

    def __init__(self, directory: Path, seed: int, public: Path | None) -> None:
        self.machine, self.copy = machine_in(directory / "one"), directory / "copy"
        self.store = directory / "store" / PLACE
        self.random, self.key, self.step = random.Random(seed), str(public or ""), 30
        self.trust = Trust.of([public], "m") if public else None
        self.published = dict[str, bytes]()
        self.stolen = set[str]()
        self.to_restore = dict[Path, bytes]()
        self.made = 0

    def publish(self) -> None:
        what = self.random.choice(
            ("delta", "delta", "merge", "rebase", "rebase", "rollback", "resume", "tidy")
        )
        model, chance = self.machine.model, self.random.random()
        with suppress(ExportError):
            match what:
                case "delta":
                    self.step += 10
                    self.machine.go_on(self.step)
                case "merge":
                    merge(model)
                case "rebase":
                    jobs = Jobs(task_bytes=self.random.choice((64, 1 << 20)))
                    rebase(model, jobs=jobs, keep=Keep(1) if chance < 0.3 else None)
                case "rollback":
                    log = read_log(model)
                    positions = [log.base.at.position, *(each.end for each in log.deltas)]
                    rollback(model, self.random.choice(positions))
                case "resume":
                    resume(model)
                case "tidy":
                    grow_old(model)
                    tidy(model, clock=lambda: 1e12)
        self.published |= files(model)

    def push(self) -> None:
        with suppress(*([ExportError] if self.to_restore else [])):
            pushed(self.machine.model, URL, prune=self.random.random() < 0.3)

    def pull(self, monkeypatch: pytest.MonkeyPatch) -> None:
        prune = self.random.random() < 0.3
        if self.random.random() < 0.2:
            grow_old(self.copy)
        if self.random.random() < 0.4:
            point = self.random.randrange(1, _STEPS)
            kills.killed_at(point, take, self.copy, environment(), self.key, prune)
        else:
            where, names = self.random.choice(
                (
                    (pulling._Pull, ("_get", "_publish", "_announce")),
                    (pulling._MergedHere, ("give",)),
                    (runner.Job, ("_run",)),
                    (merged_base, ("write_files", "_copy_graph")),
                )
            )
            call = self.random.randrange(8)
            with killed_at(monkeypatch, where, names, call), suppress(Killed, ExportError):
                done = pull(URL, self.copy, prune=prune, trust=self.trust)
                self.made += sum(each.made for each in done.spared)
        self.check()

    def restore(self) -> None:
        """Bring back what a thief has altered of the store, and of manifests."""
        for path, content in self.to_restore.items():
            if path.parent.exists():
                path.write_bytes(content)
        self.to_restore.clear()

    def steal(self) -> None:
        """Alter a file of the copy, or of the store, published or not yet."""
        root = self.random.choice((self.copy, self.copy, self.store))
        found = [path for path in root.rglob("*") if path.is_file() and path.stat().st_size]
        found = [path for path in found if path.name not in _LOCKS and not path.name.startswith("hold")]
        if root == self.store and self.trust is None:  # who may publish there may say what is published
            found = [path for path in found if path.name != "manifest.json"]
        if not found:
            return
        path = self.random.choice(sorted(found))
        if root == self.store or path.name == "manifest.json":
            self.to_restore[path] = path.read_bytes()
        if root == self.copy:
            same = [other for other in root.rglob("*") if other.is_file() and other.samefile(path)]
            self.stolen |= {other.relative_to(root).as_posix() for other in same}
        document: dict[str, Any] = {}
        with suppress(ValueError):  # no document, or one that was altered before
            document = json.loads(path.read_bytes()) if path.name == "manifest.json" else {}
        if record := document.get("merged_from"):
            self.random.choice([*RECORDS.values()])(record)
            path.write_text(json.dumps(document))
        else:
            altered(path)

    def check(self) -> None:
        """All that servers can see of the copy is what was published, but for what was stolen."""
        for path, content in files(self.copy).items():
            name = path.rpartition("/")[2]
            if path.startswith(".") or "hold" in name or path in self.stolen:
                continue
            assert self.published[path] == content, path
        for manifest in self.copy.glob("[0-9]*/manifest.json"):
            if manifest.relative_to(self.copy).as_posix() not in self.stolen:
                listed = json.loads(manifest.read_text())["files"]
                assert all(
                    (manifest.parent / each["path"]).stat().st_size == each["bytes"] for each in listed
                )


def play(directory: Path, seed: int, *, is_signed: bool) -> int:
    """Play one life, and return how many bytes of bases the copy has made.

    AssertionError if anything wrong was visible there, or a new copy does not get all at the end.
    """
    merge_at_once()
    private, public = key_pair(directory.parent)
    signer = Signer.of(str(private), "m") if is_signed else None
    with pytest.MonkeyPatch.context() as patch, reached(directory / "store", patch):
        life = Life(directory, seed, public if is_signed else None)
        model = life.machine.model
        with in_force(model, signer):
            if is_signed:
                rebase(model)  # the first that is signed
            life.published |= files(model)
            life.push()
            for _ in range(_ROUNDS):
                life.publish()
                life.push()
                if life.random.random() < 0.3:
                    life.steal()
                life.pull(patch)
                if life.random.random() < 0.5:
                    life.restore()
            life.restore()
            life.push()
        with suppress(ExportError):
            life.made += sum(each.made for each in pull(URL, life.copy, trust=life.trust).spared)
        life.check()
        life.copy, life.stolen = directory / "new", set()
        done = pull(URL, life.copy, trust=life.trust)
        life.made += sum(each.made for each in done.spared)
        life.check()
        assert done.position == max(read_log(model).at.position, done.position or 0)
        assert not verify_model(life.copy).problems
    return life.made


def main() -> None:
    """Say the seed of each life, what was made in it, and what was wrong; exit code 1 if anything was."""
    first, last = map(int, sys.argv[1:3])
    wrong = 0
    for seed in range(first, last):
        for is_signed in (False, True):
            directory = Path(tempfile.mkdtemp(prefix="lives-")) / "life"
            try:
                made = play(directory, seed, is_signed=is_signed)
                print(f"{seed} {'signed' if is_signed else 'plain'}: {made} bytes made", flush=True)
            except Exception as error:  # noqa: BLE001 - the next life is played, too
                wrong += 1
                what = f"{type(error).__name__}: {error}"
                print(f"{seed} {'signed' if is_signed else 'plain'} WRONG {directory}: {what}", flush=True)
            else:
                shutil.rmtree(directory.parent)
    print(f"{wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
