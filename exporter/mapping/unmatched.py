"""The variables and tensors that no rule matches, side by side, to begin a table of names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, ExtraKind, TensorRef
from exporter.errors import MappingError
from exporter.graph.inference_graph import GraphVariable, InferenceGraph
from exporter.mapping.build import build_mapping
from exporter.mapping.by_layer import match_unnamed, name_in_layer
from exporter.mapping.extras import classify_extras
from exporter.mapping.mapping_rules import MappingRules

_CANDIDATES = 5


class Leftover(Struct, frozen=True):
    """A variable without a tensor, and the unused tensors of its shape and dtype, most similar name first."""

    variable: GraphVariable
    candidates: tuple[TensorRef, ...]


class Unmatched(Struct, frozen=True):
    """The left-overs of both sides; `reason` says why rules and names give no mapping, "" if they do."""

    variables: tuple[Leftover, ...]
    tensors: tuple[TensorRef, ...]
    matched: int
    reason: str

    @property
    def table(self) -> tuple[str, ...]:
        """Lines for a rename file, one for each left-over variable: with its tensor if only one fits, else a
        comment.

        The comment lists all candidates.
        """
        lines = []
        for left in self.variables:
            names = [ref.name for ref in left.candidates]
            if len(names) == 1:
                lines.append(f"{left.variable.key} {names[0]}")
            else:
                lines.append(f"# {left.variable.key} {' | '.join(names) or '(nothing has its shape)'}")
        return tuple(lines)


def find_unmatched(graph: InferenceGraph, catalog: Catalog, rules: MappingRules) -> Unmatched:
    """Return the left-overs of a graph and a checkpoint, by rules and names.

    A MappingError becomes their `reason`. Raises UsageError if the rules name an object that does not exist,
    CorruptFile if the checkpoint's graph of objects is damaged, CheckpointError if it cannot be read.
    """
    try:
        mapping = build_mapping(graph, catalog, rules)
    except MappingError as error:
        return _by_name(graph, catalog, rules, error.message)
    left = tuple(extra.tensor for extra in mapping.extras if extra.kind is ExtraKind.OTHER)
    return Unmatched((), left, len(mapping.sources), "")


def _by_name(graph: InferenceGraph, catalog: Catalog, rules: MappingRules, reason: str) -> Unmatched:
    """Return the left-overs by names of variables and of layers, with shapes and dtypes.

    `reason` is passed on.
    """
    wanted = {variable.key: variable for variable in graph.variables}
    names = {key: key for key in wanted} | _by_layer(graph, catalog)
    names |= {key: new for rule in rules.renames for key in wanted if (new := rule.apply(key)) is not None}
    matched = {key for key, variable in wanted.items() if _fits(catalog.tensors.get(names[key]), variable)}
    extras = [*classify_extras(catalog, {names[key] for key in matched})]
    free = [extra.tensor for extra in extras if extra.kind is not ExtraKind.SLOT]
    by_kind = defaultdict(list)
    for ref in free:
        by_kind[ref.dtype, ref.shape].append(ref)
    variables = tuple(
        Leftover(variable, _ranked(key, by_kind[variable.dtype, variable.full_shape]))
        for key, variable in wanted.items()
        if key not in matched
    )
    return Unmatched(variables, tuple(free), len(matched), reason)


def _by_layer(graph: InferenceGraph, catalog: Catalog) -> dict[str, str]:
    """Return the matches by layers' names alone, {variable: tensor}; empty if these contradict each other."""
    try:
        return match_unnamed(replace(graph, layers={}), catalog)
    except MappingError:
        return {}


def _fits(ref: TensorRef | None, variable: GraphVariable) -> bool:
    return ref is not None and (ref.dtype, ref.shape) == (variable.dtype, variable.full_shape)


def _ranked(key: str, refs: Iterable[TensorRef]) -> tuple[TensorRef, ...]:
    def likeness(ref: TensorRef) -> float:
        import difflib

        return difflib.SequenceMatcher(None, key, name_in_layer(ref)).ratio()

    return tuple(sorted(refs, key=likeness, reverse=True)[:_CANDIDATES])
