"""Which signatures of a SavedModel are served, as its author's libraries wrote them, and in which form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.errors import NotServable
from exporter.graph.load import GraphRequest, load_graph
from exporter.options import ExportRequest, Updates
from exporter.pipeline.full import export
from exporter.wire import protos
from exporter.wire.dtypes import DType

tf1 = tf.compat.v1
X = tf.constant([[1.0, 2.0], [3.0, 4.0]])
VECTORS = [tf.TensorSpec([None, 2], tf.float32, name="x")]
PATH = [tf.TensorSpec([], tf.string, name="path")]


class Model(tf.Module):
    """A prediction, and what else a program may keep beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable([[1.0], [10.0]])
        self.requests = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.words = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 0)

    @tf.function(input_signature=VECTORS)
    def predict(self, x: Any) -> Any:
        return {"y": tf.matmul(x, self.w)}

    @tf.function(input_signature=[])
    def nothing(self) -> Any:
        return {}

    @tf.function(input_signature=PATH)
    def save(self, path: Any) -> Any:
        tf.raw_ops.Save(filename=path, tensor_names=["w"], data=[self.w.read_value()])
        return {"path": path}

    @tf.function(input_signature=PATH)
    def save_as(self, path: Any) -> Any:
        tf.raw_ops.SaveV2(
            prefix=path, tensor_names=["w"], shape_and_slices=[""], tensors=[self.w.read_value()]
        )
        return {"path": tf.strings.join([path, ".index"]), "bytes": tf.size(self.w.read_value())}

    @tf.function(input_signature=PATH)
    def write(self, path: Any) -> Any:
        tf.io.write_file(path, "here")
        return {"path": path}

    @tf.function(input_signature=PATH)
    def write_in_branch(self, path: Any) -> Any:
        if tf.strings.length(path) > 0:
            tf.io.write_file(path, "here")
        return {"done": tf.constant(True)}

    @tf.function(input_signature=VECTORS)
    def tell(self, x: Any) -> Any:
        tf.print("seen", tf.shape(x))
        return {"x": x}

    @tf.function(input_signature=[])
    def reset(self) -> Any:
        self.requests.assign(0)
        return {"done": tf.constant(True)}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="words")])
    def learn(self, words: Any) -> Any:
        self.words.insert(words, tf.ones_like(words, tf.int64))
        return {"words": words}

    @tf.function(input_signature=VECTORS)
    def spoilt(self, x: Any) -> Any:
        return {"y": tf.raw_ops.Neg(x=x)}

    @tf.function(input_signature=VECTORS)
    def predict_and_log(self, x: Any) -> Any:
        self.requests.assign_add(1)
        tf.print("seen", tf.shape(x))
        tf.io.write_file("/nowhere/log", "one more")
        return {"y": tf.matmul(x, self.w)}

    def saved(self, directory: Path, *names: str) -> Path:
        signatures = {name: getattr(self, name) for name in names}
        tf.saved_model.save(self, str(directory), signatures=signatures)
        return directory


def exported(source: Path, out: Path, **options: Any) -> tuple[Any, str]:
    """The published version, loaded by TensorFlow, and the notes of its export."""
    done = export(ExportRequest(source, out, **options))
    return tf.saved_model.load(str(done.published.path)), "\n".join(done.plan.notes)


def answers(loaded: Any, name: str, **inputs: Any) -> Mapping[str, Any]:
    return {key: np.asarray(value) for key, value in loaded.signatures[name](**inputs).items()}


@pytest.mark.landing
@pytest.mark.parametrize("options", [{}, {"updates": Updates()}], ids=["plain", "updatable"])
def test_signatures_for_an_effect_or_without_outputs_are_left_out(
    options: dict[str, Any], tmp_path: Path
) -> None:
    own = ["nothing", "save", "save_as", "write", "write_in_branch", "tell", "reset", "learn"]
    source = Model().saved(tmp_path / "source", "predict", *own)
    loaded, notes = exported(source, tmp_path / "m", **options)
    assert {name for name in loaded.signatures if not name.startswith("incremental_")} == {"predict"}
    assert all(f"signature {name!r} is left out" in notes for name in own)
    assert "'nothing' is left out: it has no outputs" in notes
    np.testing.assert_array_equal(answers(loaded, "predict", x=X)["y"], [[21.0], [43.0]])


