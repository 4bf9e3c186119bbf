"""`--delta-budget change=X`: what stays behind stays within the bound, is told, and is sent later."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.delta.delta_files import read_delta
from exporter.delta.deviation import LeftOut
from exporter.delta.residual import load_residual
from exporter.publish.delta_log import read_log
from exporter.storage.layout import CACHES_DIRECTORY
from exporter.wire.json_documents import DocumentError, decode, encode
from tests.support.budget import times
from tests.support.commands import export_model
from tests.support.drifting import World, behind, drift, export, servings
from tests.support.logs import (
    Serving,
    Trainer,
    assert_same_bits,
    served_now,
    values_at,
)

HAPPENINGS = ["train", "drift", "drift", "save", "increment", "export", "export", "merge", "tidy"]


@pytest.mark.landing
@settings(max_examples=times(40))
@given(
    servings,
    st.lists(st.sampled_from([*HAPPENINGS, "rollback", "resume"]), min_size=4, max_size=25),
    st.integers(0, 1000),
)
def test_what_is_served_stays_within_the_bound_and_becomes_exact_when_asked(
    serving: Serving, what: list[str], seed: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), serving, seed)
        rng = np.random.default_rng(seed)
        for each in what:
            world.do(each, rng)
        world.export(0.02)
        world.export(0.0)


def test_a_row_that_keeps_drifting_is_sent_once_it_has_gone_far_enough(
    trainer: Trainer, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    users = trainer.values["net/users"]
    sent = []
    for step in range(1, 8):
        users = users.copy()
        users[5, 0] += 0.25
        users[6, 1] += 0.01
        trainer.values["net/users"], trainer.step = users, 10 + step
        trainer.touched["net/users"] = {5, 6}
        trainer.increment() if step % 3 else trainer.save()
        done = export(trainer, model, 0.6)
        assert done.left_out is not None
        sent.append(done.rows)
    assert sent == [0, 0, 1, 0, 0, 1, 0]
    assert done.left_out == LeftOut(0.6, 2, pytest.approx(0.25, abs=1e-5))
    assert export(trainer, model).rows == 2


def test_a_delta_says_what_it_leaves_out(trainer: Trainer, tmp_path: Path) -> None:
    model = tmp_path / "model"
    drift(trainer, 0.01)
    trainer.increment()
    done = export(trainer, model, 1.0)
    log = read_log(model)
    assert done.published is not None
    assert log.deltas[-1].only_from
    assert read_delta(done.published.path / "delta", log.schema).header.only_from
    assert log.trained.left_out == done.left_out == LeftOut(1.0, 8, done.left_out.largest)
    assert 0 < done.left_out.largest < 0.1
    exact = export(trainer, model)
    assert (exact.rows, exact.left_out, read_log(model).deltas[-1].only_from) == (8, None, False)


def test_rows_that_were_touched_and_did_not_move_are_no_change(trainer: Trainer, tmp_path: Path) -> None:
    trainer.step += 1
    trainer.touched["net/users"] = {3, 4}
    trainer.increment()
    done = export(trainer, tmp_path / "model", 1.0)
    assert (done.rows, done.left_out) == (0, None)


def test_a_smaller_bound_sends_what_a_larger_one_left_out(trainer: Trainer, tmp_path: Path) -> None:
    model = tmp_path / "model"
    drift(trainer, 0.01)
    trainer.save()
    assert export(trainer, model, 1.0).rows == 0
    assert export(trainer, model, 2.0).published is None
    assert export(trainer, model, 1e-6).rows == 8


def test_values_that_are_no_numbers_are_no_small_changes(trainer: Trainer, tmp_path: Path) -> None:
    model = tmp_path / "model"
    users = trainer.values["net/users"].copy()
    users[1], users[2], users[3] = np.nan, np.inf, -np.inf
    trainer.values["net/users"], trainer.step = users, 11
    trainer.save()
    assert export(trainer, model, 1e300).rows == 3
    assert export(trainer, model).published is None


def test_the_command_says_what_was_left_out(trainer: Trainer, tmp_path: Path) -> None:
    drift(trainer, 0.01)
    trainer.save()
    command = ["--ckpt-dir", trainer.directory, "--out", tmp_path / "model", "--incr"]
    shown = export_model(*command, "--delta-budget", "change=1.5")
    assert "left out" in shown.out and "8 rows that moved less than 1.5" in shown.out
    drift(trainer, 0.01)
    trainer.save()
    told = export_model(*command, "--delta-budget", "change=1.5", "--json").document["left_out"]
    assert told["bound"] == 1.5 and 8 <= told["rows"] <= 16 and 0 < told["largest"] < 0.2


@pytest.mark.parametrize("bound", [math.nan, math.inf, -1.0])
def test_a_bound_is_a_distance(trainer: Trainer, tmp_path: Path, bound: float) -> None:
    command = [
        "--ckpt-dir",
        trainer.directory,
        "--out",
        tmp_path / "model",
        "--incr",
        "--delta-budget",
        f"change={bound}",
    ]
    assert export_model(*command).code == 2
    assert export_model(*command[:-3], "--delta-budget", "change=1").code == 2


def test_what_was_left_out_survives_a_manifest() -> None:
    said = LeftOut(0.1, 7, 0.09999999999999999)
    assert decode(encode(said), LeftOut, "it", written=encode) == said


@pytest.mark.parametrize("value", ["-0.5", "1e999", '"0.1"', "true", "null"])
def test_a_damaged_distance_is_named(value: str) -> None:
    with pytest.raises(DocumentError, match=r"it\.largest: (expected `float`|number out of range)"):
        decode(f'{{"bound": 0.1, "rows": 1, "largest": {value}}}', LeftOut, "it", written=encode)


@pytest.mark.parametrize("lost", ["nothing", "file", "bit"])
def test_increments_tell_what_changed_as_long_as_what_was_left_out_is_remembered(
    trainer: Trainer, tmp_path: Path, lost: str
) -> None:
    model = tmp_path / "model"
    for _ in range(3):
        drift(trainer, 0.01)
        trainer.increment()
        done = export(trainer, model, 1.0)
    assert done.compared_bytes == 0
    (kept,) = (read_log(model).path / ".state").glob("left-out-*.data*")
    if lost == "file":
        kept.unlink()
    elif lost == "bit":
        content = bytearray(kept.read_bytes())
        content[len(content) // 2] ^= 1
        kept.write_bytes(content)
    trainer.values["net/users"] = trainer.values["net/users"] + np.float32(0)
    trainer.values["net/users"][7] += 5
    trainer.touched["net/users"] = {7}
    trainer.step += 1
    trainer.increment()
    done = export(trainer, model, 1.0)
    assert done.rows == 1
    assert (done.compared_bytes == 0) is (lost == "nothing")
    found = behind(values_at(read_log(model)), served_now(trainer, Serving()))
    assert done.left_out is not None
    assert done.left_out.rows == sum(np.count_nonzero(rows) for rows in found.values())
    assert export(trainer, model).left_out is None
    assert_same_bits(values_at(read_log(model)), served_now(trainer, Serving()))


def test_a_row_that_is_as_far_as_the_bound_is_sent(trainer: Trainer, tmp_path: Path) -> None:
    users = np.zeros_like(trainer.values["net/users"])
    trainer.values["net/users"], trainer.step = users, 11
    trainer.save()
    export(trainer, tmp_path / "model")
    moved = users.copy()
    moved[3, 0], moved[4, 0] = 0.5, 0.25
    trainer.values["net/users"], trainer.step = moved, 12
    trainer.save()
    done = export(trainer, tmp_path / "model", 0.5)
    assert done.left_out is not None
    assert (done.rows, done.left_out.rows, done.left_out.largest) == (1, 1, 0.25)


def test_rows_that_were_left_out_of_another_delta_are_not_taken_for_its_own(
    trainer: Trainer, tmp_path: Path
) -> None:
    """A cache that somebody has given another name, or that another log's directory has had."""
    drift(trainer, 0.01)
    trainer.save()
    export(trainer, tmp_path / "model", 0.5)
    log = read_log(tmp_path / "model")
    at = {"lineage": log.lineage, "position": log.at.position, "state": log.newest.manifest.state_id}
    kept = log.path / CACHES_DIRECTORY
    assert load_residual(kept, log.schema, **at)
    assert load_residual(kept, log.schema, **at | {"lineage": "another"}) is None
    for path in kept.glob(f"left-out-{log.at.position}-*"):
        path.rename(path.with_name(path.name.replace(f"-{log.at.position}-", "-99-")))
    assert load_residual(kept, log.schema, **at | {"position": 99}) is None
