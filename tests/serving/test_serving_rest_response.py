"""Answers in the JSON of TF Serving's REST interface."""

from __future__ import annotations

import json
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from serving import rest_response
from serving.rest_response import classifications, columns, regressions, rows, texts, to_json


def strings(*items: bytes) -> Any:
    array = np.empty(len(items), object)
    array[:] = items
    return array


def test_rows_of_one_output_have_no_name() -> None:
    assert rows({"y": np.float32([[1, 2], [3, 4]])}) == {"predictions": [[1.0, 2.0], [3.0, 4.0]]}


def test_rows_of_several_outputs_are_objects() -> None:
    assert rows({"a": np.int64([1, 2]), "b": strings(b"x", b"y")}) == {
        "predictions": [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    }


def test_columns() -> None:
    assert columns({"y": np.float32(3)}) == {"outputs": 3.0}
    assert columns({"a": np.bool_([True]), "b": np.int32([[1]])}) == {"outputs": {"a": [True], "b": [[1]]}}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_floats_are_as_short_as_their_type_allows(dtype: Any) -> None:
    assert json.dumps(to_json(np.array([0.1, 2.0]).astype(dtype), "y")) == "[0.1, 2.0]"


def test_every_kind_of_float32_is_written_with_its_own_digits() -> None:
    bits = np.random.default_rng(3).integers(0, 1 << 32, 20_000, np.uint32)
    odd = np.float32([0, -0.0, np.inf, -np.inf, np.finfo("f4").max, np.finfo("f4").smallest_subnormal])
    values = np.concatenate([bits.view("f4"), odd])
    values = values[~np.isnan(values)]
    assert to_json(values, "y") == [float(str(value)) for value in values]
    assert np.array_equal(np.float32(json.loads(json.dumps(to_json(values, "y")))), values)


def test_bfloat16() -> None:
    assert to_json(np.array([0.5, 3]).astype(ml_dtypes.bfloat16), "y") == [0.5, 3.0]


def test_doubles_are_kept() -> None:
    assert to_json(np.array([0.1, 1 / 3]), "y") == [0.1, 1 / 3]


def test_what_is_not_finite_is_written_as_rest_writes_it() -> None:
    assert json.dumps(to_json(np.float32([np.nan, np.inf, -np.inf]), "y")) == "[NaN, Infinity, -Infinity]"


def test_bytes_are_base64_where_the_name_says_so() -> None:
    assert to_json(strings(b"\xff\x00"), "image_bytes") == [{"b64": "/wA="}]


def test_examples() -> None:
    assert classifications([[("a", float(np.float32(0.1)))]]) == {"results": [[["a", 0.1]]]}
    assert regressions([float(np.float32(0.1)), 2.0]) == {"results": [0.1, 2.0]}


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ({"y": np.float32(3)}, "'y' is a scalar"),
        ({"a": np.zeros(2), "b": np.zeros(3)}, "different numbers of rows: {'a': 2, 'b': 3}"),
        ({"y": strings(b"\xff")}, "not UTF-8"),
        ({"y": np.complex64([1])}, "no form for complex64"),
    ],
)
def test_what_json_cannot_say(outputs: Any, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        rows(outputs)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "outputs",
    [
        {"y": np.float32([[1.5, 2]] * 9)},
        {"y": np.arange(40, dtype=np.int64), "é": strings(*[b"x", "ü".encode()] * 20)},
        {"y": np.zeros([30, 0], np.float32), "z": np.zeros([30, 2, 0, 3], np.int8)},
        {"y": np.float64([[[math.nan, math.inf]]] * 7), "b_bytes": strings(*[b"\xff"] * 7)},
    ],
)
def test_a_long_answer_is_what_a_short_one_is(outputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_response, "_BLOCK", 4)
    for by_row, whole in ((True, rows), (False, columns)):
        parts = list(texts(outputs, by_row=by_row))
        assert len(parts) > 3
        assert b"".join(parts).decode() == json.dumps(whole(outputs), ensure_ascii=False)
    scalar = {"y": outputs["y"], "s": np.float32(3)}
    assert b"".join(texts(scalar, by_row=False)).decode() == json.dumps(columns(scalar))
    with pytest.raises(ValueError, match="is a scalar"):
        list(texts(scalar, by_row=True))
    with pytest.raises(ValueError, match="different numbers of rows"):
        list(texts({"y": outputs["y"], "s": outputs["y"][:2]}, by_row=True))
