"""A user's own scope is called as the incremental subgraph would be; what is told before a base is made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from exporter.options import ExportRequest, Updates
from exporter.pipeline.full import plan
from exporter.pipeline.incremental import export_incremental
from exporter.pipeline.rebase import rebase
from tests.support.commands import export_model
from tests.support.graph_runs import v1_graph
from tests.support.trained import answers_in_session

UPDATES = Updates()
LARGE = 16 << 20
LARGE_ROWS = LARGE // 4 // 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray]]:
    """Two checkpoints of one model in a scope `incremental`, and what each answers for ids 0 and 1."""
    import tensorflow as tf

    v1, directory, answers = tf.compat.v1, tmp_path_factory.mktemp("train"), []
    with v1_graph() as graph, v1.Session(graph=graph) as session:
        step = v1.train.get_or_create_global_step()
        ids = v1.placeholder(tf.int64, [None], name="ids")
        with v1.variable_scope("incremental"):
            table = v1.get_variable("table", [8, 4], initializer=v1.random_normal_initializer())
            whole = v1.get_variable("whole", [LARGE_ROWS, 4], initializer=v1.ones_initializer())
            taken = tf.constant([7.0, 7.0, 7.0], name="first_position")
            rows = tf.gather(table, ids) * tf.reduce_sum(taken)
        tf.add(rows, tf.reduce_mean(whole), name="y")
        update = [step.assign_add(10), table.assign_add(tf.ones_like(table))]
        saver = v1.train.Saver()
        session.run(v1.global_variables_initializer())
        for _ in range(2):
            session.run(update)
            saver.save(session, str(directory / "model.ckpt"), global_step=step)
            answers.append(session.run("y:0", {"ids:0": [0, 1]}))
    return directory, answers


def request(directory: Path, out: Path, updates: Updates | None = UPDATES) -> ExportRequest:
    meta = next(iter(sorted(directory.glob("*.meta"))))
    return ExportRequest(
        directory, out, str(meta), updates=updates, inputs={"ids": "ids"}, outputs={"y": "y"}
    )


def test_a_model_with_a_scope_called_incremental_is_rebased(
    trained: tuple[Path, list[np.ndarray]], tmp_path: Path
) -> None:
    directory, (before, after) = trained
    first = tmp_path / "first"
    first.mkdir()
    for file in directory.glob("model.ckpt-10.*"):
        (first / file.name).hardlink_to(file)
    (first / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-10"\n')
    out = tmp_path / "model"
    export_incremental(request(first, out))
    np.testing.assert_array_equal(answers_in_session(out / "10", {"ids": [0, 1]})["y"], before)
    export_incremental(request(directory, out))

    done = rebase(out)

    assert done is not None
    assert done.published.position == 20
    version = out / "20"
    np.testing.assert_array_equal(answers_in_session(version, {"ids": [0, 1]})["y"], after)
    assert answers_in_session(version, {"probe": [0]}, "incremental_status")["position"].tolist() == [20]


def test_what_deltas_hold_whole_is_told_before_the_base_is_made_and_after(
    trained: tuple[Path, list[np.ndarray]], tmp_path: Path
) -> None:
    directory, _ = trained
    out = tmp_path / "model"
    told = (
        f"'incremental/whole' is read whole by the graph: every delta that changes it holds all its {LARGE}"
    )
    assert any(told in note for note in plan(request(directory, out)).notes)
    plain = request(directory, out, updates=None)
    assert not any(told in note for note in plan(plain).notes), "a plain version takes no deltas"

    options = ["--ckpt-dir", directory, "--out", out, "--incr"]
    graph = ["--model", directory / "model.ckpt-20.meta", "--input", "ids=ids", "--output", "y=y"]
    for begun in (False, True):
        ran = export_model(*options, *graph, "--dry-run", "--json")
        assert any(told in note for note in ran.document["notes"]), begun
        assert told in export_model(*options, *graph, "--dry-run").err
        if not begun:
            assert export_model(*options, *graph, "--json").code == 0
