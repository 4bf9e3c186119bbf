"""What runs in processes of their own for `bench_mapped`."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from exporter import export
from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.delta.format import Rows
from exporter.delta.spans import Span
from exporter.options import DataMode, ExportRequest, Updates
from exporter.publish.commit import Staging
from exporter.publish.delta_log import read_log
from exporter.publish.delta_publication import Publication, publish_changes
from exporter.publish.manifest import DeltaOrigin
from tests.benchmarks.job import Timer

WIDTH = 64
_OPTIONS: dict[str, dict[str, Any]] = {
    "restored": {},
    "mapped": {"map_tables": True},
    "bfloat16": {"casts": ("bfloat16",)},
    "int8": {"casts": ("int8",)},
    "int8-mapped": {"casts": ("int8",), "map_tables": True},
}
_BASES: dict[str, dict[str, Any]] = {"base": {}, "base-mapped": {"map_tables": True}}
_CHANGED_AT = 10
"""One row of so many changes."""


def publish(timer: Timer, directory: str, rows: str) -> None:
    """Write a checkpoint with one table, and a version of each kind."""
    import tensorflow as tf

    def lookup() -> Any:
        ids = tf.compat.v1.placeholder(tf.int64, [None], "ids")
        table = tf.compat.v1.get_variable("table", [int(rows), WIDTH], use_resource=True)
        return {"ids": ids}, {"rows": tf.gather(table, ids)}

    train = Path(directory, "train")
    train.mkdir()
    with BundleWriter(train / "model.ckpt-1") as writer:
        block = np.random.default_rng(0).uniform(-1, 1, (1 << 14, WIDTH)).astype(np.float32)
        blocks = (block for _ in range(int(rows) >> 14))
        writer.add_chunks("table", _float(), (int(rows), WIDTH), blocks)
    for kind, options in _OPTIONS.items():
        out = Path(directory, kind)
        export(
            ExportRequest(
                train / "model.ckpt-1", out, model=lookup, version="1", data=DataMode.COMPACT, **options
            )
        )
    for kind, options in _BASES.items():
        asked = {
            "model": lookup,
            "data": DataMode.COMPACT,
            "updates": Updates(),
            "no_warmup": True,
            **options,
        }
        done = export(ExportRequest(train / "model.ckpt-1", Path(directory, kind), **asked))
        ids = np.arange(0, int(rows), _CHANGED_AT)
        values = np.tile(np.arange(WIDTH, dtype=np.float32), (len(ids), 1))
        write_changes(done.published.path.parent, {"table": Rows(ids, values)})


def write_changes(model: Path, changes: Any) -> None:
    """Publish changes as the delta after a base."""
    log = read_log(model)
    at = log.at.position
    with Staging(model) as staging:
        what = Publication.of(log, Span(at, at + 1), 2, DeltaOrigin.INCREMENTS, log.trained)
        publish_changes(log, staging, changes, what, last=at)


def _float() -> Any:
    from exporter.wire.dtypes import DType

    return DType.FLOAT


def serve(timer: Timer, version: str, rows: str, updated: str = "") -> dict[str, Any]:
    """Load; the first row, by how many bytes anonymous memory grew, and the processor time of lookups."""
    import tensorflow as tf

    from serving.loader import load

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        session.run(tf.constant(0))  # TensorFlow has started
    before = _anonymous_bytes()
    with timer:
        model = load(Path(version))
    with closing(model):
        update = _update(model) if updated else 0.0
        first = _ask(model, np.zeros(1, np.int64))[0].tolist()
        grown = _anonymous_bytes() - before
        times = {str(ids): _call(model, int(rows), ids) for ids in (64, 1_000, 100_000)}
    return {"row": first, "anonymous": grown, "lookups": times, "update": update}


def _update(model: Any) -> float:
    """Apply what is published; the seconds that it takes."""
    signature = model.signatures["incremental_update"]
    fetched = signature.outputs["position"].name, signature.outputs["rows"].name
    start = time.perf_counter()
    position, rows = model.run({signature.inputs["up_to"].name: np.array([-1])}, fetched)
    seconds = time.perf_counter() - start
    assert rows[0] > 0, position
    return seconds


def _call(model: Any, rows: int, ids: int) -> float:
    """The processor time of a call, of all threads: what a server's cores are busy for."""
    rng, calls = np.random.default_rng(1), 40 if ids > 10_000 else 2_000
    asked = [rng.integers(0, rows, ids) for _ in range(8)]
    for each in asked:
        _ask(model, each)
    start = time.process_time()
    for number in range(calls):
        _ask(model, asked[number % len(asked)])
    return (time.process_time() - start) / calls


def _ask(model: Any, ids: Any) -> Any:
    signature = model.signatures["serving_default"]
    (answer,) = model.run({signature.inputs["ids"].name: ids}, [signature.outputs["rows"].name])
    return answer


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10
