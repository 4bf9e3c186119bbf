"""Reading and checking a delta inside the graph: nothing here changes a variable.

Files are read through `Dataset.from_tensors(...).map(...).ignore_errors()`, the one way in which a graph of
stock ops survives an error: a damaged, missing or hostile file yields a fallback that no delta holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from exporter.delta.format import (
    FILE_PREFIX,
    FORMAT_VERSION,
    LINEAGE_KEY,
    PACKINGS,
    POSITION_KEY,
    SCHEMA_KEY,
    Flag,
    Kind,
    Schema,
    ServedVariable,
)
from exporter.subgraph.state import Tensor
from exporter.subgraph.unpack import restore, restore_rows
from exporter.wire.dtypes import DType

Dataset = Any
"""A `tf.data.Dataset`."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a delta must be: of this lineage and schema, and if `finite` without NaN and infinity."""

    lineage: str
    schema: Schema
    finite: bool


@dataclass(frozen=True, slots=True)
class ReadDelta:
    """A delta in memory. `refusal` is empty if it may be applied, else `<word>: <name> <why>`.

    `tensors` are those of `Schema.keys`; `changed` tells for each variable if it is in the delta, bool [n];
    `rows` counts the rows of all tables, `entries` those of all lookup tables.
    """

    refusal: Tensor
    step: Tensor
    rows: Tensor
    changed: Tensor
    tensors: list[Tensor]
    entries: Tensor


def attempt(
    argument: Tensor | tuple[Tensor, ...],
    action: Callable[..., tuple[Tensor, ...]],
    fallback: Sequence[Tensor],
) -> Sequence[Tensor]:
    """What `action` makes of `argument`, or `fallback` if anything in it fails."""
    import tensorflow as tf

    return first_success(tf.data.Dataset.from_tensors(argument), action, fallback)


def first_success(
    arguments: Dataset, action: Callable[..., tuple[Tensor, ...]], fallback: Sequence[Tensor]
) -> Sequence[Tensor]:
    """What `action` makes of the first of `arguments` that it does not fail on, else `fallback`."""
    import tensorflow as tf

    tried = arguments.map(action).ignore_errors()
    either = tried.concatenate(tf.data.Dataset.from_tensors(tuple(fallback))).take(1)
    found: Sequence[Tensor] = either.get_single_element()
    return found


@dataclass(frozen=True, slots=True)
class Check:
    """A reason to refuse a delta, if `fails`: `word` and `text` go before and after its name."""

    fails: Tensor
    word: str
    text: Tensor | str


def read_delta(directory: Tensor, name: Tensor, position: Tensor, expected: Expected) -> ReadDelta:
    """Read and check the delta `<directory>/<name>` for a state at `position`."""
    import tensorflow as tf

    prefix = tf.strings.join([directory, name, FILE_PREFIX], separator="/")
    fields, lineage, digest = _read_header(prefix)
    step, flags, rows = fields[3], fields[4], fields[5]
    refusal = _first_of(name, _checks_of_header(name, position, fields, lineage, digest, expected))
    # A delta that is refused already is not read any further: reading "" fails at once.
    readable = tf.where(tf.equal(refusal, ""), prefix, "")
    fault, changed, *tensors = _read_body(readable, name, flags, rows, expected)
    refusal = tf.where(tf.equal(refusal, ""), fault, refusal)
    found = {variable.name: tensor for variable, (*_, tensor) in by_variable(expected.schema, tensors)}
    entries = [tf.size(found[keys.name], tf.int64) for keys, _ in expected.schema.lookups]
    return ReadDelta(refusal, step, rows, changed, tensors, sum(entries, tf.zeros([], tf.int64)))


def _first_of(name: Tensor, checks: Sequence[Check]) -> Tensor:
    """`<word>: <name> <text>` of the first check that fails, empty if none does."""
    import tensorflow as tf

    fails = tf.stack([check.fails for check in checks])
    first = tf.argmax(tf.cast(fails, tf.int32))
    word = tf.gather(tf.constant([check.word for check in checks]), first)
    text = tf.gather(tf.stack([check.text for check in checks]), first)
    return tf.where(tf.reduce_any(fails), tf.strings.join([word, ": ", name, " ", text]), "")


def _read_header(prefix: Tensor) -> Sequence[Tensor]:
    """Fields int64 [6], lineage and schema digest; zeros and empty strings if it cannot be read."""
    import tensorflow as tf

    def read(path: Tensor) -> tuple[Tensor, ...]:
        fields, lineage, digest = restore(
            path, (POSITION_KEY, LINEAGE_KEY, SCHEMA_KEY), (DType.INT64, DType.STRING, DType.STRING)
        )
        return tf.ensure_shape(fields, [6]), tf.ensure_shape(lineage, []), tf.ensure_shape(digest, [])

    return attempt(prefix, read, (tf.zeros([6], tf.int64), tf.constant(""), tf.constant("")))


