"""`--golden`: a version or base whose answers are wrong is not published."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from exporter.publish.delta_log import read_log
from tests.support.agents import Published, newest_version
from tests.support.commands import export_model
from tests.support.numpy_trainer import STEP

USERS = list(range(23))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("golden"))


def golden(directory: Path, **expect: object) -> Path:
    path = directory / "golden.json"
    request = {"name": "all users", "inputs": {"user": USERS, "item": [0]}, "expect": {"user_rows": expect}}
    path.write_text(json.dumps({"requests": [request]}))
    return path


def train(world: Published, rows: list[int], number: float) -> None:
    """A step that gives these users' rows this value."""
    session = world.trainer.session
    assert session is not None
    values = session.variables.values
    values["net/users"] = values["net/users"].copy()
    values["net/users"][rows] = np.float32(number)
    values[STEP] = values[STEP] + 1
    session.variables.touched["net/users"].update(rows)


@pytest.mark.parametrize(
    ("number", "expect", "cause"),
    [
        (float("nan"), {}, "all users, output 'user_rows': 69 of 69 values are NaN or infinite"),
        (7.0, {"min": -1, "max": 1}, "all users, output 'user_rows': 7 is above 1"),
        (7.0, {"near": 6.5, "tolerance": 0.1}, "0.5 away from what is expected, 0.1 is allowed"),
    ],
)
def test_a_base_with_wrong_answers_is_not_published(
    world: Published, tmp_path: Path, number: float, expect: dict[str, float], cause: str
) -> None:
    train(world, USERS, number)
    world.trainer.save()
    before = sorted(world.model.iterdir())
    base = [*world.arguments()[:-1], "--new-base=always", "--again"]
    done = export_model(*base, "--golden", golden(tmp_path, **expect))
    assert done.code == 6
    assert "the version does not pass the golden requests" in done.err
    assert cause.split(": ")[-1] in " ".join(done.err.split())
    assert sorted(world.model.iterdir()) == before


def test_a_base_that_passes_is_published_with_its_increments(world: Published, tmp_path: Path) -> None:
    train(world, USERS, 0.5)
    world.trainer.save()
    train(world, [3], 0.75)
    world.trainer.increment()
    assert export_model(*world.arguments()).code == 0
    near = np.full((len(USERS), 3), 0.5)
    near[3] = 0.75  # which only the increment says
    before = newest_version(world.model)
    other = [*world.arguments(), "--new-base=if-needed", "--add=stamp"]
    wrong = export_model(*other, "--golden", golden(tmp_path, near=0.5, tolerance=0.01))
    assert (wrong.code, newest_version(world.model)) == (6, before), wrong.err
    done = export_model(*other, "--golden", golden(tmp_path, near=near.tolist(), tolerance=0.01))
    assert done.code == 0, done.err
    assert newest_version(world.model) > before
    assert read_log(world.model).base.at.position == newest_version(world.model)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be used"), ('{"requests": []}', "cannot be used"), (None, "cannot be used")],
    ids=["damaged", "empty", "absent"],
)
def test_a_file_that_holds_no_requests_is_a_usage_error(
    world: Published, tmp_path: Path, text: str | None, message: str
) -> None:
    file = tmp_path / "golden.json"
    if text is not None:
        file.write_text(text)
    done = export_model(*world.arguments()[:-1], "--new-base=always", "--again", "--golden", file)
    assert (done.code, message in done.err) == (2, True), done.err


def test_requests_that_do_not_fit_the_signature_do_not_pass(world: Published, tmp_path: Path) -> None:
    train(world, USERS, 0.5)
    world.trainer.save()
    file = tmp_path / "golden.json"
    requests = [
        {"name": "other inputs", "inputs": {"nobody": [1]}},
        {"name": "other signature", "signature_name": "regress", "inputs": {"user": [1], "item": [1]}},
        {"name": "no such row", "inputs": {"user": [10**9], "item": [0]}},
    ]
    file.write_text(json.dumps({"requests": requests}))
    done = export_model(*world.arguments()[:-1], "--new-base=always", "--again", "--golden", file)
    assert done.code == 6
    for request in requests:
        assert str(request["name"]) in done.err


def test_a_metagraph_alone_cannot_be_asked(world: Published, tmp_path: Path) -> None:
    file = golden(tmp_path)
    done = export_model(
        *world.arguments()[:-1], "--despite=deltas", "--format", "metagraph", "--golden", file
    )
    assert (done.code, "--golden asks a SavedModel" in done.err) == (2, True), done.err
