"""Each way an index can be bad, and crowds of random ones: a named error, and never a wrong result."""

import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporter.catalog import Extent
from exporter.checkpoint.sstable import read_table, write_table
from exporter.checkpoint.tensor_bundle import index_path, parse_index, read_array, read_catalog, shard_path
from exporter.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptFile,
    MissingShard,
    TruncatedFile,
    UnsupportedFormat,
)
from exporter.wire.dtypes import DType
from tests.support.budget import times
from tests.support.bundles import block, entry, header, table, write, write_index

PATH = Path("model.ckpt-7.index")


def where(shard: int = 0, offset: int = 0, size: int = 8) -> Extent:
    return Extent(shard, offset, size, 0)


BAD_ENTRIES = {
    "dtype unknown": (entry("w", dtype=77), UnsupportedFormat, "data type 77"),
    "dtype of a reference": (entry("w", dtype=101), UnsupportedFormat, "data type 101"),
    "dtype missing": (entry("w", dtype=0), UnsupportedFormat, "data type 0"),
    "negative dimension": (entry("w", (-2,)), CorruptFile, "is not a shape"),
    "too many dimensions": (entry("w", (1,) * 255), CorruptFile, "255 dimensions"),
    "elements overflow": (entry("w", (1 << 40, 1 << 40)), CorruptFile, "2\\^63 elements"),
    "elements overflow to the right size": (entry("w", (1 << 32, 1 << 32, 2)), CorruptFile, "2\\^63"),
    "size too small": (entry("w", extent=where(size=4)), CorruptFile, "has 4 bytes"),
    "size too large": (entry("w", extent=where(size=16)), CorruptFile, "float32\\[2\\] has 8"),
    "size negative": (entry("w", extent=where(size=-8)), CorruptFile, "-8 bytes"),
    "strings too small": (entry("w", (9,), dtype=DType.STRING), CorruptFile, "string\\[9\\] has 13"),
    "variant negative": (entry("w", dtype=DType.VARIANT, extent=where(size=-1)), CorruptFile, "-1 bytes"),
    "offset negative": (entry("w", extent=where(offset=-1)), CorruptFile, "from byte -1"),
    "offset outside": (
        entry("w", extent=where(offset=1020)),
        TruncatedFile,
        "has 1024 bytes, 'w' ends at byte 1028",
    ),
    "offset far outside": (entry("w", extent=where(offset=(1 << 63) - 1)), TruncatedFile, "ends at byte"),
    "shard outside": (entry("w", extent=where(shard=1)), CorruptFile, "in shard 1 of 1"),
    "shard negative": (entry("w", extent=where(shard=-1)), CorruptFile, "in shard -1 of 1"),
    "not a message": ((b"w", b"\x08\xff\xff"), CorruptFile, "not a BundleEntryProto"),
    "empty message": ((b"w", b""), UnsupportedFormat, "data type 0"),
    "name not UTF-8": (entry(b"w\xff"), UnsupportedFormat, "name is not UTF-8"),
    "name a surrogate": (entry(b"\xed\xa0\x80"), UnsupportedFormat, "name is not UTF-8"),
    "slice of another rank": (
        entry("w", (4, 4), slices=[[(0, 2)]]),
        CorruptFile,
        "rank 1 in a tensor of rank 2",
    ),
    "slice outside": (entry("w", slices=[[(1, 2)]]), CorruptFile, "outside"),
    "slice negative": (entry("w", slices=[[(0, -2)]]), CorruptFile, "outside"),
    "slice starts negative": (entry("w", slices=[[(-1, 1)]]), CorruptFile, "outside"),
    "slices overlap": (entry("w", (4,), slices=[[(0, 3)], [(2, 2)]]), CorruptFile, "overlap"),
    "slices repeat": (entry("w", (4,), slices=[[(0, 2)], [(0, 2)]]), CorruptFile, "overlap"),
}


@pytest.mark.parametrize(("bad", "error", "says"), BAD_ENTRIES.values(), ids=BAD_ENTRIES)
def test_each_bad_entry_is_refused_by_name(
    tmp_path: Path, bad: tuple[bytes, bytes], error: type[CheckpointError], says: str
) -> None:
    prefix = write_index(tmp_path / "model.ckpt-7", [header(), entry("a"), bad])
    with pytest.raises(error, match=says) as caught:
        read_catalog(prefix)
    assert "model.ckpt-7" in caught.value.message


