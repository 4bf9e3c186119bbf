"""Tables by keys in 8 bits: deltas make of a base what a full export in 8 bits serves, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import exporter.bundle.mapped_tables as mapped_tables
from exporter.checkpoint.admission import Admission
from exporter.errors import CorruptFile, NotFinite, OverlayFull, SchemaChanged, TableFull, UsageError
from exporter.options import DeltaDtype, EngineName, ExportRequest, Jobs, Updates, Verify
from exporter.pipeline import log_maintenance
from exporter.pipeline.full import Exported, export
from exporter.pipeline.incremental import ExportedDelta, export_incremental
from exporter.pipeline.rebase import rebase
from exporter.pipeline.watch_loop import is_for_a_person
from exporter.publish.delta_log import read_log
from exporter.tables import DynamicTable
from exporter.wire.int8_codes import beside_codes, to_codes, values_of
from tests.support.budget import times
from tests.support.commands import export_model
from tests.support.deeprec import Ev, write_full, write_increment
from tests.support.deeprec_logs import DEFAULT, DIM, DeepRecTrainer, publish_base, served, train_on
from tests.support.deeprec_logs import request as log_request
from tests.support.made_again import assert_made_again
from tests.support.publishing import delta_of
from tests.support.served_tables import DEFAULTS, LIMITS, assert_serves, in_8_bits, request
from tests.support.updatable import Loaded, loaded

UPDATES = Updates(stamp=True, digest=True)
NAMES = ("emb/user", "item")


assert_serves_8_bits = partial(assert_serves, stored=in_8_bits)


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeepRecTrainer:
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", 1)
    trainer = DeepRecTrainer(tmp_path / "train", has_codes=True)
    trainer.upsert("emb/user", [*range(1, 300), *LIMITS])
    trainer.upsert("item", range(100, 150))
    trainer.save()
    return trainer


def asked(trainer: DeepRecTrainer, out: str = "model", **options: Any) -> ExportRequest:
    told = request(trainer, **{"updates": UPDATES, "casts": ("int8",), **options})
    return replace(told, out=told.out.with_name(out))


CAST = ".*/values=int8"


def log_of(trainer: DeepRecTrainer) -> Path:
    """Where a base without a graph begins a log, which costs no TensorFlow."""
    publish_base(trainer, trainer.directory.with_name("model"), casts=(CAST,))
    return trainer.directory.with_name("model")


def to_log(trainer: DeepRecTrainer, **options: Any) -> ExportedDelta:
    """The next delta of such a log."""
    return delta_of(log_request(trainer, trainer.directory.with_name("model"), **options))


def begin(trainer: DeepRecTrainer, **options: Any) -> Exported:
    done = export_incremental(asked(trainer, **options))
    assert isinstance(done, Exported)
    return done


def delta(trainer: DeepRecTrainer, **options: Any) -> ExportedDelta:
    done = delta_of(asked(trainer, **options))
    assert done.published is not None
    return done


def rows_at(trainer: DeepRecTrainer, position: int | None = None) -> dict[str, dict[int, bytes]]:
    """What the log's tables hold, with values for codes."""
    log = read_log(asked(trainer).out)
    has_several = any(table.defaults > 1 for table in log.base.entry.mapping_spec.dynamic)
    tables = served(log, position, defaults=stored(DEFAULTS if has_several else DEFAULT))
    return {
        name: {key: values_of(np.frombuffer(row, np.int8)[np.newaxis]).tobytes() for key, row in rows.items()}
        for name, rows in tables.items()
    }


def stored(rows: np.ndarray) -> np.ndarray:
    """Rows as codes and scales, in the type that `served` compares."""
    codes, scales, _ = to_codes(rows)
    return beside_codes(codes, scales).astype(np.float32)


def trained(trainer: DeepRecTrainer) -> dict[str, dict[int, bytes]]:
    return {
        name: {key: in_8_bits(np.frombuffer(row, np.float32)[np.newaxis]).tobytes() for key, row in t.items()}
        for name, t in trainer.tables.items()
    }


