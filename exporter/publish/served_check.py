"""Check that a base's manifest agrees with itself about its served variables: schema, recipe and tensors.

Deltas are made by the recipe, and written and applied by the schema; both describe the layout of the base's
own tensors. A manifest where these differ is damaged, or another program's, and cannot be used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import SliceSpec
from exporter.delta.format import OPEN, Schema, ServedVariable
from exporter.mapping.mapping_rules import CASTS, average_slots
from exporter.mapping.tensor_source import CASTABLE
from exporter.wire.json_documents import DocumentError

if TYPE_CHECKING:
    from exporter.mapping.mapping_spec import MappingSpec
    from exporter.mapping.tensor_source import TensorSource


class Stored(Struct, frozen=True):
    """The dtype and shape of a tensor or of a served variable."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def resolved(spec: MappingSpec, schema: Schema) -> MappingSpec:
    """The recipe with all names and dtypes that its rules produced.

    Releases up to 0.2 recorded only the rules. `schema` shows which variables were cast, and the names of
    lookup tables; the rules' `tensors` have a tensor for each variable. A table by keys keeps its own name
    unless a rule without a pattern renames it.
    """
    given, dtypes, renamed = spec.given, spec.dtypes, spec.renamed
    if given.casts and not dtypes:
        served = {variable.name: variable.dtype for variable in schema.variables}
        found = {v.key: served.get(v.served_name, v.dtype) for v in spec.variables if v.dtype in CASTABLE}
        dtypes = {key: dtype.label for key, dtype in found.items() if dtype.label in CASTS}
    if given.renames and not renamed:
        renamed = {name: new for name, new in _renamed(spec, schema) if name != new}
    return replace(spec, dtypes=dtypes, renamed=renamed)


def _renamed(spec: MappingSpec, schema: Schema) -> Iterator[tuple[str, str]]:
    for name, tensor in spec.given.tensors.items():
        slots = [f"/{slot}" for slot in average_slots(spec.given.average) if tensor.endswith(f"/{slot}")]
        yield name, tensor.removesuffix(max(slots, default=""))
    lookups = {keys.contents.table: (keys, values) for keys, values in schema.lookups if keys.contents}
    for table in spec.tables:
        if table.node in lookups:
            yield from zip(
                (table.keys, table.values), (half.name for half in lookups[table.node]), strict=True
            )
    tables = {table.name for table in spec.dynamic}
    for rule in spec.given.renames:
        name = _ESCAPED.sub(r"\1", rule.pattern)
        if name in tables and _LITERAL.fullmatch(rule.pattern) and "\\" not in rule.name:
            yield name, rule.name


_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_LITERAL = re.compile(r"(\\[^0-9A-Za-z]|[^\\.^$*+?{}\[\]|()])*")


def require_fitting(schema: Schema, spec: MappingSpec, tensors: Mapping[str, Stored]) -> None:
    """Raise DocumentError unless a base's served variables, its recipe and its tensors fit each other.

    `tensors` are those of the base's bundle, by name.
    """
    made = {name: stored for source in spec.sources() for name, stored in _made(source, tensors)}
    said = {variable.name: _said(variable) for variable in schema.variables}
    for name in sorted(made.keys() | said.keys()):
        if made.get(name) != said.get(name):
            raise DocumentError(
                f"manifest.incremental: {name!r} is {said.get(name, 'nothing')} by its schema, "
                f"{made.get(name, 'nothing')} by its recipe"
            )


def _said(variable: ServedVariable) -> Stored:
    if variable.is_table and not variable.shape:
        raise DocumentError(f"manifest.incremental.schema: {variable.name!r} is a table and has no rows")
    return Stored(variable.dtype.label, variable.shape)


def _made(source: TensorSource, tensors: Mapping[str, Stored]) -> Iterator[tuple[str, Stored]]:
    """Yield the name, and dtype and shape, of each served variable of a source, by the recipe.

    `tensors` are those of the base's bundle, by name. A table by keys has one variable, under the source's
    key, with an open number of rows. DocumentError if the bundle's tensor is missing or differs, or a
    variable is not a part of it.
    """
    found, label = tensors.get(source.key), source.dtype.label
    if found is None:
        raise DocumentError(f"manifest.incremental.recipe: there is no tensor {source.key!r}")
    if not source.variables:
        yield source.key, Stored(label, (OPEN, *found.shape[1:]))
        return
    whole = SliceSpec.whole(source.tensor.shape)
    if found != (wanted := Stored(label, _shape(source, whole))):
        raise DocumentError(f"tensor {source.key!r} is {found}, by the recipe {wanted}")
    for variable in source.variables:
        if variable.full_shape != whole.full_shape or not _is_inside(variable.box):
            raise DocumentError(
                f"manifest.incremental.recipe: {variable.served_name!r} is not a part of {found}"
            )
        yield variable.served_name, Stored(label, _shape(source, variable.box))


def _shape(source: TensorSource, box: SliceSpec) -> tuple[int, ...]:
    if source.is_in_8_bits and not box.lengths:
        raise DocumentError(f"manifest.incremental.recipe: {source.key!r} has no rows to be stored in 8 bits")
    return source.stored(box).lengths


def _is_inside(box: SliceSpec) -> bool:
    sizes = zip(box.full_shape, box.starts, box.lengths, strict=True)
    return all(start + length <= full for full, start, length in sizes)
