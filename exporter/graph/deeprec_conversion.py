"""Rewrite lookups in DeepRec's embedding variables to lookups in dynamic tables, which stock TensorFlow runs.

Outputs need an embedding variable's handle, and gathers from it. Each is rewritten under its own name:

    KvVarHandleOp, or one for each part      four VarHandleOps: the variables of a dynamic table
    KvResourceGather(handle, ids)            ResourceGather(values, the row of each id)
    the partition of ids over P parts,
      P gathers and their stitch             one such lookup: the parts are served as one table

Lookups of whole groups of tables are split first (`exporter.graph.deeprec_groups`). All nodes around them
(unique, combiners, weights) are stock operations and stay. No output needs the operations that initialise,
save, restore, export or train embedding variables, so they are not served. An operation of DeepRec's that an
output needs and that is not converted is refused by name (`exporter.graph.servable`).
Source: DeepRec, tensorflow/core/ops/kv_variable_ops.cc, tensorflow/python/ops/{kv_variable,embedding}_ops.py.

*Partitioned variables.* These nodes become one lookup in one table:

    flat_ids -> FloorMod(1000) -> FloorMod(P) -> Cast = assignments
    DynamicPartition(flat_ids, assignments)    -> P gathers -> ParallelDynamicStitch
    DynamicPartition(range(size), assignments)               /

*Stages* (`tf.staged`) compute the next batch's features, or its rows, while the model computes: a
`TensorBufferPut` stores tensors, and a `TensorBufferTake` of the same shared name gives them to the model. A
request is computed at once, so the model reads the tensors that are put. A tensor of a stage that a signature
takes as its input stays.
Source: DeepRec, tensorflow/python/ops/prefetch.py and tensorflow/core/ops/tensor_buffer_ops.cc.

*Absent keys.* With a filter, a key that the variable does not hold reads the constant
`default_value_no_permission`. Without one it reads row `key mod d` of the initializer's value, a matrix of
d = `default_value_dim` rows that DeepRec computes when a server starts: no checkpoint holds it. If the
initializer draws random numbers, each start of DeepRec's server gives other ones. Then
`default_value_no_permission` is served, as DeepRec's releases up to 2302 did in all cases, unless the request
gives a number.
Source: DeepRec, tensorflow/core/framework/embedding/{counter_filter,nullable_filter}_policy.h (Lookup) and
tensorflow/python/ops/kv_variable_ops.py (where the initializer's value is made).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
from msgspec import Struct, field

from exporter.errors import ExportError, NotServable, UsageError
from exporter.graph.constant_values import compute, is_computed
from exporter.graph.deeprec_groups import group_handles, take_groups_apart
from exporter.graph.deeprec_ops import GATHERS, HANDLE, INITIALISERS, is_deeprecs
from exporter.graph.inference_graph import GraphDynamicTable
from exporter.graph.keys import collected_variables
from exporter.graph.nodes import (
    Endpoint,
    GraphIndex,
    all_before,
    attr,
    attr_dtype,
    attr_shape,
    attr_text,
    const_value,
    control_inputs,
    data_inputs,
    endpoint,
    free_name,
    new_node,
    put_nodes,
    through_identities,
)
from exporter.graph.signatures import SignatureEnds
from exporter.tables.lookup import add_rows
from exporter.tables.parts import PARTS
from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto
from exporter.wire.tensor_proto import fill, to_array

Array = np.ndarray[Any, Any]
_IMPORT = "KvResourceImportV2"

_VALUE_OF = {**dict.fromkeys(INITIALISERS, 2), _IMPORT: 3}
"""The position of the initial value among the inputs."""

_MAX_BYTES = 1 << 28
_MAX_DEPTH = 64
_SHOWN = 8
_RANDOM = re.compile(r"\w*(Random|Truncated|Multinomial|Shuffle|Rng|Bernoulli)\w*")
_STITCHES = frozenset({"ParallelDynamicStitch", "DynamicStitch"})
_MAX_STEPS = 16
_PART = re.compile(r"(.+)/part_([0-9]+)", re.ASCII)
_COLLECTIONS = ("variables", "trainable_variables", "embedding_variables")
_KEYS = (DType.INT64, DType.INT32)
_VALUES = (DType.FLOAT, DType.DOUBLE, DType.HALF, DType.BFLOAT16)


class Converted(Struct, frozen=True):
    """The dynamic tables that a graph's embedding variables became, and notes for the user."""

    tables: tuple[GraphDynamicTable, ...] = ()
    notes: tuple[str, ...] = ()


