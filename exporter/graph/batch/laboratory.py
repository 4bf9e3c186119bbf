"""A graph made fit to be run without its checkpoint, and requests of its domain.

*Variables* get small random values. A table of which rows alone are gathered gets few rows, and ids are taken
modulo their number: tables of terabytes need no memory here. *Requests* have random rows: integers below the
height of the tables, words of the vocabulary and others, sparse rows of which some are empty, serialized
Examples with the features that the graph parses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import CheckpointError
from exporter.graph.nodes import (
    Endpoint,
    attr,
    attr_dtype,
    attr_shape,
    base_dtype,
    const_texts,
    constant,
    data_inputs,
    free_name,
    new_node,
    readers_of,
    shape_of,
)
from exporter.storage.files import read_regular
from exporter.wire import protos
from exporter.wire.dtypes import Array, DType, is_floating
from exporter.wire.protos import Proto

_ROWS = 61  # of a table; a prime, so that ids do not meet by chance
_MOST_ELEMENTS = 64 << 20  # of all variables that are read whole
_MOST_WORDS = 1_000
_MOST_FILE_BYTES = 1 << 20  # of a vocabulary, for its words
_STEPS = 4  # of an input's dimension of any length, and the longest row of a sparse one
_SPREADS = (10.0, 1000.0)  # of floats that are not as usual
_LIMITS = (1_000, 100, 10, 2)  # below which integers are drawn, if the graph accepts no greater ones
_FAR = 100.0  # times the usual floats: beyond thresholds, so that branches and limits have an effect


class NoLaboratory(Exception):
    """Raised where a graph cannot be run without its checkpoint; its text says why."""


class Ends(Struct, frozen=True):
    """The tensors of one signature: inputs with their shapes (-1: any size) and dtypes, and outputs.

    `sparse` has the inputs that are indices, values and dense shape of a sparse tensor, `loose` the values
    alone of sparse tensors: weights of another one's.
    """

    inputs: Mapping[Endpoint, InputKind]
    outputs: Sequence[Endpoint]
    sparse: Sequence[tuple[Endpoint, Endpoint, Endpoint]] = ()
    loose: Sequence[Endpoint] = ()

    def parts(self) -> set[Endpoint]:
        """Return the inputs that are parts of sparse tensors."""
        return {*self.loose, *(tensor for group in self.sparse for tensor in group)}

    def batched(self) -> list[Endpoint]:
        """Return the dense inputs whose first dimension may have any length, in order."""
        parts = self.parts()
        found = (tensor for tensor, given in self.inputs.items() if given.shape and given.shape[0] < 0)
        return [tensor for tensor in found if tensor not in parts]


class InputKind(Struct, frozen=True):
    """An input's shape, None if it is not known, and its dtype."""

    shape: tuple[int, ...] | None
    dtype: DType


def sparse_inputs(
    inputs: Mapping[Endpoint, InputKind], names: Mapping[Endpoint, str]
) -> list[tuple[Endpoint, Endpoint, Endpoint]]:
    """Return (indices, values, dense shape) of each sparse tensor among the inputs.

    The three parts have one alias, or are outputs of one node, or of nodes in one scope; `names` has the
    alias of each input. Other inputs are left out.
    """
    groups: dict[tuple[str, bool], list[Endpoint]] = {}
    for tensor in inputs:
        alias = names[tensor]
        is_one = sum(other == alias for other in names.values()) > 1
        of_node = sum(other.node == tensor.node for other in inputs) > 1
        key = f"alias {alias}" if is_one else tensor.node if of_node else tensor.node.rpartition("/")[0]
        groups.setdefault((key, is_one or of_node), []).append(tensor)
    found = (
        _sparse({tensor: inputs[tensor] for tensor in tensors}, belong)
        for (_, belong), tensors in groups.items()
    )
    return [parts for parts in found if parts is not None]


