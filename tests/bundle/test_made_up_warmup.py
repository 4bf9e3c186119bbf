"""Made-up warm-up requests: only where they cannot fail, and what a base does with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import exporter.bundle.made_up_requests as made_up
from exporter import ExportRequest, export
from exporter.bundle.made_up_requests import made_up_requests
from exporter.bundle.warmup import MAX_RECORDS
from exporter.errors import UsageError
from exporter.options import Updates
from exporter.storage.layout import WARMUP_FILE
from exporter.wire import protos
from tests.support.trained import inference_graph, train
from tests.support.updatable import loaded, two_tables_and_dense, updatable_model

tf1 = tf.compat.v1

Tensors = Mapping[str, Any]


def signatures_of(build: Callable[[], tuple[Tensors, Tensors]]) -> list[str]:
    return [request.signature for request in made_up_requests(inference_graph(build))]


def variable(name: str, shape: list[int], dtype: Any = tf.float32) -> Any:
    return tf1.get_variable(name, shape, dtype, initializer=tf1.zeros_initializer(), use_resource=True)


def test_tables_and_a_dense_variable_get_zeros() -> None:
    (request,) = made_up_requests(inference_graph(two_tables_and_dense))
    assert request.signature == "serving_default"
    assert {name: (array.tolist(), array.dtype.name) for name, array in request.inputs.items()} == {
        "user": ([0], "int64"),
        "item": ([0], "int64"),
    }


def test_hashed_features_of_an_empty_example() -> None:
    """The look-ups of feature columns: sparse, hashed, a default for what is missing."""

    def build() -> tuple[Tensors, Tensors]:
        examples = tf1.placeholder(tf.string, [None], name="examples")
        parsed = tf.io.parse_example(examples, {"word": tf.io.VarLenFeature(tf.string)})
        ids = tf.strings.to_hash_bucket_fast(parsed["word"].values, 1_000_000)
        sparse = tf.SparseTensor(parsed["word"].indices, ids, parsed["word"].dense_shape)
        rows = tf1.nn.safe_embedding_lookup_sparse([variable("words", [1_000_000, 4])], sparse)
        return {"examples": examples}, {"score": tf.matmul(rows, variable("kernel", [4, 1]))}

    assert signatures_of(build) == ["serving_default"]


def needs_a_feature() -> tuple[Tensors, Tensors]:
    examples = tf1.placeholder(tf.string, [None], name="examples")
    parsed = tf.io.parse_example(examples, {"age": tf.io.FixedLenFeature([], tf.float32)})
    return {"examples": examples}, {"score": parsed["age"] * variable("scale", [])}


def asserts_that_ids_are_positive() -> tuple[Tensors, Tensors]:
    ids = tf1.placeholder(tf.int64, [None], name="ids")
    with tf.control_dependencies([tf1.assert_positive(ids)]):
        return {"ids": ids}, {"row": tf.gather(variable("table", [9, 2]), ids)}


def asserts_something_of_a_value() -> tuple[Tensors, Tensors]:
    """It holds for zeros; whether it holds for what was trained, nobody knows."""
    ids = tf1.placeholder(tf.int64, [None], name="ids")
    row = tf.gather(variable("table", [9, 2]), ids)
    with tf.control_dependencies([tf1.assert_less(row, 1.0)]):
        return {"ids": ids}, {"row": tf.identity(row)}


def looks_up_what_was_looked_up() -> tuple[Tensors, Tensors]:
    ids = tf1.placeholder(tf.int64, [None], name="ids")
    parent = tf.gather(variable("parents", [9], tf.int64), ids)
    return {"ids": ids}, {"row": tf.gather(variable("table", [9, 2]), parent)}


def looks_up_beyond_the_table() -> tuple[Tensors, Tensors]:
    ids = tf1.placeholder(tf.int64, [None], name="ids")
    return {"ids": ids}, {"row": tf.gather(variable("table", [9, 2]), ids - 1)}


def divides_by_the_input() -> tuple[Tensors, Tensors]:
    count = tf1.placeholder(tf.int64, [None], name="count")
    return {"count": count}, {"row": tf.gather(variable("table", [9, 2]), 8 // count)}


def pairs_up_rows() -> tuple[Tensors, Tensors]:
    """No batch of one can be reshaped so."""
    x = tf1.placeholder(tf.float32, [None, 3], name="x")
    return {"x": x}, {"score": tf.reshape(x * variable("scale", []), [-1, 2, 3])}


def checks_numerics() -> tuple[Tensors, Tensors]:
    x = tf1.placeholder(tf.float32, [None], name="x")
    return {"x": x}, {"score": tf.debugging.check_numerics(x * variable("scale", []), "bad")}


def reads_a_file() -> tuple[Tensors, Tensors]:
    x = tf1.placeholder(tf.float32, [None], name="x")
    size = tf.strings.length(tf.io.read_file(__file__))
    return {"x": x}, {"score": x * variable("scale", []) + tf.cast(size, tf.float32)}


def runs_python() -> tuple[Tensors, Tensors]:
    x = tf1.placeholder(tf.float32, [None], name="x")

    def never(_: Any) -> Any:
        raise AssertionError("a graph's Python was run")

    return {"x": x}, {"score": tf1.py_func(never, [x], tf.float32) * variable("scale", [])}


@pytest.mark.parametrize(
    "build",
    [
        needs_a_feature,
        asserts_that_ids_are_positive,
        asserts_something_of_a_value,
        looks_up_what_was_looked_up,
        looks_up_beyond_the_table,
        divides_by_the_input,
        pairs_up_rows,
        checks_numerics,
        reads_a_file,
        runs_python,
    ],
)
def test_what_may_fail_gets_none(build: Callable[[], tuple[Tensors, Tensors]]) -> None:
    assert signatures_of(build) == []


def test_functions_are_looked_into() -> None:
    def build() -> tuple[Tensors, Tensors]:
        ids = tf1.placeholder(tf.int64, [None], name="ids")
        table = variable("table", [1_000_000, 4])
        layer = tf.function(lambda rows: tf.nn.relu(rows), autograph=False)
        return {"ids": ids}, {"score": layer(tf.gather(table, ids))}

    def bad() -> tuple[Tensors, Tensors]:
        ids = tf1.placeholder(tf.int64, [None], name="ids")
        table = variable("table", [1_000_000, 4])
        layer = tf.function(lambda rows: tf.debugging.check_numerics(rows, "bad"), autograph=False)
        return {"ids": ids}, {"score": layer(tf.gather(table, ids))}

    assert signatures_of(build) == ["serving_default"]
    assert signatures_of(bad) == []


def test_a_table_of_a_function_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SavedModel's functions take handles as arguments."""

    def build() -> tuple[Tensors, Tensors]:
        ids = tf1.placeholder(tf.int64, [None], name="ids")
        table = variable("table", [1_000_000, 4])
        return {"ids": ids}, {"rows": tf.function(lambda: tf.gather(table, ids), autograph=False)()}

    monkeypatch.setattr(made_up, "_MAX_TRIAL_BYTES", 1024)
    assert signatures_of(build) == ["serving_default"]


