"""Rewrite lookups in DeepRec's embedding variables to lookups in dynamic tables, which stock TensorFlow runs.

Outputs need an embedding variable's handle, and gathers from it. Each is rewritten under its own name:

    KvVarHandleOp, or one for each part      four VarHandleOps: the variables of a dynamic table
    KvResourceGather(handle, ids)            ResourceGather(values, the row of each id)
    the partition of ids over P parts,
      P gathers and their stitch             one such lookup: the parts are served as one table

Lookups of whole groups of tables are split first (`exporter.graph.deeprec_groups`). An operation of DeepRec's
that an output needs and that is not converted is refused by name (`exporter.graph.servable`).
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
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.errors import ExportError, NotServable, UsageError
from exporter.graph.constant_values import MISFITS, compute, is_computed
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
    tensor_behind,
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

# The position of the initial value among an operation's inputs.
_VALUE_OF = {**dict.fromkeys(INITIALISERS, 2), _IMPORT: 3}

_PUT, _TAKE = "TensorBufferPut", "TensorBufferTake"
_MAX_BYTES = 1 << 28  # of an initial value, whatever a graph says
_MAX_DEPTH = 64  # of nodes before an initial value, each a frame of Python's stack
_SHOWN = 8
_RANDOM = re.compile(r"\w*(Random|Truncated|Multinomial|Shuffle|Rng|Bernoulli)\w*")
_STITCHES = frozenset({"ParallelDynamicStitch", "DynamicStitch"})
_PART = re.compile(r"(.+)/part_([0-9]+)", re.ASCII)
_COLLECTIONS = ("variables", "trainable_variables", "embedding_variables")
_KEYS = (DType.INT64, DType.INT32)
_VALUES = (DType.FLOAT, DType.DOUBLE, DType.HALF, DType.BFLOAT16)


class Converted(Struct, frozen=True):
    """The dynamic tables made from a graph's embedding variables, and notes for the user."""

    tables: tuple[GraphDynamicTable, ...] = ()
    notes: tuple[str, ...] = ()


def convert_deeprec(meta_graph: Proto, absent_keys: Mapping[str, str]) -> Converted:
    """Rewrite, in place, the lookups in embedding variables that the signatures' outputs need.

    `absent_keys` is {regular expression for names of variables: the number that absent keys read}. Returns
    the tables that these variables become, in the graph's order, and notes; both empty if the graph is not
    DeepRec's. GraphError if the graph is damaged, its subclass NotServable for a variable that cannot become
    a table; UsageError if `absent_keys` has something else than an expression and a number, or an expression
    that no variable's name matches.
    """
    if not absent_keys and not is_deeprecs(meta_graph.graph_def.node):
        return Converted()
    index = GraphIndex.of(meta_graph)
    ends = map(SignatureEnds.of, meta_graph.signature_def.values())
    read_through_stages(index, {tensor for one in ends for tensor in one.inputs})
    index = take_groups_apart(meta_graph, index, _needed(index.nodes, meta_graph))
    found = _embedding_variables(meta_graph, index)
    numbers = AbsentKeys(absent_keys, found.keys())
    if not found:
        return Converted()
    needed = _needed(index.nodes, meta_graph)
    conversion = _Conversion(index, found, numbers)
    stitches = (node for node in index.nodes.values() if node.op in _STITCHES)
    # All are found before the first is rewritten, because a stitch is known by the nodes before it.
    parted = [(node, one) for node in stitches if (one := _parted(index, node, conversion.handle_of))]
    for node, lookup in parted:
        if node.name in needed:
            conversion.rewrite(node, *lookup)
    nodes = conversion.nodes
    for node in (nodes[name] for name in _needed(nodes, meta_graph)):
        handle = conversion.handle_of(node) if node.op in GATHERS else None
        if handle is not None:
            inputs = data_inputs(node)
            conversion.rewrite(node, handle, inputs[1], inputs[2] if _uses_default(node) else None)
    if conversion.tables:
        conversion.place(meta_graph.graph_def)
    tables = (conversion.tables[name] for name in found if name in conversion.tables)
    return Converted(tuple(tables), tuple(conversion.notes))


