"""What runs in processes of their own for `bench_mapped`."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
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


_EXPONENT = 1.05
_HOT_SHARE = 10
"""One row of so many is hot, and one byte of so many fits into memory."""
_ASKED = 64


def publish_hot(timer: Timer, directory: str, rows: str) -> None:
    """Write a checkpoint with one table, and versions that map it, without and with hot rows behind it."""
    import tensorflow as tf

    def lookup() -> Any:
        ids = tf.compat.v1.placeholder(tf.int64, [None], "ids")
        table = tf.compat.v1.get_variable("table", [int(rows), WIDTH], use_resource=True)
        return {"ids": ids}, {"rows": tf.gather(table, ids)}

    place = Path(directory)
    with BundleWriter(place / "model.ckpt-1") as writer:
        blocks = (
            np.random.default_rng(number).uniform(-1, 1, (1 << 14, WIDTH)).astype(np.float32)
            for number in range(int(rows) >> 14)
        )
        writer.add_chunks("table", _float(), (int(rows), WIDTH), blocks)
    hot = place / "hot.npy"
    np.save(hot, _by_popularity(int(rows))[: int(rows) // _HOT_SHARE])
    for kind, options in {"mapped": {}, "hot": {"hot_rows": {"table": str(hot)}}}.items():
        asked: dict[str, Any] = {
            "model": lookup,
            "map_tables": True,
            "data": DataMode.COMPACT,
            "version": "1",
        }
        export(ExportRequest(place / "model.ckpt-1", place / kind, **asked, **options))


def _by_popularity(rows: int) -> Any:
    return np.random.default_rng(0).permutation(rows)


def ask_popular(
    timer: Timer, version: str, rows: str, warm: str, calls: str, pages: str = ""
) -> dict[str, Any]:
    """Ask for popular rows with memory for a tenth of the table; what the disk had to read for that.

    `limited` is False, and nothing is measured, where this process may not limit its memory. With `pages`
    the kernel reads one page at a miss, whatever the device's read-ahead is.
    """
    from serving.loader import load

    files = sorted(Path(version).glob("variables/*.data-*"))
    popular, chances = _by_popularity(int(rows)), np.cumsum(np.arange(1.0, int(rows) + 1) ** -_EXPONENT)
    rng = np.random.default_rng(7)

    def asked() -> Any:
        return popular[np.searchsorted(chances, rng.random(_ASKED) * chances[-1])]

    with closing(load(Path(version))) as model:
        _ask(model, np.zeros(_ASKED, np.int64))
        for file in files:  # what is read from now on is counted, and charged to the group
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if pages:
            _read_by_pages(files)
        room = max(16 << 20, int(rows) * WIDTH * 4 // _HOT_SHARE)
        with limited_memory(room) as is_limited:
            if not is_limited:
                return {"limited": False}
            for _ in range(int(warm)):
                _ask(model, asked())
            times, faults, size, checked = [], _major_faults(), _bytes_read(), 0.0
            with timer:
                for _ in range(int(calls)):
                    ids = asked()
                    start = time.perf_counter()
                    answer = _ask(model, ids)
                    times.append(time.perf_counter() - start)
                    checked += float(np.abs(answer).sum(dtype=np.float64))
            faults, size = _major_faults() - faults, _bytes_read() - size
    p50, p99 = np.percentile(times, [50, 99]).tolist()
    lookups = int(calls) * _ASKED
    return {
        "limited": True, "sum": checked, "p50": p50, "p99": p99,
        "faults": faults / lookups, "read": size / lookups,
    }  # fmt: skip


@contextmanager
def limited_memory(size: int) -> Iterator[bool]:
    """Limit what this process takes anew, pages of files included; False if the system does not let it."""
    group = f"export-model-bench-{os.getpid()}"
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        place = Path(root, group)
        try:
            place.mkdir()
        except OSError:
            continue
        try:
            (place / limit).write_text(str(size))
            (place / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            place.rmdir()
            continue
        try:
            yield True
        finally:
            Path(root, "cgroup.procs").write_text(str(os.getpid()))
            place.rmdir()
        return
    yield False


_MADV_RANDOM = 1


def _read_by_pages(files: Collection[Path]) -> None:
    """Tell the kernel that this process reads what it maps of the files at random."""
    advise = ctypes.CDLL(None, use_errno=True).madvise
    names = {str(file.resolve()) for file in files}
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, *_, name = line.split(maxsplit=5)
        if name in names:
            start, end = (int(text, 16) for text in where.split("-"))
            failed = advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_RANDOM)
            assert not failed


def _major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().partition("read_bytes: ")[2].split()[0])