@pytest.mark.parametrize("options", [{}, {"updates": Updates()}], ids=["plain", "updatable"])
def test_a_prediction_with_effects_is_served_without_them_and_that_is_told(
    options: dict[str, Any], tmp_path: Path
) -> None:
    source = Model().saved(tmp_path / "source", "predict_and_log")
    loaded, notes = exported(source, tmp_path / "m", **options)
    assert "'predict_and_log' no longer changes 'Variable'" in notes
    dropped = notes.partition("'predict_and_log' no longer does what no answer needs")[2]
    assert "PrintV2" in dropped and "WriteFile" in dropped
    np.testing.assert_array_equal(answers(loaded, "predict_and_log", x=X)["y"], [[21.0], [43.0]])


@pytest.mark.parametrize("name", ["nothing", "save", "write", "tell", "reset"])
def test_such_a_signature_alone_is_refused_by_name(name: str, tmp_path: Path) -> None:
    source = Model().saved(tmp_path / "source", name)
    with pytest.raises(NotServable) as error:
        export(ExportRequest(source, tmp_path / "m"))
    assert repr(name) in error.value.cause and "--output" in error.value.hint
    assert not list((tmp_path / "m").glob("[0-9]*"))


@pytest.mark.parametrize("use_resource", [False, True], ids=["reference", "resource"])
def test_a_variables_value_is_an_answer_although_requests_are_counted(
    use_resource: bool, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    with tf.Graph().as_default(), tf1.Session() as session:
        x = tf1.placeholder(tf.float32, [], name="x")
        w = tf1.get_variable("w", initializer=[1.0, 2.0], use_resource=use_resource)
        requests = tf1.get_variable("requests", initializer=0, use_resource=use_resource)
        with tf.control_dependencies([tf1.assign_add(requests, 1)]):
            value = tf.identity(w)
        session.run(tf1.global_variables_initializer())
        tf1.saved_model.simple_save(session, str(source), {"x": x}, {"w": value})
    loaded, notes = exported(source, tmp_path / "m")
    assert "'serving_default' no longer changes 'requests'" in notes
    np.testing.assert_array_equal(answers(loaded, "serving_default", x=tf.constant(0.0))["w"], [1.0, 2.0])


def call_itself(function: Any, node: Any) -> None:
    node.op = "StatefulPartitionedCall"
    node.attr.clear()
    node.attr["Tin"].list.type.append(1)
    node.attr["Tout"].list.type.append(1)
    node.attr["f"].func.name = function.signature.name
    for reader in function.node_def:
        reader.input[:] = [text.replace(f"{node.name}:y:", f"{node.name}:output:") for text in reader.input]


def hold_a_handle(_: Any, node: Any) -> None:
    node.attr["_kept"].tensor.dtype = int(DType.RESOURCE)


@pytest.mark.parametrize(
    ("spoil", "reason"), [(call_itself, "calls itself"), (hold_a_handle, "nobody has judged")]
)
def test_a_signature_that_is_refused_for_itself_does_not_stop_another(
    spoil: Any, reason: str, tmp_path: Path
) -> None:
    source = Model().saved(tmp_path / "source", "predict", "spoilt")
    saved_model = protos.SavedModel.FromString((source / "saved_model.pb").read_bytes())
    for function in saved_model.meta_graphs[0].graph_def.library.function:
        for node in function.node_def:
            if node.op == "Neg":
                spoil(function, node)
    (source / "saved_model.pb").write_bytes(saved_model.SerializeToString())
    loaded, notes = exported(source, tmp_path / "m")
    assert {*loaded.signatures} == {"predict"}
    assert reason in notes.partition("'spoilt' is left out")[2]


def test_functions_that_nest_deeper_than_python_does(tmp_path: Path) -> None:
    source = Model().saved(tmp_path, "predict", "nothing", "spoilt")
    saved_model = protos.SavedModel.FromString((source / "saved_model.pb").read_bytes())
    library = saved_model.meta_graphs[0].graph_def.library
    deep = [f for f in library.function if any(node.op == "MatMul" for node in f.node_def)]
    for number in range(2000):
        function = library.function.add()
        function.signature.name = f"f{number}"
        function.node_def.add(name="call", op=f"f{number + 1}" if number < 1999 else "NoOp")
    for (
        function
    ) in deep:  # that of the signature among them: names, and so their order, count up in a process
        function.node_def.add(name="call", op="f0")
    (source / "saved_model.pb").write_bytes(saved_model.SerializeToString())
    with pytest.raises(NotServable, match="levels"):
        load_graph(GraphRequest(model=str(source)))


IDS = tf.ragged.constant([[0, 1], [], [1]], tf.int64)
SPARSE = tf.sparse.from_dense([[0.0, 2.0], [1.5, 0.0]])


class Composites(tf.Module):
    """Inputs and outputs that are several tensors, and some that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.table = tf.Variable([[1.0, 2.0], [3.0, 4.0]])

    @tf.function(input_signature=[tf.RaggedTensorSpec([None, None], tf.int64)])
    def ragged(self, ids: Any) -> Any:
        rows = tf.gather(self.table, ids)
        deep = tf.RaggedTensor.from_row_splits(rows, [0, 1, rows.nrows()])
        return {"rows": rows, "deep": deep, "sum": tf.reduce_sum(rows, 1)}

    @tf.function(input_signature=[tf.SparseTensorSpec([None, 2], tf.float32)])
    def sparse(self, x: Any) -> Any:
        return {"y": tf.sparse.sparse_dense_matmul(x, self.table), "same": x}

    @tf.function(input_signature=VECTORS)
    def slices(self, x: Any) -> Any:
        return {"some": tf.IndexedSlices(tf.matmul(x, self.table), tf.constant([4, 2]))}

    @tf.function(input_signature=VECTORS)
    def taken(self, x: Any) -> Any:
        return {"y": tf.sparse.from_dense(tf.matmul(x, self.table)), "y_1": x}

    @tf.function(input_signature=VECTORS)
    def optional(self, x: Any) -> Any:
        return {"y": tf.matmul(x, self.table), "maybe": tf.experimental.Optional.from_value(x)}


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, composite ones as TensorFlow takes them apart."""
    found = {}
    for name, value in values.items():
        for number, part in enumerate(tf.nest.flatten(value, expand_composites=True)):
            found[f"{name}_{number}" if number else name] = part
    return found


def assert_equal(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.landing
@pytest.mark.parametrize("options", [{}, {"updates": Updates()}], ids=["plain", "updatable"])
def test_composite_tensors_are_served_as_their_components(options: dict[str, Any], tmp_path: Path) -> None:
    model = Composites()
    names = ["ragged", "sparse", "slices", "taken", "optional"]
    signatures = {name: getattr(model, name) for name in names}
    tf.saved_model.save(model, str(tmp_path / "source"), signatures)
    loaded, notes = exported(tmp_path / "source", tmp_path / "m", **options)
    served = {name for name in loaded.signatures if not name.startswith("incremental_")}
    assert served == {"ragged", "sparse", "slices"}
    assert "'taken' is left out: 'y' is served as its components, and 'y_1' is taken" in notes
    assert "'optional' is left out: 'maybe' is a composite tensor" in notes and "OptionalSpec" in notes
    assert_equal(answers(loaded, "ragged", **flat({"ids": IDS})), flat(model.ragged(IDS)))
    assert_equal(answers(loaded, "sparse", **flat({"x": SPARSE})), flat(model.sparse(SPARSE)))
    assert_equal(answers(loaded, "slices", x=X), flat(model.slices(X)))


def test_sparse_tensors_of_v1_signatures_are_served_as_their_components(tmp_path: Path) -> None:
    source = tmp_path / "source"
    with tf.Graph().as_default(), tf1.Session() as session:
        x = tf1.sparse_placeholder(tf.float32, [None, 2], name="x")
        table = tf1.get_variable("table", initializer=[[1.0, 2.0], [3.0, 4.0]], use_resource=False)
        outputs = {"y": tf.sparse.sparse_dense_matmul(x, table), "twice": x * 2.0}
        session.run(tf1.global_variables_initializer())
        infos = [
            {name: tf1.saved_model.build_tensor_info(tensor) for name, tensor in tensors.items()}
            for tensors in ({"x": x}, outputs)
        ]
        signature = tf1.saved_model.build_signature_def(*infos, "tensorflow/serving/predict")
        assert signature.outputs["twice"].HasField("coo_sparse")
        builder = tf1.saved_model.Builder(str(source))
        builder.add_meta_graph_and_variables(session, ["serve"], {"serving_default": signature})
        builder.save()
    loaded, _ = exported(source, tmp_path / "m")
    expected = {
        "y": tf.sparse.sparse_dense_matmul(SPARSE, [[1.0, 2.0], [3.0, 4.0]]),
        "twice": SPARSE * 2.0,
    }
    assert_equal(answers(loaded, "serving_default", **flat({"x": SPARSE})), flat(expected))


def test_a_variant_is_no_answer(tmp_path: Path) -> None:
    class Handles(tf.Module):
        @tf.function(input_signature=VECTORS)
        def __call__(self, x: Any) -> Any:
            return {"handle": tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=[2])}

    model = Handles()
    tf.saved_model.save(model, str(tmp_path / "source"), {"serving_default": model.__call__})
    with pytest.raises(NotServable) as error:
        load_graph(GraphRequest(model=str(tmp_path / "source")))
    assert "'handle' is a variant" in error.value.cause


def drop_name(signature: Any) -> None:
    signature.outputs["sum"].ClearField("name")


def drop_components(signature: Any) -> None:
    signature.outputs["rows"].composite_tensor.ClearField("components")


@pytest.mark.parametrize(("damage", "output"), [(drop_name, "sum"), (drop_components, "rows")])
def test_an_output_that_names_no_tensor_is_named(damage: Any, output: str, tmp_path: Path) -> None:
    model = Composites()
    tf.saved_model.save(model, str(tmp_path), {"serving_default": model.ragged})
    file = tmp_path / "saved_model.pb"
    saved_model = protos.SavedModel.FromString(file.read_bytes())
    damage(saved_model.meta_graphs[0].signature_def["serving_default"])
    file.write_bytes(saved_model.SerializeToString())
    with pytest.raises(NotServable) as error:
        load_graph(GraphRequest(model=str(tmp_path)))
    assert f"{output!r} names no tensor" in error.value.cause


def test_tables_that_a_program_fills_are_found_by_the_restore_function(tmp_path: Path) -> None:
    class Words(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counts = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
            self.dense = tf.lookup.experimental.DenseHashTable(tf.string, tf.float32, 0.0, "", "-")

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="words")])
        def __call__(self, words: Any) -> Any:
            return {"count": self.counts.lookup(words), "weight": self.dense.lookup(words)}

    model = Words()
    model.counts.insert(["a"], tf.constant([5], tf.int64))
    model.dense.insert(["b"], [0.5])
    tf.saved_model.save(model, str(tmp_path / "source"), {"serving_default": model.__call__})
    loaded, _ = exported(tmp_path / "source", tmp_path / "m")
    found = answers(loaded, "serving_default", words=tf.constant(["a", "b"]))
    assert found["count"].tolist() == [5, -1] and found["weight"].tolist() == [0.0, 0.5]
