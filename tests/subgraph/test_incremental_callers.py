"""Many callers of an update at once, with deadlines of all lengths: each delta is applied once, in order."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.delta.format import Change, ChangeKind, Rows
from exporter.options import Isolation
from exporter.storage.layout import SAVED_MODEL_FILE
from exporter.wire import protos
from exporter.wire.dtypes import DType
from tests.support.budget import times
from tests.support.updatable import Loaded, Model, assert_holds, loaded, updatable_model

tf1 = tf.compat.v1

ROWS, DIM = 100_000, 16
CHAIN = 12
FIRST, LAST = 100, 100 + CHAIN


def constant_everywhere() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The smallest and the largest value in what two tables and a dense variable give."""
    ids = tf1.placeholder(tf.int64, [None], name="ids")
    zeros = tf1.zeros_initializer()
    left = tf1.get_variable("left", [ROWS, DIM], initializer=zeros, use_resource=True)
    right = tf1.get_variable("right", [ROWS, DIM], initializer=zeros, use_resource=True)
    bias = tf1.get_variable("bias", [DIM], initializer=zeros, use_resource=True)
    read = tf.concat([tf.gather(left, ids), tf.gather(right, ids), tf.tile(bias[None], [tf.size(ids), 1])], 1)
    return {"ids": ids}, {"low": tf.reduce_min(read, 1), "high": tf.reduce_max(read, 1)}


def fill(model: Model, position: int) -> None:
    """Publish the delta from `position` to the next: everything is what the position is then."""
    changes: dict[str, Change] = {}
    for variable in model.schema.variables:
        full = np.full(variable.shape, position + 1, np.float32)
        changes[variable.name] = Rows(np.arange(ROWS), full) if variable.kind is ChangeKind.TABLE else full
    model.publish(position, position + 1, changes)
    model.history[position + 1] = {
        variable.name: np.full(variable.shape, position + 1, np.float32)
        for variable in model.schema.variables
    }


@pytest.fixture(scope="module", params=list(Isolation))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp(request.param.value)
    model = updatable_model(directory, constant_everywhere, {"ids": [0]}, isolation=request.param)
    for position in range(FIRST, LAST):
        fill(model, position)
    return model


@pytest.fixture(scope="module")
def server(model: Model) -> Iterator[Loaded]:
    """In a pool of one thread: a call that held it while it waits would stall everything."""
    with loaded(model, tf1.ConfigProto(inter_op_parallelism_threads=1)) as server:
        yield server


ANOTHER_RUNS = "merged: another update runs; call again"


def update(server: Loaded, timeout_ms: int = 0) -> int:
    """Deltas that the calls say they applied, made as clients make them; none if one was cut off."""
    try:
        while (done := server.update(timeout_ms=timeout_ms))["status"] == ANOTHER_RUNS:
            assert done["deltas"] == done["rows"] == 0
            time.sleep(0.001)
    except tf.errors.DeadlineExceededError:
        return 0
    return int(done["deltas"])


def is_free(server: Loaded) -> bool:
    """True if no call has the turn, and none is about to take it."""
    graph = server.session.graph
    turn, holder = (graph.get_tensor_by_name(f"incremental/{name}:0") for name in ("turn", "holder"))
    with graph.as_default():
        taking = tf.raw_ops.ReadVariableOp(resource=turn, dtype=tf.int64)
        name = tf.raw_ops.ReadVariableOp(resource=holder, dtype=tf.string)[0]
        kind = {"output_types": [tf.int64], "output_shapes": [tf.TensorShape([])]}
        found = tf.raw_ops.IteratorFromStringHandleV2(string_handle=name, **kind)
    assert not server.session.run(taking).any()
    try:
        server.session.run(found)
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError):
        return True
    return False


@contextmanager
def watched(look: Callable[[], int]) -> Iterator[list[int]]:
    """What `look` sees again and again meanwhile."""
    seen: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(look())

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield seen
        finally:
            done.set()
        watching.result()


def test_waiting_calls_that_time_out_let_no_other_in(server: Loaded, model: Model) -> None:
    server.reset(model.base)
    with watched(server.position) as seen, ThreadPoolExecutor(13) as pool:
        long = pool.submit(update, server)
        while server.position() == FIRST:
            time.sleep(0.001)
        hurried = [pool.submit(update, server, timeout_ms=5) for _ in range(6)]
        time.sleep(0.02)
        patient = [pool.submit(update, server) for _ in range(6)]
        applied = long.result() + sum(call.result() for call in (*hurried, *patient))
    assert applied == CHAIN, "each delta was applied once"
    assert seen == sorted(seen), "no position was gone back to"
    assert is_free(server)
    assert_holds(server, model, LAST)


def test_a_call_beside_an_update_is_told_at_once_and_fails_for_no_target(
    server: Loaded, model: Model
) -> None:
    """It holds none of the server's threads, and it is not refused what it asks for."""
    server.reset(model.base)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(server.update)
        while server.position() == FIRST:
            time.sleep(0.001)
        answers = [server.update(), server.update(LAST), server.update(FIRST + 1, LAST)]
        was_running = not long.done()
        assert long.result()["deltas"] == CHAIN
    assert was_running, "the update was over before the calls: nothing was tested"
    assert {answer["status"] for answer in answers} == {ANOTHER_RUNS}
    assert all(FIRST <= answer["position"] < LAST and answer["deltas"] == 0 for answer in answers)
    assert server.update(LAST)["status"] == f"reached: {LAST}"
    assert_holds(server, model, LAST)


