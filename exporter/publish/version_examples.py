"""Values that a published version knows: of a recorded request, of its vocabularies, of its tables.

Of each table the first rows are read, through maps of the files. Values are what the version was published
with: deltas that a server applied since may have brought other keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from msgspec import Struct

from exporter.catalog import Catalog, TensorRef
from exporter.checkpoint.tensor_bundle import memory_map, read_array, read_catalog
from exporter.errors import CorruptFile, UsageError
from exporter.graph.fed_lookups import (
    INTEGERS,
    WHOLE_LINE,
    ByKeys,
    ByRows,
    FedInput,
    FromFile,
    Kept,
    Listed,
    Lookup,
    fed_lookups,
)
from exporter.graph.graph_files import read_saved_model
from exporter.graph.saved_model import choose_graph
from exporter.publish.versions import VersionDir, lease
from exporter.storage.files import below, regular_file
from exporter.storage.layout import ASSETS_DIRECTORY, VARIABLES_PREFIX, WARMUP_FILE
from exporter.subgraph.make_updatable import UPDATE_SIGNATURE
from exporter.tables.geometry import TableGeometry
from exporter.tables.lookup import first_defaults
from exporter.tables.parts import INDEX_ROWS, INDEX_SEEDS, KEYS
from exporter.wire.dtypes import Array, DType
from exporter.wire.protos import Proto, message_class
from exporter.wire.tensor_proto import to_array
from exporter.wire.tfrecord import DamagedRecord, read_records

Value = int | str

_MOST = 16  # values of an input: an example shows a few
_LOOKED_AT = 1 << 10  # keys of a vocabulary or a table, from its beginning
_MOST_FILE_BYTES = 1 << 20  # of a vocabulary in a file
_MOST_KEPT = 1 << 18  # keys of a lookup table: where a string begins, the lengths of all tell
_MOST_KEPT_BYTES = 1 << 23
_MOST_RECORD_BYTES = 1 << 22  # a request that people read
_NUMBER = re.compile(rb"-?[0-9]{1,20}")


class VersionExample(Struct, frozen=True):
    """What is known of the requests that a signature of a version gets.

    `recorded` is a request of its warm-up that somebody gave: of Predict, Classify or Regress. `values` has,
    for inputs that the version looks up, some that it has entries or rows for.
    """

    recorded: Proto | None
    values: Mapping[str, tuple[Value, ...]]


def example_of(version: VersionDir, name: str, signature: Proto) -> VersionExample:
    """What a version tells of the signature `name`, which a server says is `signature`.

    Raises:
        UsageError: the version's own signature of that name is another one.
        CheckpointError, GraphError: its files are damaged.
        ManifestError: it is being removed, or its manifest is damaged.
    """
    held: AbstractContextManager[Any] = lease(version.path) if version.has_manifest else nullcontext()
    with held:
        meta_graph = choose_graph(read_saved_model(version.path), version.path, None)
        own = meta_graph.signature_def.get(name)
        if own is None or _types(own) != _types(signature):
            raise UsageError(
                f"{version.path} is not what the server serves: its signature {name!r} is another one",
                cause=f"it has {', '.join(sorted(meta_graph.signature_def)) or 'no signatures'}",
                hint="name the directory that the server loads this model from with --model-base-path",
            )
        recorded = _recorded(version.path, name, signature)
        if recorded is not None:
            return VersionExample(recorded, {})
        known = _Known(version.path, meta_graph)
        found = fed_lookups(meta_graph, own, _update_scope(meta_graph))
        values = {key: known.values(fed, DType(signature.inputs[key].dtype)) for key, fed in found.items()}
        return VersionExample(None, {key: some for key, some in values.items() if some})


def _types(signature: Proto) -> dict[str, int]:
    return {key: info.dtype for key, info in signature.inputs.items()}


def _update_scope(meta_graph: Proto) -> str:
    """The beginning of the names of the nodes that take deltas; "" if there are none."""
    # They compute a signature once more, in a loop, where its inputs cannot be followed.
    update = meta_graph.signature_def.get(UPDATE_SIGNATURE)
    tensor = "" if update is None else next((info.name for info in update.outputs.values()), "")
    return tensor.partition("/")[0] + "/" if "/" in tensor else ""


def _recorded(version: Path, name: str, signature: Proto) -> Proto | None:
    """The first request in a version's warm-up for a signature, unless it is generated; None without one."""
    path = version / WARMUP_FILE
    try:
        with regular_file(path) as file:
            for record in read_records(file):
                request = _request(record) if len(record) <= _MOST_RECORD_BYTES else None
                if request is None or (request.model_spec.signature_name or "serving_default") != name:
                    continue
                if _fits(request, signature) and _is_given(request):
                    return request
    except FileNotFoundError:
        pass
    except (DamagedRecord, DecodeError) as error:
        raise CorruptFile(f"{path} holds no warm-up requests", cause=str(error)) from error
    return None


