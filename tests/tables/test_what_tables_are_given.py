"""What a user gives for a table by keys and is wrong: an error by name, with what fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from exporter.errors import UsageError
from exporter.tables import DynamicTable, TrainableTable, dynamic_embedding, trainable_embedding


def trainable_table(*values: Any, **named: Any) -> Any:
    import tensorflow as tf

    with tf.Graph().as_default():
        return TrainableTable(*values, 100, **named)


def trainable_layer(*values: Any, **named: Any) -> Any:
    return trainable_embedding(*values, 100, **named)


FITTING = {"flot32": "float32", "bfloat": "bfloat16", "string": "float32", None: "float32"}
"""What is proposed for a type that no row has."""


@pytest.mark.parametrize("make", [DynamicTable, dynamic_embedding, trainable_table])
@pytest.mark.parametrize("dtype", FITTING, ids=str)
def test_a_type_that_no_row_has(make: Callable[..., Any], dtype: Any) -> None:
    with pytest.raises(UsageError, match=f"dynamic table 'user': dtype {dtype!r}") as refused:
        make("user", 4, dtype=dtype)
    assert refused.value.hint == f'dtype="{FITTING[dtype]}"'
    assert refused.value.cause == "expected one of float32, float64, float16, bfloat16"


@pytest.mark.parametrize("make", [DynamicTable, dynamic_embedding, trainable_layer])
@pytest.mark.parametrize("default", ["zero", None, {"a": 1}, [[1.0], [2.0, 3.0]], [1.0, None]], ids=str)
def test_a_default_that_is_not_numbers(make: Callable[..., Any], default: Any) -> None:
    with pytest.raises(UsageError, match=r"dynamic table 'user': default .* is not a number") as refused:
        make("user", 4, default=default)
    assert "expected a number, a row of 4 numbers, or several rows" in str(refused.value.cause)


@pytest.mark.parametrize("make", [dynamic_embedding, trainable_layer])
def test_a_combiner_that_is_not_known(make: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="dynamic table 'user': combiner 'avg'"):
        make("user", 4, combiner="avg")


@pytest.mark.parametrize("dtype", ["float32", "FLOAT", "Float16", "half", "bfloat16"])
def test_names_of_types_in_any_case(dtype: str) -> None:
    assert DynamicTable("user", 4, dtype, default=[1, 2, 3, 4]).dtype.is_floating
