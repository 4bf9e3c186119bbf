"""Read a delta inside the graph, check it, and unpack its rows, before any variable is changed.

Files are read through `Dataset.from_tensors(...).map(...).ignore_errors()`, the only way in which a graph of
stock operations survives an error: a damaged, missing or hostile file gives a fallback that no delta has.
`RestoreV2` verifies the checksum of each tensor. Everything else is checked here, since a kernel that meets
an index out of range in the middle of a scatter has already written the rows before it.

A delta's flags give the form in which its rows are stored: exact, or packed in one of two ways
(`exporter.delta.format`). The graph has a branch for each form, so that a base takes every delta of its log,
and an exact delta costs no more than without the other branches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, count, islice

import numpy as np
from msgspec import Struct

from exporter.delta.format import (
    FORMAT_VERSION,
    LINEAGE_KEY,
    PACKINGS,
    POSITION_KEY,
    SCHEMA_KEY,
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


class DeltaForm(Struct, frozen=True):
    """The arrangement of a delta in memory: the variables `own` separately, the tables of a group together.

    A group has tables with rows of one shape and dtype, each with the number that is added to its row
    numbers: the first row of the table in the variable or overlay that the group shares, else 0.
    """

    # An operation that makes one tensor of n takes time in n squared in each run of TensorFlow's graph
    # optimizers, of which a server makes a dozen while it loads a version, and each runs over all functions:
    # 0.26 s for 800 tensors, 0.02 for 200. So tensors are joined as soon as they are read.

    schema: Schema
    own: tuple[ServedVariable, ...]
    groups: tuple[tuple[tuple[ServedVariable, int], ...], ...] = ()

    @property
    def variables(self) -> tuple[ServedVariable, ...]:
        """Return all variables: `own`, then the variables of each group.

        A table that two variables of the graph hold can occur twice.
        """
        return *self.own, *(variable for parts in self.groups for variable, _ in parts)

    @property
    def tables(self) -> tuple[ServedVariable, ...]:
        """Return the variables that are tables, in the order of `variables`."""
        return tuple(variable for variable in self.variables if variable.is_table)

    def gather(self, read: Mapping[str, Tensor]) -> Tensor:
        """Pack the tensors `read`, by their key in the delta, into one scalar of dtype variant.

        `RestoredRows.of` unpacks it.
        """
        gathered = []
        if self.tables:
            gathered += [*_end_to_end([read[variable.keys[0]] for variable in self.tables], rank=1)]
        gathered += [read[variable.keys[-1]] for variable in self.own]
        for parts in self.groups:
            gathered += _end_to_end([read[v.keys[1]] for v, _ in parts], rank=len(parts[0][0].shape))
        return _as_one(gathered)

    def take(self, arranged: Tensor) -> tuple[dict[ServedVariable, list[Tensor]], list[list[Tensor]]]:
        """Unpack `RestoredRows.arranged` into the tensors of own variables, by variable, and of groups.

        An own table has ids, int64, and rows; another own variable has its value, of which the first
        dimension is 0 (not in the delta) or 1. A group, in the order of `groups`, has ids, to which each
        table's number is added, rows, and the number of rows of each table, int64.
        """
        kinds = [kind for variable in self.own for kind in _kinds(variable)]
        for parts in self.groups:
            kinds += [*_kinds(parts[0][0]), (DType.INT64, [len(parts)])]
        pending = iter(_taken_apart(arranged, kinds))
        own = {variable: [next(pending) for _ in variable.keys] for variable in self.own}
        return own, [[*islice(pending, 3)] for _ in self.groups]


def _end_to_end(tensors: Sequence[Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """Concatenate tensors of this rank along axis 0; return the result and the length of each, int64 [n]."""
    # With a wrong rank, `concat` fails, or the result has a wrong shape, which is checked later.
    shapes = tf.raw_ops.ShapeN(input=list(tensors), out_type=tf.int64)
    return tf.concat(tensors, 0), tf.concat(shapes, 0)[::rank]


class RestoredRows(Struct, frozen=True, dict=True):
    """The tensors of a delta as `DeltaForm.gather` packed them.

    `ids`, int64, has the row numbers of all `DeltaForm.tables`, one table after the other, and `counts` the
    number for each. `values` has the rows or the value of each `own` variable, `groups` the rows of each
    group and the number for each of its tables.
    """

    form: DeltaForm
    ids: Tensor
    counts: Tensor
    values: Sequence[Tensor]
    groups: Sequence[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, form: DeltaForm, gathered: Tensor) -> RestoredRows:
        """Add nodes that unpack `gathered`, made by `form.gather`, and return its tensors.

        The nodes fail when run if a shape does not fit.
        """
        tables, own = form.tables, form.own
        kinds: list[tuple[DType, list[int | None]]] = []
        if tables:
            kinds += [(DType.INT64, [None]), (DType.INT64, [len(tables)])]
        kinds += [(variable.dtype, _shape(variable)) for variable in own]
        for parts in form.groups:
            kinds += [(parts[0][0].dtype, _shape(parts[0][0])), (DType.INT64, [len(parts)])]
        found = _taken_apart(gathered, kinds)
        first = 2 if tables else 0
        ids, counts = found[:2] if tables else [tf.zeros([0], tf.int64)] * 2
        grouped = found[first + len(own) :]
        pairs = list(zip(grouped[::2], grouped[1::2], strict=True))
        return cls(form, ids, counts, found[first : first + len(own)], pairs)

    @cached_property
    def lengths(self) -> Tensor:
        """Return the length of each of the schema's variables, in its order, int64 [n], by a few nodes.

        It is the number of a table's rows, or of a dense variable's values: 0 or 1 in a valid delta.
        """
        shapes: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(value.dtype for value in self.values):
            own = [n for n, value in enumerate(self.values) if value.dtype == dtype]
            found = tf.raw_ops.ShapeN(input=[self.values[n] for n in own], out_type=tf.int64)
            shapes |= dict(zip(own, found, strict=True))
        starts = np.cumsum([0, *(value.shape.rank for value in self.values)])[:-1]
        every = tf.concat([tf.zeros([0], tf.int64), *(shapes[n] for n in range(len(self.values)))], 0)
        if not self.groups:
            return tf.gather(every, np.array(starts, np.int64))
        every = tf.concat([every, *(counts for _, counts in self.groups)], 0)
        of_parts = count(sum(value.shape.rank for value in self.values))
        place = dict(zip(self.form.variables, chain(starts, of_parts), strict=False))
        return tf.gather(every, _numbers(place[variable] for variable in self.form.schema.variables))

    @property
    def by_variable(self) -> dict[ServedVariable, Tensor]:
        """Return the rows, or the value with a first dimension of 0 or 1, of each `own` variable."""
        return dict(zip(self.form.own, self.values, strict=True))

    def arranged(self) -> Tensor:
        """Pack the tensors into one scalar, which `DeltaForm.take` unpacks."""
        form, counts = self.form, self.counts
        sizes = [1] * sum(variable.is_table for variable in form.own) + [len(parts) for parts in form.groups]
        if not sizes:
            return _as_one(self.values)
        ids = self.ids
        if form.groups:
            firsts = [first for parts in form.groups for _, first in parts]
            if any(firsts):
                ids += _repeated([0] * (len(form.tables) - len(firsts)) + firsts, counts)
            counts = tf.math.segment_sum(counts, np.repeat(np.arange(len(sizes)), sizes))
        # Once, not where rows are written chunk by chunk: there each chunk would copy all ids.
        pending = iter(tf.split(ids, counts, num=len(sizes)))
        tensors = []
        for variable, value in zip(form.own, self.values, strict=True):
            tensors += [next(pending), value] if variable.is_table else [value]
        for rows, counts_of_group in self.groups:
            tensors += [next(pending), rows, counts_of_group]
        return _as_one(tensors)


def _repeated(values: Sequence[int], counts: Tensor) -> Tensor:
    """Repeat each of `values` as often as the same element of `counts` says; return them in order, int64."""
    # `tf.repeat` would take memory for the number of values times the greatest count.
    ends = tf.cumsum(counts)
    numbers = tf.range(ends[-1])[tf.newaxis]
    owner = tf.raw_ops.UpperBound(sorted_inputs=ends[tf.newaxis], values=numbers)[0]
    return tf.gather(tf.constant(values, tf.int64), owner)


class Expected(Struct, frozen=True):
    """A base's demands on a delta: lineage, string [], and schema; with `finite` no NaN or infinity.

    `form` is the arrangement in which the delta is returned.
    """

    lineage: Tensor
    form: DeltaForm
    finite: bool

    @property
    def schema(self) -> Schema:
        """Return the schema that a delta must have."""
        return self.form.schema


class ReadDelta(Struct, frozen=True):
    """A delta in memory. `refusal` is empty if it may be applied, else `<word>: <name> <why>`.

    `changed`, bool [n], is true for each variable in the delta. `rows` is the number of rows of all tables,
    `entries` the number of entries of all lookup tables. `tensors` holds its tensors as one
    (`DeltaForm.take`), or nothing if the delta is refused.
    """

    refusal: Tensor
    step: Tensor
    rows: Tensor
    changed: Tensor
    entries: Tensor
    tensors: Tensor


class DeltaRefusal(Struct, frozen=True):
    """A reason to refuse a delta if `fails`, bool []; the message is `word`, the delta's name and `text`."""

    fails: Tensor
    word: UpdateStatus
    text: Tensor | str


