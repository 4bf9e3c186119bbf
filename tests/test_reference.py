"""The reference pages say what the code says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from exporter.errors import Exit, ExportError
from exporter.wire.update_status import UpdateStatus
from tools.reference.advice import ADVICE
from tools.reference.documents import PRINTED_BY, every_document
from tools.reference.failures import all_errors, messages
from tools.reference.pages import PATHS, made
from tools.reference.rooms import stages

ROOT = Path(__file__).parent.parent
FORMATS = "docs/reference/formats.md"


@pytest.mark.landing
@pytest.mark.parametrize("path", PATHS)
def test_pages_are_what_the_code_makes(path: str) -> None:
    assert (ROOT / path).read_text() == made(path), "make them anew: python -m tools.reference"


def test_every_error_has_its_advice() -> None:
    kinds = set(all_errors())
    assert set(ADVICE) == kinds
    assert all(advice.why and advice.do for advice in ADVICE.values())
    defined = {kind for kind in _subclasses(ExportError) if kind.__module__ == "exporter.errors"}
    assert defined == kinds - {ExportError}


def test_every_error_stands_in_one_group() -> None:
    page = made("docs/reference/troubleshooting.md")
    titles = re.findall(r"^### (\w+)$", page, re.MULTILINE)
    assert sorted(titles) == sorted(kind.__name__ for kind in all_errors())
    index = page.partition("\n## ")[0]
    assert all(f"[{title}](#{title.lower()})" in index for title in titles)


def test_every_status_of_an_update_is_explained() -> None:
    """The page has each word that the graph says, and clients compare with no other."""
    page = (ROOT / "docs/reference/troubleshooting.md").read_text()
    rows = re.findall(
        r"^\| `([a-z-]+)` \| (.+) \| (.+) \|$", page.partition("## Statuses of an update")[2], re.M
    )
    assert [word for word, _, _ in rows] == list(UpdateStatus)
    said = re.compile(f"[\"']({'|'.join(UpdateStatus)}): ")
    sources = [*(ROOT / "exporter/subgraph").glob("*.py"), *(ROOT / "serving").rglob("*.py")]
    assert {path.name: found for path in sources if (found := said.findall(path.read_text()))} == {}


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


def test_every_document_is_printed_by_a_command_or_part_of_one() -> None:
    printed = {kind.__name__ for kinds in PRINTED_BY.values() for kind in kinds}
    told = set(re.findall(r"^### (\w+)$", made("docs/reference/documents.md"), re.MULTILINE))
    known = {kind.__name__ for kind in every_document()}
    assert printed <= known
    shared = {"Change", "PredictDocument"}
    assert told == known - shared, "the page tells of each, but of beginnings that others share"


@pytest.mark.parametrize("file", ["documents.schema.json", "files.schema.json"])
def test_the_schemas_describe_every_field(file: str) -> None:
    schema = json.loads(made(f"docs/reference/{file}"))
    for name, definition in schema["$defs"].items():
        assert definition["description"], name
        for field, found in definition.get("properties", {}).items():
            is_tag = "enum" in found and field == "kind"
            assert is_tag or found["description"], f"{name}.{field}"
            assert field in definition["required"] or file == "files.schema.json"


def test_the_rooms_of_the_picture_are_those_that_the_code_has() -> None:
    page = made("docs/architecture.md")
    table = set(re.findall(r"^\| \d+ \| `(\w+)/?` \|", page, re.MULTILINE))
    assert table == set().union(*stages())
    picture = set(re.findall(r"\b([a-z]+)/", page.partition("## Data flow")[2].partition("```\n")[0]))
    packages = {path.parent.name for path in (ROOT / "exporter").glob("*/__init__.py")}
    assert packages - picture <= {"terminal", "wire"}, "a room is missing in the picture"
    assert picture - packages <= {"deltas", "variables"}, "the picture has rooms that are not there"
    files = re.findall(r"`(exporter/[\w/]+\.py)`", page)
    assert files
    assert all((ROOT / file).exists() for file in files)


@pytest.mark.parametrize("path", ["CONTRIBUTING.md", "docs/architecture.md", *sorted(PATHS), FORMATS])
def test_links_and_files_that_pages_name_are_there(path: str) -> None:
    page = (ROOT / path).read_text()
    files = re.findall(r"`((?:exporter|serving|tests|tools|docs)/[\w/.]*\w)`", page)
    missing = [file for file in files if not (ROOT / file).exists()]
    for target, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", page):
        file = (ROOT / path).parent / target if target else ROOT / path
        if not file.exists():
            missing.append(target)
        elif anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            if anchor not in {slug(heading) for heading in headings}:
                missing.append(f"{target}#{anchor}")
    assert not missing


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub and Python-Markdown make it."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
