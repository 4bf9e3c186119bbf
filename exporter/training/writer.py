"""`IncrementWriter`: increments of a training without TensorFlow, for a model that TensorFlow serves.

    writer = IncrementWriter("train")
    writer.save(0, {"users/table": rows})                    # export a base of this: export-model --incr
    writer.write(100, {"users/table": (ids, rows_of_ids)})   # and a delta of each of these

PyTorch, JAX, a feature store: anything that has arrays. Neither this nor a delta needs TensorFlow.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import to_builtins

from exporter.catalog import Catalog
from exporter.checkpoint.embedding_variables import (
    KEYS,
    VALUES,
    VERSIONS,
    EmbeddingVariable,
    embedding_variables,
)
from exporter.checkpoint.tensor_bundle import BundleWriter, read_catalog
from exporter.errors import MissingTensors, ShapeMismatch, UsageError
from exporter.increments.changed_tables import ChangedTable
from exporter.increments.increment import CheckpointId
from exporter.options import given
from exporter.storage.files import make_directories, write_durably, writing
from exporter.storage.layout import CHECKPOINT_STATE_FILE
from exporter.storage.local_paths import trained_path
from exporter.training.store import Bundle, Store
from exporter.training.trainer_side import NONE, Document, EventClock, FullCheckpoint, RunTip, new_id

Array = np.ndarray[Any, Any]
Change = Any
"""Rows `(ids, rows)`, for a table by keys `(keys, rows)`; or all of a variable, an array of its shape."""


class IncrementWriter:
    """Writes full checkpoints and increments into `ckpt_dir`; one process at a time.

    It continues from the newest increment that exists. Each call of `write` gets all changes since the last
    call that succeeded, even if a process that has ended made that call; a caller that does not know them
    calls `save`, after which the next delta is computed by comparison.

    Raises:
        UsageError: `ckpt_dir` is not a path of this machine.
        CheckpointError: an increment or the full checkpoint is damaged or cannot be read.
        PublishError: it, or a subclass: the record that this writer has begun cannot be written.
    """

    def __init__(self, ckpt_dir: Path | str) -> None:
        self._store = Store(given.place("ckpt_dir", ckpt_dir, trained_path))
        self._tip: RunTip | None = None
        full = self._store.newest_full()
        if full is not None:
            history = self._store.history()
            chain = history.after(CheckpointId(full.prefix.name, full.step, full.digest))
            if chain:
                last = chain[-1].increment
                self._tip = RunTip.of(last.run, history.generation, last.id, last.to_step)
                self._store.claim(self._tip.session)
                self._catalog = read_catalog(full.prefix)
            else:
                self._begin_at(full)

    def save(
        self,
        step: int,
        values: Mapping[str, Array],
        tables: Mapping[str, tuple[Array, Array]] | None = None,
    ) -> Path:
        """Write a full checkpoint, from which later increments continue, and return its prefix.

        `values` are variables by name, `tables` are tables by keys, as (keys, rows), by name. The state file
        then names the new checkpoint as the newest. Its values are not synced to disk.

        Raises:
            UsageError: the step is not a whole number, two tensors have one name, or an array has a type that
                TensorFlow lacks, or objects that are not strings.
            ShapeMismatch: a value is not an array, or keys and rows of a table do not belong together.
            TargetNotWritable, DiskFull, PublishError: it, or the record that increments continue from it, was
                not written, or not completely.
        """
        step = _step(step)
        tensors = _tensors(_named("values", values), _named("tables", tables))
        directory = self._store.ckpt_dir
        prefix = directory / f"model.ckpt-{step}"
        with writing(directory):
            make_directories(directory)
            with BundleWriter(prefix) as bundle:
                bundle.add("global_step", np.array(step, np.int64))
                for name, array in tensors:
                    try:
                        bundle.add(name, array)
                    except (KeyError, ValueError) as error:
                        raise UsageError(f"{name!r} cannot be saved", cause=str(error)) from error
            # The state file last: it may name the checkpoint only once that is complete.
            unfinished = directory / f".{CHECKPOINT_STATE_FILE}-{new_id()}"
            write_durably(unfinished, f'model_checkpoint_path: "{prefix.name}"\n'.encode())
            unfinished.rename(directory / CHECKPOINT_STATE_FILE)
        full = self._store.newest_full()
        if full is not None:
            self._begin_at(full)
        return prefix

    def write(
        self,
        step: int,
        changes: Mapping[str, Change],
        removed: Mapping[str, Array] | None = None,
        event_time: Any = None,
    ) -> Path | None:
        """Write an increment; return its directory, or None if nothing changed.

        `changes` has, by name, (row numbers, rows) or the whole value of a variable, and (keys, rows) of a
        table by keys; `removed` has the removed keys of such tables, by name. `event_time` is the time of the
        newest event that was trained on: a `datetime` with a time zone, or seconds since 1970; a malformed
        one is logged and left out. Increments that no full checkpoint needs any more are removed.

        Raises:
            UsageError: there is no full checkpoint, the step is not a whole number or does not grow, or
                another writer has begun.
            MissingTensors: the full checkpoint has no variable or table of this name.
            ShapeMismatch: values have another shape or dtype, rows do not exist, a row or key is given twice,
                or a change has neither of these forms.
            CorruptFile, UnsupportedFormat: the full checkpoint's tables are damaged, or have rows outside its
                tensors.
            CheckpointError: the full checkpoint's object graph cannot be read; CheckpointChanged if it has
                vanished.
            TargetNotWritable, DiskFull, PublishError: nothing was written.
        """
        tip, step = self._tip, _step(step)
        changes, gone = _named("changes", changes), _named("removed", removed)
        if tip is None:
            raise UsageError(
                f"there is no full checkpoint in {self._store.ckpt_dir}",
                hint="writer.save(0, {name: values})",
            )
        if step <= tip.step:
            raise UsageError(
                f"step {step} does not follow {tip.step}", hint="give each call of write a higher step"
            )
        self._store.require_claim(tip.session)
        tables = embedding_variables(self._catalog)

        def fill(bundle: Bundle) -> Document:
            plain = [
                _write_variable(bundle, self._catalog, name, changes[name])
                for name in changes
                if name not in tables
            ]
            keyed = [
                _write_table(bundle, tables[name], changes.get(name), gone.get(name, NONE))
                for name in tables
                if name in changes or name in gone
            ]
            return {"variables": [each for each in plain if each], "tables": keyed}

        if unknown := sorted(set(gone) - set(tables)):
            raise MissingTensors(f"{self._catalog.prefix} has no table by keys {unknown[0]!r}")
        draft = tip.draft(step, EventClock(event_time).read(None))
        path = self._store.publish(draft, fill)
        if path is not None:
            self._tip = tip._replace(parent=draft["id"], step=step)
            self._store.prune()
        return path

    def _begin_at(self, full: FullCheckpoint) -> None:
        tip = RunTip.of(new_id(), self._store.records().generation, full, full.step)
        self._store.claim(tip.session)
        self._store.note(tip.marker(full, is_equal=False))
        self._tip, self._catalog = tip, read_catalog(full.prefix)


def _tensors(values: Mapping[str, Any], tables: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    """Yield the tensors of a full checkpoint by name, each converted to an array when it is its turn.

    While iterating, raises ShapeMismatch if a value is not an array, or keys and rows of a table do not
    belong together.
    """
    for name, value in values.items():
        yield name, _array(value, name)
    for name, value in tables.items():
        keys, rows = _pair(value, name, "keys")
        if rows.ndim != 2 or len(rows) != len(keys):
            raise _misfit(rows, name, f"[{len(keys)}, n] for these keys")
        yield from ((f"{name}{KEYS}", keys), (f"{name}{VALUES}", rows), (f"{name}{VERSIONS}", NONE))


def _write_variable(bundle: Bundle, catalog: Catalog, name: str, change: Change) -> Document | None:
    ref = catalog.tensors.get(name)
    if ref is None:
        raise MissingTensors(f"{catalog.prefix} has no variable {name!r}")
    document = {"name": name, "dtype": ref.dtype.label, "shape": list(ref.shape)}
    if not isinstance(change, tuple):
        bundle.add(f"{name}/value", _as(change, ref.dtype.numpy, ref.shape, name)[np.newaxis, ...])
        return {**document, "kind": "dense", "rows": 1}
    given_ids, given_rows = _pair(change, name, "ids")
    if not ref.shape:
        raise ShapeMismatch(f"{name!r} is a single value and has no rows: give the value as a whole")
    ids, at = np.unique(given_ids, return_index=True)
    if len(ids) < len(given_ids) or (len(ids) and not 0 <= ids[0] <= ids[-1] < ref.shape[0]):
        raise ShapeMismatch(f"the ids of {name!r} are not distinct rows of {list(ref.shape)}")
    if not len(ids):
        return None
    rows = _as(given_rows, ref.dtype.numpy, (len(ids), *ref.shape[1:]), name)
    bundle.add(f"{name}/ids", ids)
    bundle.add(f"{name}/values", rows[at])
    return {**document, "kind": "table", "rows": len(ids)}


def _write_table(bundle: Bundle, table: EmbeddingVariable, change: Change, removed: Array) -> Document:
    none = NONE, np.empty((0, table.dim), table.value_dtype.numpy)
    keys, rows = none if change is None else _pair(change, table.name, "keys")
    gone = np.unique(_integers(removed, table.name, "removed keys"))
    if len(np.unique(keys)) < len(keys):
        raise ShapeMismatch(f"a key of {table.name!r} is there twice")
    rows = _as(rows, table.value_dtype.numpy, (len(keys), table.dim), table.name)
    # Numbers of rows are the trainer's own, and this one has none.
    label, capacity = table.value_dtype.label, max(1, len(keys))
    found = ChangedTable(table.name, label, table.dim, capacity, len(keys), len(gone))
    for key, value in zip(found.keys, (np.arange(len(keys)), keys, rows, gone), strict=True):
        bundle.add(key, value)
    return dict(to_builtins(found))


def _named(argument: str, found: Any) -> Mapping[str, Any]:
    """Return an argument's mapping from names to arrays, empty for None; UsageError for anything else."""
    if found is not None and not isinstance(found, Mapping):
        raise given.wrong(argument, found, "a dict of arrays by name", f'{argument}={{"name": ...}}')
    return found or {}