def read_delta(directory: Tensor, name: Tensor, position: Tensor, expected: Expected) -> ReadDelta:
    """Add nodes that read the delta `<directory>/<name>` and check it for a state at `position`, int64 [].

    An unreadable or unfit delta does not fail: the result then has a `refusal`. If `name` is empty, nothing
    is read, and the refusal says that the delta is damaged.
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
    """Add nodes that read the header at `prefix`; return its fields, lineage and schema digest.

    The fields, int64 [6], are format version, first and last position, step, flags and number of rows; the
    others are string []. They are zeros and empty strings if that fails, or if `prefix` is empty.
    """

    def read(path: Tensor) -> tuple[Tensor, ...]:
        fields, lineage, digest = restore(
            path, (POSITION_KEY, LINEAGE_KEY, SCHEMA_KEY), (DType.INT64, DType.STRING, DType.STRING)
        )
        return tf.ensure_shape(fields, [6]), tf.ensure_shape(lineage, []), tf.ensure_shape(digest, [])

    nothing = tf.zeros([6], tf.int64), tf.constant(""), tf.constant("")
    return attempt(prefix, read, nothing, condition=_is_named)


def _read_body(
    prefix: Tensor, name: Tensor, flags: Tensor, rows: Tensor, expected: Expected
) -> Sequence[Tensor]:
    """Add nodes that read and check the rest of a delta, whose header is accepted.

    Returns the refusal, empty if there is none; `changed`, bool [n], per variable of the schema; the number
    of entries of lookup tables, int64 []; and the packed tensors (`DeltaForm.take`). `prefix` may be empty:
    then nothing is read. `name` is the delta's, for the refusal; `flags` and `rows` are the header's.
    """
    schema = expected.schema

    # The checks run in the function that reads, apart from the writes: grappler's shape inference carries the
    # shape that a *later* operation demands back to where it is compared, and replaces the comparison by
    # true.

    def read(path: Tensor, of: Tensor, forms: Tensor, count: Tensor) -> tuple[Tensor, ...]:
        fault, gathered = restore_rows(path, forms, expected.form)
        restored = RestoredRows.of(expected.form, gathered)
        entries = [tf.size(restored.by_variable[keys], tf.int64) for keys, _ in schema.lookups]
        checks = [DeltaRefusal(tf.not_equal(fault, ""), UpdateStatus.ROWS, fault)]
        checks += _checks_of_rows(count, restored)
        if expected.finite:
            checks += _checks_of_values(restored)
        entries_count = sum(entries, tf.zeros([], tf.int64))
        return _first_of(of, checks), restored.lengths > 0, entries_count, restored.arranged()

    damaged = tf.strings.join([f"{UpdateStatus.DAMAGED}: ", name, " cannot be read"])
    unchanged = tf.zeros([len(schema.variables)], tf.bool)
    fallback = damaged, unchanged, tf.zeros([], tf.int64), tf.raw_ops.OptionalNone()
    return attempt((prefix, name, flags, rows), read, fallback, condition=_is_named)


def _is_named(prefix: Tensor, *_: Tensor) -> Tensor:
    """Return true, bool [], unless the path is empty.

    An empty path is not tried, because a server logs each failed read.
    """
    return tf.not_equal(prefix, "")


def _first_of(name: Tensor, checks: Sequence[DeltaRefusal]) -> Tensor:
    """Return `<word>: <name> <text>` of the first check that fails, string []; empty if none does."""
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
    """Add nodes that give the result of `action` on `argument`, or `fallback` if any operation in it fails.

    A tuple is passed as several arguments. If `condition` is false for the argument, the action is not tried;
    with None it always is. `fallback` has the dtypes of the result. A cancelled operation is not caught: it
    fails the call.
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


