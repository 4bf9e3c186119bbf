"""A full export in progress: the values that its steps pass to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct

from exporter.bundle.hot_rows import HotTable
from exporter.bundle.mapped_tables import NOTHING_MAPPED, MappedTables
from exporter.bundle.variables import VariablesReport
from exporter.bundle.warmup import WarmupRequest
from exporter.graph.inference_graph import InferenceGraph
from exporter.mapping.build import VariableMapping
from exporter.pipeline.full_plan import Plan
from exporter.publish.commit import ReservedPosition, Staging, VersionRule
from exporter.publish.manifest import BaseEntry
from exporter.terminal.progress import ProgressFactory
from exporter.wire.server_ops import OLDEST, Version

if TYPE_CHECKING:
    from exporter.pipeline.trainer_state import TrainerState
    from exporter.verify.difference import Difference


class Staged(Struct):
    """A version that is being staged. Steps read fields that earlier ones set, and set fields for later ones.

    `plan` follows the values: its mapping refers to the checkpoint, then to a bundle made from an archive,
    and to indexes of tables. `graph` and `mapping` are the ones to publish: in a base that takes deltas, with
    the incremental subgraph, whose node `counter` counts mapped tables. `jobs` are closed after publication,
    so that until then a second run finds completed tasks. `increments` are those that staged values do not
    include yet. `hot` are the tables with hot rows, by their names as served.
    """

    plan: Plan
    staging: Staging
    jobs: ExitStack
    progress: ProgressFactory
    graph: InferenceGraph
    mapping: VariableMapping
    variables: VariablesReport
    place: VersionRule | ReservedPosition
    step: int | None
    warmup: tuple[WarmupRequest, ...]
    counter: str = ""
    tables: MappedTables = NOTHING_MAPPED
    hot: Mapping[str, HotTable] = {}
    oldest_server: Version = OLDEST
    entry: BaseEntry | None = None
    lineage: str | None = None
    increments: TrainerState | None = None
    differences: tuple[Difference, ...] = ()

    @classmethod
    def of(cls, planned: Plan, staging: Staging, jobs: ExitStack, progress: ProgressFactory) -> Staged:
        """The state before the first step."""
        graph, mapping, step = planned.graph, planned.mapping, planned.catalog.step
        nothing = VariablesReport(mapping.catalog, ())
        return cls(planned, staging, jobs, progress, graph, mapping, nothing, planned.version, step, ())

    @property
    def bundle(self) -> Path:
        """The directory that becomes the version."""
        return self.staging.path

    def scratch(self, name: str) -> Path:
        """A path beside the bundle for files that are removed with the staging."""
        return self.staging.path.with_name(name)


Step: TypeAlias = Callable[[Staged], object]
"""A function that writes into the bundle and sets fields for later steps, or raises."""
