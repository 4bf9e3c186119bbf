"""Build the mapping: the tensor that each variable is restored from, and the tensors that are left over.

The parts below: moving averages in object-based checkpoints, keys and values of lookup tables, the mapping
itself, and the kinds of tensors that inference does not need.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Mapping as MappingOf
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, Extra, Naming, TensorRef
from exporter.checkpoint.object_graph import TABLE_SUFFIX, read_object_graph
from exporter.errors import (
    AmbiguousRename,
    MissingTensors,
    ShapeMismatch,
    UsageError,
    few,
    lines_of,
    nearest,
)
from exporter.graph.inference_graph import GraphTable, GraphVariable, InferenceGraph, PartitionStrategy
from exporter.mapping.by_layer import left_over_twins, match_unnamed
from exporter.mapping.mapping_rules import (
    TF_AVERAGE,
    CastRule,
    MappingRules,
    RenameRule,
    ServedWhole,
    average_slots,
    parse_ignored,
    row_order,
)
from exporter.mapping.tensor_source import CASTABLE, TensorSource, cast_for, group_parts, stored_names
from exporter.options import ExportRequest
from exporter.storage.local_paths import quoted
from exporter.tables.parts import VALUES

if TYPE_CHECKING:
    from exporter.mapping.object_matching import ObjectMatches, TrainedObjects

# The lists of a Keras optimizer, as its attributes are called.
_AVERAGES = "_model_variables_moving_average"
_VARIABLES = "_trainable_variables"
# `<optimizer>/average/<variable>`; an optimizer that scales the loss leaves its name out.
_KERAS_2_NAME = re.compile(r"([^/]+/)?average/(?P<variable>.+)")


def averages(trained: TrainedObjects, slot: str) -> dict[str, str]:
    """Return {variable's tensor: the tensor of its moving average}, both by name; empty if there are none.

    `slot` is a value of `--average`; "ema" finds the averages of TensorFlow, Keras and Addons (of Addons'
    slots, `average` or else `slow`). Raises UsageError if the object of `--object-path` does not exist.
    """
    found = {}
    suffix = TF_AVERAGE if slot == "ema" else slot
    for name, variables in trained.by_name.items():
        shadows = trained.by_name.get(f"{name}/{suffix}", ())
        # names of objects need not be unique: several would be a guess
        if len(variables) == len(shadows) == 1:
            found[variables[0].tensor] = shadows[0].tensor
    if slot == "ema":
        found |= dict(_of_keras(trained))
    for name in _SLOTS if slot == "ema" else (slot,):
        if slotted := dict(_of_slots(trained, name)):
            return found | slotted
    return found


# Slots of Addons' wrapping optimizers: MovingAverage and SWA, and Lookahead.
_SLOTS = ("average", "slow")


def kinds_of_averages(trained: TrainedObjects) -> list[str]:
    """Return the values of `--average` for which an object-based checkpoint has averages, "ema" first.

    Raises UsageError if the object of `--object-path` does not exist.
    """
    return [kind for kind in ("ema", *_SLOTS) if averages(trained, kind)]


def _of_slots(trained: TrainedObjects, wanted: str) -> Iterator[tuple[str, str]]:
    """Yield (variable's tensor, slot's tensor), both by name, for each optimizer's slot called `wanted`."""
    objects = trained.objects.objects
    for item in objects:
        for slot, (name, of) in zip(item.slots, item.slot_names, strict=True):
            variable, shadow = objects[of].variable, objects[slot].variable
            if name == wanted and variable is not None and shadow is not None:
                yield variable.tensor, shadow.tensor


def _of_keras(trained: TrainedObjects) -> Iterator[tuple[str, str]]:
    objects = trained.objects
    for optimizer in objects.optimizers:
        shadows = _listed(trained, optimizer, _AVERAGES)
        variables = _listed(trained, optimizer, _VARIABLES)
        if len(shadows) == len(variables):
            yield from zip(variables, shadows, strict=True)
            continue
        names = {variable.tensor: name for name, same in trained.by_name.items() for variable in same}
        for shadow in shadows:
            found = _KERAS_2_NAME.fullmatch(names.get(shadow, ""))
            same = trained.by_name.get(found["variable"], ()) if found else ()
            if len(same) == 1:
                yield same[0].tensor, shadow


def _listed(trained: TrainedObjects, optimizer: int, edge: str) -> list[str]:
    """Return the tensors of the list that an optimizer keeps under `edge`, in the list's order.

    Empty without such a list.
    """
    number = trained.objects.at(edge, optimizer)
    children = {} if number is None else trained.objects.objects[number].children
    # By number: as text, "10" comes before "9".
    in_order = sorted(children.items(), key=lambda item: int(item[0]) if item[0].isdecimal() else -1)
    variables = (trained.objects.objects[child].variable for _, child in in_order)
    return [variable.tensor for variable in variables if variable is not None]


def find_tables(
    tables: Iterable[GraphTable], catalog: Catalog, rules: MappingRules
) -> Iterator[tuple[GraphTable, TensorRef, TensorRef]]:
    """Yield each table, named and shaped as in the checkpoint, with its key tensor and value tensor.

    While iterating, raises MissingTensors if the checkpoint lacks one of them, ShapeMismatch if one has
    another dtype or shape, AmbiguousRename if rules disagree on a name.
    """
    for table in tables:
        names = stored_names(table, rules.renamed)
        missing = [name for name in names if name not in catalog.tensors]
        if missing:
            raise _missing_table(table, missing, catalog)
        keys, values = (catalog.tensors[name] for name in names)
        _check(table, keys, values)
        found = replace(table, keys=keys.name, values=values.name)
        yield replace(found, key_shape=keys.shape[1:], value_shape=values.shape[1:]), keys, values


def _missing_table(table: GraphTable, missing: list[str], catalog: Catalog) -> MissingTensors:
    """Return the error to raise for a table without contents in a checkpoint; it names the tables that exist.

    `missing` are the names of the absent tensors.
    """
    there = [
        stem
        for name in catalog.tensors
        if name.endswith("-keys") and f"{(stem := name.removesuffix('-keys'))}-values" in catalog.tensors
    ]
    cause = "a Saver stores tables made with checkpoint=True, unless it is told what to save"
    if any(name.endswith(TABLE_SUFFIX) for name in there):
        cause = "the checkpoint's objects do not correspond to the model's"
    hint = "fill a static table (tf.lookup.StaticHashTable)"
    if there:
        cause += f"; it has the tables {', '.join(map(repr, there[:5]))}"
        stem = re.escape(table.keys.removesuffix("-keys"))
        rule = rf"{stem}-(keys|values)={there[0]}-\1"
        hint = f"name its table: --rename {quoted(rule)}; or {hint}"
    return MissingTensors(
        f"table {table.node!r} is filled while training and would be empty when served: "
        f"{catalog.prefix.name} has no {' and no '.join(map(repr, missing))}",
        cause=cause,
        hint=hint,
    )


def _check(table: GraphTable, keys: TensorRef, values: TensorRef) -> None:
    for tensor, dtype in ((keys, table.key_dtype), (values, table.value_dtype)):
        if tensor.dtype is not dtype:
            raise ShapeMismatch(
                f"table {table.node!r} has {dtype.label} in the graph, tensor {tensor.name!r} is "
                f"{tensor.dtype.label} in the checkpoint"
            )
    entries = keys.shape[:1]
    if not entries or values.shape[:1] != entries:
        raise ShapeMismatch(
            f"{keys.name!r} has shape {list(keys.shape)} and {values.name!r} {list(values.shape)}: "
            "no keys with a value each"
        )
    if table.key_shape not in (None, keys.shape[1:]):
        raise ShapeMismatch(
            f"a key of table {table.node!r} has shape {list(table.key_shape or ())} in the graph, "
            f"{list(keys.shape[1:])} in the checkpoint"
        )
    if table.value_shape is not None and not _fits(values.shape[1:], table):
        raise ShapeMismatch(
            f"a value of table {table.node!r} has shape {list(table.value_shape)} in the graph, "
            f"{list(values.shape[1:])} in the checkpoint"
        )
    if table.has_all_buckets and (entries[0] < 1 or entries[0] & (entries[0] - 1)):
        raise ShapeMismatch(
            f"{keys.name!r} has {entries[0]} entries, and a dense table's buckets are a power of two",
            cause="the checkpoint is of a table of another kind",
        )


def _fits(shape: tuple[int, ...], table: GraphTable) -> bool:
    declared = table.value_shape or ()
    if table.has_all_buckets and declared == ():
        declared = (1,)  # a dense table holds scalars as vectors of one
    return len(shape) == len(declared) and all(
        want in (-1, size) for size, want in zip(shape, declared, strict=True)
    )


_REPORTED_MISSES = 20
_VIA = {Naming.NAMES: "number", Naming.LAYERS: "layer", Naming.ORDER: "order"}
_ROWS = f"/{VALUES}"


class VariableMapping(Struct, frozen=True, dict=True):
    """The source of every served variable, and the tables that are restored, named as in the bundle.

    `whole` names the variables of served objects that may be left out; None if no such variables are known.
    """

    catalog: Catalog
    sources: tuple[TensorSource, ...]
    notes: tuple[str, ...] = ()
    tables: tuple[GraphTable, ...] = ()
    whole: ServedWhole | None = None

    @cached_property
    def extras(self) -> tuple[Extra, ...]:
        """The tensors that are not served, with their kinds; computed when first asked for, then kept."""
        from exporter.mapping.extras import classify_extras

        return tuple(classify_extras(self.catalog, {source.tensor.name for source in self.sources}))

    @property
    def bytes_(self) -> int:
        """The bytes of the served variables as published; of strings, as in the checkpoint."""
        return sum(source.bytes_ for source in self.sources)

    def over(self, catalog: Catalog) -> VariableMapping:
        """Return the same mapping with the tensors of the same names in another catalog.

        Raises KeyError if it lacks one.
        """
        sources = (replace(source, tensor=catalog.tensors[source.tensor.name]) for source in self.sources)
        return replace(self, catalog=catalog, sources=tuple(sources))


def build_mapping(graph: InferenceGraph, catalog: Catalog, rules: MappingRules) -> VariableMapping:
    """Map each variable of a graph to a tensor of a checkpoint whose shape, dtype and order of rows fit.

    Raises:
        MissingTensors: variables without a tensor, each with the nearest names and why they do not fit;
            contents of a lookup table, or state of an operation, are missing; or `--average` finds no average
            of any variable.
        ShapeMismatch: a tensor of another shape or dtype.
        AmbiguousRename: two variables claim one tensor, or two rules disagree on a variable.
        NoCertainMatch: tensors without names of their own fit in no way, or in several.
        ObjectMismatch: the model's objects and those of an object-based checkpoint do not correspond.
        PartitionStrategyUnknown: the rows of a re-partitioned lookup table would be in an unknown order.
        UsageError: the rules name an object path that does not exist.
        CorruptFile: the checkpoint's graph of objects is damaged.
        CheckpointError: this graph cannot be read (CheckpointChanged if its file vanished or shrank).
    """
    wanted = group_parts(graph.variables)
    _refuse_shared_names(wanted)
    objects, side = read_object_graph(catalog), None
    if objects is not None:
        from exporter.mapping.object_matching import TrainedObjects

        side = TrainedObjects(objects, catalog.tensors, rules.object_path)
        walked, matches = _find_objects(wanted, graph, side, rules)
    else:
        renamed = {key for key in wanted if rules.renamed(key) is not None}
        unnamed = match_unnamed(graph, _not_ignored(catalog, rules), renamed, by_order=rules.by_order)
        matches = {key: _find_name(key, catalog, rules, unnamed) for key in wanted}
    missing = [key for key in wanted if not _is_usable(catalog.tensors.get(matches[key].name), wanted[key])]
    if missing:
        raise _missing_error(missing, wanted, matches, catalog)
    _refuse_shared_tensors(matches)
    by_object = side is not None
    sources = [
        _source(key, wanted[key], matches[key], graph, catalog, rules, by_object=by_object) for key in wanted
    ]
    twins = _twin_notes(sources, catalog) if not by_object and catalog.naming is Naming.NAMES else ()
    # Also the variable of which the average is served: it is not left out.
    used = {name for match in matches.values() for name in (match.name, match.trained_name)}
    if side is None:
        whole, beside = _beside_names(catalog, used, graph, rules)
    else:
        from exporter.mapping.extras import whole_objects

        whole, beside = whole_objects(side, walked, used, graph, rules)
        # before `find_tables`, which looks for these names
        rules = _with_tables(rules, graph.tables, walked.tables)
    notes = (*_notes(sources, rules, catalog, side), *twins, *beside)
    tables = tuple(find_tables(graph.tables, catalog, rules))
    sources += _contents(tables)
    sources += _state(graph, catalog)
    return VariableMapping(catalog, tuple(sources), notes, tuple(table for table, _, _ in tables), whole)


def _contents(tables: Iterable[tuple[GraphTable, TensorRef, TensorRef]]) -> list[TensorSource]:
    """Return the sources of the keys and values of lookup tables, each tensor once."""
    contents = {ref.name: ref for _, *refs in tables for ref in refs}
    return [TensorSource(name, (), ref, "table") for name, ref in contents.items()]


def _beside_names(
    catalog: Catalog, used: set[str], graph: InferenceGraph, rules: MappingRules
) -> tuple[ServedWhole | None, Iterable[str]]:
    """Return the tensors that `--ignore` leaves out, None if there are none, and notes on further tensors.

    `used` are the names of the served tensors. A note names tensors that are not served, but are in the scope
    of a served one. Iterating over the notes raises ObjectMismatch if the file says that such a tensor is of
    a served layer.
    """
    # The base already reported variables beside the served names; most deltas need not import this.
    if graph.meta_graph is None and catalog.naming is Naming.NAMES and not _has_layers(catalog):
        return None, ()
    from exporter.mapping.extras import left_out_by_names, names_of

    left = {name for name, ref in catalog.tensors.items() if rules.ignores(names_of(ref))} - used
    whole = ServedWhole(tuple(sorted(left))) if left else None
    return whole, left_out_by_names(catalog, used, graph, rules)


def _source(
    key: str,
    variables: tuple[GraphVariable, ...],
    match: _Match,
    graph: InferenceGraph,
    catalog: Catalog,
    rules: MappingRules,
    *,
    by_object: bool,
) -> TensorSource:
    """Return the source of a variable: the tensor that was found, its cast, and the order of its rows.

    `variables` are the variable's parts in the graph; `by_object` is true for an object-based checkpoint.

    Raises:
        ShapeMismatch: the tensor has another shape or dtype.
        PartitionStrategyUnknown: rows may have to move, and it is not known how.
    """
    tensor = catalog.tensors[match.name]
    check_fits(key, variables[0], tensor)
    # what the user says comes first
    trained = rules.strategies.get(key) or rules.trained.get(match.trained_name)
    if by_object and tensor.slices:
        trained = trained or PartitionStrategy.DIV  # a ShardedVariable: TensorFlow 2 looks ids up by div
    order = row_order(key, variables, tensor, trained=trained, served=graph.lookups.get(key))
    cast = cast_for(key, tensor, rules)
    return TensorSource(key, variables, tensor, match.via, cast, order.gather_parts, order.scatter_parts)


def _with_tables(
    rules: MappingRules, tables: Iterable[GraphTable], found: MappingOf[str, str]
) -> MappingRules:
    """Return a copy of the rules that also names the hash tables which were matched by their objects.

    `found` has the name of each table in the checkpoint, by its node. The rules themselves if there are none.
    """
    names = {
        name: f"{found[table.node]}-{half}"
        for table in tables
        if table.node in found
        for name, half in ((table.keys, "keys"), (table.values, "values"))
    }
    return replace(rules, names={**rules.names, **names}) if names else rules


def _has_layers(catalog: Catalog) -> bool:
    """True if a checkpoint by names also records which layer owns a tensor."""
    return any(ref.owner for ref in catalog.tensors.values())


def _not_ignored(catalog: Catalog, rules: MappingRules) -> Catalog:
    if not rules.ignored and rules.whole is None:
        return catalog
    from exporter.mapping.extras import names_of

    left = {name: ref for name, ref in catalog.tensors.items() if not rules.ignores(names_of(ref))}
    return replace(catalog, tensors=left)


def _state(graph: InferenceGraph, catalog: Catalog) -> list[TensorSource]:
    """Return the sources of tensors that operations of a graph's libraries restore by these very names.

    Raises MissingTensors if the checkpoint lacks one.
    """
    missing = [name for name in graph.state.tensors if name not in catalog.tensors]
    if missing:
        raise MissingTensors(
            f"{catalog.prefix.name} has no {missing[0]!r}, which {graph.state.importing[0]!r} restores",
            cause="operations that stock TensorFlow does not have would answer from an empty table",
            hint="export the model from the checkpoint that was saved with it",
        )
    return [TensorSource(name, (), catalog.tensors[name], "state") for name in graph.state.tensors]


def _refuse_shared_names(groups: MappingOf[str, tuple[GraphVariable, ...]]) -> None:
    for key, members in groups.items():
        if len(members) > 1 and any(member.part is None for member in members):
            nodes = ", ".join(member.node for member in members)
            raise AmbiguousRename(f"variables {nodes} all claim the checkpoint name {key!r}")


class _Match(Struct, frozen=True):
    """The tensor that a variable is restored from, the trainer's name for it, and how it was found."""

    name: str
    trained_name: str
    via: str


def _find_objects(
    wanted: MappingOf[str, tuple[GraphVariable, ...]],
    graph: InferenceGraph,
    trained: TrainedObjects,
    rules: MappingRules,
) -> tuple[ObjectMatches, dict[str, _Match]]:
    from exporter.mapping.object_matching import Matched, match_objects

    shadows = averages(trained, rules.average) if rules.average else {}
    known = {key: rules.tensors[key] for key in wanted if rules.tensors.get(key) in trained.tensors}
    renamed = {key: name for key in wanted if (name := rules.renamed(key)) is not None}
    rest = {key: variables[0] for key, variables in wanted.items() if key not in known}
    tables = (table.node for table in graph.tables if rules.renamed(table.keys) is None)
    walked = match_objects(rest, graph.objects, trained, renamed, tables)
    found = {**walked.found, **{key: Matched(name, "object") for key, name in known.items()}}
    matches = {}
    for key in wanted:
        tensor, via = found[key].tensor, found[key].via
        # A recipe names the tensor that was served: already the average, if one was.
        average = tensor if tensor in shadows.values() else shadows.get(tensor)
        matches[key] = _Match(average or tensor, tensor, "average" if average else via)
    return walked, matches


def _find_name(
    key: str, catalog: Catalog, rules: MappingRules, unnamed: MappingOf[str, str] | None
) -> _Match:
    renamed = rules.renamed(key)
    name, via = (renamed, "rename") if renamed is not None else (key, "name")
    if unnamed and renamed is None and key in unnamed:
        name = unnamed[key]
        via = "name" if name == key else _VIA[catalog.naming]
    for slot in average_slots(rules.average):
        if f"{name}/{slot}" in catalog.tensors:
            return _Match(f"{name}/{slot}", name, "average")
    return _Match(name, name, via)


def _is_usable(tensor: TensorRef | None, variables: tuple[GraphVariable, ...]) -> bool:
    if tensor is None:
        return False
    # Trainers declare slices of partitioned slots that no file has
    # (TensorFlow's issue 38537): what the graph needs decides.
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
    """Require that a tensor has the variable's shape and dtype; `key` is the variable's name in the error.

    Raises ShapeMismatch if it does not.
    """
    # TensorFlow would not notice: in graphs it restores a resource variable in whatever shape the file has.
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


def check_casts(mapping: VariableMapping, casts: Iterable[CastRule]) -> None:
    """Require that each cast rule matches a served variable.

    Raises:
        UsageError: a rule matches the whole name of no float32 or float64 variable.
    """
    names = [s.key for s in mapping.sources if s.variables and s.tensor.dtype in CASTABLE]
    for rule in casts:
        if not any(map(rule.pattern.fullmatch, names)):
            found = ", ".join(map(repr, names[:5]))
            rows = next((name for name in names if rule.pattern.fullmatch(name.removesuffix(_ROWS))), None)
            raise UsageError(
                f"--cast {rule.pattern.pattern!r}: no floating variable is called so",
                cause=f"the pattern is for a whole name; there are {found or 'none'}",
                hint=f"match the beginning, too: --cast '.*{rule.pattern.pattern}={rule.dtype.label}'"
                if rows is None
                else f"the rows of a table by keys are called so: --cast '{rows}={rule.dtype.label}'",
            )


def check_rules(
    request: ExportRequest, graph: InferenceGraph, catalog: Catalog, mapping: VariableMapping
) -> None:
    """Require that each option about names in a request matched some variable, table or tensor.

    `mapping` is the mapping that was made of `graph` and `catalog` with these options.

    Raises:
        UsageError: an option matched nothing, does not parse, or does not apply to this checkpoint.
        CheckpointError: the checkpoint's graph of objects is damaged or cannot be read.
    """
    if request.object_path is not None and read_object_graph(catalog) is None:
        raise UsageError(
            f"--object-path {request.object_path}: the checkpoint holds no objects",
            cause=f"{catalog.prefix.name} ({catalog.family}) is matched by names",
            hint="leave out --object-path; map names with --rename 'pattern=replacement'",
        )
    if request.by_order and not any(source.via == _VIA[Naming.ORDER] for source in mapping.sources):
        raise UsageError(
            "--by-order: the checkpoint's arrays have names, and are matched by them",
            hint="leave out --by-order",
        )
    keys = [source.key for source in mapping.sources]
    for name in request.partition_strategies:
        if name not in keys:
            raise UsageError(
                f"--partition-strategy {name}: no served variable is called so",
                hint=_suggestion("--partition-strategy", name, keys),
            )
    tables = [name for table in graph.tables for name in (table.keys, table.values)]
    renamed = [*keys, *tables, *(table.name for table in graph.dynamic_tables)]
    names = list[str]()
    if request.ignored:
        from exporter.mapping.extras import ignorable

        names = [*ignorable(catalog, read_object_graph(catalog))]
    for pattern in parse_ignored(request.ignored):
        if not any(map(pattern.fullmatch, names)):
            raise UsageError(
                f"--ignore {pattern.pattern}: the checkpoint has no such variable",
                hint=_suggestion("--ignore", pattern.pattern, names),
            )
    for text in request.renames:
        rule = RenameRule.parse(text)
        if not any(map(rule.pattern.fullmatch, renamed)):
            raise UsageError(
                f"--rename {text}: no served variable is called so",
                cause="the pattern is for a whole name",
                hint=_suggestion("--rename", rule.pattern.pattern, keys),
            )


def _suggestion(option: str, name: str, keys: Sequence[str]) -> str:
    close = nearest(name, keys)
    named = f"{close}, for example" if close else ", ".join(keys[:5])
    return f"leave out {option} {name}, or name a variable: {named}"


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
        # To compare one name with 10,000 others takes difflib
        # a second: so first those with the same last part.
        pool = by_leaf.get(name.rsplit("/", 1)[-1]) or list(catalog.tensors)
        near = difflib.get_close_matches(name, pool, n=3, cutoff=0.4)
        reasons = "; ".join(_why_not(catalog.tensors[other], variable, claimed.get(other)) for other in near)
        lines.append(f"{key} {shape}: {'nearest ' + reasons if reasons else 'nothing has a similar name'}")
    if len(missing) > _REPORTED_MISSES:
        lines.append(f"... and {len(missing) - _REPORTED_MISSES} more")
    return MissingTensors(
        f"{len(missing)} of {len(wanted)} graph variables have no tensor in {catalog.prefix.name}",
        cause=lines_of(lines),
    )


def _why_not(tensor: TensorRef, variable: GraphVariable, claimed_by: str | None) -> str:
    if claimed_by is not None:
        return f"{tensor.name!r} (taken by {claimed_by})"
    if tensor.shape != variable.full_shape:
        return f"{tensor.name!r} (its shape is {list(tensor.shape)})"
    if tensor.dtype != variable.dtype:
        return f"{tensor.name!r} (it is {tensor.dtype.label})"
    return f"{tensor.name!r} (would fit)"


def _notes(
    sources: Iterable[TensorSource], rules: MappingRules, catalog: Catalog, side: TrainedObjects | None
) -> Iterator[str]:
    if not rules.average:
        return
    via = Counter(source.via for source in sources)
    raw = [source.key for source in sources if source.via != "average"]
    if not via["average"]:
        kinds = [] if side is None else kinds_of_averages(side)
        there = " or ".join(f"--average {kind}" for kind in kinds)
        hint = "leave --average out, or give the trainer's own average name: --average NAME"
        if catalog.naming is not Naming.NAMES:
            hint = (
                "save a tf.train.Checkpoint of model and optimizer, which has names; or leave --average out"
            )
        raise MissingTensors(
            f"--average {rules.average}: the checkpoint has no moving average of any served variable",
            cause="" if catalog.naming is Naming.NAMES else "its format has no names for moving averages",
            hint=f"serve the averages that it has: {there}; or leave --average out" if kinds else hint,
        )
    if raw:
        yield f"no moving average in the checkpoint, raw value served: {few(raw, 5)}"


def _twin_notes(sources: Iterable[TensorSource], catalog: Catalog) -> Iterator[str]:
    """Yield at most one note, on left-over tensors that equal served ones except for numbers in their names.

    With such tensors the match of numbered names is doubtful.
    """
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