def test_a_call_says_numbers_and_never_a_path(model: Model) -> None:
    saved = protos.message_class("SavedModel").FromString((model.version / SAVED_MODEL_FILE).read_bytes())
    (meta,) = saved.meta_graphs
    taken = {
        name: {each.dtype for each in signature.inputs.values()}
        for name, signature in meta.signature_def.items()
        if name.startswith("incremental_")
    }
    assert "incremental_update" in taken
    assert {dtype for dtypes in taken.values() for dtype in dtypes} == {DType.INT64}


def test_a_call_that_is_cut_off_gives_its_turn_back(server: Loaded, model: Model) -> None:
    cut = 0
    for milliseconds in range(1, 30, max(1, 28 // times(7))):
        server.reset(model.base)
        try:
            server.update(timeout_ms=milliseconds)
        except tf.errors.DeadlineExceededError:
            cut += 1
        assert is_free(server)
        assert server.update()["position"] == LAST
    assert cut, "no update was cut off: nothing was tested"
    assert_holds(server, model, LAST)


def test_a_base_that_stands_still_wakes_no_thread(server: Loaded, model: Model) -> None:
    """A `BatchFunction`, which took turns before, looks into its queue a thousand times a second."""
    server.reset(model.base)
    server.update()
    before = wake_ups()
    time.sleep(0.5)
    woken = {name: count - before.get(name, 0) for name, count in wake_ups().items()}
    assert max(woken.values()) < 100, woken


def wake_ups() -> dict[str, int]:
    """How often each thread of this process went to sleep until now."""
    found = {}
    for status in Path("/proc/self/task").glob("*/status"):
        count = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status.read_text(), re.MULTILINE)
        assert count
        found[status.parent.name] = int(count[1])
    return found


def test_a_server_that_stops_ends_calls_that_wait(model: Model) -> None:
    with loaded(model) as server, ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(update, server) for _ in range(4)]
        while server.position() == FIRST:
            time.sleep(0.001)
        server.session.close()
        ends = [call.exception(timeout=60) for call in calls]
    assert any(ends), "none was cut off: nothing was tested"
    assert all(end is None or isinstance(end, tf.errors.OpError | RuntimeError) for end in ends), ends


def test_callers_of_a_base_that_tensorflow_2_loaded_twice(model: Model) -> None:
    """Each load has its own variables, so that it takes turns by itself."""
    calls = [tf.saved_model.load(str(model.version)).signatures["incremental_update"] for _ in range(2)]
    newest = tf.constant([-1], tf.int64)

    def until_its_turn(call: Callable[..., Any]) -> Any:
        while (answer := call(up_to=newest))["status"][0] == ANOTHER_RUNS.encode():
            time.sleep(0.001)
        return answer

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(until_its_turn, [*calls, *calls]))
    assert {int(answer["position"][0]) for answer in found} == {LAST}
    assert sorted(int(answer["deltas"][0]) for answer in found) == [0, 0, CHAIN, CHAIN]


def test_callers_beyond_number_are_served_one_after_the_other(server: Loaded, model: Model) -> None:
    server.reset(model.base)
    with ThreadPoolExecutor(300) as pool:
        assert sum(pool.map(lambda _: update(server), range(300))) == CHAIN
    assert_holds(server, model, LAST)


def test_of_many_calls_at_once_one_has_its_turn(server: Loaded, model: Model) -> None:
    """Those that are told of another were told of one that ran, not of each other."""
    server.reset(model.base)
    with ThreadPoolExecutor(30) as pool:
        found = list(pool.map(lambda _: server.update(), range(30)))
    assert sum(done["deltas"] for done in found) == CHAIN
    assert all(done["status"] == ANOTHER_RUNS or done["position"] == LAST for done in found)


@pytest.mark.landing
def test_callers_with_deadlines_of_all_lengths(server: Loaded, model: Model) -> None:
    """Callers that die at any moment, and readers: no response is mixed, and the next update always can."""
    ids, snapshot = np.random.default_rng(1).integers(0, ROWS, 100), _is_snapshot(model)
    rng = random.Random(1)

    def read() -> int:
        answer = server.predict(ids=ids)
        (position,) = set(answer["model_position"].tolist())
        if snapshot and position > FIRST:
            assert set(answer["low"]) == set(answer["high"]) == {position}
        return int(position)

    for _ in range(times(10)):
        server.reset(model.base)
        with watched(read) as seen, ThreadPoolExecutor(9) as pool:
            deadlines = [rng.choice([0, 1, 2, 5, 10, 20, 50, 100, 200]) for _ in range(25)]
            calls = [pool.submit(update, server, timeout_ms=ms) for ms in deadlines]
            assert sum(call.result() for call in calls) <= CHAIN
            update(server)
            assert is_free(server)
            time.sleep(0.01)
        known = [position for position in seen if position >= 0]
        assert known == sorted(known)
        assert_holds(server, model, LAST)


def _is_snapshot(model: Model) -> bool:
    return model.options.isolation is Isolation.SNAPSHOT
