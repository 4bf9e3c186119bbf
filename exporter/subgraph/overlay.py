"""Changed rows of a mapped table, inside the graph: an overlay beside memory that cannot be written.

`exporter.graph.overlaid_reads` says what lies where, and how signatures read it. A changed row has two
places, `capacity` apart: its slot leads to one, and an update writes into the other, where nobody reads,
before it leads the slot there. A row that has none gets the next free pair. Pairs are never given back: a
rollback writes the former values again.

Nobody sees a half-written row. A reader that still follows the slot of before the last flip began before that
flip, which changed the sequence: its pass is not clean and is computed again. One that began after the flip
follows the other place. Row isolation has no sequence: there rows are written under the overlay's lock.

Memory is taken by what changes: `Empty` leaves the overlay's pages untouched, first places are given in
order, and second ones are used by rows that change twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from exporter.graph.editor import GraphEditor
from exporter.graph.inference_graph import GraphVariable
from exporter.graph.overlaid_reads import OverlaidReads
from exporter.late_names import tf
from exporter.subgraph.state import Tensor, read
from exporter.wire.dtypes import DType


class OverlayNodes(Struct, frozen=True):
    """Nodes of one table's overlay: variables, and the `shape` of rows with place 0, which is never used."""

    # `used`, int64 [], is how many of `capacity` rows have a pair of places.

    slots: str
    rows: str
    used: str
    dtype: DType
    table_rows: int
    shape: tuple[int, ...]

    @classmethod
    def add(cls, editor: GraphEditor, variable: GraphVariable, capacity: int) -> OverlayNodes:
        """Add the variables of an overlay to a graph."""
        name, shape = f"overlay/{variable.node}", (2 * capacity + 1, *variable.shape[1:])
        return cls(
            slots=editor.variable(f"{name}/slots", DType.INT32, variable.shape[:1]),
            rows=editor.variable(f"{name}/rows", variable.dtype, shape),
            used=editor.variable(f"{name}/used", DType.INT64),
            dtype=variable.dtype,
            table_rows=variable.shape[0],
            shape=shape,
        )

    @property
    def capacity(self) -> int:
        """The number of changed rows that there is room for."""
        return self.shape[0] // 2

    @property
    def handles(self) -> tuple[str, str, str]:
        """The nodes of the variables that an update takes, in the order of `Overlay`."""
        return self.slots, self.rows, self.used

    def reads(self, variable: GraphVariable) -> OverlaidReads:
        """Describe how the graph is to read the table, for `overlay_reads`."""
        return OverlaidReads(variable.node, self.dtype, self.shape[1:], self.slots, self.rows)

    def add_first_values(self, editor: GraphEditor) -> dict[str, tuple[str, DType]]:
        """Add the variables' values of a model that is loaded: value and dtype by handle."""
        slots = _empty(editor, self.slots, (self.table_rows,), DType.INT32, is_zero=True)
        rows = _empty(editor, self.rows, self.shape, self.dtype, is_zero=False)
        used = editor.constant(f"{_name(self.used)}/none", 0, DType.INT64)
        return {
            self.slots: (slots, DType.INT32),
            self.rows: (rows, self.dtype),
            self.used: (used, DType.INT64),
        }


def _name(handle: str) -> str:
    return handle.partition("/")[2]


def _empty(editor: GraphEditor, handle: str, shape: tuple[int, ...], dtype: DType, *, is_zero: bool) -> str:
    """Add the first value of a variable: memory that is zero, or whose pages are never touched."""
    sizes = editor.constant(f"{_name(handle)}/sizes", shape, DType.INT32)
    # Stateful: constant folding would compute a `Fill`, and keep it a second time.
    return editor.node(f"{_name(handle)}/first", "Empty", [sizes], dtype=dtype, init=is_zero)


COUNTER = "overlay/mapped"
"""The variable, int64 [], that holds how many tables are mapped; it is assigned while a model loads."""


