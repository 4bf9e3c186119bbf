from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from exporter import Updates, export, rebase
from exporter.errors import UsageError
from exporter.increments.history import read_history
from exporter.training import IncrementCallback
from tests.support.increments import differing, starts


def model(kind: Any = keras) -> Any:
    made = kind.Sequential(
        [
            kind.layers.InputLayer((3,)),
            kind.layers.Embedding(50, 4),
            kind.layers.Flatten(),
            kind.layers.BatchNormalization(),
            kind.layers.Dense(1),
        ]
    )
    made.compile("adam", "mse")
    return made


def fit(directory: Path, batches: int, made: Any, **options: Any) -> Path:
    checkpoint = tf.train.Checkpoint(model=made, optimizer=made.optimizer)
    manager = tf.train.CheckpointManager(checkpoint, str(directory), max_to_keep=3)
    callback = IncrementCallback(manager, save_increment_steps=3, save_checkpoint_steps=10, **options)
    ids = np.random.default_rng(batches).integers(0, 40, (batches * 4, 3))
    made.fit(ids, np.ones((batches * 4, 1)), verbose=0, batch_size=4, callbacks=[callback])
    return Path(manager.latest_checkpoint)


SAVE_COUNTER = "save_counter/.ATTRIBUTES/VARIABLE_VALUE"


def assert_exact(directory: Path, final: Path) -> None:
    known = starts(read_history(directory), directory)
    assert len(known) > 1
    for start in known:
        assert set(differing(directory, start, final)) <= {SAVE_COUNTER}, start


def test_fit_that_is_continued_is_one_chain(tmp_path: Path) -> None:
    fit(tmp_path, 16, model())
    final = fit(tmp_path, 8, model(), incremental_save_restore=True)
    assert final.name == "ckpt-24"
    assert_exact(tmp_path, final)
    history = read_history(tmp_path)
    assert len({stored.increment.run for stored in history.increments}) == 1
    assert history.increments[-1].increment.to_step == 24


def test_a_fit_that_ends_with_an_increment_ends_at_its_step(tmp_path: Path) -> None:
    final = fit(tmp_path, 6, model())
    assert final.name == "ckpt-6"
    assert read_history(tmp_path).increments[-1].increment.to_step == 6
    assert_exact(tmp_path, final)


def sparse(directory: Path, seed: int, *, restored: bool) -> Any:
    """Six batches that look up some rows, by an optimizer that leaves the others as they are."""
    made = keras.Sequential(
        [
            keras.layers.InputLayer((3,)),
            keras.layers.Embedding(500, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    made.compile(keras.optimizers.Adagrad(0.1), "mse")
    made.optimizer.build(made.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=made, optimizer=made.optimizer)
    manager = tf.train.CheckpointManager(checkpoint, str(directory), max_to_keep=3)
    if restored:
        assert manager.restore_or_initialize()
    callback = IncrementCallback(manager, save_increment_steps=3)
    ids = np.random.default_rng(seed).integers(0, 500, (24, 3))
    made.fit(ids, np.ones((24, 1)), verbose=0, batch_size=4, callbacks=[callback])
    return made


@pytest.mark.landing
def test_a_fit_that_its_program_restored_goes_on_with_what_is_known(tmp_path: Path) -> None:
    """Without incremental_save_restore, too: nothing is compared, and no row is sent that did not move."""
    train, served = tmp_path / "train", tmp_path / "served"
    asked: Any = {"model": sparse(train, 1, restored=False), "updates": Updates(), "verify": "outputs"}
    export(train, served, **asked)
    saved = (train / "ckpt-6.index").read_bytes()
    trained = sparse(train, 2, restored=True)
    assert (train / "ckpt-6.index").read_bytes() == saved, (
        "the checkpoint that was restored is not saved again"
    )
    assert_exact(train, train / "ckpt-12")
    assert len({stored.increment.run for stored in read_history(train).increments}) == 1
    delta = export(train, served, save_incr_model=True)
    looked_up = len(np.unique(np.random.default_rng(2).integers(0, 500, (24, 3))))
    assert delta.compared_bytes == 0
    assert looked_up <= delta.rows < 100
    base = rebase(served)
    assert base is not None
    ids = np.arange(498, dtype=np.float32).reshape(-1, 3)
    answer = tf.saved_model.load(str(base.published.path)).signatures["serving_default"](tf.constant(ids))
    np.testing.assert_array_equal(next(iter(answer.values())), trained(ids))


def test_a_killed_fit_goes_on_where_the_last_increment_ended(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    class Killer(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 8:
                raise Killed

    made = model()
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(model=made, optimizer=made.optimizer), str(tmp_path), max_to_keep=3
    )
    callbacks = [IncrementCallback(manager, save_increment_steps=2), Killer()]
    with pytest.raises(Killed):
        made.fit(np.ones((64, 3)), np.ones((64, 1)), verbose=0, batch_size=4, callbacks=callbacks)
    reached = read_history(tmp_path).increments[-1].increment.to_step
    assert reached >= 7
    final = fit(tmp_path, 2, model(), incremental_save_restore=True)
    assert final.name == f"ckpt-{reached + 2}"
    assert_exact(tmp_path, final)


def test_mirrored_variables(tmp_path: Path) -> None:
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        made = model()
    assert_exact(tmp_path, fit(tmp_path, 7, made))


def test_a_model_without_variables_is_refused(tmp_path: Path) -> None:
    made = keras.Sequential([keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=made), str(tmp_path), max_to_keep=3)
    callback = IncrementCallback(manager, save_increment_steps=3)
    callback.set_model(made)
    with pytest.raises(UsageError, match="variables exist"):
        callback.on_train_begin()


def test_how_often_is_needed() -> None:
    with pytest.raises(UsageError, match="one positive"):
        IncrementCallback(None)
