"""A process that goes on imports what was edited anew, and knows which code it ran."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.graph.code_recorder import import_code, recording
from exporter.graph.origin import GraphOrigin
from exporter.graph.source_graph import GraphRequest
from exporter.graph.sources import Code, find_builder, named_function


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`ranking.model` asks `ranking.part.layers` for its answer; `ranking/part` has no `__init__.py`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "ranking/part").mkdir(parents=True)
    (tmp_path / "ranking/__init__.py").write_text("")
    (tmp_path / "ranking/part/layers.py").write_text("def answer():\n    return 'old'\n")
    (tmp_path / "ranking/model.py").write_text(
        "from ranking.part import layers\n\ndef serving():\n    return layers.answer()\n"
    )
    (tmp_path / "alone.py").write_text("from ranking.model import serving\n")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("ranking", "alone")]:
        del sys.modules[name]


def code_of(model: Any) -> Code:
    """The code of a builder, as a load records it."""
    with recording() as recorder:
        if isinstance(model, str):
            where, _, name = model.rpartition(":")
            return recorder.code(getattr(import_code(where), name), find_builder(where), is_loaded=True)
        return recorder.code(model, named_function(model)[1], is_loaded=False)


def paths(code: Code) -> set[str]:
    return {file.path for file in code.files}


@pytest.mark.parametrize("where", ["ranking.model", "alone.py"])
def test_what_was_edited_is_imported_anew(code: Path, where: str) -> None:
    before = code_of(f"{where}:serving")
    first = import_code(where)
    assert first.serving() == "old"
    assert import_code(where).serving.__globals__ is first.serving.__globals__  # nothing was edited
    assert {"ranking/__init__.py", "ranking/part/layers.py"} < paths(before)
    (code / "ranking/part/layers.py").write_text("def answer():\n    return 'newer'\n")
    assert import_code(where).serving() == "newer"
    after = code_of(f"{where}:serving")
    assert {file.path for file in {*after.files} - {*before.files}} == {"ranking/part/layers.py"}


def test_a_function_of_a_program_is_known_by_the_files_that_its_module_leads_to(code: Path) -> None:
    (code / "ranking/unused.py").write_text("")
    with pytest.MonkeyPatch.context():
        import ranking.model  # type: ignore[import-not-found]  # the program's own
        import ranking.unused  # type: ignore[import-not-found]
    known = code_of(serving := ranking.model.serving)
    assert paths(known) == {"ranking/model.py", "ranking/__init__.py", "ranking/part/layers.py"}
    assert (known.modules, known.opened) == ((), {})
    origin = GraphOrigin.of(GraphRequest(model=serving)).with_code(known)
    assert [*origin.differences(GraphRequest(model="ranking.model:serving"))] == []
    assert code_of(functools.partial(serving)) == known
    (code / "ranking/part/layers.py").write_text("def answer():\n    return 1\n")
    assert [*origin.differences(GraphRequest(model=serving))] == ["ranking/part/layers.py has changed"]
    unknown = code_of(serving)  # what runs is not in the file any more
    assert paths(unknown) == {"ranking/model.py", "ranking/__init__.py"}
    assert [(each.name, each.digest) for each in unknown.modules] == [("ranking.part.layers", None)]


def test_a_constant_that_was_edited_is_not_taken_for_that_of_the_program(code: Path) -> None:
    (code / "alone.py").write_text("UNITS = 8\n\ndef serving():\n    return UNITS\n")
    import alone  # type: ignore[import-not-found]

    assert paths(code_of(alone.serving)) == {"alone.py"}
    (code / "alone.py").write_text("UNITS = 16\n\ndef serving():\n    return UNITS\n")
    assert [(each.name, each.digest) for each in code_of(alone.serving).modules] == [("alone", None)]


def test_what_a_program_has_imported_already_is_found_in_a_function(code: Path) -> None:
    (code / "alone.py").write_text("def serving():\n    from ranking.part import layers\n    return layers\n")
    import alone
    import ranking.part.layers  # type: ignore[import-not-found]  # noqa: F401

    assert "ranking/part/layers.py" in paths(code_of(alone.serving))


def test_a_function_without_a_file_is_known_by_what_it_names(code: Path) -> None:
    """As in a notebook, whose other modules are not the builder's."""
    import ranking.part.layers

    names: dict[str, Any] = {"layers": ranking.part.layers, "__name__": "notebook"}
    exec("def serving():\n    return layers.answer()", names)
    known = code_of(names["serving"])
    assert known.files == ()
    assert {each.name for each in known.modules} == {"ranking", "ranking.part.layers"}


def test_builders_without_a_file_are_not_known() -> None:
    assert GraphOrigin.of(GraphRequest(model=len)) == GraphOrigin("len")
