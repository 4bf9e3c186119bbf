"""Damage stays where it is: what is read to be published again is checked, and caches know whose they are."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from exporter.catalog import Catalog
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.delta import row_reader
from exporter.delta.format import span_name
from exporter.delta.layered_state import LayeredState
from exporter.delta.row_reader import row_readers
from exporter.errors import CorruptFile, ManifestError, VerificationError
from exporter.options import DeltaDtype, Verify
from exporter.pipeline import incremental, log_maintenance
from exporter.pipeline.incremental import ExportedDelta, export_incremental
from exporter.pipeline.rebase import rebase
from exporter.publish.commit import PublishedDelta
from exporter.publish.delta_log import BROKEN_LOG_HINT, list_deltas, read_log
from exporter.publish.versions import version_dirs
from tests.support.drifting import behind, drift
from tests.support.logs import (
    Serving,
    Trainer,
    assert_same_bits,
    damage_tensor,
    publish_base,
    request,
    served_now,
    values_at,
)


@dataclass(frozen=True)
class World:
    """A base at 10 and two deltas of increments that touched rows of every table."""

    trainer: Trainer
    model: Path

    @property
    def base(self) -> Path:
        return self.model / "10" / "variables" / "variables"

    def export(self, **how: object) -> ExportedDelta:
        done = export_incremental(replace(request(self.trainer, self.model), **how))  # type: ignore[arg-type]
        assert isinstance(done, ExportedDelta)
        return done

    def published(self) -> list[str]:
        log = read_log(self.model)
        return sorted(str(path) for path in log.path.iterdir() if path.name != ".state")


@pytest.fixture
def world(tmp_path: Path) -> World:
    trainer = Trainer(tmp_path / "train")
    trainer.save()
    world = World(trainer, tmp_path / "model")
    publish_base(trainer, Serving(), world.model)
    for _ in range(2):
        drift(trainer, 1.0)
        trainer.increment()
        world.export()
    return world


def resumed(world: World) -> None:
    log_maintenance.resume(world.model)


def rolled_back(world: World) -> None:
    log_maintenance.rollback(world.model, 11)


def compared(world: World) -> None:
    shutil.rmtree(world.trainer.directory / "increments")
    world.trainer.step += 1
    world.trainer.save()
    world.export()


def left_out(world: World) -> None:
    drift(world.trainer, 0.01)
    world.trainer.increment()
    world.export(min_change=0.5)


def rounded(world: World) -> None:
    drift(world.trainer, 0.01)
    world.trainer.increment()
    world.export(delta_dtype=DeltaDtype.INT8)


@pytest.mark.parametrize("again", [rolled_back, resumed, compared, left_out, rounded])
def test_a_flipped_bit_of_the_base_is_published_by_nothing(
    world: World, again: Callable[[World], None]
) -> None:
    if again is resumed:
        rolled_back(world)
    before = world.published()
    hold = read_log(world.model).hold.read()
    damage_tensor(world.base, "s/users")
    with pytest.raises(CorruptFile, match="damaged at 's/users'") as caught:
        again(world)
    assert caught.value.hint == BROKEN_LOG_HINT
    assert world.published() == before
    assert read_log(world.model).hold.read() == hold


def test_a_flipped_bit_of_a_delta_is_no_value(world: World) -> None:
    """Of variables that are named it is those of others that may be damaged."""
    before, log = world.published(), read_log(world.model)
    damage_tensor(log.deltas[-1].path / "delta", "s/users/values")
    for named in (None, {"s/users"}):
        with pytest.raises(CorruptFile, match="damaged at 's/users/values'") as caught:
            log.state(only=named)
        assert caught.value.hint == BROKEN_LOG_HINT
    assert log.state(only={"s/items"}).rows("s/items", 0, 1).any()
    with pytest.raises(CorruptFile, match="damaged at 's/users/values'"):
        rolled_back(world)
    assert world.published() == before


def test_a_delta_under_another_name_leads_nowhere(world: World) -> None:
    path = read_log(world.model).deltas[-1].path
    start, end = map(int, path.name.split("-"))
    path.rename(path.with_name(span_name(start, end + 5)))
    log = read_log(world.model)
    for read in (lambda: log.tensors(log.deltas[-1]), log.state):
        with pytest.raises(ManifestError, match=f"names {start} to {end}"):
            read()


@pytest.mark.parametrize("asked", [Verify.BYTES, Verify.NONE])
def test_a_delta_is_read_back_if_that_is_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch, asked: Verify
) -> None:
    """Its bytes get wrong between their writing and the manifest."""
    write = incremental.publish_changes

    def damaged(*of: Any, check: Callable[[Catalog], None] | None, **how: Any) -> PublishedDelta:
        def checked(written: Catalog) -> None:
            damage_tensor(written.prefix, "s/users/values")
            if check is not None:
                check(written)

        return write(*of, check=checked, **how)

    monkeypatch.setattr(incremental, "publish_changes", damaged)
    drift(world.trainer, 1.0)
    world.trainer.increment()
    before = world.published()
    if asked is Verify.BYTES:
        with pytest.raises(VerificationError, match="s/users/values"):
            world.export(verify=asked)
        assert world.published() == before
    else:
        world.export(verify=asked)
        assert world.published() != before


@pytest.mark.parametrize("again", [rolled_back, compared, left_out])
def test_what_is_not_read_may_be_damaged(world: World, again: Callable[[World], None]) -> None:
    """Nothing of what is published again hangs on optimizer slots that the base's shard holds."""
    damage_tensor(world.trainer.directory / "model.ckpt-10", "net/users/Adagrad")
    again(world)


