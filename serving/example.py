"""A request that fits a signature, made from its types and shapes: `serve-model predict --example`.

Its values are zeros and empty texts, or values from the files of a version: `known_example`.
"""

from __future__ import annotations

import base64
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from exporter.errors import UsageError
from exporter.publish.served import VersionState
from exporter.storage.local_paths import quoted
from exporter.terminal.server_access import WITHOUT_TLS, ServerAccess
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto
from exporter.wire.rest_json import REST_TYPES
from serving.documents import Form

if TYPE_CHECKING:
    from serving.client import ModelClient

_DEFAULT_SIGNATURE = "serving_default"
_MOST_VALUES = 1 << 20
_NOTHING: Mapping[str, Sequence[Any]] = {}


def known_example(
    client: ModelClient, base_path: Path, version: int, signature: Proto, name: str
) -> dict[str, Any]:
    """Return a request as `example` does, with values from the files of a version below a model base path.

    It is a request of the version's warm-up, or has values from its vocabularies and tables. `signature` is
    what the server says, `name` its name. `client` is asked only if the version is not below the base path,
    for the error's hint.

    Raises:
        UsageError: as `example`; or the version is not there, or its own signature of that name differs, or
            the tensors of the warm-up request fill more than 1 MiB of their shapes.
        CallFailed: the version is not there, and the server does not respond.
        CheckpointError, GraphError: files of the version are damaged.
        ManifestError: the base path cannot be listed; or the version is being removed, or its manifest is
            damaged.
        OSError: a file of the version cannot be read.
    """
    from exporter.publish.version_examples import example_of
    from exporter.publish.versions import version_dirs

    there = {each.version: each for each in reversed(version_dirs(base_path))}
    if version not in there:
        raise _absent(client, base_path, version, name, there)
    found = example_of(there[version], name, signature)
    if isinstance(found, Mapping):
        return example(signature, name, found)
    return _recorded(found, signature, name)


def _absent(
    client: ModelClient, base_path: Path, version: int, name: str, there: Mapping[int, object]
) -> UsageError:
    from exporter.publish.versions import likely_model, version_dirs

    asked = f"serve-model predict {client.address} --model-name {quoted(client.model)} --example"
    asked += "" if name == _DEFAULT_SIGNATURE else f" --signature {quoted(name)}"
    available = (each.version for each in client.status() if each.state is VersionState.AVAILABLE)
    both = max((each for each in available if each in there), default=None)
    near = filter(None, (base_path.absolute().parent, likely_model(base_path)))
    meant = next((path for path in near if any(each.version == version for each in version_dirs(path))), None)
    if both is not None:
        hint = f"{asked} --version {both} --model-base-path {quoted(base_path)}"
    elif meant is not None:
        hint = f"{asked} --model-base-path {quoted(meant)}"
    else:
        hint = f"name the directory that the server loads it from; an example of zeros: {asked}"
    versions = ", ".join(map(str, sorted(there))) or "none"
    return UsageError(
        f"version {version} of {client.model}, which {client.address} answers with, is not in {base_path}",
        cause=f"versions that are there: {versions}",
        hint=hint,
    )


def example(signature: Proto, name: str, known: Mapping[str, Sequence[Any]] = _NOTHING) -> dict[str, Any]:
    """Return a request in REST's JSON: one row if inputs and outputs have rows, otherwise whole inputs.

    Numbers are zero and texts empty, except in inputs with `known` values (by input name), which are used in
    turn; unknown sizes are 1. `name` is the signature's; the request does not name the default one.

    Raises:
        UsageError: the signature classifies or regresses, so that it takes Examples of unknown features; or
            an input has a type without JSON, or more than 2^20 values.
    """
    method = signature.method_name.rpartition("/")[2]
    if method in ("classify", "regress"):
        raise UsageError(
            f"signature {name!r} takes Examples, and does not say with which features",
            hint='write {"examples": [{"FEATURE": VALUE}]}',
        )
    shapes = {key: _shape(info) for key, info in sorted(signature.inputs.items())}
    has_rows = _has_rows(signature)
    values = {
        key: _value(key, signature.inputs[key], sizes[1:] if has_rows else sizes, known.get(key))
        for key, sizes in shapes.items()
    }
    return _named(name) | ({"instances": [values]} if has_rows else {"inputs": values})


