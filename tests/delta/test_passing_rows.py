"""Tables in stores that are compared in this process: found as in files, and nothing of them stays here."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

from exporter.catalog import Catalog, SliceSpec
from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.checkpoint.tensor_values import checked_map
from exporter.delta import diff as comparing
from exporter.delta import row_reader
from exporter.delta.deviation import Tolerance
from exporter.delta.diff import Compared, Comparison, diff
from exporter.delta.format import ChangeKind, Rows, Schema, ServedVariable
from exporter.delta.layered_state import LayeredState
from exporter.delta.residual import Waiting
from exporter.delta.row_hashes import BlockHasher, HashIndex
from exporter.delta.row_reader import RowReader, SliceOrder
from exporter.delta.tolerance import divide
from exporter.errors import CheckpointChanged, CorruptFile
from exporter.storage import mirror
from exporter.terminal.progress import NoProgress
from exporter.wire.dtypes import DType
from tests.support.directory_store import BUCKET, directory_store
from tests.support.http_proxy import Traffic
from tests.support.table_layouts import LAYOUT_ORDERS, layer, stored

ROWS, WIDTH = 5000, 6
HASHER = BlockHasher(7)
CHUNK, THREADS = 1 << 20, 2


class Objects(NamedTuple):
    """A directory whose files are objects below a URL."""

    directory: Path
    url: str
    traffic: Traffic


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str], Traffic]]:
    root = tmp_path_factory.mktemp("store")
    with directory_store(root) as (environment, traffic):
        yield root, environment, traffic


@pytest.fixture
def objects(
    store: tuple[Path, dict[str, str], Traffic], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Objects:
    """What is fetched of them goes to `fetched/`."""
    root, environment, traffic = store
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for directory in (tmp_path / "fetched", tmp_path / "scratch", root / tmp_path.name):
        directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "fetched"))
    return Objects(root / tmp_path.name, f"s3://{BUCKET}/{tmp_path.name}", traffic)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tables pass as large ones do, in many chunks."""
    monkeypatch.setattr(comparing, "GAP_BYTES", 0)
    monkeypatch.setattr(row_reader, "GAP_BYTES", 512)
    monkeypatch.setattr(comparing, "PART_BYTES", 48 << 10)
    monkeypatch.setattr(comparing, "_STORE_BYTES", 0)


def in_store(reader: RowReader, objects: Objects) -> RowReader:
    """A table among the files, read from the store."""
    catalog = open_checkpoint(mirror.local(Path(f"{objects.url}/{Path(reader.catalog.prefix).name}")))
    tensor = catalog.tensors[reader.tensor.name]
    return RowReader(reader.name, catalog, tensor, reader.box, reader.dtype, reader.order, reader.part)


def schema_of(reader: RowReader) -> Schema:
    return Schema.of([ServedVariable(reader.name, reader.dtype, reader.shape, ChangeKind.TABLE)])


def assert_same(found: Compared, expected: Compared) -> None:
    mine, theirs = found.changes["t"], expected.changes["t"]
    assert isinstance(mine, Rows)
    assert isinstance(theirs, Rows)
    np.testing.assert_array_equal(mine.ids, theirs.ids)
    assert mine.values.tobytes() == theirs.values.tobytes()
    np.testing.assert_array_equal(found.hashes["t"], expected.hashes["t"])


