"""Tables that training fills: restored into the served graph, from what the trainer's Saver stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import MissingTensors, ShapeMismatch
from exporter.options import DataMode, ExportFormat, ExportRequest, Updates, Verify
from exporter.pipeline.full import export, plan
from exporter.pipeline.incremental import export_incremental
from tests.support.graph_runs import Trained, train
from tests.support.lookup_tables import ENDS, ENTRIES, KINDS, dense, entries
from tests.support.trained import answers_eagerly, answers_in_session
from tests.support.updatable import loaded_quickly


def looked_up(kind: str, *, name: str = "seen", scope: str = "", insert: bool = True) -> Callable[[Any], Any]:
    """x: keys -> y: what the table has for them; a tenth of the entries is removed again."""
    make, key, value, width = KINDS[kind]

    def build(v1: Any) -> Any:
        import tensorflow as tf

        x = v1.placeholder(tf.as_dtype(key), [None], name="x")
        v1.get_variable("w", [], initializer=v1.ones_initializer())
        with v1.name_scope(scope) if scope else v1.name_scope(None):
            table = make(name)
        tf.identity(table.lookup(x), name="y")
        keys, values = entries(key, value, width)
        filled = table.insert(tf.constant(keys), tf.constant(values))
        removed = table.remove(tf.constant(keys[: ENTRIES // 10]))

        def steps(session: Any) -> None:
            for operation in (filled, removed) if insert else ():
                session.run(operation)

        return steps

    return build


def asked(kind: str) -> Any:
    _, key, value, width = KINDS[kind]
    keys, _ = entries(key, value, width)
    unknown = [10**9] if key == "int64" else np.array([b"unknown"], object)
    return np.concatenate([keys, unknown])


def assert_serves(version: Path, trained: Trained, kind: str) -> None:
    x = asked(kind)
    expected = trained.run("y:0", {"x:0": x})
    assert len({str(row) for row in expected}) > ENTRIES / 2, "removed and unknown keys have the default"
    np.testing.assert_array_equal(answers_in_session(version, {"x": x})["y"], expected)
    np.testing.assert_array_equal(answers_eagerly(version, {"x": x})["y"], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_served_with_what_training_put_in(kind: str, tmp_path: Path) -> None:
    trained = train(tmp_path, looked_up(kind))

    done = export(ExportRequest(tmp_path, tmp_path / "model", verify=Verify.BYTES, **ENDS))

    assert_serves(done.published.path, trained, kind)
    assert {source.key for source in done.plan.mapping.sources} == {"seen-keys", "seen-values"}


def test_the_next_version_has_the_entries_of_its_own_checkpoint(tmp_path: Path) -> None:
    import tensorflow as tf

    trained = train(tmp_path, looked_up("dense-int64-int64"))
    out = tmp_path / "model"
    first = export(ExportRequest(tmp_path, out, **ENDS)).published.path
    before = answers_in_session(first, {"x": [5000, 6000]})["y"]
    with trained.graph.as_default():
        keys = np.arange(5000, 7000)
        table = trained.graph.get_tensor_by_name("seen:0")
        trained.session.run(tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=keys, values=keys + 7))
        saver = trained.graph.get_operation_by_name("save/restore_all")
        assert saver is not None
        trained.session.run("save/Identity:0", {"save/Const:0": str(tmp_path / "model.ckpt-2")})

    newer = ExportRequest(tmp_path / "model.ckpt-2", out, f"{trained.prefix}.meta", **ENDS)
    second = export(newer).published.path

    assert answers_in_session(second, {"x": [5000, 6000]})["y"].tolist() == [5007, 6007]
    np.testing.assert_array_equal(answers_in_session(first, {"x": [5000, 6000]})["y"], before)
    lent = ExportRequest(tmp_path / "model.ckpt-2", tmp_path / "lent", str(first))
    third = export(lent).published.path
    assert answers_in_session(third, {"x": [5000, 6000]})["y"].tolist() == [5007, 6007]


@pytest.mark.parametrize("kind", ["mutable-string-int64", "dense-string-vectors"])
def test_the_programs_name_counts_and_not_the_nodes(kind: str, tmp_path: Path) -> None:
    """A builder's graph has no Saver: its tables tell what they are stored as."""
    trained = train(tmp_path, looked_up(kind, scope="tower"))
    assert trained.value("seen-keys").shape, "not tower/seen-keys"

    def builder() -> Any:
        import tensorflow as tf

        looked_up(kind, scope="tower")(tf.compat.v1)
        graph = tf.compat.v1.get_default_graph()
        return {"x": graph.get_tensor_by_name("x:0")}, {"y": graph.get_tensor_by_name("y:0")}

    for model in (None, builder):
        ends = {} if model else ENDS
        done = export(
            ExportRequest(
                tmp_path,
                tmp_path / "model",
                model,
                verify=Verify.OUTPUTS,
                data=DataMode.COMPACT,
                again=True,
                **ends,
            )
        )
        assert [table.node for table in done.plan.mapping.tables] == ["tower/seen"]
        assert_serves(done.published.path, trained, kind)


