"""Keep how served variables come from a trainer's checkpoint, so that deltas need no graph.

A mapping spec holds what the mapping was made from (the graph's variables, how their parts are looked up, the
rules) so that the same mapping can be made of the next checkpoint, also if that partitions its tensors in
another way, without TensorFlow and without the user's code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass, field, replace
from typing import Any

from exporter.catalog import Catalog, SliceSpec, TensorRef
from exporter.errors import AmbiguousRename, MappingError, SchemaChanged
from exporter.graph.inference_graph import GraphTable, GraphVariable, InferenceGraph, PartitionStrategy
from exporter.mapping.build import (
    CastRule,
    MappingRules,
    RenameRule,
    TensorSource,
    VariableMapping,
    build_mapping,
    cast_for,
)
from exporter.mapping.table_sources import stored_names
from exporter.wire.dtypes import DType
from exporter.wire.json_fields import FieldError, Fields


@dataclass(frozen=True)
class MappingSpec:
    """The graph's variables (in the dtypes that the graph computes with), their lookups, and the rules.

    `tables` are the graph's lookup tables, by the graph's names and in the shapes that they are stored in.
    """

    variables: tuple[GraphVariable, ...]
    lookups: MappingOf[str, PartitionStrategy] = field(default_factory=dict)
    rules: MappingRules = field(default_factory=MappingRules)
    tables: tuple[GraphTable, ...] = ()

    @classmethod
    def of(cls, graph: InferenceGraph, rules: MappingRules, mapping: VariableMapping) -> MappingSpec:
        """How a full export mapped: what it found among a trainer's objects is kept by name."""
        found = {source.key: source.tensor.name for source in mapping.sources if source.variables}
        tables = tuple(
            replace(table, key_shape=stored.key_shape, value_shape=stored.value_shape)
            for table, stored in zip(graph.tables, mapping.tables, strict=True)
        )
        return cls(graph.variables, graph.lookups, replace(rules, tensors=found), tables)

    def mapping(self, catalog: Catalog) -> VariableMapping:
        """The mapping of another checkpoint of the same model.

        Raises:
            SchemaChanged: a variable has no tensor there, or one of another shape or dtype.
        """
        graph = InferenceGraph(
            "the published base", None, self.variables, lookups=self.lookups, tables=self.tables
        )
        try:
            return build_mapping(graph, catalog, self.rules)
        except MappingError as error:
            raise SchemaChanged(
                f"{catalog.prefix.name} does not fit what is published: {error.message}", cause=error.cause
            ) from error

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
        return TensorSource(key, tuple(members), tensor, cast=cast_for(key, tensor, self.rules.casts))

    def check_rules(self, given: MappingRules) -> None:
        """Compare the rules with those of a later command line, which may leave all of them out.

        Raises:
            SchemaChanged: they differ, which would change the values of rows that nobody touched.
        """
        given = replace(given, trained={}, tensors={})
        if given == MappingRules():
            return
        was, now = _rules_to_json(replace(self.rules, trained={}, tensors={})), _rules_to_json(given)
        differing = [name for name in was if was[name] != now[name]]
        if differing:
            raise SchemaChanged(
                "the base was exported with other rules",
                cause="; ".join(f"{name} was {was[name]!r}, is {now[name]!r}" for name in differing),
            )

    def to_json(self) -> dict[str, Any]:
        """The spec as a JSON object."""
        return {
            "variables": [_variable_to_json(variable) for variable in self.variables],
            "lookups": _strategies_to_json(self.lookups),
            "rules": _rules_to_json(self.rules),
            **({"tables": [_table_to_json(table) for table in self.tables]} if self.tables else {}),
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> MappingSpec:
        """The spec that `to_json` gave.

        Raises:
            FieldError: it is something else.
        """
        return cls(
            tuple(map(_variable_from_json, fields.objects("variables"))),
            _strategies_from_json(fields, "lookups"),
            _rules_from_json(fields.object("rules")),
            tuple(map(_table_from_json, fields.objects("tables"))) if "tables" in fields.document else (),
        )


def _variable_to_json(variable: GraphVariable) -> dict[str, Any]:
    part = variable.part
    box = {} if part is None else {"full_shape": list(part.full_shape), "starts": list(part.starts)}
    return {
        "node": variable.node,
        "key": variable.key,
        "dtype": variable.dtype.label,
        "shape": list(variable.shape),
        **box,
    }


def _variable_from_json(fields: Fields) -> GraphVariable:
    shape = fields.integers("shape")
    part = None
    if "full_shape" in fields.document:
        part = SliceSpec(fields.integers("full_shape"), fields.integers("starts"), shape)
        if not len(part.full_shape) == len(part.starts) == len(shape):
            raise fields.fail("starts", "as many numbers as dimensions")
    return GraphVariable(fields.text("node"), fields.text("key"), _dtype(fields, "dtype"), shape, part)


def _table_to_json(table: GraphTable) -> dict[str, Any]:
    return {
        "node": table.node,
        "keys": table.keys,
        "values": table.values,
        "key_dtype": table.key_dtype.label,
        "value_dtype": table.value_dtype.label,
        "key_shape": list(table.key_shape or ()),
        "value_shape": list(table.value_shape or ()),
        "has_all_buckets": table.has_all_buckets,
    }


def _table_from_json(fields: Fields) -> GraphTable:
    return GraphTable(
        fields.text("node"),
        fields.text("keys"),
        fields.text("values"),
        _dtype(fields, "key_dtype"),
        _dtype(fields, "value_dtype"),
        fields.integers("value_shape"),
        fields.document.get("has_all_buckets") is True,
        fields.integers("key_shape"),
    )


def _rules_to_json(rules: MappingRules) -> dict[str, Any]:
    return {
        "renames": [{"pattern": rule.pattern.pattern, "name": rule.replacement} for rule in rules.renames],
        "average": rules.average,
        "casts": [{"pattern": rule.pattern.pattern, "dtype": rule.dtype.label} for rule in rules.casts],
        "by_order": rules.by_order,
        "strategies": _strategies_to_json(rules.strategies),
        "trained": _strategies_to_json(rules.trained),
        "object_path": rules.object_path,
        "tensors": dict(sorted(rules.tensors.items())),
    }


def _rules_from_json(fields: Fields) -> MappingRules:
    try:
        return MappingRules(
            renames=tuple(
                RenameRule(re.compile(rule.text("pattern")), rule.text("name"))
                for rule in fields.objects("renames")
            ),
            average=fields.or_null(fields.text, "average"),
            casts=tuple(
                CastRule(re.compile(rule.text("pattern")), _dtype(rule, "dtype"))
                for rule in fields.objects("casts")
            ),
            by_order=fields.document.get("by_order") is True,
            strategies=_strategies_from_json(fields, "strategies"),
            trained=_strategies_from_json(fields, "trained"),
            object_path=fields.or_null(fields.text, "object_path"),
            tensors=_texts(fields.object("tensors")),
        )
    except (re.error, AmbiguousRename) as error:
        raise FieldError(f"{fields.where} holds a rule that does not parse: {error}") from error


def _texts(fields: Fields) -> dict[str, str]:
    return {key: fields.text(key) for key in fields.document}


def _strategies_to_json(strategies: MappingOf[str, PartitionStrategy]) -> dict[str, str]:
    return {key: strategy.value for key, strategy in sorted(strategies.items())}


def _strategies_from_json(fields: Fields, key: str) -> dict[str, PartitionStrategy]:
    found = fields.object(key)
    return {name: PartitionStrategy(found.text(name, _STRATEGY)) for name in found.document}


def _dtype(fields: Fields, key: str) -> DType:
    try:
        return DType.of(fields.text(key))
    except KeyError as error:
        raise fields.fail(key, "the name of a TensorFlow dtype") from error


_STRATEGY = re.compile("|".join(strategy.value for strategy in PartitionStrategy))
