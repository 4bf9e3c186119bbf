"""Whatever ends a command is said: libraries that break when imported, ends beside other threads."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

from exporter.errors import Exit
from tests.support.server_processes import DEADLINE_SECONDS, ROOT
from tests.support.serving_models import write_saved_model

BROKEN = ("raise ImportError('is broken')", "raise AttributeError('is broken')", "raise SystemExit(0)")


def ran(module: str, *arguments: object, beside: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command to its end, with the modules in `beside` before those that are installed."""
    places = [str(place) for place in (beside, ROOT) if place]
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_SECONDS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("said") / "ranker"
    write_saved_model(base / "1")
    return base


@pytest.mark.landing
@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("library", ["h11", "prometheus_client"])
def test_a_server_says_which_library_of_its_port_is_broken(
    base: Path, tmp_path: Path, library: str, how: str
) -> None:
    (tmp_path / f"{library}.py").write_text(how)
    found = ran("serving", "run", base, "--port", 0, "--rest-api-port", 0, beside=tmp_path)
    assert found.returncode == Exit.USAGE
    assert f"error: --rest-api-port needs {library}" in found.stderr


@pytest.mark.parametrize("library", ["h11", "jinja2"])
def test_an_agent_says_which_library_is_broken(base: Path, tmp_path: Path, library: str) -> None:
    (tmp_path / f"{library}.py").write_text(BROKEN[0])
    arguments = ("agent", "--model-base-path", base, "--target", "127.0.0.1:1", "--port", 0)
    found = ran("serving", *arguments, beside=tmp_path)
    assert found.returncode == Exit.USAGE
    assert f"error: the agent needs {library}" in found.stderr


@pytest.mark.parametrize("how", BROKEN)
def test_a_server_whose_tensorflow_is_broken(base: Path, tmp_path: Path, how: str) -> None:
    (tmp_path / "tensorflow.py").write_text(how)
    found = ran("serving", "run", base, "--port", 0, "--wait", 60, beside=tmp_path)
    assert found.returncode == Exit.SERVER
    assert "error: version 1 of ranker cannot be served" in found.stderr


def test_a_server_that_ends_while_a_thread_imports_tensorflow(base: Path) -> None:
    """Descriptor 2 leads elsewhere meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = ran("serving", "run", base, "--port", 0, "--rest-api-port", taken.getsockname()[1])
    assert found.returncode == Exit.SERVER
    assert "error: cannot listen on 127.0.0.1:" in found.stderr


@pytest.mark.parametrize("how", BROKEN)
def test_an_export_whose_hdf5_library_is_broken(tmp_path: Path, how: str) -> None:
    """The file is not to blame."""
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        file["w"] = [1.0]
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "h5py.py").write_text(how)
    found = ran("exporter", "inspect", tmp_path / "model.weights.h5", beside=tmp_path / "beside")
    assert found.returncode != 0
    assert "h5py" in found.stderr
    assert "damaged" not in found.stderr


def test_a_library_that_ends_the_program(tmp_path: Path) -> None:
    """Exit code 0 with nothing done, or 3 with nothing said, would be taken for something else."""
    (tmp_path / "google").mkdir()
    (tmp_path / "google" / "__init__.py").write_text("raise SystemExit(0)")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "saved_model.pb").write_bytes(b"\x08\x01")
    found = ran("exporter", "inspect", tmp_path / "saved" / "saved_model.pb", beside=tmp_path)
    assert found.returncode == Exit.FAILURE
    assert "error: a library ended the program" in found.stderr
