"""Many tables whose rows are alike: deltas are written together, and mapped ones share an overlay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tensorflow as tf

from exporter.graph.graph_files import read_saved_model
from exporter.options import Isolation
from exporter.subgraph import overlay, update_signatures, write_delta
from tests.integration.isolation import play
from tests.support.mapped_models import mapped_below
from tests.support.updatable import WIDE, WIDE_ROWS, assert_holds, expected_digests, loaded, updatable_model

tf1 = tf.compat.v1

COUNT, DIM = 10, 4
ROWS = [30 + 7 * n for n in range(COUNT)]


def many(count: int = COUNT) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """A table's rows by ids of three ranks, and by what another table's rows say."""
    ids = tf1.placeholder(tf.int64, [None], name="ids")
    tables = [tf1.get_variable(f"table_{n}", [30 + 7 * n, DIM], use_resource=True) for n in range(count)]
    found = {f"rows_{n}": tf.gather(table, ids % (30 + 7 * n)) for n, table in enumerate(tables)}
    found["pairs"] = tf.gather(tables[0], tf.stack([ids % 30, 29 - ids % 30], 1))
    found["of unique"] = tf.gather(tf.gather(tables[1], tf.unique(ids % 37)[0]), tf.unique(ids % 37)[1])
    chosen = tf.cast(tf.abs(found["rows_1"][:, 0]) * 1000, tf.int64) % 44
    found["chained"] = tf.gather(tables[2], chosen)
    bias = tf1.get_variable("bias", [DIM], use_resource=True)
    return {"ids": ids}, found | {"bias": tf.tile(bias[tf.newaxis], [tf.size(ids), 1])}


def answers(values: Mapping[str, np.ndarray], ids: np.ndarray) -> dict[str, np.ndarray]:
    found = {f"rows_{n}": values[f"table_{n}"][ids % rows] for n, rows in enumerate(ROWS)}
    found["pairs"] = values["table_0"][np.stack([ids % 30, 29 - ids % 30], 1)]
    found["of unique"] = values["table_1"][ids % 37]
    chosen = (np.abs(found["rows_1"][:, 0]) * np.float32(1000)).astype(np.int64) % 44
    found["chained"] = values["table_2"][chosen]
    return found


@pytest.mark.parametrize("rows_of_a_page", [0, 1 << 22], ids=["paged", "one page"])
@pytest.mark.parametrize("isolation", [*Isolation])
def test_mapped_tables_share_an_overlay(tmp_path: Path, rows_of_a_page: int, isolation: Isolation) -> None:
    untraced = update_signatures._traced.__wrapped__
    with (
        patch.object(overlay, "MOST_ROWS_OF_A_PAGE", rows_of_a_page),
        patch.object(write_delta, "CHUNK_ROWS", 16),
        patch.object(update_signatures, "_traced", untraced),
    ):
        model = updatable_model(tmp_path, many, {"ids": [0]}, mapped=True, digest=True, isolation=isolation)
    rng = np.random.default_rng(5)
    with loaded(model) as server:
        assert len(mapped_below(tmp_path)) == COUNT
        names = [node.name for node in server.session.graph_def.node if node.op == "ResourceGather"]
        assert sum(name.endswith("/slots") for name in names) == 2, "together, and the chained one"
        for at in (100, 110, 120, 130):
            for size in (1, 7, 100):
                ids = rng.integers(0, 1000, size)
                found = server.predict(ids=ids)
                for name, rows in answers(model.at(at), ids).items():
                    np.testing.assert_array_equal(found[name], rows, err_msg=f"{name} at {at}")
            assert server.predict(ids=[])["rows_3"].shape == (0, DIM)
            chunks = expected_digests(model, at)
            digests = server.call("incremental_digest", rows=list(range(len(chunks))))
            assert digests["digest"].tolist() == chunks
            model.evolve(at, at + 10, rows=(3, 30, 60, 9)[(at - 100) // 10])
            assert server.update()["position"] == at + 10
        status = server.call("incremental_status", probe=[0])
        assert (status["mapped_tables"][0], status["tables_to_map"][0]) == (COUNT, COUNT)


def test_tables_share_the_room_of_their_overlays(tmp_path: Path) -> None:
    model = updatable_model(tmp_path, many, {"ids": [0]}, mapped=True, overlay_rows=5)
    with loaded(model) as server:
        model.publish_rows(100, 110, "table_9", np.arange(50), np.ones((50, DIM), np.float32))
        assert server.update()["position"] == 110
        assert server.call("incremental_status", probe=[0])["overlay_percent"].tolist() == [100]
        model.publish_rows(110, 120, "table_0", np.arange(1), np.ones((1, DIM), np.float32))
        found = server.update()
        assert found["position"] == 110
        assert "changes more rows of table_0 and 9 others than their overlay has room for" in found["status"]
        ids = np.arange(100)
        for name, rows in answers(model.at(110), ids).items():
            np.testing.assert_array_equal(server.predict(ids=ids)[name], rows, err_msg=name)


@pytest.mark.parametrize(
    ("isolation", "mlir"),
    [
        (Isolation.SNAPSHOT, False),
        (Isolation.ROW, False),
        pytest.param(Isolation.ROW, True, marks=pytest.mark.landing),
    ],
)
def test_tables_in_memory_are_written_together(tmp_path: Path, isolation: Isolation, mlir: bool) -> None:
    config = tf1.ConfigProto()
    config.experimental.enable_mlir_graph_optimization = mlir
    untraced = update_signatures._traced.__wrapped__
    with patch.object(write_delta, "CHUNK_ROWS", 16), patch.object(update_signatures, "_traced", untraced):
        model = updatable_model(
            tmp_path, many, {"ids": [0]}, mapped=False, digest=True, isolation=isolation, finite=True
        )
    with loaded(model, config) as server:
        for at, rows in ((100, 1), (110, 40), (120, 100)):
            model.evolve(at, at + 10, rows=rows)
            found = server.update()
            assert (found["position"], found["rows"]) == (at + 10, sum(min(rows, each) for each in ROWS))
            assert_holds(server, model, at + 10)
        model.publish_rows(130, 140, "table_7", np.arange(3), np.zeros((3, DIM), np.float32))
        assert server.update()["position"] == 140
        assert_holds(server, model, 140)
        bad = np.zeros((2, DIM), np.float32)
        bad[1, 2] = np.nan
        model.publish_rows(140, 150, "table_4", np.array([5, 9]), bad)
        assert server.update()["status"].startswith("finite: ")
        assert server.update()["status"].endswith("has NaN or infinity in table_4")
        assert_holds(server, model, 140)
        chunks = expected_digests(model, 140)
        assert server.call("incremental_digest", rows=list(range(len(chunks))))["digest"].tolist() == chunks


@pytest.mark.parametrize("mapped", [False, True])
def test_arguments_do_not_grow_with_the_number_of_tables(tmp_path: Path, mapped: bool) -> None:
    """A server prepares each node and argument of each function a dozen times while it loads a version."""
    sizes = []
    for count in (COUNT, 2 * COUNT):
        path = tmp_path / str(count)
        path.mkdir()
        model = updatable_model(path, lambda count=count: many(count), {"ids": [0]}, mapped=mapped)
        library = read_saved_model(model.version).meta_graphs[0].graph_def.library.function
        update = [f for f in library if f.signature.name.startswith("incremental_update")]
        sizes.append((sum(len(f.node_def) for f in update), sum(len(f.signature.input_arg) for f in update)))
    (nodes, arguments), (more_nodes, more_arguments) = sizes
    # Handles of mapped tables are arguments of their own: a vector would hide their uses from hot rows.
    assert more_arguments - arguments <= (COUNT if mapped else 0)
    # A node in either packed form of a delta and, in memory, a scatter. Equal constants are one.
    assert more_nodes - nodes <= (2 if mapped else 3) * COUNT + 5


def constant_in_all() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    ids = tf1.placeholder(tf.int64, [None], name="ids")
    tables = [tf1.get_variable(f"t{n}", [WIDE_ROWS, WIDE], use_resource=True) for n in range(COUNT)]
    read = tf.concat([tf.gather(table, ids) for table in tables], 1)
    return {"ids": ids}, {"low": tf.reduce_min(read, 1), "high": tf.reduce_max(read, 1)}


@pytest.mark.parametrize("mapped", [False, True])
def test_no_response_mixes_positions(tmp_path: Path, mapped: bool) -> None:
    seen = play(tmp_path, 3000, constant_in_all, mapped=mapped)
    assert seen.responses >= 3000
    assert seen.positions > 1
    assert seen.mixed == seen.unknown == 0