@pytest.mark.landing
@pytest.mark.parametrize("maps", [False, True])
def test_a_server_that_follows_answers_as_a_full_export(trainer: DeepRecTrainer, maps: bool) -> None:
    told: dict[str, Any] = {"map_tables": maps, "verify": Verify.BYTES}
    done = begin(trainer, **told)
    with loaded(done.published.path) as server:
        assert_serves_8_bits(server, trainer)
        for what in ("increment", "increment", "save"):
            train_on(trainer, what)
            at = delta(trainer, **told).at.position
            assert server.update()["position"] == at
            assert_serves_8_bits(server, trainer)
            assert export_incremental(asked(trainer, **told)).published is None
            if what == "save":
                full = export(asked(trainer, updates=None, out=f"full-{at}"))
                assert_same_answers(server, full.published.path, trainer)
    merged = log_maintenance.merge(asked(trainer).out, jobs=Jobs(task_bytes=1))
    assert merged is not None
    rebased = rebase(asked(trainer).out, jobs=Jobs(task_bytes=1))
    assert rebased is not None
    assert_made_again(rebased.published.path)
    for version, deltas in ((done.published.path, 1), (rebased.published.path, 0)):
        with loaded(version) as server:
            assert server.update()["deltas"] == deltas
            assert_serves_8_bits(server, trainer)
    assert rows_at(trainer) == trained(trainer)
    assert export_model("verify", asked(trainer).out, "--bytes").code == 0


@pytest.mark.landing
@pytest.mark.parametrize("maps", [False, True])
def test_back_over_a_change_of_structure(trainer: DeepRecTrainer, maps: bool) -> None:
    """Keys of deltas, rows of 8 bits and mapped tables come back in a base that begins a log of its own."""
    told: dict[str, Any] = {"map_tables": maps}
    begin(trainer, **told)
    train_on(trainer, "increment")
    at = delta(trainer, **told).at.position
    expected = trained(trainer)
    train_on(trainer, "save")
    export(asked(trainer, updates=replace(UPDATES, stamp=not UPDATES.stamp), **told))
    newest = trained(trainer)
    back = log_maintenance.rollback(asked(trainer).out, at)
    assert rows_at(trainer) == expected
    with loaded(asked(trainer).out / str(back.position)) as server:
        assert server.update()["position"] == back.position
        found = server.predict(user=np.array([5], np.int64), item=np.array([101], np.int64))
        assert found["items"].astype(np.float32).tobytes() == expected["item"][101]
    assert export_model("verify", asked(trainer).out, "--bytes").code == 0
    log_maintenance.resume(asked(trainer).out)
    assert rows_at(trainer) == newest


def assert_same_answers(server: Loaded, version: Path, trainer: DeepRecTrainer) -> None:
    """A server answers bit for bit as another one of a full export."""
    ever = {key for state in trainer.saved.values() for table in state[0].values() for key in table}
    keys = np.array([*ever, *LIMITS], np.int64)
    with loaded(version) as other:
        ours, theirs = (each.predict(user=keys, item=keys) for each in (server, other))
    for name in ("users", "items", "kernel"):
        assert ours[name].tobytes() == theirs[name].tobytes()


@pytest.mark.landing
@pytest.mark.parametrize("maps", [False, True])
def test_back_and_forth_over_a_key_that_went_and_came(trainer: DeepRecTrainer, maps: bool) -> None:
    """Merged deltas, and a rollback by which a key goes, comes with other bits, and goes again."""
    done = begin(trainer, map_tables=maps)
    states = {done.published.manifest.position: (trainer.now(), trainer.kernel)}

    def publish() -> None:
        states[delta(trainer).at.position] = (trainer.now(), trainer.kernel)

    with loaded(done.published.path) as server:
        trainer.step += 1
        trainer.evict("item", [100, 101])
        trainer.save()
        publish()
        trainer.step += 1
        trainer.upsert("item", [100, 777])
        trainer.tables["item"][100] = np.array([9, 0, -9], np.float32).tobytes()
        trainer.increment()
        publish()
        first, gone, newest = states
        for target in (gone, first, newest):
            if target == newest:
                log_maintenance.resume(asked(trainer).out)
            else:
                log_maintenance.rollback(asked(trainer).out, target)
            server.update()
            trainer.tables, trainer.kernel = states[target]
            assert_serves_8_bits(server, trainer, more=[100, 101, 777])
            assert rows_at(trainer) == trained(trainer)
        assert log_maintenance.merge(asked(trainer).out) is not None
    with loaded(done.published.path) as server:
        server.update()
        assert_serves_8_bits(server, trainer, more=[100, 101, 777])


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("value", [np.nan, -np.inf, 3e38])
def test_a_row_without_codes_is_no_delta(trainer: DeepRecTrainer, value: float, saves: bool) -> None:
    model = log_of(trainer)
    trainer.upsert("item", [55])
    trainer.tables["item"][55] = np.array([1, value, 2], np.float32).tobytes()
    trainer.step += 1
    trainer.save() if saves else trainer.increment()
    with pytest.raises(NotFinite, match=r"'item.*' cannot be stored in 8 bits") as caught:
        to_log(trainer)
    assert not is_for_a_person(caught.value), "a watch waits until the rows are numbers again"
    assert read_log(model).at.position == 10
    if saves:
        with pytest.raises(NotFinite, match="'item/values' cannot be stored in 8 bits"):
            publish_base(trainer, model.with_name("other"), casts=(CAST,))


