"""Damaged deltas, and memory that was in use before, change nothing of a base with overlays."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tensorflow as tf

from exporter.delta.format import ChangeKind, Rows
from exporter.graph import overlaid_reads
from exporter.graph.overlaid_reads import PAGE_ROWS
from exporter.subgraph import overlay
from tests.support.updatable import Loaded, Model, loaded, updatable_model

tf1 = tf.compat.v1
ROWS, DIM = 500, 6
EVERY = np.arange(ROWS)


def one_table() -> Any:
    ids = tf1.placeholder(tf.int64, [None], name="ids")
    table = tf1.get_variable("table", [ROWS, DIM], use_resource=True)
    return {"ids": ids}, {"rows": tf.gather(table, ids)}


@pytest.fixture(
    scope="module", params=[overlaid_reads.MOST_ROWS_OF_A_PAGE, 0], ids=["in one page", "by pages"]
)
def served(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[Model, Loaded]]:
    with patch.object(overlay, "MOST_ROWS_OF_A_PAGE", request.param):
        model = updatable_model(
            tmp_path_factory.mktemp("mapped"),
            one_table,
            {"ids": [0]},
            mapped=True,
            overlay_rows=200,
            finite=True,
        )
    with loaded(model) as server:
        yield model, server


@pytest.fixture
def model(served: tuple[Model, Loaded]) -> Model:
    """At position 110, where rows 0 to 9 have changed once and rows 0 to 4 a second time."""
    model, server = served
    for delta in model.log.glob("*"):
        shutil.rmtree(delta)
    server.reset(model.base)
    model.history.clear()
    model.publish_rows(100, 105, "table", np.arange(10), np.full((10, DIM), 1, np.float32))
    model.publish_rows(105, 110, "table", np.arange(5), np.full((5, DIM), 2, np.float32))
    assert server.update(110)["position"] == 110
    return model


@pytest.fixture
def server(served: tuple[Model, Loaded]) -> Loaded:
    return served[1]


OVERLAY = ("changed", "slots", "rows", "used")


@cache
def node(server: Loaded, name: str) -> tuple[Any, Any, Any]:
    """A read of one of the overlay's variables, or of the state's; a value to assign, the assignment."""
    end = f"/overlay/table/{name}" if name in (*OVERLAY, "pages") else f"/{name}"
    graph = server.session.graph
    (found,) = (op for op in graph.get_operations() if op.type == "VarHandleOp" and op.name.endswith(end))
    dtype, handle = tf.as_dtype(found.get_attr("dtype")), found.outputs[0]
    with graph.as_default():
        given = tf1.placeholder(dtype)
        read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
        return read, given, tf.raw_ops.AssignVariableOp(resource=handle, value=given)


def value(server: Loaded, name: str) -> np.ndarray:
    """What one of these variables holds."""
    found: np.ndarray = server.session.run(node(server, name)[0])
    return found


def assign(server: Loaded, name: str, held: Any) -> None:
    """Assign a value to one of these variables."""
    _, given, assigned = node(server, name)
    server.session.run(assigned, {given: held})


def every_byte(server: Loaded) -> dict[str, bytes]:
    """All that updates write: what the overlay holds, and what tells where the model stands."""
    names = (*OVERLAY, *["pages"] * is_paged(server), "sequence", "position")
    reads = {name: node(server, name)[0] for name in names}
    return {name: held.tobytes() for name, held in server.session.run(reads).items()}


def is_paged(server: Loaded) -> bool:
    return any(op.name.endswith("/overlay/table/pages") for op in server.session.graph.get_operations())


def full(count: int, value: float = 9) -> np.ndarray:
    return np.full((count, DIM), value, np.float32)


HOSTILE: dict[str, Callable[[], Rows]] = {
    "a row behind the last": lambda: Rows(np.array([3, ROWS]), full(2)),
    "a row of the last page that the table lacks": lambda: Rows(np.array([3, ROWS + PAGE_ROWS - 1]), full(2)),
    "a row far behind": lambda: Rows(np.array([3, 1 << 62]), full(2)),
    "a row whose page is a number of 32 bits too many": lambda: Rows(np.array([3, 1 << 38]), full(2)),
    "a row before the first": lambda: Rows(np.array([-1, 3]), full(2)),
    "the least number": lambda: Rows(np.array([-(1 << 63), 3]), full(2)),
    "a row twice": lambda: Rows(np.array([3, 3]), full(2)),
    "a new row twice, apart": lambda: Rows(np.array([70, 300, 70]), full(3)),
    "rows out of order": lambda: Rows(np.array([300, 70]), full(2)),
    "fewer values than rows": lambda: Rows(np.array([3, 70, 300]), full(2)),
    "more values than rows": lambda: Rows(np.array([70]), full(2)),
    "values without rows": lambda: Rows(np.array([], np.int64), full(2)),
    "NaN": lambda: Rows(np.array([3, 70]), full(2, np.nan)),
    "more rows than there is room for": lambda: Rows(np.arange(ROWS)[::2], full(ROWS // 2)),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_nothing_is_written_before_a_delta_is_refused(
    model: Model, server: Loaded, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exporter.delta.delta_files._check_ids", lambda *_: None)
    assert model.schema.variables[0].kind is ChangeKind.TABLE
    model.publish(110, 120, {"table": HOSTILE[what]()})
    before = every_byte(server)
    refused = server.update()
    assert refused["position"] == 110
    assert refused["status"].startswith(("rows: ", "finite: ", "overlay: ")), refused["status"]
    assert every_byte(server) == before
    np.testing.assert_array_equal(server.predict(ids=EVERY)["rows"], model.at(110)["table"])


def test_memory_that_was_in_use_before_leads_nowhere(model: Model, server: Loaded) -> None:
    """Slots and rows are not set to zero while a model loads: whatever lies there is never followed."""
    server.reset(model.base)
    slots = value(server, "slots")
    slots[PAGE_ROWS * is_paged(server) :] = np.iinfo(np.int32).max
    assign(server, "slots", slots)
    assign(server, "rows", np.full_like(value(server, "rows"), np.nan))
    np.testing.assert_array_equal(server.predict(ids=EVERY)["rows"], model.at(100)["table"])
    for position in (105, 110):
        assert server.update(position)["position"] == position
        np.testing.assert_array_equal(server.predict(ids=EVERY)["rows"], model.at(position)["table"])
    ids = np.array([9, 63, 64, 127, 300, ROWS - 1])
    model.publish_rows(110, 120, "table", ids, full(len(ids)))
    assert server.update()["position"] == 120
    np.testing.assert_array_equal(server.predict(ids=EVERY)["rows"], model.at(120)["table"])


def test_an_update_that_died_takes_no_slots_for_good(model: Model, server: Loaded) -> None:
    """It led to some pages and slots, and did not count them: the next one finds them, and counts on."""
    ids = np.arange(5, ROWS, 7)
    model.publish_rows(110, 120, "table", ids, full(len(ids)))
    count = value(server, "used")
    assert server.update()["position"] == 120
    done = value(server, "used")
    assert (done > count).tolist() == [True, is_paged(server)]
    assign(server, "used", count)
    assign(server, "position", np.array([110, 1100, 120]))
    assert server.update()["position"] == 120
    np.testing.assert_array_equal(server.predict(ids=EVERY)["rows"], model.at(120)["table"])
    assert value(server, "used").tolist() == done.tolist()


@pytest.mark.parametrize("counted", ["neither", "changed", "used"])
def test_the_first_update_may_die_before_either_of_its_last_assignments(
    model: Model, server: Loaded, counted: str
) -> None:
    """The one that repairs finds its slots, or sets them to zero again; its rows take no room twice."""
    server.reset(model.base)
    assert server.update(105)["position"] == 105
    done = value(server, "used")
    if counted != "changed":
        assign(server, "changed", False)
    if counted != "used":
        assign(server, "used", np.zeros(2, np.int64))
    assign(server, "position", np.array([100, 1000, 105]))
    assert server.update(105)["position"] == 105
    assert value(server, "used").tolist() == done.tolist()
    np.testing.assert_array_equal(server.predict(ids=EVERY)["rows"], model.at(105)["table"])
