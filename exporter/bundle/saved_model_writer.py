"""InferenceGraph + Mapping -> `saved_model.pb` and `assets/`, without TensorFlow.

The result is a SavedModel as the stock TF1 builder writes it: one MetaGraphDef under the tag `serve`,
restored by its `SaverDef`, initialised by the op in the collection `saved_model_main_op`; if asked for, the
graph of training beside it under a tag of its own, restored from the same `variables/`. TF Serving,
`tf.compat.v1.saved_model.load` and `tf.saved_model.load` read it. (Source of names:
tensorflow/cc/saved_model/constants.h, loader_util.cc and core/protobuf/saved_model.proto.)

- *Restoring* is what a stock `Saver` does: one RestoreV2 reads every variable (parts of a partitioned one by
  slice), an AssignVariableOp each takes its values, a LookupTableImportV2 the keys and values of each table.
  Tables with files of their own are mapped if they can be (`exporter.bundle.mapped_tables`).
  A SaveV2 beside them makes `Saver(saver_def=...)` of the stock loaders complete. (Source:
  tensorflow/python/training/saver.py and core/protobuf/saver.proto.)
- *Assets*, the files that a graph's tables read, are named in `asset_file_def`, which TF Serving and
  `tf.saved_model.load` take, and in the collection `saved_model_assets`, which older loaders take. They are
  copied, not linked: unlike a checkpoint's shards, vocabularies are edited in place. (Source: `AssetFileDef`
  in tensorflow/core/protobuf/meta_graph.proto.)
- *Cloud ML's pair* is another form of the same: `export.meta` and the bundle `export.*`. Its collections
  `inputs` and `outputs` hold one JSON object each, name -> tensor, as online prediction of TensorFlow 0.12
  and trainers after it read (`tf.train.import_meta_graph`, `Saver.restore`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import EncodeError
from msgspec import Struct
from msgspec.structs import replace

from exporter.bundle.mapped_tables import NOTHING_MAPPED, MappedTables, TriedTable, add_tries
from exporter.catalog import SliceSpec, TensorRef
from exporter.errors import NotServable, os_error
from exporter.graph.cast_variables import cast_variables
from exporter.graph.changed_uses import change_uses
from exporter.graph.graph_files import SERVE_TAG
from exporter.graph.inference_graph import (
    Asset,
    GraphTable,
    GraphVariable,
    InferenceGraph,
    JoinedPart,
    KeptState,
)
from exporter.graph.metagraph import readable_version
from exporter.graph.nodes import constant, free_name, new_node, shape_proto
from exporter.graph.old_servers import make_for, oldest_server
from exporter.graph.placed_reads import PlacedReads
from exporter.graph.signatures import DEFAULT_SIGNATURE
from exporter.graph.training_graph import TrainingGraph
from exporter.mapping.build import VariableMapping
from exporter.mapping.tensor_source import TensorSource
from exporter.storage.files import below, close_quietly, open_regular
from exporter.storage.layout import (
    ASSETS_DIRECTORY,
    PAIR_NAME,
    SAVED_MODEL_FILE,
    VARIABLES_DIRECTORY,
    VARIABLES_NAME,
)
from exporter.terminal.progress import human_bytes
from exporter.wire.dtypes import DType
from exporter.wire.protos import MAX_MESSAGE_BYTES, Proto, all_nodes, message_class
from exporter.wire.stock_ops import Version

ASSETS_COLLECTION = "saved_model_assets"
_TYPE_URL = "type.googleapis.com/tensorflow.AssetFileDef"


def place_assets(
    assets: Iterable[Asset], meta_graph: Proto, directory: Path, names: dict[Path, str] | None = None
) -> None:
    """Copy each asset's file into `directory/assets`, and name it in `meta_graph`, which is changed in place.

    Of two files of one name, the second is stored with a number in its name; one file that two nodes read is
    stored once. `names` has the stored name of each file that was copied before; these are not copied again,
    and new ones are added to it (None: nothing was copied before). The constants of the assets' nodes get the
    stored names. An existing file of a stored name is overwritten. KeyError if the graph has no node of an
    asset.

    Raises:
        NotServable: a file does not exist or cannot be read, or its name is not one of a file in `assets`.
        CheckpointError: a file in a store cannot be fetched; LfsPointer if a file is a pointer of Git LFS.
        DiskFull, PublishError: it cannot be copied.
    """
    names = {} if names is None else names
    nodes = {node.name: node for node in meta_graph.graph_def.node}
    for asset in assets:
        source = asset.source.resolve()
        if source not in names:
            names[source] = _free_name(asset.file_name, set(names.values()))
            said = f"the asset of node {asset.node!r}:"
            target = below(directory / ASSETS_DIRECTORY, names[source], said, NotServable, writes=True)
            _place(asset, source, target)
        _declare(meta_graph, asset.node, names[source])
        # The loader feeds the path; the trainer's own path is of no use to a server and discloses too much.
        _set_constant(nodes[asset.node], names[source])


def _free_name(wanted: str, taken: set[str]) -> str:
    stem, dot, suffix = wanted.partition(".")
    numbered = (f"{stem}_{n}{dot}{suffix}" if n else wanted for n in range(len(taken) + 1))
    return next(name for name in numbered if name not in taken)


def _place(asset: Asset, source: Path, target: Path) -> None:
    if not source.is_file():
        raise NotServable(
            f"asset {asset.source} of node {asset.node!r} is not a file",
            hint="restore the file, or build the graph where the trainer's asset files are",
        )
    if not os.access(source, os.R_OK):
        raise NotServable(
            f"asset {asset.source} of node {asset.node!r} cannot be read", hint="make the file readable"
        )
    try:
        close_quietly(open_regular(source))  # refuses a pointer of Git LFS
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    except OSError as exc:
        raise os_error(exc, target) from exc


def _declare(meta_graph: Proto, node: str, file_name: str) -> None:
    definition = meta_graph.asset_file_def.add(filename=file_name)
    definition.tensor_info.name = f"{node}:0"
    collected = meta_graph.collection_def[ASSETS_COLLECTION].any_list.value
    collected.add(type_url=_TYPE_URL, value=definition.SerializeToString(deterministic=True))


def _set_constant(node: Proto, value: str) -> None:
    tensor = node.attr["value"].tensor
    replacement = message_class("TensorProto")(dtype=tensor.dtype, string_val=[value.encode()])
    replacement.tensor_shape.CopyFrom(tensor.tensor_shape)
    tensor.CopyFrom(replacement)


# Global variables: by this collection `tf.saved_model.load` owns them as Python objects.
VARIABLES_COLLECTION = "variables"

_SAVER_V2 = 2  # SaverDef.CheckpointFormatVersion.V2


class RestoredVariable(Struct, frozen=True):
    """A variable of the served graph, the bundle key that it is restored from, and its dtype there."""

    variable: GraphVariable
    key: str
    dtype: DType
    is_table: bool = True
    """False for the places of a table's rows, which are mapped with it."""

    @property
    def slice_spec(self) -> str:
        """The slice for RestoreV2: "" for a whole tensor, which RestoreV2 also joins from stored slices."""
        part = self.variable.part
        return part.restore_spec if part and not part.is_full else ""


