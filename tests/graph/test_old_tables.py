"""Lookup tables of TensorFlow 1.0 to 1.2, whose handles are references, take deltas as later ones do."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry  # the public API does not give an op's definition

from exporter import export
from exporter.graph import lookup_tables
from exporter.graph.load import GraphRequest, load_graph
from exporter.options import ExportRequest, Updates, Verify

tf1 = tf.compat.v1
FIXTURE = Path(__file__).parents[1] / "fixtures" / "tf1_tables" / "tables.tar.xz"
ROWS = np.arange(8, dtype=np.float32).reshape(4, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("old_tables")
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(directory, filter="data")
    return directory / "model"


def ask(loaded: Any, text: list[str]) -> dict[str, Any]:
    found = loaded.signatures["serving_default"](text=tf.constant(text))
    return {key: np.asarray(value) for key, value in found.items()}


@pytest.mark.parametrize("options", [{}, {"updates": Updates()}], ids=["plain", "updatable"])
def test_tables_of_tensorflow_1_2_answer_as_they_did(
    options: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    done = export(ExportRequest(model, tmp_path / "m", verify=Verify.OUTPUTS, **options))
    loaded = tf.saved_model.load(str(done.published.path))
    for request in json.loads((model.parent / "answers.json").read_text()):
        found = ask(loaded, request["text"])
        for name, expected in request["outputs"].items():
            if name == "names":
                assert found[name].astype(str).tolist() == expected
            else:
                np.testing.assert_allclose(found[name], expected, rtol=1e-5)


def write_checkpoint(directory: Path, step: int, rows: np.ndarray, learned: dict[str, int]) -> None:
    """A checkpoint as the trainer's Saver writes it; today's TensorFlow cannot train that graph."""
    directory.mkdir(exist_ok=True)
    prefix = str(directory / f"model.ckpt-{step}")
    values = [rows, np.array([*learned], object), np.array([*learned.values()], np.int64)]
    names = ["rows", "learned-keys", "learned-values"]
    tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=[""] * 3, tensors=values)
    tf1.train.update_checkpoint_state(str(directory), prefix)


def test_deltas_reach_tables_of_tensorflow_1_2(model: Path, tmp_path: Path) -> None:
    train, out = tmp_path / "train", tmp_path / "m"
    write_checkpoint(train, 1, ROWS, {"a": 5})
    done = export(ExportRequest(train, out, model=str(model), updates=Updates()))
    loaded = tf.saved_model.load(str(done.published.path))
    assert ask(loaded, ["b", "a"])["learned"].tolist() == [-1, 5]
    np.testing.assert_array_equal(ask(loaded, ["b", "a"])["sum"], 2 * ROWS[[1, 0]])
    write_checkpoint(train, 2, ROWS + 1, {"a": 6, "b": 7})
    export(train, out, str(model), save_incr_model=True)
    loaded.signatures["incremental_update"](up_to=tf.constant([-1], tf.int64))
    found = ask(loaded, ["b", "a"])
    assert found["learned"].tolist() == [7, 6]
    for name, times in (("sum", 2), ("branch", 2), ("loop", 4)):
        np.testing.assert_array_equal(found[name], times * (ROWS + 1)[[1, 0]])


@pytest.mark.parametrize("name", sorted(lookup_tables._OLD_MAKERS | lookup_tables._OLD_USERS))
def test_both_forms_of_an_operation_are_one_but_for_the_handle(name: str) -> None:
    old, new = (op_def_registry.get(f"{name}{form}") for form in ("", "V2"))
    found = lookup_tables._second_form(old)
    for definition in (found, new):
        definition.ClearField("is_stateful")  # a handle that is a resource is state
    assert found == new


def handle_taken() -> tuple[dict[str, Any], dict[str, Any]]:
    text = tf1.placeholder(tf.string, [None], name="text")
    table = tf.raw_ops.HashTable(key_dtype=tf.string, value_dtype=tf.int64, shared_name="words")
    fill = tf.raw_ops.InitializeTable(table_handle=table, keys=["a"], values=tf.constant([1], tf.int64))
    tf1.add_to_collection(tf1.GraphKeys.TABLE_INITIALIZERS, fill)
    found = tf.raw_ops.LookupTableFind(table_handle=table, keys=text, default_value=tf.constant(0, tf.int64))
    return {"text": text}, {"y": found, "place": tf.identity(table)}


def test_a_graph_that_takes_a_handle_by_its_value_stays_as_it_is() -> None:
    graph = load_graph(GraphRequest(model=handle_taken))
    assert {"HashTable", "LookupTableFind"} <= {node.op for node in graph.meta_graph.graph_def.node}
