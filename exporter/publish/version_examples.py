"""Example values in a published version: of a recorded request, its vocabularies, and its tables by keys.

Of each vocabulary and table the first keys are read, as the version was published: deltas that a server
applied since may have brought others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from exporter.checkpoint.tensor_bundle import memory_map, read_catalog
from exporter.errors import CorruptFile, UsageError
from exporter.graph.fed_lookups import WHOLE_LINE, ByKeys, FromFile, Lookup, fed_lookups
from exporter.graph.graph_files import read_saved_model
from exporter.graph.saved_model import choose_graph
from exporter.publish.versions import VersionDir, lease
from exporter.storage.files import below, regular_file
from exporter.storage.layout import ASSETS_DIRECTORY, VARIABLES_PREFIX, WARMUP_FILE
from exporter.tables.lookup import first_defaults
from exporter.tables.parts import KEYS
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto, message_class
from exporter.wire.tensor_proto import to_arrays
from exporter.wire.tfrecord import DamagedRecord, read_records

Value = int | str

_MOST = 16  # values per input: an example shows a few
_LOOKED_AT = 1 << 10  # keys of a vocabulary or a table, from its beginning
_MOST_FILE_BYTES = 1 << 20  # of a vocabulary in a file
_MOST_RECORD_BYTES = 1 << 22  # a request that people read


def example_of(version: VersionDir, name: str, signature: Proto) -> Proto | Mapping[str, tuple[Value, ...]]:
    """An example for the signature `name`, which a server says is `signature`: a request, or keys by input.

    It is the first warm-up request that a person gave (for Predict, Classify or Regress); without one, a
    mapping from each input to at most 16 keys that it looks up, empty for inputs whose keys are not known. A
    version with a manifest is leased meanwhile.

    Raises:
        UsageError: the version's own signature of that name differs.
        CheckpointError, GraphError: its files are damaged.
        ManifestError: it is being removed, or its manifest is damaged.
        OSError: a file in it cannot be read, or its file system has no locks.
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
        if (recorded := _recorded(version.path, name, signature)) is not None:
            return recorded
        values: dict[str, tuple[Value, ...]] = {}
        for key, lookups in fed_lookups(meta_graph, own).items():
            read = (_values(_keys(version.path, meta_graph, each), own.inputs[key].dtype) for each in lookups)
            values[key] = next(filter(None, read), ())
        return values


def _types(taken: Proto) -> dict[str, int]:
    """The dtype number of each input of a signature or a request, by the input's name."""
    return {key: each.dtype for key, each in taken.inputs.items()}


def _recorded(version: Path, name: str, signature: Proto) -> Proto | None:
    """The first warm-up request in a version for the signature `name` that was not generated; else None.

    CorruptFile if the file of warm-up requests is damaged, LfsPointer if it is a pointer of Git LFS, OSError
    if it exists but cannot be read.
    """
    path = version / WARMUP_FILE
    try:
        with regular_file(path) as file:
            for record in read_records(file):
                request = _request(record, signature) if len(record) <= _MOST_RECORD_BYTES else None
                of = None if request is None else request.model_spec.signature_name or "serving_default"
                if of == name and _is_given(request):
                    return request
    except FileNotFoundError:
        pass
    except (DamagedRecord, DecodeError) as error:
        raise CorruptFile(f"{path} holds no warm-up requests", cause=str(error)) from error
    return None


def _request(record: bytes, signature: Proto) -> Proto | None:
    """Return the request in a warm-up record; None if it is not of the signature's kind and inputs.

    DecodeError (of protobuf) if the record is damaged.
    """
    log = message_class("serving.PredictionLog").FromString(record)
    method = signature.method_name.rpartition("/")[2]
    kind = f"{method if method in ('classify', 'regress') else 'predict'}_log"
    request = getattr(log, kind).request if log.WhichOneof("log_type") == kind else None
    is_predict = request is not None and kind == "predict_log"
    return None if is_predict and _types(request) != _types(signature) else request


