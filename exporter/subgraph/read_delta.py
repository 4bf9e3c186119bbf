"""Read a delta inside the graph, check it, and unpack its rows, before any variable is changed.

Files are read through `Dataset.from_tensors(...).map(...).ignore_errors()`, the only way in which a graph of
stock operations survives an error: a damaged, missing or hostile file gives a fallback, which no delta holds.
`RestoreV2` verifies the checksum of each tensor. Everything else is checked here, since a kernel that meets
an index out of range in the middle of a scatter has written the rows before it.

A delta's flags say in which form its rows are stored: exact, or packed in one of two ways
(`exporter.delta.format`). The graph holds a branch for each form, so that a base takes every delta of its
log, and an exact delta costs what it would cost without the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from msgspec import Struct

from exporter.delta.format import (
    FORMAT_VERSION,
    LINEAGE_KEY,
    PACKINGS,
    POSITION_KEY,
    SCHEMA_KEY,
    ChangeKind,
    Flag,
    Schema,
    ServedVariable,
)
from exporter.delta.packing import LARGEST_SCALE, SMALLEST_SCALE
from exporter.late_names import tf
from exporter.options import DeltaDtype
from exporter.storage.layout import DELTA_NAME
from exporter.subgraph.state import Tensor
from exporter.wire.dtypes import Array, DType
from exporter.wire.update_status import UpdateStatus


class Expected(Struct, frozen=True):
    """The demands of a base on a delta: lineage, string [], and schema; with `finite` no NaN or infinity."""

    lineage: Tensor
    schema: Schema
    finite: bool


class ReadDelta(Struct, frozen=True):
    """A delta in memory. `refusal` is empty if it may be applied, else `<word>: <name> <why>`.

    `changed`, bool [n], is true for each variable that the delta holds. `rows` is the number of rows of all
    tables, `entries` that of all lookup tables. `tensors` holds those of `Schema.keys` as one (`tensors_in`),
    or none if the delta is refused.
    """

    refusal: Tensor
    step: Tensor
    rows: Tensor
    changed: Tensor
    entries: Tensor
    tensors: Tensor


class DeltaRefusal(Struct, frozen=True):
    """A reason to refuse a delta if `fails`, bool []; `word` and `text` stand before and after its name."""

    fails: Tensor
    word: UpdateStatus
    text: Tensor | str


def read_delta(directory: Tensor, name: Tensor, position: Tensor, expected: Expected) -> ReadDelta:
    """Add nodes that read the delta `<directory>/<name>` and check it for a state at `position`.

    Without a name nothing is read, and the refusal says that it is damaged.
    """
    prefix = tf.strings.join([directory, name, DELTA_NAME], separator="/")
    prefix = tf.where(tf.equal(name, ""), "", prefix)  # which cannot be read, and asks no store
    fields, lineage, digest = _read_header(prefix)
    step, flags, rows = fields[3], fields[4], fields[5]
    refusal = _first_of(name, _checks_of_header(name, position, fields, lineage, digest, expected))
    # The body of a delta whose header is refused is not read: reading the path "" fails at once.
    readable = tf.where(tf.equal(refusal, ""), prefix, "")
    fault, changed, entries, tensors = _read_body(readable, name, flags, rows, expected)
    refusal = tf.where(tf.equal(refusal, ""), fault, refusal)
    return ReadDelta(refusal, step, rows, changed, entries, tensors)


def _read_header(prefix: Tensor) -> Sequence[Tensor]:
    """Read the fields int64 [6], lineage and schema digest; zeros and empty strings if that fails."""

    def read(path: Tensor) -> tuple[Tensor, ...]:
        fields, lineage, digest = restore(
            path, (POSITION_KEY, LINEAGE_KEY, SCHEMA_KEY), (DType.INT64, DType.STRING, DType.STRING)
        )
        return tf.ensure_shape(fields, [6]), tf.ensure_shape(lineage, []), tf.ensure_shape(digest, [])

    return attempt(prefix, read, (tf.zeros([6], tf.int64), tf.constant(""), tf.constant("")))


def _read_body(
    prefix: Tensor, name: Tensor, flags: Tensor, rows: Tensor, expected: Expected
) -> Sequence[Tensor]:
    """Read and check the rest: the refusal, `changed`, the number of entries, the schema's tensors as one."""
    schema = expected.schema

    # The checks run in the function that reads, apart from the writes: grappler's shape inference carries the
    # shape that a *later* operation demands back to where it is compared, and replaces the comparison by
    # true.

    def read(path: Tensor, of: Tensor, forms: Tensor, count: Tensor) -> tuple[Tensor, ...]:
        fault, restored = restore_rows(path, forms, schema)
        tensors = tensors_in(restored, schema)
        lengths = Lengths.of(schema, tensors)
        found = dict(by_variable(schema, tensors))
        entries = [tf.size(found[keys][0], tf.int64) for keys, _ in schema.lookups]
        checks = [DeltaRefusal(tf.not_equal(fault, ""), UpdateStatus.ROWS, fault)]
        checks += _checks_of_rows(count, tensors, schema, lengths)
        if expected.finite:
            checks += _checks_of_values(tensors, schema)
        entries_count = sum(entries, tf.zeros([], tf.int64))
        return _first_of(of, checks), lengths.values > 0, entries_count, restored

    damaged = tf.strings.join([f"{UpdateStatus.DAMAGED}: ", name, " cannot be read"])
    unchanged = tf.zeros([len(schema.variables)], tf.bool)
    fallback = damaged, unchanged, tf.zeros([], tf.int64), tf.raw_ops.OptionalNone()
    return attempt((prefix, name, flags, rows), read, fallback)


