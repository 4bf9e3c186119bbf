"""Values that lie in a file of another kind as they would in a bundle: one run of bytes, little endian."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.checkpoint.file_range import FileRange, verify
from exporter.wire.dtypes import DType


class PlainValues(Struct, frozen=True):
    """The run of bytes `source` as numbers; `archive` is what it lies in, and may have a checksum."""

    source: FileRange
    archive: FileRange
    dtype: DType

    def blocks(self) -> Iterator[np.ndarray[Any, Any]]:
        """See `Content.blocks`."""
        verify(self.archive)
        itemsize = self.dtype.numpy.itemsize
        rest = b""
        for chunk in self.source.chunks():
            data = rest + chunk if rest else chunk
            whole = len(data) - len(data) % itemsize
            rest = data[whole:]
            yield np.frombuffer(data[:whole] if rest else data, self.dtype.numpy)
