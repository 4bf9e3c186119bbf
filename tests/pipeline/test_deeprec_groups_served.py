"""Models with DeepRec's group lookups: exported with real checkpoints, served, updated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from exporter.options import ExportRequest, Updates, Verify
from exporter.pipeline.full import export
from exporter.pipeline.incremental import export_incremental
from exporter.wire.protos import Proto
from serving.client import ModelClient
from serving.server import ModelServer
from serving.updates import update
from tests.support.deeprec import Ev, write_full, write_increment
from tests.support.deeprec_group import ABSENT, IDS, TABLES, combined, feeds, graph_with_group
from tests.support.deeprec_rows import DIM
from tests.support.dynamic_values import Rows
from tests.support.publishing import delta_of
from tests.support.updatable import Loaded, loaded_quickly

Array = np.ndarray[Any, Any]
Tables = dict[str, Ev]
PARTS = {"user": 0, "item": 0}


def first_tables() -> Tables:
    """Of the keys that are asked for, some are there, and some come later."""
    tables = {}
    for seed, name in enumerate(TABLES):
        ev = Ev.random(200, DIM, seed=seed)
        asked = np.unique(IDS[name][0])[:2]
        tables[name] = Ev(np.concatenate([ev.keys, asked]), np.concatenate([ev.values, ev.values[:2] + 1]))
    return tables


def trained(tables: Tables) -> tuple[Tables, Tables]:
    """The tables after some steps, and what was touched: every key that is asked for, and others."""
    found, touched = {}, {}
    for seed, (name, ev) in enumerate(tables.items(), 10):
        rng = np.random.default_rng(seed)
        keys = np.unique(np.concatenate([IDS[name][0], ev.keys[:30]]))
        touched[name] = Ev(keys, rng.standard_normal((len(keys), DIM), np.float32))
        left = ~np.isin(ev.keys, keys)
        found[name] = Ev(
            np.concatenate([ev.keys[left], keys]), np.concatenate([ev.values[left], touched[name].values])
        )
    return found, touched


class Trainer:
    """Checkpoints, and increments, of the program with a group."""

    def __init__(self, directory: Path, meta_graph: Proto) -> None:
        self.directory, self.step = directory, 100
        self.meta_graph, self.tables = meta_graph, first_tables()

    def save(self) -> None:
        prefix = write_full(
            self.directory / f"model.ckpt-{self.step}", self.tables, parts=PARTS, step=self.step
        )
        Path(f"{prefix}.meta").write_bytes(self.meta_graph.SerializeToString())
        (self.directory / "checkpoint").write_text(f'model_checkpoint_path: "{prefix.name}"\n')

    def train(self) -> None:
        self.step += 10
        self.tables, touched = trained(self.tables)
        write_increment(self.directory, self.step, touched, parts=PARTS)

    def expected(self, combiner: str, given: Mapping[str, Array]) -> dict[str, Array]:
        rows = {name: Rows(ev.keys, ev.values) for name, ev in self.tables.items()}
        return {name: combined(name, rows[name], combiner, given) for name in TABLES}


def request(trainer: Trainer, given: Mapping[str, Array], **options: Any) -> ExportRequest:
    return ExportRequest(
        trainer.directory,
        trainer.directory.with_name("model"),
        inputs={name: name for name in given},
        outputs={name: f"{name}_rows" for name in TABLES},
        updates=Updates(),
        **options,
    )


def assert_close(found: Mapping[str, Any], expected: Mapping[str, Array]) -> None:
    for name in TABLES:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)


@contextmanager
def served(model: Path) -> Iterator[ModelClient]:
    """`serve-model`, and a client of it."""
    with ModelServer(model) as server:
        server.wait_available(60)
        with ModelClient(server.address, model.name) as client:
            yield client


def test_weighted_groups(tmp_path: Path) -> None:
    meta_graph = graph_with_group(combiner=b"sqrtn", ignore_weights=False)
    trainer, given = Trainer(tmp_path / "train", meta_graph), feeds(weighted=True)
    trainer.save()
    asked = request(trainer, given, verify=Verify.BYTES)
    with loaded_quickly(export(asked).published.path) as server:
        before = trainer.expected("sqrtn", given)
        assert_close(server.predict(**given), before)
        trainer.train()
        delta_of(asked)
        assert server.update()["position"] == trainer.step
        after = trainer.expected("sqrtn", given)
        assert_close(server.predict(**given), after)
        assert not np.allclose(before["user"], after["user"])


def test_groups_in_8_bits(tmp_path: Path) -> None:
    trainer, given = Trainer(tmp_path / "train", graph_with_group(ignore_weights=True)), feeds()
    trainer.save()
    asked = request(trainer, given, casts=("int8",))
    done = export(asked)
    assert len(done.variables.rounded) == len(TABLES)
    with loaded_quickly(done.published.path) as server:
        for _ in range(2):
            expected, found = trainer.expected("mean", given), server.predict(**given)
            for name in TABLES:
                np.testing.assert_allclose(found[name], expected[name], atol=0.05)
            trainer.train()
            delta_of(asked)
            server.update()


def test_a_model_server_answers_and_is_updated(tmp_path: Path) -> None:
    trainer, given = Trainer(tmp_path / "train", graph_with_group(ignore_weights=True)), feeds()
    trainer.save()
    asked = request(trainer, given)
    base = export(asked)
    with served(base.published.path.parent) as client:
        for _ in range(2):
            assert_close(client.predict(given).outputs, trainer.expected("mean", given))
            trainer.train()
            export_incremental(asked)
            assert update(client).position == trainer.step
        assert_close(client.predict(given).outputs, trainer.expected("mean", given))


def test_dense_groups_and_a_full_checkpoint_without_some_keys(tmp_path: Path) -> None:
    meta_graph = graph_with_group("GroupEmbeddingVarLookupDense", ignore_weights=True)
    trainer = Trainer(tmp_path / "train", meta_graph)
    ids = {name: np.resize(IDS[name][0], (2, 3)) for name in TABLES}
    given = {f"{name}_ids": value for name, value in ids.items()}
    trainer.save()
    asked = request(trainer, given)

    def assert_serves(server: Loaded) -> None:
        found = server.predict(**given)
        for name, ev in trainer.tables.items():
            absent = np.full((1, DIM), ABSENT[name], np.float32)
            expected = Rows(ev.keys, ev.values).read(ids[name].ravel(), absent)
            np.testing.assert_array_equal(found[name], expected.reshape(2, 3, DIM))

    with loaded_quickly(export(asked).published.path) as server:
        assert_serves(server)
        trainer.train()
        trainer.tables = {
            name: ev.at(np.isin(ev.keys, IDS[name][0][:1], invert=True))
            for name, ev in trainer.tables.items()
        }
        trainer.save()
        delta_of(asked)
        server.update()
        assert_serves(server)


def test_groups_of_ordinary_variables_send_rows(tmp_path: Path) -> None:
    meta_graph = graph_with_group("GroupVariableLookup", ignore_weights=True)
    trainer, given = Trainer(tmp_path / "train", meta_graph), feeds()
    given["user_ids"], given["item_ids"] = np.array([7, 7, 1, 0, 2, 3]), np.array([0, 4, 5])
    values = {name: np.random.default_rng(1).standard_normal((8, DIM), np.float32) for name in TABLES}

    def save() -> None:
        dense = {f"{name}_table": value for name, value in values.items()}
        prefix = write_full(
            trainer.directory / f"model.ckpt-{trainer.step}", {}, dense=dense, step=trainer.step
        )
        Path(f"{prefix}.meta").write_bytes(meta_graph.SerializeToString())
        (trainer.directory / "checkpoint").write_text(f'model_checkpoint_path: "{prefix.name}"\n')

    def expected() -> dict[str, Array]:
        found = {}
        for name in TABLES:
            owners, read = IDS[name][1], values[name][given[f"{name}_ids"]]
            means = [read[owners == row].mean(0) if (owners == row).any() else [0] * DIM for row in range(5)]
            found[name] = np.array(means)
        return found

    save()
    asked = request(trainer, given)
    with loaded_quickly(export(asked).published.path) as server:
        assert_close(server.predict(**given), expected())
        values["user"] = values["user"].copy()
        values["user"][[0, 7]] += 1
        trainer.step += 10
        save()
        export_incremental(asked)
        assert server.update()["rows"] == 2
        assert_close(server.predict(**given), expected())


def test_requests_without_ids(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "train", graph_with_group(ignore_weights=True))
    trainer.save()
    given = feeds()
    for name in TABLES:
        given |= {f"{name}_ids": np.empty(0, np.int64), f"{name}_indices": np.empty((0, 2), np.int64)}
    with loaded_quickly(export(request(trainer, given)).published.path) as server:
        assert {found.shape for found in server.predict(**given).values()} == {(5, DIM)}
        assert not any(found.any() for found in server.predict(**given).values())
        given |= {f"{name}_shape": np.array([0, 4]) for name in TABLES}
        assert {found.shape for found in server.predict(**given).values()} == {(0, DIM)}
