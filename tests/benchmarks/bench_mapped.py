"""Mapped tables, and tables in fewer bits, against a table in memory: the load, memory, lookups, bytes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.harness import Benchmark, Lab, Medians, job
from tests.benchmarks.rows import Quantity, Row, bytes_, cost, seconds

KINDS = ("restored", "mapped", "bfloat16", "int8", "int8-mapped")
LOOKUPS = {64: 1.05, 1_000: 1.05, 100_000: 1.05}
"""How many ids a call looks up, and what a mapped lookup may cost."""
IN_8_BITS = {64: 1.1, 1_000: 1.1, 100_000: 1.25}
TOLERANCE = {"mapped": 0.0, "bfloat16": 2.0**-7, "int8": 2.0**-7, "int8-mapped": 2.0**-7}


def tables(lab: Lab) -> Iterator[Row]:
    """A table [rows, 64] that is only looked up: loaded by a server's loader, and asked many times."""
    rows = 1 << 14 if lab.quick else 1 << 22
    published = lab.once("tables", lambda directory: job("jobs_mapped:publish", directory, rows))

    def measured(kind: str) -> Medians:
        return found[KINDS.index(kind)]

    found = lab.side_by_side(
        *(lambda kind=kind: job("jobs_mapped:serve", _version(published, kind), rows) for kind in KINDS),
        repeats=3,
    )
    restored = measured("restored")
    for kind, tolerance in TOLERANCE.items():
        for ours, theirs in zip(measured(kind).samples, restored.samples, strict=True):
            pairs = zip(ours.result["row"], theirs.result["row"], strict=True)
            assert all(abs(a - b) <= tolerance for a, b in pairs), kind
    size = f"{rows * 256 >> 20:,} MB"
    mapped = measured("mapped")
    yield cost(f"load of a table of {size}, mapped, against restored", mapped.time, restored.time)
    yield cost("  anonymous memory", _anonymous(mapped), _anonymous(restored), at_most=0.02)
    for ids, limit in LOOKUPS.items():
        for kind in KINDS[1:]:
            at_most = {"mapped": limit, "int8": IN_8_BITS[ids]}.get(kind)
            ours, theirs = (_lookup(each, ids) for each in (measured(kind), restored))
            what = f"processor time of a lookup of {ids:,} ids, {kind}, against memory"
            yield cost(what, ours, theirs, at_most=at_most)
    whole = bytes_(_size(published, "restored"))
    yield cost("bytes of the table, bfloat16", bytes_(_size(published, "bfloat16")), whole)
    yield cost("bytes of the table, int8", bytes_(_size(published, "int8")), whole, at_most=0.28)


def _version(published: Path, kind: str) -> Path:
    return published / kind / "1"


def _size(published: Path, kind: str) -> int:
    return sum(path.stat().st_size for path in _version(published, kind).glob("variables/*.data-*"))


def _anonymous(found: Medians) -> Quantity:
    return bytes_(statistics.median(sample.result["anonymous"] for sample in found.samples))


def _lookup(found: Medians, ids: int) -> Quantity:
    return seconds(statistics.median(sample.result["lookups"][str(ids)] for sample in found.samples))


BENCHMARKS: tuple[Benchmark, ...] = (tables,)