def _checks_of_rows(rows: Tensor, restored: RestoredRows) -> list[DeltaRefusal]:
    """Return checks for row numbers, the number of dense values, lookup tables, and the number of rows.

    Row numbers have to increase inside their table, a dense variable has at most one value, and all tables
    together have `rows`, int64 [], the number in the header.
    """
    # All tables are checked together: a server prepares every node before the first call, and nodes for each
    # of hundreds of tables would make that slow.
    variables, tables = restored.form.schema.variables, restored.form.tables
    number = {variable: n for n, variable in enumerate(variables)}
    dense = [variable for variable in variables if not variable.is_table]
    wrong_dense = tf.gather(restored.lengths, _numbers(number[variable] for variable in dense)) > 1
    of_tables = tf.gather(restored.lengths, _numbers(number[variable] for variable in tables))
    wrong_tables = tf.not_equal(restored.counts, of_tables)
    if tables:
        limits = _numbers(variable.shape[0] for variable in tables)
        wrong_tables |= _are_no_rows(restored.ids, restored.counts, limits)
    wrong = tf.concat([wrong_tables, wrong_dense], 0)
    first = tf.gather([v.name for v in (*tables, *dense)], tf.argmax(tf.cast(wrong, tf.int32)))
    # A table that two variables hold stands in `tables` twice.
    each_once = _numbers(n for variable, n in number.items() if variable.is_table)
    said = tf.equal(rows, tf.reduce_sum(tf.gather(restored.lengths, each_once)))
    return [
        DeltaRefusal(
            tf.reduce_any(wrong), UpdateStatus.ROWS, tf.strings.join(["has wrong rows for ", first])
        ),
        *_checks_of_lookups(restored.form.schema, restored.by_variable),
        DeltaRefusal(tf.logical_not(said), UpdateStatus.ROWS, "holds another number of rows than it says"),
    ]


