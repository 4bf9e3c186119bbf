"""Checkpoints that TensorFlow Recommenders-Addons wrote: what is served is what the library itself answers.

The library, its versions and the programs that wrote them: tests/fixtures/tfra/make.py.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.checkpoint.embedding_variables import (
    EmbeddingVariable,
    embedding_variables,
    find_variable,
    read_keys,
)
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.checkpoint.tensor_values import cast_values, read_array
from exporter.delta.table_changes import ServedTable
from exporter.errors import CorruptFile, ForeignOperations, UnsupportedFormat
from exporter.options import ExportRequest, Updates
from exporter.pipeline.full import Exported
from exporter.pipeline.incremental import ExportedDelta, export_incremental
from exporter.publish.delta_log import read_log
from exporter.tables import DynamicTable, dynamic_embedding
from exporter.wire.dtypes import DType
from tests.support.bundles import write
from tests.support.commands import export_model
from tests.support.updatable import loaded_quickly

FIXTURES = Path(__file__).parents[1] / "fixtures" / "tfra"
ANSWERED = sorted(path.with_suffix("") for path in FIXTURES.glob("**/*.npz"))
DEFAULT = 0.25

Built = tuple[Mapping[str, Any], Mapping[str, Any]]


def placeholder() -> Any:
    import tensorflow as tf

    return tf.compat.v1.placeholder(tf.int64, [None, 2], name="ids")


def variable(name: str, *shape: int) -> Any:
    import tensorflow as tf

    return tf.compat.v1.get_variable(name, shape)


def scored(rows: Any, width: int) -> Any:
    import tensorflow as tf

    return tf.reduce_sum(tf.reshape(rows**2, [-1, 2 * width]), -1)


def of_saver() -> Built:
    import tensorflow as tf

    ids = placeholder()
    flat = tf.reshape(ids, [-1])
    rows = [
        DynamicTable("user/emb", 4, default=DEFAULT).lookup(flat),
        DynamicTable("item", 3, "float64", DEFAULT).lookup(flat),
        DynamicTable("ctx/tag", 2, default=DEFAULT).lookup(flat % 100),
        DynamicTable("half", 2, "float16", DEFAULT).lookup(flat),
    ]
    joined = tf.concat([tf.cast(each, tf.float32) for each in rows], -1)
    return {"ids": ids}, {"out": scored(joined - variable("bias", 11), 11)}


def of_cluster() -> Built:
    ids = placeholder()
    rows = DynamicTable("user/emb", 4, default=DEFAULT).lookup(ids)
    return {"ids": ids}, {"out": scored(rows - variable("bias", 4), 4)}


def of_graph() -> Built:
    ids = placeholder()
    return {"ids": ids}, {"out": scored(DynamicTable("user", 4, default=DEFAULT).lookup(ids), 4)}


def of_estimator() -> Built:
    import tensorflow as tf

    ids = placeholder()
    flat = tf.reshape(DynamicTable("input_layer/user", 4, default=DEFAULT).lookup(ids), [-1, 8])
    return {"ids": ids}, {"out": flat @ variable("score/kernel", 8, 1) + variable("score/bias", 1)}


def of_keras() -> Any:
    import tensorflow as tf
    import tf_keras as keras

    class Ranker(keras.Model):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.emb = dynamic_embedding("user", 4, default=DEFAULT)
            self.score = keras.layers.Dense(1, name="score")

        def call(self, ids: Any) -> Any:
            return self.score(tf.reshape(self.emb(ids), [-1, 8]))

    model = Ranker()
    model(keras.Input([2], dtype="int64", name="ids"))
    return model


def of_functional() -> Any:
    import tf_keras as keras

    ids = keras.Input([2], dtype="int64", name="ids")
    found = keras.layers.Reshape([8])(dynamic_embedding("user", 4, default=DEFAULT)(ids))
    for name in ("first", "second"):
        found = keras.layers.Dense(8, "relu", name=name)(found)
    return keras.Model(ids, keras.layers.Dense(1, name="score")(found))


def of_module() -> Any:
    import tensorflow as tf

    class Tables(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            kinds = {"double": "float64", "half": "float16", "ctx/tag": "float32"}
            self.tables = [DynamicTable(name, 2, kind, DEFAULT) for name, kind in kinds.items()]
            self.signatures = {"serving_default": self.serve}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "ids")])
        def serve(self, ids: Any) -> Any:
            return {"out": tf.concat([tf.cast(t.lookup(ids), tf.float32) for t in self.tables], -1)}

    return Tables()


BUILDERS = {
    "saver": of_saver,
    "cluster": of_cluster,
    "graph": of_graph,
    "restored": of_graph,
    "estimator": of_estimator,
    "manager": of_keras,
    "weights": of_keras,
    "own_checkpoint": of_keras,
    "functional": of_functional,
    "module": of_module,
}
"""By the directories of the fixtures: the trainer's model for serving, under the trainer's own names."""


def held(prefix: Path, name: str) -> tuple[EmbeddingVariable, dict[int, bytes]]:
    catalog = read_catalog(prefix)
    table = find_variable(embedding_variables(catalog), name)
    assert table is not None, name
    rows = np.concatenate([read_array(catalog, part.values) for part in table.parts])
    keys = read_keys(catalog, table).tolist()
    return table, {key: row.tobytes() for key, row in zip(keys, rows, strict=True)}


def test_the_library_wrote_what_these_tests_read() -> None:
    families = {prefix.parent.name for prefix in ANSWERED}
    assert families == BUILDERS.keys()
    assert {prefix.relative_to(FIXTURES).parts[0] for prefix in ANSWERED} == {"0.6.0", "0.8.1"}


@pytest.mark.parametrize("prefix", ANSWERED, ids=lambda prefix: str(prefix.relative_to(FIXTURES)))
def test_keys_and_rows_are_those_that_the_library_answers(prefix: Path) -> None:
    """Tables under their own names; slots belong to them, and tables of integers are none."""
    answered = np.load(f"{prefix}.npz")
    names = {name.removesuffix(":keys") for name in answered if name.endswith(":keys")}
    for name in names:
        table, rows = held(prefix, name)
        keys = answered[f"{name}:keys"].tolist()
        assert rows == {key: row.tobytes() for key, row in zip(keys, answered[f"{name}:rows"], strict=True)}
        assert table.name == name
    known = embedding_variables(read_catalog(prefix))
    assert {table.name for table in known.values() if table.slot_of is None} == names
    assert {table.slot_of for table in known.values()} <= {None, *names}


CASES = [
    *("0.6.0/saver", "0.8.1/saver", "0.8.1/cluster", "0.6.0/estimator", "0.6.0/graph"),
    *("0.6.0/manager", "0.8.1/manager", "0.6.0/functional", "0.8.1/functional", "0.6.0/weights"),
    *("0.8.1/own_checkpoint", "0.8.1/module", "0.8.1/file_system/restored"),
]


@pytest.mark.landing
@pytest.mark.parametrize("case", CASES)
def test_what_is_served_answers_as_the_library_does(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each full checkpoint is compared with the one before, and the running model follows."""
    monkeypatch.delitem(sys.modules, "keras", raising=False)  # as with TF_USE_LEGACY_KERAS=1
    prefixes = [prefix for prefix in ANSWERED if prefix.parent == FIXTURES / case]
    train, server = tmp_path / "train", None
    train.mkdir()
    request = ExportRequest(train, tmp_path / "model", model=BUILDERS[Path(case).name], updates=Updates())
    for prefix in prefixes:
        for path in prefix.parent.glob(f"{prefix.name}.[di]*"):
            shutil.copy(path, train)
        done = export_incremental(request)
        if server is None:
            assert isinstance(done, Exported)
            opened = loaded_quickly(done.published.path)
            server = opened.__enter__()
        else:
            assert isinstance(done, ExportedDelta)
            assert server.update()["position"] == done.at.position
        answered = np.load(f"{prefix}.npz")
        (name,) = server.signatures["serving_default"].inputs
        (found,) = server.predict(**{name: answered["ids"]}).values()
        np.testing.assert_allclose(found, answered["outputs"], rtol=1e-5, atol=1e-6)
    opened.__exit__(None, None, None)