def test_a_variable_that_is_not_read() -> None:
    """As where operations that only have effects were taken out of a signature."""

    def build() -> tuple[Tensors, Tensors]:
        x = tf1.placeholder(tf.float32, [None], name="x")
        with tf.control_dependencies([variable("unread", []).handle.op]):
            return {"x": x}, {"score": tf.identity(x)}

    assert signatures_of(build) == ["serving_default"]


def index_of_rows(ids: Any, rows: int) -> Any:
    """Numbers that depend on values, from 0 up to 7 more than `ids`."""
    few = tf.bitwise.bitwise_and(tf.gather(variable("few", [rows], tf.int64), ids), 7)
    return ids + few


@pytest.mark.parametrize(("rows", "expected"), [(8, ["serving_default"]), (7, [])])
def test_a_masked_value_may_be_a_row_number(rows: int, expected: list[str]) -> None:
    def build() -> tuple[Tensors, Tensors]:
        ids = tf1.placeholder(tf.int64, [None], name="ids")
        return {"ids": ids}, {"row": tf.gather(variable("table", [rows, 2]), index_of_rows(ids, rows))}

    assert signatures_of(build) == expected


@pytest.mark.parametrize(("count", "expected"), [(1, ["serving_default"]), (2, [])])
def test_shapes_that_depend_on_values(count: int, expected: list[str]) -> None:
    """One number is unique whatever it is; of two numbers nobody knows."""

    def build() -> tuple[Tensors, Tensors]:
        ids = tf1.placeholder(tf.int64, [count], name="ids")
        unique, _ = tf.unique(tf.gather(variable("parents", [9], tf.int64), ids))
        return {"ids": ids}, {"unique": tf.reshape(unique, [1])}

    assert signatures_of(build) == expected


