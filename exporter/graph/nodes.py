"""Query a GraphDef: nodes by name, a tensor's dtype and shape, attributes.

Works on `exporter.wire.protos` alone. What an operation returns is read from the OpDefs that every
MetaGraphDef carries (`meta_info_def.stripped_op_list`) and from the signatures of the function library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from exporter.errors import GraphError, UnknownTensor
from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto
from exporter.wire.tensor_proto import to_array

_REF = 100
"""DT_FLOAT_REF is DT_FLOAT + 100, and so on (source: tensorflow/core/framework/types.proto)."""

_TYPE_ATTRS = ("dtype", "T", "Tparams", "out_type", "output_type", "DstT", "SrcT")
_TYPE_LIST_ATTRS = ("Tout", "output_types", "component_types", "dtypes", "_output_types")


class Endpoint(NamedTuple):
    """One output of one node, written `node:output`; -1 stands for a control edge."""

    node: str
    output: int

    def __str__(self) -> str:
        return f"{self.node}:{self.output}"

    @property
    def as_input(self) -> str:
        """How a NodeDef writes it: output 0 by the bare node name."""
        return str(self) if self.output else self.node


@lru_cache(maxsize=1 << 17)
def endpoint(text: str) -> Endpoint:
    """`conv/Relu:1`, `conv/Relu` or a control input `^conv/Relu` as a value."""
    if text.startswith("^"):
        return Endpoint(text[1:], -1)
    name, colon, index = text.rpartition(":")
    if colon and index.isdecimal():
        return Endpoint(name, int(index))
    return Endpoint(text, 0)


def data_inputs(node: Proto) -> list[Endpoint]:
    """The tensors a node reads, in order."""
    return [endpoint(text) for text in node.input if not text.startswith("^")]


def control_inputs(node: Proto) -> list[str]:
    """The nodes that a node waits for without reading them."""
    return [text[1:] for text in node.input if text.startswith("^")]


def base_dtype(number: int) -> DType:
    """The type of a tensor, whether or not a node hands out a reference to it.

    Raises:
        GraphError: no such type.
    """
    try:
        return DType(number - _REF if number > _REF else number)
    except ValueError:
        raise GraphError(f"the graph uses data type number {number}, which is unknown") from None


@cache
def _absent() -> Proto:
    return protos.AttrValue()


def attr(node: Proto, name: str) -> Proto:
    """An attribute's AttrValue, to be read; an empty one if the node does not carry it."""
    return node.attr.get(name) or _absent()  # reading a map field by [] would insert the key


def attr_dtype(node: Proto, name: str) -> DType | None:
    """A type attribute."""
    number = attr(node, name).type
    return base_dtype(number) if number else None


def attr_text(node: Proto, name: str) -> str:
    """A string attribute, "" if absent."""
    return str(attr(node, name).s.decode("utf-8", "replace"))


def attr_shape(node: Proto, name: str = "shape") -> tuple[int, ...] | None:
    """A shape attribute as `shape_of` gives it, None if absent."""
    value = attr(node, name)
    return shape_of(value.shape) if value.HasField("shape") else None


def shape_of(shape: Proto) -> tuple[int, ...] | None:
    """A TensorShapeProto as a tuple with -1 for unknown lengths, None for an unknown rank."""
    return None if shape.unknown_rank else tuple(dim.size for dim in shape.dim)


def shape_proto(shape: tuple[int, ...] | None) -> Proto:
    """The TensorShapeProto of a shape as `shape_of` gives it."""
    proto = protos.TensorShapeProto(unknown_rank=shape is None)
    for size in shape or ():
        proto.dim.add(size=size)
    return proto


def const_value(node: Proto | None) -> np.ndarray | None:
    """The value of a Const; None for any other node, and if it is damaged or filled up with too much."""
    if node is None or node.op != "Const":
        return None
    try:
        return to_array(attr(node, "value").tensor, _MAX_FILLED_BYTES)
    except ValueError:
        return None


def const_texts(node: Proto | None) -> list[str] | None:
    """The strings of a Const, None for anything else."""
    value = const_value(node)
    if value is None or value.dtype != object:
        return None
    return [text.decode("utf-8", "surrogateescape") for text in value.ravel()]


def through_identities(nodes: Mapping[str, Proto], name: str) -> str:
    """The node whose output an Identity (or several) hands on; an ordinary node is itself."""
    for _ in range(_MAX_IDENTITIES):
        node = nodes.get(name)
        if node is None or node.op != "Identity" or not node.input:
            break
        name = endpoint(node.input[0]).node
    return name


_MAX_IDENTITIES = 32
_MAX_FILLED_BYTES = 8 << 20
_MAX_OUTPUTS = 1 << 20