def add_fill(editor: GraphEditor, overlays: Collection[OverlayNodes]) -> tuple[str, str, str]:
    """Add counts, int64 []: tables that are mapped, that were to be, percent used of the fullest overlay."""
    counter = editor.variable(COUNTER, DType.INT64)
    # An overlay that has room for every row of its table never becomes full, and does not count.
    bounded = [overlay for overlay in overlays if overlay.capacity < overlay.table_rows]

    def report(counter: Tensor, *used: Tensor) -> list[Tensor]:
        rooms = [max(1, overlay.capacity) for overlay in bounded]
        percents = [100 * read(each, DType.INT64, ()) // room for each, room in zip(used, rooms, strict=True)]
        count, none = tf.constant(len(overlays), tf.int64), tf.constant(0, tf.int64)
        return [read(counter, DType.INT64, ()), count, tf.reduce_max(tf.stack([none, *percents]))]

    names = ["counter", *(f"used_{number}" for number in range(len(bounded)))]
    part = editor.function("overlay_fill", report, dict.fromkeys(names, (DType.RESOURCE, ())))
    mapped, count, percent = editor.call(
        "overlay_fill", part, [counter, *(overlay.used for overlay in bounded)]
    )
    return mapped, count, percent


class Overlay(Struct, frozen=True):
    """The handles of a table and of its overlay inside a function."""

    table: Tensor
    slots: Tensor
    rows: Tensor
    used: Tensor
    nodes: OverlayNodes

    def gather(self, ids: Tensor) -> Tensor:
        """Add a gather of the rows as they are now, for row numbers int64 [n]."""
        dtype = tf.as_dtype(int(self.nodes.dtype))
        slots = self._slots_of(ids)
        at = tf.reshape(tf.raw_ops.Where(condition=slots), [-1])
        changed = tf.raw_ops.ResourceGather(resource=self.rows, indices=tf.gather(slots, at), dtype=dtype)
        gathered = tf.raw_ops.ResourceGather(resource=self.table, indices=ids, dtype=dtype)
        return tf.raw_ops.InplaceUpdate(x=gathered, i=tf.cast(at, tf.int32), v=changed)

    def place(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add the choice of places for changed rows `ids`, which differ: the last three of `Places`."""
        slots = tf.cast(self._slots_of(ids), tf.int64)
        is_new, is_second = tf.equal(slots, 0), slots > self.nodes.capacity
        first = tf.where(is_second, slots - self.nodes.capacity, slots)
        # `used` is assigned last. If an update died before, it may have led slots beyond it; the update that
        # repairs changes the same rows at least, and so finds these slots here.
        used = tf.maximum(read(self.used, DType.INT64, ()), tf.reduce_max(tf.concat([first, [0]], 0)))
        # No slot leads to the other place now.
        other = tf.where(is_second, first, slots + self.nodes.capacity)
        places = tf.where(is_new, used + tf.cumsum(tf.cast(is_new, tf.int64)), other)
        more = tf.reduce_sum(tf.cast(is_new, tf.int64))
        return places, tf.cast(places, tf.int32), used + more

    def is_full(self, places: Places) -> Tensor:
        """True if there is no room for the rows, bool []."""
        return places.used > self.nodes.capacity

    def _slots_of(self, ids: Tensor) -> Tensor:
        return tf.raw_ops.ResourceGather(resource=self.slots, indices=ids, dtype=tf.int32)


class Places(Struct, frozen=True):
    """Where changed rows `ids` go: their places in the overlay as indices `rows` int64 [n] and as contents of
    `slots` int32 [n]; `used`, int64 [], is how many rows have places then.
    """

    ids: Tensor
    rows: Tensor
    slots: Tensor
    used: Tensor


def add_overlays(
    editor: GraphEditor, variables: Iterable[GraphVariable], capacities: Mapping[str, int]
) -> dict[str, OverlayNodes]:
    """Add an overlay for each variable in `capacities`, by the nodes of their handles."""
    overlaid = (variable for variable in variables if variable.node in capacities)
    return {
        variable.node: OverlayNodes.add(editor, variable, capacities[variable.node]) for variable in overlaid
    }
