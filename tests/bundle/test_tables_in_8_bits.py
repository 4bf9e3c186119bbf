"""Tables in 8 bits: answers of the real loaders against numpy, and what is left as it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.bundle.saved_model_writer import write_saved_model
from exporter.bundle.tables_in_8_bits import choose_for_8_bits
from exporter.bundle.variables import VariablesReport, write_variables
from exporter.checkpoint.tensor_bundle import BundleWriter, read_array, read_catalog
from exporter.errors import MappingError, NotFinite
from exporter.graph.inference_graph import PartitionStrategy
from exporter.jobs.runner import Runner
from exporter.mapping.build import VariableMapping, build_mapping
from exporter.mapping.mapping_rules import CastRule, MappingRules
from exporter.wire.int8_codes import LARGEST_SCALE, beside_codes, to_codes, values_of
from tests.support.trained import (
    Builder,
    Tensors,
    answers_eagerly,
    answers_in_session,
    assert_same,
    inference_graph,
)

tf1 = tf.compat.v1
ROWS, DIM = 50, 12
IDS = np.array([0, 49, 3, 17, 3, 16], np.int64)


def rounded(rows: Any) -> Any:
    """What a table in 8 bits holds of rows."""
    codes, scales, _ = to_codes(np.asarray(rows))
    return values_of(beside_codes(codes, scales))


def table_of(seed: int = 0, dtype: Any = np.float32) -> Any:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(ROWS, DIM)) * rng.uniform(1e-3, 1e3, (ROWS, 1))).astype(dtype)


def save(prefix: Path, **tensors: Any) -> Path:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with BundleWriter(prefix) as writer:
        for name, value in tensors.items():
            writer.add(name, value)
    return prefix


def export(
    directory: Path,
    build: Builder,
    prefix: Path,
    rules: MappingRules | None = None,
    served: PartitionStrategy = PartitionStrategy.DIV,
    **options: Any,
) -> tuple[VariablesReport, VariableMapping]:
    rules = rules or MappingRules(casts=(CastRule.parse("int8"),))
    graph = inference_graph(build, lookups={"table": served})
    chosen = choose_for_8_bits(graph, build_mapping(graph, read_catalog(prefix), rules))
    directory.mkdir(parents=True)
    report = write_variables(chosen.mapping, directory, **options)
    write_saved_model(chosen.graph, chosen.mapping, directory)
    return report, chosen.mapping


def lookup(parts: int = 0, strategy: str = "div", dtype: Any = tf.float32) -> Builder:
    def build() -> tuple[Tensors, Tensors]:
        ids = tf1.placeholder(tf.int64, [None], name="ids")
        partitioner = tf1.fixed_size_partitioner(parts) if parts else None
        table = tf1.get_variable("table", [ROWS, DIM], dtype, partitioner=partitioner, use_resource=True)
        kernel = tf1.get_variable("kernel", [DIM, 3], dtype, use_resource=True)
        rows = tf1.nn.embedding_lookup(table, ids, partition_strategy=strategy)
        return {"ids": ids}, {"rows": rows, "scores": tf.matmul(rows, kernel)}

    return build


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("parts", "strategy"), [(0, "div"), (3, "div"), (3, "mod")])
def test_answers_are_those_of_rounded_rows(tmp_path: Path, parts: int, strategy: str, dtype: Any) -> None:
    """Read whole, by parts and by turns; a float64 table is multiplied in float32."""
    table, kernel = table_of(dtype=dtype), np.ones((DIM, 3), dtype)
    prefix = save(tmp_path / "model.ckpt", table=table, kernel=kernel)
    # The checkpoint has the table whole, in the order of `div`: for `mod` its rows are laid out in turns.
    rules = MappingRules(trained={"table": PartitionStrategy.DIV}, casts=(CastRule.parse("int8"),))
    small = Runner(task_bytes=256)
    graph = lookup(parts, strategy, tf.as_dtype(dtype))
    report, mapping = export(tmp_path / "1", graph, prefix, rules, PartitionStrategy(strategy), runner=small)
    stored = report.catalog.tensors["table"]
    assert (stored.dtype.label, stored.shape) == ("int8", (ROWS, DIM + 4))
    assert report.catalog.tensors["kernel"].dtype.numpy == dtype
    assert any("kernel (read whole by" in note for note in mapping.notes)
    expected = rounded(table).astype(dtype)
    for answers in (answers_in_session, answers_eagerly):
        found = answers(tmp_path / "1", {"ids": IDS})
        np.testing.assert_array_equal(found["rows"], expected[IDS], strict=True)
        np.testing.assert_allclose(found["scores"], expected[IDS] @ kernel, rtol=1e-5)
    differences = np.abs(rounded(table) - table)
    assert report.rounded["table"].largest == differences.max()
    assert report.rounded["table"].mean == pytest.approx(differences.mean())


def test_zeros_stay_zeros_and_every_other_value_is_near(tmp_path: Path) -> None:
    table = table_of()
    table[3], table[17, 5], table[49] = 0, 0, 1e-42  # a row of zeros, a zero, a row of subnormals
    prefix = save(tmp_path / "model.ckpt", table=table, kernel=np.ones((DIM, 3), np.float32))
    export(tmp_path / "1", lookup(), prefix)
    rows = answers_in_session(tmp_path / "1", {"ids": np.arange(ROWS)})["rows"]
    assert not rows[3].any()
    assert not rows[49].any()
    assert rows[17, 5] == 0
    largest = np.abs(table).max(axis=1, keepdims=True)
    assert (np.abs(rows - table) <= largest / 127 / 2 * (1 + 2**-15) + 1e-37).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 127.0 * LARGEST_SCALE * 1.01])
def test_values_without_a_scale_are_refused_by_name(tmp_path: Path, value: float) -> None:
    table = table_of(dtype=np.float64)
    table[7, 2] = value
    prefix = save(tmp_path / "model.ckpt", table=table, kernel=np.ones((DIM, 3)))
    with pytest.raises(NotFinite, match=re.escape(f"cannot be stored in 8 bits: it holds {value:g}")):
        export(tmp_path / "1", lookup(dtype=tf.float64), prefix)


def test_gathers_in_functions_and_loops(tmp_path: Path) -> None:
    def build() -> tuple[Tensors, Tensors]:
        ids = tf1.placeholder(tf.int64, [None], name="ids")
        table = tf1.get_variable("table", [ROWS, DIM], use_resource=True)

        @tf.function(autograph=False)
        def look(handle: Any, at: Any) -> Any:
            rows = tf.raw_ops.ResourceGather(resource=handle, indices=at, dtype=tf.float32)
            size = tf.raw_ops.VariableShape(input=handle, out_type=tf.int64)
            return rows, tf.zeros_like(at) + size[1]

        rows, size = look(table.handle, ids)

        def more(count: Any, total: Any) -> Any:
            found = tf.raw_ops.ResourceGather(resource=table.handle, indices=ids, dtype=tf.float32)
            shape = tf.raw_ops.VariableShape(input=table.handle, out_type=tf.int32)
            return count + 1, total + found * tf.cast(shape[1], tf.float32)

        tf1.disable_control_flow_v2()
        try:
            _, total = tf1.while_loop(lambda count, _: count < 2, more, [0, tf.zeros_like(rows)])
        finally:
            tf1.enable_control_flow_v2()
        return {"ids": ids}, {"rows": rows, "size": size, "total": total}

    table = table_of()
    export(tmp_path / "1", build, save(tmp_path / "model.ckpt", table=table))
    expected = rounded(table)[IDS]
    for answers in (answers_in_session, answers_eagerly):
        found = answers(tmp_path / "1", {"ids": IDS})
        np.testing.assert_array_equal(found["rows"], expected)
        np.testing.assert_array_equal(found["size"], np.full(len(IDS), DIM))
        np.testing.assert_allclose(found["total"], 2 * DIM * expected, rtol=1e-6)


def test_a_request_without_ids(tmp_path: Path) -> None:
    table = table_of()
    export(
        tmp_path / "1", lookup(), save(tmp_path / "model.ckpt", table=table, kernel=np.ones((DIM, 3), "f4"))
    )
    found = answers_in_session(tmp_path / "1", {"ids": np.zeros(0, np.int64)})
    assert found["rows"].shape == (0, DIM)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((ROWS,), "it has 1 dimensions"),
        ((ROWS, 2, 2), "it has 3 dimensions"),
        ((ROWS, 1), "would not shrink"),
    ],
)
def test_what_is_no_table_is_left_by_name(tmp_path: Path, shape: tuple[int, ...], why: str) -> None:
    def build() -> tuple[Tensors, Tensors]:
        ids = tf1.placeholder(tf.int64, [None], name="ids")
        return {"ids": ids}, {"rows": tf.gather(tf1.get_variable("table", shape, use_resource=True), ids)}

    values = np.ones(shape, np.float32)
    report, mapping = export(tmp_path / "1", build, save(tmp_path / "model.ckpt", table=values))
    (note,) = (note for note in mapping.notes if "int8" in note)
    assert note.startswith("--cast int8 leaves as they are: table (")
    assert why in note
    assert_same(answers_in_session(tmp_path / "1", {"ids": IDS}), {"rows": values[IDS]})
    assert not report.rounded


def test_what_is_gathered_by_several_indices_is_an_error_by_name(tmp_path: Path) -> None:
    def build() -> tuple[Tensors, Tensors]:
        ids = tf1.placeholder(tf.int64, [None, 2], name="ids")
        table = tf1.get_variable("table", [ROWS, DIM], use_resource=True)
        return {"ids": ids}, {"values": tf.gather_nd(table, ids)}

    with pytest.raises(MappingError, match=r"'table' cannot be cast to int8: node .* takes its handle"):
        export(tmp_path / "1", build, save(tmp_path / "model.ckpt", table=table_of()))


def test_a_stored_row_is_codes_and_a_scale(tmp_path: Path) -> None:
    """What another reader of the file has to know."""
    prefix = save(tmp_path / "model.ckpt", table=table_of(), kernel=np.ones((DIM, 3), np.float32))
    report, _ = export(tmp_path / "1", lookup(), prefix)
    stored = read_array(report.catalog, report.catalog.tensors["table"])
    scale = stored[:, DIM:].copy().view("<f4")
    np.testing.assert_array_equal(stored[:, :DIM] * scale, rounded(table_of()))
