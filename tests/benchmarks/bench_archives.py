"""Archives, whose bytes cannot be linked: how fast they stream into a bundle, and in how much memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.benchmarks.data import ROW_BYTES, SMALL_ROWS
from tests.benchmarks.harness import Benchmark, Lab, Sample, command, job
from tests.benchmarks.rows import Row, bounded, bytes_, gain

ARCHIVES = {
    "model.weights.h5": "Keras .weights.h5",
    "model.keras": "Keras .keras",
    "model.npz": "npz",
    "model.ckpt-1": "TensorFlow V1",
}
_TINY_ROWS = 100
_STREAMED_BYTES = 64 << 20
_WHOLE_TENSORS = 3
"""How often a tensor of V1 is in memory: TensorFlow's reader parses it out of a block into a tensor."""


def archives(lab: Lab) -> Iterator[Row]:
    """One model in each form, read and written as a bundle, beside `cp` of the file."""
    rows = SMALL_ROWS // 64 if lab.quick else SMALL_ROWS * 8
    tiny, full = _saved(lab, "archives-tiny", _TINY_ROWS), _saved(lab, "archives", rows)
    job("jobs_archives:check", full, rows, *ARCHIVES)
    table = rows * ROW_BYTES
    for name, label in ARCHIVES.items():
        ours, stock = lab.side_by_side(
            partial(_convert, lab, tiny / name, full / name),
            partial(_copy, lab, full / name),
            repeats=3,
        )
        (stored,) = {sample.result["bytes"] for sample in ours.samples}
        assert stored >= table
        yield gain(f"{label}, {bytes_(stored)}, into a bundle, against cp", ours.time, stock.time)
        own = max(sample.peak_bytes - sample.result["peak_before"] for sample in ours.samples)
        limit = _STREAMED_BYTES + (_WHOLE_TENSORS * table if name == "model.ckpt-1" else 0)
        yield bounded("  peak memory beyond imports", bytes_(own), at_most=bytes_(limit))


def _saved(lab: Lab, name: str, rows: int) -> Path:
    return lab.once(name, lambda directory: job("jobs_archives:save", directory, rows))


def _convert(lab: Lab, tiny: Path, archive: Path) -> Sample:
    return job("jobs_archives:convert", tiny, archive, lab.fresh("converted"))


def _copy(lab: Lab, archive: Path) -> Sample:
    return command("cp", archive, lab.fresh("copied"))


BENCHMARKS: tuple[Benchmark, ...] = (archives,)
