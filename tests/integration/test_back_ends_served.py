"""What JAX and PyTorch trained, served by a process: equal to what they predicted themselves."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

from exporter import ExportRequest, export
from exporter.pipeline.inspection import inspect
from tests.support.family_server import FamilyServer

pytestmark = pytest.mark.landing

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.mark.parametrize(
    ("archive", "path", "answers", "model"),
    [
        ("keras_backends/3.15.1-jax", "functional.keras", "functional", ""),
        ("keras_backends/3.15.1-jax", "subclassed.weights.h5", "subclassed", "wide"),
        ("keras_backends/3.15.1-torch", "functional.keras", "functional", ""),
        ("keras_backends/3.15.1-torch", "functional.weights.h5", "functional", "branches"),
        ("orbax/0.12.8", "keras", "keras", ""),
        ("orbax/0.12.8", "managed", "tower", "tower"),
    ],
)
def test_a_server_answers_as_the_back_end_did(
    archive: str, path: str, answers: str, model: str, tmp_path: Path, server: FamilyServer
) -> None:
    with tarfile.open(FIXTURES / f"{archive}.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    inspect(tmp_path / path)
    named = f"{FIXTURES / archive.partition('/')[0] / 'model.py'}:{model}" if model else None
    done = export(ExportRequest(tmp_path / path, tmp_path / "models/m", model=named))
    with np.load(tmp_path / f"{answers}.answers.npz") as own:
        inputs = {name.removeprefix("inputs/"): own[name] for name in own.files if name.startswith("inputs/")}
        (expected,) = (own[name] for name in own.files if name.startswith("outputs/"))
    (found,) = server.answers(done.published.path, inputs).values()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
