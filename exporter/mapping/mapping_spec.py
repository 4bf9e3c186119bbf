"""Keep how served variables come from a trainer's checkpoint, so that deltas need no graph.

A mapping spec holds what the mapping was made from: the graph's variables, how their parts are looked up, the
rules. From it the same mapping is made for the next checkpoint, also if that partitions its tensors in
another way, without TensorFlow and without the user's code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Mapping as MappingOf
from typing import TYPE_CHECKING, Annotated

from msgspec import Struct, field, to_builtins
from msgspec.structs import asdict, replace

from exporter.catalog import Catalog, SliceSpec, TensorRef
from exporter.checkpoint.admission import Admission
from exporter.errors import AmbiguousRename, MappingError, SchemaChanged
from exporter.graph.inference_graph import GraphTable, GraphVariable, InferenceGraph, PartitionStrategy
from exporter.mapping.mapping_rules import CastRule, MappingRules, RenameRule
from exporter.mapping.tensor_source import TensorSource, cast_for, stored_names
from exporter.options import ExportRequest, option_of
from exporter.tables.parts import PARTS
from exporter.wire.dtypes import DType
from exporter.wire.json_documents import Count, DocumentError, DtypeLabel, Shape, Text, doc

if TYPE_CHECKING:
    from exporter.mapping.build import VariableMapping


class DynamicTable(
    Struct, frozen=True, rename={"key_label": "key_dtype", "label": "dtype", "dim": "dimension"}
):
    """A table by arbitrary keys, served from four variables that the checkpoint does not have.

    `name` is the variable's in the checkpoint unless a rule renames it; the last `defaults` rows are what
    absent keys read.
    """

    name: Annotated[Text, doc("its name; its variables have this one, a slash and the part's")]
    key_label: Annotated[DtypeLabel, doc("of its keys in the checkpoint")]
    label: Annotated[DtypeLabel, doc("of its rows in the checkpoint")]
    dim: Annotated[Count, doc("numbers in a row")]
    defaults: Annotated[Count, doc("how many rows, the last ones, are what absent keys read")]

    @property
    def key_dtype(self) -> DType:
        """The dtype of its keys in the checkpoint."""
        return DType.of(self.key_label)

    @property
    def value_dtype(self) -> DType:
        """The dtype of its rows in the checkpoint."""
        return DType.of(self.label)

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of its variables, in the order of `exporter.tables.geometry.PARTS`."""
        return tuple(f"{self.name}/{part}" for part in PARTS)


