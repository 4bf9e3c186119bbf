"""Graphs that no trainer would write end in a named error, quickly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exporter.errors import CorruptFile, ExportError, GraphError, NotServable
from exporter.graph.load import GraphRequest, load_graph
from exporter.graph.nodes import GraphIndex, const_value
from exporter.graph.origin import GraphOrigin
from exporter.wire import protos

Node = tuple[str, str, list[str]]


def meta(path: Path, nodes: list[Node], change: Callable[[Any], None] = lambda _: None) -> str:
    """A `.meta` of float nodes given as (name, operation, inputs)."""
    meta_graph = protos.MetaGraphDef()
    for name, op, inputs in nodes:
        node = meta_graph.graph_def.node.add(name=name, op=op, input=inputs)
        node.attr["T"].type = 1
        node.attr["dtype"].type = 1
    change(meta_graph)
    path.write_bytes(meta_graph.SerializeToString())
    return str(path)


X: Node = ("x", "Placeholder", [])


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([X, ("y", "Relu", ["gone"])], "reads 'gone'"),
        ([X, ("y", "Relu", ["x"]), ("y", "Tanh", ["x"])], "two nodes named 'y'"),
        ([X, ("y", "", ["x"])], "without a name or an operation"),
        ([X, ("y", "Add", ["x", "z"]), ("z", "Relu", ["y"])], "cycle outside of any loop"),
        ([X, ("y", "Relu", ["y"])], "cycle outside of any loop: y <- y"),
        ([X, ("y", "Identity", ["y"])], "cycle outside of any loop"),
        ([X, ("y", "Merge", ["x", "z"]), ("z", "Relu", ["y"])], "cycle outside of any loop"),
        ([X, ("e", "Enter", ["x"]), ("y", "Merge", ["e", "y"])], "cycle outside of any loop"),
        ([X, ("y", "Relu", ["x:9999999999"])], None),
        ([X, ("y", "Relu", [])], None),
        ([X, ("y", "ReadVariableOp", [])], None),
        ([X, ("v", "VarHandleOp", []), ("y", "ReadVariableOp", ["v"])], "no static shape"),
        ([X, ("v", "KvVarHandleOp", []), ("y", "KvResourceGather", ["v", "x"])], "stock TensorFlow lacks"),
        ([X, ("t", "HashTableV2", []), ("y", "LookupTableFindV2", ["t", "x", "x"])], "nothing.*fills table"),
        ([X, ("t", "HashTableV2", []), ("i", "InitializeTableFromTextFileV2", ["t"]),
          ("y", "LookupTableFindV2", ["t", "x", "x"])], None),
        ([X, ("c", "Const", ["^a"]), ("a", "NoOp", ["^c"]), ("s", "Switch", ["x", "x"]),
          ("y", "Add", ["c", "s"])], None),
    ],
)  # fmt: skip
def test_broken_graphs(tmp_path: Path, nodes: list[Node], message: str | None) -> None:
    path = meta(tmp_path / "model.meta", nodes)
    request = GraphRequest(model=path, inputs={"x": "x"}, outputs={"y": "y"})

    if message is None:  # nobody checks an operation's arity here, but nothing may crash
        try:
            load_graph(request)
        except ExportError as error:
            assert error.message
    else:
        with pytest.raises(GraphError, match=message):
            load_graph(request)


def test_twenty_thousand_nodes_deep(tmp_path: Path) -> None:
    chain = [("n0", "Relu", ["x"]), *((f"n{i}", "Relu", [f"n{i - 1}"]) for i in range(1, 20_000))]
    path = meta(tmp_path / "model.meta", [X, *chain, ("y", "Relu", ["n19999"])])

    graph = load_graph(GraphRequest(model=path, inputs={"x": "x"}, outputs={"y": "y"}))

    assert len(graph.meta_graph.graph_def.node) == 20_002


def test_merges_nested_without_end(tmp_path: Path) -> None:
    merges = [(f"m{i}", "Merge", [f"m{i + 1}"]) for i in range(5000)]
    nodes = [X, ("s", "Switch", ["x", "x"]), *merges, ("m5000", "Relu", ["x"]), ("c", "Const", ["^m0"])]
    path = meta(tmp_path / "model.meta", [*nodes, ("y", "Add", ["c", "s"])])

    with pytest.raises(GraphError, match="nests conditionals"):
        load_graph(GraphRequest(model=path, inputs={"x": "x"}, outputs={"y": "y"}))


def test_identities_in_a_ring_around_a_table(tmp_path: Path) -> None:
    nodes = [
        X,
        ("a", "Identity", ["b"]),
        ("b", "Identity", ["a"]),
        ("i", "InitializeTableV2", ["a", "x", "x"]),
    ]
    path = meta(tmp_path / "model.meta", [*nodes, ("y", "Relu", ["x"])])

    assert load_graph(GraphRequest(model=path, inputs={"x": "x"}, outputs={"y": "y"})).init_op is None


def test_functions_that_call_each_other_for_ever(tmp_path: Path) -> None:
    def add(meta_graph: Any) -> None:
        for name, other in (("f", "g"), ("g", "f")):
            function = meta_graph.graph_def.library.function.add()
            function.signature.name = name
            function.signature.input_arg.add(name="a", type=1)
            function.signature.output_arg.add(name="b", type=1)
            function.node_def.add(name="call", op=other, input=["a"])
            function.ret["b"] = "call:b:0"

    path = meta(tmp_path / "model.meta", [X, ("y", "f", ["x"])], add)

    with pytest.raises(NotServable, match="calls itself"):
        load_graph(GraphRequest(model=path, inputs={"x": "x"}, outputs={"y": "y"}))


ONE: Node = ("one", "Const", [])


def calling(meta_graph: Any, depth: int, fill: Callable[[Any, Any, str], None]) -> None:
    """Add functions f0(x, k), f1(x, k), ... that `fill` gives a body, which may call the next one.

    The node `one` gets its value.
    """
    one = next(node for node in meta_graph.graph_def.node if node.name == "one")
    one.attr["value"].tensor.dtype = 1
    one.attr["value"].tensor.float_val.append(1.0)
    for number in range(depth):
        function = meta_graph.graph_def.library.function.add()
        function.signature.name = f"f{number}"
        for name in ("x", "k"):
            function.signature.input_arg.add(name=name, type=1)
        function.signature.output_arg.add(name="y", type=1)

        def add(name: str, op: str, *inputs: str, body: Any = function) -> None:
            node = body.node_def.add(name=name, op=op, input=inputs)
            node.attr["T"].type = node.attr["dtype"].type = 1

        fill(function, add, f"f{number + 1}" if number + 1 < depth else "")


def test_functions_that_pass_two_constants_on_at_each_call(tmp_path: Path) -> None:
    def fill(function: Any, add: Any, callee: str) -> None:
        if not callee:
            add("noise", "RandomUniform", "x")
            function.ret["y"] = "noise:output:0"
            return
        add("even", "AddV2", "k", "k")
        add("odd", "Sub", "even:z:0", "k")
        add("first", callee, "x", "even:z:0")
        add("second", callee, "first:y:0", "odd:z:0")
        function.ret["y"] = "second:y:0"

    nodes = [X, ONE, ("y", "f0", ["x", "one"])]
    path = meta(tmp_path / "model.meta", nodes, lambda meta_graph: calling(meta_graph, 18, fill))  # 2 ** 18

    graph = load_graph(GraphRequest(model=path, inputs={"x": "x"}, outputs={"y": "y"}))

    assert graph.training.random == ("RandomUniform 'noise'",)


def test_a_rate_behind_more_steps_than_python_nests(tmp_path: Path) -> None:
    steps = [f"s{number}" for number in range(60)]

    def fill(function: Any, add: Any, callee: str) -> None:
        add("c", callee or "Const", *(("x", "k") if callee else ()))
        for name, source in zip(steps, ["c", *steps], strict=False):
            add(name, "Identity", f"{source}:{'y' if source == 'c' and callee else 'output'}:0")
        function.ret["y"] = f"{steps[-1]}:output:0"

    chain = [f"i{number}" for number in range(5000)]
    nodes = [
        X,
        ONE,
        ("rate", "f0", ["one", "one"]),
        *((name, "Identity", [source]) for name, source in zip(chain, ["rate", *chain], strict=False)),
        ("drawn", "RandomUniform", ["x"]),
        ("mask", "GreaterEqual", ["drawn", chain[-1]]),
        ("scale", "Cast", ["mask"]),
        ("y", "Mul", ["x", "scale"]),
    ]
    path = meta(tmp_path / "model.meta", nodes, lambda meta_graph: calling(meta_graph, 40, fill))

    graph = load_graph(GraphRequest(model=path, inputs={"x": "x"}, outputs={"y": "y"}))

    assert graph.training.dropouts == (("RandomUniform 'drawn'", None),)


def test_a_functions_body_that_reads_nothing_known(tmp_path: Path) -> None:
    def add(meta_graph: Any) -> None:
        function = meta_graph.graph_def.library.function.add()
        function.signature.name = "f"
        function.signature.output_arg.add(name="b", type=1)
        function.node_def.add(name="body", op="Relu", input=["gone:0"])
        function.ret["b"] = "body:activations:0"

    path = meta(tmp_path / "model.meta", [X, ("y", "f", ["x"])], add)

    with pytest.raises(GraphError, match=r"function 'f' reads 'gone:0'"):
        load_graph(GraphRequest(model=path, inputs={"x": "x"}, outputs={"y": "y"}))


def test_python_inside_a_function_is_refused(tmp_path: Path) -> None:
    def add(meta_graph: Any) -> None:
        function = meta_graph.graph_def.library.function.add()
        function.signature.name = "f"
        function.signature.input_arg.add(name="a", type=1)
        function.signature.output_arg.add(name="b", type=1)
        function.node_def.add(name="body", op="PyFunc", input=["a"])
        function.ret["b"] = "body:output:0"

    path = meta(tmp_path / "model.meta", [X, ("y", "f", ["x"])], add)

    with pytest.raises(NotServable, match="function 'f' needs PyFunc"):
        load_graph(GraphRequest(model=path, inputs={"x": "x"}, outputs={"y": "y"}))


@pytest.mark.parametrize("count", [-1, 1 << 62])
def test_operations_that_claim_absurd_numbers_of_outputs(count: int) -> None:
    meta_graph = protos.MetaGraphDef()
    op = meta_graph.meta_info_def.stripped_op_list.op.add(name="Split")
    op.output_arg.add(name="output", type_attr="T", number_attr="num_split")
    node = meta_graph.graph_def.node.add(name="s", op="Split")
    node.attr["T"].type = 1
    node.attr["num_split"].i = count

    with pytest.raises(GraphError, match="claims"):
        GraphIndex.of(meta_graph).resolve("s:0", "output")


def test_a_constant_that_claims_to_be_huge_stays_small() -> None:
    node = protos.NodeDef(name="c", op="Const")
    tensor = node.attr["value"].tensor
    tensor.dtype = 3
    tensor.int_val.append(1)
    for _ in range(2):
        tensor.tensor_shape.dim.add(size=1 << 40)

    assert const_value(node) is None


@pytest.mark.parametrize("name", ["model.meta", "model.pbtxt", "saved_model.pb", "saved_model.pbtxt"])
@pytest.mark.parametrize("updatable", [False, True])
def test_a_graph_of_64_gigabytes_is_not_read(name: str, updatable: bool, tmp_path: Path) -> None:
    """A sparse file takes no disk; whoever read it would end in MemoryError, or take minutes for a digest."""
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(64 << 30)
    request = GraphRequest(
        model=str(tmp_path if "saved" in name else path), inputs={"x": "x"}, outputs={"y": "y"}
    )
    if updatable:
        assert not GraphOrigin.of(request).files
    with pytest.raises(CorruptFile, match="more than 2 GiB"):
        load_graph(request)
