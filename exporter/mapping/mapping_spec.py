"""The recipe by which served variables come from a trainer's checkpoint, kept so that deltas need no
graph.

It holds what the mapping was made from: the graph's variables, how their parts are looked up, the rules. From
it the same mapping is made for the next checkpoint, also if that partitions its tensors in another way,
without TensorFlow and without the user's code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, TypeVar

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from exporter.catalog import Catalog, Naming, SliceSpec, TensorRef
from exporter.checkpoint.admission import Admission
from exporter.errors import MappingError, SchemaChanged
from exporter.graph.inference_graph import (
    GraphDynamicTable,
    GraphTable,
    GraphVariable,
    InferenceGraph,
    PartitionStrategy,
)
from exporter.mapping.mapping_rules import MappingRules
from exporter.mapping.tensor_source import TensorSource, cast_for, group_parts, stored_names
from exporter.options import ExportRequest, option_of
from exporter.tables.parts import PARTS
from exporter.wire.dtypes import DType
from exporter.wire.json_documents import Count, DocumentError, DtypeLabel, Shape, Text, as_builtins, doc

T = TypeVar("T")

if TYPE_CHECKING:
    from exporter.mapping.build import VariableMapping


class DynamicTable(
    Struct, frozen=True, rename={"key_label": "key_dtype", "label": "dtype", "dim": "dimension"}
):
    """A table by arbitrary keys, in four variables; its last `defaults` rows are for absent keys."""

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

    @classmethod
    def of(cls, table: GraphDynamicTable) -> DynamicTable:
        """The table as a graph has it, without the values that absent keys read."""
        return cls(table.name, table.key_dtype.label, table.value_dtype.label, table.dim, len(table.defaults))

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of its variables, in the order of `exporter.tables.parts.PARTS`."""
        return tuple(f"{self.name}/{part}" for part in PARTS)


class VariableDocument(Struct, frozen=True, omit_defaults=True):
    """A variable of the graph, as a manifest has it: a part's box is spread over three fields."""

    node: Annotated[Text, doc("its node")]
    key: Annotated[Text, doc("the name that it is restored by; of a part, the whole variable's")]
    dtype: Annotated[DtypeLabel, doc("what the graph computes with")]
    shape: Annotated[Shape, doc("its own shape")]
    full_shape: Annotated[Shape | None, doc("of a part: the whole variable's shape")] = None
    starts: Annotated[Shape | None, doc("of a part: where it begins in each dimension")] = None

    @classmethod
    def of(cls, variable: GraphVariable) -> VariableDocument:
        """The document of a variable."""
        whole = cls(variable.node, variable.key, variable.dtype.label, variable.shape)
        part = variable.part
        return whole if part is None else replace(whole, full_shape=part.full_shape, starts=part.starts)

    def read(self) -> GraphVariable:
        """The variable of the document; DocumentError if its box has too few dimensions."""
        part = None
        if self.full_shape is not None:
            part = SliceSpec(self.full_shape, self.starts or (), self.shape)
            if not len(part.full_shape) == len(part.starts) == len(self.shape):
                raise DocumentError(f"part {self.node!r} of a variable: {_DIMENSIONS}")
        return GraphVariable(self.node, self.key, DType.of(self.dtype), self.shape, part)


class PlaceDocument(Struct, frozen=True, omit_defaults=True):
    """Where Keras looks for a variable in a weights file, as a manifest has it."""

    name: Annotated[Text, doc("the tensor's name there")]
    dtype: Annotated[DtypeLabel, doc("its type in the model")]
    shape: Annotated[Shape, doc("its shape in the model")]
    owner: Annotated[Text, doc("the names of the layers that it belongs to")] = ""

    @classmethod
    def of(cls, place: TensorRef) -> PlaceDocument:
        """The document of a place."""
        return cls(place.name, place.dtype.label, place.shape, place.owner)

    def read(self) -> TensorRef:
        """The place of the document."""
        return TensorRef(self.name, DType.of(self.dtype), self.shape, owner=self.owner)