class MappingSpec(Struct, frozen=True):
    """The graph's variables (in the dtypes that the graph computes with), their lookups, and the rules.

    `tables` are the graph's lookup tables, by the graph's names and in the shapes that they are stored in;
    `dynamic` its tables by arbitrary keys, whose variables are among the others. `not_in_8_bits` are the
    variables, by key, that a rule would cast to int8 and that are no tables by rows.
    """

    variables: tuple[GraphVariable, ...]
    lookups: MappingOf[str, PartitionStrategy] = field(default_factory=dict)
    rules: MappingRules = field(default_factory=MappingRules)
    tables: tuple[GraphTable, ...] = ()
    dynamic: tuple[DynamicTable, ...] = ()
    not_in_8_bits: tuple[str, ...] = ()

    @classmethod
    def of(cls, graph: InferenceGraph, rules: MappingRules, mapping: VariableMapping) -> MappingSpec:
        """How a full export mapped: what it found among a trainer's objects is kept by name."""
        found = {source.key: source.tensor.name for source in mapping.sources if source.variables}
        tables = tuple(
            replace(table, key_shape=stored.key_shape, value_shape=stored.value_shape)
            for table, stored in zip(graph.tables, mapping.tables, strict=True)
        )
        dynamic = tuple(
            DynamicTable(
                table.name, table.key_dtype.label, table.value_dtype.label, table.dim, len(table.defaults)
            )
            for table in graph.dynamic_tables
        )
        left = tuple(
            source.key
            for source in mapping.sources
            if source.variables and not source.is_in_8_bits and _is_in_8_bits(source, rules)
        )
        return cls(graph.variables, graph.lookups, replace(rules, tensors=found), tables, dynamic, left)

    def mapping(self, catalog: Catalog) -> VariableMapping:
        """The mapping of another checkpoint of the same model, without its dynamic tables."""
        from exporter.mapping.build import build_mapping

        graph = InferenceGraph(
            "the published base", None, self.ordinary, lookups=self.lookups, tables=self.tables
        )
        try:
            mapping = build_mapping(graph, catalog, self.rules)
        except MappingError as error:
            raise SchemaChanged(
                f"{catalog.prefix.name} does not fit what is published: {error.message}", cause=error.cause
            ) from error
        if not self.not_in_8_bits:
            return mapping
        return replace(mapping, sources=tuple(map(self._as_chosen, mapping.sources)))

    def _as_chosen(self, source: TensorSource) -> TensorSource:
        return replace(source, cast=None) if source.key in self.not_in_8_bits else source

    @property
    def ordinary(self) -> tuple[GraphVariable, ...]:
        """The variables that are not a dynamic table's."""
        others = {key for table in self.dynamic for key in table.keys}
        return tuple(variable for variable in self.variables if variable.key not in others)

    def trained_name(self, table: DynamicTable) -> str:
        """The name that a dynamic table has in the checkpoint."""
        return self.rules.renamed(table.name) or table.name

    def sources(self) -> tuple[TensorSource, ...]:
        """The served variables as they lie in a bundle published by this spec, whatever the trainer had."""
        by_key: dict[str, list[GraphVariable]] = {}
        for variable in self.variables:
            by_key.setdefault(variable.key, []).append(variable)
        variables = (self._published(key, members) for key, members in by_key.items())
        return (*variables, *(source for table in self.tables for source in self._contents(table)))

    def _contents(self, table: GraphTable) -> Iterator[TensorSource]:
        keys, values = stored_names(table, self.rules.renamed)
        for name, dtype in ((keys, table.key_dtype), (values, table.value_dtype)):
            yield TensorSource(name, (), TensorRef(name, dtype, ()), "table")

    def _published(self, key: str, members: list[GraphVariable]) -> TensorSource:
        members.sort(key=lambda member: member.part.starts if member.part else ())
        tensor = TensorRef(key, members[0].dtype, members[0].full_shape)
        cast = cast_for(key, tensor, self.rules.casts)
        return self._as_chosen(TensorSource(key, tuple(members), tensor, cast=cast))

    def check_rules(self, given: MappingRules) -> None:
        """Compare the rules with those of a later command line, which may leave all of them out."""
        given = replace(given, trained={}, tensors={})
        if given == MappingRules():
            return
        own = replace(self.rules, trained={}, tensors={})
        was, now = (to_builtins(RulesDocument.of(rules)) | asdict(rules.admission) for rules in (own, given))
        differing = [name for name in was if was[name] != now[name]]
        if differing:
            raise SchemaChanged(
                "the base was exported with other rules",
                cause="; ".join(f"{_option(name)} was {was[name]!r}, is {now[name]!r}" for name in differing),
            )

    def document(self) -> MappingSpecDocument:
        """What a manifest says of it."""
        return MappingSpecDocument(
            tuple(map(VariableDocument.of, self.variables)),
            dict(sorted(self.lookups.items())),
            RulesDocument.of(self.rules),
            tuple(map(TableDocument.of, self.tables)) or None,
            self.dynamic or None,
            self.rules.admission.min_freq,
            self.rules.admission.max_age_steps,
            self.not_in_8_bits,
        )

    @classmethod
    def read(cls, document: MappingSpecDocument) -> MappingSpec:
        """The recipe that a manifest holds."""
        admission = Admission(document.min_freq, document.max_age_steps)
        return cls(
            tuple(variable.read() for variable in document.variables),
            document.lookups,
            replace(document.rules.read(), admission=admission),
            tuple(table.read() for table in document.tables or ()),
            document.dynamic or (),
            document.not_in_8_bits,
        )


def _is_in_8_bits(source: TensorSource, rules: MappingRules) -> bool:
    """True if a rule casts it to int8."""
    return cast_for(source.key, source.tensor, rules.casts) is DType.INT8


class VariableDocument(Struct, frozen=True, omit_defaults=True):
    """A variable of the graph."""

    node: Annotated[Text, doc("its node")]
    key: Annotated[Text, doc("the name that it is restored by; of a part, the whole variable's")]
    dtype: Annotated[DtypeLabel, doc("what the graph computes with")]
    shape: Annotated[Shape, doc("its own shape")]
    full_shape: Annotated[Shape | None, doc("of a part: the whole variable's shape")] = None
    starts: Annotated[Shape | None, doc("of a part: where it begins in each dimension")] = None

    @classmethod
    def of(cls, variable: GraphVariable) -> VariableDocument:
        """What a manifest says of it."""
        whole = cls(variable.node, variable.key, variable.dtype.label, variable.shape)
        part = variable.part
        return whole if part is None else replace(whole, full_shape=part.full_shape, starts=part.starts)

    def read(self) -> GraphVariable:
        """The variable."""
        part = None
        if self.full_shape is not None:
            part = SliceSpec(self.full_shape, self.starts or (), self.shape)
            if not len(part.full_shape) == len(part.starts) == len(self.shape):
                raise DocumentError(f"part {self.node!r} of a variable: {_DIMENSIONS}")
        return GraphVariable(self.node, self.key, DType.of(self.dtype), self.shape, part)


