"""InferenceGraph + Mapping -> `saved_model.pb` and `assets/`, without TensorFlow.

The result is a SavedModel as the stock TF1 builder writes it: one MetaGraphDef under the tag `serve`,
restored by its `SaverDef`, initialised by the op in the collection `saved_model_main_op`; if asked for, the
graph of training beside it under a tag of its own, restored from the same `variables/`. TF Serving,
`tf.compat.v1.saved_model.load` and `tf.saved_model.load` read it.
Source of names: tensorflow/cc/saved_model/constants.h, loader_util.cc and core/protobuf/saved_model.proto.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from google.protobuf.message import EncodeError

from exporter.bundle.assets import ASSETS_COLLECTION, place_assets
from exporter.bundle.restore_graph import add_restore, served_variables
from exporter.errors import NotServable, os_error
from exporter.graph.cast_variables import cast_variables
from exporter.graph.inference_graph import Asset, InferenceGraph
from exporter.graph.metagraph import MAX_GRAPH_BYTES, readable_version
from exporter.graph.saved_model import SERVE_TAG
from exporter.graph.training_graph import TrainingGraph
from exporter.layout import SAVED_MODEL_FILE
from exporter.mapping.build import VariableMapping
from exporter.progress import human_bytes
from exporter.wire.protos import Proto, all_nodes, message_class

_SCHEMA_VERSION = 1
_MAIN_OP_COLLECTION = "saved_model_main_op"
_LARGEST_NAMED = 3


def write_saved_model(
    graph: InferenceGraph, mapping: VariableMapping, directory: Path, training: TrainingGraph | None = None
) -> None:
    """Write `saved_model.pb` and the assets of `graph` into `directory` (made if it is not there).

    `training` is published beside it as it is, but for the machines that it was placed on. The same graph and
    mapping give the same bytes.

    Raises:
        MappingError: a variable that is to be cast is used in a way that forbids it.
        NotServable: an asset cannot be read, or the graph's constants exceed protobuf's limit of 2 GiB.
        PublishError: the directory cannot be written.
    """
    saved_model = message_class("SavedModel")(saved_model_schema_version=_SCHEMA_VERSION)
    meta_graph = saved_model.meta_graphs.add()
    meta_graph.CopyFrom(restorable_graph(graph, mapping))
    if graph.init_op:
        meta_graph.collection_def[_MAIN_OP_COLLECTION].node_list.value.append(graph.init_op)
    placed: dict[Path, str] = {}
    if graph.assets:
        place_assets(graph.assets, meta_graph, directory, placed)
    _describe(meta_graph.meta_info_def, SERVE_TAG)
    if training is not None:
        _add_training(saved_model.meta_graphs.add(), training, directory, placed)
    data = _serialise(saved_model)
    target = directory / SAVED_MODEL_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    except OSError as exc:
        raise os_error(exc, target) from exc


def restorable_graph(graph: InferenceGraph, mapping: VariableMapping) -> Proto:
    """The MetaGraphDef of a graph with the nodes that restore its variables as they are stored.

    Raises:
        MappingError: a variable that is to be cast is used in a way that forbids it.
    """
    meta_graph = message_class("MetaGraphDef")()
    meta_graph.CopyFrom(graph.meta_graph)
    _make_readable(meta_graph.meta_info_def)
    served = served_variables(mapping.sources)
    cast_variables(meta_graph.graph_def, {entry.variable.node: entry.dtype for entry in served})
    add_restore(meta_graph, served, mapping.tables, graph.state)
    return meta_graph


def _add_training(
    meta_graph: Proto, training: TrainingGraph, directory: Path, placed: dict[Path, str]
) -> None:
    meta_graph.CopyFrom(training.meta_graph)
    for node in all_nodes(meta_graph.graph_def):
        node.device = ""  # a job's tasks are gone when somebody trains on
    _make_readable(meta_graph.meta_info_def)
    del meta_graph.asset_file_def[:]
    meta_graph.collection_def.pop(ASSETS_COLLECTION, None)
    place_assets([Asset(*item) for item in training.assets.items()], meta_graph, directory, placed)
    _describe(meta_graph.meta_info_def, training.tag)


def _make_readable(info: Proto) -> None:
    """Let Python's loaders parse the trainer's version; the whole of a fork's is kept as the Git version."""
    known = readable_version(info.tensorflow_version)
    if known != info.tensorflow_version:
        info.tensorflow_git_version = info.tensorflow_git_version or info.tensorflow_version
        info.tensorflow_version = known


def _describe(info: Proto, tags: str) -> None:
    info.tags[:] = tags.split(",")
    info.tensorflow_version = info.tensorflow_version or _tensorflow_version()


def _serialise(saved_model: Proto) -> bytes:
    try:
        data = bytes(saved_model.SerializeToString(deterministic=True))
        if len(data) <= MAX_GRAPH_BYTES:
            return data
    except EncodeError:
        pass  # the runtime's own way to say that a message is too large
    nodes = (node for graph in saved_model.meta_graphs for node in graph.graph_def.node)
    sizes = sorted(((node.ByteSize(), node.name, node.op) for node in nodes), reverse=True)
    largest = ", ".join(f"{name} ({op}, {human_bytes(size)})" for size, name, op in sizes[:_LARGEST_NAMED])
    total = human_bytes(sum(size for size, _, _ in sizes))
    raise NotServable(
        f"the graph's nodes take {total}; a SavedModel holds at most 2 GiB",
        cause=f"the largest nodes are {largest}",
        hint="make large constants variables, or read them from an asset file",
    )


def _tensorflow_version() -> str:
    for distribution in ("tensorflow", "tensorflow-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return ""
