from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from exporter.errors import AmbiguousRename, CorruptFile, MissingTensors, UsageError
from exporter.training import LoadReport, load_checkpoint

v1 = tf.compat.v1
KERASES = pytest.mark.parametrize("kind", [keras, tf_keras], ids=["keras 3", "tf-keras"])


def tower(kind: Any, outputs: int = 2, more: bool = False, hidden: int = 6) -> Any:
    """A model with layers by name; `more` puts another one before the last."""
    given = kind.Input((4,), name="given")
    found = kind.layers.Dense(hidden, name="first")(given)
    found = kind.layers.BatchNormalization(name="norm")(found)
    found = kind.layers.Dense(6, name="second")(found)
    if more:
        found = kind.layers.Dense(6, name="third")(found)
    return kind.Model(given, kind.layers.Dense(outputs, name="head")(found))


def scrambled(model: Any, seed: int = 5) -> Any:
    random = np.random.default_rng(seed)
    model.set_weights([random.random(value.shape).astype(value.dtype) for value in model.get_weights()])
    return model


def weights(model: Any) -> dict[str, np.ndarray]:
    names = [getattr(variable, "path", variable.name).partition(":")[0] for variable in model.weights]
    return dict(zip(names, model.get_weights(), strict=True))


def save(model: Any, directory: Path, how: str) -> Path:
    directory.mkdir()
    if how == "checkpoint":
        return Path(tf.train.Checkpoint(model=model).save(str(directory / "ckpt")))
    path = directory / {"archive": "model.keras", "weights": "model.weights.h5", "legacy": "model.h5"}[how]
    if how == "weights":
        model.save_weights(path)
    else:
        model.save(path)
    return path


def names(report: LoadReport) -> set[str]:
    return {item.variable for item in report.loaded}


@KERASES
@pytest.mark.parametrize("how", ["checkpoint", "archive", "weights", "legacy"])
def test_a_model_that_is_the_same_gets_everything(tmp_path: Path, kind: Any, how: str) -> None:
    trained, fresh = scrambled(tower(kind)), tower(kind)
    report = load_checkpoint(fresh, save(trained, tmp_path / "c", how))
    assert report.is_complete
    assert report.unused == ()
    for found, expected in zip(fresh.get_weights(), trained.get_weights(), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((keras, how) for how in ("checkpoint", "archive", "weights", "legacy")),
        *((tf_keras, how) for how in ("checkpoint", "legacy")),
    ],
)
def test_another_head_and_a_layer_more_keep_their_values(tmp_path: Path, kind: Any, how: str) -> None:
    trained, fresh = scrambled(tower(kind)), tower(kind, outputs=3, more=True)
    before = weights(fresh)
    report = load_checkpoint(fresh, save(trained, tmp_path / "c", how))
    left = {"head/kernel", "head/bias", "third/kernel", "third/bias"}
    reasons = {item.variable: item.reason for item in report.skipped}
    assert reasons.keys() == left
    assert "[6, 3], in the checkpoint [6, 2]" in reasons["head/kernel"]
    assert reasons["third/bias"].startswith("the checkpoint has no 'third/")
    assert len(report.unused) == 2
    expected = weights(trained) | {name: before[name] for name in left}
    found = weights(fresh)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    assert "loaded 8 of 12 variables" in str(report)
    assert "not head/kernel: its shape is" in str(report)


@pytest.mark.parametrize("how", ["archive", "weights"])
def test_files_without_layers_names_give_what_is_certain(tmp_path: Path, how: str) -> None:
    """tf-keras numbers the layers in its files by class: with a layer more, which one is `dense_1`?"""
    trained, fresh = scrambled(tower(tf_keras)), tower(tf_keras, outputs=3, more=True)
    report = load_checkpoint(fresh, save(trained, tmp_path / "c", how))
    norm = {f"norm/{name}" for name in ("gamma", "beta", "moving_mean", "moving_variance")}
    assert names(report) == norm | {"first/kernel"}
    for name in names(report):
        np.testing.assert_array_equal(weights(fresh)[name], weights(trained)[name])


