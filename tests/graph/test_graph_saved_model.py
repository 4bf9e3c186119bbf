"""Existing SavedModels, TF1-style and object-based, are served again with new weights."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import CorruptFile, GraphError, MissingAsset, NotServable, UnsupportedFormat, UsageError
from exporter.graph.load import GraphRequest, load_graph
from exporter.wire import protos
from tests.support.graph_runs import ops, serve, v1_graph

WORDS = ["apple", "pear", "plum"]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("train") / "words.txt"
    path.write_text("\n".join(WORDS) + "\n")
    return path


@pytest.fixture(scope="module")
def object_based(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Path:
    """A tf.Module with a table, an embedding read whole (as Keras does), and a counter it updates."""
    import tensorflow as tf

    class Ranker(tf.Module):
        def __init__(self) -> None:
            self.rows = tf.Variable(tf.zeros([3, 4]), name="ranker/rows")
            self.bias = tf.Variable(tf.zeros([4]), name="ranker/bias")
            self.calls = tf.Variable(0, name="ranker/calls")
            words = tf.lookup.TextFileInitializer(
                str(vocabulary), tf.string, tf.lookup.TextFileIndex.WHOLE_LINE,
                tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER,
            )  # fmt: skip
            self.table = tf.lookup.StaticHashTable(words, 0)
            self.unused = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="words")], autograph=False)
        def __call__(self, words: Any) -> Any:
            self.calls.assign_add(1)
            rows = tf.gather(tf.identity(self.rows), self.table.lookup(words))
            steps = lambda i, total: (i + 1, total + tf.cast(i, tf.float32) * rows)  # noqa: E731 - two of a kind
            _, total = tf.while_loop(lambda i, _: i < 3, steps, [0, rows])
            return {"scores": total + self.bias}

        @tf.function(input_signature=[tf.TensorSpec([], tf.int64)])
        def other(self, value: Any) -> Any:
            return {"value": self.unused.lookup(tf.cast(value, tf.int32))}

    path = tmp_path_factory.mktemp("object_based") / "1"
    model = Ranker()
    tf.saved_model.save(model, str(path), signatures=model.__call__.get_concrete_function())
    return path


VALUES = {
    "ranker/rows": np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32),
    "ranker/bias": np.ones(4, np.float32),
    "ranker/calls": np.int32(0),
}


def test_an_object_based_model_gets_new_weights(object_based: Path) -> None:
    graph = load_graph(GraphRequest(model=str(object_based)))

    served = serve(graph, VALUES.__getitem__, {"words": [b"plum", b"apple", b"?"]})["scores"]
    rows = VALUES["ranker/rows"][[2, 0, 0]]
    assert np.allclose(served, rows + 3 * rows + VALUES["ranker/bias"], atol=1e-6)
    assert {variable.key for variable in graph.variables} >= {"ranker/rows", "ranker/bias"}
    assert not graph.meta_graph.HasField("object_graph_def")
    assert list(graph.meta_graph.signature_def) == ["serving_default"]


def test_it_is_clean_inside_functions_too(object_based: Path) -> None:
    graph = load_graph(GraphRequest(model=str(object_based)))

    assert not ops(graph) & {"RestoreV2", "SaveV2", "AssignAddVariableOp", "AssignVariableOp", "GatherV2"}
    assert "ResourceGather" in ops(graph)
    tables = [node for node in graph.meta_graph.graph_def.node if node.op == "HashTableV2"]
    assert len(tables) == 1  # the unused one is gone


def test_its_assets_are_found_inside_it(object_based: Path, vocabulary: Path) -> None:
    graph = load_graph(GraphRequest(model=str(object_based)))

    (asset,) = graph.assets
    assert asset.source == object_based / "assets" / "words.txt"
    constant = next(node for node in graph.meta_graph.graph_def.node if node.name == asset.node)
    assert constant.op == "Const"
    assert constant.attr["value"].tensor.string_val == [b"words.txt"]


def test_a_missing_asset_is_named(object_based: Path, tmp_path: Path) -> None:
    copy = tmp_path / "1"
    shutil.copytree(object_based, copy)
    (copy / "assets" / "words.txt").unlink()

    with pytest.raises(MissingAsset, match=r"words\.txt"):
        load_graph(GraphRequest(model=str(copy)))


@pytest.fixture(scope="module")
def session_based(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Path:
    import tensorflow as tf

    v1 = tf.compat.v1
    path = tmp_path_factory.mktemp("session_based") / "1"
    with v1_graph(resource=False) as graph, v1.Session(graph=graph) as session:
        words = v1.placeholder(tf.string, [None], name="words")
        table = tf.lookup.StaticHashTable(
            tf.lookup.TextFileInitializer(
                str(vocabulary), tf.string, tf.lookup.TextFileIndex.WHOLE_LINE,
                tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER,
            ),
            0,
        )  # fmt: skip
        rows = v1.get_variable("ranker/rows", [3, 4], partitioner=v1.fixed_size_partitioner(2))
        with v1.device("/job:localhost/task:0"):
            scores = v1.nn.embedding_lookup(rows, table.lookup(words), partition_strategy="div")
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        builder = v1.saved_model.Builder(str(path))
        signature = v1.saved_model.predict_signature_def({"words": words}, {"scores": scores})
        builder.add_meta_graph_and_variables(
            session, ["serve"], {"serving_default": signature},
            assets_collection=v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS),
            main_op=v1.tables_initializer(),
        )  # fmt: skip
        builder.save()
    return path


def test_a_session_based_model_gets_new_weights(session_based: Path) -> None:
    graph = load_graph(GraphRequest(model=str(session_based)))

    served = serve(graph, VALUES.__getitem__, {"words": [b"plum", b"apple"]})["scores"]
    assert np.array_equal(served, VALUES["ranker/rows"][[2, 0]])
    assert {variable.key for variable in graph.variables} == {"ranker/rows"}
    assert [asset.source for asset in graph.assets] == [session_based / "assets" / "words.txt"]


def test_other_signatures_can_be_named(session_based: Path) -> None:
    source = protos.SavedModel.FromString((session_based / "saved_model.pb").read_bytes())
    scores = source.meta_graphs[0].signature_def["serving_default"].outputs["scores"].name

    graph = load_graph(
        GraphRequest(model=str(session_based), inputs={"text": "words"}, outputs={"rows": scores})
    )

    assert list(graph.meta_graph.signature_def["serving_default"].inputs) == ["text"]


def changed(path: Path, target: Path, change: Any) -> str:
    model = protos.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    change(model)
    shutil.copytree(path, target)
    (target / "saved_model.pb").write_bytes(model.SerializeToString())
    return str(target)


def tagged(path: Path, target: Path, *tags: str) -> str:
    """A copy whose graph is there once for each of these tags (by commas)."""

    def retag(model: Any) -> None:
        for text in tags:
            model.meta_graphs.add().CopyFrom(model.meta_graphs[0])
            model.meta_graphs[-1].meta_info_def.tags[:] = filter(None, text.split(","))
        del model.meta_graphs[0]

    return changed(path, target, retag)


@pytest.mark.parametrize(
    ("tags", "asked"),
    [
        (["train,gpu"], None),
        (["train"], "train"),
        (["train", "serve"], "train"),
        (["train", "train,gpu"], "train"),
        (["train", "serve,gpu"], "gpu"),
        (["train", "serve,gpu", "serve,tpu"], "gpu,serve"),
        (["train", "serve", "serve,tpu"], None),
        (["train", ""], None),
        (["train", ""], ""),
        (["serve", "eval", ""], ""),
        (["eval", "gpu", "gpu,tpu"], None),
    ],
)
def test_a_graph_is_chosen_by_its_tags(
    session_based: Path, tmp_path: Path, tags: list[str], asked: str | None
) -> None:
    model = tagged(session_based, tmp_path / "1", *tags)
    assert load_graph(GraphRequest(model=model, tag=asked)).variables


@pytest.mark.parametrize(
    ("tags", "asked", "message"),
    [
        (["train", "eval"], None, "no graph of .* has the tag 'serve'"),
        (["train", "serve"], "eval", "no graph of .* has the tag 'eval'"),
        (["serve,gpu", "serve,tpu"], None, "2 graphs of .* have the tag 'serve'"),
        (["train,gpu", "train,tpu,xla"], "train", "2 graphs of .* have the tag 'train'"),
        (["train", "train"], "train", "2 graphs of .* have the tag 'train'"),
    ],
)
def test_tags_are_listed_if_they_do_not_tell(
    session_based: Path, tmp_path: Path, tags: list[str], asked: str | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load_graph(GraphRequest(model=tagged(session_based, tmp_path / "1", *tags), tag=asked))
    assert "; ".join(tags) in caught.value.cause
    assert "--tag" in caught.value.hint


def test_tags_are_for_saved_models(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--tag"):
        load_graph(GraphRequest(model=str(tmp_path / "model.meta"), tag="serve"))


def test_the_plainest_of_several_graphs_is_taken(session_based: Path, tmp_path: Path) -> None:
    def add(model: Any) -> None:
        model.meta_graphs.insert(0, protos.MetaGraphDef())
        model.meta_graphs[0].meta_info_def.tags.extend(["serve", "tpu"])

    assert load_graph(GraphRequest(model=changed(session_based, tmp_path / "1", add))).variables


def test_damage_and_chunks_are_named(session_based: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    cut.mkdir()
    whole = (session_based / "saved_model.pb").read_bytes()
    (cut / "saved_model.pb").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptFile):
        load_graph(GraphRequest(model=str(cut)))

    chunked = tmp_path / "chunked"
    chunked.mkdir()
    (chunked / "saved_model.cpb").write_bytes(b"x")
    with pytest.raises(UnsupportedFormat, match="chunks"):
        load_graph(GraphRequest(model=str(chunked)))


def test_an_asset_outside_the_directory_is_refused(session_based: Path, tmp_path: Path) -> None:
    def escape(model: Any) -> None:
        graph = model.meta_graphs[0]
        asset = graph.asset_file_def.add(filename="../../etc/passwd")
        asset.tensor_info.name = "words:0"

    with pytest.raises(CorruptFile, match="outside"):
        load_graph(GraphRequest(model=changed(session_based, tmp_path / "1", escape)))


def test_a_missing_function_is_named(object_based: Path, tmp_path: Path) -> None:
    def drop(model: Any) -> None:
        library = model.meta_graphs[0].graph_def.library
        kept = [f for f in library.function if "signature_wrapper" not in f.signature.name]
        copies = [protos.FunctionDef.FromString(f.SerializeToString()) for f in kept]
        del library.function[:]
        library.function.extend(copies)

    with pytest.raises(GraphError, match="calls function"):
        load_graph(GraphRequest(model=changed(object_based, tmp_path / "1", drop)))


def test_a_table_without_its_initialiser_is_refused(object_based: Path, tmp_path: Path) -> None:
    def drop(model: Any) -> None:
        del model.meta_graphs[0].signature_def["__saved_model_init_op"]
        model.meta_graphs[0].collection_def.clear()

    with pytest.raises(NotServable, match="nothing in the graph fills table"):
        load_graph(GraphRequest(model=changed(object_based, tmp_path / "1", drop)))


@pytest.mark.parametrize("model", ["object_based", "session_based"])
def test_loading_imports_no_tensorflow(model: str, request: pytest.FixtureRequest) -> None:
    path = str(request.getfixturevalue(model))
    program = (
        "import sys; from exporter.graph.load import GraphRequest, load_graph; "
        f"load_graph(GraphRequest(model={path!r})); sys.exit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_objects_of_one_name_stay_apart(tmp_path: Path) -> None:
    import tensorflow as tf

    class Pair(tf.Module):
        def __init__(self) -> None:
            self.a, self.b = tf.Variable(1.0, name="w"), tf.Variable(2.0, name="w")

        @tf.function(input_signature=[tf.TensorSpec([], tf.float32, name="x")])
        def __call__(self, x: Any) -> Any:
            return {"y": x * self.a + self.b}

    model = Pair()
    tf.saved_model.save(model, str(tmp_path / "1"), signatures=model.__call__.get_concrete_function())

    graph = load_graph(GraphRequest(model=str(tmp_path / "1")))

    assert {variable.key for variable in graph.variables} == {"w", "w_1"}


def test_a_keras_model_as_exported(tmp_path: Path) -> None:
    import keras

    inputs = keras.Input([3], dtype="int64", name="ids")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(11, 4, name="table")(inputs))
    hidden = keras.layers.BatchNormalization(name="norm")(keras.layers.Dropout(0.5)(hidden))
    model = keras.Model(inputs, keras.layers.Dense(2, name="out")(hidden))
    model.export(str(tmp_path / "1"), verbose=False)

    graph = load_graph(GraphRequest(model=str(tmp_path / "1")))

    values = {variable.path: np.asarray(variable) for variable in model.variables}
    ids = np.array([[1, 2, 10], [0, 0, 4]])
    served = serve(graph, values.__getitem__, {graph_input(graph): ids})
    assert np.allclose(next(iter(served.values())), model.predict(ids, verbose=0), atol=1e-6)
    assert "ResourceGather" in ops(graph)
    assert not graph.notes


def graph_input(graph: Any) -> str:
    return next(iter(graph.meta_graph.signature_def["serving_default"].inputs))
