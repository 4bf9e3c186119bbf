"""A version with joined tables: both loaders of TensorFlow answer from it, and save what was published."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from exporter.graph.graph_files import read_saved_model
from exporter.graph.joined_lookups import INDEX, LEAST
from exporter.options import ExportRequest, Updates
from exporter.pipeline.full import export
from exporter.tables import DynamicTable
from exporter.tables.parts import PARTS
from tests.support.deeprec import Ev, write_full
from tests.support.updatable import loaded_quickly

NAMES = [f"t{n}" for n in range(LEAST)]


def model() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    import tensorflow as tf

    ids = tf.compat.v1.placeholder(tf.int64, [None], name="ids")
    return {"ids": ids}, {name: DynamicTable(name, 4).lookup(ids) for name in NAMES}


def test_loaders_answer_and_save(tmp_path: Path) -> None:
    import tensorflow as tf

    evs = {name: Ev.random(50 * (n + 1), seed=n) for n, name in enumerate(NAMES)}
    write_full(tmp_path / "train" / "model.ckpt-1", evs, step=1)
    version = export(ExportRequest(tmp_path / "train", tmp_path / "model", model=model)).published.path
    nodes = [node.name for node in read_saved_model(version).meta_graphs[0].graph_def.node]
    assert "joined_tables/keys" in nodes
    assert "t0/keys" not in nodes
    ids = np.concatenate([ev.keys[:20] for ev in evs.values()])
    expected = {
        name: np.array([ev.as_dict().get(key, np.zeros(4, np.float32)) for key in ids.tolist()])
        for name, ev in evs.items()
    }
    found = tf.saved_model.load(str(version)).signatures["serving_default"](tf.constant(ids))
    assert all(found[name].numpy().tobytes() == rows.tobytes() for name, rows in expected.items())

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        meta = v1.saved_model.load(session, ["serve"], str(version))
        outputs = {name: info.name for name, info in meta.signature_def["serving_default"].outputs.items()}
        given = {meta.signature_def["serving_default"].inputs["ids"].name: ids}
        found = session.run(outputs, given)
        assert all(found[name].tobytes() == rows.tobytes() for name, rows in expected.items())
        v1.train.Saver(saver_def=meta.saver_def).save(session, str(tmp_path / "saved"))
    saved = tf.train.load_checkpoint(str(tmp_path / "saved"))
    published = tf.train.load_checkpoint(str(version / "variables" / "variables"))
    for name in (f"{table}/{part}" for table in NAMES for part in PARTS):
        assert saved.get_tensor(name).tobytes() == published.get_tensor(name).tobytes(), name


def test_a_version_lends_its_graph_to_a_newer_checkpoint(tmp_path: Path) -> None:
    train = tmp_path / "train"
    write_full(train / "model.ckpt-1", {name: Ev.random(50, seed=1) for name in NAMES}, step=1)
    version = export(ExportRequest(train, tmp_path / "model", model=model)).published.path
    evs = {name: Ev.random(3000 * n + 1, seed=n) for n, name in enumerate(NAMES)}
    write_full(train / "model.ckpt-2", evs, step=2)
    newer = export(ExportRequest(train, tmp_path / "model", model=str(version))).published.path
    copied = export(ExportRequest(newer, tmp_path / "copied")).published.path
    ids = np.concatenate([*(ev.keys[:20] for ev in evs.values()), [0, -1]])
    for path in (newer, copied):
        with loaded_quickly(path) as server:
            found = server.predict(ids=ids)
        for name, ev in evs.items():
            rows = ev.as_dict()
            expected = np.array([rows.get(key, np.zeros(4, np.float32)) for key in ids.tolist()])
            assert found[name].tobytes() == expected.tobytes(), name


def test_an_update_writes_joined_indexes_together(tmp_path: Path) -> None:
    write_full(tmp_path / "train" / "model.ckpt-1", {n: Ev.random(20, seed=1) for n in NAMES}, step=1)
    request = ExportRequest(tmp_path / "train", tmp_path / "model", model=model, updates=Updates())
    functions = read_saved_model(export(request).published.path).meta_graphs[0].graph_def.library.function

    # A server prepares each node before the first update, and TensorFlow's optimizers take time in the square
    # of the tensors that one operation makes one of. So the joined index counts as three tables, and all
    # values as one, except where they are written at once.
    wanted = {"ResourceScatterUpdate": len(INDEX) + len(NAMES), "ResourceScatterNdUpdate": len(INDEX)}
    for op, count in wanted.items():
        counts = [sum(node.op == op for node in function.node_def) for function in functions]
        assert max(counts) == count, op
    sizes = [
        len(node.attr["Toutput_types"].list.type)
        for function in functions
        for node in function.node_def
        if node.op == "OptionalFromValue"
    ]
    assert max(sizes) == 3 * (len(INDEX) + 1)
