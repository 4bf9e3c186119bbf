"""DeepRec's incremental checkpoints, written as its format is described: cumulative, rows local to their
parts."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.checkpoint.tensor_bundle import BundleWriter, read_catalog
from exporter.delta.format import Rows
from exporter.errors import CorruptFile
from exporter.increments.deeprec import read_increment
from exporter.pipeline.incremental import ExportedDelta, export_incremental
from exporter.publish.delta_log import read_log
from exporter.publish.manifest import DeltaOrigin
from exporter.storage.layout import DEEPREC_INCREMENTS_DIRECTORY
from tests.support.budget import times
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
from tests.support.publishing import delta_of
from tests.support.setting import followed


@settings(max_examples=times(25))
@given(
    st.integers(1, 3), st.integers(1, 3), st.sampled_from([np.int32, np.int64]), st.integers(0, 99), st.data()
)
def test_full_checkpoints_and_increments_in_any_order(
    tmp_path_factory: pytest.TempPathFactory,
    parts: int,
    served: int,
    keys: type,
    seed: int,
    data: st.DataObject,
) -> None:
    directory = tmp_path_factory.mktemp("deeprec")
    trainer, serving = Trainer(directory / "train", parts=parts, seed=seed), Serving(parts=served, cast=True)
    trainer.save()
    publish_base(trainer, serving, directory / "model")
    for what in data.draw(st.lists(st.sampled_from(["save", "increment", "increment"]), max_size=6)):
        trainer.train()
        if what == "save":
            trainer.save()
            trainer.touched = {}
        else:
            save_increment(trainer, keys=keys)
        visible = served_now(trainer, serving)
        if data.draw(st.booleans()):
            delta_of(request(trainer, directory / "model"))
            log = read_log(directory / "model")
            assert_same_bits(values_at(log), visible)
            assert log.at.step == trainer.step


@pytest.fixture
def published(tmp_path: Path) -> tuple[Trainer, Path]:
    trainer = followed(tmp_path, parts=2)
    trainer.train()
    return trainer, tmp_path / "model"


def test_rows_are_taken_from_the_increment_and_nothing_is_compared(published: tuple[Trainer, Path]) -> None:
    trainer, model = published
    save_increment(trainer)
    done = delta_of(request(trainer, model))
    assert (done.rows, done.compared_bytes) == (8, 0)
    assert read_log(model).deltas[0].entry.made is DeltaOrigin.INCREMENTS
    again = delta_of(request(trainer, model))
    assert again.published is None


def test_an_increment_that_is_being_written_is_passed_over(published: tuple[Trainer, Path]) -> None:
    trainer, model = published
    complete = save_increment(trainer)
    visible = served_now(trainer, Serving())
    trainer.train()
    incomplete = save_increment(trainer)
    next(incomplete.parent.glob(f"{incomplete.name}.data-*")).unlink()
    export_incremental(request(trainer, model))
    assert read_log(model).at.step == int(complete.name.rpartition("-")[2])
    assert_same_bits(values_at(read_log(model)), visible)


def test_an_older_increment_than_the_full_checkpoint_is_history(published: tuple[Trainer, Path]) -> None:
    trainer, model = published
    save_increment(trainer)
    trainer.train()
    trainer.save()
    export_incremental(request(trainer, model))
    assert_same_bits(values_at(read_log(model)), served_now(trainer, Serving()))


@pytest.mark.parametrize(
    ("keys", "values", "words"),
    [
        ([0, 12], np.zeros((2, 3), np.float32), "are not rows of 12 x"),
        ([0, -1], np.zeros((2, 3), np.float32), "are not rows of 12 x"),
        ([0, 1], np.zeros((1, 3), np.float32), "are not rows of 12 x"),
        ([0, 1], np.zeros((2, 4), np.float32), "are not rows of 12 x"),
        ([0, 1], np.zeros((2, 3), np.float64), "are not rows of 12 x"),
        ([0, 1], None, "has no values beside it"),
    ],
)
def test_rows_that_fit_no_part_are_named(
    published: tuple[Trainer, Path], keys: list[int], values: np.ndarray | None, words: str
) -> None:
    trainer, model = published
    prefix = trainer.directory / DEEPREC_INCREMENTS_DIRECTORY / "incremental_model.ckpt-99"
    prefix.parent.mkdir()
    with BundleWriter(prefix) as writer:
        writer.add("net/users/part_0-sparse_incr_keys", np.array(keys, np.int64))
        if values is not None:
            writer.add("net/users/part_0-sparse_incr_values", values)
    with pytest.raises(CorruptFile, match=words):
        export_incremental(request(trainer, model))


def test_values_without_keys_are_named(published: tuple[Trainer, Path]) -> None:
    trainer, model = published
    prefix = trainer.directory / DEEPREC_INCREMENTS_DIRECTORY / "incremental_model.ckpt-99"
    prefix.parent.mkdir()
    with BundleWriter(prefix) as writer:
        writer.add("net/users/part_0-sparse_incr_values", np.zeros((2, 3), np.float32))
    with pytest.raises(CorruptFile, match="has no keys beside it"):
        export_incremental(request(trainer, model))


def test_a_table_whose_own_name_ends_like_a_part_is_found(tmp_path: Path) -> None:
    table = np.zeros((5, 2), np.float32)
    with BundleWriter(tmp_path / "model.ckpt-1") as writer:
        writer.add("global_step", np.array(1, np.int64))
        writer.add("net/part_0", table)
    (tmp_path / DEEPREC_INCREMENTS_DIRECTORY).mkdir()
    with BundleWriter(tmp_path / DEEPREC_INCREMENTS_DIRECTORY / "incremental_model.ckpt-2") as writer:
        writer.add("net/part_0-sparse_incr_keys", np.array([3], np.int64))
        writer.add("net/part_0-sparse_incr_values", table[:1] + 1)
    increment = read_increment(read_catalog(tmp_path / "model.ckpt-1"))
    assert increment is not None
    ((changed, rows),) = increment.changes()
    assert isinstance(rows, Rows)
    assert (changed.variable.name, rows.ids.tolist()) == ("net/part_0", [3])


def exported(trainer: Trainer, model: Path) -> ExportedDelta:
    """What is served afterwards is what the trainer has."""
    done = delta_of(request(trainer, model))
    assert_same_bits(values_at(read_log(model)), served_now(trainer, Serving()))
    return done


def restore(trainer: Trainer, values: dict[str, np.ndarray], step: int) -> None:
    """Begin again at a full save; what was touched since is forgotten."""
    trainer.values, trainer.step, trainer.touched = dict(values), step, {}


def test_increments_of_one_training_are_led_on_from_and_nothing_is_compared(
    published: tuple[Trainer, Path],
) -> None:
    trainer, model = published
    for _ in range(3):
        save_increment(trainer)
        assert exported(trainer, model).compared_bytes == 0
        trainer.train()


@pytest.mark.parametrize("what", ["kept", "gone"])
def test_a_trainer_that_went_back_to_its_full_save_abandons_rows(
    published: tuple[Trainer, Path], what: str
) -> None:
    trainer, model = published
    (saved,) = trainer.saved
    abandoned = save_increment(trainer)
    exported(trainer, model)
    if what == "gone":
        for path in abandoned.parent.glob(f"{abandoned.name}*"):
            path.unlink()
    last = trainer.step
    restore(trainer, trainer.saved[saved], saved.step)
    trainer.train(rows=2)
    trainer.step = last + 1
    save_increment(trainer)
    assert exported(trainer, model).compared_bytes > 0
    trainer.train()
    save_increment(trainer)
    assert exported(trainer, model).compared_bytes == 0


def written(prefix: Path, before: Path, seconds: float) -> None:
    """Have all files of a checkpoint written so many seconds before another one."""
    other = before.with_name(f"{before.name}.index").stat().st_mtime_ns
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        os.utime(path, ns=(other, other - int(seconds * 1e9)))


def went_back(trainer: Trainer, steps: int, seconds: float = 0.001) -> tuple[Path, Path]:
    """An increment, and the next full save after the trainer began again at the one before.

    The increment was written `seconds` before that, and is `steps` ahead.
    """
    (saved,) = trainer.saved
    trainer.step = saved.step + 10 + steps
    abandoned = save_increment(trainer)
    restore(trainer, trainer.saved[saved], saved.step)
    trainer.train(rows=2)
    trainer.step = saved.step + 10
    full = trainer.directory / trainer.save().name
    trainer.touched = {}
    written(abandoned, full, seconds)
    return abandoned, full


@pytest.mark.parametrize("is_published", [True, False])
def test_an_increment_of_before_the_trainer_went_back_is_left_out(
    published: tuple[Trainer, Path], is_published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, model = published
    save = trainer.save
    if is_published:  # before the trainer goes back
        monkeypatch.setattr(trainer, "save", lambda: (export_incremental(request(trainer, model)), save())[1])
    abandoned, full = went_back(trainer, 10)
    before = read_log(model).at
    assert (before.step == full_step(abandoned)) == is_published

    done = exported(trainer, model)

    now = read_log(model).at
    assert (now.step, now.position > before.position) == (full_step(full), True)
    assert any(abandoned.name in note and full.name in note for note in done.plan.notes)
    assert done.compared_bytes > 0
    trainer.train()
    trainer.step = now.step + 5
    save_state(save_increment(trainer))
    after = exported(trainer, model)
    assert (after.compared_bytes, after.plan.setbacks) == (0, ())
    assert exported(trainer, model).published is None


def full_step(prefix: Path) -> int:
    return int(prefix.name.rpartition("-")[2])


def save_state(newest: Path) -> None:
    """The state file beside increments, as the trainer writes it with each."""
    (newest.parent / "checkpoint").write_text(f'model_checkpoint_path: "{newest.name}"\n')


def test_a_base_that_is_made_after_the_trainer_went_back_holds_nothing_of_before(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "train", parts=2)
    trainer.save()
    trainer.train()
    went_back(trainer, 10)
    publish_base(trainer, Serving(), tmp_path / "model")
    done = exported(trainer, tmp_path / "model")
    assert done.published is None
    assert len(done.plan.setbacks) == 1


@pytest.mark.parametrize("how", ["at once", "anew"])
def test_an_increment_that_may_be_of_the_full_save_is_taken(
    published: tuple[Trainer, Path], how: str
) -> None:
    """Where times count whole seconds, both may have the same; and a trainer that comes to a step again
    writes its increment again."""
    trainer, model = published
    abandoned, full = went_back(trainer, 10)
    trainer.train()
    trainer.step = full_step(abandoned)
    assert save_increment(trainer) == abandoned
    written(abandoned, full, 0 if how == "at once" else -60)
    done = exported(trainer, model)
    assert done.at.step == full_step(abandoned)
    assert done.plan.setbacks[1:] == ()


def test_the_state_file_says_which_increment_is_the_newest(published: tuple[Trainer, Path]) -> None:
    trainer, model = published
    (saved,) = trainer.saved
    trainer.step += 10
    save_increment(trainer)
    exported(trainer, model)
    restore(trainer, trainer.saved[saved], saved.step)
    trainer.train()
    lower = save_increment(trainer)
    (lower.parent / "checkpoint").write_text(f'model_checkpoint_path: "{lower.name}"\n')
    exported(trainer, model)


def test_an_increment_of_a_later_full_save_is_not_laid_over_an_earlier_one(
    published: tuple[Trainer, Path],
) -> None:
    trainer, model = published
    (first,) = trainer.saved
    trainer.save()
    trainer.touched = {}
    trainer.train()
    save_increment(trainer)
    exported(trainer, model)
    restore(trainer, trainer.saved[first], first.step)
    (trainer.directory / "checkpoint").write_text(f'model_checkpoint_path: "{first.name}"\n')
    exported(trainer, model)