def _first_of(name: Tensor, checks: Sequence[DeltaRefusal]) -> Tensor:
    """`<word>: <name> <text>` of the first check that fails, or an empty string."""
    fails = tf.stack([check.fails for check in checks])
    first = tf.argmax(tf.cast(fails, tf.int32))
    word = tf.gather(tf.constant([check.word.value for check in checks]), first)
    text = tf.gather(tf.stack([check.text for check in checks]), first)
    return tf.where(tf.reduce_any(fails), tf.strings.join([word, ": ", name, " ", text]), "")


def attempt(
    argument: Tensor | tuple[Tensor, ...],
    action: Callable[..., tuple[Tensor, ...]],
    fallback: Sequence[Tensor],
    *,
    condition: Callable[..., Tensor] | None = None,
) -> Sequence[Tensor]:
    """Add nodes that give the result of `action` on `argument`, or `fallback` if anything in it fails.

    Where `condition`, if one is given, is false of the argument, the action is not tried.
    """
    arguments = tf.data.Dataset.from_tensors(argument)
    chosen = arguments if condition is None else arguments.filter(condition)
    tried = chosen.map(action).ignore_errors()
    either = tried.concatenate(tf.data.Dataset.from_tensors(tuple(fallback))).take(1)
    found: Sequence[Tensor] = either.get_single_element()
    return found


def _checks_of_header(
    name: Tensor, position: Tensor, fields: Tensor, lineage: Tensor, digest: Tensor, expected: Expected
) -> list[DeltaRefusal]:
    version, start, end, flags = fields[0], fields[1], fields[2], fields[4]
    leads = tf.strings.join(
        [tf.strings.as_string(p, width=20, fill="0") for p in (start, end)], separator="-"
    )
    only_from = tf.not_equal(tf.bitwise.bitwise_and(flags, int(Flag.ONLY_FROM)), 0)
    both = sum(PACKINGS.values())
    unknown = tf.not_equal(tf.bitwise.bitwise_and(flags, ~sum(Flag)), 0)
    unknown |= tf.equal(tf.bitwise.bitwise_and(flags, both), both)
    numbers = tf.strings.as_string(version), tf.strings.as_string(flags)
    form = tf.strings.join(["has format ", numbers[0], ", flags ", numbers[1]])
    return [
        DeltaRefusal(tf.equal(version, 0), UpdateStatus.DAMAGED, "cannot be read"),
        DeltaRefusal(tf.not_equal(version, FORMAT_VERSION) | unknown, UpdateStatus.FORMAT, form),
        DeltaRefusal(tf.not_equal(lineage, expected.lineage), UpdateStatus.LINEAGE, "belongs to another log"),
        DeltaRefusal(
            tf.not_equal(digest, expected.schema.digest), UpdateStatus.SCHEMA, "was made for other variables"
        ),
        DeltaRefusal(
            tf.not_equal(leads, name), UpdateStatus.RANGE, tf.strings.join(["says that it leads ", leads])
        ),
        DeltaRefusal(
            only_from & tf.not_equal(start, position),
            UpdateStatus.ONLY_FROM,
            "fits its first position alone",
        ),
    ]


