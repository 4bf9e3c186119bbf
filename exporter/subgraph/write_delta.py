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

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import astuple

from exporter.delta.format import ChangeKind, Schema, ServedVariable
from exporter.late_names import tf
from exporter.subgraph.overlay import Overlay, Places
from exporter.subgraph.read_delta import DeltaForm, ReadDelta
from exporter.subgraph.state import SETTLED, Tensor, UpdateState, assign, sleep

CHUNK_ROWS = 4096
"""Rows written under one lock of a table, for which lookups wait: about a millisecond for 64 floats a row."""

_LONGEST_QUIET_SECONDS = 30.0  # that an update waits, if readers asked for more or the clock was set back

_AT_ONCE = 4  # scatters at the same time: a model with fewer tables than this has them cut into parts


DeltaPlaces: TypeAlias = dict[tuple[str, int], Places]
"""The places of a delta's rows in overlays, by the table's name and the number of its handle."""


class JoinedRows(Struct, frozen=True):
    """The rows of a variable that is part of a joined one: the handle of that, and the first row in it."""

    handle: Tensor
    first: int


class UpdateTarget(Struct, frozen=True):
    """The variables into which a delta is written: handles by the names of the schema.

    A name has several handles if several variables of the graph are restored from one tensor. The handle of a
    mapped table comes with its overlay, the handle of a joined variable with its first row.
    """

    schema: Schema
    handles: Mapping[str, Sequence[Tensor | Overlay | JoinedRows]]

    @property
    def form(self) -> DeltaForm:
        """The arrangement of a delta that is written here: rows of joined variables together."""
        return DeltaForm(self.schema, self._own, tuple(parts for _, parts in self._joined))

    @property
    def _own(self) -> tuple[ServedVariable, ...]:
        """The variables with a tensor that is written separately."""
        handles = self.handles
        is_joined = {name: all(isinstance(each, JoinedRows) for each in handles[name]) for name in handles}
        return tuple(v for v in self.schema.variables if not (handles[v.name] and is_joined[v.name]))

    @property
    def _joined(self) -> list[tuple[Tensor, tuple[tuple[ServedVariable, int], ...]]]:
        """The handle of each joined variable, with its parts: a variable, and its first row there."""
        found: dict[Any, list[tuple[ServedVariable, int]]] = {}
        for variable in self.schema.variables:
            for handle in self.handles[variable.name]:
                if isinstance(handle, JoinedRows):
                    found.setdefault(handle.handle.ref(), []).append((variable, handle.first))
        return [(handle.deref(), tuple(parts)) for handle, parts in found.items()]

    def places(self, delta: ReadDelta) -> DeltaPlaces:
        """Add nodes that choose places for a delta's rows in overlays.

        Returns the places by (table, number of its handle). They are places for no rows if the delta is
        refused, as its ids may be invalid.
        """
        # Slots are read once, before anything is written: the check for room uses the same places.
        overlays = {
            (name, number): handle
            for name, handles in self.handles.items()
            for number, handle in enumerate(handles)
            if isinstance(handle, Overlay)
        }
        if not overlays:
            return {}

        def place() -> list[Tensor]:
            # Inside the branch: a refused delta has no tensors, and to take them would fail the call.
            own, _ = self.form.take(delta.tensors)
            changed = {variable.name: its_tensors[0] for variable, its_tensors in own.items()}
            chosen = (overlay.place(changed[name]) for (name, _), overlay in overlays.items())
            return [part for places in chosen for part in astuple(places)]

        def nowhere() -> list[Tensor]:
            return [*astuple(Places.nowhere())] * len(overlays)

        parts = iter(tf.cond(tf.equal(delta.refusal, ""), place, nowhere))
        return {key: Places(*islice(parts, len(Places.__struct_fields__))) for key in overlays}

    def full_overlay(self, places: DeltaPlaces) -> Tensor:
        """The name of the first table whose overlay has no room for a delta's rows, string []; or empty."""
        name = tf.constant("")
        for (table, number), found in reversed(places.items()):
            overlay = self.handles[table][number]
            assert isinstance(overlay, Overlay)
            name = tf.where(overlay.is_full(found), table, name)
        return name

    def writes(self, delta: ReadDelta, places: DeltaPlaces) -> Writes:
        """List the writes that a delta needs, given its `places`; variables without elements need none."""
        found, joined = self.form.take(delta.tensors)
        tensors = [tensor for its_tensors in (*found.values(), *joined) for tensor in its_tensors]
        writes = Writes(tensors, [], [], [], [], [], [], [], [])
        flags = tf.unstack(delta.changed)  # one node, where an index takes three for each variable
        changed = dict(zip(self.schema.variables, flags, strict=True))
        for (handle, _), (ids, rows) in zip(self._joined, joined, strict=True):
            writes.tables.append((handle, ids, rows))
        for variable, its_tensors in found.items():
            # Lookup tables follow below; scatter kernels refuse rows of no elements.
            if variable.contents is not None or 0 in variable.shape:
                continue
            for number, handle in enumerate(self.handles[variable.name]):
                if isinstance(handle, Overlay):
                    found_at = places[variable.name, number]
                    writes.overlaid.append((handle.rows, found_at.rows, its_tensors[1]))
                    writes.cleared.append((handle, found_at.pages, found_at.begins))
                    writes.slots.append((handle.slots, found_at.at, found_at.slots))
                    if handle.pages is not None:
                        writes.pages.append((handle.pages, found_at.pages, found_at.begins))
                    any_used = found_at.used[0] > 0
                    writes.used.extend([(handle.used, found_at.used), (handle.changed, any_used)])
                elif isinstance(handle, JoinedRows):
                    continue  # written with the other parts, above
                elif variable.kind is ChangeKind.TABLE:
                    writes.tables.append((handle, *its_tensors))
                else:
                    writes.dense.append((handle, changed[variable], *its_tensors))
        for keys, values in self.schema.lookups:
            for handle in self.handles[keys.name]:
                writes.lookups.append((handle, changed[keys], *found[keys], *found[values]))
        return writes


