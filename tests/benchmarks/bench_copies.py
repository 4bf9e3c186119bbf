"""A new base in a bucket: what a copy fetches of it, and what a push uploads; beside the base's bytes.

`--scale 4` takes a base of 4 GiB.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exporter.pipeline.rebase import rebase
from tests.benchmarks.harness import Benchmark, Lab, Sample, job
from tests.benchmarks.rows import Row, bounded, bytes_, cost, seconds
from tests.support.directory_store import BUCKET, directory_store
from tests.support.http_proxy import Traffic
from tests.support.large_logs import large_log
from tests.support.table_versions import publish_tables, some_tables

_URL = f"s3://{BUCKET}/model"


@contextmanager
def _merged(lab: Lab) -> Iterator[tuple[Path, Path, str, Traffic]]:
    """A merged base, a copy that has all but that, the environment of its store, and what is asked there."""
    rows, deltas = (1 << 15, 4) if lab.quick else (lab.scale << 22, 10)
    directory = lab.fresh("copies")
    directory.mkdir()
    lab.say(f"making a log of {bytes_(rows * 256)}")
    model = large_log(directory, rows, deltas, rows // 100 // deltas)
    shutil.rmtree(directory / "train")
    shutil.copytree(model, copy := directory / "copy")
    published = rebase(model)
    assert published is not None
    (store := directory / "store").mkdir()
    model.rename(store / "model")
    with directory_store(store) as (environment, traffic):
        yield store / "model" / published.path.name, copy, json.dumps(environment), traffic
    shutil.rmtree(directory)


def _size(base: Path) -> int:
    return sum(path.stat().st_size for path in base.rglob("*") if path.is_file())


def merged_base(lab: Lab) -> Iterator[Row]:
    """A base that was merged after a hundredth of the rows changed, in a copy that has base and deltas."""
    with _merged(lab) as (base, copy, environment, traffic):

        def ours() -> Sample:
            traffic.requests.clear()
            return job("jobs_copies:take", environment, _URL, copy, base.name)

        def stock() -> Sample:
            return job("jobs_copies:cp", base, lab.fresh("copied"))

        taken, copied = lab.side_by_side(ours, stock, repeats=3)
        came = sum(each for command, _, each in traffic.requests if command == "GET")
        subprocess.run(["diff", "-r", base, copy / base.name], check=True)
        size = _size(base)
    what = f"a merged base of {bytes_(size)}, 1 % of the rows changed: a copy makes it"
    yield bounded(f"{what}, bytes that came", bytes_(came), at_most=bytes_(size / 100))
    yield cost("  time until it is in place, against cp of its bytes", taken.time, copied.time, at_most=1.5)


def beside_a_server(lab: Lab) -> Iterator[Row]:
    """A server on two processors is asked by a clock, beside nothing and beside a copy that merges."""
    rounds, window_s = (1, 1) if lab.quick else (5, 10)
    rows = 1 << (14 if lab.quick else 20)
    pairs = lab.once("served", lambda place: job("jobs_mapped_servers:publish_pairs", place, rows))
    with _merged(lab) as (base, copy, environment, _):
        size = _size(base)
        for workers in (1, 2):
            arguments = (environment, _URL, copy, base.name, pairs / "restored", workers, rounds, window_s)
            found = job("jobs_copies:beside", *arguments).result
            subprocess.run(["diff", "-r", base, copy / base.name], check=True)
            idle, merging = found["p99"]
            what = f"p99 of a server while a copy merges {bytes_(size)} beside it, --workers {workers}"
            yield cost(what, seconds(merging), seconds(idle))
            yield Row("  seconds until the base was in place", seconds(found["took"]))


def one_table_of_ten(lab: Lab) -> Iterator[Row]:
    """A plain version of which one table of ten has changed."""
    directory, tables = lab.fresh("pushed"), some_tables(rows=1 << (10 if lab.quick else 15))
    model = directory / "model"
    publish_tables(model, tables, step=1)
    with directory_store(directory / "store") as (environment, _):
        first = job("jobs_copies:send", json.dumps(environment), model, _URL).result
        tables["table3"] += 1
        publish_tables(model, tables, step=2)
        second = job("jobs_copies:send", json.dumps(environment), model, _URL).result
    what = f"push of a version of {bytes_(first)}, one table of ten changed: bytes uploaded"
    yield bounded(what, bytes_(second), at_most=bytes_(first * 0.11))


BENCHMARKS: tuple[Benchmark, ...] = (merged_base, beside_a_server, one_table_of_ten)
