"""Reads through an overlay: wherever a graph gathers, rows are those of the table or of the overlay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tensorflow as tf

from exporter.delta.format import Rows
from exporter.errors import NotServable
from exporter.graph.nodes import Body, makes_vector
from exporter.graph.overlaid_reads import PAGE_ROWS, OverlaidReads, overlay_reads
from exporter.options import Isolation
from exporter.subgraph import overlay, update_signatures, write_delta
from exporter.wire.dtypes import DType
from exporter.wire.protos import message_class
from tests.support.mapped_models import mapped_below
from tests.support.updatable import loaded, updatable_model

tf1 = tf.compat.v1
ROWS, DIM = 500, 6


@pytest.fixture(autouse=True)
def control_flow_of_the_process() -> Iterator[None]:
    """Graphs here choose their kind of loops and branches; what runs afterwards has the process's own."""
    was_v2 = tf1.control_flow_v2_enabled()
    yield
    (tf1.enable_control_flow_v2 if was_v2 else tf1.disable_control_flow_v2)()


def _table() -> Any:
    return tf1.get_variable("table", [ROWS, DIM], use_resource=True)


def _ids() -> Any:
    return tf1.placeholder(tf.int64, [None], name="ids")


def plain() -> Any:
    ids, table = _ids(), _table()
    return {"ids": ids}, {"rows": tf.gather(table, ids)}


def matrix_of_ids() -> Any:
    """Row numbers in several dimensions, and none at all."""
    ids, table = _ids(), _table()
    pairs = tf.stack([ids, ids], 1)[:, tf.newaxis]
    both = tf.gather(table, pairs)
    none = tf.gather(table, ids[:0])
    return {"ids": ids}, {"rows": both[:, 0, 1] + tf.reduce_sum(none)}


def in_function() -> Any:
    ids, table = _ids(), _table()

    @tf.function(autograph=False)
    def inner(numbers: Any) -> Any:
        return tf.gather(table, numbers)

    @tf.function(autograph=False)
    def outer(numbers: Any) -> Any:
        return inner(numbers) + 0.0 * inner(numbers[::-1])

    return {"ids": ids}, {"rows": outer(ids)}


def in_loop() -> Any:
    """A loop of functions: its body reads two rows a round, its condition one."""
    ids, table = _ids(), _table()

    def body(number: Any, rows: Any) -> Any:
        return number + 1, tf.concat([rows, tf.gather(table, ids[number : number + 1])], 0)

    def goes_on(number: Any, rows: Any) -> Any:
        return (number < tf.size(ids)) & (tf.gather(table, 0)[0] < 1e9)

    tf1.enable_control_flow_v2()
    _, rows = tf.while_loop(
        goes_on, body, [0, tf.zeros([0, DIM])], [tf.TensorShape([]), tf.TensorShape([None, DIM])]
    )
    tf1.disable_control_flow_v2()
    return {"ids": ids}, {"rows": rows}


def in_old_loop() -> Any:
    """A loop of Enter and Exit nodes."""
    ids, table = _ids(), _table()
    tf1.disable_control_flow_v2()
    _, rows = tf.while_loop(
        lambda number, _: number < tf.size(ids),
        lambda number, rows: (number + 1, tf.concat([rows, tf.gather(table, ids[number : number + 1])], 0)),
        [0, tf.zeros([0, DIM])],
        [tf.TensorShape([]), tf.TensorShape([None, DIM])],
    )
    return {"ids": ids}, {"rows": rows}


def in_branch() -> Any:
    ids, table = _ids(), _table()
    tf1.enable_control_flow_v2()
    few = tf.cond(tf.size(ids) < 3, lambda: tf.gather(table, ids), lambda: tf.gather(table, ids[::-1])[::-1])
    tf1.disable_control_flow_v2()
    return {"ids": ids}, {"rows": few}


def in_old_branch() -> Any:
    ids, table = _ids(), _table()
    tf1.disable_control_flow_v2()
    few = tf.cond(tf.size(ids) < 3, lambda: tf.gather(table, ids), lambda: tf.gather(table, ids[::-1])[::-1])
    return {"ids": ids}, {"rows": few}


