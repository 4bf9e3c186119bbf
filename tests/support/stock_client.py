"""TF Serving's own stubs and messages, as its clients use them."""

from __future__ import annotations

from typing import Any

import grpc

WAIT_SECONDS = 60


class Stock:
    """The stock client: TF Serving's own stubs and messages."""

    def __init__(self, address: str) -> None:
        from tensorflow_serving.apis import model_service_pb2_grpc, prediction_service_pb2_grpc

        self.channel = grpc.insecure_channel(address)
        self.prediction = prediction_service_pb2_grpc.PredictionServiceStub(self.channel)
        self.model = model_service_pb2_grpc.ModelServiceStub(self.channel)

    def predict(self, inputs: dict[str, Any], *, filter_: tuple[str, ...] = (), **spec: Any) -> Any:
        import tensorflow as tf
        from tensorflow_serving.apis import predict_pb2

        request = predict_pb2.PredictRequest(output_filter=filter_)
        fill_spec(request.model_spec, **spec)
        for name, value in inputs.items():
            request.inputs[name].CopyFrom(tf.make_tensor_proto(value))
        return self.prediction.Predict(request, timeout=WAIT_SECONDS)

    def examples(
        self, method: str, rows: list[dict[str, Any]], context: dict[str, Any] | None = None, **spec: Any
    ) -> Any:
        from tensorflow_serving.apis import classification_pb2, regression_pb2

        request = {
            "Classify": classification_pb2.ClassificationRequest,
            "Regress": regression_pb2.RegressionRequest,
        }[method]()
        fill_spec(request.model_spec, **spec)
        if context is None:
            request.input.example_list.examples.extend(map(example, rows))
        else:
            request.input.example_list_with_context.context.CopyFrom(example(context))
            request.input.example_list_with_context.examples.extend(map(example, rows))
        return getattr(self.prediction, method)(request, timeout=WAIT_SECONDS)

    def metadata(self, *fields: str, **spec: Any) -> Any:
        from tensorflow_serving.apis import get_model_metadata_pb2

        request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=fields)
        fill_spec(request.model_spec, **spec)
        return self.prediction.GetModelMetadata(request, timeout=WAIT_SECONDS)

    def status(self, **spec: Any) -> Any:
        from tensorflow_serving.apis import get_model_status_pb2

        request = get_model_status_pb2.GetModelStatusRequest()
        fill_spec(request.model_spec, **spec)
        return self.model.GetModelStatus(request, timeout=WAIT_SECONDS)


def fill_spec(
    spec: Any, name: str = "ranker", version: int | None = None, label: str = "", signature: str = ""
) -> None:
    spec.name, spec.signature_name = name, signature
    if version is not None:
        spec.version.value = version
    if label:
        spec.version_label = label


def example(features: dict[str, Any]) -> Any:
    import tensorflow as tf

    made = tf.train.Example()
    for name, value in features.items():
        if isinstance(value, str):
            made.features.feature[name].bytes_list.value.append(value.encode())
        else:
            made.features.feature[name].float_list.value.extend(value)
    return made
