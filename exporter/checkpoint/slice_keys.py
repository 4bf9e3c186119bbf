"""The index keys of a partitioned tensor's slices: TensorFlow's ordered code of name and box.

    key = number(0) string(name) number(rank) (signed(start) signed(length))*

in ordered code, where a dimension taken whole may be start 0, length -1.
Sources: tensorflow/core/util/saved_tensor_slice_util.cc, tensorflow/core/lib/strings/ordered_code.cc.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from exporter.catalog import SliceSpec

WHOLE = (0, -1)
"""Start and length of a dimension that the writer left open (`-` in a slice spec)."""


def slice_key(name: bytes, boxes: Iterable[tuple[int, int]]) -> bytes:
    """The table key of the slice with (start, length) for each dimension."""
    boxes = tuple(boxes)
    numbers = (_signed(number) for box in boxes for number in box)
    return b"".join([_number(0), _string(name), _number(len(boxes)), *numbers])


def _number(value: int) -> bytes:
    digits = value.to_bytes((value.bit_length() + 7) // 8, "big")
    return bytes([len(digits)]) + digits


def _string(value: bytes) -> bytes:
    """Bytes 0x00 and 0xff are escaped by their opposite, so that 0x00 0x01 can only be the end."""
    return re.sub(b"[\x00\xff]", lambda byte: byte[0] + bytes([byte[0][0] ^ 0xFF]), value) + b"\x00\x01"


def _signed(value: int) -> bytes:
    """`length` bytes whose first `length` bits are ones, or zeros for negative values."""
    length = (value if value >= 0 else ~value).bit_length() // 7 + 1
    header = ((1 << length) - 1) << 7 * length
    return ((value & (1 << 8 * length) - 1) ^ header).to_bytes(length, "big")


def overlap(specs: Sequence[SliceSpec], cuts: int = 8) -> str:
    """Which boxes overlap, as text for an error; empty if none do.

    Boxes are separated along one dimension after the other, up to `cuts` times: every partitioner makes such
    boxes (grids of grids), and a hostile index cannot make this slow.
    """
    if len(specs) < 2:
        return ""
    for axis in range(len(specs[0].full_shape)):
        groups = _separate(specs, axis)
        if len(groups) > 1 and cuts:
            return next(filter(None, (overlap(group, cuts - 1) for group in groups)), "")
    return f"{specs[0].restore_spec} and {specs[1].restore_spec}"


def _separate(specs: Sequence[SliceSpec], axis: int) -> list[list[SliceSpec]]:
    """Groups of boxes whose ranges along `axis` touch no other group's."""
    groups: list[list[SliceSpec]] = []
    end = -1
    for spec in sorted(specs, key=lambda spec: (spec.starts[axis], spec.lengths[axis])):
        if not groups or spec.starts[axis] >= end:
            groups.append([])
        groups[-1].append(spec)
        end = max(end, spec.starts[axis] + spec.lengths[axis])
    return groups
