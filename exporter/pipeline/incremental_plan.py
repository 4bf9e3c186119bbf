"""Incremental exports, planned: what is published, what the trainer has, and what leads there."""

from __future__ import annotations

from typing import TypedDict

from msgspec import Struct, field
from msgspec.structs import replace

from exporter.delta.snapshot import Changes
from exporter.delta.spans import Span
from exporter.delta.tolerance import Tolerance, load_residual
from exporter.increments.trained import TrainerVersion
from exporter.layout import CACHES_DIRECTORY
from exporter.mapping.mapping_rules import MappingRules, parse_rules, read_renames
from exporter.options import ExportRequest
from exporter.pipeline.same_graph import SameGraph, check_same_graph
from exporter.pipeline.trainer_state import TrainerState, read_trainer
from exporter.publish.commit import next_delta_position
from exporter.publish.delta_log import DeltaLog, read_log


class IncrementalPlan(Struct, frozen=True):
    """What an incremental export will do; `position` is where the log will stand.

    `remembered` are rows that were left out so far: what is published and they are what the trainer had.
    `lookups` are the contents of lookup tables that the increments do not tell of.
    """

    request: ExportRequest
    log: DeltaLog
    trainer: TrainerState
    position: int
    remembered: Changes = field(default_factory=dict)
    graph: SameGraph = field(default_factory=SameGraph)
    lookups: Changes = field(default_factory=dict)

    @property
    def is_nothing(self) -> bool:
        """True if the newest of the trainer's states is published."""
        return self.trainer.plan.is_nothing and not self.lookups

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know about the deltas of this log, and of one that leads back."""
        return (*self.log.schema.notes, *([self.goes_back] if self.goes_back else []))

    @property
    def goes_back(self) -> str:
        """Which step takes the place of which later one; empty if the model goes on."""
        step, published = self.trainer.plan.step, self.log.at.step
        is_back = not self.is_nothing and self.trainer.catalog.step is not None and step < (published or 0)
        return f"the model goes back from step {published}, which is published, to step {step}" * is_back

    @property
    def span(self) -> Span:
        """The positions between which the next delta leads."""
        return Span(self.log.at.position, self.position)

    @property
    def allowed(self) -> Tolerance:
        """How far what is served may be from what the trainer has."""
        return Tolerance(self.request.min_change, self.request.delta_dtype)


def plan_incremental(
    request: ExportRequest, *, is_watching: bool = False, marker_seconds: float = 0.0
) -> IncrementalPlan:
    """Find the newest position under the target and what leads there from the trainer's files.

    A watch waits for the increment after a full checkpoint, instead of comparing. For `marker_seconds` from
    its first look at a full checkpoint the plan says if the trainer's hook may still mark it.

    Raises:
        NotUpdatable: nothing is published that takes deltas.
        SchemaChanged: the checkpoint, or the rules of the request, do not fit what is published.
        CheckpointError, ManifestError: see errors.py.
    """
    log = read_log(request.out)
    entry = log.base.entry
    entry.mapping_spec.check_rules(_rules(request))
    entry.check_updates(request.updates)
    bound = request.min_change
    published = log.trained.exact_but_for(request.delta_dtype)
    remembered = _remembered(log, published, bound)
    published = replace(published, left_out=None) if remembered else published
    trainer = read_trainer(
        request.ckpt_dir,
        entry.mapping_spec,
        log.schema,
        published,
        bound,
        is_watching=is_watching,
        marker_seconds=marker_seconds,
    )
    lookups = trainer.changed_lookups(log)
    # A watch goes on while the next model is being prepared; only a delta must be of the same graph.
    is_idle = is_watching and trainer.plan.is_nothing and not lookups
    graph = SameGraph() if is_idle else check_same_graph(log, request, trainer.catalog)
    last = log.at.position
    step = None if trainer.catalog.step is None else trainer.plan.step
    position = next_delta_position(request.out, step, last)
    return IncrementalPlan(request, log, trainer, position, remembered, graph, lookups)


class StateKey(TypedDict):
    """What caches of a log's newest state are found by."""

    lineage: str
    position: int
    state: str


def state_of(log: DeltaLog) -> StateKey:
    """The key of a log's newest state."""
    return {"lineage": log.lineage, "position": log.at.position, "state": log.newest.manifest.state_id}


def _rules(request: ExportRequest) -> MappingRules:
    """All rules that a request gives, as the base has them."""
    rules = parse_rules(request)
    if request.rename_file is None:
        return rules
    return replace(rules, renames=(*rules.renames, *read_renames(request.rename_file).rules))


def _remembered(log: DeltaLog, published: TrainerVersion, bound: float) -> Changes:
    """Rows that may stay behind further; none if some may not: then everything is compared."""
    if published.left_out is None or not published.is_within(bound):
        return {}
    return load_residual(log.path / CACHES_DIRECTORY, log.schema, **state_of(log)) or {}
