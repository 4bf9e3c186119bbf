"""What a client waits for: the model server's share of a prediction."""

from __future__ import annotations

from collections.abc import Iterator

from tests.benchmarks import data
from tests.benchmarks.harness import Benchmark, Lab, job
from tests.benchmarks.rows import Row, cost


def latency(lab: Lab) -> Iterator[Row]:
    """One client, one call at a time: the median call, and the same bits."""
    yield _latency(lab, 64)
    if not lab.quick:
        yield _latency(lab, 1)


def _latency(lab: Lab, batch: int) -> Row:
    checkpoint = data.ranker(lab, "100 MB")
    arguments = (data.published(lab, checkpoint), checkpoint.rows, batch, 50 if lab.quick else 2000)
    ours, bare = lab.side_by_side(
        lambda: job("jobs_predict:through_grpc", *arguments),
        lambda: job("jobs_predict:session_run", *arguments),
        repeats=3,
    )
    assert {sample.result for sample in ours.samples} == {sample.result for sample in bare.samples}
    return cost(f"predict over gRPC, batch {batch}, p50, against Session.run", ours.time, bare.time)


def first_calls(lab: Lab) -> Iterator[Row]:
    """What the first call of a signature takes where a version takes deltas, beside one that does not."""
    tables = 8 if lab.quick else 100
    models = {
        "the ranker": data.ranker(lab, "100 MB"),
        f"{tables} tables": data.columns(lab, tables),
    }
    for name, checkpoint in models.items():
        arguments = checkpoint.prefix, checkpoint.rows
        plain, warm, cold = lab.side_by_side(
            lambda arguments=arguments: job("jobs_predict:first_call", *arguments, "plain"),
            lambda arguments=arguments: job("jobs_predict:first_call", *arguments, "warm"),
            lambda arguments=arguments: job("jobs_predict:first_call", *arguments, "cold"),
            repeats=3,
        )
        answers = {sample.result for found in (plain, warm, cold) for sample in found.samples}
        assert len(answers) == 1
        what = f"first call of a version that takes deltas, {name}, against a plain version"
        yield cost(what, warm.time, plain.time, at_most=1.0)
        yield cost("  without warm-up", cold.time, plain.time)


def first_status(lab: Lab) -> Iterator[Row]:
    """The longest of many predictions beside the first status and digest of a base, against none of these."""
    checkpoint = data.ranker(lab, "100 MB")
    none, warm, cold = lab.side_by_side(
        *(
            lambda kind=kind: job("jobs_predict:first_status", checkpoint.prefix, checkpoint.rows, kind)
            for kind in ("none", "warm", "cold")
        ),
        repeats=3,
    )
    assert len({sample.result for found in (none, warm, cold) for sample in found.samples}) == 1
    what = "longest prediction beside a base's first status and digest, against without these calls"
    yield cost(what, warm.time, none.time)
    yield cost("  where the warm-up lacks them", cold.time, none.time)


BENCHMARKS: tuple[Benchmark, ...] = (latency, first_calls, first_status)
