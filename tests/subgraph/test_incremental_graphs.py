"""Kinds of graphs that take deltas: v1 control flow, functions, Keras, several signatures, every dtype."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from msgspec.structs import replace

from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.delta.format import Rows, log_name
from exporter.errors import NotServable
from exporter.graph.editor import _merge_constants
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.load import GraphRequest, load_graph
from exporter.options import Isolation
from exporter.subgraph.make_updatable import make_updatable, schema_of
from exporter.wire.protos import message_class
from tests.support.graph_runs import v1_graph
from tests.support.trained import export, inference_graph, train
from tests.support.updatable import (
    OPTIONS,
    Loaded,
    Model,
    applied,
    assert_holds,
    loaded,
    random_changes,
    two_tables_and_dense,
    updatable_base,
    updatable_model,
)

tf1 = tf.compat.v1


def kinds(model: Model) -> dict[str, str]:
    return {variable.name: variable.kind.value for variable in model.schema.variables}


def saved_by_stock(directory: Path, variables: Mapping[str, Any], graph: InferenceGraph) -> Path:
    """A checkpoint with the values of `variables` under the keys of `graph`; its prefix."""
    prefix = directory / "checkpoint" / "model.ckpt"
    prefix.parent.mkdir()
    with BundleWriter(prefix) as writer:
        for variable in graph.variables:
            writer.add(variable.key, np.asarray(variables[variable.key]))
    return prefix


def same_answers(server: Loaded, reference: Any, feeds: Mapping[str, Any]) -> None:
    """First and second call (that take different ways through the graph) answer as the reference does."""
    expected = {name: np.asarray(value) for name, value in reference.items()}
    for _ in range(2):
        found = server.predict(**feeds)
        assert found.keys() - {"model_position", "model_step"} == expected.keys()
        for name, value in expected.items():
            if value.dtype.kind in "OS":
                assert found[name].tolist() == value.tolist()
            else:
                np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


class Ranker(tf.Module):
    """Functions within functions, control flow, a vocabulary, and a table read through its value."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(3)
        self.rows = tf.Variable(rng.normal(size=(30, 4)).astype(np.float32), name="rows")
        self.by_value = tf.Variable(rng.normal(size=(30, 4)).astype(np.float32), name="by_value")
        self.weights = tf.Variable(rng.normal(size=(4, 4)).astype(np.float32), name="weights")
        self.bias = tf.Variable(rng.normal(size=4).astype(np.float32), name="bias")
        words = tf.lookup.KeyValueTensorInitializer(tf.constant(["a", "b"]), tf.constant([1, 2], tf.int64))
        self.vocabulary = tf.lookup.StaticHashTable(words, 0)

    @tf.function(
        input_signature=[tf.TensorSpec([None], tf.int64, "ids"), tf.TensorSpec([None], tf.string, "words")]
    )
    def serve(self, ids: Any, words: Any) -> dict[str, Any]:
        x = self.sum_up(ids) + self.sum_up(self.vocabulary.lookup(words))
        for _ in tf.range(3):
            x = tf.tanh(tf.matmul(x, self.weights)) + self.sum_up(ids)
        if tf.reduce_sum(x) > 0:
            x = x + self.bias
        else:
            x = x - self.bias
        return {"scores": x, "text": tf.strings.as_string(tf.argmax(x, 1))}

    @tf.function
    def sum_up(self, ids: Any) -> Any:
        by_value = tf.gather(tf.cast(self.by_value.read_value(), tf.float64), ids)
        return tf.gather(self.rows, ids) + tf.cast(by_value, tf.float32)