class MappingSpec(Struct, frozen=True, omit_defaults=True, dict=True, rename={"stored": "variables"}):
    """How a base's variables come from a trainer's checkpoint: `recipe` in its manifest.

    `dynamic` are tables by arbitrary keys, whose variables are among the others. `not_in_8_bits` are the
    variables, by key, that a rule would cast to int8 and that are no tables by rows. `layers` are those of
    a Keras model whose values came from a file that knows them by layers.
    """

    stored: Annotated[tuple[VariableDocument, ...], doc("the graph's variables")]
    lookups: Annotated[Mapping[Text, PartitionStrategy], doc("how the graph looks each of them up")]
    rules: Annotated[MappingRules, doc("the rules that variables were mapped to tensors by")]
    tables: Annotated[tuple[GraphTable, ...], doc("lookup tables whose contents are served")] = ()
    dynamic: Annotated[tuple[DynamicTable, ...], doc("tables by arbitrary keys")] = ()
    min_freq: Annotated[Count, doc("--min-freq")] = 0
    max_age_steps: Annotated[Count | None, doc("--max-age-steps")] = None
    not_in_8_bits: Annotated[tuple[Text, ...], doc("what --cast int8 leaves as it is, by name")] = ()
    layers: Annotated[
        Mapping[Text, tuple[PlaceDocument, ...]],
        doc("where Keras looks for each variable of the model in a weights file; the last place counts"),
    ] = field(default_factory=dict)

    @classmethod
    def of(
        cls, graph: InferenceGraph, rules: MappingRules, mapping: VariableMapping, admission: Admission
    ) -> MappingSpec:
        """The recipe of a full export; tensors found among a trainer's objects are kept by name."""
        ours = [source for source in mapping.sources if source.variables]
        tables = (
            replace(table, key_shape=stored.key_shape or (), value_shape=stored.value_shape or ())
            for table, stored in zip(graph.tables, mapping.tables, strict=True)
        )
        return cls(
            tuple(map(VariableDocument.of, graph.variables)),
            _sorted(graph.lookups),
            replace(
                rules,
                strategies=_sorted(rules.strategies),
                trained=_sorted(rules.trained),
                tensors=_sorted({source.key: source.tensor.name for source in ours}),
            ),
            tuple(tables),
            tuple(DynamicTable.of(table) for table in graph.dynamic_tables if not table.is_laid_out),
            admission.min_freq,
            admission.max_age_steps,
            tuple(
                s.key
                for s in ours
                if not s.is_in_8_bits and cast_for(s.key, s.tensor, rules.casts) is DType.INT8
            ),
            {key: tuple(map(PlaceDocument.of, at)) for key, at in _sorted(graph.layers).items()}
            if mapping.catalog.naming is Naming.LAYERS or any(source.tensor.owner for source in ours)
            else {},
        )

    @cached_property
    def variables(self) -> tuple[GraphVariable, ...]:
        """The graph's variables, in the dtypes that the graph computes with."""
        return tuple(variable.read() for variable in self.stored)

    @property
    def admission(self) -> Admission:
        """The filter of the keys of dynamic tables."""
        return Admission(self.min_freq, self.max_age_steps)

    def mapping(self, catalog: Catalog) -> VariableMapping:
        """The mapping of another checkpoint of the same model, without its dynamic tables.

        Raises:
            SchemaChanged: the checkpoint is of another model.
        """
        from exporter.mapping.build import build_mapping

        others = {key for table in self.dynamic for key in table.keys}
        ordinary = tuple(variable for variable in self.variables if variable.key not in others)
        layers = {key: tuple(place.read() for place in at) for key, at in self.layers.items()}
        graph = InferenceGraph(
            "the published base", None, ordinary, lookups=self.lookups, tables=self.tables, layers=layers
        )
        try:
            mapping = build_mapping(graph, catalog, self.rules)
        except MappingError as error:
            raise SchemaChanged(
                f"{catalog.prefix.name} does not fit what is published: {error.message}", cause=error.cause
            ) from error
        return replace(mapping, sources=tuple(map(self._as_chosen, mapping.sources)))

    def _as_chosen(self, source: TensorSource) -> TensorSource:
        return replace(source, cast=None) if source.key in self.not_in_8_bits else source

    def trained_name(self, table: DynamicTable) -> str:
        """The name that a dynamic table has in the checkpoint."""
        return self.rules.renamed(table.name) or table.name

    def sources(self) -> tuple[TensorSource, ...]:
        """The served variables as they lie in a bundle published by this recipe, whatever the trainer had."""
        variables = (self._published(*item) for item in group_parts(self.variables).items())
        return (*variables, *(source for table in self.tables for source in self._contents(table)))

    def _contents(self, table: GraphTable) -> Iterator[TensorSource]:
        keys, values = stored_names(table, self.rules.renamed)
        for name, dtype in ((keys, table.key_dtype), (values, table.value_dtype)):
            yield TensorSource(name, (), TensorRef(name, dtype, ()), "table")

    def _published(self, key: str, parts: tuple[GraphVariable, ...]) -> TensorSource:
        tensor = TensorRef(key, parts[0].dtype, parts[0].full_shape)
        cast = cast_for(key, tensor, self.rules.casts)
        return self._as_chosen(TensorSource(key, parts, tensor, cast=cast))

    def check_rules(self, given: MappingRules, admission: Admission) -> None:
        """Refuse rules of a later command line that differ from these; it may leave all of them out.

        Raises:
            SchemaChanged: names the options that differ.
        """
        given = replace(given, trained={}, tensors={})
        if given == MappingRules() and admission == Admission():
            return
        own = replace(self.rules, trained={}, tensors={})
        was, now = (
            as_builtins(rules) | asdict(filter_)
            for rules, filter_ in ((own, self.admission), (given, admission))
        )
        differing = [name for name in was if was[name] != now[name]]
        if differing:
            raise SchemaChanged(
                "the base was exported with other rules",
                cause="; ".join(f"{_option(name)} was {was[name]!r}, is {now[name]!r}" for name in differing),
            )


def _sorted(by_name: Mapping[str, T]) -> dict[str, T]:
    """The same in the order of the names, as manifests have it."""
    return dict(sorted(by_name.items()))


def _option(rule: str) -> str:
    return option_of(ExportRequest, "partition_strategies" if rule == "strategies" else rule)


_DIMENSIONS = "shape, full_shape and starts have as many numbers as it has dimensions"
