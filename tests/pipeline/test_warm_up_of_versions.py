"""The warm-up file of every kind of version: its records, and that no first call of a client prepares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import exporter.bundle.mapped_tables as mapped_tables
import serving.manager
from exporter.delta.chunk_digest import CHUNK_ROWS, cheapest_chunk
from exporter.delta.format import ChangeKind, Schema, ServedVariable
from exporter.options import ExportRequest, Isolation, Updates
from exporter.pipeline.full import export
from exporter.publish.delta_log import read_log
from exporter.storage.layout import WARMUP_FILE
from exporter.subgraph.make_updatable import DIGEST_SIGNATURE, first_requests
from exporter.tables import DynamicTable
from exporter.wire.dtypes import DType
from exporter.wire.protos import message_class
from exporter.wire.tfrecord import read_records
from serving.agent.audit import audit
from serving.agent.rollout import Audit
from serving.client import ModelClient
from serving.loader import LoadedModel, load
from serving.server import ModelServer
from serving.updates import read_incremental_status, update
from tests.support.deeprec_logs import DIM, DeepRecTrainer
from tests.support.mapped_models import ROWS, MappedModel

tf1 = tf.compat.v1

UPDATE, STATUS, DIGEST, PREDICT = (
    "incremental_update",
    "incremental_status",
    "incremental_digest",
    "serving_default",
)
ALL = Updates(stamp=True, digest=True)
OWN = [{"inputs": {"ids": [3]}}, {"inputs": {"ids": [4, 5]}}]


def played(version: Path) -> list[str]:
    """The signatures of the records, in their order."""
    path = version / WARMUP_FILE
    if not path.exists():
        return []
    with path.open("rb") as file:
        logs = [message_class("serving.PredictionLog").FromString(record) for record in read_records(file)]
    return [log.predict_log.request.model_spec.signature_name for log in logs]


def assert_played(version: Path, *expected: str) -> None:
    """These are the records, and a server that plays them answers each."""
    assert played(version) == [*expected]
    model = load(version)
    try:
        assert serving.manager.warm_up(model, version) == len(expected)
    finally:
        model.close()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MappedModel:
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", ROWS)
    return MappedModel(tmp_path)


@pytest.mark.landing
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"updates": Updates(), "map_tables": False}, [UPDATE, STATUS, PREDICT, UPDATE]),
        ({"updates": Updates()}, [UPDATE, STATUS, PREDICT, UPDATE]),
        ({"updates": ALL, "map_tables": False}, [UPDATE, STATUS, DIGEST, PREDICT, UPDATE]),
        ({"updates": ALL}, [UPDATE, STATUS, DIGEST, PREDICT, UPDATE]),
        (
            {"updates": Updates(isolation=Isolation.ROW), "map_tables": False},
            [UPDATE, STATUS, PREDICT, UPDATE],
        ),
        (
            {"updates": Updates(), "casts": ("emb=int8",), "map_tables": False},
            [UPDATE, STATUS, PREDICT, UPDATE],
        ),
        ({"updates": ALL, "casts": ("emb=int8",)}, [UPDATE, STATUS, DIGEST, PREDICT, UPDATE]),
        ({"updates": ALL, "casts": ("emb=bfloat16",)}, [UPDATE, STATUS, DIGEST, PREDICT, UPDATE]),
        ({"updates": ALL, "no_warmup": True}, [UPDATE, STATUS, DIGEST, UPDATE]),
        ({"updates": ALL, "warmup": OWN}, [UPDATE, STATUS, DIGEST, PREDICT, PREDICT, UPDATE]),
        ({"map_tables": False}, []),
        ({"map_tables": False, "warmup": OWN}, [PREDICT, PREDICT]),
        ({}, [PREDICT]),
        ({"casts": ("emb=int8",)}, [PREDICT]),
        ({"warmup": OWN}, [PREDICT, PREDICT]),
        ({"no_warmup": True}, []),
    ],
    ids=str,
)
def test_records(model: MappedModel, options: dict[str, Any], expected: list[str]) -> None:
    if requests := options.get("warmup"):
        import json

        file = model.directory / "requests"
        file.write_text("".join(json.dumps(request) + "\n" for request in requests))
        options = {**options, "warmup": file}
    assert_played(export(model.request(**options)).published.path, *expected)


def test_each_signature_is_played_once(tmp_path: Path) -> None:
    class Two(tf.Module):
        def __init__(self) -> None:
            self.emb = tf.Variable(np.ones((9, 2), np.float32), name="emb")

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "ids")])
        def rows(self, ids: Any) -> Mapping[str, Any]:
            return {"rows": tf.gather(self.emb, ids)}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "ids")])
        def totals(self, ids: Any) -> Mapping[str, Any]:
            return {"totals": tf.reduce_sum(tf.gather(self.emb, ids), 1)}

    two = Two()
    signatures = {"rows": two.rows, "totals": two.totals}
    tf.saved_model.save(two, str(tmp_path / "trained"), signatures=signatures)
    done = export(ExportRequest(tmp_path / "trained", tmp_path / "model", updates=Updates()))
    assert_played(done.published.path, UPDATE, STATUS, "rows", "totals", UPDATE)


@pytest.mark.landing
@pytest.mark.parametrize("casts", [(), ("int8",)])
def test_a_model_of_keras(tmp_path: Path, casts: tuple[str, ...]) -> None:
    """Its signatures call functions that call functions, which take the tables' handles."""
    keras = tf.keras
    user, tags = (keras.Input((size,), dtype="int64", name=name) for size, name in ((1, "user"), (3, "tags")))
    users = keras.layers.Flatten()(keras.layers.Embedding(1000, 8)(user))
    tagged = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(50, 8)(tags))
    hidden = keras.layers.Dense(4, activation="relu")(keras.layers.Concatenate()([users, tagged]))
    score = keras.layers.Dense(1, activation="sigmoid")(keras.layers.BatchNormalization()(hidden))
    keras.Model([user, tags], score).export(str(tmp_path / "trained"))
    asked = ExportRequest(tmp_path / "trained", tmp_path / "model", casts=casts, updates=Updates())
    assert_played(export(asked).published.path, UPDATE, STATUS, "serve", PREDICT, UPDATE)