class GraphIndex:
    """A GraphDef with its nodes by name; the answers are computed once.

    Raises:
        GraphError: two nodes of one name, or a node without a name or an operation.
    """

    def __init__(self, graph_def: Proto, op_defs: Iterable[Proto] = ()) -> None:
        self.graph_def = graph_def
        self.nodes: dict[str, Proto] = {}
        for node in graph_def.node:
            if node.name in self.nodes:
                raise GraphError(f"the graph has two nodes named {node.name!r}")
            if not node.name or not node.op:
                raise GraphError(
                    f"the graph has a node without a name or an operation: {node.name or node.op!r}"
                )
            self.nodes[node.name] = node
        self.functions: dict[str, Proto] = {f.signature.name: f for f in graph_def.library.function}
        self._op_defs = {op.name: op for op in op_defs} | {n: f.signature for n, f in self.functions.items()}

    @classmethod
    def of(cls, meta_graph: Proto) -> GraphIndex:
        """The index of a MetaGraphDef, with the OpDefs that it carries."""
        return cls(meta_graph.graph_def, meta_graph.meta_info_def.stripped_op_list.op)

    @cached_property
    def consumers(self) -> dict[str, list[tuple[str, int]]]:
        """For each node: who reads its outputs, as (consumer, position among the consumer's inputs)."""
        readers: dict[str, list[tuple[str, int]]] = {name: [] for name in self.nodes}
        for node in self.nodes.values():
            for position, source in enumerate(data_inputs(node)):
                if source.node in readers:
                    readers[source.node].append((node.name, position))
        return readers

    def resolve(self, text: str, role: str) -> Endpoint:
        """The tensor that a person named; a bare operation name means its output 0.

        Raises:
            UnknownTensor: no such tensor; the message lists the nearest names.
        """
        found = endpoint(text)
        node = self.nodes.get(found.node)
        if node is None or found.output < 0:
            near = self.nearest(text.lstrip("^"))
            cause = "the nearest names are " + ", ".join(near) if near else "no name in the graph is like it"
            raise UnknownTensor(f"{role} names {text!r}, which the graph does not have", cause=cause)
        dtypes = self.output_dtypes(node)
        if dtypes is not None and found.output >= len(dtypes):
            raise UnknownTensor(
                f"{role} names {text!r}, but {node.op} {node.name!r} has {len(dtypes)} output(s)",
                cause="outputs are counted from 0; a node without outputs cannot be served",
            )
        return found

    def nearest(self, text: str, count: int = 5) -> list[str]:
        """Tensor names like `text`: those that hold its last component first."""
        import difflib

        name = endpoint(text).node
        leaf = name.rpartition("/")[2].lower()
        holding = [known for known in self.nodes if leaf and leaf in known.lower()]
        holding.sort(key=lambda known: abs(len(known) - len(name)))
        similar = difflib.get_close_matches(name, list(self.nodes), n=count, cutoff=0.6)
        return [f"{known}:0" for known in [*dict.fromkeys([*similar, *holding])][:count]]

    def op_def(self, op: str) -> Proto | None:
        """The graph's own description of an operation, or a function's signature."""
        return self._op_defs.get(op)

    def output_dtypes(self, node: Proto) -> list[DType] | None:
        """The types of a node's outputs, None if neither OpDefs nor attributes tell."""
        op_def = self._op_defs.get(node.op)
        if op_def is None:
            return _guessed_dtypes(node)
        found: list[DType] = []
        for argument in op_def.output_arg:
            found += _argument_dtypes(node, op_def, argument)
        return found

    def dtype(self, tensor: Endpoint) -> DType:
        """A tensor's element type.

        Raises:
            GraphError: the operation is unknown and its attributes do not tell.
        """
        dtypes = self.output_dtypes(self.nodes[tensor.node])
        if dtypes is None or tensor.output >= len(dtypes):
            op = self.nodes[tensor.node].op
            raise GraphError(
                f"the type of {tensor} is unknown",
                cause=f"the MetaGraph does not describe the operation {op}",
            )
        return dtypes[tensor.output]

    def shape(self, tensor: Endpoint) -> tuple[int, ...] | None:
        """A tensor's shape with -1 for unknown lengths; None if its rank is unknown."""
        node = self.nodes[tensor.node]
        recorded = attr(node, "_output_shapes" if "_output_shapes" in node.attr else "output_shapes")
        if tensor.output < len(recorded.list.shape):
            return shape_of(recorded.list.shape[tensor.output])
        return attr_shape(node) if tensor.output == 0 else None


def _argument_dtypes(node: Proto, op_def: Proto, argument: Proto) -> list[DType]:
    """The types of one output argument: one, `number_attr` equal ones, or a list of them."""
    if argument.type_list_attr:
        types = _attr_or_default(node, op_def, argument.type_list_attr)
        return [base_dtype(number) for number in types.list.type] if types is not None else []
    count = 1
    if argument.number_attr:
        number = _attr_or_default(node, op_def, argument.number_attr)
        count = number.i if number is not None else 0
    if not 0 <= count <= _MAX_OUTPUTS:
        raise GraphError(f"{node.op} {node.name!r} claims {count} outputs")
    if argument.type:
        return [base_dtype(argument.type)] * count
    dtype = _attr_or_default(node, op_def, argument.type_attr)
    return [base_dtype(dtype.type)] * count if dtype is not None and dtype.type else []


def _attr_or_default(node: Proto, op_def: Proto, name: str) -> Proto | None:
    """A MetaGraph may have been written without attributes that have their default value."""
    if name in node.attr:
        return attr(node, name)
    return next((a.default_value for a in op_def.attr if a.name == name), None)


def _guessed_dtypes(node: Proto) -> list[DType] | None:
    for name in _TYPE_LIST_ATTRS:
        types = attr(node, name)
        if types.list.type:
            return [base_dtype(number) for number in types.list.type]
    for name in _TYPE_ATTRS:
        dtype = attr_dtype(node, name)
        if dtype is not None:
            return [dtype]
    return None