class _EmbeddingVariable(Struct):
    """An embedding variable of the graph, with a handle for each part."""

    name: str
    handles: list[Proto] = field(default_factory=list)


def convert_deeprec(meta_graph: Proto, absent_keys: Mapping[str, str]) -> Converted:
    """Rewrite, in place, the lookups that the signatures' outputs need."""
    if not absent_keys and not is_deeprecs(meta_graph.graph_def.node):
        return Converted()
    index = GraphIndex.of(meta_graph)
    read_through_stages(index, _inputs(meta_graph))
    index = take_groups_apart(meta_graph, index, _needed(index.nodes, meta_graph))
    found = _embedding_variables(meta_graph, index)
    numbers = AbsentKeys(absent_keys, found.keys())
    if not found:
        return Converted()
    needed = _needed(index.nodes, meta_graph)
    owners = {handle.name: variable for variable in found.values() for handle in variable.handles}
    conversion = _Conversion(index, owners, numbers)
    for parted in list(parted_lookups(index, conversion.name_of)):
        if parted.stitch in needed:
            conversion.rewrite(index.nodes[parted.stitch], parted.handle, parted.ids, parted.default)
    nodes = conversion.nodes
    for name in _needed(nodes, meta_graph):
        node = nodes[name]
        if node.op not in GATHERS:
            continue
        handle = conversion.handle_of(node)
        if handle is not None:
            inputs = data_inputs(node)
            conversion.rewrite(node, handle, inputs[1], inputs[2] if uses_default(node) else None)
    if conversion.tables:
        _place(meta_graph.graph_def, conversion)
    tables = (conversion.tables[name] for name in found if name in conversion.tables)
    return Converted(tuple(tables), tuple(conversion.notes))


def looked_up(meta_graph: Proto, index: GraphIndex) -> tuple[str, ...]:
    """The names of the embedding variables that a graph gathers from, without slots."""
    found = _embedding_variables(meta_graph, index)
    owners = {handle.name: variable.name for variable in found.values() for handle in variable.handles}
    gathers = [node for node in index.nodes.values() if node.op in GATHERS and data_inputs(node)]
    read = [data_inputs(node)[0].node for node in gathers]
    read += [handle for node in index.nodes.values() for handle in group_handles(node)]
    handles = (through_identities(index.nodes, name) for name in read)
    return tuple(dict.fromkeys(owners[handle] for handle in handles if handle in owners))