def _sparse(group: Mapping[Endpoint, InputKind], belong: bool) -> tuple[Endpoint, Endpoint, Endpoint] | None:
    """Return (indices, values, dense shape) of a group of inputs; None if it is not a sparse tensor.

    A sparse tensor has three inputs: int64 indices of two dimensions, and two vectors. The dense shape is the
    int64 vector with an element for each column of the indices, or of unknown length. Unless the inputs
    `belong` together, by an alias or a node, one of unknown length is named as a shape.
    """
    vectors = [tensor for tensor, kind in group.items() if len(kind.shape or (0,)) == 1]
    others = [tensor for tensor in group if tensor not in vectors]
    if (len(vectors), len(others)) != (2, 1) or group[others[0]].dtype is not DType.INT64:
        return None
    if len(found := group[others[0]].shape or ()) != 2:
        return None

    def is_shape(tensor: Endpoint) -> bool:
        (length,) = group[tensor].shape or (-1,)
        may_be = belong or "shape" in tensor.node.rpartition("/")[2]
        return group[tensor].dtype is DType.INT64 and (may_be if length < 0 else found[1] in (-1, length))

    # a known length decides; else it is the last, as of its node
    shapes = sorted(filter(is_shape, vectors), key=lambda tensor: ((group[tensor].shape or (-1,))[0], tensor))
    if not shapes:
        return None
    (values,) = (tensor for tensor in vectors if tensor != shapes[-1])
    return others[0], values, shapes[-1]


class Laboratory(Struct, frozen=True):
    """Nodes to run, the operations that give variables their values, and the heights of its tables."""

    nodes: Mapping[str, Proto]
    assigning: tuple[str, ...]
    heights: tuple[int, ...]


def laboratory(nodes: Mapping[str, Proto], filled: Sequence[str]) -> Laboratory:
    """Return the nodes, changed ones as copies, with operations that give variables small random values.

    Tables of which only rows are gathered get 61 rows, and ids are taken modulo 61; the numbers of rows that
    they had are returned, too. Unknown lengths become 61. Variables of booleans, or of integers other than
    int32 and int64, are zeros. Variables whose handles are in `filled` are left to other operations.

    Raises:
        NoLaboratory: the variables are too large, of unknown shape, or of a dtype without random numbers.
        GraphError: a variable or a gather has an unknown type number.
    """
    made, readers = dict(nodes), readers_of(nodes.values(), waiting=True)
    assigning, heights, elements = list[str](), list[int](), 0
    for number, (name, node) in enumerate(nodes.items()):
        shape, dtype = attr_shape(node), attr_dtype(node, "dtype")
        if node.op != "VarHandleOp" or name in filled or dtype is None:
            continue
        if shape is None:
            raise NoLaboratory(f"the shape of variable {name!r} is not known")
        gathers = readers.get(name, [])
        if shape and gathers and all(_gathers_rows(reader, name) for reader in gathers):
            heights.append(shape[0])
            shape = (_ROWS, *shape[1:])
            made[name] = deepcopy(node)
            made[name].attr["shape"].shape.dim[0].size = _ROWS
            for reader in gathers:
                _take_modulo(made, reader)
        shape = tuple(_ROWS if size < 0 else size for size in shape)
        elements += math.prod(shape)
        if elements > _MOST_ELEMENTS:
            raise NoLaboratory(f"variables that it reads whole have more than {_MOST_ELEMENTS} elements")
        assigning.append(_assign(made, name, shape, dtype, number))
    return Laboratory(made, tuple(assigning), tuple(heights))


def _gathers_rows(reader: Proto, handle: str) -> bool:
    is_gather = reader.op == "ResourceGather" and not attr(reader, "batch_dims").i
    is_gather = is_gather and attr_dtype(reader, "Tindices") in (None, DType.INT32, DType.INT64)
    return is_gather and data_inputs(reader)[0].node == handle


def _take_modulo(nodes: dict[str, Proto], gather: Proto) -> None:
    gather = nodes[gather.name] = deepcopy(gather)
    source, dtype = data_inputs(gather)[1], attr_dtype(gather, "Tindices") or DType.INT64
    rows = constant(free_name(nodes, f"{gather.name}/rows"), np.array(_ROWS, dtype.numpy), dtype)
    rows.input.append(f"^{source.node}")  # in its branch, and in its iteration
    nodes[rows.name] = rows
    modulo = new_node(
        free_name(nodes, f"{gather.name}/mod"), "FloorMod", [source.as_input, rows.name], T=dtype
    )
    nodes[modulo.name] = modulo
    gather.input[1] = modulo.name


