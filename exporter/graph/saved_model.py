"""Reuse the graph of an existing SavedModel, TF1-style or object-based, with new weights."""

from __future__ import annotations

from pathlib import Path

from google.protobuf.message import DecodeError
from msgspec.structs import replace

from exporter.errors import CorruptFile, MissingAsset, UsageError
from exporter.graph.feeds import parse_feeds
from exporter.graph.functions import drop_refills
from exporter.graph.graph_files import SERVE_TAG, TRAINING_TAGS, read_saved_model
from exporter.graph.keys import saved_objects
from exporter.graph.metagraph import with_signatures
from exporter.graph.nodes import GraphIndex, endpoint
from exporter.graph.signatures import collection_spec, drop_internal, requested_specs
from exporter.graph.source_graph import ANY_FILES, GraphRequest, SourceGraph, Trust
from exporter.graph.training_graph import TrainingGraph, drop_training_signatures
from exporter.storage.files import below
from exporter.storage.layout import (
    ASSETS_DIRECTORY,
)
from exporter.storage.local_paths import quoted
from exporter.wire import protos
from exporter.wire.protos import Proto

_INIT_SIGNATURE = "__saved_model_init_op"
_INIT_COLLECTIONS = ("saved_model_main_op", "legacy_init_op")
_UPDATE = "incremental_update"  # the signature that applies deltas, added with the subgraph


def load_saved_model(path: Path, request: GraphRequest) -> SourceGraph:
    """Load a SavedModel's graph for serving, or the one with the request's tag, with its assets and objects.

    Unless the graph has the tag `serve`, or the request names tensors, signatures that train are left out,
    with notes.

    Raises:
        UsageError: it does not exist, takes deltas, or has no graph or signature to serve; or an option is
            wrong.
        CorruptFile, UnsupportedFormat: it is damaged, or split into chunks.
        CheckpointError: its file, or the file of `--signatures`, is a pointer of Git LFS, or cannot be
            fetched from a store (subclasses).
        PublishError: what is fetched from a store cannot be written.
        MissingAsset: a file that it names does not exist; AccessRefused if the graph may not read it.
        GraphError: the signatures cannot be served; the subclass says why.
    """
    meta_graph = choose_graph(read_saved_model(path), path, request.tag)
    if _UPDATE in meta_graph.signature_def:
        raise UsageError(
            f"--model {path} is a base that takes deltas: its graph holds what applies them, too",
            hint="name what it was made from: a builder, a .meta file or the trainer's SavedModel",
        )
    init_op = _init_op(meta_graph)  # first: its pseudo-signature is dropped with the other internal ones
    drop_refills(meta_graph, init_op)
    assets = _assets(meta_graph, path, request.trust)
    notes = [] if SERVE_TAG in meta_graph.meta_info_def.tags else _without_training(meta_graph, request, path)
    source = with_signatures(meta_graph, request, label=str(path), directory=path)
    has_objects = meta_graph.HasField("object_graph_def")
    objects = saved_objects(meta_graph, GraphIndex.of(meta_graph)) if has_objects else None
    meta_graph.ClearField("object_graph_def")  # a bundle by names cannot have one
    return replace(
        source,
        assets=assets,
        init_op=init_op or source.init_op,
        objects=objects,
        notes=(*notes, *source.notes),
    )


def load_training_graph(path: Path, tag: str, trust: Trust = ANY_FILES) -> TrainingGraph:
    """Load the graph with this tag unchanged, to be published beside another.

    `trust` says which files the graph may read.

    Raises:
        AccessRefused: it names a file that it may not read.
        CorruptFile: the SavedModel is damaged, or an asset's name leads out of `assets/`.
        CheckpointError: its file is a pointer of Git LFS, or cannot be fetched from a store (subclasses).
        PublishError: what is fetched from a store cannot be written.
        UnsupportedFormat: it is split into chunks, or its graph is object-based.
        UsageError: there is no SavedModel, or no graph or several have the tag.
        MissingAsset: an asset that it names does not exist.
        GraphError: it computes the names of its tensors, or two nodes have the same name, or one has none.
    """
    meta_graph = choose_graph(read_saved_model(path), path, tag, "--train-tag")
    return TrainingGraph.of(str(path), tag, meta_graph, _assets(meta_graph, path, trust))


