"""The index of dynamic tables against a dict: built, changed, filled up, with keys of every structure."""

from __future__ import annotations

import numpy as np
import pytest

from exporter.errors import TableFull
from exporter.tables.change_index import (
    ArrayState,
    change_index,
    find_rows,
    live_rows,
)
from exporter.tables.geometry import TableGeometry, keys_of
from exporter.tables.parts import PARTS
from exporter.tables.place_keys import KeyTwice
from exporter.tables.spread import WINDOW, Crowded, spread
from tests.support.dynamic_values import built_index
from tests.support.tables_index import LIMITS, Array, apply, new_table


def assert_holds(geometry: TableGeometry, state: ArrayState, wanted: dict[int, int]) -> None:
    keys = np.array(list(wanted), np.int64)
    assert find_rows(geometry, state, keys).tolist() == list(wanted.values())
    assert sorted(np.flatnonzero(live_rows(geometry, state)).tolist()) == sorted(wanted.values())
    absent = np.setdiff1d(np.concatenate([LIMITS, np.arange(50)]), keys)
    assert (find_rows(geometry, state, absent) == -1).all()


def structured(kind: str, count: int) -> Array:
    numbers = np.arange(count, dtype=np.int64)
    if kind.startswith("multiples of 2**"):
        return numbers << int(kind.removeprefix("multiples of 2**"))
    return {
        "sequence": numbers,
        "negative": -numbers,
        "slot above": (numbers % 50 << 48) + numbers // 50,
        "slot at the top": (numbers % 50 << 57) + numbers // 50,
        "limits": np.concatenate([LIMITS, numbers[3 : count - len(LIMITS)]]),
        "hash of hashes": np.random.default_rng(1).permutation(np.unique(numbers**3 * 7919)),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "sequence",
        "negative",
        "slot above",
        "slot at the top",
        "limits",
        "hash of hashes",
        *(f"multiples of 2**{bits}" for bits in (1, 8, 20, 32, 40, 47)),
    ],
)
def test_keys_of_any_structure_are_found_and_others_are_not(kind: str) -> None:
    keys = structured(kind, 60_000)
    geometry = TableGeometry.for_keys(len(keys))
    state = new_table(geometry, keys)
    assert (find_rows(geometry, state, keys) == np.arange(len(keys))).all()
    others = np.setdiff1d(np.random.default_rng(2).integers(-(2**63), 2**63 - 1, 10_000), keys)
    assert (find_rows(geometry, state, others) == -1).all()
    assert geometry.index_bytes <= 25.5 * len(keys)


@pytest.mark.parametrize("count", [0, 1, 2, 999, 5000])
def test_small_tables(count: int) -> None:
    keys = np.random.default_rng(count).permutation(np.arange(-count, count, 2, dtype=np.int64))
    geometry = TableGeometry.for_keys(len(keys), defaults=3)
    state = new_table(geometry, keys)
    assert_holds(geometry, state, {int(key): row for row, key in enumerate(keys)})
    sizes = geometry.groups, geometry.slots, geometry.capacity
    assert TableGeometry.of_shapes(*sizes, defaults=3) == geometry


@pytest.mark.parametrize("range_keys", [3000, 100])
def test_a_table_of_several_ranges_holds_every_key(monkeypatch: pytest.MonkeyPatch, range_keys: int) -> None:
    keys = np.random.default_rng(3).permutation(np.arange(20_000, dtype=np.int64) * 977)
    geometry = TableGeometry.for_keys(len(keys))
    monkeypatch.setattr("exporter.tables.place_keys.RANGE_KEYS", range_keys)
    state = new_table(geometry, keys)
    assert_holds(geometry, state, {int(key): row for row, key in enumerate(keys)})
    for run in (2, 4, 6):
        seeds, rows = built_index(geometry, keys, run=run)
        assert np.array_equal(state.index_rows, rows), "however ranges are divided"
        assert np.array_equal(state.index_seeds, seeds)


def test_keys_that_are_left_out_are_in_no_slot_and_still_must_not_occur_twice() -> None:
    keys = np.arange(5000, dtype=np.int64) * 31
    geometry = TableGeometry.for_keys(len(keys))
    rows = np.where(keys % 2, np.arange(5000), ~np.arange(5000))
    state = ArrayState(*built_index(geometry, keys, rows), np.append(keys, [0] * (geometry.capacity - 5000)))
    assert np.array_equal(find_rows(geometry, state, keys), np.maximum(rows, -1))
    with pytest.raises(KeyTwice, match="key 62 occurs twice"):
        built_index(geometry, np.append(keys, 62), np.append(rows, 5000))


def test_many_keys_that_occur_twice_end() -> None:
    keys = np.repeat(np.arange(1, 2601, dtype=np.int64) * 7919, 2)
    windows = np.arange(2600, dtype=np.int64) * WINDOW
    with pytest.raises(Crowded) as found:
        spread(keys, np.full(2600, 2, np.int64), windows, np.zeros(2601 * WINDOW, bool))
    assert found.value.twice == 7919


