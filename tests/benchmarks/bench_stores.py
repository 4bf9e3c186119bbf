"""Object stores: what is fetched for an export, beside a plain download of as many bytes; and how long people
wait where a store takes its time to answer.

The store is an emulator on the same processors, so that ratios say more than seconds.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from statistics import median

from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.transfer.items import local_items
from tests.benchmarks import data
from tests.benchmarks.bench_full_export import EXPORT_MODEL
from tests.benchmarks.data import Checkpoint
from tests.benchmarks.harness import Benchmark, Lab, Sample, command, job
from tests.benchmarks.rows import Row, bounded, bytes_, count, gain, seconds

_PART_BYTES = 8 << 20
_WAIT = 0.05
"""Seconds until a store answers: one in the same region takes 10 to 100 ms."""


def many_tensors(lab: Lab) -> Iterator[Row]:
    """A model of many small variables: they come together, not one by one."""
    variables = 50 if lab.quick else 10_000
    checkpoint = data.wide(lab, variables)
    yield from _beside_download(lab, checkpoint, f"{variables:,} tensors from a store", at_least=None)


def large_tables(lab: Lab) -> Iterator[Row]:
    """A third of a checkpoint's bytes: parts in parallel."""
    checkpoint = data.ranker(lab, "1.5 GB")
    yield from _beside_download(lab, checkpoint, "the weights of 1.5 GB from a store", at_least=0.7)


def _beside_download(lab: Lab, checkpoint: Checkpoint, what: str, *, at_least: float | None) -> Iterator[Row]:
    from tests.support.object_stores import new_bucket, s3_server

    with s3_server() as address:
        bucket = new_bucket(address)
        bucket.upload(checkpoint.prefix.parent, "train")
        environment = json.dumps(dict(bucket.environment))
        url = bucket.url(f"train/{checkpoint.prefix.name}")

        def ours() -> Sample:
            return job("jobs_stores:variables", environment, url, lab.fresh("variables"))

        kept = ours().result["bytes"]

        def stock() -> Sample:
            out = lab.fresh("downloaded")
            return job("jobs_stores:download", environment, bucket.name, "train", kept, out)

        exported, downloaded = lab.side_by_side(ours, stock, repeats=3)
    assert {sample.result for sample in downloaded.samples} == {kept}
    label = f"{what}, {bytes_(kept)}, against obstore's download of as many bytes"
    yield gain(label, exported.time, downloaded.time, at_least=at_least)
    requests = median(sample.result["requests"] for sample in exported.samples)
    shards = len(list(checkpoint.prefix.parent.glob("*.data-*")))
    yield bounded("  requests", count(requests), at_most=count(2 * shards + kept / _PART_BYTES))


def inspect(lab: Lab) -> Iterator[Row]:
    """A checkpoint of 1 TB in a store that takes 50 ms a request: its index tells all that is shown."""
    from tests.support.directory_store import BUCKET, directory_store

    checkpoint = data.terabyte(lab)
    with directory_store(checkpoint.prefix.parent.parent, _WAIT) as (environment, traffic):
        settings = [f"{name}={value}" for name, value in environment.items()]
        url = f"s3://{BUCKET}/{checkpoint.prefix.parent.name}"

        inspected = ["env", *settings, str(EXPORT_MODEL), "inspect", url, "--json"]
        told = json.loads(subprocess.run(inspected, check=True, stdout=subprocess.PIPE).stdout)
        shards = sum(path.stat().st_size for path in checkpoint.prefix.parent.glob("*.data-*"))
        assert (told["bytes"], told["tensor_count"]) == (shards, len(read_catalog(checkpoint.prefix).tensors))

        def ours() -> Sample:
            traffic.requests.clear()
            return command(*inspected)

        (found,) = lab.side_by_side(ours)
        yield bounded(
            f"inspect a checkpoint of {bytes_(shards)}, {_WAIT * 1000:.0f} ms a request",
            found.time,
            at_most=seconds(2),
        )
        yield bounded("  requests", count(len(traffic.requests)), at_most=count(5))
        fetched = sum(each for _, _, each in traffic.requests)
        yield bounded("  bytes that came", bytes_(fetched), at_most=bytes_(4e6))


def increment(lab: Lab) -> Iterator[Row]:
    """`--incr` where a thousand deltas are published, in the same store."""
    from tests.support.directory_store import BUCKET, directory_store
    from tests.support.many_deltas import merged_deltas
    from tests.support.remote_models import went_on

    deltas = 30 if lab.quick else 1000
    directory = lab.fresh("many-deltas")
    directory.mkdir()
    trainer = merged_deltas(directory, deltas)
    with directory_store(directory, _WAIT) as (environment, traffic):
        settings = [f"{name}={value}" for name, value in environment.items()]
        exported = [EXPORT_MODEL, "--ckpt-dir", trainer.directory, "--out", f"s3://{BUCKET}/model", "--incr"]

        def ours() -> Sample:
            went_on(trainer, trainer.step + 10)
            traffic.requests.clear()
            return command("env", *settings, *exported, "--quiet")

        (found,) = lab.side_by_side(ours)
        assert local_items(directory / "model")[-1].manifest.position == trainer.step
        what = f"export-model --incr to a model of {deltas:,} deltas, {_WAIT * 1000:.0f} ms a request"
        yield bounded(what, found.time, at_most=seconds(4))
        yield bounded("  requests", count(len(traffic.requests)), at_most=count(40))


BENCHMARKS: tuple[Benchmark, ...] = (many_tensors, large_tables, inspect, increment)
