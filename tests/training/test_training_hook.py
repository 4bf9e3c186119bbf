from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.errors import CorruptFile, MissingTensors, PublishError, ShapeMismatch, UsageError
from exporter.increments.history import read_history
from exporter.training import (
    ExportHook,
    IncrementHook,
    MonitoredTrainingSession,
    StopAfterHook,
    restore_increments,
)
from exporter.training.store import Store
from tests.support.increments import apply_increments, differing, full, starts, values_of
from tests.support.logs import damage_tensor
from tests.support.training_graphs import LAZY, OPTIMIZERS, Training, two_towers, v1


@pytest.mark.parametrize(
    "hook",
    [
        lambda directory: IncrementHook(directory, save_increment_steps=1),
        lambda directory: ExportHook(["--ckpt-dir", str(directory), "--out", "models/ranker"]),
        lambda _: StopAfterHook(60),
        lambda directory: Renamed(directory, save_increment_steps=1),
    ],
)
def test_hooks_are_tensorflows_own(tmp_path: Path, hook: Callable[[Path], Any]) -> None:
    """Estimators refuse any other; tests/matrix trains with the real ones."""
    made = hook(tmp_path)
    assert isinstance(made, v1.train.SessionRunHook)
    assert isinstance(made, (IncrementHook, ExportHook, StopAfterHook))
    assert type(copy.copy(made)) is type(made) is type(hook(tmp_path))


def test_hooks_go_to_other_processes(tmp_path: Path) -> None:
    for made in (Renamed(tmp_path, save_increment_steps=1), StopAfterHook(60)):
        assert type(pickle.loads(pickle.dumps(made))) is type(made)


class Renamed(IncrementHook):
    """A hook of a user's, which is one of TensorFlow's, too."""


def test_the_names_of_hooks_are_imported_without_tensorflow() -> None:
    code = "import sys; from exporter.training import ExportHook, IncrementHook, StopAfterHook"
    code += "; raise SystemExit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def assert_exact(training: Training, final: Path) -> None:
    history = read_history(training.directory)
    known = starts(history, training.directory)
    assert len(known) > 1
    for start in known:
        assert differing(training.directory, start, final) == [], start


def rows_in(directory: Path, name: str) -> list[int | None]:
    """For each increment the number of rows of a variable, None where it is absent."""
    found = []
    for stored in read_history(directory).increments:
        counts = {changed.variable.name: changed.rows for changed in stored.increment.variables}
        found.append(counts.get(name))
    return found


@pytest.mark.parametrize(
    ("optimizer", "use_resource"),
    [*((name, True) for name in sorted(OPTIMIZERS)), *((name, False) for name in ("sgd", "adagrad", "adam"))],
)
def test_full_checkpoint_and_increments_are_the_last_state(
    tmp_path: Path, optimizer: str, use_resource: bool
) -> None:
    training = Training(tmp_path, two_towers(optimizer, use_resource))
    final = training.run(25)
    assert_exact(training, final)
    assert set(rows_in(tmp_path, "frozen")) == {None}
    if optimizer in LAZY:
        assert all(rows is not None and 0 < rows < 15 for rows in rows_in(tmp_path, "table"))


def test_an_optimizer_with_a_dense_decay_is_compared_row_by_row(tmp_path: Path) -> None:
    training = Training(
        tmp_path, two_towers("adam", True), save_checkpoint_steps=1000, save_increment_steps=1
    )
    training.run(12)
    first, second, *_ = rows_in(tmp_path, "table")
    assert first == 30  # nothing to compare with yet
    assert second is not None and 0 < second < 30  # rows that were never looked up stay


def test_a_moving_average_of_a_table_is_exact(tmp_path: Path) -> None:
    def build() -> Any:
        table = v1.get_variable("table", [30, 3], use_resource=True)
        loss = tf.reduce_sum(tf.gather(table, tf.random.uniform([4], 0, 20, tf.int64)))
        update = OPTIMIZERS["sgd"]().minimize(loss)
        with tf.control_dependencies([update]):
            return tf.train.ExponentialMovingAverage(0.9).apply([table])

    training = Training(tmp_path, build)
    assert_exact(training, training.run(25))
    assert rows_in(tmp_path, "table/ExponentialMovingAverage")[-1] is not None