def _numbers(numbers: Iterable[int]) -> Array:
    return np.array([*numbers], np.int64)


def _are_no_rows(ids: Tensor, counts: Tensor, limits: Array) -> Tensor:
    """Return a mask, bool [n]: tables whose row numbers do not increase from 0 to below their limits.

    `ids` has the row numbers of all tables, one after the other; `counts`, int64 [n], the number for each.
    """
    every = tf.concat([ids, [0]], 0)  # one more, so that an empty last table has an element at its start
    ends = tf.cumsum(counts)
    starts = ends - counts
    inside = (tf.gather(every, starts) >= 0) & (tf.gather(every, tf.maximum(ends - 1, 0)) < limits)
    inside |= tf.equal(counts, 0)
    # Ids may fall only where the next table begins: find each fall and the table that it lies in.
    falls = tf.where(every[1:-1] <= every[:-2])[:, 0] + 1
    owner = tf.raw_ops.UpperBound(sorted_inputs=ends[tf.newaxis], values=falls[tf.newaxis])[0]
    within = tf.cast(tf.not_equal(falls, tf.gather(starts, owner)), tf.int32)
    disorder = tf.math.unsorted_segment_sum(within, owner, len(limits)) > 0
    return disorder | tf.logical_not(inside)


def _checks_of_lookups(schema: Schema, values_of: Mapping[ServedVariable, Tensor]) -> list[DeltaRefusal]:
    """Return a check for each lookup table: it has as many keys as values.

    If all its buckets are stored, there must be a power of two of them, or the table is not in the delta.
    `values_of` has the tensor of the keys, and of the values, of each table.
    """
    checks = []
    for keys, values in schema.lookups:
        pair = values_of[keys], values_of[values]
        right = tf.reduce_all(tf.equal(*(tf.shape(half)[:2] for half in pair)))
        if keys.contents is not None and keys.contents.has_all_buckets:
            count = tf.shape(pair[0])[1]
            power = (count > 0) & tf.equal(tf.bitwise.bitwise_and(count, count - 1), 0)
            right &= power | tf.equal(tf.shape(pair[0])[0], 0)
        checks.append(
            DeltaRefusal(tf.logical_not(right), UpdateStatus.ROWS, f"has wrong entries for {keys.name}")
        )
    return checks


