"""What `--for-server` promises, in the C++ loaders of the TensorFlows that servers run.

`make test-all` asks three of them, `make matrix` all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from msgspec.structs import replace

import exporter.bundle.mapped_tables as mapped_tables
from exporter.delta.chunk_digest import CHUNK_ROWS, chunk_digest
from exporter.errors import UsageError
from exporter.options import DeltaDtype, ExportRequest, Isolation, Updates
from exporter.pipeline.full import export
from exporter.pipeline.incremental import export_incremental
from exporter.pipeline.log_maintenance import merge
from exporter.pipeline.rebase import rebase
from exporter.wire.int8_codes import to_codes
from tests.support import served_tables
from tests.support.deeprec_logs import DeepRecTrainer
from tests.support.environments import SERVERS
from tests.support.mapped_models import IDS, MappedModel
from tests.support.stock_loaders import StockLoader

pytestmark = [pytest.mark.landing, pytest.mark.timeout(1800)]

ALWAYS = ("1.15.5", "2.4.4", "2.8.4")
CALLERS = 8

in_matrix = pytest.mark.skipif("OLD_TRAINERS" not in os.environ, reason="a combination of `make matrix`")


@pytest.fixture(
    params=[pytest.param(name, marks=() if name in ALWAYS else in_matrix) for name in (*SERVERS, "2.22.0rc0")]
)
def server(request: pytest.FixtureRequest) -> Iterator[StockLoader]:
    with StockLoader(request.param) as loader:
        yield loader


def change(model: MappedModel, step: int) -> None:
    """Train 300 rows on: each step adds its own number."""
    table = model.table.copy()
    table[:300] += step
    model.save(step, table)


def assert_answers(server: StockLoader, model: MappedModel, tolerance: float = 0.0) -> None:
    np.testing.assert_allclose(server.predict(ids=IDS)["rows"], model.table[IDS], rtol=0, atol=tolerance)


HOW: dict[str, dict[str, Any]] = {
    "stamp, digest": {"updates": Updates(stamp=True, digest=True, finite=True)},
    "by rows": {"updates": Updates(isolation=Isolation.ROW)},
    "in chunks": {"updates": Updates(snapshot_max_rows=0)},
    "bfloat16": {"updates": Updates(), "casts": ("bfloat16",)},
    "8 bits": {"updates": Updates(), "casts": ("emb=int8",)},
}
ROUNDED = {"bfloat16": 0.2, "8 bits": 0.5}


@pytest.mark.parametrize("how", HOW)
def test_a_base_its_deltas_and_what_they_become(tmp_path: Path, server: StockLoader, how: str) -> None:
    model = MappedModel(tmp_path)
    asked = model.request(map_tables=False, for_server=server.tensorflow, **HOW[how])
    base, later = export(asked), replace(asked, for_server=None)
    exact = ROUNDED.get(how, 0.0)
    server.load(base.published.path)
    assert_answers(server, model, exact)
    for step, packing in ((8, None), (9, DeltaDtype.BFLOAT16), (10, DeltaDtype.INT8), (11, None)):
        change(model, step)
        export_incremental(replace(later, delta_dtype=packing))
        position, status = server.update(CALLERS)
        assert position == step, status
        assert_answers(server, model, 0.5 if packing else exact)
    if how == "stamp, digest":
        (found,) = server.call("incremental_digest", {"rows": [0]})
        assert isinstance(found, dict), found
        assert found["position_before"] == found["position_after"] == 11
        assert int(found["digest"][0]) == chunk_digest(model.table[:CHUNK_ROWS])
    merge(asked.out)
    server.load(base.published.path)
    assert server.update()[0] == 11
    assert_answers(server, model, exact)
    merged = rebase(asked.out)
    assert merged is not None
    assert merged.published.manifest.for_server == base.published.manifest.for_server
    server.load(merged.published.path)
    assert_answers(server, model, exact)
    change(model, 12)
    export_incremental(later)
    assert server.update()[0] == 12
    assert_answers(server, model, exact)


def in_8_bits(rows: np.ndarray) -> np.ndarray:
    codes, scales, _ = to_codes(rows)
    return codes * scales[:, np.newaxis]


@pytest.mark.parametrize("casts", [(), ("int8",)], ids=["float", "8 bits"])
def test_tables_by_keys(tmp_path: Path, server: StockLoader, casts: tuple[str, ...]) -> None:
    trainer = DeepRecTrainer(tmp_path / "train", has_codes=True)
    trainer.upsert("emb/user", [*range(1, 300), *served_tables.LIMITS])
    trainer.upsert("item", range(100, 150))
    trainer.save()
    asked = served_tables.request(trainer, for_server=server.tensorflow, casts=casts)
    stored = in_8_bits if casts else np.asarray
    server.load(export(asked).published.path)
    served_tables.assert_serves(server, trainer, stored=stored)
    for _ in range(2):
        trainer.train()
        trainer.increment()
        export_incremental(asked)
        assert server.update(CALLERS)[0] == trainer.step
        served_tables.assert_serves(server, trainer, stored=stored)


def test_mapped_tables(tmp_path: Path, server: StockLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", 1)
    model = MappedModel(tmp_path)
    asked = model.request(for_server=server.tensorflow, updates=Updates())
    if server.tensorflow.startswith("1."):
        with pytest.raises(UsageError, match="copy a table that they are to map"):
            export(asked)
        return
    assert server.load(export(asked).published.path) == 2
    assert_answers(server, model)
    for step in (8, 9):  # a row that changes twice moves to its other place
        change(model, step)
        export_incremental(replace(asked, for_server=None))
        assert server.update(CALLERS)[0] == step
        assert_answers(server, model)


def test_what_keras_made(tmp_path: Path, server: StockLoader) -> None:
    layers = tf.keras.layers
    things = tf.keras.Input([3], dtype="int64", name="things")
    hidden = layers.Flatten()(layers.Embedding(100, 8, name="table")(things))
    hidden = layers.LayerNormalization(name="norm")(layers.Dense(8, activation="gelu", name="hidden")(hidden))
    model = tf.keras.Model(things, layers.Dense(3, activation="softmax", name="scores")(hidden))
    tf.train.Checkpoint(model=model).save(str(tmp_path / "train/ckpt"))
    asked = ExportRequest(tmp_path / "train", tmp_path / "served", model=model, for_server=server.tensorflow)
    server.load(export(asked).published.path)
    some = np.arange(30).reshape(10, 3)
    (found,) = server.predict(things=some).values()
    np.testing.assert_allclose(found, np.asarray(model(some)), atol=1e-5)
