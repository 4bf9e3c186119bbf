"""TF Serving's REST interface over the calls of a model server: `/v1/models/NAME[/versions/V|/labels/L]`.

GET returns a model's status, and `.../metadata` its signatures; POST calls `:predict`, `:classify`,
`:regress`. Paths, codes and JSON follow tensorflow_serving/model_servers (http_server.cc,
http_rest_api_handler.cc, http_rest_api_util.cc) and https://www.tensorflow.org/tfx/serving/api_rest.
"""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from msgspec import Struct
from numpy.typing import NDArray

from exporter.publish.served import version_number
from exporter.terminal.output import plain
from exporter.wire import rest_json
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto, message_class
from serving import rest_response
from serving.calls import Calls
from serving.http_port import HttpRequest, HttpResponse
from serving.server_metrics import ServerMetrics
from serving.status import Code, StatusError, invalid, status_of
from serving.text_config import read_text_config

MAX_BODY_BYTES = 512 << 20
"""Longer bodies, compressed or not, are refused: a whole request is in memory, as text and as arrays."""
PROMETHEUS_PATH = "/monitoring/prometheus/metrics"

_VERSION = r"(?:/versions/(?P<version>[0-9]+)|/labels/(?P<label>[^/:]+))?"
_PREDICTION = re.compile(rf"/v1/models/(?P<name>[^/:]+){_VERSION}:(?P<method>classify|regress|predict)", re.I)
_MODEL = re.compile(rf"/v1/models(?:/(?P<name>[^/:]+))?{_VERSION}(?:/(?P<what>metadata))?", re.I)
_OUR_PATHS = re.compile(r"/v1/.*", re.I | re.S)
_JSON = ("Content-Type", "application/json")
_CORS = [
    ("Access-Control-Allow-Origin", "*"),
    ("Access-Control-Allow-Methods", "POST, GET"),
    ("Access-Control-Allow-Headers", "Content-Type"),
]
_HTTP = {
    Code.OK: "200 OK",
    Code.CANCELLED: "499 Client Closed Request",
    Code.INVALID_ARGUMENT: "400 Bad Request",
    Code.DEADLINE_EXCEEDED: "504 Gateway Timeout",
    Code.NOT_FOUND: "404 Not Found",
    Code.ALREADY_EXISTS: "409 Conflict",
    Code.PERMISSION_DENIED: "403 Forbidden",
    Code.RESOURCE_EXHAUSTED: "429 Too Many Requests",
    Code.FAILED_PRECONDITION: "400 Bad Request",
    Code.ABORTED: "409 Conflict",
    Code.OUT_OF_RANGE: "400 Bad Request",
    Code.UNIMPLEMENTED: "501 Not Implemented",
    Code.UNAVAILABLE: "503 Service Unavailable",
    Code.UNAUTHENTICATED: "401 Unauthorized",
}
"""TF Serving's HTTP status for each canonical code; 500 for all others."""


def metrics_path(monitoring_config_file: Path | None) -> str | None:
    """Return the URL path of the metrics that a `MonitoringConfig` file names, by default `PROMETHEUS_PATH`.

    None without a file, or if the file does not enable metrics. UsageError if it cannot be read or is
    invalid, LfsPointer if it is a pointer of Git LFS.
    """
    if monitoring_config_file is None:
        return None
    config = read_text_config("--monitoring-config-file", monitoring_config_file, "MonitoringConfig")
    return (config.prometheus_config.path or PROMETHEUS_PATH) if config.prometheus_config.enable else None


class RequestedModel(Struct, frozen=True):
    """The model, version and operation of a request's path.

    The operation is `predict`, `classify`, `regress`, `status` or `metadata`.
    """

    name: str
    version: int | None
    label: str | None
    what: str

    def fill(self, spec: Proto) -> None:
        """Copy the name, and the version or label if there is one, into `spec`, a `ModelSpec`."""
        spec.name = self.name
        if self.version is not None:
            spec.version.value = self.version
        elif self.label is not None:
            spec.version_label = self.label


