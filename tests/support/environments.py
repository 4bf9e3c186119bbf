"""Environments of any Python and TensorFlow, made once and kept between runs."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "export-model/trainers"
_OLD_PIP = ("pip<24", "setuptools<66")
"""What installs the wheels of before 2021."""


class Environment(NamedTuple):
    """A Python, and packages that work together on it; the first is TensorFlow, after which it is called."""

    python: str
    packages: tuple[str, ...]
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """TensorFlow's version."""
        return self.packages[0].partition("==")[2]


_1_12 = (
    "tensorflow==1.12.3 protobuf==3.19.6 numpy==1.16.6 absl-py==0.15.0 gast==0.2.2 astor==0.8.1"
    " termcolor==1.1.0 six==1.16.0 keras-applications==1.0.8 keras-preprocessing==1.1.2 h5py==2.10.0"
    " grpcio==1.48.2"
)
ENVIRONMENTS = (
    Environment("3.6", tuple(_1_12.split()), ("--no-deps",)),
    Environment("3.7", ("tensorflow==1.15.5", "protobuf<3.21", "numpy<1.19", "tensorflow-estimator==1.15.1")),
    Environment("3.8", ("tensorflow-cpu==2.4.4", "protobuf<3.21", "numpy<1.20")),
    Environment("3.8", ("tensorflow-cpu==2.8.4", "protobuf<3.21", "numpy<1.24")),
    Environment("3.9", ("tensorflow-cpu==2.11.1", "protobuf<3.20", "numpy<1.24")),
    Environment("3.8", ("tensorflow-cpu==2.13.1", "numpy<1.25")),
)
BY_NAME = {environment.name: environment for environment in ENVIRONMENTS}
_LATER = (
    Environment("3.10", ("tensorflow-cpu==2.15.1",)),
    Environment("3.11", ("tensorflow-cpu==2.18.1",)),
    Environment("3.11", ("tensorflow-cpu==2.21.0",)),
    Environment("3.13", ("tensorflow-cpu==2.22.0rc0",)),
)
_ALL = BY_NAME | {environment.name: environment for environment in _LATER}
SERVERS = ("1.15.5", "2.4.4", "2.8.4", "2.11.1", "2.13.1", "2.15.1", "2.18.1", "2.21.0")
"""TensorFlows whose servers are told apart, oldest first."""


def clean_environ() -> dict[str, str]:
    """This process's environment, without what a TensorFlow 2 or a launcher left in it."""
    ours = ("PYTHONPATH", "TF_CONFIG", "TF2_BEHAVIOR")
    return {name: value for name, value in os.environ.items() if name not in ours}


def interpreter(version: str) -> str | None:
    """A Python of that version, on the path or of pyenv."""
    if found := shutil.which(f"python{version}"):
        done = subprocess.run([found, "-V"], capture_output=True, text=True, check=False)
        if done.returncode == 0 and f" {version}." in done.stdout:
            return found
    versions = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))
    return str(versions[-1]) if versions else None


def python_of(name: str) -> Path:
    """The interpreter of the environment of a TensorFlow; the test is skipped if its Python is missing."""
    environment = _ALL[name]
    found = interpreter(environment.python)
    if found is None:
        pytest.skip(f"TensorFlow {name}: there is no Python {environment.python} on the path or of pyenv")

    def make(directory: Path) -> bool:
        subprocess.run([found, "-m", "venv", directory], check=True)
        for packages in (_OLD_PIP, (*environment.options, *environment.packages)):
            pip = [directory / "bin/python", "-m", "pip", "install", "-q", *packages]
            subprocess.run(pip, check=True, cwd="/")
        return True

    made = made_once(name, make)
    assert made is not None
    return made


def made_once(name: str, make: Callable[[Path], bool]) -> Path | None:
    """The interpreter of an environment that is kept; None if it cannot be made."""
    CACHE.mkdir(parents=True, exist_ok=True)
    directory = CACHE / name
    with (CACHE / f"{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not (directory / ".complete").exists():
            shutil.rmtree(directory, ignore_errors=True)
            if not make(directory):
                return None
            (directory / ".complete").touch()
    return directory / "bin/python"