def served_variables(sources: Iterable[TensorSource]) -> tuple[RestoredVariable, ...]:
    """Return every variable of every source, in its stored form, in the order of the sources."""
    return tuple(
        RestoredVariable(source.as_stored(variable), source.key, source.dtype)
        for source in sources
        for variable in source.variables
    )


class _Held(Struct, frozen=True):
    """A VarHandleOp of the graph and the variables that it holds: several, joined by rows, or one."""

    node: str
    entries: list[RestoredVariable]

    @property
    def dtype(self) -> DType:
        """The dtype of the variable's elements in the bundle."""
        return self.entries[0].dtype


def _held(served: Iterable[RestoredVariable], joined: Mapping[str, JoinedPart]) -> list[_Held]:
    """Group the variables by the VarHandleOps that hold them, in the order of the variables.

    Variables that one node holds are in the order of their rows. `joined` has, by node, the place of each
    variable that is part of another.
    """
    # The rows of joined variables follow the graph's order, which may differ from that of the sources.
    found: dict[str, list[RestoredVariable]] = {}
    for entry in served:
        node = entry.variable.node
        found.setdefault(joined[node].node if node in joined else node, []).append(entry)
    for entries in found.values():
        if len(entries) > 1:
            entries.sort(key=lambda entry: joined[entry.variable.node].first)
    return [_Held(*item) for item in found.items()]


