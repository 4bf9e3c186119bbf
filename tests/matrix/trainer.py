"""A trainer of the matrix: runs in an environment with any TensorFlow.

`python tests/matrix/trainer.py KIND CKPT_DIR STEPS ANSWERS.npz`: trains on to that step, writes a full
checkpoint and increments, and what the trained model answers. KIND is `session` (TF1 style, IncrementHook),
`estimator` (an Estimator with the same hook and the two others; up to TensorFlow 2.15), `keras`
(IncrementCallback; Keras 2 in TensorFlow 2.15, Keras 3 later), `mapped` (a table that is large enough to be
mapped; it writes full checkpoints alone) or `joined` (tables by keys, as DeepRec leaves them).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from exporter.tables import DynamicTable
from exporter.training import ExportHook, IncrementCallback, IncrementHook, StopAfterHook

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.ranker.model import ITEMS, USERS, Batch, click_logit
from tests.support.deeprec import Ev, write_full, write_increment

v1 = tf.compat.v1
EVERY = 10
RANKER = f"{Path(__file__).parents[2] / 'examples/ranker/model.py'}:serving"
ASKED = 500
ROWS = 80_000
TABLES = 12


def session(directory: str, steps: int, answers: str) -> None:
    """The ranker of the examples."""
    random = np.random.default_rng(steps)
    some = np.arange(ASKED)
    asked = {"user": some**2 % USERS, "item": some * 5 % ITEMS}
    with tf.Graph().as_default():
        step = v1.train.create_global_step()
        user, item = v1.placeholder(tf.int64, [None]), v1.placeholder(tf.int64, [None])
        logit = click_logit(Batch(user, item))
        labels = tf.cast(tf.equal(user % 5, item % 5), tf.float32)
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logit))
        train = v1.train.AdagradOptimizer(0.3).minimize(loss, global_step=step)
        click = tf.sigmoid(logit)
        hook = IncrementHook(directory, save_increment_steps=EVERY)
        scaffold = v1.train.Scaffold(saver=v1.train.Saver(sharded=True, save_relative_paths=True))
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=directory,
            hooks=[hook],
            scaffold=scaffold,
            save_checkpoint_steps=1 << 30,
            save_summaries_steps=None,
            save_summaries_secs=None,
            log_step_count_steps=None,
        ) as running:
            begun = running.run_step_fn(lambda step_context: step_context.session.run(step))
            for _ in range(begun, steps):
                running.run(train, {user: random.integers(0, USERS, 64), item: random.integers(0, ITEMS, 64)})
            feeds = {user: asked["user"], item: asked["item"]}
            found = running.run_step_fn(lambda step_context: step_context.session.run(click, feeds))
        np.savez(answers, **{f"in_{name}": value for name, value in asked.items()}, out_click=found)


def estimator(directory: str, steps: int, answers: str) -> None:
    """The same ranker: first by `train`, called twice with one hook, then by `train_and_evaluate`."""
    some = np.arange(ASKED)
    asked = {"user": some**2 % USERS, "item": some * 5 % ITEMS}

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        logit = click_logit(Batch(features["user"], features["item"]))
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions={"click": tf.sigmoid(logit)})
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logit))
        optimizer = v1.train.AdagradOptimizer(0.3)
        train = optimizer.minimize(loss, global_step=v1.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train)

    def trained_on() -> Any:
        random = np.random.default_rng(steps)
        ids = {"user": random.integers(0, USERS, 4096), "item": random.integers(0, ITEMS, 4096)}
        labels = (ids["user"] % 5 == ids["item"] % 5).astype(np.float32)
        return tf.data.Dataset.from_tensor_slices((ids, labels)).repeat().batch(64)

    config = tf.estimator.RunConfig(save_checkpoints_steps=1 << 30)
    trainer = tf.estimator.Estimator(model_fn, directory, config)
    increments = IncrementHook(directory, save_increment_steps=EVERY, is_chief=config.is_chief)
    export = ["--ckpt-dir", directory, "--model", RANKER, "--out", "models/exported"]
    exports = ExportHook(export, raise_on_failure=True)
    if steps == EVERY:
        trainer.train(trained_on, max_steps=steps // 2, hooks=[increments])
        trainer.train(trained_on, max_steps=steps, hooks=[increments, StopAfterHook(3600), exports])
    else:
        train = tf.estimator.TrainSpec(trained_on, steps, hooks=[increments, StopAfterHook(3600), exports])
        evaluate = tf.estimator.EvalSpec(trained_on, steps=1, start_delay_secs=0, throttle_secs=0)
        tf.estimator.train_and_evaluate(trainer, train, evaluate)
    assert all(outcome.is_done for outcome in exports.outcomes)
    found = trainer.predict(lambda: tf.data.Dataset.from_tensors(asked))
    clicks = np.array([each["click"] for each in found])
    np.savez(answers, **{f"in_{name}": value for name, value in asked.items()}, out_click=clicks)


def tower() -> Any:
    """A builder for `export-model --model`, too."""
    keras = tf.keras
    things = keras.Input([3], dtype="int64", name="things")
    rows = keras.layers.Embedding(1000, 8, name="table")(things)
    hidden = keras.layers.Dense(8, activation="relu", name="hidden")(keras.layers.Flatten()(rows))
    return keras.Model(things, keras.layers.Dense(3, activation="softmax", name="scores")(hidden))


def keras(directory: str, steps: int, answers: str) -> None:
    """A tower of dense layers over an embedding."""
    random = np.random.default_rng(steps)
    model = tower()
    model.compile(tf.keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    manager = tf.train.CheckpointManager(checkpoint, directory, max_to_keep=5)
    callback = IncrementCallback(manager, save_increment_steps=EVERY, incremental_save_restore=True)
    trained = 0 if manager.latest_checkpoint is None else EVERY
    things = random.integers(0, 1000, ((steps - trained) * 16, 3))
    model.fit(things, things[:, 0] % 3, batch_size=16, verbose=0, callbacks=[callback])
    asked = np.arange(3 * ASKED).reshape(ASKED, 3) % 1000
    np.savez(answers, in_things=asked, out_scores=np.asarray(model(asked)))


def wide() -> tuple[dict[str, Any], dict[str, Any]]:
    """A builder of a table that is large enough to be mapped, in 8 bits, too, and a layer over it."""
    ids = v1.placeholder(tf.int64, [None], name="ids")
    table = v1.get_variable("table", [ROWS, 16], initializer=v1.random_normal_initializer(stddev=0.1))
    layer = v1.get_variable("layer", [16, 1], initializer=v1.ones_initializer())
    score = tf.squeeze(tf.matmul(v1.nn.embedding_lookup(table, ids), layer), axis=1)
    return {"ids": ids}, {"score": tf.sigmoid(score, name="score")}


def mapped(directory: str, steps: int, answers: str) -> None:
    """The model of `wide`, without increments: what changed is compared."""
    random = np.random.default_rng(steps)
    asked = np.arange(ASKED) ** 2 % ROWS
    with tf.Graph().as_default(), v1.Session() as running:
        step = v1.train.create_global_step()
        inputs, outputs = wide()
        labels = tf.cast(inputs["ids"] % 2, tf.float32)
        loss = tf.reduce_sum(tf.square(outputs["score"] - labels))
        train = v1.train.AdagradOptimizer(0.3).minimize(loss, global_step=step)
        running.run(v1.global_variables_initializer())
        saver = v1.train.Saver(save_relative_paths=True)
        if (newest := tf.train.latest_checkpoint(directory)) is not None:
            saver.restore(running, newest)
        for _ in range(running.run(step), steps):
            running.run(train, {inputs["ids"]: random.integers(0, ROWS, 4096)})
        found = running.run(outputs["score"], {inputs["ids"]: asked})
        Path(directory).mkdir(exist_ok=True)
        saver.save(running, f"{directory}/model.ckpt", step)
    np.savez(answers, in_ids=asked, out_score=found)


def many() -> tuple[dict[str, Any], dict[str, Any]]:
    """A builder of so many tables by keys that their lookups are joined."""
    ids = v1.placeholder(tf.int64, [None], name="ids")
    rows = [DynamicTable(f"table_{number}", 4).lookup(ids) for number in range(TABLES)]
    return {"ids": ids}, {"score": tf.sigmoid(tf.reduce_sum(tf.add_n(rows), axis=1), name="score")}


def joined(directory: str, steps: int, answers: str) -> None:
    """The tables of `many` without a training: a full checkpoint; later an increment, of other keys, too."""
    asked, logits = np.arange(ASKED) ** 2, np.zeros(ASKED)
    tables = {}
    for number in range(TABLES):
        held = {}
        for step in sorted({EVERY, steps}):
            apart = step + number if step == EVERY else 10 * step + number  # few are new
            keys = np.arange(0, ASKED**2, apart)
            values = np.random.default_rng([number, step]).normal(0, 0.3, (len(keys), 4))
            tables[f"table_{number}"] = newest = Ev(keys, values.astype(np.float32))
            held |= newest.as_dict()
        logits += [held[key].sum() if key in held else 0 for key in asked.tolist()]
    if steps == EVERY:
        prefix = write_full(Path(directory, f"model.ckpt-{steps}"), tables, step=steps)
        (prefix.parent / "checkpoint").write_text(f'model_checkpoint_path: "{prefix.name}"\n')
    else:
        write_increment(Path(directory), steps, tables)
    np.savez(answers, in_ids=asked, out_score=1 / (1 + np.exp(-logits)))


if __name__ == "__main__":
    kind, directory, steps, answers = sys.argv[1:]
    kinds = {"session": session, "estimator": estimator, "keras": keras, "mapped": mapped, "joined": joined}
    kinds[kind](directory, int(steps), answers)