@pytest.mark.parametrize("layout", LAYOUT_ORDERS)
def test_what_is_found_in_files(tmp_path: Path, objects: Objects, small: None, layout: str) -> None:
    before = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    after = before.copy()
    after[[0, 1, 777, 1300, 1301, 4999]] += 1
    tables = {"a": before, "b": after}
    here = [stored(objects.directory / name, layout, table) for name, table in tables.items()]
    schema, rows, dtype = schema_of(here[0]), here[0].shape[0], here[0].dtype.numpy
    layers = (layer(1, rows, dtype), layer(2, rows, dtype)), (layer(3, rows, dtype),)
    local = [LayeredState({"t": reader}, over) for reader, over in zip(here, layers, strict=True)]
    there = [in_store(reader, objects) for reader in here]
    remote = [LayeredState({"t": reader}, over) for reader, over in zip(there, layers, strict=True)]
    expected = diff(*local, schema, Comparison(tmp_path, hasher=HASHER))
    of_old = diff(local[0], local[0], schema, Comparison(tmp_path, hasher=HASHER)).hashes
    known = HashIndex("", 0, HASHER, of_old, "")
    mixed = [(local[0], remote[1]), (remote[0], local[1])] if layout == "slices" else []
    for old, new in [(remote[0], remote[1]), *mixed]:
        for hashes in (None, known):
            assert_same(diff(old, new, schema, Comparison(tmp_path / "scratch", hashes, HASHER)), expected)
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize("cut", ["turns", "ranges", "columns"])
def test_what_several_variables_are_made_of_is_fetched_once(
    tmp_path: Path, objects: Objects, small: None, cut: str
) -> None:
    before = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    readers = [
        in_store(stored(objects.directory / n, "whole", before + k), objects) for k, n in enumerate("ab")
    ]
    shape, half = before.shape, (ROWS // 2, WIDTH)
    order = SliceOrder(0, 2) if cut == "turns" else SliceOrder()
    boxes = [SliceSpec(shape, (0, 0), half), SliceSpec(shape, (ROWS // 2, 0), half)]
    if cut == "columns":
        boxes = [SliceSpec(shape, (0, start), (ROWS, WIDTH // 2)) for start in (0, WIDTH // 2)]
    objects.traffic.requests.clear()
    found = []
    for part, box in enumerate(boxes):
        sides = [LayeredState({"t": replace(reader, box=box, order=order, part=part)}) for reader in readers]
        schema = schema_of(sides[0].stored["t"])
        found.append(diff(*sides, schema, Comparison(tmp_path / "scratch", hasher=HASHER)).changes["t"])
    assert [len(changes.ids) for changes in found] == [box.lengths[0] for box in boxes]
    assert sum(size for _, _, size in objects.traffic.requests) < 2.1 * before.nbytes


def test_what_lies_between_rows_is_not_more_than_they(
    tmp_path: Path, objects: Objects, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    reader = in_store(stored(objects.directory / "a", "whole", table), objects)
    monkeypatch.setattr(row_reader, "_PASSED_BYTES", 8 * table[::30].nbytes)
    read, sizes = row_reader._ObjectRange.read, list[int]()

    def noted(self: row_reader._ObjectRange, starts: np.ndarray, stops: np.ndarray) -> np.ndarray | None:
        sizes.append(int((stops - starts).sum()))
        return read(self, starts, stops)

    monkeypatch.setattr(row_reader._ObjectRange, "read", noted)
    np.testing.assert_array_equal(reader.rows_at(np.arange(0, ROWS, 30)), table[::30])
    assert sizes == [table[::30].nbytes]


@pytest.mark.parametrize(
    ("layout", "side", "hashes"),
    [
        ("whole", 0, "unknown"),
        ("slices", 1, "unknown"),
        ("mod", 0, "unknown"),
        ("whole", 0, "known"),
        ("mod", 1, "known"),
    ],
)
def test_damage_is_found(
    tmp_path: Path, objects: Objects, small: None, layout: str, side: int, hashes: str
) -> None:
    table = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    here = [stored(objects.directory / name, layout, table + n) for n, name in enumerate("ab")]
    local = LayeredState({"t": here[0]})
    schema = schema_of(here[0])
    expected = diff(local, local, schema, Comparison(tmp_path, hasher=HASHER)).hashes
    extent = here[side].tensor.extents[-1]
    with here[side].catalog.path_of(extent).open("r+b") as file:
        file.seek(extent.offset + extent.size - 2)
        file.write(b"\x99")
    old, new = (LayeredState({"t": in_store(reader, objects)}) for reader in here)
    known = HashIndex("", 0, HASHER, expected, "") if hashes == "known" else None
    with pytest.raises(CorruptFile, match="damaged at 't'"):
        diff(old, new, schema, Comparison(tmp_path / "scratch", known, HASHER))
    assert not list((tmp_path / "scratch").iterdir())


class Watching(NoProgress):
    """Notes the most bytes that files below a directory take on disk."""

    def __init__(self, root: Path) -> None:
        self._root, self.most = root, 0

    def advance(self, amount: int) -> None:
        self.most = max(self.most, self.bytes_())

    def bytes_(self) -> int:
        found = 0
        for directory, _, names in os.walk(self._root):
            for name in names:
                with suppress(FileNotFoundError):
                    found += Path(directory, name).stat().st_blocks * 512
        return found


TABLE_BYTES = 12 << 20


def large(prefix: Path, tables: dict[str, np.ndarray], parts: int) -> None:
    """Tables in one shard, in slices if there are several parts."""
    with BundleWriter(prefix) as writer:
        for name, table in tables.items():
            for rows in np.split(np.arange(len(table)), parts):
                spec = SliceSpec(table.shape, (int(rows[0]), 0), (len(rows), *table.shape[1:]))
                writer.add(name, table[rows], spec if parts > 1 else None)


def states(catalogs: list[Catalog], names: str) -> list[LayeredState]:
    return [
        LayeredState(
            {
                name: RowReader(
                    name, each, each.tensors[name], SliceSpec.whole(each.tensors[name].shape), DType.FLOAT
                )
                for name in names
            }
        )
        for each in catalogs
    ]


@pytest.mark.parametrize("parts", [1, 8])
def test_a_watch_leaves_nothing_behind(
    tmp_path: Path, objects: Objects, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """Checkpoints of two tables in one shard, one after another: what is on disk is what threads work on."""
    monkeypatch.setattr(comparing, "PART_BYTES", CHUNK)
    monkeypatch.setattr(comparing, "_STORE_BYTES", 0)
    shape = (TABLE_BYTES // 256, 64)
    tables = {
        name: np.random.default_rng(n).normal(size=shape).astype(np.float32) for n, name in enumerate("tu")
    }
    for step in range(3):
        large(objects.directory / f"m-{step}", tables, parts)
        tables["t"][step::1000] += 1
    urls = [f"{objects.url}/m-{step}" for step in range(3)]
    catalogs = [open_checkpoint(mirror.local(Path(url))) for url in urls]
    watching = Watching(tmp_path)
    schema = Schema.of([ServedVariable(name, DType.FLOAT, shape, ChangeKind.TABLE) for name in "tu"])
    known, before = None, watching.bytes_()
    every = states(catalogs, "tu")
    for step, (old, new) in enumerate(pairwise(every)):
        objects.traffic.requests.clear()
        how = Comparison(tmp_path / "scratch", known, HASHER, THREADS, watching)
        found = diff(old, new, schema, how)
        assert list(found.changes) == ["t"]
        assert isinstance(found.changes["t"], Rows)
        assert found.changes["t"].ids.tolist() == list(range(step, shape[0], 1000))
        known = HashIndex("", 0, HASHER, found.hashes, "")
        sizes = [objects.traffic.of(lambda path, n=n: f"m-{n}.data" in path)[1] for n in (step, step + 1)]
        assert sizes[1] == 2 * TABLE_BYTES  # each byte once
        assert sizes[0] == 2 * TABLE_BYTES if not step else 0 < sizes[0] < TABLE_BYTES
        allowed, scratch = Tolerance(bound=1e-9), tmp_path / "scratch"
        divided = divide(found.changes, old, schema, allowed, scratch, Waiting())
        assert divided.changes.keys() == {"t"}
    assert watching.most - before <= 2 * (THREADS + 1) * CHUNK
    assert watching.bytes_() - before < CHUNK


def test_an_object_that_is_replaced_meanwhile(tmp_path: Path, objects: Objects, small: None) -> None:
    table = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    here = [stored(objects.directory / name, "whole", table + n) for n, name in enumerate("ab")]
    old, new = (LayeredState({"t": in_store(reader, objects)}) for reader in here)

    class Replacing(NoProgress):
        def advance(self, amount: int) -> None:
            stored(objects.directory / "b", "whole", table + 2)

    with pytest.raises(CheckpointChanged):
        diff(
            old, new, schema_of(here[0]), Comparison(tmp_path, hasher=HASHER, workers=1, progress=Replacing())
        )


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_map_of_an_object_goes_with_the_array(tmp_path: Path, objects: Objects, is_damaged: bool) -> None:
    table = np.random.default_rng(0).normal(size=(TABLE_BYTES // 256, 64)).astype(np.float32)
    large(objects.directory / "m", {"t": table}, 1)
    if is_damaged:
        with next(objects.directory.glob("m.data*")).open("r+b") as file:
            file.write(b"\x99")
    catalog = open_checkpoint(mirror.local(Path(f"{objects.url}/m")))
    objects.traffic.requests.clear()
    if is_damaged:
        with pytest.raises(CorruptFile, match="damaged at 't'"):
            checked_map(catalog, catalog.tensors["t"])
    else:
        np.testing.assert_array_equal(checked_map(catalog, catalog.tensors["t"]), table)
    assert objects.traffic.of(lambda path: "m.data" in path)[1] == TABLE_BYTES
    assert Watching(tmp_path / "fetched").bytes_() < 64 << 10
