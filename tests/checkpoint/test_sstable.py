import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.checkpoint.sstable import read_table, varint, write_table
from exporter.errors import CheckpointError, CorruptFile, TruncatedFile, UnsupportedFormat
from tests.support.bundles import MAGIC, block, compressed_table, handle, seal, table

PATH = Path("model.ckpt-7.index")
PAIRS = st.dictionaries(st.binary(min_size=1, max_size=40), st.binary(max_size=300), max_size=60)


@given(PAIRS)
def test_what_is_written_is_read(pairs: dict[bytes, bytes]) -> None:
    entries = sorted(pairs.items())
    assert read_table(write_table(entries), PATH) == entries


@given(st.integers(0, 40), st.binary(max_size=8), st.integers(1, 3))
def test_keys_with_long_common_prefixes_cross_blocks(common: int, tail: bytes, blocks: int) -> None:
    keys = [b"\xff" * common + b"%06d" % at + tail for at in range(300 * blocks)]
    entries = [(key, bytes(1000)) for key in keys]
    data = write_table(entries)
    assert read_table(data, PATH) == entries
    assert len(data) > 262_144


def test_a_block_boundary_between_keys_without_a_shorter_separator() -> None:
    big = bytes(262_144)
    for one, other in pairwise([b"a", b"a\xff", b"a\xff\xff", b"b", b"c", b"c\x00", b"\xff", b"\xff\xff"]):
        entries = [(one, big), (other, big)]
        assert read_table(write_table(entries), PATH) == entries


@pytest.mark.parametrize("keys", [(b"b", b"a"), (b"a", b"a")])
def test_the_writer_refuses_keys_that_do_not_increase(keys: tuple[bytes, bytes]) -> None:
    with pytest.raises(ValueError, match="must increase"):
        write_table([(key, b"") for key in keys])


@given(PAIRS, st.integers(1, 70))
def test_compressed_tables_are_read(pairs: dict[bytes, bytes], in_block: int) -> None:
    entries = sorted(pairs.items())
    assert read_table(compressed_table(entries, in_block), PATH) == entries


def test_every_flipped_bit_of_a_compressed_table_is_found() -> None:
    small = compressed_table(
        [(b"", b"header"), *((b"layer%03d/kernel" % at, b"1234") for at in range(50))], 30
    )
    for position in range(len(small)):
        for bit in range(8):
            damaged = bytearray(small)
            damaged[position] ^= 1 << bit
            with pytest.raises(CheckpointError):
                read_table(bytes(damaged), PATH)


SMALL = write_table([(b"", b"header"), (b"layer/bias", b"1234"), (b"layer/kernel", b"56")])


def test_every_flipped_bit_is_found() -> None:
    for position in range(len(SMALL)):
        for bit in range(8):
            damaged = bytearray(SMALL)
            damaged[position] ^= 1 << bit
            with pytest.raises(CheckpointError):
                read_table(bytes(damaged), PATH)


def test_every_truncation_is_found() -> None:
    for size in range(len(SMALL)):
        with pytest.raises(TruncatedFile, match=r"model\.ckpt-7\.index"):
            read_table(SMALL[:size], PATH)


@given(st.binary(min_size=1, max_size=100))
def test_bytes_behind_the_end_are_found(garbage: bytes) -> None:
    with pytest.raises(CheckpointError):
        read_table(SMALL + garbage, PATH)


def test_bytes_behind_the_end_are_counted() -> None:
    with pytest.raises(CorruptFile, match="20 bytes after its end"):
        read_table(SMALL + bytes(20), PATH)


@given(st.binary(max_size=400), st.booleans())
def test_garbage_ends_in_a_named_error(garbage: bytes, with_magic: bool) -> None:
    with pytest.raises(CheckpointError):
        read_table(garbage + MAGIC if with_magic else garbage, PATH)