def test_rows_that_are_held_back_ask_for_the_whole_base_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was compared is not read again for the next delta, until a shard of the base is written to."""
    read: list[object] = []
    check = row_reader.check_values
    monkeypatch.setattr(
        row_reader, "check_values", lambda *run, keep: (read.append(run), check(*run, keep=keep))
    )
    left_out(world)
    assert len(read) == 2, "users and items"
    left_out(world)
    assert len(read) == 2
    cache = read_log(world.model).path / ".state" / "checked"
    for spoilt in ("[", "[]", "{}", '{"files": [], "runs": []}', '{"files": {}, "runs": [7, []]}'):
        cache.write_text(spoilt)
        read.clear()
        left_out(world)
        assert len(read) == 2
    damage_tensor(world.base, "s/items")
    with pytest.raises(CorruptFile, match="damaged at 's/items'"):
        left_out(world)


def test_a_damaged_dense_value_is_not_restored(world: World) -> None:
    world.trainer.values["net/kernel"] = world.trainer.values["net/kernel"] + 1
    world.trainer.touched["net/kernel"] = set()
    world.trainer.step += 1
    world.trainer.increment()
    world.export()
    damage_tensor(world.base, "s/kernel")
    with pytest.raises(CorruptFile, match="damaged at 's/kernel'"):
        rolled_back(world)


def test_what_hashes_alone_vouch_for_is_not_noted_as_compared(world: World) -> None:
    for _ in range(2):
        world.trainer.step += 1
        world.trainer.save()
        world.export()
    damage_tensor(world.base, "s/users")
    world.trainer.step += 1
    world.trainer.save()
    world.export(min_change=0.5)
    with pytest.raises(CorruptFile, match="damaged at 's/users'"):
        left_out(world)


def test_known_hashes_tell_of_damage_in_the_blocks_that_are_read(world: World) -> None:
    """The damaged row equals the trainer's new one: bytes alone would say that nothing changed."""
    compared(world)
    assert world.export().published is None
    users = world.trainer.values["net/users"]
    untouched = np.flatnonzero((values_at(read_log(world.model), 10)["s/users"] == users).all(axis=1))
    damaged = damage_row(world.base, "s/users", int(untouched[0]))
    world.trainer.values["net/users"] = users.copy()
    world.trainer.values["net/users"][untouched[0]] = damaged
    world.trainer.step += 1
    world.trainer.save()
    with pytest.raises(CorruptFile, match="damaged at 's/users'"):
        world.export()


def damage_row(prefix: Path, name: str, row: int) -> np.ndarray:
    """Put other values in the place of a row; what they are."""
    catalog = read_catalog(prefix)
    ref = catalog.tensors[name]
    (extent,) = ref.extents
    path = catalog.path_of(extent)
    content = bytearray(path.read_bytes())
    width = extent.size // ref.shape[0]
    values = np.full(ref.shape[1:], 7, np.float32)
    content[extent.offset + row * width :][:width] = values.tobytes()
    start = extent.offset + row * width
    content[start : start + width] = values.tobytes()
    path.unlink()
    path.write_bytes(content)
    return values