def choose_graph(model: Proto, path: Path, tag: str | None, option: str = "--tag") -> Proto:
    """Return the graph (a MetaGraphDef) of a SavedModel that `tag` selects, tags separated by commas.

    The graph with exactly these tags is selected, else the only graph with these and further tags. "" selects
    a graph without tags, as in modules of TensorFlow Hub. Without `tag` (None): the only graph, else the one
    for serving with the fewest other tags (`gpu`, `tpu`), else the one with the fewest tags that is not for
    training. UsageError unless exactly one is selected; the message names the `path`, and the `option` of the
    command line.
    """
    graphs = [*model.meta_graphs]
    if tag is None and len(graphs) == 1:
        return graphs[0]
    wanted = {SERVE_TAG} if tag is None else {*filter(None, tag.split(","))}
    found = [graph for graph in graphs if wanted <= {*graph.meta_info_def.tags}]
    if tag is None and not found:
        found = [graph for graph in graphs if not TRAINING_TAGS & {*graph.meta_info_def.tags}]
    fewest = min((len(graph.meta_info_def.tags) for graph in found), default=0)
    nearest = [graph for graph in found if len(graph.meta_info_def.tags) == fewest]
    if tag is not None and fewest > len(wanted):
        nearest = found
    if len(nearest) == 1:
        return nearest[0]
    shown = repr(SERVE_TAG if tag is None else tag)
    tags = "; ".join(",".join(graph.meta_info_def.tags) or "none" for graph in graphs)
    raise UsageError(
        f"{len(nearest)} graphs of {path} have the tag {shown}"
        if nearest
        else f"no graph of {path} has the tag {shown}",
        cause=f"the tags of its graphs are: {tags}",
        hint=f"name all tags of one of them: {option} {quoted(','.join(_likeliest(graphs)))}",
    )


def _likeliest(graphs: list[Proto]) -> list[str]:
    """Return the tags of the first graph that is not for training; of the first graph if all are."""
    tags = [[*graph.meta_info_def.tags] for graph in graphs]
    return next((one for one in tags if not TRAINING_TAGS & {*one}), tags[0])


def _without_training(meta_graph: Proto, request: GraphRequest, path: Path) -> list[str]:
    """Remove training signatures from `meta_graph`, and return notes on them.

    Entries that are not signatures are always removed. If the request names tensors, no signature is removed,
    and there are no notes. UsageError if no signature is left that can be served, or an option does not fit;
    UnknownTensor for the feed of an unknown tensor, GraphError if two nodes have the same name, or one has
    none; CheckpointError if the file of `--signatures` is a pointer of Git LFS, or cannot be fetched from a
    store.
    """
    drop_internal(meta_graph)
    if requested_specs(request) or not meta_graph.signature_def:
        return []
    fixed = parse_feeds(GraphIndex.of(meta_graph), request.feeds)
    notes = drop_training_signatures(meta_graph, fixed)
    if not meta_graph.signature_def and collection_spec(meta_graph) is None:
        raise UsageError(
            f"no signature of {path} can be served",
            cause="; ".join(notes),
            hint="name the tensors: --input NAME=TENSOR --output NAME=TENSOR",
        )
    return notes


def _init_op(meta_graph: Proto) -> str | None:
    """Return the name of the node that a SavedModel's loader runs; None if there is none.

    It is in the pseudo-signature, else in a collection.
    """
    if _INIT_SIGNATURE in meta_graph.signature_def:
        name = meta_graph.signature_def[_INIT_SIGNATURE].outputs[_INIT_SIGNATURE].name
        return endpoint(name).node or None
    for collection in _INIT_COLLECTIONS:
        if collection in meta_graph.collection_def:
            for name in meta_graph.collection_def[collection].node_list.value:
                return endpoint(name).node
    return None


def _assets(meta_graph: Proto, path: Path, trust: Trust) -> dict[str, Path]:
    """Return {node that gets the path: file} for the assets of a SavedModel; all exist and may be read.

    `path` is the SavedModel's directory, and `trust` says which files its graph may read.

    Raises:
        MissingAsset: a file does not exist.
        AccessRefused: the graph may not read it.
        CorruptFile: a name leads out of `assets/`, or the list is damaged.
    """
    said = f"{path} names an asset:"
    directory = path / ASSETS_DIRECTORY
    assets = {name: below(directory, file, said, CorruptFile) for name, file in asset_files(meta_graph)}
    for file in assets.values():
        trust.require_file(file, path)
        if not file.is_file():
            raise MissingAsset(
                f"the SavedModel names the asset {file}, which is not there",
                hint="copy the SavedModel again, with its assets/ directory",
            )
    return assets


def asset_files(meta_graph: Proto) -> list[tuple[str, str]]:
    """Return (node that gets the path, file name under assets/) for each asset.

    The assets of the field `asset_file_def` come first, then the collection's. CorruptFile if the collection
    is damaged.
    """
    assets = [*meta_graph.asset_file_def]
    if "saved_model_assets" in meta_graph.collection_def:
        for item in meta_graph.collection_def["saved_model_assets"].any_list.value:
            try:
                assets.append(protos.AssetFileDef.FromString(item.value))
            except DecodeError as error:
                raise CorruptFile("the SavedModel's list of assets is damaged", cause=str(error)) from error
    return [(endpoint(asset.tensor_info.name).node, asset.filename) for asset in assets]
