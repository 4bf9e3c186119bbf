"""Put a parser of serialized tf.Examples before a graph that takes parsed features.

A feature is a tensor's name, or an object with the tensor and how an Example holds it:

    {"age": "IteratorGetNext:0",
     "size": {"tensor": "IteratorGetNext:1", "dtype": "int64", "shape": [2], "default": 0},
     "words": {"sparse": "DeserializeSparse"}}

Dense features: `shape` is the shape in one Example, by default the tensor's without the batch. A first length
of -1 accepts any number of values, and shorter Examples of a batch are padded with `default`. A feature
without `default` must be in every Example. Sparse features, which an Example may lack, name the tensors
`[indices, values, dense_shape]`, or the node with these as outputs. `dtype` is the stored one (float32,
int64, string), from which values are cast.

Source of the parsing node: `ParseExampleV2` in tensorflow/core/ops/parsing_ops.cc.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.errors import UsageError
from exporter.graph.nodes import Endpoint, GraphIndex, constant, endpoint, free_name, new_node, shape_proto
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

# The dtypes of a tf.Example (source: tensorflow/core/example/feature.proto).
_STORED = (DType.FLOAT, DType.INT64, DType.STRING)

_FIELDS = {"tensor", "sparse", "dtype", "shape", "default"}
_WANTED = 'expected "TENSOR", {"tensor": TENSOR, "shape": [...], "default": ...} or {"sparse": NODE}'


class Feature(Struct, frozen=True):
    """A feature of a tf.Example, and the tensor that takes its values; three tensors if it is sparse."""

    name: str
    tensors: tuple[str, ...]
    dtype: DType | None = None
    shape: tuple[int, ...] | None = None  # in one Example; None: the tensor's, without the batch
    default: Any = None  # None if every Example must have the feature

    @property
    def is_sparse(self) -> bool:
        """True if the graph takes the feature as three tensors: indices, values and dense shape."""
        return len(self.tensors) > 1


def read_features(where: str, entry: Any) -> tuple[Feature, ...]:
    """Return the features of a JSON object (the form is at the top of the module), in order of their names.

    `where` begins the message of the UsageError that is raised if the object is not valid.
    """
    if not isinstance(entry, dict) or not entry:
        raise UsageError(f"{where}: 'examples' is not an object of features", cause=_WANTED)
    return tuple(_read_feature(where, name, entry[name]) for name in sorted(entry))


def _read_feature(where: str, name: str, entry: Any) -> Feature:
    entry = {"tensor": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, dict) or set(entry) - _FIELDS or ("tensor" in entry) == ("sparse" in entry):
        raise UsageError(f"{where}: feature {name!r} is not a feature", cause=_WANTED)
    if "sparse" in entry:
        tensors = _triple(entry["sparse"])
        if set(entry) - {"sparse", "dtype"}:
            raise UsageError(f"{where}: feature {name!r} is sparse: it has neither shape nor default")
    else:
        tensors = [entry["tensor"]]
    shape = entry.get("shape")
    if not tensors or not all(isinstance(tensor, str) for tensor in tensors) or not _is_shape(shape):
        raise UsageError(f"{where}: feature {name!r} is not a feature", cause=_WANTED)
    shape = None if shape is None else tuple(shape)
    return Feature(name, tuple(tensors), _stored_dtype(where, name, entry), shape, entry.get("default"))


def _triple(sparse: Any) -> list[Any]:
    """Return the names of indices, values and dense shape: a list of three, or a node's first three outputs.

    Empty if `sparse` is neither such a list nor a node's name; items of the list are not checked.
    """
    if isinstance(sparse, list):
        return sparse if len(sparse) == 3 else []
    return [f"{sparse}:{output}" for output in range(3)] if isinstance(sparse, str) else []


def _is_shape(shape: Any) -> bool:
    if shape is None:
        return True
    sizes = isinstance(shape, list) and all(type(size) is int for size in shape)
    return sizes and all(size >= (0 if at else -1) for at, size in enumerate(shape))


def _stored_dtype(where: str, name: str, entry: Mapping[str, Any]) -> DType | None:
    labels = [dtype.label for dtype in _STORED]
    if "dtype" not in entry:
        return None
    if entry["dtype"] not in labels:
        raise UsageError(
            f"{where}: feature {name!r} has dtype {entry['dtype']!r}",
            cause=f"a tf.Example holds {', '.join(labels)}",
        )
    return DType.of(entry["dtype"])


class ExampleParser(Struct, frozen=True):
    """The parser in the graph: the placeholder of the Examples, and {feature's tensor: its parsed tensor}."""

    examples: Endpoint
    parsed: Mapping[Endpoint, Endpoint]


def add_parser(meta_graph: Proto, index: GraphIndex, features: Iterable[Feature]) -> ExampleParser:
    """Let the readers of the features' tensors read, in place, tensors parsed from a new placeholder.

    Returns the placeholder's tensor, and the parsed ones. UsageError if a feature does not fit its tensors,
    or two features name the same tensor; UnknownTensor if the graph lacks a tensor, GraphError if a tensor's
    dtype is unknown.
    """
    resolved = [_Resolved.of(index, feature) for feature in features]
    taken: dict[Endpoint, str] = {}
    for item in resolved:
        for tensor in item.tensors:
            if taken.setdefault(tensor, item.feature.name) != item.feature.name:
                raise UsageError(f"features {taken[tensor]!r} and {item.feature.name!r} are both {tensor}")
    sparse = [item for item in resolved if item.feature.is_sparse]
    dense = [item for item in resolved if not item.feature.is_sparse]
    parser = _Nodes(meta_graph.graph_def, index).add_parsing(sparse, dense)
    for node in index.nodes.values():  # the nodes from before, without the parser's own
        for at, text in enumerate(node.input):
            if not text.startswith("^") and (moved := parser.parsed.get(endpoint(text))):
                node.input[at] = moved.as_input
    return parser


class _Resolved(Struct, frozen=True):
    """A feature with its tensors in the graph, its stored dtype, and the dtype of the graph's values."""

    feature: Feature
    tensors: tuple[Endpoint, ...]
    dtype: DType
    values: DType
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, index: GraphIndex, feature: Feature) -> _Resolved:
        tensors = tuple(index.resolve(text, f"feature {feature.name!r}") for text in feature.tensors)
        if feature.is_sparse:
            _check_sparse(index, feature, tensors)
        values = index.dtype(tensors[1 if feature.is_sparse else 0])
        dtype = feature.dtype or _natural(values)
        if dtype is None or (dtype is DType.STRING) != (values is DType.STRING):
            stored = "nothing like it" if dtype is None else dtype.label
            raise UsageError(
                f"feature {feature.name!r}: {tensors[0]} takes {values.label}, a tf.Example holds {stored}"
            )
        shape = () if feature.is_sparse else _shape(index, feature, tensors[0])
        return cls(feature, tensors, dtype, values, shape)

    @property
    def default(self) -> np.ndarray[Any, Any]:
        """Return the feature's values for Examples that lack it, or its padding if it may have any length.

        The padding is a scalar. Empty for a required feature. UsageError if the given value is not of the
        feature's type and shape.
        """
        given, varies = self.feature.default, self.shape[:1] == (-1,)
        kind = object if self.dtype is DType.STRING else self.dtype.numpy
        if given is None and varies:
            given = "" if self.dtype is DType.STRING else 0
        if given is None:
            return np.zeros(0, kind)
        try:
            exact = np.asarray(given, object) if self.dtype is DType.STRING else np.asarray(given)
            if self.dtype is DType.STRING:
                exact = np.array([text.encode() for text in exact.ravel()], object).reshape(exact.shape)
            elif exact.dtype.kind not in ("iu" if self.dtype is DType.INT64 else "iuf"):
                raise ValueError(f"{given!r} is not of type {self.dtype.label}")
            return np.broadcast_to(exact.astype(kind), () if varies else self.shape)
        except (ValueError, AttributeError, OverflowError) as error:
            raise UsageError(
                f"feature {self.feature.name!r}: {given!r} cannot be its default",
                cause=f"it is {self.dtype.label} of shape {list(self.shape)}: {error}",
            ) from error


