"""Shapes in which one dimension counts the rows of a request: the values that `rules` computes with.

A dimension is a number, a number of rows (`RowCount`), or None if it is unknown. A number from a constant of
the graph is `Baked`: it remembers the constant, which is opened (made dynamic) if the number meets rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from msgspec import Struct, field

from exporter.graph.nodes import attr
from exporter.wire.protos import Proto


class Slot(NamedTuple):
    """A number in the graph: element `at` of an input of a node, or of one of its attributes."""

    node: str
    what: str  # the input's position, "value" for the shape of a Const's own value, or the attribute's name
    at: int


class RowCount(NamedTuple):
    """A dimension of `outer * rows * inner` elements, the rows of a request in between."""

    outer: int = 1  # of time-major tensors flattened
    inner: int = 1  # of batch-major ones: `[rows * time, units]`

    @property
    def each(self) -> int:
        """The number of elements for each row."""
        return self.outer * self.inner


class Baked(int):
    """A dimension that a constant gives. Arithmetic with it gives a plain number."""

    slot: Slot

    @classmethod
    def of(cls, size: int, slot: Slot) -> Baked:
        """The number `size`, which remembers its `slot`."""
        baked = cls(size)
        baked.slot = slot
        return baked


class Times(NamedTuple):
    """A number that is `each` times the rows of the request: an element of a shape."""

    each: int


Dim: TypeAlias = int | RowCount | None
Number: TypeAlias = int | Times | None


class Known(Struct, frozen=True):
    """A tensor's shape (of a handle: its variable's), and the numbers of small tensors of integers."""

    shape: tuple[Dim, ...]
    numbers: tuple[Number, ...] | None = None
    handle: str = ""  # of a handle: the variable's or the TensorArray's node

    @property
    def rows_at(self) -> int | None:
        """The number of the dimension that counts rows; None if none does."""
        return next((at for at, dim in enumerate(self.shape) if isinstance(dim, RowCount)), None)


class Unclear(Exception):
    """Raised by a rule that cannot give an output's shape, or where rows of a request are mixed."""


class Stuck(Exception):
    """Raised by a rule where the graph accepts one number of rows only, and no constant can be opened."""


class Meeting(Struct):
    """Where rows meet numbers: the slots that are opened, and those that must be."""

    batch: int | None  # the rows that the graph was traced with, None as long as they are unknown
    is_recorded: bool  # the graph's inputs give them
    opened: dict[Slot, RowCount] = field(default_factory=dict)  # the rows that a slot now stands for
    asked: dict[Slot, RowCount] = field(default_factory=dict)  # found in a pass, to be opened in the next

    def equal(self, left: Dim, right: Dim) -> Dim:
        """The dimension that two must both have for the graph to run (None: unknown); Unclear if they differ.

        Asks to open a number that is rows.
        """
        if left is None or right is None:
            return left if right is None else right
        if isinstance(right, RowCount) and not isinstance(left, RowCount):
            left, right = right, left
        if isinstance(left, RowCount) and not isinstance(right, RowCount):
            return self._with_number(left, right)
        if left != right:
            raise Unclear
        return left

    def broadcast(self, *shapes: Sequence[Dim]) -> tuple[Dim, ...]:
        """The shape of an element-wise result, by the rules of broadcasting."""
        rank = max(map(len, shapes), default=0)
        padded = [(*[1] * (rank - len(shape)), *shape) for shape in shapes]
        return tuple(self._broadcast_dims(dims) for dims in zip(*padded, strict=True))

    def _broadcast_dims(self, dims: tuple[Dim, ...]) -> Dim:
        wide = [dim for dim in dims if isinstance(dim, RowCount) or dim != 1]
        if None in wide and not all(dim is None for dim in wide):
            raise Unclear
        result: Dim = wide[0] if wide else dims[0]
        kinds = {isinstance(dim, RowCount) for dim in wide}
        if len(kinds) > 1 and not self.is_recorded:
            raise Unclear  # a request of one row may be meant, to be compared with many of the model's
        for dim in wide[1:]:
            result = self.equal(result, dim)
        return result

    def _with_number(self, rows: RowCount, size: int) -> Dim:
        if not self.is_all_rows(size, rows.each):
            raise Unclear
        if not isinstance(size, Baked):
            raise Stuck
        self.asked[size.slot] = rows
        return rows

    def is_all_rows(self, size: int, count: int) -> bool:
        """True if `size` elements are all traced rows, `count` for each; the first call may set the batch."""
        if self.batch is None and size > 0 and size % count == 0:
            self.batch = size // count
        return self.batch is not None and size == count * self.batch

    def dim(self, number: Number, slot: Slot) -> Dim:
        """The dimension that an operation makes from a number in a slot: rows, if the slot is opened.

        None if the number is unknown.
        """
        if isinstance(number, Times):
            return RowCount(1, number.each)
        if number is None:
            return None
        return self.opened.get(slot) or Baked.of(number, slot)


