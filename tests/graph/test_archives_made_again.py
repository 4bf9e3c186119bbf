"""Archives of a model that a program makes again: Keras has counted on, and nothing else is another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest
import tf_keras

from exporter import export_incremental
from exporter.errors import SchemaChanged
from exporter.graph.archived_model import model_digest
from tests.support.updatable import loaded_quickly

KERASES = pytest.mark.parametrize("kind", [keras, tf_keras], ids=["keras", "tf-keras"])
X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def plain(kind: ModuleType, activation: str = "relu", units: int = 4) -> Any:
    x = kind.Input([3])
    return kind.Model(x, kind.layers.Dense(1)(kind.layers.Dense(units, activation=activation)(x)))


def nested(kind: ModuleType) -> Any:
    x = kind.Input([3])
    inner = kind.Sequential([kind.Input([3]), kind.layers.Dense(4), kind.layers.Dense(3)])
    return kind.Model(x, kind.layers.Dense(2)(inner(x)))


def shared(kind: ModuleType) -> Any:
    one, two, layer = kind.Input([3]), kind.Input([3]), kind.layers.Dense(4)
    return kind.Model([one, two], kind.layers.Concatenate()([layer(one), layer(two)]))


def wrapped(kind: ModuleType) -> Any:
    x = kind.Input([3, 2])
    h = kind.layers.Bidirectional(kind.layers.LSTM(2))(x)
    g = kind.layers.RNN([kind.layers.LSTMCell(3), kind.layers.GRUCell(4)])(x)
    return kind.Model(x, kind.layers.TimeDistributed(kind.layers.Dense(2))(g[:, :, None] * 2.0 + h[:, None]))


def sequential(kind: ModuleType) -> Any:
    return kind.Sequential(
        [kind.Input([3]), kind.layers.Dense(4), kind.layers.Dropout(0.1), kind.layers.Dense(1)]
    )


def folded(kind: ModuleType) -> Any:
    """A model called after its fold, by the program."""
    x = kind.Input([3], name="x")
    return kind.Model(x, kind.layers.Dense(1, name="y")(x), name=f"fold_{len(_folds)}")


_folds: list[None] = []


def digests(path: Path, *models: Any) -> list[str]:
    found = []
    for number, model in enumerate(models):
        model.compile("sgd", "mse")
        model.save(path / f"m{number}.keras")
        found.append(model_digest(path / f"m{number}.keras"))
    return found


@KERASES
@pytest.mark.parametrize(
    "make", [plain, nested, shared, wrapped, sequential, folded], ids=lambda f: f.__name__
)
def test_numbers_that_keras_counted_are_no_difference(
    tmp_path: Path, kind: ModuleType, make: Callable[[ModuleType], Any]
) -> None:
    models = []
    for _ in range(11):  # past nine, as texts `dense_10` comes before `dense_9`
        models.append(make(kind))
        _folds.append(None)
    assert models[0].name != models[-1].name
    assert len({*digests(tmp_path, models[0], models[1], models[-1])}) == 1


def heads(kind: ModuleType, *names: str) -> Any:
    x = kind.Input([3], name="x")
    return kind.Model(x, [kind.layers.Dense(1, name=name)(x) for name in names])


def fed(kind: ModuleType, name: str) -> Any:
    x = kind.Input([3], name=name)
    return kind.Model(x, kind.layers.Dense(1)(x))


def ordered(kind: ModuleType, *, is_swapped: bool) -> Any:
    x = kind.Input([4])
    first, second = kind.layers.Dense(4), kind.layers.LayerNormalization()
    return kind.Model(x, first(second(x)) if is_swapped else second(first(x)))


def crossed(kind: ModuleType, *, is_crossed: bool) -> Any:
    x = kind.Input([3])
    one, two = kind.layers.Dense(2)(x), kind.layers.Dense(2)(x)
    return kind.Model(x, [two, one] if is_crossed else [one, two])


OTHERS: dict[str, Callable[[ModuleType], tuple[Any, Any]]] = {
    "activation": lambda kind: (plain(kind), plain(kind, "tanh")),
    "units": lambda kind: (plain(kind), plain(kind, units=5)),
    "order": lambda kind: (ordered(kind, is_swapped=False), ordered(kind, is_swapped=True)),
    "outputs": lambda kind: (crossed(kind, is_crossed=False), crossed(kind, is_crossed=True)),
    "own numbers": lambda kind: (heads(kind, "head_1", "head_2"), heads(kind, "head_2", "head_1")),
    "own names": lambda kind: (heads(kind, "ctr", "cvr"), heads(kind, "cvr", "ctr")),
    "as if counted": lambda kind: (heads(kind, "dense_1", "dense_2"), heads(kind, "dense_2", "dense_1")),
    "input": lambda kind: (fed(kind, "feature_1"), fed(kind, "feature_2")),
    "sharing": lambda kind: (shared(kind), twice(kind)),
}


def twice(kind: ModuleType) -> Any:
    one, two = kind.Input([3]), kind.Input([3])
    parts = [kind.layers.Dense(4)(one), kind.layers.Dense(4)(two)]
    return kind.Model([one, two], kind.layers.Concatenate()(parts))


@KERASES
@pytest.mark.parametrize("other", OTHERS)
def test_another_model_is_one(tmp_path: Path, kind: ModuleType, other: str) -> None:
    before, after = digests(tmp_path, *OTHERS[other](kind))
    assert before != after


def answered(server: Any) -> Any:
    (name,) = server.signatures["serving_default"].inputs
    (found,) = server.predict(**{name: X}).values()
    return found


@KERASES
@pytest.mark.parametrize(
    "name", ["m.keras", *(pytest.param(name, marks=pytest.mark.landing) for name in ("m.h5", "m.weights.h5"))]
)
def test_a_model_made_again_becomes_a_delta(tmp_path: Path, kind: ModuleType, name: str) -> None:
    models = [nested(kind) for _ in range(12)]
    builder = (lambda: nested(kind)) if "weights" in name else None
    for number in (3, 11):
        (tmp_path / str(number)).mkdir()
        model, path = models[number], tmp_path / str(number) / name
        (model.save_weights if builder else model.save)(path)
        exported = export_incremental(path, tmp_path / "out", model=builder)
        if number == 3:
            version = exported.published.path
    with loaded_quickly(version) as server:
        np.testing.assert_allclose(answered(server), models[3](X), atol=1e-6)
        assert server.update()["deltas"] == 1
        np.testing.assert_allclose(answered(server), models[11](X), atol=1e-6)


def test_a_model_of_another_structure_is_refused(tmp_path: Path) -> None:
    for activation in ("relu", "tanh"):
        plain(keras, activation).save(tmp_path / f"{activation}.keras")
    export_incremental(tmp_path / "relu.keras", tmp_path / "out")
    with pytest.raises(SchemaChanged, match="not those of base"):
        export_incremental(tmp_path / "tanh.keras", tmp_path / "out")


def test_a_base_of_an_earlier_release_takes_the_archives_that_it_took(tmp_path: Path) -> None:
    model = [plain(keras) for _ in range(3)][-1]
    model.save(tmp_path / "m.keras")
    export_incremental(tmp_path / "m.keras", tmp_path / "out")
    digest = model_digest(tmp_path / "m.keras")
    before = model_digest(tmp_path / "m.keras", as_written=True)
    (manifest,) = (tmp_path / "out").glob("*/manifest.json")
    text = manifest.read_text()
    assert digest in text
    manifest.write_text(text.replace(digest, before))
    model.set_weights([value + 1 for value in model.get_weights()])
    model.save(tmp_path / "m.keras")
    assert export_incremental(tmp_path / "m.keras", tmp_path / "out").published.path.parent.name != "out"
