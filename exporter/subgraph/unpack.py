"""Read a delta's rows inside the graph, and unpack those that are stored in fewer bits.

A delta's flags say which of three forms it has (`exporter.delta.format`); the graph holds a branch for each,
so that a base takes any delta of its log, and an exact one costs what it would cost without the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from exporter.delta.format import PACKINGS, ChangeKind, Schema
from exporter.delta.packing import LARGEST_SCALE, SMALLEST_SCALE
from exporter.options import DeltaDtype
from exporter.subgraph.state import Tensor
from exporter.wire.dtypes import DType


def restore(path: Tensor, keys: Sequence[str], dtypes: Sequence[DType]) -> list[Tensor]:
    """Tensors of the bundle at `path`, each verified against its checksum."""
    import tensorflow as tf

    restored: list[Tensor] = tf.raw_ops.RestoreV2(
        prefix=path,
        tensor_names=list(keys),
        shape_and_slices=[""] * len(keys),
        dtypes=[tf.as_dtype(int(dtype)) for dtype in dtypes],
    )
    return restored


def tensors_in(whole: Tensor, schema: Schema) -> list[Tensor]:
    """The tensors of `schema.keys` that `restore_rows` gave; fails if one has a shape that it cannot have."""
    return _taken_apart(whole, schema.dtypes, _shapes(schema))


def _as_one(tensors: Sequence[Tensor]) -> Tensor:
    """A scalar that holds the tensors, without a copy: to pass them on costs one node instead of many."""
    import tensorflow as tf

    return tf.raw_ops.OptionalFromValue(components=list(tensors))


def _taken_apart(
    whole: Tensor, dtypes: Sequence[DType], shapes: Sequence[Sequence[int | None]]
) -> list[Tensor]:
    import tensorflow as tf

    found: list[Tensor] = tf.raw_ops.OptionalGetValue(
        optional=whole,
        output_types=[tf.as_dtype(int(dtype)) for dtype in dtypes],
        output_shapes=[tf.TensorShape(shape) for shape in shapes],
    )
    return found


def _shapes(schema: Schema) -> list[list[int | None]]:
    """The shapes of the tensors of `Schema.keys`; how many rows there are is not known."""
    shapes: list[list[int | None]] = []
    for variable in schema.variables:
        ids: list[list[int | None]] = [[None]] if variable.kind is ChangeKind.TABLE else []
        shapes += [*ids, [None, *variable.element_shape]]
    return shapes


def restore_rows(path: Tensor, flags: Tensor, schema: Schema) -> tuple[Tensor, Tensor]:
    """Unpack rows: what is wrong with them (empty if nothing is), and the tensors of `schema.keys` as one.

    Fails, when the graph runs, if the bundle cannot be read or its tensors do not fit each other.
    """
    import tensorflow as tf

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


def _out_of_line(read: Callable[[Tensor], list[Tensor]], path: Tensor) -> list[Tensor]:
    """A call that is not inlined: a server that meets no such delta never prepares the function for it.

    Inlined, with both forms a model of a hundred tables takes seconds more for its first update.
    """
    import tensorflow as tf

    attributes = {"_noinline": True, "_tf_data_function": True}  # the latter: grappler passes it over
    found: list[Tensor] = tf.function(read, autograph=False, experimental_attributes=attributes)(path)
    return found


def _restore_as(packing: DeltaDtype | None, path: Tensor, schema: Schema) -> list[Tensor]:
    """The fault, and the tensors of `schema.keys` as one, of a delta that is packed so."""
    import tensorflow as tf

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
        # In turn: what fails in one cancels those that have not begun, and if one of these is the first to
        # report, it is CANCELLED, which `ignore_errors` lets through (ignore_errors_dataset_op.cc).
        with tf.control_dependencies(sound[-1:]):
            by_key[variable.keys[1]], is_sound = unpackers[kind](ids, exact, *own)
        sound.append(is_sound)
    wrong = tf.gather([variable.name for variable in packed], tf.argmin(tf.cast(tf.stack(sound), tf.int32)))
    fault = tf.where(tf.reduce_all(sound), "", tf.strings.join(["has wrong packed rows for ", wrong]))
    return [fault, _as_one([by_key[key] for key in schema.keys])]


def _unpack(
    ids: Tensor, exact: Tensor, places: Tensor, codes: Tensor, *scales: Tensor
) -> tuple[Tensor, Tensor]:
    """All rows in the order of `ids`, `exact` at `places`, between them those that the codes give.

    And whether that is sound: every row is there once, and no scale makes a value that is none.
    """
    import tensorflow as tf

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