@pytest.mark.landing
def test_functions_of_a_module(tmp_path: Path) -> None:
    module = Ranker()
    tf.saved_model.save(module, str(tmp_path / "saved"), signatures={"serving_default": module.serve})
    graph = load_graph(GraphRequest(model=str(tmp_path / "saved")))
    values = {v.name.removesuffix(":0"): v.numpy() for v in module.variables}
    model = updatable_base(tmp_path, graph, saved_by_stock(tmp_path, values, graph))
    assert kinds(model) == {"rows": "table", "by_value": "table", "weights": "dense", "bias": "dense"}
    feeds = {"ids": [1, 2], "words": ["b", "unknown"]}
    arguments = {"ids": tf.constant([1, 2], tf.int64), "words": tf.constant(["b", "unknown"])}
    with loaded(model) as server:
        same_answers(server, module.serve(**arguments), feeds)
        model.evolve(100, 110)
        assert server.update()["position"] == 110
        for variable in module.variables:
            variable.assign(model.at(110)[variable.name.removesuffix(":0")])
        same_answers(server, module.serve(**arguments), feeds)
        assert server.predict(**feeds)["model_position"].tolist() == [110, 110]


@pytest.mark.landing
def test_a_keras_model_with_embeddings(tmp_path: Path) -> None:
    import keras

    keras.utils.clear_session()
    user = keras.Input([], dtype="int64", name="user")
    items = keras.Input([5], dtype="int64", name="items")
    user_rows = keras.layers.Embedding(50, 8, name="users")(user)
    item_rows = keras.layers.Flatten()(keras.layers.Embedding(60, 8, name="items_table")(items))
    x = keras.layers.Concatenate()([user_rows, item_rows])
    x = keras.layers.Dense(16, activation="relu", name="hidden")(x)
    network = keras.Model([user, items], keras.layers.Dense(1, name="out")(x))
    network.export(str(tmp_path / "saved"), verbose=False)
    graph = load_graph(GraphRequest(model=str(tmp_path / "saved")))
    values = {variable.path: variable.numpy() for variable in network.variables}
    model = updatable_base(tmp_path, graph, saved_by_stock(tmp_path, values, graph))
    assert {name for name, kind in kinds(model).items() if kind == "table"} == {
        "users/embeddings",
        "items_table/embeddings",
    }
    feeds = {"user": np.array([1, 2]), "items": np.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]])}
    with loaded(model) as server:
        same_answers(server, {"output_0": network([feeds["user"], feeds["items"]])}, feeds)
        model.evolve(100, 110, rows=30)
        assert server.update()["rows"] == 60
        for variable in network.variables:
            variable.assign(model.at(110)[variable.path])
        same_answers(server, {"output_0": network([feeds["user"], feeds["items"]])}, feeds)