class _Conversion:
    """The rewriting of one graph, in place. `handles` and `before` are nodes to add before rewritten ones."""

    def __init__(
        self, index: GraphIndex, owners: Mapping[str, _EmbeddingVariable], numbers: AbsentKeys
    ) -> None:
        self._index, self._owners, self._numbers = index, owners, numbers
        self.tables: dict[str, GraphDynamicTable] = {}
        self.handles: list[Proto] = []
        self.before: dict[str, list[Proto]] = {}
        self._names = {*index.nodes}
        self.notes: list[str] = []

    @property
    def nodes(self) -> dict[str, Proto]:
        """The graph's nodes by name, new ones among them."""
        return {
            **self._index.nodes,
            **{node.name: node for before in self.before.values() for node in before},
        }

    def handle_of(self, gather: Proto) -> str | None:
        """The handle that a gather reads from; None if its input is not a handle itself."""
        inputs = data_inputs(gather)
        handle = through_identities(self._index.nodes, inputs[0].node) if len(inputs) > 2 else ""
        return handle if handle in self._owners else None

    def name_of(self, gather: Proto) -> str | None:
        """The name of the variable that a gather reads from."""
        handle = self.handle_of(gather)
        return None if handle is None else self._owners[handle].name

    def rewrite(self, node: Proto, handle: str, ids: Endpoint, default: Endpoint | None) -> None:
        """Replace a node by the lookup of `ids`."""
        variable = self._owners[through_identities(self._index.nodes, handle)]
        table = self._table(variable)
        if default is not None and self._is_filtered(variable):
            default = None  # a filter's constant goes first
        lookup = Lookup(
            name=node.name,
            table=table,
            ids=ids,
            default=default,
            after=tuple(control_inputs(node)),
        )
        *before, last = lookup_nodes(lookup, self._names)
        self.before[node.name] = before
        self._names |= {added.name for added in before}
        node.CopyFrom(last)

    def _table(self, variable: _EmbeddingVariable) -> GraphDynamicTable:
        if variable.name not in self.tables:
            self.tables[variable.name] = self._made(variable)
        return self.tables[variable.name]

    def _made(self, variable: _EmbeddingVariable) -> GraphDynamicTable:
        key_dtype, value_dtype, dim = _kind(variable)
        self._check_blocks(variable)
        given = self._numbers.of(variable.name)
        defaults = default_rows(self._index, variable.name, variable.handles, value_dtype, dim, given)
        if defaults.note:
            self.notes.append(defaults.note)
        names = [free_name(self._names, f"{variable.name}/{suffix}") for suffix in PARTS]
        self._names |= {*names}
        seeds, rows, keys, values = names
        table = GraphDynamicTable(
            variable.name, (seeds, rows, keys, values), key_dtype, value_dtype, dim, defaults.rows
        )
        for made in table.variables:
            self.handles.append(
                new_node(
                    made.node,
                    "VarHandleOp",
                    dtype=made.dtype,
                    shape=made.shape,
                    shared_name=made.node.encode(),
                )
            )
        return table

    def _initialisers(self, variable: _EmbeddingVariable) -> Iterator[Proto]:
        for handle in variable.handles:
            for reader, position in self._index.consumers[handle.name]:
                node = self._index.nodes[reader]
                if node.op in INITIALISERS and position == 0:
                    yield node

    def _is_filtered(self, variable: _EmbeddingVariable) -> bool:
        return any(attr(node, "filter_freq").i > 0 for node in self._initialisers(variable))

    def _check_blocks(self, variable: _EmbeddingVariable) -> None:
        for node in self._initialisers(variable):
            blocks = attr(node, "block_num").i
            if blocks > 1:
                raise NotServable(
                    f"embedding variable {variable.name!r} is a block of a dynamic-dimension variable",
                    cause=f"{node.op} {node.name!r} has block_num {blocks}",
                    hint="train it with one dimension for all keys",
                )


def _place(graph_def: Proto, conversion: _Conversion) -> None:
    """Add the new nodes, in an order in which each stands after its inputs."""
    placed = list(conversion.handles)
    for node in graph_def.node:
        placed += conversion.before.get(node.name, [])
        placed.append(node)
    put_nodes(graph_def.node, placed)


def _embedding_variables(meta_graph: Proto, index: GraphIndex) -> dict[str, _EmbeddingVariable]:
    """The embedding variables of a graph by name; the parts of one are joined."""
    collected = dict(_from_collections(meta_graph))
    found: dict[str, dict[int, Proto]] = {}
    for node in index.nodes.values():
        if node.op == HANDLE:
            stored = attr_text(node, "shared_name") or node.name
            part = _PART.fullmatch(stored)
            name, number = collected.get(node.name) or ((part[1], int(part[2])) if part else (stored, 0))
            found.setdefault(name, {}).setdefault(number, node)
    return {
        name: _EmbeddingVariable(name, [node for _, node in sorted(parts.items())])
        for name, parts in found.items()
    }


