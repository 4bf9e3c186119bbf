from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.delta.format import ChangeKind, Rows, ServedVariable, span_name
from exporter.errors import CheckpointNotFound, CorruptFile, UnsupportedFormat
from exporter.increments.history import CheckpointMarker, History, identify, read_history
from exporter.increments.increment import (
    Changed,
    CheckpointId,
    Contents,
    Increment,
    StoredIncrement,
    from_json,
    to_json,
)
from exporter.storage.layout import DELTA_NAME, MANIFEST_FILE, flaw_of
from exporter.wire.dtypes import DType
from tests.support.increments import apply_increments, publish

HEX = st.text("0123456789abcdef", min_size=32, max_size=32)
STEPS = st.integers(0, 10**18)
FILE_NAMES = st.text(min_size=1, max_size=20).filter(lambda name: not flaw_of(name))
CHECKPOINTS = st.builds(
    CheckpointId, FILE_NAMES, STEPS, st.text("0123456789abcdef", min_size=64, max_size=64)
)


@st.composite
def changes(draw: st.DrawFn) -> Changed:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    kind = draw(st.sampled_from(ChangeKind))
    rows = draw(st.integers(0, shape[0])) if kind is ChangeKind.TABLE else 1
    return Changed(
        ServedVariable(draw(st.text(max_size=20)), draw(st.sampled_from(DType)), shape, kind), rows
    )


@st.composite
def increments(draw: st.DrawFn) -> Increment:
    start = draw(STEPS)
    return Increment(
        id=draw(HEX),
        run=draw(HEX),
        generation=draw(st.integers(0, 99)),
        parent=draw(HEX | CHECKPOINTS),
        from_step=start,
        to_step=start + draw(st.integers(1, 1000)),
        session=draw(HEX | st.none()),
        event_time=draw(st.none() | st.datetimes(timezones=st.just(timezone.utc))),
        variables=tuple(
            draw(st.lists(changes(), max_size=3, unique_by=lambda changed: changed.variable.name))
        ),
    )


@given(increments())
def test_a_manifest_comes_back(increment: Increment) -> None:
    assert from_json(to_json(increment).encode(), Path("manifest.json")) == increment


@given(
    st.builds(
        CheckpointMarker,
        checkpoint=CHECKPOINTS,
        run=HEX,
        after=HEX | st.none(),
        is_equal=st.booleans(),
        session=HEX | st.none(),
    )
)
def test_a_milestone_comes_back(marker: CheckpointMarker) -> None:
    assert CheckpointMarker.from_json(marker.to_json().encode(), Path("x.json")) == marker


def test_a_milestone_equals_no_increment_unless_it_says_so() -> None:
    marker = CheckpointMarker(
        checkpoint=CheckpointId("model.ckpt-3", 3, "c" * 64), run="b" * 32, after="a" * 32, is_equal=True
    )
    document = json.loads(marker.to_json())
    assert document.pop("is_equal") is True
    assert not CheckpointMarker.from_json(json.dumps(document).encode(), Path("x.json")).is_equal


EXAMPLE = Increment(
    id="a" * 32,
    run="b" * 32,
    generation=1,
    parent=CheckpointId("model.ckpt-3", 3, "c" * 64),
    from_step=3,
    to_step=8,
    variables=(
        Changed(ServedVariable("t", DType.FLOAT, (5, 2), ChangeKind.TABLE), 2),
        Changed(ServedVariable("w", DType.INT64, (), ChangeKind.DENSE), 1),
    ),
)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["id"], "not hex"),
        (["run"], None),
        (["generation"], -1),
        (["parent"], {}),
        (["parent"], {"increment": 7}),
        (["parent", "checkpoint", "step"], "3"),
        (["to_step"], 3),
        (["kind"], "milestone"),
        (["variables", 0, "kind"], "dynamic"),
        (["variables", 0, "rows"], 6),
        (["variables", 0, "dtype"], "float33"),
        (["variables", 0, "shape"], [5, -2]),
        (["variables", 0, "shape"], []),
        (["variables", 1, "rows"], 2),
    ],
)
def test_a_damaged_manifest_is_named(path: list[Any], value: Any) -> None:
    document = json.loads(to_json(EXAMPLE))
    target = document
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(CorruptFile, match="damaged"):
        from_json(json.dumps(document).encode(), Path("manifest.json"))


