"""JSON values to arrays: the fast way gives what the careful one gives, or leaves it to it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.wire import rest_json
from exporter.wire.dtypes import DType
from exporter.wire.protos import message_class

DTYPES = [DType.FLOAT, DType.DOUBLE, DType.HALF, DType.BFLOAT16, DType.INT8, DType.INT64, DType.UINT64]
NUMBERS = st.one_of(
    st.floats(),
    st.integers(-(2**70), 2**70),
    st.integers(-300, 300),
    st.sampled_from([2**24, 2**24 - 1, 2**53, 2**63, 2**64, 65504, 65505, 3.4e38, 3.5e38, 10**400, -0.0]),
)
LEAVES = st.one_of(NUMBERS, st.booleans(), st.text(max_size=2), st.none())
VALUES = st.one_of(
    st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3), max_leaves=8),
    st.lists(NUMBERS, max_size=5),
    st.integers(1, 3).flatmap(lambda n: st.lists(st.lists(NUMBERS, min_size=n, max_size=n), max_size=4)),
)


def outcome(make: Any) -> tuple[str, Any]:
    try:
        array = make()
    except ValueError as error:
        return "refused", str(error)
    return str(array.dtype), (array.shape, array.tobytes())


@given(VALUES, st.sampled_from(DTYPES))
@example([[1.5, 2], [3, math.nan]], DType.FLOAT)
@example([True, 1.0], DType.FLOAT)
@example([1, 2.0], DType.INT64)
@example([], DType.FLOAT)
@example([[], []], DType.INT8)
@example([128], DType.INT8)
@example([-1], DType.UINT64)
def test_both_ways_agree(value: Any, dtype: DType) -> None:
    shape = rest_json._shape_of(value)
    fast = rest_json._plain_array(value, shape, dtype)
    if fast is not None:
        careful = outcome(lambda: rest_json._checked_array(value, shape, dtype, "x"))
        assert outcome(lambda: fast) == careful


@pytest.mark.parametrize("dtype", [DType.FLOAT, DType.INT64])
def test_plain_numbers_take_the_fast_way(dtype: DType) -> None:
    array = rest_json._plain_array([[1, 2], [3, 4]], (2, 2), dtype)
    assert array is not None
    assert (array.dtype, array.tolist()) == (dtype.numpy, [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        ([300], DType.INT8, "out of range"),
        ([-1], DType.UINT8, "out of range"),
        ([70000], DType.UINT16, "out of range"),
        ([1.0], DType.INT32, "found 1.0"),
    ],
)
def test_numbers_that_would_become_others_are_refused(value: Any, dtype: DType, text: str) -> None:
    info = message_class("TensorInfo")(name="x:0", dtype=int(dtype))
    info.tensor_shape.unknown_rank = True
    with pytest.raises(ValueError, match=text):
        rest_json.to_array(value, "x", info)


TEXTS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner)
)


@given(TEXTS, st.sampled_from([None, 1]), st.integers(0, 60), st.sampled_from(["", *',][}{: x"']))
def test_the_deep_way_parses_as_the_usual_one(value: Any, indent: int | None, at: int, put: str) -> None:
    """Well-formed texts, and some in which a character is another, or gone."""
    decoder, text = json.JSONDecoder(), json.dumps(value, indent=indent)
    for each in (text, text[:at] + put + text[at + 1 :]):
        found = outcome_of(lambda: rest_json._parse_deep(each, decoder))  # noqa: B023
        assert found == outcome_of(lambda: decoder.decode(each))  # noqa: B023


def outcome_of(parse: Any) -> str:
    try:
        return repr(parse())
    except json.JSONDecodeError:
        return "refused"


@pytest.mark.parametrize(
    ("body", "document"),
    [
        (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
        (b'{"a": [NaN, Infinity, -Infinity]}', {"a": [math.nan, math.inf, -math.inf]}),
        (b'{"a": 1e300, "b": 1E+3}', {"a": 1e300, "b": 1000.0}),
        (b'{"a": 1, "a": 2}', {"a": 2}),
    ],
)
def test_documents(body: bytes, document: Any) -> None:
    assert np.array_equal(repr(rest_json.parse_request(body)), repr(document))


@pytest.mark.parametrize("text", [b'{"a": 1e309}', b'{"a": -1E+400}', b'{"a": 1' + b"0" * 400 + b".0}"])
def test_numbers_that_no_double_holds(text: bytes) -> None:
    with pytest.raises(ValueError, match="too big"):
        rest_json.parse_request(text)


ROWS = st.one_of(
    VALUES,
    st.lists(st.one_of(st.floats(width=16), st.text(st.sampled_from('a,]}[{":\\é'), max_size=4)), max_size=6),
    st.lists(st.fixed_dictionaries({"x": st.floats(width=16), "y": st.integers(0, 9)}), max_size=6),
    st.lists(
        st.sampled_from([{"x": [1]}, [1], 1, {"b64": "YQ=="}, "],", "},", {"x": 1, "y": 2}]), max_size=6
    ),
)
DOCUMENTS = st.dictionaries(
    st.sampled_from(["instances", "inputs", "examples", "signature_name", "a"]),
    st.one_of(ROWS, st.dictionaries(st.sampled_from(["x", "y", "b64"]), ROWS, max_size=2)),
    max_size=2,
)


def inputs_of(text: str, signature: Any, long_bytes: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rest_json, "LONG_BYTES", long_bytes)
        patch.setattr(rest_json, "_BLOCK_BYTES", 8)
        try:
            document = rest_json.parse_request(text.encode(errors="surrogatepass"))
            if "examples" in document:
                return rest_json.examples_input(document).SerializeToString(deterministic=True)
            found = rest_json.predict_inputs(document, signature)
        except ValueError:
            return "refused"
    return {name: (str(array.dtype), array.shape, array.tolist()) for name, array in found.items()}


@given(
    DOCUMENTS,
    st.sampled_from([("x",), ("x", "y")]),
    st.sampled_from([DType.FLOAT, DType.INT64, DType.STRING]),
    st.sampled_from([None, 0, 2]),
    st.tuples(st.integers(0, 80), st.sampled_from(["", ",", "]", "}", '"', "1", " "])),
)
@example({"instances": [[1.5, 2.5]] * 9}, ("x",), DType.FLOAT, None, (0, ""))
@example({"instances": [{"x": 1.5, "y": 2}] * 9}, ("x", "y"), DType.FLOAT, 2, (0, ""))
@example({"inputs": {"x": ["a],", "},b", '"'] * 5, "y": ["c"] * 15}}, ("x", "y"), DType.STRING, 0, (0, ""))
@example({"examples": [{"x": [1.5]}, {"x": "a"}] * 5}, ("x",), DType.FLOAT, None, (0, ""))
def test_a_long_request_is_what_a_short_one_is(
    document: Any, names: tuple[str, ...], dtype: DType, indent: int | None, typo: tuple[int, str]
) -> None:
    signature = message_class("SignatureDef")()
    for name in names:
        signature.inputs[name].name, signature.inputs[name].dtype = f"{name}:0", int(dtype)
        signature.inputs[name].tensor_shape.unknown_rank = True
    text = json.dumps(document, indent=indent)
    at, character = typo
    text = text[:at] + character + text[at + bool(character) :]
    long, short = (inputs_of(text, signature, limit) for limit in (0, 1 << 30))
    assert repr(long) == repr(short)


PEAK = """
import sys, numpy as np
from exporter.wire import rest_json
from exporter.wire.protos import message_class
from serving import rest_response