@pytest.mark.landing
@pytest.mark.parametrize(
    "build",
    [plain, matrix_of_ids, in_function, in_loop, in_old_loop, in_branch, in_old_branch],
    ids=lambda build: build.__name__,
)
def test_rows_are_the_newest_wherever_they_are_read(tmp_path: Path, build: Callable[[], Any]) -> None:
    model = updatable_model(tmp_path, build, {"ids": [0]}, mapped=True)
    rng = np.random.default_rng(3)
    with loaded(model) as server:
        assert len(mapped_below(tmp_path)) == 1
        at = 100
        for ids in (np.arange(0, ROWS, 7), np.arange(0, ROWS, 5), np.arange(3)):
            values = rng.normal(size=(len(ids), DIM)).astype(np.float32)
            model.publish_rows(at, at + 10, "table", ids, values)
            at += 10
            assert server.update()["position"] == at
            for wanted in (np.arange(ROWS), np.array([0, 1, 7, 7]), np.array([35])):
                found = server.predict(ids=wanted)["rows"]
                np.testing.assert_array_equal(found, model.at(at)["table"][wanted])


@pytest.mark.parametrize(
    ("op", "said"),
    [
        ("ReadVariableOp", "ReadVariableOp 'read' takes it"),
        ("ResourceGatherNd", "ResourceGatherNd 'read' takes it"),
    ],
)
def test_other_reads_are_refused_by_name(op: str, said: str) -> None:
    graph_def = message_class("GraphDef")()
    graph_def.node.add(name="table", op="VarHandleOp")
    graph_def.node.add(name="read", op=op, input=["table"])
    table = OverlaidReads("table", DType.FLOAT, (DIM,), "changed", "slots", "overlay", "pages")
    with pytest.raises(NotServable, match=said):
        overlay_reads(graph_def, {"table": table})


def test_a_delta_without_room_is_refused_and_a_smaller_one_is_not(tmp_path: Path) -> None:
    model = updatable_model(tmp_path, plain, {"ids": [0]}, mapped=True, overlay_rows=10)
    ones = np.ones((10, DIM), np.float32)
    model.publish_rows(100, 110, "table", np.arange(10), ones)
    with loaded(model) as server:
        assert server.update()["position"] == 110
        model.publish_rows(110, 120, "table", np.arange(10), 2 * ones)  # the same rows have their places
        assert server.update()["position"] == 120
        model.publish_rows(120, 130, "table", np.arange(1, 11), 3 * ones)
        found = server.update()
        assert found["position"] == 120
        assert found["status"].startswith("overlay: ")
        assert "changes more rows of table than its overlay has room for" in found["status"]
        np.testing.assert_array_equal(server.predict(ids=np.arange(12))["rows"], model.at(120)["table"][:12])
        with pytest.raises(tf.errors.InvalidArgumentError, match="overlay: "):
            server.update(130)
        status = server.call("incremental_status", probe=[0, 1])
        assert status["overlay_percent"].tolist() == [100, 100]
        assert (status["mapped_tables"][0], status["tables_to_map"][0]) == (1, 1)


def test_a_refused_delta_is_named_on_a_base_with_overlays(tmp_path: Path) -> None:
    """Where its rows go was looked up before it was known to be refused, so that the call failed."""
    model = updatable_model(tmp_path, plain, {"ids": [0]}, mapped=True)
    ones = np.ones((3, DIM), np.float32)
    model.publish_rows(100, 110, "table", np.arange(3), ones)
    data = next(model.log.glob("*/delta.data-*"))
    good = data.read_bytes()
    with loaded(model) as server:
        data.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        assert server.update()["status"].startswith("damaged: ")
        data.write_bytes(good)
        assert server.update()["position"] == 110


