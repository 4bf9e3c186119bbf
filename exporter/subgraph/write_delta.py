"""Write a checked delta into the served variables, inside the graph.

*Snapshot*: rows of overlays are written into places to which no slot points. Then the sequence becomes odd,
all other writes run without a loop between them, position and step follow, the sequence becomes even.
TensorFlow cancels a call only at a loop's condition, so a cancelled call does not leave a straight line half
done. *Rows*: tables are written chunk by chunk, outside the sequence, each chunk under the table's exclusive
lock: a response may mix rows of two deltas, but every row that it reads is whole.

Either way the update first records its target in the third field of `position`. If it dies (the process
survives, a kernel failed), only a delta that ends at or beyond the target overwrites everything that it may
have written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import islice, pairwise
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import astuple

from exporter.delta.format import ChangeKind, Schema, ServedVariable
from exporter.late_names import tf
from exporter.subgraph.overlay import MANY, OverlaidTable, Overlay, OverlayNodes, Places
from exporter.subgraph.read_delta import DeltaForm, ReadDelta
from exporter.subgraph.state import SETTLED, Tensor, UpdateState, assign, sleep
from exporter.wire.dtypes import DType

CHUNK_ROWS = 4096
"""Rows written under one lock of a table, for which lookups wait: about a millisecond for 64 floats a row."""

_LONGEST_QUIET_SECONDS = 30.0  # that an update waits, if readers asked for more or the clock was set back

_AT_ONCE = 4  # scatters at the same time: a model with fewer tables than this has them cut into parts


DeltaPlaces: TypeAlias = dict[OverlayNodes, Places]
"""The places of a delta's rows in overlays."""


class JoinedRows(Struct, frozen=True):
    """A part of a joined variable: the joined variable's `handle`, and the part's `first` row in it."""

    handle: Tensor
    first: int


class MappedRows(Struct, frozen=True):
    """A mapped table: its handle, its overlay, and the number of its first row in the overlay."""

    handle: Tensor
    overlay: Overlay
    first: int


Handle: TypeAlias = "Tensor | JoinedRows | MappedRows"


class TableGroup(Struct, frozen=True):
    """Tables whose rows are written together, each with the number that is added to its row numbers.

    `home` is the place (the index among all handles) of the handle of the joined variable whose parts they
    are; or the overlay that they share; or, for separate variables, the place of each table's handle.
    """

    parts: tuple[tuple[ServedVariable, int], ...]
    home: int | OverlayNodes | tuple[int, ...]


