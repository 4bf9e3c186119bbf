"""TensorFlow's `DataType` numbers with their numpy types (source: tensorflow/core/framework/types.proto)."""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"
"""An array of any shape and type."""


_REFERENCES = 100  # source: tensorflow/core/framework/types.proto


class DType(IntEnum):
    """The type of a tensor's elements; its value is TensorFlow's number."""

    FLOAT = 1
    DOUBLE = 2
    INT32 = 3
    UINT8 = 4
    INT16 = 5
    INT8 = 6
    STRING = 7
    COMPLEX64 = 8
    INT64 = 9
    BOOL = 10
    QINT8 = 11
    QUINT8 = 12
    QINT32 = 13
    BFLOAT16 = 14
    QINT16 = 15
    QUINT16 = 16
    UINT16 = 17
    COMPLEX128 = 18
    HALF = 19
    RESOURCE = 20
    VARIANT = 21
    UINT32 = 22
    UINT64 = 23
    FLOAT8_E5M2 = 24
    FLOAT8_E4M3FN = 25
    FLOAT8_E4M3FNUZ = 26
    FLOAT8_E4M3B11FNUZ = 27
    FLOAT8_E5M2FNUZ = 28
    INT4 = 29
    UINT4 = 30
    INT2 = 31
    UINT2 = 32
    FLOAT4_E2M1FN = 33

    @classmethod
    def _missing_(cls, value: object) -> DType:
        """Return the type that a reference refers to: DT_FLOAT_REF is DT_FLOAT + 100, and so on.

        `DType(number)` calls it for other numbers. ValueError for a number that no type has.
        """
        number = value - _REFERENCES if isinstance(value, int) else 0
        if number in cls._value2member_map_:
            return cls(number)
        raise ValueError(f"data type number {value} is unknown")

    @property
    def label(self) -> str:
        """The name that users of TensorFlow know: `float32`, `string`, `bfloat16`."""
        return _LABELS.get(self.name, self.name.lower())

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy type of the stored bytes (little endian).

        TypeError for strings, resources and variants, and for a type that the installed ml-dtypes lacks.
        """
        return _numpy(self)

    @property
    def itemsize(self) -> int | None:
        """Bytes of one element on disk; None if elements vary in size.

        TypeError for a type that the installed ml-dtypes lacks.
        """
        return None if self in _VARIABLE_SIZE else _SIZES.get(self) or _numpy(self).itemsize

    @property
    def is_floating(self) -> bool:
        """True for the floats that TensorFlow computes with; floats of 8 and 4 bits are only for storage."""
        return self in _FLOATING

    @property
    def is_integer(self) -> bool:
        """True for whole numbers, including quantised types and types of less than 8 bits."""
        return "INT" in self.name

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the greatest value of an integer type; ValueError for other types."""
        kind, _, bits = self.name.partition("INT")  # numpy does not know them below 8 bits
        return (0, (1 << int(bits)) - 1) if "U" in kind else (-1 << int(bits) - 1, (1 << int(bits) - 1) - 1)

    @classmethod
    def of(cls, label: str) -> DType:
        """Return the type with this label (`float32`) or name (`FLOAT`), in any case; KeyError for others."""
        return _BY_LABEL[label.lower()]


_LABELS = {"FLOAT": "float32", "DOUBLE": "float64", "HALF": "float16"}
_FLOATING = {DType.HALF, DType.BFLOAT16, DType.FLOAT, DType.DOUBLE}
_VARIABLE_SIZE = {DType.STRING, DType.RESOURCE, DType.VARIANT}
_BY_LABEL = {dtype.label: dtype for dtype in DType} | {dtype.name.lower(): dtype for dtype in DType}
_SIZES = {DType.BOOL: 1, DType.BFLOAT16: 2} | {
    DType.of(f"{kind}{8 * size}"): size
    for kind, sizes in {
        "float": (2, 4, 8),
        "int": (1, 2, 4, 8),
        "uint": (1, 2, 4, 8),
        "complex": (8, 16),
    }.items()
    for size in sizes
}  # of most variables, so that to list them needs no numpy
_QUANTIZED = {"QINT8": "int8", "QUINT8": "uint8", "QINT32": "int32", "QINT16": "int16", "QUINT16": "uint16"}


@cache
def _numpy(dtype: DType) -> np.dtype[Any]:
    if dtype in _VARIABLE_SIZE:
        raise TypeError(f"{dtype.label} has no fixed-size numpy type")
    import numpy as np

    # TensorFlow's numpy types of these are structures of one field; stored are the plain integers
    name = _QUANTIZED.get(dtype.name, dtype.label)
    dtype_: np.dtype[Any]
    try:
        dtype_ = np.dtype(name).newbyteorder("<")
    except TypeError:
        import ml_dtypes

        if not hasattr(ml_dtypes, name):
            raise TypeError(f"ml-dtypes {ml_dtypes.__version__} has no {name}") from None
        dtype_ = np.dtype(getattr(ml_dtypes, name))
    return dtype_


def is_floating(values: np.ndarray[Any, Any]) -> bool:
    """True for an array of floats, including bfloat16, which numpy regards as raw bytes.

    Of 8-bit floats only float8_e5m2 counts.
    """
    # ml_dtypes' bfloat16 has the kind "V", as raw bytes have
    return values.dtype.kind == "f" or str(values.dtype) == DType.BFLOAT16.label


# RestoreV2 joins and cuts slices of these types alone; of others it reads a slice only as it is stored
# (HANDLE_COPY in BundleReader::GetSliceValue, tensorflow/core/util/tensor_bundle/tensor_bundle.cc).
_JOINABLE = """
    FLOAT DOUBLE BFLOAT16 COMPLEX64 COMPLEX128
    BOOL INT8 INT16 INT32 INT64 UINT8 INT4 UINT4 QINT8 QUINT8 QINT32
"""
JOINABLE = {DType[name] for name in _JOINABLE.split()}
