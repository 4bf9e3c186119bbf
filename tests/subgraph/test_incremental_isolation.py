"""Predictions beside updates: one position a response, and updates that are cut off at any moment."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.delta.format import ChangeKind
from exporter.graph.graph_files import read_saved_model
from exporter.options import Isolation
from exporter.subgraph.state import sleep
from tests.support.updatable import (
    WIDE,
    WIDE_ROWS,
    Loaded,
    Model,
    constant_everywhere,
    filled,
    loaded,
    tf1,
    updatable_model,
)

PATIENCE_SECONDS = 0.3


@pytest.fixture(scope="module", params=list(Isolation))
def mode(request: pytest.FixtureRequest) -> Isolation:
    mode: Isolation = request.param
    return mode


@pytest.fixture(scope="module")
def model(mode: Isolation, tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp(mode.value)
    return updatable_model(
        directory, constant_everywhere, {"ids": [0]}, isolation=mode, patience_seconds=PATIENCE_SECONDS
    )


@pytest.fixture(scope="module")
def session(model: Model) -> Iterator[Loaded]:
    with loaded(model) as server:
        yield server


@pytest.fixture
def server(session: Loaded, model: Model) -> Iterator[Loaded]:
    """At position 101 with every value 101, warm."""
    session.reset(model.base)
    model.publish(100, 101, filled(model, 101))
    assert session.update()["position"] == 101
    session.predict(ids=[0])
    yield session
    shutil.rmtree(model.log, ignore_errors=True)


def while_running(read: Callable[[], None], write: Callable[[], None], readers: int = 3) -> None:
    """Call `read` in several threads again and again for as long as `write` takes."""
    done = threading.Event()

    def loop() -> int:
        count = 0
        while not done.is_set():
            read()
            count += 1
        return count

    with ThreadPoolExecutor(readers) as pool:
        loops = [pool.submit(loop) for _ in range(readers)]
        try:
            write()
        finally:
            done.set()
        assert all(loop.result() > 1 for loop in loops)


def test_each_response_comes_from_one_position(server: Loaded, model: Model, mode: Isolation) -> None:
    ids = np.random.default_rng(1).integers(0, WIDE_ROWS, 200)
    seen = set()

    def read() -> None:
        answer = server.predict(ids=ids)
        low, high = answer["low"].min(), answer["high"].max()
        position = set(answer["model_position"].tolist())
        seen.update(position)
        if mode is Isolation.SNAPSHOT:
            assert {low} == {high} == position
            assert set(answer["model_step"].tolist()) == {10 * p for p in position}
        else:  # rows of several positions may meet, but each is one that existed, and none is half-written
            assert 101 <= low <= high <= 141
            assert all(float(value).is_integer() for value in (*answer["low"], *answer["high"]))

    def write() -> None:
        for position in range(101, 141):
            model.publish(position, position + 1, filled(model, position + 1))
            assert server.update(position + 1)["rows"] == 2 * WIDE_ROWS

    while_running(read, write)
    assert len(seen) > 5


def test_concurrent_updates_take_turns(server: Loaded, model: Model) -> None:
    for position in range(101, 121):
        model.publish(position, position + 1, filled(model, position + 1))

    def until_its_turn(target: int) -> dict[str, Any]:
        while (done := server.update(target))["status"] == "merged: another update runs; call again":
            time.sleep(0.001)
        return done

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(until_its_turn, [105, 121, 110, 121, 115, 121, 121, 121]))
    assert sum(done["deltas"] for done in found) == 20, "each delta was applied once"
    assert server.position() == 121
    answer = server.predict(ids=np.arange(50))
    assert set(answer["low"]) == set(answer["high"]) == set(answer["model_position"]) == {121}


def test_a_deadline_at_any_moment_leaves_a_state_that_the_next_update_completes(
    server: Loaded, model: Model, mode: Isolation
) -> None:
    position, cut = 101, 0
    for milliseconds in range(1, 25):
        for start in range(position, position + 3):
            model.publish(start, start + 1, filled(model, start + 1))
        try:
            server.update(timeout_ms=milliseconds)
        except tf.errors.DeadlineExceededError:
            cut += 1
        before = time.monotonic()
        answer = server.predict(ids=np.arange(100))
        assert time.monotonic() - before < PATIENCE_SECONDS + 5, "readers do not stall"
        if mode is Isolation.SNAPSHOT and answer["model_position"][0] >= 0:
            assert set(answer["low"]) == set(answer["high"]) == set(answer["model_position"])
        position += 3
        assert server.update()["position"] == position
        answer = server.predict(ids=np.arange(100))
        assert set(answer["low"]) == set(answer["high"]) == set(answer["model_position"]) == {position}
        shutil.rmtree(model.log)
    assert cut, "no update was cut off: nothing was tested"


@pytest.mark.landing
def test_a_dense_variable_is_written_before_the_position_also_where_mlir_rewrites_graphs(
    tmp_path: Path,
) -> None:
    """With `enable_mlir_graph_optimization` a killed update left old dense values under the new position."""
    model = updatable_model(tmp_path, constant_everywhere, {"ids": [0]}, patience_seconds=PATIENCE_SECONDS)
    config = tf1.ConfigProto()
    config.experimental.enable_mlir_graph_optimization = True
    cut = 0
    with loaded(model, config) as server:
        for position in range(100, 180, 2):
            for start in (position, position + 1):
                model.publish(start, start + 1, filled(model, start + 1))
            try:
                server.update(timeout_ms=1 + (position - 100) // 2)
            except tf.errors.DeadlineExceededError:
                cut += 1
            assert server.update()["position"] == position + 2
            held = {name: set(value.ravel()) for name, value in server.values(model.schema).items()}
            assert held == {name: {position + 2} for name in ("left", "right", "bias")}
            shutil.rmtree(model.log)
    assert cut, "no update was cut off: nothing was tested"


def pause_between_tables() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Reads one table, and the other one a while after it."""
    ids = tf1.placeholder(tf.int64, [None], name="ids")
    left = tf1.get_variable("left", [WIDE_ROWS, WIDE], use_resource=True)
    right = tf1.get_variable("right", [WIDE_ROWS, WIDE], use_resource=True)
    first = tf.gather(left, ids)
    with tf.control_dependencies([first, sleep(25_000)]):
        later = tf.identity(ids)
    read = tf.concat([first, tf.gather(right, later)], 1)
    return {"ids": ids}, {"low": tf.reduce_min(read, 1), "high": tf.reduce_max(read, 1)}