def _step(step: Any) -> int:
    """Return a training step as an int; UsageError if it is not a whole number."""
    try:
        return operator.index(step)
    except TypeError:
        raise given.wrong("step", step, "a whole number", "step=100") from None


def _pair(change: Any, name: str, what: str) -> tuple[Array, Array]:
    """Return the row numbers or keys (int64 [n]) and the rows of `name`; ShapeMismatch if it is not a pair.

    `what` is the word for the former, for errors.
    """
    if not isinstance(change, tuple | list) or len(change) != 2:
        count = f" of {len(change)}" if isinstance(change, tuple | list) else ""
        raise ShapeMismatch(
            f"what is given for {name!r} is a {type(change).__name__}{count}, expected ({what}, rows)"
        )
    return _integers(change[0], name, what), _array(change[1], name)


def _integers(value: Any, name: str, what: str) -> Array:
    """Return whole numbers as int64 [n]; ShapeMismatch, which calls them `what` of `name`, for others."""
    found = _array(value, name)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ShapeMismatch(
            f"the {what} of {name!r} are {found.dtype}{list(found.shape)}, expected whole numbers [n]"
        )
    return found.astype(np.int64, copy=False)


def _array(value: Any, name: str) -> Array:
    """Return a value as an array; ShapeMismatch, which names `name`, if numpy cannot make one of it."""
    try:
        return np.asarray(value)
    except (RuntimeError, TypeError, ValueError) as error:  # lists of several lengths, tensors of a GPU
        raise ShapeMismatch(f"the values of {name!r} are not an array", cause=str(error)) from error


def _as(value: Any, dtype: Any, shape: tuple[int, ...], name: str) -> Array:
    found = _array(value, name)
    if found.shape != shape or found.dtype != dtype:
        raise _misfit(found, name, f"{dtype}{list(shape)}")
    return found


def _misfit(found: Array, name: str, expected: str) -> ShapeMismatch:
    return ShapeMismatch(f"the values of {name!r} are {found.dtype}{list(found.shape)}, expected {expected}")
