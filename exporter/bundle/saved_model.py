"""InferenceGraph + Mapping -> `saved_model.pb` and `assets/`, without TensorFlow.

The result is a SavedModel as the stock TF1 builder writes it: one MetaGraphDef under the tag `serve`,
restored by its `SaverDef`, initialised by the op in the collection `saved_model_main_op`. TF Serving,
`tf.compat.v1.saved_model.load` and `tf.saved_model.load` read it.
Source of names: tensorflow/cc/saved_model/constants.h, loader_util.cc and core/protobuf/saved_model.proto.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from exporter.bundle.assets import place_assets
from exporter.bundle.cast import cast_variables
from exporter.bundle.restore_graph import add_restore, served_variables
from exporter.errors import NotServable, os_error
from exporter.graph.inference_graph import InferenceGraph
from exporter.mapping import Mapping
from exporter.output import human_bytes
from exporter.protos import Proto, message_class

SAVED_MODEL_FILE = "saved_model.pb"
SERVE_TAG = "serve"
PROTOBUF_LIMIT_BYTES = (1 << 31) - 1
"""No reader of protocol buffers takes a larger message."""

_SCHEMA_VERSION = 1
_MAIN_OP_COLLECTION = "saved_model_main_op"
_LARGEST_NAMED = 3


def write_saved_model(graph: InferenceGraph, mapping: Mapping, directory: Path) -> None:
    """Write `saved_model.pb` and the assets of `graph` into `directory` (made if it is not there).

    The same graph and mapping give the same bytes.

    Raises:
        MappingError: a variable that is to be cast is used in a way that forbids it.
        NotServable: an asset cannot be read, or the graph's constants exceed protobuf's limit of 2 GiB.
        PublishError: the directory cannot be written.
    """
    meta_graph = serving_meta_graph(graph, mapping)
    place_assets(graph.assets, meta_graph, directory)
    saved_model = message_class("SavedModel")(saved_model_schema_version=_SCHEMA_VERSION)
    saved_model.meta_graphs.add().CopyFrom(meta_graph)
    target = directory / SAVED_MODEL_FILE
    data = _serialise(saved_model, meta_graph.graph_def)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    except OSError as exc:
        raise os_error(exc, target) from exc


def serving_meta_graph(graph: InferenceGraph, mapping: Mapping) -> Proto:
    """The MetaGraphDef to serve: casts, restore nodes, init op and tags; assets are not in it yet.

    Raises:
        MappingError: a variable that is to be cast is used in a way that forbids it.
    """
    meta_graph = message_class("MetaGraphDef")()
    meta_graph.CopyFrom(graph.meta_graph)
    served = served_variables(mapping.sources)
    stored = {entry.variable.node: entry.dtype for entry in served if entry.dtype != entry.variable.dtype}
    cast_variables(meta_graph.graph_def, stored)
    add_restore(meta_graph, served)
    if graph.init_op:
        meta_graph.collection_def[_MAIN_OP_COLLECTION].node_list.value.append(graph.init_op)
    info = meta_graph.meta_info_def
    del info.tags[:]
    info.tags.append(SERVE_TAG)
    info.tensorflow_version = info.tensorflow_version or _tensorflow_version()
    return meta_graph


def _serialise(saved_model: Proto, graph_def: Proto) -> bytes:
    size = sum(node.ByteSize() for node in graph_def.node)
    if size <= PROTOBUF_LIMIT_BYTES:
        # Summed first: the runtime's own answer to a message above the limit is an error without a name.
        data = bytes(saved_model.SerializeToString(deterministic=True))
        if (size := len(data)) <= PROTOBUF_LIMIT_BYTES:
            return data
    largest = sorted(graph_def.node, key=lambda node: node.ByteSize(), reverse=True)[:_LARGEST_NAMED]
    names = ", ".join(f"{node.name} ({node.op}, {human_bytes(node.ByteSize())})" for node in largest)
    raise NotServable(
        f"the graph takes {human_bytes(size)}; a SavedModel holds at most 2 GiB",
        cause=f"the largest nodes are {names}",
        hint="make large constants variables, or read them from an asset file",
    )


def _tensorflow_version() -> str:
    for distribution in ("tensorflow", "tensorflow-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return ""