@KERASES
@pytest.mark.parametrize("how", ["checkpoint", "archive"])
def test_layers_that_only_numbers_tell_apart(tmp_path: Path, kind: Any, how: str) -> None:
    """`dense` and `dense_1` of three may be any two of the trainer's; in their order if there are as many."""

    def unnamed(sizes: list[int]) -> Any:
        given = found = kind.Input((4,))
        for size in sizes:
            found = kind.layers.Dense(size)(found)
        return kind.Model(given, found)

    trained = scrambled(unnamed([4, 4, 2]))
    path = save(trained, tmp_path / "c", how)
    another_head = unnamed([4, 4, 3])
    report = load_checkpoint(another_head, path)
    assert len(report.loaded) == 4
    for found, expected in zip(another_head.get_weights()[:4], trained.get_weights()[:4], strict=True):
        np.testing.assert_array_equal(found, expected)
    a_layer_more = unnamed([4, 4, 4, 2])
    before = a_layer_more.get_weights()
    report = load_checkpoint(a_layer_more, path)
    assert len(report.loaded) == 2  # the head alone is certain
    assert sum("numbered names may stand for other layers" in item.reason for item in report.skipped) == 6
    for found, expected in zip(a_layer_more.get_weights()[:6], before[:6], strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(a_layer_more.get_weights()[6], trained.get_weights()[4])


def test_renames(tmp_path: Path) -> None:
    path = save(scrambled(tower(keras)), tmp_path / "c", "checkpoint")
    fresh = tower(keras, more=True)
    report = load_checkpoint(fresh, path, renames=["third/(.*)=second/\\1", "second/(.*)=none/\\1"])
    assert {"third/kernel", "third/bias"} <= names(report)
    assert {item.variable for item in report.skipped} == {"second/kernel", "second/bias"}


@pytest.mark.parametrize("how", ["checkpoint", "archive"])
@pytest.mark.parametrize("more", [False, True], ids=["fits", "fits in part"])
def test_rules_that_disagree_are_refused(tmp_path: Path, how: str, more: bool) -> None:
    path = save(scrambled(tower(keras)), tmp_path / "c", how)
    fresh = tower(keras, more=more)
    before = fresh.get_weights()
    rules = ["second/(.*)=first/\\1", "second/kernel=head/kernel"]
    with pytest.raises(AmbiguousRename, match="'second/kernel': rename rules disagree"):
        load_checkpoint(fresh, path, renames=rules)
    for found, expected in zip(fresh.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_rule_that_does_not_parse_is_refused(tmp_path: Path) -> None:
    path = save(tower(keras), tmp_path / "c", "checkpoint")
    with pytest.raises(UsageError, match="does not parse"):
        load_checkpoint(tower(keras), path, renames=["(=x"])


def test_one_tensor_is_not_given_to_two_variables(tmp_path: Path) -> None:
    path = save(scrambled(tower(keras)), tmp_path / "c", "checkpoint")
    report = load_checkpoint(tower(keras, more=True), path, renames=["third/(.*)=second/\\1"])
    reasons = {item.variable: item.reason for item in report.skipped}
    assert reasons.keys() == {"third/kernel", "third/bias", "second/kernel", "second/bias"}
    assert "would all get the values" in reasons["third/bias"]


def test_nothing_that_fits_is_an_error(tmp_path: Path) -> None:
    path = save(tower(keras), tmp_path / "c", "checkpoint")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="other")])
    with pytest.raises(MissingTensors, match=r"nothing of .* fits: 2 variables") as caught:
        load_checkpoint(model, path)
    assert "other/kernel" in caught.value.cause


def test_a_model_that_is_not_built_is_refused(tmp_path: Path) -> None:
    path = save(tower(keras), tmp_path / "c", "checkpoint")
    with pytest.raises(UsageError, match="no variables"):
        load_checkpoint(keras.Sequential([keras.layers.Dense(1)]), path)


@pytest.mark.parametrize(
    "target",
    [None, "model", 3, [np.zeros(2)], tf.constant([1.0]), keras.layers.Dense],
    ids=["none", "text", "number", "arrays", "tensor", "class"],
)
def test_what_holds_no_variables_is_no_target(tmp_path: Path, target: Any) -> None:
    path = save(tower(keras), tmp_path / "c", "checkpoint")
    with pytest.raises(UsageError, match=r"^target=.*: expected a model, a tf.Module or a list of variables"):
        load_checkpoint(target, path)
    with pytest.raises(UsageError, match=r"^session="):
        load_checkpoint(None, path, session="session")
    if target is not None:
        with tf.Graph().as_default(), v1.Session() as session, pytest.raises(UsageError, match=r"^target="):
            load_checkpoint(target, path, session=session)


def test_another_precision_is_not_loaded(tmp_path: Path) -> None:
    path = Path(
        tf.train.Checkpoint(a=tf.Variable(1.0, name="a"), b=tf.Variable(2.0, name="b")).write(
            str(tmp_path / "c")
        )
    )
    a, b = tf.Variable(0, name="a", dtype=tf.float64), tf.Variable(0.0, name="b")
    report = load_checkpoint([a, b], path)
    assert names(report) == {"b"}
    assert (float(a), float(b)) == (0.0, 2.0)
    assert "float64, in the checkpoint float32" in report.skipped[0].reason


class Mixers(tf.Module):  # type: ignore[misc]
    """Variables without names, in a list."""

    def __init__(self, count: int, seed: int) -> None:
        super().__init__()
        self.mixers = [tf.Variable(tf.random.normal([3, 3], seed=seed + n)) for n in range(count)]
        self.scale = tf.Variable(float(seed), name="scale")


def test_a_module_with_variables_without_names(tmp_path: Path) -> None:
    trained, fresh = Mixers(2, 1), Mixers(3, 10)
    path = tf.train.Checkpoint(net=trained, step=tf.Variable(7)).save(str(tmp_path / "ckpt"))
    report = load_checkpoint(fresh, path)
    assert {item.via for item in report.loaded} == {"name", "object"}
    for found, expected in zip(fresh.mixers, trained.mixers, strict=False):
        np.testing.assert_array_equal(found, expected)
    assert float(fresh.scale) == 1.0
    assert [item.variable for item in report.skipped] == ["mixers/2"]


