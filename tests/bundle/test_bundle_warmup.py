"""Warm-up files: REST's JSON in, a TFRecord of PredictionLogs out, every bad line named."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensorflow_serving.apis import prediction_log_pb2

from exporter.bundle.warmup import MAX_RECORDS, parse_request, read_requests, write_warmup
from exporter.errors import TargetNotWritable, UsageError
from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.rest_json import examples_input, predict_inputs, serialized_examples
from exporter.wire.tfrecord import encode_records

PREDICT = "tensorflow/serving/predict"


def signature(method: str = PREDICT, **inputs: tuple[DType, tuple[int, ...] | None]) -> protos.Proto:
    """Inputs by name: dtype, and shape with -1 for unknown sizes, None for an unknown rank."""
    definition = protos.SignatureDef(method_name=method)
    for name, (dtype, shape) in inputs.items():
        info = definition.inputs[name]
        info.name, info.dtype = f"{name}:0", int(dtype)
        if shape is None:
            info.tensor_shape.unknown_rank = True
        for size in shape or ():
            info.tensor_shape.dim.add(size=size)
    return definition


X = signature(x=(DType.FLOAT, (-1, 2)))
XY = signature(x=(DType.FLOAT, (-1, 2)), words=(DType.STRING, (-1,)))
CLASSIFY = signature("tensorflow/serving/classify", inputs=(DType.STRING, (-1,)))


JSON_TYPES = [DType.FLOAT, DType.DOUBLE, DType.INT8, DType.INT32, DType.INT64, DType.UINT64, DType.BOOL]


def arrays(dtype: DType) -> st.SearchStrategy[np.ndarray]:
    elements = {"allow_nan": False} if dtype in (DType.FLOAT, DType.DOUBLE) else None
    return hnp.arrays(dtype.numpy, hnp.array_shapes(max_dims=3), elements=elements)


class TestPredict:
    @pytest.mark.parametrize(
        "document",
        [
            {"instances": [[1, 2.5], [3, 4]]},
            {"instances": [{"x": [1, 2.5]}, {"x": [3, 4]}]},
            {"inputs": [[1, 2.5], [3, 4]]},
            {"inputs": {"x": [[1, 2.5], [3, 4]]}},
        ],
    )
    def test_rows_and_columns_say_the_same(self, document: dict[str, Any]) -> None:
        (found,) = predict_inputs(document, X).values()
        np.testing.assert_array_equal(found, np.float32([[1, 2.5], [3, 4]]), strict=True)

    def test_several_inputs(self) -> None:
        rows = {"instances": [{"x": [1, 2], "words": "a"}, {"x": [3, 4], "words": {"b64": "AP8="}}]}
        columns = {"inputs": {"x": [[1, 2], [3, 4]], "words": ["a", {"b64": "AP8="}]}}
        for document in (rows, columns):
            found = predict_inputs(document, XY)
            assert found["words"].tolist() == [b"a", b"\x00\xff"]
            assert found["x"].dtype == np.float32

    def test_a_binary_string_is_a_value_and_not_a_row(self) -> None:
        words = signature(words=(DType.STRING, (-1,)))
        assert predict_inputs({"instances": [{"b64": "YQ=="}, "b"]}, words)["words"].tolist() == [b"a", b"b"]
        scalar = signature(word=(DType.STRING, ()))
        assert predict_inputs({"inputs": {"b64": "/+8="}}, scalar)["word"].item() == b"\xff\xef"

    def test_text_is_utf8(self) -> None:
        words = signature(words=(DType.STRING, (-1,)))
        assert predict_inputs({"inputs": ["ä"]}, words)["words"].item() == "ä".encode()

    def test_infinity_and_nan(self) -> None:
        document = json.loads('{"inputs": [[NaN, -Infinity]]}')
        found = predict_inputs(document, X)["x"]
        assert math.isnan(found[0, 0]) and found[0, 1] == -math.inf

    @given(st.sampled_from(JSON_TYPES).flatmap(arrays))
    def test_what_json_can_say_comes_back(self, array: np.ndarray) -> None:
        definition = signature(x=(DType.of(array.dtype.name), None))
        found = predict_inputs({"inputs": {"x": json.loads(json.dumps(array.tolist()))}}, definition)["x"]
        np.testing.assert_array_equal(found, array, strict=True)

    @pytest.mark.parametrize(
        ("document", "definition", "message"),
        [
            ({}, X, "either the key 'instances'"),
            ({"instances": [[1, 2]], "inputs": [[1, 2]]}, X, "either the key 'instances'"),
            ({"instances": []}, X, "at least one row"),
            ({"instances": {"x": 1}}, X, "at least one row"),
            ({"instances": [[1, 2]]}, XY, "an object with the inputs words, x"),
            ({"instances": [{"x": [1, 2]}]}, XY, "row 0: expected the inputs words, x, found x"),
            ({"instances": [{"x": [1, 2]}, [3, 4]]}, X, r"row 1: expected the inputs x, found \[3, 4\]"),
            ({"inputs": [1]}, XY, "'inputs' to be an object with the inputs words, x"),
            ({"inputs": {"y": 1}}, X, "expected the inputs x in 'inputs', found y"),
            ({"inputs": [[1, 2], [3]]}, X, "'x': expected a list of 2 at dimension 1, found one of 1"),
            ({"inputs": [[1, 2], 3]}, X, "'x': expected a list of 2 at dimension 1, found 3"),
            ({"inputs": [[1, [2]]]}, X, "'x': lists are nested deeper"),
            ({"inputs": [1, 2]}, X, r"'x': expected float32\[\?, 2\], found the shape \[2\]"),
            ({"inputs": [[1, 2, 3]]}, X, r"'x': expected float32\[\?, 2\], found the shape \[1, 3\]"),
            ({"inputs": [["1", 2]]}, X, "'x': expected float32, found '1'"),
            ({"inputs": [[True, 2]]}, X, "'x': expected float32, found True"),
            ({"inputs": [[None, 2]]}, X, "'x': expected float32, found None"),
            ({"inputs": [[10**400, 2]]}, X, "which is too large"),
            ({"inputs": 1.0}, signature(n=(DType.INT32, ())), "'n': expected int32, found 1.0"),
            ({"inputs": True}, signature(n=(DType.INT32, ())), "'n': expected int32, found True"),
            ({"inputs": 128}, signature(n=(DType.INT8, ())), "'n': expected int8, found 128, which is out"),
            ({"inputs": -1}, signature(n=(DType.UINT8, ())), "'n': expected uint8, found -1, which is out"),
            ({"inputs": 1}, signature(b=(DType.BOOL, ())), "'b': expected bool, found 1"),
            ({"inputs": 1}, signature(s=(DType.STRING, ())), "'s': expected string, found 1"),
            ({"inputs": {"s": {"b64": "?"}}}, signature(s=(DType.STRING, ())), "which is not base64"),
            ({"inputs": {"s": {"b64": "YQ==", "x": 1}}}, signature(s=(DType.STRING, ())), "expected string"),
            ({"inputs": 1}, signature(c=(DType.COMPLEX64, ())), "no form for complex64"),
        ],
    )
    def test_what_does_not_fit_is_named(
        self, document: dict[str, Any], definition: protos.Proto, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            predict_inputs(document, definition)

    def test_a_sparse_input_is_named(self) -> None:
        definition = signature(x=(DType.FLOAT, (-1,)))
        definition.inputs["x"].coo_sparse.values_tensor_name = "v:0"
        with pytest.raises(ValueError, match="'x' is not a dense tensor"):
            predict_inputs({"inputs": [1.0]}, definition)


class TestExamples:
    def test_features_take_the_type_of_their_values(self) -> None:
        document = {
            "examples": [
                {"age": 3, "flags": [True, False], "score": [0.5, 1.0], "name": ["a", {"b64": "/w=="}]}
            ]
        }
        (example,) = examples_input(document).example_list.examples
        parsed = tf.io.parse_single_example(
            example.SerializeToString(),
            {
                "age": tf.io.FixedLenFeature([], tf.int64),
                "flags": tf.io.FixedLenFeature([2], tf.int64),
                "score": tf.io.FixedLenFeature([2], tf.float32),
                "name": tf.io.FixedLenFeature([2], tf.string),
            },
        )
        assert {name: value.numpy().tolist() for name, value in parsed.items()} == {
            "age": 3,
            "flags": [1, 0],
            "score": [0.5, 1.0],
            "name": [b"a", b"\xff"],
        }

    def test_a_context_is_shared_and_overridden(self) -> None:
        document = {"context": {"a": 1, "b": 1}, "examples": [{"b": 2}, {}]}
        message = examples_input(document)
        assert len(message.example_list_with_context.examples) == 2
        values = [
            {name: feature.int64_list.value[0] for name, feature in example.features.feature.items()}
            for example in map(protos.Example.FromString, serialized_examples(message))
        ]
        assert values == [{"a": 1, "b": 2}, {"a": 1, "b": 1}]

    @pytest.mark.parametrize(
        ("document", "message"),
        [
            ({}, "the key 'examples'"),
            ({"examples": []}, "the key 'examples'"),
            ({"examples": [1]}, "example 0: expected an object of features, found 1"),
            ({"examples": [{}, {"a": [1, 2.5]}]}, "example 1, feature 'a': expected one type of values"),
            ({"examples": [{"a": [[1]]}]}, r"example 0, feature 'a': \[1\]"),
            ({"examples": [{"a": 2**63}]}, "feature 'a': 9223372036854775808, which is out of range"),
            ({"examples": [{"a": None}]}, "feature 'a': None"),
            ({"examples": [{}], "context": 3}, "context: expected an object of features"),
        ],
    )
    def test_what_is_not_an_example_is_named(self, document: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            examples_input(document)


@pytest.fixture
def meta_graph() -> protos.Proto:
    meta = protos.MetaGraphDef()
    meta.signature_def["serving_default"].CopyFrom(X)
    meta.signature_def["words"].CopyFrom(XY)
    meta.signature_def["classify"].CopyFrom(CLASSIFY)
    meta.signature_def["regress"].CopyFrom(
        signature("tensorflow/serving/regress", inputs=(DType.STRING, (-1,)))
    )
    return meta


class TestFile:
    def test_tensorflow_and_tf_serving_read_what_is_written(
        self, tmp_path: Path, meta_graph: protos.Proto
    ) -> None:
        path = tmp_path / "requests.jsonl"
        path.write_text(
            '{"instances": [[1, 2]]}\n'
            "\n"
            '{"signature_name": "words", "inputs": {"x": [[3, 4]], "words": ["ä"]}}\n'
            '{"signature_name": "classify", "examples": [{"a": 1}], "context": {"b": 2}}\n'
            '{"signature_name": "regress", "examples": [{"a": 1.5}]}\n'
        )
        requests = read_requests(path, meta_graph)
        assert [(request.line, request.signature) for request in requests] == [
            (1, "serving_default"),
            (3, "words"),
            (4, "classify"),
            (5, "regress"),
        ]
        written = write_warmup(requests, tmp_path / "1")
        assert written == tmp_path / "1/assets.extra/tf_serving_warmup_requests"
        records = [record.numpy() for record in tf.data.TFRecordDataset(str(written))]
        logs = [prediction_log_pb2.PredictionLog.FromString(record) for record in records]
        first, second = logs[0].predict_log.request, logs[1].predict_log.request
        assert first.model_spec.signature_name == "serving_default"
        np.testing.assert_array_equal(tf.make_ndarray(first.inputs["x"]), np.float32([[1, 2]]), strict=True)
        assert tf.make_ndarray(second.inputs["words"]).tolist() == ["ä".encode()]
        classify, regress = logs[2].classify_log.request, logs[3].regress_log.request
        assert classify.model_spec.signature_name == "classify"
        assert classify.input.example_list_with_context.context.features.feature["b"].int64_list.value == [2]
        assert regress.input.example_list.examples[0].features.feature["a"].float_list.value == [1.5]

    def test_requests_can_be_fed_to_a_session(self, meta_graph: protos.Proto) -> None:
        text = '{"signature_name": "classify", "examples": [{"a": 1}, {"a": 2}]}'
        request = parse_request(text, meta_graph.signature_def)
        assert request.inputs.keys() == {"inputs"}
        parsed = tf.io.parse_example(
            request.inputs["inputs"].tolist(), {"a": tf.io.FixedLenFeature([], tf.int64)}
        )
        assert parsed["a"].numpy().tolist() == [1, 2]

    @given(st.lists(st.binary(max_size=300), max_size=5))
    def test_records_come_back_from_tensorflow(self, records: list[bytes]) -> None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(encode_records(records))
            file.flush()
            assert [record.numpy() for record in tf.data.TFRecordDataset(file.name)] == records

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", "not JSON"),
            ("[" * 100_000, "not JSON"),
            ("[1]", "expected an object, found list"),
            (
                '{"signature_name": "gone", "inputs": 1}',
                "no signature 'gone'; the model has classify, regress",
            ),
            ('{"signature_name": 3, "inputs": 1}', "no signature 3"),
            ('{"examples": [{}]}', "'serving_default' is for predict"),
            (
                '{"signature_name": "classify", "inputs": ["a"]}',
                "'classify' is for classify: expected the key",
            ),
            ('{"inputs": [["a", 1]]}', "input 'x': expected float32, found 'a'"),
        ],
    )
    def test_a_bad_line_is_named_with_its_number(
        self, tmp_path: Path, meta_graph: protos.Proto, line: str, message: str
    ) -> None:
        path = tmp_path / "requests.jsonl"
        path.write_text('{"inputs": [[1, 2]]}\n' + line + "\n")
        with pytest.raises(UsageError, match=rf"requests\.jsonl, line 2: .*{message}"):
            read_requests(path, meta_graph)

    def test_too_many_requests(self, tmp_path: Path, meta_graph: protos.Proto) -> None:
        path = tmp_path / "requests.jsonl"
        path.write_text('{"inputs": [[1, 2]]}\n' * MAX_RECORDS)
        assert len(read_requests(path, meta_graph)) == MAX_RECORDS
        path.write_text('{"inputs": [[1, 2]]}\n' * (MAX_RECORDS + 1))
        with pytest.raises(UsageError, match="1001 requests; a server takes at most 1000"):
            read_requests(path, meta_graph)

    @pytest.mark.parametrize("content", [b"", b"\n \n"])
    def test_a_file_without_requests(self, tmp_path: Path, meta_graph: protos.Proto, content: bytes) -> None:
        path = tmp_path / "requests.jsonl"
        path.write_bytes(content)
        with pytest.raises(UsageError, match="holds no requests"):
            read_requests(path, meta_graph)

    def test_a_file_that_cannot_be_read(self, tmp_path: Path, meta_graph: protos.Proto) -> None:
        (tmp_path / "binary").write_bytes(b"\xff\xfe")
        for path in (tmp_path / "gone", tmp_path, tmp_path / "binary"):
            with pytest.raises(UsageError, match="cannot read warm-up requests"):
                read_requests(path, meta_graph)

    def test_a_file_of_very_many_bytes(self, tmp_path: Path, meta_graph: protos.Proto) -> None:
        with (tmp_path / "sparse").open("wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(UsageError, match="cannot read warm-up requests") as caught:
            read_requests(tmp_path / "sparse", meta_graph)
        assert "it has more than" in str(caught.value.cause)

    def test_a_target_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(TargetNotWritable):
            write_warmup([], tmp_path / "file")
