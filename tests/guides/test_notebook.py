"""The notebook of examples/: its cells, run in their order."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.guide_pages import ROOT

NOTEBOOK = ROOT / "examples/hot_update.ipynb"


def cells(kind: str) -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_it_is_kept_without_outputs() -> None:
    """Outputs differ from run to run; GitHub shows the cells as they are."""
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for number, text in enumerate(cells("code")):
        compile(text, f"cell {number}", "exec")


@pytest.mark.landing
def test_the_loaded_model_answers_as_the_trained_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names: dict[str, Any] = {}
    for number, text in enumerate(cells("code")):
        exec(compile(text, f"cell {number}", "exec"), names)
    assert names["status"] == "current: at 9"
    assert np.abs(names["after"] - names["before"]).max() > 1e-4
    np.testing.assert_allclose(names["after"], names["expected"], atol=1e-6)
    assert [path.name for path in tmp_path.glob("*/models/tower/8")] == ["8"]