def test_an_unknown_rank_is_refused(tmp_path: Path) -> None:
    unknown_rank = b"\x08\x01\x12\x02\x18\x01\x28\x04"
    with pytest.raises(CorruptFile, match="is not a shape"):
        read_catalog(write_index(tmp_path / "m", [header(), (b"w", unknown_rank)]))


BAD_HEADERS = {
    "missing": ([], CorruptFile, "no header"),
    "not a message": ([(b"", b"\xff")], CorruptFile, "header cannot be decoded"),
    "big-endian": ([header(endianness=1)], UnsupportedFormat, "big-endian"),
    "newer": ([header(version={"producer": 9, "min_consumer": 2})], UnsupportedFormat, "version 2"),
    "not for us": (
        [header(version={"producer": 9, "bad_consumers": [1]})],
        UnsupportedFormat,
        "this one is 1",
    ),
    "no shards": ([header(0)], CorruptFile, "0 shards"),
    "negative shards": ([header(-1)], CorruptFile, "-1 shards"),
    "millions of shards": ([header(2_000_000_000)], CorruptFile, "2000000000 shards"),
}


@pytest.mark.parametrize(("head", "error", "says"), BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_each_bad_header_is_refused_by_name(
    tmp_path: Path, head: list[tuple[bytes, bytes]], error: type[CheckpointError], says: str
) -> None:
    with pytest.raises(error, match=says):
        read_catalog(write_index(tmp_path / "m", [*head, entry("a")]))


def test_an_index_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match="no header"):
        read_catalog(write_index(tmp_path / "m", []))


def test_a_slice_that_holds_another_shape_is_refused() -> None:
    from exporter.checkpoint.bundle_writer import slice_key

    whole = entry("w", (4,), slices=[[(0, 2)]])
    for part in (
        entry(slice_key(b"w", [(0, 2)]), (1, 2)),
        entry(slice_key(b"w", [(0, 2)]), dtype=DType.INT32),
    ):
        with pytest.raises(CorruptFile, match="holds"):
            parse_index(write_table(sorted([header(), whole, part])), PATH)


@pytest.mark.parametrize(
    "boxes",
    [
        pytest.param([((0, 1), (0, 2)), ((0, 2), (2, 1)), ((1, 2), (0, 1)), ((2, 1), (1, 2))], id="pinwheel"),
        pytest.param([((at % 7, 9), (at % 5, 9)) for at in range(3000)], id="thousands of overlapping boxes"),
        pytest.param([((0, 20), (at, 1)) for at in range(20)] + [((19, 1), (19, 1))], id="one in a crowd"),
    ],
)
def test_boxes_that_no_partitioner_makes_are_refused(boxes: list[tuple[tuple[int, int], ...]]) -> None:
    with pytest.raises(CorruptFile, match="overlap"):
        parse_index(write_table([header(), entry("w", (20, 20), slices=boxes)]), PATH)


def test_a_grid_of_slices_none_of_which_is_stored_is_incomplete() -> None:
    boxes = product([(0, 3), (3, 7), (10, 10)], [(0, 5), (5, 15)])
    ref = parse_index(write_table([header(), entry("w", (20, 20), slices=boxes)]), PATH).tensors["w"]
    assert len(ref.slices) == 6
    assert not ref.is_complete
    assert ref.extents == ()


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"gone\.index"):
        read_catalog(tmp_path / "gone")
    prefix = write(tmp_path / "model.ckpt-7")
    shard_path(prefix, 0, 1).unlink()
    with pytest.raises(MissingShard, match=r"data-00000-of-00001") as caught:
        read_catalog(prefix)
    assert "'w'" in caught.value.cause


@pytest.mark.parametrize(
    "path_of", [index_path, lambda prefix: shard_path(prefix, 0, 1)], ids=["index", "shard"]
)
def test_a_directory_in_the_place_of_a_file_is_refused(
    tmp_path: Path, path_of: Callable[[Path], Path]
) -> None:
    prefix = write(tmp_path / "m")
    path_of(prefix).unlink()
    path_of(prefix).mkdir()
    with pytest.raises(CorruptFile, match="not a regular file"):
        read_catalog(prefix)


def test_a_shard_that_is_cut_is_named(tmp_path: Path) -> None:
    prefix = write(tmp_path / "m", a=np.zeros(3), b=np.zeros(5))
    shard = shard_path(prefix, 0, 1)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(TruncatedFile, match="has 63 bytes, 'b' ends at byte 64"):
        read_catalog(prefix)


def test_a_huge_file_is_not_an_index(tmp_path: Path) -> None:
    prefix = write(tmp_path / "m")
    with index_path(prefix).open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnsupportedFormat, match="1 GiB"):
        read_catalog(prefix)


