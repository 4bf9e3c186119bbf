"""A trainer and a log under a budget, and what is to be served: found by another way than the exporter's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from exporter.delta.format import ChangeKind, Schema
from exporter.delta.packing import round_rows, shrinks
from exporter.delta.residual import load_residual
from exporter.delta.tolerance import row_distances
from exporter.errors import ExportError
from exporter.options import DeltaDtype
from exporter.options.given import changed
from exporter.pipeline.incremental import ExportedDelta
from exporter.publish.delta_log import DeltaLog, read_log
from exporter.storage.layout import CACHES_DIRECTORY
from tests.support.drifting import RememberingWorld
from tests.support.logs import Trainer, Values, assert_same_bits, request, values_at
from tests.support.publishing import delta_of

OVERHEAD = 12_000
"""More than the index and the manifest of a delta of these small models take."""


def export(
    trainer: Trainer, model: Path, budget: str | None = None, *, watches: bool = False, **options: Any
) -> ExportedDelta:
    asked = changed(request(trainer, model), delta_budget=budget, **options)
    return delta_of(asked, is_watching=watches)


def bytes_on_disk(delta: Path) -> int:
    """All that a delta takes, with its manifest."""
    return sum(path.stat().st_size for path in delta.iterdir())


def differing(served: Values, trained: Values) -> dict[str, np.ndarray]:
    """The numbers of the rows, by variable, that are not the same bits; a scalar is a row."""
    found = {}
    for name, value in trained.items():
        rows = len(value) if value.ndim else 1
        a, b = (np.frombuffer(each.tobytes(), np.uint8).reshape(rows, -1) for each in (served[name], value))
        found[name] = np.flatnonzero((a != b).any(axis=1))
    return found


def assert_divided_well(
    before: Values, after: Values, trained: Values, schema: Schema, done: ExportedDelta
) -> None:
    """Each row is the trainer's or as before; none that stays is further, for its size, than one sent."""
    lowest_sent, highest_held, furthest_held, held_rows = np.inf, 0.0, 0.0, 0
    for variable in schema.variables:
        name = variable.name
        changed = differing(before, trained)[name]
        if variable.kind is ChangeKind.DENSE:
            assert not len(differing(after, trained)[name]), name
            continue
        stays = differing(after, trained)[name]
        assert np.isin(stays, changed).all(), f"{name}: a row is neither the trainer's nor as before"
        held = stays
        assert after[name][held].tobytes() == before[name][held].tobytes(), name
        sent = np.setdiff1d(changed, held)
        distances = row_distances(trained[name], before[name])
        finite = sent[np.isfinite(distances[sent])]
        size = 8 + trained[name][0].nbytes
        lowest_sent = min([lowest_sent, *distances[finite] / size])
        highest_held = max([highest_held, *distances[held] / size])
        furthest_held = max([furthest_held, *distances[held]])
        assert np.isfinite(distances[held]).all(), f"{name}: what is no distance is sent"
        held_rows += len(held)
    assert highest_held <= lowest_sent * (1 + 1e-5) or done.budgeted is None
    left_out = done.left_out
    assert (0 if left_out is None else left_out.rows) == held_rows, "told"
    if left_out is not None:
        assert (
            left_out.largest == np.float32(furthest_held)
            or abs(left_out.largest - furthest_held) < 1e-6 * furthest_held
        )
        assert left_out.bound > furthest_held


def remembered(log: DeltaLog) -> Mapping[str, np.ndarray]:
    """The numbers of the rows that the exporter remembers to have held back, by variable."""
    key = {"lineage": log.lineage, "position": log.at.position, "state": log.newest.manifest.state_id}
    found = load_residual(log.path / CACHES_DIRECTORY, log.schema, **key)
    return {} if found is None else {name: change.ids for name, change in found.changes.items()}