def add_restore(
    meta_graph: Proto,
    served: Sequence[RestoredVariable],
    tables: Sequence[GraphTable],
    state: KeptState,
    mapped: MappedTables,
    joined: Mapping[str, JoinedPart],
) -> None:
    """Add the nodes that restore and save, a `SaverDef` and the collection of variables to a graph in place.

    `served` are the variables to restore, `tables` the lookup tables, `mapped` the tables that are mapped if
    possible; `joined` says which variables are parts of joined ones. `state` has the nodes that import
    further contents. A graph without variables, tables and such nodes stays as it is.
    """
    if not served and not tables and not state.importing:  # as with the stock builder
        return
    graph_def = meta_graph.graph_def
    scope = _free_scope(graph_def)
    _add_file_name(graph_def, scope)
    tried = [entry for entry in served if entry.variable.node in mapped.files]
    read = [entry for entry in served if entry.variable.node not in mapped.files]
    names = _add_names(graph_def, scope, served, tables)
    if tried:
        names = _add_names(graph_def, f"{scope}/restored", read, tables)
    if names:
        inputs = [f"{scope}/Const", *names]
        _add_node(graph_def, f"{scope}/RestoreV2", "RestoreV2", inputs, dtypes=_dtypes(read, tables))
    values = {entry.variable.node: _restored(scope, index) for index, entry in enumerate(read)}
    tables_tried = (
        TriedTable(each.variable, each.dtype, each.key, each.slice_spec, each.is_table) for each in tried
    )
    tries = add_tries(graph_def, scope, f"{scope}/Const", tables_tried, mapped)
    values |= tries.values
    held = _held(served, joined)
    _add_save(graph_def, scope, served, held, tables)
    contents = [_restored(scope, len(read) + index) for index in range(2 * len(tables))]
    importing = (*state.importing, *tries.counts)
    _add_assignments(graph_def, scope, held, values, tables, contents, importing)
    for node in graph_def.node:
        if node.name == state.prefix:
            node.CopyFrom(new_node(state.prefix, "Identity", [f"{scope}/Const"], T=DType.STRING))
    meta_graph.saver_def.CopyFrom(
        message_class("SaverDef")(
            filename_tensor_name=f"{scope}/Const:0",
            save_tensor_name=f"{scope}/control_dependency:0",
            restore_op_name=f"{scope}/restore_all",
            # As a stock Saver says by default.
            max_to_keep=5,
            keep_checkpoint_every_n_hours=10000.0,
            version=_SAVER_V2,
        )
    )
    collection = meta_graph.collection_def[VARIABLES_COLLECTION].bytes_list.value
    collection.extend(_variable_def(scope, index, each) for index, each in enumerate(held))


def _add_node(graph_def: Proto, name: str, op: str, inputs: Sequence[str] = (), **attrs: Any) -> None:
    graph_def.node.append(new_node(name, op, inputs, **attrs))


def _free_scope(graph_def: Proto) -> str:
    """Return `save`, or else the first `save_<n>` under which the graph has no node yet."""
    # In lower case: to TensorFlow, names that differ in case alone are the same.
    taken = {node.name.partition("/")[0].lower() for node in graph_def.node}
    return next(name for n in range(len(taken) + 1) if (name := f"save_{n}" if n else "save") not in taken)


