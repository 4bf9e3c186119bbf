"""Mapped tables, and tables in fewer bits, against a table in memory: load, memory, lookups, bytes, swaps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.harness import Benchmark, Lab, Medians, job
from tests.benchmarks.rows import Quantity, Row, bounded, bytes_, cost, seconds, share

KINDS = ("restored", "mapped", "bfloat16", "int8", "int8-mapped")
LOOKUPS = {64: 1.05, 1_000: 1.05, 100_000: 1.05}
"""How many ids a call looks up, and what a mapped lookup may cost."""
UNTOUCHED = {64: 1.1, 1_000: 1.1, 100_000: 1.05}
"""The same of a base in which nothing has changed."""
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


OVERLAID = {64: 1.15, 1_000: 1.25, 100_000: 1.8}
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
    yield cost("  anonymous memory", _anonymous(mapped), _anonymous(plain))
    yield cost(
        "update of a tenth of the rows, into the overlay against memory", _update(overlaid), _update(changed)
    )
    for ids in LOOKUPS:
        what = f"processor time of a lookup of {ids:,} ids of a base, mapped against memory"
        yield cost(what, _lookup(mapped, ids), _lookup(plain, ids), at_most=UNTOUCHED[ids])
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


OWN_BYTES = 80 << 20
"""What each server may have of its own."""


def huge(lab: Lab) -> Iterator[Row]:
    """A sparse table of 64 GB, in a plain version and in a base, against the model with one row of it."""
    rows = 1 << 18 if lab.quick else 1 << 28
    published = lab.once("huge", lambda directory: job("jobs_mapped_servers:publish_sparse", directory, rows))
    cases = {
        "a plain version": ("mapped",),
        "a base that takes deltas": ("base-mapped",),
        "the same with TF_ONEDNN_USE_SYSTEM_ALLOCATOR=1": ("base-mapped", "system"),
    }
    found = lab.side_by_side(
        *(
            lambda kind=kind, how=how, size=size: job(
                "jobs_mapped_servers:load_alone", published / _SIZES[size > 1] / kind / "1", size, *how
            )
            for kind, *how in cases.values()
            for size in (rows, 1)
        ),
        repeats=3,
    )
    assert len({str(sample.result["rows"]) for each in found for sample in each.samples}) == 1
    for number, what in enumerate(cases):
        with_it, without = found[2 * number :][:2]
        size = f"{rows * 256 >> 30:,} GB" if rows * 256 >> 30 else f"{rows * 256 >> 20:,} MB"
        yield bounded(
            f"load of a sparse table of {size}, {what}: more than without",
            seconds(max(0.0, with_it.time.value - without.time.value)),
            at_most=seconds(0.1 if number == 0 else 0.25),
        )
        memory = _anonymous(with_it).value - _anonymous(without).value
        yield bounded("  anonymous memory", bytes_(max(0.0, memory)), at_most=bytes_(25e6))


_SIZES = ("none", "huge")


def swap(lab: Lab) -> Iterator[Row]:
    """A server takes another version of a table [rows, 64] under 200 predictions a second."""
    rows, window_s = (1 << 14, 0.5) if lab.quick else (1 << 22, 8)
    published = lab.once("pairs", lambda directory: job("jobs_mapped_servers:publish_pairs", directory, rows))
    kinds = ("restored", "mapped", "base", "base-mapped")
    found = lab.side_by_side(
        *(lambda kind=kind: job("jobs_mapped_servers:swap", published / kind, window_s) for kind in kinds),
        repeats=3,
    )
    assert len({sample.result["answer"] for each in found for sample in each.samples}) == 1
    for kind, each in zip(kinds, found, strict=True):
        p99, anonymous = (
            [statistics.median(sample.result[what][at] for sample in each.samples) for at in (0, 1)]
            for what in ("p99", "anonymous")
        )
        is_ours = kind.endswith("mapped")
        yield cost(
            f"p99 of 200 predictions/s during a swap, {kind}, against before",
            *map(seconds, reversed(p99)),
            at_most=1.2 if is_ours else None,
        )
        yield cost(
            "  peak of anonymous memory",
            *map(bytes_, reversed(anonymous)),
            at_most=1.05 if is_ours else None,
        )
        yield Row("  until the new version answers", each.time)


def servers(lab: Lab) -> Iterator[Row]:
    """Servers of one host with one model, each asked for a row of every page of its table."""
    rows = 1 << 14 if lab.quick else 1 << 22
    published = lab.once("pairs", lambda directory: job("jobs_mapped_servers:publish_pairs", directory, rows))
    one, three, restored = lab.side_by_side(
        *(
            lambda kind=kind, count=count: job(
                "jobs_mapped_servers:servers_of_a_host", published / kind, rows, count
            )
            for kind, count in (("mapped", 1), ("mapped", 3), ("restored", 3))
        ),
        repeats=2,
    )
    samples = [sample.result for each in (one, three, restored) for sample in each.samples]
    assert len({answer for result in samples for answer in result["answers"]}) == 1
    together = [
        statistics.median(sample.result["together"] for sample in each.samples)
        for each in (one, three, restored)
    ]
    limit = bytes_(1.1 * together[0] + 2 * OWN_BYTES)
    what = "memory of three servers of a host, mapped, against one"
    yield bounded(what, bytes_(together[1]), at_most=limit, stock=bytes_(together[0]))
    yield cost("  against three that restore it", bytes_(together[1]), bytes_(together[2]))
    yield Row("  anonymous memory of each", _anonymous(three))


def popular(lab: Lab) -> Iterator[Row]:
    """Lookups by Zipf's law, with memory for a tenth of a table on a disk: hot rows together, or not."""
    rows, warm, calls = (1 << 14, 5, 5) if lab.quick else (1 << 20, 1_500, 1_000)
    published = lab.once("hot", lambda directory: job("jobs_mapped:publish_hot", directory, rows))
    hot, mapped = lab.side_by_side(
        *(
            lambda kind=kind: job(
                "jobs_mapped:ask_popular", _version(published, kind), rows, warm, calls, "pages"
            )
            for kind in ("hot", "mapped")
        ),
        repeats=3,
    )
    if not all(sample.result["limited"] for each in (hot, mapped) for sample in each.samples):
        lab.say("this process may not limit its memory: lookups of hot rows are not measured")
        return
    assert len({sample.result["sum"] for each in (hot, mapped) for sample in each.samples}) == 1

    def figure(found: Medians, what: str) -> float:
        return statistics.median(sample.result[what] for sample in found.samples)

    ours, theirs = (share(1 - figure(each, "faults")) for each in (hot, mapped))
    yield Row("lookups that the disk is not read for, hot rows together, against scattered", ours, theirs)
    read = (bytes_(max(1, figure(each, "read"))) for each in (hot, mapped))
    yield cost("  bytes read for a lookup", *read, at_most=0.7)
    for what in ("p50", "p99"):
        yield cost(f"  {what} of 64 ids", *(seconds(figure(each, what)) for each in (hot, mapped)))


BENCHMARKS: tuple[Benchmark, ...] = (tables, bases, huge, swap, servers, popular)
