"""TF Serving's gRPC services over the models that a server holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from exporter.wire.protos import Proto
from serving.inference import (
    DEFAULT_SIGNATURE,
    MAX_FILLED_BYTES,
    Model,
    classify,
    multi_inference,
    predict,
    regress,
)
from serving.models import ServedModels
from serving.status import MAX_MESSAGE_CHARACTERS, Code, invalid, status_of

Context = grpc.ServicerContext
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}
_SIGNATURE_DEF = "signature_def"
_CONFIGURE_SECONDS = 60.0
_FOREVER_SECONDS = 1e9


def add_services(server: grpc.Server, models: ServedModels, max_filled_bytes: int = MAX_FILLED_BYTES) -> None:
    """Register PredictionService and ModelService, through TF Serving's own stubs."""
    from tensorflow_serving.apis import model_service_pb2_grpc, prediction_service_pb2_grpc

    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(
        PredictionService(models, max_filled_bytes), server
    )
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(models), server)


class PredictionService:
    """Inference and metadata (source: tensorflow_serving/apis/prediction_service.proto)."""

    def __init__(self, models: ServedModels, max_filled_bytes: int) -> None:
        from tensorflow_serving.apis import (
            classification_pb2,
            get_model_metadata_pb2,
            inference_pb2,
            predict_pb2,
            regression_pb2,
        )

        self._models = models
        self._max_filled_bytes = max_filled_bytes
        self._predict_response = predict_pb2.PredictResponse
        self._classification_response = classification_pb2.ClassificationResponse
        self._regression_response = regression_pb2.RegressionResponse
        self._multi_inference_response = inference_pb2.MultiInferenceResponse
        self._metadata_response = get_model_metadata_pb2.GetModelMetadataResponse
        self._signature_def_map = get_model_metadata_pb2.SignatureDefMap

    def Predict(self, request: Proto, context: Context) -> Proto:
        """Run a signature on tensors."""
        return self._infer(predict, self._predict_response(), request, context)

    def Classify(self, request: Proto, context: Context) -> Proto:
        """Run a classify signature on examples."""
        return self._infer(classify, self._classification_response(), request, context)

    def Regress(self, request: Proto, context: Context) -> Proto:
        """Run a regress signature on examples."""
        return self._infer(regress, self._regression_response(), request, context)

    def MultiInference(self, request: Proto, context: Context) -> Proto:
        """Run several classify and regress signatures on the same examples."""
        with _status_to(context):
            if not request.tasks:
                raise invalid("MultiInferenceRequest has no tasks.")
            response = self._multi_inference_response()
            with self._models.borrow(request.tasks[0].model_spec) as (version, model):
                multi_inference(model, request, response, _timeout_ms(context), self._max_filled_bytes)
                for task, result in zip(request.tasks, response.results, strict=True):
                    _name_version(result.model_spec, task.model_spec, version)
            return response

    def GetModelMetadata(self, request: Proto, context: Context) -> Proto:
        """The signatures of a version."""
        with _status_to(context):
            _require_spec(request)
            if not request.metadata_field:
                raise invalid("GetModelMetadataRequest must specify at least one metadata_field")
            for field in request.metadata_field:
                if field != _SIGNATURE_DEF:
                    raise invalid(f"Metadata field {field} is not supported")
            response = self._metadata_response()
            with self._models.borrow(request.model_spec) as (version, model):
                response.model_spec.name = request.model_spec.name
                response.model_spec.version.value = version
                signatures = self._signature_def_map()
                for name, signature in model.signatures.items():
                    signatures.signature_def[name].CopyFrom(signature)
                response.metadata[_SIGNATURE_DEF].Pack(signatures)
            return response

    def _infer(
        self,
        run: Callable[[Model, Proto, Proto, int | None, int], None],
        response: Proto,
        request: Proto,
        context: Context,
    ) -> Proto:
        with _status_to(context):
            _require_spec(request)
            with self._models.borrow(request.model_spec) as (version, model):
                run(model, request, response, _timeout_ms(context), self._max_filled_bytes)
                _name_version(response.model_spec, request.model_spec, version)
            return response


class ModelService:
    """States and configuration (source: tensorflow_serving/apis/model_service.proto)."""

    def __init__(self, models: ServedModels) -> None:
        from tensorflow_serving.apis import get_model_status_pb2, model_management_pb2

        self._models = models
        self._status_response = get_model_status_pb2.GetModelStatusResponse
        self._reload_response = model_management_pb2.ReloadConfigResponse

    def GetModelStatus(self, request: Proto, context: Context) -> Proto:
        """Where each version of a model is in its life."""
        with _status_to(context):
            _require_spec(request)
            response = self._status_response()
            for status in self._models.statuses(request.model_spec):
                entry = response.model_version_status.add(version=status.version, state=int(status.state))
                entry.status.error_code = int(status.code)
                entry.status.error_message = status.message
            return response

    def HandleReloadConfigRequest(self, request: Proto, context: Context) -> Proto:
        """Serve other models, versions or labels; answers when all of them are available."""
        with _status_to(context):
            remaining = _seconds_left(context)
            self._models.configure(request.config, _CONFIGURE_SECONDS if remaining is None else remaining)
            response = self._reload_response()
            response.status.SetInParent()
            return response


def _require_spec(request: Proto) -> None:
    if not request.HasField("model_spec"):
        raise invalid("Missing ModelSpec")


def _name_version(answer: Proto, asked: Proto, version: int) -> None:
    answer.name = asked.name
    answer.signature_name = asked.signature_name or DEFAULT_SIGNATURE
    answer.version.value = version


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