def test_a_variable_that_is_listed_twice_is_refused() -> None:
    document = json.loads(to_json(EXAMPLE))
    document["variables"].append(document["variables"][0])
    with pytest.raises(CorruptFile, match="damaged"):
        from_json(json.dumps(document).encode(), Path("manifest.json"))


def test_another_format_version_is_refused() -> None:
    document = {**json.loads(to_json(EXAMPLE)), "format_version": 2}
    with pytest.raises(UnsupportedFormat, match="version 2"):
        from_json(json.dumps(document).encode(), Path("manifest.json"))


def write(directory: Path, increment: Increment, tensors: dict[str, np.ndarray]) -> StoredIncrement:
    directory.mkdir(parents=True)
    with BundleWriter(directory / DELTA_NAME) as writer:
        for name, value in tensors.items():
            writer.add(name, value)
    (directory / MANIFEST_FILE).write_text(to_json(increment))
    return StoredIncrement(directory, increment)


GOOD = {
    "t/ids": np.array([1, 4], np.int64),
    "t/values": np.array([[1, 2], [3, 4]], np.float32),
    "w/value": np.array([9], np.int64),
}


def test_changes_come_back_and_are_overlaid(tmp_path: Path) -> None:
    stored = write(tmp_path / "i", EXAMPLE, GOOD)
    (_, rows), (_, whole) = stored.changes()
    assert isinstance(rows, Rows)
    assert rows.ids.tolist() == [1, 4]
    assert int(np.asarray(whole)) == 9
    frozen = np.zeros((5, 2), np.float32)
    frozen.flags.writeable = False
    values: dict[str, Any] = {"t": frozen, "w": np.int64(0)}
    apply_increments(values, [stored])
    assert values["t"].tolist() == [[0, 0], [1, 2], [0, 0], [0, 0], [3, 4]]
    assert int(values["w"]) == 9


@pytest.mark.parametrize(
    "tensors",
    [
        {**GOOD, "t/ids": np.array([4, 1], np.int64)},
        {**GOOD, "t/ids": np.array([1, 1], np.int64)},
        {**GOOD, "t/ids": np.array([1, 5], np.int64)},
        {**GOOD, "t/ids": np.array([-1, 4], np.int64)},
        {**GOOD, "t/ids": np.array([1, 4], np.int32)},
        {**GOOD, "t/ids": np.array([1, 2, 4], np.int64)},
        {**GOOD, "t/values": np.zeros((2, 3), np.float32)},
        {**GOOD, "t/values": np.zeros((2, 2), np.float64)},
        {name: value for name, value in GOOD.items() if name != "w/value"},
        {**GOOD, "unlisted/value": np.zeros(1, np.float32)},
        {**GOOD, "unlisted/ids": np.zeros(1, np.int64), "unlisted/values": np.zeros((1, 2), np.float32)},
    ],
)
def test_contents_that_are_not_what_the_manifest_says_are_named(
    tmp_path: Path, tensors: dict[str, np.ndarray]
) -> None:
    stored = write(tmp_path / "i", EXAMPLE, tensors)
    with pytest.raises(CorruptFile):
        list(stored.changes())


def history(
    *entries: tuple[str, str | CheckpointId, int], markers: tuple[CheckpointMarker, ...] = ()
) -> History:
    """Increments given as (id, parent, generation), in order of their steps."""
    found = [
        StoredIncrement(
            Path(name),
            structs.replace(
                EXAMPLE,
                id=name,
                parent=parent,
                generation=generation,
                session=str(generation) * 32,
                from_step=i,
                to_step=i + 1,
            ),
        )
        for i, (name, parent, generation) in enumerate(entries)
    ]
    return History(tuple(reversed(found)), markers)


