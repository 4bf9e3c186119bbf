"""What `make release` builds: the same bytes for the same commit, with every file that is not code."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.environments import interpreter
from tests.support.project import PROJECT
from tools.release import BUILT_BY, TRAINER, TRAINER_FILE, normalised, of_version, trainer_wheel

ROOT = Path(__file__).parent.parent


def sdist(*, mtime: int, owner: str, mode: int, order: int) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as files:
        for name in ["p/a.py", "p/b.py"][::order]:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.uname, member.mode = 3, mtime, owner, mode
            files.addfile(member, io.BytesIO(b"abc"))
    return packed.getvalue()


def test_an_sdist_says_nothing_of_who_built_it_and_when() -> None:
    one = normalised(sdist(mtime=1, owner="a", mode=0o664, order=1), 1_700_000_000)
    other = normalised(sdist(mtime=9, owner="b", mode=0o600, order=-1), 1_700_000_000)
    assert one == other
    with tarfile.open(fileobj=io.BytesIO(one)) as files:
        assert [member.name for member in files] == ["p/a.py", "p/b.py"]
        assert {member.mtime for member in files.getmembers()} == {1_700_000_000}


def test_what_builds_it_is_one_version_that_the_project_allows() -> None:
    """A wheel has the builder's version in it."""
    built_by = Requirement(BUILT_BY)
    (asked,) = map(Requirement, PROJECT["build-system"]["requires"])
    (pin,) = built_by.specifier
    assert (pin.operator, built_by.name) == ("==", asked.name)
    assert asked.specifier.contains(pin.version)


def test_a_bill_of_materials_says_of_which_release_it_is() -> None:
    bill = {"components": [1], "metadata": {"component": {"name": "export-model"}}}
    found = json.loads(of_version(json.dumps(bill), "0.2.1"))
    assert found["metadata"]["component"] == {"name": "export-model", "version": "0.2.1"}
    assert found["components"] == [1]


def test_package_data_names_every_file_that_is_not_code() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "exporter", "serving"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a clone")
    data = PROJECT["tool"]["setuptools"]["package-data"]
    patterns = [f"{package}/{pattern}" for package, found in data.items() for pattern in found]
    others = [name for name in listed.stdout.splitlines() if not name.endswith(".py")]
    assert len(others) >= 3
    assert [name for name in others if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_nobody_is_told_to_install_from_an_index_that_lacks_this_package() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*")]
    rooms = ("exporter", "serving", "examples", "tools")
    code = [path for room in rooms for path in ROOT.glob(f"{room}/**/*.py")]
    for path in [*pages, *code]:
        if path.is_file() and path.name != "CHANGELOG.md":  # which says what was
            text = path.read_text().replace("`", "").replace("'", "")
            assert "install export-model" not in text, path
            assert "export-model[" not in text, path


@pytest.mark.parametrize("version", ["3.6", "3.7", "3.13"])
def test_the_trainers_wheel_is_one_file_that_old_pythons_install(tmp_path: Path, version: str) -> None:
    code = (ROOT / TRAINER_FILE).read_text()
    wheel = tmp_path / f"{TRAINER}-0.2.1-py3-none-any.whl"
    wheel.write_bytes(trainer_wheel(code, "0.2.1", 1_700_000_000))
    assert wheel.read_bytes() == trainer_wheel(code, "0.2.1", 1_700_000_000)
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on the path or of pyenv")
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--target", tmp_path / "installed", wheel]
    subprocess.run([python, *install], check=True, cwd=tmp_path, stderr=subprocess.DEVNULL)
    assert (tmp_path / f"installed/{TRAINER}.py").read_text() == code
    about = (tmp_path / f"installed/{TRAINER}-0.2.1.dist-info/METADATA").read_text()
    assert "Requires-Python: >=3.6" in about and "Requires-Dist" not in about