def _add_file_name(graph_def: Proto, scope: str) -> None:
    default = message_class("TensorProto")(dtype=int(DType.STRING), string_val=[b"model"])
    default.tensor_shape.SetInParent()
    _add_node(graph_def, f"{scope}/filename/input", "Const", dtype=DType.STRING, value=default)
    inputs = [f"{scope}/filename/input"]
    _add_node(graph_def, f"{scope}/Const", "PlaceholderWithDefault", inputs, dtype=DType.STRING, shape=())


def _add_names(
    graph_def: Proto, scope: str, served: Sequence[RestoredVariable], tables: Sequence[GraphTable]
) -> list[str]:
    """Add the constant inputs of RestoreV2 and SaveV2: names in the bundle and slices.

    Return the names of these nodes. Empty if there is nothing to restore; then nothing is added.
    """
    contents = [name for table in tables for name in (table.keys, table.values)]
    if not served and not contents:
        return []
    texts = {
        f"{scope}/tensor_names": [*(entry.key for entry in served), *contents],
        f"{scope}/shape_and_slices": [*(entry.slice_spec for entry in served), *("" for _ in contents)],
    }
    for name, values in texts.items():
        tensor = message_class("TensorProto")(dtype=int(DType.STRING))
        tensor.string_val.extend(value.encode() for value in values)
        tensor.tensor_shape.dim.add(size=len(values))
        _add_node(graph_def, name, "Const", dtype=DType.STRING, value=tensor)
    return [*texts]


def _add_save(
    graph_def: Proto,
    scope: str,
    served: Sequence[RestoredVariable],
    held: Sequence[_Held],
    tables: Sequence[GraphTable],
) -> None:
    reads: dict[str, str] = {}
    for index, each in enumerate(held):
        read = _read_name(scope, index)
        _add_node(graph_def, read, "ReadVariableOp", [each.node], dtype=each.dtype)
        pieces = _split(graph_def, read, each) if len(each.entries) > 1 else [read]
        reads |= {entry.variable.node: piece for entry, piece in zip(each.entries, pieces, strict=True)}
    inputs = [f"{scope}/Const", f"{scope}/tensor_names", f"{scope}/shape_and_slices"]
    inputs.extend(reads[entry.variable.node] for entry in served)
    for index, table in enumerate(tables):
        name = f"{scope}/LookupTableExportV2_{index}"
        types = {"Tkeys": table.key_dtype, "Tvalues": table.value_dtype}
        _add_node(graph_def, name, "LookupTableExportV2", [table.node], **types)
        inputs += [name, f"{name}:1"]
    after = [f"{scope}/Const"]
    if served or tables:
        _add_node(graph_def, f"{scope}/SaveV2", "SaveV2", inputs, dtypes=_dtypes(served, tables))
        after.append(f"^{scope}/SaveV2")
    _add_node(graph_def, f"{scope}/control_dependency", "Identity", after, T=DType.STRING)


def _split(graph_def: Proto, read: str, held: _Held) -> list[str]:
    """Add nodes that split the value `read` of joined variables by rows.

    Return the tensor of each variable, in order.
    """
    lengths = np.array([entry.variable.shape[0] for entry in held.entries], np.int64)
    sizes, axis = f"{read}/sizes", f"{read}/axis"
    graph_def.node.append(constant(sizes, lengths, DType.INT64))
    graph_def.node.append(constant(axis, np.array(0, np.int32), DType.INT32))
    types = {"T": held.dtype, "Tlen": DType.INT64, "num_split": len(lengths)}
    _add_node(graph_def, f"{read}/split", "SplitV", [read, sizes, axis], **types)
    return [f"{read}/split:{index}" if index else f"{read}/split" for index in range(len(lengths))]


def _joined(graph_def: Proto, name: str, held: _Held, values: Mapping[str, str]) -> str:
    """Add nodes that join the `values`, by node, of the variables that `held` holds.

    Return the tensor of the whole. A single variable needs no node: its own tensor is returned.
    """
    tensors = [values[entry.variable.node] for entry in held.entries]
    if len(tensors) == 1:
        return tensors[0]
    axis = f"{name}/axis"
    graph_def.node.append(constant(axis, np.array(0, np.int32), DType.INT32))
    types = {"T": held.dtype, "N": len(tensors), "Tidx": DType.INT32}
    _add_node(graph_def, f"{name}/joined", "ConcatV2", [*tensors, axis], **types)
    return f"{name}/joined"


