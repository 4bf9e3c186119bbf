"""Merged and padded batches, as `--enable_batching` makes them: each caller gets what is its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.updatable import Loaded, loaded, updatable_model

tf1 = tf.compat.v1


def looked_up() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    ids = tf1.placeholder(tf.int64, [None], name="ids")
    table = tf1.get_variable("table", [50, 3], use_resource=True)
    return {"ids": ids}, {"rows": tf.gather(table, ids)}


def merged(server: Loaded, signature: str, calls: list[dict[str, list[int]]], size: int) -> list[Any]:
    """One call for all: inputs one after the other, the last row repeated to fill `size`; then split."""
    (name,) = calls[0]
    lengths = [len(call[name]) for call in calls]
    rows = [row for call in calls for row in call[name]]
    rows += rows[-1:] * (size - len(rows))
    answer = server.call(signature, **{name: rows})
    assert {len(value) for value in answer.values()} == {size}, "every output has the batch's dimension"
    ends = np.cumsum(lengths)
    return [
        {key: value[end - length : end] for key, value in answer.items()}
        for end, length in zip(ends, lengths, strict=True)
    ]


@pytest.mark.parametrize(
    ("signature", "calls"),
    [
        ("serving_default", [{"ids": [1, 2, 3]}, {"ids": [4]}, {"ids": [2, 49]}]),
        ("incremental_status", [{"probe": [0]}, {"probe": [7, 8]}]),
        ("incremental_digest", [{"rows": [0]}, {"rows": [0, 0]}]),
        ("incremental_update", [{"up_to": [110]}, {"up_to": [-1]}]),
    ],
)
def test_merged_calls_answer_as_single_ones(
    tmp_path: Path, signature: str, calls: list[dict[str, list[int]]]
) -> None:
    model = updatable_model(tmp_path, looked_up, {"ids": [0]}, digest=True)
    model.evolve(100, 110)
    model.evolve(110, 120)
    with loaded(model) as server:
        together = merged(server, signature, calls, size=8)
        single = [server.call(signature, **call) for call in calls]
        position = server.position()
    if signature == "incremental_update":  # the nearest target is reached; asked alone, the second goes on
        assert [answer["position"].tolist() for answer in together] == [[110], [110]]
        assert position == 120
        return
    for one, other in zip(together, single, strict=True):
        for name, value in other.items():
            np.testing.assert_array_equal(one[name], value)
