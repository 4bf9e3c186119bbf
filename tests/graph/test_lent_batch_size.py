"""A version that answers one batch size alone lends its graph with that size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from exporter.options import ExportRequest, Updates, Verify
from exporter.pipeline.full import export
from exporter.pipeline.inspected import signatures_of
from tests.support.trained import answers_in_session

v1 = tf.compat.v1


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a graph of batches of 8 whose rows change each other's answers."""
    directory = tmp_path_factory.mktemp("train")
    with tf.Graph().as_default(), v1.Session() as session:
        rows = tf.data.Dataset.range(100).map(lambda i: tf.ones([3])).batch(8, drop_remainder=True)
        x = v1.data.make_one_shot_iterator(rows).get_next()
        y = tf.reshape(tf.matmul(x, v1.get_variable("w", [3, 2])), [4, 4])
        tf.identity(tf.reshape(y - tf.reduce_mean(y, 0), [8, 2]), name="out")
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, str(directory / "model.ckpt"), 400)
    return directory


@pytest.mark.parametrize("updates", [None, pytest.param(Updates(), marks=pytest.mark.landing)])
def test_a_version_of_a_fixed_batch_lends_it(train: Path, updates: Updates | None, tmp_path: Path) -> None:
    ends = {"inputs": {"x": "IteratorGetNext:0"}, "outputs": {"y": "out:0"}}
    first = export(ExportRequest(train, tmp_path / "first", **ends))
    told = "serving_default", "(x float32[8,3]) -> y float32[8,2]"
    path = first.published.path
    for name in ("lent", "lent once more"):
        request = ExportRequest(
            train, tmp_path / name, model=str(path), verify=Verify.OUTPUTS, updates=updates
        )
        lent = export(request)
        found = signatures_of(lent.plan.graph.meta_graph)
        assert [(key, str(one)) for key, one in found.items()] == [told]
        x = np.arange(24, dtype=np.float32).reshape(8, 3)
        answers = (answers_in_session(each, {"x": x})["y"] for each in (path, lent.published.path))
        np.testing.assert_array_equal(*answers)
        if updates is None:
            path = lent.published.path
