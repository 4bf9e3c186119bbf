"""What an archive's config may name: gadgets that run are refused, what real models hold is not.

Each gadget leaves a file behind when it runs; that it does is shown once, with `--allow code`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from exporter.errors import AccessRefused, BuilderError, CodeRefused
from exporter.graph.archived_code import refuse_code
from exporter.graph.archived_model import archive_builder
from exporter.graph.source_graph import Trust
from tests.support.archives import keras_archive, legacy_file
from tests.support.commands import export_model

CONSTANT = "_CONSTANT_VALUE"


def functional(*layers: dict[str, Any]) -> dict[str, Any]:
    """A legacy config of an input and these layers, the last of which is the output."""
    first = {
        "class_name": "InputLayer",
        "config": {"batch_input_shape": [None, 2], "dtype": "float32", "name": "x"},
        "name": "x",
        "inbound_nodes": [],
    }
    ends = {"input_layers": [["x", 0, 0]], "output_layers": [[layers[-1]["name"], 0, 0]]}
    return {"class_name": "Functional", "config": {"name": "m", "layers": [first, *layers], **ends}}


def applied(class_name: str, config: dict[str, Any], *first: Any, **keywords: Any) -> dict[str, Any]:
    """A config whose last layer is called with a constant, or with `x` if there is none."""
    node = [CONSTANT, -1, *first, keywords] if first else ["x", 0, 0, keywords]
    layer = {"class_name": class_name, "config": {"name": "g", "trainable": True, **config}, "name": "g"}
    return functional({**layer, "inbound_nodes": [node]})


def legacy(path: Path, config: dict[str, Any], version: str = "2.15.0") -> Path:
    weights = {"g": {"g/kernel:0": np.zeros((2, 2), np.float32)}}
    return legacy_file(path / "m.h5", weights, model_config=json.dumps(config), keras_version=version)


def build(path: Path, **options: Any) -> Any:
    make = archive_builder(path, **options)
    with tf.Graph().as_default():
        return make()


def call(symbol: str, *first: Any, **keywords: Any) -> dict[str, Any]:
    return applied("TFOpLambda", {"function": symbol}, *first, **keywords)


# --- Keras 2 -----------------------------------------------------------------------------------------------


def copies(mark: Path) -> dict[str, Any]:
    return call("io.gfile.copy", __file__, dst=str(mark))


def test_the_gadget_runs_where_it_is_trusted(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(BuilderError):  # what it returns is no tensor
        build(legacy(tmp_path, copies(mark)), allow_code=True)
    assert mark.exists()


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=["export", "dry run"])
def test_no_command_runs_it(tmp_path: Path, options: tuple[str, ...]) -> None:
    mark = tmp_path / "mark"
    path = legacy(tmp_path, copies(mark))
    ran = export_model("--ckpt-dir", path, "--out", tmp_path / "out", *options, "--json")
    assert ran.error["error"] == "CodeRefused", ran.err
    assert "--allow code" in ran.error["hint"]
    assert not mark.exists()
    assert not (tmp_path / "out").exists()


SYMBOLS = [
    "io.gfile.copy",
    "io.gfile.rmtree",
    "io.write_file",
    "io.read_file",
    "load_library",
    "load_op_library",
    "saved_model.load",
    "raw_ops.WriteFile",
    "raw_ops.PyFunc",
    "raw_ops.DatasetFromGraph",
    "compat.v1.gfile.Remove",
    "compat.v1.py_func",
    "compat.v1.load_file_system_library",
    "compat.v1.train.import_meta_graph",
    "py_function",
    "numpy_function",
    "print",
    "map_fn",
    "debugging.enable_check_numerics",
    "debugging.experimental.enable_dump_debug_info",
    "config.run_functions_eagerly",
    "data.experimental.save",
    "summary.create_file_writer",
    "train.load_checkpoint",
    "random.set_seed",
    "random.fixed_unigram_candidate_sampler",
    "keras.utils.get_file",
    "keras.models.load_model",
    "keras.layers.deserialize",
    "keras.backend.function",
    "keras.__internal__.enable_unsafe_deserialization",
    "xla.experimental.compile",
    "lookup.TextFileInitializer",
    "Variable",
    "no.such.symbol",
    "os.system",
    "",
    None,
    ["io.write_file"],
]


@pytest.mark.parametrize("layer", ["TFOpLambda", "SlicingOpLambda"])
@pytest.mark.parametrize("symbol", SYMBOLS, ids=str)
def test_functions_that_do_more_than_compute(layer: str, symbol: Any) -> None:
    with pytest.raises(CodeRefused, match="call"):
        refuse_code(Path("m.h5"), applied(layer, {"function": symbol}, "/nowhere"), {}, tf_keras)


@pytest.mark.parametrize(
    ("layer", "config"),
    [
        ("ClassMethod", {"cls_symbol": "io.TFRecordWriter", "method_name": "write"}),
        ("ClassMethod", {"cls_symbol": "RaggedTensor", "method_name": "__init__"}),
        ("ClassMethod", {"cls_symbol": "train.Checkpoint", "method_name": "from_config"}),
        ("InstanceProperty", {"attr_name": "graph"}),
        ("InstanceMethod", {"attr_name": "__getattribute__"}),
        ("InstanceMethod", {"attr_name": "eval"}),
        ("InstanceMethod", {}),
        ("TensorFlowOpLayer", {"node_def": {"name": "w", "op": "WriteFile"}}),
        ("TensorFlowOpLayer", {"node_def": {"name": "w", "op": "ReadFile"}}),
        ("TensorFlowOpLayer", {"node_def": {"name": "w", "op": "PyFunc"}}),
        ("TensorFlowOpLayer", {"node_def": {"op": "Identity", "attr": {"f": {"func": {"name": "f"}}}}}),
        ("TensorFlowOpLayer", {"node_def": "\n\x01w\x12\x09WriteFile"}),
        ("TensorFlowOpLayer", {"node_def": "no node"}),
        ("TensorFlowOpLayer", {"node_def": {"op": 3}}),
        ("TensorFlowOpLayer", {}),
    ],
)
def test_methods_and_operations_that_are_not_listed(layer: str, config: dict[str, Any]) -> None:
    with pytest.raises(CodeRefused, match="call"):
        refuse_code(Path("m.h5"), applied(layer, config), {}, tf_keras)


def test_an_operation_as_keras_2_wrote_it_before_it_named_functions(tmp_path: Path) -> None:
    node = {"name": "Neg", "op": "Neg", "input": ["x"], "attr": {"T": {"type": "DT_FLOAT"}}}
    model = build(legacy(tmp_path, applied("TensorFlowOpLayer", {"node_def": node, "constants": {}})))
    assert model.layers[-1].node_def.op == "Neg"


# --- classes and functions of both -------------------------------------------------------------------------


def own_format(path: Path, config: dict[str, Any], version: str) -> Path:
    return keras_archive(path / "m.keras", config=json.dumps(config), version=version)


def dense(**config: Any) -> dict[str, Any]:
    layer = {"module": "keras.layers", "class_name": "Dense", "config": {"name": "d", "units": 2, **config}}
    return {"module": "keras", "class_name": "Sequential", "config": {"name": "m", "layers": [layer]}}


def function(module: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"module": module, "class_name": "function", "config": name, "registered_name": name, **fields}


def named(module: str | None, name: str, **fields: Any) -> dict[str, Any]:
    return {"module": module, "class_name": name, "config": {}, "registered_name": None, **fields}


ENTRIES = [
    function("keras.utils", "get_file"),
    function("keras.saving", "load_model"),
    function("keras.models", "load_model"),
    function("keras.config", "enable_unsafe_deserialization"),
    function("keras.src.utils.file_utils", "get_file"),
    function("keras.datasets.mnist", "load_data"),
    function("keras.applications", "ResNet50"),
    function("keras.ops", "map"),
    function("keras.layers", "deserialize"),
    function("builtins", "eval"),
    function("builtins", "exec", registered_name="function"),
    function("os", "system"),
    function("keras_evil", "relu"),
    function("keras.src.utils.data_utils", "os.system"),
    function("keras.activations", "relu", registered_name="os.system"),
    {"module": "keras.activations", "class_name": "function", "config": {"class_name": "x"}},
    {"module": "keras.activations", "class_name": "function"},
    named("keras.callbacks", "CSVLogger", config={"filename": "x"}),
    named("keras.callbacks", "BackupAndRestore"),
    named("keras.export", "ExportArchive"),
    named("keras.utils", "FeatureSpace"),
    named("keras.utils", "PyDataset"),
    named("keras.saving", "KerasFileEditor", config={"filepath": "x"}),
    named("keras.src.saving.file_editor", "KerasFileEditor"),
    named("keras.preprocessing.image", "ImageDataGenerator"),
    named("keras.layers", "TFSMLayer", config={"filepath": "/nowhere"}),
    named("keras.src.export.tfsm_layer", "TFSMLayer"),
    named("keras.layers", "Lambda"),
    named("keras.layers", "TorchModuleWrapper"),
    named("keras.src.ops.core", "Map"),
    named("keras.src.ops.core", "WhileLoop"),
    named("keras.src.ops.linalg", "JVP"),
    named("keras.src.ops.function", "Function"),
    named("keras.distillation", "Distiller"),
    named("keras_hub.models", "Backbone"),
    named("keras", "Dense", registered_name="mine>Dense"),
    named("kerasx.layers", "Dense"),
    named("os", "Dense"),
    named(None, "keras_export"),
    named(None, "deserialize"),
    {"class_name": "TFOpLambda", "config": {"function": "io.write_file"}},
    {"class_name": ["Dense"], "config": {}},
    {"class_name": None, "config": {}},
    {"class_name": "__lambda__", "config": {"value": "4wAA"}},
    {"class_name": "__typespec__", "spec_name": "Popen", "module": "subprocess", "config": []},
    {"class_name": "__typespec__", "spec_name": "Dense", "module": "keras.layers", "config": []},
    {"class_name": "TypeSpec", "type_spec": "tf.data.DatasetSpec", "serialized": []},
]


@pytest.mark.parametrize("keras", [keras, tf_keras], ids=["Keras 3", "Keras 2"])
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_classes_and_functions_that_are_not_listed(entry: dict[str, Any], keras: Any) -> None:
    """Wherever they stand: as a layer, or as what a layer's config holds."""
    for config in (dense(activation=entry), dense(anything=[{"a": entry}]), dense(), entry):
        if config == dense():
            config["config"]["layers"].append(entry)
        with pytest.raises(CodeRefused):
            refuse_code(Path("m.keras"), config, {}, keras)


