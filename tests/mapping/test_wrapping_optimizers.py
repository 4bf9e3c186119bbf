"""Optimizers that hold another one: the averages that they keep as slots, and the steps of the inner one."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.tensor_values import read_array
from exporter.errors import MissingTensors
from exporter.options import ExportRequest
from exporter.pipeline.full import Plan, plan

ADDONS = Path(__file__).parents[1] / "fixtures/addons/0.19.0.tar.xz"


@pytest.fixture(scope="module")
def addons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What TensorFlow Addons saved: see `make.py` beside it."""
    directory = tmp_path_factory.mktemp("addons")
    with tarfile.open(ADDONS) as packed:
        packed.extractall(directory, filter="data")
    return directory


def build(library: ModuleType = tf_keras) -> Any:
    x = library.Input([3], name="x")
    hidden = library.layers.Dense(4, name="hidden")(x)
    return library.Model(x, library.layers.Dense(2, name="out")(hidden))


def planned(directory: Path, average: str) -> Plan:
    return plan(ExportRequest(directory, directory / "out", model=build, average=average))


@pytest.mark.parametrize(
    ("kind", "average"),
    [
        ("moving_average", "ema"),
        ("moving_average", "average"),
        ("swa", "ema"),
        ("lookahead", "ema"),
        ("lookahead", "slow"),
        ("nested", "ema"),
    ],
)
def test_averages_of_a_wrapping_optimizer_are_found(addons: Path, kind: str, average: str) -> None:
    slots = np.load(addons / kind / "slots.npz")
    found = planned(addons / kind, average)
    assert found.catalog.step == slots["steps"] == 16
    assert not found.mapping.notes
    assert {source.via for source in found.mapping.sources} == {"average"}
    for source in found.mapping.sources:
        np.testing.assert_array_equal(read_array(found.catalog, source.tensor), slots[source.key])


@pytest.mark.parametrize(
    ("kind", "there"), [("lookahead", "--average ema or --average slow"), ("swa", "--average average")]
)
def test_the_hint_names_the_averages_that_there_are(addons: Path, kind: str, there: str) -> None:
    with pytest.raises(MissingTensors) as caught:
        planned(addons / kind, "polyak")
    assert there in caught.value.hint


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras3", "keras2"])
@pytest.mark.parametrize("name", ["m.keras", "m.h5", "ckpt"])
def test_mixed_precision_tells_its_steps(library: ModuleType, name: str, tmp_path: Path) -> None:
    model = build(library)
    model.compile(
        library.mixed_precision.LossScaleOptimizer(library.optimizers.SGD(0.1, momentum=0.9)), "mse"
    )
    model.fit(np.zeros([24, 3]), np.zeros([24, 2]), batch_size=8, verbose=0)
    if name == "ckpt":
        tf.train.Checkpoint(model=model).save(str(tmp_path / name / "c"))
    else:
        model.save(tmp_path / name)
    assert open_checkpoint(tmp_path / name).step == 3


@pytest.mark.parametrize("name", ["m.keras", "ckpt"])
def test_an_optimizer_of_ones_own_that_holds_another(name: str, tmp_path: Path) -> None:
    class Scaled(keras.optimizers.Optimizer):  # type: ignore[misc]
        def __init__(self, held: Any) -> None:
            super().__init__(learning_rate=0.1)
            self.held = held

        def build(self, variables: Any) -> None:
            super().build(variables)
            self.held.build(variables)

        def apply(self, gradients: Any, variables: Any = None) -> None:
            if not self.built:
                self.build(variables)
            self.held.apply(gradients, variables)

    model = build(keras)
    model.compile(Scaled(keras.optimizers.Adam(0.1)), "mse")
    model.fit(np.zeros([24, 3]), np.zeros([24, 2]), batch_size=8, verbose=0)
    if name == "ckpt":
        tf.train.Checkpoint(model=model).save(str(tmp_path / name / "c"))
    else:
        model.save(tmp_path / name)
    assert open_checkpoint(tmp_path / name).step == 3


def test_averages_of_keras_3_are_found_as_before(tmp_path: Path) -> None:
    model = build(keras)
    model.compile(keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5), "mse")
    model.fit(np.ones([24, 3]), np.zeros([24, 2]), batch_size=8, verbose=0)
    tf.train.Checkpoint(model=model).save(str(tmp_path / "c"))
    found = plan(ExportRequest(tmp_path, tmp_path / "out", model=lambda: build(keras), average="ema"))
    assert {source.via for source in found.mapping.sources} == {"average"}
