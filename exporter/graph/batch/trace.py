"""Find where a training graph's batch size is fixed in constants, and which of them to make dynamic.

An `input_fn` whose batches have a fixed size leaves that size all over a graph: in targets of Reshapes, in
initial states, in the declared elements of TensorArrays. Such a graph answers requests of that size alone.
Here shapes are computed again, with an unknown number of rows as the first dimension of the requests' inputs
(see `rules`). Where rows meet a number that must equal theirs for the graph to run, the number is *opened*:
it is made dynamic. Shapes are computed again, until no rows meet a fixed number any more. This also proves
the result: every rule keeps rows apart, so that each row's answer is the same in a request of any size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from exporter.graph.batch.dims import Call, Dim, Findings, Known, Meeting, RowCount, Slot, Stuck, Unclear
from exporter.graph.batch.rules import RULES
from exporter.graph.nodes import (
    MERGES,
    NEXT_ITERATIONS,
    Endpoint,
    attr,
    closure,
    data_inputs,
    forward_sources,
    input_names,
    readers_of,
    shape_of,
)
from exporter.wire.protos import Proto

_MOST_PASSES = 16  # each opens more numbers, or corrects loops; then nothing is changed


class Trace(Struct, frozen=True):
    """The shapes in a graph whose inputs have any number of rows, and the numbers to make dynamic."""

    batch: int | None  # the number of rows that the graph was traced with, if known
    values: Mapping[Endpoint, Known | None]
    opened: Mapping[Slot, RowCount]  # the slots to make dynamic, with the rows that they stand for
    targets: Mapping[str, tuple[int, ...]]  # new numbers for Reshapes and slices: see `Findings`
    stuck: tuple[str, ...]  # nodes that accept no other number of rows
    unclear: tuple[str, ...]  # nodes that depend on a request and whose outputs no rule gives


def trace(nodes: Mapping[str, Proto], inputs: Mapping[Endpoint, tuple[Dim, ...]], batch: int | None) -> Trace:
    """The shapes that follow from those of the inputs, after as many passes as open all numbers."""
    order, fed, readers = _ordered(nodes), {tensor.node for tensor in inputs}, readers_of(nodes.values())
    asking = closure(fed, lambda name: (reader.name for reader in readers.get(name, ())))
    meeting, loops = Meeting(batch, batch is not None), dict[str, Known | None]()
    for _ in range(_MOST_PASSES):
        one = _Pass(nodes, inputs, fed, asking, meeting, loops)
        for name in order:
            one.visit(nodes[name])
        ends = one.loop_ends()
        more = {slot: rows for slot, rows in meeting.asked.items() if slot not in meeting.opened}
        meeting.opened.update(more)
        meeting.asked.clear()
        if more:
            loops.clear()  # their shapes were found with numbers that are rows now
        elif ends:
            loops.update(ends)
        else:
            return Trace(
                meeting.batch,
                one.values,
                meeting.opened,
                one.found.targets,
                tuple(one.stuck),
                tuple(one.unclear),
            )
    return Trace(meeting.batch, {}, {}, {}, (), tuple(nodes))


class _Pass(Struct):
    """One walk over the nodes; `loops` has the shapes of loops that an earlier pass corrected."""

    nodes: Mapping[str, Proto]
    inputs: Mapping[Endpoint, tuple[Dim, ...]]
    fed: Collection[str]
    asking: Collection[str]
    meeting: Meeting
    loops: Mapping[str, Known | None]
    values: dict[Endpoint, Known | None] = field(default_factory=dict)
    found: Findings = field(default_factory=Findings)
    stuck: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)

    def visit(self, node: Proto) -> None:
        """Compute a node's outputs into `values`, and note it if it is stuck or unclear."""
        asks = node.name in self.asking
        outputs = self._outputs(node, asks=asks)
        for at, known in enumerate(outputs):
            self.values[Endpoint(node.name, at)] = self._as_recorded(node, at, known)
        if asks and node.name not in self.fed and (not outputs or None in outputs):
            self.unclear.append(node.name)

    def _outputs(self, node: Proto, *, asks: bool) -> Sequence[Known | None]:
        """A node's outputs by its rule; without one the recorded shapes, unless it `asks` for the request."""
        if node.name in self.fed:
            places = [tensor.output for tensor in self.inputs if tensor.node == node.name]
            shapes = (self.inputs.get(Endpoint(node.name, at)) for at in range(max(places) + 1))
            return [None if shape is None else Known(shape) for shape in shapes]
        if node.op in MERGES:
            return [self._merged(node), Known(())]
        rule = RULES.get(node.op)
        if rule is None:
            return self._recorded_shapes(node) if not asks else []
        call = Call(node, [*map(self.values.get, data_inputs(node))], self.meeting, self.found, self.nodes)
        try:
            return rule(call)
        except Stuck:
            self.stuck.append(node.name)
        except (Unclear, ValueError, LookupError, ArithmeticError):
            pass  # the last three: a damaged graph
        return self._recorded_shapes(node) if not asks else []

    def _merged(self, node: Proto) -> Known | None:
        """The common shape of a conditional's branches; for a loop its initial or corrected shape.

        None if it is unknown.
        """
        if node.name in self.loops:
            return self.loops[node.name]
        sources = [tensor for tensor in data_inputs(node) if not self._closes_loop(tensor)]
        known = [self.values.get(tensor) for tensor in sources]
        first = known[0] if known else None
        for other in known[1:]:
            first = self._joined(first, other)
        return None if first is None else replace(first, numbers=None)

    def _joined(self, left: Known | None, right: Known | None) -> Known | None:
        if (
            left is None
            or right is None
            or len(left.shape) != len(right.shape)
            or left.handle != right.handle
        ):
            return None
        try:
            dims = [self.meeting.equal(one, two) for one, two in zip(left.shape, right.shape, strict=True)]
        except (Unclear, Stuck, ArithmeticError):
            return None
        return Known(tuple(dims), None, left.handle)

    def _closes_loop(self, tensor: Endpoint) -> bool:
        node = self.nodes.get(tensor.node)
        return node is not None and node.op in NEXT_ITERATIONS

    def loop_ends(self) -> dict[str, Known | None]:
        """{Merge of a loop: common shape} for loops whose turns end with another shape."""
        found: dict[str, Known | None] = {}
        for node in self.nodes.values():
            if node.op not in MERGES:
                continue
            ends = [tensor for tensor in data_inputs(node) if self._closes_loop(tensor)]
            known = self.values.get(Endpoint(node.name, 0))
            if ends and known is not None:
                after = self._joined(known, self.values.get(ends[0]))
                if after is None or after.shape != known.shape:
                    found[node.name] = after
        return found

    def _as_recorded(self, node: Proto, at: int, known: Known | None) -> Known | None:
        """An output's shape; None if it contradicts the one that TensorFlow recorded for the traced batch."""
        shapes = attr(node, "_output_shapes").list.shape
        recorded = shape_of(shapes[at]) if at < len(shapes) else None
        if known is None or recorded is None or known.handle or node.name in self.fed:
            return known
        if len(recorded) != len(known.shape):
            return None
        for size, dim in zip(recorded, known.shape, strict=True):
            traced = (
                self.meeting.batch and dim.each * self.meeting.batch if isinstance(dim, RowCount) else dim
            )
            if size >= 0 and traced is not None and traced != size:
                return None
        return known

    def _recorded_shapes(self, node: Proto) -> Sequence[Known | None]:
        """The shapes that TensorFlow recorded for a node's outputs, where they are fixed."""
        shapes = map(shape_of, attr(node, "_output_shapes").list.shape)
        return [
            Known(shape) if shape is not None and min(shape, default=0) >= 0 else None for shape in shapes
        ]


def _ordered(nodes: Mapping[str, Proto]) -> list[str]:
    """The names of the nodes, each after its inputs; a loop begins at its Merge."""
    # Otherwise in the graph's order, in which a loop's writes into arrays come before the reads of them.
    order: list[str] = []
    state = dict[str, bool]()
    for root in nodes:
        pending = [root]
        while pending:
            name = pending[-1]
            if name in state:
                pending.pop()
                if not state[name]:
                    state[name] = True
                    order.append(name)
                continue
            state[name] = False
            sources = forward_sources(nodes, name, input_names(nodes[name]))
            pending += [source for source in sources if source not in state]
    return order
