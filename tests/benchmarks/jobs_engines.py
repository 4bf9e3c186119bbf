"""What runs in processes of their own for `bench_engines`."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Generator, Iterable
from functools import cache
from pathlib import Path
from statistics import median

import msgspec

from exporter.bundle.variables import Move
from exporter.catalog import Catalog, Extent, TensorRef
from exporter.jobs.execute import Outcome, Work, encode
from exporter.jobs.runner import LocalEngine, Runner, choose_engine
from exporter.jobs.shard_sections import MovedRows
from exporter.jobs.task import Input, Range, Receipt
from exporter.verify.version_files import Checksum, verify_bytes
from exporter.wire import crc32c
from exporter.wire.dtypes import DType
from tests.benchmarks.job import Timer

_MB = 1 << 20
_ROUNDS = 5  # of copies, after one that only warms the page cache


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
    assert done == size * count
    return done // (64 * _MB)


def copy(timer: Timer, directory: str, megabytes: str) -> dict[str, float]:
    """Copy a file by tasks, with checksums of what is read and written, and by cp: medians of turns."""
    source, size = Path(directory, "source"), int(megabytes) * _MB
    source.write_bytes(os.urandom(_MB) * int(megabytes))
    step = 64 * _MB
    works = []
    for start in range(0, size, step):
        wanted = Range(0, start, min(step, size - start))
        rows = wanted.size // 4
        segment = MovedRows("t", DType.FLOAT, DType.FLOAT, 1, (wanted,), False, (rows,), False)
        task = Move(name=f"part-{start}", inputs=(Input.of(source),), sections=(segment,))
        works.append(encode(task, f"{directory}/copied", keep=True))

    def by_tasks() -> None:
        outcomes = list(LocalEngine(2).run(works))
        assert all(b'"failure":null' in outcome for outcome in outcomes)

    def by_cp() -> None:
        subprocess.run(["cp", source, f"{directory}/by-cp"], check=True)

    ways = {"tasks": (by_tasks, resource.RUSAGE_SELF), "cp": (by_cp, resource.RUSAGE_CHILDREN)}
    rounds: list[dict[str, float]] = []
    for number in range(_ROUNDS + 1):
        figures: dict[str, float] = {}
        for name in sorted(ways, reverse=number % 2 == 0):
            shutil.rmtree(f"{directory}/copied", ignore_errors=True)
            Path(directory, "copied").mkdir()
            Path(directory, "by-cp").unlink(missing_ok=True)
            os.sync()  # nobody pays for what another has left to write
            run, who = ways[name]
            began, before = time.perf_counter(), _cpu(who)
            run()
            figures |= {f"{name}_seconds": time.perf_counter() - began, f"{name}_cpu": _cpu(who) - before}
        rounds.append(figures)
    return {name: median(each[name] for each in rounds[1:]) for name in rounds[0]}


def _cpu(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def sleeping_store(timer: Timer, address: str, workers: str, tasks: str) -> None:
    """Read objects of a store that gives each connection so many bytes a second and no more."""
    os.environ |= {
        "AWS_ENDPOINT_URL": address,
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
