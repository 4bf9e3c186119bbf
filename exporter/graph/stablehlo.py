"""Decide whether a program of an `XlaCallModule`, as JAX exports it, does nothing but compute.

Such a program is MLIR in bytecode. One section names every kind of operation that the program has, so the
program need not be understood to check that each of them is known and only computes.

*Custom calls* run a function of the server's process by its name; XLA treats some names as notes. From
version 5 of the bytecode on, an operation's own attributes are numbers in a table of *properties*. Those of a
custom call are eight, among them its target's name. So every text among eight or more properties has to be
one that XLA treats as a note, whichever operation they belong to. (In other programs a target is next to its
attribute's name, `call_target_name`, which is then one of the strings.)

Sources: mlir/docs/BytecodeFormat.md, mlir/lib/Bytecode; stablehlo/dialect/VhloBytecode.cpp, VhloOps.td.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

_MAGIC = b"ML\xefR"
_STRINGS, _DIALECTS, _ATTRIBUTES, _OFFSETS, _PROPERTIES = 0, 1, 2, 3, 8
# The first versions of the format in which dialects have their number of operations, and names a flag.
_OPERATION_COUNT, _REGISTERED_FLAG = 4, 5
_NEWEST = 6
# The (dialect, code) of attributes that are a text: StringAttr, StringV1Attr.
_TEXTS = {("builtin", 2), ("vhlo", 14)}
_CUSTOM_CALL, _ITS_PROPERTIES, _TARGET = "vhlo.custom_call_v1", 8, "call_target_name"
# Targets of custom calls that XLA reads as notes, without running a function of that name.
_NOTES = re.compile(r"|shape_assertion|Sharding|mhlo\.(acosh?|asinh?|atanh|cosh|erf|sinh|tan|topk)")

# The operations that compute their results from their operands, by their full names.
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


class Program(Struct, frozen=True):
    """The kinds of operations of a program by their full names, and the texts of its custom calls."""

    operations: frozenset[str]
    texts: frozenset[str] | None = None  # None if there are none, or if there could be others


def is_plain_module(module: bytes) -> bool:
    """True if `module` is a program in bytecode whose operations all only compute; False for other bytes.

    A custom call counts as such if XLA reads its target as a note, without running a function of that name.
    """
    try:
        program = read_program(module)
    except (ValueError, IndexError):
        return False
    others = [each for each in program.operations if not _COMPUTES.fullmatch(each)]
    are_notes = program.texts is not None and all(map(_NOTES.fullmatch, program.texts))
    return bool(program.operations) and (not others or (others == [_CUSTOM_CALL] and are_notes))


def read_program(module: bytes) -> Program:
    """Return the operations and texts of a program in MLIR's bytecode, up to version 6.

    ValueError or IndexError if the bytes are not such a program, or are cut off.
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
    dialects, operations = _dialects(_Reader(sections[_DIALECTS]), strings, version)
    has_texts = version >= _REGISTERED_FLAG and _TARGET not in strings and _PROPERTIES in sections
    if has_texts and not {_OFFSETS, _ATTRIBUTES} <= sections.keys():
        raise ValueError("a section is missing")
    texts = _texts(sections, strings, dialects) if has_texts and _CUSTOM_CALL in operations else None
    return Program(operations, texts)


class _Reader:
    """Reads bytes from the front; IndexError at their end."""

    def __init__(self, content: bytes | memoryview) -> None:
        self._content = memoryview(content)
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        """True if all bytes are read."""
        return self._at >= len(self._content)

    def take(self, count: int) -> memoryview:
        """Return the next `count` bytes as a view, and move behind them; IndexError if there are fewer."""
        taken = self._content[self._at : self._at + count]
        if len(taken) < count:
            raise IndexError("the bytes end too early")
        self._at += count
        return taken

    def number(self) -> int:
        """Read a number of variable length, and move behind it; IndexError at the end of the bytes.

        Zeros at the end of its first byte count the bytes after it.
        """
        first = self.take(1)[0]
        more = (first & -first).bit_length() - 1 if first else 8
        return (int.from_bytes(self.take(more), "little") << 8 | first) >> min(more + 1, 8)

    def section(self) -> tuple[int, memoryview]:
        """Read the next section, and return its kind (a number) and its content as a view.

        ValueError if it is aligned, IndexError if it is cut off.
        """
        kind = self.take(1)[0]
        if kind & 0x80:
            raise ValueError("an aligned section")
        return kind, self.take(self.number())


def _strings(reader: _Reader) -> list[str]:
    """Read the section of strings; their lengths come first, in reverse order, and count a zero byte.

    ValueError if bytes are left over or not UTF-8, IndexError if there are too few.
    """
    lengths = [reader.number() for _ in range(reader.number())]
    found = [str(reader.take(length)[:-1], "utf-8") for length in reversed(lengths)]
    if not reader.is_at_end:
        raise ValueError("more bytes than strings")
    return found


def _dialects(reader: _Reader, strings: list[str], version: int) -> tuple[list[str], frozenset[str]]:
    """Read the names of the dialects, in order, and the full names of the operations, `dialect.operation`.

    `version` is the bytecode's. IndexError if it is cut off, or if a number is beyond `strings` or the
    dialects; ValueError for an aligned section.
    """
    dialects, operations = [], set[str]()
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
            name = strings[index >> 1 if version >= _REGISTERED_FLAG else index]
            operations.add(f"{dialect}.{name}")
    return dialects, frozenset(operations)


def _texts(
    sections: Mapping[int, memoryview], strings: list[str], dialects: list[str]
) -> frozenset[str] | None:
    """Return the texts in sets of eight or more properties, as custom calls have them.

    None if some attribute is not encoded, but plain text for MLIR's parser. `sections` must have offsets,
    attributes and properties. IndexError if one is cut off, or if a number is beyond `strings` or `dialects`.
    """
    attributes = _attributes(_Reader(sections[_OFFSETS]), _Reader(sections[_ATTRIBUTES]), dialects)
    if attributes is None:
        return None
    found = set[str]()
    reader = _Reader(sections[_PROPERTIES])
    for _ in range(reader.number()):
        properties = _Reader(reader.take(reader.number()))
        numbers = []
        while not properties.is_at_end:
            numbers.append(properties.number())
        for number in numbers if len(numbers) >= _ITS_PROPERTIES else ():
            dialect, content = attributes[number] if number < len(attributes) else ("", b"\1")
            encoded = _Reader(content)
            if (dialect, encoded.number()) in _TEXTS:
                found.add(strings[encoded.number()])
    return frozenset(found)


def _attributes(
    offsets: _Reader, contents: _Reader, dialects: list[str]
) -> list[tuple[str, memoryview]] | None:
    """Return (dialect, encoded content) of each attribute, in order.

    `offsets` reads the section of offsets, `contents` the section of attributes. None if an attribute is
    plain text for MLIR's parser. IndexError if the bytes end too early, or for a number beyond `dialects`.
    """
    count, _ = offsets.number(), offsets.number()
    found: list[tuple[str, memoryview]] = []
    while len(found) < count:
        dialect = dialects[offsets.number()]
        for _ in range(offsets.number()):
            size = offsets.number()
            if not size & 1:
                return None
            found.append((dialect, contents.take(size >> 1)))
    return found
