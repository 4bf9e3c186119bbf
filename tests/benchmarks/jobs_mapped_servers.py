"""What runs in processes of their own for `bench_mapped`: servers, and the load of a huge table."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from exporter import export
from exporter.catalog import Extent, TensorRef
from exporter.checkpoint.bundle_writer import encode_index, index_path, shard_path
from exporter.options import ExportRequest, Updates
from exporter.wire.crc32c import mask, zeros_crc
from exporter.wire.dtypes import DType
from serving.client import ModelClient
from serving.status import VersionState
from tests.benchmarks.job import Timer
from tests.support.server_processes import running

WIDTH = 64
_ROW_BYTES = 4 * WIDTH
_PAGE = 4096
CLIENTS, _REQUEST_EVERY_S, _BATCH = 4, 0.02, 64
"""Each client asks by a clock, 200 times a second in all, and does not slow down with the server."""
_KINDS: dict[str, dict[str, Any]] = {
    "restored": {},
    "mapped": {"map_tables": True},
    "base": {"updates": Updates()},
    "base-mapped": {"map_tables": True, "updates": Updates()},
}


def publish_sparse(timer: Timer, directory: str, rows: str) -> None:
    """Publish a table of zeros that takes no room on the disk, and a model that has next to none of it.

    The trainer's shard is the table alone, a sparse file: it is linked, and nobody reads it for that. The
    checksum of so many zeros is calculated.
    """
    for name, count in (("huge", int(rows)), ("none", 1)):
        prefix = Path(directory, name, "train", "model.ckpt-1")
        prefix.parent.mkdir(parents=True)
        size = count * _ROW_BYTES
        with shard_path(prefix, 0, 1).open("wb") as file:
            file.truncate(size)
        table = TensorRef("table", DType.FLOAT, (count, WIDTH), Extent(0, 0, size, mask(zeros_crc(size))))
        index_path(prefix).write_bytes(encode_index([table], 1))
        for kind in ("mapped", "base-mapped"):
            _publish(prefix, Path(directory, name, kind), kind, count)


def publish_pairs(timer: Timer, directory: str, rows: str) -> None:
    """Write a checkpoint with one table, and two versions of it of each kind; the second one lies aside."""
    from exporter.checkpoint.tensor_bundle import BundleWriter

    prefix = Path(directory, "train", "model.ckpt-1")
    prefix.parent.mkdir()
    with BundleWriter(prefix) as writer:
        block = np.random.default_rng(0).uniform(-1, 1, (1 << 14, WIDTH)).astype(np.float32)
        writer.add_chunks("table", DType.FLOAT, (int(rows), WIDTH), (block for _ in range(int(rows) >> 14)))
    for kind in _KINDS:
        model = Path(directory, kind)
        _publish(prefix, model, kind, int(rows))
        second = _publish(prefix, model, kind, int(rows), "2")
        second.rename(_aside(second))


def _publish(prefix: Path, model: Path, kind: str, rows: int, version: str = "1") -> Path:
    import tensorflow as tf

    def lookup() -> Any:
        ids = tf.compat.v1.placeholder(tf.int64, [None], "ids")
        table = tf.compat.v1.get_variable("table", [rows, WIDTH], use_resource=True)
        return {"ids": ids}, {"rows": tf.gather(table, ids)}

    options = {**_KINDS[kind], **({} if "updates" in _KINDS[kind] else {"version": version})}
    return export(ExportRequest(prefix, model, model=lookup, again=True, **options)).published.path


def _aside(version: Path) -> Path:
    return version.with_name(f".{version.name}")


def load_alone(timer: Timer, version: str, rows: str, allocator: str = "") -> dict[str, Any]:
    """Load, and ask for the first and the last row; by how many bytes anonymous memory grew.

    With the `allocator` "system" TensorFlow takes memory from the C library, as without oneDNN.
    """
    if allocator == "system":
        os.environ["TF_ONEDNN_USE_SYSTEM_ALLOCATOR"] = "1"
    import tensorflow as tf

    from serving.loader import load

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        session.run(tf.constant(0))  # TensorFlow has started
    before = anonymous_bytes("self")
    with timer:
        model = load(Path(version))
    with closing(model):
        signature = model.signatures["serving_default"]
        asked = {signature.inputs["ids"].name: np.array([0, int(rows) - 1])}
        (found,) = model.run(asked, [signature.outputs["rows"].name])
        return {"rows": found.tolist(), "anonymous": anonymous_bytes("self") - before}


def anonymous_bytes(process: int | str) -> int:
    """The anonymous memory of a process that is resident."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def proportional_bytes(process: int) -> int:
    """The memory of a process, where each page counts by how many processes have it."""
    rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
    return int(rollup.partition("\nPss:")[2].split()[0]) << 10


