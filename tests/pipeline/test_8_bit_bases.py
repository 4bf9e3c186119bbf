"""Bases in 8 bits that take deltas: at every position they serve what a full export in 8 bits would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import exporter.bundle.mapped_tables as mapped_tables
from exporter.errors import NotFinite, SchemaChanged
from exporter.options import EngineName, Jobs, Updates, Verify
from exporter.pipeline.full import Exported, export
from exporter.pipeline.incremental import export_incremental
from exporter.pipeline.watch_loop import is_for_a_person
from exporter.publish.delta_log import read_log
from exporter.wire.int8_codes import to_codes, values_of
from tests.support.agents import Published
from tests.support.commands import export_model
from tests.support.made_again import assert_made_again
from tests.support.mapped_models import DIM, ROWS, MappedModel, mapped_below
from tests.support.publishing import delta_of
from tests.support.updatable import Loaded, loaded

UPDATES = Updates(stamp=True, digest=True)
ALL = np.arange(ROWS)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MappedModel:
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", ROWS * DIM)
    return MappedModel(tmp_path)


def options(**more: Any) -> dict[str, Any]:
    return {"updates": UPDATES, "casts": ("emb=int8",), **more}


def in_8_bits(table: np.ndarray) -> np.ndarray:
    codes, scales, _ = to_codes(table)
    return codes * scales[:, np.newaxis]


def assert_answers(server: Loaded, model: MappedModel, position: int) -> None:
    found = server.predict(ids=ALL)
    np.testing.assert_array_equal(found["rows"], in_8_bits(model.table))
    assert set(found["model_position"].tolist()) == {position}


@pytest.mark.landing
@pytest.mark.parametrize("maps", [False, True])
@pytest.mark.parametrize("parts", ["0", "3"])
def test_deltas_carry_rows_as_they_are_served(
    model: MappedModel, maps: bool, parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", 1)
    asked = options(map_tables=maps, model_args={"parts": parts})
    done = export(model.request(**asked, verify=Verify.OUTPUTS, tolerance=0.1))
    assert 0 < done.variables.rounded["emb"].largest < 0.05
    with loaded(done.published.path) as server:
        assert len(mapped_below(model.out)) == maps * max(1, int(parts))
        assert_answers(server, model, 7)
        for step in (8, 9):
            model.table[5 * step : 50 * step] += 1
            model.save(step, model.table)
            delta_of(model.request(**asked))
            assert server.update()["position"] == step
            assert_answers(server, model, step)
        merged = export_model("merge", model.out, "--rebase")
        assert merged.code == 0, merged.err
        assert_made_again(model.out / "9")
        with loaded(model.out / "9") as other:
            assert_answers(other, model, 9)
    assert export_model("verify", model.out, "--bytes").code == 0


def test_differences_are_those_of_values(model: MappedModel) -> None:
    export(model.request(**options(map_tables=False)))
    before = in_8_bits(model.table)
    model.table[3:30] *= 1.5
    model.save(8, model.table)
    export_incremental(model.request(**options(map_tables=False)))
    found = export_model("diff", f"{model.out}@7", model.out, "--json").document
    (variable,) = (each for each in found["variables"] if each["name"] == "emb")
    moved = np.abs(in_8_bits(model.table).astype(np.float64) - before.astype(np.float64))
    assert (variable["changed_rows"], variable["rows"]) == (27, ROWS)
    assert variable["largest"] == moved.max()
    assert variable["norm"] == pytest.approx(np.sqrt((moved**2).sum()))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38 * 3])
def test_a_row_without_codes_is_no_delta(model: MappedModel, value: float) -> None:
    export(model.request(**options(map_tables=False)))
    model.table[7, 2] = value
    model.save(8, model.table)
    with pytest.raises(NotFinite, match=r"'emb.*' cannot be stored in 8 bits") as caught:
        export_incremental(model.request(**options(map_tables=False)))
    assert not is_for_a_person(caught.value), "a watch waits until the rows are numbers again"
    assert read_log(model.out).at.position == 7


def test_other_rules_begin_another_log(model: MappedModel) -> None:
    export(model.request(**options(map_tables=False)))
    model.save(8)
    with pytest.raises(SchemaChanged, match="other rules") as caught:
        changed = options(map_tables=False, casts=("emb=bfloat16",), average="ema", by_order=True, min_freq=3)
        export_incremental(model.request(**changed))
    assert caught.value.cause.split("; ") == [
        "--average was not given, is 'ema'",
        "--cast was 'emb=int8', is 'emb=bfloat16'",
        "--by-order was not given, is given",
        "--keys min-freq was 0, is 3",
    ]
    done = export_incremental(
        model.request(**options(map_tables=False, casts=("emb=bfloat16",))), full_on_mismatch=True
    )
    assert isinstance(done, Exported)


@pytest.mark.landing
def test_what_is_left_as_it_is_stays_so_in_deltas(model: MappedModel) -> None:
    """A rule for all, of which only the table is one by rows."""
    asked = options(map_tables=False, casts=("int8",))
    done = export(model.request(**asked))
    kinds = {v.name: v.dtype.label for v in read_log(model.out).schema.variables}
    assert kinds == {"emb": "int8", "kernel": "float32", "whole": "float32"}
    model.table[:9] = 2
    model.save(8, model.table)
    export_incremental(model.request(**asked))
    with loaded(done.published.path) as server:
        assert server.update()["position"] == 8
        assert_answers(server, model, 8)


@pytest.mark.landing
@pytest.mark.parametrize("jobs", [None, Jobs(engine=EngineName.LOCAL, workers=2, task_bytes=1 << 16)])
def test_increments_of_a_trainer(tmp_path: Path, jobs: Jobs | None) -> None:
    """Rows of the trainer's increments, and a comparison of full checkpoints, by tasks too."""
    published = Published(tmp_path, options=("--cast", "s/users=int8"))
    trainer = published.trainer
    base = max(read_log(published.model).bases, key=lambda one: one.at.position)
    more = [] if jobs is None else ["--engine", "local", "--engine", "task-size=64KiB"]
    with loaded(base.path) as server:
        for saves in (False, True, False):
            trainer.train()
            trainer.save() if saves else trainer.increment()
            done = export_model(*published.arguments(), *more)
            assert done.code == 0, done.err
            server.update()
            users = trainer.session.variables.values["net/users"]
            found = server.predict(user=np.arange(len(users)), item=np.array([0]))
            np.testing.assert_array_equal(found["user_rows"], in_8_bits(users))
    state = read_log(published.model).state()
    np.testing.assert_array_equal(values_of(state.rows("s/users", 0, len(users))), in_8_bits(users))


def test_rows_that_became_numbers_again_do_not_stand_in_the_way(tmp_path: Path) -> None:
    """The increment in which they were NaN is not published; a later one holds them."""
    published = Published(tmp_path, options=("--cast", "s/users=int8"))
    variables = published.trainer.session.variables
    for value, code in ((np.nan, 6), (0.5, 0)):
        published.trainer.train()
        variables.values["net/users"] = variables.values["net/users"].copy()
        variables.values["net/users"][:3] = value
        variables.touched["net/users"].update(range(3))
        published.trainer.increment()
        ran = export_model(*published.arguments())
        assert ran.code == code, ran.err
    log = read_log(published.model)
    users = variables.values["net/users"]
    np.testing.assert_array_equal(values_of(log.state().rows("s/users", 0, len(users))), in_8_bits(users))