def _add_assignments(
    graph_def: Proto,
    scope: str,
    held: Sequence[_Held],
    values: Mapping[str, str],
    tables: Sequence[GraphTable],
    contents: Sequence[str],
    importing: Iterable[str],
) -> None:
    """Add nodes that assign `values` and import `contents`, and `restore_all` after them.

    `values` are by the variables' nodes. The contents are the tensors of keys and values of each table, in
    turn; `importing` are further nodes that `restore_all` waits for.
    """
    for index, each in enumerate(held):
        name = _assign_name(scope, index)
        inputs = [each.node, _joined(graph_def, name, each, values)]
        _add_node(graph_def, name, "AssignVariableOp", inputs, dtype=each.dtype)
    everything = [f"^{_assign_name(scope, index)}" for index in range(len(held))]
    for index, table in enumerate(tables):
        name = f"{scope}/LookupTableImportV2_{index}"
        inputs = [table.node, *contents[2 * index : 2 * index + 2]]
        types = {"Tin": table.key_dtype, "Tout": table.value_dtype}
        _add_node(graph_def, name, "LookupTableImportV2", inputs, **types)
        everything.append(f"^{name}")
    everything += [f"^{name}" for name in importing]
    _add_node(graph_def, f"{scope}/restore_all", "NoOp", everything)


def _restored(scope: str, output: int) -> str:
    return f"{scope}/RestoreV2:{output}" if output else f"{scope}/RestoreV2"  # as TensorFlow names output 0


def _read_name(scope: str, index: int) -> str:
    return f"{scope}/Read_{index}/ReadVariableOp"


def _assign_name(scope: str, index: int) -> str:
    return f"{scope}/AssignVariableOp_{index}"


def _dtypes(served: Sequence[RestoredVariable], tables: Sequence[GraphTable]) -> tuple[DType, ...]:
    contents = (dtype for table in tables for dtype in (table.key_dtype, table.value_dtype))
    return (*(entry.dtype for entry in served), *contents)


def _variable_def(scope: str, index: int, held: _Held) -> bytes:
    entry = held.entries[0]
    definition = message_class("VariableDef")(
        variable_name=f"{held.node}:0",
        initializer_name=_assign_name(scope, index),
        snapshot_name=f"{_read_name(scope, index)}:0",
        is_resource=True,
    )
    if part := entry.variable.part:
        definition.save_slice_info_def.full_name = entry.key
        definition.save_slice_info_def.full_shape.extend(part.full_shape)
        definition.save_slice_info_def.var_offset.extend(part.starts)
        definition.save_slice_info_def.var_shape.extend(part.lengths)
    return bytes(definition.SerializeToString(deterministic=True))


_SCHEMA_VERSION = 1  # kSavedModelSchemaVersion
_MAIN_OP_COLLECTION = "saved_model_main_op"
_LARGEST_NAMED = 3


def write_saved_model(
    graph: InferenceGraph,
    mapping: VariableMapping,
    directory: Path,
    training: TrainingGraph | None = None,
    mapped: MappedTables = NOTHING_MAPPED,
    server: Version | None = None,
) -> Version:
    """Write `saved_model.pb` and the assets; return the oldest TensorFlow version that can serve them.

    The directory is created if it does not exist. With `server`, the graph is rewritten for that TensorFlow
    version; with None it is not. `training` (None: no such graph) is published beside it unchanged except
    that devices are cleared. The same graph and mapping give the same bytes. The tables of `mapped` are
    mapped where servers see their files.

    Raises:
        MappingError: a variable that is to be cast is used in a way that forbids it.
        CheckpointError: an asset in a store cannot be fetched; LfsPointer if it is a pointer of Git LFS.
        NotServable: an asset cannot be read, the graph's constants exceed protobuf's limit of 2 GiB, `server`
            lacks something that the graph needs, or a table with hot rows is read other than by rows.
        DiskFull, PublishError: the directory cannot be written.
    """
    saved_model = message_class("SavedModel")(saved_model_schema_version=_SCHEMA_VERSION)
    meta_graph = saved_model.meta_graphs.add()
    meta_graph.CopyFrom(restorable_graph(graph, mapping, mapped, server))
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
    return oldest_server(meta_graph.graph_def)


