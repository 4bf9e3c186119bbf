"""What kind a dtype is, compared with numpy and ml-dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from exporter.wire.dtypes import DType, is_floating

STORED = [dtype for dtype in DType if dtype.itemsize is not None]


@pytest.mark.parametrize("dtype", [dtype for dtype in STORED if hasattr(ml_dtypes, dtype.label)])
def test_the_types_of_ml_dtypes_have_a_kind(dtype: DType) -> None:
    assert dtype.is_integer is ("int" in dtype.label)
    if dtype.is_integer:
        known = ml_dtypes.iinfo(dtype.numpy)
        assert dtype.limits == (known.min, known.max)


@pytest.mark.parametrize("dtype", [dtype for dtype in STORED if not hasattr(ml_dtypes, dtype.label)])
def test_the_types_of_numpy_have_the_kind_that_it_says(dtype: DType) -> None:
    assert dtype.is_integer is (dtype.numpy.kind in "iu")
    assert dtype.is_floating is (dtype.numpy.kind == "f")
    if dtype.is_integer:
        known = np.iinfo(dtype.numpy)
        assert dtype.limits == (known.min, known.max)


@pytest.mark.parametrize("dtype", [DType.FLOAT, DType.BFLOAT16, DType.INT64, DType.BOOL, DType.COMPLEX64])
def test_an_array_is_of_floats_as_its_dtype_is(dtype: DType) -> None:
    assert is_floating(np.zeros(1, dtype.numpy)) is dtype.is_floating


@pytest.mark.parametrize("dtype", STORED)
def test_an_element_has_the_size_that_numpy_gives_it(dtype: DType) -> None:
    if hasattr(np, dtype.label) or hasattr(ml_dtypes, dtype.label):
        assert dtype.itemsize == dtype.numpy.itemsize


def test_what_has_no_numbers_has_no_kind() -> None:
    others = {DType.STRING, DType.RESOURCE, DType.VARIANT}
    assert not any(dtype.is_integer or dtype.is_floating for dtype in others)