def test_zeros_stay_zeros_and_their_mean_error_does_not_count(trainer: DeepRecTrainer) -> None:
    """Neither do the rows for which there is room."""
    zeros = np.zeros(DIM, np.float32).tobytes()
    trainer.tables["item"] |= dict.fromkeys((100, 101), zeros)
    trainer.step += 1
    trainer.save()
    done = begin(trainer)
    rows = [np.frombuffer(row, np.float32) for row in trainer.tables["item"].values() if row != zeros]
    rows = [row for row in rows if row.any()]
    differences = np.abs(in_8_bits(np.array(rows)) - rows)
    assert done.variables.rounded["item/values"].largest == differences.max()
    assert done.variables.rounded["item/values"].mean == pytest.approx(differences.mean())
    trainer.step += 1
    trainer.upsert("item", [102, 900])
    trainer.tables["item"] |= dict.fromkeys((102, 900), zeros)
    trainer.increment()
    delta(trainer)
    with loaded(done.published.path) as server:
        server.update()
        assert_serves_8_bits(server, trainer)
        found = server.predict(user=np.array([0]), item=np.array([100, 101, 102, 900]))["items"]
        assert found.tobytes() == zeros * 4


def test_less_than_half_a_step_is_no_change(trainer: DeepRecTrainer) -> None:
    """Of a comparison: what is served is compared, and the same codes are not sent again."""
    trainer.tables["item"][100] = np.array([1, 0.51, 0.25], np.float32).tobytes()
    trainer.step += 1
    trainer.save()
    model = log_of(trainer)
    trainer.tables["item"][100] = np.array([1, 0.5101, 0.2501], np.float32).tobytes()
    trainer.evict("item", [101])
    trainer.step += 1
    trainer.save()
    to_log(trainer)
    log = read_log(model)
    changes = log.open(log.deltas[-1]).changes
    assert {"item/index_rows"} == {name for name in changes if name.startswith("item/")}
    assert rows_at(trainer) == trained(trainer)


@pytest.mark.landing
def test_rows_of_one_number_are_left_as_they_are(tmp_path: Path) -> None:
    """With a scale each they would be larger; those of float64 would not."""
    import tensorflow as tf

    def build() -> Any:
        ids = tf.compat.v1.placeholder(tf.int64, [None], name="ids")
        tables = DynamicTable("single", 1), DynamicTable("double", 1, "float64")
        return {"ids": ids}, {name: t.lookup(ids) for name, t in zip(("a", "b"), tables, strict=True)}

    def save(write: Any, path: Path, seed: int) -> dict[str, Ev]:
        wide = {"single": np.float32, "double": np.float64}
        tables = {name: Ev.random(9, 1, seed=seed, values=kind) for name, kind in wide.items()}
        write(path, tables)
        return tables

    train = tmp_path / "train"
    save(lambda path, tables: write_full(path, tables, step=1), train / "model.ckpt-1", 1)
    told = ExportRequest(train, tmp_path / "model", model=build, updates=UPDATES, casts=("int8",))
    done = export_incremental(told)
    assert isinstance(done, Exported)
    (note,) = (note for note in done.plan.notes if "--cast int8 leaves" in note)
    assert note == "--cast int8 leaves as they are: single/values (its rows of 1 would not shrink)"
    new = save(lambda _, tables: write_increment(train, 2, tables), train, 2)
    delta_of(told)
    with loaded(done.published.path) as server:
        server.update()
        found = server.predict(ids=new["single"].keys)
        np.testing.assert_array_equal(found["a"], new["single"].values)
        found = server.predict(ids=new["double"].keys)
        np.testing.assert_array_equal(found["b"], in_8_bits(new["double"].values))