def test_updates_written_by_hand_are_recorded(tmp_path: Path) -> None:
    def build() -> Any:
        a = v1.get_variable("a", [9, 2], use_resource=True)
        b = v1.get_variable("b", [9, 2], use_resource=False)
        c = v1.get_variable("c", [9, 2, 2], use_resource=True)
        ids = tf.random.uniform([2], 0, 9, tf.int32)
        nd = tf.stack([ids, ids % 2], axis=1)
        return [
            v1.scatter_mul(a, ids, tf.fill([2, 2], 1.01)),
            v1.scatter_div(b, ids, tf.fill([2, 2], 1.01)),
            v1.scatter_nd_update(c, nd, tf.random.uniform([2, 2])),
        ]

    training = Training(tmp_path, build)
    assert_exact(training, training.run(25))
    assert all(rows is not None and rows < 9 for rows in rows_in(tmp_path, "c"))


def test_a_write_that_is_run_by_itself_is_recorded(tmp_path: Path) -> None:
    written = {}

    def build() -> Any:
        a = v1.get_variable("a", [9, 2], use_resource=True)
        written["reset"] = v1.scatter_update(a, [7], [[5.0, 5.0]])
        return v1.scatter_add(a, [1], [[1.0, 1.0]])

    training = Training(tmp_path, build, save_checkpoint_steps=100, save_increment_steps=1)
    with training.session() as (session, train_op):
        session.run(train_op)
        session.run(written["reset"])
        session.run(train_op)
        session.run(written["reset"].op.name)
        session.run(train_op)
    assert rows_in(tmp_path, "a")[1:] == [2, 2]
    assert values_of(Path(tf.train.latest_checkpoint(str(tmp_path))))["a"][7].tolist() == [5.0, 5.0]
    assert_exact(training, Path(tf.train.latest_checkpoint(str(tmp_path))))


@pytest.mark.landing
@pytest.mark.parametrize("before", [False, True], ids=["after the saver", "before the saver"])
def test_training_resumes_where_the_last_increment_ended(tmp_path: Path, before: bool) -> None:
    class Killed(Exception):
        pass

    training = Training(tmp_path, two_towers("adagrad", True), save_increment_steps=4)
    with pytest.raises(Killed), training.session(before=before) as (session, train_op):
        for _ in range(17):
            session.run(train_op)
        raise Killed
    history = read_history(tmp_path)
    last = history.increments[-1].increment
    assert last.to_step > 10
    newest = full(tmp_path, Path(tf.train.latest_checkpoint(str(tmp_path))).name)
    expected = values_of(tmp_path / newest.name)
    apply_increments(expected, history.after(newest))
    with training.session(before=before, incremental_save_restore=True) as (session, train_op):
        names = [variable.op.name for variable in v1.global_variables() if variable.op.name in expected]
        graph_values = session.run(dict(zip(names, [by_name(name) for name in names], strict=True)))
        for name in names:
            assert graph_values[name].tobytes() == expected[name].tobytes(), name
        assert int(graph_values["global_step"]) == last.to_step
        for _ in range(9):
            session.run(train_op)
    history = read_history(tmp_path)
    assert {stored.increment.run for stored in history.increments} == {last.run}
    assert_exact(training, Path(tf.train.latest_checkpoint(str(tmp_path))))


def by_name(name: str) -> Any:
    return next(variable for variable in v1.global_variables() if variable.op.name == name)


@pytest.mark.parametrize(("every", "steps"), [(10, (25, 43)), (3, (24, 42))], ids=["between", "same steps"])
def test_full_checkpoints_of_a_hook_that_comes_after_are_marked(
    tmp_path: Path, every: int, steps: tuple[int, int]
) -> None:
    """Those of the beginning and of the end, too, which are saved after this hook has had its turn."""
    training = Training(tmp_path, two_towers("adagrad", True), save_checkpoint_steps=every)
    for last, count in zip(steps, (steps[0], steps[1] - steps[0]), strict=True):
        final = training.run(count, before=True)
        history = read_history(tmp_path)
        marked = {marker.checkpoint.name for marker in history.markers}
        assert final.name == f"model.ckpt-{last}"
        assert marked >= {path.stem for path in tmp_path.glob("*.index")}
        assert_exact(training, final)
    assert len({stored.increment.run for stored in history.increments}) == 1


