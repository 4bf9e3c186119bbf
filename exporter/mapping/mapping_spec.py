"""The recipe that maps a trainer's checkpoint to served variables, kept so that deltas need no graph.

It holds the inputs of the mapping: the graph's variables, how their parts are looked up, the results of the
rules. From it the same mapping is made for the next checkpoint, also if that partitions its tensors in
another way, without TensorFlow and without the user's code. A document holds no program: the patterns of
rules are kept as texts, to be compared with those of a later command line, and are never run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from exporter.catalog import Catalog, Naming, SliceSpec, TensorRef
from exporter.checkpoint.admission import Admission
from exporter.errors import MappingError, ObjectMismatch, SchemaChanged
from exporter.graph.inference_graph import (
    GraphDynamicTable,
    GraphTable,
    GraphVariable,
    InferenceGraph,
    PartitionStrategy,
)
from exporter.mapping.mapping_rules import CASTS, MappingRules, ServedWhole
from exporter.mapping.tensor_source import TensorSource, cast_for, group_parts, stored_names
from exporter.options import ExportRequest, option_of
from exporter.tables.parts import PARTS
from exporter.wire.dtypes import DType
from exporter.wire.json_documents import Count, DocumentError, DtypeLabel, Shape, Text, as_builtins, doc

T = TypeVar("T")

if TYPE_CHECKING:
    from exporter.mapping.build import VariableMapping

    CastLabel = str
else:
    CastLabel = Literal[CASTS]


class DynamicTable(
    Struct, frozen=True, rename={"key_label": "key_dtype", "label": "dtype", "dim": "dimension"}
):
    """A table by arbitrary keys, in four variables; its last `defaults` rows are for absent keys."""

    name: Annotated[Text, doc("its name; those of its variables are this name, a slash and the part's")]
    key_label: Annotated[DtypeLabel, doc("the type of its keys in the checkpoint")]
    label: Annotated[DtypeLabel, doc("the type of its rows in the checkpoint")]
    dim: Annotated[Count, doc("numbers in a row")]
    defaults: Annotated[Count, doc("the number of rows, the last ones, that absent keys read")]

    @property
    def key_dtype(self) -> DType:
        """The dtype of the table's keys in the checkpoint."""
        return DType.of(self.key_label)

    @property
    def value_dtype(self) -> DType:
        """The dtype of the table's rows in the checkpoint."""
        return DType.of(self.label)

    @classmethod
    def of(cls, table: GraphDynamicTable) -> DynamicTable:
        """Return the description of a graph's table, without the values that absent keys read."""
        return cls(table.name, table.key_dtype.label, table.value_dtype.label, table.dim, len(table.defaults))

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the table's variables, in the order of `exporter.tables.parts.PARTS`."""
        return tuple(f"{self.name}/{part}" for part in PARTS)


class VariableDocument(Struct, frozen=True, omit_defaults=True):
    """A variable of the graph in the form of a manifest, where a part's box is spread over three fields."""

    node: Annotated[Text, doc("its node")]
    key: Annotated[Text, doc("the name that it is restored by; for a part, the whole variable's")]
    dtype: Annotated[DtypeLabel, doc("the type that the graph computes with")]
    shape: Annotated[Shape, doc("its own shape")]
    full_shape: Annotated[Shape | None, doc("for a part: the whole variable's shape")] = None
    starts: Annotated[Shape | None, doc("for a part: its start in each dimension")] = None

    @classmethod
    def of(cls, variable: GraphVariable) -> VariableDocument:
        """Return the document of a variable."""
        whole = cls(variable.node, variable.key, variable.dtype.label, variable.shape)
        part = variable.part
        return whole if part is None else replace(whole, full_shape=part.full_shape, starts=part.starts)

    def read(self) -> GraphVariable:
        """Return the variable that the document describes.

        Raises DocumentError if its box has another number of dimensions.
        """
        part = None
        if self.full_shape is not None:
            part = SliceSpec(self.full_shape, self.starts or (), self.shape)
            if not len(part.full_shape) == len(part.starts) == len(self.shape):
                raise DocumentError(f"part {self.node!r} of a variable: {_DIMENSIONS}")
        return GraphVariable(self.node, self.key, DType.of(self.dtype), self.shape, part)