@pytest.mark.landing
def test_a_pass_longer_than_the_gaps_between_updates_is_of_one_position(tmp_path: Path) -> None:
    """Updates that come without a pause let it through, and it lets them through."""
    model = updatable_model(
        tmp_path, pause_between_tables, {"ids": [0]}, patience_seconds=PATIENCE_SECONDS, stamp=False
    )
    seen: list[float] = []
    with loaded(model) as server:

        def read() -> None:
            answer = server.predict(ids=[0, 1])
            assert answer["low"].min() == answer["high"].max(), "the response mixes positions"
            seen.append(float(answer["low"][0]))

        def write() -> None:
            for position in range(101, 151):
                model.publish(position, position + 1, filled(model, position + 1))
                assert server.update()["position"] == position + 1

        model.publish(100, 101, filled(model, 101))
        server.update()
        while_running(read, write, readers=2)
        assert server.call("incremental_status", probe=[0])["unsettled"].tolist() == [0]
    assert len(set(seen)) > 1, "nothing was updated meanwhile"


def kill_half_way(server: Loaded, *, position: int, target: int, odd: bool) -> None:
    """Leave what an update leaves that dies between its first and its last write."""
    graph = server.session.graph
    with graph.as_default():
        values = {
            "position": [position, 10 * position, target],
            "since": time.time(),
            "sequence": 7 if odd else 6,
        }
        dtypes = {"position": tf.int64, "since": tf.float64, "sequence": tf.int64}
        server.session.run(
            [
                tf.raw_ops.AssignVariableOp(
                    resource=graph.get_tensor_by_name(f"incremental/{name}:0"),
                    value=tf.constant(value, dtypes[name]),
                )
                for name, value in values.items()
            ]
        )


