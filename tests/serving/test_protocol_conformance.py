"""The page that compares the model server with TensorFlow Serving, held to the code.

Each method of TensorFlow Serving's services has a row, and each row of a status is provoked with its stubs.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from serving.server import ModelServer
from serving.server_options import ServerOptions
from serving.status import Code
from serving.stock_flags import REFUSED, STOCK_FLAGS, SWITCHES_WITHOUT_EFFECT, VALUES_WITHOUT_EFFECT
from tests.support.serving_models import CLASSIFY, PREDICT, REGRESS, write_saved_model
from tests.support.stock_client import Stock, example, fill_spec
from tools.reference.tf_serving import GRPC_CALLS, OTHER_CALLS, OUTCOMES, Match

WAIT_SECONDS = 60
X = [[1.0, 2.0]]
ROWS = [{"x": [1.0, 2.0]}]

FLAGS = """
port grpc_socket_path rest_api_port rest_api_num_threads rest_api_timeout_in_ms rest_api_enable_cors_support
enable_batching allow_version_labels_for_unavailable_models batching_parameters_file
enable_per_model_batching_parameters model_config_file model_config_file_poll_wait_seconds model_name
model_base_path num_load_threads num_unload_threads max_num_load_retries load_retry_interval_micros
file_system_poll_wait_seconds flush_filesystem_caches tensorflow_session_parallelism
tensorflow_session_config_file tensorflow_intra_op_parallelism tensorflow_inter_op_parallelism
use_alts_credentials ssl_config_file platform_config_file per_process_gpu_memory_fraction saved_model_tags
grpc_channel_arguments grpc_max_threads enable_model_warmup num_request_iterations_for_warmup version
monitoring_config_file remove_unused_fields_from_bundle_metagraph prefer_tflite_model num_tflite_pools
num_tflite_interpreters_per_pool enable_signature_method_name_check xla_cpu_compilation_enabled
xla_gpu_compilation_enabled enable_profiler thread_pool_factory_config_file mixed_precision
skip_initialize_tpu enable_grpc_healthcheck_service enable_serialization_as_tensor_content
"""
"""Those of tensorflow_serving/model_servers/main.cc."""


def test_every_flag_has_a_row() -> None:
    others = (*SWITCHES_WITHOUT_EFFECT, *VALUES_WITHOUT_EFFECT, *REFUSED)
    assert sorted([*(flag.name for flag in STOCK_FLAGS), *others]) == sorted(FLAGS.split())


def test_codes_have_the_numbers_of_grpc() -> None:
    assert {code.name: code.value for code in Code} == {code.name: code.value[0] for code in grpc.StatusCode}


def stock_methods() -> dict[str, Any]:
    """Every method of TensorFlow Serving's API, by `Service/Method`."""
    from tensorflow_serving.apis import model_service_pb2, prediction_service_pb2, session_service_pb2

    files = (prediction_service_pb2, model_service_pb2, session_service_pb2)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    return {f"{service.name}/{method.name}": method for service in services for method in service.methods}


def test_every_method_has_a_row() -> None:
    assert [call.name for call in GRPC_CALLS] and {call.name for call in GRPC_CALLS} == set(stock_methods())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("models") / "ranker"
    write_saved_model(base / "1")
    write_saved_model(base / "2", scale=2.0)
    return base