@pytest.mark.landing
@pytest.mark.parametrize("maps", [False, True])
def test_a_full_table_is_a_new_base_with_the_increments(trainer: DeepRecTrainer, maps: bool) -> None:
    begin(trainer, map_tables=maps)
    trainer.train()
    trainer.increment()
    delta(trainer)
    trainer.step += 1
    trainer.upsert("item", range(10_000, 13_000))
    trainer.increment()
    with pytest.raises(TableFull, match="'item' is full"):
        export_incremental(asked(trainer))
    based = export_incremental(asked(trainer), is_watching=True)
    assert isinstance(based, Exported)
    assert based.published.manifest.step == trainer.step
    assert {"emb/user/values", "item/values"} == based.variables.rounded.keys()
    with loaded(based.published.path) as server:
        assert_serves_8_bits(server, trainer)
        trainer.train()
        trainer.increment()
        assert delta(trainer).compared_bytes == 0
        server.update()
        assert_serves_8_bits(server, trainer)


@pytest.mark.landing
def test_new_keys_take_places_in_the_overlay(trainer: DeepRecTrainer) -> None:
    done = begin(trainer, map_tables=True, overlay_rows=30)
    trainer.step += 1
    trainer.upsert("item", range(5_000, 5_030))
    trainer.increment()
    delta(trainer)
    with loaded(done.published.path) as server:
        server.update()
        assert_serves_8_bits(server, trainer)
        assert server.call("incremental_status", probe=[0])["overlay_percent"][0] == 100
    trainer.step += 1
    trainer.upsert("item", [6_000])
    trainer.increment()
    with pytest.raises(OverlayFull, match="'item/values' is full: 31 rows"):
        export_incremental(asked(trainer))


def test_a_pattern_of_the_tables_name_leads_to_its_rows(trainer: DeepRecTrainer) -> None:
    with pytest.raises(UsageError, match="no floating variable is called so") as caught:
        export(asked(trainer, casts=("emb/user=int8",)))
    assert caught.value.hint.endswith(": --cast 'emb/user/values=int8'")
    done = begin(trainer, casts=("emb/user/values=int8",))
    assert done.variables.rounded.keys() == {"emb/user/values"}
    shown = {t["name"]: t for t in export_model("inspect", done.published.path, "--json").document["tables"]}
    assert (shown["emb/user"]["dtype"], shown["emb/user"]["dimension"]) == ("int8", DIM)
    assert (shown["item"]["dtype"], shown["item"]["dimension"]) == ("float32", DIM)


@pytest.mark.landing
def test_a_base_without_scales_takes_none(trainer: DeepRecTrainer) -> None:
    begin(trainer, casts=())
    trainer.train()
    trainer.increment()
    with pytest.raises(SchemaChanged, match="other rules"):
        export_incremental(asked(trainer))
    done = export_incremental(asked(trainer), full_on_mismatch=True)
    assert isinstance(done, Exported)
    delta(trainer)
    with loaded(done.published.path) as server:
        server.update()
        assert_serves_8_bits(server, trainer)


def test_rows_of_8_bits_are_neither_held_back_nor_rounded_again(trainer: DeepRecTrainer) -> None:
    log_of(trainer)
    trainer.train(keys=100)
    trainer.increment()
    done = to_log(trainer, min_change=100.0, delta_dtype=DeltaDtype.INT8)
    assert (done.left_out, done.rounded) == (None, None)
    assert rows_at(trainer) == trained(trainer)


def test_rows_of_8_bits_compete_for_a_budget_by_their_values(trainer: DeepRecTrainer) -> None:
    log_of(trainer)
    before = rows_at(trainer)
    trainer.train(keys=100)
    trainer.increment()
    done = to_log(trainer, delta_budget="1B")
    known = {
        name: {key: row for key, row in rows.items() if key in before[name]}
        for name, rows in rows_at(trainer).items()
    }
    assert known == before
    assert done.left_out is not None and done.left_out.rows > 50
    assert to_log(trainer, delta_budget="1MB").left_out is None
    assert rows_at(trainer) == trained(trainer)


def test_keys_that_are_not_admitted_need_no_codes(tmp_path: Path) -> None:
    trainer = DeepRecTrainer(tmp_path / "train", records_freqs=True, has_codes=True)
    for name in NAMES:
        trainer.upsert(name, [*range(200), *range(100)])
    trainer.save()
    publish_base(trainer, tmp_path / "model", casts=(CAST,), admission=Admission(min_freq=2))
    for saves in (False, True):
        trainer.step += 1
        trainer.upsert("item", [*range(90, 150), 9_000])
        if not saves:  # a full checkpoint is cast with all its rows
            trainer.tables["item"][9_000] = np.full(DIM, np.nan, np.float32).tobytes()
        trainer.save() if saves else trainer.increment()
        if saves:
            trainer.tables["item"].pop(9_000)
        to_log(trainer, min_freq=2, casts=(CAST,))
        counts = trainer.freqs
        expected = {
            name: {key: row for key, row in rows.items() if counts[name].get(key, 0) >= 2}
            for name, rows in trained(trainer).items()
        }
        if saves:
            expected["item"][9_000] = rows_at(trainer)["item"][9_000]
        assert rows_at(trainer) == expected


