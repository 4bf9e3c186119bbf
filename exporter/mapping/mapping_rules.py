"""The rules that variables are mapped to tensors by, and how they are parsed."""

from __future__ import annotations

import re
from collections.abc import Mapping as MappingOf

from msgspec import Struct, field

from exporter.checkpoint.admission import Admission
from exporter.errors import AmbiguousRename, UsageError
from exporter.graph.inference_graph import PartitionStrategy
from exporter.options import ExportRequest
from exporter.wire.dtypes import DType

_RENAME_EXAMPLE = r"a regular expression and a tensor's name: --rename 'tower/(.*)=ranker/\1'"


class RenameRule(Struct, frozen=True):
    r"""A regular expression for a whole variable name, and the tensor name it stands for (`\1`: a group)."""

    pattern: re.Pattern[str]
    replacement: str

    @classmethod
    def parse(cls, text: str) -> RenameRule:
        r"""Read `pattern=replacement`, split at the last `=`.

        Raises:
            UsageError: no `=`, or the pattern or the replacement is not a regular expression's.
        """
        pattern, equals, replacement = text.rpartition("=")
        if not equals or not pattern or not replacement:
            raise UsageError(f"rename rule {text!r} is not of the form PATTERN=NAME", hint=_RENAME_EXAMPLE)
        try:
            compiled = re.compile(pattern)
            compiled.sub(replacement, "")
        except (re.error, IndexError) as error:
            raise UsageError(
                f"rename rule {text!r} does not parse", cause=str(error), hint=_RENAME_EXAMPLE
            ) from error
        return cls(compiled, replacement)

    def apply(self, name: str) -> str | None:
        """The tensor name for a variable, None if the rule is not about it."""
        match = self.pattern.fullmatch(name)
        return match.expand(self.replacement) if match else None


class CastRule(Struct, frozen=True):
    """Variables whose whole name matches are stored as `dtype`."""

    pattern: re.Pattern[str]
    dtype: DType

    @classmethod
    def parse(cls, text: str) -> CastRule:
        """Read `pattern=bfloat16`, or `bfloat16` for every floating variable.

        Raises:
            UsageError: another dtype, or the pattern is not a regular expression.
        """
        pattern, _, label = text.rpartition("=")
        if label not in ("bfloat16", "float16"):
            raise UsageError(
                f"--cast {text!r}: expected bfloat16 or float16, found {label!r}",
                hint="--cast 'embedding.*=bfloat16'",
            )
        try:
            return cls(re.compile(pattern or ".*"), DType.of(label))
        except re.error as error:
            raise UsageError(f"--cast {text!r}: not a regular expression", cause=str(error)) from error


class MappingRules(Struct, frozen=True):
    """What the user says about names and layouts.

    `average` is the slot name of moving averages to serve in place of raw weights, "ema" standing for
    TensorFlow's own. `by_order` says that a list of values without names is in the order of the graph's
    variables. `strategies` says how tables were looked up in training where the user knows it;
    `trained` what the trainer's own graph tells. `object_path` leads to the served model in an object-based
    checkpoint; `tensors` names the tensor of a variable by its key where that was found out before, among the
    objects of another checkpoint of the same trainer. `admission` says which keys of tables are served.
    """

    renames: tuple[RenameRule, ...] = ()
    average: str | None = None
    casts: tuple[CastRule, ...] = ()
    by_order: bool = False
    strategies: MappingOf[str, PartitionStrategy] = field(default_factory=dict)
    trained: MappingOf[str, PartitionStrategy] = field(default_factory=dict)
    object_path: str | None = None
    tensors: MappingOf[str, str] = field(default_factory=dict)
    admission: Admission = Admission()

    def renamed(self, key: str) -> str | None:
        """The tensor name that the rename rules give a variable, None if none is about it.

        Raises:
            AmbiguousRename: two rules disagree.
        """
        names = {new for rule in self.renames if (new := rule.apply(key)) is not None}
        if len(names) > 1:
            raise AmbiguousRename(
                f"variable {key!r}: rename rules disagree: {', '.join(sorted(map(repr, names)))}"
            )
        return names.pop() if names else None


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
