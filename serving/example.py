"""A request that a signature takes, made of its types and shapes: `serve-model predict --example`."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from typing import Any

from msgspec.structs import asdict

from exporter.errors import UsageError
from exporter.terminal.server_access import WITHOUT_TLS, ServerAccess
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto
from exporter.wire.rest_json import REST_TYPES
from serving.documents import Form

_DEFAULT_SIGNATURE = "serving_default"
_MOST_VALUES = 1 << 20


def example(signature: Proto, name: str) -> dict[str, Any]:
    """A request in REST's JSON: a row, of a signature whose inputs and outputs have rows; else whole inputs.

    Numbers are zero, texts empty, unknown sizes 1.

    Raises:
        UsageError: it takes serialised Examples, whose features it does not name, a type without JSON, or
            too many values.
    """
    method = signature.method_name.rpartition("/")[2]
    if method in ("classify", "regress"):
        raise UsageError(
            f"signature {name!r} takes Examples, and does not say with which features",
            hint='write {"examples": [{"FEATURE": VALUE}]}',
        )
    shapes = {key: _shape(info) for key, info in sorted(signature.inputs.items())}
    answers = [_shape(info) for info in signature.outputs.values() if not info.tensor_shape.unknown_rank]
    has_rows = all(sizes and sizes[0] < 0 for sizes in (*shapes.values(), *answers))
    values = {
        key: _value(key, signature.inputs[key], sizes[1:] if has_rows else sizes)
        for key, sizes in shapes.items()
    }
    request: dict[str, Any] = {} if name == _DEFAULT_SIGNATURE else {"signature_name": name}
    return request | ({"instances": [values]} if has_rows else {"inputs": values})


def _shape(info: Proto) -> tuple[int, ...]:
    return () if info.tensor_shape.unknown_rank else tuple(dim.size for dim in info.tensor_shape.dim)


def _value(key: str, info: Proto, sizes: tuple[int, ...]) -> Any:
    dtype = DType(info.dtype)
    if dtype not in REST_TYPES:
        raise UsageError(
            f"input {key!r} is {dtype.label}, which REST's JSON does not have",
            hint="ask this signature by a gRPC client: serving.client.ModelClient",
        )
    if math.prod(max(size, 1) for size in sizes) > _MOST_VALUES:
        raise UsageError(
            f"input {key!r} has the shape {list(sizes)}, which is too large for an example",
            hint="ask this signature by a gRPC client: serving.client.ModelClient",
        )
    value: Any = "" if dtype is DType.STRING else False if dtype is DType.BOOL else 0
    value = 0.0 if dtype.is_floating else value
    for size in reversed(sizes):
        value = [value] * max(size, 1)
    return value


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
    """The request as its JSON, as a command line for the REST port, or as a Python program.

    It asks a `version`, unless that is None. `address` is HOST:PORT of gRPC, which the program reaches by
    `access`; REST is taken to be at 8501, TensorFlow Serving's own default, and to speak no TLS, as there.
    """
    text = json.dumps(request)
    match form:
        case Form.JSON:
            return text
        case Form.CURL:
            of = model if version is None else f"{model}/versions/{version}"
            url = f"http://{address.rpartition(':')[0]}:8501/v1/models/{of}:predict"
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
    rows = request.get("instances", [{}])
    values = request.get("inputs", {key: [value] for key, value in rows[0].items()})
    yield "import numpy as np"
    yield f"from serving.client import ModelClient{', ServerAccess' if reached else ''}"
    yield ""
    yield "inputs = {"
    for key, value in values.items():
        dtype = DType(signature.inputs[key].dtype)
        kind = "object" if dtype is DType.STRING else f"np.{dtype.numpy.name}"
        yield f"    {key!r}: np.array({value!r}, {kind.replace('np.bool', 'np.bool_')}),"
    yield "}"
    files = ", ".join(f"{name}={value!r}" for name, value in reached.items())
    by = f", access=ServerAccess({files})" if reached else ""
    yield f"with ModelClient({address!r}, {model!r}{by}) as client:"
    name = request.get("signature_name", _DEFAULT_SIGNATURE)
    of = "" if version is None else f", version={version}"
    yield f"    print(client.predict(inputs, signature={name!r}{of}).outputs)"
