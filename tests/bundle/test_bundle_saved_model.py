"""The SavedModel that is written: restored, initialised and answered by TensorFlow's own loaders."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from exporter.bundle import saved_model_writer
from exporter.bundle.saved_model_writer import write_saved_model
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.errors import NotServable, TargetNotWritable
from exporter.graph.inference_graph import InferenceGraph, PartitionStrategy
from exporter.mapping.build import VariableMapping, build_mapping
from exporter.mapping.mapping_rules import MappingRules
from exporter.wire import protos
from tests.support.trained import (
    answers_eagerly,
    answers_in_session,
    assert_same,
    catalog_values,
    embedding,
    export,
    inference_graph,
    train,
    uneven_ids,
)

tf1 = tf.compat.v1

FEEDS = {"ids": uneven_ids(11)}
DIV = MappingRules(trained={"table": PartitionStrategy.DIV})


def read_meta_graph(directory: Path) -> protos.Proto:
    return protos.SavedModel.FromString((directory / "saved_model.pb").read_bytes()).meta_graphs[0]


@pytest.mark.landing
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("trained_parts", "served_parts"), [(0, 0), (3, 3), (3, 0), (3, 2), (0, 3)])
def test_served_answers_are_the_trained_ones_bit_for_bit(
    tmp_path: Path, trained_parts: int, served_parts: int, sharded: bool
) -> None:
    trained = train(embedding(11, trained_parts), FEEDS, tmp_path / "train/model.ckpt", sharded=sharded)
    graph = inference_graph(embedding(11, served_parts), lookups=DIV.trained)
    report = export(graph, trained.prefix, tmp_path / "1", rules=DIV)
    assert (len(report.shards) > 1) is sharded
    assert_same(answers_in_session(tmp_path / "1", FEEDS), trained.answers)
    assert_same(answers_eagerly(tmp_path / "1", FEEDS), trained.answers)


@pytest.mark.parametrize("trained_axis, served_axis", [(1, 1), (1, 0), (0, 1)])
def test_parts_along_another_axis_are_joined_and_cut(
    tmp_path: Path, trained_axis: int, served_axis: int
) -> None:
    trained = train(embedding(11, 2, axis=trained_axis), FEEDS, tmp_path / "model.ckpt")
    graph = inference_graph(embedding(11, 2, axis=served_axis), lookups=DIV.trained)
    export(graph, trained.prefix, tmp_path / "1", rules=DIV)
    assert_same(answers_in_session(tmp_path / "1", FEEDS), trained.answers)


def test_variables_are_owned_by_tf2_and_can_be_saved_again(tmp_path: Path) -> None:
    trained = train(embedding(11, 3), FEEDS, tmp_path / "model.ckpt")
    export(inference_graph(embedding(11, 3)), trained.prefix, tmp_path / "1")
    loaded = tf.saved_model.load(str(tmp_path / "1"))
    names = [variable.name for variable in loaded.variables]
    assert names == ["table/part_0:0", "table/part_1:0", "table/part_2:0", "dense/kernel:0", "scale:0"]
    tf.saved_model.save(loaded, str(tmp_path / "again"), signatures=loaded.signatures)
    assert_same(answers_eagerly(tmp_path / "again", FEEDS), trained.answers)


def test_saver_of_the_bundle_saves_what_the_stock_saver_would(tmp_path: Path) -> None:
    trained = train(embedding(11, 3), FEEDS, tmp_path / "model.ckpt")
    report = export(inference_graph(embedding(11, 3)), trained.prefix, tmp_path / "1")
    with tf.Graph().as_default() as graph, tf1.Session(graph=graph) as session:
        meta = tf1.saved_model.load(session, ["serve"], str(tmp_path / "1"))
        tf1.train.Saver(saver_def=meta.saver_def).save(session, str(tmp_path / "again"), write_state=False)
    again = read_catalog(tmp_path / "again")
    assert_same(catalog_values(again), catalog_values(report.catalog))
    assert [len(ref.slices) for ref in again.tensors.values()] == [0, 0, 3]


def test_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    trained = train(embedding(11, 2), FEEDS, tmp_path / "model.ckpt")
    for name in ("1", "2"):
        export(inference_graph(embedding(11, 2)), trained.prefix, tmp_path / name)
    first, second = ((tmp_path / name / "saved_model.pb").read_bytes() for name in ("1", "2"))
    assert first == second


def test_the_input_graph_is_left_alone(tmp_path: Path) -> None:
    trained = train(embedding(11, 2), FEEDS, tmp_path / "model.ckpt")
    graph = inference_graph(embedding(11, 2))
    before = graph.meta_graph.SerializeToString(deterministic=True)
    export(graph, trained.prefix, tmp_path / "1")
    assert graph.meta_graph.SerializeToString(deterministic=True) == before


def test_head_says_what_loaders_look_for(tmp_path: Path) -> None:
    trained = train(embedding(11, 0), FEEDS, tmp_path / "model.ckpt")
    export(inference_graph(embedding(11, 0)), trained.prefix, tmp_path / "1")
    document = protos.SavedModel.FromString((tmp_path / "1/saved_model.pb").read_bytes())
    assert document.saved_model_schema_version == 1
    info = document.meta_graphs[0].meta_info_def
    assert list(info.tags) == ["serve"]
    assert info.tensorflow_version == tf.__version__
    assert tf.saved_model.contains_saved_model(str(tmp_path / "1"))


def test_restore_nodes_do_not_collide_with_the_graphs(tmp_path: Path) -> None:
    def build() -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        x = tf1.placeholder(tf.float32, [None], name="save/Const")
        scale = tf1.get_variable("save_1/scale", [], use_resource=True)
        return {"x": x}, {"y": tf.multiply(x, scale, name="SAVE_2/y")}

    feeds = {"x": np.float32([1, 2])}
    trained = train(build, feeds, tmp_path / "model.ckpt")
    export(inference_graph(build), trained.prefix, tmp_path / "1")
    assert read_meta_graph(tmp_path / "1").saver_def.filename_tensor_name == "save_3/Const:0"
    assert_same(answers_in_session(tmp_path / "1", feeds), trained.answers)


def test_model_without_variables_has_no_saver_and_loads(tmp_path: Path) -> None:
    def build() -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        x = tf1.placeholder(tf.float32, [None], name="x")
        return {"x": x}, {"y": x * 2}

    feeds = {"x": np.float32([1, 2])}
    trained = train(build, feeds, tmp_path / "model.ckpt")
    report = export(inference_graph(build), trained.prefix, tmp_path / "1")
    assert report.shards == () and not (tmp_path / "1/variables").exists()
    assert not read_meta_graph(tmp_path / "1").HasField("saver_def")
    assert_same(answers_in_session(tmp_path / "1", feeds), trained.answers)
    assert_same(answers_eagerly(tmp_path / "1", feeds), trained.answers)


class TestAssets:
    """Tables initialised from files that travel with the model."""

    @staticmethod
    def build(*paths: Path) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        words = tf1.placeholder(tf.string, [None], name="words")
        outputs = {}
        for number, path in enumerate(paths):
            initializer = tf.lookup.TextFileInitializer(
                tf.constant(str(path), name=f"vocabulary_{number}"),
                tf.string,
                tf.lookup.TextFileIndex.WHOLE_LINE,
                tf.int64,
                tf.lookup.TextFileIndex.LINE_NUMBER,
            )
            table = tf.lookup.StaticHashTable(initializer, -1, name=f"table_{number}")
            ids = table.lookup(words)
            weights = tf1.get_variable(f"weights_{number}", [4], use_resource=True)
            outputs[f"ids_{number}"] = ids
            outputs[f"score_{number}"] = tf.gather(weights, tf.maximum(ids, 0))
        return {"words": words}, outputs

    def export(self, tmp_path: Path, *paths: Path) -> tuple[dict[str, np.ndarray], dict[str, list[bytes]]]:
        feeds = {"words": np.array([b"b", b"z", b"a"], object)}
        trained = train(lambda: self.build(*paths), feeds, tmp_path / "model.ckpt")
        assets = {f"vocabulary_{number}": path for number, path in enumerate(paths)}
        graph = inference_graph(lambda: self.build(*paths), assets=assets, with_tables=True)
        export(graph, trained.prefix, tmp_path / "1")
        return trained.answers, feeds

    def test_tables_initialise_after_the_trainers_files_are_gone(self, tmp_path: Path) -> None:
        path = tmp_path / "words.txt"
        path.write_text("a\nb\nc\n")
        expected, feeds = self.export(tmp_path, path)
        path.unlink()
        (tmp_path / "1").rename(tmp_path / "moved")
        np.testing.assert_array_equal(expected["ids_0"], [1, -1, 0])
        assert_same(answers_in_session(tmp_path / "moved", feeds), expected)
        assert_same(answers_eagerly(tmp_path / "moved", feeds), expected)

    def test_files_of_one_name_are_told_apart_and_shared_ones_stored_once(self, tmp_path: Path) -> None:
        first, second = tmp_path / "x/words.v1.txt", tmp_path / "y/words.v1.txt"
        for path, text in ((first, "a\nb\n"), (second, "z\nb\n")):
            path.parent.mkdir()
            path.write_text(text)
        expected, feeds = self.export(tmp_path, first, second, first)
        assert sorted(path.name for path in (tmp_path / "1/assets").iterdir()) == [
            "words.v1.txt",
            "words_1.v1.txt",
        ]
        assert not np.array_equal(expected["ids_0"], expected["ids_1"])
        assert_same(answers_in_session(tmp_path / "1", feeds), expected)
        assert_same(answers_eagerly(tmp_path / "1", feeds), expected)

    def test_the_trainers_path_is_not_published(self, tmp_path: Path) -> None:
        path = tmp_path / "words.txt"
        path.write_text("a\n")
        self.export(tmp_path, path)
        assert os.fsencode(tmp_path) not in (tmp_path / "1/saved_model.pb").read_bytes()

    def test_an_edit_of_the_source_does_not_reach_the_model(self, tmp_path: Path) -> None:
        path = tmp_path / "words.txt"
        path.write_text("a\n")
        self.export(tmp_path, path)
        with path.open("a") as file:
            file.write("b\n")
        assert (tmp_path / "1/assets/words.txt").read_text() == "a\n"

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "words.txt"
        path.write_text("a\n")
        graph = inference_graph(
            lambda: self.build(path), assets={"vocabulary_0": tmp_path / "gone.txt"}, with_tables=True
        )
        with pytest.raises(NotServable, match=r"gone\.txt of node 'vocabulary_0' is not a file"):
            write_saved_model(graph, empty_mapping(), tmp_path / "1")


def empty_mapping() -> VariableMapping:
    from tests.support.values import catalog

    return VariableMapping(catalog(), (), ())


def test_a_target_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    graph = InferenceGraph("test", protos.MetaGraphDef(), ())
    with pytest.raises(TargetNotWritable, match="file/1"):
        write_saved_model(graph, empty_mapping(), tmp_path / "file" / "1")


def test_a_graph_above_protobufs_limit_names_its_largest_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is lowered: a real graph of 2 GiB would take the machine's memory several times over."""
    monkeypatch.setattr(saved_model_writer, "MAX_MESSAGE_BYTES", 10_000)
    meta = protos.MetaGraphDef()
    node = meta.graph_def.node.add(name="table/init", op="Const")
    node.attr["value"].tensor.tensor_content = bytes(20_000)
    with pytest.raises(NotServable, match="at most 2 GiB") as caught:
        write_saved_model(InferenceGraph("test", meta, ()), empty_mapping(), tmp_path / "1")
    assert "table/init (Const, 19.6 KiB)" in caught.value.cause
    assert not (tmp_path / "1").exists()


def test_ten_thousand_variables_stay_one_restore(tmp_path: Path) -> None:
    from exporter.graph.inference_graph import GraphVariable
    from exporter.wire.dtypes import DType
    from tests.support.values import catalog, tensor

    meta, variables, tensors = protos.MetaGraphDef(), [], []
    for number in range(10_000):
        name = f"layer_{number}/kernel"
        meta.graph_def.node.add(name=name, op="VarHandleOp").attr["dtype"].type = int(DType.FLOAT)
        variables.append(GraphVariable(name, name, DType.FLOAT, (4, 4)))
        tensors.append(tensor(name, 4, 4))
    graph = InferenceGraph("test", meta, tuple(variables))
    write_saved_model(graph, build_mapping(graph, catalog(*tensors), MappingRules()), tmp_path)
    nodes = read_meta_graph(tmp_path).graph_def.node
    (restore,) = (node for node in nodes if node.op == "RestoreV2")
    assert len(restore.attr["dtypes"].list.type) == 10_000