@pytest.mark.parametrize("version", ["2.15.0", "3.10.0"])
def test_a_function_is_refused_in_every_kind_of_file(tmp_path: Path, version: str) -> None:
    config = dense(activation=function("keras.utils", "get_file"))
    for path in (own_format(tmp_path, config, version), legacy(tmp_path, config, version)):
        with pytest.raises(CodeRefused, match="get_file"):
            archive_builder(path)


def test_what_the_user_names_does_not_excuse_what_keras_calls() -> None:
    known = {"Special": type("Special", (), {}), "Lambda": keras.layers.Lambda}
    for entry in (
        named("keras.layers", "Lambda"),
        named("keras.layers", "Lambda", registered_name="Lambda"),
        named("keras.layers", "Lambda", registered_name="Special"),
        named("antigravity", "Special", registered_name=None),
        {"class_name": "TFOpLambda", "registered_name": "Special", "config": {"function": "io.write_file"}},
    ):
        with pytest.raises(CodeRefused):
            refuse_code(Path("m.keras"), entry, known, tf_keras)
    refuse_code(Path("m.keras"), named("mine", "Special", registered_name="Special"), known, tf_keras)


def test_losses_and_metrics_of_a_training_are_left_out(tmp_path: Path) -> None:
    """Only training calls them, and they may be of the trainer's own code."""
    config = dense(activation="relu")
    config["compile_config"] = {"loss": function("my.losses", "hinge")}
    config["config"]["layers"][0]["build_config"] = {"input_shape": [None, 3]}
    assert build(own_format(tmp_path, config, "3.10.0")).layers[0].units == 2


