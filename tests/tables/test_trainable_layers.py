"""Tables by keys in models of Keras: trained by `fit`, saved, exported, followed by deltas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from exporter.checkpoint.embedding_variables import embedding_variables
from exporter.checkpoint.keras_archive import read_keras
from exporter.increments.history import read_history
from exporter.jobs.execute import encode
from exporter.jobs.runner import Runner
from exporter.jobs.task import Task
from exporter.options import EngineName, ExportRequest, Jobs, Updates, Verify
from exporter.pipeline.full import export
from exporter.pipeline.incremental import export_incremental
from exporter.publish.manifest import DeltaEntry, DeltaOrigin
from exporter.storage.layout import STAGING_PREFIX
from exporter.tables import dynamic_embedding, trainable_embedding, trainable_embedding_class
from exporter.training import IncrementCallback
from tests.support.forks import run_warm
from tests.support.increments import differing, starts
from tests.support.publishing import delta_of

DIM, CAPACITY, DEFAULT = 3, 60, -1.0
SEEN = np.arange(100, dtype=np.int64) * 7919 - 300_000


def model(embedding: Any, optimizer: str = "adagrad") -> Any:
    ids = keras.Input((2,), dtype="int64", name="ids")
    rows = embedding(ids)
    made = keras.Model(ids, keras.layers.Dense(1, name="score")(keras.layers.Flatten()(rows)))
    made.compile(optimizer, "mse")
    return made


def trained(optimizer: str = "adagrad") -> tuple[Any, Any]:
    """The model that is trained, and its layer."""
    layer = trainable_embedding("user/emb", DIM, CAPACITY, default=DEFAULT)
    return model(layer, optimizer), layer


def serving() -> Any:
    """The model that is exported."""
    return model(dynamic_embedding("user/emb", DIM, default=DEFAULT))


def fit(made: Any, keys: Any, steps: int = 1, callbacks: Any = ()) -> None:
    """Steps with these keys."""
    ids = np.resize(np.asarray(keys), (steps * 4, 2))
    made.fit(ids, np.ones((steps * 4, 1)), batch_size=4, verbose=0, shuffle=False, callbacks=list(callbacks))


def rows_of(layer: Any) -> dict[int, bytes]:
    numbers, keys = layer.table.index.in_use()
    values = tf.gather(layer.rows.value, numbers).numpy()
    return {int(key): row.tobytes() for key, row in zip(keys.numpy(), values, strict=True)}


PAIRS = SEEN.reshape(-1, 2)


class Server:
    """The exported model, loaded by TensorFlow."""

    def __init__(self, version: Path) -> None:
        self._model = tf.saved_model.load(str(version))

    def update(self) -> None:
        self._model.signatures["incremental_update"](up_to=tf.constant([-1], tf.int64))

    def scores(self) -> Any:
        (found,) = self._model.signatures["serving_default"](tf.constant(PAIRS)).values()
        return found.numpy()


def answers(made: Any) -> Any:
    """What the trainer answers, known and absent keys alike."""
    return made(tf.constant(PAIRS), training=False).numpy()


@pytest.mark.landing
@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "sgd"])
def test_fit_gives_rows_and_predict_does_not(optimizer: str) -> None:
    made, layer = trained(optimizer)
    fit(made, SEEN[:20], 5)
    assert rows_of(layer).keys() == set(SEEN[:20].tolist())
    made.predict(PAIRS, verbose=0)
    made.evaluate(PAIRS, np.ones((len(PAIRS), 1)), verbose=0)
    assert len(rows_of(layer)) == 20
    absent = layer(tf.constant([[5, 6]]), training=False)
    assert (absent.numpy() == DEFAULT).all()
    assert layer.remove([*SEEN[:5], 1, SEEN[0]], made.optimizer) == 5
    fit(made, SEEN[20:64], 30)  # more than were never given: rows of keys that went are given again
    assert rows_of(layer).keys() == set(SEEN[5:64].tolist())


def test_a_full_table_is_an_error_that_names_it() -> None:
    made, _ = trained()
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"user/emb.* is full"):
        fit(made, SEEN[:80], 20)


def test_slots_of_removed_keys_begin_anew() -> None:
    made, layer = trained()
    fit(made, SEEN[:10], 20)
    (slot,) = [each for each in made.optimizer.variables if "user_emb_rows" in each.path]
    pristine = slot.numpy()[-1].copy()
    assert (slot.numpy()[:10] > pristine).any()
    assert layer.remove(SEEN[:3], made.optimizer) == 3
    assert (slot.numpy()[:10] == pristine).all(1).sum() == 3


@pytest.mark.landing
@pytest.mark.parametrize("kind", ["checkpoint", "keras", "weights"])
def test_what_was_saved_is_trained_on(tmp_path: Path, kind: str) -> None:
    made, layer = trained()
    fit(made, SEEN[:20], 5)
    layer.remove(SEEN[:5], made.optimizer)
    if kind == "checkpoint":
        path = tf.train.Checkpoint(model=made, optimizer=made.optimizer).save(str(tmp_path / "ckpt"))
        again, other = trained()
        again.optimizer.build(again.trainable_variables)
        fit(again, SEEN[50:60])  # other keys, which the restore forgets
        saved = tf.train.Checkpoint(model=again, optimizer=again.optimizer)
        saved.restore(path).assert_existing_objects_matched()
    elif kind == "keras":
        made.save(tmp_path / "m.keras")
        objects = {"TrainableEmbedding": trainable_embedding_class()}
        again = keras.saving.load_model(tmp_path / "m.keras", custom_objects=objects)
        other = next(each for each in again.layers if hasattr(each, "table"))
    else:
        made.save_weights(tmp_path / "m.weights.h5")
        again, other = trained()
        again.load_weights(tmp_path / "m.weights.h5")
    assert rows_of(other) == rows_of(layer)
    fit(again, SEEN[3:30], 5)
    assert rows_of(other).keys() == set(SEEN[3:30].tolist())


@pytest.mark.landing
@pytest.mark.parametrize("kind", ["archive", "weights and builder"])
def test_keras_own_files_are_exported(tmp_path: Path, kind: str) -> None:
    """The archive's own model has the table that is served in the place of the one that is trained."""
    made, layer = trained()
    fit(made, SEEN[:20], 5)
    layer.remove(SEEN[:5], made.optimizer)
    path = tmp_path / ("m.weights.h5" if kind.startswith("weights") else "m.keras")
    (made.save_weights if kind.startswith("weights") else made.save)(path)
    built = {} if kind == "archive" else {"model": serving}
    done = export(ExportRequest(path, tmp_path / "model", verify=Verify.OUTPUTS, **built))
    assert done.published.manifest.step == 5
    np.testing.assert_allclose(Server(done.published.path).scores(), answers(made), rtol=1e-6)
    followed = ExportRequest(path, tmp_path / "followed", **built)
    server = Server(export_incremental(followed).published.path)
    fit(made, SEEN[15:30], 5)
    layer.remove(SEEN[5:9], made.optimizer)
    (made.save_weights if kind.startswith("weights") else made.save)(path)
    assert delta_of(followed).rows
    server.update()
    np.testing.assert_allclose(server.scores(), answers(made), rtol=1e-6)