@pytest.mark.landing
def test_v1_loops_conditions_lookups_strings_and_sparse_tensors(tmp_path: Path) -> None:
    with v1_graph(), tf1.Session() as session:
        steps = tf1.placeholder(tf.int32, [], name="steps")
        words = tf1.placeholder(tf.string, [None], name="words")
        bags = tf1.sparse_placeholder(tf.int64, [None, None], name="bags")
        rows = tf1.get_variable("rows", [20, 4])
        weights, bias = tf1.get_variable("weights", [4, 4]), tf1.get_variable("bias", [4])
        initializer = tf.lookup.KeyValueTensorInitializer(
            tf.constant(["a", "b"]), tf.constant([1, 2], tf.int64)
        )
        vocabulary = tf.lookup.StaticVocabularyTable(initializer, 3)
        ids = vocabulary.lookup(words)
        x = tf.gather(rows, ids) + tf1.nn.safe_embedding_lookup_sparse([rows], bags, combiner="mean")
        _, x = tf1.while_loop(
            lambda i, _: i < steps,
            lambda i, x: (i + 1, tf.tanh(tf.matmul(x, weights)) + tf.gather(rows, ids)),
            [0, x],
        )
        scores = tf1.cond(tf.reduce_sum(x) > 0, lambda: x + bias, lambda: x - bias)
        inputs = {"steps": steps, "words": words, "bags": bags}
        outputs = {
            "scores": scores,
            "text": tf.strings.as_string(tf.argmax(scores, 1)),
            "sparse": tf.sparse.from_dense(scores),
        }
        session.run([tf1.global_variables_initializer(), tf1.tables_initializer()])
        assert any(op.type == "NextIteration" for op in tf1.get_default_graph().get_operations())
        signature = tf1.saved_model.build_signature_def(
            {name: tf1.saved_model.build_tensor_info(tensor) for name, tensor in inputs.items()},
            {name: tf1.saved_model.build_tensor_info(tensor) for name, tensor in outputs.items()},
            "tensorflow/serving/predict",
        )
        builder = tf1.saved_model.Builder(str(tmp_path / "saved"))
        builder.add_meta_graph_and_variables(
            session, ["serve"], {"serving_default": signature}, main_op=tf1.tables_initializer()
        )
        builder.save()
        bag = tf1.SparseTensorValue([[0, 0], [1, 1]], [3, 4], [2, 2])
        reference = {
            n: session.run([scores, outputs["text"]], {steps: n, words: ["a", "zz"], bags: bag})
            for n in (0, 3)
        }
    graph = load_graph(GraphRequest(model=str(tmp_path / "saved")))
    model = updatable_base(tmp_path, graph, tmp_path / "saved" / "variables" / "variables")
    assert kinds(model) == {"rows": "table", "weights": "dense", "bias": "dense"}
    with loaded(model) as server:
        given, found = (
            server.signatures["serving_default"].inputs,
            server.signatures["serving_default"].outputs,
        )
        names = ["scores", "text", "sparse_1", "model_position", "sparse_2"]
        fetches = [found[name].name for name in names]

        def call(n: int) -> list[Any]:
            feeds = {given["steps"].name: n, given["words"].name: ["a", "zz"]}
            parts = zip(("bags", "bags_1", "bags_2"), bag, strict=True)
            feeds |= {given[name].name: part for name, part in parts}
            answer: list[Any] = server.session.run(fetches, feeds)
            return answer

        for n in (3, 0, 3):
            scores_found, text_found, values_found, positions, shape = call(n)
            np.testing.assert_allclose(scores_found, reference[n][0], rtol=1e-6)
            assert text_found.tolist() == reference[n][1].tolist()
            np.testing.assert_array_equal(values_found, scores_found.ravel())
            assert (positions.tolist(), shape.tolist()) == ([100, 100], [2, 4])
        model.evolve(100, 110, rows=20)
        assert server.update()["position"] == 110
        assert_holds(server, model, 110)
        assert np.abs(call(3)[0] - reference[3][0]).max() > 0.01
        assert call(3)[3].tolist() == [110, 110]