def test_a_checkpoint_is_known_by_its_contents_and_not_by_its_name() -> None:
    one, two = CheckpointId("model.ckpt-4", 4, "4" * 64), CheckpointId("model.ckpt-5", 4, "4" * 64)
    assert one == two
    assert not one != two  # noqa: SIM202  what `!=` says is asked
    assert one != CheckpointId("model.ckpt-4", 4, "5" * 64)


FIRST, LATER = CheckpointId("model.ckpt-0", 0, "0" * 64), CheckpointId("model.ckpt-2", 2, "2" * 64)


def names(found: tuple[StoredIncrement, ...]) -> list[str]:
    return [stored.increment.id for stored in found]


def test_of_two_forks_the_younger_one_is_restored_though_it_has_come_less_far() -> None:
    """A trainer that was set back trains on from there; what it abandoned may have been further."""
    forks = history(("new", FIRST, 2), ("newer", "new", 2), ("old", FIRST, 1), ("older", "old", 1))
    assert names(forks.after(FIRST)) == ["new", "newer"]


def test_a_chain_is_followed_from_parent_to_child() -> None:
    chain = history(("a", FIRST, 1), ("b", "a", 1), ("c", "b", 1), ("x", "unknown", 1))
    assert names(chain.after(FIRST)) == ["a", "b", "c"]
    assert names(chain.after(LATER)) == []


def test_a_full_checkpoint_joins_the_chain_by_its_milestone() -> None:
    noted = (CheckpointMarker(checkpoint=LATER, run="run", after="b", is_equal=False, session="1" * 32),)
    chain = history(("a", FIRST, 1), ("b", "a", 1), ("c", "b", 1), markers=noted)
    assert names(chain.after(LATER)) == ["c"]
    assert (
        names(chain.after(structs.replace(LATER, digest="3" * 64))) == []
    )  # the same name and step, other values
    assert names(chain.after(structs.replace(LATER, name="model.ckpt-1"))) == [
        "c"
    ]  # another name, the same values


def test_a_full_checkpoint_that_was_written_before_the_first_increment_joins_the_chain() -> None:
    noted = (
        CheckpointMarker(checkpoint=LATER, run=EXAMPLE.run, after=None, is_equal=False, session="1" * 32),
    )
    assert names(history(("a", FIRST, 1), ("b", "a", 1), markers=noted).after(LATER)) == ["a", "b"]


def test_the_younger_fork_is_followed() -> None:
    noted = (CheckpointMarker(checkpoint=LATER, run="run", after="b", is_equal=False, session="1" * 32),)
    forked = history(
        ("a", FIRST, 1), ("b", "a", 1), ("c", "b", 1), ("d", LATER, 2), ("e", "d", 2), markers=noted
    )
    assert names(forked.after(LATER)) == ["d", "e"]
    assert forked.generation == 2


def test_a_milestone_counts_for_the_increments_of_its_own_session() -> None:
    """What changed between b and the full checkpoint, another session that restored b does not know of."""
    noted = (CheckpointMarker(checkpoint=LATER, run="run", after="b", is_equal=False, session="1" * 32),)
    restored = history(("a", FIRST, 1), ("b", "a", 1), ("x", "b", 2), ("y", "x", 2), markers=noted)
    assert names(restored.after(LATER)) == []
    assert names(restored.after(FIRST)) == ["a", "b", "x", "y"]
    assert restored.chain(LATER, "y") is None
    assert restored.chain(LATER, "b") is None
    assert names(restored.chain("b", "y") or ()) == ["x", "y"]


