"""Read the two sides that an export brings together: the checkpoint and the graph."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog
from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.families import model_beside
from exporter.checkpoint.identity import Identity
from exporter.errors import MissingTensors, ObjectMismatch
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.load import GraphSource, SourceGraph, clean, load_source, nothing_to_serve
from exporter.graph.origin import GraphOrigin
from exporter.graph.source_graph import GraphRequest
from exporter.graph.sources import find_builder
from exporter.graph.user_errors import keras_choice
from exporter.mapping.mapping_rules import MappingRules, parse_rules, read_renames
from exporter.mapping.unmatched import Unmatched
from exporter.options import ExportRequest
from exporter.pipeline.table_layout import unmatched_with
from exporter.pipeline.trainer_graph import with_trained


class Both(Struct, frozen=True):
    """A checkpoint, a graph, and the rules by which the graph's variables get the checkpoint's values."""

    catalog: Catalog
    checkpoint: Identity
    source: SourceGraph
    graph: InferenceGraph
    rules: MappingRules
    origin: GraphOrigin | None


def read_both(
    request: ExportRequest,
    rules: MappingRules,
    catalog: Catalog,
    checkpoint: Identity,
    load: GraphSource = load_source,
) -> Both:
    """Read the graph that a request names, else the graph beside the checkpoint, and complete the rules.

    `catalog` and `checkpoint` are the checkpoint and its identity, which the result repeats; `load` reads the
    graph. `rules` are completed by the partition strategies of the trainer's graph and the request's file of
    names; `origin`, the record of the graph's files, is None unless the request is for a base that takes
    deltas.

    Raises:
        UsageError, GraphError: and subclasses: the graph cannot be found, or does not fit the request.
        UsageError: the file of names is malformed, or has a name that graph or checkpoint lack.
        CheckpointError: the graph's file, or the checkpoint's record of embedding variables, is damaged.
        TensorFlowNeeded: the model is a builder, and no TensorFlow is installed.
    """
    asked = GraphRequest.of(request, model_beside(catalog.prefix), catalog.naming)
    if asked.model is None:
        raise nothing_to_serve(request.ckpt_dir)
    # Before loading, so that files edited meanwhile are refused later, not taken for the loaded ones.
    origin = GraphOrigin.of(asked, is_beside=asked.is_found) if request.updates else None
    source = load(asked)
    if origin is not None:
        # Files in the trainer's directory differ for each checkpoint; their values are exported anyway.
        source = replace(source, code=source.code.without_files_of(catalog.prefix.parent))
        origin = origin.with_code(source.code)
    graph = clean(source)
    rules = with_trained(rules, catalog, source)
    if request.rename_file:
        table = read_renames(request.rename_file)
        table.check(graph, catalog)
        rules = replace(rules, renames=(*rules.renames, *table.rules))
    return Both(catalog, checkpoint, source, graph, rules, origin)


@contextmanager
def advised(request: ExportRequest, catalog: Catalog) -> Iterator[None]:
    """Run the block; extend the hint of its MissingTensors or ObjectMismatch if Keras 2 should be used.

    That is so if the checkpoint is of Keras 2, and the request's model is a builder that uses Keras 3. Every
    error of the block is raised. BuilderError instead if the builder's file no longer exists.
    """
    try:
        yield
    except (MissingTensors, ObjectMismatch) as error:
        if catalog.family.startswith("Keras 2 ") and (hint := keras_choice(True, _builder_files(request))):
            error.hint = f"the checkpoint is of Keras 2: {hint}; or {error.hint}"
        raise


def _builder_files(request: ExportRequest) -> list[str]:
    """Return the path of the source file of a request's builder, in a list; [] if the model is not a builder.

    [] also for a builder whose module has no file. The path is "" for a function whose file is not known.
    Raises BuilderError if a named file or module does not exist, TensorFlowNeeded if the module is of
    TensorFlow, which is not installed.
    """
    model = request.model
    if callable(model):
        return [inspect.getsourcefile(inspect.unwrap(model)) or ""]
    file = find_builder(model.rpartition(":")[0]) if model and ":" in model else None
    return [] if file is None else [str(file.path)]


class Unmatchable(Struct, frozen=True):
    """A checkpoint and a graph, and the variables and tensors that no rule matches."""

    catalog: Catalog
    graph: InferenceGraph
    unmatched: Unmatched


def compare_names(request: ExportRequest) -> Unmatchable:
    """Return the variables and tensors that an export of this request would not match; write nothing.

    Checkpoint and graph are read, and a builder runs.

    Raises:
        UsageError, CheckpointError, GraphError, MappingError: and subclasses, see errors.py.
        TensorFlowNeeded: the model is a builder, and no TensorFlow is installed.
    """
    rules, catalog = parse_rules(request), open_checkpoint(request.ckpt_dir)
    found = read_both(request, rules, catalog, Identity.of(catalog))
    left = unmatched_with(found.graph, found.catalog, found.rules)
    return Unmatchable(found.catalog, found.graph, left)
