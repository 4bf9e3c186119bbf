"""What runs in processes of their own for `bench_predict`: many calls in a row, each timed."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from exporter import export
from exporter.options import Updates
from tests.benchmarks.job import Timer
from tests.benchmarks.jobs_full_export import export_request, requests

_WARM_UP = 50


def session_run(timer: Timer, version: str, rows: str, batch: str, calls: str) -> Any:
    """A bare `Session.run` of the signature, in this process."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        signature = v1.saved_model.load(session, ["serve"], version).signature_def["serving_default"]
        score, ids = signature.outputs["score"].name, signature.inputs["ids"].name
        return _time_calls(timer, lambda x: session.run(score, {ids: x}), rows, batch, calls)


def through_grpc(timer: Timer, version: str, rows: str, batch: str, calls: str) -> Any:
    """The same through `serve-model run` in another process, over loopback."""
    from serving.client import ModelClient

    command = [sys.executable, "-m", "serving.cli", "run", str(Path(version).parent), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split(" on ")[1].strip()
            with ModelClient(address, Path(version).parent.name) as client:

                def ask(ids: Any) -> Any:
                    return client.predict({"ids": ids}).outputs["score"]

                return _time_calls(timer, ask, rows, batch, calls)
        finally:
            server.terminate()


def first_call(timer: Timer, prefix: str, rows: str, kind: str) -> str:
    """The first call of a signature: of a `plain` version, of one that takes deltas, `cold` or `warm`.

    The process has served the model before: what TensorFlow prepares once in a process does not count.
    """
    from serving.loader import load
    from serving.manager import warm_up

    ids = requests(int(rows))
    with tempfile.TemporaryDirectory() as scratch:
        request = export_request(prefix, f"{scratch}/model")
        if kind != "plain":
            request = replace(request, updates=Updates())
        version = export(request).published.path
        for _ in range(2):
            with closing(load(version)) as model:
                if kind == "warm":
                    assert warm_up(model, version) == 3, "catch up, the signature, catch up"
                signature = model.signatures["serving_default"]
                score, fed = signature.outputs["score"].name, signature.inputs["ids"].name
                with timer:
                    (answer,) = model.run({fed: ids}, [score])
    return str(answer.tobytes().hex())


def _time_calls(timer: Timer, ask: Callable[[Any], Any], rows: str, batch: str, calls: str) -> Any:
    """Seconds of the median call; the last call's answer is the result, as text that keeps every bit."""
    ids = requests(int(rows), int(batch))
    for _ in range(_WARM_UP):
        ask(ids)
    taken = []
    with timer:
        for _ in range(int(calls)):
            started = time.perf_counter()
            answer = ask(ids)
            taken.append(time.perf_counter() - started)
    timer.seconds = statistics.median(taken)
    return answer.tobytes().hex()