def test_two_nodes_of_one_table_are_one(tmp_path: Path) -> None:
    def build(v1: Any) -> Any:
        import tensorflow as tf

        x = v1.placeholder(tf.int64, [None], name="x")
        v1.get_variable("w", [], initializer=v1.ones_initializer())
        minus = tf.constant([-1, -2], tf.int64)
        first = dense("int64", "int64")("a")
        second = tf.raw_ops.MutableDenseHashTableV2(
            empty_key=minus[0], deleted_key=minus[1], value_dtype=tf.int64, shared_name="a", name="b"
        )
        found = tf.raw_ops.LookupTableFindV2(table_handle=second, keys=x, default_value=minus[0])
        tf.add(found, first.lookup(x), name="y")
        filled = first.insert(tf.constant([1, 2], tf.int64), tf.constant([10, 20], tf.int64))
        return lambda session: session.run(filled)

    train(tmp_path, build)
    done = export(ExportRequest(tmp_path, tmp_path / "model", **ENDS))
    assert len(done.plan.mapping.tables) == 1
    assert answers_in_session(done.published.path, {"x": [1, 2, 3]})["y"].tolist() == [20, 40, -2]


def test_a_table_that_the_saver_left_out_is_refused_and_not_served_empty(tmp_path: Path) -> None:
    import tensorflow as tf

    def saver() -> Any:
        return tf.compat.v1.train.Saver(tf.compat.v1.global_variables())

    train(tmp_path, looked_up("mutable-string-int64", scope="tower"), saver=saver)
    with pytest.raises(MissingTensors, match=r"'tower/seen'.*empty when served.*'tower/seen-keys'"):
        plan(ExportRequest(tmp_path, tmp_path / "model", **ENDS))


def test_a_table_under_another_name_is_renamed(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    trained = train(tmp_path / "old", looked_up("dense-int64-int64", name="before"))
    (tmp_path / "new").mkdir()
    graph = train(tmp_path / "new", looked_up("dense-int64-int64", insert=False))
    request = ExportRequest(
        tmp_path / "old", tmp_path / "model", graph.meta, renames=(r"seen(-keys|-values)=before\1",), **ENDS
    )
    assert_serves(export(request).published.path, trained, "dense-int64-int64")


def test_contents_of_another_table_are_refused(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    train(tmp_path / "old", looked_up("mutable-int64-vectors"))
    (tmp_path / "new").mkdir()
    for kind, said in (
        ("mutable-string-int64", r"has string in the graph.*is int64"),
        ("dense-int64-int64", r"has int64 in the graph.*is float32"),
    ):
        graph = train(tmp_path / "new", looked_up(kind, insert=False))
        with pytest.raises(ShapeMismatch, match=said):
            plan(ExportRequest(tmp_path / "old", tmp_path / "model", graph.meta, **ENDS))


def test_the_pair_of_graph_and_bundle_restores_and_saves_tables(tmp_path: Path) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    trained = train(tmp_path, looked_up("dense-int64-int64"))
    request = ExportRequest(tmp_path, tmp_path / "model", format=ExportFormat.METAGRAPH, **ENDS)
    pair = export(request).published.path / "export"
    x = asked("dense-int64-int64")
    expected = trained.run("y:0", {"x:0": x})
    for prefix in (str(pair), str(tmp_path / "again")):
        with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
            saver = v1.train.import_meta_graph(f"{pair}.meta")
            saver.restore(session, prefix)
            np.testing.assert_array_equal(session.run("y:0", {"x:0": x}), expected)
            saver.save(session, str(tmp_path / "again"), write_meta_graph=False)


@pytest.mark.landing
def test_a_model_of_nothing_but_a_renamed_table_takes_deltas(tmp_path: Path) -> None:
    import tensorflow as tf

    kind, out = "dense-int64-int64", tmp_path / "model"
    (tmp_path / "old").mkdir()
    trained = train(tmp_path / "old", looked_up(kind, name="before"))
    (tmp_path / "new").mkdir()
    graph = train(tmp_path / "new", looked_up(kind, insert=False))
    rules = {"renames": (r"seen(-keys|-values)=before\1",), "updates": Updates(digest=True)}
    base = export(ExportRequest(trained.prefix, out, graph.meta, **rules, **ENDS)).published.path
    assert_serves(base, trained, kind)
    with trained.graph.as_default():
        keys = np.arange(5000, 7000)
        table = trained.graph.get_tensor_by_name("before:0")
        trained.session.run(tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=keys, values=keys + 7))
        trained.session.run("save/Identity:0", {"save/Const:0": str(tmp_path / "old" / "model.ckpt-2")})

    request = ExportRequest(tmp_path / "old" / "model.ckpt-2", out, graph.meta, **rules, **ENDS)
    done = export_incremental(request)

    assert done.published is not None
    with loaded_quickly(base) as server:
        assert server.update()["deltas"] == 1
        assert server.predict(x=[5000, 6999, 7000])["y"].tolist() == [5007, 7006, -1]
        with pytest.raises(tf.errors.InvalidArgumentError, match="chunks"):
            server.call("incremental_digest", rows=[0])
    eager = tf.saved_model.load(str(base)).signatures
    eager["incremental_update"](up_to=tf.constant([-1], tf.int64))
    found = eager["serving_default"](x=tf.constant([5000, 6999, 7000], tf.int64))
    assert found["y"].numpy().tolist() == [5007, 7006, -1]
