"""The model server through the stock client stubs."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import grpc
import numpy as np
import pytest

from exporter.errors import Exit, ModelPathNotFound, ServerError, UsageError
from exporter.wire.dtypes import DType
from exporter.wire.protos import message_class
from serving.inference import predict
from serving.server import ModelServer, _timeout_ms
from serving.server_options import ServerOptions
from serving.status import Code, StatusError
from tests.support.serving_models import CLASSIFY, REGRESS, write_saved_model
from tests.support.stock_client import Stock, example, fill_spec

WAIT_SECONDS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("models") / "ranker"
    write_saved_model(base / "1", scale=1.0)
    write_saved_model(base / "2", scale=2.0)
    return base


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ModelServer]:
    with ModelServer(model, options=ServerOptions(poll_seconds=0.05)) as server:
        server.wait_available(WAIT_SECONDS)
        yield server


@pytest.fixture(scope="module")
def stock(server: ModelServer) -> Iterator[Stock]:
    client = Stock(server.address)
    yield client
    client.channel.close()


X = [[1.0, 2.0], [3.0, 4.0]]


def test_predict(stock: Stock) -> None:
    import tensorflow as tf

    response = stock.predict({"x": X})
    np.testing.assert_array_equal(tf.make_ndarray(response.outputs["y"]), np.float32(X) * 2)
    assert response.model_spec.name == "ranker"
    assert response.model_spec.version.value == 2
    assert response.model_spec.signature_name == "serving_default"


def test_responses_use_the_fields_that_stock_servers_use(stock: Stock) -> None:
    assert list(stock.predict({"x": [[1.0, 2.0]]}).outputs["y"].float_val) == [2.0, 4.0]


def test_responses_in_bytes_if_asked(model: Path) -> None:
    import tensorflow as tf

    options = ServerOptions(enable_serialization_as_tensor_content=True)
    with ModelServer(model, options=options) as server:
        server.wait_available(WAIT_SECONDS)
        stock = Stock(server.address)
        outputs = stock.predict({"x": X, "text": ["a", "b"]}, signature="two").outputs
        stock.channel.close()
    assert outputs["y"].tensor_content == np.float32([[2, 4], [6, 8]]).tobytes()
    assert tf.make_ndarray(outputs["loud"]).tolist() == [b"a!", b"b!"]


def test_strings_are_any_bytes(stock: Stock) -> None:
    import tensorflow as tf

    response = stock.predict({"text": np.array([b"a", b"\x00\xff"], object)}, signature="text")
    assert tf.make_ndarray(response.outputs["loud"]).tolist() == [b"a!", b"\x00\xff!"]
    assert response.model_spec.signature_name == "text"


def test_output_filter(stock: Stock) -> None:
    inputs = {"x": X, "text": ["a", "b"]}
    assert set(stock.predict(inputs, signature="two").outputs) == {"y", "loud"}
    assert set(stock.predict(inputs, signature="two", filter_=("loud",)).outputs) == {"loud"}


def test_predict_runs_classify_signatures_too(stock: Stock) -> None:
    serialized = [example({"x": [1.0, 2.0]}).SerializeToString()]
    assert set(stock.predict({"inputs": serialized}, signature="scores").outputs) == {"scores"}


def test_several_values_of_wire_width(stock: Stock) -> None:
    """One value for a whole tensor, as `TensorProto` allows it."""
    from tensorflow_serving.apis import predict_pb2

    request = predict_pb2.PredictRequest()
    fill_spec(request.model_spec)
    request.inputs["x"].dtype = 1
    for size in (3, 2):
        request.inputs["x"].tensor_shape.dim.add(size=size)
    request.inputs["x"].float_val.append(1.5)
    assert list(stock.prediction.Predict(request).outputs["y"].float_val) == [3.0] * 6


@pytest.mark.parametrize(
    ("inputs", "options", "code", "text"),
    [
        ({"x": X}, {"name": "nobody"}, "NOT_FOUND", "Servable not found for request: Latest(nobody)"),
        ({"x": X}, {"version": 9}, "NOT_FOUND", "Servable not found for request: Specific(ranker, 9)"),
        ({"x": X}, {"version": 1}, "NOT_FOUND", "Servable not found for request: Specific(ranker, 1)"),
        ({"x": X}, {"label": "canary"}, "INVALID_ARGUMENT", "Unrecognized servable version label: canary"),
        ({"x": X}, {"name": ""}, "INVALID_ARGUMENT", "ModelSpec has no name specified."),
        ({"x": X}, {"signature": "none"}, "FAILED_PRECONDITION", 'Serving signature key "none" not found.'),
        ({}, {}, "INVALID_ARGUMENT", "input size does not match signature: 0!=1 len({}) != len({x}). "
         "Sent extra: {}. Missing but required: {x}."),
        ({"x": X, "z": X}, {}, "INVALID_ARGUMENT", "2!=1 len({x,z}) != len({x}). Sent extra: {z}."),
        ({"z": X}, {}, "INVALID_ARGUMENT", "input tensor alias not found in signature: z. "
         "Inputs expected to be in the set {x}."),
        ({"x": X}, {"filter_": ("q",)}, "INVALID_ARGUMENT", "output tensor alias not found in signature: q "
         "Outputs expected to be in the set {y}."),
        ({"x": X}, {"filter_": ("y", "y")}, "INVALID_ARGUMENT", "duplicate output tensor alias: y"),
        ({"x": np.float64(X)}, {}, "INVALID_ARGUMENT", "Expects arg[0] to be float but double is provided"),
        ({"x": ["a"]}, {}, "INVALID_ARGUMENT", "Expects arg[0] to be float but string is provided"),
        ({"inputs": ["junk"]}, {"signature": "regress"}, "INVALID_ARGUMENT", "Feature: x"),
        ({"x": [[-1.0, 1.0]]}, {"signature": "check"}, "INVALID_ARGUMENT", "x must be positive"),
    ],
)  # fmt: skip
def test_refused_predictions(
    stock: Stock, inputs: dict[str, Any], options: Any, code: str, text: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stock.predict(inputs, **options)
    assert caught.value.code().name == code
    assert text in caught.value.details()


def test_a_tensor_that_does_not_fill_its_shape_is_refused(stock: Stock) -> None:
    from tensorflow_serving.apis import predict_pb2

    request = predict_pb2.PredictRequest()
    fill_spec(request.model_spec)
    request.inputs["x"].dtype = 1
    request.inputs["x"].tensor_shape.dim.add(size=3)
    request.inputs["x"].tensor_content = b"1234"
    with pytest.raises(grpc.RpcError, match="tensor parsing error: x"):
        stock.prediction.Predict(request)


@pytest.mark.parametrize("sizes", [[1 << 26, 2], [1 << 40], [1 << 62, 1 << 62], [1] * 255])
@pytest.mark.parametrize("type_", [1, 7])
def test_a_shape_far_beyond_the_values_sent_is_refused(stock: Stock, sizes: list[int], type_: int) -> None:
    """60 bytes must not cost gigabytes; TF Serving answers so where it cannot allocate them."""
    from tensorflow_serving.apis import predict_pb2

    request = predict_pb2.PredictRequest()
    fill_spec(request.model_spec)
    request.inputs["x"].dtype = type_
    for size in sizes:
        request.inputs["x"].tensor_shape.dim.add(size=size)
    with pytest.raises(grpc.RpcError, match="tensor parsing error: x") as caught:
        stock.prediction.Predict(request)
    assert caught.value.code().name == "INVALID_ARGUMENT"


def test_one_value_for_a_whole_shape_is_taken(stock: Stock) -> None:
    from tensorflow_serving.apis import predict_pb2

    request = predict_pb2.PredictRequest()
    fill_spec(request.model_spec)
    request.inputs["x"].dtype = 1
    request.inputs["x"].float_val.append(0.5)
    for size in (1 << 18, 2):
        request.inputs["x"].tensor_shape.dim.add(size=size)
    response = stock.prediction.Predict(request)
    assert response.outputs["y"].tensor_shape.dim[0].size == 1 << 18


def test_a_context_before_too_many_examples_is_refused(stock: Stock) -> None:
    rows = [{"x": [1.0, 2.0]}] * 1000
    with pytest.raises(grpc.RpcError, match="a context of") as caught:
        stock.examples("Classify", rows, {"label": "s" * 100_000}, signature="classify")
    assert caught.value.code().name == "INVALID_ARGUMENT"


def test_long_messages_are_cut(stock: Stock) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stock.predict({"x": X}, signature="s" * 3000)
    assert len(caught.value.details()) == 1024 + len("...TRUNCATED")


def test_a_callers_deadline_ends_the_step(stock: Stock, server: ModelServer) -> None:
    """Otherwise a call that nobody waits for would keep its thread: eight of them would end the service."""
    from tensorflow_serving.apis import predict_pb2

    request = predict_pb2.PredictRequest()
    fill_spec(request.model_spec, signature="slow")
    request.inputs["turns"].dtype = 9
    request.inputs["turns"].tensor_shape.dim.add(size=1)
    request.inputs["turns"].int64_val.append(1 << 60)
    for _ in range(10):
        with pytest.raises(grpc.RpcError) as caught:
            stock.prediction.Predict(request, timeout=0.1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    stock.predict({"x": X})


def test_classify(stock: Stock) -> None:
    response = stock.examples(
        "Classify", [{"x": [1.0, 2.0], "label": "a"}, {"x": [3.0, 4.0]}], signature="classify"
    )
    rows = [[(c.label, c.score) for c in row.classes] for row in response.result.classifications]
    assert rows == [[("a", 2.0), ("a", 4.0)], [("-", 6.0), ("-", 8.0)]]
    assert response.model_spec.version.value == 2
    assert response.model_spec.signature_name == "classify"


def test_classify_with_scores_alone(stock: Stock) -> None:
    response = stock.examples("Classify", [{"x": [1.0, 2.0]}], signature="scores")
    assert [(c.label, c.score) for c in response.result.classifications[0].classes] == [("", 2.0), ("", 4.0)]


def test_a_context_is_part_of_each_example(stock: Stock) -> None:
    rows = [{"x": [1.0, 2.0]}, {"x": [3.0, 4.0], "label": "own"}]
    response = stock.examples("Classify", rows, {"label": "shared"}, signature="classify")
    assert [row.classes[0].label for row in response.result.classifications] == ["shared", "own"]


def test_regress(stock: Stock) -> None:
    response = stock.examples("Regress", [{"x": [1.0, 2.0]}, {"x": [3.0, 4.0]}], signature="regress")
    assert [row.value for row in response.result.regressions] == [6.0, 14.0]
    assert response.model_spec.signature_name == "regress"


def test_methods_are_not_checked(stock: Stock) -> None:
    """As in TF Serving's binary: models of TensorFlow 2 name `predict` in all their signatures."""
    response = stock.examples("Classify", [{"x": [1.0, 2.0]}], signature="native")
    assert [c.score for c in response.result.classifications[0].classes] == [2.0, 4.0]
    assert list(stock.predict({"x": [[1.0, 2.0]]}, signature="odd").outputs["y"].float_val) == [2.0, 4.0]


