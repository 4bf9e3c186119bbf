"""Operations that stock TensorFlow lacks are refused by name, or go along with all that they need.

The models are those that TFRA, TF-DF and TF-Text saved. What is published here answers in an environment with
its library as the library's own SavedModel does; `tests/fixtures/foreign_ops/serve.py` asks it there.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.cli import transfer_commands
from exporter.errors import ExportError, ForeignOperations, MissingTensors, NotServable, UsageError
from exporter.graph.graph_files import read_saved_model
from exporter.graph.servable import library_of
from exporter.options import ExportRequest, Updates, Verify
from exporter.pipeline.full import export
from exporter.wire import protos
from tests.support.commands import export_model
from tests.support.foreign_libraries import unpack

v1 = tf.compat.v1
LIBRARIES = {
    "tfra": ("TFRA>CuckooHashTableOfTensors", "TensorFlow Recommenders Addons"),
    "tfdf": ("SimpleMLCreateModelResource", "TensorFlow Decision Forests"),
    "text": ("FastWordpieceTokenizeWithOffsets", "TensorFlow Text"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("foreign")
    return {name: unpack(name, directory) for name in LIBRARIES}


TREES = {"trees-stamp": np.int64(3), "trees-serialized": b"trees"}


def request(checkpoint: Path, out: Path, **others: Any) -> ExportRequest:
    return ExportRequest(checkpoint, out / "model", **{"allow": "foreign-ops", **others})


def served(version: Path) -> Any:
    (meta_graph,) = read_saved_model(version).meta_graphs
    return meta_graph


def nodes(meta_graph: Any) -> dict[str, Any]:
    return {node.name: node for node in meta_graph.graph_def.node}


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("is_named", [False, True], ids=["found", "named"])
def test_foreign_operations_are_refused_by_name(
    name: str, is_named: bool, saved: dict[str, Path], tmp_path: Path
) -> None:
    op, library = LIBRARIES[name]
    model = str(saved[name]) if is_named else None
    with pytest.raises(ForeignOperations, match=op) as caught:
        export(request(saved[name], tmp_path, model=model, allow=()))
    assert library in caught.value.message
    assert "--allow foreign-ops" in (caught.value.hint or "")
    assert not (tmp_path / "model").exists()


def test_a_librarys_table_goes_along_with_its_contents(saved: dict[str, Path], tmp_path: Path) -> None:
    done = export(request(saved["tfra"], tmp_path, verify=Verify.BYTES))

    meta_graph = served(done.published.path)
    found = nodes(meta_graph)
    (imported,) = (node for node in found.values() if node.op == "TFRA>CuckooHashTableImport")
    assert imported.input[0] == "user-parameter_mht_1of1"
    restore = found[meta_graph.saver_def.restore_op_name]
    assert f"^{imported.name}" in restore.input
    read = found[imported.input[1].partition(":")[0]]
    names = [text.decode() for text in found[read.input[1]].attr["value"].tensor.string_val]
    assert len(names) == 2 and {*names} <= {source.key for source in done.plan.mapping.sources}
    stored = tf.train.load_checkpoint(str(done.published.path / "variables/variables"))
    keys, values = (stored.get_tensor(name) for name in names)
    np.testing.assert_array_equal(np.sort(keys), np.arange(32) * 7)
    assert values.shape == (32, 4)
    prefix = found[read.input[0]]
    assert [*prefix.input] == [meta_graph.saver_def.filename_tensor_name.partition(":")[0]]
    assert any("TFRA>CuckooHashTableFind" in note for note in done.plan.notes)


def test_a_librarys_files_and_init_operation_go_along(saved: dict[str, Path], tmp_path: Path) -> None:
    version = export(request(saved["tfdf"], tmp_path)).published.path

    own, ours = saved["tfdf"] / "assets", version / "assets"
    assert {file.name: file.read_bytes() for file in ours.iterdir()} == {
        file.name: file.read_bytes() for file in own.iterdir()
    }, "the library finds the others by the name of the one that it is given"
    meta_graph = served(version)
    found, functions = nodes(meta_graph), meta_graph.graph_def.library.function
    init = found[meta_graph.collection_def["saved_model_main_op"].node_list.value[0]]
    called = {found[text[1:]].attr["f"].func.name for text in init.input}
    ops = {n.op for f in functions if f.signature.name in called for n in f.node_def}
    assert {"SimpleMLLoadModelFromPathWithHandle", "LookupTableImportV2"} <= ops


def test_no_server_without_the_operations_is_proposed(saved: dict[str, Path], tmp_path: Path) -> None:
    ran = export_model("--ckpt-dir", saved["text"], "--out", tmp_path / "model", "--allow", "foreign-ops")
    assert ran.code == 0, ran.err
    (following,) = re.findall("(?m)^next +export-model (.*)", ran.out)
    assert export_model(*shlex.split(following)).code == 0
    pulled = transfer_commands._next(tmp_path / "model")
    assert pulled.startswith("export-model inspect ")
    assert export_model(*shlex.split(pulled)[1:]).code == 0


def test_a_librarys_kernel_without_state(saved: dict[str, Path], tmp_path: Path) -> None:
    version = export(request(saved["text"], tmp_path)).published.path
    used = {node.op for node in protos.all_nodes(served(version).graph_def)}
    assert "FastWordpieceTokenizeWithOffsets" in used


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"updates": Updates()}, NotServable, "takes no deltas"),
        ({"verify": Verify.OUTPUTS}, UsageError, "--verify outputs runs the model here"),
    ],
)
def test_what_would_have_to_run_here_is_refused(
    change: dict[str, Any], error: type[ExportError], message: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        export(request(saved["tfra"], tmp_path, **change))


def test_a_checkpoint_without_the_tables_contents_is_refused(saved: dict[str, Path], tmp_path: Path) -> None:
    """The trainer's newer checkpoint may lack the table: nothing is served empty."""
    model = tf.train.Checkpoint(v=tf.Variable(1.0))
    model.write(str(tmp_path / "ckpt"))
    with pytest.raises(MissingTensors):
        export(request(tmp_path / "ckpt", tmp_path, model=str(saved["tfra"])))
    assert not (tmp_path / "model").exists()