@dataclass
class BudgetedWorld(RememberingWorld):
    """Random life: whatever happens, what is served is what the log says."""

    states: list[Values] = field(default_factory=list)

    def do(self, what: str, rng: np.random.Generator) -> None:
        if not self.states or self.states[-1] is not self.visible:
            self.states.append(self.visible)
        match what:
            case "budget":
                self.export_within(int(rng.integers(0, 12)), None, rng)
            case "rounded":
                self.export_rounded(int(rng.integers(0, 12)))
            case "watch":
                self.watch(int(rng.integers(0, 12)))
            case "aged":
                self.export_within(int(rng.integers(0, 12)), float(rng.choice([0.0, 1e6])), rng)
            case "set back":
                saved = list(self.trainer.saved)
                self.trainer.go_back(saved[int(rng.integers(len(saved)))])
                self.trainer.train()
                self.do(str(rng.choice(["save", "increment"])), rng)
            case "rebase":
                self.rebase()
            case "forget":
                for path in (read_log(self.model).path / CACHES_DIRECTORY).glob("*"):
                    path.unlink()
            case _:
                super().do(what, rng)
        self.note()
        self.check()

    def rebase(self) -> None:
        from exporter.pipeline.rebase import rebase

        before = values_at(read_log(self.model))
        try:
            rebase(self.model)
        except ExportError:  # it is held
            return
        assert_same_bits(values_at(read_log(self.model)), before)

    def export_within(self, rows: int, age: float | None, rng: np.random.Generator) -> None:
        log = read_log(self.model)
        before = values_at(log)
        room = OVERHEAD + 20 * rows
        done = export(self.trainer, self.model, f"{room}B", max_row_age=age)
        after = values_at(read_log(self.model))
        if done.published is None:
            assert_same_bits(after, before)
            return
        if age == 0.0:
            assert_same_bits(after, self.visible)
            assert done.left_out is None
            return
        assert_divided_well(before, after, self.visible, log.schema, done)
        used = done.budgeted
        assert used is not None and used.allowed == room
        assert bytes_on_disk(done.published.path) <= max(room, used.due)
        assert {n: ids.tolist() for n, ids in remembered(read_log(self.model)).items()} == {
            name: ids.tolist() for name, ids in differing(after, self.visible).items() if len(ids)
        }

    def export_rounded(self, rows: int) -> None:
        """Each row is as before, or the trainer's, rounded where rows of 8 bits are smaller."""
        log = read_log(self.model)
        before = values_at(log)
        done = export(self.trainer, self.model, f"{OVERHEAD + 16 * rows}B", delta_dtype=DeltaDtype.INT8)
        after, held = values_at(read_log(self.model)), 0
        for variable in log.schema.variables if done.published is not None else ():
            name, trained = variable.name, self.visible[variable.name]
            if variable.kind is ChangeKind.DENSE:
                assert after[name].tobytes() == trained.tobytes()
                continue
            packs = shrinks(DeltaDtype.INT8, variable.dtype, variable.shape[1:])
            image = round_rows(trained, DeltaDtype.INT8) if packs else trained
            for row, value in enumerate(after[name]):
                if value.tobytes() not in (trained[row].tobytes(), image[row].tobytes()):
                    assert value.tobytes() == before[name][row].tobytes(), (name, row)
                    held += 1
        assert done.published is None or (0 if done.left_out is None else done.left_out.rows) == held

    def watch(self, rows: int) -> None:
        """A watch may wait, for the trainer or for its rate; what it sends, the trainer had."""
        before = values_at(read_log(self.model))
        done = export(self.trainer, self.model, f"{OVERHEAD + 20 * rows}B/s", watches=True)
        after = values_at(read_log(self.model))
        if done.published is None:
            assert_same_bits(after, before)
        for name, ids in differing(after, before).items():
            for row in ids:
                had = [
                    state[name].reshape(after[name].shape)[row] if after[name].ndim else state[name]
                    for state in self.states
                ]
                now = after[name][row] if after[name].ndim else after[name]
                assert now.tobytes() in {value.tobytes() for value in had}, (name, row)
