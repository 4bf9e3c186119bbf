"""`--delta-dtype`: what is served is what was sent, the error is told, exact values come when asked for."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.delta.delta_files import read_delta
from exporter.delta.deviation import Rounded
from exporter.delta.format import ChangeKind, Rows
from exporter.delta.packing import round_rows, shrinks
from exporter.errors import CorruptFile
from exporter.increments.plan import ROUNDED
from exporter.options import DeltaDtype
from exporter.pipeline import log_maintenance
from exporter.pipeline.incremental import ExportedDelta
from exporter.publish.delta_log import DeltaLog, read_log
from exporter.publish.manifest import BaseEntry, DeltaEntry, DeltaOrigin
from exporter.wire.json_documents import DocumentError, decode, encode
from tests.support.budget import times
from tests.support.commands import export_model
from tests.support.drifting import RememberingWorld, drift, servings
from tests.support.logs import (
    Serving,
    Trainer,
    Values,
    assert_same_bits,
    damage_tensor,
    request,
    save_increment,
    served_now,
    values_at,
)
from tests.support.publishing import delta_of

BFLOAT16, INT8 = DeltaDtype


def export(
    trainer: Trainer, model: Path, dtype: DeltaDtype | None = None, bound: float = 0.0
) -> ExportedDelta:
    return delta_of(structs.replace(request(trainer, model), delta_dtype=dtype, min_change=bound))


def same_rows(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.array([x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True)], bool)


def largest_error(served: Values, trained: Values) -> float:
    """Of all elements that are not the same bit for bit."""
    found = [0.0]
    for name, value in trained.items():
        moved = np.abs(served[name].astype(np.float64) - value.astype(np.float64))
        found.append(float(moved[served[name] != value].max(initial=0.0)) if value.ndim else 0.0)
    return max(found)


def assert_rounded(log: DeltaLog, trained: Values, dtype: DeltaDtype, bound: float = 0.0) -> int:
    """Every row is the trainer's, or that rounded, or nearer than the bound; how many are rounded."""
    served, rounded = values_at(log), 0
    for variable in log.schema.variables:
        value, found = trained[variable.name], served[variable.name]
        if variable.kind is ChangeKind.DENSE or not shrinks(dtype, variable.dtype, variable.shape[1:]):
            assert found.tobytes() == value.tobytes() or bound > 0, variable.name
            continue
        is_exact, is_image = same_rows(found, value), same_rows(found, round_rows(value, dtype))
        near = np.linalg.norm(found.astype(np.float64) - value.astype(np.float64), axis=1) < bound
        assert (is_exact | is_image | near).all(), variable.name
        rounded += int(np.count_nonzero(is_image & ~is_exact))
    return rounded


class RoundedWorld(RememberingWorld):
    """Some deltas are rounded."""

    def do(self, what: str, rng: np.random.Generator) -> None:
        match what:
            case "int8" | "bfloat16":
                self.export_rounded(DeltaDtype(what), float(rng.choice([0.0, 0.0, 0.5])))
            case "exact":
                self.export_rounded(None)
            case _:
                super().do(what, rng)
        self.note()
        self.check()

    def export_rounded(self, dtype: DeltaDtype | None, bound: float = 0.0) -> None:
        done = export(self.trainer, self.model, dtype, bound)
        log = read_log(self.model)
        if dtype is None:
            assert_same_bits(values_at(log), self.visible)
            assert done.rounded is log.trained.rounded is None
        else:
            rounded = assert_rounded(log, self.visible, dtype, bound)
            said = log.trained.rounded
            assert said is not None or not rounded or done.left_out
            if said is not None and not bound:
                assert said.rows >= rounded
                assert said.largest >= largest_error(values_at(log), self.visible)
        assert export(self.trainer, self.model, dtype, bound).published is None, "nothing to do"


HAPPENINGS = ["train", "train", "save", "increment", "int8", "int8", "bfloat16", "exact", "merge", "tidy"]


