"""`export(request, save_incr_model=True)`: the incremental model, and an error if there is none to save."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from exporter import DeltaDtype, ExportedDelta, ExportRequest, Updates, export, open_checkpoint
from exporter.checkpoint.identity import Identity
from exporter.errors import Exit, NothingChanged, NotUpdatable, UsageError
from exporter.publish.delta_log import LogBase, read_log
from exporter.terminal.progress import NoProgress
from tests.support.logs import (
    Serving,
    Trainer,
    assert_same_bits,
    publish_base,
    request,
    save_increment,
    served_now,
    values_at,
)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    trainer = Trainer(tmp_path / "train")
    trainer.save()
    return trainer


@pytest.fixture
def model(trainer: Trainer, tmp_path: Path) -> Path:
    publish_base(trainer, Serving(), tmp_path / "model")
    return tmp_path / "model"


SOURCES: dict[str, Callable[[Trainer], object]] = {
    "an increment": Trainer.increment,
    "DeepRec's increment": save_increment,
    "a changed checkpoint": Trainer.save,
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_incremental_model_is_the_next_delta(trainer: Trainer, model: Path, source: str) -> None:
    trainer.train()
    SOURCES[source](trainer)
    done = export(request(trainer, model), save_incr_model=True)
    assert isinstance(done, ExportedDelta)
    assert done.published is not None and done.published.path.parent == read_log(model).path
    assert_same_bits(values_at(read_log(model)), served_now(trainer, Serving()))
    with pytest.raises(NothingChanged, match=f"nothing beyond position {done.at.position} ") as caught:
        export(request(trainer, model), save_incr_model=True)
    assert caught.value.exit_code is Exit.POSITION
    assert "save an increment" in caught.value.hint


def test_training_that_was_not_saved_is_nothing(trainer: Trainer, model: Path) -> None:
    trainer.train()
    with pytest.raises(NothingChanged):
        export(request(trainer, model), save_incr_model=True)
    assert not read_log(model).deltas


def test_without_a_base_there_is_nothing_to_be_incremental_to(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(NotUpdatable, match="there is no model") as caught:
        export(request(trainer, tmp_path / "model"), save_incr_model=True)
    assert "publish a base" in caught.value.hint
    assert not (tmp_path / "model").exists()


def test_it_takes_the_options_of_deltas(trainer: Trainer, model: Path) -> None:
    trainer.train()
    trainer.save()
    asked = replace(request(trainer, model), delta_dtype=DeltaDtype.INT8)
    done = export(asked, save_incr_model=True)
    assert done.rounded is not None and done.rounded.dtype is DeltaDtype.INT8


@pytest.mark.parametrize("options", [{"delta_dtype": DeltaDtype.INT8}, {"min_change": 0.5}], ids=str)
def test_options_of_deltas_are_not_silently_off(
    trainer: Trainer, tmp_path: Path, options: dict[str, object]
) -> None:
    asked = replace(request(trainer, tmp_path / "model"), **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a version is exact"):
        export(asked)


def test_a_base_is_published_though_its_checkpoint_is_pruned_meanwhile(
    ranker: Path, ranker_graph: Path, tmp_path: Path
) -> None:
    train = shutil.copytree(ranker, tmp_path / "train")
    digest = Identity.of(open_checkpoint(train)).digest

    @contextmanager
    def pruning(label: str, total: int) -> Iterator[NoProgress]:
        yield NoProgress()
        if label == "variables":  # they are in the bundle now
            shutil.rmtree(train)

    asked = ExportRequest(train, tmp_path / "model", model=str(ranker_graph), updates=Updates())
    done = export(asked, progress=pruning)
    assert LogBase.read(done.published.path).entry.trained.checkpoint.digest == digest