def _assign(nodes: dict[str, Proto], name: str, shape: tuple[int, ...], dtype: DType, seed: int) -> str:
    """Add operations to `nodes` that give the variable `name` random values; return the last one's name.

    `seed` makes the values differ between variables. Booleans, and integers other than int32 and int64, are
    zeros instead. NoLaboratory for a dtype without random numbers.
    """

    def add(what: str, op: str, inputs: Sequence[str], **attrs: Any) -> str:
        node = new_node(free_name(nodes, f"{name}/{what}"), op, inputs, **attrs)
        nodes[node.name] = node
        return str(node.name)

    def number(what: str, value: Any, of: DType) -> str:
        node = constant(free_name(nodes, f"{name}/{what}"), np.array(value, of.numpy), of)
        nodes[node.name] = node
        return str(node.name)

    size, seeds = number("size", shape, DType.INT32), number("seed", (seed, 1), DType.INT32)
    types = {"T": DType.INT32, "Tseed": DType.INT32}
    if dtype.is_floating:
        # variances and scales have one dimension, and are positive; kernels keep numbers near 1
        is_matrix = len(shape) > 1
        op = "StatelessRandomNormal" if is_matrix else "StatelessRandomUniform"
        value = add("random", op, [size, seeds], dtype=DType.FLOAT, **types)
        scale = 1 / math.sqrt(max(1, math.prod(shape[:-1]))) if is_matrix else 1.0
        value = add("scaled", "Mul", [value, number("scale", scale, DType.FLOAT)], T=DType.FLOAT)
        value = add(
            "moved", "AddV2", [value, number("least", 0 if is_matrix else 0.5, DType.FLOAT)], T=DType.FLOAT
        )
        value = add("cast", "Cast", [value], SrcT=DType.FLOAT, DstT=dtype)
    elif dtype in (DType.INT32, DType.INT64):
        ends = [number("least", 1, dtype), number("limit", _ROWS, dtype)]
        value = add("random", "StatelessRandomUniformInt", [size, seeds, *ends], dtype=dtype, **types)
    elif dtype is DType.BOOL or dtype.is_integer:
        value = add("zeros", "Fill", [size, number("zero", 0, dtype)], T=dtype, index_type=DType.INT32)
    else:
        raise NoLaboratory(f"variable {name!r} is of {dtype.label}")
    return add("assign", "AssignVariableOp", [name, value], dtype=dtype)


class Population(Struct, frozen=True):
    """Random rows for one signature: `dense` has values by tensor, `ragged` rows and rank by sparse input.

    `fixed` has the one value of an input that is not by rows, `loose` the rows of an input that is only the
    values of a sparse tensor.
    """

    dense: Mapping[str, Array]
    ragged: Mapping[tuple[str, str, str], tuple[Sequence[Array], int]]
    fixed: Mapping[str, Array]
    loose: Mapping[str, Sequence[Array]]

    def feeds(self, rows: Array) -> dict[str, Array]:
        """Return {tensor: value} for a request of the rows with these numbers, in this order.

        An input that is not by rows has the same value in every request.
        """
        found = {name: values[rows] for name, values in self.dense.items()}
        for (indices, values, shape), (lists, rank) in self.ragged.items():
            chosen = [lists[row] for row in rows]
            places = [(at, step) for at, each in enumerate(chosen) for step in range(len(each))]
            found[indices] = np.zeros((len(places), rank), np.int64)
            found[indices][:, :2] = np.array(places, np.int64).reshape(-1, 2)
            found[values] = np.concatenate(chosen)
            found[shape] = np.array([len(rows), _STEPS, *[1] * (rank - 2)], np.int64)
        for name, lists in self.loose.items():
            found[name] = np.concatenate([lists[row] for row in rows])
        return {**found, **self.fixed}


