"""`--verify outputs` asks for two numbers of rows: a baked batch size answers one of them alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from exporter.wire import protos
from tests.support.commands import export_model

tf1 = tf.compat.v1


def rows_of(batch: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `input_fn` with a fixed batch leaves: `batch` as a constant in the shapes of the graph."""
    x = tf1.placeholder(tf.float32, [None, 48], name="x")
    kernel = tf1.get_variable("ranker/hidden/kernel", [48, 32], use_resource=True)
    return {"x": x}, {"y": tf.reshape(tf.matmul(x, kernel), [batch, 4, 8])}


def any_rows() -> tuple[dict[str, Any], dict[str, Any]]:
    return rows_of(-1)


def three_rows() -> tuple[dict[str, Any], dict[str, Any]]:
    return rows_of(3)


def many_rows() -> tuple[dict[str, Any], dict[str, Any]]:
    return rows_of(32)


def two_inputs() -> tuple[dict[str, Any], dict[str, Any]]:
    """Two inputs, of which nothing says that they have as many rows: constants that meet them stay."""
    inputs, outputs = rows_of(32)
    scale = tf1.placeholder(tf.float32, [None, 1, 1], name="scale")
    return inputs | {"scale": scale}, {"y": outputs["y"] * scale}


def mixed_rows() -> tuple[dict[str, Any], dict[str, Any]]:
    """A shape of 32 rows' elements that keeps no row together."""
    inputs, outputs = rows_of(-1)
    return inputs, {"y": tf.reshape(outputs["y"], [8, 4, 32])}


@pytest.mark.parametrize("builder", ["any_rows", "three_rows", "many_rows"])
def test_a_baked_batch_is_opened_and_compared(builder: str, ranker: Path, tmp_path: Path) -> None:
    """Also with a source graph that answers 32 rows alone: it is asked in parts."""
    ran = export_model(
        *("--ckpt-dir", ranker, "--model", f"{__file__}:{builder}", "--out", tmp_path / "m"),
        *("--verify", "outputs", "--json"),
    )
    assert ran.code == 0, ran.err
    notes = [note for note in ran.document["notes"] if "any number of rows" in note]
    assert len(notes) == (builder != "any_rows")
    loaded = tf.saved_model.load(tmp_path / "m" / "20").signatures["serving_default"]
    for rows in (1, 3, 65):
        assert loaded(x=tf.ones([rows, 48]))["y"].shape == (rows, 4, 8)


def test_a_size_that_cannot_be_opened_is_told(ranker: Path, tmp_path: Path) -> None:
    ran = export_model(
        *("--ckpt-dir", ranker, "--model", f"{__file__}:mixed_rows", "--out", tmp_path / "m"),
        *("--verify", "outputs", "--json"),
    )
    assert ran.code == 0, ran.err
    (note,) = (note for note in ran.document["notes"] if "rows" in note)
    assert note.startswith("only requests of 32 rows are answered, and the signatures say so"), note
    data = (tmp_path / "m" / "20" / "saved_model.pb").read_bytes()
    (meta_graph,) = protos.message_class("SavedModel").FromString(data).meta_graphs
    signature = meta_graph.signature_def["serving_default"]
    assert [dim.size for dim in signature.inputs["x"].tensor_shape.dim] == [32, 48]


def test_a_baked_batch_is_found_before_it_is_published(ranker: Path, tmp_path: Path) -> None:
    ran = export_model(
        *("--ckpt-dir", ranker, "--model", f"{__file__}:two_inputs", "--out", tmp_path / "m"),
        *("--verify", "outputs", "--json"),
    )
    assert (ran.code, ran.error["error"]) == (6, "VerificationError"), ran.err
    assert ran.error["message"] == (
        "signature 'serving_default' does not answer 3 rows, though its inputs say [?]"
    )
    assert "baked in" in ran.error["hint"]
    assert not (tmp_path / "m" / "20").exists()