class TableDocument(Struct, frozen=True):
    """A lookup table whose contents are served."""

    node: Annotated[Text, doc("its node")]
    keys: Annotated[Text, doc("the name of its keys")]
    values: Annotated[Text, doc("the name of its values")]
    key_dtype: Annotated[DtypeLabel, doc("of its keys")]
    value_dtype: Annotated[DtypeLabel, doc("of its values")]
    key_shape: Annotated[Shape, doc("of one key, as it is stored")]
    value_shape: Annotated[Shape, doc("of one value")]
    has_all_buckets: Annotated[bool, doc("true: there is an entry for each bucket")] = False

    @classmethod
    def of(cls, table: GraphTable) -> TableDocument:
        """What a manifest says of it."""
        dtypes = table.key_dtype.label, table.value_dtype.label
        shapes = table.key_shape or (), table.value_shape or ()
        return cls(table.node, table.keys, table.values, *dtypes, *shapes, table.has_all_buckets)

    def read(self) -> GraphTable:
        """The table."""
        dtypes = DType.of(self.key_dtype), DType.of(self.value_dtype)
        shape, key_shape = self.value_shape, self.key_shape
        return GraphTable(self.node, self.keys, self.values, *dtypes, shape, self.has_all_buckets, key_shape)


class RenameDocument(Struct, frozen=True):
    """A rule that names a variable's tensor."""

    pattern: Annotated[Text, doc("a regular expression of variables' names")]
    name: Annotated[Text, doc("the tensor's name")]


class CastDocument(Struct, frozen=True):
    """A rule that stores variables smaller."""

    pattern: Annotated[Text, doc("a regular expression of variables' names")]
    dtype: Annotated[DtypeLabel, doc("what they are stored as")]


def _option(rule: str) -> str:
    return option_of(ExportRequest, "partition_strategies" if rule == "strategies" else rule)


class RulesDocument(Struct, frozen=True, kw_only=True):
    """The rules that variables were mapped to tensors by."""

    renames: Annotated[tuple[RenameDocument, ...], doc("--rename")]
    average: Annotated[Text | None, doc("--average")]
    casts: Annotated[tuple[CastDocument, ...], doc("--cast")]
    by_order: Annotated[bool, doc("--by-order")] = False
    strategies: Annotated[dict[Text, PartitionStrategy], doc("--partition-strategy")]
    trained: Annotated[dict[Text, PartitionStrategy], doc("how training looked tables up, as its graph says")]
    object_path: Annotated[Text | None, doc("--object-path")]
    tensors: Annotated[dict[Text, Text], doc("the tensor that was found for each variable")]

    @classmethod
    def of(cls, rules: MappingRules) -> RulesDocument:
        """What a manifest says of them."""
        return cls(
            renames=tuple(RenameDocument(rule.pattern.pattern, rule.replacement) for rule in rules.renames),
            average=rules.average,
            casts=tuple(CastDocument(rule.pattern.pattern, rule.dtype.label) for rule in rules.casts),
            by_order=rules.by_order,
            strategies=dict(sorted(rules.strategies.items())),
            trained=dict(sorted(rules.trained.items())),
            object_path=rules.object_path,
            tensors=dict(sorted(rules.tensors.items())),
        )

    def read(self) -> MappingRules:
        """The rules."""
        try:
            return MappingRules(
                renames=tuple(RenameRule(re.compile(rule.pattern), rule.name) for rule in self.renames),
                average=self.average,
                casts=tuple(CastRule(re.compile(rule.pattern), DType.of(rule.dtype)) for rule in self.casts),
                by_order=self.by_order,
                strategies=self.strategies,
                trained=self.trained,
                object_path=self.object_path,
                tensors=self.tensors,
            )
        except (re.error, AmbiguousRename) as error:
            raise DocumentError(f"a rule does not parse: {error}") from error


class MappingSpecDocument(Struct, frozen=True, omit_defaults=True):
    """`recipe` in the manifest of a base."""

    variables: Annotated[tuple[VariableDocument, ...], doc("the graph's variables")]
    lookups: Annotated[dict[Text, PartitionStrategy], doc("how the graph looks each of them up")]
    rules: Annotated[RulesDocument, doc("the rules that variables were mapped to tensors by")]
    tables: Annotated[tuple[TableDocument, ...] | None, doc("lookup tables whose contents are served")] = None
    dynamic: Annotated[tuple[DynamicTable, ...] | None, doc("tables by arbitrary keys")] = None
    min_freq: Annotated[Count, doc("--min-freq")] = 0
    max_age_steps: Annotated[Count | None, doc("--max-age-steps")] = None
    not_in_8_bits: Annotated[tuple[Text, ...], doc("what --cast int8 leaves as it is, by name")] = ()


_DIMENSIONS = "shape, full_shape and starts have as many numbers as it has dimensions"