def _request(record: bytes) -> Proto | None:
    """The request of a record; None if it is of another kind than Predict, Classify and Regress."""
    log = message_class("serving.PredictionLog").FromString(record)
    kind = log.WhichOneof("log_type")
    return getattr(log, kind).request if kind in ("predict_log", "classify_log", "regress_log") else None


def _fits(request: Proto, signature: Proto) -> bool:
    method = request.DESCRIPTOR.name.removesuffix("Request")
    takes: str = signature.method_name.rpartition("/")[2]
    if method != "Predict":
        return takes == {"Classification": "classify", "Regression": "regress"}.get(method)
    sent = {key: tensor.dtype for key, tensor in request.inputs.items()}
    return takes not in ("classify", "regress") and sent == _types(signature)


def _is_given(request: Proto) -> bool:
    """True unless a request is of zeros, empty strings and empty examples, as generated ones are."""
    if request.DESCRIPTOR.name != "PredictRequest":
        examples = request.input.example_list.examples or request.input.example_list_with_context.examples
        return any(example.features.feature for example in examples)
    try:
        arrays = [to_array(tensor, _MOST_RECORD_BYTES) for tensor in request.inputs.values()]
    except ValueError:  # a server refuses it, too
        return False
    return any(bool(value) for array in arrays for value in array.ravel().tolist())


