"""Read a table whose changed rows are stored separately: replace its rows by its overlay's.

The table itself cannot be written (`exporter.bundle.mapped_tables`). Beside it are

    changed  bool []                 false: no row has changed, and nothing below is read
    slots    int32 [rows]            0: the table's row is current; else the row's place in the overlay
    overlay  dtype [2 * capacity + 1, ...]    changed rows, each with two places; place 0 is never used

A gather becomes

    gathered  = rows of the table
    at        = places, in the gathered rows, of rows whose slot is not 0
    result    = gathered, with overlay[slot] at `at`

and all but the first line is on the side of a Switch that runs if `changed`. `ListDiff` returns slots that
are not 0 with their places, and needs three nodes less than `Where`; but it hashes each slot twice, so that a
lookup of 100,000 ids takes 10 % longer.

Tables of more than `MOST_ROWS_OF_A_PAGE` rows have their slots in pages of 128 rows:

    pages    int64 [rows / 128]      to be added to a row's number: the sum is the number of its slot
    slots    int32 [128 * (n + 1)]   as above

The first page is always 0: the rows of all pages without changes use it. With 10 % of 4 M rows changed, pages
make a lookup of 64, 1,000, 100,000 ids 8, 15, 10 % longer.

`InplaceUpdate` writes into the buffer of its input (tensorflow/core/kernels/inplace_ops.cc), which is that of
the gather, a new one at each call, and which nothing else reads. `where` over both gathers takes 2.1 and 2.2
times as long with 1,000 and 100,000 ids as a table in memory, `TensorScatterUpdate`, which copies its input,
1.6 and 1.8.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.graph.changed_uses import INDIFFERENT, RowReads, change_uses
from exporter.graph.nodes import (
    CONTROL_FLOW,
    Body,
    GraphIndex,
    all_before,
    attr,
    base_dtype,
    constant,
    free_name,
    makes_vector,
    node_of,
)
from exporter.graph.signatures import SignatureEnds
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

SCATTERED = {
    *(DType.FLOAT, DType.DOUBLE, DType.HALF, DType.BFLOAT16, DType.COMPLEX64, DType.COMPLEX128, DType.BOOL),
    *(DType.INT8, DType.INT16, DType.INT32, DType.INT64),
    *(DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64),
}
"""The dtypes for which TensorFlow has scatter kernels, and whose rows a delta can therefore hold."""


PAGE_BITS = 7
PAGE_ROWS = 1 << PAGE_BITS
"""The rows whose slots are one page: 512 bytes once one of them has changed, and 8 in `pages` in any case."""

MOST_ROWS_OF_A_PAGE = 1 << 22
"""The most rows of a table without pages: its slots take up to 16 MiB once one of its rows has changed."""


_LEAST = 8  # gathers: to read fewer together takes more operations than it saves
_JOINED = "_overlaid_together"


class OverlaidReads(RowReads, frozen=True):
    """The change of the reads of a table with an overlay; `changed` to `pages` are nodes of handles.

    `pages` is None for a table with a slot for each row. `first` is the number of the table's first row in an
    overlay that tables share. `named` are the nodes that signatures name.
    """

    variable: str
    dtype: DType
    row_shape: tuple[int, ...]
    changed: str
    slots: str
    overlay: str
    pages: str | None = None
    first: int = 0
    named: frozenset[str] = frozenset()

    @property
    def extra_handles(self) -> tuple[str, ...]:
        """Return the names of the handles' nodes, in order: changed, slots, overlay and, if any, pages."""
        return self.changed, self.slots, self.overlay, *([self.pages] if self.pages else [])

    def apply(self, body: Body, node: Proto, extra_handles: Sequence[str]) -> None:
        """Change a node that takes the table's handle so that it reads changed rows from the overlay.

        Nodes are added to the body; `extra_handles` are the handles beside the table, by their names there.
        Gathers that `overlay_joined_reads` changed are left alone. NotServable for any other use, GraphError
        for an unknown type number.
        """
        if node.op in INDIFFERENT or attr(node, _JOINED).b:
            return
        if node.op != "ResourceGather" or attr(node, "batch_dims").i:
            raise self.refusal(node)
        _overlay_rows(body, node, self, extra_handles)


