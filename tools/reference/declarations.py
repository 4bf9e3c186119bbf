"""What declarations of JSON say: types in words, the structs in them, and what each field means."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping

from msgspec import Struct
from msgspec import inspect as types

from exporter.options import declared
from tools.reference.markdown import code


def helps(kind: type[Struct]) -> dict[str, str]:
    """The help of fields that are options."""
    found: dict[str, str] = {}
    for one in declared(kind):
        if len(one.path) == 1:
            found |= one.option.of_fields() or {one.path[0]: one.option.help}
    return found


def meanings(kind: type[Struct]) -> dict[str, str]:
    """What each field means: what its type says, the help of its option, or the text under it.

    Raises:
        KeyError: nothing says it.
    """
    found: dict[str, str] = {}
    for parent in reversed(kind.__mro__):
        if issubclass(parent, Struct) and parent is not Struct:
            found |= texts_under_fields(parent)
    found |= helps(kind)
    fields = type_info(kind).fields
    for field in fields:
        if isinstance(field.type, types.Metadata) and field.type.extra_json_schema:
            found[field.name] = field.type.extra_json_schema["description"]
    return {field.name: found[field.name] for field in fields}


def type_info(kind: type[Struct]) -> types.StructType:
    """A struct's fields and their types."""
    found = types.type_info(kind)
    assert isinstance(found, types.StructType)
    return found


def title(kind: type) -> str:
    """What a page of files calls a class."""
    return kind.__name__.removesuffix("Document")


def in_words(found: types.Type, name: Callable[[type], str] = title) -> str:
    """A type in JSON's words; `name` gives those of a class."""
    match found:
        case types.Metadata(type=inner):
            return in_words(inner, name)
        case types.UnionType(types=members):
            return " or ".join(in_words(member, name) for member in members)
        case types.StructType(cls=kind):
            return name(kind)
        case types.VarTupleType(item_type=item) | types.ListType(item_type=item):
            return f"list of {in_words(item, name)}"
        case types.DictType(value_type=value):
            return f"object: name to {in_words(value, name)}"
        case types.LiteralType(values=values) if len(values) <= _FEW:
            return " or ".join(code(json.dumps(value)) for value in values)
        case types.EnumType(cls=choices) if len(choices) <= _FEW:
            return " or ".join(code(json.dumps(member.value)) for member in choices)
        case types.LiteralType() | types.EnumType() | types.CustomType():
            return "string"
    return _WORDS[type(found)]


def structs_in(found: types.Type) -> Iterator[type[Struct]]:
    """The classes that a type names."""
    match found:
        case types.StructType(cls=kind):
            yield kind
        case (
            types.Metadata(type=inner) | types.VarTupleType(item_type=inner) | types.ListType(item_type=inner)
        ):
            yield from structs_in(inner)
        case types.DictType(value_type=inner):
            yield from structs_in(inner)
        case types.UnionType(types=members):
            for member in members:
                yield from structs_in(member)


def texts_under_fields(kind: type) -> dict[str, str]:
    """The texts below the fields in a class's own definition."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(words))),
            ):
                found[name] = " ".join(words.split())
    return found


_FEW = 5
_WORDS: Mapping[type[types.Type], str] = {
    types.AnyType: "any",
    types.BoolType: "true or false",
    types.DateTimeType: "time (RFC 3339)",
    types.FloatType: "number",
    types.IntType: "integer",
    types.NoneType: "null",
    types.StrType: "string",
}
