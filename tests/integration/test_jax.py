"""The page on JAX, with JAX itself; `tests/graph/test_stablehlo.py` has models that JAX has saved."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter import ExportRequest, Updates, export, export_incremental
from tests.support.environments import made_over_this, run_program
from tests.support.guide_pages import Page
from tests.support.updatable import loaded

pytestmark = [pytest.mark.landing, pytest.mark.timeout(1800)]
JAX = ("jax==0.9.0", "jaxlib==0.9.0", "opt_einsum")


@pytest.fixture(scope="module")
def python() -> Path:
    made = made_over_this(f"jax-{sys.version_info.minor}", JAX)
    if made is None:
        pytest.skip("JAX 0.9.0 cannot be installed here")
    return made


def test_the_jax_guide(python: Path, tmp_path: Path) -> None:
    blocks = Page("docs/from/others.md").tested_by("test_the_jax_guide")
    tower, graph, trains, _ = (block.text for block in blocks)
    (tmp_path / "tower.py").write_text(tower)
    run_program(python, tmp_path, graph)
    before, _, after = trains.partition("gradients = ")
    request = ExportRequest(
        tmp_path / "train", tmp_path / "models/jax", model=str(tmp_path / "graph"), updates=Updates()
    )
    run_program(python, tmp_path, before)
    base = export(request)
    again = before.replace('writer.save(0, {"users": users, **weights})\n', "")
    answers = "\nnp.save('answers.npy', tower(weights, users[:1000]))\nnp.save('last.npy', ids)\n"
    run_program(python, tmp_path, again + "gradients = " + after + answers)
    asked = np.arange(1000)
    with loaded(base.published.path) as server:
        delta = export_incremental(request)
        assert delta.published is not None and delta.compared_bytes == 0
        first: Any = server.predict(user=asked)["click"]
        server.update()
        found: Any = server.predict(user=asked)["click"]
    expected = np.load(tmp_path / "answers.npy")
    assert np.abs(first - expected).max() > 1e-3, "the training changed answers"
    np.testing.assert_allclose(found, expected, atol=1e-6)


INSIDE = """
import numpy as np, tensorflow as tf
from jax.experimental import jax2tf

model = tf.Module()
model.users = tf.Variable(np.ones([100_000, 8], "float32"), name="users")
shapes = [None, "(b,)"]
look_up = jax2tf.convert(lambda users, user: users[user], polymorphic_shapes=shapes, with_gradient=False)
serve = tf.function(lambda user: {"row": look_up(model.users, user)}, autograph=False)
model.serve = serve.get_concrete_function(tf.TensorSpec([None], tf.int32, name="user"))
tf.saved_model.save(model, "saved/1", signatures=model.serve)
model.users.scatter_add(tf.IndexedSlices(tf.ones([10, 8]), tf.range(10)))
tf.saved_model.save(model, "saved/2", signatures=model.serve)
"""


def test_a_table_inside_the_module_is_replaced_whole(python: Path, tmp_path: Path) -> None:
    run_program(python, tmp_path, INSIDE)
    out = tmp_path / "models/inside"
    base = export(ExportRequest(tmp_path / "saved/1", out, updates=Updates()))
    delta = export_incremental(ExportRequest(tmp_path / "saved/2", out, updates=Updates()))
    assert delta.published is not None
    assert sum(file.stat().st_size for file in delta.published.path.iterdir()) > 100_000 * 8 * 4
    with loaded(base.published.path) as server:
        server.update()
        found: Any = server.predict(user=np.array([0, 9, 10], np.int32))["row"]
    np.testing.assert_array_equal(found[:, 0], [2, 2, 1])
