"""What runs in processes of their own for `bench_budget`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from exporter.delta.deviation import Tolerance
from exporter.delta.format import ChangeKind, Rows, Schema, ServedVariable
from exporter.delta.residual import Waiting
from exporter.delta.tolerance import divide
from exporter.options import DeltaDtype, ExportRequest
from exporter.pipeline.incremental import ExportedDelta, export_incremental
from exporter.wire.dtypes import DType
from tests.benchmarks import streams
from tests.benchmarks.job import Timer
from tests.benchmarks.streams import Array, Learner, Stream, intervals, loss
from tests.support import logs
from tests.support.logs import Trainer

SHARES = (0.01, 0.05, 0.1, 0.2, 0.33, 1.0)


class Served:
    """What servers hold, in memory, as the published state that changes are divided by."""

    def __init__(self, values: Mapping[str, Array]) -> None:
        self.values = {name: value.copy() for name, value in values.items()}

    def check(self, names: Iterable[str]) -> None:
        """Nothing is stored."""

    def is_remote(self, name: str) -> bool:
        """Nothing lies in a store."""
        return False

    def rows_at(self, name: str, ids: Array) -> Array:
        """Rows of a table."""
        return self.values[name][ids]


def replay(timer: Timer, name: str, package: str, intervals_: str, repeats: str) -> dict[str, Any]:
    """Serve a stream under budgets: bytes, and which part of the gain of full freshness is kept.

    Each interval's events are answered by what was served when it began; then they are trained on. The
    gain is that in log-loss against the base, which stays as it is.
    """
    stream: Stream = streams.synthetic() if name == "synthetic" else getattr(streams, name)(Path(package))
    learner, spans = Learner(stream), list(intervals(stream, int(intervals_)))
    for _ in range(int(repeats)):
        learner.train(0, spans[0][0])
    shapes = stream.tables.items()
    schema = Schema.of(ServedVariable(name, DType.FLOAT, shape, ChangeKind.TABLE) for name, shape in shapes)
    policies = [(share, dtype) for share in SHARES for dtype in (None, DeltaDtype.INT8)]
    served = {policy: Served(learner.values) for policy in policies}
    lucky, base = {share: Served(learner.values) for share in SHARES[:-1]}, Served(learner.values)
    losses: dict[Any, float] = dict.fromkeys([*policies, *lucky, "base"], 0.0)
    sent: dict[Any, int] = dict.fromkeys([*policies, *lucky], 0)
    rng = np.random.default_rng(0)
    with timer, tempfile.TemporaryDirectory() as scratch:
        for before, after in pairwise(spans):
            touched = learner.train(*before)
            for policy in policies:
                share, dtype = policy
                sent[policy] += _send(served[policy], learner, touched, schema, share, dtype, Path(scratch))
                losses[policy] += loss(served[policy].values, stream, *after)
            for share, state in lucky.items():
                sent[share] += _send_any(state, learner, touched, share, rng)
                losses[share] += loss(state.values, stream, *after)
            losses["base"] += loss(base.values, stream, *after)
    gain = losses["base"] - losses[1.0, None]
    whole = sent[1.0, None]

    def figures(policy: Any) -> dict[str, float]:
        return {"kept": (losses["base"] - losses[policy]) / gain, "fewer": whole / max(1, sent[policy])}

    return {
        "events": spans[-1][1] - spans[1][0],
        "rows": sum(rows for rows, _ in stream.tables.values()),
        "gain": gain / (spans[-1][1] - spans[1][0]),
        "ranked": [
            {"share": share, "dtype": dtype or "float32", **figures((share, dtype))}
            for share, dtype in policies
        ],
        "random": [{"share": share, **figures(share)} for share in lucky],
    }


def _send(
    served: Served,
    learner: Learner,
    touched: Mapping[str, Array],
    schema: Schema,
    share: float,
    dtype: DeltaDtype | None,
    scratch: Path,
) -> int:
    """Bring rows up to date, up to a share of the bytes of the touched ones; how many bytes that takes."""
    changes = {name: _differing(served, learner, name) for name in touched}
    most = sum(len(ids) * _row_bytes(learner.values[name], dtype) for name, ids in touched.items())
    fixed = divide({}, served, schema, Tolerance(room=0), scratch, Waiting()).used  # type: ignore[arg-type]
    assert fixed is not None
    room = fixed.due + int(most * share) if share < 1 else 1 << 60
    found = divide(changes, served, schema, Tolerance(0.0, dtype, room), scratch, Waiting())  # type: ignore[arg-type]
    for name, change in found.changes.items():
        assert isinstance(change, Rows)
        served.values[name][change.ids] = np.asarray(change.values)
    assert found.used is not None and found.used.sent <= room
    return found.used.sent - fixed.due


def _differing(served: Served, learner: Learner, name: str) -> Rows:
    ids = np.flatnonzero((served.values[name] != learner.values[name]).any(axis=1))
    return Rows(ids, learner.values[name][ids])


def _send_any(
    served: Served, learner: Learner, touched: Mapping[str, Array], share: float, rng: np.random.Generator
) -> int:
    """Bring rows up to date that chance chooses, of as many bytes."""
    room = share * sum(len(ids) * _row_bytes(learner.values[name], None) for name, ids in touched.items())
    rows = [(name, row) for name in touched for row in _differing(served, learner, name).ids.tolist()]
    used = 0
    for place in rng.permutation(len(rows)).tolist():
        name, row = rows[place]
        size = _row_bytes(learner.values[name], None)
        if used + size > room:
            break
        used += size
        served.values[name][row] = learner.values[name][row]
    return used


def _row_bytes(values: Array, dtype: DeltaDtype | None) -> int:
    return 8 + (4 * values.shape[1] if dtype is None else values.shape[1] + 4)


def prepare(timer: Timer, directory: str, rows: str, changed: str) -> None:
    """A trainer with a table of rows of 64 floats, a base of it, and an increment."""
    logs.TABLES, logs.DENSE = {"users": (int(rows), 64)}, {}
    trainer = Trainer(Path(directory) / "train")
    trainer.values = {"net/users": trainer.values["net/users"]}
    trainer.save()
    logs.publish_base(trainer, logs.Serving(), Path(directory) / "model")
    ids = np.sort(trainer.rng.choice(int(rows), int(changed), replace=False))
    moves = trainer.rng.normal(size=(len(ids), 64)) * trainer.rng.exponential(size=(len(ids), 1))
    trainer.values["net/users"][ids] += moves.astype(np.float32)
    trainer.touched, trainer.step = {"net/users": set(ids.tolist())}, trainer.step + 1
    trainer.increment()


def export(timer: Timer, train: str, model: str, budget: str = "") -> dict[str, Any]:
    """Publish the newest increment, within a budget if there is one; the processor time of the process."""
    asked = ExportRequest(Path(train), Path(model), delta_budget=budget or None)
    with timer:
        done = export_incremental(asked)
    assert isinstance(done, ExportedDelta) and done.published is not None
    size = sum(file.bytes_ for file in done.published.manifest.files)
    return {"rows": done.rows, "bytes": size, "processor": time.process_time()}
