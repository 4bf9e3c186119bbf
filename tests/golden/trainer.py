"""A trainer of the golden model, without TensorFlow: numbers from a seed, ids from their order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from exporter.catalog import SliceSpec
from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.delta.format import ChangeKind, ServedVariable
from exporter.increments.history import CheckpointMarker, identify
from exporter.increments.increment import Changed, CheckpointId, Contents, Increment
from exporter.storage.layout import DEEPREC_INCREMENTS_DIRECTORY as DEEPREC
from exporter.training.store import Store
from exporter.wire.dtypes import DType
from tests.support.increments import note, publish

TABLES = {"users": (8, 4), "users/Adagrad": (8, 4), "items": (7, 16), "items/Adagrad": (7, 16)}
PARTS = ((0, 4), (4, 7))
"""Rows of `items` in each of its parts."""


def given_id(kind: str, number: int) -> str:
    """32 hex digits that say whose id it is."""
    return f"{kind.encode().hex()[:16]:0<16}{number:016x}"


@dataclass
class Trainer:
    """What training has now, and the files it leaves in `directory`."""

    directory: Path
    step: int = 10
    session: int = 1
    generation: int = 1
    parent: str | CheckpointId | None = None
    parent_step: int = 0
    touched: dict[str, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(7)
        self.directory.mkdir(parents=True)
        shapes = {**TABLES, "kernel": (4,), "scale": ()}
        self.values = {n: self.rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
        self.values["users"][0, :2] = -0.0, 1e-40  # bits that a comparison of numbers loses
        self.words = {b"red": 1, b"green": 2}

    def train(self, tables: Mapping[str, list[int]], *, by: float = 1.0, dense: str = "") -> None:
        """Ten steps that move these rows by about this much, and one dense variable."""
        self.step += 10
        for name, rows in tables.items():
            for each in (name, f"{name}/Adagrad"):
                moved = self.rng.normal(size=(len(rows), TABLES[each][1])) * by
                self.values[each][rows] += moved.astype(np.float32)
                self.touched.setdefault(each, set()).update(rows)
        if dense:
            self.values[dense] = self.rng.normal(size=self.values[dense].shape).astype(np.float32)
            self.touched[dense] = set()

    def save(self) -> CheckpointId:
        """A full checkpoint of now, and its marker if increments came before it."""
        prefix = self.directory / f"model.ckpt-{self.step}"
        with BundleWriter(prefix) as writer:
            writer.add("global_step", np.array(self.step, np.int64))
            for name, value in self.values.items():
                self._add(writer, name, value)
            writer.add("seen-keys", np.array(list(self.words), object))
            writer.add("seen-values", np.array(list(self.words.values()), np.int64))
        (self.directory / "checkpoint").write_text(f'model_checkpoint_path: "{prefix.name}"\n')
        saved = identify(prefix, self.step)
        if isinstance(self.parent, str):
            run, session = given_id("run", 1), given_id("session", self.session)
            marker = CheckpointMarker(
                checkpoint=saved, run=run, after=self.parent, is_equal=not self.touched, session=session
            )
            note(self.directory, marker)
        else:
            self.parent, self.parent_step, self.touched = saved, self.step, {}
        return saved

    def restart(self, saved: CheckpointId) -> None:
        """Another session, from a full checkpoint."""
        self.session, self.generation = self.session + 1, self.generation + 1
        self.step, self.parent, self.parent_step, self.touched = saved.step, saved, saved.step, {}

    def increment(self) -> None:
        """What was touched since the last increment."""
        assert self.parent is not None
        draft = Increment(
            id=given_id("increment", 1000 * self.session + self.step),
            run=given_id("run", 1),
            session=given_id("session", self.session),
            generation=self.generation,
            parent=self.parent,
            from_step=self.parent_step,
            to_step=self.step,
            variables=(),
        )
        publish(self.directory, draft, self._fill)
        Store(self.directory).claim(given_id("session", self.session))
        self.parent, self.parent_step, self.touched = draft.id, self.step, {}

    def deeprec_increment(self) -> None:
        """Everything since the last full checkpoint, as DeepRec writes it."""
        prefix = self.directory / DEEPREC / f"incremental_model.ckpt-{self.step}"
        prefix.parent.mkdir()
        with BundleWriter(prefix) as writer:
            writer.add("global_step", np.array(self.step, np.int64))
            for name, value in self.values.items():
                if name not in TABLES:
                    writer.add(name, value)
                    continue
                rows = np.array(sorted(self.touched.get(name, ()), reverse=True), np.int64)
                for number, (start, stop) in enumerate(PARTS if name.startswith("items") else [(0, 8)]):
                    local = rows[(rows >= start) & (rows < stop)]
                    part = f"{name}/part_{number}" if name.startswith("items") else name
                    if len(rows):
                        writer.add(f"{part}-sparse_incr_keys", local - start)
                        writer.add(f"{part}-sparse_incr_values", value[local])

    def served(self) -> dict[str, np.ndarray]:
        """What a model would serve now, by the names that deltas have."""
        found = {name: self.values[name] for name in ("users", "kernel", "scale")}
        for start, stop in PARTS:
            found[f"items[7 16 {start},{stop - start}:0,16]"] = self.values["items"][start:stop]
        found["seen-keys"] = np.array(list(self.words), object)
        found["seen-values"] = np.array(list(self.words.values()), np.int64)
        return {name: value.copy() for name, value in found.items()}

    @staticmethod
    def _add(writer: BundleWriter, name: str, value: np.ndarray) -> None:
        if not name.startswith("items"):
            writer.add(name, value)
            return
        for start, stop in PARTS:
            part = SliceSpec(value.shape, (start, 0), (stop - start, value.shape[1]))
            writer.add(name, value[start:stop], part)

    def _fill(self, writer: BundleWriter) -> Contents:
        changed = []
        for name, rows in sorted(self.touched.items()):
            kind = ChangeKind.TABLE if name in TABLES else ChangeKind.DENSE
            variable = ServedVariable(name, DType.FLOAT, self.values[name].shape, kind)
            if kind is ChangeKind.TABLE:
                ids = np.array(sorted(rows), np.int64)
                writer.add(variable.keys[0], ids)
                writer.add(variable.keys[1], self.values[name][ids])
            else:
                writer.add(variable.keys[0], self.values[name][np.newaxis, ...])
            changed.append(Changed(variable, max(1, len(rows))))
        return Contents(tuple(changed))