signature = message_class("SignatureDef")()
signature.inputs["x"].name, signature.inputs["x"].dtype = "x:0", 1
row = "[1.5,2.5],"
body = ('{"instances":[' + (row * ((24 << 20) // len(row)))[:-1] + "]}").encode()

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) << 10

before = peak()
inputs = rest_json.predict_inputs(rest_json.parse_request(body), signature, check_shapes=False)
answer = list(rest_response.texts({"y": inputs["x"]}, by_row=True))
print(inputs["x"].size, (peak() - before) / len(body))
"""


@pytest.mark.landing
def test_a_long_request_takes_a_few_times_its_size() -> None:
    """By itself JSON's reader takes forty times as much: 2 GB for 60 MB."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, timeout=300, check=True
    )
    size, times = done.stdout.split()
    assert int(size) == 2 * ((24 << 20) // 10)
    assert float(times) < 8


@pytest.mark.parametrize("text", ['{"instances": %s', '{"inputs": {"x": %s', '{"a": %s', "%s"])
def test_a_long_request_that_is_nested_too_deeply(text: str) -> None:
    """A list of nothing takes sixty times the room of its brackets."""
    body = (text % ("[" * rest_json.LONG_BYTES)).encode()
    with pytest.raises(ValueError, match="nested too deeply"):
        rest_json.parse_request(body + b" ")


@pytest.mark.landing
@pytest.mark.parametrize("text", ['{"instances": [%s]}', '{"inputs": {"x": [%s]}}', '{"a": %s}', "%s"])
@pytest.mark.parametrize("part", ["[],", "{},", '"",'])
def test_a_long_value_of_very_many_parts(text: str, part: str) -> None:
    body = text % f"[{part * (2 * rest_json.MOST_IN_ONE)}1]"
    with pytest.raises(ValueError, match=f"more than {rest_json.MOST_IN_ONE} lists"):
        rest_json.parse_request(body.encode())


@pytest.mark.parametrize("value", [[1] * 200, [[1]] * 60, ["a]"] * 60, 10**200, "[" * 200])
def test_a_long_value_of_not_so_many_parts(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut anywhere, also inside of a number, it is read whole."""
    for name, size in {"LONG_BYTES": 100, "_BLOCK_BYTES": 64, "MOST_IN_ONE": 250}.items():
        monkeypatch.setattr(rest_json, name, size)
    assert rest_json.parse_request(json.dumps({"a": value, "b": [value, 2]}).encode()) == {
        "a": value,
        "b": [value, 2],
    }
