"""`incremental_digest`: what a server holds, as the exporter computes it from its own copy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from exporter.delta.chunk_digest import CHUNK_ROWS, Chunk, chunk_digest, chunks
from exporter.delta.format import ChangeKind, Schema, ServedVariable
from exporter.wire.dtypes import DType
from tests.support.updatable import expected_digests, loaded, updatable_model

tf1 = tf.compat.v1

DTYPES = "half bfloat16 float32 double int8 uint16 int64 bool complex64 complex128"


def several_chunks() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    ids = tf1.placeholder(tf.int64, [None], name="ids")
    long = tf1.get_variable("long", [CHUNK_ROWS * 2 + 5, 2], use_resource=True)
    read = [tf.gather(long, ids)]
    for name in DTYPES.split():
        dtype, zeros = tf.as_dtype(name), tf.zeros_initializer()
        read.append(tf1.get_variable(f"whole_{name}", [7, 3], dtype, zeros, use_resource=True))
    read.append(tf1.get_variable("scalar", [], use_resource=True))
    read.append(tf1.get_variable("text", initializer=tf.constant(["a", "b"]), use_resource=True))
    return {"ids": ids}, {str(n): tf.identity(tensor) for n, tensor in enumerate(read)}


def test_digests_are_those_that_the_exporter_computes(tmp_path: Path) -> None:
    model = updatable_model(tmp_path, several_chunks, {"ids": [0]}, digest=True)
    every = list(range(len(list(chunks(model.schema)))))
    with loaded(model) as server:
        found = server.call("incremental_digest", rows=every)
        assert found["digest"].tolist() == expected_digests(model, 100)
        assert set(found["position_before"]) == set(found["position_after"]) == {100}
        rng = np.random.default_rng(1)
        rows = np.sort(rng.choice(CHUNK_ROWS, 9, replace=False)) + CHUNK_ROWS
        model.publish_rows(100, 110, "long", rows, rng.normal(size=(9, 2)).astype(np.float32))
        server.update()
        found = server.call("incremental_digest", rows=every)
        assert found["digest"].tolist() == expected_digests(model, 110)
        pairs = zip(
            chunks(model.schema), expected_digests(model, 100), expected_digests(model, 110), strict=True
        )
        assert [chunk for chunk, before, after in pairs if before != after] == [
            Chunk("long", CHUNK_ROWS, 2 * CHUNK_ROWS)
        ]
        assert set(found["position_after"]) == {110}
        assert server.call("incremental_digest", rows=[])["digest"].tolist() == []
        for number in (-1, len(every)):
            with pytest.raises(tf.errors.InvalidArgumentError, match="chunks are numbered"):
                server.call("incremental_digest", rows=[number])


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=20), st.randoms())
def test_what_changes_a_digest(values: list[float], random: Any) -> None:
    rows = np.array(values, np.float32)
    other = rows.copy()
    place = random.randrange(len(rows))
    other[place : place + 1].view(np.uint32)[:] ^= np.uint32(1 << random.randrange(32))
    assert chunk_digest(rows) != chunk_digest(other), "one bit"
    turned = rows[::-1]
    if turned.tobytes() != rows.tobytes():
        assert chunk_digest(rows) != chunk_digest(turned), "the order"
    assert chunk_digest(rows) == chunk_digest(rows.reshape(-1, 1)), "not the shape"


def test_chunks_cover_every_row_once() -> None:
    schema = Schema.of(
        [
            ServedVariable("b", DType.FLOAT, (), ChangeKind.DENSE),
            ServedVariable("a", DType.FLOAT, (CHUNK_ROWS + 1, 2), ChangeKind.TABLE),
            ServedVariable("c", DType.FLOAT, (0, 2), ChangeKind.TABLE),
        ]
    )
    assert list(chunks(schema)) == [Chunk("a", 0, 4096), Chunk("a", 4096, 4097), Chunk("b", 0, 1)]
