"""What people are told to type to install this package: it is typed, and moves no library that is there.

In an environment that sees the libraries of this one, and with a copy of the clone. What builds the package
comes from the index, as in a user's environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml

from exporter.errors import to_install
from exporter.version import __version__
from tests.support.guide_pages import ROOT, Page, pages
from tests.support.project import PROJECT
from tools.reference.failures import messages

EXTRAS = PROJECT["project"]["optional-dependencies"].keys() - {"dev", "docs"}
BUILT_FROM = ("exporter", "serving", "deploy", "pyproject.toml", "README.md", "LICENSE")
OURS = re.compile(
    r"python3 -m pip install (?:'\.\[(?P<extras>[a-z,-]+)\]'|\.|-r deploy/requirements-slim\.txt)$"
)
"""In a clone, the ways to install it."""
OTHERS = {"tensorflow", "ml-dtypes", "tf-keras", "…"}
"""What a hint may install beside it: the last is the Keras that a model was saved by."""


def told(page: str) -> list[str]:
    """The commands of a page that install something."""
    lines = [line for block in Page(page).blocks for line in block.text.splitlines()]
    return [line.removeprefix("$ ").partition("  #")[0].strip() for line in lines if "pip install" in line]


class Machine:
    """A clone, and an environment that has everything but this package."""

    def __init__(self, directory: Path) -> None:
        self.clone = directory / "clone"
        self.clone.mkdir()
        for name in BUILT_FROM:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, self.clone / name)
        self.environment = directory / "environment"
        venv.create(self.environment, symlinks=True)
        version = f"python{sysconfig.get_python_version()}"
        self.packages = self.environment / "lib" / version / "site-packages"
        below = [entry for entry in sys.path if entry.endswith("-packages")]
        (self.packages / "below.pth").write_text("\n".join(below) + "\n")

    def type(self, text: str, directory: Path | None = None, **variables: str) -> str:
        """What a command line prints, typed in a shell where the environment is activated."""
        path = f"{self.environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-e", "-c", text],
            cwd=directory or self.clone,
            env={**os.environ, "PATH": path, "PYTHONPATH": "", **variables},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{text}: {done.stdout}{done.stderr}"
        return done.stdout

    def installed(self) -> dict[str, str]:
        """What the environment has of its own."""
        found = distributions(path=[str(self.packages)])
        return {each.metadata["Name"]: each.version for each in found}

    def remove(self) -> None:
        self.type("python3 -m pip uninstall --yes --quiet export-model")
        assert self.installed() == {}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("installing"))


@pytest.fixture(scope="module")
def wheel(machine: Machine) -> Path:
    """As `make release` leaves it."""
    machine.type("python3 -m pip wheel --quiet --no-deps --wheel-dir dist .")
    (found,) = (machine.clone / "dist").iterdir()
    return found


def require_both_commands(machine: Machine, directory: Path) -> None:
    """They run outside the clone, from the environment, which has got nothing else."""
    assert machine.installed() == {"export-model": __version__}, "a library was moved"
    for program in ("export-model", "serve-model"):
        assert machine.type(f"{program} --version", directory).strip().endswith(__version__)
    where = machine.type("python3 -c 'import exporter, serving; print(exporter.__file__)'", directory)
    assert Path(where.strip()).is_relative_to(machine.packages)
    machine.type("serve-model agent --help", directory)
    machine.remove()


@pytest.mark.parametrize("command", told("README.md"))
def test_readme_installs_it(machine: Machine, wheel: Path, tmp_path: Path, command: str) -> None:
    machine.type(command)
    require_both_commands(machine, tmp_path)


@pytest.mark.landing
def test_a_type_checker_finds_the_types_of_the_installed_package(
    machine: Machine, wheel: Path, tmp_path: Path
) -> None:
    """Beside no clone and no settings: `py.typed` comes with the wheel, and each mistake is found."""
    machine.type(f"python3 -m pip install --quiet --no-deps {wheel}")
    script = shutil.copy(ROOT / "tests/support/typed_uses.py", tmp_path / "mine.py")
    machine.type("python3 -m mypy --strict mine.py", tmp_path)
    text = script.read_text()
    script.write_text(re.sub(r"  # type: ignore.*", "", text))
    found = machine.type("python3 -m mypy --strict mine.py || true", tmp_path)
    wrong = {number for number, line in enumerate(text.splitlines(), 1) if "# type: ignore" in line}
    assert {*map(int, re.findall(r"^mine\.py:(\d+): error", found, re.MULTILINE))} == wrong
    machine.remove()


def test_without_tensorflow(machine: Machine, tmp_path: Path) -> None:
    commands = told("docs/which-tensorflow.md")
    assert len(commands) == 2
    for command in commands:
        machine.type(command)
    require_both_commands(machine, tmp_path)


@pytest.mark.landing
def test_the_workflow_installs_the_wheel(machine: Machine, wheel: Path, tmp_path: Path) -> None:
    workflow = yaml.safe_load((ROOT / "deploy/ci/export.yaml").read_text())
    job = workflow["jobs"]["export"]
    (install,) = [step["run"] for step in job["steps"] if step.get("name") == "Install"]
    assert Path(job["env"]["WHEEL"]).name == wheel.name
    machine.type(install, tmp_path, WHEEL=str(wheel))
    require_both_commands(machine, tmp_path)


def test_pages_and_hints_say_what_readme_says() -> None:
    """From one clone, by one command: what is typed above, with other extras."""
    said = [command for page in pages() for command in told(page.name)]
    said += re.findall(r"python3 .*", "\n".join(map(to_install, EXTRAS)))
    assert len(said) > len(EXTRAS) + 5
    for command in said:
        if command.endswith((".whl[server,agent,stores]'", "export_model_trainer-*-py3-none-any.whl")):
            continue  # README's, for a wheel; and the trainer's own wheel
        found = OURS.fullmatch(command.removeprefix("PIP_NO_DEPS=1 "))
        assert found, command
        assert {*(found["extras"] or "server").split(",")} <= EXTRAS, command


def test_readme_names_every_extra() -> None:
    table = Page("README.md").text.partition("| extra |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert set(re.findall("`([a-z-]+)`", " ".join(cells))) == EXTRAS


@pytest.mark.landing
def test_hints_install_what_is_this_package_or_tensorflow() -> None:
    hints = {text.hint for texts in messages().values() for text in texts}
    named = {word for hint in hints for word in re.findall(r"pip install '?([\w.…-]+)", hint)}
    assert named - {"."} <= OTHERS
    assert {".", "ml-dtypes"} <= named