class _Known:
    """The keys and rows that a version has."""

    def __init__(self, version: Path, meta_graph: Proto) -> None:
        self._version, self._meta_graph = version, meta_graph

    def values(self, fed: FedInput, dtype: DType) -> tuple[Value, ...]:
        """Some values of an input that lead to entries and rows of the version; none if that is not known."""
        if dtype is not DType.STRING and dtype not in INTEGERS:
            return ()
        rows = [lookup.rows for lookup in fed.lookups if isinstance(lookup, ByRows)]
        most = min([*rows, 1 << 63 if dtype is DType.STRING else int(np.iinfo(dtype.numpy).max) + 1])
        least = 0 if rows or dtype is DType.STRING else int(np.iinfo(dtype.numpy).min)
        for lookup in fed.lookups:
            if isinstance(lookup, ByRows):
                continue
            read = (_value(key, dtype) for key in self._keys(lookup))
            found = [value for value in dict.fromkeys(read) if value is not None]
            if dtype is DType.STRING:
                found = [text for text in found if not fed.altered or _is_plain(str(text))]
            else:
                found = [number for number in found if least <= int(number) < most]
            # 0 and "" often stand for nothing: another one shows more, if there is one
            if found := [value for value in found if value] or found:
                return tuple(found[:_MOST])
        if rows and fed.is_followed and dtype is not DType.STRING:
            return tuple(range(min(1, most - 1), min(_MOST, most)))
        return ()

    def _keys(self, lookup: Lookup) -> Iterable[int | bytes]:
        match lookup:
            case FromFile():
                return self._of_file(lookup)
            case Listed(keys):
                return keys.tolist()  # type: ignore[no-any-return]  # numpy says Any
            case Kept():
                return self._of_lookup_table(lookup)
            case ByKeys(table):
                return self._of_table(table)
        return ()

    def _of_file(self, lookup: FromFile) -> Iterator[bytes]:
        directory = self._version / ASSETS_DIRECTORY
        path = below(directory, lookup.asset, f"{self._version} names an asset:", CorruptFile)
        try:
            with regular_file(path) as file:
                content = file.read(_MOST_FILE_BYTES)
                is_cut = bool(file.read(1))
        except FileNotFoundError:
            raise CorruptFile(f"{self._version} has no {path}, which its graph reads") from None
        lines = content.split(b"\n")
        lines = lines[:-1] if is_cut else lines
        for line in lines[:_LOOKED_AT]:
            text = line.replace(b"\r", b"")  # as TensorFlow reads lines
            if lookup.column == WHOLE_LINE:
                yield text
            else:
                columns = text.split(lookup.delimiter.encode())
                yield from columns[lookup.column : lookup.column + 1] if lookup.column >= 0 else ()

    def _of_lookup_table(self, lookup: Kept) -> Iterable[int | bytes]:
        ref = self._catalog.tensors.get(lookup.tensor)
        if ref is None or not ref.shape or ref.elements != ref.shape[0]:  # keys of vectors have more
            return ()
        # Of a table with all buckets, most of which are empty, the first thousand may hold no key.
        if ref.elements > _MOST_KEPT or ref.bytes_ > _MOST_KEPT_BYTES:
            keys = np.empty(0) if ref.dtype is DType.STRING or ref.slices else self._first(ref)
        else:
            keys = read_array(self._catalog, ref)
        there = (key for key in keys.ravel().tolist() if key not in lookup.empty)
        return islice(there, _LOOKED_AT)

    def _of_table(self, table: str) -> list[int]:
        """Keys of the first rows of a table by keys, of those that are in its index."""
        named = [self._catalog.tensors.get(f"{table}/{part}") for part in (INDEX_SEEDS, INDEX_ROWS, KEYS)]
        refs = [ref for ref in named if ref is not None and len(ref.shape) == 1]
        if len(refs) < len(named):
            return []
        seeds, rows, keys = refs
        (groups,), (slots,), (capacity,) = seeds.shape, rows.shape, keys.shape
        try:
            first_default = self._first_defaults.get(table, capacity)
            geometry = TableGeometry.of_shapes(groups, slots, capacity, capacity - first_default)
            found = self._first(keys).astype(np.int64)[: geometry.usable_rows]
            seeds_of, row_of = memory_map(self._catalog, seeds), memory_map(self._catalog, rows)
            live: list[int] = []
            # A few at a time: around each of their slots, pages of the file are read.
            for start in range(0, len(found), _MOST):
                some = found[start : start + _MOST]
                in_groups = geometry.groups_of(some)
                held = row_of[geometry.slots_of(some, in_groups, seeds_of[in_groups])]
                live += some[held == np.arange(start, start + len(some))].tolist()
                if len(live) > _MOST:
                    break
        except (ValueError, IndexError) as error:
            raise CorruptFile(f"table {table!r} of {self._version} is damaged", cause=str(error)) from error
        return live

    def _first(self, ref: TensorRef) -> Array:
        """The first elements of a tensor of one dimension, perhaps in slices, as far as they are stored."""
        if ref.extent is not None:
            return memory_map(self._catalog, ref)[:_LOOKED_AT]
        found = np.empty(0, ref.dtype.numpy)
        for part in sorted(ref.slices, key=lambda part: part.spec.starts):
            if len(found) >= _LOOKED_AT or part.extent is None or part.spec.starts[0] != len(found):
                break
            piece = memory_map(self._catalog, ref, part)
            found = np.concatenate([found, piece[: _LOOKED_AT - len(found)]])
        return found

    @cached_property
    def _catalog(self) -> Catalog:
        return read_catalog(self._version / VARIABLES_PREFIX)

    @cached_property
    def _first_defaults(self) -> Mapping[str, int]:
        return first_defaults(self._meta_graph.graph_def)


def _value(key: object, dtype: DType) -> Value | None:
    """A key as an input of this dtype takes it; None if it is of another type, or no text."""
    if dtype is DType.STRING:
        try:
            return key.decode() if isinstance(key, bytes) else None
        except UnicodeDecodeError:
            return None
    if isinstance(key, bytes):
        return int(key) if _NUMBER.fullmatch(key) else None
    return key if isinstance(key, int) else None


def _is_plain(text: str) -> bool:
    """True for a text that is one word, in lower case, without punctuation."""
    return text.isalnum() and text == text.lower()