def test_every_flipped_bit_of_an_index_is_found(tmp_path: Path) -> None:
    prefix = write(
        tmp_path / "m", kernel=np.zeros((3, 2)), names=np.array([b"a", b"bc"], object), step=np.int64(7)
    )
    data = index_path(prefix).read_bytes()
    for position, bit in product(range(len(data)), range(8)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << bit
        with pytest.raises(CheckpointError):
            parse_index(bytes(damaged), PATH)


BASE = read_table(
    write_table(
        [
            header(2),
            entry("a", (2, 1), slices=[[(0, 1), (0, 1)], [(1, 1), (0, 1)]]),
            entry("b", (2,)),
            entry("s", (2,), dtype=DType.STRING),
        ]
    ),
    PATH,
)


@settings(max_examples=times(400))
@given(st.data())
def test_damage_under_right_checksums_is_read_or_refused(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(BASE) - 1))
    key, value = BASE[at]
    start = data.draw(st.integers(0, len(value)))
    end = data.draw(st.integers(start, min(len(value), start + 4)))
    damaged = value[:start] + data.draw(st.binary(max_size=12)) + value[end:]
    try:
        index = parse_index(write_table([*BASE[:at], (key, damaged), *BASE[at + 1 :]]), PATH)
    except CheckpointError:
        return
    for ref in index.tensors.values():
        for extent in ref.extents:
            assert 0 <= extent.shard < index.num_shards
            assert extent.offset >= 0
            assert extent.offset + extent.size <= index.reach[extent.shard][0]
        if ref.extent and ref.dtype.itemsize:
            assert ref.extent.size == ref.elements * ref.dtype.itemsize


@settings(max_examples=times(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 5), st.binary(min_size=1, max_size=30))
def test_damaged_values_are_found(tmp_path: Path, at: int, junk: bytes) -> None:
    """Strings are the hard ones: lengths, their checksum and bytes must all agree."""
    prefix = write(tmp_path / "m", w=np.array([b"one", b"", b"three" * 40], object))
    shard = shard_path(prefix, 0, 1)
    good = shard.read_bytes()
    damaged = (good[:at] + junk + good[at + len(junk) :])[: len(good)]
    shard.write_bytes(damaged)
    catalog = read_catalog(prefix)
    if damaged == good:
        return
    with pytest.raises(CorruptFile, match="'w'"):
        read_array(catalog, catalog.tensors["w"])


HUGE = 1 << 62
BOMBS: dict[str, Callable[[], bytes]] = {
    "one key shared by all": lambda: table(
        [block([(0, bytes(200_000), b""), *((200_000, b"%06d" % at, b"") for at in range(100_000))])]
    ),
    "slices by the hundred thousand": lambda: write_table(
        [header(), entry("w", (HUGE,), slices=([(at, 1 << 40)] for at in range(100_000)))]
    ),
    "a spiral of boxes": lambda: write_table(
        [
            header(),
            entry(
                "w",
                (HUGE, HUGE),
                slices=(
                    [(at, 1), (at, HUGE - 2 * at)] if at % 2 else [(at, HUGE - 2 * at), (at, 1)]
                    for at in range(50_000)
                ),
            ),
        ]
    ),
    "dimensions by the hundred thousand": lambda: write_table([header(), entry("w", (1 << 62,) * 100_000)]),
    "a bad tensor behind a hundred thousand": lambda: write_table(
        [header(), *(entry(f"{at:06d}") for at in range(100_000)), entry("w", (HUGE,))]
    ),
    "nested messages": lambda: write_table([header(), (b"w", b"\x0b" * 1_000_000)]),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_in_bounded_time_and_memory(tmp_path: Path, name: str) -> None:
    """In a process with 10 s of CPU and 1 GiB of address space."""
    (tmp_path / "m.index").write_bytes(BOMBS[name]())
    program = (
        "import resource, sys\nfrom pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (10, 10))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from exporter.checkpoint.tensor_bundle import read_catalog\n"
        "from exporter.errors import CheckpointError\n"
        "try:\n    read_catalog(Path(sys.argv[1]))\nexcept CheckpointError as error:\n"
        "    print(type(error).__name__, len(str(error)))\n"
    )

    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "m")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    kind, length = run.stdout.split() if run.returncode == 0 else (run.stderr, 0)
    assert kind == "CorruptFile"
    assert int(length) < 500, "an error text must not repeat a hostile file"
