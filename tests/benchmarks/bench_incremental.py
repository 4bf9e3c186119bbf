"""Increments, deltas and updates: what a change costs, beside what it costs without them."""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from tests.benchmarks import data
from tests.benchmarks.bench_full_export import EXPORT_MODEL
from tests.benchmarks.followed import Followed, followed, published_deltas
from tests.benchmarks.harness import Benchmark, Lab, Medians, Sample, command, job
from tests.benchmarks.rows import Quantity, Row, bounded, bytes_, cost, gain, seconds

_ROWS_A_SECOND = 5e6


def whole_command(lab: Lab) -> Iterator[Row]:
    """`export-model --incr` from an increment, from the shell's prompt back to it."""
    source = followed(lab)
    model = source.model(lab.fresh("exported"))

    def ours() -> Sample:
        for path in published_deltas(model):
            shutil.rmtree(path)
        return command(EXPORT_MODEL, "--ckpt-dir", source.train, "--out", model, "--incr", "--quiet")

    imported, found = lab.side_by_side(lambda: command(sys.executable, "-c", "import tensorflow"), ours)
    assert job("followed:check_published", model, source.newer).result == source.changed
    what = f"export-model --incr, an increment of {source.changed:,} rows x 64, beside import tensorflow"
    yield cost(what, found.time, imported.time, at_most=0.08)
    yield Row("  peak memory", found.peak, imported.peak)


def diff(lab: Lab) -> Iterator[Row]:
    """Two full checkpoints, compared by rows; `cmp` reads equal files to their end."""
    source = followed(lab)
    model, kept = source.model(lab.fresh("compared")), source.plain / "variables"
    same = shutil.copytree(kept, lab.fresh("same"))
    each = 'for file in "$1"/*.data-*; do cmp "$file" "$2/${file##*/}" || exit; done'
    ours, hashed, stock = lab.side_by_side(
        lambda: job("jobs_incremental:compare", model, source.newer),
        lambda: job("jobs_incremental:compare", model, source.newer, "hashes"),
        lambda: command("sh", "-c", each, "sh", kept, same),
    )
    size = sum(path.stat().st_size for path in kept.glob("*.data-*"))
    for sample in (*ours.samples, *hashed.samples):
        assert sample.result == [source.changed, size], (sample.result, source.changed, size)
    what = f"diff of two full checkpoints, {bytes_(size)}, {source.changed:,} rows differ, against cmp"
    yield gain(what, ours.time, stock.time, at_least=0.6)
    yield gain("  with hashes of the old rows", hashed.time, stock.time)


def update(lab: Lab) -> Iterator[Row]:
    """Deltas applied in a session of the loaded SavedModel, and what readers pay for that when there is
    none.
    """
    source = followed(lab)
    small, large, listed, many = (3, 1, 6, 12) if lab.quick else (9, 3, 30, 1_000)
    large_rows = 4 * source.changed if lab.quick else 1_000_000
    tiny = [4] * (listed - small - large)  # these fill the list and are not measured
    model = source.model(lab.fresh("updated"))
    job("followed:publish_all", model, *tiny, *[source.changed] * small, *[large_rows] * large)
    calls = 5 if lab.quick else 500
    arguments = (source.rows, calls, small, large)
    ours, stock = lab.side_by_side(
        lambda: job("jobs_incremental:update", model, *arguments, many),
        lambda: job("jobs_incremental:restore_and_scatter", source.plain, model, *arguments),
        repeats=3,
    )
    digests = {sample.result["digest"] for medians in (ours, stock) for sample in medians.samples}
    assert len(digests) == 1
    for name, rows, limit in (
        ("small", source.changed, 0.02),
        ("large", large_rows, large_rows / _ROWS_A_SECOND),
    ):
        what = f"incremental_update, {rows:,} rows x 64, beside RestoreV2 + ResourceScatterUpdate"
        yield bounded(what, _figure(ours, name), at_most=seconds(limit), stock=_figure(stock, name))
    yield Row("  the first delta after a load and its warm-up, of 4 rows", _figure(ours, "first"))
    for name, deltas, limit in (("nothing", listed, 0.002), ("nothing of many", many, 0.005)):
        what = f"  nothing to do, {deltas:,} deltas listed"
        yield bounded(what, _figure(ours, name), at_most=seconds(limit))
    for batch in (64, 1):
        plain = _figure(stock, f"predict {batch}")
        limit = max(1.05 * plain.value, plain.value + 1e-4)
        what = f"predict of an updatable bundle, idle, batch {batch}, beside a plain one"
        yield bounded(what, _figure(ours, f"predict {batch}"), at_most=seconds(limit), stock=plain)
        after, before = _figure(ours, f"predict {batch}, updated"), _figure(ours, f"predict {batch}")
        yield cost(f"  after {many:,} updates, beside before", after, before)