@pytest.mark.parametrize(
    ("method", "signature", "code", "text"),
    [
        ("Predict", "odd", "INTERNAL", "Was: tensorflow/serving/odd"),
        ("Classify", "native", "INVALID_ARGUMENT", f"signature method_name to be {CLASSIFY}"),
        ("Regress", "native", "INVALID_ARGUMENT", f"signature method_name to be {REGRESS}"),
    ],
)  # fmt: skip
def test_methods_are_checked_if_asked(model: Path, method: str, signature: str, code: str, text: str) -> None:
    options = ServerOptions(enable_signature_method_name_check=True)
    with ModelServer(model, options=options) as server:
        server.wait_available(WAIT_SECONDS)
        stock = Stock(server.address)
        with pytest.raises(grpc.RpcError) as caught:
            if method == "Predict":
                stock.predict({"x": X}, signature=signature)
            else:
                stock.examples(method, [{"x": [1.0, 2.0]}], signature=signature)
        stock.channel.close()
    assert (caught.value.code().name, text in caught.value.details()) == (code, True)


@pytest.mark.parametrize(
    ("method", "rows", "signature", "text"),
    [
        ("Classify", [], "classify", "Input is empty."),
        ("Regress", [], "regress", "Input is empty."),
        ("Classify", [{"x": [1.0, 2.0]}], "none", "No signature was found with the name: none"),
        ("Classify", [{"x": [1.0, 2.0]}], "", "No classification inputs found in SignatureDef"),
        ("Classify", [{"x": [1.0, 2.0]}], "two", "Expected one input Tensor."),
        ("Classify", [{"x": [1.0, 2.0]}], "regress", "outputs to contain at least one of"),
        ("Regress", [{"x": [1.0, 2.0]}], "", "No regression inputs found in SignatureDef"),
        ("Regress", [{"x": [1.0, 2.0]}], "scores", "No regression outputs found in SignatureDef"),
        ("Regress", [{"x": [1.0, 2.0]}], "classify", "Expected one output Tensor."),
        ("Classify", [{"label": "a"}], "classify", "Feature: x (data type: float) is required"),
        (
            "Classify",
            [{"x": [1.0, 2.0]}],
            "flat",
            "Expected Tensor shape: [batch_size num_classes] but got [1]",
        ),
        ("Regress", [{"x": [1.0, 2.0]}], "wide", "[batch_size] or [batch_size, 1] but got [1,2]"),
    ],
)
def test_refused_examples(stock: Stock, method: str, rows: Any, signature: str, text: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stock.examples(method, rows, signature=signature)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert text in caught.value.details()


def inference_request(*tasks: tuple[str, str]) -> Any:
    from tensorflow_serving.apis import inference_pb2

    request = inference_pb2.MultiInferenceRequest()
    request.input.example_list.examples.append(example({"x": [1.0, 2.0], "label": "a"}))
    for signature, method in tasks:
        task = request.tasks.add(method_name=method)
        fill_spec(task.model_spec, signature=signature)
    return request


def test_multi_inference(stock: Stock) -> None:
    request = inference_request(("regress", REGRESS), ("classify", CLASSIFY))
    response = stock.prediction.MultiInference(request)
    regression, classification = response.results
    assert [row.value for row in regression.regression_result.regressions] == [6.0]
    assert classification.classification_result.classifications[0].classes[1].score == 4.0
    assert (regression.model_spec.signature_name, regression.model_spec.version.value) == ("regress", 2)


def test_multi_inference_feeds_each_signature_of_tensorflow_2(stock: Stock) -> None:
    """`multi_inference_test.cc` with tf2_model_t: each has an input tensor of its own, and all are fed."""
    response = stock.prediction.MultiInference(inference_request(("regress", REGRESS), ("own", REGRESS)))
    found = [result.regression_result.regressions[0].value for result in response.results]
    assert found == [6.0, 4.0]


@pytest.mark.parametrize(
    ("tasks", "code", "text"),
    [
        ((), "INVALID_ARGUMENT", "ModelSpec has no name specified."),
        (
            (("regress", REGRESS), ("regress", REGRESS)),
            "INVALID_ARGUMENT",
            "Duplicate evaluation of signature",
        ),
        ((("none", REGRESS),), "INVALID_ARGUMENT", "Requested signature not found in model graph: none"),
        ((("two", "tensorflow/serving/predict"),), "UNIMPLEMENTED", "Unsupported signature method_name"),
    ],
)
def test_refused_multi_inference(stock: Stock, tasks: Any, code: str, text: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stock.prediction.MultiInference(inference_request(*tasks))
    assert caught.value.code().name == code
    assert text in caught.value.details()


def test_outputs_of_a_quantised_type(stock: Stock) -> None:
    output = stock.predict({"x": [[1.0, -2.0]]}, signature="quantised").outputs["y"]
    assert list(output.int_val) == [2, -4]
    assert output.dtype in (DType.QINT8, DType.INT8), "recent sessions return plain integers"
    for method, signature, text in (
        ("Classify", "quantised scores", "Expected scores Tensor of DT_FLOAT. Got: DT_"),
        ("Regress", "quantised value", "Expected output Tensor of DT_FLOAT.  Got: DT_"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            stock.examples(method, [{"x": [1.0, 2.0]}], signature=signature)
        assert caught.value.code().name == "INVALID_ARGUMENT"
        assert caught.value.details().removesuffix("INT8").removesuffix("Q") == text


@pytest.mark.parametrize("value", [np.zeros(1, "datetime64[s]"), np.array([3], object)])
def test_an_output_that_cannot_be_sent_is_named(value: Any) -> None:
    """What sessions of some releases return for types that numpy does not have."""

    signature = message_class("SignatureDef")()
    signature.outputs["when"].name = "when:0"

    class Odd:
        signatures: ClassVar = {"serving_default": signature}

        def run(self, *_: object) -> list[Any]:
            return [value]

    asked, answer = (message_class(f"serving.Predict{kind}")() for kind in ("Request", "Response"))
    with pytest.raises(StatusError, match="Output when cannot be sent") as caught:
        predict(Odd(), asked, answer)
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_metadata(stock: Stock) -> None:
    from tensorflow_serving.apis import get_model_metadata_pb2

    response = stock.metadata("signature_def")
    signatures = get_model_metadata_pb2.SignatureDefMap()
    assert response.metadata["signature_def"].Unpack(signatures)
    assert signatures.signature_def["serving_default"].inputs["x"].name == "x:0"
    assert signatures.signature_def["regress"].method_name == REGRESS
    assert (response.model_spec.name, response.model_spec.version.value) == ("ranker", 2)


@pytest.mark.parametrize(
    ("fields", "spec", "code", "text"),
    [
        ((), {}, "INVALID_ARGUMENT", "at least one metadata_field"),
        (("weights",), {}, "INVALID_ARGUMENT", "Metadata field weights is not supported"),
        (("signature_def",), {"name": "nobody"}, "NOT_FOUND", "Servable not found"),
    ],
)
def test_refused_metadata(stock: Stock, fields: Any, spec: Any, code: str, text: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stock.metadata(*fields, **spec)
    assert caught.value.code().name == code
    assert text in caught.value.details()


def test_status(stock: Stock) -> None:
    (status,) = stock.status().model_version_status
    assert (status.version, status.state, status.status.error_code) == (2, 30, 0)
    assert stock.status(version=2).model_version_status[0].version == 2


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"name": "nobody"}, "Could not find any versions of model nobody"),
        ({"version": 9}, "Could not find version 9 of model ranker"),
    ],
)
def test_refused_status(stock: Stock, spec: Any, text: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stock.status(**spec)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == text


def test_a_request_without_a_model_is_refused(stock: Stock) -> None:
    from tensorflow_serving.apis import get_model_status_pb2, predict_pb2

    with pytest.raises(grpc.RpcError, match="Missing ModelSpec"):
        stock.prediction.Predict(predict_pb2.PredictRequest())
    with pytest.raises(grpc.RpcError, match="Missing ModelSpec"):
        stock.model.GetModelStatus(get_model_status_pb2.GetModelStatusRequest())


def test_messages_of_any_size(stock: Stock, server: ModelServer) -> None:
    """Clients default to 4 MiB; the server itself sets no limit."""
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

    rows = 1 << 20
    request = predict_pb2.PredictRequest()
    fill_spec(request.model_spec)
    request.inputs["x"].CopyFrom(tf.make_tensor_proto(np.ones((rows, 2), np.float32)))
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.address, options) as channel:
        response = prediction_service_pb2_grpc.PredictionServiceStub(channel).Predict(request)
    assert len(response.outputs["y"].float_val) == 2 * rows


def test_an_object_based_saved_model(tmp_path: Path) -> None:
    import tensorflow as tf

    class Words(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            words = tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([0, 1], tf.int64))
            self.rows = tf.lookup.StaticHashTable(words, 0)
            self.vectors = tf.Variable([[1.0, 2.0], [3.0, 4.0]])

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "words")])
        def serve(self, words: Any) -> Any:
            return {"vectors": tf.gather(self.vectors, self.rows.lookup(words))}

    module = Words()
    tf.saved_model.save(module, str(tmp_path / "words" / "1"), signatures={"serving_default": module.serve})
    with ModelServer(tmp_path / "words") as server:
        server.wait_available(WAIT_SECONDS)
        stock = Stock(server.address)
        response = stock.predict({"words": ["b", "a"]}, name="words")
        stock.channel.close()
    assert list(response.outputs["vectors"].float_val) == [3.0, 4.0, 1.0, 2.0]


