"""The JSON documents of all commands: a page of tables, and a JSON schema, both from their types."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from exporter.cli.documents import deltas, exported, inspections, logs
from exporter.pipeline.comparison import Differences
from exporter.terminal.output import FORMAT_VERSION, Failure
from serving import documents as served
from serving.agent.journal import AgentEvent
from tools.reference.declarations import in_words, meanings, structs_in, type_info
from tools.reference.markdown import code, table, text

PRINTED_BY: Mapping[str, Sequence[type[Struct]]] = {
    "export-model": (exported.Export, exported.ExportPlan, exported.PublishedAlready, exported.StandBy),
    "export-model --incr": (deltas.DeltaExport, deltas.DeltaPlan),
    "export-model --config": (exported.SeveralRuns,),
    "export-model init": (inspections.Proposed,),
    "export-model inspect": (
        inspections.CheckpointInspection,
        inspections.GraphInspection,
        inspections.VersionInspection,
        inspections.ModelInspection,
        inspections.NameComparison,
    ),
    "export-model history": (logs.History,),
    "export-model merge": (logs.Merge, logs.Rebase),
    "export-model rollback, export-model resume": (logs.Rollback,),
    "export-model tag": (logs.Tags, logs.Tag),
    "export-model diff": (Differences,),
    "export-model verify": (logs.Verification,),
    "export-model doctor": (logs.Diagnosis,),
    "export-model push": (logs.Push,),
    "export-model pull": (logs.Pull,),
    "serve-model run": (served.Serving,),
    "serve-model reload": (served.Reload,),
    "serve-model status": (served.ModelStatus,),
    "serve-model predict": (
        served.RowPrediction,
        served.ColumnPrediction,
        served.ExampleResults,
        served.RequestExample,
    ),
    "serve-model update": (served.Update,),
    "serve-model agent": (served.AgentStarted, AgentEvent),
    "/status.json of the agent": (served.AgentStatus,),
}
"""Which documents a command prints on stdout. A command with `--watch` prints one a line."""

SCHEMA_FILE = "documents.schema.json"
_PAGE = """\
# JSON documents

With `--json` a command prints one document on stdout; with `--watch` one for each publication, each on a
line of its own. Its first field is `format_version`, which is {version}. A document has all its fields:
`null` says that something is not known, or is not the case. New releases may add fields (ignore those that
you do not know) and never change what a field means without another `format_version`.

[{schema_file}]({schema_file}) has all of this as JSON Schema (2020-12), one definition for each document.
"""
_ERROR = """\
If a command fails, the last line of stderr is this object, with `format_version` first, and the
[exit code](exit-codes.md) is not 0. Some commands print their document, too, before they fail: `verify`,
`doctor`, `serve-model status` and `serve-model update`.
"""


def page() -> str:
    """The page of tables."""
    parts = [_PAGE.format(version=FORMAT_VERSION, schema_file=SCHEMA_FILE)]
    told: set[type] = set()
    for command, documents in PRINTED_BY.items():
        parts.append(f"## {command}\n")
        for document in documents:
            parts += _tables(document, told)
    parts += ["## Errors\n", _ERROR, *_tables(Failure, told)]
    return "\n".join(parts)


def schema() -> str:
    """The JSON schema of every document, as one file."""
    printed: list[type[Struct]] = [document for documents in PRINTED_BY.values() for document in documents]
    _, definitions = msgspec.json.schema_components(
        [*printed, Failure], ref_template="#/$defs/{name}", schema_hook=_of_path
    )
    by_name = {kind.__name__: kind for kind in every_document()}
    for name, definition in definitions.items():
        if name not in by_name:
            continue
        told = meanings(by_name[name])
        for field, found in definition["properties"].items():
            definition["properties"][field] = {"description": told[field], **_without(found, "default")}
        definition["required"] = list(definition["properties"])
    _stand_apart(definitions, {document.__name__ for document in printed})
    with_version: list[type[Struct]] = [*printed, Failure]
    for document in with_version:
        definition = definitions[document.__name__]
        version = {"description": "Version of the documents' format.", "const": FORMAT_VERSION}
        definition["properties"] = {"format_version": version, **definition["properties"]}
        definition["required"] = ["format_version", *definition["required"]]
    names = [document.__name__ for document in printed]
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Documents of export-model and serve-model",
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in (*names, Failure.__name__)],
        "$defs": {name: definitions[name] for name in sorted(definitions)},
    }
    return json.dumps(whole, indent=2) + "\n"


def _stand_apart(definitions: dict[str, Any], printed: Set[str]) -> None:
    """Give what is printed by itself, and is part of another document, too, a definition as a part: it has no
    `format_version` of its own there.
    """
    refs = {name: f'"#/$defs/{name}"' for name in printed}
    inside = {name for name, ref in refs.items() if ref in json.dumps(definitions)}
    for name in inside:
        definitions[f"{name}Part"] = definitions[name]
    text = json.dumps(definitions)
    for name in inside:
        text = text.replace(refs[name], f'"#/$defs/{name}Part"')
    definitions |= json.loads(text)


def every_document() -> Iterator[type[Struct]]:
    """Every class of the documents, and of what they hold."""
    found: dict[type[Struct], None] = {}
    left: list[type[Struct]] = [Failure, *(kind for documents in PRINTED_BY.values() for kind in documents)]
    while left:
        kind = left.pop()
        if kind not in found:
            found[kind] = None
            left += [inner for field in type_info(kind).fields for inner in structs_in(field.type)]
    yield from found


def _of_path(kind: type) -> dict[str, Any]:
    assert kind is Path
    return {"type": "string"}


def _tables(kind: type[Struct], told: set[type]) -> Iterator[str]:
    """The table of a document, and of each class that it holds, unless that has been told."""
    if kind in told:
        return
    told.add(kind)
    yield f"### {kind.__name__}\n"
    yield text(" ".join((inspect.getdoc(kind) or "").split())) + "\n"
    fields, said = type_info(kind).fields, meanings(kind)
    yield table(
        ("field", "type", "meaning"),
        ((code(field.name), in_words(field.type, _link), text(said[field.name])) for field in fields),
    )
    inside = {inner.__name__: inner for field in fields for inner in structs_in(field.type)}
    for _, inner in sorted(inside.items()):
        yield from _tables(inner, told)


def _link(kind: type) -> str:
    return f"[{kind.__name__}](#{kind.__name__.lower()})"


def _without(definition: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in definition.items() if name != key}