def populations(
    nodes: Mapping[str, Proto], ends: Ends, heights: Sequence[int], rows: int, files: Sequence[Path]
) -> Iterator[Population]:
    """Yield populations of `rows` random rows for a signature, with the greatest integers first.

    A graph may refuse some of them, so the caller tries one after the other. Each comes twice: with some rows
    far out and some of zeros and ones, then without these, because a graph may mix rows only where a limit is
    exceeded or a value is missing. In the first half sparse rows and texts may be empty, in the second not.
    `heights` are the numbers of rows of the graph's tables; `files` fill its lookup tables, and their words
    are drawn.
    """
    limits = {height for height in (*heights, sum(heights)) if height > 1}
    words = _words(nodes, files)
    for fewest in (0, 1):
        known = words[words != b""] if fewest else words
        for limit in sorted(limits | {*_LIMITS}, reverse=True):
            usual = _Drawing(nodes, known, limit, fewest, np.random.default_rng(limit), 1.0)
            kinds = (usual, replace(usual, scale=_FAR), replace(usual, limit=2, scale=0.0))
            drawn = [_population(each, ends, rows) for each in kinds]
            yield _in_turn(drawn, usual.random.choice(len(drawn), rows, p=(0.6, 0.2, 0.2)))
            yield drawn[0]


def _in_turn(drawn: Sequence[Population], kinds: Array) -> Population:
    """Return a population with the rows of several: row i is row i of `drawn[kinds[i]]`.

    Values that are not by rows are taken from the first population.
    """
    first, at = drawn[0], np.arange(len(kinds))
    dense = {name: np.array([each.dense[name] for each in drawn])[kinds, at] for name in first.dense}
    ragged = {
        names: ([drawn[kind].ragged[names][0][row] for row, kind in enumerate(kinds)], rank)
        for names, (_, rank) in first.ragged.items()
    }
    loose = {name: [drawn[kind].loose[name][row] for row, kind in enumerate(kinds)] for name in first.loose}
    return replace(first, dense=dense, ragged=ragged, loose=loose)


