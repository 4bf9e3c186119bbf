"""What a catalog says of tensors that lie in other files than a bundle."""

from __future__ import annotations

from pathlib import Path

from exporter.catalog import TensorRef
from exporter.checkpoint.file_range import FileRange, PlainValues
from exporter.wire.dtypes import DType


def ref(directory: Path, dtype: DType) -> TensorRef:
    archive = directory / "archive"
    archive.write_bytes(bytes(12))
    lies = FileRange.whole(archive)
    return TensorRef("name", dtype, (3,), content=PlainValues(lies, lies, dtype))


def test_numbers_take_the_bytes_that_they_will_have_in_a_bundle(tmp_path: Path) -> None:
    assert ref(tmp_path, DType.FLOAT).bytes_ == 12


def test_texts_take_none_before_they_are_written(tmp_path: Path) -> None:
    assert ref(tmp_path, DType.STRING).bytes_ == 0