class Lengths(Struct, frozen=True):
    """The lengths of each table's ids and of each variable's values (dense: 0 or 1) in a delta, int64."""

    ids: Tensor
    values: Tensor

    @classmethod
    def of(cls, schema: Schema, tensors: Sequence[Tensor]) -> Lengths:
        """Add a few nodes, however many tensors of `Schema.keys` there are, that give their lengths."""
        shapes: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            own = [n for n, tensor in enumerate(tensors) if tensor.dtype == dtype]
            found = tf.raw_ops.ShapeN(input=[tensors[n] for n in own], out_type=tf.int64)
            shapes |= dict(zip(own, found, strict=True))
        ranks = [tensor.shape.rank for tensor in tensors]
        starts = np.cumsum([0, *ranks])[:-1]
        ids, values = [], []
        numbers = iter(range(len(tensors)))
        for variable in schema.variables:
            *ids_of, values_of = [next(numbers) for _ in variable.keys]
            ids += ids_of
            values.append(values_of)
        every = tf.concat([shapes[n] for n in range(len(tensors))], 0)
        return cls(
            tf.gather(every, np.array(starts[ids], np.int64)),
            tf.gather(every, np.array(starts[values], np.int64)),
        )


def _checks_of_rows(
    rows: Tensor, tensors: Sequence[Tensor], schema: Schema, lengths: Lengths
) -> list[DeltaRefusal]:
    """Refuse row numbers that do not increase in their table, or lack a row; more than one dense value."""
    # All tables are checked together: a server prepares every node before the first call, and nodes for each
    # of hundreds of tables would make that slow.
    tables, dense = (
        np.array([n for n, variable in enumerate(schema.variables) if variable.kind is kind], np.int64)
        for kind in (ChangeKind.TABLE, ChangeKind.DENSE)
    )
    of_tables = tf.gather(lengths.values, tables)
    wrong_dense = tf.gather(lengths.values, dense) > 1
    wrong_tables = tf.not_equal(lengths.ids, of_tables)
    if tables.size:
        ids = [found[0] for _, found in by_variable(schema, tensors) if len(found) > 1]
        limits = np.array([schema.variables[n].shape[0] for n in tables], np.int64)
        wrong_tables |= _are_no_rows(ids, lengths.ids, limits)
    wrong = tf.concat([wrong_tables, wrong_dense], 0)
    names = [schema.variables[n].name for n in (*tables, *dense)]
    first = tf.gather(names, tf.argmax(tf.cast(wrong, tf.int32)))
    said = tf.equal(rows, tf.reduce_sum(of_tables))
    return [
        DeltaRefusal(
            tf.reduce_any(wrong), UpdateStatus.ROWS, tf.strings.join(["has wrong rows for ", first])
        ),
        *_checks_of_lookups(tensors, schema),
        DeltaRefusal(tf.logical_not(said), UpdateStatus.ROWS, "holds another number of rows than it says"),
    ]


def _are_no_rows(ids: Sequence[Tensor], counts: Tensor, limits: Array) -> Tensor:
    """True for each table whose `ids`, of which there are `counts`, fail to increase within [0, limit)."""
    every = tf.concat([*ids, [0]], 0)  # one more, so that an empty last table has an element at its start
    ends = tf.cumsum(counts)
    starts = ends - counts
    inside = (tf.gather(every, starts) >= 0) & (tf.gather(every, tf.maximum(ends - 1, 0)) < limits)
    inside |= tf.equal(counts, 0)
    # Ids may fall only where the next table begins: find each fall and the table that it lies in.
    falls = tf.where(every[1:-1] <= every[:-2])[:, 0] + 1
    owner = tf.raw_ops.UpperBound(sorted_inputs=ends[tf.newaxis], values=falls[tf.newaxis])[0]
    within = tf.cast(tf.not_equal(falls, tf.gather(starts, owner)), tf.int32)
    disorder = tf.math.unsorted_segment_sum(within, owner, len(ids)) > 0
    return disorder | tf.logical_not(inside)