@pytest.mark.parametrize("dense", [frozenset[str](), frozenset({"users"})], ids=["rows", "whole"])
def test_partitions_that_become_one_are_checked(tmp_path: Path, dense: frozenset[str]) -> None:
    """Rows that are taken out of `mod` partitions, also those of a variable that is served whole."""
    trainer, serving = Trainer(tmp_path / "train", parts=3), Serving(dense=dense)
    trainer.save()
    publish_base(trainer, serving, tmp_path / "model")
    trainer.train()
    trainer.save()
    damage_tensor(trainer.directory / f"model.ckpt-{trainer.step}", "net/users")
    with pytest.raises(CorruptFile, match="damaged at 'net/users'"):
        export_incremental(request(trainer, tmp_path / "model"))


def test_each_partition_is_read_once_however_many_parts_are_served_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, serving = Trainer(tmp_path / "train", parts=3), Serving(parts=4)
    trainer.save()
    catalog = read_catalog(trainer.directory / "model.ckpt-10")
    sources = serving.mapping_spec().mapping(catalog).sources
    variables = [found for source in sources for found in row_readers(catalog, source)]
    state = LayeredState({variable.name: variable for variable in variables})
    read: list[object] = []
    check = row_reader.check_values
    monkeypatch.setattr(
        row_reader, "check_values", lambda *run, keep: (read.append(run[2] or run[1]), check(*run, keep=keep))
    )
    for name in state.stored:
        state.check([name])
    state.check(state.stored)
    tables = [ref for name, ref in catalog.tensors.items() if name in ("net/users", "net/items")]
    assert len(read) == sum(len(ref.slices) for ref in tables) + 2


def remade(world: World) -> None:
    """The newest delta is deleted and made anew at its position, with other rows and values."""
    newest = list_deltas(read_log(world.model).path)[-1]
    position = newest.end
    shutil.rmtree(newest.path)
    trainer = world.trainer
    for path in trainer.directory.glob(f"model.ckpt-{trainer.step}.*"):
        path.unlink()
    users = served_now(trainer, Serving())["s/users"].copy()
    users[[2, 9]] += 3
    trainer.values["net/users"] = users
    trainer.save()
    caches = {path: path.read_bytes() for path in (read_log(world.model).path / ".state").iterdir()}
    done = world.export()
    assert done.at.position == position
    for path, content in caches.items():
        path.write_bytes(content)


def test_hashes_of_a_delta_that_was_made_anew_are_not_taken_for_its_own(world: World) -> None:
    compared(world)
    before = dict(world.trainer.values)
    remade(world)
    world.trainer.values = before
    world.trainer.step += 1
    world.trainer.save()
    world.export()
    assert_same_bits(values_at(read_log(world.model)), served_now(world.trainer, Serving()))


def test_rows_left_out_of_a_delta_that_was_made_anew_are_not_taken_for_its_own(world: World) -> None:
    trainer = world.trainer
    drift(trainer, 0.01)
    trainer.increment()
    world.export(min_change=0.5)
    log = read_log(world.model)
    caches = {path: path.read_bytes() for path in (log.path / ".state").glob("left-out-*")}
    shutil.rmtree(log.deltas[-1].path)
    shutil.rmtree(sorted((trainer.directory / "increments").glob("0*"))[-1])
    trainer.values["net/users"] = trainer.values["net/users"].copy()
    trainer.values["net/users"][5] += 0.01
    trainer.save()
    done = world.export(min_change=0.5)
    assert done.at == log.at and done.left_out is not None
    for path, content in caches.items():
        path.write_bytes(content)
    trainer.touched["net/items"] = {1}
    trainer.step += 1
    trainer.increment()
    again = world.export(min_change=0.5)
    found = behind(values_at(read_log(world.model)), served_now(trainer, Serving()))
    assert again.left_out is not None
    assert again.left_out.rows == sum(np.count_nonzero(rows) for rows in found.values())


def test_a_damaged_base_is_not_made_into_a_new_one(world: World) -> None:
    """Rows that no delta touched would get checksums that call them right."""
    damage_tensor(world.base, "s/users")
    before = [child.version for child in version_dirs(world.model)]
    with pytest.raises(VerificationError, match="s/users"):
        rebase(world.model)
    assert [child.version for child in version_dirs(world.model)] == before
