"""The trainer's side is one file: what it needs, and what it has to say as the rest of the package does."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.catalog import SliceSpec
from exporter.checkpoint.tensor_bundle import BundleWriter, read_array, read_catalog
from exporter.errors import CorruptFile
from exporter.graph import graph_files
from exporter.increments.history import CheckpointMarker, read_history
from exporter.increments.increment import CheckpointId, to_json
from exporter.storage import layout
from exporter.tables import trainable_table
from exporter.training import trainer_side
from exporter.training.store import CatalogSource
from exporter.training.trainer_side import (
    Bundle,
    FullCheckpoint,
    RunTip,
    Store,
    TrackingMode,
    VariablePart,
    VariableTracking,
)
from tests.support.environments import ROOT, interpreter

FILE = ROOT / "exporter/training/trainer_side.py"
NEEDED = {"numpy", "tensorflow", "tf_keras"}


@pytest.mark.parametrize("version", ["3.6", "3.7", "3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14"])
def test_every_python_compiles_it(version: str) -> None:
    found = interpreter(version)
    if found is None:
        pytest.skip(f"there is no Python {version} on the path or of pyenv")
    code = f"compile(open({str(FILE)!r}, encoding='utf-8').read(), 'trainer_side.py', 'exec')"
    subprocess.run([found, "-W", "error", "-c", code], check=True)


def test_it_imports_nothing_but_numpy_and_the_trainers_tensorflow() -> None:
    imported = set()
    for node in ast.walk(ast.parse(FILE.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).partition(".")[0])
    assert imported - sys.stdlib_module_names == NEEDED


def test_it_is_imported_without_tensorflow() -> None:
    code = f"import sys; sys.path.insert(0, {str(FILE.parent)!r}); import trainer_side"
    code += "; assert 'tensorflow' not in sys.modules and 'exporter' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_says_names_as_the_rest_does() -> None:
    store = Store(Path("train"))
    assert store.path.name == layout.INCREMENTS_DIRECTORY
    names = (trainer_side._STAGING, trainer_side._TRASH, trainer_side._UNFINISHED, trainer_side._SESSION)
    assert names == (
        layout.STAGING_PREFIX,
        layout.TRASH_PREFIX,
        layout.UNFINISHED_MARKER_PREFIX,
        layout.SESSION_FILE,
    )
    assert trainer_side.SCOPE == graph_files.RECORDING_SCOPE
    assert trainer_side.UPKEEP == trainable_table.UPKEEP


@pytest.mark.parametrize("event_time", [None, datetime(2026, 1, 31, 12, 0, 0, 5, timezone.utc)])
def test_it_writes_what_the_package_would_write(tmp_path: Path, event_time: datetime | None) -> None:
    """Manifest and marker, byte for byte, as those structs are written that read them."""
    full = FullCheckpoint(tmp_path / "model.ckpt-7", 7, "a" * 64)
    tip = RunTip.of("b" * 32, 3, full, 7)
    store = Store(tmp_path)
    changed = {"name": "t", "dtype": "float32", "shape": [9, 2], "kind": "table", "rows": 2}
    ids, values = np.array([1, 8]), np.ones((2, 2), np.float32)

    def fill(writer: Bundle) -> dict[str, Any]:
        writer.add("t/ids", ids)
        writer.add_rows("t/values", "float32", (2, 2), iter([values[:1], values[1:]]))
        return {"variables": [changed], "tables": []}

    path = store.publish(tip.draft(12, event_time), fill)
    store.note(tip.marker(full, is_equal=False, event_time=event_time))
    assert path is not None
    history = read_history(tmp_path)
    (stored,) = history.increments
    assert to_json(stored.increment) == (path / "manifest.json").read_text()
    assert stored.increment.event_time == event_time
    assert stored.increment.parent == CheckpointId("model.ckpt-7", 7, "a" * 64)
    ((_, rows),) = stored.changes()
    assert (rows.ids.tolist(), rows.values.tolist()) == ([1, 8], values.tolist())
    (marker,) = history.markers
    assert isinstance(marker, CheckpointMarker)
    assert marker.to_json() == (tmp_path / "increments/model.ckpt-7.json").read_text()
    assert json.loads(marker.to_json())["session"] == tip.session


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "bfloat16", "int8", "int64", "bool", "complex64"]
)
def test_bundles_of_tensorflows_own_writer_are_read(tmp_path: Path, dtype: str) -> None:
    import tensorflow as tf

    value = np.array([[0, 1], [2, 3]]).astype(tf.as_dtype(dtype).as_numpy_dtype)
    with Bundle(tmp_path / "delta") as bundle:
        bundle.add("table/values", value)
        bundle.add("scalar/value", value[:1, 1])
    catalog = read_catalog(tmp_path / "delta")
    found = read_array(catalog, catalog.tensors["table/values"])
    assert (found.dtype, found.tobytes()) == (value.dtype, value.tobytes())
    assert catalog.tensors["scalar/value"].shape == (1,)
    restored = trainer_side.restored(tmp_path / "delta", "table/values", "", dtype)
    assert restored.tobytes() == value.tobytes()


def test_a_checkpoint_is_known_as_the_package_knows_it(tmp_path: Path) -> None:
    """By the state file, by step where that is missing, and by content; with TensorFlow's reader."""
    from exporter.training.store import Store as Ours

    for step in (9, 10):
        with Bundle(tmp_path / f"model.ckpt-{step}") as bundle:
            bundle.add("global_step", np.array(step + 1, np.int64))
    for named in ("model.ckpt-9", "model.ckpt-10", "gone"):
        (tmp_path / "checkpoint").write_text(f'model_checkpoint_path: "/elsewhere/{named}"\n')
        found = Store(tmp_path).newest_full()
        if named != "gone":
            assert found == Ours(tmp_path).newest_full()
        assert found is not None and found.step == (10 if named == "model.ckpt-9" else 11)
    assert Store(tmp_path / "nowhere").newest_full() is None


def test_rows_of_a_full_checkpoint_in_slices(tmp_path: Path) -> None:
    whole = np.arange(14, dtype=np.float32).reshape(7, 2)
    with BundleWriter(tmp_path / "c") as writer:
        writer.add("w", whole)
        for start, length in ((3, 4), (0, 3)):
            writer.add("s", whole[start : start + length], SliceSpec((7, 2), (start, 0), (length, 2)))
        writer.add("holes", whole[:3], SliceSpec((7, 2), (0, 0), (3, 2)))
        writer.add("columns", whole[:, :1], SliceSpec((7, 2), (0, 0), (7, 1)))
    source, ids = CatalogSource(read_catalog(tmp_path / "c")), np.array([6, 0, 3, 2])
    part = VariablePart(None, (7, 2), (0, 0))

    def rows(name: str) -> Any:
        tracked = VariableTracking(name, "float32", np.float32, (7, 2), (part,), TrackingMode.TOUCHED)
        return next(source.read(tracked, part, ids))

    for name in ("w", "s"):
        assert np.array_equal(rows(name), whole[ids])
    for name in ("holes", "columns"):
        with pytest.raises(CorruptFile):
            rows(name)
