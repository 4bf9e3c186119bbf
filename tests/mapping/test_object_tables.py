"""Hash tables among TensorFlow 2's objects: `tf.train.Checkpoint` stores them by paths of objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.errors import MissingTensors
from exporter.options import ExportRequest, Updates
from exporter.pipeline.full import export, plan
from exporter.pipeline.incremental import export_incremental
from tests.support.updatable import loaded_quickly

lookup = tf.lookup.experimental
ASKED = [3, 20, 55, 10**14 + 7, 999]


class Tables(tf.Module):
    """A table of vectors, one of scalars and one of rows, in lists and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = lookup.DenseHashTable(
            tf.int64, tf.float32, tf.zeros([4]), empty_key=-1, deleted_key=-2
        )
        self.others = [
            lookup.MutableHashTable(tf.int64, tf.float32, 1.0),
            lookup.MutableHashTable(tf.string, tf.int64, 0),
        ]

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, name="ids")])
    def find(self, ids: Any) -> Any:
        row = self.others[1].lookup(tf.strings.as_string(ids))
        return {"vector": self.vectors.lookup(ids), "weight": self.others[0].lookup(ids), "row": row}

    def fill(self, keys: list[int], value: float) -> None:
        numbers = tf.constant(keys, tf.int64)
        self.vectors.insert(numbers, tf.fill([len(keys), 4], value))
        self.others[0].insert(numbers, tf.fill([len(keys)], value))
        self.others[1].insert(tf.strings.as_string(numbers), tf.fill([len(keys)], tf.cast(value, tf.int64)))


class Scored(Tables):
    """The same, beside a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = tf.Variable(2.0, name="scale")

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, name="ids")])
    def find(self, ids: Any) -> Any:
        return {"vector": self.vectors.lookup(ids) * self.scale, "weight": self.others[0].lookup(ids)}


def answers(module: Tables) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in module.find(tf.constant(ASKED, tf.int64)).items()}


def served(kind: type[Tables]) -> Any:
    module: Any = kind()
    module.signatures = {"serving_default": module.find}
    return module


@pytest.mark.parametrize(
    ("kind", "place", "is_saved"),
    [
        (Tables, "net/tower", False),
        pytest.param(Scored, "model", False, marks=pytest.mark.landing),
        pytest.param(Tables, "model", True, marks=pytest.mark.landing),
        pytest.param(Scored, "net/tower", True, marks=pytest.mark.landing),
    ],
)
def test_tables_are_found_by_their_objects_and_followed(
    kind: type[Tables], place: str, is_saved: bool, tmp_path: Path
) -> None:
    module = kind()
    held: Any = module
    for name in reversed(place.split("/")):
        held = tf.train.Checkpoint(**{name: held})
    module.fill([3, 20, 10**14 + 7], 0.5)
    held.save(str(tmp_path / "train/ckpt"))
    model: Any = lambda: served(kind)  # noqa: E731
    if is_saved:
        source = kind()
        tf.saved_model.save(source, str(tmp_path / "saved"), signatures={"serving_default": source.find})
        model = str(tmp_path / "saved")
    request = ExportRequest(tmp_path / "train", tmp_path / "out", model=model, updates=Updates())
    base = export(request).published.path
    with loaded_quickly(base) as server:
        assert_equal(server.predict(ids=ASKED), answers(module))
        module.fill([3, 55], 7.0)
        module.vectors.erase(tf.constant([20], tf.int64))
        module.others[0].remove(tf.constant([10**14 + 7], tf.int64))
        held.save(str(tmp_path / "train/ckpt"))
        export_incremental(request)
        server.update(-1)
        assert_equal(server.predict(ids=ASKED), answers(module))


def assert_equal(found: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() >= expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_a_table_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    other = tf.train.Checkpoint(model=tf.train.Checkpoint(memory=Tables().vectors))
    other.save(str(tmp_path / "ckpt"))

    def build() -> Any:
        x = tf.compat.v1.placeholder(tf.int64, [None], name="x")
        table = lookup.DenseHashTable(tf.int64, tf.float32, tf.zeros([4]), empty_key=-1, deleted_key=-2)
        return {"x": x}, {"y": table.lookup(x)}

    with pytest.raises(MissingTensors) as caught:
        plan(ExportRequest(tmp_path, tmp_path / "out", model=build))
    assert "'model/memory/.ATTRIBUTES/table'" in caught.value.cause
    rule = caught.value.hint.partition("--rename '")[2].partition("'")[0]
    plan(ExportRequest(tmp_path, tmp_path / "out", model=build, renames=(rule,)))
