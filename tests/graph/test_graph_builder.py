"""Builders: what they may be, take and return; graphs made by them are served as those from files."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.errors import BuilderError, NotServable, UsageError
from exporter.graph.inference_graph import PartitionStrategy
from exporter.graph.load import GraphRequest, load_graph
from tests.support.commands import export_model
from tests.support.graph_runs import ops, serve, v1_graph


def linear() -> Any:
    import tensorflow as tf

    v1 = tf.compat.v1
    x = v1.placeholder(tf.float32, [None, 4], name="x")
    return {"x": x}, {"y": tf.matmul(x, v1.get_variable("w", [4, 2]))}


WEIGHTS = np.arange(8, dtype=np.float32).reshape(4, 2)


def test_a_builder_is_served() -> None:
    graph = load_graph(GraphRequest(model=linear))

    x = np.ones((3, 4), np.float32)
    assert np.array_equal(serve(graph, {"w": WEIGHTS}.__getitem__, {"x": x})["y"], x @ WEIGHTS)
    assert [(variable.key, variable.shape) for variable in graph.variables] == [("w", (4, 2))]
    assert list(graph.meta_graph.signature_def) == ["serving_default"]


def write_module(directory: Path, name: str, source: str) -> Path:
    path = directory / f"{name}.py"
    path.write_text(textwrap.dedent(source))
    return path


MODEL = """
    import threading
    import tensorflow as tf
    import {beside}

    def build(width: int = 2, scale=1.0, is_training=True):
        print("talk")
        thread = threading.Thread(target=print, args=("talk",))
        thread.start()
        thread.join()
        assert is_training is False and {beside}.VALUE == 3
        x = tf.compat.v1.placeholder(tf.float32, [None, 4], name="x")
        w = tf.compat.v1.get_variable("w", [4, width])
        return {{"x": x}}, {{"y": tf.matmul(x, w) * scale}}

    def needs(size): pass
    def raises(): return undefined_name
    def exits(): raise SystemExit(3)
    NUMBER = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model module and a module beside it, in the working directory; both with names of their own."""
    name = "model_" + "".join(c for c in tmp_path.name if c.isalnum())
    write_module(tmp_path, f"{name}_beside", "VALUE = 3")
    write_module(tmp_path, name, MODEL.format(beside=f"{name}_beside"))
    monkeypatch.chdir(tmp_path)
    return name


@pytest.mark.parametrize("form", ["{0}:build", "{0}.py:build", "./{0}.py:build"])
def test_modules_and_files_are_found_from_the_working_directory(module: str, form: str) -> None:
    graph = load_graph(GraphRequest(model=form.format(module), model_args={"width": "3", "scale": "2.0"}))

    assert [variable.shape for variable in graph.variables] == [(4, 3)]


def test_what_a_builder_prints_is_no_part_of_a_commands_result(module: str, tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "model.ckpt-1") as writer:
        writer.add("w", WEIGHTS)

    ran = export_model(
        *("--ckpt-dir", tmp_path, "--out", tmp_path / "out"), *("--model", f"{module}:build", "--json")
    )
    assert ran.code == 0 and ran.document  # one document, and nothing else
    assert ran.err.count("talk") == 2  # its own, and its thread's


def test_what_a_builder_prints_in_a_program_is_the_programs(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load_graph(GraphRequest(model=f"{module}:build"))
    assert capsys.readouterr().out.split() == ["talk", "talk"]


@pytest.mark.parametrize(
    ("function", "args", "error", "message"),
    [
        ("build", {"width": "wide"}, UsageError, "expected a int"),
        ("build", {"depth": "1"}, UsageError, "no argument 'depth'"),
        ("needs", {}, UsageError, "needs the argument 'size'"),
        ("raises", {}, BuilderError, "raised NameError"),
        ("exits", {}, BuilderError, "raised SystemExit"),
        ("absent", {}, BuilderError, "no function 'absent'"),
        ("NUMBER", {}, BuilderError, "no function 'NUMBER'"),
    ],
)
def test_calls_that_cannot_work(
    module: str, function: str, args: dict[str, str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_graph(GraphRequest(model=f"{module}:{function}", model_args=args))


def test_an_exception_is_told_with_the_users_line(module: str) -> None:
    with pytest.raises(BuilderError) as caught:
        load_graph(GraphRequest(model=f"{module}:raises"))

    assert f"{module}.py:" in caught.value.cause
    assert "in raises" in caught.value.cause
    assert "undefined_name" in caught.value.cause
    assert isinstance(caught.value.__cause__, NameError)


@pytest.mark.parametrize("model", ["no_such_module:fn", "no_such_file.py:fn", "json:nothing"])
def test_models_that_are_not_there(model: str) -> None:
    with pytest.raises(BuilderError):
        load_graph(GraphRequest(model=model))


def test_a_slip_in_a_name_is_answered_with_the_nearest(module: str) -> None:
    with pytest.raises(BuilderError) as caught:
        load_graph(GraphRequest(model=f"{module}:riases"))
    assert f"--model {module}:raises" in caught.value.hint


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(BuilderError, match=r"there is no file no_such_file\.py") as caught:
        load_graph(GraphRequest(model="no_such_file.py:fn"))
    assert "file.py:fn" in caught.value.hint


def test_a_file_without_a_function_asks_for_one(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.touch()
    with pytest.raises(UsageError) as caught:
        load_graph(GraphRequest(model=str(path)))
    assert f"--model {path}:FUNCTION" in caught.value.hint


def test_a_module_that_fails_to_import_names_its_line(tmp_path: Path) -> None:
    path = write_module(tmp_path, "broken", "import json\nx = 1 / 0\n")

    with pytest.raises(BuilderError, match="importing") as caught:
        load_graph(GraphRequest(model=f"{path}:fn"))
    assert "broken.py:2" in caught.value.cause


def tensor() -> Any:
    import tensorflow as tf

    return tf.compat.v1.placeholder(tf.float32, [None], name="x")


def foreign() -> Any:
    import tensorflow as tf

    with tf.Graph().as_default():
        return tf.constant(1.0)


@pytest.mark.parametrize(
    "result",
    [
        lambda: None,
        dict,
        lambda: 3,
        lambda: (tensor(), tensor()),
        lambda: ({"x": tensor()}, {}),
        lambda: {"s": ({"x": tensor()}, {"y": tensor()}, "rank")},
        lambda: {"s": {"y": tensor()}},
        lambda: ({"x": "x:0"}, {"y": tensor()}),
        lambda: ({"x": tensor()}, {"y": foreign()}),
        lambda: ({"x": tensor()}, {"y": np.ones(3)}),
    ],
)
def test_results_that_are_no_signature(result: Any) -> None:
    with pytest.raises(BuilderError) as caught:
        load_graph(GraphRequest(model=result))
    assert caught.value.cause or caught.value.hint


def test_tensors_cannot_be_named_beside_a_builder() -> None:
    with pytest.raises(UsageError, match="--input"):
        load_graph(GraphRequest(model=linear, outputs={"y": "y"}))


def three_methods() -> Any:
    import tensorflow as tf

    v1 = tf.compat.v1
    examples = v1.placeholder(tf.string, [None], name="examples")
    parsed = v1.parse_example(examples, {"x": v1.FixedLenFeature([2], tf.float32)})
    scores = tf.nn.softmax(tf.matmul(parsed["x"], v1.get_variable("w", [2, 3])))
    return {
        "serving_default": ({"x": parsed["x"]}, {"scores": scores}),
        "classify": ({"inputs": examples}, {"scores": scores}, "classify"),
        "regress": ({"inputs": examples}, {"outputs": scores[:, :1]}, "regress"),
    }


def test_methods_of_tensorflow_serving() -> None:
    import tensorflow as tf

    graph = load_graph(GraphRequest(model=three_methods))

    methods = {name: s.method_name for name, s in graph.meta_graph.signature_def.items()}
    assert methods == {
        "serving_default": "tensorflow/serving/predict",
        "classify": "tensorflow/serving/classify",
        "regress": "tensorflow/serving/regress",
    }
    feature = tf.train.Feature(float_list=tf.train.FloatList(value=[1, 2]))
    example = tf.train.Example(features=tf.train.Features(feature={"x": feature})).SerializeToString()
    weights = {"w": np.ones((2, 3), np.float32)}.__getitem__
    by_example = serve(graph, weights, {"inputs": [example]}, "classify")["scores"]
    by_value = serve(graph, weights, {"x": [[1.0, 2.0]]})["scores"]
    assert np.array_equal(by_example, by_value)


@pytest.mark.parametrize(
    ("inputs", "outputs", "method"),
    [("x", "scores", "classify"), ("inputs", "y", "classify"), ("inputs", "scores", "regress")],
)
def test_signatures_that_tensorflow_serving_would_refuse(inputs: str, outputs: str, method: str) -> None:
    def build() -> Any:
        import tensorflow as tf

        return {"s": ({inputs: tf.compat.v1.placeholder(tf.string, [None])}, {outputs: tf.ones([1])}, method)}

    with pytest.raises(UsageError, match=method):
        load_graph(GraphRequest(model=build))


def test_sparse_inputs_and_variables_as_outputs() -> None:
    import tensorflow as tf

    def build() -> Any:
        v1 = tf.compat.v1
        sparse = v1.sparse_placeholder(tf.float32, [None, 4], name="sparse")
        w = v1.get_variable("w", [4, 2])
        return {"x": sparse}, {"y": v1.sparse_tensor_dense_matmul(sparse, w), "w": w}

    graph = load_graph(GraphRequest(model=build))

    inputs = graph.meta_graph.signature_def["serving_default"].inputs
    assert {key: inputs[key].name for key in ("x", "x_1")} == {
        "x": "sparse/indices:0",
        "x_1": "sparse/values:0",
    }
    assert {*inputs} == {"x", "x_1", "x_2"}
    assert "w" in graph.meta_graph.signature_def["serving_default"].outputs


def test_functions_loops_and_library_are_pruned_to_what_is_called() -> None:
    import tensorflow as tf

    def build() -> Any:
        v1 = tf.compat.v1
        x = v1.placeholder(tf.int64, [None], name="ids")
        table = v1.get_variable("table", [9, 2], use_resource=True)
        counter = v1.get_variable("counter", [], use_resource=True, initializer=v1.zeros_initializer())

        @tf.function(autograph=False)
        def looked_up(ids: Any) -> Any:
            counter.assign_add(1.0)
            tf.print("talk", output_stream="file:///dev/null")
            return tf.gather(table.read_value(), ids)

        @tf.function(autograph=False)
        def unused(value: Any) -> Any:
            return value + 1.0

        unused(tf.constant(1.0))
        return {"ids": x}, {"rows": looked_up(x)}

    with v1_graph(control_flow_v2=True):
        graph = load_graph(GraphRequest(model=build))

    rows = np.arange(18, dtype=np.float32).reshape(9, 2)
    values = {"table": rows, "counter": np.float32(0)}
    assert np.array_equal(serve(graph, values.__getitem__, {"ids": [3, 8]})["rows"], rows[[3, 8]])
    assert len(graph.meta_graph.graph_def.library.function) == 1
    assert not ops(graph) & {"AssignAddVariableOp", "PrintV2", "GatherV2", "ReadVariableOp"}
    assert "ResourceGather" in ops(graph)


def test_a_function_that_reads_its_own_change_is_refused() -> None:
    import tensorflow as tf

    def build() -> Any:
        counter = tf.compat.v1.get_variable("c", [], use_resource=True, initializer=tf.zeros_initializer())

        @tf.function(autograph=False)
        def counted() -> Any:
            counter.assign_add(1.0)
            return counter.read_value()

        return {}, {"count": counted()}

    with pytest.raises(NotServable, match="has just changed in function"):
        load_graph(GraphRequest(model=build))


@pytest.mark.parametrize("strategy", ["mod", "div"])
@pytest.mark.parametrize("resource", [False, True])
def test_partitioned_tables(strategy: str, resource: bool) -> None:
    import tensorflow as tf

    def build() -> Any:
        v1 = tf.compat.v1
        ids = v1.placeholder(tf.int64, [None], name="ids")
        parts = v1.fixed_size_partitioner(3)
        table = v1.get_variable("table", [20, 4], partitioner=parts, use_resource=resource)
        rows = v1.nn.embedding_lookup(table, ids, partition_strategy=strategy)
        weights = v1.get_variable("weights", [4, 6], partitioner=parts, use_resource=resource)
        return {"ids": ids}, {"rows": rows, "y": tf.matmul(rows, tf.convert_to_tensor(weights))}

    graph = load_graph(GraphRequest(model=build))

    assert graph.lookups == {"table": PartitionStrategy(strategy), "weights": PartitionStrategy.NONE}
    spans = sorted(v.part.starts[0] for v in graph.variables if v.key == "table" and v.part)
    assert spans == [0, 7, 14]
    rows = np.arange(80, dtype=np.float32).reshape(20, 4)
    values = {"table": rows, "weights": np.ones((4, 6), np.float32)}
    served = serve(graph, values.__getitem__, {"ids": [0, 1, 4, 8]})["rows"]
    by_mod = np.concatenate([rows[:7], rows[7:14], rows[14:]])[[0, 7, 8, 16]]
    assert np.array_equal(served, rows[[0, 1, 4, 8]] if strategy == "div" else by_mod)


def test_signatures_files_are_for_graphs_from_files(tmp_path: Path) -> None:
    file = tmp_path / "signatures.json"
    file.write_text(json.dumps({"s": {"outputs": {"y": "y"}}}))

    with pytest.raises(UsageError):
        load_graph(GraphRequest(model=linear, signatures=file))
