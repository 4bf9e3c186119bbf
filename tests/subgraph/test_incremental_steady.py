"""After updates a prediction needs no more memory than before the first; nor does another model's."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.delta.format import Rows
from tests.support.budget import times
from tests.support.neighbour import CALLS
from tests.support.updatable import loaded, two_tables_and_dense, updatable_model

tf1 = tf.compat.v1

ROWS, DIM = 500_000, 64
TABLE_BYTES = ROWS * DIM * 4


def large_table() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    ids = tf1.placeholder(tf.int64, [None], name="ids")
    initial = tf1.zeros_initializer()
    table = tf1.get_variable("table", [ROWS, DIM], initializer=initial, use_resource=True)
    bias = tf1.get_variable("bias", [DIM], initializer=initial, use_resource=True)
    return {"ids": ids}, {"score": tf.reduce_sum(tf.gather(table, ids) + bias, axis=1)}


def peak_bytes() -> int:
    """The most memory that this process has held since the peak was last forgotten."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@pytest.mark.landing
def test_memory_is_the_same_after_hundreds_of_updates(tmp_path: Path) -> None:
    model = updatable_model(tmp_path, large_table, {"ids": [0]})
    expected, rng = model.values["table"], np.random.default_rng(1)
    with loaded(model) as server:
        server.predict(ids=[1])
        server.update()
        forget_peak()
        before = peak_bytes()
        for position in range(100, 100 + times(200)):
            ids = np.sort(rng.choice(ROWS, 4, replace=False))
            values = rng.normal(size=(4, DIM)).astype(np.float32)
            expected[ids] = values
            delta = model.publish(position, position + 1, {"table": Rows(ids, values)})
            assert server.update()["position"] == position + 1
            score = server.predict(ids=ids)["score"]
            np.testing.assert_allclose(score, (values + model.values["bias"]).sum(1), atol=1e-3)
            shutil.rmtree(delta)
        assert peak_bytes() - before < TABLE_BYTES / 2
        np.testing.assert_array_equal(server.values(model.schema)["table"], expected)


def test_a_base_costs_no_model_beside_it_page_faults(tmp_path: Path) -> None:
    """An operation of the subgraph that sets the allocator's threshold would: 60 a call."""
    model = updatable_model(tmp_path, two_tables_and_dense, {"user": [0], "item": [0]})
    model.evolve(100, 101)
    asked = [sys.executable, "-m", "tests.support.neighbour", str(model.version)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300)
    alone, beside, applied = json.loads(done.stdout)
    assert applied == 1
    assert beside <= alone + CALLS, f"{alone} page faults in {CALLS} calls, {beside} beside a base"
