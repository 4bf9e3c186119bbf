"""The document that `inspect` prints of a checkpoint, a graph, a version or a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from exporter.cli.documents import Checkpoint, Tensor, TensorGroup
from exporter.pipeline.inspected import EmbeddingTable, ProposedInput, ServedTableView, Signature, TensorSpec
from exporter.publish.manifest import Origin


class UnmatchedTensor(Tensor, frozen=True):
    """A stored tensor that no variable of the graph takes."""

    owner: str | None
    """The layer or object that it belongs to, where the checkpoint says so."""


class CheckpointInspection(Checkpoint, frozen=True):
    """The document that `inspect` prints of a checkpoint."""

    kind: Literal["checkpoint"]
    """What was inspected."""
    kinds: Mapping[str, TensorGroup]
    """Its tensors by kind: optimizer slots, averages, the global step, other."""
    embeddings: Sequence[EmbeddingTable]
    """Its embedding variables."""
    tensors: Sequence[Tensor] | None
    """Every tensor, with `--tensors`."""


class Proposed(Struct, frozen=True):
    """The document that `init` prints: the options of a first export."""

    checkpoint: str
    """The checkpoint's prefix."""
    model: str | None
    """The graph beside it; null if a builder is needed."""
    inputs: Sequence[ProposedInput]
    """Inputs of a `.meta` without signatures."""
    outputs: Mapping[str, str]
    """Its likeliest answer: a name, and the tensor."""
    signatures: Sequence[str]
    """The signatures that the graph has."""
    builder: str | None
    """The beginning of a builder, where there is no graph, or it cannot be served."""
    command: str
    """The command of the export."""
    easier: str | None
    """The command for a `.keras` archive beside the checkpoint, which needs no builder; null without one."""
    refused: str | None
    """Why the graph beside the checkpoint cannot be served; null if it can, or there is none."""


class GraphInspection(Struct, frozen=True):
    """The document that `inspect` prints of a `.meta` file's graph."""

    kind: Literal["graph"]
    """What was inspected."""
    path: str
    """The file."""
    nodes: int
    """How many nodes the graph has."""
    embedding_variables: Sequence[str]
    """Tables whose rows have arbitrary integers as keys, which it looks up."""
    placeholders: Sequence[TensorSpec]
    """Its placeholders: what `--input` may name."""
    batches: Sequence[TensorSpec]
    """What its input pipeline gives: what `--input` may name, too."""
    likely_outputs: Sequence[TensorSpec]
    """Tensors that look like a model's answers, the most likely first."""
    signatures: Mapping[str, Signature]
    """Signatures that it has of its own."""
    feeds: Mapping[str, Sequence[str]]
    """The variables that each of these tensors is first used with."""
    tensors: Sequence[TensorSpec] | None
    """Every tensor, with `--tensors`."""


class VersionInspection(Struct, frozen=True):
    """The document that `inspect` prints of a version, or of any SavedModel."""

    kind: Literal["saved_model"]
    """What was inspected."""
    path: str
    """Its directory."""
    position: int | None
    """Its position; null if it has no manifest."""
    step: int | None
    """The training step of its values."""
    source: Origin | None
    """What it was exported from; null if it has no manifest."""
    variables: Checkpoint | None
    """Its variables."""
    signatures: Mapping[str, Signature]
    """Its signatures, by name."""
    tables: Sequence[ServedTableView]
    """Its dynamic tables, as its variables hold them."""
    mapped: str | None
    """`mapped`, of a copy ` from ` the original, or `restored: ` and why; null: not made for it."""
    oldest_server: str | None
    """The oldest TensorFlow whose servers load it; null: it has no graph."""
    opened_batch: int | None
    """Training's batch size, if an experiment made its numbers follow each request; null: it did not."""
    tensors: Sequence[Tensor] | None
    """Every variable, with `--tensors`."""


class ModelInspection(Struct, frozen=True):
    """The document that `inspect` prints of a model base path."""

    kind: Literal["model"]
    """What was inspected."""
    path: str
    """The model base path."""
    position: int | None
    """The newest position."""
    step: int | None
    """The training step of its values."""
    hold: int | None
    """The position at which the model is held."""
    tables: Sequence[ServedTableView]
    """Its dynamic tables at the newest position, if it takes deltas."""
    versions: Sequence[VersionInspection]
    """Its versions, the newest first."""


class UnmatchedVariable(Struct, frozen=True):
    """A variable of the graph that no tensor of the checkpoint is certain to be."""

    name: str
    """Its name."""
    dtype: str
    """Its type."""
    shape: Sequence[int]
    """Its shape."""
    candidates: Sequence[str]
    """Left-over tensors of the same shape and type."""


class NameComparison(Struct, frozen=True):
    """The document that `inspect --unmatched` prints."""

    checkpoint: Checkpoint
    """What was compared."""
    graph: str
    """With which graph."""
    matched: int
    """How many variables have a tensor."""
    reason: str | None
    """Why the others have none."""
    variables: Sequence[UnmatchedVariable]
    """Variables without a tensor."""
    tensors: Sequence[UnmatchedTensor]
    """Tensors without a variable."""
    table: Sequence[str]
    """The beginning of a table for `--rename`, one line each."""


Inspection: TypeAlias = CheckpointInspection | GraphInspection | VersionInspection | ModelInspection
"""The document that `inspect` prints without `--unmatched`."""
