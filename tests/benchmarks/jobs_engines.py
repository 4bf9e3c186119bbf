"""What runs in processes of their own for `bench_engines`."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
import time
from collections.abc import Generator, Iterable
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

from exporter.bundle.move import Move, Segment
from exporter.catalog import Catalog, Extent, TensorRef
from exporter.jobs.engines.choose import choose_engine
from exporter.jobs.engines.local import LocalEngine
from exporter.jobs.execute import Outcome, Work, encode
from exporter.jobs.runner import Runner
from exporter.jobs.task import Input, Range, Receipt
from exporter.verify.checksum import Checksum
from exporter.verify.version_files import verify_bytes
from exporter.wire import crc32c
from exporter.wire.dtypes import DType
from tests.benchmarks.job import Timer

_MB = 1 << 20
STORE_BYTES_S = 20e6
"""What a connection to the store that sleeps gets."""
_PIECE = _MB // 2  # what comes at a time: a network does not hold everything back until the end


def idle(timer: Timer, engine: str, tasks: str) -> dict[str, float]:
    """Tasks that read nothing: seconds until the first is done, and for each of the others."""
    chosen = choose_engine(engine, 2)
    works = [encode(Checksum(name=str(n), ranges=()), "", keep=False) for n in range(int(tasks))]
    with timer:
        began = time.perf_counter()
        outcomes = chosen.run(works)
        next(outcomes)
        first = time.perf_counter() - began
        count = 1 + sum(1 for _ in outcomes)
    assert count == len(works)
    return {"first": first, "each": (timer.seconds - first) / (count - 1)}


class _Zeros:
    """An engine that knows the checksums of zeros."""

    name = "zeros"

    def run(self, works: Iterable[bytes]) -> Generator[bytes, None, None]:
        for work in works:
            task = msgspec.json.decode(msgspec.json.decode(work, type=Work).task, type=Checksum)
            read = tuple(_crc_of_zeros(each.size) for each in task.ranges)
            yield msgspec.json.encode(Outcome(Receipt(task.name, read)))


@cache
def _crc_of_zeros(size: int) -> int:
    if size <= _MB:
        return crc32c.extend(0, bytes(size))
    half = size // 2
    return crc32c.combine(_crc_of_zeros(half), _crc_of_zeros(size - half), size - half)


def terabyte(timer: Timer, directory: str, gigabytes: str) -> int:
    """Plan the checksums of a sparse checkpoint in ranges of 64 MB, and fold receipts; how many tasks."""
    size, count = 16 << 30, int(gigabytes) // 16
    shards = tuple(Path(directory, f"shard-{number}") for number in range(count))
    for shard in shards:
        shard.touch()
        os.truncate(shard, size)
    stored = crc32c.mask(_crc_of_zeros(size))
    tensors = {
        f"t{n}": TensorRef(f"t{n}", DType.FLOAT, (size // 4,), Extent(n, 0, size, stored))
        for n in range(count)
    }
    catalog = Catalog("", Path(directory, "c"), tensors, shards, (size,) * count)
    with timer:
        done = verify_bytes(catalog, runner=Runner(_Zeros(), task_bytes=64 * _MB))
    assert done.bytes_ == size * count
    return done.bytes_ // (64 * _MB)


def copy(timer: Timer, directory: str, megabytes: str) -> dict[str, float]:
    """Copy a file by tasks, with checksums of what is read and written, and by cp: CPU seconds and time."""
    source, size = Path(directory, "source"), int(megabytes) * _MB
    source.write_bytes(os.urandom(_MB) * int(megabytes))
    step = 64 * _MB
    works = []
    for start in range(0, size, step):
        wanted = Range(0, start, min(step, size - start))
        rows = wanted.size // 4
        segment = Segment("t", DType.FLOAT, DType.FLOAT, 1, (wanted,), False, (rows,), False)
        task = Move(name=f"part-{start}", inputs=(Input.of(source),), segments=(segment,))
        works.append(encode(task, f"{directory}/copied", keep=True))
    subprocess.run(["cp", source, f"{directory}/warm"], check=True)
    before, children = _cpu(resource.RUSAGE_SELF), _cpu(resource.RUSAGE_CHILDREN)
    with timer:
        outcomes = list(LocalEngine(2).run(works))
    ours = _cpu(resource.RUSAGE_SELF) - before
    assert all(b'"failure":null' in outcome for outcome in outcomes)
    began = time.perf_counter()
    subprocess.run(["cp", source, f"{directory}/by-cp"], check=True)
    took = time.perf_counter() - began
    return {"cpu": ours, "cp_cpu": _cpu(resource.RUSAGE_CHILDREN) - children, "cp_seconds": took}


def _cpu(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def sleeping_store(timer: Timer, workers: str, tasks: str) -> None:
    """Read objects of a store that gives each connection so many bytes a second and no more."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Sleeping)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "us-east-1",
    }
    size = 8 * _MB
    ranges = (Range(0, 0, size),)

    def works(count: int) -> list[bytes]:
        inputs = (Input("s3://bucket/object", size, '"tag"'),)
        return [
            encode(Checksum(name=str(n), inputs=inputs, ranges=ranges), "", keep=False) for n in range(count)
        ]

    list(LocalEngine(1).run(works(1)))
    with timer:
        outcomes = list(LocalEngine(int(workers)).run(works(int(tasks))))
    assert len({msgspec.json.decode(each)["receipt"]["read"][0] for each in outcomes}) == 1


class _Sleeping(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        size = last + 1 - first
        self.send_response_only(206)
        told = {
            "Content-Length": str(size),
            "Content-Range": f"bytes {first}-{last}/{8 * _MB}",
            "ETag": '"tag"',
            "Last-Modified": "Sun, 22 Nov 2026 00:00:00 GMT",
        }
        for name, value in told.items():
            self.send_header(name, value)
        self.end_headers()
        began = time.perf_counter()
        for start in range(0, size, _PIECE):
            stop = min(start + _PIECE, size)
            time.sleep(max(0.0, began + stop / STORE_BYTES_S - time.perf_counter()))
            self.wfile.write(_CONTENT[start:stop])

    def log_message(self, *rest: Any) -> None:
        """Say nothing."""


_CONTENT = memoryview(bytes(8 * _MB))