def _from_collections(meta_graph: Proto) -> Iterator[tuple[str, tuple[str, int]]]:
    """Handles of parts, each with the whole variable's name and the part's number."""
    for variable in collected_variables(meta_graph, _COLLECTIONS):
        info = variable.save_slice_info_def
        if info.full_name and info.var_offset:
            yield endpoint(variable.variable_name).node, (info.full_name, int(info.var_offset[0]))


def _kind(variable: _EmbeddingVariable) -> tuple[DType, DType, int]:
    """The dtypes of keys and values, and the dimension."""
    kinds = set()
    for handle in variable.handles:
        keys, values = attr_dtype(handle, "Tkeys"), attr_dtype(handle, "dtype")
        shape = attr_shape(handle)
        if keys not in _KEYS or values not in _VALUES or shape is None or len(shape) != 1 or shape[0] < 1:
            shown = (
                f"keys {keys.label if keys else 'unknown'}, values {values.label if values else 'unknown'}"
            )
            raise NotServable(
                f"embedding variable {variable.name!r} cannot be served from a dynamic table",
                cause=f"{HANDLE} {handle.name!r} has {shown} of shape {list(shape) if shape else 'unknown'}; "
                "keys are to be int64 or int32, values vectors of floating-point numbers",
                hint="choose outputs that do not need it",
            )
        kinds.add((keys, values, shape[0]))
    if len(kinds) > 1:
        raise NotServable(
            f"the parts of embedding variable {variable.name!r} are of several kinds",
            cause="their dtypes or dimensions differ",
            hint="choose outputs that do not need it",
        )
    return kinds.pop()


def _inputs(meta_graph: Proto) -> set[Endpoint]:
    """The tensors that signatures take."""
    return {
        tensor
        for signature in meta_graph.signature_def.values()
        for tensor in SignatureEnds.of(signature).inputs
    }


def _needed(nodes: Mapping[str, Proto], meta_graph: Proto) -> dict[str, None]:
    """The nodes that compute the outputs of some signature from its inputs."""
    found: dict[str, None] = {}
    for signature in meta_graph.signature_def.values():
        ends = SignatureEnds.of(signature)
        found |= all_before(nodes, ends.outputs, ends.inputs)
    return found


class PartedLookup(Struct, frozen=True):
    """A stitch whose result equals one lookup of `ids`; `handle` is that of the first part.

    `default` are the rows that absent keys read, if the lookup itself has them.
    """

    stitch: str
    handle: str
    ids: Endpoint
    default: Endpoint | None


def parted_lookups(index: GraphIndex, table_of: Callable[[Proto], str | None]) -> Iterator[PartedLookup]:
    """The lookups of a graph over all parts of a table; `table_of` maps a gather to its table."""
    for node in index.nodes.values():
        if node.op in _STITCHES:
            found = _parted(index, node, table_of)
            if found is not None:
                yield found


def _parted(index: GraphIndex, stitch: Proto, table_of: Callable[[Proto], str | None]) -> PartedLookup | None:
    inputs = data_inputs(stitch)
    count = len(inputs) // 2
    gathers = [_origin(index, tensor) for tensor in inputs[count:]]
    if not gathers or len(inputs) % 2 or any(node is None or node.op not in GATHERS for node in gathers):
        return None
    reads = [node for node in gathers if node is not None]
    if len({table_of(node) for node in reads}) != 1 or table_of(reads[0]) is None:
        return None
    ids = _partitioned(index, [data_inputs(node)[1] for node in reads])
    places = _partitioned(index, inputs[:count])
    if ids is None or places is None or ids[1] != places[1] or not _counts_up(index, places[0], ids[0]):
        return None
    default = None
    brought = {uses_default(node) for node in reads}
    if brought == {True}:
        rows = _partitioned(index, [data_inputs(node)[2] for node in reads])
        if rows is None or rows[1] != ids[1]:
            return None
        default = rows[0]
    elif brought != {False}:
        return None
    return PartedLookup(stitch.name, data_inputs(reads[0])[0].node, ids[0], default)


def uses_default(gather: Proto) -> bool:
    """True if an absent key reads the row of `default_value` at the key's own position."""
    return bool(attr(gather, "is_use_default_value_tensor").b)