def trees(tmp_path: Path, *, is_saved: bool) -> ExportRequest:
    """A checkpoint, and the `.meta` of a graph with boosted trees, whose kernels newer releases lack."""
    from tensorflow.python.training.saving import saveable_object

    with tf.Graph().as_default(), v1.Session() as session:
        for name, value in TREES.items():
            v1.get_variable(name, initializer=value)
        v1.get_variable("unused", [2])
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, str(tmp_path / "ckpt"), write_meta_graph=False)

    class Trees(saveable_object.SaveableObject):  # type: ignore[misc]
        def __init__(self, handle: Any) -> None:
            specs = [saveable_object.SaveSpec(tf.constant(value), "", name) for name, value in TREES.items()]
            super().__init__(handle, specs, "trees")

        def restore(self, tensors: Any, shapes: Any) -> Any:
            return tf.raw_ops.BoostedTreesDeserializeEnsemble(
                tree_ensemble_handle=self.op, stamp_token=tensors[0], tree_ensemble_serialized=tensors[1]
            )

    with tf.Graph().as_default():
        x = v1.placeholder(tf.int32, [None], name="x")
        handle = tf.raw_ops.BoostedTreesEnsembleResourceHandleOp(name="trees")
        logits = tf.raw_ops.BoostedTreesPredict(
            tree_ensemble_handle=handle, bucketized_features=[x], logits_dimension=1
        )
        tf.identity(logits, name="y")
        saver = v1.train.Saver([v1.get_variable("unused", [2]), *([Trees(handle)] if is_saved else [])])
        saver.export_meta_graph(str(tmp_path / "ckpt.meta"))
    return ExportRequest(tmp_path / "ckpt", tmp_path / "model", inputs={"x": "x"}, outputs={"y": "y"})


def test_state_that_a_saver_restores_by_an_operation_of_its_own(tmp_path: Path) -> None:
    version = export(trees(tmp_path, is_saved=True)).published.path

    meta_graph = served(version)
    found = nodes(meta_graph)
    (imported,) = (node for node in found.values() if node.op == "BoostedTreesDeserializeEnsemble")
    assert f"^{imported.name}" in found[meta_graph.saver_def.restore_op_name].input
    read = found[imported.input[1].partition(":")[0]]
    names = [text.decode() for text in found[read.input[1]].attr["value"].tensor.string_val]
    assert names == [*TREES], "no variable that nobody needs"
    stored = tf.train.load_checkpoint(str(version / "variables/variables"))
    assert [stored.get_tensor(name) for name in names] == [*TREES.values()]
    with tf.Graph().as_default():
        tf.import_graph_def(v1.GraphDef.FromString(meta_graph.graph_def.SerializeToString()), name="")


def test_state_that_no_saver_restores_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotServable, match="fills BoostedTreesEnsembleResourceHandleOp"):
        export(trees(tmp_path, is_saved=False))


def test_the_option_and_the_note_on_the_command_line(saved: dict[str, Path], tmp_path: Path) -> None:
    refused = export_model("--ckpt-dir", saved["text"], "--out", tmp_path / "model")
    assert refused.code == 1 and "TensorFlow Text" in refused.err
    told = export_model(
        "--ckpt-dir", saved["text"], "--out", tmp_path / "model", "--allow", "foreign-ops", "--dry-run"
    )
    assert told.code == 0 and "the server must know operations" in told.out + told.err


@pytest.mark.parametrize(
    ("op", "library"),
    [
        ("TFRA>CuckooHashTableFind", "TensorFlow Recommenders Addons"),
        ("KvResourceGather", "DeepRec"),
        ("Acme>Embed", "the namespace 'Acme'"),
        ("Mine", ""),
    ],
)
def test_operations_are_known_by_their_names(op: str, library: str) -> None:
    assert library_of(op) == library
