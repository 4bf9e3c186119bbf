"""A model server in this process: TF Serving's gRPC services over TensorFlow's own session.

    with ModelServer("models/ranker") as server:
        server.wait_available(timeout_seconds=60)
        print(server.address)

Client stubs, requests, statuses and errors are `tensorflow_model_server`'s.

It also has gRPC's health service (grpc.health.v1), for `grpc_health_probe`, Kubernetes and load balancers.
The service `""` and TF Serving's own services are SERVING when every model has an available version; a
model's name is a service, too. `Watch` is not implemented: it would occupy a thread for each client, and
gRPC's clients treat UNIMPLEMENTED as healthy.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from exporter.errors import ServerError, UsageError
from exporter.storage.local_paths import local_path
from exporter.wire.protos import Proto, class_of, service_methods
from serving.calls import Calls
from serving.grpc_port import Call, GrpcPort, Method
from serving.models import ConfigFile, ServedModels
from serving.served_names import as_metadata
from serving.server_metrics import ServerMetrics
from serving.server_options import DEFAULT_OPTIONS, ServerOptions
from serving.status import MAX_MESSAGE_CHARACTERS, Code, StatusError, VersionStatus, status_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from serving.http_port import HttpPort
    from serving.manager import Listener, VersionManager
    from serving.model_config import ModelConfig

Respond = Callable[[Proto, Call], Proto]
MAX_MESSAGE_BYTES = (1 << 31) - 1  # protobuf's limit: sizes are int32
_REQUEST_S = 60.0
"""A REST client that takes longer to send a request is disconnected, unless the request is long."""
_CONFIGURE_SECONDS = 600.0
"""Seconds for which a call without a deadline waits for new models; TF Serving waits for ever."""
# 31 years: no deadline of a client is longer, and gRPC's last timestamp is.
_FOREVER_SECONDS = 1e9
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}
_SERVICE = "grpc.health.v1.Health"
_WHOLE_SERVER = ("", "tensorflow.serving.PredictionService", "tensorflow.serving.ModelService")
SERVING, NOT_SERVING = 1, 2


class ModelServer:
    """A model server in this process, from construction until `stop` or the end of a `with` block.

    It accepts calls at once; predictions are possible when `wait_available` returns. It loads new versions as
    TF Serving does: it loads the directory with the largest number first, then unloads the old version.
    """

    def __init__(
        self,
        base_path: str | PathLike[str] | None = None,
        *,
        name: str | None = None,
        options: ServerOptions = DEFAULT_OPTIONS,
        listener: Listener | None = None,
    ) -> None:
        """Listen, and start to load versions.

        Args: base_path: the directory that holds the versions of the one model; the server waits for it if it
        does not exist yet. Without it, `options.model_config_file` lists the models. name: the model's name
        in requests; the last part of `base_path` by default. options: how to listen, find and load versions,
        and compute. listener: called with a model's name and a version's new status, from the thread that
        changed it.

        Raises:
            UsageError: there is no model, the options or a file that they name cannot be used, or a library
                of REST is not installed.
            LfsPointer: a file that the options name is a pointer of Git LFS.
            ServerError: it cannot listen.
        """
        from serving.optional_libraries import require_libraries

        if options.network.rest_api_port is not None:  # before anything runs that would have to be stopped
            require_libraries("server", "--rest-api-port", "h11", "prometheus_client")
        self.host = options.host
        self._options = options
        self._stopped = False
        file = options.model_config_file
        self._config_file = (
            None if file is None else ConfigFile(file, options.model_config_file_poll_wait_seconds)
        )
        wanted = self._config_file.read() if self._config_file else _single(base_path, name)
        self.name = wanted[0].name if wanted else ""
        self.models = _no_models(options, listener)
        self._executor = ThreadPoolExecutor(options.threads, thread_name_prefix="call")
        self._calls = Calls(self.models, options.inference())
        self._metrics = ServerMetrics(self.models)
        self._health = Health()
        self._http: HttpPort | None = None
        # A port that is in use must fail before a model is loaded, and calls must find the models' managers.
        self._server, self.port = self._bind()
        self._configure(wanted)
        self._server.start()
        self._http = self._listen_http()
        self.rest_port = None if self._http is None else self._http.port
        if self._config_file:
            self._config_file.follow(self.models)

    @property
    def address(self) -> str:
        """Return `host:port` for gRPC clients."""
        return _host_and_port(self.host, self.port)

    @property
    def rest_url(self) -> str | None:
        """Return the URL of the models in REST; None without REST."""
        if self.rest_port is None:
            return None
        return f"http://{_host_and_port(self.host, self.rest_port)}/v1/models"

    def wait_available(self, timeout_seconds: float) -> int:
        """Wait until every model has an available version; return the newest one of the first model.

        0 for a server without models. ServerError after `timeout_seconds`, or if a model cannot become
        available; ModelPathNotFound, a ServerError, if a model's base path does not exist.
        """
        deadline = time.monotonic() + timeout_seconds
        served = self.models.served().values()
        versions = [model.wait_available(max(0.0, deadline - time.monotonic())) for model in served]
        return versions[0] if versions else 0

    def statuses(self) -> list[VersionStatus]:
        """Return the last status of every version ever seen of the first model, the newest first.

        The first model is the first of the configuration at the start; empty if that lists none.
        """
        return self.models.versions(self.name)

    def stop(self, grace_seconds: float | None = None) -> None:
        """Fail health checks, drain, refuse new calls, let calls in progress end, and unload all models.

        Waits for all of that. Calls that take longer than the grace time are cut off. A repeated call does
        nothing.

        Args: grace_seconds: the time for calls in progress, without a drain before; None: the options give
        both times.
        """
        if self._stopped:
            return
        self._stopped = True
        # First, so that probes fail while the server still answers: balancers stop sending before it refuses.
        self._health.is_ending = True
        if self._config_file:
            self._config_file.stop()
        # A server that never was SERVING gets no requests that could drain.
        if grace_seconds is None and self.models.is_available():
            time.sleep(self._options.network.drain_seconds)
        if grace_seconds is None:
            grace_seconds = self._options.network.grace_seconds
        deadline = time.monotonic() + grace_seconds
        ended = self._server.stop(grace_seconds)
        if self._http is not None:
            self._http.stop(grace_seconds)
        # After REST has ended: both ports have the same grace, at the same time.
        ended.result()
        self.models.stop(max(0.0, deadline - time.monotonic()))
        # `wait=False`: a call that ignores its cut-off must not keep `stop` from returning.
        self._executor.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _bind(self) -> tuple[GrpcPort, int]:
        from serving.credentials import server_credentials

        options = self._options
        file = options.network.ssl_config_file
        credentials = None if file is None else server_credentials(file)
        own: dict[str, int | str] = {
            "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
            "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
            "grpc.compression_enabled_algorithms_bitset": 1,  # none: packed messages would grow without limit
            "grpc.so_reuseport": 0,  # otherwise a second server could share the port, and half of the calls
        }
        # Merged by name, because gRPC uses the first of repeated arguments.
        arguments = own | dict(options.channel_arguments())
        require_free(self.host, options.port)
        services = _services(self._calls, self._metrics, self._health)
        server = GrpcPort(services, self._executor, list(arguments.items()))
        bound = _listen(
            server,
            _host_and_port(self.host, options.port),
            credentials,
            *_IN_USE,
        )
        if options.grpc_socket_path is not None:
            path = options.grpc_socket_path.absolute()
            _require_unused(path)
            _listen(
                server,
                f"unix:{path}",
                credentials,
                "the directory is missing, or the path is too long",
                "choose another --grpc_socket_path",
            )
        return server, bound

    def _listen_http(self) -> HttpPort | None:
        network = self._options.network
        if network.rest_api_port is None:
            return None
        try:
            from serving.http_port import HttpPort
            from serving.rest import MAX_BODY_BYTES, RestInterface, metrics_path

            application = RestInterface(
                self._calls,
                self._metrics,
                timeout_ms=network.rest_api_timeout_in_ms or None,
                allow_cors=network.rest_api_enable_cors_support,
                metrics_path=metrics_path(network.monitoring_config_file),
            )
            return HttpPort(
                application,
                self.host.strip("[]"),
                network.rest_api_port,
                option="--rest-api-port",
                threads=network.rest_api_num_threads or 4 * (os.cpu_count() or 1),
                max_body_bytes=MAX_BODY_BYTES,
                request_seconds=_REQUEST_S,
                is_quick=lambda request: request.method != "POST",
                allow_host=network.allow_host,
            )
        except BaseException:
            self.stop(0.0)
            raise

    def _configure(self, wanted: Sequence[ModelConfig]) -> None:
        try:
            self.models.configure(wanted)
        except StatusError as error:
            self.stop(0.0)
            hint = "correct the configuration"
            if error.code is Code.FAILED_PRECONDITION:
                hint = "set labels after versions are available, or allow them earlier: "
                hint += "--allow_version_labels_for_unavailable_models"
            raise UsageError(error.message, cause=f"{error.code.name}", hint=hint) from error


def _no_models(options: ServerOptions, listener: Listener | None) -> ServedModels:
    from serving.manager import VersionManager, load_warm

    load = partial(load_warm, loading=options.loading(), how=options.inference())

    def create(model: ModelConfig) -> VersionManager:
        return VersionManager(
            model.name,
            model.base_path,
            policy=model.policy,
            poll_seconds=options.poll_seconds,
            load=load,
            listener=listener,
        )

    return ServedModels(
        create, labels_unavailable_versions=options.allow_version_labels_for_unavailable_models
    )


def _single(base_path: str | PathLike[str] | None, name: str | None) -> tuple[ModelConfig, ...]:
    from serving.model_config import ModelConfig

    if base_path is None:
        raise UsageError(
            "there is no model to serve",
            cause="neither a model base path nor a configuration file is given",
            hint="serve-model run MODEL, or serve-model run --model-config-file FILE",
        )
    path = local_path("base_path", base_path).absolute()
    return (ModelConfig(name or path.name, path),)


def _require_unused(path: Path) -> None:
    """Raise ServerError for a socket on which another server listens: gRPC would replace the file."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise ServerError(
        f"cannot listen on unix:{path}",
        cause="another server listens on it",
        hint="choose another --grpc_socket_path",
    )


