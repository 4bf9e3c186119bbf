"""What commands print in tests as JSON is one of the published documents, to the last field."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import msgspec
from msgspec.structs import asdict

from exporter.terminal.output import FORMAT_VERSION, Failure, to_json
from tools.reference.declarations import meanings
from tools.reference.documents import PRINTED_BY


def checked(document: Any) -> Any:
    """A document from stdout, if it is one of those that commands say they print."""
    fields = dict(document)
    assert next(iter(document)) == "format_version"
    assert fields.pop("format_version") == FORMAT_VERSION
    kinds = _by_fields().get(frozenset(fields), ())
    assert kinds, f"no document has the fields {sorted(fields)}"
    wrong = []
    for kind in kinds:
        try:
            typed = msgspec.convert(fields, kind, strict=True, dec_hook=lambda kind, value: kind(value))
        except msgspec.ValidationError as error:
            wrong.append(f"{kind.__name__}: {error}")
            continue
        again = json.loads(json.dumps(asdict(typed), default=to_json))
        if _collapsed(again) == _collapsed(fields):
            return document
        odd = sorted(name for name in fields if again.get(name) != fields[name])
        wrong.append(
            f"{kind.__name__}: inside {odd} is what is not published: {[fields[name] for name in odd]}"
        )
    raise AssertionError(wrong)


def _collapsed(document: Any) -> str:
    """As text, where a URL that a field declares as a path has one slash, as `Path` writes it."""
    return json.dumps(document, sort_keys=True).replace("://", ":/")


def checked_error(error: Any) -> Any:
    """The object in stderr's last line, if it is what commands say."""
    assert asdict(msgspec.convert(error, Failure, strict=True)) == error
    return error


@cache
def _by_fields() -> dict[frozenset[str], list[type]]:
    found: dict[frozenset[str], list[type]] = {}
    for kind in {kind for kinds in PRINTED_BY.values() for kind in kinds}:
        found.setdefault(frozenset(meanings(kind)), []).append(kind)
    return found