def restorable_graph(
    graph: InferenceGraph,
    mapping: VariableMapping,
    mapped: MappedTables = NOTHING_MAPPED,
    server: Version | None = None,
) -> Proto:
    """Return a new MetaGraphDef: the graph with the nodes that restore its variables from a bundle.

    `mapping` has the variables' tensors, `mapped` the tables that are mapped. With `server`, the graph is
    rewritten for that TensorFlow version; with None it is not. Raises MappingError if a variable that is to
    be cast is used in a way that forbids it; NotServable if `server` lacks something that the graph needs, or
    a table with hot rows is read other than by rows.
    """
    meta_graph = message_class("MetaGraphDef")()
    meta_graph.CopyFrom(graph.meta_graph)
    _make_readable(meta_graph.meta_info_def)
    served = served_variables(mapping.sources)
    cast_variables(meta_graph.graph_def, {entry.variable.node: entry.dtype for entry in served})
    served, mapped = _place_hot_rows(meta_graph.graph_def, served, mapped)
    add_restore(meta_graph, served, mapping.tables, graph.state, mapped, graph.joined)
    if server is not None:
        make_for(meta_graph.graph_def, server)
    return meta_graph


def _place_hot_rows(
    graph_def: Proto, served: tuple[RestoredVariable, ...], mapped: MappedTables
) -> tuple[tuple[RestoredVariable, ...], MappedTables]:
    """Change a graph in place so that lookups read hot rows.

    `served` are the variables, `mapped` the tables to map and their hot rows. Return the variables to restore
    and the tables to map. Raises NotServable if a table with hot rows is read other than by rows.
    """
    nodes = {node.name: node for node in graph_def.node}
    entries, places, reads, files = list[RestoredVariable](), list[RestoredVariable](), {}, {}
    for entry in served:
        own = entry.variable
        if (hot := mapped.hot.get(own.node)) is None:
            entries.append(entry)
            continue
        handle = free_name(nodes, f"{own.node}/hot_places")
        whole, beside = _named_in_bundle(own.node, hot.whole), _named_in_bundle(handle, hot.places)
        entries.append(RestoredVariable(whole, whole.key, whole.dtype))
        places.append(RestoredVariable(beside, beside.key, beside.dtype, is_table=False))
        kind: dict[str, Any] = {"dtype": beside.dtype, "shape": beside.shape}
        nodes[handle] = new_node(handle, "VarHandleOp", shared_name=handle.encode(), **kind)
        graph_def.node.append(nodes[handle])
        nodes[own.node].attr["shape"].shape.CopyFrom(shape_proto(whole.shape))
        reads[own.node] = PlacedReads(own.shape, handle, beside.dtype)
        files[handle] = hot.file
    change_uses(graph_def, reads)
    return (*entries, *places), replace(mapped, files={**mapped.files, **files})


def _named_in_bundle(node: str, stored: TensorRef) -> GraphVariable:
    """Return a variable of `node` whose value is a whole stored tensor.

    It has a slice, so that loaders learn its name in the bundle.
    """
    return GraphVariable(node, stored.name, stored.dtype, stored.shape, SliceSpec.whole(stored.shape))


def _add_training(
    meta_graph: Proto, training: TrainingGraph, directory: Path, placed: dict[Path, str]
) -> None:
    meta_graph.CopyFrom(training.meta_graph)
    for node in all_nodes(meta_graph.graph_def):
        node.device = ""  # a job's tasks are gone when somebody trains on
    _make_readable(meta_graph.meta_info_def)
    del meta_graph.asset_file_def[:]  # `place_assets` names them anew
    meta_graph.collection_def.pop(ASSETS_COLLECTION, None)
    place_assets([Asset(*item) for item in training.assets.items()], meta_graph, directory, placed)
    _describe(meta_graph.meta_info_def, training.tag)