def _partitioned(index: GraphIndex, parts: list[Endpoint]) -> tuple[Endpoint, Endpoint] | None:
    """The tensor that was partitioned into these, in order, and the assignments; None if there is none."""
    found = [_source(index, tensor) for tensor in parts]
    node = index.nodes.get(found[0].node)
    if node is None or node.op != "DynamicPartition" or len(data_inputs(node)) < 2:
        return None
    if found != [Endpoint(node.name, number) for number in range(len(found))]:
        return None
    if attr(node, "num_partitions").i != len(found):
        return None
    data, assignment = data_inputs(node)[:2]
    return _source(index, data), _source(index, assignment)


def _counts_up(index: GraphIndex, places: Endpoint, ids: Endpoint) -> bool:
    """True for `range(size(ids))`."""
    node = index.nodes.get(places.node)
    if node is None or node.op != "Range" or len(data_inputs(node)) < 3:
        return False
    start, limit, step = data_inputs(node)[:3]
    size = _origin(index, limit)
    while size is not None and size.op == "Cast" and data_inputs(size):
        size = _origin(index, data_inputs(size)[0])
    counted = data_inputs(size) if size is not None and size.op == "Size" else []
    if not counted or _source(index, counted[0]) != ids:
        return False
    return _number(index, start) == 0 and _number(index, step) == 1


def _number(index: GraphIndex, tensor: Endpoint) -> int | None:
    value = const_value(_origin(index, tensor))
    is_number = value is not None and value.size == 1 and value.dtype.kind in "iu"
    return int(value.ravel()[0]) if value is not None and is_number else None


def _origin(index: GraphIndex, tensor: Endpoint) -> Proto | None:
    return index.nodes.get(_source(index, tensor).node)


def _source(index: GraphIndex, tensor: Endpoint) -> Endpoint:
    """The tensor behind Identity nodes."""
    for _ in range(_MAX_STEPS):
        node = index.nodes.get(tensor.node)
        if node is None or node.op != "Identity" or not data_inputs(node):
            break
        tensor = data_inputs(node)[0]
    return tensor


def read_through_stages(index: GraphIndex, given: Collection[Endpoint]) -> None:
    """Let nodes read the tensors that are put into stages instead of those taken from them, in place.

    A stage that gives one of the tensors `given`, or into which this graph puts nothing, stays.
    """
    takes = [node for node in index.nodes.values() if node.op == _TAKE]
    if not takes:
        return
    puts = {_name(node): node for node in index.nodes.values() if node.op == _PUT}
    moved: dict[Endpoint, str] = {}
    for take in takes:
        put = puts.get(_name(take))
        if put is None or len(attr(take, "dtypes").list.type) != len(data_inputs(put)):
            continue
        if not any(tensor.node == take.name for tensor in given):
            sources = data_inputs(put)
            moved |= {Endpoint(take.name, number): tensor.as_input for number, tensor in enumerate(sources)}
    for node in index.nodes.values():
        for position, text in enumerate(node.input):
            if not text.startswith("^") and endpoint(text) in moved:
                node.input[position] = moved[endpoint(text)]


def _name(node: Proto) -> tuple[str, str]:
    """The name of a stage, equal for all its nodes."""
    return attr_text(node, "container"), attr_text(node, "shared_name") or str(node.name)


class Lookup(Struct, frozen=True):
    """A lookup of `ids` to add under `name`, after the nodes `after`.

    `default` holds a row for each id, to read where the table lacks the key; None: absent keys read the
    table's default rows.
    """

    name: str
    table: GraphDynamicTable
    ids: Endpoint
    default: Endpoint | None = None
    after: tuple[str, ...] = ()


def lookup_nodes(lookup: Lookup, taken: Collection[str]) -> list[Proto]:
    """The nodes of a lookup, with names not in `taken`; the last has its name and gives a row for each id."""
    for number in itertools.count():
        scope = f"{lookup.name}/lookup_{number}" if number else f"{lookup.name}/lookup"
        made = _made(lookup, scope)
        if not any(node.name in taken for node in made[:-1]):
            return made
    raise AssertionError("some scope is free")