class PlaceDocument(Struct, frozen=True, omit_defaults=True):
    """The place of a variable in a Keras weights file, in the form of a manifest."""

    name: Annotated[Text, doc("the tensor's name there")]
    dtype: Annotated[DtypeLabel, doc("its type in the model")]
    shape: Annotated[Shape, doc("its shape in the model")]
    owner: Annotated[Text, doc("the names of the layers that it belongs to")] = ""

    @classmethod
    def of(cls, place: TensorRef) -> PlaceDocument:
        """Return the document of a place, a tensor in a Keras weights file."""
        return cls(place.name, place.dtype.label, place.shape, place.owner)

    def read(self) -> TensorRef:
        """Return the place that the document describes, as a tensor without stored bytes."""
        return TensorRef(self.name, DType.of(self.dtype), self.shape, owner=self.owner)


class RenameText(Struct, frozen=True):
    """The text of a rename rule."""

    pattern: Annotated[Text, doc("a regular expression of variables' names")]
    name: Annotated[Text, doc("the tensor's name")]


class CastText(Struct, frozen=True):
    """The text of a cast rule."""

    pattern: Annotated[Text, doc("a regular expression of variables' names")]
    dtype: Annotated[DtypeLabel, doc("the type that they are stored as")]


_Strategies: TypeAlias = Mapping[Text, PartitionStrategy]


class RulesDocument(Struct, frozen=True):
    """The rules of a base in the form of a manifest: `MappingRules` with patterns as texts."""

    renames: Annotated[tuple[RenameText, ...], doc("--rename")] = ()
    average: Annotated[Text | None, doc("--average")] = None
    casts: Annotated[tuple[CastText, ...], doc("--cast")] = ()
    by_order: Annotated[bool, doc("--by-order")] = False
    strategies: Annotated[_Strategies, doc("--partition-strategy")] = field(default_factory=dict)
    trained: Annotated[_Strategies, doc("how training looked tables up, by its graph")] = field(
        default_factory=dict
    )
    object_path: Annotated[Text | None, doc("--object-path")] = None
    tensors: Annotated[Mapping[Text, Text], doc("the tensor that was found for each variable")] = field(
        default_factory=dict
    )

    @classmethod
    def of(cls, rules: MappingRules) -> RulesDocument:
        """Return the document of rules, its mappings sorted by name."""
        return cls(
            tuple(RenameText(rule.pattern.pattern, rule.replacement) for rule in rules.renames),
            rules.average,
            tuple(CastText(rule.pattern.pattern, rule.label) for rule in rules.casts),
            rules.by_order,
            _sorted(rules.strategies),
            _sorted(rules.trained),
            rules.object_path,
            _sorted(rules.tensors),
        )