def _checks_of_values(restored: RestoredRows) -> list[DeltaRefusal]:
    said = "has NaN or infinity in "
    checks = [
        DeltaRefusal(
            tf.logical_not(tf.reduce_all(tf.math.is_finite(values))), UpdateStatus.FINITE, said + v.name
        )
        for v, values in restored.by_variable.items()
        if values.dtype.is_floating
    ]
    for parts, (rows, counts) in zip(restored.form.groups, restored.groups, strict=True):
        if rows.dtype.is_floating:
            wrong = tf.where(tf.logical_not(tf.math.is_finite(rows)))[:, 0]
            owner = tf.searchsorted(tf.cumsum(counts), tf.concat([wrong, [0]], 0)[:1], side="right")
            name = tf.gather([variable.name for variable, _ in parts], tf.minimum(owner[0], len(parts) - 1))
            text = tf.strings.join([said, name])
            checks.append(DeltaRefusal(tf.size(wrong) > 0, UpdateStatus.FINITE, text))
    return checks


def restore(path: Tensor, keys: Sequence[str], dtypes: Sequence[DType]) -> list[Tensor]:
    """Add the operation that reads the tensors `keys` of the bundle at `path`; return them in this order.

    When run it fails if a tensor is missing, has another dtype, or does not match its checksum.
    """
    restored: list[Tensor] = tf.raw_ops.RestoreV2(
        prefix=path,
        tensor_names=list(keys),
        shape_and_slices=[""] * len(keys),
        dtypes=[tf.as_dtype(int(dtype)) for dtype in dtypes],
    )
    return restored


def restore_rows(path: Tensor, flags: Tensor, form: DeltaForm) -> tuple[Tensor, Tensor]:
    """Add nodes that read a delta's rows; return the fault and the rows, gathered.

    `path` is the prefix of the delta's bundle; `flags`, int64 [], is the field of its header. The fault is a
    string [], empty if there is none; the rows are the tensor of `DeltaForm.gather`. Running them fails if
    the delta cannot be read.
    """
    schema = form.schema
    packings = [packing for packing in PACKINGS if any(v.packed(packing) for v in schema.variables)]
    if not packings:
        fault, gathered = _restore_as(None, path, form)
        return fault, gathered
    forms: list[Callable[[], list[Tensor]]] = [partial(_restore_as, None, path, form)]
    number = tf.constant(0)
    for packing in packings:
        is_packed = tf.not_equal(tf.bitwise.bitwise_and(flags, int(PACKINGS[packing])), 0)
        number = tf.where(is_packed, len(forms), number)
        forms.append(partial(_out_of_line, partial(_restore_as, packing, form=form), path))
    fault, gathered = tf.switch_case(number, forms)
    return fault, gathered


def _restore_as(packing: DeltaDtype | None, path: Tensor, form: DeltaForm) -> list[Tensor]:
    """Add nodes that read a delta of this packing (None: exact); return the fault and the rows, gathered.

    The fault, string [], names the first variable with wrong packed rows and is empty if there is none; the
    rows are the tensor of `DeltaForm.gather`. Running them fails if the delta cannot be read.
    """
    schema = form.schema
    packed = [variable for variable in schema.variables if variable.packed(packing)]
    extra = [tensor for variable in packed for tensor in variable.packed(packing)]
    keys = [*schema.keys, *(tensor.key for tensor in extra)]
    dtypes = [*schema.dtypes, *(tensor.dtype for tensor in extra)]
    by_key = dict(zip(keys, restore(path, keys, dtypes), strict=True))
    if not packed:
        return [tf.constant(""), form.gather(by_key)]
    unpackers: dict[tuple[DType, int], Callable[..., tuple[Tensor, Tensor]]] = {}
    sound: list[Tensor] = []
    for variable in packed:
        ids, exact = (by_key[key] for key in variable.keys)
        own = [by_key[tensor.key] for tensor in variable.packed(packing)]
        kind = variable.dtype, len(variable.shape)  # tables of one kind share a function at any width
        if kind not in unpackers:
            unpackers[kind] = tf.function(partial(_unpack, kind[1]), autograph=False)
        # One after the other. A call that fails cancels the others, and if one of these is the first to
        # report, the error is CANCELLED, which `ignore_errors` lets through (ignore_errors_dataset_op.cc):
        # the whole update would fail instead of refusing the delta.
        with tf.control_dependencies(sound[-1:]):
            by_key[variable.keys[1]], is_sound = unpackers[kind](ids, exact, *own)
        sound.append(is_sound)
    wrong = tf.gather([variable.name for variable in packed], tf.argmin(tf.cast(tf.stack(sound), tf.int32)))
    fault = tf.where(tf.reduce_all(sound), "", tf.strings.join(["has wrong packed rows for ", wrong]))
    return [fault, form.gather(by_key)]