def overlay_reads(graph_def: Proto, tables: Mapping[str, OverlaidReads]) -> None:
    """Let the graph read tables through their overlays, in place; `tables` are by the nodes of their handles.

    After an error the graph may be changed in part.

    Raises:
        NotServable: a table is read otherwise than by gathers of rows, or a function returns its handle; the
            message names the node or function.
    """
    change_uses(graph_def, tables)


def overlay_joined_reads(meta_graph: Proto, tables: Mapping[str, OverlaidReads]) -> None:
    """Let all gathers that always run together read the overlay that their tables share at once, in place.

    At least eight gathers are changed at once. They are marked, so that `overlay_reads` changes only the
    other reads. `tables` are by the nodes of their handles. GraphError if two nodes have the same name, or
    one has none.
    """
    # A flag, a branch and a look at the slots for each of a hundred tables cost more than the gathers.
    body = Body(meta_graph.graph_def.node)
    for number, group in enumerate(_read_together(meta_graph, tables)):
        _overlay_rows_of_all(body, number, [(node, tables[node_of(node.input[0])]) for node in group])


def _read_together(meta_graph: Proto, tables: Mapping[str, OverlaidReads]) -> list[list[Proto]]:
    """Return groups of at least eight gathers that always run together, from tables that share an overlay.

    GraphError if two nodes have the same name, or one has none.
    """
    index = GraphIndex.of(meta_graph)
    ends = {name: SignatureEnds.of(each) for name, each in meta_graph.signature_def.items()}
    needed = {name: all_before(index.nodes, each.outputs, each.inputs) for name, each in ends.items()}
    sent = {tensor.node for each in ends.values() for tensor in each.inputs}
    gathers = [
        node
        for node in index.nodes.values()
        if node.op == "ResourceGather" and node_of(node.input[0]) in tables and node.name not in sent
    ]
    # They cannot run together with what their own ids need, and must not in a branch or a loop.
    begins = [*gathers, *(node for node in index.nodes.values() if node.op in CONTROL_FLOW)]
    apart = _after(index, {node.name for node in begins})
    found: dict[tuple[object, ...], list[Proto]] = {}
    for node in gathers:
        names = frozenset(name for name, each in needed.items() if node.name in each)
        types = node.attr["Tindices"].type, node.device
        if names and node.name not in apart and not attr(node, "batch_dims").i:
            kind = tables[node_of(node.input[0])].changed, names, *types
            found.setdefault(kind, []).append(node)
    return [group for group in found.values() if len(group) >= _LEAST]


def _after(index: GraphIndex, begins: Collection[str]) -> set[str]:
    """Return the names of all nodes that wait for one of the nodes `begins`, also by control edges.

    A node of `begins` is among them only if it waits for another.
    """
    readers: dict[str, list[str]] = {}
    for node in index.nodes.values():
        for text in node.input:
            readers.setdefault(node_of(text), []).append(node.name)
    found, pending = set[str](), [*begins]
    while pending:
        for name in readers.get(pending.pop(), ()):
            if name not in found:
                found.add(name)
                pending.append(name)
    return found


