"""What `--for-server` promises, in the C++ loaders of the TensorFlows that servers run.

`make test-all` asks three of them, `make matrix` all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from msgspec import Struct
from msgspec.structs import replace

import exporter.bundle.mapped_tables as mapped_tables
from exporter.delta.chunk_digest import chunks, served_digests
from exporter.graph.joined_lookups import LEAST
from exporter.options import DeltaDtype, ExportRequest, Isolation, Updates
from exporter.pipeline.full import export
from exporter.pipeline.incremental import export_incremental
from exporter.pipeline.rebase import rebase
from exporter.publish.delta_log import read_log
from exporter.tables import DynamicTable
from tests.support import served_tables
from tests.support.deeprec_logs import DIM, DeepRecTrainer, Table
from tests.support.environments import SERVERS
from tests.support.joined_tables import is_joined
from tests.support.mapped_models import IDS, MappedModel
from tests.support.served_tables import in_8_bits
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


HOW: dict[str, dict[str, Any]] = {
    "stamp, digest": {"updates": Updates(stamp=True, digest=True, finite=True)},
    "by rows": {"updates": Updates(isolation=Isolation.ROW)},
    "in chunks": {"updates": Updates(snapshot_max_rows=0)},
    "bfloat16": {"updates": Updates(), "casts": ("bfloat16",)},
    "8 bits": {"updates": Updates(), "casts": ("emb=int8",)},
}
ROUNDED = {"bfloat16": 0.2, "8 bits": 0.5}
PACKED = {9: DeltaDtype.BFLOAT16, 10: DeltaDtype.INT8}
LAST = 12


def made_for(server: StockLoader) -> str | None:
    """Two makes serve all: one of 1.15 the two that need one, that of the default all others."""
    return "1.15" if server.tensorflow in {"1.15.5", "2.4.4"} else None


class Published(Struct, frozen=True):
    """A base, one of the same log that holds deltas up to the step before the last, and rows by step."""

    base: Path
    merged: Path
    rows: dict[int, np.ndarray]


@cache
def published(directory: Path, how: str, for_server: str | None) -> Published:
    """A log of deltas: exact, in 16 bits, in 8 bits, exact; then a base that holds them, and one more."""
    model = MappedModel(directory / f"{how} for {for_server}")
    asked = model.request(map_tables=False, for_server=for_server, **HOW[how])
    base, rows = export(asked).published, {7: model.table[IDS]}
    for step in range(8, LAST):
        change(model, step)
        rows[step] = model.table[IDS]
        export_incremental(replace(asked, for_server=None, delta_dtype=PACKED.get(step)))
    merged = rebase(asked.out)
    assert merged is not None
    assert merged.published.manifest.for_server == base.manifest.for_server
    change(model, LAST)
    rows[LAST] = model.table[IDS]
    export_incremental(replace(asked, for_server=None))
    return Published(base.path, merged.path, rows)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("how", HOW)
def test_a_base_its_deltas_and_what_they_become(directory: Path, server: StockLoader, how: str) -> None:
    made = published(directory, how, made_for(server))
    exact = ROUNDED.get(how, 0.0)

    def assert_answers(step: int) -> None:
        tolerance = 0.5 if step in PACKED else exact
        found = server.predict(ids=IDS)["rows"]
        np.testing.assert_allclose(found, made.rows[step], rtol=0, atol=tolerance, err_msg=f"step {step}")

    server.load(made.base)
    assert_answers(7)
    for step in range(8, LAST):
        assert server.update(CALLERS, up_to=step)[0] == step
        assert_answers(step)
    for version in (made.base, made.merged):
        server.load(version)
        assert_answers(7 if version == made.base else LAST - 1)
        assert server.update(CALLERS)[0] == LAST
        assert_answers(LAST)
    if how == "stamp, digest":
        (found,) = server.call("incremental_digest", {"rows": [*range(3)]})
        assert isinstance(found, dict), found
        assert {*found["position_before"], *found["position_after"]} == {LAST}
        log = read_log(made.base.parent)
        told = served_digests(log.schema, log.state(), [*islice(chunks(log.schema), 3)])
        assert [int(each) for each in found["digest"]] == told


@cache
def keyed(directory: Path, for_server: str | None, casts: tuple[str, ...]) -> tuple[Path, DeepRecTrainer]:
    """A base of tables by keys that new keys came to, and their trainer."""
    trainer = DeepRecTrainer(directory / f"by keys for {for_server} {casts}/train", has_codes=True)
    trainer.upsert("emb/user", [*range(1, 300), *served_tables.LIMITS])
    trainer.upsert("item", range(100, 150))
    trainer.save()
    asked = served_tables.request(trainer, for_server=for_server, casts=casts)
    base = export(asked).published.path
    for _ in range(2):
        trainer.train()
        trainer.increment()
        export_incremental(asked)
    return base, trainer


@pytest.mark.parametrize("casts", [(), ("int8",)], ids=["float", "8 bits"])
def test_tables_by_keys(directory: Path, server: StockLoader, casts: tuple[str, ...]) -> None:
    base, trainer = keyed(directory, made_for(server), casts)
    server.load(base)
    assert server.update(CALLERS)[0] == trainer.step
    served_tables.assert_serves(server, trainer, stored=in_8_bits if casts else np.asarray)


JOINED = tuple(f"emb/t{number}" for number in range(LEAST + 1))


def many() -> tuple[dict[str, Any], dict[str, Any]]:
    """A builder of tables by keys whose lookups are joined."""
    ids = tf.compat.v1.placeholder(tf.int64, [None], name="ids")
    return {"ids": ids}, {name: DynamicTable(name, DIM).lookup(ids) for name in JOINED}


class Joined(Struct, frozen=True):
    """A base of joined tables, one of the same log that holds what followed, and tables by step."""

    base: Path
    rebased: Path
    tables: dict[int, dict[str, Table]]


@cache
def joined(directory: Path, for_server: str | None, **options: Any) -> Joined:
    """New keys come by increments, some are evicted; then a base holds that, and more follow."""
    trainer = DeepRecTrainer(directory / f"joined for {for_server} {options}/train", names=JOINED, parts={})
    for number, name in enumerate(JOINED):
        trainer.upsert(name, range(1, 30 * number + 2))
    trainer.save()
    asked = served_tables.request(trainer, model=many, for_server=for_server, **options)
    base = export(asked).published.path
    tables = {trainer.step: trainer.now()}

    def publish() -> None:
        export_incremental(replace(asked, for_server=None))
        tables[trainer.step] = trainer.now()

    trainer.train(60)
    trainer.increment()
    publish()
    trainer.train(60)
    trainer.evict(JOINED[-1], range(1, 100, 2))
    trainer.save()
    publish()
    rebased = rebase(asked.out)
    assert rebased is not None
    trainer.train(60)
    trainer.increment()
    publish()
    return Joined(base, rebased.published.path, tables)


@pytest.mark.parametrize("map_tables", [False, True], ids=["in memory", "mapped"])
def test_joined_tables(
    directory: Path, server: StockLoader, monkeypatch: pytest.MonkeyPatch, map_tables: bool
) -> None:
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", 1)
    options: dict[str, Any] = {}
    if map_tables:
        if server.tensorflow.startswith("1."):
            return  # from 1.15 on a mapped table would be copied
        options = {"map_tables": True, "overlay_rows": 600}
    for_2_4 = "2.4" if server.tensorflow == "2.4.4" else None
    made = joined(directory, for_2_4 if map_tables else made_for(server), **options)
    for version, done in ((made.base, 1), (made.rebased, 3)):
        assert is_joined(version)
        assert server.load(version) >= map_tables * len(JOINED)
        for step, tables in [*made.tables.items()][done:]:
            assert server.update(CALLERS, up_to=step)[0] == step
            assert_rows(server, tables)


def assert_rows(server: StockLoader, tables: dict[str, Table]) -> None:
    """Every table answers with its own rows to the keys of all."""
    held = np.array(sorted({key for table in tables.values() for key in table}), np.int64)
    keys = np.concatenate([held, held + 1, served_tables.LIMITS])
    found = server.predict(ids=keys)
    absent = np.zeros(DIM, np.float32).tobytes()
    for name, table in tables.items():
        assert found[name].tobytes() == b"".join(table.get(key, absent) for key in keys.tolist()), name


@cache
def mapped(directory: Path, for_server: str | None) -> Published:
    """A base whose tables are mapped, and rows by step: changed ones move to their other place."""
    model = MappedModel(directory / f"mapped for {for_server}")
    asked = model.request(for_server=for_server, updates=Updates())
    base, rows = export(asked).published.path, {7: model.table[IDS]}
    for step in (8, 9):
        change(model, step)
        rows[step] = model.table[IDS]
        export_incremental(replace(asked, for_server=None))
    return Published(base, base, rows)


def test_mapped_tables(directory: Path, server: StockLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 2.4 map a table, from 1.15 on it would be copied."""
    if server.tensorflow.startswith("1."):
        return
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", 1)
    made = mapped(directory, "2.4" if server.tensorflow == "2.4.4" else None)
    assert server.load(made.base) >= 1
    for step, rows in made.rows.items():
        if step > 7:
            assert server.update(CALLERS, up_to=step)[0] == step
        np.testing.assert_array_equal(server.predict(ids=IDS)["rows"], rows)


@cache
def of_keras(directory: Path, for_server: str | None) -> tuple[Path, np.ndarray]:
    """A version without deltas, of Keras's layers, and what these answer to `SOME`."""
    layers = tf.keras.layers
    things = tf.keras.Input([3], dtype="int64", name="things")
    hidden = layers.Flatten()(layers.Embedding(100, 8, name="table")(things))
    hidden = layers.LayerNormalization(name="norm")(layers.Dense(8, activation="gelu", name="hidden")(hidden))
    model = tf.keras.Model(things, layers.Dense(3, activation="softmax", name="scores")(hidden))
    work = directory / f"keras for {for_server}"
    tf.train.Checkpoint(model=model).save(str(work / "train/ckpt"))
    done = export(ExportRequest(work / "train", work / "served", model=model, for_server=for_server))
    return done.published.path, np.asarray(model(SOME))


SOME = np.arange(30).reshape(10, 3)


def test_what_keras_made(directory: Path, server: StockLoader) -> None:
    version, expected = of_keras(directory, made_for(server))
    server.load(version)
    (found,) = server.predict(things=SOME).values()
    np.testing.assert_allclose(found, expected, atol=1e-5)