def _natural(dtype: DType) -> DType | None:
    """Return the dtype in which a tf.Example holds values of a dtype: string, int64 or float32.

    Booleans are int64. None for resources and variants.
    """
    if dtype is DType.STRING:
        return dtype
    if dtype in (DType.RESOURCE, DType.VARIANT):
        return None
    return DType.INT64 if dtype.is_integer or dtype is DType.BOOL else DType.FLOAT


def _check_sparse(index: GraphIndex, feature: Feature, tensors: tuple[Endpoint, ...]) -> None:
    """Raise UsageError unless the first and last of three tensors, indices and dense shape, are int64.

    GraphError if the graph does not describe one of them.
    """
    found = [index.dtype(tensor) for tensor in tensors]
    if found[0] is not DType.INT64 or found[2] is not DType.INT64:
        raise UsageError(
            f"feature {feature.name!r}: {', '.join(map(str, tensors))} are not a sparse tensor",
            cause=f"their types are {', '.join(dtype.label for dtype in found)}; indices and shape are int64",
            hint='{"sparse": [INDICES, VALUES, DENSE_SHAPE]}',
        )


def _shape(index: GraphIndex, feature: Feature, tensor: Endpoint) -> tuple[int, ...]:
    """Return a dense feature's shape in one Example: the given one, else the tensor's without the batch.

    A first length of -1 is any number of values. UsageError if neither is known, or if they differ in rank or
    in a length that both fix.
    """
    known = index.shape(tensor)
    shape = feature.shape
    if shape is None:
        if known is None or not known or min(known[1:], default=0) < 0:
            raise UsageError(
                f"feature {feature.name!r}: the graph does not tell the shape of {tensor}",
                hint='say one Example\'s: {"tensor": ..., "shape": [...]}',
            )
        return known[1:]
    fits = known is None or (
        len(known) == len(shape) + 1
        and all(size in (-1, given) or given == -1 for size, given in zip(known[1:], shape, strict=True))
    )
    if not fits:
        raise UsageError(
            f"feature {feature.name!r} has shape {list(shape)}, but {tensor} takes {list(known or ())}",
            cause="the first length is the batch's",
        )
    return shape