def looked_up(meta_graph: Proto, index: GraphIndex) -> tuple[str, ...]:
    """Return the names of the embedding variables, without slots, that a graph gathers from, each once.

    Variables that only lookups of groups read come last. GraphError for an unknown type number.
    """
    found = _embedding_variables(meta_graph, index)
    owners = {handle.name: name for name, handles in found.items() for handle in handles}
    gathers = [node for node in index.nodes.values() if node.op in GATHERS and data_inputs(node)]
    read = [data_inputs(node)[0].node for node in gathers]
    read += [handle for node in index.nodes.values() for handle in group_handles(node)]
    handles = (through_identities(index.nodes, name) for name in read)
    return tuple(dict.fromkeys(owners[handle] for handle in handles if handle in owners))


class _Conversion:
    """The rewriting of one graph; `variables` has the handles of each embedding variable's parts."""

    def __init__(self, index: GraphIndex, variables: Mapping[str, list[Proto]], numbers: AbsentKeys) -> None:
        self._index, self._variables, self._numbers = index, variables, numbers
        self._owners = {handle.name: name for name, handles in variables.items() for handle in handles}
        self.tables: dict[str, GraphDynamicTable] = {}
        self._handles: list[Proto] = []
        self._before: dict[str, list[Proto]] = {}
        """New nodes, by the rewritten node that reads them."""
        self._names = {*index.nodes}
        self.notes: list[str] = []

    @property
    def nodes(self) -> dict[str, Proto]:
        """Return the graph's nodes by name, including new nodes that rewritten nodes read."""
        added = (node for before in self._before.values() for node in before)
        return self._index.nodes | {node.name: node for node in added}

    def handle_of(self, gather: Proto) -> str | None:
        """Return the name of the handle node of the variable that a gather reads.

        Of a variable in parts it is the first part's handle. None if the node reads no embedding variable, or
        has fewer than three inputs.
        """
        inputs = data_inputs(gather)
        handle = through_identities(self._index.nodes, inputs[0].node) if len(inputs) > 2 else ""
        owner = self._owners.get(handle)
        return None if owner is None else str(self._variables[owner][0].name)

    def rewrite(self, node: Proto, handle: str, ids: Endpoint, default: Endpoint | None) -> None:
        """Turn a node, in place, into the lookup of `ids` in the table that a variable becomes.

        `handle` is the variable's, as `handle_of` returns it. `default` has a row for each id, to read if the
        table lacks the key; None: the table's default rows, which are also read if the variable filters keys.
        The table and the nodes that the lookup needs are added to `tables` and `nodes`. NotServable if the
        variable cannot become a table; GraphError for an unknown type number.
        """
        variable = self._owners[handle]
        if variable not in self.tables:
            self.tables[variable] = self._made(variable)
        if any(attr(each, "filter_freq").i > 0 for each in self._initialisers(variable)):
            default = None  # a filter's constant goes first
        for number in itertools.count():
            scope = f"{node.name}/lookup_{number}" if number else f"{node.name}/lookup"
            *before, last = _lookup(node.name, self.tables[variable], ids, default, scope)
            if self._names.isdisjoint(added.name for added in before):
                break
        last.input.extend(f"^{name}" for name in control_inputs(node))
        self._before[node.name] = before
        self._names |= {added.name for added in before}
        node.CopyFrom(last)

    def _made(self, variable: str) -> GraphDynamicTable:
        """Return the table that a variable becomes, and add its handles to the new nodes.

        A note on its default rows may be added, too. NotServable for a block of a dynamic-dimension variable,
        or if no table can have the variable's dtypes and shape, or if its default rows are unknown;
        GraphError for an unknown type number.
        """
        handles = self._variables[variable]
        key_dtype, value_dtype, dim = _kind(variable, handles)
        for node in self._initialisers(variable):
            if (blocks := attr(node, "block_num").i) > 1:
                raise NotServable(
                    f"embedding variable {variable!r} is a block of a dynamic-dimension variable",
                    cause=f"{node.op} {node.name!r} has block_num {blocks}",
                    hint="train it with one dimension for all keys",
                )
        given = self._numbers.of(variable)
        defaults, note = _default_rows(self._index, variable, handles, value_dtype, dim, given)
        self.notes += [note] if note else []
        names = [free_name(self._names, f"{variable}/{suffix}") for suffix in PARTS]
        self._names |= {*names}
        seeds, rows, keys, values = names
        nodes = seeds, rows, keys, values
        table = GraphDynamicTable(variable, nodes, key_dtype, value_dtype, dim, defaults)
        for made in table.variables:
            types: Any = {"dtype": made.dtype, "shape": made.shape}
            self._handles.append(new_node(made.node, "VarHandleOp", shared_name=made.node.encode(), **types))
        return table

    def _initialisers(self, variable: str) -> Iterator[Proto]:
        for handle in self._variables[variable]:
            for reader, position in self._index.consumers[handle.name]:
                node = self._index.nodes[reader]
                if node.op in INITIALISERS and position == 0:
                    yield node

    def place(self, graph_def: Proto) -> None:
        """Add the new nodes to the graph: the tables' handles first, others right before their readers."""
        placed = [*self._handles]
        for node in graph_def.node:
            placed += [*self._before.get(node.name, ()), node]
        put_nodes(graph_def.node, placed)