def test_a_new_configuration_by_the_stock_client(model: Path) -> None:
    from tensorflow_serving.apis import model_management_pb2

    with ModelServer(model, options=ServerOptions(poll_seconds=0.05)) as server:
        server.wait_available(WAIT_SECONDS)
        stock = Stock(server.address)
        request = model_management_pb2.ReloadConfigRequest()
        added = request.config.model_config_list.config.add(name="other", model_platform="tensorflow")
        added.base_path = str(model)
        response = stock.model.HandleReloadConfigRequest(request, timeout=WAIT_SECONDS)
        assert response.status.error_code == 0
        assert stock.predict({"x": X}, name="other").model_spec.version.value == 2
        with pytest.raises(grpc.RpcError, match="Servable not found"):
            stock.predict({"x": X})
        stock.channel.close()


def test_a_reload_that_nobody_waits_for_gives_its_thread_back(model: Path, tmp_path: Path) -> None:
    from tensorflow_serving.apis import model_management_pb2

    with ModelServer(model, options=ServerOptions(threads=1)) as server:
        server.wait_available(WAIT_SECONDS)
        stock = Stock(server.address)
        request = model_management_pb2.ReloadConfigRequest()
        for name, path in (("ranker", model), ("later", tmp_path / "later")):
            request.config.model_config_list.config.add(
                name=name, base_path=str(path), model_platform="tensorflow"
            )
        call = stock.model.HandleReloadConfigRequest.future(request)
        while "later" not in server.models.served():
            time.sleep(0.01)
        call.cancel()
        assert stock.predict({"x": X}).model_spec.version.value == 2  # by the only thread
        stock.channel.close()


