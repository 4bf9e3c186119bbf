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


OVERLAID = {64: 1.1, 1_000: 1.3, 100_000: 2.0}
"""What a lookup may cost with a tenth of the rows in the overlay."""


def bases(lab: Lab) -> Iterator[Row]:
    """The same table in a base that takes deltas: mapped, untouched and with a tenth of its rows changed."""
    rows = 1 << 14 if lab.quick else 1 << 22
    published = lab.once("tables", lambda directory: job("jobs_mapped:publish", directory, rows))
    kinds = [("base", ""), ("base-mapped", ""), ("base", "updated"), ("base-mapped", "updated")]
    plain, mapped, changed, overlaid = lab.side_by_side(
        *(
            lambda kind=kind, updated=updated: job(
                "jobs_mapped:serve", _version(published, kind), rows, *([updated] if updated else [])
            )
            for kind, updated in kinds
        ),
        repeats=3,
    )
    for ours, theirs in ((mapped, plain), (overlaid, changed)):
        for one, other in zip(ours.samples, theirs.samples, strict=True):
            assert one.result["row"] == other.result["row"]
    yield cost("load of a base of this table, mapped, against restored", mapped.time, plain.time)
    yield cost("  anonymous memory, 4 bytes a row of it for slots", _anonymous(mapped), _anonymous(plain))
    yield cost(
        "update of a tenth of the rows, into the overlay against memory", _update(overlaid), _update(changed)
    )
    for ids in LOOKUPS:
        what = f"processor time of a lookup of {ids:,} ids of a base, mapped against memory"
        yield cost(what, _lookup(mapped, ids), _lookup(plain, ids), at_most=LOOKUPS[ids])
        what = "  with a tenth of the rows changed"
        yield cost(what, _lookup(overlaid, ids), _lookup(changed, ids), at_most=OVERLAID[ids])


def _update(found: Medians) -> Quantity:
    return seconds(statistics.median(sample.result["update"] for sample in found.samples))


def _version(published: Path, kind: str) -> Path:
    return published / kind / "1"


def _size(published: Path, kind: str) -> int:
    return sum(path.stat().st_size for path in _version(published, kind).glob("variables/*.data-*"))


def _anonymous(found: Medians) -> Quantity:
    return bytes_(statistics.median(sample.result["anonymous"] for sample in found.samples))


def _lookup(found: Medians, ids: int) -> Quantity:
    return seconds(statistics.median(sample.result["lookups"][str(ids)] for sample in found.samples))


BENCHMARKS: tuple[Benchmark, ...] = (tables, bases)