def _named(name: str) -> dict[str, Any]:
    return {} if name == _DEFAULT_SIGNATURE else {"signature_name": name}


def _has_rows(signature: Proto) -> bool:
    """Return True if all inputs and outputs begin with a dimension of unknown size.

    Outputs of unknown rank do not count.
    """
    answers = [_shape(info) for info in signature.outputs.values() if not info.tensor_shape.unknown_rank]
    shapes = [*map(_shape, signature.inputs.values()), *answers]
    return all(sizes and sizes[0] < 0 for sizes in shapes)


def _recorded(request: Proto, signature: Proto, name: str) -> dict[str, Any]:
    """Return a warm-up request in REST's JSON: by rows if `example` has rows, and all inputs have as many.

    `name` is the signature's. UsageError for an input of a type without JSON, or if the request's tensors
    fill more than 1 MiB of their shapes.
    """
    from exporter.wire.tensor_proto import to_arrays
    from serving.rest_response import to_json

    if request.DESCRIPTOR.name != "PredictRequest":
        return _named(name) | _examples(request.input)
    for key in sorted(request.inputs):
        _require_json(key, _dtype(key, signature.inputs[key]))
    try:
        arrays = to_arrays(request.inputs)
    except ValueError as error:
        raise UsageError(
            "the first request of the version's warm-up is too large for an example",
            cause=str(error),
            hint="leave out --model-base-path for an example of zeros",
        ) from error
    values = {
        key: _texts(array.tolist()) if array.dtype == object else to_json(array, key)
        for key, array in arrays.items()
    }
    sizes = {array.shape[:1] for array in arrays.values()}
    if not (_has_rows(signature) and len(sizes) == 1 and sizes != {()}):
        return _named(name) | {"inputs": values}
    rows = zip(*values.values(), strict=True)
    return _named(name) | {"instances": [dict(zip(values, row, strict=True)) for row in rows]}


def _examples(given: Proto) -> dict[str, Any]:
    """Return the examples, and the `context` if any, of a `serving.Input`, in REST's JSON by these names."""
    if given.WhichOneof("kind") == "example_list":
        return {"examples": [_features(example) for example in given.example_list.examples]}
    listed = given.example_list_with_context
    return {"context": _features(listed.context), "examples": [_features(each) for each in listed.examples]}


def _features(example: Proto) -> dict[str, Any]:
    from serving.rest_response import shortest

    found = {}
    for name, feature in sorted(example.features.feature.items()):
        kind = feature.WhichOneof("kind")
        items = list(getattr(feature, kind).value) if kind else []
        items = [shortest(item) for item in items] if kind == "float_list" else _texts(items)
        found[name] = items[0] if len(items) == 1 else items
    return found


def _texts(value: Any) -> Any:
    """Return nested lists with texts in place of bytes; bytes that are not UTF-8 become `{"b64": ...}`."""
    if isinstance(value, list):
        return [_texts(item) for item in value]
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(value).decode()}


def _shape(info: Proto) -> tuple[int, ...]:
    return () if info.tensor_shape.unknown_rank else tuple(dim.size for dim in info.tensor_shape.dim)


def _require_json(key: str, dtype: DType) -> None:
    if dtype not in REST_TYPES:
        raise UsageError(
            f"input {key!r} is {dtype.label}, which REST's JSON does not have",
            hint="ask this signature by a gRPC client: serving.client.ModelClient",
        )


def _value(key: str, info: Proto, sizes: tuple[int, ...], known: Sequence[Any] | None) -> Any:
    dtype = _dtype(key, info)
    _require_json(key, dtype)
    if math.prod(max(size, 1) for size in sizes) > _MOST_VALUES:
        raise UsageError(
            f"input {key!r} has the shape {list(sizes)}, which is too large for an example",
            hint="ask this signature by a gRPC client: serving.client.ModelClient",
        )
    value: Any = "" if dtype is DType.STRING else False if dtype is DType.BOOL else 0
    value = 0.0 if dtype.is_floating else value
    return _nested(cycle(known or [value]), sizes)