def read_both_ways() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Tied weights: `tied` is looked up and multiplied by; `strided` is read along another axis."""
    ids = tf1.placeholder(tf.int64, [None], name="ids")
    tied = tf1.get_variable("tied", [10, 4], use_resource=True)
    strided = tf1.get_variable("strided", [10, 4], use_resource=True)
    small = tf1.get_variable("small", [10, 4], use_resource=True)
    columns = tf.gather(strided, [0, 1, 2, 3], axis=1)
    x = tf.matmul(tf.gather(tied, ids), tied, transpose_b=True)
    nd = tf.gather_nd(small, ids[:, None])
    return {"ids": ids}, {"x": x + tf.reduce_sum(columns) + tf.reduce_sum(nd, 1, keepdims=True)}


@pytest.mark.landing
def test_a_table_that_is_also_read_whole_is_assigned_whole(tmp_path: Path) -> None:
    model = updatable_model(tmp_path, read_both_ways, {"ids": [0]})
    assert kinds(model) == {"tied": "dense", "strided": "dense", "small": "table"}
    with loaded(model) as server:
        model.evolve(100, 110)
        model.evolve(110, 120)
        assert server.update()["rows"] == 10
        assert_holds(server, model, 120)


SCATTERED = (
    "half bfloat16 float32 double int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex64 complex128"
)


def every_dtype() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """A table and a dense variable of each type."""
    ids = tf1.placeholder(tf.int64, [None], name="ids")
    outputs = {}
    for name in SCATTERED.split():
        dtype, zeros = tf.as_dtype(name), tf.zeros_initializer()
        rows = tf1.get_variable(f"rows_{name}", [9, 2], dtype, zeros, use_resource=True)
        whole = tf1.get_variable(f"whole_{name}", [2], dtype, zeros, use_resource=True)
        outputs |= {f"rows_{name}": tf.gather(rows, ids), f"whole_{name}": tf.identity(whole)}
    return {"ids": ids}, outputs


@pytest.mark.landing
@pytest.mark.parametrize("isolation", list(Isolation))
def test_tables_of_every_dtype(tmp_path: Path, isolation: Isolation) -> None:
    model = updatable_model(tmp_path, every_dtype, {"ids": [0]}, isolation=isolation)
    by_rows = {name for name, kind in kinds(model).items() if kind == "table"}
    assert by_rows == {f"rows_{name}" for name in SCATTERED.split()}
    with loaded(model) as server:
        model.evolve(100, 110)
        assert server.update()["position"] == 110
        assert_holds(server, model, 110)
        answer = server.predict(ids=[0, 8])
        for name, value in model.at(110).items():
            np.testing.assert_array_equal(answer[name], value[[0, 8]] if name in by_rows else value)


def without_elements() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    ids, zeros = tf1.placeholder(tf.int64, [None], name="ids"), tf1.zeros_initializer()
    narrow = tf1.get_variable("narrow", [9, 0], initializer=zeros, use_resource=True)
    rows = tf1.get_variable("rows", [9, 2], initializer=zeros, use_resource=True)
    whole = tf1.get_variable("whole", [0, 2], initializer=zeros, use_resource=True)
    read = {"narrow": tf.gather(narrow, ids), "rows": tf.gather(rows, ids)}
    return {"ids": ids}, {**read, "whole": tf.reduce_sum(whole, keepdims=True)}


@pytest.mark.landing
@pytest.mark.parametrize("isolation", list(Isolation))
def test_variables_without_elements(tmp_path: Path, isolation: Isolation) -> None:
    model = updatable_model(tmp_path, without_elements, {"ids": [0]}, isolation=isolation)
    model.evolve(100, 110)
    with loaded(model) as server:
        assert server.update()["position"] == 110
        assert_holds(server, model, 110)


def test_string_and_scalar_variables(tmp_path: Path) -> None:
    def build() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        ids = tf1.placeholder(tf.int64, [None], name="ids")
        names = tf1.get_variable("names", initializer=tf.constant(["a", "b", "c"]), use_resource=True)
        scale = tf1.get_variable("scale", initializer=tf.constant(2.0), use_resource=True)
        return {"ids": ids}, {"name": tf.gather(names, ids), "scale": tf.fill(tf.shape(ids), scale)}

    model = updatable_model(tmp_path, build, {"ids": [0]})
    assert kinds(model) == {"names": "dense", "scale": "dense"}
    model.publish(100, 110, {"names": np.array([b"x", b"", b"\xff"], object), "scale": np.float32(3)})
    with loaded(model) as server:
        assert server.update()["position"] == 110
        answer = server.predict(ids=[2, 1])
        assert answer["name"].tolist() == [b"\xff", b""]
        assert answer["scale"].tolist() == [3.0, 3.0]


def several_signatures(graph: InferenceGraph) -> InferenceGraph:
    """`graph` with a signature beside that reads no variable, and one that classifies."""
    copy = replace(graph, meta_graph=type(graph.meta_graph).FromString(graph.meta_graph.SerializeToString()))
    signatures = copy.meta_graph.signature_def
    signatures["echo"].CopyFrom(signatures["serving_default"])
    del signatures["echo"].inputs["item"]
    for name in list(signatures["echo"].outputs):
        del signatures["echo"].outputs[name]
    signatures["echo"].outputs["user"].CopyFrom(signatures["echo"].inputs["user"])
    signatures["rank"].CopyFrom(signatures["serving_default"])
    signatures["rank"].method_name = "tensorflow/serving/regress"
    for name in ("user_rows", "bias"):
        del signatures["rank"].outputs[name]
    return copy


def test_each_signature_keeps_its_name_and_inputs(tmp_path: Path) -> None:
    plain = several_signatures(inference_graph(two_tables_and_dense))
    graph = make_updatable(plain, OPTIONS, tmp_path)
    signatures, before = graph.meta_graph.signature_def, plain.meta_graph.signature_def
    assert signatures.keys() == before.keys() | {"incremental_update", "incremental_status"}
    for name in before:
        assert signatures[name].inputs == before[name].inputs
        assert signatures[name].method_name == before[name].method_name
    assert set(signatures["serving_default"].outputs) == {
        "score",
        "user_rows",
        "bias",
        "model_position",
        "model_step",
    }
    assert set(signatures["rank"].outputs) == {"score"}, "stamps are for predict signatures alone"
    assert signatures["echo"].outputs["user"] == before["echo"].outputs["user"], "nothing to isolate"
    assert plain.meta_graph.signature_def.keys() == before.keys(), "the graph that was given is not changed"


def test_signatures_are_isolated_one_by_one(tmp_path: Path) -> None:
    trained = train(two_tables_and_dense, {"user": [0], "item": [0]}, tmp_path / "train" / "model.ckpt")
    model = updatable_base(
        tmp_path, several_signatures(inference_graph(two_tables_and_dense)), trained.prefix
    )
    model.evolve(100, 110, rows=30)
    with loaded(model) as server:
        score = server.predict(user=[1], item=[2])["score"]
        assert server.call("rank", user=[1], item=[2])["score"] == score
        assert server.call("echo", user=[7])["user"].tolist() == [7]
        assert server.call("echo", user=[7])["model_position"].tolist() == [100]
        server.update()
        after = server.predict(user=[1], item=[2])["score"]
        assert server.call("rank", user=[1], item=[2])["score"] == after != score
        assert server.call("echo", user=[7])["model_position"].tolist() == [110]


@pytest.mark.parametrize("name", ["incremental_update", "incremental_other"])
def test_a_signature_with_a_reserved_name_is_refused(tmp_path: Path, name: str) -> None:
    graph = several_signatures(inference_graph(two_tables_and_dense))
    graph.meta_graph.signature_def[name].CopyFrom(graph.meta_graph.signature_def["echo"])
    with pytest.raises(NotServable, match="incremental_"):
        make_updatable(graph, OPTIONS, tmp_path)


def test_an_output_with_a_stamps_name_is_refused(tmp_path: Path) -> None:
    graph = several_signatures(inference_graph(two_tables_and_dense))
    outputs = graph.meta_graph.signature_def["serving_default"].outputs
    outputs["model_step"].CopyFrom(outputs["score"])
    with pytest.raises(NotServable, match="model_step"):
        make_updatable(graph, OPTIONS, tmp_path)
    make_updatable(graph, replace(OPTIONS, stamp=False), tmp_path)


@pytest.mark.landing
def test_v1_behaviour_of_the_process_does_not_matter(tmp_path: Path) -> None:
    """A builder may switch TensorFlow 2's behaviour off for the whole process."""
    code = (
        "import tensorflow.compat.v1 as tf1; tf1.disable_v2_behavior()\n"
        "from pathlib import Path\n"
        "from tests.support.updatable import updatable_model, loaded, assert_holds\n"
        f"model = updatable_model(Path({str(tmp_path)!r}))\n"
        "with loaded(model) as server:\n"
        "    model.evolve(100, 110)\n"
        "    server.predict(user=[1], item=[2])\n"
        "    assert server.update()['position'] == 110\n"
        "    assert_holds(server, model, 110)\n"
        "    print(server.predict(user=[1], item=[2])['model_position'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[110]", done.stderr[-3000:]


def test_variables_on_another_device_are_written_where_they_are(tmp_path: Path) -> None:
    """Accelerators place variables elsewhere; two CPU devices show the same."""
    graph = inference_graph(two_tables_and_dense)
    for node in graph.meta_graph.graph_def.node:
        node.device = "/device:CPU:1"
    trained = train(two_tables_and_dense, {"user": [0], "item": [0]}, tmp_path / "train" / "model.ckpt")
    model = updatable_base(tmp_path, graph, trained.prefix)
    config = tf1.ConfigProto(device_count={"CPU": 2})
    with loaded(model, config) as server:
        server.predict(user=[1], item=[2])
        model.evolve(100, 110)
        assert server.update()["position"] == 110
        assert_holds(server, model, 110)
        changed = random_changes(model.schema, seed=120)
        model.publish(110, 120, changed)
        model.history[120] = applied(model.at(110), changed)
        server.update()
        assert_holds(server, model, 120)


def partitioned() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """A table in three parts that is looked up by id, and a bias in two that is joined."""
    ids = tf1.placeholder(tf.int64, [None], name="ids")
    table = tf1.get_variable("table", [12, 2], use_resource=True, partitioner=tf1.fixed_size_partitioner(3))
    bias = tf1.get_variable("bias", [2], use_resource=True, partitioner=tf1.fixed_size_partitioner(2))
    rows = tf1.nn.embedding_lookup(list(table), ids, partition_strategy="mod")
    return {"ids": ids}, {"rows": rows + tf.concat(list(bias), 0)}


def test_each_part_of_a_partitioned_variable_is_a_variable_of_its_own(tmp_path: Path) -> None:
    graph = inference_graph(partitioned)
    trained = train(partitioned, {"ids": [0]}, tmp_path / "train" / "model.ckpt")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    schema = schema_of(graph)
    shapes = {variable.name: (variable.shape, variable.kind.value) for variable in schema.variables}
    assert shapes == {
        "bias[2 0,1]": ((1,), "dense"),
        "bias[2 1,1]": ((1,), "dense"),
        "table[12 2 0,4:0,2]": ((4, 2), "table"),
        "table[12 2 4,4:0,2]": ((4, 2), "table"),
        "table[12 2 8,4:0,2]": ((4, 2), "table"),
    }
    base = tmp_path / "model"
    export(make_updatable(graph, OPTIONS, scratch), trained.prefix, base / "100")
    model = Model(base, schema, OPTIONS, {})
    new = np.full((1, 2), 7, np.float32)
    model.publish(100, 110, {"table[12 2 4,4:0,2]": Rows(np.array([1]), new), "bias[2 1,1]": np.float32([0])})
    with loaded(model) as server:
        ids = list(range(12))
        before = server.predict(ids=ids)["rows"]
        assert server.update()["rows"] == 1
        changed = np.flatnonzero((server.predict(ids=ids)["rows"] != before)[:, 0])
        assert changed.tolist() == [4], "under mod, row 1 of part 1 of 3 is row 1 * 3 + 1"


@pytest.mark.landing
def test_models_loaded_by_tensorflow_2_stand_at_positions_of_their_own(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    a, b = updatable_model(tmp_path / "a"), updatable_model(tmp_path / "b", lineage="lineage-b")
    a.evolve(100, 110)
    served_a, served_b = (tf.saved_model.load(str(model.version)).signatures for model in (a, b))
    feeds = {"user": tf.constant([1], tf.int64), "item": tf.constant([2], tf.int64)}
    assert served_b["incremental_update"](up_to=tf.constant([-1], tf.int64))["position"].numpy() == [100]
    assert served_a["incremental_update"](up_to=tf.constant([-1], tf.int64))["position"].numpy() == [110]
    assert served_a["serving_default"](**feeds)["model_position"].numpy() == [110]
    assert served_b["serving_default"](**feeds)["model_position"].numpy() == [100]


def test_a_graph_with_references_cannot_be_isolated(tmp_path: Path) -> None:
    graph = inference_graph(two_tables_and_dense)
    copy = type(graph.meta_graph).FromString(graph.meta_graph.SerializeToString())
    legacy = copy.graph_def.node.add(name="legacy", op="VariableV2")
    legacy.attr["dtype"].type = 1
    legacy.attr["shape"].shape.SetInParent()
    copy.signature_def["serving_default"].outputs["legacy"].name = "legacy:0"
    copy.signature_def["serving_default"].outputs["legacy"].dtype = 1
    with pytest.raises(NotServable, match="outputs a reference"):
        make_updatable(replace(graph, meta_graph=copy), OPTIONS, tmp_path)


def test_optimizers_pass_over_updates_and_second_tries(tmp_path: Path) -> None:
    """With a hundred tables they would cost the first update fifteen seconds, a first prediction one."""
    graph = make_updatable(inference_graph(two_tables_and_dense), OPTIONS, tmp_path)
    graph_def = graph.meta_graph.graph_def
    (call,) = [node for node in graph_def.node if node.name == "incremental/update"]
    config = tf1.ConfigProto.FromString(call.attr["config_proto"].s)
    assert config.graph_options.rewrite_options.disable_meta_optimizer
    as_written = {f.signature.name: f.attr["_tf_data_function"].b for f in graph_def.library.function}
    assert {name for name, kept in as_written.items() if kept} == {
        name for name in as_written if name.startswith("incremental_update") or "_again" in name
    }


def many_tables(count: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    ids = tf1.placeholder(tf.int64, [None], name="ids")
    tables = [tf1.get_variable(f"table{n:03d}", [50, 16], use_resource=True) for n in range(count)]
    return {"ids": ids}, {"sum": tf.add_n([tf.gather(table, ids) for table in tables])}


def test_what_names_a_log_is_no_part_of_how_an_update_works(tmp_path: Path) -> None:
    """So the update of a schema is traced once, however many bases a process makes."""

    def made(**options: Any) -> tuple[dict[str, bytes], set[bytes]]:
        graph = make_updatable(inference_graph(two_tables_and_dense), replace(OPTIONS, **options), tmp_path)
        graph_def = graph.meta_graph.graph_def
        constants = (node.attr["value"].tensor for node in graph_def.node if node.op == "Const")
        return {
            f.signature.name: f.SerializeToString(deterministic=True)
            for f in graph_def.library.function
            if f.signature.name.startswith("incremental_update")
        }, {text for tensor in constants for text in tensor.string_val}

    one, named = made()
    other, otherwise = made(lineage="lineage-b", log=200, position=200)
    assert one == other
    assert {b"lineage-a", log_name(100).encode()} <= named
    assert {b"lineage-b", log_name(200).encode()} <= otherwise
    assert not {b"lineage-a", log_name(100).encode()} & otherwise
    assert one != made(finite=True)[0]


def test_an_update_has_few_nodes_for_each_table(tmp_path: Path) -> None:
    """Whatever a server prepares first, an update or a prediction, it goes through all functions' nodes."""

    def nodes(tables: int) -> int:
        graph = make_updatable(inference_graph(partial(many_tables, tables)), OPTIONS, tmp_path)
        library = graph.meta_graph.graph_def.library.function
        return sum(len(f.node_def) for f in library if f.signature.name.startswith("incremental_update"))

    assert nodes(30) - nodes(10) <= 20 * 28


def test_constants_that_a_function_returns_stay_defined() -> None:
    """Equal constants become one, also where there are many and several of them are results."""
    function = message_class("FunctionDef")()
    for number in range(60):
        node = function.node_def.add(name=f"Const_{number}", op="Const")
        node.attr["value"].tensor.int_val.append(number % 2)
        function.ret[f"const_{number}"] = f"Const_{number}:output:0"
    _merge_constants(function)
    assert {node.name for node in function.node_def} == {"Const_0", "Const_1"}
    assert {reference.partition(":")[0] for reference in function.ret.values()} == {"Const_0", "Const_1"}
    assert len(function.ret) == 60