class Conformance:
    """A server that may be configured anew, one that checks method names, and a client for each."""

    def __init__(self, base: Path, scratch: Path) -> None:
        self.base, self.scratch = base, scratch
        self.server = ModelServer(base, options=ServerOptions(poll_seconds=0.05))
        strict = ServerOptions(enable_signature_method_name_check=True)
        self.strict_server = ModelServer(base, options=strict)
        for server in (self.server, self.strict_server):
            server.wait_available(WAIT_SECONDS)
        self.stock, self.strict = Stock(self.server.address), Stock(self.strict_server.address)

    def close(self) -> None:
        for stock in (self.stock, self.strict):
            stock.channel.close()
        for server in (self.server, self.strict_server):
            server.stop()

    def predict(self, **spec: Any) -> Any:
        return self.stock.predict({"x": X}, **spec)

    def filled(self, sizes: list[int], **values: Any) -> Any:
        """Predict with a shape and few values for it."""
        from tensorflow_serving.apis import predict_pb2

        request = predict_pb2.PredictRequest()
        fill_spec(request.model_spec)
        tensor = request.inputs["x"]
        tensor.dtype = 1
        for size in sizes:
            tensor.tensor_shape.dim.add(size=size)
        for name, value in values.items():
            if isinstance(value, bytes):
                setattr(tensor, name, value)
            else:
                getattr(tensor, name).extend(value)
        return self.stock.prediction.Predict(request, timeout=WAIT_SECONDS)

    def too_late(self) -> Any:
        import tensorflow as tf
        from tensorflow_serving.apis import predict_pb2

        request = predict_pb2.PredictRequest()
        fill_spec(request.model_spec, signature="slow")
        request.inputs["turns"].CopyFrom(tf.make_tensor_proto(np.array([1 << 60])))
        return self.stock.prediction.Predict(request, timeout=0.2)

    def infer(self, *tasks: tuple[str, str, str]) -> Any:
        """MultiInference of (model, signature, method)."""
        from tensorflow_serving.apis import inference_pb2

        request = inference_pb2.MultiInferenceRequest()
        request.input.example_list.examples.append(example(ROWS[0]))
        for name, signature, method in tasks:
            fill_spec(request.tasks.add(method_name=method).model_spec, name=name, signature=signature)
        return self.stock.prediction.MultiInference(request, timeout=WAIT_SECONDS)

    def without_spec(self) -> Any:
        from tensorflow_serving.apis import predict_pb2

        return self.stock.prediction.Predict(predict_pb2.PredictRequest())

    def reload(self, *models: Mapping[str, Any], timeout: float = WAIT_SECONDS) -> Any:
        """The model that is served, and these."""
        from tensorflow_serving.apis import model_management_pb2

        request = model_management_pb2.ReloadConfigRequest()
        for fields in ({"name": "ranker"}, *models):
            entry = {"base_path": str(self.base), "model_platform": "tensorflow", **fields}
            labels = entry.pop("labels", {})
            request.config.model_config_list.config.add(**entry).version_labels.update(labels)
        return self.stock.model.HandleReloadConfigRequest(request, timeout=timeout)

    def reload_ranker(self, **fields: Any) -> Any:
        from tensorflow_serving.apis import model_management_pb2

        request = model_management_pb2.ReloadConfigRequest()
        labels = fields.pop("labels", {})
        entry = {"name": "ranker", "base_path": str(self.base), "model_platform": "tensorflow", **fields}
        request.config.model_config_list.config.add(**entry).version_labels.update(labels)
        return self.stock.model.HandleReloadConfigRequest(request, timeout=WAIT_SECONDS)

    def reload_nothing(self) -> Any:
        from tensorflow_serving.apis import model_management_pb2

        return self.stock.model.HandleReloadConfigRequest(model_management_pb2.ReloadConfigRequest())

    def broken(self, name: str) -> Path:
        """A base path whose version cannot be loaded."""
        path = self.scratch / name
        if not path.exists():
            shutil.copytree(self.base / "1", path / "1")
            shutil.rmtree(path / "1" / "variables")
        return path

    def status_of_a_failed_version(self) -> Any:
        with pytest.raises(grpc.RpcError):
            self.reload({"name": "failed", "base_path": str(self.broken("failed"))})
        found = self.stock.status(name="failed")
        (status,) = found.model_version_status
        assert (status.state, status.status.error_code != 0) == (50, True)
        self.reload()
        return found

    def status_of_a_model_that_was_taken_out(self) -> Any:
        self.reload({"name": "gone"})
        self.reload()
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            found = self.stock.status(name="gone")
            if {status.state for status in found.model_version_status} == {50}:
                return found
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture(scope="module")
def world(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Conformance]:
    world = Conformance(base, tmp_path_factory.mktemp("scratch"))
    yield world
    world.close()