def test_differences_are_those_of_values(trainer: DeepRecTrainer) -> None:
    model = log_of(trainer)
    before = trained(trainer)["item"]
    assert export_model("diff", model, trainer.directory, "--json").document["equal"]
    trainer.evict("item", [100])
    trainer.upsert("item", [101, 102, 5_000])
    trainer.step += 1
    trainer.save()
    other = export_model("diff", model, trainer.directory, "--json").document["tables"]
    to_log(trainer)
    (found,) = export_model("diff", f"{model}@10", model, "--json").document["tables"]
    assert [found] == other
    after = trained(trainer)["item"]
    pairs = [
        np.frombuffer(rows[key], np.float32).astype(np.float64)
        for rows in (before, after)
        for key in (101, 102)
    ]
    moved = np.abs(np.array(pairs[2:]) - pairs[:2])
    assert (found["name"], found["keys"], found["only_a"], found["only_b"]) == ("item", 49, 1, 1)
    assert found["changed_rows"] == np.count_nonzero(moved.any(axis=1))
    assert found["largest"] == moved.max()
    assert found["norm"] == pytest.approx(np.sqrt((moved**2).sum()))


def test_an_engine_makes_the_same_bytes(trainer: DeepRecTrainer) -> None:
    jobs = Jobs(engine=EngineName.LOCAL, workers=2, task_bytes=256)
    files = []
    for out, more in (("here", {}), ("there", {"jobs": jobs})):
        done = begin(trainer, out=out, **more)
        trainer_files = sorted((done.published.path / "variables").glob("*"))
        with loaded(done.published.path) as server:
            assert_serves_8_bits(server, trainer)
        files.append((done.variables.rounded, len(trainer_files)))
    assert files[0][0].keys() == files[1][0].keys()
    for name in files[0][0]:
        assert files[0][0][name].largest == files[1][0][name].largest
        assert files[0][0][name].mean == pytest.approx(files[1][0][name].mean)


def test_a_key_that_an_increment_holds_twice_is_no_delta(trainer: DeepRecTrainer) -> None:
    model = log_of(trainer)
    rows = np.ones((2, DIM), np.float32)
    write_increment(trainer.directory, trainer.step + 1, {"item": Ev(np.array([100, 100]), rows)})
    with pytest.raises(CorruptFile, match="twice"):
        to_log(trainer)
    assert read_log(model).at.position == 10


OPERATIONS = ("train", "train", "evict", "save", "increment", "rollback", "resume", "merge", "rebase")


@settings(max_examples=times(8))
@given(st.integers(0, 99), st.lists(st.sampled_from(OPERATIONS), min_size=4, max_size=12))
def test_any_history_holds_what_a_dict_holds(
    tmp_path_factory: pytest.TempPathFactory, seed: int, operations: list[str]
) -> None:
    trainer = DeepRecTrainer(tmp_path_factory.mktemp("history") / "train", seed=seed, has_codes=True)
    trainer.train(keys=40)
    trainer.save()
    model = log_of(trainer)
    states = {read_log(model).at.position: trained(trainer)}
    for what in operations:
        log = read_log(model)
        if what == "train":
            trainer.train(keys=int(trainer.rng.integers(0, 30)))
        elif what == "evict":
            trainer.evict("item", list(trainer.tables["item"])[::3])
            trainer.step += 1
            trainer.save()
            to_log(trainer)
            states[read_log(model).at.position] = trained(trainer)
        elif what in ("save", "increment"):
            trainer.step += 1
            trainer.save() if what == "save" else trainer.increment()
            to_log(trainer)
            states[read_log(model).at.position] = trained(trainer)
        elif what == "rollback":
            earlier = [p for p in states if log.base.entry.log <= p < log.at.position]
            if earlier:
                target = int(trainer.rng.choice(earlier))
                log_maintenance.rollback(model, target)
                states[read_log(model).at.position] = states[target]
        elif what == "resume" and log.hold.is_set:
            done = log_maintenance.resume(model)
            states[read_log(model).at.position] = states[done.values_of.position]
        elif what == "merge":
            log_maintenance.merge(model)
        elif what == "rebase" and not log.hold.is_set:
            rebase(model)
        newest = read_log(model)
        assert rows_at(trainer) == states[newest.at.position], what
