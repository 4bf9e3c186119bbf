"""Maps of files: as many as there are tensors, read only, and gone with the last array of them."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.checkpoint.tensor_values import map_range
from tests.support.commands import export_model

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(0).bytes(3 * PAGE + 7))
    return path


@contextmanager
def no_more_files_than(count: int) -> Iterator[None]:
    """Beside those that are open already."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def maps_of(path: Path) -> int:
    return sum(line.rstrip().endswith(str(path)) for line in Path("/proc/self/maps").open())


@pytest.mark.parametrize(("offset", "size"), [(0, 1), (1, PAGE), (PAGE, PAGE), (2 * PAGE - 1, PAGE + 8)])
def test_what_is_mapped(file: Path, offset: int, size: int) -> None:
    with file.open("rb") as opened:
        found = map_range(opened.fileno(), offset, size)
    content = file.read_bytes()
    file.unlink()  # a map keeps what a name no longer leads to
    assert found.tobytes() == content[offset : offset + size]
    with pytest.raises(ValueError, match="read-only"):
        found[:] = 0


def test_a_map_ends_with_the_last_array_of_it(file: Path) -> None:
    with file.open("rb") as opened:
        found = map_range(opened.fileno(), PAGE + 3, PAGE)
    part = found.view(np.int32)[7:9]
    del found
    assert maps_of(file) == 1
    del part
    assert maps_of(file) == 0


def test_nothing_is_mapped(file: Path) -> None:
    with file.open("rb") as opened:
        assert len(map_range(opened.fileno(), 3 * PAGE + 7, 0)) == 0


def test_what_cannot_be_mapped(file: Path) -> None:
    with file.open("rb") as opened, pytest.raises(EOFError, match="behind the file"):
        map_range(opened.fileno(), 3 * PAGE, 8)
    with file.open("ab") as opened, pytest.raises(PermissionError):
        map_range(opened.fileno(), 0, 1)


def test_more_tensors_are_compared_than_files_may_be_open(tmp_path: Path) -> None:
    count = 300
    for side in "ab":
        with BundleWriter(tmp_path / side) as writer:
            for number in range(count):
                writer.add(f"t{number}", np.full(3, number + (side == "b"), np.float32))
    with no_more_files_than(count // 2):
        ran = export_model("diff", tmp_path / "a", tmp_path / "b")
    assert ran.code == 0, ran.err
    assert f"{count} of {count} variables" in ran.out
