"""What the agent finds wrong with the files of a delta that servers refuse."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from exporter.delta.spans import Span
from exporter.verify import log as verify_log
from serving.agent import publications
from serving.agent.journal import Journal
from serving.agent.publications import FollowedModel, Publications
from tests.support.commands import export_model
from tests.support.damage import INDEX, SHARD, flip, truncate
from tests.support.logs import Serving
from tests.support.setting import followed


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    """A delta of a published log."""
    trainer = followed(tmp_path, serving=Serving(parts=2, cast=True), parts=3, name="ranker")
    trainer.train()
    trainer.step = 20
    trainer.increment()
    done = export_model("--ckpt-dir", tmp_path / "train", "--out", tmp_path / "ranker", "--incr")
    assert done.code == 0, done.err
    return next((tmp_path / "ranker/deltas").glob("*/*-*"))


def found(delta: Path) -> str:
    model = Publications(FollowedModel("ranker", delta.parents[2]), Journal(), 1.0)
    (log,) = model.current.logs.values()
    return model.damage(log.lineage, Span(10, 20))


@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink])
@pytest.mark.parametrize("name", [SHARD, INDEX])
def test_damage_is_named_by_its_file(harm: Callable[[Path], None], name: str, delta: Path) -> None:
    assert found(delta) == ""
    harm(delta / name)
    assert str(delta / name) in found(delta)


def test_it_is_read_once_and_again_when_a_file_changes(delta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def look(path: Path) -> str:
        looks.append(path)
        return verify_log.delta_damage(path)

    monkeypatch.setattr(publications, "delta_damage", look)
    model = Publications(FollowedModel("ranker", delta.parents[2]), Journal(), 1.0)
    (log,) = model.current.logs.values()
    good = (delta / SHARD).read_bytes()
    for _ in range(3):
        assert model.damage(log.lineage, Span(10, 20)) == ""
    flip(delta / SHARD)
    for _ in range(3):
        assert SHARD in model.damage(log.lineage, Span(10, 20))
    (delta / SHARD).write_bytes(good)
    assert model.damage(log.lineage, Span(10, 20)) == ""
    assert len(looks) == 3
    assert model.damage(log.lineage, Span(10, 30)) == "", "there is no such delta"
    shutil.rmtree(delta)
    assert model.damage(log.lineage, Span(10, 20)) == "", "what retention removes is not damaged"
