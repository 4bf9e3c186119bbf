"""A process that goes on imports what was edited anew, and knows which code it ran."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.graph.origin import GraphOrigin
from exporter.graph.source_graph import GraphRequest
from exporter.graph.sources import code_behind, import_code


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


@pytest.mark.parametrize("where", ["ranking.model", "alone.py"])
def test_what_was_edited_is_imported_anew(code: Path, where: str) -> None:
    first = import_code(where)
    assert first.serving() == "old"
    assert import_code(where).serving.__globals__ is first.serving.__globals__  # nothing was edited
    before = code_behind(f"{where}:serving")
    assert {"ranking/part/layers.py"} < {file.path for file in before}
    (code / "ranking/part/layers.py").write_text("def answer():\n    return 'newer'\n")
    assert import_code(where).serving() == "newer"
    changed = {file.path for file in {*code_behind(f"{where}:serving")} - {*before}}
    assert changed == {"ranking/part/layers.py"}


def origin(model: Any) -> GraphOrigin:
    return GraphOrigin.of(GraphRequest(model=model))


def test_a_function_is_known_by_its_file_while_that_holds_it(code: Path) -> None:
    serving = import_code("ranking.model").serving
    known = origin(serving)
    assert (known.function, known.files) == ("serving", code_behind("ranking.model:serving"))
    assert [*known.differences(GraphRequest(model="ranking.model:serving"))] == []
    assert origin(functools.partial(serving)) == known
    (code / "ranking/model.py").write_text("def serving():\n    return 1\n")
    assert origin(serving).files == ()  # what runs is not in the file any more
    assert [*known.differences(GraphRequest(model="ranking.model:serving"))] == [
        "ranking/model.py has changed"
    ]


def test_builders_without_a_file_are_not_known() -> None:
    class Maker:
        def __call__(self) -> None: ...

    assert origin(Maker()).function.endswith("Maker")
    assert origin(len) == GraphOrigin("len")
