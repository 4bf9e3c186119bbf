"""Merge a base and its deltas into a new base of the same log.

The graph stays; only the position that its variables begin with is another. Servers load the new base
beside the old one; deltas that lead on from its position fit both.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.delta.spans import Position
from exporter.errors import CorruptFile, ManifestError
from exporter.files import copy_file, writing
from exporter.graph.saved_model import read_saved_model
from exporter.layout import (
    ASSETS_DIRECTORY,
    EXTRA_DIRECTORY,
    SAVED_MODEL_FILE,
    UPDATABLE_FILE,
    VARIABLES_PREFIX,
)
from exporter.options import Jobs
from exporter.pipeline.given_up import past_given_up, position_of_merger
from exporter.pipeline.log_maintenance import LOCALLY
from exporter.pipeline.merge_runner import runner_for
from exporter.pipeline.merged_base import BaseMerger
from exporter.pipeline.undisturbed import undisturbed
from exporter.progress import ProgressFactory, no_progress
from exporter.publish.commit import Published, ReservedPosition, Staging, publish_version
from exporter.publish.delta_log import BROKEN_LOG_HINT, DeltaLog, LogBase, LogDelta
from exporter.publish.manifest import ManifestDraft, tensor_entries
from exporter.publish.permission import Permission
from exporter.subgraph.make_updatable import UPDATE_SIGNATURE
from exporter.verify.version_files import verify_bytes, verify_files
from exporter.version import __version__
from exporter.wire import tensor_proto
from exporter.wire.protos import Proto

FIRST_POSITION = "first_position"
"""The constant of the incremental subgraph that holds position and step of its base, and -1."""


class Rebased(Struct, frozen=True):
    """The new base, how many deltas it holds, and how many tasks wrote it."""

    published: Published
    deltas: int
    tasks: int


class Rebasing(Struct, frozen=True):
    """A new base as it is planned: its place, where it stands, the deltas that it will hold, and tasks."""

    path: Path
    at: Position
    deltas: int
    tasks: int


def plan_rebase(model: Path, *, despite_hold: bool = False, jobs: Jobs = LOCALLY) -> Rebasing | None:
    """What `rebase` would do now; the deltas are read and checked, the base's values are not.

    Raises:
        ModelHeld, CheckpointError, PositionMoved: as `rebase`.
    """
    Permission(despite_hold).check(model, takes_deltas=True)

    def plan(log: DeltaLog) -> Rebasing | None:
        at = _newest_approved(log).at
        if log.base.at.position >= at.position:
            return None
        log.state(at.position)
        chain = log.chain(log.base.at.position, at.position)
        position = position_of_merger(log, model / str(at.position)) if at == log.at else at.position
        path, deltas = model / str(position), len(chain) + (position != at.position)
        tasks = _merger(log, chain, path, jobs).tasks
        return Rebasing(path, Position(position, at.step), deltas, tasks)

    return undisturbed(model, plan)


def rebase(
    model: Path,
    *,
    keep: int | None = None,
    despite_hold: bool = False,
    jobs: Jobs = LOCALLY,
    progress: ProgressFactory = no_progress,
) -> Rebased | None:
    """Publish a base at the newest position of the log; None if the newest base stands there already.

    Deltas that are published meanwhile lead on from it. Servers load a base by themselves: under a canary's
    hold it stands at what is approved.

    Raises:
        ModelHeld: the model is held, unless `despite_hold`.
        VerificationError: the old base is damaged.
        CheckpointError: a delta is damaged.
        PositionMoved, PublishError: see errors.py; nothing was published.
    """
    permission = Permission(despite_hold)
    permission.check(model, takes_deltas=True)
    return undisturbed(model, lambda log: _rebase(log, keep, permission, jobs, progress))


def _rebase(
    log: DeltaLog,
    keep: int | None,
    permission: Permission,
    jobs: Jobs = LOCALLY,
    progress: ProgressFactory = no_progress,
) -> Rebased | None:
    model, base, newest = log.model, log.base, _newest_approved(log)
    if base.at.position >= newest.at.position:
        return None
    if newest.at == log.at:
        log = past_given_up(log, model / str(newest.at.position))
        newest = _newest_approved(log)
    at, trained = newest.at, newest.entry.trained
    chain = log.chain(base.at.position, at.position)
    with Staging(model) as staging, writing(staging.path), ExitStack() as stack:
        merger = _merger(log, chain, staging.path, jobs)
        with progress("merging", merger.bytes_) as bar:
            try:
                runner = runner_for(jobs, model, merger.tasks)
                merger.write(stack, runner, lambda: log.state(at.position), bar)
            except CorruptFile:
                verify_bytes(read_catalog(base.path / VARIABLES_PREFIX))  # says what is wrong with a base
                raise
        _copy_graph(base.path, staging.path, at.position, at.step or 0)
        catalog = read_catalog(staging.path / VARIABLES_PREFIX)
        verify_files(staging.path, tensor_entries(catalog))
        draft = ManifestDraft(
            tensors=tensor_entries(catalog),
            # It holds what increments made of that checkpoint: no checkpoint has these contents.
            source=replace(base.manifest.source, checkpoint=trained.checkpoint.name, digest=None),
            exporter=__version__,
            step=at.step,
            lineage=log.lineage,
            incremental=replace(base.entry, trained=trained, state=newest.manifest.state_id),
        )
        place = ReservedPosition(at.position, last=at.position, is_passed=True)
        published = publish_version(staging, draft, place, keep=keep, permission=permission)
        return Rebased(published, len(chain), merger.tasks)


def _merger(log: DeltaLog, chain: Sequence[LogDelta], bundle: Path, jobs: Jobs) -> BaseMerger:
    """What writes the variables of the log's base with deltas laid over them."""
    return BaseMerger(
        bundle,
        log.base.entry.mapping_spec,
        log.schema,
        log.base.stored(),
        [log.tensors(delta) for delta in chain],
        task_bytes=jobs.task_bytes,
        hint=BROKEN_LOG_HINT,
    )