def test_an_update_that_died_does_not_stall_readers(server: Loaded, model: Model, mode: Isolation) -> None:
    if mode is not Isolation.SNAPSHOT:
        pytest.skip("row isolation has no readers that wait")
    kill_half_way(server, position=101, target=102, odd=True)
    before_it = server.call("incremental_status", probe=[0])["unsettled"]
    answer = server.predict(ids=[1, 2])
    assert answer["model_position"].tolist() == answer["model_step"].tolist() == [-1, -1]
    counted = server.call("incremental_status", probe=[0, 1])["unsettled"]
    assert counted.tolist() == [before_it[0] + 1] * 2, "it is counted, for readers without a stamp, too"
    before = time.monotonic()
    for _ in range(20):  # patience is counted from the update's begin: it is used up by now
        assert server.predict(ids=[1])["model_position"].tolist() == [-1]
    assert time.monotonic() - before < 20 * PATIENCE_SECONDS
    model.publish(101, 102, filled(model, 102))
    assert server.update()["position"] == 102
    assert server.predict(ids=[1])["model_position"].tolist() == [102]


def test_only_a_delta_that_leads_as_far_makes_a_dead_update_good(
    server: Loaded, model: Model, mode: Isolation
) -> None:
    kill_half_way(server, position=101, target=105, odd=mode is Isolation.SNAPSHOT)
    model.publish(101, 103, filled(model, 103))
    assert server.update()["status"] == "interrupted: an update to 105 died half-way; still at 101"
    for target in (101, 103):
        with pytest.raises(tf.errors.InvalidArgumentError, match="interrupted: an update to 105"):
            server.update(target)
    model.publish(101, 106, filled(model, 106))
    assert server.update()["position"] == 106
    answer = server.predict(ids=np.arange(10))
    assert set(answer["low"]) == set(answer["high"]) == set(answer["model_position"]) == {106}


def test_tables_are_read_by_rows_alone(model: Model) -> None:
    with loaded(model) as server:
        graph_def = server.session.graph.as_graph_def()
    tables = {v.name for v in model.schema.variables if v.kind is ChangeKind.TABLE}
    assert tables == {"left", "right"}
    ops = {
        node.op for node in graph_def.node if set(node.input) & tables and not node.name.startswith("save/")
    }
    assert ops <= {"Identity", "ResourceGather", "Pack", "AssignVariableOp"}
    forwarded = {node.name for node in graph_def.node if node.op == "Identity" and set(node.input) & tables}
    readers = {node.op for node in graph_def.node if set(node.input) & forwarded}
    assert readers <= {"ResourceGather", "Pack"}
    packs = [node for node in graph_def.node if node.op == "Pack"]
    packed = {node.name for node in packs if set(node.input) & (tables | forwarded)}
    assert {node.op for node in graph_def.node if set(node.input) & packed} == {"StatefulPartitionedCall"}


def test_chunks_are_written_under_the_lock_of_their_table(model: Model) -> None:
    """No response may have half of a row; whether one would, a race decides."""
    saved_model = read_saved_model(model.version)
    functions = saved_model.meta_graphs[0].graph_def.library.function
    chunks = [node for each in functions for node in each.node_def if node.op == "ResourceScatterNdUpdate"]
    assert len(chunks) >= 2
    assert all(node.attr["use_locking"].b for node in chunks)


@pytest.mark.parametrize(
    ("before", "after", "is_clean"),
    [(6, 6, True), (7, 7, False), (6, 8, False), (6, 7, False), (7, 8, False)],
)
def test_a_response_is_clean_if_one_even_sequence_stood_before_and_after_it(
    server: Loaded, mode: Isolation, before: int, after: int, is_clean: bool
) -> None:
    """(6, 7): an update began while the response was computed, and may have written already."""
    if mode is not Isolation.SNAPSHOT:
        pytest.skip("row isolation compares nothing")
    nodes = server.session.graph.as_graph_def().node
    (clean,) = [node.name for node in nodes if node.name.endswith("serving_default/clean")]
    (read_before,) = [node.name for node in nodes if node.name.endswith("incremental/before")]
    (read_after,) = [node.name for node in nodes if node.name.endswith("serving_default/after")]
    found = server.session.run(f"{clean}:0", {f"{read_before}:0": before, f"{read_after}:0": after})
    assert bool(found) is is_clean