class Reshaped(Struct, frozen=True):
    """A tensor's new shape, and the target to write in the graph if one of its numbers is opened."""

    shape: tuple[Dim, ...]
    target: tuple[int, ...] | None = None


def reshape(shape: Sequence[Dim], target: Sequence[Number], meeting: Meeting) -> Reshaped:
    """Reshape `shape` to `target`, which may have one -1 and may count rows; Unclear if rows may be mixed.

    The result has as many elements before and after a row's own as before. If that holds only when a number
    is read as the number of rows that the graph was traced with, that number is opened.
    """
    if None in shape or None in target:
        raise Unclear
    total = math.prod(_count(dim) for dim in shape)
    at = next((at for at, dim in enumerate(shape) if isinstance(dim, RowCount)), None)
    if at is None:
        return Reshaped(_without_rows(total, target))
    rows = shape[at]
    assert isinstance(rows, RowCount)
    before = math.prod(map(_count, shape[:at])) * rows.outer
    literal = next(_as_written(before, total, target), None)
    baked = next(_as_traced(before, total, target, meeting), None)
    if baked is not None and literal is not None and meeting.batch == 1 and baked.shape != literal.shape:
        raise Unclear  # 1 is everywhere: `[1, -1]` may flatten a row, or all rows
    found = literal or baked
    if found is not None:
        return found
    sizes = [number for number in target if isinstance(number, int) and number >= 0]
    if len(sizes) == len(target) and meeting.is_all_rows(math.prod(sizes), total):
        raise Stuck
    raise Unclear


def _count(dim: Dim) -> int:
    assert dim is not None
    return dim.each if isinstance(dim, RowCount) else int(dim)


