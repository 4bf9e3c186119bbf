"""Begin a new log at the newest of the trainer's increments, where a full checkpoint would lead servers back.

A base is of a full checkpoint, whose bytes are linked, and its first delta brings the increments. But servers
answer by a base before that delta is there, and where the log before led them further than the checkpoint,
they would go back to it. There the increments are laid over the staged variables, which are written anew.

Write the variables of a base anew, with a trainer's increments laid over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from msgspec import Struct

from exporter.bundle.variables import ShardOrigin, ShardReport, VariablesReport
from exporter.catalog import Catalog
from exporter.checkpoint.tensor_bundle import BundleWriter, read_catalog
from exporter.delta.format import ChangeKind, Schema, ServedVariable
from exporter.delta.row_reader import served_in
from exporter.delta.snapshot import Array, Snapshot
from exporter.errors import CheckpointError, ManifestError, NotUpdatable
from exporter.files import writing
from exporter.graph.inference_graph import InferenceGraph
from exporter.increments.trained import TrainerVersion
from exporter.layout import VARIABLES_DIRECTORY, VARIABLES_PREFIX
from exporter.mapping.build import VariableMapping
from exporter.mapping.mapping_spec import MappingSpec
from exporter.pipeline.table_deltas import told_changes
from exporter.pipeline.trainer_state import TrainerState, read_trainer
from exporter.pipeline.updatable import as_served
from exporter.publish.delta_log import read_log
from exporter.publish.manifest import BaseEntry
from exporter.subgraph.make_updatable import schema_of
from exporter.verify.version_files import verify_bytes

_CHUNK_BYTES = 4 << 20


def write_merged(mapping_spec: MappingSpec, schema: Schema, state: Snapshot, bundle: Path) -> None:
    """Write `variables/` of a bundle with the values of a state, which the caller has checked.

    Raises:
        CheckpointError: a value that is read as a whole is damaged, or a file changed.
        OSError: it cannot be written.
    """
    prefix = bundle / VARIABLES_PREFIX
    prefix.parent.mkdir()
    variables = {variable.name: variable for variable in schema.variables}
    with BundleWriter(prefix) as writer:
        for source in mapping_spec.sources():
            if not source.variables:  # the keys or values of a lookup table
                writer.add(source.key, state.whole(source.key))
            for part in source.variables:
                variable = variables[part.served_name]
                if variable.kind is ChangeKind.DENSE:
                    writer.add(source.key, state.whole(variable.name), part.part)
                else:
                    rows = row_blocks(state, variable)
                    writer.add_chunks(source.key, variable.dtype, variable.shape, rows, part.part)


def row_blocks(state: Snapshot, variable: ServedVariable) -> Iterator[Array]:
    """The rows of a table, a bounded number at a time."""
    row_bytes = max(1, int(np.prod(variable.shape[1:])) * variable.dtype.numpy.itemsize)
    step = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(0, variable.shape[0], step):
        yield state.rows(variable.name, start, min(start + step, variable.shape[0]))


class BaseState(Struct, frozen=True):
    """The trainer's state that a base begins with; `increments` are not in its staged variables yet."""

    trained: TrainerVersion
    step: int | None
    increments: TrainerState | None = None


def newest_state(
    model: Path,
    full: BaseState,
    prefix: Path,
    graph: InferenceGraph,
    mapping: VariableMapping,
    mapping_spec: MappingSpec,
) -> BaseState:
    """The state of a checkpoint with the increments since, if more than the checkpoint is served.

    Raises:
        CheckpointError: an increment is damaged.
        SchemaChanged: one holds a variable of another shape or dtype than the checkpoint.
    """
    if full.step is None or (_served_step(model) or 0) <= full.step:
        return full
    schema = schema_of(as_served(graph, mapping)[0])
    trainer = read_trainer(prefix, mapping_spec, schema, full.trained)
    plan = trainer.plan
    if not plan.is_known or not plan.increments or plan.target.checkpoint != full.trained.checkpoint:
        return full
    return BaseState(plan.target, plan.step, trainer)


def lay_increments_over(
    entry: BaseEntry, trainer: TrainerState, bundle: Path, scratch: Path
) -> VariablesReport:
    """Write the staged variables of a base once more, with the trainer's increments laid over them.

    Memory is bounded; what was staged goes to `scratch`.

    Raises:
        CheckpointError: a file is damaged or changed.
        TableFull: more keys came than the tables were laid out for.
        PublishError: the target cannot be written; DiskFull if there is no space.
    """
    before = scratch / "full"
    with writing(bundle):
        before.mkdir()
        (bundle / VARIABLES_DIRECTORY).rename(before / VARIABLES_DIRECTORY)
    staged = read_catalog(before / VARIABLES_PREFIX)
    verify_bytes(staged)
    spec, schema = entry.mapping_spec, entry.schema
    stored = {found.name: found for source in spec.sources() for found in served_in(staged, source)}
    told = told_changes(spec, schema, Snapshot(stored), trainer, None)
    state = Snapshot(stored, (*trainer.layers(), told))
    with writing(bundle):
        write_merged(spec, schema, state, bundle)
    return _report(read_catalog(bundle / VARIABLES_PREFIX))


def _report(written: Catalog) -> VariablesReport:
    why = "increments laid over the checkpoint"
    sizes = zip(written.shards, written.shard_sizes, strict=True)
    shards = (ShardReport(path, None, ShardOrigin.REWRITTEN, why, size) for path, size in sizes)
    return VariablesReport(written, tuple(shards))


def _served_step(model: Path) -> int | None:
    with suppress(NotUpdatable, ManifestError, CheckpointError):
        return read_log(model).at.step
    return None