class Writes(Struct, frozen=True):
    """A delta's `tensors`, and the writes that it needs, one for each handle.

    `tables` are scattered (handle, ids, rows), `dense` variables assigned (handle, whether it changed,
    value), the entries of `lookups` replaced (handle, whether they changed, keys, values).

    For overlays, first the `overlaid` rows are scattered (handle, places, rows), and the slots of some pages
    `cleared` (overlay, pages, contents); then the `slots` that point to rows (handle, at, places) and the
    `pages` that point to slots (handle, pages, contents). Last, the amounts in `used` are assigned, and
    whether any is (handle, value). So a pointer always points to valid content; and an update that dies loses
    no place for good:
    `Overlay.place` of the repairing update reads slots and pages, too.
    """

    tensors: Sequence[Tensor]
    tables: list[tuple[Tensor, Tensor, Tensor]]
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
    """Add the writes of all tensors while the sequence is odd; return the last operation, for others to wait
    for.
    """
    # `start` and `end` are the values of `position` during the writes and after them, int64 [3].
    writes = target.writes(delta, places)
    # Readers wait while the sequence is odd. So everything else is done before it becomes odd: the delta was
    # read and checked, values are chosen and cut here, and quiet is granted. Only writes are left.
    tables, slots = map(_in_parts, (writes.tables, writes.slots))
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
    """Add a loop that waits for the quiet that readers ask for; return the time at its end."""

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


def _in_parts(tables: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Cut the rows of a few tables into parts, to be written at the same time; many tables stay whole."""
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
    """Add the writes of all tensors outside the sequence, tables in chunks; return the last operation."""
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
    with tf.control_dependencies(written):
        written += [assign(handle, used) for handle, used in writes.used]
    # The sequence is odd here only if an earlier snapshot died. These writes have repaired its state, so the
    # sequence becomes even.
    return _settle(state, end, written, sequence + tf.bitwise.bitwise_and(sequence, 1))


def _settle(state: UpdateState, end: Tensor, written: Sequence[Tensor], sequence: Tensor) -> Tensor:
    """Add the assignments of the position, after all writes, and then of the sequence; return the latter."""
    # The position follows the writes: a call that fails in one leaves the target recorded. It precedes the
    # sequence: a reader that finds the sequence even and unchanged has read this position, too.
    with tf.control_dependencies(written):
        moved = assign(state.position, end)
    with tf.control_dependencies([moved]):
        return assign(state.sequence, sequence)


def _value_if(handle: Tensor, changed: Tensor, value: Tensor) -> Tensor:
    """The value to assign: the only one in `value` [1, ...] or, if not `changed`, the variable's own."""
    # The variable's own value is not copied: reading and assigning it share one buffer. The branch chooses
    # the value and the assignment is unconditional: servers with `enable_mlir_graph_optimization` lose the
    # order of an assignment inside a branch. It is made of raw ops, because `tf.cond` makes two
    # functions for each variable, and a server takes seconds to inline them all.
    held = tf.raw_ops.ReadVariableOp(resource=handle, dtype=value.dtype)
    kept = tf.raw_ops.Switch(data=held, pred=changed).output_false
    taken = tf.raw_ops.Switch(data=value, pred=changed).output_true
    return tf.raw_ops.Merge(inputs=[kept, taken[0]]).output


def _import_if(handle: Tensor, changed: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Add the replacement of a lookup table's entries by `keys` and `values` [1, n, ...], if `changed`."""

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
    """Add a loop that writes one chunk of every table per round, then one for slots of overlays."""

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


def position_vector(position: Tensor, step: Tensor, target: Tensor | int = SETTLED) -> Tensor:
    """A value for the position variable, int64 [3]."""
    return tf.stack([position, step, tf.cast(target, tf.int64)])
