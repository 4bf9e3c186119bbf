"""No response mixes two positions while deltas rewrite a dynamic table, its index among it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.options import ExportRequest, Updates
from exporter.pipeline.full import export
from exporter.pipeline.incremental import export_incremental
from exporter.tables import DynamicTable
from tests.support.deeprec import Ev, write_full, write_increment

DIM = 8
STEPS = 6


def build() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    import tensorflow as tf

    ids = tf.compat.v1.placeholder(tf.int64, [None], name="ids")
    return {"ids": ids}, {"rows": DynamicTable("emb", DIM, default=-1.0).lookup(ids)}


def rows_of(keys: Any, step: int) -> Ev:
    return Ev(keys, np.full((len(keys), DIM), step, np.float32))


@pytest.mark.landing
def test_rows_of_one_response_are_of_one_position(tmp_path: Path) -> None:
    import tensorflow as tf

    random = np.random.default_rng(1)
    keys = np.unique(random.integers(0, 2**62, 26_000))
    random.shuffle(keys)
    known, new = keys[:20_000], np.array_split(keys[20_000:], STEPS)
    write_full(tmp_path / "train" / "model.ckpt-1", {"emb": rows_of(known, 1)}, step=1)
    request = ExportRequest(
        tmp_path / "train", tmp_path / "model", model=build, updates=Updates(), table_head_room=0.5
    )
    version = export(request).published.path
    for number in range(STEPS):
        step = number + 2
        told = np.concatenate([known, *new[: number + 1]])  # all that changed since the full checkpoint
        write_increment(tmp_path / "train", step, {"emb": rows_of(told, step)}, parts=1)
        export_incremental(ExportRequest(tmp_path / "train", tmp_path / "model"))
    v1 = tf.compat.v1
    answers: list[Any] = []
    done = threading.Event()
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        signatures = v1.saved_model.load(session, ["serve"], str(version)).signature_def
        predict, update = signatures["serving_default"], signatures["incremental_update"]
        ask = session.make_callable(predict.outputs["rows"].name, [predict.inputs["ids"].name])
        apply = session.make_callable(update.outputs["position"].name, [update.inputs["up_to"].name])

        def read(seed: int) -> None:
            choice = np.random.default_rng(seed)
            while not done.is_set():
                answers.append(np.unique(ask(choice.choice(known, 256))))

        readers = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
        for reader in readers:
            reader.start()
        for step in range(2, STEPS + 2):
            assert apply([step]) == [step]
        done.set()
        for reader in readers:
            reader.join()
        assert (ask(keys) == STEPS + 1).all(), "new keys are there, and old ones are found where they moved"
    assert {len(found) for found in answers} == {1}
    assert len({float(found[0]) for found in answers}) > 1
