"""Warm-up requests: a server runs them on a new version before the version takes traffic.

`assets.extra/tf_serving_warmup_requests` is an uncompressed TFRecord of `PredictionLog`s, at most 1,000. A
record that fails keeps the version from serving, so every given line is checked against its signature.
Where no requests are given, `made_up_requests` generates them.
Sources: tensorflow_serving/servables/tensorflow/saved_model_warmup.cc, tensorflow/core/lib/io/record_writer.h
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from numpy.typing import NDArray

from exporter.errors import UsageError, os_error
from exporter.storage.files import read_regular
from exporter.storage.layout import WARMUP_FILE
from exporter.storage.local_paths import quoted
from exporter.wire import rest_json, tensor_proto
from exporter.wire.protos import Proto, message_class
from exporter.wire.tfrecord import encode_records

MAX_RECORDS = 1000  # more than this and TF Serving refuses the version

DEFAULT_SIGNATURE = "serving_default"

_MAX_FILE_BYTES = 1 << 30
_EXAMPLE_METHODS = {"tensorflow/serving/classify", "tensorflow/serving/regress"}


class WarmupRequest(Struct, frozen=True):
    """One line of a request file: its number, signature, inputs by name, and the record for the server."""

    line: int
    signature: str
    inputs: Mapping[str, NDArray[Any]]
    record: bytes


def read_requests(path: Path, meta_graph: Proto) -> tuple[WarmupRequest, ...]:
    """Read the requests in a file, one a line, for the signatures of `meta_graph`.

    Return them in the file's order. Blank lines are skipped.

    Raises:
        LfsPointer: the file is a pointer of Git LFS.
        UsageError: the file cannot be read, holds no requests or too many; or a line is not a request that
            its signature takes (the message has line number, input and what was expected).
    """
    requests = []
    for line, text in _lines(path):
        try:
            requests.append(parse_request(text, meta_graph.signature_def, line))
        except ValueError as exc:
            raise UsageError(
                f"{path}, line {line}: {exc}",
                hint="write one request a line, as TF Serving's REST takes it: "
                '{"signature_name": "serving_default", "instances": [...]}',
            ) from None
    if not requests:
        raise UsageError(f"{path} holds no requests", hint="write one JSON request a line")
    if len(requests) > MAX_RECORDS:
        raise UsageError(
            f"{path} holds {len(requests)} requests; a server takes at most {MAX_RECORDS}",
            hint=f"head -n {MAX_RECORDS} {quoted(path)}",
        )
    return tuple(requests)


def parse_request(text: str, signatures: Mapping[str, Proto], line: int = 1) -> WarmupRequest:
    """Parse one request in the form of TF Serving's REST, and check it against its signature.

    `signatures` are the SignatureDefs by name, `line` is the number to record. Without `signature_name`, the
    request is for "serving_default".

    Raises:
        ValueError: it is not JSON, not a request, or not one that its signature takes.
    """
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as exc:  # the latter if it is nested too deeply
        raise ValueError(f"not JSON: {exc}") from None
    if not isinstance(document, dict):
        raise ValueError(f"expected an object, found {type(document).__name__}")
    name = document.get("signature_name", DEFAULT_SIGNATURE)
    if not isinstance(name, str) or name not in signatures:
        raise ValueError(f"no signature {name!r}; the model has {', '.join(sorted(signatures)) or 'none'}")
    signature = signatures[name]
    if takes_examples(signature):
        return examples_request(name, signature, document, line)
    if "examples" in document:
        raise ValueError(f"signature {name!r} is for predict and takes 'instances' or 'inputs'")
    return tensors_request(name, rest_json.predict_inputs(document, signature), line)


def takes_examples(signature: Proto) -> bool:
    """True for a signature of Classify or Regress, False for one of Predict."""
    return signature.method_name in _EXAMPLE_METHODS


def tensors_request(name: str, inputs: Mapping[str, NDArray[Any]], line: int = 1) -> WarmupRequest:
    """Return a Predict request of arrays, by the names of inputs, for the signature `name`.

    `line` is the number to record. Raises ValueError for an array of a type that TensorFlow lacks.
    """
    log = message_class("serving.PredictionLog")()
    request = log.predict_log.request
    request.model_spec.signature_name = name
    for key, array in inputs.items():
        tensor_proto.fill(request.inputs[key], array)
    return WarmupRequest(line, name, inputs, log.SerializeToString(deterministic=True))


def examples_request(
    name: str, signature: Proto, document: Mapping[str, Any], line: int = 1
) -> WarmupRequest:
    """Return a Classify or Regress request of the examples in a document, under its key `examples`.

    `line` is the number to record. `signature` is the SignatureDef with the name `name`. Raises ValueError if
    the document has no examples, or bad ones.
    """
    method = signature.method_name.rpartition("/")[2]
    if "examples" not in document:
        raise ValueError(f"signature {name!r} is for {method}: expected the key 'examples'")
    log = message_class("serving.PredictionLog")()
    request = getattr(log, f"{method}_log").request
    request.model_spec.signature_name = name
    request.input.CopyFrom(rest_json.examples_input(document))
    examples = rest_json.serialized_examples(request.input)
    inputs = dict.fromkeys(signature.inputs, examples)
    return WarmupRequest(line, name, inputs, log.SerializeToString(deterministic=True))


def write_warmup(requests: Iterable[WarmupRequest], directory: Path) -> Path:
    """Write the requests' records, in order, into the SavedModel `directory`; return the file's path.

    An existing file is replaced.

    Raises:
        DiskFull, PublishError: it cannot be written.
    """
    path = directory / WARMUP_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_records(request.record for request in requests))
    except OSError as exc:
        raise os_error(exc, path) from exc
    return path


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = read_regular(path, _MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(
            f"cannot read warm-up requests from {path}",
            cause=str(exc),
            hint="name a text file with --requests",
        ) from exc
    # Not `splitlines`: it also splits at U+2028 and others, which JSON allows within a string.
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
