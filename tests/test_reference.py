"""The reference pages say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.errors import Exit, ExportError
from tools.reference.advice import ADVICE
from tools.reference.failures import all_errors, messages
from tools.reference.pages import made

ROOT = Path(__file__).parent.parent
PAGES = made()


@pytest.mark.parametrize("path", PAGES)
def test_pages_are_what_the_code_makes(path: str) -> None:
    assert (ROOT / path).read_text() == PAGES[path], "make them anew: python -m tools.reference"


def test_every_error_has_its_advice() -> None:
    kinds = set(all_errors())
    assert set(ADVICE) == kinds
    assert all(advice.why and advice.do for advice in ADVICE.values())
    defined = {kind for kind in _subclasses(ExportError) if kind.__module__ == "exporter.errors"}
    assert defined == kinds - {ExportError}


def test_every_text_of_an_error_is_found() -> None:
    """One of each shape: plain, with parts, one of two, behind a status, with a hint of its own."""
    found = {name: {m.text: m.hint for m in texts} for name, texts in messages().items()}
    assert "nothing was exported" in found["ExportFailed"]
    assert found["MissingShard"]["there are … of … shards of …"] == ""
    assert {"no graph of … has the tag …", "… graphs of … have the tag …"} <= found["UsageError"].keys()
    assert "no model server answers at …" in found["CallFailed"]
    assert "incremental_" not in found["CallFailed"]
    assert found["UsageError"]["--out … is the directory of the checkpoint"].endswith("--out …")


def test_every_exit_code_has_a_meaning() -> None:
    assert all(code.meaning for code in Exit)
    assert Exit(3) is Exit.CHECKPOINT
    assert sorted(map(int, Exit)) == [0, 1, 2, 3, 4, 5, 6, 7, 10, 130]


def _subclasses(kind: type[ExportError]) -> set[type[ExportError]]:
    return {found for child in kind.__subclasses__() for found in (child, *_subclasses(child))}