_IN_USE = (
    "the port is in use, or the address does not belong to this machine",
    "choose another --port, or --port 0 for a free one",
)


def require_free(host: str, port: int) -> None:
    """Raise ServerError if another program listens on a port, before gRPC prints its own line about that.

    A host name that does not resolve passes, and so does an address that this machine does not have.
    """
    with suppress(socket.gaierror):  # gRPC resolves names in its own way
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of connections that ended
                    probe.bind(address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    continue  # another address of the name may do
                cause, hint = _IN_USE
                where = f"cannot listen on {_host_and_port(host, port)}"
                raise ServerError(where, cause=cause, hint=hint) from error


def _host_and_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _listen(server: GrpcPort, address: str, credentials: Any, cause: str, hint: str) -> int:
    try:
        bound = server.listen(address, credentials)
    except RuntimeError:
        bound = 0
    if not bound:
        raise ServerError(f"cannot listen on {address}", cause=cause, hint=hint)
    return int(bound)


class Health:
    """A flag that makes health checks fail before the server stops, whatever the models' states are."""

    is_ending = False


def _health_check(models: ServedModels, health: Health) -> Method:
    request, response = messages()

    def check(asked: Proto, call: Call) -> Proto:
        if asked.service not in _WHOLE_SERVER and asked.service not in models.served():
            call.abort(grpc.StatusCode.NOT_FOUND, f"unknown service: {asked.service}")
        is_available = models.is_available(None if asked.service in _WHOLE_SERVER else asked.service)
        return response(status=SERVING if is_available and not health.is_ending else NOT_SERVING)

    return _method(request, check, is_quick=True)


@cache
def messages() -> tuple[Any, Any]:
    """Return the classes of the messages HealthCheckRequest and HealthCheckResponse; memoised.

    Their source is grpc/health/v1/health.proto.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="grpc/health/v1/health.proto", package="grpc.health.v1", syntax="proto3"
    )
    request = file.message_type.add(name="HealthCheckRequest")
    request.field.add(name="service", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    response = file.message_type.add(name="HealthCheckResponse")
    states = response.enum_type.add(name="ServingStatus")
    for number, name in enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")):
        states.value.add(name=name, number=number)
    status = response.field.add(name="status", number=1, type=field.TYPE_ENUM, label=field.LABEL_OPTIONAL)
    status.type_name = ".grpc.health.v1.HealthCheckResponse.ServingStatus"
    # A pool of its own: grpcio-health-checking has another file of this name in the default one.
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    classes = [
        class_of(pool.FindMessageTypeByName(f"grpc.health.v1.{name}"))
        for name in ("HealthCheckRequest", "HealthCheckResponse")
    ]
    return classes[0], classes[1]


def _services(calls: Calls, metrics: ServerMetrics, health: Health) -> Mapping[str, Mapping[str, Method]]:
    """Return the methods of all services, by service and method name.

    They are PredictionService, ModelService and the health service, by full names such as
    `tensorflow.serving.ModelService`. Requests of PredictionService are counted in `metrics`; `health` can
    make health checks fail.
    """
    found: dict[str, Mapping[str, Method]] = {_SERVICE: {"Check": _health_check(calls.models, health)}}
    for service in (PredictionService(calls, metrics), ModelService(calls)):
        name = type(service).__name__
        found[f"tensorflow.serving.{name}"] = {
            method: _method(request, getattr(service, method))
            for method, (request, _) in service_methods(name).items()
        }
    return found


def _method(request: type[Proto], respond: Respond, *, is_quick: bool = False) -> Method:
    from google.protobuf.message import DecodeError

    def answer(content: bytes, call: Call) -> bytes:
        try:
            asked = request.FromString(content)
        except DecodeError:
            call.abort(grpc.StatusCode.INTERNAL, "Exception deserializing request!")  # as grpc says it
        return bytes(respond(asked, call).SerializeToString())

    return Method(answer, is_quick)


class PredictionService:
    """Inference and metadata (source: tensorflow_serving/apis/prediction_service.proto)."""

    def __init__(self, calls: Calls, metrics: ServerMetrics) -> None:
        self._calls = calls
        self._metrics = metrics

    def Predict(self, request: Proto, call: Call) -> Proto:
        """Run a signature on tensors; return a `PredictResponse`.

        The caller's deadline limits the computation. An error ends the call with its status. The request is
        counted in the metrics.
        """
        with _status_to(call), self._counted("Predict", request.model_spec):
            return self._calls.predict(request, _timeout_ms(call))

    def Classify(self, request: Proto, call: Call) -> Proto:
        """Run a classify signature on examples; return a `ClassificationResponse`.

        The caller's deadline limits the computation. An error ends the call with its status. The request is
        counted in the metrics.
        """
        with _status_to(call), self._counted("Classify", request.model_spec):
            return self._calls.classify(request, _timeout_ms(call))

    def Regress(self, request: Proto, call: Call) -> Proto:
        """Run a regress signature on examples; return a `RegressionResponse`.

        The caller's deadline limits the computation. An error ends the call with its status. The request is
        counted in the metrics.
        """
        with _status_to(call), self._counted("Regress", request.model_spec):
            return self._calls.regress(request, _timeout_ms(call))

    def MultiInference(self, request: Proto, call: Call) -> Proto:
        """Run several classify and regress signatures on one input; return a `MultiInferenceResponse`.

        The caller's deadline limits the computation. An error ends the call with its status. The request is
        counted in the metrics.
        """
        spec = request.tasks[0].model_spec if request.tasks else None
        with _status_to(call), self._counted("MultiInference", spec):
            return self._calls.multi_inference(request, _timeout_ms(call))

    def GetModelMetadata(self, request: Proto, call: Call) -> Proto:
        """Return the signatures of a version as a `GetModelMetadataResponse`.

        An error ends the call with its status. The request is counted in the metrics.
        """
        with _status_to(call, self._calls.models), self._counted("GetModelMetadata", request.model_spec):
            return self._calls.metadata(request)

    @contextmanager
    def _counted(self, api: str, spec: Proto | None) -> Iterator[None]:
        began, code = time.monotonic(), Code.OK
        try:
            yield
        except Exception as error:
            code = status_of(error).code or Code.UNKNOWN
            raise
        finally:
            name = "" if spec is None else spec.name
            self._metrics.count(name, api, "GRPC", code, time.monotonic() - began)


class ModelService:
    """States and configuration (source: tensorflow_serving/apis/model_service.proto)."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def GetModelStatus(self, request: Proto, call: Call) -> Proto:
        """Return the state of each version of a model as a `GetModelStatusResponse`.

        An error ends the call with its status.
        """
        with _status_to(call, self._calls.models):
            return self._calls.status(request)

    def HandleReloadConfigRequest(self, request: Proto, call: Call) -> Proto:
        """Serve exactly the models of a `ReloadConfigRequest`, and wait until every new one is available.

        Returns an empty `ReloadConfigResponse`. It waits at most until the caller's deadline, or ten minutes
        without one. An error ends the call with its status.
        """
        with _status_to(call):
            remaining = _seconds_left(call)
            seconds = _CONFIGURE_SECONDS if remaining is None else remaining
            return self._calls.configure(request, seconds, call.is_active)


def _timeout_ms(call: Call) -> int | None:
    """Return the milliseconds until the caller's deadline, for the session's time limit; None without one.

    Not positive after the deadline.
    """
    seconds = _seconds_left(call)
    return None if seconds is None else int(seconds * 1000)


def _seconds_left(call: Call) -> float | None:
    seconds = call.time_remaining()  # without a deadline: None, or the time to gRPC's last timestamp
    return None if seconds is None or seconds > _FOREVER_SECONDS else seconds


@contextmanager
def _status_to(call: Call, models: ServedModels | None = None) -> Iterator[None]:
    """End the call with the canonical status of any exception in the block, by `Call.abort`.

    The status's message is shortened as in TF Serving. With `models`, NOT_FOUND carries their names, for
    clients that do not know one.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the edge of the server: every error becomes a status
        status = status_of(error)
        code = status.code if status.code is not Code.OK else Code.UNKNOWN
        message = status.message
        if len(message) > MAX_MESSAGE_CHARACTERS:
            message = message[:MAX_MESSAGE_CHARACTERS] + "...TRUNCATED"
        names = () if code is not Code.NOT_FOUND or models is None else as_metadata(models.served())
        call.abort(_STATUS_CODES[int(code)], message, names)