def _embedding_variables(meta_graph: Proto, index: GraphIndex) -> dict[str, list[Proto]]:
    """Return {embedding variable: the handle nodes of its parts, in order}.

    The order is that of the parts' offsets or numbers; of several handles of one part the first is kept.
    """
    collected = dict(_from_collections(meta_graph))
    found: dict[str, dict[int, Proto]] = {}
    for node in index.nodes.values():
        if node.op == HANDLE:
            stored = attr_text(node, "shared_name") or node.name
            part = _PART.fullmatch(stored)
            name, number = collected.get(node.name) or ((part[1], int(part[2])) if part else (stored, 0))
            found.setdefault(name, {}).setdefault(number, node)
    return {name: [node for _, node in sorted(parts.items())] for name, parts in found.items()}


def _from_collections(meta_graph: Proto) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield (handle, (whole variable's name, the part's offset)) for each part in the graph's collections."""
    for variable in collected_variables(meta_graph, _COLLECTIONS):
        info = variable.save_slice_info_def
        if info.full_name and info.var_offset:
            yield endpoint(variable.variable_name).node, (info.full_name, int(info.var_offset[0]))


def _kind(variable: str, handles: Iterable[Proto]) -> tuple[DType, DType, int]:
    """Return (dtype of the keys, dtype of the values, dimension) of a variable with these handles.

    NotServable if no dynamic table can have them, or if parts differ; GraphError for an unknown type number.
    """
    kinds = set()
    for handle in handles:
        keys, values = attr_dtype(handle, "Tkeys"), attr_dtype(handle, "dtype")
        shape = attr_shape(handle)
        if keys not in _KEYS or values not in _VALUES or shape is None or len(shape) != 1 or shape[0] < 1:
            shown = (
                f"keys {keys.label if keys else 'unknown'}, values {values.label if values else 'unknown'}"
            )
            raise NotServable(
                f"embedding variable {variable!r} cannot be served from a dynamic table",
                cause=f"{HANDLE} {handle.name!r} has {shown} of shape {list(shape) if shape else 'unknown'}; "
                "keys are to be int64 or int32, values vectors of floating-point numbers",
                hint="choose outputs that do not need it",
            )
        kinds.add((keys, values, shape[0]))
    if len(kinds) > 1:
        raise NotServable(
            f"the parts of embedding variable {variable!r} are of several kinds",
            cause="their dtypes or dimensions differ",
            hint="choose outputs that do not need it",
        )
    return kinds.pop()