@pytest.mark.landing
@pytest.mark.parametrize("case", ["0.6.0/saver", "0.8.1/cluster", "0.8.1/manager"])
def test_deltas_in_8_bits_hold_what_a_full_export_does(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    prefixes = [prefix for prefix in ANSWERED if prefix.parent == FIXTURES / case]
    train, out = tmp_path / "train", tmp_path / "model"
    train.mkdir()
    model = BUILDERS[Path(case).name]
    for prefix in prefixes:
        for path in prefix.parent.glob(f"{prefix.name}.[di]*"):
            shutil.copy(path, train)
        export_incremental(ExportRequest(train, out, model=model, updates=Updates(), casts=("int8",)))
        log = read_log(out)
        assert log.base.entry.mapping_spec.dynamic
        for table in log.base.entry.mapping_spec.dynamic:
            served = ServedTable.of(table, log.schema, log.state())
            rows, keys = served.live()
            stored = log.state().rows_at(table.keys[3], rows)
            trained = held(train / prefix.name, table.name)[1]
            assert len(keys) == len(trained)
            values = np.frombuffer(b"".join(trained[key] for key in keys.tolist()), table.value_dtype.numpy)
            dtype = served.row_values.dtype
            assert (dtype is DType.INT8) == (table.value_dtype is not DType.HALF)
            assert stored.tobytes() == cast_values(values.reshape(len(keys), -1), dtype, "").tobytes()
    assert len(log.deltas) == len(prefixes) - 1


@pytest.mark.parametrize("name", ["user/emb", "user_emb", "user/emb/user_emb"])
def test_a_table_is_found_by_its_name_however_it_is_spelt(name: str) -> None:
    assert held(FIXTURES / "0.8.1/saver/model.ckpt-2", name)[0].name == "user/emb"


@pytest.mark.parametrize("name", ["user", "user-parameter", "model/emb/params"])
def test_a_keras_layers_table_is_found_by_the_layers_name(name: str) -> None:
    assert held(FIXTURES / "0.6.0/manager/ckpt-1", name)[0].name == "user-parameter"


@pytest.mark.parametrize("version", ["0.6.0", "0.8.1"])
@pytest.mark.parametrize("where", ["file_system/model.ckpt-1", "file_system_objects/ckpt-1"])
def test_rows_in_files_of_a_file_system_saver_are_refused_by_name(version: str, where: str) -> None:
    """The way that the hint names is what made `file_system/restored`, which is served above."""
    with pytest.raises(UnsupportedFormat, match=r"lacks the rows of '.*user") as refused:
        embedding_variables(read_catalog(FIXTURES / version / where))
    assert "FileSystemSaver" in refused.value.cause
    assert "load_from_file_system" in refused.value.hint
    assert export_model("inspect", FIXTURES / version / where).code == 0


@pytest.mark.parametrize("version", ["0.6.0", "0.8.1"])
@pytest.mark.parametrize("model", ["model.ckpt-1.meta", "saved_model", None])
def test_graphs_that_need_the_library_are_refused_by_its_name(
    tmp_path: Path, version: str, model: str | None
) -> None:
    directory = FIXTURES / version / "graph"
    named = None if model is None else str(directory / model)
    request = ExportRequest(directory, tmp_path / "model", model=named, updates=Updates())
    with pytest.raises(ForeignOperations, match=r"TFRA>CuckooHashTable.*Recommenders Addons") as refused:
        export_incremental(request)
    assert "'user'" in refused.value.cause
    assert "DynamicTable(NAME, DIM)" in refused.value.hint
    assert not (tmp_path / "model").exists()


def test_a_graph_is_served_behind_what_only_the_library_has(tmp_path: Path) -> None:
    directory = FIXTURES / "0.8.1/graph"
    told = ("--input", "rows=lookup/Reshape:0", "--output", "score=score:0")
    done = export_model("--ckpt-dir", directory, *told, "--out", tmp_path / "model")
    assert done.code == 0, done.err


def shards(name: str, *numbers: str, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Tensors of empty shards, to damage what the library never wrote so."""
    empty = {"keys": np.zeros(0, np.int64), "values": np.zeros((0, 4), dtype)}
    return {f"{name}_mht_{number}-{what}": value for number in numbers for what, value in empty.items()}


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        (("1of3", "2of3"), "'user' has 2 parts, and not part 2"),
        (("1of1", "4of3"), "is shard 4 of 3"),
        (("0of3",), "is shard 0 of 3"),
        (("1of1", "1of2"), "is shard 1 of 2, and another is of 1"),
    ],
)
def test_a_shard_that_is_missing_or_impossible_is_named(
    tmp_path: Path, numbers: tuple[str, ...], found: str
) -> None:
    prefix = write(tmp_path / "m-1", **shards("user/user", *numbers))
    with pytest.raises(CorruptFile, match=found):
        embedding_variables(read_catalog(prefix))


def test_two_tables_of_one_name_are_two_tables(tmp_path: Path) -> None:
    """`a/b/c` and `a_b/c` are spelt alike: each is known by its place, and neither by the name alone."""
    prefix = write(tmp_path / "m-1", **shards("c/a_b_c", "1of1"), **shards("c_1/a_b_c", "1of1"))
    known = embedding_variables(read_catalog(prefix))
    assert known.keys() == {"c/a_b_c", "c_1/a_b_c"}
    assert find_variable(known, "a_b/c") is None


@pytest.mark.parametrize("name", ["user", "user/emb", "a_b/user_2"])
def test_slots_belong_to_the_nearest_table(tmp_path: Path, name: str) -> None:
    """Here `user_item` is no slot of `user`, and has one."""
    flat, scope = name.replace("/", "_"), name.rpartition("/")[2]
    tensors = shards(f"{scope}/{flat}", "1of1") | shards(f"{scope}_item/{flat}_item", "1of1")
    tensors |= shards(f"m/{flat}_Adam_m", "1of1") | shards(f"m_1/{flat}_item_Adam_m", "1of1")
    known = embedding_variables(read_catalog(write(tmp_path / "m-1", **tensors)))
    owners = {table.name: table.slot_of for table in known.values()}
    assert owners == {
        name: None,
        f"{name}_item": None,
        f"{name}/Adam/m": name,
        f"{name}_item/Adam/m": f"{name}_item",
    }
