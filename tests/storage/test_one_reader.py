"""Files are read by `exporter.storage.files`: with a limit, and a pipe in their place is not waited for."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from exporter.pipeline.incremental import export_incremental
from exporter.publish.delta_log import read_log
from exporter.storage.layout import CHECKED_DIRECTORY, NORMS_FILE, SOURCES_FILE, TAKEN_FILE
from tests.support.commands import export_model
from tests.support.logs import Serving, Trainer, publish_base, request

ROOT = Path(__file__).parent.parent.parent

# Files that no other reader can be used for, by module.
OTHERS = {
    "exporter/training/trainer_side.py": "stands alone, in trainers of any age",
    "exporter/wire/protos.py": "of the package",
    "exporter/wire/stock_ops.py": "of the package",
    "exporter/graph/archived_code.py": "of the package",
    "exporter/graph/outside.py": "of the package",
    "serving/agent/http.py": "of the package",
    "exporter/limited/worker_process.py": "/proc, and /dev/null",
    "exporter/jobs/engines/process.py": "/proc, and what an engine's process said in a directory of our own",
    "exporter/publish/mapped_state.py": "/proc/mounts",
    "exporter/publish/signing.py": "pieces of an object that were just fetched",
    "exporter/terminal/edge.py": "/dev/null",
}


def test_only_storage_opens_files_to_read() -> None:
    found = {
        str(path.relative_to(ROOT))
        for room in ("exporter", "serving")
        for path in (ROOT / room).rglob("*.py")
        if path.parent != ROOT / "exporter/storage" and any(reads(ast.parse(path.read_text())))
    }
    assert found == OTHERS.keys()


def reads(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that open a named file to read it."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        named, modes = ast.unparse(call.func), [ast.unparse(each) for each in call.args]
        method, has_encoding = named.rpartition(".")[2], any(each.arg == "encoding" for each in call.keywords)
        of_a_path = method == "open" and named not in ("open", "os.open")
        if (
            method in ("read_bytes", "read_text")
            or (named == "open" and modes[0] != "descriptor")
            or (named == "os.open" and "RDONLY" in modes[1])
            or (of_a_path and (modes in (["'rb'"], ["'r'"]) or (has_encoding and not modes)))
        ):
            yield call


@pytest.fixture
def followed(tmp_path: Path) -> tuple[Trainer, Path]:
    trainer, model = Trainer(tmp_path / "train"), tmp_path / "model"
    trainer.save()
    publish_base(trainer, Serving(cast=True), model)
    return trainer, model


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    """A file of no bytes on disk, and a terabyte to read."""
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("instead", [_pipe, _endless])
@pytest.mark.parametrize("kept", [TAKEN_FILE, SOURCES_FILE, NORMS_FILE, CHECKED_DIRECTORY.name])
def test_what_is_in_place_of_a_kept_file_is_not_waited_for(
    kept: str, instead: Callable[[Path], None], followed: tuple[Trainer, Path]
) -> None:
    trainer, model = followed
    log = read_log(model).path
    place = {TAKEN_FILE: model / TAKEN_FILE, CHECKED_DIRECTORY.name: log / CHECKED_DIRECTORY}.get(
        kept, log / kept
    )
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir():
        place.rmdir()
    place.unlink(missing_ok=True)
    instead(place)
    trainer.train()
    trainer.save()
    asked = replace(request(trainer, model), max_norm=("auto",))
    assert export_incremental(asked).published is not None
    ran = export_model("history", model, "--json")
    assert ran.code == 0
    assert json.loads(ran.out)
