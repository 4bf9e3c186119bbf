"""Environments of any Python and TensorFlow, made once and kept between runs."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "export-model/trainers"
_OLD_PIP = ("pip<24", "setuptools<66")
"""What installs the wheels of before 2021; the pip of Python 3.6 knows too few kinds and would compile."""


class Environment(NamedTuple):
    """A Python, and packages that work together on it, of which the first is TensorFlow.

    `library` runs on them, though it asks for others: `alone` is installed without what it asks for.
    """

    python: str
    packages: tuple[str, ...]
    options: tuple[str, ...] = ()
    library: str = ""
    alone: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The library, or TensorFlow's version."""
        return self.library or self.packages[0].partition("==")[2]


_1_12 = (
    "tensorflow==1.12.3 protobuf==3.19.6 numpy==1.16.6 absl-py==0.15.0 gast==0.2.2 astor==0.8.1"
    " termcolor==1.1.0 six==1.16.0 keras-applications==1.0.8 keras-preprocessing==1.1.2 h5py==2.10.0"
    " grpcio==1.48.2"
)
_1_15 = ("tensorflow==1.15.5", "protobuf<3.21", "numpy<1.19", "tensorflow-estimator==1.15.1")
ENVIRONMENTS = (
    Environment("3.6", tuple(_1_12.split()), ("--no-deps",)),
    Environment("3.7", _1_15),
    Environment("3.8", ("tensorflow-cpu==2.4.4", "protobuf<3.21", "numpy<1.20")),
    Environment("3.8", ("tensorflow-cpu==2.8.4", "protobuf<3.21", "numpy<1.24")),
    Environment("3.9", ("tensorflow-cpu==2.11.1", "protobuf<3.20", "numpy<1.24")),
    Environment("3.8", ("tensorflow-cpu==2.13.1", "numpy<1.25")),
)
BY_NAME = {environment.name: environment for environment in ENVIRONMENTS}
_EASYREC = (
    "pandas<1.3 scikit-learn<1 scipy<1.5 psutil pyyaml tensorflow-probability==0.8.0 cloudpickle<1.4"
    " grpcio-tools==1.48.2 future"
)
_TENSORLAYER = (
    "scipy<1.5 progressbar2 lxml requests imageio<2.10 matplotlib<3.4 scikit-learn<1 scikit-image<0.18"
    " tqdm wrapt pillow<9"
)
_AUTODIST = "netaddr paramiko netifaces pyyaml"
LIBRARIES = (
    Environment("3.7", (*_1_15, *_EASYREC.split()), library="EasyRec"),  # a checkout of it
    Environment(
        "3.7", (*_1_15, *_TENSORLAYER.split()), library="TensorLayer", alone=("tensorlayer==1.11.1",)
    ),
    Environment("3.7", (*_1_15, *_AUTODIST.split()), library="AutoDist", alone=("autodist==0.7.0rc2",)),
)
_LATER = (
    Environment("3.10", ("tensorflow-cpu==2.15.1",)),
    Environment("3.11", ("tensorflow-cpu==2.18.1",)),
    Environment("3.11", ("tensorflow-cpu==2.21.0",)),
    Environment("3.13", ("tensorflow-cpu==2.22.0rc0",)),
)
_ALL = BY_NAME | {environment.name: environment for environment in (*LIBRARIES, *_LATER)}
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
    """The interpreter of the environment of a TensorFlow or a library; the test is skipped without one."""
    environment = _ALL[name]
    found = interpreter(environment.python)
    if found is None:
        pytest.skip(f"{name}: there is no Python {environment.python} on the path or of pyenv")

    def make(directory: Path) -> bool:
        subprocess.run([found, "-m", "venv", directory], check=True)
        is_old = int(environment.python.partition(".")[2]) < 10
        wanted = [*([_OLD_PIP] if is_old else []), (*environment.options, *environment.packages)]
        if environment.alone:
            wanted.append(("--no-deps", *environment.alone))
        for packages in wanted:
            pip = [str(directory / "bin/python"), "-m", "pip", "install", "-q", "-U", *packages]
            if subprocess.run(pip, check=not environment.library, cwd="/").returncode:
                return False
        return True

    made = made_once(name, make)
    if made is None:
        pytest.skip(f"{name}: the index has not all of {', '.join(environment.packages + environment.alone)}")
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


def made_over_this(name: str, packages: tuple[str, ...]) -> Path | None:
    """The interpreter of an environment with these packages over the ones here; None if pip fails."""

    def make(directory: Path) -> bool:
        venv.create(directory, symlinks=True)
        _lay_over_this(directory)
        pip = [str(directory / "bin/python"), "-m", "pip", "install", "-q", "--no-deps", *packages]
        return subprocess.run(pip, cwd="/", check=False).returncode == 0

    python = made_once(name, make)
    if python is not None:
        _lay_over_this(python.parents[1])  # a checkout elsewhere may have made it
    return python


def _lay_over_this(directory: Path) -> None:
    """Let an environment find the packages that are installed here."""
    (site,) = directory.glob("lib/python*/site-packages")
    here = [entry for entry in sys.path if entry.endswith("-packages")]
    part = site / f".below-{os.getpid()}"
    part.write_text("\n".join([str(ROOT), *here]) + "\n")
    part.replace(site / "below.pth")


def run_program(python: Path, directory: Path, code: str) -> None:
    """Run a program in a directory, with this repository's packages."""
    (directory / "program.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, "program.py"], cwd=directory, env=environment, capture_output=True, timeout=600
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