def _out_of_line(read: Callable[[Tensor], list[Tensor]], path: Tensor) -> list[Tensor]:
    """Call `read` on `path` as a function that is not inlined, and return its tensors.

    So a server prepares it only for the first such delta.
    """
    # With both forms inlined, the first update of a model of a hundred tables takes seconds longer. Graph
    # optimizers leave functions with `_tf_data_function` alone (see `GraphEditor.function`).
    attributes = {"_noinline": True, "_tf_data_function": True}
    found: list[Tensor] = tf.function(read, autograph=False, experimental_attributes=attributes)(path)
    return found


def _unpack(
    rank: int, ids: Tensor, exact: Tensor, places: Tensor, codes: Tensor, *scales: Tensor
) -> tuple[Tensor, Tensor]:
    """Return all rows in the order of `ids`, and true, bool [], if the delta's rows are valid.

    They are valid if each id has a row, and places and scales are valid. `exact` are rows of this rank that
    are stored as they are, at the indices `places`; the others are `codes`, in order, each multiplied by its
    number in `scales` (one tensor, or none).
    """
    # Valid places increase; a valid scale is 0, or in the range in which no code overflows.
    ids, places, *of_rows = (tf.ensure_shape(numbers, [None]) for numbers in (ids, places, *scales))
    exact, codes = (tf.ensure_shape(rows, [None] * rank) for rows in (exact, codes))
    values = tf.cast(codes, tf.float32)
    rows, packed = tf.size(ids), tf.shape(codes)[0]
    sound = tf.equal(tf.size(places) + packed, rows) & tf.equal(tf.size(places), tf.shape(exact)[0])
    sound &= tf.reduce_all(places[1:] > places[:-1])
    for scale in of_rows:
        values *= tf.reshape(scale, [-1, *[1] * (codes.shape.rank - 1)])
        in_range = (scale >= SMALLEST_SCALE) & (scale <= LARGEST_SCALE)
        sound &= tf.equal(tf.size(scale), packed) & tf.reduce_all(tf.equal(scale, 0) | in_range)
    is_exact = tf.scatter_nd(places[:, tf.newaxis], tf.ones_like(places), tf.shape(ids, tf.int64)) > 0
    others = tf.cast(tf.where(tf.logical_not(is_exact))[:, 0], tf.int32)
    decoded = tf.cast(values, exact.dtype)
    return tf.dynamic_stitch([tf.cast(places, tf.int32), others], [exact, decoded]), sound


def _as_one(tensors: Sequence[Tensor]) -> Tensor:
    """Return a scalar of dtype variant that holds the tensors, without copying them."""
    # Loops and branches then carry one tensor, not hundreds.
    return tf.raw_ops.OptionalFromValue(components=list(tensors))


def _taken_apart(whole: Tensor, kinds: Sequence[tuple[DType, list[int | None]]]) -> list[Tensor]:
    found: list[Tensor] = tf.raw_ops.OptionalGetValue(
        optional=whole,
        output_types=[tf.as_dtype(int(dtype)) for dtype, _ in kinds],
        output_shapes=[tf.TensorShape(shape) for _, shape in kinds],
    )
    return found


def _kinds(variable: ServedVariable) -> list[tuple[DType, list[int | None]]]:
    """Return dtype and static shape of each of a variable's tensors.

    These are row numbers and rows of a table, and the value of a dense variable.
    """
    shapes: list[list[int | None]] = [[None]] if variable.is_table else []
    return list(zip(variable.dtypes, [*shapes, _shape(variable)], strict=True))


def _shape(variable: ServedVariable) -> list[int | None]:
    """Return the static shape of a variable's rows or value; the first element, the row count, is None."""
    return [None, *variable.element_shape]
