"""Serialized tf.Examples in front of a graph that takes features: parsed as tf.io.parse_example does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import ExportError, UnknownTensor, UsageError
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.load import GraphRequest, load_graph
from tests.support.graph_runs import Trained, ops, serve, train


def features(v1: Any) -> None:
    """A graph that takes features of many types and hands them on."""
    import tensorflow as tf

    v1.get_variable("unused", [1])
    dense = {
        "size": v1.placeholder(tf.float32, [8, 2], "in/size"),
        "age": v1.placeholder(tf.int32, [None], "in/age"),
        "member": v1.placeholder(tf.bool, [None, 1], "in/member"),
        "exact": v1.placeholder(tf.float64, [None], "in/exact"),
        "name": v1.placeholder(tf.string, [None], "in/name"),
        "history": v1.placeholder(tf.int64, [None, None], "in/history"),
        "loose": v1.placeholder(tf.float32, None, "in/loose"),
    }
    for name, tensor in dense.items():
        tf.identity(tensor, f"out/{name}")
    for name, dtype in (("words", tf.string), ("ids", tf.int32)):
        sparse = v1.sparse_placeholder(dtype, [None, None], f"in/{name}")
        tf.sparse.to_dense(sparse, name=f"out/{name}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("features"), features)


WORDS = {"sparse": ["in/words/indices", "in/words/values", "in/words/shape"]}
IDS = {"sparse": ["in/ids/indices", "in/ids/values", "in/ids/shape"]}


def load(trained: Trained, directory: Path, signatures: Any) -> InferenceGraph:
    file = directory / "signatures.json"
    file.write_text(json.dumps(signatures))
    return load_graph(GraphRequest(model=trained.meta, signatures=file))


def load_examples(trained: Trained, directory: Path, examples: Any, **entry: Any) -> InferenceGraph:
    features = examples if isinstance(examples, dict) and examples else ["age"]
    outputs = {name: f"out/{name}" for name in features}
    return load(trained, directory, {"serving_default": {"examples": examples, "outputs": outputs, **entry}})


def example(**values: Any) -> bytes:
    import tensorflow as tf

    made = tf.train.Example()
    for name, value in values.items():
        feature = made.features.feature[name]
        kind = {str: feature.bytes_list, int: feature.int64_list, float: feature.float_list}[type(value[0])]
        kind.value.extend(v.encode() if isinstance(v, str) else v for v in value)
    return bytes(made.SerializeToString())


FULL = {"size": [1.5, -2.0], "age": [3], "member": [1], "exact": [0.1], "name": ["a\0"], "history": [7, 8, 9]}
BATCH = [
    {**FULL, "words": ["x", "y"], "ids": [5]},
    {"size": [0.0, 4.0], "words": ["z"], "ids": [1, 2, 3]},
    {**FULL, "age": [-1], "name": ["é"], "history": [1]},
]


def test_every_kind_of_feature(trained: Trained, tmp_path: Path) -> None:
    import tensorflow as tf

    examples = {
        "size": "in/size",
        "age": {"tensor": "in/age:0", "default": -7},
        "member": {"tensor": "in/member", "default": [0]},
        "exact": {"tensor": "in/exact", "default": 2},
        "name": {"tensor": "in/name", "default": "nobody"},
        "history": {"tensor": "in/history", "shape": [-1], "default": 6},
        "words": WORDS,
        "ids": IDS,
    }
    graph = load_examples(trained, tmp_path, examples)
    batch = [example(**values) for values in BATCH]
    found = serve(graph, trained.value, {"examples": np.array(batch, object)})
    stock = tf.io.parse_example(
        batch,
        {
            "size": tf.io.FixedLenFeature([2], tf.float32),
            "age": tf.io.FixedLenFeature([], tf.int64, -7),
            "member": tf.io.FixedLenFeature([1], tf.int64, [0]),
            "exact": tf.io.FixedLenFeature([], tf.float32, 2.0),
            "name": tf.io.FixedLenFeature([], tf.string, "nobody"),
            "history": tf.io.FixedLenSequenceFeature([], tf.int64, allow_missing=True, default_value=6),
            "words": tf.io.VarLenFeature(tf.string),
            "ids": tf.io.VarLenFeature(tf.int64),
        },
    )
    for name, value in stock.items():
        dense = tf.sparse.to_dense(value) if isinstance(value, tf.SparseTensor) else value
        types = {"age": np.int32, "ids": np.int32, "member": np.bool_, "exact": np.float64}
        expected = dense.numpy().astype(types.get(name, dense.dtype.as_numpy_dtype))
        np.testing.assert_array_equal(found[name], expected, err_msg=name, strict=True)
    assert "Placeholder" in ops(graph)
    assert [n.name for n in graph.meta_graph.graph_def.node if n.op == "Placeholder"] == ["examples"]


def test_names_of_inputs_are_those_that_model_servers_ask_for(trained: Trained, tmp_path: Path) -> None:
    signatures = {
        "classify": {"examples": {"name": "in/name", "size": "in/size"}, "outputs": {"scores": "out/size"}},
        "regress": {"examples": "classify", "outputs": {"outputs": "out/size"}},
        "predict": {"examples": "classify", "outputs": {"size": "out/size"}},
        "raw": {"inputs": {"size": "in/size"}, "outputs": {"size": "out/size", "same": "in/size"}},
    }
    for name in ("classify", "regress"):
        signatures[name]["method"] = name
    graph = load(trained, tmp_path, signatures)
    definitions = graph.meta_graph.signature_def
    assert {name: [*definitions[name].inputs] for name in definitions} == {
        "classify": ["inputs"],
        "regress": ["inputs"],
        "predict": ["examples"],
        "raw": ["size"],
    }
    taken = {
        info.name for name in ("classify", "regress", "predict") for info in definitions[name].inputs.values()
    }
    assert taken == {"examples:0"}
    assert [dim.size for dim in definitions["raw"].inputs["size"].tensor_shape.dim] == [-1, 2]
    raw = serve(graph, trained.value, {"size": [[1.0, 2.0]]}, "raw")
    assert raw["size"].tolist() == raw["same"].tolist() == [[1.0, 2.0]]


def test_an_example_without_a_feature_that_has_no_default(trained: Trained, tmp_path: Path) -> None:
    import tensorflow as tf

    graph = load_examples(trained, tmp_path, {"age": "in/age"})
    with pytest.raises(tf.errors.InvalidArgumentError, match="age"):
        serve(graph, trained.value, {"examples": np.array([example(size=[1.0])], object)})


def test_the_source_s_own_scopes_are_not_taken(tmp_path: Path) -> None:
    def build(v1: Any) -> None:
        import tensorflow as tf

        v1.get_variable("unused", [1])
        x = v1.placeholder(tf.float32, [None], "examples")
        tf.add(x, tf.constant(1.0, name="parse_examples"), name="out/examples")

    trained = train(tmp_path, build)
    graph = load_examples(trained, tmp_path, {"examples": "examples"})
    found = serve(graph, trained.value, {"examples": np.array([example(examples=[2.0])], object)})
    assert found["examples"].tolist() == [3.0]


BAD = {
    "no object": ([], "not an object of features"),
    "nothing": ({}, "not an object of features"),
    "another signature that has none": ("other", "not an object of features"),
    "a number": ({"age": 3}, "'age' is not a feature"),
    "no tensor": ({"age": {"shape": []}}, "'age' is not a feature"),
    "both": ({"age": {"tensor": "in/age", "sparse": "in/ids"}}, "'age' is not a feature"),
    "an unknown key": ({"age": {"tensor": "in/age", "shapes": []}}, "'age' is not a feature"),
    "two of three": ({"ids": {"sparse": ["in/ids/indices", "in/ids/values"]}}, "'ids' is not a feature"),
    "no names": ({"ids": {"sparse": [1, 2, 3]}}, "'ids' is not a feature"),
    "a sparse default": ({"ids": {**IDS, "default": 0}}, "neither shape nor default"),
    "a shape that is none": ({"age": {"tensor": "in/age", "shape": ["2"]}}, "'age' is not a feature"),
    "a hole in a shape": ({"size": {"tensor": "in/size", "shape": [2, -1]}}, "'size' is not a feature"),
    "a dtype of no Example": ({"age": {"tensor": "in/age", "dtype": "int32"}}, "dtype 'int32'"),
    "text for numbers": ({"age": {"tensor": "in/age", "dtype": "string"}}, "holds string"),
    "numbers for text": ({"name": {"tensor": "in/name", "dtype": "int64"}}, "holds int64"),
    "another rank": ({"age": {"tensor": "in/age", "shape": [1]}}, r"shape \[1\], but in/age:0 takes \[-1\]"),
    "another length": ({"size": {"tensor": "in/size", "shape": [3]}}, r"shape \[3\]"),
    "an unknown shape": ({"loose": "in/loose"}, "does not tell the shape"),
    "an unknown length": ({"history": "in/history"}, "does not tell the shape"),
    "a default of another type": ({"age": {"tensor": "in/age", "default": 0.5}}, "cannot be its default"),
    "a default text": ({"age": {"tensor": "in/age", "default": "x"}}, "cannot be its default"),
    "a default number": ({"name": {"tensor": "in/name", "default": 1}}, "cannot be its default"),
    "a default of another shape": (
        {"size": {"tensor": "in/size", "default": [1, 2, 3]}},
        "cannot be its default",
    ),
    "no sparse tensor": (
        {"ids": {"sparse": ["in/age", "in/ids/values", "in/ids/shape"]}},
        "not a sparse tensor",
    ),
    "one tensor twice": ({"age": "in/age", "years": "in/age:0"}, "'age' and 'years' are both in/age:0"),
}


@pytest.mark.parametrize(("examples", "text"), BAD.values(), ids=BAD.keys())
def test_features_that_are_none(trained: Trained, tmp_path: Path, examples: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        load_examples(trained, tmp_path, examples)


@pytest.mark.parametrize("feature", ["in/nothing", {"sparse": "in/age"}])
def test_features_of_unknown_tensors(trained: Trained, tmp_path: Path, feature: Any) -> None:
    with pytest.raises(UnknownTensor, match="feature 'age'"):
        load_examples(trained, tmp_path, {"age": feature})


def test_inputs_and_examples_exclude_each_other(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="both inputs and examples"):
        load_examples(trained, tmp_path, {"age": "in/age"}, inputs={"age": "in/age"})


def test_one_parser_for_all_signatures(trained: Trained, tmp_path: Path) -> None:
    entry = {"examples": {"age": "in/age"}, "outputs": {"age": "out/age"}}
    other = {"examples": {"size": "in/size"}, "outputs": {"size": "out/size"}}
    with pytest.raises(ExportError, match="parse different features") as caught:
        load(trained, tmp_path, {"one": entry, "two": other})
    assert '"examples": "one"' in caught.value.hint