def test_stopping_cuts_off_calls_that_do_not_end(model: Path) -> None:
    def never_ends() -> None:
        with pytest.raises(grpc.RpcError):
            stock.predict({"turns": np.array([1 << 60])}, signature="slow")

    server = ModelServer(model)
    server.wait_available(WAIT_SECONDS)
    stock = Stock(server.address)
    thread = threading.Thread(target=never_ends)
    thread.start()
    time.sleep(0.2)
    server.stop(grace_seconds=0.2)
    server.stop()
    thread.join(WAIT_SECONDS)
    stock.channel.close()
    assert not thread.is_alive()
    assert {status.state.name for status in server.statuses()} == {"END"}


def test_a_missing_base_path_is_waited_for(model: Path, tmp_path: Path) -> None:
    with ModelServer(tmp_path / "later", options=ServerOptions(poll_seconds=0.02)) as server:
        with pytest.raises(ModelPathNotFound) as caught:
            server.wait_available(0.1)
        assert caught.value.exit_code is Exit.SERVER
        threading.Timer(0.3, shutil.copytree, (model, tmp_path / "later")).start()
        assert server.wait_available(float("inf")) == 2


def test_a_directory_may_be_looked_at_once(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model / "1", tmp_path / "once" / "1")
    with ModelServer(tmp_path / "once", options=ServerOptions(poll_seconds=0)) as server:
        assert server.wait_available(WAIT_SECONDS) == 1
        shutil.copytree(model / "2", tmp_path / "once" / "2")
        time.sleep(0.3)
        assert [status.version for status in server.statuses()] == [1]


def test_a_taken_port(server: ModelServer, model: Path) -> None:
    with pytest.raises(ServerError, match="cannot listen on"):
        ModelServer(model, options=ServerOptions(port=server.port))


@pytest.mark.parametrize("options", [{"port": -1}, {"port": 65536}, {"threads": 0}, {"poll_seconds": -1}])
def test_numbers_out_of_range(model: Path, options: Any) -> None:
    with pytest.raises(UsageError):
        ModelServer(model, options=ServerOptions(**options))


@pytest.mark.parametrize(
    ("seconds", "milliseconds"), [(None, None), (2.5, 2500), (0.0004, 0), (9e9, None)], ids=str
)
def test_the_session_gets_what_is_left_of_the_deadline(
    seconds: float | None, milliseconds: int | None
) -> None:
    class Context:
        def time_remaining(self) -> float | None:
            return seconds

    assert _timeout_ms(Context()) == milliseconds  # type: ignore[arg-type]