@settings(max_examples=times(25))
@given(
    servings,
    st.lists(st.sampled_from([*HAPPENINGS, "rollback", "resume"]), min_size=4, max_size=20),
    st.integers(0, 1000),
)
def test_what_is_served_is_what_was_sent_and_becomes_exact_when_asked(
    serving: Serving, what: list[str], seed: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = RoundedWorld(Path(directory), serving, seed)
        rng = np.random.default_rng(seed)
        for each in [*what, "train", "save", "int8", "exact"]:
            world.do(each, rng)


@pytest.mark.parametrize("source", ["increment", "save", "deeprec"])
@pytest.mark.parametrize("dtype", DeltaDtype)
def test_the_largest_error_is_the_true_one_and_the_exact_values_come_later(
    trainer: Trainer, tmp_path: Path, dtype: DeltaDtype, source: str
) -> None:
    model = tmp_path / "model"
    for _ in range(3):
        drift(trainer, 1.0, rows=5)
        if source == "deeprec":
            save_increment(trainer)
        else:
            getattr(trainer, source)()
        done = export(trainer, model, dtype)
        log, trained = read_log(model), served_now(trainer, Serving())
        assert done.published is not None and done.rounded is not None
        assert (done.compared_bytes > 0) is (source == "save")
        entry = done.published.manifest.incremental
        assert isinstance(entry, DeltaEntry) and entry.only_from and entry.rounded == done.rounded
        assert read_delta(done.published.path / "delta", log.schema).header.packing is dtype
        served = values_at(log)
        changed = log.open(log.deltas[-1]).changes
        errors = [
            np.abs(served[name][rows.ids].astype(float) - trained[name][rows.ids].astype(float)).max()
            for name, rows in changed.items()
            if isinstance(rows, Rows)
        ]
        assert done.rounded.largest >= max(errors) > 0
        if source == "increment":
            assert done.rounded.largest == max(errors)
        elif source == "save":
            assert done.rounded.largest == largest_error(served, trained)
        assert log.trained.rounded is not None
        assert log.trained.rounded.largest >= largest_error(served, trained)
        assert assert_rounded(log, trained, dtype) <= log.trained.rounded.rows
        assert export(trainer, model, dtype).published is None
    exact = export(trainer, model)
    assert exact.plan.trainer.plan.reason == ROUNDED
    assert (exact.rounded, read_log(model).trained.rounded) == (None, None)
    assert not read_log(model).deltas[-1].only_from
    assert_same_bits(values_at(read_log(model)), served_now(trainer, Serving()))
    assert export(trainer, model).published is None


def test_another_dtype_sends_again_what_was_rounded(trainer: Trainer, tmp_path: Path) -> None:
    model = tmp_path / "model"
    drift(trainer, 1.0, rows=5)
    trainer.increment()
    coarse = export(trainer, model, INT8)
    fine = export(trainer, model, BFLOAT16)
    assert coarse.rounded is not None and fine.rounded is not None
    assert (fine.rows, fine.rounded.dtype) == (coarse.rows, BFLOAT16)
    assert fine.rounded.largest < coarse.rounded.largest
    assert_rounded(read_log(model), served_now(trainer, Serving()), BFLOAT16)


@pytest.mark.parametrize("kind", ["packed", "scales"])
def test_damaged_packed_rows_are_found_where_one_variable_is_read(
    trainer: Trainer, tmp_path: Path, kind: str
) -> None:
    model = tmp_path / "model"
    drift(trainer, 1.0, rows=5)
    trainer.increment()
    export(trainer, model, INT8)
    log = read_log(model)
    (delta,) = log.deltas
    found = read_catalog(delta.path / "delta")
    name = next(key for key, ref in found.tensors.items() if key.endswith(f"/{kind}") and ref.shape[0])
    damage_tensor(delta.path / "delta", name)
    with pytest.raises(CorruptFile):
        log.open(delta, only={name.removesuffix(f"/{kind}")})


def test_a_row_that_rounds_to_what_is_served_is_not_sent_again(trainer: Trainer, tmp_path: Path) -> None:
    model = tmp_path / "model"
    drift(trainer, 1.0, rows=5)
    trainer.increment()
    export(trainer, model, BFLOAT16)
    drift(trainer, 1e-6, rows=10)
    trainer.increment()
    done = export(trainer, model, BFLOAT16)
    assert done.rows < 20
    assert done.rounded is not None and done.rounded.rows == 20
    assert_rounded(read_log(model), served_now(trainer, Serving()), BFLOAT16)


@pytest.mark.parametrize("dtype", DeltaDtype)
def test_mergers_and_rollbacks_hold_every_bit_and_stay_small(
    trainer: Trainer, tmp_path: Path, dtype: DeltaDtype
) -> None:
    model = tmp_path / "model"
    history = {}
    for wanted in (dtype, None, dtype):
        log = read_log(model)
        history[log.at.position] = values_at(log)
        drift(trainer, 1.0, rows=5)
        trainer.save()
        export(trainer, model, wanted)
    log = read_log(model)
    newest = values_at(log)
    merged = log_maintenance.merge(model)
    assert merged is not None
    header = read_delta(merged.path / "delta", log.schema).header
    assert (header.packing, header.only_from) == (dtype, False)
    catalog = read_catalog(merged.path / "delta")
    assert catalog.tensors["s/users/packed"].shape[0] > 0
    assert_same_bits(values_at(read_log(model)), newest)
    for position, values in history.items():
        done = log_maintenance.rollback(model, position)
        assert done.published is not None
        assert_same_bits(values_at(read_log(model)), values)
    log_maintenance.resume(model)
    entry = read_log(model).newest.entry
    assert isinstance(entry, DeltaEntry) and entry.made is DeltaOrigin.RESUME
    export(trainer, model)
    assert_same_bits(values_at(read_log(model)), served_now(trainer, Serving()))


def test_left_out_and_rounded_rows_go_together(trainer: Trainer, tmp_path: Path) -> None:
    model = tmp_path / "model"
    users = trainer.values["net/users"].copy()
    users[3] += 5
    users[4] += 0.01
    trainer.values["net/users"], trainer.step, trainer.touched = users, 11, {"net/users": {3, 4}}
    trainer.increment()
    done = export(trainer, model, INT8, bound=0.5)
    assert done.left_out is not None and done.rounded is not None
    assert (done.rows, done.left_out.rows, done.rounded.rows) == (1, 1, 1)
    trainer.step, trainer.touched = 12, {"net/users": {5}}
    trainer.values["net/users"] = users = users.copy()
    users[5] *= 3
    trainer.increment()
    again = export(trainer, model, INT8, bound=0.5)
    assert (again.rows, again.compared_bytes) == (1, 0), "what was left out is remembered"
    assert again.left_out == done.left_out
    both = read_log(model).trained.rounded
    assert both is not None and both.rows == 2
    assert export(trainer, model).rows == 3
    assert_same_bits(values_at(read_log(model)), served_now(trainer, Serving()))


def test_a_comparison_finds_exact_rows_behind_cached_hashes(trainer: Trainer, tmp_path: Path) -> None:
    """The hashes that a comparison keeps are of the trainer's rows, those of rounded ones must not be."""
    model = tmp_path / "model"
    drift(trainer, 1.0, rows=5)
    trainer.save()
    first = export(trainer, model, INT8)
    trainer.step += 1
    trainer.save()
    assert export(trainer, model, INT8).rows == 0
    assert export(trainer, model).rows == first.rows
    assert_same_bits(values_at(read_log(model)), served_now(trainer, Serving()))


def test_a_base_remembers_what_was_rounded(trainer: Trainer, tmp_path: Path) -> None:
    drift(trainer, 1.0, rows=5)
    trainer.save()
    rounded = export(trainer, tmp_path / "model", BFLOAT16).rounded
    trained = read_log(tmp_path / "model").trained
    entry = structs.replace(read_log(tmp_path / "model").base.entry, trained=trained)
    assert decode(encode(entry), BaseEntry, "it", written=encode).trained.rounded == rounded


def test_the_command_says_how_far_off_rounded_rows_are(trainer: Trainer, tmp_path: Path) -> None:
    drift(trainer, 1.0, rows=5)
    trainer.save()
    command = ["--ckpt-dir", trainer.directory, "--out", tmp_path / "model", "--incr"]
    shown = export_model(*command, "--delta-dtype", "int8")
    error = largest_error(values_at(read_log(tmp_path / "model")), served_now(trainer, Serving()))
    assert f"rounded       10 rows to int8, off by {error:.3g} at most" in shown.out
    told = export_model(*command, "--delta-dtype", "int8", "--json").document
    assert (told["path"], told["rounded"]) == (None, {"dtype": "int8", "rows": 10, "largest": error})
    exact = export_model(*command, "--json").document
    assert (exact["rows"], exact["rounded"], exact["why"]) == (10, None, ROUNDED)


@pytest.mark.parametrize(
    "options",
    [
        ["--incr", "--delta-dtype", "int4"],
        ["--delta-dtype", "int8"],
        ["--new-base=always", "--delta-dtype", "int8"],
    ],
)
def test_a_dtype_that_is_none_or_goes_with_nothing_is_a_usage_error(
    trainer: Trainer, tmp_path: Path, options: list[str]
) -> None:
    ran = export_model("--ckpt-dir", trainer.directory, "--out", tmp_path / "model", *options)
    assert ran.code == 2
    assert "--delta-dtype" in ran.err


def test_what_was_rounded_survives_a_manifest() -> None:
    said = Rounded(INT8, 7, 0.09999999999999999)
    assert decode(encode(said), Rounded, "it", written=encode) == said


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", '"int4"'), ("dtype", "null"), ("rows", "-1"), ("largest", "-0.5"), ("largest", "1e999")],
)
def test_a_damaged_entry_is_named(field: str, value: str) -> None:
    fields = {"dtype": '"int8"', "rows": "1", "largest": "0.1"} | {field: value}
    text = ", ".join(f'"{key}": {each}' for key, each in fields.items())
    with pytest.raises(DocumentError, match=rf"it\.{field}: "):
        decode(f"{{{text}}}", Rounded, "it", written=encode)


@given(
    st.lists(st.builds(Rounded, st.just(INT8), st.integers(1, 9), st.floats(0, 9)), min_size=1, max_size=5)
)
def test_what_was_rounded_before_counts_until_all_is_sent_anew(said: list[Rounded]) -> None:
    total: Rounded | None = None
    for each in said:
        total = each.since(total)
    assert total == Rounded(INT8, sum(each.rows for each in said), max(each.largest for each in said))
    assert structs.replace(said[0], dtype=BFLOAT16).since(total) == structs.replace(said[0], dtype=BFLOAT16)
