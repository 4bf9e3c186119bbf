"""No response mixes two positions while deltas rewrite a dynamic table, its index among it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.delta.chunk_digest import chunks, served_digests
from exporter.graph.graph_files import read_saved_model
from exporter.graph.joined_lookups import LEAST
from exporter.options import ExportRequest, Isolation, Updates
from exporter.pipeline.full import export
from exporter.pipeline.incremental import export_incremental
from exporter.publish.delta_log import read_log
from exporter.tables import DynamicTable
from tests.support.deeprec import Ev, write_full, write_increment

DIM = 8
STEPS = 6


def build(tables: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    import tensorflow as tf

    ids = tf.compat.v1.placeholder(tf.int64, [None], name="ids")
    rows = [DynamicTable(f"emb{n}", DIM, default=-1.0).lookup(ids) for n in range(tables)]
    return {"ids": ids}, {"rows": tf.concat(rows, 1)}


def rows_of(keys: Any, step: int) -> Ev:
    return Ev(keys, np.full((len(keys), DIM), step, np.float32))


@pytest.mark.landing
@pytest.mark.parametrize(
    ("tables", "isolation"),  # one by itself, and many whose index is joined
    [(1, Isolation.SNAPSHOT), (LEAST + 1, Isolation.SNAPSHOT), (LEAST + 1, Isolation.ROW)],
)
def test_rows_of_one_response_are_of_one_position(tmp_path: Path, tables: int, isolation: Isolation) -> None:
    import tensorflow as tf

    random = np.random.default_rng(1)
    keys = np.unique(random.integers(0, 2**62, 26_000 // tables))
    random.shuffle(keys)
    count = 20_000 // tables
    known, new = keys[:count], np.array_split(keys[count:], STEPS)
    names = [f"emb{n}" for n in range(tables)]
    write_full(tmp_path / "train" / "model.ckpt-1", dict.fromkeys(names, rows_of(known, 1)), step=1)
    request = ExportRequest(
        tmp_path / "train",
        tmp_path / "model",
        model=partial(build, tables),
        updates=Updates(digest=True, isolation=isolation),
        table_head_room=0.5,
    )
    version = export(request).published.path
    nodes = read_saved_model(version).meta_graphs[0].graph_def.node
    assert any(node.name == "joined_tables/keys" for node in nodes) is (tables >= LEAST)
    for number in range(STEPS):
        step = number + 2
        told = np.concatenate([known, *new[: number + 1]])  # all that changed since the full checkpoint
        write_increment(tmp_path / "train", step, dict.fromkeys(names, rows_of(told, step)), parts=1)
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
        log, digest = read_log(tmp_path / "model"), signatures["incremental_digest"]
        every = [*chunks(log.schema)]
        numbers = {digest.inputs["rows"].name: np.arange(len(every))}
        found = session.run(digest.outputs["digest"].name, numbers)
        assert [int(each) for each in found] == served_digests(log.schema, log.state(), every)
    if isolation is Isolation.ROW:
        return
    assert {len(found) for found in answers} == {1}
    assert len({float(found[0]) for found in answers}) > 1