class HandleLayout(Struct, frozen=True, dict=True):
    """The order of the handles that a function takes, independent of the log, so that bases share it.

    `owners` are the variables that are written, once for each of their handles: several if variables of the
    graph are restored from one tensor. `numbers` are the places of these handles, their indices among all:
    variables inside one joined variable share a place. `overlaid` has each owner's overlay, or None; `joined`
    the first row of a variable that is part of another, or None. The handles of overlays come last. The
    function takes them as vectors, one for each device; `vectors` are the places of what is in each. The
    handle at a place in `apart` is passed by itself, not in a vector.
    """

    schema: Schema
    owners: tuple[ServedVariable, ...]
    numbers: tuple[int, ...]
    overlaid: tuple[OverlaidTable | None, ...]
    joined: tuple[int | None, ...]
    vectors: tuple[tuple[int, ...], ...]
    apart: frozenset[int] = frozenset()

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Return, by the place of each handle, the index of its vector and its index in that vector."""
        vectors = enumerate(self.vectors)
        return {place: (vector, n) for vector, each in vectors for n, place in enumerate(each)}

    @cached_property
    def overlays(self) -> dict[OverlayNodes, tuple[ServedVariable, ...]]:
        """Return the overlays, each with the variables whose rows it holds, in the order of `owners`."""
        found: dict[OverlayNodes, tuple[ServedVariable, ...]] = {}
        for owner, table in zip(self.owners, self.overlaid, strict=True):
            if table is not None:
                found[table.overlay] = (*found.get(table.overlay, ()), owner)
        return found

    @cached_property
    def groups(self) -> list[TableGroup]:
        """Return the groups of tables that are written together.

        A group has the parts of one variable, the tables of one overlay, or at least `MANY` tables that are
        alike. Tables are alike if they have rows of one shape and dtype and are on one device.
        """
        parts: dict[Any, list[tuple[ServedVariable, int]]] = {}
        alike: dict[Any, dict[ServedVariable, int]] = {}
        handles = Counter(self.owners)
        for owner, number, table, first in zip(
            self.owners, self.numbers, self.overlaid, self.joined, strict=True
        ):
            if first is not None:
                parts.setdefault(number, []).append((owner, first))
            elif table is not None and len(self.overlays[table.overlay]) > 1:
                parts.setdefault(table.overlay, []).append((owner, table.first))
            elif table is None and owner.is_table and handles[owner] == 1:
                kind = owner.dtype, owner.element_shape, self.places[number][0]
                alike.setdefault(kind, {})[owner] = number
        # Row numbers of one variable or overlay have to increase.
        groups = [TableGroup((*sorted(each, key=lambda e: e[1]),), home) for home, each in parts.items()]
        many = (each for (_, shape, _), each in alike.items() if len(each) >= MANY and 0 not in shape)
        groups += [TableGroup(tuple((v, 0) for v in each), (*each.values(),)) for each in many]
        return groups

    @cached_property
    def form(self) -> DeltaForm:
        """Return the arrangement of a delta that fits this layout."""
        groups = tuple(group.parts for group in self.groups)
        grouped, handles = Counter(table for parts in groups for table, _ in parts), Counter(self.owners)
        own = (v for v in self.schema.variables if not grouped[v] or handles[v] > grouped[v])
        return DeltaForm(self.schema, tuple(own), groups)

    def handle(self, handles: Sequence[Tensor], index: int) -> Handle:
        """Return the handle of the owner number `index`, given all handles in the order of their places.

        It gets the dtype and shape of its variable, unless that is a lookup table.
        """
        owner, first, table = self.owners[index], self.joined[index], self.overlaid[index]
        handle = handles[self.numbers[index]]
        # Shape inference needs dtype and shape to read a variable; a lookup table is not read so.
        shape = owner.shape if first is None else (None, *owner.shape[1:])
        valued = handle if owner.contents else _with_handle_data(handle, owner.dtype, shape)
        if first is not None:
            return JoinedRows(valued, first)
        return (
            valued if table is None else MappedRows(valued, self.overlay(handles, table.overlay), table.first)
        )

    def overlay(self, handles: Sequence[Tensor], overlay: OverlayNodes) -> Overlay:
        """Return the handles of an overlay, given all handles in the order of their places.

        Each gets the dtype and shape of its variable.
        """
        number = max(self.numbers) + 1
        for other in self.overlays:
            if other == overlay:
                break
            number += len(other.handles)
        kinds = enumerate(overlay.handles.values(), number)
        return Overlay(overlay, *(_with_handle_data(handles[n], *kind) for n, kind in kinds))


def _with_handle_data(handle: Tensor, dtype: DType, shape: tuple[int | None, ...]) -> Tensor:
    """Record the dtype and shape of a variable in its handle, and return the same handle."""
    from tensorflow.python.ops import handle_data_util  # the public API cannot set them

    known = handle_data_util.create_handle_data(tf.TensorShape(shape), tf.as_dtype(int(dtype)))
    handle_data_util.set_handle_data(handle, known)
    return handle


class _Picked(Sequence[Tensor]):
    """All handles of a target in the order of their places; an index adds the nodes that take one out."""

    def __init__(self, target: UpdateTarget) -> None:
        self._target = target

    def __len__(self) -> int:
        return len(self._target.layout.places)

    def __getitem__(self, index: Any) -> Any:
        vector, number = self._target.layout.places[index]
        packed = self._target.packed[vector]
        return packed if index in self._target.layout.apart else tf.gather(packed, number)


class UpdateTarget(Struct, frozen=True):
    """The variables into which a delta is written: the vectors of their handles, and the layout of these."""

    # Vectors, which are taken apart where handles are used. Loops and branches, which are functions, would
    # take each handle as an argument, and a server prepares every argument of every function a dozen times
    # while it loads a version.

    layout: HandleLayout
    packed: Sequence[Tensor]

    @property
    def schema(self) -> Schema:
        """Return the schema that deltas have."""
        return self.layout.schema

    def handle(self, variable: ServedVariable) -> Handle:
        """Add nodes that take a variable's first handle out of its vector, and return it.

        ValueError if deltas do not write the variable.
        """
        return self.layout.handle(_Picked(self), self.layout.owners.index(variable))

    def places(self, delta: ReadDelta) -> DeltaPlaces:
        """Add nodes that choose places for a delta's rows, and return them by overlay; nothing is written.

        The result is empty if there are no overlays. If the delta is refused, they are places for no rows, as
        its ids may be invalid.
        """
        # Slots are read once, before anything is written: the check for room uses the same places.
        overlays = self.layout.overlays
        if not overlays:
            return {}

        def place() -> list[Tensor]:
            # Inside the branch: a refused delta has no tensors, and to take them would fail the call.
            changed = self._overlaid(*self.layout.form.take(delta.tensors))
            handles = self._handles()
            chosen = (self.layout.overlay(handles, each).place(changed[each][0]) for each in overlays)
            return [part for places in chosen for part in astuple(places)]

        def nowhere() -> list[Tensor]:
            return [*astuple(Places.nowhere())] * len(overlays)

        parts = iter(tf.cond(tf.equal(delta.refusal, ""), place, nowhere))
        return {each: Places(*islice(parts, len(Places.__struct_fields__))) for each in overlays}

    def full_overlay(self, places: DeltaPlaces) -> Tensor:
        """Return a text, string [], that names the first table whose overlay lacks room for a delta's rows.

        It is `<name> than its`, or `<name> and <n> others than their` if several tables share the overlay;
        empty if all have room. `places` is the result of `self.places`.
        """
        full = tf.constant("")
        for overlay, (table, *others) in reversed(self.layout.overlays.items()):
            name = f"{table.name} and {len(others)} others than their" if others else f"{table.name} than its"
            full = tf.where(places[overlay].used[0] > overlay.capacity, name, full)
        return full

    def _handles(self) -> list[Tensor]:
        """Add nodes that take all handles out of their vectors; return them in the order of their places."""
        vectors = zip(self.packed, self.layout.vectors, strict=True)
        opened = [
            [vector] if places[0] in self.layout.apart else tf.raw_ops.Unpack(value=vector, num=len(places))
            for vector, places in vectors
        ]
        return [opened[vector][n] for _, (vector, n) in sorted(self.layout.places.items())]

    def _overlaid(
        self, own: Mapping[ServedVariable, Sequence[Tensor]], groups: Sequence[Sequence[Tensor]]
    ) -> dict[OverlayNodes, Sequence[Tensor]]:
        """Return the row numbers and rows that each overlay gets.

        `own` and `groups` are as `DeltaForm.take` returns them. Overlays that several tables share also have
        the number of rows for each table.
        """
        together = {
            group.home: taken
            for group, taken in zip(self.layout.groups, groups, strict=True)
            if isinstance(group.home, OverlayNodes)
        }
        return {
            overlay: together[overlay] if overlay in together else own[tables[0]]
            for overlay, tables in self.layout.overlays.items()
        }

    def writes(self, delta: ReadDelta, places: DeltaPlaces) -> Writes:
        """Add nodes that unpack a delta, and return the writes that it needs; nothing is written yet.

        `places` is the result of `self.places` for this delta. Variables without elements need no writes.
        """
        layout, handles = self.layout, self._handles()
        found, groups = layout.form.take(delta.tensors)
        tensors = [tensor for its_tensors in (*found.values(), *groups) for tensor in its_tensors]
        writes = Writes(tensors, [], [], [], [], [], [], [], [], [])
        flags = tf.unstack(delta.changed)  # one node, where an index takes three for each variable
        changed = dict(zip(self.schema.variables, flags, strict=True))
        for group, (ids, rows, counts) in zip(layout.groups, groups, strict=True):
            if isinstance(group.home, int):
                writes.tables.append((handles[group.home], ids, rows))
            elif isinstance(group.home, tuple):
                writes.alike.append((group.home, [handles[n] for n in group.home], ids, rows, counts))
        for nodes, (_, rows, *_) in self._overlaid(found, groups).items():
            overlay, found_at = layout.overlay(handles, nodes), places[nodes]
            writes.overlaid.append((overlay.rows, found_at.rows, rows))
            writes.cleared.append((overlay, found_at.pages, found_at.begins))
            writes.slots.append((overlay.slots, found_at.at, found_at.slots))
            if overlay.pages is not None:
                writes.pages.append((overlay.pages, found_at.pages, found_at.begins))
            any_used = found_at.used[0] > 0
            writes.used.extend([(overlay.used, found_at.used), (overlay.changed, any_used)])
        by_name: dict[str, list[Handle]] = {variable.name: [] for variable in self.schema.variables}
        for index, owner in enumerate(layout.owners):
            by_name[owner.name].append(layout.handle(handles, index))
        for variable, its_tensors in found.items():
            # Lookup tables follow below; scatter kernels refuse rows of no elements.
            if variable.contents is not None or 0 in variable.shape:
                continue
            for handle in by_name[variable.name]:
                if isinstance(handle, (JoinedRows, MappedRows)):
                    continue  # written above
                if variable.kind is ChangeKind.TABLE:
                    writes.tables.append((handle, *its_tensors))
                else:
                    writes.dense.append((handle, changed[variable], *its_tensors))
        for keys, values in self.schema.lookups:
            for handle in by_name[keys.name]:
                writes.lookups.append((handle, changed[keys], *found[keys], *found[values]))
        return writes


class Writes(Struct, frozen=True):
    """A delta's `tensors`, and the writes that it needs, one for each handle.

    `tables` are scattered (handle, ids, rows), and so are the groups of `alike` ones (places, handles, ids,
    rows, the number for each), `dense` variables assigned (handle, whether it changed, value), the entries of
    `lookups` replaced (handle, whether they changed, keys, values).

    For overlays, first the `overlaid` rows are scattered (handle, places, rows), and the slots of some pages
    `cleared` (overlay, pages, contents); then the `slots` that point to rows (handle, at, places) and the
    `pages` that point to slots (handle, pages, contents). Last, the amounts in `used` are assigned, and
    whether any is (handle, value). So a pointer always points to valid content; and an update that dies loses
    no place for good: `Overlay.place` of the repairing update reads slots and pages, too.
    """

    tensors: Sequence[Tensor]
    tables: list[tuple[Tensor, Tensor, Tensor]]
    alike: list[tuple[tuple[int, ...], list[Tensor], Tensor, Tensor, Tensor]]
    dense: list[tuple[Tensor, Tensor, Tensor]]
    lookups: list[tuple[Tensor, Tensor, Tensor, Tensor]]
    overlaid: list[tuple[Tensor, Tensor, Tensor]]
    cleared: list[tuple[Overlay, Tensor, Tensor]]
    slots: list[tuple[Tensor, Tensor, Tensor]]
    pages: list[tuple[Tensor, Tensor, Tensor]]
    used: list[tuple[Tensor, Tensor]]


def write_snapshot(
    state: UpdateState,
    target: UpdateTarget,
    delta: ReadDelta,
    places: DeltaPlaces,
    start: Tensor,
    end: Tensor,
) -> Tensor:
    """Add the writes of all tensors while the sequence is odd; return the last operation.

    `places` is the result of `target.places` for this delta. `start` and `end`, int64 [3], are the values of
    `position` during the writes and after them. Before the sequence becomes odd, it waits for the quiet that
    readers ask for, at most 30 seconds.
    """
    writes = target.writes(delta, places)
    # Readers wait while the sequence is odd. So everything else is done before it becomes odd: the delta was
    # read and checked, values are chosen and cut here, and quiet is granted. Only writes are left.
    tables, slots = _in_parts([*writes.tables, *_apart(writes)]), _in_parts(writes.slots)
    dense = [(handle, _value_if(handle, changed, value)) for handle, changed, value in writes.dense]
    scattered = (*tables, *writes.overlaid, *writes.cleared, *slots, *writes.pages)
    chosen = (value for _, *values in (*scattered, *dense, *writes.used) for value in values)
    prepared = [*writes.tensors, start, end, *chosen]
    # Rows of overlays, too: no slot points to their places (`exporter.subgraph.overlay`). As nobody waits for
    # these, one table follows another: at once they would occupy all threads of a server's pool, on which
    # predictions run, for some 20 ms on two cores.
    rows: list[Tensor] = []
    for write in writes.overlaid:
        with tf.control_dependencies([*prepared, *rows[-1:]]):
            rows += _scatter([write])
    with tf.control_dependencies(prepared):
        rows += [overlay.clear(*led) for overlay, *led in writes.cleared]
    with tf.control_dependencies([*prepared, *rows]):
        granted = _grant_quiet(state)
    with tf.control_dependencies([granted]):
        # `since` before odd: a reader that finds the sequence odd takes `since` as the beginning, and would
        # lose patience at once with an old value. The target before the first write: see the module.
        noted = [assign(state.since, tf.timestamp()), assign(state.position, start)]
        # `| 1`, not `+ 1`: if an update died while the sequence was odd, `+ 1` would make it even here.
        odd = tf.bitwise.bitwise_or(state.read("sequence"), 1)
    with tf.control_dependencies(noted):
        begun = assign(state.sequence, odd)
    with tf.control_dependencies([begun]):
        # In any order and at once: the sequence keeps readers from seeing them half done. This kernel copies
        # under the variable's shared lock (tensorflow/core/kernels/resource_variable_ops.cc,
        # `ResourceScatterUpdateOp`): lookups go on, and parts of one table are written at the same time.
        written = _scatter(tables)
        written += [assign(handle, value) for handle, value in dense]
        written += [_import_if(*write) for write in writes.lookups]
        led = _scatter([*slots, *writes.pages])
    with tf.control_dependencies(led):
        written += [assign(handle, used) for handle, used in writes.used]
    return _settle(state, end, [*written, *rows, *led], odd + 1)


def _scatter(tables: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    return [
        tf.raw_ops.ResourceScatterUpdate(resource=handle, indices=ids, updates=rows)
        for handle, ids, rows in tables
    ]


def _grant_quiet(state: UpdateState) -> Tensor:
    """Add a wait for the quiet that readers ask for, at most 30 seconds; return the time at its end.

    The time is in seconds since 1970.
    """

    # Later requests are granted by the next update: readers delay an update once, but never block it. This is
    # the only loop of a snapshot, and it comes before all writes: a call that is cancelled in it has written
    # nothing.
    def wait(_: Tensor) -> Tensor:
        with tf.control_dependencies([sleep()]):
            return tf.timestamp()

    now = tf.timestamp()
    until = tf.minimum(state.read("quiet"), now + _LONGEST_QUIET_SECONDS)
    (granted,) = tf.while_loop(lambda now: now < until, wait, [now], parallel_iterations=1)
    return granted


def _apart(writes: Writes) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the tables of all groups of `alike` ones separately: handle, ids, rows."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for places, handles, ids, rows, counts in writes.alike:
        each = (tf.split(tensor, counts, num=len(places)) for tensor in (ids, rows))
        found += zip(handles, *each, strict=True)
    return found


def _in_parts(tables: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the tables' rows cut into parts, to be written at the same time: handle, ids, rows of each.

    More than two tables stay whole.
    """
    # The kernel copies row by row in one thread (source: tensorflow/core/kernels/scatter_functor.h).
    count = _AT_ONCE // len(tables) if tables else 1
    if count < 2:
        return list(tables)
    parts = []
    for handle, ids, rows in tables:
        size = tf.shape(ids)[0]
        edges = [size * n // count for n in range(count + 1)]
        for begin, end in pairwise(edges):
            parts.append((handle, ids[begin:end], rows[begin:end]))
    return parts


def write_rows(
    state: UpdateState,
    target: UpdateTarget,
    delta: ReadDelta,
    places: DeltaPlaces,
    start: Tensor,
    end: Tensor,
) -> Tensor:
    """Add the writes of all tensors outside the sequence, tables in chunks; return the last operation.

    `places` is the result of `target.places` for this delta. `start` and `end`, int64 [3], are the values of
    `position` during the writes and after them.
    """
    writes = target.writes(delta, places)
    placed = [at for _, at, *_ in (*writes.overlaid, *writes.slots, *writes.pages)]
    with tf.control_dependencies([*writes.tensors, start, end, *placed, *(used for _, used in writes.used)]):
        sequence = state.read("sequence")
        noted = assign(state.position, start)
    # The target is recorded before the first write: see the module.
    with tf.control_dependencies([noted]):
        written = [
            assign(handle, _value_if(handle, changed, value)) for handle, changed, value in writes.dense
        ]
        written += [_import_if(*write) for write in writes.lookups]
        if writes.tables or writes.overlaid:
            written.append(_scatter_chunks(target, delta, places))
        for at, _, *changed in writes.alike:
            written.append(_scatter_one_by_one(target, at, *changed))
    with tf.control_dependencies(written):
        written += [assign(handle, used) for handle, used in writes.used]
    # The sequence is odd here only if an earlier snapshot died. These writes have repaired its state, so the
    # sequence becomes even.
    return _settle(state, end, written, sequence + tf.bitwise.bitwise_and(sequence, 1))


def _settle(state: UpdateState, end: Tensor, written: Sequence[Tensor], sequence: Tensor) -> Tensor:
    """Add the assignments of the position, after all writes, and then of the sequence; return the last.

    `end`, int64 [3], and `sequence`, int64 [], are the new values.
    """
    # The position follows the writes: a call that fails in one leaves the target recorded. It precedes the
    # sequence: a reader that finds the sequence even and unchanged has read this position, too.
    with tf.control_dependencies(written):
        moved = assign(state.position, end)
    with tf.control_dependencies([moved]):
        return assign(state.sequence, sequence)


def _value_if(handle: Tensor, changed: Tensor, value: Tensor) -> Tensor:
    """Return the value to assign: `value` without its first axis if `changed`, else the variable's own.

    `changed` is bool []; if it is true, `value` is [1, ...].
    """
    # The variable's own value is not copied: reading and assigning it share one buffer. The branch chooses
    # the value and the assignment is unconditional: servers with `enable_mlir_graph_optimization` lose the
    # order of an assignment inside a branch. It is made of raw ops, because `tf.cond` makes two
    # functions for each variable, and a server takes seconds to inline them all.
    held = tf.raw_ops.ReadVariableOp(resource=handle, dtype=value.dtype)
    kept = tf.raw_ops.Switch(data=held, pred=changed).output_false
    taken = tf.raw_ops.Switch(data=value, pred=changed).output_true
    return tf.raw_ops.Merge(inputs=[kept, taken[0]]).output


def _import_if(handle: Tensor, changed: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Add the replacement of a lookup table's entries by `keys` and `values`, if `changed`.

    Both are [1, n, ...], `changed` is bool []. Return a tensor, equal to `changed`, that depends on the
    replacement.
    """

    # The kernels clear and fill a table under its lock: a lookup sees all old entries or all new ones
    # (source: tensorflow/core/kernels/lookup_table_op.cc, `ImportValues`).
    def replace() -> Tensor:
        # Shape inference takes keys for scalars, but tables that store all their buckets hold keys of shape
        # [1]. So it gets tensors of unknown shape.
        whole = [
            tf.raw_ops.PlaceholderWithDefault(input=half[0], shape=tf.TensorShape(None))
            for half in (keys, values)
        ]
        imported = tf.raw_ops.LookupTableImportV2(table_handle=handle, keys=whole[0], values=whole[1])
        with tf.control_dependencies([imported]):
            return tf.identity(changed)

    return tf.cond(changed, replace, lambda: tf.identity(changed))


def _scatter_chunks(target: UpdateTarget, delta: ReadDelta, places: DeltaPlaces) -> Tensor:
    """Add a loop that writes one chunk of every table per round, then one for slots and pages of overlays.

    Returns a number that depends on all writes. `places` is the result of `target.places` for this delta.
    Groups of `alike` tables are left out.
    """

    # The loop takes the delta as one tensor and holds a few raw ops for each table: a server prepares all of
    # them before its first update, which with a hundred tables takes noticeable time for each node.
    def write(start: Tensor, *, leads: bool) -> Tensor:
        end = start + CHUNK_ROWS
        rows = {"begin": start[tf.newaxis], "end": end[tf.newaxis], "strides": tf.constant([1])}
        columns = {key: tf.concat([edge, [int(key == "strides")]], 0) for key, edge in rows.items()}
        writes = target.writes(delta, places)
        # With `use_locking` under the variable's exclusive lock, so that a lookup sees a row whole;
        # `ResourceScatterUpdate` would write beside lookups. 100,000 rows of 64 floats: 34 against 9 ms.
        scatters = [
            tf.raw_ops.ResourceScatterNdUpdate(
                ref=handle,
                indices=tf.raw_ops.StridedSlice(input=ids, new_axis_mask=0b10, **columns),
                updates=tf.raw_ops.StridedSlice(input=values, **rows),
                use_locking=True,
            )
            for handle, ids, values in (
                (*writes.slots, *writes.pages) if leads else (*writes.tables, *writes.overlaid)
            )
        ]
        # Nobody reads these slots yet, so no lookup waits for them.
        for overlay, *led in () if leads else writes.cleared:
            scatters.append(overlay.clear(*(tf.raw_ops.StridedSlice(input=each, **rows) for each in led)))
        with tf.control_dependencies(scatters):
            return tf.identity(end)

    def run(first: Tensor, *, leads: bool) -> Tensor:
        write_next = partial(write, leads=leads)
        (end,) = tf.while_loop(lambda start: start < rows, write_next, [first], parallel_iterations=1)
        return end

    writes = target.writes(delta, places)
    lengths = tf.raw_ops.ShapeN(input=[ids for _, ids, _ in (*writes.tables, *writes.overlaid)])
    rows = tf.reduce_max(tf.concat(lengths, 0))
    end = run(tf.constant(0), leads=False)
    # A loop of its own, which begins with the end of the first. In one loop slots would be ordered behind
    # rows by control edges alone, and servers with `enable_mlir_graph_optimization` lose those: places were
    # read before their rows were written, and so would slots be before they were cleared.
    return run(tf.minimum(end, 0), leads=True) if writes.slots else end


def _scatter_one_by_one(
    target: UpdateTarget, places: Sequence[int], ids: Tensor, rows: Tensor, counts: Tensor
) -> Tensor:
    """Add a loop that writes one chunk of one table per round; return a number that depends on all writes.

    `places` are the places of the tables' handles; `ids` and `rows` have all tables, one after the other, and
    `counts` the number of rows for each.
    """
    # The same few nodes for any number of tables.
    ends = tf.cumsum(counts)
    (vector,) = {target.layout.places[place][0] for place in places}
    numbers = [target.layout.places[place][1] for place in places]

    def write(number: Tensor, start: Tensor) -> tuple[Tensor, ...]:
        end = tf.minimum(start + CHUNK_ROWS, ends[number])
        handle = tf.gather(target.packed[vector], tf.gather(tf.constant(numbers), number))
        dtype = DType(rows.dtype.as_datatype_enum)
        scattered = tf.raw_ops.ResourceScatterNdUpdate(
            ref=_with_handle_data(handle, dtype, (None, *rows.shape[1:])),
            indices=ids[start:end, tf.newaxis],
            updates=rows[start:end],
            use_locking=True,
        )
        with tf.control_dependencies([scattered]):
            return number + tf.cast(tf.equal(end, ends[number]), tf.int32), tf.identity(end)

    number, _ = tf.while_loop(
        lambda number, _: number < len(places),
        write,
        [tf.constant(0), tf.zeros([], tf.int64)],
        parallel_iterations=1,
    )
    return number


def position_vector(position: Tensor, step: Tensor, target: Tensor | int = SETTLED) -> Tensor:
    """Return a value for the position variable, int64 [3]: position, step and target.

    The target is that of an unfinished update, -1 if none is under way.
    """
    return tf.stack([position, step, tf.cast(target, tf.int64)])
