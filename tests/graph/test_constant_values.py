"""What is computed of constants is what TensorFlow's own kernels compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.graph.constant_values import compute, is_computed
from exporter.graph.nodes import endpoint, new_node
from exporter.wire import protos
from exporter.wire.tensor_proto import to_array

raw = tf.raw_ops
A = np.array([[0.5, -1.5, 2.0], [3.0, 0.25, -0.75]], np.float32)
B = np.array([1.0, 2.0, 0.5], np.float32)
POSITIVE = np.abs(A)
N = np.array([7, -7, 3, 0], np.int32)
M = np.array([2, 2, -2, 5], np.int32)
T = np.array([[True, False, True], [False, False, True]])

SAME_SHAPE: dict[str, Callable[[], Any]] = {
    **{op: lambda op=op: getattr(raw, op)(x=A) for op in ("Abs", "Neg", "Exp", "Square", "Sigmoid", "Sign")},
    **{
        op: lambda op=op: getattr(raw, op)(x=A)
        for op in ("Floor", "Ceil", "Rint", "Round", "Reciprocal", "Inv")
    },
    **{op: lambda op=op: getattr(raw, op)(x=POSITIVE) for op in ("Log", "Sqrt", "Rsqrt")},
    **{
        op: lambda op=op: getattr(raw, op)(input=A)
        for op in ("Identity", "Shape", "Size", "Rank", "StopGradient")
    },
    **{op: lambda op=op: getattr(raw, op)(x=A) for op in ("ZerosLike", "OnesLike")},
    "Snapshot": lambda: raw.Snapshot(input=A),
    "EnsureShape": lambda: raw.EnsureShape(input=A, shape=[2, 3]),
    "PlaceholderWithDefault": lambda: raw.PlaceholderWithDefault(input=A, shape=[2, 3]),
    "LogicalNot": lambda: raw.LogicalNot(x=T),
}
BROADCAST: dict[str, Callable[[], Any]] = {
    **{
        op: lambda op=op: getattr(raw, op)(x=A, y=B)
        for op in (
            "Add",
            "AddV2",
            "Sub",
            "Mul",
            "Div",
            "RealDiv",
            "DivNoNan",
            "FloorDiv",
            "FloorMod",
            "Maximum",
        )
    },
    **{
        op: lambda op=op: getattr(raw, op)(x=A, y=B)
        for op in ("Minimum", "Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual")
    },
    "SquaredDifference": lambda: raw.SquaredDifference(x=A, y=B),
    "Pow": lambda: raw.Pow(x=POSITIVE, y=B),
    "Div of integers": lambda: raw.Div(x=N, y=M),
    "FloorDiv of integers": lambda: raw.FloorDiv(x=N, y=M),
    "FloorMod of integers": lambda: raw.FloorMod(x=N, y=M),
    "DivNoNan by 0": lambda: raw.DivNoNan(x=A, y=np.float32(0)),
    "LogicalAnd": lambda: raw.LogicalAnd(x=T, y=T[0]),
    "LogicalOr": lambda: raw.LogicalOr(x=T, y=T[0]),
    "SelectV2": lambda: raw.SelectV2(condition=T, t=A, e=B),
    "Select": lambda: raw.Select(condition=T, x=A, y=-A),
    "Select of rows": lambda: raw.Select(condition=[True, False], x=A, y=-A),
    "AddN": lambda: raw.AddN(inputs=[A, A, A]),
    "ClipByValue": lambda: raw.ClipByValue(t=A, clip_value_min=-0.5, clip_value_max=1.0),
}
ARRANGED: dict[str, Callable[[], Any]] = {
    "Cast": lambda: raw.Cast(x=A, DstT=tf.int32),
    "Cast to bool": lambda: raw.Cast(x=A, DstT=tf.bool),
    "Cast to bfloat16": lambda: raw.Cast(x=A, DstT=tf.bfloat16),
    "Fill": lambda: raw.Fill(dims=[2, 2], value=np.float32(0.5)),
    "BroadcastTo": lambda: raw.BroadcastTo(input=B, shape=[2, 3]),
    "Tile": lambda: raw.Tile(input=A, multiples=[2, 1]),
    "Reshape": lambda: raw.Reshape(tensor=A, shape=[-1]),
    "Squeeze": lambda: raw.Squeeze(input=A[:1], axis=[0]),
    "ExpandDims": lambda: raw.ExpandDims(input=A, axis=-1),
    "Transpose": lambda: raw.Transpose(x=A, perm=[1, 0]),
    "Pack": lambda: raw.Pack(values=[B, B], axis=1),
    "ConcatV2": lambda: raw.ConcatV2(values=[A, A], axis=0),
    "Slice": lambda: raw.Slice(input=A, begin=[0, 1], size=[-1, 2]),
    "Gather": lambda: raw.Gather(params=A, indices=[1, 0]),
    "GatherV2": lambda: raw.GatherV2(params=A, indices=[2, 0], axis=1),
    "GatherNd": lambda: raw.GatherNd(params=A, indices=[[0, 2], [1, 1]]),
    **{op: lambda op=op: getattr(raw, op)(input=A, axis=[1]) for op in ("Sum", "Mean", "Prod", "Max", "Min")},
    "Sum, kept": lambda: raw.Sum(input=A, axis=[0], keep_dims=True),
    "All": lambda: raw.All(input=T, axis=[0]),
    "Any": lambda: raw.Any(input=T, axis=[0, 1]),
    "IdentityN": lambda: raw.IdentityN(input=[A, N])[1],
    "Split": lambda: raw.Split(axis=1, value=A, num_split=3)[2],
    "SplitV": lambda: raw.SplitV(value=A, size_splits=[1, 2], axis=1, num_split=2)[1],
    "SplitV, the rest": lambda: raw.SplitV(value=A, size_splits=[-1, 1], axis=1, num_split=2)[0],
    "Unpack": lambda: raw.Unpack(value=A, num=3, axis=1)[1],
    "StridedSlice": lambda: tf.constant(A)[1],
    "StridedSlice, new axes": lambda: tf.constant(A)[..., tf.newaxis, 1:],
    "StridedSlice, backwards": lambda: tf.constant(A)[::-1, -2],
    "StridedSlice, ends": lambda: tf.constant(A)[:1, :-1],
}


@pytest.mark.parametrize("name", [*SAME_SHAPE, *BROADCAST, *ARRANGED])
def test_values_are_tensorflows(name: str) -> None:
    with tf.Graph().as_default() as graph:
        tensor = ({**SAME_SHAPE, **BROADCAST, **ARRANGED})[name]()
        with tf.compat.v1.Session() as session:
            expected = session.run(tensor)
    message = protos.GraphDef.FromString(graph.as_graph_def().SerializeToString())
    nodes = {node.name: node for node in message.node}
    node = nodes[tensor.op.name]
    assert is_computed(node.op)
    values = [to_array(nodes[endpoint(text).node].attr["value"].tensor) for text in node.input]

    found = compute(node, values, tensor.value_index, 1 << 10)

    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found.astype(np.float64), expected.astype(np.float64), rtol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: raw.Fill(dims=[1 << 20, 1 << 20], value=1.0),
        lambda: raw.Tile(input=A, multiples=[1 << 30, 1]),
        lambda: raw.BroadcastTo(input=B, shape=[1 << 40, 3]),
        lambda: raw.Add(x=np.zeros([300, 1]), y=np.zeros([1, 300])),
        lambda: raw.GatherV2(params=np.zeros([100]), indices=np.zeros([100], np.int32), axis=0),
    ],
)
def test_what_would_be_large_is_not_made(make: Callable[[], Any]) -> None:
    with tf.Graph().as_default() as graph:
        tensor = make()
    message = protos.GraphDef.FromString(graph.as_graph_def().SerializeToString())
    nodes = {node.name: node for node in message.node}
    values = [to_array(nodes[text].attr["value"].tensor) for text in nodes[tensor.op.name].input]
    with pytest.raises(ValueError, match="too many"):
        compute(nodes[tensor.op.name], values, 0, 1 << 12)


def test_every_operation_is_compared() -> None:
    compared = {name.split(",")[0].split()[0] for name in [*SAME_SHAPE, *BROADCAST, *ARRANGED]}
    of_loops = {"Enter", "RefEnter"}
    assert {op for op in dir(raw) if is_computed(op)} - of_loops == compared


@pytest.mark.parametrize("op", ["Mul", "Less", "SelectV2", "ClipByValue"])
def test_inputs_that_an_operation_does_not_have_are_refused_and_stay_as_they_are(op: str) -> None:
    count = 3 if op in ("SelectV2", "ClipByValue") else 2
    values = [np.full(2, n, bool if op == "Less" and n == count else np.float32) for n in range(count + 1)]
    before = [value.copy() for value in values]
    with pytest.raises(ValueError, match=f"it has {count + 1} inputs, expected {count}"):
        compute(new_node("n", op, []), values, 0, 1 << 15)
    np.testing.assert_array_equal(values, before)
