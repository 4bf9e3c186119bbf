"""TF Serving's gRPC services: the calls of `serving.calls` with gRPC's deadlines and statuses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from exporter.wire.protos import Proto
from serving.calls import Calls
from serving.server_metrics import ServerMetrics
from serving.status import MAX_MESSAGE_CHARACTERS, Code, status_of

Context = grpc.ServicerContext
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}
_CONFIGURE_SECONDS = 600.0
"""How long a call without a deadline waits for new models; TF Serving's waits for ever."""
_FOREVER_SECONDS = 1e9


def add_services(server: grpc.Server, calls: Calls, metrics: ServerMetrics) -> None:
    """Register PredictionService and ModelService, through TF Serving's own stubs."""
    from tensorflow_serving.apis import model_service_pb2_grpc, prediction_service_pb2_grpc

    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(
        PredictionService(calls, metrics), server
    )
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(calls), server)


class PredictionService:
    """Inference and metadata (source: tensorflow_serving/apis/prediction_service.proto)."""

    def __init__(self, calls: Calls, metrics: ServerMetrics) -> None:
        self._calls = calls
        self._metrics = metrics

    def Predict(self, request: Proto, context: Context) -> Proto:
        """Run a signature on tensors."""
        with _status_to(context), self._counted("Predict", request.model_spec):
            return self._calls.predict(request, _timeout_ms(context))

    def Classify(self, request: Proto, context: Context) -> Proto:
        """Run a classify signature on examples."""
        with _status_to(context), self._counted("Classify", request.model_spec):
            return self._calls.classify(request, _timeout_ms(context))

    def Regress(self, request: Proto, context: Context) -> Proto:
        """Run a regress signature on examples."""
        with _status_to(context), self._counted("Regress", request.model_spec):
            return self._calls.regress(request, _timeout_ms(context))

    def MultiInference(self, request: Proto, context: Context) -> Proto:
        """Run several classify and regress signatures on the same examples."""
        spec = request.tasks[0].model_spec if request.tasks else None
        with _status_to(context), self._counted("MultiInference", spec):
            return self._calls.multi_inference(request, _timeout_ms(context))

    def GetModelMetadata(self, request: Proto, context: Context) -> Proto:
        """The signatures of a version."""
        with _status_to(context), self._counted("GetModelMetadata", request.model_spec):
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

    def GetModelStatus(self, request: Proto, context: Context) -> Proto:
        """Where each version of a model is in its life."""
        with _status_to(context):
            return self._calls.status(request)

    def HandleReloadConfigRequest(self, request: Proto, context: Context) -> Proto:
        """Serve other models, versions or labels; answers when the models that are new are available."""
        with _status_to(context):
            remaining = _seconds_left(context)
            seconds = _CONFIGURE_SECONDS if remaining is None else remaining
            return self._calls.configure(request, seconds, context.is_active)


def _timeout_ms(context: Context) -> int | None:
    """What is left of the caller's deadline: the session stops the step then, as TF Serving's does."""
    seconds = _seconds_left(context)
    return None if seconds is None else int(seconds * 1000)


def _seconds_left(context: Context) -> float | None:
    seconds = context.time_remaining()  # without a deadline: None, or the time to the end of the epoch
    return None if seconds is None or seconds > _FOREVER_SECONDS else seconds


@contextmanager
def _status_to(context: Context) -> Iterator[None]:
    """Whatever a call raises ends it with a canonical status, the message cut where TF Serving cuts it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the edge of the server: every error becomes a status
        status = status_of(error)
        code = status.code if status.code is not Code.OK else Code.UNKNOWN
        message = status.message
        if len(message) > MAX_MESSAGE_CHARACTERS:
            message = message[:MAX_MESSAGE_CHARACTERS] + "...TRUNCATED"
        context.abort(_STATUS_CODES[int(code)], message)
