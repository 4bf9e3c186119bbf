"""Build the Mapping: which tensor each variable is restored from, and which tensors are left over."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Mapping as MappingOf
from functools import cached_property

from msgspec import Struct

from exporter.catalog import Catalog, Naming, TensorRef
from exporter.checkpoint.object_graph import read_object_graph
from exporter.errors import AmbiguousRename, MissingTensors, ShapeMismatch, UsageError
from exporter.graph.inference_graph import GraphTable, GraphVariable, InferenceGraph, PartitionStrategy
from exporter.mapping.by_layer import match_unnamed
from exporter.mapping.extras import TF_AVERAGE, Extra, classify_extras
from exporter.mapping.mapping_rules import CastRule, MappingRules
from exporter.mapping.name_evidence import left_over_twins
from exporter.mapping.object_averages import averages
from exporter.mapping.object_matching import Matched, TrainedObjects, match_objects
from exporter.mapping.row_order import row_order
from exporter.mapping.table_sources import find_tables
from exporter.wire.dtypes import DType

_REPORTED_MISSES = 20
_VIA = {Naming.NAMES: "number", Naming.LAYERS: "layer", Naming.ORDER: "order"}
_CASTABLE = {DType.FLOAT, DType.DOUBLE}


class TensorSource(Struct, frozen=True):
    """Where the values of one served variable (whole, also if the graph partitions it) come from.

    `key` is the name in the published bundle; `variables` the graph variables restored from it: one, or the
    parts of a partitioned one; none for a table's contents. `cast` is the dtype to store instead of the
    tensor's. `gather_parts` > 0 says that the tensor's n slices hold rows in `mod` order (row i in slice
    i % n) and must be put in order; `scatter_parts` > 0 that the graph looks its n parts up by `mod`, so rows
    must be laid out so.
    """

    key: str
    variables: tuple[GraphVariable, ...]
    tensor: TensorRef
    via: str = "name"
    cast: DType | None = None
    gather_parts: int = 0
    scatter_parts: int = 0

    @property
    def dtype(self) -> DType:
        """The dtype in the published bundle."""
        return self.cast or self.tensor.dtype

    @property
    def bytes_(self) -> int:
        """Bytes in the published bundle."""
        itemsize = self.dtype.itemsize
        return self.tensor.bytes_ if itemsize is None else self.tensor.elements * itemsize

    @property
    def is_verbatim(self) -> bool:
        """True if the stored bytes are served as they are, so that they can be linked."""
        return self.cast is None and not self.gather_parts and not self.scatter_parts


class VariableMapping(Struct, frozen=True, dict=True):
    """Every served variable's source, and the tensors that are not needed.

    `tables` are those that are restored, under the names that their two tensors have in the bundle.
    """

    catalog: Catalog
    sources: tuple[TensorSource, ...]
    notes: tuple[str, ...] = ()
    tables: tuple[GraphTable, ...] = ()

    @cached_property
    def extras(self) -> tuple[Extra, ...]:
        """The tensors that are not needed, by kind; computed only when a report asks."""
        return tuple(classify_extras(self.catalog, {source.tensor.name for source in self.sources}))

    @property
    def bytes_(self) -> int:
        """Bytes of the served variables as published."""
        return sum(source.bytes_ for source in self.sources)


def build_mapping(graph: InferenceGraph, catalog: Catalog, rules: MappingRules) -> VariableMapping:
    """Find each graph variable's tensor.

    Raises:
        MissingTensors: variables without a tensor, each with the nearest names and why they do not fit.
        ShapeMismatch: a tensor of another shape or dtype.
        AmbiguousRename: two variables claim one tensor, or two rules disagree on a variable.
        NoCertainMatch: tensors without names of their own fit in no way, or in several.
        ObjectMismatch: the model's objects and those of an object-based checkpoint do not correspond.
        PartitionStrategyUnknown: the rows of a re-partitioned lookup table would be in an unknown order.
    """
    wanted = _group_parts(graph.variables)
    objects = read_object_graph(catalog)
    if objects is not None:
        matches = _find_objects(
            wanted, graph, TrainedObjects(objects, catalog.tensors, rules.object_path), rules
        )
    else:
        renamed = {key for key in wanted if any(rule.apply(key) for rule in rules.renames)}
        unnamed = match_unnamed(graph, catalog, renamed, by_order=rules.by_order)
        matches = {key: _find_name(key, catalog, rules, unnamed) for key in wanted}
    missing = [key for key in wanted if not _is_usable(catalog.tensors.get(matches[key].name), wanted[key])]
    if missing:
        raise _missing_error(missing, wanted, matches, catalog)
    _refuse_shared_tensors(matches)
    sources = []
    for key, variables in wanted.items():
        match = matches[key]
        tensor = catalog.tensors[match.name]
        check_fits(key, variables[0], tensor)
        trained = rules.strategies.get(key) or rules.trained.get(match.trained_name)
        if objects is not None and tensor.slices:  # a ShardedVariable: TensorFlow 2 looks ids up by div
            trained = trained or PartitionStrategy.DIV
        order = row_order(key, variables, tensor, trained=trained, served=graph.lookups.get(key))
        cast = cast_for(key, tensor, rules.casts)
        sources.append(
            TensorSource(key, variables, tensor, match.via, cast, order.gather_parts, order.scatter_parts)
        )
    twins = _twin_notes(sources, catalog) if objects is None and catalog.naming is Naming.NAMES else ()
    notes = (*_notes(sources, rules), *twins)
    tables = tuple(find_tables(graph.tables, catalog, rules.renamed))
    contents = {ref.name: ref for _, *refs in tables for ref in refs}
    sources += [TensorSource(name, (), ref, "table") for name, ref in contents.items()]
    return VariableMapping(catalog, tuple(sources), notes, tuple(table for table, _, _ in tables))


def _group_parts(variables: Iterable[GraphVariable]) -> dict[str, tuple[GraphVariable, ...]]:
    groups: dict[str, list[GraphVariable]] = {}
    for variable in variables:
        groups.setdefault(variable.key, []).append(variable)
    for key, members in groups.items():
        members.sort(key=lambda member: member.part.starts if member.part else ())
        if len(members) > 1 and any(member.part is None for member in members):
            nodes = ", ".join(member.node for member in members)
            raise AmbiguousRename(f"variables {nodes} all claim the checkpoint name {key!r}")
    return {key: tuple(members) for key, members in groups.items()}


class _Match(Struct, frozen=True):
    """The tensor that a variable is restored from, the trainer's name of that variable, and the rule used."""

    name: str
    trained_name: str
    via: str