class _Adder(Struct, frozen=True):
    """Adds nodes to a body, on one device, under names that begin with `name` and a slash."""

    body: Body
    name: str
    device: str

    def add(self, what: str, op: str, *inputs: str, output: str = "output", **attrs: Any) -> str:
        """Add a node under `<prefix>/<what>`, or a free name like it, and return the name of its output.

        `output` is the output's name in the OpDef. `inputs` and attributes are as for `Body.add`.
        """
        made = self.body.add(f"{self.name}/{what}", op, *inputs, device=self.device, **attrs)
        return self.body.single(made, output)

    def switch(self, what: str, tensor: str, condition: str, of: DType) -> tuple[str, str]:
        """Add a Switch and return the names of its outputs, for a false `condition` and for a true one.

        `what` is the last part of the node's name, `of` the dtype of the tensor.
        """
        made = self.body.add(f"{self.name}/{what}", "Switch", tensor, condition, device=self.device, T=of)
        return self.body.output(made, 0), self.body.output(made, 1)

    def reshape(self, what: str, tensor: str, shape: str, of: DType) -> str:
        """Add a Reshape of a tensor of dtype `of` to an int32 shape, and return its output's name.

        `what` is the last part of the node's name.
        """
        return self.add(what, "Reshape", tensor, shape, T=of, Tshape=DType.INT32)

    def newest(
        self,
        rows: str,
        ids: str,
        table: OverlaidReads,
        handles: Sequence[str],
        index_type: DType,
        known: Callable[[str, int | tuple[int, ...], DType], str],
    ) -> str:
        """Add nodes that replace the changed rows among `rows`, and return the name of their result.

        `ids` are the rows' numbers in the overlay, of `index_type`, which is int64 if there are pages.
        `handles` are the slots', the overlay's and, if there are some, the pages'. `known` adds a constant,
        given its name, value and dtype, and returns its output.
        """
        slots_handle, overlay_handle, *pages_handle = handles
        for pages in pages_handle:
            bits = known("bits", PAGE_BITS, index_type)
            page = self.add("page", "RightShift", ids, bits, output="z", T=index_type)
            begin = self.add("begin", "ResourceGather", pages, page, dtype=index_type, Tindices=index_type)
            ids = self.add("slot", "AddV2", begin, ids, output="z", T=index_type)
        slots = self.add("slots", "ResourceGather", slots_handle, ids, dtype=DType.INT32, Tindices=index_type)
        where = self.add("where", "Where", slots, output="index", T=DType.INT32)
        at = self.reshape("at", where, known("vector", (-1,), DType.INT32), DType.INT64)
        types: Any = {"Tparams": DType.INT32, "Tindices": DType.INT64, "Taxis": DType.INT32}
        places = self.add("places", "GatherV2", slots, at, known("axis", 0, DType.INT32), **types)
        types = {"dtype": table.dtype, "Tindices": DType.INT32}
        changed = self.add("rows", "ResourceGather", overlay_handle, places, **types)
        at = self.add("at_32", "Cast", at, output="y", SrcT=DType.INT64, DstT=DType.INT32)
        return self.add("newest", "InplaceUpdate", rows, at, changed, output="y", T=table.dtype)


def _overlay_rows(body: Body, node: Proto, table: OverlaidReads, extra_handles: Sequence[str]) -> None:
    """Rename a gather of the table's rows; a new node with its old name returns the current rows.

    `extra_handles` are the handles beside the table, by their names in this body.
    """
    name, dtype = node.name, table.dtype
    changed_handle, *handles = extra_handles
    indices, index_type = node.input[1], base_dtype(node.attr["Tindices"].type)
    body.rename(node, free_name(body.by_name, f"{name}/mapped"))
    node.attr.pop("_output_shapes", None)
    nodes = _Adder(body, name, node.device)

    @cache
    def known(what: str, value: int | tuple[int, ...], of: DType) -> str:
        return body.constant_beside(node, f"{name}/{what}", value, of)

    is_changed = nodes.add("changed", "ReadVariableOp", changed_handle, output="value", dtype=DType.BOOL)
    unchanged, gathered = nodes.switch("gathered", body.single(node, "output"), is_changed, dtype)
    _, ids = nodes.switch("ids", indices, is_changed, index_type)
    is_vector = makes_vector(body, indices, table.named)
    in_line = gathered
    if not is_vector:
        ids = nodes.reshape("ids_in_line", ids, known("vector", (-1,), DType.INT32), index_type)
        in_line = nodes.reshape("in_line", gathered, known("row", (-1, *table.row_shape), DType.INT32), dtype)
    if table.pages is not None and index_type is not DType.INT64:
        ids = nodes.add("ids_64", "Cast", ids, output="y", SrcT=index_type, DstT=DType.INT64)
        index_type = DType.INT64
    if table.first:
        first = known("first", table.first, index_type)
        ids = nodes.add("ids_in_all", "AddV2", ids, first, output="z", T=index_type)
    newest = nodes.newest(in_line, ids, table, handles, index_type, known)
    if not is_vector:
        shape = nodes.add("shape", "Shape", gathered, T=dtype, out_type=DType.INT32)
        newest = nodes.reshape("in_shape", newest, shape, dtype)
    # Its output has the gather's name, `output`, so its readers need no change.
    body.add(name, "Merge", unchanged, newest, device=node.device, T=dtype, N=2)


