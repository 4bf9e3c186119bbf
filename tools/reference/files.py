"""The JSON files on disk: tables for docs/reference/formats.md and a JSON schema, from the types that read
them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import inspect as types

from exporter.increments.history import MarkerDocument
from exporter.increments.increment import IncrementDocument
from exporter.mapping.mapping_spec import MappingSpecDocument
from exporter.options import Updates, declared
from exporter.publish.manifest import DeltaDocument, VersionDocument
from tools.reference.documents import texts_under_fields
from tools.reference.markdown import code, table, text

ROOT = Path(__file__).parent.parent.parent
SCHEMA_FILE = "files.schema.json"
FILES: Mapping[str, tuple[type, ...]] = {
    "manifest": (VersionDocument, DeltaDocument),
    "increment": (IncrementDocument,),
    "marker": (MarkerDocument,),
}
"""The documents by the mark in docs/reference/formats.md that their tables stand behind."""
_FOR_THE_EXPORTER = (MappingSpecDocument,)
"""What no other reader needs to look into; the schema has its fields, the page does not."""


def page() -> str:
    """docs/reference/formats.md with the tables as the code has them now."""
    content = (ROOT / "docs/reference/formats.md").read_text()
    for name, documents in FILES.items():
        begin, end = f"<!-- {name}: made by tools.reference -->\n", f"<!-- end of {name} -->\n"
        before, found, rest = content.partition(begin)
        _, closed, after = rest.partition(end)
        assert found and closed, f"docs/reference/formats.md has lost the marks around {name}"
        told: set[type] = set()
        tables = "\n".join(part for document in documents for part in _tables(document, told))
        content = f"{before}{begin}\n{tables}\n{end}{after}"
    return content


def schema() -> str:
    """The JSON schema of every file, as one."""
    documents = [document for kinds in FILES.values() for document in kinds]
    _, definitions = msgspec.json.schema_components(documents, ref_template="#/$defs/{name}")
    for kind in (Updates,):  # whose fields are described by the help of their options
        properties = definitions[kind.__name__]["properties"]
        for name, meaning in _helps(kind).items():
            properties[name] = {"description": meaning, **properties[name]}
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "JSON files that export-model and trainers leave on disk",
        "anyOf": [{"$ref": f"#/$defs/{document.__name__}"} for document in documents],
        "$defs": {name: definitions[name] for name in sorted(definitions)},
    }
    return json.dumps(whole, indent=2) + "\n"


def _tables(kind: type, told: set[type]) -> Iterator[str]:
    """The table of a document, and of each object that it holds, unless that has been told."""
    if kind in told:
        return
    told.add(kind)
    found = types.type_info(kind)
    assert isinstance(found, types.StructType | types.DataclassType)
    summary = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
    yield f"*{_title(kind)}.* {text(summary)}\n"
    tag_field, tag = getattr(found, "tag_field", None), getattr(found, "tag", None)
    first = [(code(tag_field), code(json.dumps(tag)), "what the document is")] if tag_field else []
    below = {**texts_under_fields(kind), **_helps(kind)}
    rows = (
        (
            code(field.encode_name),
            _type(field.type) + ("" if field.required or field.name in _ALWAYS else ", optional"),
            text(_meaning(field, below)),
        )
        for field in found.fields
    )
    yield table(("field", "type", "meaning"), [*first, *rows])
    for field in found.fields:
        for inner in _structs(field.type):
            if inner not in _FOR_THE_EXPORTER:
                yield from _tables(inner, told)


def _helps(kind: type) -> dict[str, str]:
    """The help of fields that are options."""
    return {one.path[0]: one.option.help for one in declared(kind) if len(one.path) == 1}


def _title(kind: type) -> str:
    return kind.__name__.removesuffix("Document")


def _meaning(field: types.Field, below: Mapping[str, str]) -> str:
    """What the declaration says a field means, in its type or in the text below it.

    Raises:
        KeyError: it says nothing.
    """
    if isinstance(field.type, types.Metadata) and field.type.extra_json_schema:
        meaning: str = field.type.extra_json_schema["description"]
        return meaning
    return below[field.name]


def _type(found: types.Type) -> str:
    """A type in JSON's words."""
    match found:
        case types.Metadata(type=inner):
            return _type(inner)
        case types.UnionType(types=members):
            return " or ".join(map(_type, members))
        case types.StructType(cls=kind) | types.DataclassType(cls=kind):
            return _title(kind)
        case types.VarTupleType(item_type=item) | types.ListType(item_type=item):
            return f"list of {_type(item)}"
        case types.DictType(value_type=value):
            return f"object: name to {_type(value)}"
        case types.LiteralType(values=values) if len(values) <= _FEW:
            return " or ".join(code(json.dumps(value)) for value in values)
        case types.EnumType(cls=kind):
            return " or ".join(code(json.dumps(member.value)) for member in kind)
        case types.LiteralType():
            return "string"
    return _WORDS[type(found)]


def _structs(found: types.Type) -> Iterator[type]:
    match found:
        case types.StructType(cls=kind) | types.DataclassType(cls=kind):
            yield kind
        case (
            types.Metadata(type=inner) | types.VarTupleType(item_type=inner) | types.ListType(item_type=inner)
        ):
            yield from _structs(inner)
        case types.UnionType(types=members):
            for member in members:
                yield from _structs(member)


_FEW = 5
_ALWAYS = ("format_version", "kind")
"""Fields that are always written, though they have a default in memory."""
_WORDS: Mapping[type[types.Type], str] = {
    types.AnyType: "any",
    types.BoolType: "true or false",
    types.DateTimeType: "time (RFC 3339)",
    types.FloatType: "number",
    types.IntType: "integer",
    types.NoneType: "null",
    types.StrType: "string",
}
