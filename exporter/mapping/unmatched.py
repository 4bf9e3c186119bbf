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
        """Lines for a rename file, one for each left-over variable.

        The line maps the variable to its candidate if there is only one; else it is a comment with the
        candidates, at most five.
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
    """Return the variables of a graph and the tensors of a checkpoint that the rules and names do not match.

    A MappingError does not pass: its message becomes the result's `reason`. Raises UsageError if the rules
    name an object that does not exist, CorruptFile if the checkpoint's graph of objects is damaged,
    CheckpointError if it cannot be read.
    """
    try:
        mapping = build_mapping(graph, catalog, rules)
    except MappingError as error:
        return _by_name(graph, catalog, rules, error.message)
    left = tuple(extra.tensor for extra in mapping.extras if extra.kind is ExtraKind.OTHER)
    return Unmatched((), left, len(mapping.sources), "")


def _by_name(graph: InferenceGraph, catalog: Catalog, rules: MappingRules, reason: str) -> Unmatched:
    """Return the left-overs if variables are matched by their names or layers, and by shapes and dtypes.

    `reason` is the reason in the result.
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
    """Return {variable: tensor}, both by name, as layers' names alone match them.

    Empty if a match would be a guess.
    """
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