def _make_readable(info: Proto) -> None:
    """Set in `info` a version that Python's loaders can parse.

    A fork's full version is kept as the Git version.
    """
    known = readable_version(info.tensorflow_version)
    if known != info.tensorflow_version:
        info.tensorflow_git_version = info.tensorflow_git_version or info.tensorflow_version
        info.tensorflow_version = known


def _describe(info: Proto, tags: str) -> None:
    info.tags[:] = tags.split(",")
    for distribution in ("tensorflow", "tensorflow-cpu"):
        with suppress(PackageNotFoundError):
            info.tensorflow_version = info.tensorflow_version or version(distribution)


def _serialise(saved_model: Proto) -> bytes:
    try:
        data = bytes(saved_model.SerializeToString(deterministic=True))
        if len(data) <= MAX_MESSAGE_BYTES:
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


_INIT_COLLECTION = "serving_init_op"  # tensorflow/contrib/session_bundle/constants.py


def write_pair(
    graph: InferenceGraph, mapping: VariableMapping, directory: Path, server: Version | None = None
) -> None:
    """Write Cloud ML's pair of files into `directory`, with hard links to the files of `variables/`.

    `directory` has `variables/` already. With `server`, the graph is rewritten for that TensorFlow version;
    with None it is not.

    Raises:
        MappingError: a variable that is to be cast is used in a way that forbids it.
        NotServable: the graph reads files, has no default signature or one of sparse tensors, or `server`
            lacks something that it needs.
        DiskFull, PublishError: the directory cannot be written, or cannot have hard links.
    """
    meta_graph = restorable_graph(graph, mapping, server=server)
    if graph.assets:
        files = ", ".join(asset.file_name for asset in graph.assets)
        raise NotServable(
            f"the graph reads {files}, for which export.meta has no place", hint="use --format saved_model"
        )
    _add_collections(meta_graph)
    if graph.init_op:
        meta_graph.collection_def[_INIT_COLLECTION].node_list.value.append(graph.init_op)
    target = directory / f"{PAIR_NAME}.meta"
    try:
        target.write_bytes(meta_graph.SerializeToString(deterministic=True))
        for file in sorted((directory / VARIABLES_DIRECTORY).glob(f"{VARIABLES_NAME}.*")):
            os.link(file, directory / f"{PAIR_NAME}{file.name.removeprefix(VARIABLES_NAME)}")
    except OSError as exc:
        raise os_error(exc, target) from exc


def keep_pair_alone(directory: Path) -> None:
    """Remove `saved_model.pb` and `variables/` beside a pair.

    If `saved_model.pb` is not there, nothing is removed.

    Raises:
        PublishError: they cannot be removed.
    """
    try:
        (directory / SAVED_MODEL_FILE).unlink()
        shutil.rmtree(directory / VARIABLES_DIRECTORY, ignore_errors=False)
    except FileNotFoundError:
        return  # a model without variables
    except OSError as exc:
        raise os_error(exc, directory) from exc


def _add_collections(meta_graph: Proto) -> None:
    if DEFAULT_SIGNATURE not in meta_graph.signature_def:
        raise NotServable(
            f"export.meta describes the signature {DEFAULT_SIGNATURE!r} alone, which the graph does not have",
            cause=f"it has {', '.join(sorted(meta_graph.signature_def))}",
        )
    signature = meta_graph.signature_def[DEFAULT_SIGNATURE]
    for name, infos in (("inputs", signature.inputs), ("outputs", signature.outputs)):
        tensors = {}
        for alias, info in infos.items():
            if info.WhichOneof("encoding") != "name":
                raise NotServable(f"export.meta names dense tensors, and {alias!r} is not one")
            tensors[alias] = info.name
        text = json.dumps(tensors, sort_keys=True)
        meta_graph.collection_def[name].bytes_list.value[:] = [text.encode()]