def logs(version: Path) -> list[tuple[str, dict[str, list[Any]]]]:
    records = tf.data.TFRecordDataset(str(version / WARMUP_FILE)).as_numpy_iterator()
    requests = [
        protos.message_class("serving.PredictionLog").FromString(r).predict_log.request for r in records
    ]
    return [
        (
            r.model_spec.signature_name,
            {k: list(t.int64_val) or len(t.tensor_content) for k, t in r.inputs.items()},
        )
        for r in requests
    ]


FIRST = ("incremental_update", "incremental_status")

BUILDER = """
import tensorflow as tf
def serving():
    ids = tf.compat.v1.placeholder(tf.int64, [None], name="ids")
    table = tf.compat.v1.get_variable("table", [9, 2], use_resource=True)
    return {"ids": ids}, {"row": tf.gather(table, ids)}
"""


@pytest.fixture
def request_(tmp_path: Path) -> ExportRequest:
    def build() -> tuple[Tensors, Tensors]:
        ids = tf1.placeholder(tf.int64, [None], name="ids")
        return {"ids": ids}, {"row": tf.gather(variable("table", [9, 2]), ids)}

    train(build, {"ids": [0]}, tmp_path / "train" / "model.ckpt-7")
    (tmp_path / "model.py").write_text(BUILDER)
    model = f"{tmp_path / 'model.py'}:serving"
    return ExportRequest(tmp_path / "train", tmp_path / "served", model=model, updates=Updates())


def exported(request: ExportRequest, **changes: Any) -> list[str]:
    from msgspec.structs import replace

    return [name for name, _ in logs(export(replace(request, **changes)).published.path)]


def test_a_base_catches_up_before_and_after_its_warm_up(request_: ExportRequest) -> None:
    assert exported(request_) == [*FIRST, "serving_default", "incremental_update"]


def test_requests_of_the_users_own_replace_made_up_ones(request_: ExportRequest, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"inputs": [3]}\n{"inputs": [4, 5]}\n')
    expected = [*FIRST, "serving_default", "serving_default", "incremental_update"]
    assert exported(request_, warmup=own) == expected


def test_without_warm_up_a_base_still_catches_up(request_: ExportRequest) -> None:
    assert exported(request_, no_warmup=True) == [*FIRST, "incremental_update"]


def test_the_catch_up_counts_among_the_records(request_: ExportRequest, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"inputs": [3]}\n' * (MAX_RECORDS - 1))
    with pytest.raises(UsageError, match=f"has room for {MAX_RECORDS - 3}"):
        exported(request_, warmup=own)
    own.write_text('{"inputs": [3]}\n' * (MAX_RECORDS - 3))
    assert len(exported(request_, warmup=own)) == MAX_RECORDS


@pytest.mark.landing
@pytest.mark.parametrize("warmed", [True, False])
def test_the_first_call_prepares_the_second_try_where_it_is_a_record(tmp_path: Path, *, warmed: bool) -> None:
    signatures = frozenset({"serving_default"}) if warmed else frozenset()
    model = updatable_model(tmp_path, warmed=signatures)
    with loaded(model) as server:
        expected = model.values["users"][[3]]
        clean = server.session.graph.get_tensor_by_name("incremental/serving_default/clean:0")
        feeds = {server.signatures["serving_default"].inputs[name].name: [3] for name in ("user", "item")}
        rows = server.signatures["serving_default"].outputs["user_rows"].name
        found, was_clean = server.session.run([rows, clean], feeds)
        np.testing.assert_array_equal(found, expected)
        assert bool(was_clean) is not warmed
        found, was_clean = server.session.run([rows, clean], feeds)
        np.testing.assert_array_equal(found, expected)
        assert was_clean
