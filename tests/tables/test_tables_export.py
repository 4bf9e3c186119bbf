"""Export checkpoints with dynamic tables for builders that use `exporter.tables`; answers are exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.delta.format import ChangeKind
from exporter.errors import UsageError, VerificationError
from exporter.options import DataMode, ExportRequest, Updates, Verify
from exporter.pipeline.full import Exported, export
from exporter.publish.delta_log import read_log
from exporter.publish.model import PublishedAlready
from exporter.tables import DynamicTable, dynamic_embedding
from exporter.tables.parts import PARTS
from exporter.tables.place_keys import PlacedSlots, place_ranges
from tests.support.deeprec import Ev, write_full

Array = np.ndarray[Any, Any]
DIM = 4
LIMITS = np.array([0, -1, -2, 2**63 - 1, -(2**63)], np.int64)


def export_table(
    directory: Path, ev: Ev, builder: Any, *, parts: int = 1, old: bool = False, **options: Any
) -> Exported:
    write_full(directory / "ckpt" / "model.ckpt-7", {"emb": ev}, parts=parts, old=old, step=7)
    return export(ExportRequest(directory / "ckpt", directory / "model", model=builder, **options))


def serve(done: Exported, signature: str = "serving_default") -> Any:
    import tensorflow as tf

    loaded = tf.saved_model.load(str(done.published.path))
    return loaded, loaded.signatures[signature]


def reference(ev: Ev, ids: Array, default: Array) -> Array:
    held = {int(key): row for key, row in zip(ev.keys, ev.values, strict=True)}
    rows = [held.get(int(key), default[int(key) % len(default)]) for key in ids.ravel()]
    return np.array(rows).reshape(*ids.shape, ev.dim)


def lookup(default: Any = 0.0, dtype: str = "float32") -> Any:
    def build() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        import tensorflow as tf

        ids = tf.compat.v1.placeholder(tf.int64, [None, 3], name="ids")
        table = DynamicTable("emb", DIM, dtype, default)
        return {"ids": ids}, {"rows": tf.cast(table.lookup(ids), tf.float32)}

    return build


def asked_for(ev: Ev) -> Array:
    random = np.random.default_rng(1)
    known = random.choice(ev.keys, 60) if len(ev.keys) else np.zeros(60, np.int64)
    ids = np.concatenate([known.astype(np.int64), LIMITS, random.integers(-(2**63), 2**63 - 1, 55)])
    return random.permutation(ids).reshape(-1, 3)


@pytest.mark.parametrize("incr", [False, True], ids=["plain", "updatable"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("rows", [0, 1, 20_000])
def test_served_rows_are_those_of_the_checkpoint(tmp_path: Path, rows: int, parts: int, incr: bool) -> None:
    ev = Ev.random(rows, DIM, negative=True)
    default = np.arange(2 * DIM).reshape(2, DIM).astype(np.float32)
    done = export_table(
        tmp_path, ev, lookup(default), parts=parts, old=True, updates=Updates() if incr else None
    )
    _, predict = serve(done)
    ids = asked_for(ev)
    assert predict(ids=ids)["rows"].numpy().tobytes() == reference(ev, ids, default).tobytes()


@pytest.mark.parametrize("data", [*DataMode])
def test_rows_are_linked_or_copied_as_asked(tmp_path: Path, data: DataMode) -> None:
    ev = Ev.random(30_000, DIM)
    done = export_table(tmp_path, ev, lookup(), parts=2, data=data, verify=Verify.BYTES)
    _, predict = serve(done)
    ids = asked_for(ev)
    assert (predict(ids=ids)["rows"].numpy() == reference(ev, ids, np.zeros((1, DIM)))).all()
    if data is DataMode.AUTO:
        (source,) = (tmp_path / "ckpt").glob("*.data-*")
        assert source.stat().st_nlink > 1
    assert not any(extra.tensor.name.endswith(("-keys", "-values")) for extra in done.plan.ignored)


def test_the_room_is_a_hole_in_the_file(tmp_path: Path) -> None:
    ev = Ev.random(20_000, 64)
    done = export_table(
        tmp_path, ev, build_wide, table_head_room=20.0, data=DataMode.LINK, verify=Verify.BYTES
    )
    shards = (done.published.path / "variables").glob("*.data-*")
    (shard,) = (each.stat() for each in shards if each.stat().st_size > 50_000_000)
    assert shard.st_blocks * 512 < 10_000_000


def build_wide() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    import tensorflow as tf

    ids = tf.compat.v1.placeholder(tf.int64, [None], name="ids")
    return {"ids": ids}, {"rows": DynamicTable("emb", 64).lookup(ids)}


@pytest.mark.parametrize("cast", ["bfloat16", "float16"])
def test_values_are_cast_and_nothing_else(tmp_path: Path, cast: str) -> None:
    import tensorflow as tf

    ev = Ev.random(5000, DIM)
    done = export_table(tmp_path, ev, lookup(), parts=2, casts=(cast,))
    _, predict = serve(done)
    ids = asked_for(ev)
    wanted = reference(ev, ids, np.zeros((1, DIM))).astype(tf.as_dtype(cast).as_numpy_dtype)
    assert (predict(ids=ids)["rows"].numpy() == wanted.astype(np.float32)).all()


@pytest.mark.parametrize("values", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("keys", [np.int32, np.int64])
def test_keys_and_rows_of_other_types(tmp_path: Path, keys: Any, values: str) -> None:
    import ml_dtypes

    dtype = np.dtype(ml_dtypes.bfloat16) if values == "bfloat16" else np.dtype(values)
    ev = Ev.random(3000, DIM, keys=keys, values=dtype)
    _, predict = serve(export_table(tmp_path, ev, lookup(dtype=values), parts=3))
    ids = asked_for(ev)
    wanted = reference(ev, ids, np.zeros((1, DIM), dtype))
    assert (predict(ids=ids)["rows"].numpy() == wanted.astype(np.float32)).all()


def build_columns() -> Any:
    import tensorflow as tf

    v1 = tf.compat.v1
    table = DynamicTable("emb", DIM, default=0.5)
    sparse = v1.sparse_placeholder(tf.int64, [None, None], name="sparse")
    weights = v1.placeholder(tf.float32, [None], name="weights")
    weighted = tf.SparseTensor(sparse.indices, weights, sparse.dense_shape)
    outputs = {
        f"{combiner}{'_weighted' if by else ''}": table.lookup_sparse(sparse, by, combiner)
        for combiner in ("sum", "mean", "sqrtn")
        for by in (None, weighted)
    }
    ragged = tf.RaggedTensor.from_row_splits(sparse.values, v1.placeholder(tf.int64, [None], name="splits"))
    outputs["ragged"] = table.lookup(ragged).to_tensor()
    unique, where = tf.unique(sparse.values)
    outputs["unique"] = tf.gather(table.lookup(unique), where)
    safe = tf.nn.safe_embedding_lookup_sparse(table.values, table.rows(sparse), combiner="sum")
    names = ("sparse/indices", "sparse/values", "sparse/shape", "weights", "splits")
    graph = v1.get_default_graph()
    inputs = {name.rpartition("/")[2]: graph.get_tensor_by_name(f"{name}:0") for name in names}
    return inputs, outputs | {"safe": safe}


def test_every_kind_of_lookup(tmp_path: Path) -> None:
    import tensorflow as tf

    ev = Ev.random(4000, DIM)
    done = export_table(tmp_path, ev, build_columns, updates=Updates())
    _, predict = serve(done)
    random = np.random.default_rng(2)
    lengths = random.integers(1, 6, 40)
    values = random.choice(np.concatenate([ev.keys[:100], LIMITS, np.arange(20)]), lengths.sum())
    weights = random.normal(size=len(values)).astype(np.float32)
    splits = np.concatenate([[0], np.cumsum(lengths)])
    places = np.arange(len(values)) - np.repeat(splits[:-1], lengths)
    indices = np.stack([np.repeat(np.arange(len(lengths)), lengths), places], 1)
    answers = predict(
        indices=tf.constant(indices),
        values=tf.constant(values),
        shape=tf.constant([len(lengths), lengths.max()], tf.int64),
        weights=tf.constant(weights),
        splits=tf.constant(splits),
    )
    rows = reference(ev, values, np.full((1, DIM), 0.5, np.float32))
    assert answers["unique"].numpy().tobytes() == rows.tobytes()
    for number, (begin, end) in enumerate(pairwise(splits)):
        part, by = rows[begin:end], weights[begin:end, None]
        close = {"rtol": 1e-5, "atol": 1e-6}
        np.testing.assert_allclose(answers["sum"][number], part.sum(0), **close)
        np.testing.assert_allclose(answers["safe"][number], part.sum(0), **close)
        np.testing.assert_allclose(answers["mean"][number], part.mean(0), **close)
        np.testing.assert_allclose(answers["sqrtn"][number], part.sum(0) / np.sqrt(len(part)), **close)
        np.testing.assert_allclose(answers["sum_weighted"][number], (part * by).sum(0), **close)
        np.testing.assert_allclose(
            answers["mean_weighted"][number], (part * by).sum(0) / by.sum(), rtol=1e-3, atol=1e-4
        )
        assert (answers["ragged"][number, : len(part)].numpy() == part).all()


@pytest.mark.parametrize("cast", [(), ("bfloat16",)])
def test_answers_are_verified_with_tables_in_the_graph(tmp_path: Path, cast: tuple[str, ...]) -> None:
    ev = Ev.random(5000, DIM)
    done = export_table(
        tmp_path, ev, lookup(), parts=2, casts=cast, verify=Verify.OUTPUTS, tolerance=0.02 if cast else 0
    )
    assert [(found.output, found.max_error) for found in done.differences] == [("rows", 0.0)]


def test_an_index_that_leads_astray_is_found_before_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def astray(*asked: Any) -> Iterator[PlacedSlots]:
        for piece in place_ranges(*asked):
            is_filled = piece.rows != asked[0].geometry.empty_row
            piece.rows[is_filled] = np.roll(piece.rows[is_filled], 1)
            yield piece

    monkeypatch.setattr("exporter.tables.place_keys.place_ranges", astray)
    with pytest.raises(VerificationError, match="expected row 0"):
        export_table(tmp_path, Ev.random(5000, DIM), lookup())
    assert not (tmp_path / "model" / "7").exists()


def build_keras() -> Any:
    import keras

    ids = keras.Input([3], dtype="int64", name="ids")
    rows = dynamic_embedding("emb", DIM, default=0.5)(ids)
    mean = dynamic_embedding("other", DIM, combiner="mean")(ids)
    joined = keras.layers.Concatenate(name="rows")([keras.layers.Flatten()(rows), mean])
    return keras.Model(ids, joined)


def in_a_module() -> Any:
    import tensorflow as tf

    class Ranker(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.other = DynamicTable("emb", DIM, default=0.5), DynamicTable("other", DIM)
            self.signatures = {"serving_default": self.serve}

        @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.int64, "ids")])
        def serve(self, ids: Any) -> Any:
            rows = tf.reshape(self.emb.lookup(ids), [-1, 3 * DIM])
            return {"rows": tf.concat([rows, self.mean(ids)], -1)}

        @tf.function
        def mean(self, ids: Any) -> Any:
            some = tf.size(ids) > 0
            return tf.cond(
                some, lambda: tf.reduce_mean(self.other.lookup(ids), 1), lambda: tf.zeros([0, DIM])
            )

    return Ranker()


def in_a_subclass() -> Any:
    import keras
    import tensorflow as tf

    class Ranker(keras.Model):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.emb = dynamic_embedding("emb", DIM, default=0.5)
            self.other = dynamic_embedding("other", DIM, combiner="mean")

        @tf.function
        def call(self, ids: Any) -> Any:
            return tf.concat([tf.reshape(self.emb(ids), [-1, 3 * DIM]), self.other(ids)], -1)

    model = Ranker()
    model(keras.Input([3], dtype="int64", name="ids"))
    return model


@pytest.mark.landing
@pytest.mark.parametrize("builder", [build_keras, in_a_module, in_a_subclass])
def test_tables_in_layers_functions_and_modules(tmp_path: Path, builder: Any) -> None:
    emb, other = Ev.random(3000, DIM), Ev.random(2000, DIM, seed=5)
    write_full(tmp_path / "ckpt" / "model.ckpt-7", {"emb": emb, "other": other}, parts=2, step=7)
    done = export(ExportRequest(tmp_path / "ckpt", tmp_path / "model", model=builder, updates=Updates()))
    _, predict = serve(done)
    (name,) = predict.structured_input_signature[1]
    ids = np.concatenate([asked_for(emb), asked_for(other)])
    (answer,) = predict(**{name: ids}).values()
    rows = reference(emb, ids, np.full((1, DIM), 0.5, np.float32))
    mean = reference(other, ids, np.zeros((1, DIM), np.float32)).mean(1)
    assert (answer[:, : 3 * DIM].numpy() == rows.reshape(len(ids), -1)).all()
    np.testing.assert_allclose(answer[:, 3 * DIM :], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("room", [-0.5, float("nan"), float("inf")])
def test_room_that_is_no_number_is_a_usage_error(tmp_path: Path, room: float) -> None:
    with pytest.raises(UsageError, match=r"table.head.room"):
        export_table(tmp_path, Ev.random(50, DIM), lookup(), table_head_room=room)


def test_room_for_tables_of_a_graph_without_any_is_a_usage_error(tmp_path: Path) -> None:
    def build() -> Any:
        import tensorflow as tf

        x = tf.compat.v1.placeholder(tf.float32, [None], name="x")
        return {"x": x}, {"y": x * tf.compat.v1.get_variable("w", [])}

    write_full(tmp_path / "ckpt" / "model.ckpt-7", {}, dense={"w": np.float32(2)}, step=7)
    with pytest.raises(UsageError, match="there are none to lay out"):
        export(ExportRequest(tmp_path / "ckpt", tmp_path / "model", model=build, table_head_room=1.0))


def test_more_room_is_another_plan(tmp_path: Path) -> None:
    ev = Ev.random(2000, DIM)
    first = export_table(tmp_path, ev, lookup())
    with pytest.raises(PublishedAlready):
        export_table(tmp_path, ev, lookup(), again=False)
    second = export_table(tmp_path, ev, lookup(), again=False, table_head_room=3.0)
    assert second.plan.digest != first.plan.digest


def test_all_variables_of_a_table_change_row_by_row(tmp_path: Path) -> None:
    done = export_table(tmp_path, Ev.random(2000, DIM), build_columns, updates=Updates())
    schema = read_log(tmp_path / "model").schema
    assert {variable.name for variable in schema.variables} == {f"emb/{part}" for part in PARTS}
    assert {variable.kind for variable in schema.variables} == {ChangeKind.TABLE}
    assert done.plan.layout is not None


@pytest.mark.parametrize("updates", [None, Updates()], ids=["plain", "takes deltas"])
def test_row_numbers_alone_may_be_asked_for(tmp_path: Path, updates: Updates | None) -> None:
    """No signature reads the values of such a table; its numbers are those of the whole one."""

    def build() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        import tensorflow as tf

        ids = tf.compat.v1.placeholder(tf.int64, [None], name="ids")
        return {"ids": ids}, {"numbers": DynamicTable("emb", DIM).rows(ids)}

    ev = Ev.random(50, DIM)
    _, signature = serve(export_table(tmp_path, ev, build, updates=updates))
    numbers = signature(ids=np.concatenate([ev.keys, [-7]]))["numbers"].numpy()
    assert len({*numbers.tolist()}) == 51