def _read_body(
    prefix: Tensor, name: Tensor, flags: Tensor, rows: Tensor, expected: Expected
) -> Sequence[Tensor]:
    """Refusal, `changed` and the tensors of the schema's keys, each of its shape; empty ones if that fails.

    The checks are done in here, in a function of their own: grappler's shape inference carries what a *later*
    op demands of a shape back to where the shape is compared, and then takes the comparison for granted.
    """
    import tensorflow as tf

    schema = expected.schema
    shapes = [shape for variable in schema.variables for shape in _shapes(variable)]

    def read(path: Tensor, of: Tensor, forms: Tensor, count: Tensor) -> tuple[Tensor, ...]:
        fault, restored = restore_rows(path, forms, schema)
        tensors = [tf.ensure_shape(t, shape) for t, shape in zip(restored, shapes, strict=True)]
        checks = [Check(tf.not_equal(fault, ""), "rows", fault), *_checks_of_rows(count, tensors, schema)]
        if expected.finite:
            checks += _checks_of_values(tensors, schema)
        changed = tf.stack([_length(found[-1]) > 0 for _, found in by_variable(schema, tensors)])
        return _first_of(of, checks), changed, *tensors

    nothing = [
        tf.zeros([0, *(size or 0 for size in shape[1:])], tf.as_dtype(int(dtype)))
        for shape, dtype in zip(shapes, schema.dtypes, strict=True)
    ]
    damaged = tf.strings.join(["damaged: ", name, " cannot be read"])
    return attempt(
        (prefix, name, flags, rows), read, (damaged, tf.zeros([len(schema.variables)], tf.bool), *nothing)
    )


def _shapes(variable: ServedVariable) -> list[list[int | None]]:
    values: list[int | None] = [None, *variable.element_shape]
    return [[None], values] if variable.kind is Kind.TABLE else [values]


def _checks_of_header(
    name: Tensor, position: Tensor, fields: Tensor, lineage: Tensor, digest: Tensor, expected: Expected
) -> list[Check]:
    import tensorflow as tf

    version, start, end, flags = fields[0], fields[1], fields[2], fields[4]
    leads = tf.strings.join(
        [tf.strings.as_string(p, width=20, fill="0") for p in (start, end)], separator="-"
    )
    only_from = tf.not_equal(tf.bitwise.bitwise_and(flags, int(Flag.ONLY_FROM)), 0)
    both = sum(PACKINGS.values())
    unknown = tf.not_equal(tf.bitwise.bitwise_and(flags, ~sum(Flag)), 0)
    unknown |= tf.equal(tf.bitwise.bitwise_and(flags, both), both)
    form = tf.strings.join(
        ["has format ", tf.strings.as_string(version), ", flags ", tf.strings.as_string(flags)]
    )
    return [
        Check(tf.equal(version, 0), "damaged", "cannot be read"),
        Check(tf.not_equal(version, FORMAT_VERSION) | unknown, "format", form),
        Check(tf.not_equal(lineage, expected.lineage), "lineage", "belongs to another log"),
        Check(tf.not_equal(digest, expected.schema.digest), "schema", "was made for other variables"),
        Check(tf.not_equal(leads, name), "range", tf.strings.join(["says that it leads ", leads])),
        Check(only_from & tf.not_equal(start, position), "only-from", "fits its first position alone"),
    ]


def _checks_of_rows(rows: Tensor, tensors: Sequence[Tensor], schema: Schema) -> list[Check]:
    """Row numbers increase within the table, ids and values are as many, dense values are one or none."""
    import tensorflow as tf

    # One function for all tables: what a graph holds for each of them, every signature's first call pays for.
    are_rows = tf.function(_are_rows, autograph=False)
    checks = []
    counted = tf.zeros([], tf.int64)
    for variable, found in by_variable(schema, tensors):
        values = _length(found[-1])
        if variable.kind is Kind.TABLE:
            counted += values
            right = are_rows(found[0], values, tf.constant(variable.shape[0], found[0].dtype))
        else:
            right = values <= 1
        checks.append(Check(tf.logical_not(right), "rows", f"has wrong rows for {variable.name}"))
    checks += _checks_of_lookups(tensors, schema)
    return [*checks, Check(tf.not_equal(rows, counted), "rows", "holds another number of rows than it says")]


def _checks_of_lookups(tensors: Sequence[Tensor], schema: Schema) -> list[Check]:
    """A lookup table has keys with a value each, or is not there; buckets are a power of two."""
    import tensorflow as tf

    values_of = {variable.name: tensor for variable, (*_, tensor) in by_variable(schema, tensors)}
    checks = []
    for keys, values in schema.lookups:
        pair = values_of[keys.name], values_of[values.name]
        right = tf.reduce_all(tf.equal(*(tf.shape(half)[:2] for half in pair)))
        if keys.contents is not None and keys.contents.has_all_buckets:
            count = tf.shape(pair[0])[1]
            power = (count > 0) & tf.equal(tf.bitwise.bitwise_and(count, count - 1), 0)
            right &= power | tf.equal(_length(pair[0]), 0)
        checks.append(Check(tf.logical_not(right), "rows", f"has wrong entries for {keys.name}"))
    return checks


def _are_rows(ids: Tensor, count: Tensor, limit: Tensor) -> Tensor:
    """Whether `ids` are `count` numbers that increase, from 0 to below `limit`."""
    import tensorflow as tf

    increasing = tf.reduce_all(ids[1:] > ids[:-1])
    inside = tf.reduce_all(ids[:1] >= 0) & tf.reduce_all(ids[-1:] < limit)
    return increasing & inside & tf.equal(_length(ids), count)


def _checks_of_values(tensors: Sequence[Tensor], schema: Schema) -> list[Check]:
    import tensorflow as tf

    return [
        Check(
            tf.logical_not(tf.reduce_all(tf.math.is_finite(found[-1]))),
            "finite",
            f"has NaN or infinity in {variable.name}",
        )
        for variable, found in by_variable(schema, tensors)
        if found[-1].dtype.is_floating
    ]


def by_variable(schema: Schema, tensors: Sequence[Tensor]) -> list[tuple[ServedVariable, list[Tensor]]]:
    """The tensors of each variable: ids and values, or the value."""
    pending = iter(tensors)
    return [(variable, [next(pending) for _ in variable.keys]) for variable in schema.variables]


def _length(tensor: Tensor) -> Tensor:
    import tensorflow as tf

    return tf.shape(tensor, out_type=tf.int64)[0]
