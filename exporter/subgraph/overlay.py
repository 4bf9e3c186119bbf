"""Changed rows of a mapped table, inside the graph: an overlay beside memory that cannot be written.

`exporter.graph.overlaid_reads` has the layout, and the way signatures read it. A changed row has two places,
`capacity` apart: its slot points to one, and an update writes into the other, which nobody reads, before it
points the slot there. A row without places gets the next free pair. Pairs are never freed: a rollback writes
the former values again. A page gets slots when the first of its rows changes; they are set to zero, while
nobody reads them, before `pages` points to them.

No reader sees a half-written row. A reader that still follows the previous value of a slot began before the
slot changed, and that changed the sequence: its pass is not clean and is computed again. One that began later
follows the other place. Row isolation has no sequence: there rows are written under the overlay's lock.

Memory is used only for changes: `Empty` leaves it untouched, first places and slots are assigned in order,
and second places are used by rows that change twice. Nothing counts as zero unless it was set to zero:
allocators return reused memory with its old content. A table with a slot for each row counts as one page: its
slots are set to zero before its first row changes, and nobody reads them until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import accumulate

from msgspec import Struct

from exporter.graph.editor import GraphEditor
from exporter.graph.inference_graph import GraphVariable
from exporter.graph.overlaid_reads import MOST_ROWS_OF_A_PAGE, PAGE_BITS, PAGE_ROWS, OverlaidReads
from exporter.late_names import tf
from exporter.subgraph.state import Tensor, read
from exporter.wire.dtypes import DType


class OverlayNodes(Struct, frozen=True):
    """The variables of an overlay, by the nodes of their handles.

    `rows`, of `dtype` and `shape`, holds changed rows; its row 0 is never used. `table_rows` is the number of
    rows of the mapped table, or of all mapped tables that share the overlay.
    """

    # `used`, int64 [2]: the numbers of rows with a pair of places, and of pages with slots.
    # A table with a slot for each row has no `pages`.

    changed: str
    slots: str
    rows: str
    used: str
    pages: str | None
    dtype: DType
    table_rows: int
    shape: tuple[int, ...]

    @classmethod
    def add(
        cls, editor: GraphEditor, name: str, dtype: DType, table: tuple[int, ...], capacity: int
    ) -> OverlayNodes:
        """Add the variables of an overlay to a graph, without values, and return their nodes.

        `name` distinguishes it from other overlays; `table` is the shape of the mapped table, with rows of
        `dtype`; `capacity` is the number of changed rows that fit.
        """
        name, shape = f"overlay/{name}", (2 * capacity + 1, *table[1:])
        pages, slots = _sizes(table[0], capacity)
        return cls(
            changed=editor.variable(f"{name}/changed", DType.BOOL),
            slots=editor.variable(f"{name}/slots", DType.INT32, slots),
            rows=editor.variable(f"{name}/rows", dtype, shape),
            used=editor.variable(f"{name}/used", *_USED),
            pages=editor.variable(f"{name}/pages", DType.INT64, pages) if pages else None,
            dtype=dtype,
            table_rows=table[0],
            shape=shape,
        )

    @property
    def capacity(self) -> int:
        """Return the number of changed rows that fit."""
        return self.shape[0] // 2

    @property
    def handles(self) -> dict[str, tuple[DType, tuple[int, ...]]]:
        """Return the dtype and shape of each variable, by node of its handle, in the order of `Overlay`.

        `pages` is left out if each row has a slot.
        """
        pages, slots = _sizes(self.table_rows, self.capacity)
        kinds: dict[str, tuple[DType, tuple[int, ...]]] = {
            self.changed: (DType.BOOL, ()),
            self.slots: (DType.INT32, slots),
            self.rows: (self.dtype, self.shape),
            self.used: _USED,
        }
        return kinds | ({self.pages: (DType.INT64, pages)} if self.pages else {})

    def add_first_values(self, editor: GraphEditor) -> dict[str, tuple[str, DType]]:
        """Add the initial values of the variables, for a model that is being loaded.

        Returns the value's node and its dtype, by node of the handle. Slots and rows are left uninitialized,
        except, if there are pages, for the slots of the first page.
        """
        pages, sizes = _sizes(self.table_rows, self.capacity)
        slots = _empty(editor, self.slots, sizes, DType.INT32, is_zero=False)
        first_page = []
        if self.pages:
            zero = _empty(editor, self.pages, (), DType.INT64, is_zero=True)
            ends = {"limit": -PAGE_ROWS * pages[0], "step": -PAGE_ROWS}
            name = _name(self.pages)
            limits = [editor.constant(f"{name}/{what}", n, DType.INT64) for what, n in ends.items()]
            first_page = [editor.node(f"{name}/first_page", "Range", [zero, *limits], Tidx=DType.INT64)]
            name = _name(self.slots)
            of_none = editor.constant(f"{name}/of_none", range(PAGE_ROWS), DType.INT32)
            zeros = editor.constant(f"{name}/zeros", [0] * PAGE_ROWS, DType.INT32)
            slots = editor.node(f"{name}/first_page", "InplaceUpdate", [slots, of_none, zeros], T=DType.INT32)
        values = (
            editor.constant(f"{_name(self.changed)}/no", False, DType.BOOL),
            slots,
            _empty(editor, self.rows, self.shape, self.dtype, is_zero=False),
            editor.constant(f"{_name(self.used)}/none", [0, 0], DType.INT64),
            *first_page,
        )
        return {
            handle: (value, dtype)
            for (handle, (dtype, _)), value in zip(self.handles.items(), values, strict=True)
        }


MANY = 8
"""Tables with rows of one shape and dtype that are written together; of fewer, each is by itself."""

MOST_PLACES = (1 << 31) - 2 * PAGE_ROWS  # places are int32, and `Empty` counts them and slots by an int32

_USED = DType.INT64, (2,)


class OverlaidTable(Struct, frozen=True):
    """A mapped table's overlay, in which the table's first row has the number `first`."""

    overlay: OverlayNodes
    first: int = 0

    def reads(self, variable: GraphVariable, named: frozenset[str]) -> OverlaidReads:
        """Return the reads of the table `variable` for `overlay_reads`; `named` are nodes in signatures."""
        each = self.overlay
        beside = each.changed, each.slots, each.rows, each.pages
        return OverlaidReads(variable.node, each.dtype, each.shape[1:], *beside, self.first, named)


def _sizes(table_rows: int, capacity: int) -> tuple[tuple[int, ...], tuple[int]]:
    """Return the shapes of an overlay's variables `pages` and `slots`; () for `pages` if each row has a slot.

    The mapped table has `table_rows` rows, of which up to `capacity` may change.
    """
    if table_rows <= MOST_ROWS_OF_A_PAGE:
        return (), (table_rows,)
    pages = -(-table_rows // PAGE_ROWS)
    return (pages,), (PAGE_ROWS * (1 + min(pages, capacity)),)  # pages with slots have a changed row at least


def _name(handle: str) -> str:
    return handle.partition("/")[2]


def _empty(editor: GraphEditor, handle: str, shape: tuple[int, ...], dtype: DType, *, is_zero: bool) -> str:
    """Add memory for a variable's first value and return its node; its content is zero only with `is_zero`.

    `handle` is the node of the variable's handle; the value has this shape and dtype.
    """
    sizes = editor.constant(f"{_name(handle)}/sizes", shape, DType.INT32)
    # Stateful: constant folding would compute a `Fill`, and keep it a second time.
    return editor.node(f"{_name(handle)}/first", "Empty", [sizes], dtype=dtype, init=is_zero)


COUNTER = "overlay/mapped"
"""The variable, int64 [], with the number of mapped tables; it is assigned while a model loads."""


def add_fill(editor: GraphEditor, tables: Collection[OverlaidTable]) -> tuple[str, str, str]:
    """Add nodes for three counts about mapped tables, int64 [], and return their names in this order.

    The counts are the number of mapped tables, of tables with an overlay, and the percentage of places used
    in the fullest overlay that can become full (0 if none can). The first one's variable, `COUNTER`, is
    added, too.
    """
    counter = editor.variable(COUNTER, DType.INT64)
    # An overlay that has room for every row of its tables never becomes full, and does not count.
    overlays = dict.fromkeys(table.overlay for table in tables)
    bounded = [overlay for overlay in overlays if overlay.capacity < overlay.table_rows]

    def report(counter: Tensor, *used: Tensor) -> list[Tensor]:
        rooms = [max(1, overlay.capacity) for overlay in bounded]
        percents = [100 * read(each, *_USED)[0] // room for each, room in zip(used, rooms, strict=True)]
        count, none = tf.constant(len(tables), tf.int64), tf.constant(0, tf.int64)
        return [read(counter, DType.INT64, ()), count, tf.reduce_max(tf.stack([none, *percents]))]

    names = ["counter", *(f"used_{number}" for number in range(len(bounded)))]
    part = editor.function("overlay_fill", report, dict.fromkeys(names, (DType.RESOURCE, ())))
    mapped, count, percent = editor.call(
        "overlay_fill", part, [counter, *(overlay.used for overlay in bounded)]
    )
    return mapped, count, percent


class Overlay(Struct, frozen=True):
    """The handles of an overlay inside a function."""

    nodes: OverlayNodes
    changed: Tensor
    slots: Tensor
    rows: Tensor
    used: Tensor
    pages: Tensor | None = None

    def gather(self, table: Tensor, first: int, ids: Tensor) -> Tensor:
        """Add a gather of the present values of a table's rows `ids`, int64 [n]; return the values.

        `table` is the handle of the mapped table; `first` is the number of its first row in this overlay.
        """
        dtype = tf.as_dtype(int(self.nodes.dtype))
        places = tf.raw_ops.ListDiff(x=self._slots(ids + first).slots, y=tf.constant([0]))
        changed = tf.raw_ops.ResourceGather(resource=self.rows, indices=places.out, dtype=dtype)
        gathered = tf.raw_ops.ResourceGather(resource=table, indices=ids, dtype=dtype)
        return tf.raw_ops.InplaceUpdate(x=gathered, i=places.idx, v=changed)

    def place(self, ids: Tensor) -> Places:
        """Add nodes that choose places in `rows` for changed rows, and return them; no variable is written.

        `ids`, int64 [n], are numbers of rows in this overlay and must increase. `Places.used` may exceed the
        capacity: the caller has to check.
        """
        found = self._slots(ids)
        pages, held, slots = found.pages, found.held, tf.cast(found.slots, tf.int64)
        is_new, is_second, is_bare = tf.equal(slots, 0), slots > self.nodes.capacity, tf.equal(held, 0)
        first = tf.where(is_second, slots - self.nodes.capacity, slots)
        # `used` is assigned last. If an update died before that, slots and pages may point beyond it; the
        # repairing update changes at least the same rows, and so finds these here.
        used = tf.maximum(read(self.used, *_USED), tf.stack([_largest(first), _largest(held)]))
        # No slot points to the other place now.
        other = tf.where(is_second, first, slots + self.nodes.capacity)
        rows = tf.where(is_new, used[0] + tf.cumsum(tf.cast(is_new, tf.int64)), other)
        # Rows of one page are neighbours: its first one asks for slots.
        asks = is_bare & tf.not_equal(pages, tf.concat([[-1], pages[:-1]], 0))
        begins = found.begins
        if self.pages is not None:
            given = tf.where(is_bare, used[1] + tf.cumsum(tf.cast(asks, tf.int64)), held)
            begins = tf.bitwise.left_shift(given - pages, PAGE_BITS)
        more = [tf.reduce_sum(tf.cast(each, tf.int64)) for each in (is_new, asks)]
        return Places(
            at=begins + ids,
            rows=rows,
            slots=tf.cast(rows, tf.int32),
            pages=pages[asks],
            begins=begins[asks],
            used=used + tf.stack(more),
        )

    def clear(self, pages: Tensor, begins: Tensor) -> Tensor:
        """Add the operation that zeroes all slots of `pages`, int64 [k], and return it.

        `begins`, int64 [k], are the contents that the variable `pages` has or will have for them.
        """
        first = tf.bitwise.left_shift(pages, PAGE_BITS) + begins
        size = self.nodes.table_rows if self.pages is None else PAGE_ROWS
        # Constant folding would keep the range of all rows; and mostly there is nothing to clear.
        size = tf.where(tf.size(first) > 0, tf.constant(size, tf.int64), 0)
        every = first[:, tf.newaxis] + tf.range(size)
        return tf.raw_ops.ResourceScatterUpdate(resource=self.slots, indices=every, updates=tf.constant(0))

    def _slots(self, ids: Tensor) -> _Slots:
        """Add gathers of the slots of the rows `ids`, int64 [n], and of their pages; return both."""
        if self.pages is None:
            pages = begins = tf.zeros_like(ids)
            # Either: an update may have died between the two assignments, and slots were written before both.
            any_used = read(self.changed, DType.BOOL, ()) | (read(self.used, *_USED)[1] > 0)
            held = pages + tf.cast(any_used, tf.int64)
        else:
            pages = tf.bitwise.right_shift(ids, PAGE_BITS)
            begins = tf.raw_ops.ResourceGather(resource=self.pages, indices=pages, dtype=tf.int64)
            held = tf.bitwise.right_shift(begins, PAGE_BITS) + pages
        slots = tf.raw_ops.ResourceGather(resource=self.slots, indices=begins + ids, dtype=tf.int32)
        return _Slots(pages, begins, held, slots if self.pages is not None else tf.where(held > 0, slots, 0))


class _Slots(Struct, frozen=True):
    """The `slots` of some rows, int32 [n], and the `pages` that contain them, int64 [n].

    `begins`, int64 [n], are the contents of `pages` in the overlay. `held`, int64 [n], is the page's number
    among pages with slots, 0 if it has none.
    """

    pages: Tensor
    begins: Tensor
    held: Tensor
    slots: Tensor


def _largest(numbers: Tensor) -> Tensor:
    return tf.reduce_max(tf.concat([numbers, [0]], 0))


class Places(Struct, frozen=True):
    """The places of changed rows: indices in the variable `rows`, int64 [n], and again as `slots`, int32 [n].

    `at`, int64 [n], are the indices in the variable `slots` to which the places are written. The `pages`,
    int64 [k], get slots: `begins`, int64 [k], are their new contents. `used`, int64 [2], are the numbers of
    rows with places and of pages with slots afterwards.
    """

    at: Tensor
    rows: Tensor
    slots: Tensor
    pages: Tensor
    begins: Tensor
    used: Tensor

    @classmethod
    def nowhere(cls) -> Places:
        """Return places for no rows: all fields are empty, and `used` is zeros."""
        rows, slots = tf.zeros([0], tf.int64), tf.zeros([0], tf.int32)
        return cls(rows, rows, slots, rows, rows, tf.zeros([2], tf.int64))


def add_overlays(
    editor: GraphEditor, variables: Iterable[GraphVariable], capacities: Mapping[str, int]
) -> dict[str, OverlaidTable]:
    """Add an overlay for each of `variables` that is in `capacities`; return the overlays by node.

    The nodes are those of the handles. `capacities` has, by node, the number of changed rows that fit; a key
    that is not of `variables` is ignored. `MANY` tables and more with rows of one shape and dtype share an
    overlay, except tables that are restored from one tensor.
    """
    overlaid = [variable for variable in variables if variable.node in capacities]
    names = Counter(variable.served_name for variable in overlaid)
    found: dict[str, OverlaidTable] = {}
    for shared in _alike([v for v in overlaid if names[v.served_name] == 1], capacities):
        name, (first, *_) = f"joined_{len(found)}", shared
        total, room = sum(v.shape[0] for v in shared), sum(capacities[v.node] for v in shared)
        overlay = OverlayNodes.add(editor, name, first.dtype, (total, *first.shape[1:]), room)
        firsts = accumulate((v.shape[0] for v in shared), initial=0)
        found |= {v.node: OverlaidTable(overlay, n) for v, n in zip(shared, firsts, strict=False)}
    for each in overlaid:
        if each.node not in found:
            nodes = OverlayNodes.add(editor, each.node, each.dtype, each.shape, capacities[each.node])
            found[each.node] = OverlaidTable(nodes)
    return found


def _alike(
    variables: Iterable[GraphVariable], capacities: Mapping[str, int]
) -> Iterator[list[GraphVariable]]:
    """Yield lists of at least `MANY` tables with rows of one shape and dtype, which are to share an overlay.

    Tables of which there are fewer are left out. A list has at most as many as fit into `MOST_PLACES`.
    `capacities` are by node of the handle.
    """
    kinds: dict[object, list[list[GraphVariable]]] = {}
    for each in variables:
        sets = kinds.setdefault((each.dtype, each.shape[1:]), [[]])
        size = sum(max(v.shape[0], 2 * capacities[v.node] + 1) for v in (*sets[-1], each))
        if size > MOST_PLACES:
            sets.append([])
        sets[-1].append(each)
    yield from (each for sets in kinds.values() for each in sets if len(each) >= MANY)