def test_an_optimizer_is_not_in_the_way(tmp_path: Path) -> None:
    trained = tower(keras)
    trained.compile("adam", "mse")
    trained.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    checkpoint = tf.train.Checkpoint(model=trained, optimizer=trained.optimizer)
    report = load_checkpoint(tower(keras, outputs=5), checkpoint.save(str(tmp_path / "ckpt")))
    assert {item.variable for item in report.skipped} == {"head/kernel", "head/bias"}
    assert len(report.unused) == 2


def test_numpy_lists_fit_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    trained = scrambled(tower(keras))
    np.savez(tmp_path / "list.npz", *trained.get_weights())
    with pytest.raises(MissingTensors) as caught:
        load_checkpoint(tower(keras, outputs=3), tmp_path / "list.npz")
    assert "array" in caught.value.cause
    by_name = weights(trained)
    np.savez(tmp_path / "names.npz", **by_name)
    fresh = tower(keras, outputs=3)
    report = load_checkpoint(fresh, tmp_path / "names.npz")
    assert len(report.loaded) == 8
    np.testing.assert_array_equal(weights(fresh)["second/kernel"], by_name["second/kernel"])


def test_damage_is_found(tmp_path: Path) -> None:
    path = save(tower(keras), tmp_path / "c", "checkpoint")
    shard = path.with_name(f"{path.name}.data-00000-of-00001")
    data = bytearray(shard.read_bytes())
    data[:32] = bytes(value ^ 1 for value in data[:32])
    shard.write_bytes(data)
    with pytest.raises(CorruptFile):
        load_checkpoint(tower(keras), path)


def test_mirrored_variables(tmp_path: Path) -> None:
    path = save(trained := scrambled(tower(keras)), tmp_path / "c", "checkpoint")
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        fresh = tower(keras, outputs=3)
        assert len(load_checkpoint(fresh, path).loaded) == 8
    np.testing.assert_array_equal(weights(fresh)["first/kernel"], weights(trained)["first/kernel"])


# --- sessions ----------------------------------------------------------------------------------------------


def graph(parts: int | None = None, classes: int = 2, use_resource: bool = True) -> dict[str, Any]:
    v1.train.get_or_create_global_step()
    with v1.variable_scope("", use_resource=use_resource):
        partitioner = v1.fixed_size_partitioner(parts) if parts else None
        table = v1.get_variable("table", [7, 2], partitioner=partitioner)
        hidden = v1.get_variable("hidden", [2, 4])
        scale = v1.get_variable("scale", [])
        head = v1.get_variable("head", [4, classes])
    return {"table": tf.convert_to_tensor(table), "hidden": hidden, "scale": scale, "head": head}


@pytest.fixture(scope="module")
def name_based(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint by names, its table in two parts, and its values."""
    directory = tmp_path_factory.mktemp("names")
    with tf.Graph().as_default(), v1.Session() as session:
        tensors = graph(parts=2)
        session.run([v1.global_variables_initializer(), v1.train.get_global_step().assign(900)])
        path = v1.train.Saver().save(session, str(directory / "model.ckpt"), 900)
        return Path(path), session.run(tensors)


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
def test_a_monitored_session_begins_with_what_fits(
    name_based: tuple[Path, dict[str, np.ndarray]], use_resource: bool
) -> None:
    path, expected = name_based
    reports = []
    with tf.Graph().as_default():
        tensors = graph(parts=2, classes=3, use_resource=use_resource)
        scaffold = v1.train.Scaffold(
            init_op=v1.global_variables_initializer(),
            init_fn=lambda _, session: reports.append(load_checkpoint(None, path, session=session)),
        )
        step = v1.train.get_global_step()
        with v1.train.MonitoredTrainingSession(scaffold=scaffold) as session:
            found = session.run(tensors)
            assert session.run(step) == 0
    (report,) = reports
    assert names(report) == {"table", "hidden", "scale"}
    for name in names(report):
        np.testing.assert_array_equal(found[name], expected[name])
    assert report.skipped[0].variable == "head"


def test_a_table_in_other_parts_is_not_loaded(name_based: tuple[Path, dict[str, np.ndarray]]) -> None:
    """Its rows may be looked up by mod: nothing tells."""
    path, _ = name_based
    with tf.Graph().as_default(), v1.Session() as session:
        graph(parts=3)
        session.run(v1.global_variables_initializer())
        report = load_checkpoint(None, path, session=session)
    assert [item.variable for item in report.skipped] == ["table"]
    assert "2 partitions in the checkpoint, 3 in the graph" in report.skipped[0].reason


def test_some_variables_of_a_session(name_based: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, expected = name_based
    with tf.Graph().as_default(), v1.Session() as session:
        tensors = graph(parts=2)
        session.run(v1.global_variables_initializer())
        before = session.run(tensors["hidden"])
        report = load_checkpoint([tensors["scale"]], path, session=session)
        found = session.run(tensors)
    assert names(report) == {"scale"}
    assert found["scale"] == expected["scale"]
    np.testing.assert_array_equal(found["hidden"], before)