def _dtype(name: str, info: Proto) -> DType:
    """Return the type of the input `name`, given its `TensorInfo`; UsageError if its number is unknown."""
    try:
        return DType(info.dtype)
    except ValueError as error:
        raise UsageError(
            f"the server says that input {name!r} is of a type that TensorFlow does not have",
            cause=str(error),
            hint="name the gRPC port of a model server, 8500 in TF Serving's image",
        ) from error


def _nested(values: Iterator[Any], sizes: tuple[int, ...]) -> Any:
    if not sizes:
        return next(values)
    return [_nested(values, sizes[1:]) for _ in range(max(sizes[0], 1))]


def written(
    request: dict[str, Any],
    signature: Proto,
    form: Form,
    *,
    address: str,
    model: str,
    version: int | None,
    access: ServerAccess = WITHOUT_TLS,
) -> str:
    """Return the request as JSON, as a command line for the REST port, or as a Python program, by `form`.

    `request` is a result of `example` or `known_example` for this signature. The command and the program ask
    `version`, or the newest one for None. `address` is HOST:PORT of gRPC, which the program reaches by
    `access`; the command expects REST at port 8501 without TLS, as in TensorFlow Serving. UsageError for a
    program with an input of an unknown type.
    """
    text = json.dumps(request)
    match form:
        case Form.JSON:
            return text
        case Form.CURL:
            of = model if version is None else f"{model}/versions/{version}"
            method = signature.method_name.rpartition("/")[2] if "examples" in request else "predict"
            url = f"http://{address.rpartition(':')[0]}:8501/v1/models/{of}:{method}"
            return f"curl -d {shlex.quote(text)} {shlex.quote(url)}"
        case Form.PYTHON:
            return "\n".join(_program(request, signature, address, model, version, access))


def _program(
    request: dict[str, Any],
    signature: Proto,
    address: str,
    model: str,
    version: int | None,
    access: ServerAccess,
) -> Iterator[str]:
    reached = {name: value for name, value in asdict(access).items() if value is not None}
    method = signature.method_name.rpartition("/")[2] if "examples" in request else "predict"
    needed = "import numpy as np", "from exporter.wire.rest_json import examples_input"
    yield needed[method != "predict"]
    yield f"from serving.client import ModelClient{', ServerAccess' if reached else ''}"
    yield ""
    if method == "predict":
        yield from _arrays(request, signature)
    else:
        given = {key: value for key, value in request.items() if key != "signature_name"}
        yield f"inputs = examples_input({given!r})"
    files = ", ".join(f"{name}={value!r}" for name, value in reached.items())
    by = f", access=ServerAccess({files})" if reached else ""
    yield f"with ModelClient({address!r}, {model!r}{by}) as client:"
    name = request.get("signature_name", _DEFAULT_SIGNATURE)
    of = "" if version is None else f", version={version}"
    yield f"    print(client.{method}(inputs, signature={name!r}{of}).{_ANSWERS[method]})"


_ANSWERS = {"predict": "outputs", "classify": "examples", "regress": "values"}


def _arrays(request: dict[str, Any], signature: Proto) -> Iterator[str]:
    rows = request.get("instances", [])
    values = request.get("inputs", {key: [row[key] for row in rows] for key in (rows[0] if rows else ())})
    yield "inputs = {"
    for key, value in values.items():
        dtype = _dtype(key, signature.inputs[key])
        kind = "object" if dtype is DType.STRING else f"np.{dtype.numpy.name}"
        yield f"    {key!r}: np.array({_literal(value)!r}, {kind.replace('np.bool', 'np.bool_')}),"
    yield "}"


def _literal(value: Any) -> Any:
    """Return the value with bytes in place of `{"b64": ...}`, also inside lists."""
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return base64.b64decode(value["b64"]) if isinstance(value, dict) else value
