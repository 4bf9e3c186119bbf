"""One node of a graph with what is known of its inputs, and what the rules for operations share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, field

from exporter.graph.batch.dims import Dim, Known, Meeting, Number, Rows, Slot, Stuck, Times, Unclear
from exporter.graph.nodes import attr
from exporter.wire.protos import Proto

MAX_NUMBERS = 256
"""Elements of a tensor of integers whose numbers are followed; longer ones are no shapes."""


class Findings(Struct):
    """What a pass over a graph finds beside shapes.

    `arrays` has the shape of the elements of each TensorArray, by its node. `targets` are numbers to write
    into a Reshape's or Slice's target, or the bit of a StridedSlice's end, so that they take all rows.
    """

    arrays: dict[str, tuple[Dim, ...]] = field(default_factory=dict)
    targets: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Call(Struct):
    """One node with what is known of its inputs."""

    node: Proto
    inputs: Sequence[Known | None]
    meeting: Meeting
    found: Findings
    nodes: Mapping[str, Proto]

    def input(self, at: int) -> Known:
        """An input.

        Raises:
            Unclear: nothing is known of it.
        """
        found = self.inputs[at] if -len(self.inputs) <= at < len(self.inputs) else None
        if found is None:
            raise Unclear
        return found

    def shape(self, at: int) -> tuple[Dim, ...]:
        """An input's shape."""
        return self.input(at).shape

    def numbers(self, at: int) -> tuple[Number, ...]:
        """An input's numbers.

        Raises:
            Unclear: they are not known.
        """
        numbers = self.input(at).numbers
        if numbers is None:
            raise Unclear
        return numbers

    def integers(self, at: int) -> tuple[int, ...]:
        """An input's numbers, none of which counts rows."""
        numbers = [number for number in self.numbers(at) if isinstance(number, int)]
        if len(numbers) < len(self.numbers(at)):
            raise Unclear
        return tuple(numbers)

    def axis(self, at: int, rank: int) -> int:
        """The dimension that a scalar input names."""
        (axis,) = self.integers(at) or (rank,)
        return axis_of(axis, rank)

    def dims(self, at: int) -> tuple[Dim, ...]:
        """The shape that an input's numbers spell."""
        slots = (Slot(self.node.name, str(at), place) for place in range(MAX_NUMBERS))
        dims = [self.meeting.dim(number, slot) for number, slot in zip(self.numbers(at), slots, strict=False)]
        if None in dims or any(isinstance(dim, int) and dim < 0 for dim in dims):
            raise Unclear
        return tuple(dims)

    def attr_ints(self, name: str) -> list[int]:
        """A list of numbers in an attribute."""
        return [*attr(self.node, name).list.i]

    def attr_int(self, name: str, default: int = 0) -> int:
        """A number in an attribute."""
        return int(attr(self.node, name).i) if name in self.node.attr else default

    def attr_bool(self, name: str, *, default: bool = False) -> bool:
        """A yes or no in an attribute."""
        return bool(attr(self.node, name).b) if name in self.node.attr else default


Outputs = list[Known | None]
Rule = Callable[[Call], Outputs]


def axis_of(axis: int, rank: int) -> int:
    """A dimension's number, counted from the end if it is negative."""
    if not -rank <= axis < rank:
        raise Unclear
    return axis % rank


def output(shape: Sequence[Dim], numbers: tuple[Number, ...] | None = None) -> Outputs:
    """The one output of a node. Two dimensions of rows are one too many."""
    if sum(isinstance(dim, Rows) for dim in shape) > 1:
        raise Unclear
    return [Known(tuple(shape), numbers)]


def require_whole(dim: Dim) -> None:
    """Refuse to work along the rows."""
    if isinstance(dim, Rows) or dim is None:
        raise Unclear


def equal_shapes(call: Call, left: Sequence[Dim], right: Sequence[Dim]) -> tuple[Dim, ...]:
    """The one shape that two are if the graph is to run."""
    if len(left) != len(right):
        raise Unclear
    return tuple(call.meeting.equal(one, other) for one, other in zip(left, right, strict=True))


def computed(op: str, left: Number, right: Number) -> Number:
    """A number computed from two, None where it cannot be followed."""
    if isinstance(left, int) and isinstance(right, int):
        if op == "FloorDiv":
            return left // right if right else None
        return {"Mul": left * right, "Sub": left - right, "Maximum": max(left, right)}.get(op, left + right)
    if op == "Mul" and isinstance(left, Times) and isinstance(right, int) and right > 0:
        return Times(left.each * right)
    if op == "Mul" and isinstance(right, Times) and isinstance(left, int) and left > 0:
        return Times(right.each * left)
    return None


def stop_if_traced(call: Call, dim: Dim, size: int) -> None:
    """Refuse rows where only `size` elements are taken, which are those that the graph was traced with."""
    if isinstance(dim, Rows):
        raise Stuck if call.meeting.is_all_rows(size, dim.each) else Unclear


def as_number(dim: Dim) -> Number:
    """A dimension as an element of a shape."""
    return Times(dim.each) if isinstance(dim, Rows) else None if dim is None else int(dim)


def rules(rule: Rule, names: str) -> Mapping[str, Rule]:
    """One rule for several operations, named in a text."""
    return dict.fromkeys(names.split(), rule)
