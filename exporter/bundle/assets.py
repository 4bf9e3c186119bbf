"""Copy the files that a graph's tables read into `assets/`, and name them in the MetaGraphDef.

Source: `AssetFileDef` in tensorflow/core/protobuf/meta_graph.proto; TF Serving and `tf.saved_model.load` take
the field `asset_file_def`, older loaders the collection `saved_model_assets`. Files are copied, not linked:
unlike a checkpoint's shards, vocabularies are edited in place.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from exporter.errors import NotServable, os_error
from exporter.files import below
from exporter.graph.inference_graph import Asset
from exporter.layout import ASSETS_DIRECTORY
from exporter.wire.protos import Proto, message_class

ASSETS_COLLECTION = "saved_model_assets"
_TYPE_URL = "type.googleapis.com/tensorflow.AssetFileDef"


def place_assets(
    assets: Iterable[Asset], meta_graph: Proto, directory: Path, names: dict[Path, str] | None = None
) -> None:
    """Copy each asset's file into `directory/assets` and name it in `meta_graph`.

    Two files of one name are told apart by a number; one file that two nodes read is stored once. `names`
    tells, and learns, which files have been placed there already.

    Raises:
        NotServable: a file is not there, not a regular file or not readable.
        PublishError: the target cannot be written.
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
        # The loader feeds the path; the trainer's own path says nothing to a server and tells too much.
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
