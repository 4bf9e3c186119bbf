"""Pacing: what probes took, and how long a delta has waited, decide when the next one is applied."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from exporter.delta.spans import Span
from exporter.publish.delta_log import read_log
from exporter.publish.model import Log, Model
from exporter.publish.served import Served
from exporter.wire.protos import message_class
from exporter.wire.tfrecord import encode_records
from serving.agent.pacing import FIRST_PAUSE_S, LEAST_PROBES, Latencies, PacePolicy, Waiting, next_pause, p99
from serving.agent.probe import probe_request
from serving.agent.rollout import (
    Action,
    Apply,
    Observed,
    Paced,
    RolloutPolicy,
    Wait,
    next_action,
)
from serving.status import VersionState
from tests.support.agents import Published as Publishing
from tests.support.agents import Server, agent, wait

POLICY = PacePolicy(2.0, longest_delay_s=5.0)


def probes(seconds: float, count: int = 100) -> tuple[float, ...]:
    return (seconds,) * count


PAUSES: dict[str, tuple[float, Latencies, float]] = {
    "nothing measured": (0.0, Latencies(), 0.0),
    "too few while applying": (0.1, Latencies(probes(0.002), probes(1.0, LEAST_PROBES - 1)), 0.1),
    "too few when idle": (0.1, Latencies(probes(0.002, LEAST_PROBES - 1), probes(1.0)), 0.1),
    "within the factor": (0.0, Latencies(probes(0.002), probes(0.004)), 0.0),
    "above it": (0.0, Latencies(probes(0.002), probes(0.005)), FIRST_PAUSE_S),
    "above it again": (0.4, Latencies(probes(0.002), probes(0.005)), 0.8),
    "not beyond the longest delay": (4.0, Latencies(probes(0.002), probes(0.005)), 5.0),
    "better": (0.4, Latencies(probes(0.002), probes(0.003)), 0.2),
    "well": (FIRST_PAUSE_S, Latencies(probes(0.002), probes(0.003)), 0.0),
    "a fast model's noise": (0.0, Latencies(probes(0.0001), probes(0.001)), 0.0),
    "one of 100 is slow": (0.0, Latencies(probes(0.002), (*probes(0.002, 99), 9.0)), 0.0),
    "two of 100 are": (0.0, Latencies(probes(0.002), (*probes(0.002, 98), 9.0, 9.0)), FIRST_PAUSE_S),
}


@pytest.mark.parametrize("case", PAUSES)
def test_the_pause_follows_the_probes(case: str) -> None:
    pause, found, expected = PAUSES[case]
    assert next_pause(pause, found, POLICY) == expected


def test_p99_is_a_value_that_was_measured() -> None:
    assert p99([1.0] * (LEAST_PROBES - 1)) is None
    assert p99([float(value) for value in range(1000)]) == 989.0


LINE = "line"
LOG = Log(LINE, (Span(0, 1), Span(1, 2), Span(0, 2), Span(2, 3)))
BEHIND = Observed().answered([Served(1, VersionState.AVAILABLE, 0, 0, LINE)], 100.0)
PACED = RolloutPolicy(longest_delay_s=5.0)
ONE, ALL = Apply(1, LINE, 1, (Span(0, 1),)), Apply(1, LINE, 3, (Span(0, 2), Span(2, 3)))
ACTIONS: dict[str, tuple[RolloutPolicy, Paced, float, Action]] = {
    "without pacing": (RolloutPolicy(), Paced(9.0, 1.0), 100.0, ALL),
    "one by one, the smallest": (PACED, Paced(), 100.0, ONE),
    "a pause": (PACED, Paced(0.5), 99.8, Wait(100.3)),
    "after the pause": (PACED, Paced(0.5), 99.4, ONE),
    "not beyond the delay": (PACED, Paced(4.0, 4.9), 99.9, Wait(100.1)),
    "too late for pauses": (PACED, Paced(4.0, 5.0), 99.9, ALL),
    "steps are the operator's": (
        RolloutPolicy(step_s=1.0, longest_delay_s=5.0),
        Paced(4.0, 5.0),
        99.5,
        Wait(100.5),
    ),
    "before anything is measured": (PACED, Paced(is_measured=False), 0.0, Wait(100.1)),
    "measured for too long": (PACED, Paced(0.0, 5.0, is_measured=False), 0.0, ALL),
    "no delay allowed": (RolloutPolicy(longest_delay_s=0.0), Paced(), 99.9, ALL),
}


@pytest.mark.parametrize("case", ACTIONS)
def test_pauses_decide_when_and_how_much(case: str) -> None:
    policy, paced, last_applied, expected = ACTIONS[case]
    published = Model({LINE: LOG}, 0)
    found = next_action(BEHIND, published, policy, 100.0, last_applied=last_applied, paced=paced)
    if isinstance(found, Wait) and isinstance(expected, Wait):
        assert found.until == pytest.approx(expected.until)
    else:
        assert found == expected


def test_a_delta_waits_from_when_it_may_be_taken() -> None:
    waiting = Waiting()
    held, free = Log(LINE, LOG.deltas, limit=1), LOG
    start, on = (Served(1, VersionState.AVAILABLE, at, at, LINE) for at in (0, 1))
    assert waiting.longest_s([(start, held)], 100.0) == 0.0
    assert waiting.longest_s([(start, held)], 101.0) == 1.0
    assert waiting.longest_s([(on, held)], 102.0) == 0.0, "what the hold keeps back does not wait"
    assert waiting.longest_s([(on, free)], 103.0) == 0.0
    assert waiting.longest_s([(on, free)], 104.5) == 1.5
    assert waiting.longest_s([], 105.0) == 0.0


def test_freshness_never_starves() -> None:
    """However slow every probe is, each delta is served soon after the longest delay."""
    pause, waiting, position, last_applied, now = 0.0, Waiting(), 0, 0.0, 0.0
    bad = Latencies(probes(0.001), probes(1.0))
    seen: dict[int, float] = {}
    deltas: list[Span] = []
    while now < 120:
        if now >= len(deltas):  # one is published each second
            deltas.append(Span(len(deltas), len(deltas) + 1))
            seen[len(deltas)] = now
        version = Served(1, VersionState.AVAILABLE, position, position, LINE)
        log = Log(LINE, tuple(deltas))
        paced = Paced(pause, waiting.longest_s([(version, log)], now))
        found = next_action(
            Observed().answered([version], now),
            Model({LINE: log}, 0),
            PACED,
            now,
            last_applied=last_applied,
            paced=paced,
        )
        if isinstance(found, Apply):
            for end in range(position + 1, found.up_to + 1):
                assert now - seen[end] <= 5.0 + 0.11
            position, last_applied = found.up_to, now
            pause = next_pause(pause, bad, POLICY)
        now += 0.1
    assert pause == 5.0


def test_what_is_probed_is_the_first_prediction_of_the_warm_up(tmp_path: Path) -> None:
    def record(signature: str) -> bytes:
        log = message_class("serving.PredictionLog")()
        log.predict_log.request.model_spec.signature_name = signature
        return bytes(log.SerializeToString())

    file = tmp_path / "assets.extra" / "tf_serving_warmup_requests"
    assert probe_request(tmp_path) is None
    file.parent.mkdir()
    file.write_bytes(encode_records([record("incremental_update")]))
    assert probe_request(tmp_path) is None
    file.write_bytes(encode_records([record("incremental_update"), record("rank"), record("other")]))
    assert probe_request(tmp_path).model_spec.signature_name == "rank"
    file.write_bytes(file.read_bytes()[:-1])
    assert probe_request(tmp_path).model_spec.signature_name == "rank", "the damage is after it"
    for content in (b"no records", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"):
        file.write_bytes(content)
        assert probe_request(tmp_path) is None


@pytest.mark.landing
def test_real_replicas_are_paced_and_get_there(tmp_path: Path) -> None:
    publishing = Publishing(tmp_path)
    version = int(read_log(publishing.model).base.path.name)
    with ExitStack() as stack:
        server = Server(publishing.model, stack=stack).start()
        newest = [publishing.publish() for _ in range(4)][-1]
        patient = ("--pace", "factor=1", "--pace", "max-delay=600", "--pace", "probe=0.002")
        with agent(publishing.model, server.address, more=patient) as running:
            wait(lambda: server.position(version) == newest)
            applied = wait(lambda: found if len(found := running.of("applied")) == 4 else [])
            assert [event["deltas"] for event in applied] == [1] * 4, "one by one"
            labels = f'{{model="ranker",replica="{server.address}",state="idle"}}'
            wait(lambda: f"probe_p99_seconds{labels}" in running.get("/metrics")[1])
        newest = [publishing.publish() for _ in range(3)][-1]
        hasty = ("--pace", "factor=1", "--pace", "max-delay=0")
        with agent(publishing.model, server.address, more=hasty) as running:
            wait(lambda: server.position(version) == newest)
            assert [event["deltas"] for event in wait(lambda: running.of("applied"))] == [3], (
                "no delay is allowed"
            )
