"""Dynamic tables: loading, lookups, updates and memory, beside DenseHashTable and plain gathers."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.bench_incremental import p99
from tests.benchmarks.harness import Benchmark, Lab, Medians, command, job
from tests.benchmarks.rows import Quantity, Row, bounded, bytes_, cost, seconds

_DIM = 16


def loading(lab: Lab) -> Iterator[Row]:
    """Load a version with a table, against reading its files; at least 5 M keys a second."""
    for count in _sizes(lab):
        directory = _prepared(lab, count)
        repeats = 3 if count < 50_000_000 else 1
        loaded, read = lab.side_by_side(
            lambda directory=directory: job("jobs_tables:load", directory),
            lambda directory=directory: job("jobs_tables:read", directory),
            repeats=repeats,
        )
        what = f"load a table of {count:,} keys x {_DIM} floats, a key (stock: read its files)"
        limit = seconds(0.2e-6)
        yield bounded(what, _a_key(loaded, count), at_most=limit, stock=_a_key(read, count))


def lookups(lab: Lab) -> Iterator[Row]:
    """Key to row of values, processor time of a session's calls; stock: DenseHashTable and a gather."""
    for count in (20_000,) if lab.quick else (1_000_000, 10_000_000):
        (found,) = lab.side_by_side(
            lambda count=count: job("jobs_tables:lookup", count, _DIM, 1, 64, 1000, 100_000), repeats=1
        )
        for batch, figures in found.samples[-1].result.items():
            yield _against_dense(f"look up {int(batch):,} of {count:,} keys", figures)
            yield Row("  a gather of as many rows", seconds(figures["gather"]))


def many_tables(lab: Lab) -> Iterator[Row]:
    """A call that looks up in each table of a model; stock: as many DenseHashTables and gathers."""
    tables, keys = (8, 1000) if lab.quick else (100, 20_000)
    (found,) = lab.side_by_side(lambda: job("jobs_tables:lookup", keys, _DIM, tables, 64), repeats=1)
    for batch, figures in found.samples[-1].result.items():
        yield _against_dense(f"look up {batch} keys in each of {tables} tables", figures)
        yield Row("  each table by itself", seconds(figures["apart"]))


def loading_many(lab: Lab) -> Iterator[Row]:
    """Load a base with many tables, and make the calls that a warm-up makes; stock: a plain version."""
    tables, keys = (8, 1000) if lab.quick else (100, 20_000)
    directory = lab.once("many-tables", lambda d: job("jobs_tables:prepare_many", d, tables, keys))
    kinds = ("plain", "base", "mapped")
    found = lab.side_by_side(
        *(lambda kind=kind: job("jobs_tables:load_many", directory / kind / "1") for kind in kinds), repeats=3
    )
    taken = {kind: each.samples for kind, each in zip(kinds, found, strict=True)}
    for kind in kinds[1:]:
        for what, said in {"load": "load", "calls": "  and first calls of all signatures"}.items():
            ours, theirs = (
                seconds(statistics.median(sample.result[what] for sample in taken[each]))
                for each in (kind, "plain")
            )
            yield cost(f"{said}, {tables} tables by keys, {kind}, processor time", ours, theirs, at_most=2.0)


def building(lab: Lab) -> Iterator[Row]:
    """Publish a base, the index among it: time and memory; what the index takes, room for more keys in it."""
    for count in _sizes(lab):
        directory = _prepared(lab, count)
        (built,) = lab.side_by_side(
            lambda directory=directory: job("jobs_tables:build", directory, lab.fresh("tables-built")),
            repeats=1 if count > 10_000_000 else 3,
        )
        what = f"publish a base of {count:,} keys x {_DIM} floats, after imports"
        yield bounded(f"{what}, a key", _a_key(built, count), at_most=seconds(0.2e-6))
        yield Row("  peak memory, TensorFlow among it", built.peak)
        index, limit = built.samples[-1].result["index"], bytes_(40 if lab.quick else 25)
        yield bounded(f"index of {count:,} keys, a key", bytes_(index / count), at_most=limit)


def whole_command(lab: Lab) -> Iterator[Row]:
    """From the command to a published base, TensorFlow's import among it."""
    count = max(_sizes(lab))
    directory = _prepared(lab, count)
    arguments = ("--ckpt-dir", directory / "train", "--model", f"{directory}/builder.py:model")
    (done,) = lab.side_by_side(
        lambda: command(sys.executable, "-m", "exporter", *arguments, "--out", lab.fresh("tables-built")),
        repeats=1,
    )
    what = f"export-model, {count:,} keys x {_DIM} floats, whole command, a key"
    yield bounded(what, _a_key(done, count), at_most=seconds(0.2e-6))


def updates(lab: Lab) -> Iterator[Row]:
    """Upsert keys each second, half of them new, while predictions come at fixed times."""
    count, changed, times = (20_000, 1000, 2) if lab.quick else (1_000_000, 100_000, 8)
    directory = _prepared(lab, count, name="upserted", head_room=True)
    written = job("jobs_tables:upsert", directory, changed, times).result
    (found,) = lab.side_by_side(lambda: job("jobs_tables:apply", directory), repeats=1)
    figures: Mapping[str, Any] = found.samples[-1].result
    yield Row(f"increment of {changed:,} keys, half of them new, to delta", seconds(written["first"]))
    yield Row(f"apply {changed:,} keys x {_DIM} floats, a key", seconds(figures["apply"] / changed))
    what = f"predict, open loop, p99, {changed:,} keys upserted each second, beside idle"
    yield cost(what, p99(found, "busy"), p99(found, "idle"), at_most=1.2)


def _sizes(lab: Lab) -> tuple[int, ...]:
    return (20_000,) if lab.quick else (1_000_000, 10_000_000, 50_000_000)


def _against_dense(what: str, figures: Mapping[str, float]) -> Row:
    return cost(what, seconds(figures["ours"]), seconds(figures["dense"]), at_most=1.5)


def _a_key(found: Medians, count: int) -> Quantity:
    return seconds(found.time.value / count)


def _prepared(lab: Lab, count: int, name: str = "tables", *, head_room: bool = False) -> Path:
    return lab.once(
        f"{name}-{count}",
        lambda directory: job("jobs_tables:prepare", directory, count, _DIM, 1.0 if head_room else 0.25),
    )


BENCHMARKS: tuple[Benchmark, ...] = (
    building,
    whole_command,
    loading,
    loading_many,
    lookups,
    many_tables,
    updates,
)
