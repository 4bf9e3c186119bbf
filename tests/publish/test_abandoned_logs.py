"""Deltas of a log that has no base any more go; nothing that a server could still need does."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest

from exporter.pipeline import incremental, log_maintenance
from exporter.pipeline.incremental import export_incremental
from exporter.publish.delta_log import list_deltas, read_log
from exporter.publish.versions import lease
from exporter.storage.layout import MANIFEST_FILE
from tests.support.logs import Serving, Trainer, publish_base, request
from tests.support.setting import Setting, followed

LATER = 1e12


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two logs, each a base and a delta."""
    trainer, model = Trainer(tmp_path / "train"), tmp_path / "model"
    trainer.save()
    for parts in (1, 2):
        publish_base(trainer, Serving(parts=parts), model)
        trainer.train()
        trainer.save()
        export_incremental(request(trainer, model))
    return model


def logs(model: Path) -> list[Path]:
    return sorted((model / "deltas").iterdir())


def first_base(model: Path) -> Path:
    return min((path for path in model.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))


def test_a_log_goes_with_its_last_base(model: Path) -> None:
    old, new = logs(model)
    log_maintenance.tidy(model, clock=lambda: LATER)
    assert logs(model) == [old, new], "its base is there"
    shutil.rmtree(first_base(model))
    _, retired = log_maintenance.tidy(model, clock=lambda: LATER)
    assert logs(model) == [new]
    assert [name.split("/")[0] for name in retired.removed] == [old.name]
    assert not any(path.exists() for path in retired.trash)


def test_it_stays_for_the_grace_period(model: Path) -> None:
    shutil.rmtree(first_base(model))
    log_maintenance.tidy(model)
    assert len(logs(model)) == 2


def test_it_stays_while_someone_reads_a_delta(model: Path) -> None:
    shutil.rmtree(first_base(model))
    (delta,) = (path for path in logs(model)[0].iterdir() if (path / MANIFEST_FILE).exists())
    with lease(delta):
        log_maintenance.tidy(model, clock=lambda: LATER)
        assert delta.exists()
    log_maintenance.tidy(model, clock=lambda: LATER)
    assert not delta.exists()


def test_it_stays_while_a_version_does_not_say_which_log_it_is_of(model: Path) -> None:
    (first_base(model) / MANIFEST_FILE).write_text("{")
    log_maintenance.tidy(model, clock=lambda: LATER)
    assert len(logs(model)) == 2


def test_what_is_no_log_stays(model: Path) -> None:
    """Also where deltas lie in it: a copy, and a link to what somebody keeps elsewhere."""
    old, _ = logs(model)
    kept = [shutil.copytree(old, old.with_name("copy")), old.rename(model.parent / "elsewhere")]
    old.symlink_to(kept[1])
    shutil.rmtree(first_base(model))
    log_maintenance.tidy(model, clock=lambda: LATER)
    assert len(logs(model)) == 3
    assert all(list_deltas(each) for each in kept)


def test_a_log_has_its_own_bases_alone(model: Path) -> None:
    """Deltas fit no base of the log before, though its position lies inside one of them."""
    newest = max(int(path.name) for path in model.iterdir() if path.name.isdigit())
    assert [base.path for base in read_log(model).bases] == [model / str(newest)]


def test_of_deltas_that_follow_each_other_quickly_few_remove_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for what nobody needs costs more than a small delta does."""
    trainer = followed(tmp_path, range(11, 45), published=44)
    setting = Setting(tmp_path)
    monkeypatch.setattr(incremental, "tidy", partial(log_maintenance.tidy, clock=lambda: LATER))

    def publish(every_s: float) -> int:
        monkeypatch.setattr(incremental, "_REMOVE_EVERY_S", every_s)
        trainer.train()
        trainer.increment()
        assert export_incremental(request(trainer, setting.model)).published is not None
        return len(setting.deltas)

    before = len(setting.deltas)
    assert publish(1e12) == before + 1
    assert publish(1e-6) < before - 8
