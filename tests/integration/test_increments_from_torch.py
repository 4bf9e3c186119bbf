"""The page on trainers that know nothing of TensorFlow, with PyTorch itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter import ExportRequest, Updates, export, export_incremental
from tests.support.environments import made_over_this, run_program
from tests.support.guide_pages import Page
from tests.support.updatable import loaded

pytestmark = [pytest.mark.landing, pytest.mark.timeout(1800)]
TORCH = (
    "torch==2.13.0+cpu",
    "filelock",
    "typing_extensions",
    "sympy",
    "networkx",
    "jinja2",
    "fsspec",
    "mpmath",
)
"""A build without GPUs, where there is one; the others take gigabytes."""


def test_the_torch_guide(tmp_path: Path) -> None:
    python = made_over_this(f"torch-{sys.version_info.minor}", TORCH)
    if python is None:
        pytest.skip("there is no build of PyTorch without GPUs to install")
    saves, builder, _, trains = (
        b.text for b in Page("docs/from/others.md").tested_by("test_the_torch_guide")
    )
    (tmp_path / "bag.py").write_text(builder)
    kept = "\ntorch.save(bag.state_dict(), 'bag.pt')\n"
    run_program(python, tmp_path, saves + kept)
    request = ExportRequest(
        tmp_path / "train",
        tmp_path / "models/items",
        model=f"{tmp_path}/bag.py:serving",
        updates=Updates(),
    )
    base = export(request)
    asked = np.arange(300).reshape(100, 3)
    again = saves.partition("writer = ")[0] + "bag.load_state_dict(torch.load('bag.pt'))\n"
    again += "writer = IncrementWriter('train')\n"
    answers = "\nnp.save('answers.npy', bag(torch.arange(300).reshape(100, 3)).detach().numpy())\n"
    run_program(python, tmp_path, again + trains + answers)
    with loaded(base.published.path) as server:
        delta = export_incremental(request)
        assert delta.published is not None and delta.compared_bytes == 0
        server.update()
        found: Any = server.predict(ids=asked)["vector"]
    # Three numbers are added: their order may differ.
    np.testing.assert_allclose(found, np.load(tmp_path / "answers.npy"), rtol=1e-6, atol=1e-6)
