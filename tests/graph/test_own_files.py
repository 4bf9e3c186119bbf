"""What runs when a graph is served or compared reads the version's own files, whatever way a path takes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from exporter.errors import AccessRefused, GraphError, NotServable
from exporter.graph.outside import outside_ops
from exporter.options import ExportRequest, Verify
from exporter.pipeline.full import export
from exporter.wire import protos
from tests.support.commands import export_model
from tests.support.foreign_models import WORDS, Answering
from tests.support.graph_runs import train
from tests.support.trained import answers_in_session

v1 = tf.compat.v1
ENDS: Any = {"inputs": {"x": "x"}, "outputs": {"y": "y"}}
TYPED = ("--input", "x=x", "--output", "y=y")
WAYS = [(), ("--verify", "outputs"), ("--new-base=always",), ("--incr",)]
NAMES = ["plain", "outputs", "updatable", "increments"]
Build = Callable[[Any], None]


def found_in(tmp_path: Path, build: Build, *, v2: bool = False) -> Path:
    """A checkpoint with the graph that lies beside it."""
    directory = tmp_path / "bucket"
    directory.mkdir()
    train(directory, build, control_flow_v2=v2)
    return directory


def refused(directory: Path, out: Path, *options: object) -> dict[str, Any]:
    """The error of the real command, which must publish nothing."""
    ran = export_model("--ckpt-dir", directory, "--out", out, *TYPED, *options, "--json")
    assert ran.code != 0, ran.out
    assert not [*out.glob("[0-9]*")]
    error: dict[str, Any] = ran.error
    return error


def dataset_that_writes(path: Path) -> bytes:
    """A serialised graph that makes a dataset after it has written a file."""
    with tf.Graph().as_default() as graph:
        with tf.control_dependencies([tf.raw_ops.WriteFile(filename=str(path), contents="written")]):
            zero, one = tf.constant(0, tf.int64), tf.constant(1, tf.int64)
            made = tf.raw_ops.RangeDataset(
                start=zero, stop=one, step=one, output_types=[tf.int64], output_shapes=[[]]
            )
        graph_def = graph.as_graph_def()
    result = graph_def.node.add(name="result", op="_Retval", input=[made.op.name])
    result.attr["T"].type = tf.variant.as_datatype_enum
    result.attr["index"].i = 0
    content: bytes = graph_def.SerializeToString()
    return content


def from_graph(path: Path) -> Any:
    return tf.raw_ops.DatasetFromGraph(graph_def=tf.constant(dataset_that_writes(path)))


def counted(path: Path) -> Build:
    """An output that counts what such a dataset has."""

    def build(v1: Any) -> None:
        x = v1.placeholder(tf.float32, [None], name="x")
        w = v1.get_variable("w", [], initializer=v1.ones_initializer())
        count = tf.raw_ops.DatasetCardinality(input_dataset=from_graph(path))
        tf.multiply(x * w, tf.cast(count, tf.float32), name="y")

    return build


@pytest.mark.parametrize("options", WAYS, ids=NAMES)
def test_a_graph_in_a_text_is_not_run(options: tuple[str, ...], tmp_path: Path) -> None:
    written = tmp_path / "written"
    directory = found_in(tmp_path, counted(written))
    written.unlink(missing_ok=True)
    error = refused(directory, tmp_path / "model", *options)
    assert error["error"] == "AccessRefused" and "DatasetFromGraph" in error["message"]
    assert "--allow file-ops" in error["hint"]
    assert not written.exists()

    allowed = ("--allow", "file-ops", "--verify", "outputs")
    error = refused(directory, tmp_path / "model", *allowed)
    assert "DatasetFromGraph" in error["message"] and "--allow code" in error["hint"]
    assert not written.exists()


def test_what_may_be_served_is_not_tried_here(tmp_path: Path) -> None:
    """A version with mapped tables brings warm-up requests, which are tried while they are made up."""
    written = tmp_path / "written"
    directory = found_in(tmp_path, counted(written))
    written.unlink(missing_ok=True)
    typed = (
        "--ckpt-dir",
        directory,
        "--out",
        tmp_path / "model",
        *TYPED,
        "--allow",
        "file-ops",
        "--map-tables",
    )
    ran = export_model(*typed)
    assert ran.code == 0, ran.err
    assert not written.exists()


def in_a_process(directory: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own, which it may break."""
    typed = ("--ckpt-dir", directory, "--out", out, *TYPED, *options)
    command = [sys.executable, "-m", "exporter", *map(str, typed)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("is_in_function", [False, True], ids=["in the graph", "in a function"])
def test_what_no_output_needs_is_not_imported(is_in_function: bool, tmp_path: Path) -> None:
    """TensorFlow computes shapes while it imports a graph, and runs what they come from."""

    def shaped(program: Any) -> Any:
        number = tf.constant(1, tf.int64)
        made = tf.raw_ops.RangeDataset(
            start=number, stop=number, step=number, output_types=[tf.int64], output_shapes=[[]]
        )
        count = tf.raw_ops.DatasetCardinality(input_dataset=made)
        return tf.reshape(tf.zeros([1]), tf.reshape(count, [1]))

    def build(v1: Any) -> None:
        x = v1.placeholder(tf.float32, [None], name="x")
        w = v1.get_variable("w", [], initializer=v1.ones_initializer())
        tf.multiply(x, w, name="y")
        program = tf.constant(dataset_that_writes(tmp_path / "written"), name="program")
        tf.function(shaped)(program) if is_in_function else shaped(program)

    directory = found_in(tmp_path, build)
    meta = next(directory.glob("*.meta"))
    graph = v1.MetaGraphDef.FromString(meta.read_bytes())
    for nodes in (graph.graph_def.node, *(each.node_def for each in graph.graph_def.library.function)):
        for node in nodes:  # afterwards: this process would run it while it makes the graph
            if node.op == "RangeDataset":
                node.op = "DatasetFromGraph"
                node.input[:] = ["program"]
                node.attr.clear()
    meta.write_bytes(graph.SerializeToString())
    ran = in_a_process(directory, tmp_path / "model", "--verify", "outputs")
    assert ran.returncode == 0, ran.stderr
    assert not (tmp_path / "written").exists()


def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("not for you")
    return path


class Reads(Answering):
    """Answers with the length of a file that it reads in its own way."""

    def __init__(self, words: Path, read: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.path = tf.saved_model.Asset(str(words))
        self.read = read

    def answer(self, words: Any) -> Any:
        length = tf.strings.length(self.read(self.path.asset_path, words))
        return tf.cast(tf.strings.length(words) + length, tf.int64)


def asset(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text("a")
    return path


def in_turns(after: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Read a file twice in a loop, whose body says which path is the next."""

    def read(path: Any, words: Any) -> Any:
        def body(turn: Any, path: Any, text: Any) -> Any:
            return turn + 1, after(path, words), tf.strings.join([text, tf.io.read_file(path)])

        start = (tf.constant(0), path, tf.constant(""))
        loop: Any = tf.while_loop(lambda turn, *_: turn < 2, body, start, maximum_iterations=2)
        return loop[2]

    return read


def by_switching(path: Any, words: Any) -> Any:
    """Two paths that change their places."""

    def body(turn: Any, one: Any, other: Any, text: Any) -> Any:
        return turn + 1, other, one, tf.strings.join([text, tf.io.read_file(one)])

    start = (tf.constant(0), path, words[0], tf.constant(""))
    loop: Any = tf.while_loop(lambda turn, *_: turn < 2, body, start)
    return loop[3]


def by_a_list(path: Any, words: Any) -> Any:
    array: Any = tf.TensorArray(tf.string, 2, element_shape=[]).write(0, path).write(1, words[0])
    return tf.io.read_file(array.read(1))


def by_a_map(path: Any, words: Any) -> Any:
    found = tf.data.Dataset.from_tensors(words[0]).map(lambda word: tf.io.read_file(word))
    return found.get_single_element()


def by_a_branch(path: Any, words: Any) -> Any:
    return tf.io.read_file(tf.cond(tf.size(words) > 2, lambda: words[0], lambda: path))


def by_texts(path: Any, words: Any) -> Any:
    return tf.io.read_file(tf.strings.join([path, words[0]]))


def by_a_slice(path: Any, words: Any) -> Any:
    return tf.io.read_file(tf.stack([path, words[0]])[1])


HOSTILE = {
    "a loop that returns a word": in_turns(lambda path, words: words[0]),
    "a loop that lengthens": in_turns(lambda path, words: tf.strings.join([path, words[0]])),
    "a loop that switches": by_switching,
    "a list": by_a_list,
    "a map": by_a_map,
    "a branch": by_a_branch,
    "texts": by_texts,
    "a slice": by_a_slice,
}


@pytest.mark.parametrize("way", HOSTILE)
def test_a_path_that_a_client_sends_is_not_read(way: str, tmp_path: Path) -> None:
    Reads(asset(tmp_path), HOSTILE[way]).save(tmp_path / "source")
    with pytest.raises(AccessRefused, match="ReadFile"):
        export(ExportRequest(tmp_path / "source", tmp_path / "model"))
    assert not [*(tmp_path / "model").glob("[0-9]*")]


def test_an_own_file_is_read_in_every_turn_of_a_loop(tmp_path: Path) -> None:
    Reads(asset(tmp_path), in_turns(lambda path, words: tf.identity(path))).save(tmp_path / "source")
    request = ExportRequest(tmp_path / "source", tmp_path / "model", verify=Verify.OUTPUTS)
    version = export(request).published.path
    assert answers_in_session(version, {"words": WORDS})["y"].tolist() == [6.0] * 4


def test_a_loop_beside_a_checkpoint_reads_no_other_file(tmp_path: Path) -> None:
    path, words = secret(tmp_path), tmp_path / "bucket" / "words.txt"

    def build(v1: Any) -> None:
        words.write_text("a")
        x = v1.placeholder(tf.string, [None], name="x")
        v1.get_variable("w", [], initializer=v1.ones_initializer())
        named = tf.constant(str(words))
        v1.add_to_collection(v1.GraphKeys.ASSET_FILEPATHS, named)
        read = in_turns(lambda *_: tf.constant(str(path)))(named, x)
        tf.identity(read, name="y")

    for number, v2 in enumerate((False, True)):
        place = tmp_path / str(number)
        place.mkdir()
        words = place / "bucket" / "words.txt"
        directory = found_in(place, build, v2=v2)
        error = refused(directory, place / "model")
        assert error["error"] == "AccessRefused" and "ReadFile" in error["message"]


def test_a_client_that_feeds_the_middle_of_a_graph_names_no_file(tmp_path: Path) -> None:
    """A server takes values for any tensor that is an input, also for one that another signature computes."""
    words = asset(tmp_path)

    def build(v1: Any) -> None:
        x = v1.placeholder(tf.float32, [None], name="x")
        w = v1.get_variable("w", [], initializer=v1.ones_initializer())
        tf.multiply(x, w, name="y")
        named = tf.constant(str(words), name="named")
        v1.add_to_collection(v1.GraphKeys.ASSET_FILEPATHS, named)
        tf.io.read_file(tf.identity(named, name="path"), name="content")

    directory = tmp_path / "bucket"
    directory.mkdir()
    trained = train(directory, build)
    signatures = tmp_path / "signatures.json"
    both = '{"serving_default": {"inputs": {"x": "x"}, "outputs": {"y": "y", "content": "content"}}, '
    signatures.write_text(both + '"b": {"inputs": {"path": "path:0"}, "outputs": {"content": "content"}}}')
    model = {"model": trained.meta, "signatures": signatures}
    with pytest.raises(AccessRefused, match="ReadFile"):
        export(ExportRequest(directory, tmp_path / "model", **model))
    signatures.write_text(both[:-2] + "}")
    export(ExportRequest(directory, tmp_path / "model", **model))


def handle(name: str, shared: str) -> Any:
    node = protos.NodeDef(name=name, op="VarHandleOp")
    node.attr["shared_name"].s = shared.encode()
    return node


def path_kept_in_a_variable() -> Any:
    """The graph that keeps an asset's path in a variable for requests, as the product makes it."""
    graph = protos.GraphDef(node=[handle("kept", "kept")])
    graph.node.add(name="asset", op="Const")
    graph.node.add(name="other", op="Const")
    graph.node.add(name="assign", op="AssignVariableOp", input=["kept", "asset"])
    graph.node.add(name="path", op="ReadVariableOp", input=["kept"])
    graph.node.add(name="content", op="ReadFile", input=["path"])
    return graph


def reached(graph: Any, fed: tuple[str, ...] = ()) -> list[str]:
    return [each.op for each in outside_ops(graph, files={"asset"}, fed=fed)]


def test_all_that_a_variable_gets_counts() -> None:
    assert reached(path_kept_in_a_variable()) == []
    for value in ("path", "asset", "kept"):
        assert reached(path_kept_in_a_variable(), fed=(value,)) == ["ReadFile"]

    restored = path_kept_in_a_variable()
    del restored.node[3]
    assert reached(restored) == ["ReadFile"]

    twice = path_kept_in_a_variable()
    twice.node.add(name="again", op="AssignVariableOp", input=["kept", "other"])
    assert reached(twice) == ["ReadFile"]

    scattered = path_kept_in_a_variable()
    scattered.node.add(name="again", op="ResourceScatterUpdate", input=["kept", "asset", "other"])
    assert reached(scattered) == ["ReadFile"]

    renamed = path_kept_in_a_variable()
    renamed.node.append(handle("twin", "kept"))
    assert reached(renamed) == ["ReadFile"]

    inside = path_kept_in_a_variable()
    inside.library.function.add().node_def.append(handle("twin", "kept"))
    inside.library.function[0].signature.name = "f"
    assert reached(inside) == ["ReadFile"]

    handed = path_kept_in_a_variable()
    handed.node.add(name="call", op="f", input=["kept"])
    handed.library.function.add().signature.name = "f"
    assert reached(handed) == ["ReadFile"]


def test_attributes_that_cannot_be_followed_are_refused() -> None:
    def graph() -> Any:
        made = protos.GraphDef()
        made.library.function.add().signature.name = "f"
        made.node.add(name="call", op="PartitionedCall").attr["f"].func.name = "f"
        return made

    assert reached(graph()) == []
    nested = graph()
    nested.node[0].attr["f"].func.attr["g"].func.name = "f"
    assert reached(nested) == ["PartitionedCall"]
    unknown = protos.GraphDef()
    unknown.node.add(name="call", op="MapDefun").attr["f"].func.name = "SymbolicGradient"
    assert reached(unknown) == ["MapDefun"]
    for dtype in (tf.resource, tf.variant):
        constant = protos.GraphDef()
        constant.node.add(name="c", op="Const").attr["value"].tensor.dtype = dtype.as_datatype_enum
        assert reached(constant) == ["Const"]
    late = graph()
    late.library.function[0].node_def.add(name="p", op="PrintV2").attr["output_stream"].placeholder = "where"
    assert reached(late) == ["PrintV2"]


def test_functions_that_may_replace_each_other_are_judged_together() -> None:
    graph = protos.GraphDef()
    for name in ("plain", "reading"):
        function = graph.library.function.add()
        function.signature.name = name
        function.signature.input_arg.add(name="x")
        function.attr["api_implements"].s = b"one"
        graph.node.add(name=f"call_{name}", op=name, input=["asset"])
    graph.library.function[1].node_def.add(name="read", op="ReadFile", input=["x"])
    graph.node.add(name="asset", op="Const")
    assert reached(graph) == []
    graph.node[0].input[:] = ["other"]
    assert reached(graph) == ["ReadFile"]


def recursive(meta: Path) -> None:
    """Make the graph's functions call themselves: Python cannot trace such a one."""
    graph = v1.MetaGraphDef.FromString(meta.read_bytes())
    for function in graph.graph_def.library.function:
        for node in function.node_def:
            node.input[:] = [source.replace(":y:0", ":output:0") for source in node.input]
            if node.op == "Neg":
                node.op = "StatefulPartitionedCall"
                node.attr.clear()
                types = attr_value_pb2.AttrValue(list={"type": [tf.float32.as_datatype_enum]})
                node.attr["Tin"].CopyFrom(types)
                node.attr["Tout"].CopyFrom(types)
                node.attr["f"].func.name = function.signature.name
        for name, source in [*function.ret.items()]:
            function.ret[name] = source.replace(":y:0", ":output:0")
    meta.write_bytes(graph.SerializeToString())


@pytest.mark.parametrize("options", WAYS, ids=NAMES)
def test_functions_that_reach_themselves_are_refused_by_name(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    def build(v1: Any) -> None:
        x = v1.placeholder(tf.float32, [None], name="x")
        w = v1.get_variable("w", [], initializer=v1.ones_initializer())
        negative: Any = tf.function(lambda x: tf.raw_ops.Neg(x=x), input_signature=[tf.TensorSpec([None])])
        tf.multiply(negative(x), w, name="y")

    directory = found_in(tmp_path, build)
    recursive(next(directory.glob("*.meta")))
    ran = in_a_process(directory, tmp_path / "model", *options)
    assert ran.returncode != 0 and "calls itself" in ran.stderr, ran.stderr
    assert not [*(tmp_path / "model").glob("[0-9]*")]


def test_a_function_with_two_nodes_of_one_name_is_refused() -> None:
    graph = protos.GraphDef()
    function = graph.library.function.add()
    function.signature.name = "f"
    function.node_def.add(name="a", op="WriteFile")
    function.node_def.add(name="a", op="NoOp")
    graph.node.add(name="call", op="f")
    with pytest.raises(GraphError, match="two nodes"):
        reached(graph)


def test_functions_that_call_each_other_end_in_an_error() -> None:
    graph = protos.GraphDef()
    for name, callee in (("f", "g"), ("g", "f")):
        function = graph.library.function.add()
        function.signature.name = name
        function.node_def.add(name="call", op=callee)
    graph.node.add(name="call", op="f")
    with pytest.raises(NotServable, match="calls itself, through"):
        reached(graph)