class MappingSpec(
    Struct, frozen=True, omit_defaults=True, dict=True, rename={"stored": "variables", "given": "rules"}
):
    """The `recipe` in a base's manifest: how its variables are made from a trainer's checkpoint.

    `dynamic` are tables by arbitrary keys, whose variables are among the others. `not_in_8_bits` are the
    variables, by key, that a rule would cast to int8 but that are not tables read by rows. `layers` are those
    of a Keras model whose values came from a file that identifies values by layers.
    """

    stored: Annotated[tuple[VariableDocument, ...], doc("the graph's variables")]
    lookups: Annotated[Mapping[Text, PartitionStrategy], doc("how the graph looks up each variable's rows")]
    given: Annotated[RulesDocument, doc("the rules that variables were mapped to tensors by")]
    tables: Annotated[tuple[GraphTable, ...], doc("lookup tables whose contents are served")] = ()
    dynamic: Annotated[tuple[DynamicTable, ...], doc("tables by arbitrary keys")] = ()
    min_freq: Annotated[Count, doc("--keys min-freq")] = 0
    max_age_steps: Annotated[Count | None, doc("--keys max-age-steps")] = None
    not_in_8_bits: Annotated[tuple[Text, ...], doc("names of variables that --cast int8 leaves out")] = ()
    layers: Annotated[
        Mapping[Text, tuple[PlaceDocument, ...]],
        doc("the places where Keras looks for each variable in a weights file; the last one counts"),
    ] = field(default_factory=dict)
    renamed: Annotated[
        Mapping[Text, Text], doc("the name that --rename gave, by the name of each variable and table")
    ] = field(default_factory=dict)
    dtypes: Annotated[Mapping[Text, CastLabel], doc("the types that --cast gave, by variable")] = field(
        default_factory=dict
    )
    whole: Annotated[
        ServedWhole | None, doc("what else served objects and layers have; null if it was not recorded")
    ] = None

    @classmethod
    def of(
        cls, graph: InferenceGraph, rules: MappingRules, mapping: VariableMapping, admission: Admission
    ) -> MappingSpec:
        """Return the recipe of a full export; tensors found among a trainer's objects are recorded by name.

        Raises AmbiguousRename if rename rules disagree on a name.
        """
        ours = [source for source in mapping.sources if source.variables]
        tables = (
            replace(table, key_shape=stored.key_shape or (), value_shape=stored.value_shape or ())
            for table, stored in zip(graph.tables, mapping.tables, strict=True)
        )
        has_layers = mapping.catalog.naming is Naming.LAYERS or any(source.tensor.owner for source in ours)
        layers = _sorted(graph.layers).items() if has_layers else ()
        return cls(
            tuple(map(VariableDocument.of, graph.variables)),
            _sorted(graph.lookups),
            RulesDocument.of(replace(rules, tensors={source.key: source.tensor.name for source in ours})),
            tuple(tables),
            tuple(DynamicTable.of(table) for table in graph.dynamic_tables if not table.is_laid_out),
            admission.min_freq,
            admission.max_age_steps,
            tuple(
                s.key for s in ours if not s.is_in_8_bits and cast_for(s.key, s.tensor, rules) is DType.INT8
            ),
            {key: tuple(map(PlaceDocument.of, at)) for key, at in layers},
            _renamed(graph, rules, mapping),
            _sorted({s.key: s.cast.label for s in ours if s.cast is not None}),
            mapping.whole,
        )

    @cached_property
    def variables(self) -> tuple[GraphVariable, ...]:
        """The graph's variables, in the dtypes that the graph computes with.

        Raises DocumentError if one is inconsistent.
        """
        return tuple(variable.read() for variable in self.stored)

    @cached_property
    def rules(self) -> MappingRules:
        """The rules for the next checkpoint: with the results of patterns instead of the patterns."""
        given = self.given
        return MappingRules(
            average=given.average,
            by_order=given.by_order,
            strategies=given.strategies,
            trained=given.trained,
            object_path=given.object_path,
            tensors=given.tensors,
            names=self.renamed,
            dtypes=self.dtypes,
            whole=self.whole,
        )

    @property
    def admission(self) -> Admission:
        """The recorded filter of the keys of dynamic tables."""
        return Admission(self.min_freq, self.max_age_steps)

    def mapping(self, catalog: Catalog, ignored: tuple[re.Pattern[str], ...] = ()) -> VariableMapping:
        """Map another checkpoint of the same model, without its dynamic tables.

        Variables of served objects may be left out if they match `ignored`, or were left out before.

        Raises:
            SchemaChanged: the checkpoint is of another model.
            UsageError: it has no object at the recorded path.
            CorruptFile: its graph of objects is damaged.
            CheckpointError: its graph of objects cannot be read.
            DocumentError: a variable of the recipe is inconsistent.
        """
        # late: manifests hold recipes, and most commands that read one map nothing
        from exporter.mapping.build import build_mapping

        others = {key for table in self.dynamic for key in table.keys}
        ordinary = tuple(variable for variable in self.variables if variable.key not in others)
        layers = {key: tuple(place.read() for place in at) for key, at in self.layers.items()}
        graph = InferenceGraph(
            "the published base", None, ordinary, lookups=self.lookups, tables=self.tables, layers=layers
        )
        try:
            return build_mapping(graph, catalog, replace(self.rules, ignored=ignored))
        except MappingError as error:
            hint = SchemaChanged.default_hint
            if isinstance(error, ObjectMismatch):  # a served object is more than it was
                hint = f"{error.hint}; a model that has more begins a new log: --new-base if-needed"
            raise SchemaChanged(
                f"{catalog.prefix.name} does not fit what is published: {error.message}",
                cause=error.cause,
                hint=hint,
            ) from error

    def trained_name(self, table: DynamicTable) -> str:
        """Return a dynamic table's name in the checkpoint: the one that `--rename` gave, else its own."""
        return self.renamed.get(table.name, table.name)

    def sources(self) -> tuple[TensorSource, ...]:
        """Return the served variables as stored in a bundle of this recipe, under their served names.

        Their tensors have no extents. The contents of lookup tables come last. Raises DocumentError if a
        variable of the recipe is inconsistent.
        """
        variables = (self._published(*item) for item in group_parts(self.variables).items())
        return (*variables, *(source for table in self.tables for source in self._contents(table)))

    def _contents(self, table: GraphTable) -> Iterator[TensorSource]:
        keys, values = stored_names(table, self.renamed.get)
        for name, dtype in ((keys, table.key_dtype), (values, table.value_dtype)):
            yield TensorSource(name, (), TensorRef(name, dtype, ()), "table")

    def _published(self, key: str, parts: tuple[GraphVariable, ...]) -> TensorSource:
        tensor = TensorRef(key, parts[0].dtype, parts[0].full_shape)
        return TensorSource(key, parts, tensor, cast=cast_for(key, tensor, self.rules))

    def check_rules(self, given: MappingRules, admission: Admission) -> None:
        """Require that the rules of a later command line equal the rules of this recipe, or are all left out.

        `admission` is that command line's filter of keys, which counts as a rule. `--ignore` may be given at
        any time: see `mapping`.

        Raises:
            SchemaChanged: they differ; the error names the options.
        """
        # without what was found and nobody typed
        asked = replace(RulesDocument.of(given), trained={}, tensors={})
        if asked == RulesDocument() and admission == Admission():
            return
        own = replace(self.given, trained={}, tensors={})
        was, now = (
            as_builtins(rules) | asdict(filter_)
            for rules, filter_ in ((own, self.admission), (asked, admission))
        )
        differing = [name for name in was if was[name] != now[name]]
        if differing:
            raise SchemaChanged(
                "the base was exported with other rules",
                cause="; ".join(
                    f"{_option(name)} was {_typed(was[name])}, is {_typed(now[name])}" for name in differing
                ),
            )


