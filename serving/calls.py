"""TF Serving's calls, independent of the protocol: message in, message out.

`server` offers them over gRPC, `rest` over HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace
from numpy.typing import NDArray

from exporter.wire.protos import Proto, message_class
from serving.inference import (
    DEFAULT_INFERENCE,
    DEFAULT_SIGNATURE,
    Inference,
    Model,
    classify,
    multi_inference,
    predict,
    predict_arrays,
    regress,
)
from serving.model_config import listed_models
from serving.models import ServedModels
from serving.status import invalid

_SIGNATURE_DEF = "signature_def"
Run = Callable[[Model, Proto, Proto, Inference], None]


class Calls:
    """TF Serving's calls on the models of a server. Each raises StatusError, or TensorFlow's own errors."""

    def __init__(self, models: ServedModels, how: Inference = DEFAULT_INFERENCE) -> None:
        self.models = models
        self.how = how

    def predict(self, request: Proto, timeout_ms: int | None = None) -> Proto:
        """Run a signature on the tensors of a `PredictRequest`; return a `PredictResponse`.

        TensorFlow stops the run after `timeout_ms`; None sets no limit. StatusError if the model, version,
        label or signature is not available, or the request does not fit the signature; TensorFlow's own
        errors (`tf.errors.OpError`) pass.
        """
        return self._infer(predict, message_class("serving.PredictResponse")(), request, timeout_ms)

    def predict_arrays(
        self, model: Model, signature: str, inputs: Mapping[str, NDArray[Any]], timeout_ms: int | None
    ) -> dict[str, NDArray[Any]]:
        """Run a signature of a borrowed model on arrays, by input name; return arrays by output name.

        "" as `signature` is the default one; an input with a default may be left out. TensorFlow stops the
        run after `timeout_ms`; None sets no limit. StatusError if there is no such signature, or the inputs
        do not fit it; TensorFlow's own errors pass.
        """
        return predict_arrays(model, signature, inputs, self.within(timeout_ms))

    def classify(self, request: Proto, timeout_ms: int | None = None) -> Proto:
        """Run a classify signature on a request's examples; return a `ClassificationResponse`.

        TensorFlow stops the run after `timeout_ms`; None sets no limit. StatusError if the model, version,
        label or signature is not available, the signature lacks the tensors of a classification, or there is
        no example; TensorFlow's own errors pass, as for an example that does not parse.
        """
        return self._infer(classify, message_class("serving.ClassificationResponse")(), request, timeout_ms)

    def regress(self, request: Proto, timeout_ms: int | None = None) -> Proto:
        """Run a regress signature on a request's examples; return a `RegressionResponse`.

        TensorFlow stops the run after `timeout_ms`; None sets no limit. StatusError if the model, version,
        label or signature is not available, the signature lacks the tensors of a regression, or there is no
        example; TensorFlow's own errors pass, as for an example that does not parse.
        """
        return self._infer(regress, message_class("serving.RegressionResponse")(), request, timeout_ms)

    def multi_inference(self, request: Proto, timeout_ms: int | None = None) -> Proto:
        """Run several classify and regress signatures on one input; return a `MultiInferenceResponse`.

        Its results have the order of the request's tasks. TensorFlow stops the run after `timeout_ms`; None
        sets no limit. StatusError if there is no task or no example, a model, version, label or signature is
        not available, or tasks name several models, one signature twice, or another method; TensorFlow's own
        errors pass.
        """
        if not request.tasks:
            raise invalid("ModelSpec has no name specified.")  # TF Serving reads the spec of the first task
        response = message_class("serving.MultiInferenceResponse")()
        with self.models.borrow(request.tasks[0].model_spec) as (version, model):
            multi_inference(model, request, response, self.within(timeout_ms))
            for task, result in zip(request.tasks, response.results, strict=True):
                _name_version(result.model_spec, task.model_spec, version)
        return response

    def metadata(self, request: Proto) -> Proto:
        """Return the signatures of a version as a `GetModelMetadataResponse`.

        StatusError if no field or another one than `signature_def` is requested, or the model, version or
        label is not available.
        """
        _require_spec(request)
        if not request.metadata_field:
            raise invalid("GetModelMetadataRequest must specify at least one metadata_field")
        for field in request.metadata_field:
            if field != _SIGNATURE_DEF:
                raise invalid(f"Metadata field {field} is not supported")
        response = message_class("serving.GetModelMetadataResponse")()
        with self.models.borrow(request.model_spec) as (version, model):
            response.model_spec.name = request.model_spec.name
            response.model_spec.version.value = version
            signatures = message_class("serving.SignatureDefMap")()
            for name, signature in model.signatures.items():
                signatures.signature_def[name].CopyFrom(signature)
            response.metadata[_SIGNATURE_DEF].Pack(signatures)
        return response

    def status(self, request: Proto) -> Proto:
        """Return the state of each version of a model, the newest first, as a `GetModelStatusResponse`.

        If the request names a version or label, the response has only this version. StatusError if the model,
        version or label is unknown.
        """
        _require_spec(request)
        response = message_class("serving.GetModelStatusResponse")()
        for status in self.models.statuses(request.model_spec):
            entry = response.model_version_status.add(version=status.version, state=int(status.state))
            entry.status.error_code = int(status.code)
            entry.status.error_message = status.message
        return response

    def configure(self, request: Proto, timeout_seconds: float, is_wanted: Callable[[], bool]) -> Proto:
        """Serve exactly the models of a `ReloadConfigRequest`, and wait until every new one is available.

        Returns an empty `ReloadConfigResponse`. `is_wanted` is called about once a second, and returns False
        once the client no longer waits. StatusError if the configuration is refused, which changes nothing;
        or, while the configuration stays in effect, if a new model is not available within `timeout_seconds`,
        cannot be loaded, or is no longer waited for.
        """
        if request.config.WhichOneof("config") != "model_config_list":
            raise invalid(
                "ServerModelConfig type not supported by HandleReloadConfigRequest. "
                "Only ModelConfigList is currently supported"
            )
        self.models.serve(listed_models(request.config), timeout_seconds, is_wanted)
        response = message_class("serving.ReloadConfigResponse")()
        response.status.SetInParent()
        return response

    def within(self, timeout_ms: int | None) -> Inference:
        """Return the inference settings with `timeout_ms` as a request's time limit; None sets no limit."""
        return replace(self.how, timeout_ms=timeout_ms)

    def _infer(self, run: Run, response: Proto, request: Proto, timeout_ms: int | None) -> Proto:
        _require_spec(request)
        with self.models.borrow(request.model_spec) as (version, model):
            run(model, request, response, self.within(timeout_ms))
            _name_version(response.model_spec, request.model_spec, version)
        return response


def _require_spec(request: Proto) -> None:
    if not request.HasField("model_spec"):
        raise invalid("Missing ModelSpec")


def _name_version(response: Proto, request: Proto, version: int) -> None:
    response.name = request.name
    response.signature_name = request.signature_name or DEFAULT_SIGNATURE
    response.version.value = version
