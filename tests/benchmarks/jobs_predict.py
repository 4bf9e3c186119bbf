"""What runs in processes of their own for `bench_predict`: many calls in a row, each timed."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from exporter import export
from exporter.options import Updates
from exporter.storage.layout import WARMUP_FILE
from exporter.wire.protos import message_class
from exporter.wire.tfrecord import encode_records, read_records
from serving.inference import Model, predict_arrays
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
                    assert warm_up(model, version) == 4, "catch up, status, the signature, catch up"
                signature = model.signatures["serving_default"]
                score, fed = signature.outputs["score"].name, signature.inputs["ids"].name
                with timer:
                    (answer,) = model.run({fed: ids}, [score])
    return str(answer.tobytes().hex())


def first_status(timer: Timer, prefix: str, rows: str, kind: str) -> str:
    """Predictions one after the other, and beside them the first status and digest since a load: the longest.

    `kind` is `none`, without them; `warm`, they were warm-up requests; or `cold`, they were not. The process
    has served the model before.
    """
    from serving.manager import load_warm

    ids = requests(int(rows))
    with tempfile.TemporaryDirectory() as scratch:
        request = replace(export_request(prefix, f"{scratch}/model"), updates=Updates(digest=True))
        version = export(request).published.path
        if kind == "cold":
            _leave_out(version / WARMUP_FILE, {"incremental_status", "incremental_digest"})
        for _ in range(2):
            stop = threading.Event()
            with closing(load_warm(version)) as model, ThreadPoolExecutor(1) as pool:
                longest = pool.submit(_longest, model, ids, stop)
                try:
                    time.sleep(_STEADY_S)
                    if kind != "none":
                        predict_arrays(model, "incremental_status", {"probe": np.zeros(1, np.int64)})
                        predict_arrays(model, "incremental_digest", {"rows": np.zeros(1, np.int64)})
                    time.sleep(_STEADY_S)
                finally:
                    stop.set()
                answer, timer.seconds = longest.result()
    return answer


_STEADY_S = 0.5


def _longest(model: Model, ids: Any, stop: threading.Event) -> tuple[str, float]:
    """Ask again and again until told to stop; the last answer, and the seconds of the longest call."""
    longest = 0.0
    while not stop.is_set():
        started = time.perf_counter()
        answer = predict_arrays(model, "serving_default", {"ids": ids})["score"]
        longest = max(longest, time.perf_counter() - started)
    return answer.tobytes().hex(), longest


def _leave_out(file: Path, signatures: set[str]) -> None:
    """Take the requests of signatures out of a file of warm-up requests."""
    with file.open("rb") as source:
        records = list(read_records(source))
    log = message_class("serving.PredictionLog")
    kept = [
        record
        for record in records
        if log.FromString(record).predict_log.request.model_spec.signature_name not in signatures
    ]
    assert len(kept) == len(records) - len(signatures)
    file.write_bytes(encode_records(kept))


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