def _find_objects(
    wanted: MappingOf[str, tuple[GraphVariable, ...]],
    graph: InferenceGraph,
    trained: TrainedObjects,
    rules: MappingRules,
) -> dict[str, _Match]:
    shadows = averages(trained, rules.average) if rules.average else {}
    known = {key: rules.tensors[key] for key in wanted if rules.tensors.get(key) in trained.tensors}
    renamed = {key: name for key in wanted if (name := rules.renamed(key)) is not None}
    rest = {key: variables[0] for key, variables in wanted.items() if key not in known}
    found = match_objects(rest, graph.objects, trained, renamed)
    found |= {key: Matched(name, "object") for key, name in known.items()}
    matches = {}
    for key in wanted:
        tensor, via = found[key].tensor, found[key].via
        average = tensor if tensor in shadows.values() else shadows.get(tensor)
        matches[key] = _Match(average or tensor, tensor, "average" if average else via)
    return matches


def _find_name(
    key: str, catalog: Catalog, rules: MappingRules, unnamed: MappingOf[str, str] | None = None
) -> _Match:
    renamed = rules.renamed(key)
    name, via = (renamed, "rename") if renamed is not None else (key, "name")
    if unnamed and renamed is None and key in unnamed:
        name = unnamed[key]
        via = "name" if name == key else _VIA[catalog.naming]
    if rules.average:
        suffixes = (TF_AVERAGE, "ema") if rules.average == "ema" else (rules.average,)
        for suffix in suffixes:
            if f"{name}/{suffix}" in catalog.tensors:
                return _Match(f"{name}/{suffix}", name, "average")
    return _Match(name, name, via)


def _is_usable(tensor: TensorRef | None, variables: tuple[GraphVariable, ...]) -> bool:
    if tensor is None:
        return False
    return tensor.is_complete or all(
        any(part.spec == variable.part and part.extent for part in tensor.slices) for variable in variables
    )


def _refuse_shared_tensors(matches: MappingOf[str, _Match]) -> None:
    claims: dict[str, list[str]] = {}
    for key, match in matches.items():
        claims.setdefault(match.name, []).append(key)
    for name, keys in claims.items():
        if len(keys) > 1:
            raise AmbiguousRename(f"tensor {name!r} is claimed by {len(keys)} variables: {', '.join(keys)}")


def check_fits(key: str, variable: GraphVariable, tensor: TensorRef) -> None:
    """Compare a variable with the tensor that it is to be restored from.

    Raises:
        ShapeMismatch: shapes or dtypes differ.
    """
    if variable.full_shape != tensor.shape:
        raise ShapeMismatch(
            f"variable {key!r} has shape {list(variable.full_shape)} in the graph, "
            f"tensor {tensor.name!r} has {list(tensor.shape)} in the checkpoint",
            cause="the checkpoint is of another model, or the graph was built with other sizes",
        )
    if variable.dtype != tensor.dtype:
        raise ShapeMismatch(
            f"variable {key!r} is {variable.dtype.label} in the graph, "
            f"tensor {tensor.name!r} is {tensor.dtype.label} in the checkpoint",
            cause="the checkpoint was written by a graph of another precision",
        )


