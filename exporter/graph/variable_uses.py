"""Find how a graph reads its variables, and turn reads of whole tables into reads of rows.

The first scatter into a variable puts it in copy-on-read mode: from then on each `ReadVariableOp` copies the
whole table. A cleaned graph gathers by handle where possible (`graph.functions`). This module has the other
cases: gathers after a cast, as Keras' mixed precision exports them, gathers by several indices, sums over
segments, as `embedding_lookup_sparse` makes them, and reads of the shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from enum import Flag, auto

import numpy as np
from msgspec import Struct

from exporter.graph.changed_uses import INDIFFERENT
from exporter.graph.nodes import (
    CALLS,
    LOOPS,
    Body,
    attr_dtype,
    attr_text,
    bodies,
    called,
    const_value,
    constant,
    drop_from_function,
    drop_nodes,
    free_name,
    input_names,
    node_of,
)
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

_ROW_READS = {"ResourceGather", "ResourceGatherNd"}
_FORWARDS = {"Identity": 1, "Enter": 1, "RefEnter": 1, "Exit": 1, "Switch": 2, "Merge": 1, "NextIteration": 1}
# The SparseSegment operations that `embedding_lookup_sparse` makes.
_SEGMENTS = {
    f"SparseSegment{what}{more}" for what in ("Sum", "Mean", "SqrtN") for more in ("", "WithNumSegments")
}
_TRANSPARENT = {"Identity", "Cast"}
_GATHER_INDICES = {int(DType.INT32), int(DType.INT64)}


class Use(Flag):
    """The ways in which a graph reads a variable."""

    NOTHING = 0
    ROWS = auto()
    WHOLE = auto()


class Reading(Struct, frozen=True):
    """The use of a variable, and the first node that reads it whole or might change it.

    `taken_by` tells of that node as the end of an error message; "" if there is none.
    """

    use: Use = Use.NOTHING
    taken_by: str = ""
    handles: int = 0  # number of its VarHandleOps: a change of the reads of one does not affect the others

    def __or__(self, other: Reading) -> Reading:
        """Return both uses together, with the first `taken_by` that is not "", and the sum of the handles."""
        handles = self.handles + other.handles
        return Reading(self.use | other.use, self.taken_by or other.taken_by, handles)


def read_rows_only(graph_def: Proto, fetched: Iterable[str]) -> None:
    """Let gathers, and reads of the shape, take the variable's handle instead of its value, in place.

    Reads of whole tables that nothing reads any more are removed, except the nodes `fetched` (names) of the
    graph. GraphError for an unknown type number.
    """
    # Results are the same bit for bit: a cast in between is done on the gathered rows instead of the table.
    fetched = set(fetched)
    for body in bodies(graph_def):
        rewritten: set[str] = set()
        for node in list(body.nodes):
            rewritten |= _rewrite(body, node)
        _drop_unread(body, rewritten, fetched)


def uses(graph_def: Proto) -> dict[str, Use]:
    """Return {VarHandleOp of the graph: the `Use` of its handle by the graph and its functions}."""
    tracker = _Tracker(graph_def)
    return {
        node.name: tracker.follow("", f"{node.name}:0").use
        for node in graph_def.node
        if node.op == "VarHandleOp"
    }


def readings(graph_def: Proto) -> dict[str, Reading]:
    """Return {VarHandleOp of the graph: the Reading of its variable, over all handles and functions}."""
    tracker = _Tracker(graph_def)  # handles with equal container and shared name are the same memory
    found: dict[tuple[str, str], Reading] = defaultdict(Reading)
    named: dict[str, tuple[str, str]] = {}
    for body in bodies(graph_def):
        scope = body.name
        for node in body.nodes:
            if node.op == "VarHandleOp":
                name = attr_text(node, "container"), attr_text(node, "shared_name") or node.name
                found[name] |= tracker.follow(scope, body.canonical(body.single(node, "resource")))
                found[name] |= Reading(handles=1)
                if not scope:
                    named[node.name] = name
    return {node: found[name] for node, name in named.items()}


def _rewrite(body: Body, node: Proto) -> set[str]:
    """Make a node read by handle, in place, if possible; return the names of nodes that it no longer reads.

    Empty if the node is unchanged. Nodes may be added to the body. GraphError for an unknown type number.
    """
    if node.op in _SEGMENTS:
        return _sum_gathered(body, node)
    if node.op not in ("Gather", "GatherV2", "GatherNd", "Shape") or not _takes_rows(body, node):
        return set()
    chain = _chain_to_read(body, node.input[0])
    if not chain or (node.op == "Shape" and any(link.op == "Cast" for link in chain)):
        return set()
    read = chain[-1]
    if node.op == "Shape":
        _become(node, "VariableShape", read.input[0], chain, keep=("out_type",))
    else:
        _become_gather(body, node, chain)
    return {link.name for link in chain}


def _sum_gathered(body: Body, node: Proto) -> set[str]:
    """Turn a sum of a variable's rows into a sum of gathered rows, in the same order, in place.

    Returns the names of the nodes that it no longer reads from; empty if the rows are not a variable's.
    GraphError for an unknown type number.
    """
    chain = _chain_to_read(body, node.input[0])
    if not chain:
        return set()
    indices, name, device = node.input[1], node.name, node.device
    by = attr_dtype(node, "Tidx") or DType.INT32
    gather = body.add(f"{name}/rows", "GatherV2", node.input[0], indices, device=device, Tindices=by)
    _become_gather(body, gather, chain)
    size = body.add(f"{name}/size", "Size", indices, device=device, T=by, out_type=DType.INT32)
    places = body.add(f"{name}/places", "Range", device=device, Tidx=DType.INT32)
    first, step = (
        body.put(constant(free_name(body.by_name, f"{name}/{what}"), np.array(value, np.int32), DType.INT32))
        for what, value in (("first", 0), ("step", 1))
    )
    places.input.extend(body.single(made, "output") for made in (first, size, step))
    node.input[0], node.input[1] = body.single(gather, "output"), body.single(places, "output")
    node.attr["Tidx"].type = int(DType.INT32)
    return {link.name for link in chain}


def _takes_rows(body: Body, node: Proto) -> bool:
    """True for a Shape, and for a gather along dimension 0 by row numbers that ResourceGather accepts."""
    if node.op == "Shape":
        return True
    # `in` comes first: looking up an absent attribute in a protobuf map adds it.
    if "batch_dims" in node.attr and node.attr["batch_dims"].i:
        return False
    if node.attr["Tindices"].type not in _GATHER_INDICES:
        return False
    if node.op != "GatherV2":
        return True
    axis = body.producer(node.input[2])
    along = const_value(axis)
    return along is not None and not along.any()


def _chain_to_read(body: Body, reference: str) -> list[Proto]:
    """Return the nodes from a tensor back to the ReadVariableOp that reads its value, which is the last.

    Only Identity and Cast may be between them; [] if the value is another one.
    """
    chain: list[Proto] = []
    producer = body.producer(reference)
    while producer is not None and producer.op in _TRANSPARENT:
        chain.append(producer)
        producer = body.producer(producer.input[0])
    return [*chain, producer] if producer is not None and producer.op == "ReadVariableOp" else []


def _become_gather(body: Body, node: Proto, chain: list[Proto]) -> None:
    """Turn `node` into a gather by handle, in place, followed by the casts of `chain`, which were before it.

    `chain` is as `_chain_to_read` returns it. With casts the gather is a new node, and `node` an Identity.
    """
    casts = [link for link in reversed(chain) if link.op == "Cast"]
    op = "ResourceGatherNd" if node.op == "GatherNd" else "ResourceGather"
    gather = node
    if casts:
        gather = body.add(f"{node.name}/rows", op, *node.input, device=node.device)
        gather.attr["Tindices"].CopyFrom(node.attr["Tindices"])
    gather.attr["dtype"].CopyFrom(chain[-1].attr["dtype"])
    _become(gather, op, chain[-1].input[0], chain, keep=("dtype", "Tindices"), inputs=node.input[1:2])
    last = body.single(gather, "output")
    for number, cast in enumerate(casts):
        copy = body.add(f"{node.name}/cast_{number}", "Cast", last, device=node.device)
        copy.attr.MergeFrom(cast.attr)
        last = body.single(copy, "y")
    if casts:  # an Identity under the old name, so that its consumers need no change
        node.op = "Identity"
        node.input[:] = [last]
        node.ClearField("attr")
        node.attr["T"].type = casts[-1].attr["DstT"].type


def _become(
    node: Proto,
    op: str,
    handle: str,
    chain: list[Proto],
    *,
    keep: tuple[str, ...],
    inputs: Iterable[str] = (),
) -> None:
    """Make `node` an `op` on `handle` and `inputs`, in place, with control inputs of all replaced nodes.

    `chain` are the replaced nodes besides it; `keep` are the attributes that stay.
    """
    controls = {ref for old in (node, *chain) for ref in old.input if ref.startswith("^")}
    dropped = {f"^{link.name}" for link in chain}
    node.op = op
    node.input[:] = [handle, *inputs, *sorted(controls - dropped)]
    for name in node.attr.keys() - set(keep):
        del node.attr[name]


def _drop_unread(body: Body, candidates: set[str], fetched: set[str]) -> None:
    """Remove the nodes among `candidates` that no node reads any more, in place, and control edges from them.

    Results of a function are kept, and the nodes `fetched` of a graph.
    """
    kept = {*map(node_of, body.results())} | (fetched if body.function is None else set())
    dead: set[str] = set()
    while True:  # a read may have only readers that are removed themselves
        taken = {node_of(text) for node in body.nodes if node.name not in dead for text in input_names(node)}
        if not (found := candidates - dead - taken - kept):
            break
        dead |= found
    if dead and body.function is not None:
        drop_from_function(body.function, dead)
    elif dead:
        drop_nodes(body.nodes, dead)


class _Tracker:
    """Follows handles through forwarding nodes and into functions."""

    def __init__(self, graph_def: Proto) -> None:
        self._graph = _Consumers(Body(graph_def.node))
        self._functions = {f.signature.name: f for f in graph_def.library.function}
        self._bodies: dict[str, _Consumers] = {}

    def follow(self, scope: str, handle: str) -> Reading:
        """Return all uses of a handle, also in functions that get it.

        `handle` is a tensor of the function `scope`, or of the graph if that is "".
        """
        found = Reading()
        seen = set()
        pending = [(scope, handle)]
        while pending:
            place = pending.pop()
            if place in seen:
                continue
            seen.add(place)
            scope, tensor = place
            consumers = self._consumers(scope)
            for node, index in consumers.of(tensor):
                use, further = self._consume(consumers.body, scope, node, index)
                found |= Reading(use, _taker(scope, node) if Use.WHOLE in use else "")
                pending += further
        return found

    def _consumers(self, scope: str) -> _Consumers:
        if not scope:
            return self._graph
        if scope not in self._bodies:
            self._bodies[scope] = _Consumers(Body.of(self._functions[scope]))
        return self._bodies[scope]

    def _consume(self, body: Body, scope: str, node: Proto, index: int) -> tuple[Use, list[tuple[str, str]]]:
        """Return the use by `node` of the handle at its data input `index`, and the tensors that forward it.

        These are (scope, tensor), to be followed further: outputs of a node that forwards the handle, and
        arguments of functions that the node calls. `body` is the body of `scope`.
        """
        if node.op in _ROW_READS:
            return Use.ROWS, []
        if node.op in INDIFFERENT:
            return Use.NOTHING, []
        if node.op in _FORWARDS:
            return Use.NOTHING, [(scope, body.output(node, out)) for out in range(_FORWARDS[node.op])]
        names = [function.name for function in called(node)] if node.op in CALLS else []
        if not names or any(name not in self._functions for name in names):
            return Use.WHOLE, []
        further = [(scope, body.output(node, index))] if node.op in LOOPS else []
        for name in names:
            signature = self._functions[name].signature
            further.append((name, signature.input_arg[index - CALLS[node.op]].name))
            if node.op not in LOOPS:  # a handle that the function returns may be this one
                returned = enumerate(signature.output_arg)
                further += [
                    (scope, body.output(node, number))
                    for number, result in returned
                    if result.type == DType.RESOURCE
                ]
        return Use.NOTHING, further


def _taker(scope: str, node: Proto) -> str:
    """Return the end of an error message: the way in which a node uses a variable.

    `scope` is the function that the node is in, "" for the graph.
    """
    where = f" in function {scope!r}" if scope else ""
    if node.op != "ReadVariableOp":
        return f"{node.op} {node.name!r}{where} takes it"
    return f"read whole by {node.name.removesuffix('/ReadVariableOp')}{where}"


class _Consumers:
    """The readers of each tensor of a body, by its canonical name."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self._found: dict[str, list[tuple[Proto, int]]] = defaultdict(list)
        for node in body.nodes:
            for index, reference in enumerate(input_names(node)):
                self._found[body.canonical(reference)].append((node, index))

    def of(self, tensor: str) -> list[tuple[Proto, int]]:
        """Return (node, position among its data inputs) for each use of a tensor, by its canonical name."""
        return self._found.get(tensor, [])
