"""What a trainer leaves in its checkpoint directory, recorded as it comes, and played again at its pace.

So a benchmark has what a real cluster wrote, without the cluster beside it. Files are kept as hard links: a
trainer replaces its files, and never writes into one that has its name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from exporter.storage.layout import INCREMENTS_DIRECTORY

_LOOK_S = 0.005
_KEPT = re.compile(r"checkpoint|model\.ckpt-\d+\.(index|meta|data-\d+-of-\d+)|\d+-\d+|model\.ckpt-\d+\.json")
_STATE_FILE = "checkpoint"
_TRAINED = re.compile(r'model_checkpoint_path: ".*-[1-9]\d*"')


@dataclass(frozen=True)
class Event:
    """Something appeared (`kept` is where it lies in the recording), or with None vanished."""

    at: float
    name: str
    kept: str | None

    @property
    def is_increment(self) -> bool:
        is_there = self.kept is not None and not self.name.endswith(".json")
        return is_there and Path(self.name).parent.name == INCREMENTS_DIRECTORY


@dataclass
class Recording:
    """A recording in `directory`."""

    directory: Path
    events: list[Event] = field(default_factory=list)

    @property
    def begin(self) -> int:
        """How many events there are until a full checkpoint of a trained model is named; all if none is."""
        for number, event in enumerate(self.events, 1):
            is_named = event.name == _STATE_FILE and event.kept is not None
            if is_named and _TRAINED.search((self.directory / str(event.kept)).read_text()):
                return number
        return len(self.events)

    @property
    def increments(self) -> list[str]:
        """The names of those that were written after `begin`, in their order."""
        return [Path(event.name).name for event in self.events[self.begin :] if event.is_increment]

    @classmethod
    def read(cls, directory: Path) -> Recording:
        told = json.loads((directory / "events.json").read_text())
        return cls(directory, [Event(**event) for event in told])

    def follow(self, source: Path, stop: threading.Event) -> None:
        """Record what happens in `source` until `stop`, and write down what it was."""
        known: dict[str, tuple[int, int]] = {}
        began, is_over = time.monotonic(), False
        while not is_over:
            is_over = stop.wait(_LOOK_S)  # one more look after that
            found = dict(_entries(source))
            at = time.monotonic() - began
            # The state file last: it names what must be there.
            for name in sorted(found, key=lambda name: (name == _STATE_FILE, name)):
                if known.get(name) != found[name]:
                    with suppress(FileNotFoundError):
                        self.events.append(Event(at, name, self._keep(source / name)))
            self.events += [Event(at, name, None) for name in known.keys() - found.keys()]
            known = found
        written = json.dumps([asdict(event) for event in self.events], indent=1)
        (self.directory / "events.json").write_text(written)

    def after_increments(self, count: int) -> int:
        """How many events there are until so many increments after `begin`."""
        left = count
        for number, event in enumerate(self.events[self.begin :], self.begin + 1):
            left -= event.is_increment
            if not left:
                return number
        return len(self.events)

    def do(self, target: Path, begin: int, end: int) -> None:
        """Let happen in `target` what happened from one event to another, at once."""
        for event in self.events[begin:end]:
            self._do(target, event)

    def play(self, target: Path, begin: int, *, every_s: float) -> Iterator[tuple[Event, float]]:
        """Let happen what happened from an event on, in the same rhythm; each event and when it was done.

        An increment comes each `every_s` on average: a cluster that shares its cores with nothing that
        serves may be recorded while it writes much faster.
        """
        events = self.events[begin:]
        times = [event.at for event in events if event.is_increment]
        slower = every_s * (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 1.0
        started = time.monotonic()
        for event in events:
            time.sleep(max(0.0, started + (event.at - events[0].at) * slower - time.monotonic()))
            self._do(target, event)
            yield event, time.time()

    def _keep(self, path: Path) -> str:
        kept = f"{len(self.events):06d}"
        _link(path, self.directory / kept)
        return kept

    def _do(self, target: Path, event: Event) -> None:
        path = target / event.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if event.kept is not None:
            coming = path.with_name(f".coming-{path.name}")
            _link(self.directory / event.kept, coming)
            os.utime(coming)  # a watch tells by the times of files how often a trainer writes
            coming.replace(path)
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _entries(source: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    for directory in (source, source / INCREMENTS_DIRECTORY):
        with suppress(FileNotFoundError), os.scandir(directory) as entries:
            for entry in entries:
                if _KEPT.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        stat = entry.stat()
                        name = str(Path(entry.path).relative_to(source))
                        # A directory's time changes when something in it is removed.
                        yield name, (stat.st_ino, 0 if entry.is_dir() else stat.st_mtime_ns)


def _link(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, copy_function=os.link)
    else:
        os.link(source, target)
