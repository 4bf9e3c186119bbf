"""Parse the rules about names and layouts that a request gives."""

from __future__ import annotations

from exporter.checkpoint.admission import Admission
from exporter.errors import UsageError
from exporter.graph.inference_graph import PartitionStrategy
from exporter.mapping.build import CastRule, MappingRules, RenameRule
from exporter.options import ExportRequest


def parse_rules(request: ExportRequest) -> MappingRules:
    """The rules about names and layouts in a request.

    Raises:
        UsageError: a rule does not parse, or a number is negative.
    """
    strategies = {}
    for name, text in request.partition_strategies.items():
        if text not in (PartitionStrategy.MOD.value, PartitionStrategy.DIV.value):
            raise UsageError(f"--partition-strategy {name}={text}: expected mod or div")
        strategies[name] = PartitionStrategy(text)
    for option, count in (("--min-freq", request.min_freq), ("--max-age-steps", request.max_age_steps)):
        if count is not None and count < 0:
            raise UsageError(f"{option} {count}: expected 0 or more")
    return MappingRules(
        renames=tuple(map(RenameRule.parse, request.renames)),
        average=request.average,
        by_order=request.by_order,
        casts=tuple(map(CastRule.parse, request.casts)),
        strategies=strategies,
        object_path=request.object_path,
        admission=Admission(request.min_freq, request.max_age_steps),
    )