def _needed(nodes: Mapping[str, Proto], meta_graph: Proto) -> dict[str, None]:
    """Return the names of the nodes that run for any signature's outputs, up to its inputs."""
    found: dict[str, None] = {}
    for signature in meta_graph.signature_def.values():
        ends = SignatureEnds.of(signature)
        found |= all_before(nodes, ends.outputs, ends.inputs)
    return found


def _parted(
    index: GraphIndex, stitch: Proto, handle_of: Callable[[Proto], str | None]
) -> tuple[str, Endpoint, Endpoint | None] | None:
    """Return (handle, ids, rows for absent keys or None) of the one lookup that equals a stitch of all parts.

    `handle_of` returns the first part's handle for a gather. None if the stitch is not of such a lookup.
    """
    inputs = data_inputs(stitch)
    count = len(inputs) // 2
    origins = [_origin(index, tensor) for tensor in inputs[count:]]
    reads = [node for node in origins if node is not None and node.op in GATHERS]
    if not reads or len(inputs) != 2 * len(reads):
        return None
    handle, *others = {handle_of(node) for node in reads}
    if others or handle is None:
        return None
    ids = _partitioned(index, [data_inputs(node)[1] for node in reads])
    places = _partitioned(index, inputs[:count])
    if ids is None or places is None or ids[1] != places[1] or not _counts_up(index, places[0], ids[0]):
        return None
    if not any(map(_uses_default, reads)):
        return handle, ids[0], None
    rows = _partitioned(index, [data_inputs(node)[2] for node in reads])
    if not all(map(_uses_default, reads)) or rows is None or rows[1] != ids[1]:
        return None
    return handle, ids[0], rows[0]


def _uses_default(gather: Proto) -> bool:
    """True if an absent key reads the row of the gather's third input at the key's own position."""
    return bool(attr(gather, "is_use_default_value_tensor").b)


def _partitioned(index: GraphIndex, parts: list[Endpoint]) -> tuple[Endpoint, Endpoint] | None:
    """Return (data, assignments) of the DynamicPartition whose outputs are `parts`, in order; else None."""
    found = [tensor_behind(index.nodes, tensor) for tensor in parts]
    node = index.nodes.get(found[0].node)
    if node is None or node.op != "DynamicPartition" or len(data_inputs(node)) < 2:
        return None
    if found != [Endpoint(node.name, number) for number in range(len(found))]:
        return None
    if attr(node, "num_partitions").i != len(found):
        return None
    data, assignment = data_inputs(node)[:2]
    return tensor_behind(index.nodes, data), tensor_behind(index.nodes, assignment)


def _counts_up(index: GraphIndex, places: Endpoint, ids: Endpoint) -> bool:
    """True if the tensor `places` is `range(size(ids))`."""
    node = index.nodes.get(places.node)
    if node is None or node.op != "Range" or len(data_inputs(node)) < 3:
        return False
    start, limit, step = data_inputs(node)[:3]
    size = _origin(index, limit)
    while size is not None and size.op == "Cast" and data_inputs(size):
        size = _origin(index, data_inputs(size)[0])
    counted = data_inputs(size) if size is not None and size.op == "Size" else []
    if not counted or tensor_behind(index.nodes, counted[0]) != ids:
        return False
    return _number(index, start) == 0 and _number(index, step) == 1


def _number(index: GraphIndex, tensor: Endpoint) -> int | None:
    value = const_value(_origin(index, tensor))
    is_number = value is not None and value.size == 1 and value.dtype.kind in "iu"
    return int(value.ravel()[0]) if value is not None and is_number else None


def _origin(index: GraphIndex, tensor: Endpoint) -> Proto | None:
    return index.nodes.get(tensor_behind(index.nodes, tensor).node)