def stranger(population: Population, batch: int) -> Iterator[Population]:
    """Yield two populations of the same rows with unusual numbers, to which a graph may react otherwise.

    Floats are large, with one sign in the first half of the rows and the other in the second; integers are at
    most `batch`, or 2, so that they are often equal; texts and booleans are shuffled among the rows. Sparse
    inputs stay. A graph may refuse these rows.
    """
    for seed, spread in enumerate(_SPREADS):
        random = np.random.default_rng(seed)

        def drawn(values: Array, random: np.random.Generator = random, spread: float = spread) -> Array:
            if is_floating(values):
                signs = np.where(np.arange(len(values)) < len(values) // 2, spread, -spread)
                moved = values.astype(np.float64) * spread + signs.reshape(-1, *[1] * (values.ndim - 1))
                return moved.astype(values.dtype)
            if values.dtype.kind in "iu" and values.size:
                most = min(int(values.max()), max(2, batch))
                found: Array = random.integers(0, most + 1, values.shape).astype(values.dtype)
                return found
            return random.permutation(values)

        dense = {name: drawn(values) for name, values in population.dense.items()}
        yield Population(dense, population.ragged, population.fixed, population.loose)


def _population(drawing: _Drawing, ends: Ends, rows: int) -> Population:
    dense, fixed = dict[str, Array](), dict[str, Array]()
    parts = ends.parts()
    for tensor, given in ends.inputs.items():
        if tensor not in parts:
            shape = tuple(_STEPS if size < 0 else size for size in given.shape or ())
            is_by_rows = bool(given.shape) and (given.shape or (0,))[0] < 0
            shape = (rows, *shape[1:]) if is_by_rows else shape
            (dense if is_by_rows else fixed)[str(tensor)] = drawing.values(tensor, given.dtype, shape)
    ragged = {}
    # one sparse input may weigh the values of another: a row has as many of each
    lengths = drawing.random.integers(drawing.fewest, _STEPS + 1, rows)
    lengths[:2] = (drawing.fewest, _STEPS)[: len(lengths[:2])]

    def lists(values: Endpoint) -> list[Array]:
        return [drawing.values(values, ends.inputs[values].dtype, (int(length),)) for length in lengths]

    for indices, values, dense_shape in ends.sparse:
        rank = max(2, (ends.inputs[indices].shape or (2,))[-1])
        ragged[str(indices), str(values), str(dense_shape)] = (lists(values), rank)
    return Population(dense, ragged, fixed, {str(values): lists(values) for values in ends.loose})


class _Drawing(Struct, frozen=True):
    """Draws values for the inputs of a graph: integers below `limit`, strings among `words`.

    Floats are normally distributed, times `scale`; with a scale of 0 they are rounded to whole numbers. Rows
    of sparse inputs have `fewest` values or more.
    """

    nodes: Mapping[str, Proto]
    words: Array
    limit: int
    fewest: int
    random: np.random.Generator
    scale: float

    def values(self, tensor: Endpoint, dtype: DType, shape: tuple[int, ...]) -> Array:
        """Return random values of this dtype and shape; serialized Examples if the graph parses `tensor`.

        NoLaboratory for resources and variants.
        """
        if dtype is DType.STRING:
            parsers = [node for node in self.nodes.values() if _parses(node, tensor)]
            if not parsers:
                return self.random.choice(self.words, shape)
            examples = [self._example(parsers) for _ in range(math.prod(shape))]
            return np.array([*examples, None], object)[:-1].reshape(shape)
        if dtype is DType.BOOL:
            return self.random.integers(0, 2, shape).astype(bool)
        if dtype.is_integer:
            return self.random.integers(0, min(self.limit, dtype.limits[1]), shape).astype(dtype.numpy)
        if dtype in (DType.RESOURCE, DType.VARIANT):
            raise NoLaboratory(f"there are no random values of {dtype.label}")
        drawn = self.random.normal(size=shape)
        return (drawn * self.scale if self.scale else np.rint(drawn)).astype(dtype.numpy)

    def _example(self, parsers: Sequence[Proto]) -> bytes:
        example = protos.message_class("Example")()
        for parser in parsers:
            for key, dtype, shape in _features(self.nodes, parser):
                steps = int(self.random.integers(self.fewest, _STEPS + 1))
                count = math.prod(steps if size < 0 else size for size in shape)
                drawn = self.values(Endpoint("", 0), dtype, (count,)).tolist()
                feature = example.features.feature[key]
                kind = {DType.FLOAT: feature.float_list, DType.STRING: feature.bytes_list}
                kind.get(dtype, feature.int64_list).value.extend(drawn)
        data: bytes = example.SerializeToString()
        return data


def _parses(node: Proto, tensor: Endpoint) -> bool:
    return node.op in ("ParseExample", "ParseExampleV2") and data_inputs(node)[0] == tensor


def _features(nodes: Mapping[str, Proto], parser: Proto) -> Iterator[tuple[str, DType, tuple[int, ...]]]:
    """Yield (name, dtype, shape) of the features that a node parses; shape (-1,) for sparse and ragged ones.

    GraphError, during the iteration, for an unknown type number.
    """
    is_second = parser.op == "ParseExampleV2"
    texts = [const_texts(nodes.get(tensor.node)) or [] for tensor in data_inputs(parser)]
    sparse = attr(parser, "num_sparse" if is_second else "Nsparse").i
    dense = attr(parser, "Ndense").i
    names = (
        texts[2:5]
        if is_second
        else [[*chain(*texts[2 : 2 + sparse])], [*chain(*texts[2 + sparse :][:dense])], []]
    )
    types = (("sparse_types", None), ("Tdense", "dense_shapes"), ("ragged_value_types", None))
    for keys, (kind, declared) in zip(names, types, strict=True):
        shapes = [*attr(parser, declared).list.shape] if declared else []
        for at, (key, number) in enumerate(zip(keys, attr(parser, kind).list.type, strict=False)):
            yield key, base_dtype(number), (shape_of(shapes[at]) or ()) if shapes else (-1,)


def _words(nodes: Mapping[str, Proto], files: Sequence[Path]) -> Array:
    """Return words for inputs, as an object array of bytes: of the graph's vocabularies and others.

    They are at most 1,000; only three numbers as text if the graph reads texts as numbers. `files` are
    vocabularies; a file that cannot be read, or exceeds 1 MiB, is skipped.
    """
    found = [b"", b"a", b"word", b"17", b"another word"]
    if any(node.op in ("StringToNumber", "DecodeCSV") for node in nodes.values()):
        found = [b"3", b"17", b"0.5"]
        return np.array(found, object)
    for node in nodes.values():
        if node.op.startswith("InitializeTable") and len(data_inputs(node)) > 1:
            found += [text.encode() for text in const_texts(nodes.get(data_inputs(node)[1].node)) or []]
    for file in files:
        with suppress(OSError, CheckpointError):
            found += read_regular(file, _MOST_FILE_BYTES).splitlines()
    return np.array(found[:_MOST_WORDS], object)