def _made(lookup: Lookup, scope: str) -> list[Proto]:
    table, made = lookup.table, protos.GraphDef()
    ids, values_handle = lookup.ids.as_input, table.nodes[-1]
    if table.key_dtype is not DType.INT64:
        ids = _add(made, f"{scope}/ids", "Cast", ids, SrcT=table.key_dtype, DstT=DType.INT64)
    rows = add_rows(made, scope, table.name, table.nodes, ids, defaults=len(table.defaults))
    name = lookup.name if lookup.default is None else f"{scope}/values"
    values = _add(
        made, name, "ResourceGather", values_handle, rows.rows, dtype=table.value_dtype, Tindices=DType.INT32
    )
    if lookup.default is not None:
        _choose(made, lookup, lookup.default, scope, rows.found, values)
    made.node[-1].input.extend(f"^{name}" for name in lookup.after)
    return [*made.node]


def _choose(made: Proto, lookup: Lookup, default: Endpoint, scope: str, found: str, values: str) -> None:
    """Add the node that chooses between found values and the rows of `default`, under the lookup's name."""
    dtype = lookup.table.value_dtype
    shape = _add(made, f"{scope}/shape", "Shape", values, T=dtype, out_type=DType.INT32)
    given = default.as_input
    rows = _add(made, f"{scope}/default", "Reshape", given, shape, T=dtype, Tshape=DType.INT32)
    number = protos.TensorProto()
    fill(number, np.array(-1, np.int32), as_fields=True)
    last = _add(made, f"{scope}/last", "Const", dtype=DType.INT32, value=number)
    mask = _add(made, f"{scope}/is_found", "ExpandDims", found, last, T=DType.BOOL, Tdim=DType.INT32)
    _add(made, lookup.name, "SelectV2", mask, values, rows, T=dtype)


def _add(graph_def: Proto, name: str, op: str, *inputs: str, **attrs: Any) -> str:
    graph_def.node.append(new_node(name, op, inputs, **attrs))
    return name


class Defaults(Struct, frozen=True, eq=False):
    """The default rows [d, dim] of a table, and a note on them for the user."""

    rows: Array
    note: str = ""


def default_rows(
    index: GraphIndex, name: str, parts: list[Proto], dtype: DType, dim: int, given: float | None
) -> Defaults:
    """The rows that absent keys read in a table of these parts (handles); `given` is the request's number."""
    if given is not None:
        return Defaults(_constant(given, dtype, dim))
    found = [_part_defaults(index, part, dtype, dim) for part in parts]
    known = [one for one in found if one is not None]
    if not known:
        raise NotServable(
            f"the graph does not say what a key reads that {name!r} does not hold",
            cause="the nodes that initialise the embedding variable are not in the graph",
            hint=f"give it: --absent-key '{name}=0'",
        )
    first = known[0]
    if any(not np.array_equal(other.rows, first.rows, equal_nan=True) for other in known[1:]):
        raise NotServable(
            f"the parts of {name!r} have initializers of different values",
            cause="the parts are served as one table, which has one answer for a key that it does not hold",
            hint=f"choose it: --absent-key '{name}=0'",
        )
    note = f"a key that {name!r} does not hold reads {first.note}" if first.note else ""
    return Defaults(first.rows, note)


class AbsentKeys:
    """A request's numbers for absent keys, by regular expressions for the names of tables."""

    def __init__(self, texts: Mapping[str, str], names: Collection[str]) -> None:
        """Parse the rules for the embedding variables of a graph."""
        self._rules: list[tuple[re.Pattern[str], float]] = []
        for text, number in texts.items():
            try:
                pattern = re.compile(text)
                self._rules.append((pattern, float(number)))
            except (re.error, ValueError) as error:
                raise UsageError(
                    f"--absent-key {text}={number}: expected a regular expression and a number",
                    cause=str(error),
                    hint="--absent-key 'user_.*=0'",
                ) from error
            if not any(map(pattern.fullmatch, names)):
                shown = ", ".join(map(repr, sorted(names)[:_SHOWN])) or "none"
                raise UsageError(
                    f"--absent-key {text}: no embedding variable is called so",
                    cause=f"the pattern is for a whole name; there are {shown}",
                )

    def of(self, name: str) -> float | None:
        """The number for a table, from the first rule that matches its name."""
        return next((number for pattern, number in self._rules if pattern.fullmatch(name)), None)


