"""How each common operation hands the rows of a request on: shape in, shape out, one rule for each kind.

A rule answers only if row i of its outputs depends on nothing but row i of its inputs (and on variables), for
any number of rows. So whatever mixes rows (a mean over the batch, batch normalisation in training) raises
`Unclear`, as does what a rule does not know. Sources: the shape functions of TensorFlow's REGISTER_OPs in
tensorflow/core/ops/{array,math,nn,random,parsing,lookup}_ops.cc.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from exporter.graph.batch.call import Call, Outputs, Rule, equal_shapes, output, require_whole, rules
from exporter.graph.batch.dims import Dim, Known, Slot, Unclear
from exporter.graph.batch.element_rules import ELEMENT_RULES
from exporter.graph.batch.shape_rules import SHAPE_RULES
from exporter.graph.nodes import attr, attr_shape, shape_of
from exporter.wire.protos import Proto


def _parsed(call: Call) -> Outputs:
    """Serialized Examples: dense features have a row each."""
    (rows,) = call.shape(0)
    is_first = call.node.op == "ParseExample"
    sparse = call.attr_int("Nsparse" if is_first else "num_sparse")
    dense: list[Known | None] = []
    for proto in attr(call.node, "dense_shapes").list.shape:
        shape = shape_of(proto)
        is_fixed = shape is not None and min(shape, default=0) >= 0
        dense.append(Known((rows, *shape)) if shape is not None and is_fixed else None)
    return [*[None] * (3 * sparse), *dense]


def _switch(call: Call) -> Outputs:
    return [Known(call.shape(0), None, call.input(0).handle)] * 2


def _array(call: Call) -> Outputs:
    return [Known((2,), handle=call.node.name), Known(())]


def _array_size(call: Call) -> Outputs:
    return [Known(())]


def _array_written(call: Call) -> Outputs:
    shape = call.shape(2)
    if call.node.op == "TensorArrayScatterV3":
        require_whole(shape[0] if shape else None)
        shape = shape[1:]
    name = _array_name(call)
    if name in call.found.arrays:
        shape = equal_shapes(call, call.found.arrays[name], shape)
    call.found.arrays[name] = _as_declared(call, call.nodes[name], "element_shape", shape)
    return [Known(())]


def _array_read(call: Call) -> Outputs:
    known = call.found.arrays.get(_array_name(call))
    if known is None:
        raise Unclear
    shape = _as_declared(call, call.node, "element_shape", known)
    if call.node.op == "TensorArrayGatherV3":
        (steps,) = call.shape(1)
        return output((steps, *shape))
    return output(shape)


def _array_name(call: Call) -> str:
    name = call.input(0).handle
    if name not in call.nodes:
        raise Unclear
    return name


def _ensured(call: Call) -> Outputs:
    return output(_as_declared(call, call.node, "shape", call.shape(0)))


def _as_declared(call: Call, node: Proto, what: str, shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """A shape that an attribute of a node declares, too: numbers in the attribute have to agree with it."""
    declared = attr_shape(node, what)
    if declared is None:
        return tuple(shape)
    if len(declared) != len(shape):
        raise Unclear
    slots = (Slot(node.name, what, at) for at in range(len(shape)))
    return tuple(
        call.meeting.equal(dim, None if size < 0 else call.meeting.dim(size, slot))
        for dim, size, slot in zip(shape, declared, slots, strict=True)
    )


RULES: Mapping[str, Rule] = {
    **ELEMENT_RULES,
    **SHAPE_RULES,
    **rules(_parsed, "ParseExample ParseExampleV2"),
    **rules(_switch, "Switch RefSwitch"),
    **rules(_ensured, "EnsureShape"),
    **rules(_array, "TensorArrayV3"),
    **rules(_array_size, "TensorArraySizeV3"),
    **rules(_array_written, "TensorArrayWriteV3 TensorArrayScatterV3"),
    **rules(_array_read, "TensorArrayReadV3 TensorArrayGatherV3"),
}
