"""The update signature in a plain session: chains, targets, and every reason to refuse a delta."""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from msgspec.structs import replace

from exporter.bundle.warmup import parse_request
from exporter.checkpoint.tensor_bundle import BundleWriter, read_array, read_catalog
from exporter.delta.format import Change, Rows, Schema, ServedVariable
from exporter.delta.packing import round_rows
from exporter.options import DeltaDtype
from exporter.subgraph.make_updatable import CATCH_UP_REQUEST
from exporter.wire.protos import message_class
from tests.support.updatable import (
    MAPPED,
    Loaded,
    Model,
    applied,
    assert_holds,
    loaded,
    random_changes,
    updatable_model,
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return updatable_model(tmp_path_factory.mktemp("exported"), finite=True)


@pytest.fixture(scope="module")
def session(exported: Model) -> Iterator[Loaded]:
    with loaded(exported) as server:
        yield server


@pytest.fixture
def model(exported: Model, tmp_path: Path) -> Model:
    base = tmp_path / "model"
    shutil.copytree(exported.base, base)
    return replace(exported, base=base, history={})


@pytest.fixture
def server(session: Loaded, model: Model) -> Loaded:
    session.reset(model.base)
    return session


def refusal(server: Loaded, up_to: int) -> str:
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        server.update(up_to)
    return str(caught.value)


def test_nothing_published_is_no_error(server: Loaded, model: Model) -> None:
    assert server.update() == {
        "position": 100,
        "step": 1000,
        "rows": 0,
        "deltas": 0,
        "status": "current: at 100",
    }
    assert_holds(server, model, 100)


def test_a_chain_is_followed_to_its_end(server: Loaded, model: Model) -> None:
    for start in (100, 110, 120):
        model.evolve(start, start + 10)
    assert server.update() == {
        "position": 130,
        "step": 1300,
        "rows": 30,
        "deltas": 3,
        "status": "current: at 130",
    }
    assert_holds(server, model, 130)


def test_the_delta_that_leads_furthest_is_taken(server: Loaded, model: Model) -> None:
    model.evolve(100, 110)
    model.evolve(110, 120)
    model.evolve(100, 120)
    assert server.update()["deltas"] == 1
    assert_holds(server, model, 120)


def test_a_merged_delta_fits_a_state_inside_it(server: Loaded, model: Model) -> None:
    model.evolve(100, 110)
    assert server.update()["position"] == 110
    model.evolve(90, 120)
    model.history[120] = {k: v.copy() for k, v in model.history[110].items()} | {}
    changes = random_changes(model.schema, seed=120)
    for name, change in changes.items():
        if isinstance(change, Rows):
            model.history[120][name][change.ids] = change.values
        else:
            model.history[120][name] = change
    assert server.update()["position"] == 120
    assert_holds(server, model, 120)


def test_an_explicit_target_is_not_passed(server: Loaded, model: Model) -> None:
    for start in (100, 110, 120):
        model.evolve(start, start + 10)
    assert server.update(120)["status"] == "reached: 120"
    assert_holds(server, model, 120)
    assert server.update(120)["deltas"] == 0
    assert server.update(130)["status"] == "reached: 130"


def test_a_target_behind_does_nothing(server: Loaded, model: Model) -> None:
    model.evolve(100, 110)
    server.update()
    assert server.update(105)["status"] == "passed: at 110, beyond 105"
    assert_holds(server, model, 110)


def test_merged_batches_mean_the_smallest_target(server: Loaded, model: Model) -> None:
    for start in (100, 110, 120):
        model.evolve(start, start + 10)
    again = b"merged: with a call for 120; call again"
    found = server.call("incremental_update", up_to=[-1, 120, 130])
    assert {name: value.tolist() for name, value in found.items()} == {
        "position": [120] * 3,
        "step": [1200] * 3,
        "rows": [20] * 3,
        "deltas": [2] * 3,
        "status": [again, b"reached: 120", again],
    }


def test_a_target_that_cannot_be_reached_fails_no_call_that_it_is_merged_with(
    server: Loaded, model: Model
) -> None:
    model.evolve(100, 110)
    found = server.call("incremental_update", up_to=[-1, 999])
    assert found["position"].tolist() == [110, 110], "what leads on was applied for both"
    assert found["status"].tolist() == [
        b"merged: with a call for 999; call again",
        b"unpublished: nothing leads to 999; at 110",
    ]
    assert "unpublished: nothing leads to 999; at 110" in refusal(server, 999)
    with pytest.raises(tf.errors.InvalidArgumentError, match="unpublished"):
        server.call("incremental_update", up_to=[999, 999])
    with pytest.raises(tf.errors.InvalidArgumentError, match="up_to is a position"):
        server.call("incremental_update", up_to=[-1, -2])


def test_a_refusal_says_nothing_of_the_graph_before_what_it_says(server: Loaded, model: Model) -> None:
    assert "function_node" not in refusal(server, 999)


def test_a_log_that_is_gone(server: Loaded, model: Model) -> None:
    model.evolve(100, 110)
    server.update(110)
    moved = model.base.rename(model.base.parent / "moved")
    for empty in (False, True):  # moved, or unmounted: a place with nothing in it
        if empty:
            model.base.mkdir()
        status = f"unlisted: {model.log} cannot be listed; at 110"
        assert server.update()["status"] == status
        assert server.update(110)["status"] == "reached: 110"
        assert status in refusal(server, 120)
    model.base.rmdir()
    moved.rename(model.base)
    assert server.update()["status"] == "current: at 110"


def test_a_log_that_holds_nothing_yet_is_listed(server: Loaded, model: Model) -> None:
    model.log.mkdir(parents=True)
    assert server.update()["status"] == "current: at 100"


def test_a_target_that_is_no_position_is_refused(server: Loaded) -> None:
    assert "up_to is a position" in refusal(server, -2)


def test_a_target_inside_a_delta(server: Loaded, model: Model) -> None:
    model.evolve(100, 120)
    assert "inside: 110 lies inside a delta; at 100" in refusal(server, 110)
    assert_holds(server, model, 100)


def test_a_target_beyond_what_is_published(server: Loaded, model: Model) -> None:
    model.evolve(100, 110)
    assert "unpublished: nothing leads to 200; at 110" in refusal(server, 200)
    assert_holds(server, model, 110)


def test_a_gap(server: Loaded, model: Model) -> None:
    model.evolve(100, 110)
    model.publish(120, 130, {})
    assert server.update()["status"] == "gap: no delta leads on from 110"
    assert "gap: no delta leads on from 110" in refusal(server, 130)
    assert_holds(server, model, 110)


def test_a_stale_delta_is_passed_over(server: Loaded, model: Model) -> None:
    model.publish(80, 90, random_changes(model.schema, seed=1))
    model.publish(90, 100, random_changes(model.schema, seed=2))
    assert server.update()["status"] == "current: at 100"
    assert_holds(server, model, 100)


def test_a_held_log(server: Loaded, model: Model) -> None:
    model.evolve(100, 110)
    model.evolve(110, 120)
    (model.log / "hold").write_text("110\n")
    assert server.update()["status"] == "hold: not beyond 110; at 110"
    assert_holds(server, model, 110)
    assert server.update(120)["status"] == "reached: 120", "an explicit target goes beyond a hold"
    (model.log / "hold").unlink()
    assert server.update()["status"] == "current: at 120"


def test_who_knows_the_hold_of_a_rollback_sees_its_delta(server: Loaded, model: Model) -> None:
    """A delta comes that brings its hold with it: 120, which it leads past, is never reached."""
    model.evolve(100, 120)
    taken_back = model.publish(100, 121, {})
    (taken_back / "hold").write_text("121\n")
    (model.log / "hold").symlink_to(taken_back / "hold")
    aside = model.log / ".aside"
    server.update()  # what the first call does besides takes longer than what is raced here

    for attempt in range(150):
        taken_back.rename(aside)
        server.reset(model.base)
        publication = threading.Timer(attempt % 50 * 0.0001, lambda: aside.rename(taken_back))
        publication.start()
        assert server.update()["position"] in (100, 121)
        publication.join()


@pytest.mark.parametrize("content", ["", "soon", "-5", "110 120", "1e3", "9" * 30])
def test_a_hold_that_cannot_be_read_holds_everything(server: Loaded, model: Model, content: str) -> None:
    model.evolve(100, 110)
    (model.log / "hold").write_text(content)
    assert server.update()["status"] == "hold: its file cannot be read; still at 100"
    assert_holds(server, model, 100)


def test_another_lineage(server: Loaded, model: Model) -> None:
    model.publish(100, 110, random_changes(model.schema, seed=1), lineage="lineage-b")
    text = "lineage: 00000000000000000100-00000000000000000110 belongs to another log"
    assert server.update()["status"] == text
    assert text in refusal(server, 110)
    assert_holds(server, model, 100)


def test_another_schema(server: Loaded, model: Model) -> None:
    kept = [v for v in model.schema.variables if v.name != "items"]
    items = next(v for v in model.schema.variables if v.name == "items")
    wider = ServedVariable("items", items.dtype, (items.shape[0] + 1, *items.shape[1:]), items.kind)
    other = replace(model, schema=Schema.of([*kept, wider]))
    other.publish(100, 110, random_changes(other.schema, seed=1))
    assert server.update()["status"].startswith("schema: ")
    assert_holds(server, model, 100)


def test_a_lying_directory_name(server: Loaded, model: Model) -> None:
    written = model.publish(100, 110, random_changes(model.schema, seed=1))
    written.rename(model.log / f"{100:020d}-{120:020d}")
    assert server.update()["status"] == (
        "range: 00000000000000000100-00000000000000000120 says that it leads "
        "00000000000000000100-00000000000000000110"
    )
    assert_holds(server, model, 100)


def test_a_delta_for_its_first_position_alone(server: Loaded, model: Model) -> None:
    model.publish(90, 110, random_changes(model.schema, seed=1), only_from=True)
    assert server.update()["status"].startswith("only-from: ")
    assert_holds(server, model, 100)
    changes = random_changes(model.schema, seed=2)
    model.publish(100, 105, changes, only_from=True)
    assert server.update()["position"] == 105


def damage(delta: Path, how: str) -> None:
    data, index = delta / "delta.data-00000-of-00001", delta / "delta.index"
    if how == "flipped bit in the data":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 4
        data.write_bytes(content)
    elif how == "flipped bit in the index":
        content = bytearray(index.read_bytes())
        content[len(content) // 2] ^= 4
        index.write_bytes(content)
    elif how == "truncated data":
        data.write_bytes(data.read_bytes()[:-9])
    elif how == "truncated index":
        index.write_bytes(index.read_bytes()[:-9])
    elif how == "no data":
        data.unlink()
    elif how == "no index":
        index.unlink()
    elif how == "a plain file":
        shutil.rmtree(delta)
        delta.write_text("not a directory")
    else:
        raise AssertionError(how)


DAMAGES = [
    "flipped bit in the data",
    "flipped bit in the index",
    "truncated data",
    "truncated index",
    "no data",
    "no index",
    "a plain file",
]


@pytest.mark.parametrize("how", DAMAGES)
def test_damage(server: Loaded, model: Model, how: str) -> None:
    damage(model.publish(100, 110, random_changes(model.schema, seed=1)), how)
    text = "damaged: 00000000000000000100-00000000000000000110 cannot be read"
    assert server.update()["status"] == text, "with -1 the call stops there and says so"
    assert text in refusal(server, 110)
    assert_holds(server, model, 100)


def test_a_damaged_merged_delta_is_gone_around(server: Loaded, model: Model) -> None:
    model.evolve(100, 110)
    model.evolve(110, 120)
    damage(model.publish(100, 120, random_changes(model.schema, seed=1)), "truncated data")
    assert server.update()["status"] == "current: at 120"
    assert_holds(server, model, 120)


def test_a_damaged_step_is_gone_around(server: Loaded, model: Model) -> None:
    """Also where it is the one delta that leads from here to the position that is asked for."""
    model.evolve(100, 110)
    model.evolve(110, 120)
    damage(model.publish(100, 120, random_changes(model.schema, seed=1)), "truncated data")
    assert server.update(120) == {
        "position": 120,
        "step": 1200,
        "rows": 20,
        "deltas": 2,
        "status": "reached: 120",
    }
    assert_holds(server, model, 120)


@contextmanager
def listings(directory: Path) -> Iterator[Callable[[], int]]:
    """Tells how often a directory was listed since it was last asked; the kernel says so."""
    libc = ctypes.CDLL(None)
    events = libc.inotify_init1(os.O_NONBLOCK)
    libc.inotify_add_watch(events, os.fsencode(directory), 0x1)  # IN_ACCESS of <sys/inotify.h>

    def count() -> int:
        try:
            return len(os.read(events, 1 << 16)) // 16
        except BlockingIOError:
            return 0

    try:
        yield count
    finally:
        os.close(events)


def test_a_step_to_a_named_position_lists_nothing(server: Loaded, model: Model) -> None:
    """Its cost does not grow with the deltas that are kept."""
    for start in (100, 110, 120, 130):
        model.evolve(start, start + 10)
    server.update(110)
    with listings(model.log) as listed:
        assert server.update(120)["deltas"] == 1
        assert listed() == 0
        assert server.update(140)["deltas"] == 2, "no single delta leads there"
        assert listed() > 0
        assert server.update()["status"] == "current: at 140"
        assert listed() > 0
    assert_holds(server, model, 140)


def test_a_chain_stops_before_its_damaged_end(server: Loaded, model: Model) -> None:
    model.evolve(100, 110)
    damage(model.publish(110, 120, random_changes(model.schema, seed=1)), "flipped bit in the data")
    assert "damaged: " in refusal(server, 120)
    assert_holds(server, model, 110)


@pytest.mark.parametrize("ids", [[5, 30], [-1, 4], [4, 4], [4, 2]], ids=str)
def test_row_numbers_outside_or_out_of_order(
    server: Loaded, model: Model, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exporter.delta.delta_files._check_ids", lambda *_: None)
    rows = Rows(np.array(ids, np.int64), np.ones((2, 4), np.float32))
    model.publish(100, 110, random_changes(model.schema, seed=1) | {"items": rows})
    assert server.update()["status"].endswith("has wrong rows for items")
    assert_holds(server, model, 100)


def test_fewer_values_than_ids(server: Loaded, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.delta.delta_files._check_ids", lambda *_: None)
    rows = Rows(np.array([1, 2, 3], np.int64), np.ones((2, 4), np.float32))
    model.publish(100, 110, {"items": rows})
    assert server.update()["status"].endswith("has wrong rows for items")
    assert_holds(server, model, 100)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["bias", "users"])
def test_values_that_are_not_finite(server: Loaded, model: Model, name: str, value: float) -> None:
    changes = random_changes(model.schema, seed=1)
    change = changes[name]
    (change.values if isinstance(change, Rows) else change)[-1] = value
    model.publish(100, 110, changes)
    assert server.update()["status"].endswith(f"has NaN or infinity in {name}")
    assert_holds(server, model, 100)


def rounded(changes: dict[str, Change], dtype: DeltaDtype, *, exact: int = 0) -> dict[str, Change]:
    """The changes with all rows of tables but the first `exact` rounded."""
    found = dict(changes)
    for name, change in changes.items():
        if isinstance(change, Rows):
            values = np.array(change.values)
            values[exact:] = round_rows(values[exact:], dtype)
            found[name] = Rows(change.ids, values)
    return found


AWKWARD = np.array(
    [[1e-38, -1e-38, 1e-40, -0.0], [3.3e38, -1e-30, 7.0, 0.1], [1e-45, 0, 0, 0], [-2.5, 1.5, 3.5, 0.5]],
    np.float32,
)


@pytest.mark.parametrize("exact", [0, 2, 5], ids=["all packed", "some packed", "none packed"])
@pytest.mark.parametrize("dtype", DeltaDtype)
def test_packed_rows_are_served_as_they_were_rounded_bit_for_bit(
    server: Loaded, model: Model, dtype: DeltaDtype, exact: int
) -> None:
    changes = rounded(random_changes(model.schema, seed=1), dtype, exact=exact)
    awkward = Rows(np.array([0, 2, 3, 29]), round_rows(AWKWARD, dtype))
    model.publish(100, 110, changes, only_from=True, packing=dtype)
    model.publish(110, 120, {"items": awkward}, only_from=True, packing=dtype)
    model.history[110] = applied(model.values, changes)
    model.history[120] = applied(model.history[110], {"items": awkward})
    for position in (110, 120):
        assert server.update(position)["position"] == position
        assert_holds(server, model, position)
        for name, value in server.values(model.schema).items():
            assert value.tobytes() == model.at(position)[name].tobytes(), name
    model.evolve(120, 130)
    assert server.update()["position"] == 130, "and exact deltas go on"
    assert_holds(server, model, 130)


SHAPES: dict[str, tuple[tuple[int, ...], type]] = {
    "wide": ((30, 6), np.float32),
    "wider": ((20, 9), np.float32),
    "numbers": ((25,), np.float32),
    "matrices": ((15, 2, 3), np.float32),
    "double": ((12, 5), np.float64),
    "half": ((12, 5), np.float16),
    "counts": ((12, 5), np.int64),
}


def tables_of_all_kinds() -> tuple[dict[str, object], dict[str, object]]:
    ids = tf.compat.v1.placeholder(tf.int64, [None], name="ids")
    rows = []
    for name, (shape, dtype) in SHAPES.items():
        initial = np.random.default_rng(0).normal(size=shape).astype(dtype)
        table = tf.compat.v1.get_variable(name, initializer=initial, use_resource=True)
        rows.append(tf.reduce_sum(tf.cast(tf.reshape(tf.gather(table, ids), [-1]), tf.float32)))
    return {"ids": ids}, {"sums": tf.stack(rows)}


def test_packed_rows_of_every_shape_and_dtype(tmp_path: Path) -> None:
    model = updatable_model(tmp_path, tables_of_all_kinds, {"ids": [0]}, stamp=False)
    values = model.values
    for position, dtype in ((110, DeltaDtype.INT8), (120, DeltaDtype.BFLOAT16)):
        changes = random_changes(model.schema, seed=position)
        for variable in model.schema.variables:
            change = changes[variable.name]
            if variable.packed(dtype) and isinstance(change, Rows):
                changes[variable.name] = Rows(change.ids, round_rows(np.asarray(change.values), dtype))
        model.publish(position - 10, position, changes, packing=dtype)
        values = model.history[position] = applied(values, changes)
    with loaded(model) as server:
        for position in (110, 120):
            assert server.update(position)["position"] == position
            assert_holds(server, model, position)


@pytest.mark.landing
@pytest.mark.parametrize("dtype", DeltaDtype)
def test_many_packed_rows_go_by_chunks(exported: Model, tmp_path: Path, dtype: DeltaDtype) -> None:
    model = updatable_model(tmp_path, snapshot_max_rows=0)
    changes = rounded(random_changes(model.schema, seed=1, rows=20), dtype, exact=3)
    model.publish(100, 110, changes, packing=dtype)
    model.history[110] = applied(model.values, changes)
    with loaded(model) as server:
        assert server.update(110)["status"] == "reached: 110 (rows written in chunks)"
        assert_holds(server, model, 110)


def test_a_packed_delta_that_says_it_is_packed_twice(server: Loaded, model: Model) -> None:
    directory = model.publish(100, 110, {}, packing=DeltaDtype.INT8)
    fields = np.array([1, 100, 110, 1100, 6, 0], np.int64)
    rewrite(directory / "delta", {"delta/position": fields})
    assert server.update()["status"].endswith("has format 1, flags 6")


def rewrite(prefix: Path, tensors: dict[str, np.ndarray]) -> None:
    catalog = read_catalog(prefix)
    kept = {name: read_array(catalog, ref) for name, ref in catalog.tensors.items()} | tensors
    with BundleWriter(prefix) as writer:
        for name, array in kept.items():
            writer.add(name, array)


F4 = np.float32
WRONG_PACKING = {
    "scale NaN": {"scales": np.array([1, np.nan, 1], F4)},
    "scale infinite": {"scales": np.array([1, np.inf, 1], F4)},
    "scale too large": {"scales": np.array([1, 2e36, 1], F4)},
    "scale negative": {"scales": np.array([1, -1, 1], F4)},
    "fewer scales": {"scales": np.ones(1, F4)},
    "scales of another dtype": {"scales": np.ones(3)},
    "scales of another rank": {"scales": np.ones((3, 1), F4)},
    "codes of another dtype": {"packed": np.ones((3, 4), np.uint8)},
    "codes of another shape": {"packed": np.ones((3, 5), np.int8)},
    "fewer codes": {"packed": np.ones((2, 4), np.int8), "scales": np.ones(2, F4)},
    "more codes": {"packed": np.ones((4, 4), np.int8), "scales": np.ones(4, F4)},
    "place outside": {"exact": np.array([0, 5])},
    "place negative": {"exact": np.array([-1, 4])},
    "place twice": {"exact": np.array([4, 4])},
    "places in disorder": {"exact": np.array([4, 0])},
    "fewer places": {"exact": np.array([0])},
    "places of another dtype": {"exact": np.array([0, 4], np.int32)},
    "more exact values": {"values": np.ones((3, 4), F4)},
}


@pytest.mark.parametrize("case", WRONG_PACKING)
def test_wrong_packed_rows(server: Loaded, model: Model, case: str) -> None:
    values = np.random.default_rng(0).normal(size=(5, 4)).astype(F4)
    values[1:4] = round_rows(values[1:4], DeltaDtype.INT8)
    rows = Rows(np.array([0, 2, 5, 6, 9]), values)
    directory = model.publish(100, 110, {"items": rows}, packing=DeltaDtype.INT8)
    rewrite(directory / "delta", {f"items/{key}": array for key, array in WRONG_PACKING[case].items()})
    assert server.update()["status"].endswith(("cannot be read", "has wrong packed rows for items"))
    assert_holds(server, model, 100)


def test_infinity_that_packed_rows_hold(server: Loaded, model: Model) -> None:
    rows = Rows(np.array([1, 3]), np.ones((2, 4), F4))
    directory = model.publish(100, 110, {"items": rows}, packing=DeltaDtype.BFLOAT16)
    rewrite(directory / "delta", {"items/packed": np.full((2, 4), np.inf, ml_dtypes.bfloat16)})
    assert server.update()["status"].endswith("has NaN or infinity in items")
    assert_holds(server, model, 100)


HOSTILE_NAMES = [
    "hold2",
    "..-..",
    "100-110",
    f"{100:020d}-{110:020d}.tmp",
    f" {100:020d}-{110:020d}",
    f"{100:020d}-{110:020d}\n",
    f"{110:020d}-{100:020d}",
    f"{100:020d}-{100:020d}",
    "9" * 20 + "-" + "9" * 20,
    f"{-100:020d}-{110:020d}",
    f"{100:020d}_{110:020d}",
    "*",
    "[0-9]",
    "\\",
    "$(id)",
    ".staging-x",
    "é\U0001f600",
    "a" * 200,
]


def test_hostile_names_are_ignored(server: Loaded, model: Model) -> None:
    written = model.publish(100, 110, random_changes(model.schema, seed=1))
    for name in HOSTILE_NAMES:
        shutil.copytree(written, model.log / name)
    (model.log / "dangling").symlink_to("nowhere")
    (model.log / f"{200:020d}-{210:020d}").symlink_to(model.log)
    shutil.rmtree(written)
    assert server.update()["status"] == "gap: no delta leads on from 100"
    model.evolve(100, 110)
    assert server.update()["position"] == 110
    assert_holds(server, model, 110)


def test_other_logs_are_not_looked_at(server: Loaded, model: Model) -> None:
    other = replace(model, options=replace(model.options, log=50))
    other.publish(100, 110, random_changes(model.schema, seed=1))
    assert server.update()["status"] == "current: at 100"


def test_an_unchanged_variable_is_not_touched(server: Loaded, model: Model) -> None:
    change = random_changes(model.schema, seed=1)["items"]
    model.publish(100, 110, {"items": change})
    model.history[110] = {name: value.copy() for name, value in model.values.items()}
    assert isinstance(change, Rows)
    model.history[110]["items"][change.ids] = change.values
    assert server.update()["rows"] == len(change.ids)
    assert_holds(server, model, 110)


PLACES = ["moved", "deep/er", "st*rs and? (signs)", "sp\u00e4ce \U0001f600", "line\nbreak", "a-b/0-1"]


@pytest.mark.parametrize("place", PLACES, ids=range(len(PLACES)))
def test_a_moved_model_finds_its_own_deltas(
    session: Loaded, model: Model, tmp_path: Path, place: str
) -> None:
    moved = replace(model, base=tmp_path / place)
    moved.evolve(100, 110)
    session.reset(moved.base)
    assert session.update()["position"] == 110
    assert_holds(session, moved, 110)


@pytest.mark.landing
@pytest.mark.parametrize(
    "version", ["model/100", "./model/100/", "model//100", "model/100/.", "model/x/../100"]
)
def test_a_model_loaded_by_a_relative_path(
    model: Model, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    model.evolve(100, 110)
    (model.base / "x").mkdir()
    monkeypatch.chdir(model.base.parent)
    with loaded(Path(version)) as server:
        assert server.update()["position"] == 110


@pytest.mark.parametrize("version", ["100", "."])
def test_a_model_loaded_from_beside_or_inside(
    model: Model, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    model.evolve(100, 110)
    monkeypatch.chdir(model.base if version == "100" else model.version)
    with loaded(Path(version)) as server:
        assert server.update()["position"] == 110


def test_a_restarted_model_catches_up_in_one_call(model: Model) -> None:
    for start in range(100, 200, 10):
        model.evolve(start, start + 10)
    with loaded(model) as server:
        assert server.update()["deltas"] == 10
        assert_holds(server, model, 200)


def test_many_rows_go_by_chunks_and_the_status_says_so(exported: Model, tmp_path: Path) -> None:
    # Rows of overlays count a sixteenth.
    model = updatable_model(tmp_path, snapshot_max_rows=0 if MAPPED else 8)
    model.evolve(100, 110, rows=4)
    model.evolve(110, 120, rows=20)
    with loaded(model) as server:
        assert server.update(110)["status"] == "reached: 110"
        assert server.update(120)["status"] == "reached: 120 (rows written in chunks)"
        assert_holds(server, model, 120)


def test_a_warm_up_request_catches_up(server: Loaded, model: Model) -> None:
    signatures = {
        name: message_class("SignatureDef").FromString(signature.SerializeToString())
        for name, signature in server.signatures.items()
    }
    request = parse_request(CATCH_UP_REQUEST, signatures)
    model.evolve(100, 110)
    assert server.call(request.signature, **request.inputs)["position"].tolist() == [110]