class RestInterface:
    """The application of the REST port.

    Args:
        calls: the server's calls.
        metrics: counts requests.
        timeout_ms: a request's computation is stopped after this time; None is never.
        allow_cors: allow requests from web pages of other origins.
        metrics_path: the path of the metrics page; None serves no such page.
    """

    def __init__(
        self,
        calls: Calls,
        metrics: ServerMetrics,
        *,
        timeout_ms: int | None = None,
        allow_cors: bool = False,
        metrics_path: str | None = None,
    ) -> None:
        self._calls = calls
        self._metrics = metrics
        self._timeout_ms = timeout_ms
        self._allows_pages = allow_cors
        self._headers = [_JSON, *(_CORS if allow_cors else [])]
        self._metrics_path = metrics_path

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Return the response to one request; every error of a call becomes a status.

        Requests below `/v1/` are counted; the page of metrics and other paths (404) are not.
        """
        if self._metrics_path is not None and request.path == self._metrics_path:
            return self._show_metrics(request.target)
        if _OUR_PATHS.fullmatch(request.target):
            return self._respond(request)
        return HttpResponse("404 Not Found", [_JSON], [_error("Not Found: see /v1/models/MODEL_NAME")])

    def _show_metrics(self, target: str) -> HttpResponse:
        if target != self._metrics_path:
            text = f"Unexpected path: {target}. Should be {self._metrics_path}"
            return HttpResponse("400 Bad Request", [("Content-Type", "text/plain")], [plain(text)])
        return HttpResponse("200 OK", [("Content-Type", "text/plain; version=0.0.4")], [self._metrics.text()])

    def _respond(self, request: HttpRequest) -> HttpResponse:
        began = time.monotonic()
        name, method, code, http = "", "", Code.OK, ""
        try:
            if request.method == "OPTIONS":
                _require_origin(request)
                body = []
            else:
                if request.method == "POST" and not self._allows_pages:
                    _refuse_other_pages(request.headers)
                target = _target(request.method, request.target)
                name, method = target.name, target.what
                body = self._process(target, request)
        except Exception as error:  # noqa: BLE001 - the edge of the server: every error becomes a status
            status = status_of(error)
            code = status.code if status.code is not Code.OK else Code.UNKNOWN
            body = [_error(status.message)]
        self._metrics.count(name, method, "REST", code, time.monotonic() - began)
        return HttpResponse(http or _HTTP.get(code, "500 Internal Server Error"), self._headers, body)

    def _process(self, target: RequestedModel, request: HttpRequest) -> list[bytes]:
        if target.what == "status":
            return [self._status(target)]
        if target.what == "metadata":
            return [self._metadata(target)]
        document = _document(request)
        try:
            if target.what == "predict":
                # A list: errors while the generator runs are raised here, where they become a status.
                return list(self._predict(target, document))
            return [_json(self._ask_examples(target, document))]
        except rest_json.NoJsonForm as error:  # there, it is wrapped where it comes from a row
            code = Code.UNIMPLEMENTED if "inputs" in document else Code.INVALID_ARGUMENT
            raise StatusError(code, str(error)) from error
        except ValueError as error:
            raise invalid(str(error)) from error

    def _status(self, target: RequestedModel) -> bytes:
        request = message_class("serving.GetModelStatusRequest")()
        target.fill(request.model_spec)
        return _message(self._calls.status(request)).encode()

    def _metadata(self, target: RequestedModel) -> bytes:
        request = message_class("serving.GetModelMetadataRequest")()
        target.fill(request.model_spec)
        request.metadata_field.append("signature_def")
        response = self._calls.metadata(request)
        signatures = message_class("serving.SignatureDefMap").FromString(
            response.metadata["signature_def"].value
        )
        spec, found = _message(response.model_spec), _message(signatures)
        return f'{{\n"model_spec":{spec},\n"metadata": {{"signature_def": {found}}}\n}}\n'.encode()

    def _predict(self, target: RequestedModel, document: Mapping[str, Any]) -> Iterator[bytes]:
        spec = message_class("serving.ModelSpec")()
        target.fill(spec)
        name = rest_json.signature_name(document)
        with self._calls.models.borrow(spec) as (_, model):
            if (name or "serving_default") not in model.signatures:
                raise invalid(
                    f'Serving signature name: "{name or "serving_default"}" not found in signature def'
                )
            signature = model.signatures[name or "serving_default"]
            if not signature.inputs:
                raise invalid(f"Failed to get input map for signature: {name or 'DEFAULT'}")
            inputs = rest_json.predict_inputs(document, signature, check_shapes=False)
            _require_types(inputs, signature)
            outputs = self._calls.predict_arrays(model, name, inputs, self._timeout_ms)
        if not outputs:
            raise invalid("Cannot convert empty tensor map to JSON")
        return rest_response.texts(outputs, by_row="instances" in document)

    def _ask_examples(self, target: RequestedModel, document: Mapping[str, Any]) -> dict[str, Any]:
        kind = {"classify": "Classification", "regress": "Regression"}[target.what]
        request = message_class(f"serving.{kind}Request")()
        target.fill(request.model_spec)
        request.model_spec.signature_name = rest_json.signature_name(document)
        request.input.CopyFrom(rest_json.examples_input(document))
        if target.what == "classify":
            result = self._calls.classify(request, self._timeout_ms).result
            return rest_response.classifications(
                [[(item.label, item.score) for item in row.classes] for row in result.classifications]
            )
        result = self._calls.regress(request, self._timeout_ms).result
        return rest_response.regressions([row.value for row in result.regressions])


def _require_types(inputs: Mapping[str, NDArray[Any]], signature: Proto) -> None:
    """Raise NoJsonForm for inputs of types that TensorFlow Serving does not read from JSON.

    `inputs` are by name, and their types are those in the `SignatureDef`. An array without elements passes,
    whatever its type.
    """
    for name, array in inputs.items():
        dtype = DType(signature.inputs[name].dtype)
        if array.size and dtype not in rest_json.REST_TYPES:
            raise rest_json.NoJsonForm(
                f"Conversion of JSON Value to type: {dtype.label} (input {name!r}): use gRPC"
            )


def _target(http_method: str, path: str) -> RequestedModel:
    found = {"POST": _PREDICTION, "GET": _MODEL}.get(http_method)
    match = found.fullmatch(path) if found else None
    parts = match.groupdict() if match else {}
    what = parts.get("method") or ("metadata" if parts.get("what") == "metadata" else "status")
    if match is None or what not in ("classify", "regress", "predict", "status", "metadata"):
        raise invalid(f"Malformed request: {http_method} {path}")
    if not parts["name"]:
        raise invalid("Missing model name in request.")
    version = None if parts["version"] is None else _number(parts["version"])
    label = None if parts["label"] is None else _decoded(parts["label"], "model version label")
    return RequestedModel(_decoded(parts["name"], "model name"), version, label, what)


def _number(text: str) -> int:
    number = version_number(text)
    if number is None:
        raise invalid(f"Failed to convert version: {text[:60]} to numeric.")
    return number


def _decoded(text: str, kind: str) -> str:
    try:
        return unquote_to_bytes(text).decode()
    except UnicodeDecodeError:
        raise invalid(f"Failed to decode {kind}:{text}") from None


def _require_origin(request: HttpRequest) -> None:
    if not re.search("https?://", request.headers.get("origin", "")):
        raise StatusError(Code.FAILED_PRECONDITION, "Origin header is missing in CORS preflight")


def _refuse_other_pages(headers: Mapping[str, str]) -> None:
    """Raise StatusError for a POST that a page of another site makes a browser send without asking first.

    `headers` are the request's, by lower-case name. Such a POST has a type other than JSON: for JSON the
    browser asks first, by OPTIONS, and is refused without CORS. Another site is recognised by
    `Sec-Fetch-Site` or `Origin`. Programs send neither (`curl -d` sends a form's type); proxies pass them on.
    """
    if headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json":
        return
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is None and origin is not None:
        is_own = origin.partition("://")[2].lower() == headers.get("host", "").lower()
    else:
        is_own = site in (None, "same-origin", "none")
    if not is_own:
        raise StatusError(
            Code.PERMISSION_DENIED,
            f"a page of another site asks ({origin or site!s:.99}): --rest_api_enable_cors_support allows it",
        )


def _document(request: HttpRequest) -> dict[str, Any]:
    try:
        body, request.body = request.body, b""  # frees the text before the arrays are made
        return rest_json.parse_request(body)
    except ValueError as error:
        raise invalid(str(error)) from error


def _message(message: Proto) -> str:
    from google.protobuf.json_format import MessageToJson

    return str(MessageToJson(message, preserving_proto_field_name=True, indent=1, **_printing_defaults()))


@cache
def _printing_defaults() -> dict[str, Any]:
    """Return the argument of MessageToJson that prints fields without a value, as {name: True}; memoised.

    Its name changed in protobuf 5.
    """
    from google.protobuf.json_format import MessageToJson

    option = "always_print_fields_with_no_presence"
    known = inspect.signature(MessageToJson).parameters
    return {option if option in known else "including_default_value_fields": True}


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode()


def _error(message: str) -> bytes:
    return json.dumps({"error": message}, ensure_ascii=False).encode(errors="replace")
