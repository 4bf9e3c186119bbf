"""What commands print in tests as JSON is one of the published documents, to the last field."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from jsonschema import Draft202012Validator
from msgspec.structs import asdict

from exporter.terminal.output import FORMAT_VERSION, Failure, to_json
from tools.reference.declarations import meanings
from tools.reference.documents import PRINTED_BY
from tools.reference.pages import made


def checked(document: Any) -> Any:
    """A document from stdout, if it is one of those that commands say they print."""
    fields = dict(document)
    assert next(iter(document)) == "format_version"
    _published().validate(document)
    assert fields.pop("format_version") == FORMAT_VERSION
    kinds = _by_fields().get(frozenset(fields), ())
    assert kinds, f"no document has the fields {sorted(fields)}"
    wrong = []
    for kind in kinds:
        try:
            typed = msgspec.convert(fields, kind, strict=True, dec_hook=_decoded)
        except msgspec.ValidationError as error:
            wrong.append(f"{kind.__name__}: {error}")
            continue
        again = json.loads(json.dumps(asdict(typed), default=_encoded))
        if again == fields:
            return document
        odd = sorted(name for name in fields if again.get(name) != fields[name])
        wrong.append(
            f"{kind.__name__}: inside {odd} is what is not published: {[fields[name] for name in odd]}"
        )
    raise AssertionError(wrong)


class _AsPrinted(type(Path())):  # type: ignore[misc]  # the class of this system's paths
    """A path, or a URL in the field of one, that keeps its text: a `Path` makes `s3:/b` of `s3://b`."""

    text: str


def _decoded(kind: type, value: Any) -> Any:
    if kind is not Path:
        return kind(value)
    path = _AsPrinted(value)
    path.text = value
    return path


def _encoded(value: Any) -> Any:
    return value.text if isinstance(value, _AsPrinted) else to_json(value)


def checked_error(error: Any) -> Any:
    """The object in stderr's last line, if it is what commands say."""
    fields = dict(error)
    assert fields.pop("format_version") == FORMAT_VERSION
    assert asdict(msgspec.convert(fields, Failure, strict=True)) == fields
    _published().validate(error)
    return error


@cache
def _published() -> Draft202012Validator:
    """The published schema."""
    return Draft202012Validator(json.loads(made("docs/reference/documents.schema.json")))


@cache
def _by_fields() -> dict[frozenset[str], list[type]]:
    found: dict[frozenset[str], list[type]] = {}
    for kind in {kind for kinds in PRINTED_BY.values() for kind in kinds}:
        found.setdefault(frozenset(meanings(kind)), []).append(kind)
    return found