def _renamed(graph: InferenceGraph, rules: MappingRules, mapping: VariableMapping) -> dict[str, str]:
    """Return {name: the trainer's name} for variables and tables whose name in the checkpoint is another.

    A rename rule, or the table's object, gave that name. Raises AmbiguousRename if rename rules disagree on a
    name.
    """
    names = {variable.key for variable in graph.variables}
    names |= {name for table in graph.tables for name in (table.keys, table.values)}
    names |= {table.name for table in graph.dynamic_tables}
    by_object = {
        name: found
        for table, stored in zip(graph.tables, mapping.tables, strict=True)
        for name, found in ((table.keys, stored.keys), (table.values, stored.values))
        if found != name
    }
    found = {name: rules.renamed(name) or by_object.get(name) for name in sorted(names)}
    return {name: new for name, new in found.items() if new is not None}


def _sorted(by_name: Mapping[str, T]) -> dict[str, T]:
    """Return the same mapping in the order of its keys, as in manifests."""
    return dict(sorted(by_name.items()))


def _option(rule: str) -> str:
    return option_of(ExportRequest, "partition_strategies" if rule == "strategies" else rule)


def _typed(rule: Any) -> str:
    """Return the value of a rule, as in a manifest, in the words of a command line: quoted, or `given`."""
    if rule is None or rule is False or rule in ((), {}):
        return "not given"
    if rule is True:
        return "given"
    if not isinstance(rule, tuple | dict):
        return repr(rule)
    pairs = rule.items() if isinstance(rule, dict) else (each.values() for each in rule)
    return ", ".join(repr("=".join(pair)) for pair in pairs)


_DIMENSIONS = "shape, full_shape and starts have as many numbers as it has dimensions"