def _is_given(request: Proto) -> bool:
    """True if a request has any value but zeros, empty strings or empty examples, which generated ones have.

    False for one that cannot be decoded.
    """
    if request.DESCRIPTOR.name != "PredictRequest":
        examples = request.input.example_list.examples or request.input.example_list_with_context.examples
        return any(example.features.feature for example in examples)
    try:
        arrays = to_arrays(request.inputs, _MOST_RECORD_BYTES).values()
    except ValueError:  # a server refuses it, too
        return False
    return any(bool(value) for array in arrays for value in array.ravel().tolist())


def _values(keys: Iterable[object], dtype: int) -> tuple[Value, ...]:
    """Return up to 16 of the keys, in their order, that an input of this dtype (its number) accepts.

    At most the first 1,024 keys are looked at. Zeros and empty texts are left out; if some are plain
    lower-case words, only these are returned. Errors of reading lazy `keys` are raised as they are.
    """
    read = (_value(key, DType(dtype)) for key in islice(keys, _LOOKED_AT))
    found = [value for value in dict.fromkeys(read) if value]
    # A model may change other texts before it looks them up, or split them; and "[UNK]" stands for nothing.
    words = [text for text in found if isinstance(text, str) and text.isalnum() and text == text.lower()]
    return tuple((words or found)[:_MOST])


def _value(key: object, dtype: DType) -> Value | None:
    try:
        if dtype is DType.STRING:
            return key.decode() if isinstance(key, bytes) else None
        number = int(key) if isinstance(key, bytes) else key
    except ValueError:  # no UTF-8, or no number
        return None
    if not isinstance(number, int) or dtype.numpy.kind not in "iu":
        return None
    limits = np.iinfo(dtype.numpy)
    return number if limits.min <= number <= limits.max else None


def _keys(version: Path, meta_graph: Proto, lookup: Lookup) -> Iterable[object]:
    match lookup:
        case FromFile():
            return _of_file(version, lookup)
        case ByKeys(table):
            return _of_table(version, meta_graph, table)
        case _:
            return lookup.keys


def _of_file(version: Path, lookup: FromFile) -> Iterator[bytes]:
    # a graph names its assets, and may name any path
    path = below(version / ASSETS_DIRECTORY, lookup.asset, f"{version} names an asset:", CorruptFile)
    try:
        with regular_file(path) as file:
            content = file.read(_MOST_FILE_BYTES)
            is_cut = bool(file.read(1))
    except FileNotFoundError:
        raise CorruptFile(f"{version} has no {path}, which its graph reads") from None
    lines = content.split(b"\n")
    for line in lines[:-1] if is_cut else lines:
        text = line.replace(b"\r", b"")  # as TensorFlow reads lines
        if lookup.column == WHOLE_LINE:
            yield text
        else:  # of column -1, the line's number, nothing
            yield from text.split(lookup.delimiter.encode())[lookup.column : lookup.column + 1]


def _of_table(version: Path, meta_graph: Proto, table: str) -> list[object]:
    """Return up to 1024 keys, of the first rows of a version's table; empty if the version has no such table.

    CorruptFile if the table is damaged, another CheckpointError if the bundle cannot be read, GraphError if a
    constant of the graph that describes the table is damaged.
    """
    catalog = read_catalog(version / VARIABLES_PREFIX)
    ref = catalog.tensors.get(f"{table}/{KEYS}")
    if ref is None:
        return []
    try:
        # The row before the default rows has no key, and unused rows have zeros: see `tables.geometry`.
        end = first_defaults(meta_graph.graph_def).get(table, 1) - 1
        part = min(ref.slices, key=lambda each: each.spec.starts, default=None)
        return list(memory_map(catalog, ref, part)[: min(max(end, 0), _LOOKED_AT)].tolist())
    except (ValueError, IndexError) as error:
        raise CorruptFile(f"table {table!r} of {version} is damaged", cause=str(error)) from error