def _checks_of_lookups(tensors: Sequence[Tensor], schema: Schema) -> list[DeltaRefusal]:
    """Add the checks of lookup tables: a refusal for each.

    It holds where keys and values differ in number, or where the number of buckets is no power of two.
    """
    values_of = {variable.name: tensor for variable, (*_, tensor) in by_variable(schema, tensors)}
    checks = []
    for keys, values in schema.lookups:
        pair = values_of[keys.name], values_of[values.name]
        right = tf.reduce_all(tf.equal(*(tf.shape(half)[:2] for half in pair)))
        if keys.contents is not None and keys.contents.has_all_buckets:
            count = tf.shape(pair[0])[1]
            power = (count > 0) & tf.equal(tf.bitwise.bitwise_and(count, count - 1), 0)
            right &= power | tf.equal(tf.shape(pair[0])[0], 0)
        checks.append(
            DeltaRefusal(tf.logical_not(right), UpdateStatus.ROWS, f"has wrong entries for {keys.name}")
        )
    return checks


def _checks_of_values(tensors: Sequence[Tensor], schema: Schema) -> list[DeltaRefusal]:
    return [
        DeltaRefusal(
            tf.logical_not(tf.reduce_all(tf.math.is_finite(found[-1]))),
            UpdateStatus.FINITE,
            f"has NaN or infinity in {variable.name}",
        )
        for variable, found in by_variable(schema, tensors)
        if found[-1].dtype.is_floating
    ]


def by_variable(schema: Schema, tensors: Sequence[Tensor]) -> list[tuple[ServedVariable, list[Tensor]]]:
    """The tensors of each variable: ids and values, or the value."""
    pending = iter(tensors)
    return [(variable, [next(pending) for _ in variable.keys]) for variable in schema.variables]


def restore(path: Tensor, keys: Sequence[str], dtypes: Sequence[DType]) -> list[Tensor]:
    """Add the operation that reads tensors of the bundle at `path`, each verified against its checksum."""
    restored: list[Tensor] = tf.raw_ops.RestoreV2(
        prefix=path,
        tensor_names=list(keys),
        shape_and_slices=[""] * len(keys),
        dtypes=[tf.as_dtype(int(dtype)) for dtype in dtypes],
    )
    return restored


def restore_rows(path: Tensor, flags: Tensor, schema: Schema) -> tuple[Tensor, Tensor]:
    """Read rows, or fail: a fault (string [], empty if none), and the tensors of `schema.keys` as one."""
    packings = [packing for packing in PACKINGS if any(v.packed(packing) for v in schema.variables)]
    if not packings:
        return tf.constant(""), _as_one(restore(path, schema.keys, schema.dtypes))
    forms: list[Callable[[], list[Tensor]]] = [partial(_restore_as, None, path, schema)]
    form = tf.constant(0)
    for packing in packings:
        is_packed = tf.not_equal(tf.bitwise.bitwise_and(flags, int(PACKINGS[packing])), 0)
        form = tf.where(is_packed, len(forms), form)
        forms.append(partial(_out_of_line, partial(_restore_as, packing, schema=schema), path))
    fault, tensors = tf.switch_case(form, forms)
    return fault, tensors


def _restore_as(packing: DeltaDtype | None, path: Tensor, schema: Schema) -> list[Tensor]:
    """Read a delta of this form (None: exact): the fault, and the tensors of `schema.keys` as one."""
    packed = [variable for variable in schema.variables if variable.packed(packing)]
    extra = [tensor for variable in packed for tensor in variable.packed(packing)]
    keys = [*schema.keys, *(tensor.key for tensor in extra)]
    dtypes = [*schema.dtypes, *(tensor.dtype for tensor in extra)]
    found = restore(path, keys, dtypes)
    if not packed:
        return [tf.constant(""), _as_one(found)]
    shapes = [*_shapes(schema), *([None, *tensor.element_shape] for tensor in extra)]
    by_key = dict(zip(keys, _taken_apart(_as_one(found), dtypes, shapes), strict=True))
    unpackers: dict[tuple[DType, int], Callable[..., tuple[Tensor, Tensor]]] = {}
    sound: list[Tensor] = []
    for variable in packed:
        ids, exact = (by_key[key] for key in variable.keys)
        own = [by_key[tensor.key] for tensor in variable.packed(packing)]
        kind = variable.dtype, len(variable.shape)  # tables of one kind share a function at any width
        if kind not in unpackers:
            unpackers[kind] = tf.function(_unpack, autograph=False, reduce_retracing=True)
        # One after the other. A call that fails cancels the others, and if one of these is the first to
        # report, the error is CANCELLED, which `ignore_errors` lets through (ignore_errors_dataset_op.cc):
        # the whole update would fail instead of refusing the delta.
        with tf.control_dependencies(sound[-1:]):
            by_key[variable.keys[1]], is_sound = unpackers[kind](ids, exact, *own)
        sound.append(is_sound)
    wrong = tf.gather([variable.name for variable in packed], tf.argmin(tf.cast(tf.stack(sound), tf.int32)))
    fault = tf.where(tf.reduce_all(sound), "", tf.strings.join(["has wrong packed rows for ", wrong]))
    return [fault, _as_one([by_key[key] for key in schema.keys])]


