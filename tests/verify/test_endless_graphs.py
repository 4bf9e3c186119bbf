"""Graphs that never end, or wait, or take all memory end in a named error within their deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter import export
from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.errors import VerificationError
from exporter.graph.batch import opening
from exporter.graph.load import GraphRequest, load_graph
from exporter.graph.session import RunFailed, graph_session
from exporter.limited.worker import Ended
from exporter.verify.golden import GoldenRequest
from exporter.verify.outputs import Running, require_golden
from exporter.wire import protos
from tests.support.graph_runs import train

v1 = tf.compat.v1
LATEST = 60.0  # a busy machine; the limits are a few seconds


def endless(x: Any) -> Any:
    return v1.while_loop(lambda at, _: at >= 0, lambda at, y: (at * 0, tf.tanh(y) + 0.1), (0, x))[1]


def waiting(x: Any) -> Any:
    """A kernel that sleeps: nothing is ever put into the queue."""
    return x + v1.FIFOQueue(1, [tf.float32], shapes=[[]]).dequeue()


def greedy(x: Any) -> Any:
    return tf.reduce_sum(
        tf.random.uniform(tf.cast([1 << 19, 1 << 16], tf.int32) + tf.cast(x[0, 0] * 0, tf.int32))
    )


@pytest.fixture
def soon() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < LATEST


def graph_of(build: Callable[[Any], Any]) -> Any:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 2], name="x")
        tf.identity(build(x), name="y")
    return protos.message_class("GraphDef").FromString(graph.as_graph_def().SerializeToString())


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("build", "limit"), [(endless, "2 s of computing"), (waiting, "3 s")], ids=["endless", "waiting"]
)
def test_a_run_without_end_ends_its_process_alone(build: Any, limit: str) -> None:
    seconds = {"cpu_seconds": 2, "step_seconds": 3.0 if build is waiting else 60.0}
    with pytest.raises(Ended) as found, graph_session(memory_bytes=1 << 30, **seconds) as session:  # type: ignore[arg-type]
        session.open(graph_of(build))
        session.run(["y:0"], {"x:0": np.ones((3, 2), np.float32)})
    assert found.value.limit == limit


@pytest.mark.usefixtures("soon")
def test_a_run_that_asks_for_all_memory_is_refused() -> None:
    with graph_session(memory_bytes=1 << 30, cpu_seconds=20, step_seconds=60) as session:
        session.open(graph_of(greedy))
        with pytest.raises((RunFailed, Ended)):
            session.run(["y:0"], {"x:0": np.ones((3, 2), np.float32)})
            raise AssertionError("128 GiB were there")


@pytest.mark.usefixtures("soon")
def test_golden_requests_of_an_endless_version_end_in_a_named_error(tmp_path: Path) -> None:
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        x = v1.placeholder(tf.float32, [None, 2], name="x")
        y = tf.identity(endless(x), name="y")
        signature = v1.saved_model.predict_signature_def({"x": x}, {"y": y})
        builder = v1.saved_model.Builder(str(tmp_path / "model"))
        builder.add_meta_graph_and_variables(session, ["serve"], {"serving_default": signature})
        builder.save()
    request = GoldenRequest(instances=[[1.0, 2.0]])
    with pytest.raises(VerificationError, match="the version could not be run for --golden") as found:
        require_golden(tmp_path / "model", [request], Running(cpu_seconds=2))
    assert found.value.cause == "it came to no end in 2 s of computing"


@pytest.mark.usefixtures("soon")
def test_an_endless_graph_of_a_fixed_batch_keeps_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "CPU_SECONDS", 2)

    def build(_: Any) -> None:
        data = tf.data.Dataset.from_tensor_slices(np.ones((64, 2), np.float32)).repeat()
        iterator = v1.data.make_initializable_iterator(data.batch(8, drop_remainder=True))
        v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
        x = iterator.get_next()
        v1.get_variable("w", [2])
        tf.identity(tf.reshape(endless(x), [8, 2]), name="scores")

    trained = train(tmp_path, build)
    request = GraphRequest(model=trained.meta, inputs={"x": "IteratorGetNext"}, outputs={"scores": "scores"})
    graph = load_graph(request)
    (note,) = (note for note in graph.notes if "rows" in note)
    assert "a trial with others came to no end in 2 s of computing" in note
    assert graph.meta_graph.signature_def["serving_default"].inputs["x"].tensor_shape.dim[0].size == 8


def test_a_program_may_change_its_directory_between_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def table(ids: str = "ids") -> Any:
        rows = tf.compat.v1.get_variable("table", [4, 2])
        asked = tf.compat.v1.placeholder(tf.int64, [None], name=ids)
        return {"ids": asked}, {"rows": tf.gather(rows, asked)}

    for name in ("first", "second"):  # the process that ran the first is kept for the next
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        with BundleWriter(Path("model.ckpt-1")) as writer:
            writer.add("table", np.ones((4, 2), np.float32))
        assert export("model.ckpt-1", "model", table, verify="outputs").is_new
