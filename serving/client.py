"""The gRPC client of a model server: every call has a deadline, and status codes become errors.

Its messages come from the private descriptor pool of `exporter.wire.protos`, so that a client command starts
without TensorFlow.

    with ModelClient("127.0.0.1:8500", "ranker") as client:
        client.predict({"x": x}).outputs["scores"]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

from exporter.errors import CallFailed, ExportError
from exporter.options.given import MOST_SECONDS
from exporter.storage.local_paths import quoted
from exporter.terminal.server_access import WITHOUT_TLS, ServerAccess
from exporter.wire.protos import Proto, message_class
from exporter.wire.tensor_proto import fill, to_arrays
from serving.address import to_reach, with_port
from serving.credentials import identity, open_channel
from serving.served_names import names_in
from serving.status import Code, VersionState, VersionStatus

if TYPE_CHECKING:
    from typing_extensions import Self


T = TypeVar("T")

DEFAULT_DEADLINE_S = 10.0
DEFAULT_SIGNATURE = "serving_default"
# gRPC's own 4 MiB are too little for large outputs, and without a limit a server can fill the memory here.
MOST_ANSWER_BYTES = 64 << 20
_MAX_MESSAGE_BYTES = (1 << 31) - 1  # protobuf's limit: sizes are int32
_MOST_BYTES = {"GetModelStatus": 4 << 20, "GetModelMetadata": 16 << 20}
"""The limits for answers with many small objects: gRPC's default, and the size of a thousand signatures."""
_NOT_READ = (ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
"""Errors while reading an answer that no model server would send; protobuf's own is added."""
_RELOAD = "HandleReloadConfigRequest"
_GRAPH_PLACE = re.compile(
    r"\{\{function_node [^}]*\}\}\s*|\n\s*\[\[[^\n]*|\nRecent warning and error logs:.*", re.DOTALL
)
"""TensorFlow's location in the graph, and its log lines, which do not help a client."""
_UNRESOLVED = re.compile("errors resolving|DNS resolution failed")
_TLS_PROBLEM = re.compile(r"\w+ handshake failed.*|Hostname Verification Check failed.*", re.I)
_CUT_OFF = "Socket closed"
"""gRPC's only message when the server expects TLS, or a client certificate."""
_NO_GRPC = "Failed parsing HTTP/2"
"""gRPC's message if the port speaks another protocol, REST for example."""
_NO_GRPC_CAUSE = "the port answers, but does not speak gRPC"
_LONGEST_RECONNECT_MS = 1000
"""The longest back-off: a server that comes back must be found within a second; gRPC's is 2 minutes."""
_HINTS = {
    "DEADLINE_EXCEEDED": "give it more time with --deadline SECONDS",
    "RESOURCE_EXHAUSTED": "ask for less at once: fewer rows, or fewer outputs",
    "INVALID_ARGUMENT": "compare the request with the signatures: export-model inspect MODEL_VERSION",
    "UNAUTHENTICATED": "send the token that the server expects with --grpc token=FILE",
    "UNIMPLEMENTED": "this port speaks another protocol: name the gRPC port, 8500 in TF Serving's image",
}
_REPLAYED = {
    "PredictRequest": ("Predict", "serving.PredictResponse"),
    "ClassificationRequest": ("Classify", "serving.ClassificationResponse"),
    "RegressionRequest": ("Regress", "serving.RegressionResponse"),
}


class Prediction(Struct, frozen=True):
    """A signature's outputs by name, and the version that computed them."""

    outputs: Mapping[str, NDArray[Any]]
    version: int


class Classification(Struct, frozen=True):
    """Pairs of label and score for each example, and the version that computed them."""

    examples: Sequence[Sequence[tuple[str, float]]]
    version: int


class Regression(Struct, frozen=True):
    """One value for each example, and the version that computed them."""

    values: Sequence[float]
    version: int


class Metadata(Struct, frozen=True):
    """The `SignatureDef`s of a version by name."""

    signatures: Mapping[str, Proto]
    version: int


class ModelClient:
    """A client for one model on one server. Threads may share it.

    Methods raise ValueError for a version that is no int64, and after `close`.
    """

    def __init__(
        self,
        address: str,
        model: str,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        access: ServerAccess = WITHOUT_TLS,
        most_answer_bytes: int = MOST_ANSWER_BYTES,
    ) -> None:
        """Prepare a channel; it sends nothing before the first call.

        Args: address: `host:port` of the server's gRPC port; the default port is 8500. model: the model's
        name on the server. deadline_s: a call without a response fails after so many seconds. access: files
        for TLS, the client's certificate and a token. most_answer_bytes: a longer answer fails the call.

        Raises:
            UsageError: one of these files cannot be used, or a server cannot have this address.
            LfsPointer: one of them is a pointer of Git LFS.
        """
        self.address = address = with_port(address)
        self.model = model
        self.deadline_s = deadline_s
        self._access = access
        self._most_answer_bytes = most_answer_bytes
        self._connection = _Connection(address, access, most_answer_bytes)

    def predict(
        self,
        inputs: Mapping[str, ArrayLike],
        *,
        signature: str = DEFAULT_SIGNATURE,
        version: int | None = None,
        outputs: Iterable[str] = (),
    ) -> Prediction:
        """Run a signature, and return its outputs and the version that computed them.

        Args: inputs: arrays by input name, of the signature's dtypes. signature: its name. version: the
        version to ask; the newest available one by default. outputs: the outputs to fetch; all by default.

        Raises:
            CallFailed: the server did not respond before the deadline, refused the call, or did not answer as
                a model server.
            ValueError: an input has a type that TensorFlow does not have; or the client is closed.
            TypeError: an array of objects has an item that is neither `str` nor `bytes`.
        """
        return self.predict_as(_whole, inputs, signature=signature, version=version, outputs=outputs)

    def predict_as(
        self,
        read: Callable[[Prediction], T],
        inputs: Mapping[str, ArrayLike],
        *,
        signature: str = DEFAULT_SIGNATURE,
        version: int | None = None,
        outputs: Iterable[str] = (),
    ) -> T:
        """Run a signature as `predict` does, pass the answer to `read`, and return the result of `read`.

        Raises:
            CallFailed: the server did not respond before the deadline, refused the call, or did not answer as
                expected, so that `read` raises ValueError, TypeError, LookupError or the like.
            ValueError: an input has a type that TensorFlow does not have; or the client is closed.
            TypeError: an array of objects has an item that is neither `str` nor `bytes`.
        """
        request = self._request("serving.PredictRequest", version, signature)
        for name, value in inputs.items():
            fill(request.inputs[name], _array(value))
        request.output_filter.extend(outputs)
        return self._call(
            "PredictionService",
            "Predict",
            request,
            "serving.PredictResponse",
            lambda found: read(Prediction(to_arrays(found.outputs), _version(found, version))),
        )

    def classify(
        self, input_: Proto, *, signature: str = DEFAULT_SIGNATURE, version: int | None = None
    ) -> Classification:
        """Run a classify signature on a `serving.Input` of examples; return labels and scores of each.

        `version` is the newest available one by default.

        Raises:
            CallFailed: the server did not respond before the deadline, refused the call, or did not answer as
                a model server.
        """
        request = self._request("serving.ClassificationRequest", version, signature)
        request.input.CopyFrom(input_)
        return self._call(
            "PredictionService",
            "Classify",
            request,
            "serving.ClassificationResponse",
            lambda found: Classification(
                [[(c.label, c.score) for c in row.classes] for row in found.result.classifications],
                _version(found, version),
            ),
        )

    def regress(
        self, input_: Proto, *, signature: str = DEFAULT_SIGNATURE, version: int | None = None
    ) -> Regression:
        """Run a regress signature on a `serving.Input` of examples; return a value for each.

        `version` is the newest available one by default.

        Raises:
            CallFailed: the server did not respond before the deadline, refused the call, or did not answer as
                a model server.
        """
        request = self._request("serving.RegressionRequest", version, signature)
        request.input.CopyFrom(input_)
        return self._call(
            "PredictionService",
            "Regress",
            request,
            "serving.RegressionResponse",
            lambda found: Regression(
                [row.value for row in found.result.regressions], _version(found, version)
            ),
        )

    def replay(self, request: Proto, version: int) -> None:
        """Send a recorded predict, classify or regress request to a version of this client's model.

        The recording's own model and version are replaced in a copy; the answer is discarded.

        Raises:
            KeyError: `request` is of another kind.
            CallFailed: the server did not respond before the deadline, refused the call, or did not answer as
                a model server.
        """
        kind = request.DESCRIPTOR.name
        method, response = _REPLAYED[kind]
        copy = type(request)()
        copy.CopyFrom(request)
        copy.model_spec.name = self.model
        copy.model_spec.version.value = version
        self._call("PredictionService", method, copy, response, _whole)

    def metadata(self, version: int | None = None, *, label: str | None = None) -> Metadata:
        """Return the signatures of an available version, and its number.

        `version` selects it by its number, `label` by a label; without both, it is the newest. With both, the
        label is sent, and must name `version`.

        Raises:
            CallFailed: the server did not respond before the deadline, has no such version available, or did
                not answer as a model server; or the label names another version.
        """
        request = self._request("serving.GetModelMetadataRequest", version)
        if label is not None:
            request.model_spec.version_label = label
        request.metadata_field.append("signature_def")
        return self._call(
            "PredictionService",
            "GetModelMetadata",
            request,
            "serving.GetModelMetadataResponse",
            lambda found: Metadata(_signatures(found), _version(found, version)),
        )

    def status(self, version: int | None = None, *, deadline_s: float | None = None) -> list[VersionStatus]:
        """Return the state of each version of the model, the newest first; or only of `version`, if given.

        There is at least one. `deadline_s` is the client's by default.

        Raises:
            CallFailed: the server did not respond before the deadline, does not know the model or version
                (code NOT_FOUND), or did not answer as a model server.
        """
        request = self._request("serving.GetModelStatusRequest", version)
        response = "serving.GetModelStatusResponse"
        return self._call(
            "ModelService", "GetModelStatus", request, response, _statuses, deadline_s=deadline_s
        )

    def labelled(self, label: str) -> int | None:
        """Return the available version that a label names; None if the server answers that there is none.

        Raises:
            CallFailed: the server did not respond, refused for another reason, or did not answer as a model
                server.
        """
        try:
            return self.metadata(label=label).version
        except CallFailed as error:
            if error.code not in (Code.INVALID_ARGUMENT.name, Code.NOT_FOUND.name):
                raise
            return None

    def configure(self, config: Proto, deadline_s: float) -> None:
        """Send a `ModelServerConfig`: afterwards the server serves exactly the listed models.

        Waits until all new models are available, for at most `deadline_s`.

        Raises:
            CallFailed: the server did not respond in time, refused the configuration, or cannot serve a new
                model; by its code, UNAVAILABLE, DEADLINE_EXCEEDED or UNKNOWN, the server may have accepted
                the configuration.
        """
        request = message_class("serving.ReloadConfigRequest")()
        request.config.CopyFrom(config)
        response = "serving.ReloadConfigResponse"
        try:
            self._call("ModelService", _RELOAD, request, response, _whole, deadline_s=deadline_s)
        except CallFailed as error:
            if error.code == Code.UNAVAILABLE.name:
                raise
            message = f"{self.address} refused the configuration"
            hint = (
                "correct the configuration and send it again; if a stock server then repeats this error, it "
                "still holds the refused one: restart it"
            )
            if error.code == Code.DEADLINE_EXCEEDED.name:
                message = f"{self.address} does not serve the configuration yet"
                hint = (
                    f"it continues to load: {self.status_command}; a stock server whose base path does not "
                    "exist accepts no other configuration until the path appears, or until a restart"
                )
            elif error.code == Code.UNKNOWN.name:
                message = f"{self.address} accepted the configuration, but cannot serve all of it"
                hint = f"see why: {self.status_command}"
            raise CallFailed(error.code, message, cause=error.cause, hint=hint) from error

    def close(self) -> None:
        """Close the channel; later calls raise ValueError. May be called repeatedly."""
        self._connection.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _request(self, message: str, version: int | None, signature: str = "") -> Proto:
        request = message_class(message)()
        request.model_spec.name = self.model
        request.model_spec.signature_name = signature
        if version is not None:
            request.model_spec.version.value = version
        return request

    def _call(
        self,
        service: str,
        method: str,
        request: Proto,
        response: str,
        read: Callable[[Proto], T],
        *,
        deadline_s: float | None = None,
    ) -> T:
        """Send a request, pass the answer to `read`, and return the result of `read`.

        `service` and `method` are names without a package, `response` is the answer's message type;
        `deadline_s` is the client's by default. CallFailed if the server did not respond, refused, or did not
        answer as a model server does: the answer is too long or does not parse, or `read` raises an error of
        `_NOT_READ`. ValueError if the client is closed.
        """
        import grpc
        from google.protobuf.message import DecodeError

        path = f"/tensorflow.serving.{service}/{method}"
        # Read once: another thread may put a new one in its place.
        connection = self._connection
        if path not in connection.calls:
            connection.calls[path] = connection.channel.unary_unary(
                path,
                request_serializer=type(request).SerializeToString,
                response_deserializer=None,  # answers are parsed below, where errors get a name
            )
        try:
            answer = connection.calls[path](request, timeout=min(deadline_s or self.deadline_s, MOST_SECONDS))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._reconnect(connection)
            served = names_in(error.trailing_metadata())
            failed = self._failed(method, error.code().name, error.details() or "", served)
            failed.served = served
            raise failed from error
        try:
            if len(answer) > (most := _MOST_BYTES.get(method, len(answer))):
                raise ValueError(f"it has {len(answer)} bytes, more than {most}")
            return read(message_class(response).FromString(answer))
        except (*_NOT_READ, DecodeError) as error:
            raise CallFailed(
                Code.INTERNAL.name,
                f"{self.address} answers {method} otherwise than a model server",
                cause=f"{type(error).__name__}: {error}",
                hint=f"see what listens there: {self.status_command}",
            ) from error

    def _reconnect(self, failed: _Connection) -> None:
        """Open a new channel if certificate files were replaced since the connection `failed` was opened.

        In a process that runs for weeks certificates expire. Files that cannot be used are ignored until the
        next failing call.
        """
        # Threads share a client: another one may have opened a new channel since this call failed.
        if failed is self._connection and failed.identity != identity(self._access):
            # So far only some files are replaced: the next failing call tries again.
            with suppress(ExportError, OSError):
                self._connection = _Connection(self.address, self._access, self._most_answer_bytes)

    @property
    def status_command(self) -> str:
        """Return the command line that shows the model's versions on the server."""
        return f"serve-model status {self.address} --model-name {quoted(self.model)}"

    def _failed(self, method: str, code: str, details: str, served: Sequence[str]) -> CallFailed:
        """Return the error for a call of `method` that ended with status `code` and message `details`.

        `served` are the names of the server's models, empty if it does not list them. If the model has no
        loaded version, the server is asked for its status first, within one more deadline.
        """
        cause = f"{code}: {_GRAPH_PLACE.sub('', details).strip()}"
        hint = _HINTS.get(code, f"see what it serves: {self.status_command}")
        if code == "NOT_FOUND" and ("Latest(" in details or method == "GetModelStatus"):
            found: list[VersionStatus] = []
            if method != "GetModelStatus":
                with suppress(CallFailed):
                    found = self.status()
            message, hint = self._not_loaded(found, served)
            return CallFailed(code, message, cause=cause, hint=hint)
        if "version label" in details:
            hint = f"leave out --label; versions that are served: {self.status_command}"
        if code == "UNAVAILABLE" and (tls := _TLS_PROBLEM.search(details)):
            message = f"{self.address} and this client do not agree on TLS"
            hint = "compare its certificate with --grpc ca and --grpc name, and yours with its authority"
            return CallFailed(code, message, cause=f"{code}: {tls[0]}", hint=hint)
        if code == "UNAVAILABLE" and _NO_GRPC in details:
            message = f"the process that listens at {self.address} is not a model server"
            return CallFailed(code, message, cause=f"{code}: {_NO_GRPC_CAUSE}", hint=_HINTS["UNIMPLEMENTED"])
        if code == "UNAVAILABLE":
            if _CUT_OFF in details:
                hint = "if it expects TLS: --grpc ca=FILE; if it needs a certificate: --grpc cert, key"
            else:
                hint = to_reach(self.address, is_unknown=_UNRESOLVED.search(details) is not None)
            return CallFailed(code, f"no model server answers at {self.address}", cause=cause, hint=hint)
        if code == "DEADLINE_EXCEEDED":
            message = f"{self.address} did not answer {method} in {self.deadline_s:g} s"
            return CallFailed(code, message, cause=cause, hint=hint)
        return CallFailed(code, f"{self.address} refused {method} for {self.model}", cause=cause, hint=hint)

    def _not_loaded(self, found: Sequence[VersionStatus], served: Sequence[str]) -> tuple[str, str]:
        """Return message and hint for a model without a loaded version.

        `found` are its versions on the server, the newest first, empty if the server knows none; `served` is
        as for `_failed`.
        """
        shows = f"this shows its versions: {self.status_command}"
        if found:
            is_coming = found[0].state in (VersionState.START, VersionState.LOADING)
            state = f"version {found[0].version} is {found[0].state.name}"
            what = (
                f"has not loaded {self.model} yet" if is_coming else f"has no version of {self.model} loaded"
            )
            return f"{self.address} {what}: {state}", f"ask again when one is AVAILABLE; {shows}"
        if self.model in served:
            what = f"{self.address} has not loaded {self.model} yet: it has found no version"
            return what, f"ask again when one is published where the server looks; {shows}"
        hint = "name a model of this server with --model-name; it is the last part of MODEL"
        if served:
            return f"{self.address} serves no {self.model}: it serves {', '.join(served)}", hint
        what = f"{self.address} has not loaded {self.model}, or has no model of this name"
        return what, f"{hint}; if it has just started, ask again; {shows}"


class _Connection:
    """A channel, its calls by path, and the identity of the files with which it was opened."""

    def __init__(self, address: str, access: ServerAccess, most_answer_bytes: int) -> None:
        self.identity = identity(access)
        limits = [
            ("grpc.max_receive_message_length", most_answer_bytes),
            ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.initial_reconnect_backoff_ms", _LONGEST_RECONNECT_MS // 10),
            ("grpc.max_reconnect_backoff_ms", _LONGEST_RECONNECT_MS),
        ]
        self.channel = open_channel(address, access, limits)
        self.calls: dict[str, Callable[..., bytes]] = {}


def _whole(found: T) -> T:
    return found


def _version(found: Proto, asked: int | None) -> int:
    """Return the version that answered; ValueError if another one was `asked` for (None: any).

    `found` is an answer with a `model_spec`.
    """
    version: int = found.model_spec.version.value
    if asked not in (None, version):  # a proxy or a lying server; the caller would record a wrong position
        raise ValueError(f"version {version} answers in place of {asked}")
    return version


def _signatures(found: Proto) -> dict[str, Proto]:
    signatures = message_class("serving.SignatureDefMap").FromString(found.metadata["signature_def"].value)
    return dict(signatures.signature_def)


def _statuses(found: Proto) -> list[VersionStatus]:
    statuses = [
        VersionStatus(s.version, VersionState(s.state), Code(s.status.error_code), s.status.error_message)
        for s in found.model_version_status
    ]
    if not statuses:
        raise ValueError("it lists no version, and a server without any says so")
    return sorted(statuses, key=lambda status: -status.version)


def _array(value: ArrayLike) -> NDArray[Any]:
    array = np.asarray(value)
    # Strings stay objects: numpy's own string types cut trailing zero bytes.
    return np.asarray(value, object) if array.dtype.kind in "SU" else array