def dense_ids() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    ids = tf1.placeholder(tf.int64, [None], name="ids")
    defaults = np.arange(2 * DIM, dtype=np.float32).reshape(2, DIM)
    return {"ids": ids}, {"rows": DynamicTable("emb/user", DIM, "float32", defaults).lookup(ids)}


def ids_of_examples() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    examples = tf1.placeholder(tf.string, [None], name="examples")
    parsed = tf.io.parse_example(examples, {"ids": tf.io.VarLenFeature(tf.int64)})
    rows = DynamicTable("emb/user", DIM).lookup_sparse(parsed["ids"], combiner="mean")
    return {"examples": examples}, {"rows": rows}


@pytest.mark.landing
@pytest.mark.parametrize("build", [dense_ids, ids_of_examples])
@pytest.mark.parametrize(
    "options",
    [{"map_tables": False}, {}, {"map_tables": False, "casts": ("int8",)}, {"casts": ("int8",)}],
    ids=str,
)
def test_tables_by_keys(
    tmp_path: Path,
    build: Callable[[], Any],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", 1)
    trainer = DeepRecTrainer(tmp_path / "train", has_codes=True)
    trainer.upsert("emb/user", range(300))
    trainer.save()
    given = {"model": build, "map_tables": True, "updates": ALL, **options}
    done = export(ExportRequest(trainer.directory, tmp_path / "model", **given))
    assert_played(done.published.path, UPDATE, STATUS, DIGEST, PREDICT, UPDATE)


def test_an_index_leads_into_its_own_table_alone(tmp_path: Path) -> None:
    def build() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        ids = tf1.placeholder(tf.int64, [None], name="ids")
        users, items = (DynamicTable(name, DIM) for name in ("emb/user", "item"))
        crossed = tf.gather(items.values, users.rows(ids))
        return {"ids": ids}, {"crossed": crossed, "users": users.lookup(ids), "items": items.lookup(ids)}

    trainer = DeepRecTrainer(tmp_path / "train")
    for name in trainer.names:
        trainer.upsert(name, range(300))
    trainer.save()
    done = export(ExportRequest(trainer.directory, tmp_path / "model", model=build, updates=Updates()))
    assert_played(done.published.path, UPDATE, STATUS, UPDATE)


def test_the_digest_asked_for_is_cheap() -> None:
    kept = [
        ServedVariable("large", DType.FLOAT, (9 * CHUNK_ROWS, 64), ChangeKind.TABLE),
        ServedVariable("matrix", DType.FLOAT, (64, 32), ChangeKind.DENSE),
        ServedVariable("zero_rows", DType.FLOAT, (0, 32), ChangeKind.TABLE),
    ]
    assert cheapest_chunk(Schema.of(kept)) == 9
    assert cheapest_chunk(Schema.of(kept[2:])) is None
    for schema, count in ((Schema.of(kept), 3), (Schema.of(kept[2:]), 2)):
        assert len(first_requests(schema, {DIGEST_SIGNATURE: None})) == count, "it would fail"


class Prepared(LoadedModel):
    """A version that notes what a session prepares: once for each set of feeds and fetches.

    Source: tensorflow/core/common_runtime/direct_session.cc, `GetOrCreateExecutors`.
    """

    def __init__(self, model: LoadedModel) -> None:
        super().__init__(model._session, model.signatures, model._lock)
        self.sets: list[tuple[frozenset[str], frozenset[str]]] = []

    def run(
        self, feeds: Mapping[str, Any], fetches: Sequence[str], timeout_ms: int | None = None
    ) -> list[Any]:
        key = frozenset(feeds), frozenset(fetches)
        if key not in self.sets:
            self.sets.append(key)
        return super().run(feeds, fetches, timeout_ms)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Prepared]]:
    """The versions that servers in this process load."""
    found: list[Prepared] = []

    def load_and_note(*arguments: Any) -> LoadedModel:
        found.append(Prepared(load(*arguments)))
        return found[-1]

    monkeypatch.setattr(serving.manager, "load", load_and_note)
    yield found


@pytest.mark.parametrize("maps", [False, True])
def test_what_clients_ask_first_is_prepared(model: MappedModel, prepared: list[Prepared], maps: bool) -> None:
    export(model.request(updates=ALL, map_tables=maps))
    with ModelServer(model.out) as server:
        server.wait_available(60)
        (version,) = prepared
        before = list(version.sets)
        assert len(before) == 4
        with ModelClient(server.address, model.out.name) as client:
            status = read_incremental_status(client, 7)
            assert status is not None and status.position == 7
            assert update(client).position == 7
            log = read_log(model.out)
            audited = audit(client, model.out, Audit(version=7, position=7, lineage=log.lineage), 9)
            assert (audited.chunks, audited.differing, audited.skipped) == (9, (), "")
            client.predict({"ids": np.array([3, 4])})
        assert b'export_model_server_position{model_name="served",version="7"} 7.0' in server._metrics.text()
        assert version.sets == before