@given(st.binary(max_size=200), st.lists(st.binary(max_size=12), max_size=3))
def test_garbage_with_right_checksums_is_read_or_refused(contents: bytes, handles: list[bytes]) -> None:
    for data in (table([contents]), table([contents], handles)):
        try:
            entries = read_table(data, PATH)
        except CheckpointError:
            continue
        assert all(one[0] < other[0] for one, other in pairwise(entries))


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        pytest.param(SMALL[:-8] + b"\x58" + MAGIC[1:], CorruptFile, "magic number", id="magic"),
        pytest.param(SMALL[:-20] + b"\1" + SMALL[-19:], CorruptFile, "padding", id="footer padding"),
        pytest.param(table([block([(0, b"a", b"")])], type_=2), UnsupportedFormat, "zstd", id="zstd"),
        pytest.param(table([b"\x08abcdefgh"], type_=1), CorruptFile, "cannot be unpacked", id="no snappy"),
        pytest.param(table([b""], type_=1), CorruptFile, "lies at bytes", id="empty snappy"),
        pytest.param(
            table([varint(1 << 31) + bytes(9)], type_=1), CorruptFile, "claims to unpack", id="snappy bomb"
        ),
        pytest.param(table([b"\xff" * 20], type_=1), CorruptFile, "cannot be unpacked", id="snappy length"),
        pytest.param(table([block([(0, b"a", b"")])], type_=9), UnsupportedFormat, "type 9", id="other type"),
        pytest.param(table([block([(1, b"a", b"")])]), CorruptFile, "longer than", id="shares too much"),
        pytest.param(
            table([block([(0, b"b", b""), (0, b"a", b"")])]), CorruptFile, "out of order", id="unsorted"
        ),
        pytest.param(
            table([block([(0, b"a", b""), (1, b"", b"")])]), CorruptFile, "out of order", id="repeated"
        ),
        pytest.param(
            table([block([(0, b"b", b"")]), block([(0, b"a", b"")])]),
            CorruptFile,
            "out of order",
            id="blocks",
        ),
        pytest.param(
            table([block([(0, b"a", b"")]), block([(0, b"a", b"")])]),
            CorruptFile,
            "out of order",
            id="repeated in the next block",
        ),
        pytest.param(table([b"\0\0\0"]), CorruptFile, "lies at bytes", id="no restarts"),
        pytest.param(
            table([block([], range(9))[:-4] + b"\xff\xff\xff\xff"]), CorruptFile, "restarts", id="restarts"
        ),
        pytest.param(table([b"\0\1" + block([])]), CorruptFile, "longer than", id="entry cut"),
        pytest.param(table([b"\0\1\x7fa" + block([])]), CorruptFile, "longer than", id="value length"),
        pytest.param(
            table([b"\0\1" + varint(1 << 62) + b"a" + block([])]), CorruptFile, "longer than", id="huge value"
        ),
        pytest.param(
            table([b"\0" + varint(1 << 62) + b"\0a" + block([])]), CorruptFile, "longer than", id="huge key"
        ),
        pytest.param(table([b"\xff" * 20 + block([])]), CorruptFile, "is not one", id="endless varint"),
    ],
)
def test_each_bad_table_is_refused_by_name(data: bytes, error: type[CheckpointError], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        read_table(data, PATH)
    assert str(PATH) in caught.value.message


ONE = block([(0, b"a", b"1")])


@pytest.mark.parametrize(
    "handles",
    [
        pytest.param([handle(0, len(ONE)), handle(0, len(ONE))], id="a block twice"),
        pytest.param([handle(0, len(ONE))] * 100, id="a block a hundred times"),
        pytest.param([handle(0, 1 << 62)], id="longer than the file"),
        pytest.param([handle(1 << 62, 8)], id="behind the file"),
        pytest.param([handle(1, len(ONE) - 1)], id="inside a block"),
        pytest.param([handle(len(seal(ONE)) + 13, 8)], id="the index itself"),
        pytest.param([b"\xff" * 20], id="a handle without end"),
        pytest.param([b""], id="no handle"),
        pytest.param([], id="a block that nothing names"),
    ],
)
def test_blocks_must_tile_the_file(handles: list[bytes]) -> None:
    with pytest.raises(CorruptFile):
        read_table(table([ONE], handles), PATH)


def test_a_prefix_compression_bomb_is_refused_in_bounded_memory() -> None:
    key = bytes(100_000)
    bomb = table([block([(0, key, b""), *((len(key), b"%06d" % at, b"") for at in range(20_000))])])
    tracemalloc.start()
    with pytest.raises(CorruptFile, match="expand"):
        read_table(bomb, PATH)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * len(bomb)  # it would be 2 GB


def test_the_densest_legal_prefix_compression_is_read() -> None:
    entries = [(b"k" * 5000 + b"%04d" % at, b"") for at in range(1600)]
    for data in (write_table(entries), compressed_table(entries, 1)):
        assert read_table(data, PATH) == entries
    data = write_table(entries)
    assert sum(len(key) for key, _ in entries) > 15 * len(data)
