"""docs/reference/formats.md is enough to write a reader: its own one reads what every release wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.checkpoint.tensor_bundle import read_array, read_catalog
from exporter.wire.dtypes import DType

PAGE = (Path(__file__).parent.parent / "docs/reference/formats.md").read_text()
GOLDEN = Path(__file__).parent / "golden"
DELTAS = sorted(path.parent for path in GOLDEN.rglob("delta.index"))
DOCUMENTS = sorted(
    path for path in GOLDEN.rglob("*.json") if {"manifest.json", "increments"} & set(path.parts)
)


def reader() -> dict[str, Any]:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(code, "formats.md", "exec"), names)
    return names


@pytest.mark.parametrize("directory", DELTAS, ids=lambda path: str(path.relative_to(GOLDEN)))
def test_the_pages_reader_reads_real_deltas(directory: Path) -> None:
    page = reader()
    found = page["read_delta"](directory)
    catalog = read_catalog(directory / "delta")
    assert found.keys() == catalog.tensors.keys()
    for name, ref in catalog.tensors.items():
        dtype, shape, content = found[name]
        assert (dtype, shape) == (int(ref.dtype), list(ref.shape))
        expected = read_array(catalog, ref)
        if ref.dtype is DType.STRING:
            assert content.endswith(b"".join(np.asarray(expected).reshape(-1).tolist()))
        else:
            assert content == np.ascontiguousarray(expected).tobytes()
    if "delta/position" in found:
        version, start, end, *_ = page["position"](found)
        assert (version, directory.name) == (1, f"{start:020d}-{end:020d}")
        assert page["fits"](directory, start)
        assert not page["fits"](directory, end)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(GOLDEN)))
def test_every_field_stands_on_the_page(path: Path) -> None:
    document = json.loads(path.read_text())
    document.get("incremental", {}).pop("recipe", None)  # for the exporter alone, and the page says so
    document.get("incremental", {}).pop("graph", None)
    missing = sorted(key for key in keys(document) if f"`{key}`" not in PAGE and f'"{key}"' not in PAGE)
    assert not missing


def test_there_is_something_to_read() -> None:
    kinds = {json.loads(path.read_text())["kind"] for path in DOCUMENTS}
    assert kinds == {"base", "delta", "increment", "milestone"}


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys(inner)