def _without_rows(total: int, target: Sequence[Number]) -> tuple[Dim, ...]:
    """The shape of `total` elements, none of which is a row's; Unclear if -1 cannot be computed."""
    sizes = [number for number in target if isinstance(number, int)]
    known = math.prod(size for size in sizes if size >= 0)
    if len(sizes) < len(target) or sizes.count(-1) > 1 or (-1 in sizes and (not known or total % known)):
        raise Unclear
    return tuple(total // known if size == -1 else int(size) for size in sizes)


def _as_written(before: int, total: int, target: Sequence[Number]) -> Iterator[Reshaped]:
    """Yield the new shape if the target is right as it stands: its rows, or else its -1, are all rows."""
    rows = [at for at, number in enumerate(target) if isinstance(number, Times)]
    free = [at for at, number in enumerate(target) if number == -1]
    if len(rows) > 1 or len(free) > 1 or not (rows or free):
        return
    known = math.prod(number for number in target if isinstance(number, int) and number >= 0)
    if rows:
        count = target[rows[0]]
        assert isinstance(count, Times)
        known *= count.each
    if not known or total % known or (rows and not free and known != total):
        return
    rest = total // known
    at = (rows or free)[0]
    sizes: list[int] = [rest if number == -1 else _number(number) for number in target]
    split = _split(before, total, sizes, at)
    if split is not None:
        yield Reshaped(tuple(split if here == at else size for here, size in enumerate(sizes)))


def _as_traced(before: int, total: int, target: Sequence[Number], meeting: Meeting) -> Iterator[Reshaped]:
    """Yield the new shapes in which one of the target's numbers is read as the traced rows."""
    sizes = [number for number in target if isinstance(number, int)]
    if len(sizes) < len(target) or sizes.count(-1) > 1:
        return
    known = math.prod(size for size in sizes if size >= 0)
    if -1 not in sizes:
        if not known or not meeting.is_all_rows(known, total):
            return
    elif meeting.batch is None or not known or total * meeting.batch % known:
        return
    rest = total * (meeting.batch or 0) // known
    traced = [rest if size == -1 else size for size in sizes]
    for at, size in enumerate(sizes):
        if size <= 0 or not meeting.batch or size % meeting.batch:
            continue
        counted = [*traced[:at], size // meeting.batch, *traced[at + 1 :]]
        split = _split(before, total, counted, at)
        if split is not None:
            shape: tuple[Dim, ...] = tuple(split if here == at else int(n) for here, n in enumerate(counted))
            yield Reshaped(shape, tuple(-1 if here == at else n for here, n in enumerate(counted)))


def _number(number: Number) -> int:
    return number.each if isinstance(number, Times) else int(number or 0)


def _split(before: int, total: int, counts: Sequence[int], at: int) -> RowCount | None:
    """The rows as dimension `at` of `counts` (elements for each row); None if their place would change."""
    ahead, behind = math.prod(counts[:at]), math.prod(counts[at + 1 :])
    after = total // before if before else 0
    if not ahead or not behind or not after or before % ahead or after % behind:
        return None
    rows = RowCount(before // ahead, after // behind)
    return rows if rows.each == counts[at] else None


MAX_NUMBERS = 256  # of a tensor of integers that is followed: longer ones are not shapes


class Findings(Struct):
    """The results of a pass over a graph besides shapes, by node."""

    arrays: dict[str, tuple[Dim, ...]] = field(default_factory=dict)  # shapes of TensorArrays' elements
    # Numbers to write as a Reshape's or Slice's target, or a bit of a StridedSlice's `end_mask`.
    targets: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Call(Struct):
    """One node, with the known shapes and numbers of its inputs; methods raise Unclear for unknown ones."""

    node: Proto
    inputs: Sequence[Known | None]
    meeting: Meeting
    found: Findings
    nodes: Mapping[str, Proto]

    def input(self, at: int) -> Known:
        """The shape and numbers of input `at`; Unclear if it is not known, or not there."""
        found = self.inputs[at] if -len(self.inputs) <= at < len(self.inputs) else None
        if found is None:
            raise Unclear
        return found

    def shape(self, at: int) -> tuple[Dim, ...]:
        """The shape of input `at`."""
        return self.input(at).shape

    def numbers(self, at: int) -> tuple[Number, ...]:
        """The numbers of input `at`; Unclear if they are not known."""
        numbers = self.input(at).numbers
        if numbers is None:
            raise Unclear
        return numbers

    def integers(self, at: int) -> tuple[int, ...]:
        """The numbers of input `at`; Unclear unless all are known and none is a count of rows."""
        numbers = [number for number in self.numbers(at) if isinstance(number, int)]
        if len(numbers) < len(self.numbers(at)):
            raise Unclear
        return tuple(numbers)

    def axis(self, at: int, rank: int) -> int:
        """The dimension, of a shape of `rank`, that the scalar input `at` names."""
        (axis,) = self.integers(at) or (rank,)
        return axis_of(axis, rank)

    def dims(self, at: int) -> tuple[Dim, ...]:
        """The shape that the numbers of input `at` form; Unclear if one is unknown or negative."""
        slots = (Slot(self.node.name, str(at), place) for place in range(MAX_NUMBERS))
        dims = [self.meeting.dim(number, slot) for number, slot in zip(self.numbers(at), slots, strict=False)]
        if None in dims or any(isinstance(dim, int) and dim < 0 for dim in dims):
            raise Unclear
        return tuple(dims)

    def attr_ints(self, name: str) -> list[int]:
        """A list of numbers in an attribute, empty if absent."""
        return [*attr(self.node, name).list.i]

    def attr_int(self, name: str, default: int = 0) -> int:
        """A number in an attribute, or the default."""
        return int(attr(self.node, name).i) if name in self.node.attr else default

    def attr_bool(self, name: str, *, default: bool = False) -> bool:
        """A boolean in an attribute, or the default."""
        return bool(attr(self.node, name).b) if name in self.node.attr else default


Outputs = list[Known | None]
Rule = Callable[[Call], Outputs]


def axis_of(axis: int, rank: int) -> int:
    """A dimension's number from 0, where a negative one counts from the end; Unclear out of range."""
    if not -rank <= axis < rank:
        raise Unclear
    return axis % rank


def output(shape: Sequence[Dim], numbers: tuple[Number, ...] | None = None) -> Outputs:
    """A node's outputs, if there is one of this shape; Unclear if two dimensions count rows."""
    if sum(isinstance(dim, RowCount) for dim in shape) > 1:
        raise Unclear
    return [Known(tuple(shape), numbers)]


def require_whole(dim: Dim) -> None:
    """Raise Unclear for a dimension that counts rows, or is unknown: working along it would mix them."""
    if isinstance(dim, RowCount) or dim is None:
        raise Unclear


def equal_shapes(call: Call, left: Sequence[Dim], right: Sequence[Dim]) -> tuple[Dim, ...]:
    """The shape that two must both have for the graph to run, by `Meeting.equal`; Unclear if they differ."""
    if len(left) != len(right):
        raise Unclear
    return tuple(call.meeting.equal(one, other) for one, other in zip(left, right, strict=True))


def computed(op: str, left: Number, right: Number) -> Number:
    """The result of Add, Sub, Mul, FloorDiv or Maximum on two numbers; None if it cannot be followed."""
    if isinstance(left, int) and isinstance(right, int):
        if op == "FloorDiv":
            return left // right if right else None
        return {"Mul": left * right, "Sub": left - right, "Maximum": max(left, right)}.get(op, left + right)
    if isinstance(right, Times):
        left, right = right, left
    if op == "Mul" and isinstance(left, Times) and isinstance(right, int) and right > 0:
        return Times(left.each * right)
    return None


def product(numbers: Iterable[Number]) -> Number:
    """The product of numbers; None if it cannot be followed."""
    total: Number = 1
    for number in numbers:
        total = computed("Mul", total, number)
    return total


def refuse_taken_rows(call: Call, dim: Dim, size: int) -> None:
    """Raise Stuck for rows of which `size` elements are taken, if these are all traced ones, else Unclear."""
    if isinstance(dim, RowCount):
        raise Stuck if call.meeting.is_all_rows(size, dim.each) else Unclear


def as_number(dim: Dim) -> Number:
    """A dimension as an element of a shape, which no longer remembers its slot; None if it is unknown."""
    return Times(dim.each) if isinstance(dim, RowCount) else None if dim is None else int(dim)