Ask = Callable[[Conformance], Any]
CHECKED = "that, with --enable_signature_method_name_check"
PROVOKED: dict[tuple[str, str], list[Ask]] = {
    ("Predict", "no `model_spec`, or no name in it"): [
        lambda w: w.without_spec(), lambda w: w.predict(name="")],
    ("Predict", "the model is not served, or none of its versions is available"): [
        lambda w: w.predict(name="nobody")],
    ("Predict", "the version is not available"): [lambda w: w.predict(version=1)],
    ("Predict", "the label is not known"): [lambda w: w.predict(label="canary")],
    ("Predict", "the signature is not known"): [lambda w: w.predict(signature="none")],
    ("Predict", "the signature has another method name"): [lambda w: w.predict(signature="odd")],
    ("Predict", CHECKED): [lambda w: w.strict.predict({"x": X}, signature="odd")],
    ("Predict", "inputs are missing, or unknown"): [
        lambda w: w.stock.predict({}), lambda w: w.stock.predict({"z": X}),
        lambda w: w.stock.predict({"x": X, "z": X})],
    ("Predict", "an input has another type"): [lambda w: w.stock.predict({"x": np.float64(X)})],
    ("Predict", "a tensor does not fill its shape"): [lambda w: w.filled([3], tensor_content=b"1234")],
    ("Predict", "a tensor has more values than its shape, in fields"): [
        lambda w: w.filled([1, 2], float_val=[1.0, 2.0, 3.0])],
    ("Predict", "a shape has more than 64 MiB, and one value"): [
        lambda w: w.filled([1 << 26, 2], float_val=[1.0])],
    ("Predict", "an output in `output_filter` is unknown, or named twice"): [
        lambda w: w.predict(filter_=("q",)), lambda w: w.predict(filter_=("y", "y"))],
    ("Predict", "the deadline is over while it computes"): [lambda w: w.too_late()],
    ("Classify", "no example"): [lambda w: w.stock.examples("Classify", [], signature="classify")],
    ("Classify", "the signature is not known"): [
        lambda w: w.stock.examples("Classify", ROWS, signature="none")],
    ("Classify", "the signature has no input `inputs`, or neither `classes` nor `scores`"): [
        lambda w: w.stock.examples("Classify", ROWS),
        lambda w: w.stock.examples("Classify", ROWS, signature="regress")],
    ("Classify", "the signature is named predict, as in TensorFlow 2"): [
        lambda w: w.stock.examples("Classify", ROWS, signature="native")],
    ("Classify", CHECKED): [lambda w: w.strict.examples("Classify", ROWS, signature="native")],
    ("Classify", "an example lacks a feature"): [
        lambda w: w.stock.examples("Classify", [{"label": "a"}], signature="classify")],
    ("Classify", "the output is no matrix"): [
        lambda w: w.stock.examples("Classify", ROWS, signature="flat")],
    ("Regress", "the signature has no output `outputs`, or several"): [
        lambda w: w.stock.examples("Regress", ROWS, signature="scores"),
        lambda w: w.stock.examples("Regress", ROWS, signature="classify")],
    ("Regress", "the output is neither a vector nor a column"): [
        lambda w: w.stock.examples("Regress", ROWS, signature="wide")],
    ("MultiInference", "no task"): [lambda w: w.infer()],
    ("MultiInference", "tasks name several models, or a signature twice"): [
        lambda w: w.infer(("ranker", "regress", REGRESS), ("other", "classify", CLASSIFY)),
        lambda w: w.infer(("ranker", "regress", REGRESS), ("ranker", "regress", REGRESS))],
    ("MultiInference", "signatures with input tensors of their own, as in TensorFlow 2"): [
        lambda w: w.infer(("ranker", "regress", REGRESS), ("ranker", "own", REGRESS))],
    ("MultiInference", "a task is neither classify nor regress"): [
        lambda w: w.infer(("ranker", "two", PREDICT))],
    ("GetModelMetadata", "no field, or another than `signature_def`"): [
        lambda w: w.stock.metadata(), lambda w: w.stock.metadata("weights")],
    ("GetModelMetadata", "the model is not served"): [
        lambda w: w.stock.metadata("signature_def", name="nobody")],
    ("GetModelStatus", "the model, or the version, was never seen"): [
        lambda w: w.stock.status(name="nobody"), lambda w: w.stock.status(version=9)],
    ("GetModelStatus", "the version failed to load: END with its error"): [
        lambda w: w.status_of_a_failed_version()],
    ("GetModelStatus", "the model was taken out of the configuration: END"): [
        lambda w: w.status_of_a_model_that_was_taken_out()],
    ("HandleReloadConfigRequest", "it is no list of models"): [lambda w: w.reload_nothing()],
    ("HandleReloadConfigRequest", "a model is listed twice"): [lambda w: w.reload({"name": "ranker"})],
    ("HandleReloadConfigRequest", "a base path is relative"): [
        lambda w: w.reload({"name": "a", "base_path": "models/a"})],
    ("HandleReloadConfigRequest", "no platform, or another than `tensorflow`"): [
        lambda w: w.reload({"name": "a", "model_platform": ""}),
        lambda w: w.reload({"name": "a", "model_platform": "torch"})],
    ("HandleReloadConfigRequest", "another platform for a model that is served"): [
        lambda w: w.reload_ranker(model_platform="torch")],
    ("HandleReloadConfigRequest", "a model has no name"): [lambda w: w.reload({"name": ""})],
    ("HandleReloadConfigRequest", "a base path in an object store"): [
        lambda w: w.reload({"name": "a", "base_path": "gs://bucket/m"})],
    ("HandleReloadConfigRequest", "a label for a version that is not available now"): [
        lambda w: w.reload_ranker(labels={"stable": 1})],
    ("HandleReloadConfigRequest", "a new model cannot be loaded; it stays configured"): [
        lambda w: w.reload({"name": "broken", "base_path": str(w.broken("broken"))})],
    ("HandleReloadConfigRequest", "a base path is not there at the deadline; it is waited for"): [
        lambda w: w.reload({"name": "later", "base_path": str(w.scratch / "later")}, timeout=0.5)],
}  # fmt: skip