@pytest.mark.parametrize("paged", [False, True])
def test_a_row_that_changes_again_goes_where_nobody_reads(
    tmp_path: Path, paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot leads to one of two places; the other one is written, and the next time the first again."""
    if paged:
        monkeypatch.setattr(overlay, "MOST_ROWS_OF_A_PAGE", 0)
    model = updatable_model(tmp_path, plain, {"ids": [0]}, mapped=True, overlay_rows=10)
    for position in range(100, 140, 10):
        rows = np.full((10, DIM), position, np.float32)
        model.publish_rows(position, position + 10, "table", np.arange(10), rows)
    with loaded(model) as server:
        handles = {
            op.name.rpartition("/")[2]: op.outputs[0]
            for op in server.session.graph.get_operations()
            if op.type == "VarHandleOp" and "/overlay/" in op.name
        }
        with server.session.graph.as_default():
            slots = tf.raw_ops.ReadVariableOp(resource=handles["slots"], dtype=tf.int32)
        seen = []
        for position in range(110, 150, 10):
            assert server.update(position)["position"] == position
            seen.append(server.session.run(slots)[PAGE_ROWS * paged :][:10].tolist())
            found = server.predict(ids=np.arange(12))["rows"]
            np.testing.assert_array_equal(found, model.at(position)["table"][:12])
    assert seen[0] == seen[2] == [*range(1, 11)]
    assert seen[1] == seen[3] == [*range(11, 21)]


def test_an_overlay_with_room_for_every_row_is_never_nearly_full(tmp_path: Path) -> None:
    model = updatable_model(tmp_path, plain, {"ids": [0]}, mapped=True, overlay_rows=1 << 20)
    rows = len(model.at(100)["table"])
    model.publish_rows(100, 110, "table", np.arange(rows), np.ones((rows, DIM), np.float32))
    with loaded(model) as server:
        assert server.update()["position"] == 110
        status = server.call("incremental_status", probe=[0])
        assert (status["mapped_tables"][0], status["tables_to_map"][0]) == (1, 1)
        assert status["overlay_percent"][0] == 0


def test_a_base_that_was_moved_is_restored_and_updated_all_the_same(tmp_path: Path) -> None:
    model = updatable_model(tmp_path, plain, {"ids": [0]}, mapped=True)
    (model.version / "variables/mapped.id").write_text("another")
    model.publish_rows(100, 110, "table", np.arange(4), np.ones((4, DIM), np.float32))
    with loaded(model) as server:
        assert not mapped_below(tmp_path)
        assert server.update()["position"] == 110
        np.testing.assert_array_equal(server.predict(ids=np.arange(8))["rows"], model.at(110)["table"][:8])
        status = server.call("incremental_status", probe=[0])
        assert (status["mapped_tables"][0], status["tables_to_map"][0]) == (0, 1)


def test_rows_of_other_tables_and_dtypes(tmp_path: Path) -> None:
    def build() -> Any:
        ids = _ids()
        half = tf1.get_variable("half", [ROWS, 2, 3], tf.bfloat16, use_resource=True)
        flags = tf1.get_variable(
            "flags", [ROWS], tf.int32, initializer=tf1.zeros_initializer(), use_resource=True
        )
        return {"ids": ids}, {
            "half": tf.cast(tf.gather(half, ids), tf.float32),
            "flags": tf.gather(flags, ids),
        }

    model = updatable_model(tmp_path, build, {"ids": [0]}, mapped=True)
    with loaded(model) as server:
        changes = {
            "half": Rows(np.arange(3), np.ones((3, 2, 3), np.float32).astype(DType.BFLOAT16.numpy)),
            "flags": Rows(np.arange(5, 7), np.array([8, 9], np.int32)),
        }
        model.publish(100, 110, changes)
        assert server.update()["rows"] == 5
        found = server.predict(ids=np.arange(8))
        np.testing.assert_array_equal(found["half"][:3], np.ones((3, 2, 3)))
        np.testing.assert_array_equal(found["half"][3:], model.values["half"][3:8].astype(np.float32))
        assert found["flags"].tolist() == [0, 0, 0, 0, 0, 8, 9, 0]


def two_handles() -> Any:
    """As of a graph that was imported twice: what is changed for one is not for the other."""
    ids, table = _ids(), _table()
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[ROWS, DIM], shared_name="table")
    other = tf.raw_ops.ResourceGather(resource=handle, indices=ids, dtype=tf.float32)
    return {"ids": ids}, {"rows": tf.gather(table, ids), "other": other}


def compiled() -> Any:
    ids, table = _ids(), _table()

    @tf.function(autograph=False, jit_compile=True)
    def inner(numbers: Any) -> Any:
        return tf.gather(table, numbers) * 1.0

    return {"ids": ids}, {"rows": inner(ids)}


@pytest.mark.landing
@pytest.mark.parametrize("build", [two_handles, compiled], ids=lambda build: build.__name__)
def test_what_an_overlay_would_not_reach_is_restored(tmp_path: Path, build: Callable[[], Any]) -> None:
    model = updatable_model(tmp_path, build, {"ids": [0]}, mapped=True)
    model.publish_rows(100, 110, "table", np.arange(4), np.ones((4, DIM), np.float32))
    with loaded(model) as server:
        assert not mapped_below(tmp_path)
        assert server.update()["position"] == 110
        for rows in server.predict(ids=np.arange(8)).values():
            if rows.ndim == 2:
                np.testing.assert_array_equal(rows, model.at(110)["table"][:8])


@pytest.mark.landing
def test_readers_beside_chunks_see_old_rows_or_new_ones(tmp_path: Path) -> None:
    """Row isolation, also with graph optimisation by MLIR, which loses control edges."""
    untraced = update_signatures._traced.__wrapped__
    with patch.object(write_delta, "CHUNK_ROWS", 64), patch.object(update_signatures, "_traced", untraced):
        model = updatable_model(
            tmp_path, plain, {"ids": [0]}, mapped=True, isolation=Isolation.ROW, snapshot_max_rows=0
        )
    config = tf1.ConfigProto()
    config.experimental.enable_mlir_graph_optimization = True
    every = np.arange(ROWS)
    old = model.values["table"]
    model.publish_rows(100, 110, "table", every, np.full((ROWS, DIM), 7, np.float32))
    with loaded(model, config) as server, ThreadPoolExecutor(3) as pool:
        server.predict(ids=every)
        stop = threading.Event()

        def read() -> int:
            count = 0
            while not stop.is_set():
                rows = server.predict(ids=every)["rows"]
                assert ((rows == old) | (rows == 7)).all()
                count += 1
            return count

        reads = [pool.submit(read) for _ in range(3)]
        assert server.update()["position"] == 110
        stop.set()
        assert sum(each.result() for each in reads)
        np.testing.assert_array_equal(server.predict(ids=every)["rows"], np.full((ROWS, DIM), 7))


def of_unique_ids() -> Any:
    """Lookups of ids without duplicates, as those of sparse features."""
    ids, table = _ids(), _table()
    own, at = tf.unique(ids)
    return {"ids": ids}, {"rows": tf.gather(tf.gather(table, tf.identity(own)), at)}


def of_partitioned_ids() -> Any:
    """What `embedding_lookup` makes of ids for a table in shards, each of which is asked for its own."""
    ids, table = _ids(), _table()
    flat = tf.reshape(ids, [-1])
    shard = tf.cast(flat % 2, tf.int32)
    parts = tf.dynamic_partition(flat // 2, shard, 2)
    places = tf.dynamic_partition(tf.range(tf.size(flat)), shard, 2)
    rows = [tf.gather(table, part * 2 + number) for number, part in enumerate(parts)]
    return {"ids": ids}, {"rows": tf.dynamic_stitch(places, rows)}


@pytest.mark.parametrize("build", [plain, of_unique_ids, of_partitioned_ids])
def test_ids_that_are_a_vector_for_certain_are_not_reshaped(tmp_path: Path, build: Any) -> None:
    """Those of a placeholder are reshaped: a client may send any shape, whatever the graph declares."""
    model = updatable_model(tmp_path, build, {"ids": [0]}, mapped=True)
    model.publish_rows(100, 110, "table", np.arange(0, ROWS, 3), np.full((167, DIM), 7, np.float32))
    with loaded(model) as server:
        names = [node.name for node in server.session.graph_def.node]
        assert any(name.endswith("/in_line") for name in names) == (build is plain)
        assert server.update()["position"] == 110
        wanted = np.array([3, 1, 3, 499, 0, 2])
        np.testing.assert_array_equal(server.predict(ids=wanted)["rows"], model.at(110)["table"][wanted])
        assert server.predict(ids=wanted[:0])["rows"].shape == (0, DIM)


@pytest.mark.parametrize(
    ("shape", "axes"), [([3], 1), ([3, 1], 0), ([1, 3], 0)], ids=["vector", "column", "row"]
)
def test_only_operations_that_make_vectors_count(shape: list[int], axes: int) -> None:
    with tf.Graph().as_default() as graph:
        ids = tf1.placeholder(tf.int64, [None], name="ids")
        tf.unique(ids)
        tf.add(tf.unique(ids)[0], tf.constant(0, tf.int64, shape, name="zeros"), name="sum")
        tf.reshape(ids, [-1, 1], name="column")
        tf.reshape(ids, [-1], name="line")
    body = Body(message_class("GraphDef").FromString(graph.as_graph_def().SerializeToString()).node)
    assert makes_vector(body, "sum", ()) == bool(axes)
    assert makes_vector(body, "line", ())
    assert makes_vector(body, "Unique", ())
    assert not any(makes_vector(body, name, ()) for name in ("ids", "column", "absent", "Unique:1"))
    sent = {"Unique_1", "line"}, {"zeros", "line/shape"}
    assert not any(makes_vector(body, name, each) for name in ("line", "sum") for each in sent)