def _out_of_line(read: Callable[[Tensor], list[Tensor]], path: Tensor) -> list[Tensor]:
    """Call `read` as a function that is not inlined: a server prepares it for the first such delta."""
    # With both forms inlined, the first update of a model of a hundred tables takes seconds longer. Graph
    # optimizers leave functions with `_tf_data_function` alone (see `GraphEditor.function`).
    attributes = {"_noinline": True, "_tf_data_function": True}
    found: list[Tensor] = tf.function(read, autograph=False, experimental_attributes=attributes)(path)
    return found


def _unpack(
    ids: Tensor, exact: Tensor, places: Tensor, codes: Tensor, *scales: Tensor
) -> tuple[Tensor, Tensor]:
    """All rows in the order of `ids`, and a bool []: each id has one row, and places and scales are sound."""
    # Places are if they increase, a scale if it is 0 or in the range in which no code overflows.
    values = tf.cast(codes, tf.float32)
    rows, packed = tf.size(ids), tf.shape(codes)[0]
    sound = tf.equal(tf.size(places) + packed, rows) & tf.equal(tf.size(places), tf.shape(exact)[0])
    sound &= tf.reduce_all(places[1:] > places[:-1])
    for scale in scales:
        values *= tf.reshape(scale, [-1, *[1] * (codes.shape.rank - 1)])
        in_range = (scale >= SMALLEST_SCALE) & (scale <= LARGEST_SCALE)
        sound &= tf.equal(tf.size(scale), packed) & tf.reduce_all(tf.equal(scale, 0) | in_range)
    is_exact = tf.scatter_nd(places[:, tf.newaxis], tf.ones_like(places), tf.shape(ids, tf.int64)) > 0
    others = tf.cast(tf.where(tf.logical_not(is_exact))[:, 0], tf.int32)
    decoded = tf.cast(values, exact.dtype)
    return tf.dynamic_stitch([tf.cast(places, tf.int32), others], [exact, decoded]), sound


def tensors_in(whole: Tensor, schema: Schema) -> list[Tensor]:
    """Take the tensors of `schema.keys` out of the one of `restore_rows`; fails if a shape does not fit."""
    return _taken_apart(whole, schema.dtypes, _shapes(schema))


def _as_one(tensors: Sequence[Tensor]) -> Tensor:
    """A scalar that holds the tensors, without a copy of them."""
    # Loops and branches then pass on one tensor, not hundreds.
    return tf.raw_ops.OptionalFromValue(components=list(tensors))


def _taken_apart(
    whole: Tensor, dtypes: Sequence[DType], shapes: Sequence[Sequence[int | None]]
) -> list[Tensor]:
    found: list[Tensor] = tf.raw_ops.OptionalGetValue(
        optional=whole,
        output_types=[tf.as_dtype(int(dtype)) for dtype in dtypes],
        output_shapes=[tf.TensorShape(shape) for shape in shapes],
    )
    return found


def _shapes(schema: Schema) -> list[list[int | None]]:
    """The static shapes of the tensors of `Schema.keys`; the number of rows is None."""
    shapes: list[list[int | None]] = []
    for variable in schema.variables:
        shapes += [[None]] if variable.is_table else []
        shapes.append([None, *variable.element_shape])
    return shapes