def _overlay_rows_of_all(body: Body, number: int, reads: Sequence[tuple[Proto, OverlaidReads]]) -> None:
    """Rename gathers of tables that share an overlay, and add nodes with their old names.

    The new nodes return the current rows. `reads` are (gather, its table), in the body of a graph, and always
    run together. `number` makes the names of the group's nodes unique.
    """
    first, table = reads[0]
    dtype, index_type, many = table.dtype, base_dtype(first.attr["Tindices"].type), len(reads)
    nodes = _Adder(body, f"{table.changed.rpartition('/')[0]}/read_{number}", first.device)
    is_changed = nodes.add("changed", "ReadVariableOp", table.changed, dtype=DType.BOOL)

    @cache
    def known(what: str, value: int | tuple[int, ...], of: DType) -> str:
        # Dead unless rows have changed: then nothing runs that takes one.
        made = constant(f"{nodes.name}/{what}_is", np.array(value, of.numpy), of)
        return nodes.switch(what, body.put(made).name, is_changed, of)[1]

    def concat(what: str, tensors: Sequence[str], of: DType) -> str:
        return nodes.add(what, "ConcatV2", *tensors, axis, T=of, N=len(tensors), Tidx=DType.INT32)

    def shapes(what: str, tensors: Sequence[str], of: DType) -> list[str]:
        types: Any = {"T": of, "out_type": DType.INT32}
        made = nodes.add(what, "ShapeN", *tensors, N=len(tensors), after=[if_changed], **types)
        return [f"{made}:{n}" for n in range(len(tensors))]

    axis, vector = known("axis", 0, DType.INT32), known("vector", (-1,), DType.INT32)
    if_changed = nodes.add("if_changed", "Identity", axis, T=DType.INT32)
    ids: list[str] = []
    rows: list[str] = []
    either: list[tuple[str, str]] = []
    names = [node.name for node, _ in reads]
    for n, (node, of) in enumerate(reads):
        indices = node.input[1]
        body.rename(node, free_name(body.by_name, f"{node.name}/mapped"))
        node.attr.pop("_output_shapes", None)
        node.attr[_JOINED].b = True
        either.append(nodes.switch(f"gathered_{n}", node.name, is_changed, dtype))
        ids.append(
            _in_line(body, indices, of.named) or nodes.reshape(f"ids_{n}", indices, vector, index_type)
        )
        rows.append(either[-1][1])
        if ids[-1] != indices:
            row = known("row", (-1, *table.row_shape), DType.INT32)
            rows[-1] = nodes.reshape(f"in_line_{n}", rows[-1], row, dtype)
    sizes = concat("sizes", shapes("lengths", ids, index_type), DType.INT32)
    types: Any = {"T": DType.INT32, "Tidx": DType.INT32}
    total = nodes.add("total", "Sum", sizes, axis, **types)
    ends = nodes.add("ends", "Cumsum", sizes, axis, **types)
    ended = nodes.add("ended", "Bincount", ends, total, known("weights", (), DType.INT32), T=DType.INT32)
    owner = nodes.add("owner", "Cumsum", ended, axis, **types)
    types = {"Tparams": DType.INT64, "Tindices": DType.INT32, "Taxis": DType.INT32}
    firsts = known("firsts", tuple(of.first for _, of in reads), DType.INT64)
    begin = nodes.add("first", "GatherV2", firsts, owner, axis, **types)
    numbers = concat("ids", ids, index_type)
    if index_type is not DType.INT64:
        numbers = nodes.add("ids_64", "Cast", numbers, SrcT=index_type, DstT=DType.INT64)
    numbers = nodes.add("ids_in_all", "AddV2", begin, numbers, T=DType.INT64)
    handles = table.extra_handles[1:]
    newest = nodes.newest(concat("all", rows, dtype), numbers, table, handles, DType.INT64, known)
    split = nodes.add("each", "SplitV", newest, sizes, axis, T=dtype, Tlen=DType.INT32, num_split=many)
    shaped = shapes("shapes", [changed for _, changed in either], dtype)
    for n, (name, (unchanged, changed)) in enumerate(zip(names, either, strict=True)):
        result = f"{split}:{n}"
        if rows[n] != changed:
            result = nodes.reshape(f"in_shape_{n}", result, shaped[n], dtype)
        body.add(name, "Merge", unchanged, result, device=first.device, T=dtype, N=2)


def _in_line(body: Body, indices: str, named: Collection[str]) -> str | None:
    """Return a tensor that is certainly a vector with the same numbers as `indices`; None without one.

    `named` are the nodes that signatures name.
    """
    if makes_vector(body, indices, named):
        return indices
    made = body.producer(indices)
    if made is None or made.op != "Reshape" or made.name in named:
        return None
    return made.input[0] if makes_vector(body, made.input[0], named) else None
