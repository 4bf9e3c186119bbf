"""The JSON files on disk: tables for docs/reference/formats.md and a JSON schema, from the types that read
them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from exporter.increments.history import CheckpointMarker
from exporter.increments.increment import IncrementDocument
from exporter.mapping.mapping_spec import MappingSpec
from exporter.options import Updates
from exporter.publish.manifest import DeltaDocument, VersionDocument
from tools.reference.declarations import helps, in_words, meanings, structs_in, title, type_info
from tools.reference.markdown import code, table, text

ROOT = Path(__file__).parent.parent.parent
SCHEMA_FILE = "files.schema.json"
FILES: Mapping[str, tuple[type, ...]] = {
    "manifest": (VersionDocument, DeltaDocument),
    "increment": (IncrementDocument,),
    "marker": (CheckpointMarker,),
}
"""The documents by the mark in docs/reference/formats.md that their tables stand behind."""
_FOR_THE_EXPORTER = (MappingSpec,)
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
        for name, meaning in helps(kind).items():
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
    found = type_info(kind)
    summary = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
    yield f"*{title(kind)}.* {text(summary)}\n"
    tag, said = found.tag_field, meanings(kind)
    first = [(code(tag), code(json.dumps(found.tag)), "what the document is")] if tag else []
    rows = (
        (
            code(field.encode_name),
            in_words(field.type) + ("" if field.required or field.name in _ALWAYS else ", optional"),
            text(said[field.name]),
        )
        for field in found.fields
    )
    yield table(("field", "type", "meaning"), [*first, *rows])
    for field in found.fields:
        for inner in structs_in(field.type):
            if inner not in _FOR_THE_EXPORTER:
                yield from _tables(inner, told)


_ALWAYS = ("format_version", "kind")
"""Fields that are always written, though they have a default in memory."""
