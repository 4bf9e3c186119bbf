"""`--verify outputs` asks for two numbers of rows: a baked batch size answers one of them alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

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


@pytest.mark.parametrize(("builder", "refused"), [("any_rows", 0), ("three_rows", 5), ("many_rows", 3)])
def test_a_baked_batch_is_found_before_it_is_published(
    builder: str, refused: int, ranker: Path, tmp_path: Path
) -> None:
    ran = export_model(
        *("--ckpt-dir", ranker, "--model", f"{__file__}:{builder}", "--out", tmp_path / "m"),
        *("--verify", "outputs", "--json"),
    )
    if not refused:
        assert ran.code == 0, ran.err
        return
    assert (ran.code, ran.error["error"]) == (6, "VerificationError"), ran.err
    assert ran.error["message"] == (
        f"signature 'serving_default' does not answer {refused} rows, though its inputs say [?]"
    )
    assert "baked in" in ran.error["hint"]
    assert not (tmp_path / "m" / "20").exists()
