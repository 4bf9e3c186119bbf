"""What a command imports is what it uses: most of a short command's time are imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from exporter.publish.delta_log import read_log
from tests.support.setting import Setting, followed

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/0.2.1"
ARRAYS = {"numpy", "ml_dtypes", "h5py", "xxhash"}
MESSAGES = {"google.protobuf"}
NEVER = {"tensorflow", "keras", "grpc", "pydantic", "obstore", "prometheus_client"}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A trainer's directory, and a model that was made from it."""
    shutil.copytree(GOLDEN / "train", tmp_path / "train")
    shutil.copytree(GOLDEN / "models", tmp_path / "models")
    return tmp_path


def imported(here: Path, *arguments: str) -> set[str]:
    """The modules that a command has imported when it ends well."""
    code = (
        "import atexit, sys; atexit.register(lambda: print('MODULES', *sys.modules, file=sys.stderr));"
        "from exporter.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("MODULES "))
    return set(line.split()[1:])


def own(modules: Collection[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] in ("exporter", "serving")}


@pytest.mark.parametrize(
    "command, most, without",
    [
        ("--help", 41, ARRAYS | MESSAGES | {"rich", "logging", "hashlib"}),
        ("history models/ranker", 74, ARRAYS | MESSAGES | {"logging"}),
        ("history models/ranker --json", 74, ARRAYS | MESSAGES | {"rich", "logging"}),
        ("inspect models/plain", 83, ARRAYS | {"rich", "logging"}),
        ("inspect models/ranker --json", 83, ARRAYS | {"rich"}),
        ("merge models/ranker --dry-run", 116, {"rich"}),
        ("rollback models/ranker --to 10", 111, {"rich"}),
        ("rollback models/ranker --to 10 --dry-run", 111, {"rich"}),
    ],
)
def test_a_command_imports_what_it_uses(here: Path, command: str, most: int, without: set[str]) -> None:
    modules = imported(here, *command.split())
    assert len(own(modules)) <= most, sorted(own(modules))
    assert not (without | NEVER) & modules


def test_a_delta_of_an_increment_imports_no_stage_of_a_full_export(tmp_path: Path) -> None:
    """They take as long to import as the delta takes to make; so does what compares, and what runs jobs."""
    followed(tmp_path, (20, 30), published=20)
    setting = Setting(tmp_path)
    done = ("--ckpt-dir", str(setting.train), "--out", str(setting.model), "--incr", "--quiet")
    modules = own(imported(tmp_path, *done))
    assert read_log(setting.model).at.position == 30
    assert 50 < len(modules) <= 113, sorted(modules)
    assert not {name.split(".")[1] for name in modules if "." in name} & {
        "bundle",
        "subgraph",
        "verify",
        "jobs",
    }
    assert not modules & {
        "exporter.graph.metagraph",
        "exporter.pipeline.full",
        "exporter.pipeline.watch",
        "exporter.delta.diff",
    }