def _newest_approved(log: DeltaLog) -> LogBase | LogDelta:
    """What leads to the newest position that no canary has yet to approve."""
    approved = log.approved
    return log.newest if approved is None or approved >= log.at.position else log.standing(approved)


def _copy_graph(base: Path, bundle: Path, position: int, step: int) -> None:
    """Everything of a base but its variables, at another position."""
    saved_model = read_saved_model(base)
    constant = _first_position(saved_model)
    if constant is None:
        raise ManifestError(f"{base / SAVED_MODEL_FILE} has no incremental subgraph that this program knows")
    first = tensor_proto.to_array(constant.attr["value"].tensor)
    moved = np.array([position, step, *first.tolist()[2:]], np.int64)
    constant.attr["value"].tensor.Clear()
    tensor_proto.fill(constant.attr["value"].tensor, moved)
    (bundle / SAVED_MODEL_FILE).write_bytes(saved_model.SerializeToString(deterministic=True))
    for directory in (ASSETS_DIRECTORY, EXTRA_DIRECTORY):
        if (base / directory).is_dir():
            shutil.copytree(base / directory, bundle / directory, copy_function=copy_file)
    description = json.loads((bundle / UPDATABLE_FILE).read_text())
    description |= {"position": position, "step": step}
    (bundle / UPDATABLE_FILE).write_text(json.dumps(description) + "\n")


def _first_position(saved_model: Proto) -> Proto | None:
    """The node that holds the base's position: in the scope of the update signature, whatever that is called.

    The subgraph gets another scope where the user's own model has one called `incremental`.
    """
    for meta_graph in saved_model.meta_graphs:
        signature = meta_graph.signature_def.get(UPDATE_SIGNATURE)
        scopes = {info.name.partition("/")[0] for info in signature.outputs.values()} if signature else set()
        for node in meta_graph.graph_def.node:
            if node.op == "Const" and node.name in {f"{scope}/{FIRST_POSITION}" for scope in scopes}:
                return node
    return None
