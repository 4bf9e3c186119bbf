"""What tests of increments ask: do full checkpoints and increments give the trainer's own last state?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from msgspec.structs import replace

from exporter.catalog import TensorRef
from exporter.checkpoint.tensor_bundle import OBJECT_GRAPH, read_array, read_catalog
from exporter.delta.format import Rows
from exporter.increments.history import CheckpointMarker, History, identify, read_history
from exporter.increments.increment import CheckpointId, Contents, Increment, StoredIncrement, to_json
from exporter.training.store import Store

KeyedTable = dict[int, tuple[int, bytes]]


def values_of(prefix: Path) -> dict[str, np.ndarray]:
    catalog = read_catalog(prefix)
    refs = (ref for ref in catalog.tensors.values() if ref.name != OBJECT_GRAPH)
    return {ref.name: read_array(catalog, stored(ref)) for ref in refs}


def stored(ref: TensorRef) -> TensorRef:
    """The slot of one part of a table is declared in the table's shape, and one slice of it is there."""
    if ref.is_complete:
        return ref
    (part,) = [part for part in ref.slices if part.extent]
    return TensorRef(ref.name, ref.dtype, part.spec.lengths, part.extent)


def full(directory: Path, name: str) -> CheckpointId:
    """A name may be a step behind its contents: workers go on while a saver reads."""
    step = read_catalog(directory / name).step
    assert step is not None
    return identify(directory / name, step)


def differing(
    directory: Path, start: CheckpointId, final: Path, chain: tuple[StoredIncrement, ...] | None = None
) -> list[str]:
    """Variables whose bits differ between `final` and `start` with the increments that lead on from it."""
    chain = read_history(directory).after(start) if chain is None else chain
    values = values_of(directory / start.name)
    keyed = _take_keyed(values)
    apply_increments(values, chain)
    apply_keyed(keyed, chain)
    expected = values_of(final)
    expected_keyed = _take_keyed(expected)
    assert values.keys() == expected.keys()
    assert keyed.keys() == expected_keyed.keys()
    found = [name for name, value in expected.items() if values[name].tobytes() != value.tobytes()]
    return found + [name for name, table in expected_keyed.items() if keyed[name] != table]


def _take_keyed(values: dict[str, np.ndarray]) -> dict[str, KeyedTable]:
    """Take tables by keys out of a checkpoint's values: of each key its row's number and bytes."""
    tables = {}
    for name in [key.removesuffix("-rows") for key in values if key.endswith("-rows")]:
        parts = {part: values.pop(f"{name}-{part}") for part in ("keys", "rows", "values", "versions")}
        keys = parts["keys"].tolist()
        assert len(set(keys)) == len(keys)
        rows = zip(parts["rows"].tolist(), (row.tobytes() for row in parts["values"]), strict=True)
        tables[unquote(name.rpartition("/.ATTRIBUTES/")[2])] = dict(zip(keys, rows, strict=True))
    return tables


def apply_keyed(tables: dict[str, KeyedTable], increments: Iterable[StoredIncrement]) -> None:
    """Overlay tables by keys in memory with increments, in order."""
    for stored in increments:
        for table, change in stored.tables():
            for key in change.removed.tolist():
                tables[table.name].pop(key, None)
            rows = zip(change.ids.tolist(), (row.tobytes() for row in change.values), strict=True)
            tables[table.name] |= dict(zip(change.keys.tolist(), rows, strict=True))


def apply_increments(values: dict[str, np.ndarray], increments: Iterable[StoredIncrement]) -> None:
    """Overlay whole variables in memory with increments, in order: what a restored trainer would hold."""
    for stored in increments:
        for changed, change in stored.changes():
            name = changed.variable.name
            if not isinstance(change, Rows):
                values[name] = change
                continue
            if not values[name].flags.writeable:
                values[name] = values[name].copy()
            values[name][change.ids] = change.values


def starts(history: History, directory: Path) -> list[CheckpointId]:
    """The full checkpoints that are still there and have a place in the chain."""
    known = [marker.checkpoint for marker in history.markers]
    there = [checkpoint for checkpoint in known if (directory / f"{checkpoint.name}.index").exists()]
    return [checkpoint for checkpoint in there if full(directory, checkpoint.name) == checkpoint]


def checkpoint(step: int, content: str = "0") -> CheckpointId:
    return CheckpointId(f"model.ckpt-{step}", step, content * 64)


def increment(
    name: str, parent: str | CheckpointId, start: int, end: int, generation: int = 1
) -> StoredIncrement:
    return StoredIncrement(
        Path(name),
        Increment(
            id=name * 16,
            run="f" * 16,
            generation=generation,
            parent=parent,
            from_step=start,
            to_step=end,
            variables=(),
            session=str(generation) * 32,
        ),
    )


A = increment("a", checkpoint(10), 10, 20)


def publish(directory: Path, draft: Increment, fill: Callable[[Any], Contents]) -> None:
    """Have a trainer's store publish an increment, whose bundle `fill` writes."""

    def write(writer: Any) -> dict[str, Any]:
        contents = fill(writer)
        written = _fields(to_json(replace(draft, variables=contents.variables, tables=contents.tables)))
        return {name: written[name] for name in ("variables", "tables") if name in written}

    assert Store(directory).publish(_fields(to_json(draft)), write) is not None


def note(directory: Path, marker: CheckpointMarker) -> None:
    """Have a trainer's store write a marker."""
    Store(directory).note(_fields(marker.to_json()))


def _fields(text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text)
    return {name: value for name, value in document.items() if name not in ("format_version", "kind")}
