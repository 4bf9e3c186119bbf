"""Graphs whose calls or constants grow without measure end in a named error or an answer, quickly."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.errors import NotServable
from exporter.graph.constant_values import compute
from exporter.graph.functions import callees_first
from exporter.graph.training_mode import training_mode
from exporter.wire import protos
from tests.support.graph_runs import train

MOST = 1 << 15


def add_function(graph_def: Any, name: str, nodes: Sequence[tuple[str, str, list[str]]], result: str) -> None:
    """A function of two floats; an operation that begins with `f` is a call of that function."""
    function = graph_def.library.function.add()
    function.signature.name = name
    for argument in "ab":
        function.signature.input_arg.add(name=argument, type=1)
    function.signature.output_arg.add(name="r", type=1)
    for node, op, inputs in nodes:
        function.node_def.add(name=node, op=op, input=inputs).attr["T"].type = 1
    function.ret["r"] = result


def calling(levels: int, *, twice: bool) -> Any:
    """A graph whose functions call the next one, once or twice: then with another value."""
    graph_def = protos.GraphDef()
    for level in range(levels):
        below = f"f{level + 1}"
        nodes = [("d", "AddV2", ["b", "b"]), ("p", below, ["a", "b"]), ("q", below, ["a", "d:z:0"])]
        add_function(graph_def, f"f{level}", nodes if twice else nodes[1:2], "p:r:0")
        if twice:
            graph_def.library.function[-1].node_def.add(name="s", op="AddV2", input=["p:r:0", "q:r:0"])
            graph_def.library.function[-1].ret["r"] = "s:z:0"
    last = [("s", "Shape", ["a"]), ("u", "RandomUniform", ["s:output:0"]), ("m", "Mul", ["u:output:0", "b"])]
    add_function(graph_def, f"f{levels}", last, "m:z:0")
    graph_def.node.add(name="x", op="Placeholder")
    one = graph_def.node.add(name="one", op="Const").attr["value"].tensor
    one.dtype = 1
    one.float_val.append(1.0)
    graph_def.node.add(name="y", op="f0", input=["x", "one"])
    return graph_def


@pytest.mark.parametrize(
    ("levels", "twice"), [(40, True), (500, False)], ids=["two calls on each of 40 levels", "500 levels"]
)
def test_calls_that_tensorflow_could_not_expand_are_refused(levels: int, twice: bool) -> None:
    graph_def = calling(levels, twice=twice)
    library = {function.signature.name: function for function in graph_def.library.function}
    with pytest.raises(NotServable, match="'f"):
        callees_first(graph_def.node, library)


def test_calls_that_tensorflow_can_expand_are_not() -> None:
    for graph_def in (calling(15, twice=True), calling(100, twice=False)):
        library = {function.signature.name: function for function in graph_def.library.function}
        assert callees_first(iter(graph_def.node), library)[-1] == "f0"


LOOKS = """
from exporter.graph.training_mode import training_mode
from exporter.wire import protos
import sys
meta_graph = protos.MetaGraphDef.FromString(sys.stdin.buffer.read())
print([name for name in training_mode(meta_graph).random])
"""


def signed(graph_def: Any) -> Any:
    meta_graph = protos.MetaGraphDef()
    meta_graph.graph_def.CopyFrom(graph_def)
    signature = meta_graph.signature_def["serving_default"]
    signature.inputs["x"].name, signature.outputs["y"].name = "x:0", "y:0"
    return meta_graph


def test_calls_with_ever_other_values_are_looked_at_once() -> None:
    """They were 2 ** 40; what draws numbers behind them is found all the same."""
    written = signed(calling(40, twice=True)).SerializeToString()
    command = [sys.executable, "-c", LOOKS]
    ran = subprocess.run(command, input=written, capture_output=True, timeout=120, check=True)
    assert b"u" in ran.stdout


def test_values_behind_many_calls_need_no_deep_stack() -> None:
    graph_def = protos.GraphDef()
    graph_def.CopyFrom(calling(45, twice=False))
    for function in graph_def.library.function:
        calls = [node for node in function.node_def if node.op.startswith("f")]
        for number in range(60 if calls else 0):
            before = f"i{number - 1}:output:0" if number else "b"
            function.node_def.add(name=f"i{number}", op="Identity", input=[before])
        for node in calls:
            node.input[1] = "i59:output:0"
    before = "y"
    for number in range(3000):
        graph_def.node.add(name=f"e{number}", op="Identity", input=[before])
        before = f"e{number}"
    draw = graph_def.node.add(name="draw", op="RandomUniform", input=["x"])
    graph_def.node.add(name="kept", op="GreaterEqual", input=[draw.name, before])
    meta_graph = signed(graph_def)
    meta_graph.signature_def["serving_default"].outputs["y"].name = "kept:0"
    assert "draw" in str(training_mode(meta_graph))


@pytest.mark.parametrize(
    ("op", "values", "attributes"),
    [
        ("Fill", [np.array([1 << 40, 0]), np.float32(1)], {}),
        ("Reshape", [np.zeros([0], np.float32), np.array([1 << 40, 0])], {}),
        ("Split", [np.int32(0), np.zeros([0], np.float32)], {"num_split": 1 << 62}),
        ("AddN", [np.zeros([1 << 12], np.float32)] * 8, {}),
        ("Select", [np.ones([1 << 12], bool), *[np.zeros([1, 1 << 12], np.float32)] * 2], {}),
    ],
)
def test_constants_that_ask_for_much_memory_are_not_computed(
    op: str, values: list[Any], attributes: dict[str, int]
) -> None:
    node = protos.NodeDef(name="n", op=op)
    for name, value in attributes.items():
        node.attr[name].i = value
    with pytest.raises(ValueError):
        compute(node, [np.asarray(value) for value in values], 0, MOST)


def test_the_real_command_refuses_such_calls(tmp_path: Path) -> None:
    def build(v1: Any) -> None:
        x = v1.placeholder(tf.float32, [None], name="x")
        w = v1.get_variable("w", [], initializer=v1.ones_initializer())
        tf.multiply(x, w, name="y")

    directory = tmp_path / "bucket"
    directory.mkdir()
    train(directory, build)
    path = next(directory.glob("*.meta"))
    meta_graph = protos.MetaGraphDef.FromString(path.read_bytes())
    added = calling(40, twice=True)
    meta_graph.graph_def.library.CopyFrom(added.library)
    product = next(node for node in meta_graph.graph_def.node if node.name == "y")
    product.name = "product"
    meta_graph.graph_def.node.add(name="y", op="f0", input=["product", "product"])
    path.write_bytes(meta_graph.SerializeToString())
    typed = ["--ckpt-dir", directory, "--out", tmp_path / "model", "--input", "x=x", "--output", "y=y"]
    command = [sys.executable, "-m", "exporter", *map(str, typed), "--new-base=always", "--allow", "dropout"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 1 and "would become more than" in ran.stderr, ran.stderr