def read_through_stages(index: GraphIndex, given: Collection[Endpoint]) -> None:
    """Replace, in place, the tensors that nodes read out of stages by the tensors that are put in.

    A stage stays as it is if one of the tensors taken out of it is in `given` (the inputs of signatures), or
    if nothing puts in as many tensors as are taken out.
    """
    takes = [node for node in index.nodes.values() if node.op == _TAKE]
    if not takes:
        return
    puts = {_name(node): node for node in index.nodes.values() if node.op == _PUT}
    moved: dict[Endpoint, str] = {}
    for take in takes:
        put = puts.get(_name(take))
        if put is None or len(attr(take, "dtypes").list.type) != len(data_inputs(put)):
            continue  # the graph puts nothing there, or something else
        if not any(tensor.node == take.name for tensor in given):
            sources = data_inputs(put)
            moved |= {Endpoint(take.name, number): tensor.as_input for number, tensor in enumerate(sources)}
    for node in index.nodes.values():
        for position, text in enumerate(node.input):
            if not text.startswith("^") and endpoint(text) in moved:
                node.input[position] = moved[endpoint(text)]


def _name(node: Proto) -> tuple[str, str]:
    """Return the container and name of a stage, which are equal for all its nodes."""
    return attr_text(node, "container"), attr_text(node, "shared_name") or str(node.name)


def _lookup(
    name: str, table: GraphDynamicTable, ids: Endpoint, default: Endpoint | None, scope: str
) -> list[Proto]:
    """Return new nodes that look up `ids` in a table; the last is called `name` and gives a row for each id.

    The others are under `scope`. `default` has a row for each id, to read if the table lacks the key; None:
    the table's default rows. No graph is changed.
    """
    made, dtype, keys = protos.GraphDef(), table.value_dtype, ids.as_input

    def add(name: str, op: str, *inputs: str, **attrs: Any) -> str:
        made.node.append(new_node(name, op, inputs, **attrs))
        return name

    if table.key_dtype is not DType.INT64:
        keys = add(f"{scope}/ids", "Cast", keys, SrcT=table.key_dtype, DstT=DType.INT64)
    found = add_rows(made, scope, table.name, table.nodes, keys, defaults=len(table.defaults))
    read = name if default is None else f"{scope}/values"
    values = add(read, "ResourceGather", table.nodes[-1], found.rows, dtype=dtype, Tindices=DType.INT32)
    if default is not None:
        shape = add(f"{scope}/shape", "Shape", values, T=dtype, out_type=DType.INT32)
        rows = add(f"{scope}/default", "Reshape", default.as_input, shape, T=dtype, Tshape=DType.INT32)
        number = protos.TensorProto()
        fill(number, np.array(-1, np.int32), as_fields=True)
        last = add(f"{scope}/last", "Const", dtype=DType.INT32, value=number)
        mask = add(f"{scope}/is_found", "ExpandDims", found.found, last, T=DType.BOOL, Tdim=DType.INT32)
        add(name, "SelectV2", mask, values, rows, T=dtype)
    return [*made.node]


def _default_rows(
    index: GraphIndex, name: str, parts: list[Proto], dtype: DType, dim: int, given: float | None
) -> tuple[Array, str]:
    """Return the rows [d, dim] that absent keys read in a table of these parts, and a note for the user.

    The note is "" unless the graph's own default rows cannot be computed. With `given` there is one row of
    this number. NotServable if the graph does not have default rows, or not of `dim` numbers, or different
    ones for the parts; GraphError for an unknown type number.
    """
    if given is not None:
        return _constant(given, dtype, dim), ""
    found = [_part_defaults(index, part, dtype, dim) for part in parts]
    known = [one for one in found if one is not None]
    if not known:
        raise NotServable(
            f"the graph does not say what a key reads that {name!r} does not hold",
            cause="the nodes that initialise the embedding variable are not in the graph",
            hint=f"give it: --absent-key '{name}=0'",
        )
    (rows, why), *others = known
    if any(not np.array_equal(other, rows, equal_nan=True) for other, _ in others):
        raise NotServable(
            f"the parts of {name!r} have initializers of different values",
            cause="the parts are served as one table, which has one answer for a key that it does not hold",
            hint=f"choose it: --absent-key '{name}=0'",
        )
    return rows, f"a key that {name!r} does not hold reads {why}" if why else ""


