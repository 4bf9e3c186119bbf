"""Find out whether a program of an `XlaCallModule`, as JAX exports it, does nothing but compute.

Such a program is MLIR in bytecode. One section names every kind of operation that the program has, so it need
not be understood to see that each of them is known and computes. A custom call is not: it runs a function of
the server's process by name. (Source: mlir/docs/BytecodeFormat.md; StableHLO's specification.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_MAGIC = b"ML\xefR"
_STRINGS, _DIALECTS = 0, 1
_OPERATION_COUNT = 4
_REGISTERED_FLAG = 5
"""The versions of the format since which dialects have their number of operations, and names a flag."""
_NEWEST = 6

_COMPUTES = re.compile(
    r"""builtin\.module | func\.(func|call|return) | (vhlo|stablehlo|chlo)\.(
    abs | acos | acosh | add | after_all | and | asin | asinh | atan | atan2 | atanh
    | batch_norm_(grad|inference|training) | bessel_i1e | bitcast_convert | broadcast | broadcast_\w+
    | call | case | cbrt | ceil | cholesky | clamp | compare | complex | composite | concatenate | conj
    | constant | constant_like | convert | convolution | cosh | cosine | count_leading_zeros
    | create_token | digamma | divide | dot | dot_general
    | dynamic_(broadcast_in_dim|conv|gather|iota|pad|reshape|slice|update_slice) | einsum | erf | erf_inv
    | erfc | exponential | exponential_minus_one | fft | floor | func | gather | get_dimension_size
    | get_tuple_element | if | imag | iota | is_finite | is_(neg_|pos_)?inf | lgamma | log | log_plus_one
    | logistic | map | maximum | minimum | multiply | negate | next_after | not | optimization_barrier
    | or | pad | polygamma | popcnt | power | ragged_dot | real | real_dynamic_slice | reduce
    | reduce_precision | reduce_window | remainder | reshape | return | reverse | rng | rng_bit_generator
    | round_nearest_(afz|even) | rsqrt | scatter | select | select_and_scatter | set_dimension_size
    | shift_(left|right_arithmetic|right_logical) | sign | sine | sinh | slice | sort | sqrt | square
    | subtract | tan | tanh | top_k | torch_index_select | transpose | triangular_solve | tuple
    | unary_einsum | uniform_(de)?quantize | while | xor | zeta
    )(_v\d+)?""",
    re.VERBOSE,
)
"""The operations that compute their results from their operands, by their full names."""


def is_plain_module(module: bytes) -> bool:
    """True for a program in bytecode all of whose operations only compute; False for any other bytes."""
    try:
        found = operations(module)
    except (ValueError, IndexError):
        return False
    return bool(found) and all(_COMPUTES.fullmatch(each) for each in found)


def operations(module: bytes) -> set[str]:
    """The full names of the kinds of operations that a program in MLIR's bytecode has.

    Raises:
        ValueError: the bytes are no such program, or of a newer version.
        IndexError: they end too early.
    """
    reader = _Reader(module)
    if reader.take(len(_MAGIC)) != _MAGIC:
        raise ValueError("no MLIR bytecode")
    version = reader.number()
    if version > _NEWEST:
        raise ValueError(f"version {version} of MLIR's bytecode")
    while reader.take(1)[0]:
        pass  # the producer's name
    sections: dict[int, memoryview] = {}
    while not reader.is_at_end:
        kind, content = reader.section()
        if kind in sections:
            raise ValueError("a section comes twice")
        sections[kind] = content
    if not {_STRINGS, _DIALECTS} <= sections.keys():
        raise ValueError("a section is missing")
    strings = _strings(_Reader(sections[_STRINGS]))
    return {*_names(_Reader(sections[_DIALECTS]), strings, version)}


class _Reader:
    """Reads bytes from the front."""

    def __init__(self, content: bytes | memoryview) -> None:
        self._content = memoryview(content)
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at >= len(self._content)

    def take(self, count: int) -> memoryview:
        taken = self._content[self._at : self._at + count]
        if len(taken) < count:
            raise IndexError("the bytes end too early")
        self._at += count
        return taken

    def number(self) -> int:
        """A number of variable length: zeros at the end of its first byte count the bytes that follow."""
        first = self.take(1)[0]
        more = (first & -first).bit_length() - 1 if first else 8
        return (int.from_bytes(self.take(more), "little") << 8 | first) >> min(more + 1, 8)

    def section(self) -> tuple[int, memoryview]:
        """The next section's kind and content.

        Raises:
            ValueError: it is aligned, so that its place depends on where the bytes lie in memory.
        """
        kind = self.take(1)[0]
        if kind & 0x80:
            raise ValueError("an aligned section")
        return kind, self.take(self.number())


def _strings(reader: _Reader) -> list[str]:
    """The table of strings; their lengths, which come first, are in reverse order and count a zero byte."""
    lengths = [reader.number() for _ in range(reader.number())]
    found = [str(reader.take(length)[:-1], "utf-8") for length in reversed(lengths)]
    if not reader.is_at_end:
        raise ValueError("more bytes than strings")
    return found


def _names(reader: _Reader, strings: list[str], version: int) -> Iterator[str]:
    dialects = []
    for _ in range(reader.number()):
        index = reader.number()
        if version >= 1:
            if index & 1:
                reader.section()
            index >>= 1
        dialects.append(strings[index])
    if version >= _OPERATION_COUNT:
        reader.number()
    while not reader.is_at_end:
        dialect = dialects[reader.number()]
        for _ in range(reader.number()):
            index = reader.number()
            yield f"{dialect}.{strings[index >> 1 if version >= _REGISTERED_FLAG else index]}"
