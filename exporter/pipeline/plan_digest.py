"""Digest a plan: everything but the checkpoint's values that decides what a version is.

Two exports of one checkpoint by plans of one digest publish the same version. Whoever changes an option, a
graph, a vocabulary or a file of warm-up requests gets another digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from exporter.bundle.warmup_requests import WarmupRequest
from exporter.errors import MissingAsset
from exporter.graph.graph_digest import graph_digest
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.training_graph import TrainingGraph
from exporter.mapping.build import VariableMapping
from exporter.options import ExportRequest


def plan_digest(
    request: ExportRequest,
    graph: InferenceGraph,
    mapping: VariableMapping,
    warmup: Iterable[WarmupRequest],
    training: TrainingGraph | None,
) -> str:
    """A lower-case SHA-256.

    Raises:
        MissingAsset: a file of the graph's tables is gone.
    """
    told: dict[str, object] = {
        "graph": _graph(graph),
        "assets": [[asset.file_name, _file(asset.source)] for asset in graph.assets],
        "variables": [
            [s.key, s.tensor.name, s.dtype.label, s.gather_parts, s.scatter_parts] for s in mapping.sources
        ],
        "training": None if training is None else [training.tag, _proto(training.meta_graph)],
        "warmup": [hashlib.sha256(line.record).hexdigest() for line in warmup],
        "no_warmup": request.no_warmup,
        "updates": None if request.updates is None else asdict(request.updates),
        "format": request.format.value,
        "data": request.data.value,
        "verify": request.verify.value,
    }
    if request.min_freq or request.max_age_steps is not None:
        told["admission"] = [request.min_freq, request.max_age_steps]
    if graph.dynamic_tables:
        tables = {variable.key for table in graph.dynamic_tables for variable in table.variables}
        told["tables"] = [[s.key, s.tensor.shape] for s in mapping.sources if s.key in tables]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _graph(graph: InferenceGraph) -> str:
    """Functions are called otherwise each time that a builder runs; without any, the bytes tell."""
    if graph.meta_graph.graph_def.library.function:
        return graph_digest(graph)
    return _proto(graph.meta_graph)


def _proto(message: Any) -> str:
    return hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()


def _file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise MissingAsset(f"{path} cannot be read", cause=error.strerror or str(error)) from error