@pytest.mark.parametrize("name", ["table", "shared"])
def test_rows_of_a_damaged_full_checkpoint_get_no_right_checksum_in_an_increment(
    tmp_path: Path, name: str
) -> None:
    training = Training(tmp_path, two_towers("sgd", True), save_checkpoint_steps=10)
    is_refused = pytest.raises(CorruptFile, match=f"model.ckpt-10.data.* is damaged at '.*{name}'")
    with is_refused, training.session() as (session, train_op):
        for _ in range(10):
            session.run(train_op)
        stored = next(n for n in read_catalog(tmp_path / "model.ckpt-10").tensors if n.endswith(name))
        damage_tensor(tmp_path / "model.ckpt-10", stored)
    assert max(stored.increment.to_step for stored in read_history(tmp_path).increments) < 10


def test_a_clean_restart_continues_the_run(tmp_path: Path) -> None:
    training = Training(tmp_path, two_towers("ftrl", True))
    training.run(13)
    final = training.run(14)
    assert len({stored.increment.run for stored in read_history(tmp_path).increments}) == 1
    assert_exact(training, final)


def test_a_trainer_that_was_killed_and_does_not_restore_increments_forks(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    training = Training(tmp_path, two_towers("sgd", True))
    with pytest.raises(Killed), training.session() as (session, train_op):
        for _ in range(18):
            session.run(train_op)
        raise Killed
    abandoned = read_history(tmp_path).increments
    restored = full(tmp_path, Path(tf.train.latest_checkpoint(str(tmp_path))).name)
    final = training.run(5)
    history = read_history(tmp_path)
    fork = [stored for stored in history.increments if stored.increment.generation == 2]
    assert fork[0].increment.parent == restored
    assert all(stored in history.increments for stored in abandoned)  # also under names that both runs take
    assert fork[0].increment.run not in {stored.increment.run for stored in abandoned}
    assert differing(tmp_path, restored, final) == []


def test_nothing_is_lost_when_an_increment_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk = threading.Event()
    sync = Store.sync

    def failing_sync(path: Path) -> None:
        if full_disk.is_set():
            raise OSError(28, "No space left on device")
        sync(path)

    monkeypatch.setattr(Store, "sync", staticmethod(failing_sync))
    training = Training(tmp_path, two_towers("adam", True), save_checkpoint_steps=1000)
    with training.session() as (session, train_op):
        for step in range(20):
            full_disk.set() if 5 <= step < 11 else full_disk.clear()
            session.run(train_op)
    assert_exact_from_start(training)
    with pytest.raises(PublishError, match="no space left"), training.session() as (session, train_op):
        full_disk.set()
        for _ in range(20):
            session.run(train_op)


def assert_exact_from_start(training: Training) -> None:
    final = Path(tf.train.latest_checkpoint(str(training.directory)))
    start = full(training.directory, "model.ckpt-0")
    assert differing(training.directory, start, final) == []


def test_increments_that_no_full_checkpoint_needs_are_removed(tmp_path: Path) -> None:
    training = Training(tmp_path, two_towers("sgd", True), save_checkpoint_steps=5)
    training.run(60)
    oldest = min(start.step for start in starts(read_history(tmp_path), tmp_path))
    assert oldest > 30
    assert all(stored.increment.to_step > oldest for stored in read_history(tmp_path).increments)
    known = {path.stem for path in (tmp_path / "increments").glob("*.json")}
    assert known == {path.stem for path in tmp_path.glob("*.index")}


def test_the_session_that_goes_back_waits_for_a_full_checkpoint(tmp_path: Path) -> None:
    training = Training(tmp_path, two_towers("sgd", True))
    with training.session() as (session, train_op):
        for _ in range(9):
            session.run(train_op)
        saver = v1.get_collection(v1.GraphKeys.SAVERS)[0]
        session.run_step_fn(
            lambda step_context: saver.restore(step_context.session, str(tmp_path / "model.ckpt-0"))
        )
        for _ in range(20):
            session.run(train_op)
    generations = [stored.increment.generation for stored in read_history(tmp_path).increments]
    assert set(generations) == {1, 2}
    parents = [s.increment.parent for s in read_history(tmp_path).increments if s.increment.generation == 2]
    start = next(parent for parent in parents if not isinstance(parent, str))
    assert differing(tmp_path, start, Path(tf.train.latest_checkpoint(str(tmp_path)))) == []


def test_restoring_outside_a_monitored_session(tmp_path: Path) -> None:
    training = Training(tmp_path, two_towers("adagrad", False), save_checkpoint_steps=1000)
    final = training.run(14)
    for path in tmp_path.glob(f"{final.name}.*"):
        path.unlink()
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-0"\n')
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        training.build()
        saver = v1.train.Saver()
        with v1.Session() as session:
            saver.restore(session, str(tmp_path / "model.ckpt-0"))
            with pytest.raises(UsageError, match="session=None: expected a session"):
                restore_increments(None, tmp_path)
            assert restore_increments(session, tmp_path) == 14
            saver.save(session, str(tmp_path / "again"), write_state=False)
            v1.get_default_graph().finalize()
            with pytest.raises(UsageError, match="finalized"):
                restore_increments(session, tmp_path)
    history = read_history(tmp_path)
    expected = values_of(tmp_path / "model.ckpt-0")
    apply_increments(expected, history.after(full(tmp_path, "model.ckpt-0")))
    found = values_of(tmp_path / "again")
    assert {name for name in expected if expected[name].tobytes() != found[name].tobytes()} == set()


@pytest.mark.parametrize("damage", ["values", "shape", "name"])
def test_a_damaged_or_foreign_increment_is_refused_before_anything_changes(
    tmp_path: Path, damage: str
) -> None:
    training = Training(tmp_path, two_towers("sgd", True), save_checkpoint_steps=1000)
    final = training.run(7)
    for path in tmp_path.glob(f"{final.name}.*"):
        path.unlink()
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-0"\n')
    stored = read_history(tmp_path).increments[-1]
    if damage == "values":
        shard = stored.path / "delta.data-00000-of-00001"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    expected = {"values": CorruptFile, "shape": ShapeMismatch, "name": MissingTensors}[damage]
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        with v1.variable_scope("other" if damage == "name" else ""):
            training.build() if damage != "shape" else v1.get_variable("bias", [2])
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            before = session.run(v1.global_variables())
            with pytest.raises(expected):
                restore_increments(session, tmp_path)
            after = session.run(v1.global_variables())
    assert [value.tobytes() for value in before] == [value.tobytes() for value in after]


def test_threads_that_train_without_a_lock_lose_nothing(tmp_path: Path) -> None:
    """Many writers of few rows, and a chief that does hardly anything but collect."""

    def build() -> Any:
        table = v1.get_variable("table", [50, 64], use_resource=True)
        ids = tf.random.uniform([16], 0, 50, tf.int64)
        return v1.scatter_update(table, ids, tf.random.uniform([16, 64]))

    training = Training(tmp_path, build, save_checkpoint_steps=10**6, save_increment_steps=1)
    with training.session() as (session, train_op):
        raw = session.run_step_fn(lambda step_context: step_context.session)
        is_over = threading.Event()

        def train() -> None:
            while not is_over.is_set():
                raw.run(train_op)

        threads = [threading.Thread(target=train) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(60):
                session.run(train_op)
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
    assert_exact_from_start(training)
    assert len(read_history(tmp_path).increments) >= 30


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"save_increment_secs": 5, "save_increment_steps": 5},
        {"save_increment_secs": 5, "incremental_save_secs": 5},
        {"save_incremental_checkpoint_secs": 0},
        {"save_increment_steps": -1},
    ],
)
def test_contradicting_arguments_are_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="one positive"):
        IncrementHook(tmp_path, **arguments)