@pytest.mark.parametrize("url", ["gs://bucket/words.txt", "http://127.0.0.1:9/words.txt"])
def test_a_vocabulary_elsewhere(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # below which a URL would seem to lie
    lookup = named("keras.layers", "StringLookup", config={"vocabulary": url})
    config = {"module": "keras", "class_name": "Sequential", "config": {"layers": [lookup]}}
    with pytest.raises(AccessRefused):
        archive_builder(own_format(tmp_path, config, "3.10.0"), trust=Trust(is_found=True))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("layer", ["StringLookup", "IntegerLookup", "TextVectorization"])
def test_a_vocabulary_that_never_ends_is_not_waited_for(tmp_path: Path, layer: str) -> None:
    """Whoever names an archive lets it read any file: not a pipe, nor a device."""
    os.mkfifo(tmp_path / "pipe")
    for file in (str(tmp_path / "pipe"), "/dev/zero"):
        lookup = named("keras.layers", layer, config={"vocabulary": file})
        config = {"module": "keras", "class_name": "Sequential", "config": {"layers": [lookup]}}
        path = own_format(tmp_path, config, "3.10.0")
        ran = export_model("--ckpt-dir", path, "--model", path, "--out", tmp_path / "out", "--json")
        assert (ran.error["error"], "not a regular file" in ran.err) == ("UnsafeArchive", True), ran.err


@pytest.mark.parametrize("key", ["vocabulary_file", "ckpt_to_load_from"])
def test_the_file_of_a_column(tmp_path: Path, key: str) -> None:
    column = {"class_name": "VocabularyFileCategoricalColumn", "config": {"key": "a", key: "/etc/hostname"}}
    layer = {"class_name": "DenseFeatures", "config": {"name": "f", "feature_columns": [column]}}
    config = {"class_name": "Sequential", "config": {"name": "m", "layers": [layer]}}
    with pytest.raises(AccessRefused):
        archive_builder(legacy(tmp_path, config), trust=Trust(is_found=True))