def _part_defaults(index: GraphIndex, handle: Proto, dtype: DType, dim: int) -> Defaults | None:
    made = _initialiser(index, handle.name)
    if made is None:
        return None
    constant = _constant(attr(made, "default_value_no_permission").f, dtype, dim)
    if attr(made, "filter_freq").i > 0:
        return Defaults(constant)
    inputs, position = data_inputs(made), _VALUE_OF[made.op]
    value, why = _Evaluation(index).of(inputs[position] if position < len(inputs) else Endpoint("", 0))
    if value is None:
        shown = f"{float(constant[0, 0]):g}"
        return Defaults(
            constant,
            f"{shown}: {why}, so no file holds the value that DeepRec reads there (another: --absent-key)",
        )
    if value.dtype.kind == "O" or value.size % dim or not value.size:
        raise NotServable(
            f"the initial value of {handle.name!r} has shape {list(value.shape)}: no rows of {dim} numbers",
            cause="the graph is damaged, or was made for another dimension",
            hint="write the .meta again from the training program, or say --absent-key",
        )
    rows = np.asarray(value).reshape(-1, dim).astype(dtype.numpy)
    count = attr(made, "default_value_dim").i
    if 0 < count < len(rows):
        rows = rows[:count]
    same = bool((rows == rows[0]).all())
    return Defaults(np.ascontiguousarray(rows[:1] if same else rows))


def _constant(value: float, dtype: DType, dim: int) -> Array:
    return np.full((1, dim), value, dtype.numpy)


def _initialiser(index: GraphIndex, handle: str) -> Proto | None:
    """The operation that sets an embedding variable's initial value (DeepRec's second generation has two)."""
    readers = [index.nodes[name] for name, position in index.consumers[handle] if position < 2]
    for ops in (INITIALISERS, {_IMPORT}):
        for node in readers:
            position, inputs = 1 if node.op == _IMPORT else 0, data_inputs(node)
            if (
                node.op in ops
                and position < len(inputs)
                and through_identities(index.nodes, inputs[position].node) == handle
            ):
                return node
    return None


class _Evaluation:
    """Computes initial values that are made of constants, in numpy."""

    def __init__(self, index: GraphIndex) -> None:
        self._index = index

    def of(self, tensor: Endpoint, depth: int = 0) -> tuple[Array | None, str]:
        """A tensor's value, or the reason why it cannot be computed."""
        node = self._index.nodes.get(tensor.node)
        if node is None or depth > _MAX_DEPTH:
            return None, "its initializer is not in the graph"
        if _RANDOM.fullmatch(node.op):
            return None, "its initializer draws random numbers"
        if node.op == "Const":
            return _constant_value(node)
        if not is_computed(node.op):
            return None, f"its initializer needs {node.op} {node.name!r}, which is not computed here"
        values = []
        for source in data_inputs(node):
            value, why = self.of(source, depth + 1)
            if value is None:
                return None, why
            values.append(value)
        try:
            return compute(node, values, tensor.output, _MAX_BYTES), ""
        except (ValueError, TypeError, IndexError, ArithmeticError) as error:
            return None, f"its initializer cannot be computed ({error})"


def _constant_value(node: Proto) -> tuple[Array | None, str]:
    if "value" not in node.attr:
        return None, "its initializer has no value"
    try:
        return to_array(attr(node, "value").tensor, _MAX_BYTES), ""
    except (ExportError, ValueError, TypeError) as error:
        return None, f"its initializer's constant is damaged ({error})"


_PUT, _TAKE = "TensorBufferPut", "TensorBufferTake"
