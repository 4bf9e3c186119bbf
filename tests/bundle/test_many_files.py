"""Checkpoints of more shards than files may be open: trainers on many nodes have thousands."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest

from exporter.bundle.variables import write_variables
from exporter.catalog import Extent, SliceRef, SliceSpec, TensorRef
from exporter.checkpoint.tensor_bundle import encode_index, index_path, read_array, read_catalog, shard_path
from exporter.delta import compare_rows
from exporter.delta.compare_rows import StoredSide
from exporter.delta.row_reader import RowReader
from exporter.jobs.runner import LOCAL, Runner
from exporter.jobs.task import FewFiles
from exporter.pipeline import comparison
from exporter.wire.crc32c import masked_crc
from exporter.wire.dtypes import DType
from tests.support.values import in_parts, mapping_of

SHARDS, ROWS = 150, 300


@pytest.fixture
def few_files() -> Iterator[None]:
    """A third of the shards may be open beyond what is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(each.name) for each in Path("/proc/self/fd").iterdir()}
    free = (number for number in count() if number not in used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(islice(free, SHARDS // 3, None)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def saved(prefix: Path, *, mod: bool, seed: int = 0) -> np.ndarray:
    """A checkpoint of one table in as many shards."""
    table = np.random.default_rng(seed).normal(size=(ROWS, 4)).astype(np.float32)
    prefix.parent.mkdir()
    slices, start = [], 0
    for number, part in enumerate(in_parts(table, SHARDS, mod)):
        shard_path(prefix, number, SHARDS).write_bytes(part.tobytes())
        box = SliceSpec(table.shape, (start, 0), part.shape)
        extent = Extent(number, 0, part.nbytes, masked_crc(part.tobytes()))
        slices.append(SliceRef(box, extent))
        start += len(part)
    tensor = TensorRef("w", DType.FLOAT, table.shape, slices=tuple(slices))
    index_path(prefix).write_bytes(encode_index([tensor], SHARDS))
    return table


@pytest.mark.parametrize("mod", [True, False])
def test_rows_that_are_laid_out_anew(tmp_path: Path, few_files: None, mod: bool) -> None:
    table = saved(tmp_path / "train" / "model.ckpt", mod=mod)
    source = read_catalog(tmp_path / "train" / "model.ckpt")
    mapping = mapping_of(source, gather_parts=SHARDS if mod else 0, cast=None if mod else DType.BFLOAT16)
    report = write_variables(mapping, tmp_path / "version")
    bundle = read_catalog(report.catalog.prefix)
    found = read_array(bundle, bundle.tensors["w"])
    np.testing.assert_array_equal(found, table.astype(found.dtype))


def test_a_task_leaves_most_of_what_may_be_open_to_others(tmp_path: Path, few_files: None) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    limit = 2 * before + SHARDS  # whatever else this process has open, a quarter is free
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    paths = [tmp_path / f"{number}" for number in range(limit // 4 + 20)]
    for path in paths:
        path.write_text(path.name)
    with FewFiles(paths) as files:
        for number, path in enumerate(paths):
            assert os.pread(files[number], 9, 0).decode() == path.name
        opened = len([*Path("/proc/self/fd").iterdir()]) - before
    assert 0 < opened <= limit // 4


def test_many_tables_in_one_process(tmp_path: Path, few_files: None) -> None:
    """Each of 16 threads reads one of 10 files, which are more together than may be open."""
    paths = [tmp_path / f"{number}" for number in range(10)]
    for path in paths:
        path.write_text(path.name)
    with ExitStack() as stack:
        tables = [stack.enter_context(FewFiles(paths)) for _ in range(16)]
        for number in range(len(paths)):
            assert {os.pread(table[number], 9, 0) for table in tables} == {b"%d" % number}


def test_others_have_files_open(tmp_path: Path, few_files: None) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_text(path.name)
    with FewFiles(paths) as files, ExitStack() as stack:
        assert os.pread(files[0], 9, 0) == b"a"
        with suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(0))
        assert os.pread(files[1], 9, 0) == b"b"


@pytest.mark.parametrize("runner", [None, LOCAL, Runner(task_bytes=256)])
def test_comparing_checkpoints(tmp_path: Path, few_files: None, runner: Runner | None) -> None:
    before = saved(tmp_path / "before" / "model.ckpt-1", mod=False)
    after = saved(tmp_path / "after" / "model.ckpt-2", mod=False, seed=1)
    sides = (comparison.parse_side(str(tmp_path / name)) for name in ("before", "after"))
    (found,) = comparison.compare(*sides, runner).variables
    assert (found.changed_rows, found.rows) == (ROWS, ROWS)
    assert found.largest == pytest.approx(np.abs(after.astype(float) - before).max())


def test_of_thousands_of_slices_a_task_looks_at_those_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "train" / "model.ckpt-1", mod=False)
    asked, overlaps = [], compare_rows.overlaps

    def counted(a: SliceSpec, b: SliceSpec) -> bool:
        asked.append(a)
        return overlaps(a, b)

    monkeypatch.setattr(compare_rows, "overlaps", counted)
    catalog = read_catalog(tmp_path / "train" / "model.ckpt-1")
    table = catalog.tensors["w"]
    reader = RowReader("w", catalog, table, SliceSpec.whole(table.shape), table.dtype)
    sides = [StoredSide.of(reader, start, start + 3, 0) for start in range(0, ROWS, 3)]
    stored = [extent.shard for side in sides for extent in side.tensor.extents]
    assert sorted(set(stored)) == list(range(SHARDS))
    assert len(asked) < 5 * len(sides)
