"""A trainer in numpy that the real publisher, collector and store serve, and what it knows to be true.

What leads on from what is told here by what happened (who restored what, who wrote what after it), not by
runs, parents, generations or milestones: those are what is tested.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from exporter.checkpoint.tensor_bundle import BundleWriter, read_array, read_catalog
from exporter.increments.history import StateId, identify, read_history
from exporter.increments.increment import CheckpointId
from exporter.training.restoring import Overlay, Publisher, Write, overlay_of
from exporter.training.store import Store
from exporter.training.trainer_side import (
    Collector,
    EventClock,
    RowGroup,
    Source,
    TrackingMode,
    VariablePart,
    VariableTracking,
)

TABLES = {"net/users": (23, 3), "net/items": (10, 2)}
DENSE = {"net/kernel": (3, 4), "net/scale": ()}
STEP = "global_step"
KEEP = 3
"""Full checkpoints that the saver keeps."""

Values = dict[str, np.ndarray]


class Timer:
    """Increments are written when the test says so."""

    def reset(self) -> None:
        pass

    def update_last_triggered_step(self, step: int) -> None:
        pass


@dataclass
class Variables(Source):
    """What a session holds: variables, and flags of touched rows. `run` collects flags, as a graph would."""

    values: Values
    touched: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    def run(self, names: Iterable[str]) -> list[np.ndarray]:
        return [np.array(sorted(self.touched.pop(name, ())), np.int64) for name in names]

    def read(
        self, tracked: VariableTracking, part: VariablePart, rows: np.ndarray | None
    ) -> Iterator[np.ndarray]:
        value = self.values[tracked.name]
        yield value if rows is None else value[rows]


def writer(part: VariablePart) -> Write:
    """How restoring writes."""

    def write(session: Variables, ids: np.ndarray, values: np.ndarray) -> None:
        name = str(part.variable)
        if part.shape:
            session.values[name] = session.values[name].copy()
            session.values[name][ids] = values
        else:
            session.values[name] = np.array(values)

    return write


def named_by(state_file: Path) -> str:
    """The checkpoint that a state file names; "" if it does not name one."""
    found = re.search(r'"(.+)"', state_file.read_text() if state_file.exists() else "")
    return found[1] if found else ""


def collector() -> tuple[Collector, Overlay]:
    """What collects, and what restores."""
    tracked = []
    for name, shape in {**TABLES, **DENSE, STEP: ()}.items():
        part = VariablePart(name, shape, (0,) * len(shape))
        dtype = np.dtype(np.int64 if name == STEP else np.float32)
        mode = TrackingMode.TOUCHED if name in TABLES else TrackingMode.WHOLE
        tracked.append(VariableTracking(name, dtype.name, dtype, shape, (part,), mode))
    groups = tuple(RowGroup(entry.parts, entry.name, entry.name) for entry in tracked if entry.name in TABLES)
    writers = {id(entry.parts[0]): writer(entry.parts[0]) for entry in tracked}
    return Collector(tracked, groups, lambda session: session), overlay_of(tracked, writers)


@dataclass
class Session:
    """One session of the trainer: what its next increment leads on from."""

    number: int
    variables: Variables
    publisher: Publisher
    since: set[StateId]


class NumpyTrainer:
    """Files, sessions, and every state that was on disk while this object was there.

    Where a trainer was before, its files are taken up.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.rng = np.random.default_rng(seed)
        directory.mkdir(parents=True, exist_ok=True)
        self.states: dict[StateId, Values] = {}
        self.edges: dict[StateId, list[tuple[int, str]]] = defaultdict(list)
        self.equal: list[set[StateId]] = []
        self.kept: list[str] = []
        self.sessions = 0
        self.session: Session | None = None
        self.event_time: Callable[[], Any] | None = None
        self.took_up = bool(found := self.fulls())
        if self.took_up:
            self.kept = sorted(found, key=lambda name: found[name].step)
        else:
            values = {name: self.normal(shape) for name, shape in {**TABLES, **DENSE}.items()}
            self.save_files(Variables({**values, STEP: np.array(10, np.int64)}))

    # --- what is on disk ---

    def fulls(self) -> dict[str, CheckpointId]:
        """The complete full checkpoints, by name."""
        found = {}
        for index in self.directory.glob("*.index"):
            if list(self.directory.glob(f"{index.stem}.data-*")):
                found[index.stem] = identify(index.with_suffix(""), int(index.stem.partition("-")[2]))
        return found

    @property
    def named(self) -> str:
        """What the state file names; "" while there is none, or half of one."""
        return named_by(self.directory / "checkpoint")

    def newest(self) -> CheckpointId:
        """The full checkpoint that counts: the named one, else the highest step of those that are whole."""
        fulls = self.fulls()
        return fulls[self.named] if self.named in fulls else max(fulls.values(), key=lambda found: found.step)

    def same(self, state: StateId) -> set[StateId]:
        names = {state}
        for _ in self.equal:
            for pair in self.equal:
                names |= pair if pair & names else set()
        return names

    def newest_state(self, start: StateId | None = None) -> StateId:
        """What a trainer that restores increments would have: the newest of what leads on, still there."""
        there = {stored.increment.id for stored in read_history(self.directory).increments}
        state: StateId = start if start is not None else self.newest()
        while True:
            names = self.same(state)
            edges = [edge for name in names for edge in self.edges[name] if edge[1] not in names]
            found = [edge for edge in edges if edge[1] in there]
            if not found:
                return state
            state = max(found, key=lambda edge: edge[0])[1]

    # --- what a trainer does ---

    def begin(self, *, restores: bool, saver_first: bool, is_live: bool) -> None:
        """Restore what the state file names and go on; `is_live` workers write before the saver saves."""
        if self.named not in self.fulls():
            self.point_to(f"model.ckpt-{self.newest().step}")
        restored = self.newest()
        variables = Variables(self.values_of(self.directory / self.named))
        clock = EventClock(self.event_time)
        collects, overlay = collector()
        publisher = Publisher(Store(self.directory), collects, Timer(), clock, overlay if restores else None)
        tip = self.newest_state(restored) if restores else restored
        start = restored
        if saver_first:
            if is_live:
                self.write_rows(variables, rows=1)
            start = self.save_files(variables)
        publisher.begin_session(variables, int(variables.values[STEP]))
        self.sessions += 1
        if start == restored:
            self.session = Session(self.sessions, variables, publisher, {tip})
            if not self.took_up:
                self.assert_same(variables.values, self.states[tip])
        else:  # what was saved differs from what was restored: the training goes on from there
            self.session = Session(self.sessions, variables, publisher, {start})
        if not saver_first:
            self.save()

    def train(self, rows: int = 3) -> None:
        if self.session is not None:
            variables = self.session.variables
            self.write_rows(variables, rows)
            for name, shape in DENSE.items():
                variables.values[name] = self.normal(shape)
            variables.values[STEP] = variables.values[STEP] + self.rng.integers(1, 4)

    def save(self, *, notices: bool = True) -> None:
        """A full checkpoint of now; the hook may die before it notices."""
        if self.session is None:
            return
        saved = self.save_files(self.session.variables)
        if not notices:
            self.session = None
            return
        is_known = bool(read_history(self.directory).markers_of(saved))
        self.session.publisher.notice(int(self.session.variables.values[STEP]))
        if not is_known:
            self.session.since.add(saved)

    def increment(self) -> None:
        if self.session is not None:
            before = self.ids()
            self.session.publisher.notice(int(self.session.variables.values[STEP]))
            self.session.publisher.save(self.session.variables, int(self.session.variables.values[STEP]))
            self.see_increment(before)

    def end(self) -> None:
        """A clean end: a full checkpoint and the increment that equals it."""
        if self.session is None:
            return
        self.train()
        self.save()
        before, saved = self.ids(), self.newest()
        self.session.publisher.finish(self.session.variables, int(self.session.variables.values[STEP]))
        if new := self.see_increment(before):
            self.equal.append({saved, new})
        self.session = None

    def kill(self) -> None:
        self.session = None

    # --- what an operator does ---

    def point_to(self, name: str) -> None:
        written = self.directory / ".checkpoint"
        written.write_text(f'model_checkpoint_path: "{name}"\n')
        written.replace(self.directory / "checkpoint")

    def set_back(self, what_of_later: str) -> None:
        """Point the state file to an older full checkpoint; those after it are kept, deleted, or lose shards.

        A session that runs does not notice.
        """
        fulls = sorted(self.fulls(), key=lambda name: int(name.partition("-")[2]))
        to = str(self.rng.choice(fulls))
        if what_of_later != "lost by itself":
            self.point_to(to)
        for name in fulls[fulls.index(to) + 1 :]:
            suffixes = {"kept": [], "deleted": [".index", ".data-*"]}.get(what_of_later, [".data-*"])
            for path in [path for suffix in suffixes for path in self.directory.glob(f"{name}{suffix}")]:
                path.unlink()

    # --- how ---

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.rng.normal(size=shape).astype(np.float32)

    def write_rows(self, variables: Variables, rows: int) -> None:
        for name, shape in TABLES.items():
            ids = self.rng.choice(shape[0], rows, replace=False)
            variables.values[name] = variables.values[name].copy()
            variables.values[name][ids] = self.normal((rows, shape[1]))
            variables.touched[name].update(ids.tolist())

    def save_files(self, variables: Variables) -> CheckpointId:
        step = int(variables.values[STEP])
        prefix = self.directory / f"model.ckpt-{step}"
        with BundleWriter(prefix) as writer:
            for name, value in variables.values.items():
                writer.add(name, value)
        self.point_to(prefix.name)
        saved = identify(prefix, step)
        self.states[saved] = dict(variables.values)
        self.kept = [*(name for name in self.kept if name != prefix.name), prefix.name]
        for old in self.kept[:-KEEP]:
            for path in (*self.directory.glob(f"{old}.index"), *self.directory.glob(f"{old}.data-*")):
                path.unlink()
        self.kept = self.kept[-KEEP:]
        return saved

    def ids(self) -> set[str]:
        return {stored.increment.id for stored in read_history(self.directory).increments}

    def see_increment(self, before: set[str]) -> str | None:
        assert self.session is not None
        new = self.ids() - before
        if not new:
            return None
        (increment,) = new
        self.states[increment] = dict(self.session.variables.values)
        for state in self.session.since:
            self.edges[state].append((self.session.number, increment))
        self.session.since = {increment}
        return increment

    @staticmethod
    def values_of(prefix: Path) -> Values:
        catalog = read_catalog(prefix)
        return {name: np.array(read_array(catalog, ref)) for name, ref in catalog.tensors.items()}

    @staticmethod
    def assert_same(found: Values, expected: Values) -> None:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].tobytes() == value.tobytes(), name

    # --- what the publishing of a base asks ---

    @property
    def step(self) -> int:
        return int(self.named.partition("-")[2])


def as_any(trainer: NumpyTrainer) -> Any:
    """As what `tests.support.logs` takes, of which it asks `directory` and `step` alone."""
    return trainer
