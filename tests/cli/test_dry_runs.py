"""`--dry-run` of the commands that change a log: the document of the run, and nothing on disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from exporter.publish.delta_log import read_log
from tests.support.commands import export_model
from tests.support.logs import set_hold
from tests.support.remote_models import published_log
from tests.support.step_models import published


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published_log(tmp_path_factory.mktemp("origin"), 20, 30, 40)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 10 and 20, neither of which takes deltas."""
    return published(tmp_path_factory.mktemp("plain"), 10, 20, plain=True).out


@pytest.fixture
def model(origin: Path, tmp_path: Path) -> Path:
    return shutil.copytree(origin, tmp_path / "model")


def contents(directory: Path) -> dict[str, tuple[int, float]]:
    found = {str(path): path.lstat() for path in directory.rglob("*")}
    return {name: (status.st_ino, status.st_mtime) for name, status in found.items()}


def agrees(command: str, model: Path, *options: object, unknown: tuple[str, ...] = ()) -> Any:
    """The document of the run, which the dry run before it gave too, but for what is `unknown` then."""
    before = contents(model)
    dry = export_model(command, model, *options, "--dry-run", "--json")
    people = export_model(command, model, *options, "--dry-run")
    assert (dry.code, people.code) == (0, 0)
    assert contents(model) == before
    real = export_model(command, model, *options, "--json").document
    planned = dry.document
    assert (planned.pop("dry_run"), real.pop("dry_run")) == (True, False)
    done = real.pop("status")
    assert planned.pop("status") == (done if done == "nothing_to_do" else "planned")
    assert all(planned[name] is None and real[name] is not None for name in unknown)
    assert planned == {**real, **dict.fromkeys(unknown)}
    if real["path"] is not None:
        assert real["path"] in people.out
        assert Path(real["path"]).is_dir()
    return real


def test_merge(model: Path) -> None:
    assert agrees("merge", model, "--from", 20, "--to", 40, unknown=("bytes",))["from_position"] == 20
    assert len(agrees("merge", model, unknown=("bytes",))["merged"]) == 2
    assert agrees("merge", model)["path"] is None


def test_merge_into_a_base(model: Path) -> None:
    unknown = ("versions_removed", "versions_kept")
    assert agrees("merge", model, "--rebase", "--keep", 1, unknown=unknown)["deltas"] == 3
    assert agrees("merge", model, "--rebase")["path"] is None


def test_rollback_and_resume(model: Path) -> None:
    assert agrees("rollback", model, "--to", 20)["hold"] == 41
    assert agrees("rollback", model, "--to", 10)["position"] == 42
    back = agrees("resume", model)
    assert (back["values_of"], back["position"], back["hold"]) == (40, 43, None)


def test_resume_that_leaves_the_values(model: Path) -> None:
    set_hold(read_log(model), 20)
    assert agrees("resume", model)["path"] is None
    agrees("rollback", model, "--to", 20)
    assert agrees("resume", model, "--lift-only")["path"] is None


def test_versions_that_take_no_deltas(plain: Path, tmp_path: Path) -> None:
    model = shutil.copytree(plain, tmp_path / "model")
    assert agrees("rollback", model, "--to", 10)["position"] == 21
    assert agrees("resume", model)["values_of"] == 20


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("merge", "--to", 25), 5),
        (("rollback", "--to", 15), 5),
        (("rollback", "--to", 40), 2),
    ],
)
def test_what_the_run_would_refuse_is_refused(model: Path, arguments: tuple[Any, ...], code: int) -> None:
    command, *options = arguments
    dry = export_model(command, model, *options, "--dry-run", "--json")
    real = export_model(command, model, *options, "--json")
    assert (dry.code, dry.error) == (code, real.error)


@pytest.mark.parametrize("arguments", [("merge",), ("merge", "--rebase"), ("rollback", "--to", 10)])
def test_damage_is_found(model: Path, arguments: tuple[Any, ...]) -> None:
    file = next(read_log(model).deltas[1].path.glob("*.data-*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    command, *options = arguments
    ran = export_model(command, model, *options, "--dry-run", "--json")
    assert (ran.code, ran.error["error"]) == (3, "CorruptFile")


def test_a_hold_is_minded(model: Path) -> None:
    set_hold(read_log(model), 20)
    ran = export_model("merge", model, "--rebase", "--dry-run", "--json")
    assert (ran.code, ran.error["error"]) == (5, "ModelHeld")
    assert export_model("merge", model, "--rebase", "--despite=hold", "--dry-run", "-q").code == 0
