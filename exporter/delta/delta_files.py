"""Write deltas as tensor bundles, and read them with a check of their structure.

The format is in `format`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct

from exporter.catalog import Catalog, TensorRef
from exporter.checkpoint.tensor_bundle import (
    BundleWriter,
    check_tensor,
    memory_map,
    read_array,
    read_catalog,
)
from exporter.delta.format import (
    FORMAT_VERSION,
    LINEAGE_KEY,
    PACKINGS,
    POSITION_KEY,
    SCHEMA_KEY,
    Change,
    ChangeKind,
    Delta,
    DeltaHeader,
    Flag,
    Rows,
    Schema,
    ServedVariable,
    check_lookups,
    count_rows,
)
from exporter.delta.packing import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    PackedRows,
    Packing,
    RowValues,
    SlicedRows,
    StoredRows,
)
from exporter.errors import CorruptFile, UnsupportedFormat
from exporter.options import DeltaDtype
from exporter.wire.dtypes import Array, DType


def write_delta(
    prefix: Path, schema: Schema, header: DeltaHeader, changes: Mapping[str, Change]
) -> tuple[TensorRef, ...]:
    """Write the bundle `prefix`.index and .data-00000-of-00001, unsynced.

    Return the tensors that were written. Existing files are replaced. A variable without a change is empty in
    the bundle. The header's packing changes no value: rows that packing would change are stored exactly.

    Raises:
        ValueError: a change does not fit its variable, or names a variable that the schema does not have;
            keys and values of a lookup table do not match; or the header has another schema.
        OSError: the files cannot be written.
    """
    if header.schema_digest != schema.digest:
        raise ValueError("the header names another schema")
    unknown = changes.keys() - {variable.name for variable in schema.variables}
    if unknown:
        raise ValueError(f"the schema has no variable {min(unknown)!r}")
    check_lookups(schema, changes)
    # Every change is checked before the first byte is written.
    tensors = [(v, list(_tensors(v, changes.get(v.name)))) for v in schema.variables]
    with BundleWriter(prefix) as writer:
        for key, array in header_tensors(header, count_rows(changes)).items():
            writer.add(key, array)
        for variable, arrays in tensors:
            _add(writer, variable, arrays, header.packing)
    return writer.tensors


class DeltaTensors(Struct, frozen=True):
    """A delta without its values: for each changed variable, the tensors with the names of `tensor_keys`."""

    header: DeltaHeader
    catalog: Catalog
    tensors: Mapping[str, tuple[TensorRef, ...]]


def read_tensors(prefix: Path, schema: Schema) -> DeltaTensors:
    """Read index and header of the delta at `prefix`, and check them against `schema`.

    Raises:
        UnsupportedFormat: it is not a delta, has another format version, or was made for other variables.
        CorruptFile: a checksum or the number of rows is wrong, or a tensor belongs to no variable.
        CheckpointError: it cannot be read (CheckpointNotFound: it does not exist).
        DiskFull, PublishError: bytes fetched from a store cannot be kept.
    """
    catalog = read_catalog(prefix)
    header, rows = _header(catalog)
    if header.schema_digest != schema.digest:
        raise UnsupportedFormat(
            f"{prefix} was made for other variables",
            cause=f"its schema is {header.schema_digest[:12]}, expected {schema.digest[:12]}",
        )
    found = {variable.name: _refs(catalog, variable, header.packing) for variable in schema.variables}
    tensors = {name: refs for name, refs in found.items() if refs}
    _check_nothing_else(catalog, schema, header.packing)
    held = sum(tensors[v.name][0].shape[0] for v in schema.variables if v.is_table and v.name in tensors)
    if held != rows:
        raise CorruptFile(f"{prefix} is damaged: it declares {rows} rows and holds {held}")
    return DeltaTensors(header, catalog, tensors)


def read_delta(prefix: Path, schema: Schema) -> Delta:
    """Read the delta at `prefix`, check it against `schema` and map its values.

    Checksums of values are not verified.

    Raises:
        UnsupportedFormat: it is not a delta, has another format version, or was made for other variables.
        CorruptFile: index or header are damaged, or row numbers, packed rows or lookup tables are wrong.
        CheckpointError: it cannot be read (CheckpointNotFound: it does not exist).
        DiskFull, PublishError: bytes fetched from a store cannot be kept.
    """
    return with_values(read_tensors(prefix, schema), schema)


def with_values(read: DeltaTensors, schema: Schema) -> Delta:
    """Return a delta with the tensors of `read` mapped into memory; checksums of rows are not verified.

    Raises CorruptFile if row numbers, packed rows or lookup tables are wrong, CheckpointChanged if a shard
    vanished or shrank, CheckpointError if a shard cannot be read, DiskFull or PublishError if bytes fetched
    from a store cannot be kept.
    """
    catalog = read.catalog
    variables = [variable for variable in schema.variables if variable.name in read.tensors]
    try:
        found = {v.name: _change(catalog, v, read.tensors[v.name]) for v in variables}
        check_lookups(schema, found)
    except ValueError as exc:
        raise CorruptFile(f"{catalog.prefix} is damaged: {exc}") from exc
    return Delta(read.header, catalog, found)


def row_numbers(read: DeltaTensors, variable: ServedVariable) -> Array:
    """Return the row numbers, int64 [n] ascending, of a table's rows in a delta.

    Empty if the delta does not change the table. The numbers' checksum is verified. Raises CorruptFile if
    they are damaged, CheckpointError (and subclasses) if they cannot be read, DiskFull or PublishError if
    bytes fetched from a store cannot be kept.
    """
    refs = read.tensors.get(variable.name)
    if refs is None:
        return np.empty(0, np.int64)
    check_tensor(read.catalog, refs[0])
    ids = _array(read.catalog, refs[0])
    try:
        _check_numbers(variable, ids)
    except ValueError as exc:
        raise CorruptFile(f"{read.catalog.prefix} is damaged: {exc}") from exc
    return ids


def _check_nothing_else(catalog: Catalog, schema: Schema, packing: DeltaDtype | None) -> None:
    """Raise CorruptFile if the catalog has a tensor that is neither the header's nor a variable's.

    Its values would be lost. `packing` is the delta's, None for exact rows.
    """
    packed = {tensor.key for variable in schema.variables for tensor in variable.packed(packing)}
    known = {POSITION_KEY, LINEAGE_KEY, SCHEMA_KEY, *schema.keys, *packed}
    if unknown := sorted(catalog.tensors.keys() - known):
        raise CorruptFile(f"{catalog.prefix} is damaged: it holds {unknown[0]!r}, which is of no variable")


def header_tensors(header: DeltaHeader, rows: int) -> dict[str, Array]:
    """Return the header tensors, by name, of a delta whose tables have `rows` rows together."""
    flags = Flag.ONLY_FROM if header.only_from else Flag(0)
    flags |= PACKINGS[header.packing] if header.packing else Flag(0)
    fields = (FORMAT_VERSION, header.from_position, header.to_position, header.step, flags, rows)
    return {
        POSITION_KEY: np.array(fields, np.int64),
        LINEAGE_KEY: np.array(header.lineage.encode(), object),
        SCHEMA_KEY: np.array(header.schema_digest.encode(), object),
    }


def _header(catalog: Catalog) -> tuple[DeltaHeader, int]:
    """Return the header of a delta, read from its tensors, and the number of rows that it declares.

    Raises UnsupportedFormat for another version, unknown flags or a bundle that is not a delta, CorruptFile
    if its values are impossible or damaged, CheckpointChanged or CheckpointError if they cannot be read,
    DiskFull or PublishError if bytes fetched from a store cannot be kept.
    """
    position = _read(catalog, POSITION_KEY, DType.INT64, (6,))
    version, start, end, step, flags, rows = position.tolist()
    packings = [packing for packing, flag in PACKINGS.items() if flags & flag]
    if version != FORMAT_VERSION or flags & ~sum(Flag) or len(packings) > 1:
        raise UnsupportedFormat(
            f"{catalog.prefix} has delta format {version} with flags {flags}; "
            f"this program reads format {FORMAT_VERSION} with flags {Flag.ONLY_FROM} and one of "
            f"{', '.join(str(int(flag)) for flag in PACKINGS.values())}",
            hint="use the export-model that published it, or a newer one",
        )
    lineage = _read(catalog, LINEAGE_KEY, DType.STRING, ()).item().decode(errors="replace")
    digest = _read(catalog, SCHEMA_KEY, DType.STRING, ()).item().decode(errors="replace")
    try:
        only_from, packing = bool(flags & Flag.ONLY_FROM), packings[0] if packings else None
        return DeltaHeader(lineage, digest, start, end, step, only_from, packing), rows
    except ValueError as exc:
        raise CorruptFile(f"{catalog.prefix} is damaged: {exc}") from exc


def _read(catalog: Catalog, key: str, dtype: DType, shape: tuple[int, ...]) -> Array:
    return read_array(catalog, _ref(catalog, key, dtype, shape))


def _ref(catalog: Catalog, key: str, dtype: DType, shape: tuple[int | None, ...]) -> TensorRef:
    """Return the tensor `key`, which must have this dtype and shape (None: any size).

    Raises UnsupportedFormat if it is absent, CorruptFile if it has another dtype or shape, or is not stored
    completely.
    """
    ref = catalog.tensors.get(key)
    if ref is None:
        raise UnsupportedFormat(f"{catalog.prefix} is not a delta: it has no tensor {key!r}")
    fits = len(ref.shape) == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, ref.shape, strict=True)
    )
    if ref.dtype is not dtype or not fits or not _is_whole(ref):
        wanted = ", ".join("n" if size is None else str(size) for size in shape)
        raise CorruptFile(
            f"{catalog.prefix} is damaged: {key!r} is {ref.dtype.label}{list(ref.shape)}, "
            f"expected {dtype.label}[{wanted}]"
        )
    return ref


def tensor_keys(variable: ServedVariable, packing: DeltaDtype | None) -> tuple[str, ...]:
    """Return the names of a variable's tensors in a delta, in the order in which `read_tensors` returns them.

    Of a table: ids, values and the tensors of packed rows, if any; of a dense variable: its value. `packing`
    is the delta's, None for exact rows.
    """
    return (*variable.keys, *(tensor.key for tensor in variable.packed(packing)))


def _is_whole(ref: TensorRef) -> bool:
    """True if all of a tensor is stored, in one piece or in slices of whole rows."""
    return ref.is_complete and all(
        part.extent is not None and part.spec.lengths[1:] == ref.shape[1:] for part in ref.slices
    )


def _refs(catalog: Catalog, variable: ServedVariable, packing: DeltaDtype | None) -> tuple[TensorRef, ...]:
    """Return the tensors with the names of `tensor_keys`, in that order.

    Empty if the variable did not change. `packing` is the delta's, None for exact rows. Raises CorruptFile if
    they do not fit the variable or one another, UnsupportedFormat if one is absent.
    """
    refs = [
        _ref(catalog, key, dtype, (None, *(variable.element_shape if key == variable.keys[-1] else ())))
        for key, dtype in zip(variable.keys, variable.dtypes, strict=True)
    ]
    # Both: if all rows of a table are packed, there are ids and no values.
    if refs[-1].shape[0] == 0 and refs[0].shape[0] == 0:
        return ()
    if not variable.is_table and refs[0].shape[0] != 1:
        raise CorruptFile(f"{catalog.prefix} is damaged: {refs[0].shape[0]} values of {variable.name!r}")
    packed = variable.packed(packing)
    if variable.is_table and not packed and refs[0].shape != refs[1].shape[:1]:
        ids, rows = refs[0].shape[0], refs[1].shape[0]
        raise CorruptFile(f"{catalog.prefix} is damaged: {variable.name!r}: int64[{ids}] ids for {rows} rows")
    extra = [_ref(catalog, each.key, each.dtype, (None, *each.element_shape)) for each in packed]
    if any(ref.extent is None for ref in ([] if variable.is_table and not packed else [*refs, *extra])):
        raise CorruptFile(f"{catalog.prefix} is damaged: tensors of {variable.name!r} are in slices")
    return (*refs, *extra)


def _change(catalog: Catalog, variable: ServedVariable, refs: Sequence[TensorRef]) -> Change:
    """Map the tensors of one variable, in the order of `tensor_keys`; return its rows or its value.

    Raises ValueError if they are not rows or a value of this variable, CheckpointChanged or CheckpointError
    if a shard vanished, shrank or cannot be read, CorruptFile if strings are damaged, DiskFull or
    PublishError if bytes fetched from a store cannot be kept.
    """
    if not variable.is_table:
        return _array(catalog, refs[0])[0, ...]  # `...`: of a scalar, an array and no number
    ids = _array(catalog, refs[0])
    if refs[1].extent is None:
        values: RowValues = SlicedRows(_slices(catalog, refs[1]))
    elif len(refs) > len(variable.keys):
        values = _unpacked(catalog, variable, refs[1:])
    else:
        values = _array(catalog, refs[1])
    _check_ids(variable, ids, values)
    return Rows(ids, values)


def _unpacked(catalog: Catalog, variable: ServedVariable, refs: Sequence[TensorRef]) -> PackedRows:
    values, places, codes, *scales = (memory_map(catalog, ref) for ref in refs)
    rows = len(places) + len(codes)
    if len(places) != len(values):
        raise ValueError(f"{variable.name!r}: {len(places)} places for {len(values)} exact rows")
    if len(places) and not ((places[1:] > places[:-1]).all() and places[0] >= 0 and places[-1] < rows):
        raise ValueError(f"{variable.name!r}: places are not strictly increasing in 0-{rows - 1}")
    for scale in scales:
        if len(scale) != len(codes):
            raise ValueError(f"{variable.name!r}: {len(scale)} scales for {len(codes)} rows")
        if not ((scale == 0) | (scale >= SMALLEST_SCALE) & (scale <= LARGEST_SCALE)).all():
            raise ValueError(f"{variable.name!r}: a scale is none, from {SMALLEST_SCALE} to {LARGEST_SCALE}")
    return PackedRows(values, places, codes, scales[0] if scales else None)


def _array(catalog: Catalog, ref: TensorRef) -> Array:
    """Return a tensor as a map; as a copy in memory if it holds strings or is stored in slices.

    Of strings the checksum is verified, of other types it is not. Raises CorruptFile if it differs,
    CheckpointChanged or CheckpointError if a shard vanished, shrank or cannot be read, DiskFull or
    PublishError if bytes fetched from a store cannot be kept.
    """
    if ref.extent is None:
        return np.concatenate(_slices(catalog, ref))
    return read_array(catalog, ref) if ref.dtype is DType.STRING else memory_map(catalog, ref)


def _slices(catalog: Catalog, ref: TensorRef) -> list[Array]:
    return [memory_map(catalog, ref, part) for part in sorted(ref.slices, key=lambda part: part.spec.starts)]


def _add(
    writer: BundleWriter, variable: ServedVariable, arrays: Sequence[RowValues], packing: DeltaDtype | None
) -> None:
    """Write the tensors of a variable, given the arrays of `variable.keys` in order.

    With a packing (not None), rows are packed. Large values are written in pieces. Raises OSError if the
    files cannot be written.
    """
    extra = variable.packed(packing)
    if not extra or packing is None:
        for key, dtype, array in zip(variable.keys, variable.dtypes, arrays, strict=True):
            if isinstance(array, StoredRows):
                writer.add_chunks(key, dtype, array.shape, array.pieces())
            else:
                writer.add(key, array)
        return
    ids, rows = arrays
    packed = Packing.of(rows, packing)
    places, codes, *_ = extra
    exact_shape, codes_shape = (
        (count, *variable.shape[1:]) for count in (len(packed.exact), len(packed.packed))
    )
    writer.add(variable.keys[0], np.asarray(ids))
    writer.add_chunks(variable.keys[1], variable.dtype, exact_shape, packed.values())
    writer.add(places.key, packed.exact)
    writer.add_chunks(codes.key, codes.dtype, codes_shape, packed.codes())
    if packed.scales is not None:
        writer.add(extra[-1].key, packed.scales)


def _tensors(variable: ServedVariable, change: Change | None) -> Iterator[RowValues]:
    """Yield the arrays for `variable.keys`; empty ones if `change` is None.

    Raises ValueError if the change does not fit.
    """
    numpy = np.dtype(object) if variable.dtype is DType.STRING else variable.dtype.numpy
    if change is None:
        if variable.kind is ChangeKind.TABLE:
            yield np.empty(0, np.int64)
        yield np.empty((0, *(size or 0 for size in variable.element_shape)), numpy)
        return
    if isinstance(change, Rows) is not (variable.kind is ChangeKind.TABLE):
        raise ValueError(f"{variable.name!r} is {variable.kind.value}, its change is not")
    values = change.values if isinstance(change, Rows) else np.asarray(change)[np.newaxis, ...]
    if values.dtype != numpy or not variable.fits(values.shape[1:]):
        wanted = f"{variable.dtype.label}{list(variable.element_shape)}"
        raise ValueError(f"{variable.name!r} takes {wanted}, not {values.dtype}{list(values.shape[1:])}")
    if isinstance(change, Rows):
        _check_ids(variable, change.ids, values)
        yield change.ids
    yield values


def _check_ids(variable: ServedVariable, ids: Array, values: RowValues) -> None:
    if ids.dtype != np.int64 or ids.shape != values.shape[:1]:
        raise ValueError(f"{variable.name!r}: {ids.dtype}{list(ids.shape)} ids for {len(values)} rows")
    _check_numbers(variable, ids)


def _check_numbers(variable: ServedVariable, ids: Array) -> None:
    increasing = bool((ids[1:] > ids[:-1]).all())
    if len(ids) and not (increasing and ids[0] >= 0 and ids[-1] < variable.shape[0]):
        raise ValueError(
            f"{variable.name!r}: row numbers are not strictly increasing in 0-{variable.shape[0] - 1}"
        )
