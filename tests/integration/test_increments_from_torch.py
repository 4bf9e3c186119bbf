"""The page on trainers that know nothing of TensorFlow, with PyTorch itself."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter import ExportRequest, Updates, export, export_incremental
from tests.support.environments import ROOT, made_once
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


def make(directory: Path) -> bool:
    """What is here, and PyTorch over it; False if there is no such build to install."""
    venv.create(directory, symlinks=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    here = [entry for entry in sys.path if entry.endswith("-packages")]
    (packages / "below.pth").write_text("\n".join([str(ROOT), *here]) + "\n")
    pip = [directory / "bin/python", "-m", "pip", "install", "-q", "--no-deps", *TORCH]
    return subprocess.run(pip, cwd="/", check=False).returncode == 0


def test_the_guide(tmp_path: Path) -> None:
    python = made_once(f"torch-{sys.version_info.minor}", make)
    if python is None:
        pytest.skip("there is no build of PyTorch without GPUs to install")
    saves, builder, _, trains = (b.text for b in Page("docs/from/arrays.md").tested_by("test_the_guide"))
    (tmp_path / "serving.py").write_text(builder)
    kept = "\ntorch.save(bag.state_dict(), 'bag.pt')\n"
    run(python, tmp_path, saves + kept)
    request = ExportRequest(
        tmp_path / "train",
        tmp_path / "models/items",
        model=f"{tmp_path}/serving.py:serving",
        updates=Updates(),
    )
    base = export(request)
    asked = np.arange(300).reshape(100, 3)
    again = saves.partition("writer = ")[0] + "bag.load_state_dict(torch.load('bag.pt'))\n"
    again += "writer = IncrementWriter('train')\n"
    answers = "\nnp.save('answers.npy', bag(torch.arange(300).reshape(100, 3)).detach().numpy())\n"
    run(python, tmp_path, again + trains + answers)
    with loaded(base.published.path) as server:
        delta = export_incremental(request)
        assert delta.published is not None and delta.compared_bytes == 0
        server.update()
        found: Any = server.predict(ids=asked)["vector"]
    # Three numbers are added: their order may differ.
    np.testing.assert_allclose(found, np.load(tmp_path / "answers.npy"), rtol=1e-6, atol=1e-6)


def run(python: Path, directory: Path, code: str) -> None:
    (directory / "program.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, "program.py"], cwd=directory, env=environment, capture_output=True, timeout=600
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
