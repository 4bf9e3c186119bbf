"""An existing SavedModel whose graph is reused with new weights: TF1-style or object-based."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from google.protobuf.message import DecodeError

from exporter import protos
from exporter.errors import CorruptFile, MissingAsset, UnsupportedFormat, UsageError
from exporter.graph.metagraph import parse_message, with_signatures
from exporter.graph.nodes import GraphIndex, endpoint
from exporter.graph.object_names import saved_objects
from exporter.graph.source_graph import GraphRequest, SourceGraph
from exporter.protos import Proto

SERVE = "serve"
_SCHEMA_VERSION = 1
_INIT_SIGNATURE = "__saved_model_init_op"
_INIT_COLLECTIONS = ("saved_model_main_op", "legacy_init_op")


def is_saved_model(path: Path) -> bool:
    """True for a directory that holds a SavedModel in any of its spellings."""
    return any((path / name).is_file() for name in ("saved_model.pb", "saved_model.pbtxt", "saved_model.cpb"))


def load_saved_model(path: Path, request: GraphRequest) -> SourceGraph:
    """The graph tagged `serve` with its signatures (or those asked for), assets and initialiser.

    The message loses its graph of objects, which has no place in a bundle by names; it becomes `objects`.

    Raises:
        CorruptFile: the directory holds no readable SavedModel.
        UnsupportedFormat: another version, or one that is split into chunks.
        UsageError: no graph is tagged `serve`, or nothing says what to serve.
        MissingAsset: an asset that it names is not there.
    """
    meta_graph = _tagged(read_saved_model(path), path)
    init_op = _init_op(meta_graph)
    assets = {name: path / "assets" / file for name, file in _asset_files(meta_graph)}
    for file in assets.values():
        if not file.is_file():
            raise MissingAsset(
                f"the SavedModel names the asset {file}, which is not there",
                hint="copy the SavedModel again, with its assets/ directory",
            )
    source = with_signatures(meta_graph, request, label=str(path), directory=path)
    has_objects = meta_graph.HasField("object_graph_def")
    objects = saved_objects(meta_graph, GraphIndex.of(meta_graph)) if has_objects else None
    meta_graph.ClearField("object_graph_def")
    return dataclasses.replace(source, assets=assets, init_op=init_op or source.init_op, objects=objects)


def read_saved_model(path: Path) -> Proto:
    """The `protos.SavedModel` in a directory.

    Raises:
        CorruptFile: damaged.
        UnsupportedFormat: another schema version, or split into chunks (`saved_model.cpb`).
        UsageError: nothing there, or not readable.
    """
    if (path / "saved_model.cpb").is_file():
        raise UnsupportedFormat(
            f"{path} is a SavedModel split into chunks", hint="save it again below 2 GiB of constants"
        )
    file = path / "saved_model.pb"
    if not file.is_file():
        file = path / "saved_model.pbtxt"
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(
            f"no SavedModel can be read from {path}", cause=error.strerror or str(error)
        ) from error
    model = parse_message("SavedModel", data, file, is_text=file.suffix == ".pbtxt", nonempty="meta_graphs")
    if model.saved_model_schema_version != _SCHEMA_VERSION:
        raise UnsupportedFormat(
            f"{file} has schema version {model.saved_model_schema_version}, expected {_SCHEMA_VERSION}",
            hint="save it again with TensorFlow 1.x or 2.x",
        )
    return model


def _tagged(model: Proto, path: Path) -> Proto:
    """The graph with the tag `serve`, the one with fewest other tags (`gpu`, `tpu`) if there are several."""
    serving = [graph for graph in model.meta_graphs if SERVE in graph.meta_info_def.tags]
    if not serving:
        tags = "; ".join(", ".join(graph.meta_info_def.tags) or "none" for graph in model.meta_graphs)
        raise UsageError(
            f"no graph of {path} has the tag {SERVE!r}",
            cause=f"the tags of its graphs are: {tags}",
            hint=f"save it with the tag {SERVE!r}, or export from the trainer's .meta",
        )
    return min(serving, key=lambda graph: len(graph.meta_info_def.tags))


def _init_op(meta_graph: Proto) -> str | None:
    if _INIT_SIGNATURE in meta_graph.signature_def:
        name = meta_graph.signature_def[_INIT_SIGNATURE].outputs[_INIT_SIGNATURE].name
        return endpoint(name).node or None
    for collection in _INIT_COLLECTIONS:
        if collection in meta_graph.collection_def:
            for name in meta_graph.collection_def[collection].node_list.value:
                return endpoint(name).node
    return None


def _asset_files(meta_graph: Proto) -> list[tuple[str, str]]:
    """(node that gets the path, file name under assets/), from the field or the older collection.

    Raises:
        CorruptFile: a file name leads out of the directory.
    """
    assets = [*meta_graph.asset_file_def]
    if "saved_model_assets" in meta_graph.collection_def:
        for item in meta_graph.collection_def["saved_model_assets"].any_list.value:
            try:
                assets.append(protos.AssetFileDef.FromString(item.value))
            except DecodeError as error:
                raise CorruptFile("the SavedModel's list of assets is damaged", cause=str(error)) from error
    for asset in assets:
        if Path(asset.filename).is_absolute() or ".." in Path(asset.filename).parts:
            raise CorruptFile(f"the SavedModel names an asset outside its directory: {asset.filename!r}")
    return [(endpoint(asset.tensor_info.name).node, asset.filename) for asset in assets]
