"""The JSON documents of all commands: a page of tables, and a JSON schema, both from their types."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from exporter.cli.documents import exported, inspections, logs
from exporter.terminal.output import FORMAT_VERSION, Failure
from serving import documents as served
from tools.reference.markdown import code, table, text

PRINTED_BY: Mapping[str, Sequence[type]] = {
    "export-model": (exported.Export, exported.ExportPlan, exported.PublishedAlready, exported.StandBy),
    "export-model --incr": (exported.DeltaExport, exported.DeltaPlan),
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
    "export-model diff": (logs.Differences,),
    "export-model verify": (logs.Verification,),
    "export-model doctor": (logs.Diagnosis,),
    "export-model push": (logs.Push,),
    "export-model pull": (logs.Pull,),
    "serve-model run": (served.Serving,),
    "serve-model reload": (served.Reload,),
    "serve-model status": (served.ModelStatus,),
    "serve-model predict": (served.RowPrediction, served.ColumnPrediction, served.ExampleResults),
    "serve-model update": (served.Update,),
    "serve-model agent": (served.AgentStarted, served.AgentEvent),
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
If a command fails, the last line of stderr is this object, and the [exit code](exit-codes.md) is not 0. Some
commands print their document, too, before they fail: `verify`, `doctor`, `serve-model status` and
`serve-model update`.
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
    printed = [document for documents in PRINTED_BY.values() for document in documents]
    _, definitions = msgspec.json.schema_components([*printed, Failure], ref_template="#/$defs/{name}")
    by_name = {kind.__name__: kind for kind in every_document()}
    for name, definition in definitions.items():
        if name not in by_name:
            continue
        told = descriptions(by_name[name])
        for field, found in definition["properties"].items():
            definition["properties"][field] = {"description": told[field], **_without(found, "default")}
        definition["required"] = list(definition["properties"])
    for document in printed:
        definition = definitions[document.__name__]
        version = {"description": "Version of the documents' format.", "const": FORMAT_VERSION}
        definition["properties"] = {"format_version": version, **definition["properties"]}
        definition["required"] = ["format_version", *definition["required"]]
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Documents of export-model and serve-model",
        "anyOf": [{"$ref": f"#/$defs/{document.__name__}"} for document in [*printed, Failure]],
        "$defs": {name: definitions[name] for name in sorted(definitions)},
    }
    return json.dumps(whole, indent=2) + "\n"


def every_document() -> Iterator[type[Struct]]:
    """Every class of the documents, and of what they hold."""
    for module in (exported, inspections, logs, logs, served):
        yield from {kind.__name__: kind for kind in vars(module).values() if _is_document(kind)}.values()
    yield Failure


def _is_document(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct) and kind is not Struct


def descriptions(kind: type[Struct]) -> dict[str, str]:
    """What each field means: the text under it in the class, or in the class that it comes from.

    Raises:
        KeyError: a field has no text.
    """
    found: dict[str, str] = {}
    for parent in reversed(kind.__mro__):
        if _is_document(parent):
            found |= texts_under_fields(parent)
    return {name: found[name] for name in kind.__struct_fields__}


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


def _tables(kind: type, told: set[type]) -> Iterator[str]:
    """The table of a document, and of each class that it holds, unless that has been told."""
    if kind in told:
        return
    told.add(kind)
    yield f"### {kind.__name__}\n"
    yield text(" ".join((inspect.getdoc(kind) or "").split())) + "\n"
    hints = inspect.get_annotations(kind) | {
        name: hint for parent in kind.__mro__ for name, hint in inspect.get_annotations(parent).items()
    }
    told_fields = descriptions(kind)
    yield table(
        ("field", "type", "meaning"),
        ((code(name), _type(hints[name]), text(words)) for name, words in told_fields.items()),
    )
    for inner in _inside(kind, hints.values()):
        yield from _tables(inner, told)


def _inside(kind: type, hints: Any) -> list[type]:
    """The documents' classes that annotations name."""
    names = {name.id for hint in hints for name in ast.walk(ast.parse(hint)) if isinstance(name, ast.Name)}
    known = vars(inspect.getmodule(kind))
    for parent in kind.__mro__:
        known = {**vars(inspect.getmodule(parent)), **known} if inspect.getmodule(parent) else known
    found = [known[name] for name in sorted(names) if name in known]
    return [
        each for each in found if isinstance(each, type) and issubclass(each, Struct) and each is not Struct
    ]


_JSON_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "datetime": "time (RFC 3339)",
    "Any": "any",
    "None": "null",
    "Status": "string",
}


def _type(annotation: str) -> str:
    """An annotation in JSON's words; what is an object of its own is linked."""
    return _type_of(ast.parse(annotation, mode="eval").body)


def _type_of(node: ast.expr) -> str:
    match node:
        case ast.BinOp(left=left, right=right):
            return f"{_type_of(left)} or {_type_of(right)}"
        case ast.Constant(value=None):
            return "null"
        case ast.Subscript(value=ast.Name(id="Sequence"), slice=item):
            return f"list of {_type_of(item)}"
        case ast.Subscript(value=ast.Name(id="Mapping"), slice=ast.Tuple(elts=[_, item])):
            return f"object: name to {_type_of(item)}"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            return " or ".join(map(_choice, choices.elts if isinstance(choices, ast.Tuple) else [choices]))
        case ast.Name(id=name):
            return _JSON_TYPES.get(name) or f"[{name}](#{name.lower()})"
    raise TypeError(f"no words for {ast.unparse(node)}")


def _choice(node: ast.expr) -> str:
    return f"`{json.dumps(ast.literal_eval(node))}`"


def _without(definition: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in definition.items() if name != key}