def same_change(lab: Lab) -> Iterator[Row]:
    """From the trainer's files to answers: delta and update, against a stock export and a stock reload."""
    source = followed(lab)
    tiny = data.ranker(lab, "100 MB").prefix
    ours, stock = lab.side_by_side(
        lambda: job("jobs_incremental:follow", _followed(lab, source), source.train, source.rows),
        lambda: job(
            "jobs_incremental:export_and_reload", tiny, source.newer, lab.fresh("stock"), source.rows
        ),
        repeats=3,
    )
    assert len({sample.result for medians in (ours, stock) for sample in medians.samples}) == 1
    what = (
        f"{source.changed:,} rows changed: delta + update, against stock export + reload of served variables"
    )
    yield gain(what, ours.time, stock.time)
    yield cost("  bytes written", ours.written, stock.written)


def recording(lab: Lab) -> Iterator[Row]:
    """A trainer's step that records which rows it touched, beside the step without it."""
    batch, count = (100, 5) if lab.quick else (10_000, 300)
    (many,) = lab.side_by_side(lambda: job("jobs_recording:steps", batch, count), repeats=3)
    what = f"recording: a step of Adagrad that writes {batch:,} rows x 64, beside the same without"
    yield cost(what, _figure(many, "recorded"), _figure(many, "plain"))
    yield Row("  a recorded row", seconds(_added(many).value / batch))
    if not lab.quick:
        (one,) = lab.side_by_side(lambda: job("jobs_recording:steps", 1, 10 * count), repeats=3)
        yield cost("  a step that writes one row", _figure(one, "recorded"), _figure(one, "plain"))
        yield Row("  a recorded step", _added(one))


def open_loop(lab: Lab) -> Iterator[Row]:
    """Predictions at fixed times while a delta is applied every second; each is of one position, bit for
    bit. Beside it, what bare writes of the same rows cost predictions, which then may mix.
    """
    source = followed(lab)
    duration = 2 if lab.quick else 10
    models = [source.model(lab.fresh(f"loaded-{base}"), base) for base in ("model", "mapped")]
    for model in models:
        job("followed:publish_all", model, *[source.changed] * duration)
    loops = [partial(job, "jobs_incremental:open_loop", model, source.rows, duration) for model in models]
    arguments = (source.plain, models[0], source.rows, duration)
    loops.append(partial(job, "jobs_incremental:open_loop_of_bare_writes", *arguments))
    *ours, bare = lab.side_by_side(*loops, repeats=5)
    what = f"predict, open loop, p99, {source.changed:,} rows"
    for kind, found in zip(("in memory", "mapped"), ours, strict=True):
        results = [sample.result for sample in found.samples]
        assert all(result["mixed"] == 0 and result["seen"] > 1 for result in results)
        responses = sum(len(result["idle"]) + len(result["busy"]) for result in results)
        said = f"applied each second, tables {kind}, beside idle (0 of {responses:,} responses mixed)"
        yield cost(f"{what} {said}", p99(found, "busy"), p99(found, "idle"), at_most=1.15)
        yield Row(
            "  what readers wait for: from the first write of an update to its last", _figure(found, "wait")
        )
    assert all(sample.result["seen"] > 1 for sample in bare.samples)
    said = "written each second by bare RestoreV2 + ResourceScatterUpdate, beside idle"
    yield cost(f"{what} {said}", p99(bare, "busy"), p99(bare, "idle"))


def p99(found: Medians, name: str) -> Quantity:
    """The p99 of all rounds' requests together: that of one round is of twenty requests, and jumps."""
    return seconds(float(np.percentile([*chain(*(sample.result[name] for sample in found.samples))], 99)))


def _figure(found: Medians, name: str) -> Quantity:
    """The median of a figure that jobs return."""
    return seconds(statistics.median(sample.result[name] for sample in found.samples))


def _added(found: Medians) -> Quantity:
    """What recording adds; less than nothing would be noise."""
    return seconds(max(0.0, _figure(found, "recorded").value - _figure(found, "plain").value))


def _followed(lab: Lab, source: Followed) -> Path:
    return source.model(lab.fresh("following"))


BENCHMARKS: tuple[Benchmark, ...] = (whole_command, diff, update, same_change, recording, open_loop)
