"""Each type of TensorFlow over REST, by a table read off json_tensor.cc; base64 as in absl's escaping.cc."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.wire import rest_json
from exporter.wire.dtypes import DType
from serving.server import ModelServer
from serving.server_options import NetworkOptions, ServerOptions

WAIT_SECONDS = 60
VALUES: dict[DType, Any] = {
    DType.FLOAT: 1.5,
    DType.DOUBLE: 1.5,
    DType.INT8: 1,
    DType.INT16: 1,
    DType.INT32: 1,
    DType.INT64: 1,
    DType.UINT8: 1,
    DType.UINT32: 1,
    DType.UINT64: 1,
    DType.BOOL: True,
    DType.STRING: "a",
}
"""What `AddValueToTensor` and `AddSingleValueAndAdvance` have a case for, and a value of it."""
OTHERS = [dtype for dtype in DType if dtype not in VALUES]
WRITTEN = [
    DType.HALF,
    DType.BFLOAT16,
    DType.UINT16,
    DType.COMPLEX64,
    DType.COMPLEX128,
    DType.FLOAT8_E5M2,
    DType.FLOAT8_E4M3FN,
]
"""Types that TensorFlow computes."""


def write_types(directory: Path) -> set[str]:
    """Write signatures `in_T`, which count values of a type, and `out_T`, which give some.

    Returns their names.
    """
    import tensorflow as tf

    v1 = tf.compat.v1

    def signature(x: Any, y: Any) -> Any:
        info = v1.saved_model.build_tensor_info
        return v1.saved_model.build_signature_def(
            {"x": info(x)}, {"y": info(y)}, "tensorflow/serving/predict"
        )

    signatures = {}
    with tf.Graph().as_default(), v1.Session() as session:
        v1.get_variable("factor", initializer=1.0)
        number = v1.placeholder(tf.float32, [None], "number")
        for dtype in DType:
            try:
                kind = tf.as_dtype(int(dtype))
            except TypeError:  # newer than the TensorFlow that is installed
                continue
            values = v1.placeholder(kind, None)
            signatures[f"in_{dtype.name}"] = signature(values, tf.size(values)[None])
            if dtype in WRITTEN:
                signatures[f"out_{dtype.name}"] = signature(number, tf.cast(number, kind))
        nothing = tf.constant([1.0])
        signatures["inputless"] = v1.saved_model.build_signature_def(
            {}, {"y": v1.saved_model.build_tensor_info(nothing)}, "tensorflow/serving/predict"
        )
        session.run(v1.global_variables_initializer())
        builder = v1.saved_model.Builder(str(directory))
        builder.add_meta_graph_and_variables(session, ["serve"], signatures)
        builder.save()
    return set(signatures)


Ask = Any


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Ask a signature over REST: the status and the document that comes back; None if there is none."""
    base = tmp_path_factory.mktemp("types") / "types"
    known = write_types(base / "1")
    with ModelServer(base, options=ServerOptions(network=NetworkOptions(rest_api_port=0))) as server:
        server.wait_available(WAIT_SECONDS)
        link = http.client.HTTPConnection("127.0.0.1", server.rest_port or 0, timeout=WAIT_SECONDS)

        def asked(signature: str, **document: Any) -> tuple[int, Any]:
            if signature not in known:
                pytest.skip("newer than the TensorFlow that is installed")
            body = json.dumps({"signature_name": signature, **document})
            link.request("POST", "/v1/models/types:predict", body)
            response = link.getresponse()
            return response.status, json.loads(response.read())

        yield asked
        link.close()


@pytest.mark.parametrize("dtype", VALUES, ids=lambda dtype: dtype.name)
def test_types_that_are_read(ask: Ask, dtype: DType) -> None:
    value = VALUES[dtype]
    assert ask(f"in_{dtype.name}", instances=[value, value]) == (200, {"predictions": [2]})
    assert ask(f"in_{dtype.name}", inputs=[[value], [value]]) == (200, {"outputs": [2]})


@pytest.mark.parametrize("dtype", OTHERS, ids=lambda dtype: dtype.name)
def test_types_that_are_not_read(ask: Ask, dtype: DType) -> None:
    """By rows the error is wrapped, and 400; by columns it is UNIMPLEMENTED as it is."""
    assert ask(f"in_{dtype.name}", instances=[1])[0] == 400
    assert ask(f"in_{dtype.name}", inputs=[1])[0] == 501


@pytest.mark.parametrize("dtype", WRITTEN, ids=lambda dtype: dtype.name)
def test_types_that_are_not_written(ask: Ask, dtype: DType) -> None:
    for form in ({"instances": [1.0]}, {"inputs": [1.0]}):
        code, document = ask(f"out_{dtype.name}", **form)
        assert code == 400
        assert "Failed to write JSON value" in document["error"]
        assert "gRPC" in document["error"]


@pytest.mark.parametrize("dtype", [DType.HALF, DType.BFLOAT16, DType.UINT16], ids=lambda dtype: dtype.name)
def test_no_values_are_of_any_type(ask: Ask, dtype: DType) -> None:
    """A value is what the server refuses, not a type."""
    assert ask(f"in_{dtype.name}", inputs=[]) == (200, {"outputs": [0]})
    assert ask(f"out_{dtype.name}", inputs=[]) == (200, {"outputs": []})


def test_a_signature_without_inputs(ask: Ask) -> None:
    code, document = ask("inputless", inputs={})
    assert (code, "Failed to get input map" in document["error"]) == (400, True)


@pytest.mark.parametrize("text", ["aG\nk=", "aGk", "aGk.", " a\tG\r\nk\v=\f", "", " \n", "aGl="])
def test_base64_that_is_read(ask: Ask, text: str) -> None:
    assert ask("in_STRING", instances=[{"b64": text}])[0] == 200
    assert ask("in_STRING", inputs=[{"b64": text}])[0] == 200


@pytest.mark.parametrize(
    "text", ["__8-", "a", "aGk==", "aG=", "=", "a=Gk", "aGk=a", "aG\0k", "aGk\xa0", "äGk="]
)
def test_base64_that_is_refused(ask: Ask, text: str) -> None:
    assert ask("in_STRING", instances=[{"b64": text}])[0] == 400
    assert ask("in_STRING", inputs=[{"b64": text}])[0] == 400


def unescaped_by_absl(text: str) -> bytes | None:
    """absl's loop, digit for digit: bits go in, bytes come out, then the padding is counted."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    bits, count, out, rest = 0, 0, bytearray(), iter(text)
    padding = 0
    for character in rest:
        if character in " \t\n\v\f\r":
            continue
        if character in "=.":
            padding = 1
            break
        if character not in alphabet:
            return None
        bits, count = bits << 6 | alphabet.index(character), count + 1
        if count == 4:
            out += bits.to_bytes(3, "big")
            bits, count = 0, 0
    for character in rest:
        if character in "=.":
            padding += 1
        elif character not in " \t\n\v\f\r":
            return None
    if count == 1 or padding not in (0, {0: 0, 2: 2, 3: 1}[count]):
        return None
    left = count * 6 // 8
    return bytes(out) + (bits >> count * 6 % 8).to_bytes(left, "big")


@given(st.text(st.sampled_from("AZaz09+/=. \n\r\t-_\0é"), max_size=12))
@example("aR==")
@example("aGl")
def test_base64_is_read_as_by_absl(text: str) -> None:
    assert rest_json._unescaped(text) == unescaped_by_absl(text)


@given(st.binary(max_size=200))
def test_base64_in_lines(data: bytes) -> None:
    assert rest_json._unescaped(base64.encodebytes(data).decode()) == data