def test_a_full_checkpoint_that_equals_an_increment_is_that_increment_to_every_session() -> None:
    noted = (CheckpointMarker(checkpoint=LATER, run="run", after="b", is_equal=True, session="1" * 32),)
    chain = history(("a", FIRST, 1), ("b", "a", 1), ("x", LATER, 2), ("y", "x", 2), markers=noted)
    assert names(chain.after(FIRST)) == ["a", "b", "x", "y"]
    assert names(chain.chain("a", "y") or ()) == ["b", "x", "y"]
    assert chain.chain(LATER, "b") == ()


def test_files_of_releases_that_noted_no_session_may_lead_on_but_not_for_certain() -> None:
    noted = (CheckpointMarker(checkpoint=LATER, run=EXAMPLE.run, after="b", is_equal=False),)
    known = history(("a", FIRST, 1), ("b", "a", 1), ("c", "b", 1), ("d", "c", 1))
    old = [structs.replace(s, increment=structs.replace(s.increment, session=None)) for s in known.increments]
    chain = History(tuple(old), noted)
    assert names(chain.after(LATER)) == ["c", "d"]
    assert chain.chain(LATER, "d") is None  # what is published is to be compared
    assert names(chain.chain("c", "d") or ()) == ["d"]
    before = structs.replace(LATER, step=3)  # an increment of a session is ahead of its full checkpoint
    assert names(History(tuple(old), (structs.replace(noted[0], checkpoint=before),)).after(before)) == []


def test_a_ring_ends() -> None:
    assert names(history(("a", "b", 1), ("b", "a", 1), ("c", FIRST, 1)).after(FIRST)) == ["c"]
    ring = history(
        ("a", "b", 1),
        ("b", "a", 1),
        markers=(CheckpointMarker(checkpoint=FIRST, run="run", after="a", is_equal=False),),
    )
    assert len(ring.after(FIRST)) <= 2


def test_a_directory_of_increments(tmp_path: Path) -> None:
    assert read_history(tmp_path) == History()
    root = tmp_path / "increments"
    name = span_name(EXAMPLE.from_step, EXAMPLE.to_step)
    stored = write(root / name, EXAMPLE, GOOD)
    fork = structs.replace(EXAMPLE, id="d" * 32)
    twin = write(root / f"{name}-{'b' * 8}", fork, GOOD)
    (root / ".staging-1").mkdir()
    (root / "notes").mkdir()
    (root / f"{1:020d}-{2:020d}").mkdir()  # being removed
    marker = CheckpointMarker(checkpoint=FIRST, run="b" * 32, after=None, is_equal=False)
    (root / marker.file_name).write_text(marker.to_json())
    assert read_history(tmp_path) == History((stored, twin), (marker,))


def test_identity_is_content(tmp_path: Path) -> None:
    prefix = tmp_path / "model.ckpt-7"
    with BundleWriter(prefix) as writer:
        writer.add("w", np.zeros(3, np.float32))
    first = identify(prefix, 7)
    for path in tmp_path.iterdir():
        path.unlink()
    with BundleWriter(prefix) as writer:
        writer.add("w", np.ones(3, np.float32))
    assert identify(prefix, 7) != first
    with pytest.raises(CheckpointNotFound):
        identify(tmp_path / "gone", 7)


def test_a_trainer_that_comes_by_the_same_steps_again_keeps_what_was_there(tmp_path: Path) -> None:
    def fill(value: int) -> Callable[[BundleWriter], Contents]:
        def write(writer: BundleWriter) -> Contents:
            writer.add("w/value", np.array([value], np.int64))
            return Contents(EXAMPLE.variables[1:])

        return write

    for number in (1, 2):
        draft = structs.replace(EXAMPLE, id=str(number) * 32, session=str(number) * 32)
        publish(tmp_path, draft, fill(number))
    found = {stored.increment.id[0]: stored for stored in read_history(tmp_path).increments}
    assert sorted(found) == ["1", "2"]
    for number, stored in found.items():
        ((_, value),) = stored.changes()
        assert value == int(number)
