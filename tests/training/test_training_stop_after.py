from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from exporter.errors import UsageError
from exporter.training import StopAfterCallback, StopAfterHook

v1 = tf.compat.v1
SECONDS = 0.2


def test_a_session_stops_and_saves_its_last_step(tmp_path: Path) -> None:
    hook = StopAfterHook(SECONDS)
    with tf.Graph().as_default():
        train_op = v1.assign_add(v1.train.get_or_create_global_step(), 1)
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=str(tmp_path), save_checkpoint_secs=3600, hooks=[hook], log_step_count_steps=None
        ) as session:
            begun, reached = time.monotonic(), 0
            while not session.should_stop():
                reached = int(session.run(train_op))
                assert time.monotonic() < begun + 120
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith(f"model.ckpt-{reached}")


def test_time_goes_on_over_sessions(tmp_path: Path) -> None:
    """A session that is made anew after a preemption gets what is left, not all of it."""
    hook = StopAfterHook(SECONDS)
    time.sleep(SECONDS)
    with tf.Graph().as_default():
        train_op = v1.assign_add(v1.train.get_or_create_global_step(), 1)
        with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            session.run(train_op)
            assert session.should_stop()


@pytest.mark.parametrize("kind", [keras, tf_keras], ids=["keras 3", "tf-keras"])
def test_a_fit_stops_within_an_epoch_and_saves(tmp_path: Path, kind: Any) -> None:
    model = kind.Sequential([kind.layers.InputLayer((3,)), kind.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((np.ones((2, 3)), np.ones((2, 1)))).repeat()
    saver = kind.callbacks.ModelCheckpoint(str(tmp_path / "last.weights.h5"), save_weights_only=True)
    callbacks = [StopAfterCallback(SECONDS), saver]
    history = model.fit(data, steps_per_epoch=10_000_000, epochs=3, verbose=0, callbacks=callbacks)
    assert len(history.epoch) == 1
    before = model.get_weights()
    model.load_weights(tmp_path / "last.weights.h5")
    for found, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("make", [StopAfterHook, StopAfterCallback])
def test_a_time_that_has_passed_is_refused(make: Any) -> None:
    with pytest.raises(UsageError, match="after 0 s"):
        make(0)