def test_every_status_of_the_page_is_provoked() -> None:
    assert set(PROVOKED) == {(outcome.call, outcome.when) for outcome in OUTCOMES}
    assert {outcome.call for outcome in OUTCOMES} == {
        call.name.partition("/")[2] for call in GRPC_CALLS if call.match is not Match.ABSENT
    }


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda one: f"{one.call}: {one.when}")
def test_statuses(world: Conformance, outcome: Any) -> None:
    for ask in PROVOKED[outcome.call, outcome.when]:
        try:
            ask(world)
        except grpc.RpcError as error:
            found = error.code().name
            assert error.details()
        else:
            found = Code.OK.name
        assert found == outcome.here.name


ANSWERED: dict[str, Ask] = {
    "PredictionService/Predict": lambda w: w.predict().outputs["y"].float_val,
    "PredictionService/Classify": lambda w: (
        w.stock.examples("Classify", ROWS, signature="classify").result.classifications
    ),
    "PredictionService/Regress": lambda w: (
        w.stock.examples("Regress", ROWS, signature="regress").result.regressions
    ),
    "PredictionService/MultiInference": lambda w: (
        w.infer(("ranker", "regress", REGRESS), ("ranker", "classify", CLASSIFY)).results
    ),
    "PredictionService/GetModelMetadata": lambda w: w.stock.metadata("signature_def").metadata,
    "ModelService/GetModelStatus": lambda w: w.stock.status().model_version_status,
    "ModelService/HandleReloadConfigRequest": lambda w: [w.reload()],
}


@pytest.mark.parametrize("call", GRPC_CALLS, ids=lambda call: call.name)
def test_calls(world: Conformance, call: Any) -> None:
    if call.match is not Match.ABSENT:
        assert ANSWERED[call.name](world)
        return
    path = f"/tensorflow.serving.{call.name}"
    method = world.stock.channel.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)
    with pytest.raises(grpc.RpcError) as caught:
        method(b"", timeout=WAIT_SECONDS)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "path",
    ["/grpc.health.v1.Health/Watch", "/tensorflow.ProfilerService/Profile",
     "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"],
)  # fmt: skip
def test_what_is_absent(world: Conformance, path: str) -> None:
    method = world.stock.channel.unary_stream(path, request_serializer=bytes, response_deserializer=bytes)
    with pytest.raises(grpc.RpcError) as caught:
        list(method(b"", timeout=WAIT_SECONDS))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert len([call for call in OTHER_CALLS if call.match is Match.ABSENT]) == 3