def test_a_directory_is_needed() -> None:
    with pytest.raises(UsageError, match="directory"):
        IncrementHook("", save_increment_secs=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_increment_steps": 3, "checkpoint_dir": None}, "checkpoint_dir"),
        (
            {"save_increment_steps": 3, "save_checkpoint_secs": None, "save_checkpoint_steps": None},
            "turned off",
        ),
        ({"incremental_save_restore": True}, "no increments are written"),
        ({"save_increment_secs": 3, "save_incremental_checkpoint_secs": 3}, "one positive"),
    ],
)
def test_the_session_refuses_what_it_cannot_honour(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with tf.Graph().as_default(), pytest.raises(UsageError, match=message):
        MonitoredTrainingSession(**{"checkpoint_dir": str(tmp_path), **options})


def test_the_session_writes_increments_with_a_scaffold_of_ones_own(tmp_path: Path) -> None:
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        update = two_towers("sgd", True)()
        with tf.control_dependencies([update]):
            train_op = v1.assign_add(v1.train.get_global_step(), 1)
        scaffold = v1.train.Scaffold(saver=v1.train.Saver(sharded=True))
        with MonitoredTrainingSession(
            checkpoint_dir=str(tmp_path), scaffold=scaffold, save_incremental_checkpoint_secs=0.001
        ) as session:
            for _ in range(5):
                session.run(train_op)
    assert len(rows_in(tmp_path, "table")) >= 3
    final = Path(tf.train.latest_checkpoint(str(tmp_path)))
    assert differing(tmp_path, full(tmp_path, "model.ckpt-0"), final) == []


def test_a_graph_without_a_step_is_refused(tmp_path: Path) -> None:
    with tf.Graph().as_default(), pytest.raises(UsageError, match="global step"):
        IncrementHook(tmp_path, save_increment_steps=1).begin()


def test_a_variable_of_strings_is_refused(tmp_path: Path) -> None:
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        v1.Variable("text", use_resource=True)
        with pytest.raises(UsageError, match="string"):
            IncrementHook(tmp_path, save_increment_steps=1).begin()


def test_a_training_without_full_checkpoints_is_refused(tmp_path: Path) -> None:
    with tf.Graph().as_default():
        train_op = v1.assign_add(v1.train.get_or_create_global_step(), 1)
        hook = IncrementHook(tmp_path, save_increment_steps=1)
        with (
            pytest.raises(UsageError, match="no full checkpoint"),
            v1.train.MonitoredSession(hooks=[hook]) as session,
        ):
            session.run(train_op)


def test_increments_of_a_session_that_restored_nothing_are_refused(tmp_path: Path) -> None:
    training = Training(tmp_path, two_towers("sgd", True))
    with pytest.raises(RuntimeError), training.session() as (session, train_op):
        for _ in range(15):
            session.run(train_op)
        raise RuntimeError
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        hook = IncrementHook(tmp_path, save_increment_steps=1, incremental_save_restore=True)
        with pytest.raises(UsageError, match="has not restored"):
            v1.train.MonitoredSession(hooks=[hook])


def test_a_worker_waits_for_the_chief_and_compares_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from exporter.training import trainer_side as module

    monkeypatch.setattr(module, "READY_SECONDS", 0.2)
    server = tf.distribute.Server.create_local_server()
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        v1.get_variable("a", [4, 2])
        worker = IncrementHook(tmp_path, save_increment_steps=1, is_chief=False)
        worker.begin()
        with (
            v1.Session(server.target) as session,
            pytest.raises(UsageError, match="the chief has not initialized"),
        ):
            worker.after_create_session(session, None)
        other = IncrementHook(tmp_path, save_increment_steps=1)
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        v1.scatter_add(v1.get_variable("a", [4, 2], use_resource=True), [1], [[1.0, 1.0]])
        other.begin()
        with v1.Session(server.target) as session:
            session.run(step.initializer)
            other.after_create_session(session, None)
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        v1.get_variable("a", [4, 2], use_resource=True)
        worker = IncrementHook(tmp_path, save_increment_steps=1, is_chief=False)
        worker.begin()
        with v1.Session(server.target) as session, pytest.raises(UsageError, match="other variables"):
            worker.after_create_session(session, None)


def test_full_checkpoints_do_not_hold_the_recording(tmp_path: Path) -> None:
    final = Training(tmp_path, two_towers("sgd", True)).run(4)
    assert not [name for name in read_catalog(final).tensors if "increments" in name]


def test_a_store_without_a_step_in_its_checkpoints_finds_none(tmp_path: Path) -> None:
    assert Store(tmp_path).newest_full() is None
    assert Store(tmp_path).state_signature() is None
