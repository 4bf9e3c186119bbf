"""A new base in a bucket: what a copy fetches of it, and what a push uploads; beside the base's bytes."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator

from exporter.pipeline.rebase import rebase
from tests.benchmarks.harness import Benchmark, Lab, Sample, job
from tests.benchmarks.rows import Row, bounded, bytes_, cost
from tests.support.directory_store import BUCKET, directory_store
from tests.support.large_logs import large_log
from tests.support.table_versions import publish_tables, some_tables

_URL = f"s3://{BUCKET}/model"


def merged_base(lab: Lab) -> Iterator[Row]:
    """A base that was merged after a hundredth of the rows changed, in a copy that has base and deltas."""
    rows, deltas = (1 << 15, 4) if lab.quick else (1 << 22, 10)
    directory = lab.fresh("copies")
    directory.mkdir()
    model = large_log(directory, rows, deltas, rows // 100 // deltas)
    shutil.copytree(model, directory / "copy")
    published = rebase(model)
    assert published is not None
    base = published.path
    size = sum(path.stat().st_size for path in base.rglob("*") if path.is_file())
    shutil.copytree(model, directory / "store/model")
    with directory_store(directory / "store") as (environment, traffic):

        def ours() -> Sample:
            traffic.requests.clear()
            return job("jobs_copies:take", json.dumps(environment), _URL, directory / "copy", str(base.name))

        def stock() -> Sample:
            return job("jobs_copies:cp", base, lab.fresh("copied"))

        taken, copied = lab.side_by_side(ours, stock, repeats=3)
        came = sum(each for command, _, each in traffic.requests if command == "GET")
    what = f"a merged base of {bytes_(size)}, 1 % of the rows changed: a copy makes it"
    yield bounded(f"{what}, bytes that came", bytes_(came), at_most=bytes_(size / 100))
    yield cost("  time until it is in place, against cp of its bytes", taken.time, copied.time, at_most=1.5)
    subprocess.run(["diff", "-r", base, directory / "copy" / base.name], check=True)


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


BENCHMARKS: tuple[Benchmark, ...] = (merged_base, one_table_of_ten)