class AbsentKeys:
    """A request's numbers for absent keys, by regular expressions for the names of tables."""

    def __init__(self, texts: Mapping[str, str], names: Collection[str]) -> None:
        """Parse `texts`, which are {regular expression: number}, with the number as text.

        UsageError if one is not a regular expression and a number, or if the expression matches the whole
        name of none of the embedding variables `names`.
        """
        self._rules: list[tuple[re.Pattern[str], float]] = []
        for text, number in texts.items():
            try:
                pattern = re.compile(text)
                self._rules.append((pattern, float(number)))
                if not math.isfinite(float(number)):
                    raise ValueError(f"{number} is not finite")
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
        """Return the number of the first rule that matches a table's whole name; None if none does."""
        return next((number for pattern, number in self._rules if pattern.fullmatch(name)), None)


def _part_defaults(index: GraphIndex, handle: Proto, dtype: DType, dim: int) -> tuple[Array, str] | None:
    """Return the default rows [d, dim] of one part, and the reason why its own rows are not known, or "".

    With a reason, or if the variable filters keys, there is one row of `default_value_no_permission`. None if
    nothing in the graph initialises the part. NotServable if the initial value does not consist of rows of
    `dim` numbers; GraphError for an unknown type number.
    """
    made = _initialiser(index, handle.name)
    if made is None:
        return None
    constant = _constant(attr(made, "default_value_no_permission").f, dtype, dim)
    if attr(made, "filter_freq").i > 0:
        return constant, ""
    inputs, position = data_inputs(made), _VALUE_OF[made.op]
    value, why = _evaluated(index, inputs[position] if position < len(inputs) else Endpoint("", 0))
    if value is None:
        why = f"{why}, so no file holds the value that DeepRec reads there (another: --absent-key)"
        return constant, f"{float(constant[0, 0]):g}: {why}"
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
    return np.ascontiguousarray(rows[:1] if (rows == rows[0]).all() else rows), ""


def _constant(value: float, dtype: DType, dim: int) -> Array:
    return np.full((1, dim), value, dtype.numpy)


def _initialiser(index: GraphIndex, handle: str) -> Proto | None:
    """Return the operation that sets the initial value of the variable at `handle`; None if there is none."""
    # DeepRec's second generation has two: the initialiser, which has the attributes, goes first.
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


def _evaluated(
    index: GraphIndex, tensor: Endpoint, depth: int = 0, known: dict[Endpoint, Array] | None = None
) -> tuple[Array | None, str]:
    """Return (value, "") of a tensor computed from constants, or (None, why it cannot be computed).

    `depth` is the number of nodes between this tensor and the initial value; above 64 there is no value.
    `known` gets the value of each tensor on the way, so that none is computed twice.
    GraphError for an unknown type number.
    """
    known = {} if known is None else known
    if tensor in known:
        return known[tensor], ""
    node = index.nodes.get(tensor.node)
    if node is None or depth > _MAX_DEPTH:
        return None, "its initializer is not in the graph"
    if _RANDOM.fullmatch(node.op):
        return None, "its initializer draws random numbers"
    if node.op == "Const":
        if "value" not in node.attr:
            return None, "its initializer has no value"
        try:
            return to_array(attr(node, "value").tensor, _MAX_BYTES), ""
        except (ExportError, ValueError, TypeError) as error:
            return None, f"its initializer's constant is damaged ({error})"
    if not is_computed(node.op):
        return None, f"its initializer needs {node.op} {node.name!r}, which is not computed here"
    values = []
    for source in data_inputs(node):
        value, why = _evaluated(index, source, depth + 1, known)
        if value is None:
            return None, why
        values.append(value)
    try:
        known[tensor] = compute(node, values, tensor.output, _MAX_BYTES)
    except MISFITS as error:
        return None, f"its initializer cannot be computed ({error})"
    return known[tensor], ""