def cast_for(key: str, tensor: TensorRef, casts: Iterable[CastRule]) -> DType | None:
    """The dtype that the rules store a variable in, None for the tensor's own."""
    if tensor.dtype not in _CASTABLE:
        return None
    return next((rule.dtype for rule in casts if rule.pattern.fullmatch(key)), None)


def check_casts(mapping: VariableMapping, casts: Iterable[CastRule]) -> None:
    """Refuse a cast rule that matches no served variable.

    Raises:
        UsageError: no float32 or float64 variable's whole name matches.
    """
    names = [s.key for s in mapping.sources if s.variables and s.tensor.dtype in _CASTABLE]
    for rule in casts:
        if not any(map(rule.pattern.fullmatch, names)):
            found = ", ".join(map(repr, names[:5]))
            raise UsageError(
                f"--cast {rule.pattern.pattern!r}: no floating variable is called so",
                cause=f"the pattern is for a whole name; there are {found or 'none'}",
                hint=f"match the beginning, too: --cast '.*{rule.pattern.pattern}={rule.dtype.label}'",
            )


def _missing_error(
    missing: list[str],
    wanted: MappingOf[str, tuple[GraphVariable, ...]],
    matches: MappingOf[str, _Match],
    catalog: Catalog,
) -> MissingTensors:
    lines = []
    claimed = {matches[key].name: key for key in wanted if key not in missing}
    by_leaf: dict[str, list[str]] = {}
    for name in catalog.tensors:
        by_leaf.setdefault(name.rsplit("/", 1)[-1], []).append(name)
    for key in missing[:_REPORTED_MISSES]:
        variable, name = wanted[key][0], matches[key].name
        found = catalog.tensors.get(name)
        shape = f"{variable.dtype.label}{list(variable.full_shape)}"
        if found is not None:
            gaps = sum(part.extent is None for part in found.slices)
            lines.append(f"{key} {shape}: tensor {name!r} lacks {gaps} of its {len(found.slices)} slices")
            continue
        pool = by_leaf.get(name.rsplit("/", 1)[-1]) or list(catalog.tensors)
        near = difflib.get_close_matches(name, pool, n=3, cutoff=0.4)
        reasons = "; ".join(_why_not(catalog.tensors[other], variable, claimed.get(other)) for other in near)
        lines.append(f"{key} {shape}: {'nearest ' + reasons if reasons else 'nothing has a similar name'}")
    if len(missing) > _REPORTED_MISSES:
        lines.append(f"... and {len(missing) - _REPORTED_MISSES} more")
    return MissingTensors(
        f"{len(missing)} of {len(wanted)} graph variables have no tensor in {catalog.prefix.name}",
        cause="\n  ".join(["", *lines]),
    )


def _why_not(tensor: TensorRef, variable: GraphVariable, claimed_by: str | None) -> str:
    if claimed_by is not None:
        return f"{tensor.name!r} (taken by {claimed_by})"
    if tensor.shape != variable.full_shape:
        return f"{tensor.name!r} (its shape is {list(tensor.shape)})"
    if tensor.dtype != variable.dtype:
        return f"{tensor.name!r} (it is {tensor.dtype.label})"
    return f"{tensor.name!r} (would fit)"


def _notes(sources: Iterable[TensorSource], rules: MappingRules) -> Iterator[str]:
    if not rules.average:
        return
    via = Counter(source.via for source in sources)
    raw = [source.key for source in sources if source.via != "average"]
    if not via["average"]:
        raise MissingTensors(
            f"--average {rules.average}: the checkpoint has no moving average of any served variable",
            hint="leave --average out, or give the trainer's own average name: --average NAME",
        )
    if raw:
        more = f" and {len(raw) - 5} more" if len(raw) > 5 else ""
        yield f"no moving average in the checkpoint, raw value served: {', '.join(raw[:5])}{more}"


def _twin_notes(sources: Iterable[TensorSource], catalog: Catalog) -> Iterator[str]:
    """What may speak against names that a framework numbered; nothing is known where names are the user's."""
    used = {source.tensor.name: (source.tensor.dtype, source.tensor.shape) for source in sources}
    left = {ref.name: (ref.dtype, ref.shape) for ref in catalog.tensors.values() if ref.name not in used}
    twins = [*left_over_twins(used, left)]
    if twins:
        name, twin = twins[0]
        more = f", and {len(twins) - 1} more like it" if len(twins) > 1 else ""
        yield (
            f"{name!r} is left over beside {twin!r}, of one shape{more}: if the trainer's model had a layer "
            "more than this one, numbered names stand for other layers"
        )
