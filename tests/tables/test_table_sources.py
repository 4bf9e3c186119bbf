"""Dynamic tables from every kind of source, through base and deltas: types and ages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from exporter.delta.table_changes import ServedTable
from exporter.options import ExportRequest, Updates
from exporter.pipeline.full import Exported
from exporter.pipeline.incremental import export_incremental
from exporter.publish.delta_log import DeltaLog, read_log
from exporter.tables import DynamicTable
from tests.support.deeprec import Ev, write_full, write_increment

DIM = 4


def lookup(name: str, dtype: str = "float32") -> Any:
    def build() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        import tensorflow as tf

        ids = tf.compat.v1.placeholder(tf.int64, [None], name="ids")
        return {"ids": ids}, {"rows": tf.cast(DynamicTable(name, DIM, dtype).lookup(ids), tf.float32)}

    return build


def request(directory: Path, builder: Any, **options: Any) -> ExportRequest:
    return ExportRequest(
        directory / "train", directory / "model", model=builder, updates=Updates(), **options
    )


def table(log: DeltaLog) -> dict[int, bytes]:
    """The only table of a log as it is published."""
    (found,) = log.base.entry.mapping_spec.dynamic
    state = log.state()
    served = ServedTable.of(found, log.schema, state)
    rows, keys = served.live()
    values = state.rows_at(found.keys[3], rows)
    return {key: row.tobytes() for key, row in zip(keys.tolist(), values, strict=True)}


def expected(*states: Ev) -> dict[int, bytes]:
    """The rows of all states, of which the later ones count."""
    return {key: row.tobytes() for ev in states for key, row in ev.as_dict().items()}


def point_to(directory: Path, step: int) -> None:
    (directory / "train" / "checkpoint").write_text(f'model_checkpoint_path: "model.ckpt-{step}"\n')


@pytest.mark.landing
@pytest.mark.parametrize("keys", [np.int32, np.int64])
@pytest.mark.parametrize("values", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_keys_and_rows_of_every_type(tmp_path: Path, keys: Any, values: Any) -> None:
    ev, touched = (Ev.random(200, DIM, keys=keys, values=values, seed=seed) for seed in (1, 2))
    touched = Ev(np.concatenate([touched.keys[:50], ev.keys[:50]]), touched.values[:100])
    train, builder = tmp_path / "train", lookup("emb", np.dtype(values).name)
    write_full(train / "model.ckpt-10", {"emb": ev}, parts=2, step=10)
    base = export_incremental(request(tmp_path, builder))
    assert isinstance(base, Exported)
    log = read_log(tmp_path / "model")
    assert table(log) == expected(ev)
    write_increment(train, 12, {"emb": touched}, parts=2)
    export_incremental(request(tmp_path, builder))
    assert table(read_log(tmp_path / "model")) == expected(ev, touched)
    write_full(train / "model.ckpt-20", {"emb": touched}, parts=3, step=20)
    export_incremental(request(tmp_path, builder))
    assert table(read_log(tmp_path / "model")) == expected(touched)


def test_old_keys_go_when_a_full_checkpoint_arrives(tmp_path: Path) -> None:
    """An increment says nothing of keys that were not touched; what it holds is recent."""
    train, builder = tmp_path / "train", lookup("emb")
    keys = np.arange(100)
    ev = Ev(keys, np.ones((100, DIM), np.float32), versions=keys)
    write_full(train / "model.ckpt-100", {"emb": ev}, step=100)
    told = request(tmp_path, builder, max_age_steps=60)
    export_incremental(told)
    assert table(read_log(tmp_path / "model")).keys() == set(range(40, 100))
    touched = Ev(np.array([3, 41]), np.full((2, DIM), 2, np.float32))
    write_increment(train, 105, {"emb": touched}, parts=1)
    export_incremental(told)
    assert table(read_log(tmp_path / "model")).keys() == {3, *range(40, 100)}
    versions = keys.copy()
    versions[[3, 41]] = 105
    later = Ev(keys, np.full((100, DIM), 3, np.float32), versions=versions)
    write_full(train / "model.ckpt-120", {"emb": later}, step=120)
    export_incremental(told)
    found = table(read_log(tmp_path / "model"))
    assert found == expected(later.at(versions >= 60))