def test_any_sequence_of_changes_is_that_of_a_dict() -> None:
    random = np.random.default_rng(11)
    universe = np.unique(
        np.concatenate([LIMITS, random.integers(-(2**63), 2**63 - 1, 6000), np.arange(3000)])
    )
    first = random.choice(universe, 3000, replace=False)
    geometry = TableGeometry.for_keys(len(first), head_room=0.4)
    state = new_table(geometry, first)
    wanted = {int(key): row for row, key in enumerate(first)}
    for turn in range(60):
        picked = random.permutation(universe)[: int(random.integers(0, 1500))]
        add, drop = np.split(picked, [int(len(picked) * random.random())])
        room = geometry.usable_rows - len(wanted)
        add = add[: max(0, room)]
        change = change_index(geometry, state, add, drop)
        apply(state, change)
        for key in drop.tolist():
            wanted.pop(key, None)
        for key, row in zip(add.tolist(), change.added.tolist(), strict=True):
            assert wanted.setdefault(key, row) == row, f"turn {turn}: {key} moved"
        assert len(set(wanted.values())) == len(wanted), f"turn {turn}: a row has two keys"
        assert_holds(geometry, state, wanted)


def test_a_change_may_be_applied_twice_and_changes_little() -> None:
    keys = np.random.default_rng(5).integers(-(2**63), 2**63 - 1, 100_000)
    geometry = TableGeometry.for_keys(len(keys))
    state = new_table(geometry, keys)
    change = change_index(geometry, state, np.array([42, -1]), keys[:1])
    assert len(change.rows.ids) < 40 and len(change.seeds.ids) <= 2
    apply(state, change)
    apply(state, change)
    assert find_rows(geometry, state, np.array([42, -1])).tolist() == change.added.tolist()
    assert find_rows(geometry, state, keys[:2]).tolist() == [-1, 1]


def test_the_last_row_is_filled_and_one_more_is_an_error() -> None:
    keys = np.arange(500, dtype=np.int64)
    geometry = TableGeometry.for_keys(len(keys))
    state = new_table(geometry, keys)
    more = np.arange(1000, 1000 + geometry.usable_rows - len(keys))
    apply(state, change_index(geometry, state, more, keys[:0]))
    assert live_rows(geometry, state).sum() == geometry.usable_rows
    with pytest.raises(TableFull, match="1 new keys, and room for 0"):
        change_index(geometry, state, np.array([77_777]), keys[:0])
    apply(state, change_index(geometry, state, keys[:0], keys[:3]))
    change = change_index(geometry, state, np.array([77_777, 88_888]), keys[:0])
    assert set(change.added.tolist()) <= {0, 1, 2}, "rows of dropped keys are found by a scan"


def test_a_key_that_occurs_twice_is_refused_by_name() -> None:
    keys = np.array([5, 6, 7, 6], np.int64)
    with pytest.raises(KeyTwice, match="key 6 occurs twice"):
        new_table(TableGeometry.for_keys(4), keys)
    for often in (2, 10, 200, 5000):
        with pytest.raises(KeyTwice, match="key 6 occurs twice"):
            new_table(TableGeometry.for_keys(6000), np.append(np.arange(1000), [6] * (often - 1)))
    state = new_table(TableGeometry.for_keys(3), keys[:3])
    with pytest.raises(ValueError, match="twice"):
        change_index(TableGeometry.for_keys(3), state, keys[:1], keys[:1])


def test_keys_made_to_collide_end_in_a_named_error() -> None:
    keys = keys_of(np.arange(400, dtype=np.uint64))
    with pytest.raises(TableFull, match="400 of a table's keys fall in one place") as refused:
        new_table(TableGeometry.for_keys(len(keys)), keys)
    assert "made to collide" in refused.value.hint


def test_the_room_that_an_error_names_is_enough() -> None:
    """Keys that collide in this table alone: in a larger one their hashes are told apart."""
    geometry = TableGeometry.for_keys(3000)
    step = 64 - geometry.group_bits - 4
    keys = np.concatenate([np.arange(2800), keys_of(np.arange(200, dtype=np.uint64) << np.uint64(step - 4))])
    with pytest.raises(TableFull, match="of a table's keys fall in one place") as refused:
        new_table(geometry, keys)
    room = float(refused.value.hint.rpartition(" ")[2])
    new_table(TableGeometry.for_keys(len(keys), room), keys)


@pytest.mark.parametrize("sizes", [(3, 200, 10), (4, 100, 10), (4, 133, 10), (0, 128, 10), (4, 132, 1)])
def test_sizes_that_no_table_has_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="make no table"):
        TableGeometry.of_shapes(*sizes)
    assert len(PARTS) == 4


def test_an_index_that_names_a_row_below_the_first_is_damaged() -> None:
    keys = np.arange(500, dtype=np.int64)
    geometry = TableGeometry.for_keys(len(keys))
    state = new_table(geometry, keys)
    state.index_rows[0] = -1
    with pytest.raises(IndexError, match="no row -1"):
        live_rows(geometry, state)