@contextmanager
def served(model: Path) -> Iterator[tuple[int, str]]:
    """`serve-model run`: its process and its address."""
    with running(model) as process:
        assert process.stdout is not None
        yield process.pid, process.stdout.readline().split(" on ")[1].strip()


def servers_of_a_host(timer: Timer, model: str, rows: str, servers: str) -> dict[str, Any]:
    """So many servers of one model, each asked for a row of every page: the memory of all together."""
    ids = np.arange(0, int(rows), _PAGE // _ROW_BYTES)
    answers = set()
    with ExitStack() as stack:
        found = [stack.enter_context(served(Path(model))) for _ in range(int(servers))]
        with timer:
            for _, address in found:
                digest = hashlib.sha256()
                with ModelClient(address, Path(model).name, deadline_s=60) as client:
                    for start in range(0, len(ids), _PAGE):
                        asked = {"ids": ids[start : start + _PAGE]}
                        digest.update(client.predict(asked).outputs["rows"].tobytes())
                answers.add(digest.hexdigest())
        return {
            "answers": sorted(answers),
            "together": sum(proportional_bytes(process) for process, _ in found),
            "anonymous": max(anonymous_bytes(process) for process, _ in found),
        }


@dataclass
class Asked:
    """When each request was due, and how long after that its answer was there."""

    latencies: list[tuple[float, float]] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    answers: set[bytes] = field(default_factory=set)

    def follow(self, address: str, model: str, stop: threading.Event) -> None:
        """Ask for the same rows until told to stop."""
        asked, due = {"ids": np.arange(_BATCH)}, time.monotonic()
        with ModelClient(address, model, deadline_s=60) as client:
            while not stop.is_set():
                due += _REQUEST_EVERY_S
                time.sleep(max(0.0, due - time.monotonic()))
                found = client.predict(asked)
                self.latencies.append((due, time.monotonic() - due))
                self.versions.add(found.version)
                self.answers.add(found.outputs["rows"].tobytes())


def swap(timer: Timer, model: str, window_s: str) -> dict[str, Any]:
    """A server gets another version under load: p99 and peak anonymous memory before, and from then on."""
    place, window = Path(model), float(window_s)
    first, aside = place / "1", _aside(place / "2")
    second = aside.with_name("2")
    stop, asked = threading.Event(), [Asked() for _ in range(CLIENTS)]
    samples: list[tuple[float, int]] = []
    with served(place) as (process, address), ModelClient(address, place.name, deadline_s=60) as client:

        def watch() -> None:
            while not stop.is_set():
                samples.append((time.monotonic(), anonymous_bytes(process)))
                time.sleep(0.005)

        threads = [threading.Thread(target=one.follow, args=(address, place.name, stop)) for one in asked]
        threads.append(threading.Thread(target=watch))
        for thread in threads:
            thread.start()
        try:
            time.sleep(window)  # the first calls of a server are slow
            begin = time.monotonic()
            time.sleep(window)
            with timer:
                swapped = time.monotonic()
                aside.rename(second)
                while (
                    client.status()[0].version != 2 or client.status()[0].state is not VersionState.AVAILABLE
                ):
                    time.sleep(0.02)
            time.sleep(max(0.0, swapped + window - time.monotonic()))
            end = time.monotonic()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    second.rename(aside)
    assert first.exists()
    (answer,) = set().union(*(one.answers for one in asked))
    assert set().union(*(one.versions for one in asked)) == {1, 2}
    latencies = [each for one in asked for each in one.latencies]
    return {
        "answer": hashlib.sha256(answer).hexdigest(),
        "p99": [p99_of(latencies, begin, swapped), p99_of(latencies, swapped, end)],
        "anonymous": [_peak(samples, begin, swapped), _peak(samples, swapped, end)],
    }


def p99_of(latencies: list[tuple[float, float]], begin: float, end: float) -> float:
    """The p99 of the answers that were due from `begin` to `end`."""
    return float(np.quantile([took for due, took in latencies if begin <= due < end], 0.99))


def _peak(samples: list[tuple[float, int]], begin: float, end: float) -> int:
    return max(size for at, size in samples if begin <= at < end)
