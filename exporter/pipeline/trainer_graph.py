"""The trainer's graph beside a checkpoint: to serve it, to keep it, or to learn how it partitions tables."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from exporter.catalog import Catalog
from exporter.checkpoint.families import is_archive, meta_beside, model_beside, saved_model_around
from exporter.checkpoint.tensor_bundle import OBJECT_GRAPH
from exporter.errors import CheckpointNotFound, UsageError
from exporter.graph.graph_files import SERVE_TAG, read_saved_model
from exporter.graph.inference_graph import PartitionStrategy
from exporter.graph.keys import trained_strategies, variable_keys
from exporter.graph.metagraph import is_autodist, read_metagraph
from exporter.graph.nodes import GraphIndex
from exporter.graph.saved_model import load_training_graph
from exporter.graph.source_graph import GraphRequest, SourceGraph
from exporter.graph.training_graph import TrainingGraph
from exporter.mapping.mapping_rules import MappingRules
from exporter.options import ExportFormat, ExportRequest
from exporter.storage.layout import is_saved_model
from exporter.tables.parts import INDEX_SEEDS, PARTS
from exporter.wire.protos import Proto


def require_graph(request: ExportRequest, catalog: Catalog) -> None:
    """Raise CheckpointNotFound if the graph beside a checkpoint is to be served, and does not exist yet.

    A Saver writes it last, so that a watch waits for it. That is not raised for archives and object-based
    checkpoints, beside which there is never a graph: planning reports it. Another CheckpointError if an
    archive beside the checkpoint, which may describe the model, is damaged.
    """
    if request.model is not None or is_archive(catalog.prefix) or OBJECT_GRAPH in catalog.tensors:
        return
    if model_beside(prefix := catalog.prefix) is None:
        raise CheckpointNotFound(f"there is no {prefix.name}.meta beside {prefix}, and no --model")


def with_trained(rules: MappingRules, catalog: Catalog, source: SourceGraph) -> MappingRules:
    """Return the rules with the partition strategies of the trainer's graph, if it is beside the checkpoint.

    `source` is the loaded graph, which may be the trainer's. The trainer's graph is read only if the
    checkpoint has tensors in slices; without it the result has no strategies. AutoDist partitions variables
    that are whole in its user's program, by ranges of rows. A SavedModel's own `variables/` also has
    variables that are whole in its graph partitioned by ranges of rows; so are tables by keys, which its
    graph may have joined.

    Raises CorruptFile or GraphError if the trainer's graph is damaged, LfsPointer or UnsupportedFormat if it
    is another kind of file, UsageError if it cannot be opened.
    """
    sliced = {name for name, ref in catalog.tensors.items() if ref.slices}
    meta, saved_model = meta_beside(catalog.prefix), saved_model_around(catalog.prefix)
    by_ranges: set[str] = set()
    trainers: list[Proto] = []
    if sliced and meta.exists():
        trainers = [source.meta_graph if source.label == str(meta) else read_metagraph(meta)]
        by_ranges = sliced if is_autodist(trainers[0]) else set()
    elif sliced and saved_model is not None:
        trainers = [*read_saved_model(saved_model).meta_graphs]
        by_ranges = {key for graph in trainers for key in _whole(graph)} | _of_tables(catalog)
    trained = dict.fromkeys(by_ranges, PartitionStrategy.DIV)
    for graph in trainers:
        trained |= trained_strategies(graph)
    return replace(rules, trained=trained)


def _whole(meta_graph: Proto) -> set[str]:
    """Return the checkpoint keys of the variables that a graph has unpartitioned."""
    keys = variable_keys(meta_graph, GraphIndex.of(meta_graph)).values()
    return {key.key for key in keys if key.part is None}


def _of_tables(catalog: Catalog) -> set[str]:
    """Return the names of the variables of dynamic tables in a published version."""
    firsts = [name for name in catalog.tensors if name.endswith(f"/{INDEX_SEEDS}")]
    return {f"{name.removesuffix(INDEX_SEEDS)}{part}" for name in firsts for part in PARTS}


def training_graph(request: ExportRequest, catalog: Catalog) -> TrainingGraph | None:
    """Return the graph of `--train-tag` in the source SavedModel; None without the option.

    Raises UsageError if there is no SavedModel or tag, the tag is the serving graph's own (`serve`), or the
    option is used with deltas or `--format metagraph`; AccessRefused, CheckpointError or GraphError if the
    graph may not or cannot be loaded.
    """
    if request.train_tag is None:
        return None
    if SERVE_TAG in request.train_tag.split(","):
        raise UsageError(f"--train-tag {request.train_tag}: this tag is the serving graph's own")
    if request.updates or request.format is ExportFormat.METAGRAPH:
        raise UsageError(
            "--train-tag keeps a graph in a SavedModel that does not change",
            hint="leave out --incr, --new-base and --format metagraph",
        )
    named = Path(request.model) if isinstance(request.model, str) else None
    path = named if named is not None and is_saved_model(named) else saved_model_around(catalog.prefix)
    if path is None:
        raise UsageError(
            f"--train-tag {request.train_tag}: neither the model nor the checkpoint is a SavedModel",
            hint="name the trainer's SavedModel with --model, or with --ckpt-dir",
        )
    return load_training_graph(path, request.train_tag, GraphRequest.of(request).trust)