class _Nodes:
    """Adds the parser's nodes under one scope."""

    def __init__(self, graph_def: Proto, index: GraphIndex) -> None:
        self._graph_def = graph_def
        self._names = dict(index.nodes)
        self._scope = free_name(self._names, "parse_examples")

    def add_parsing(self, sparse: list[_Resolved], dense: list[_Resolved]) -> ExampleParser:
        """Add the placeholder, the parsing node, and one parsed tensor for each tensor of a feature.

        Returns the placeholder's tensor, and {feature's tensor: its parsed tensor}. UsageError if a default
        does not fit.
        """
        name = free_name(self._names, "examples")
        examples = self._put(new_node(name, "Placeholder", dtype=DType.STRING, shape=(-1,)))
        keys = [("names", []), ("sparse_keys", sparse), ("dense_keys", dense), ("ragged_keys", [])]
        inputs = [examples.name]  # then lists of names and the defaults, in the order of the operation
        for label, items in keys:
            texts = np.array([item.feature.name.encode() for item in items], object)
            inputs.append(self._constant(label, texts, DType.STRING))
        inputs += [self._constant("default", item.default, item.dtype) for item in dense]
        node = self._put(new_node(f"{self._scope}/ParseExampleV2", "ParseExampleV2", inputs))
        _describe_outputs(node, sparse, dense)
        count, parsed = len(sparse), dict[Endpoint, Endpoint]()
        for at, item in enumerate(sparse):  # all indices come first, then all values, then all shapes
            whole = (DType.INT64, DType.INT64)
            parts = zip((whole, (item.dtype, item.values), whole), ((-1, 2), (-1,), (2,)), strict=True)
            for role, (types, shape) in enumerate(parts):
                source = Endpoint(node.name, role * count + at)
                parsed[item.tensors[role]] = self._passed_on(item, source, *types, shape)
        for at, item in enumerate(dense):
            source = Endpoint(node.name, 3 * count + at)
            shape = (-1, *item.shape)
            parsed[item.tensors[0]] = self._passed_on(item, source, item.dtype, item.values, shape)
        return ExampleParser(Endpoint(examples.name, 0), parsed)

    def _passed_on(
        self, item: _Resolved, source: Endpoint, stored: DType, wanted: DType, shape: tuple[int, ...]
    ) -> Endpoint:
        """Add an Identity, or a Cast from `stored` to `wanted`, of the parsed tensor; return its output.

        The node is named after the feature, and `shape` is recorded as its attribute.
        """
        leaf = re.sub(r"[^A-Za-z0-9_./-]", "_", item.feature.name)
        name = free_name(self._names, f"{self._scope}/{leaf}")
        if stored is wanted:
            node = self._put(new_node(name, "Identity", [source.as_input], T=wanted))
        else:
            node = self._put(new_node(name, "Cast", [source.as_input], SrcT=stored, DstT=wanted))
        node.attr["_output_shapes"].list.shape.append(shape_proto(shape))
        return Endpoint(node.name, 0)

    def _constant(self, role: str, value: np.ndarray[Any, Any], dtype: DType) -> str:
        name = free_name(self._names, f"{self._scope}/{role}")
        return str(self._put(constant(name, value, dtype)).name)

    def _put(self, node: Proto) -> Proto:
        self._graph_def.node.append(node)
        self._names[node.name] = self._graph_def.node[-1]
        return self._graph_def.node[-1]


def _describe_outputs(node: Proto, sparse: list[_Resolved], dense: list[_Resolved]) -> None:
    """Set the parsing node's attributes in place, also empty lists: the operation has no defaults."""
    node.attr["num_sparse"].i = len(sparse)
    for name, items in (("sparse_types", sparse), ("Tdense", dense)):
        node.attr[name].list.SetInParent()
        node.attr[name].list.type[:] = [int(item.dtype) for item in items]
    node.attr["dense_shapes"].list.SetInParent()
    node.attr["dense_shapes"].list.shape.extend(shape_proto(item.shape) for item in dense)
    for name in ("ragged_value_types", "ragged_split_types"):
        node.attr[name].list.SetInParent()
