"""`.meta` files: signatures by tensor names, from collections, from a file; and damaged files."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporter.catalog import SliceSpec
from exporter.errors import CorruptFile, ExportError, GraphError, UnknownTensor, UsageError
from exporter.graph.graph_files import read_saved_model
from exporter.graph.keys import parse_slice_spec
from exporter.graph.load import GraphRequest, clean, load_graph, load_source
from exporter.graph.metagraph import read_metagraph
from exporter.options import ExportRequest
from exporter.pipeline.full import export
from exporter.wire import protos
from tests.support.budget import times
from tests.support.graph_runs import Trained, serve, train


def scorer(v1: Any) -> None:
    import tensorflow as tf

    image = v1.placeholder(tf.float32, [None, 4], name="cnn/image")
    logits = tf.matmul(image, v1.get_variable("w", [4, 3]), name="cnn/logits")
    tf.nn.softmax(logits, name="cnn/Softmax")
    tf.nn.top_k(logits, 2, name="cnn/best")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("scorer"), scorer)


IMAGES = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.mark.parametrize(
    ("request_", "outputs"),
    [
        (
            GraphRequest(model="", inputs={"image": "cnn/image:0"}, outputs={"scores": "cnn/Softmax:0"}),
            {"scores": "cnn/Softmax:0"},
        ),
        (
            GraphRequest(model="", inputs={"image": "cnn/image"}, outputs={"scores": "cnn/Softmax"}),
            {"scores": "cnn/Softmax:0"},
        ),
        (
            GraphRequest(model="", inputs={"image": "cnn/image"}, outputs={"ids": "cnn/best:1"}),
            {"ids": "cnn/best:1"},
        ),
    ],
)
def test_tensors_by_name(trained: Trained, request_: GraphRequest, outputs: dict[str, str]) -> None:
    graph = load_graph(GraphRequest(model=trained.meta, inputs=request_.inputs, outputs=request_.outputs))

    served = serve(graph, trained.value, {"image": IMAGES})
    for alias, name in outputs.items():
        assert np.array_equal(served[alias], trained.run(name, {"cnn/image:0": IMAGES}))


@pytest.mark.parametrize(
    ("name", "message", "nearest"),
    [
        ("cnn/Sotfmax:0", "does not have", "cnn/Softmax:0"),
        ("Softmax", "does not have", "cnn/Softmax:0"),
        ("logit", "does not have", "cnn/logits:0"),
        ("cnn/best:2", "has 2 output", ""),
        ("cnn/best:-1", "does not have", "cnn/best:0"),
        ("^cnn/best", "does not have", "cnn/best:0"),
        ("", "does not have", ""),
    ],
)
def test_unknown_tensors_are_told_with_their_neighbours(
    trained: Trained, name: str, message: str, nearest: str
) -> None:
    with pytest.raises(UnknownTensor, match=message) as caught:
        load_graph(GraphRequest(model=trained.meta, inputs={"image": "cnn/image"}, outputs={"scores": name}))
    assert nearest in caught.value.cause
    assert caught.value.exit_code == 2


def test_a_signatures_file_gives_several(trained: Trained, tmp_path: Path) -> None:
    file = tmp_path / "signatures.json"
    both = {
        "serving_default": {"inputs": {"image": "cnn/image"}, "outputs": {"scores": "cnn/Softmax"}},
        "from_logits": {
            "inputs": {"logits": "cnn/logits"},
            "outputs": {"best": "cnn/best:1"},
            "method": "predict",
        },
    }
    file.write_text(json.dumps(both))

    graph = load_graph(GraphRequest(model=trained.meta, signatures=file))

    expected = trained.run("cnn/best:1", {"cnn/image:0": IMAGES})
    logits = trained.run("cnn/logits:0", {"cnn/image:0": IMAGES})
    assert np.array_equal(serve(graph, trained.value, {"logits": logits}, "from_logits")["best"], expected)
    assert set(graph.meta_graph.signature_def) == set(both)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"s": 1}',
        '{"s": {"inputs": {}}}',
        '{"s": {"outputs": {}}}',
        '{"s": {"outputs": {"y": 1}}}',
        '{"s": {"outputs": {"y": "y"}, "methods": "predict"}}',
        '{"s": {"outputs": {"y": "y"}, "method": "rank"}}',
        '{"s": {"outputs": {"y": "y"}, "method": {}}}',
        '{"s": {"outputs": {"y": "y"}, "method": []}}',
        '{"s": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"s": {"outputs": {"y": "y"}, "examples": {"f": {}}}}',
    ],
)
def test_signatures_files_that_are_none(trained: Trained, tmp_path: Path, text: str) -> None:
    file = tmp_path / "signatures.json"
    file.write_text(text)

    with pytest.raises(UsageError, match=r"signatures\.json"):
        load_graph(GraphRequest(model=trained.meta, signatures=file))


def rewritten(trained: Trained, path: Path, change: Any) -> str:
    meta_graph = read_metagraph(Path(trained.meta))
    change(meta_graph)
    path.write_bytes(meta_graph.SerializeToString())
    return str(path)


def test_collections_that_hold_json_are_a_signature(trained: Trained, tmp_path: Path) -> None:
    def add(meta_graph: Any) -> None:
        for name, tensors in (("inputs", {"image": "cnn/image:0"}), ("outputs", {"scores": "cnn/Softmax:0"})):
            meta_graph.collection_def[name].bytes_list.value.append(json.dumps(tensors).encode())

    graph = load_graph(GraphRequest(model=rewritten(trained, tmp_path / "ml.meta", add)))

    signature = graph.meta_graph.signature_def["serving_default"]
    assert (dict(signature.inputs)["image"].name, signature.outputs["scores"].name) == (
        "cnn/image:0",
        "cnn/Softmax:0",
    )


@pytest.mark.parametrize("values", [[], [b"{}", b"{}"], [b"[]"], [b"\xff"], [b'{"x": 1}']])
def test_collections_that_hold_something_else(trained: Trained, tmp_path: Path, values: list[bytes]) -> None:
    def add(meta_graph: Any) -> None:
        meta_graph.collection_def["inputs"].bytes_list.value.extend(values)
        meta_graph.collection_def["outputs"].bytes_list.value.append(b'{"scores": "cnn/Softmax"}')

    with pytest.raises(GraphError, match="'inputs'"):
        load_graph(GraphRequest(model=rewritten(trained, tmp_path / "ml.meta", add)))


def test_a_graph_without_signatures_says_how_to_find_names(trained: Trained) -> None:
    with pytest.raises(UsageError, match="nothing says what to serve") as caught:
        load_graph(GraphRequest(model=trained.meta))
    assert "cnn/image" in caught.value.cause
    assert "cnn/Softmax" in caught.value.cause
    assert "inspect" in caught.value.hint


def test_a_graphs_own_signatures_are_taken(trained: Trained, tmp_path: Path) -> None:
    request = GraphRequest(
        model=trained.meta, inputs={"image": "cnn/image"}, outputs={"scores": "cnn/Softmax"}
    )
    own = load_source(request).meta_graph.signature_def["serving_default"]

    def add(meta_graph: Any) -> None:
        meta_graph.signature_def["mine"].CopyFrom(own)

    graph = load_graph(GraphRequest(model=rewritten(trained, tmp_path / "own.meta", add)))
    assert list(graph.meta_graph.signature_def) == ["mine"]

    def break_it(meta_graph: Any) -> None:
        add(meta_graph)
        meta_graph.signature_def["mine"].outputs["scores"].name = "gone:0"

    with pytest.raises(UnknownTensor, match="gone"):
        load_graph(GraphRequest(model=rewritten(trained, tmp_path / "own.meta", break_it)))


def test_text_graphs_are_read(trained: Trained, tmp_path: Path) -> None:
    path = tmp_path / "graph.pbtxt"
    path.write_text(text_format.MessageToString(read_metagraph(Path(trained.meta))))

    graph = load_graph(
        GraphRequest(model=str(path), inputs={"image": "cnn/image"}, outputs={"scores": "cnn/Softmax"})
    )

    assert [variable.key for variable in graph.variables] == ["w"]


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"garbage, not a graph", b"\xff" * 100])
def test_files_that_hold_no_graph(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.meta"
    path.write_bytes(content)

    with pytest.raises(CorruptFile):
        load_graph(GraphRequest(model=str(path), outputs={"y": "y"}))


@settings(max_examples=times(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_ends_in_a_named_error_or_in_a_graph(
    trained: Trained, tmp_path: Path, data: st.DataObject
) -> None:
    whole = Path(trained.meta).read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    damaged = bytearray(whole[:cut])
    for position in data.draw(st.lists(st.integers(0, max(0, cut - 1)), max_size=4)) if cut else []:
        damaged[position] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "model.meta"
    path.write_bytes(bytes(damaged))

    try:
        graph = load_graph(
            GraphRequest(model=str(path), inputs={"image": "cnn/image"}, outputs={"scores": "cnn/Softmax"})
        )
    except ExportError as error:
        assert error.message
    else:
        assert graph.meta_graph.signature_def


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GraphRequest(model=None), "nothing says what to serve"),
        (GraphRequest(model="gone.meta"), "cannot be read"),
        (GraphRequest(model="gone"), "expected pkg.mod:fn"),
        (GraphRequest(model="."), "no saved_model.pb"),
        (GraphRequest(model="model.meta", model_args={"a": "1"}), "--model-arg"),
    ],
)
def test_requests_that_name_nothing(request_: GraphRequest, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_graph(request_)


def test_inputs_need_outputs_and_one_way(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="without --output"):
        load_graph(GraphRequest(model=trained.meta, inputs={"image": "cnn/image"}))
    with pytest.raises(UsageError, match="exclude"):
        load_graph(GraphRequest(model=trained.meta, outputs={"y": "y"}, signatures=tmp_path / "s.json"))


def test_loading_imports_no_tensorflow(trained: Trained) -> None:
    program = (
        "import sys; from exporter.graph.load import GraphRequest, load_graph; "
        f"load_graph(GraphRequest(model={trained.meta!r}, inputs={{'image': 'cnn/image'}}, "
        "outputs={'scores': 'cnn/Softmax'})); "
        "sys.exit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("", None),
        ("21 6 0,7:0,6", SliceSpec((21, 6), (0, 0), (7, 6))),
        ("21 6 7,7:-", SliceSpec((21, 6), (7, 0), (7, 6))),
        ("8 2,3", SliceSpec((8,), (2,), (3,))),
        ("a b", None),
        ("21 6 0,7", None),
        ("21 0,7,9", None),
    ],
)
def test_slice_specs_as_a_saver_writes_them(text: str, spec: SliceSpec | None) -> None:
    assert parse_slice_spec(text) == spec
    if spec is not None:
        assert parse_slice_spec(spec.restore_spec) == spec


def test_the_source_keeps_the_graph_as_it_was(trained: Trained) -> None:
    request = GraphRequest(
        model=trained.meta, inputs={"image": "cnn/image"}, outputs={"scores": "cnn/Softmax"}
    )
    source = load_source(request)
    before = source.meta_graph.SerializeToString(deterministic=True)

    clean(source)

    original = read_metagraph(Path(trained.meta))
    assert [n.name for n in source.meta_graph.graph_def.node] == [n.name for n in original.graph_def.node]
    assert source.meta_graph.SerializeToString(deterministic=True) == before
    assert source.keys["w"].key == "w"
    assert (
        protos.MetaGraphDef.FromString(before).signature_def["serving_default"].outputs["scores"].dtype == 1
    )


@pytest.mark.parametrize(
    ("written", "served"),
    [
        ("1.15.5-deeprec2402", "1.15.5"),
        ("0.12.head", "0.12"),
        ("2.4.0-rc1", "2.4.0-rc1"),
        ("1.14.0+nv", "1.14.0+nv"),
        ("head", version("tensorflow")),
    ],
)
def test_a_forks_version_keeps_nobody_from_loading(
    trained: Trained, tmp_path: Path, written: str, served: str
) -> None:
    """`tf.saved_model.load` parses the version of the TensorFlow that a graph comes from."""
    import tensorflow as tf

    meta_graph = read_metagraph(Path(trained.meta))
    meta_graph.meta_info_def.tensorflow_version = written
    meta_graph.meta_info_def.tensorflow_git_version = ""
    path = tmp_path / "fork.meta"
    path.write_bytes(meta_graph.SerializeToString())
    ends: Any = {"inputs": {"image": "cnn/image"}, "outputs": {"scores": "cnn/Softmax"}}
    done = export(ExportRequest(trained.prefix, tmp_path / "model", model=str(path), **ends))
    (found,) = read_saved_model(done.published.path).meta_graphs
    assert found.meta_info_def.tensorflow_version == served
    assert found.meta_info_def.tensorflow_git_version == ("" if served == written else written)
    assert tf.saved_model.load(str(done.published.path)).signatures["serving_default"]
