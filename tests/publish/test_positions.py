"""A position is used once, also while the manifest of what stands there is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from exporter.errors import PositionMoved
from exporter.pipeline import log_maintenance
from exporter.pipeline.incremental import execute_incremental, export_incremental, plan_incremental
from exporter.publish.commit import VersionRule
from exporter.publish.delta_log import read_log
from exporter.publish.versions import delta_positions, last_position, version_dirs
from exporter.storage.layout import MANIFEST_FILE
from tests.support.commands import export_model
from tests.support.logs import Serving, Trainer, publish_base, request
from tests.support.setting import followed


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """The trainer of a log of `model`, and of a base after it that has lost its manifest."""
    trainer, model = followed(tmp_path), tmp_path / "model"
    trainer.train()
    trainer.save()
    export_incremental(request(trainer, model))
    trainer.train()
    trainer.save()
    lost = publish_base(trainer, Serving(parts=2), model)
    (lost.path / MANIFEST_FILE).rename(tmp_path / MANIFEST_FILE)
    return trainer


@pytest.fixture
def model(trainer: Trainer, tmp_path: Path) -> Path:
    return tmp_path / "model"


def positions(model: Path) -> list[int]:
    return sorted({*(child.version for child in version_dirs(model)), *delta_positions(model)})


def delta(trainer: Trainer, model: Path) -> None:
    export_incremental(request(trainer, model))


def rollback(trainer: Trainer, model: Path) -> None:
    log_maintenance.rollback(model, read_log(model).base.at.position)


def base(trainer: Trainer, model: Path) -> None:
    publish_base(trainer, Serving(), model)


@pytest.mark.parametrize("publish", [delta, rollback, base])
def test_what_is_published_next_stands_behind_a_version_without_a_manifest(
    publish: Callable[[Trainer, Path], None], trainer: Trainer, model: Path
) -> None:
    before = positions(model)
    publish(trainer, model)
    now = positions(model)
    assert now[:-1] == before
    assert now[-1] > before[-1]


def test_a_version_by_the_clock_stands_behind_it_too(model: Path) -> None:
    last = last_position(model, version_dirs(model))
    _, position = VersionRule("time").choose(None, newest=None, last=last, now=0)
    assert position > positions(model)[-1]


def test_a_negative_name_of_another_program_is_no_position(model: Path) -> None:
    before = last_position(model, version_dirs(model))
    (model / "-7").mkdir()
    assert last_position(model, version_dirs(model)) == before
    assert last_position(model / "-7", version_dirs(model / "-7")) is None


def test_a_delta_is_refused_if_the_manifest_came_back_meanwhile(trainer: Trainer, model: Path) -> None:
    """Then the newest log is another one, whose greatest position is the same as before."""
    lost = version_dirs(model)[0].path
    trainer.train()
    trainer.save()
    planned = plan_incremental(request(trainer, model))
    assert planned.position > int(lost.name)
    (model.parent / MANIFEST_FILE).rename(lost / MANIFEST_FILE)
    with pytest.raises(PositionMoved):
        execute_incremental(planned)


def test_a_rebase_says_what_is_in_its_way_where_a_version_lost_its_manifest(tmp_path: Path) -> None:
    followed(tmp_path, (20, 30), published=30, serving=Serving(parts=2))
    model = tmp_path / "model"
    assert export_model("merge", model, "--rebase").code == 0
    (model / "30/manifest.json").unlink()
    ran = export_model("merge", model, "--rebase", "--json")
    assert ran.code == 2, ran.err
    assert ran.error["message"] == f"{model}/30 is in the way of version 30: it has no manifest.json"
    assert f"export-model doctor {model}" in ran.error["hint"]