def test_workers_elsewhere_need_no_file_that_an_archive_became(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors are in a bundle of the command's own: so the index of its keys is built here, too."""
    made, _ = trained()
    fit(made, SEEN[:20], 5)
    made.save(tmp_path / "m.keras")
    given: list[Task] = []

    def noted(task: Task, directory: str, *, keep: bool) -> bytes:
        if keep:
            given.append(task)
        return encode(task, directory, keep=keep)

    monkeypatch.setattr("exporter.jobs.runner.encode", noted)
    monkeypatch.setattr(Runner, "sees_our_files", False)
    jobs = Jobs(engine=EngineName.LOCAL)
    export(ExportRequest(tmp_path / "m.keras", tmp_path / "model", casts=("bfloat16",), jobs=jobs))
    assert {task.operation for task in given} == {"move"}
    assert not [each for task in given for each in task.inputs if STAGING_PREFIX in each.place]


def test_an_archive_of_combined_rows_and_several_tables(tmp_path: Path) -> None:
    words = keras.Input((3,), dtype="int64", name="words")
    users = keras.Input((1,), dtype="int64", name="users")
    rows = [
        trainable_embedding("vocabulary", DIM, 100, combiner="mean", default=2.0)(words),
        keras.layers.Flatten()(trainable_embedding("a.b/users", DIM, 100, "float64")(users)),
    ]
    made = keras.Model([words, users], keras.layers.Dense(1)(keras.layers.Concatenate()(rows)))
    made.compile("sgd", "mse")
    asked = {"words": SEEN[:30].reshape(10, 3), "users": SEEN[:10, np.newaxis]}
    made.fit(asked, np.ones((10, 1)), verbose=0)
    made.save(tmp_path / "m.keras")
    catalog = read_keras(tmp_path / "m.keras")
    assert {name: table.rows for name, table in embedding_variables(catalog).items()} == {
        "a.b/users": 10,
        "vocabulary": 30,
    }
    done = export(ExportRequest(tmp_path / "m.keras", tmp_path / "model"))
    served = tf.saved_model.load(str(done.published.path)).signatures["serving_default"]
    some = {name: np.concatenate([ids, ids + 1]) for name, ids in asked.items()}  # and absent ones
    (found,) = served(**{name: tf.constant(ids) for name, ids in some.items()}).values()
    np.testing.assert_allclose(found, made(some, training=False), rtol=1e-6)


def manager_of(made: Any, directory: Path) -> Any:
    saved = tf.train.Checkpoint(model=made, optimizer=made.optimizer)
    return tf.train.CheckpointManager(saved, str(directory), max_to_keep=5)


@pytest.mark.landing
@pytest.mark.parametrize(("casts", "near"), [((), 1e-6), (("int8",), 0.05)])
def test_increments_of_fit_are_deltas_that_serve_what_was_trained(
    tmp_path: Path, casts: tuple[str, ...], near: float
) -> None:
    """Among them what was trained, what came, and what went between two of them."""
    train = tmp_path / "train"
    made, layer = trained()
    request = ExportRequest(train, tmp_path / "model", model=serving, updates=Updates(), casts=casts)
    servers: list[Server] = []
    made_by: list[DeltaOrigin] = []

    class Followed(keras.callbacks.Callback):
        """After every few batches: a delta, and the trainer's answers."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                servers.append(Server(export(request).published.path))
            if batch == 4:
                assert layer.remove(SEEN[:4], made.optimizer) == 4
            if batch in (2, 3, 5, 6):
                done = delta_of(request)
                assert done.published is not None
                entry = done.published.manifest.incremental
                assert isinstance(entry, DeltaEntry)
                made_by.append(entry.made)
                servers[0].update()
                np.testing.assert_allclose(servers[0].scores(), answers(made), atol=near)

    callback = IncrementCallback(manager_of(made, train), save_increment_steps=1)
    fit(made, SEEN[:30], 7, [callback, Followed()])
    assert made_by == [DeltaOrigin.INCREMENTS] * 4
    assert rows_of(layer).keys() == set(SEEN[4:30].tolist())


def test_a_killed_fit_goes_on_where_the_last_increment_ended(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    class Killer(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3:
                layer.remove(SEEN[:4], made.optimizer)
            if batch == 6:
                raise Killed

    made, layer = trained()
    callbacks = [IncrementCallback(manager_of(made, tmp_path), save_increment_steps=1), Killer()]
    with pytest.raises(Killed):
        fit(made, SEEN[:30], 9, callbacks)
    again, other = trained()
    callback = IncrementCallback(
        manager_of(again, tmp_path), save_increment_steps=1, incremental_save_restore=True
    )

    class Restored(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 0:
                assert rows_of(other) == rows_of(layer)

    fit(again, SEEN[20:40], 4, [callback, Restored()])
    final = Path(tf.train.latest_checkpoint(str(tmp_path)))
    known = starts(read_history(tmp_path), tmp_path)
    assert known
    for start in known:
        assert set(differing(tmp_path, start, final)) <= {
            "save_counter/.ATTRIBUTES/VARIABLE_VALUE",
            "optimizer/_trainable_variables/0/.ATTRIBUTES/VARIABLE_VALUE",  # the rows, which are told by keys
        }, start


TWO_REPLICAS = """
import tensorflow as tf
from exporter.errors import UsageError
from exporter.tables import trainable_embedding

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
    trainable_embedding("one", 3, 50).build((None,))
with tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
    try:
        trainable_embedding("two", 3, 50).build((None,))
    except UsageError as error:
        print(error.message)
"""


def test_strategies_that_copy_variables_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "replicas.py"
    script.write_text(TWO_REPLICAS)
    assert "layer 'two' is trained in one process, not under MirroredStrategy" in run_warm(script)
