"""Deltas of dynamic tables: what is served after each is what the trainer has, key by key, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.checkpoint.admission import Admission
from exporter.checkpoint.embedding_variables import embedding_variables
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.delta.table_changes import compared
from exporter.errors import CorruptFile, SchemaChanged, TableFull
from exporter.options import DeltaDtype
from exporter.pipeline import log_maintenance, table_deltas
from exporter.pipeline.incremental import ExportedDelta, export_incremental
from exporter.pipeline.rebase import rebase
from exporter.publish.delta_log import read_log
from exporter.publish.manifest import DeltaOrigin
from exporter.storage.layout import VARIABLES_PREFIX
from exporter.tables.geometry import TableGeometry
from tests.support.budget import times
from tests.support.commands import export_model
from tests.support.deeprec import Ev, write_full
from tests.support.deeprec_logs import DeepRecTrainer, publish_base, request, served
from tests.support.logs import damage_tensor
from tests.support.made_again import assert_made_again
from tests.support.publishing import delta_of

DISTANT = [np.iinfo(np.int64).min, np.iinfo(np.int64).max, -1, -2, 0, -1000, 999]


@pytest.fixture
def trainer(tmp_path: Path) -> DeepRecTrainer:
    trainer = DeepRecTrainer(tmp_path / "train")
    trainer.upsert("emb/user", [*range(300), *DISTANT])
    trainer.upsert("item", range(100, 150))
    trainer.save()
    return trainer


@pytest.fixture
def model(trainer: DeepRecTrainer, tmp_path: Path) -> Path:
    publish_base(trainer, tmp_path / "model")
    return tmp_path / "model"


def exported(trainer: DeepRecTrainer, model: Path, **options: object) -> ExportedDelta:
    return delta_of(request(trainer, model, **options))


def test_a_base_serves_the_keys_of_the_checkpoint(trainer: DeepRecTrainer, model: Path) -> None:
    assert served(read_log(model)) == trainer.now()


def test_an_increment_is_a_delta_and_nothing_is_compared(trainer: DeepRecTrainer, model: Path) -> None:
    trainer.train()
    trainer.increment()
    done = exported(trainer, model)
    assert done.compared_bytes == 0
    assert read_log(model).deltas[-1].entry.made is DeltaOrigin.INCREMENTS
    assert served(read_log(model)) == trainer.now()
    assert exported(trainer, model).published is None, "a retry is nothing to do"


def test_rows_that_the_last_increment_held_are_not_sent_again(trainer: DeepRecTrainer, model: Path) -> None:
    for _ in range(4):
        trainer.train(keys=30)
        trainer.increment()
        done = exported(trainer, model)
        assert served(read_log(model)) == trainer.now()
        values = read_log(model).open(read_log(model).deltas[-1]).changes["emb/user/values"]
        assert len(values.ids) <= 30, "not all 30, 60, 90, 120 touched rows"
        assert done.compared_bytes == 0


def test_keys_that_a_newer_full_checkpoint_lacks_are_deleted(trainer: DeepRecTrainer, model: Path) -> None:
    trainer.train()
    trainer.evict("emb/user", [*range(0, 300, 7), -1, np.iinfo(np.int64).min])
    trainer.save()
    done = exported(trainer, model)
    assert done.compared_bytes > 0
    assert read_log(model).deltas[-1].entry.made is DeltaOrigin.COMPARISON
    assert served(read_log(model)) == trainer.now()
    trainer.upsert("emb/user", [-1, 14])
    trainer.step += 1
    trainer.increment()
    exported(trainer, model)
    assert served(read_log(model)) == trainer.now()


def test_a_comparison_sends_what_differs_alone(trainer: DeepRecTrainer, model: Path) -> None:
    trainer.upsert("emb/user", [5, 9_999])
    trainer.evict("emb/user", [6])
    trainer.step += 1
    trainer.save()
    exported(trainer, model)
    changes = read_log(model).open(read_log(model).deltas[-1]).changes
    assert len(changes["emb/user/values"].ids) == 2
    assert "item/values" not in changes
    assert served(read_log(model)) == trainer.now()


def test_a_checkpoint_that_is_written_to_while_its_rows_are_compared(
    trainer: DeepRecTrainer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are compared in maps of files, whose checksums were right before."""
    trainer.upsert("emb/user", [5, 9_999])
    trainer.step += 1
    trainer.save()
    catalog = read_catalog(trainer.directory / f"model.ckpt-{trainer.step}")
    (extent, *_) = embedding_variables(catalog)["emb/user"].parts[0].values.extents

    def written_first(*values: Any) -> Any:
        with catalog.path_of(extent).open("r+b") as file:
            file.seek(extent.offset)
            file.write(b"other")
        return compared(*values)

    monkeypatch.setattr(table_deltas, "compared", written_first)
    with pytest.raises(CorruptFile, match="is damaged at 'emb/user/part_0-values'"):  # when it is read again
        export_incremental(request(trainer, model))
    assert read_log(model).deltas == ()


def test_a_table_that_loses_all_keys_and_gets_others(trainer: DeepRecTrainer, model: Path) -> None:
    for keys in (range(0), range(500, 800), range(0)):
        trainer.evict("emb/user", list(trainer.tables["emb/user"]))
        trainer.upsert("emb/user", keys)
        trainer.step += 1
        trainer.save()
        exported(trainer, model)
        assert served(read_log(model)) == trainer.now()


def test_a_full_checkpoint_with_an_increment_on_top(trainer: DeepRecTrainer, model: Path) -> None:
    """Both are newer than what is published: keys go, rows come from either."""
    trainer.train()
    trainer.evict("item", range(100, 120))
    trainer.save()
    trainer.train()
    trainer.upsert("item", [105, 130])
    trainer.increment()
    assert exported(trainer, model).compared_bytes > 0
    assert served(read_log(model)) == trainer.now()


def test_a_trainer_that_was_set_back_abandons_keys(trainer: DeepRecTrainer, model: Path) -> None:
    saved = trainer.now()
    trainer.train()
    trainer.increment()
    exported(trainer, model)
    assert served(read_log(model)) != saved
    last = trainer.step
    trainer.restart()
    trainer.step = last
    trainer.train(keys=4)
    trainer.increment()
    assert exported(trainer, model).compared_bytes > 0
    assert served(read_log(model)) == trainer.now()


@pytest.mark.parametrize("parts", [{"emb/user": 2, "item": 3}, {"emb/user": 1}, {}])
def test_a_trainer_that_was_repartitioned_goes_on(
    trainer: DeepRecTrainer, model: Path, parts: dict[str, int]
) -> None:
    trainer.parts = parts
    trainer.train()
    trainer.save()
    exported(trainer, model)
    assert served(read_log(model)) == trainer.now()
    trainer.train()
    trainer.increment()
    assert exported(trainer, model).compared_bytes == 0
    assert served(read_log(model)) == trainer.now()


def test_rollback_merge_and_resume_know_nothing_of_keys(trainer: DeepRecTrainer, model: Path) -> None:
    states = {10: trainer.now()}
    for number in range(3):
        trainer.train()
        trainer.evict("emb/user", range(number * 10, number * 10 + 10))
        trainer.save() if number % 2 else trainer.increment()
        exported(trainer, model)
        states[read_log(model).at.position] = served(read_log(model))
    newest = read_log(model).at.position
    log_maintenance.rollback(model, 10)
    assert served(read_log(model)) == states[10]
    log_maintenance.resume(model)
    assert served(read_log(model)) == states[newest]
    assert log_maintenance.merge(model) is not None
    assert served(read_log(model)) == states[newest]
    trainer.train()
    trainer.save()
    exported(trainer, model)
    assert served(read_log(model)) == trainer.now()


def test_a_lost_cache_costs_time_alone(trainer: DeepRecTrainer, model: Path) -> None:
    for _ in range(2):
        trainer.train()
        trainer.increment()
        exported(trainer, model)
        shutil.rmtree(read_log(model).path / ".state", ignore_errors=True)
        assert served(read_log(model)) == trainer.now()


def values_of(table: Mapping[int, bytes], dtype: Any = np.float32) -> dict[int, np.ndarray]:
    return {key: np.frombuffer(row, dtype).astype(np.float64) for key, row in table.items()}


@pytest.mark.parametrize("by_saving", [False, True])
def test_rows_that_moved_little_are_held_back_and_new_keys_never(
    trainer: DeepRecTrainer, model: Path, by_saving: bool
) -> None:
    before = trainer.tables["emb/user"]
    known = np.frombuffer(before[7], np.float32)
    near, far = (known + np.float32(0.01)).tobytes(), np.full(3, 100, np.float32).tobytes()
    trainer.upsert("emb/user", [7, 8, 5_000])
    trainer.tables["emb/user"] |= {7: near, 8: far, 5_000: np.full(3, 50, np.float32).tobytes()}
    trainer.step += 1
    trainer.save() if by_saving else trainer.increment()
    done = exported(trainer, model, min_change=0.5)
    found = served(read_log(model))["emb/user"]
    assert (done.left_out is not None and done.left_out.rows) == (0 if np.isnan(known).any() else 1)
    assert found[8] == far
    assert found[5_000] == trainer.tables["emb/user"][5_000]
    assert found[7] == (near if np.isnan(known).any() else before[7] if before[7] != near else near)
    exported(trainer, model)
    assert served(read_log(model)) == trainer.now(), "without the option everything is sent"


@pytest.mark.parametrize("by_saving", [False, True])
def test_under_a_budget_keys_come_and_go_first(trainer: DeepRecTrainer, model: Path, by_saving: bool) -> None:
    for number in range(4):
        before = served(read_log(model))
        trainer.train()
        if by_saving:
            trainer.evict("emb/user", range(number * 10, number * 10 + 10))
        trainer.save() if by_saving else trainer.increment()
        done = exported(trainer, model, delta_budget="1B")
        found = served(read_log(model))
        for name, table in trainer.now().items():
            assert found[name].keys() == table.keys()
            for key, row in table.items():
                assert found[name][key] in (row, before[name].get(key)), (name, key)
    assert done.left_out is not None and done.left_out.rows > 0
    assert done.budgeted is not None and done.budgeted.excess
    exported(trainer, model)
    assert served(read_log(model)) == trainer.now()


@pytest.mark.parametrize("by_saving", [False, True])
@pytest.mark.parametrize("delta_dtype", list(DeltaDtype))
def test_rows_are_rounded_and_the_index_is_not(
    trainer: DeepRecTrainer, model: Path, by_saving: bool, delta_dtype: DeltaDtype
) -> None:
    for _ in range(3):
        trainer.train()
        trainer.evict("item", range(100, 110)) if by_saving else None
        trainer.save() if by_saving else trainer.increment()
        exported(trainer, model, delta_dtype=delta_dtype)
        for name, table in served(read_log(model)).items():
            expected, found = values_of(trainer.tables[name]), values_of(table)
            assert found.keys() == expected.keys()
            for key, row in expected.items():
                np.testing.assert_allclose(found[key], row, atol=0.05, rtol=0.02)
    trainer.step += 1
    trainer.save()
    exported(trainer, model)
    assert served(read_log(model)) == trainer.now()


def test_rows_that_are_served_cast(trainer: DeepRecTrainer, tmp_path: Path) -> None:
    model = tmp_path / "cast"
    publish_base(trainer, model, casts=(".*/values=bfloat16",))
    for by_saving in (False, True, False):
        trainer.train()
        trainer.evict("emb/user", range(20)) if by_saving else None
        trainer.save() if by_saving else trainer.increment()
        exported(trainer, model)
        for name, table in served(read_log(model)).items():
            rows = {
                key: np.frombuffer(row, np.float32).astype(ml_dtypes.bfloat16).tobytes()
                for key, row in trainer.tables[name].items()
            }
            assert table == rows


def test_a_rebase_holds_what_the_deltas_held(trainer: DeepRecTrainer, model: Path) -> None:
    for by_saving in (False, True):
        trainer.train()
        trainer.save() if by_saving else trainer.increment()
        exported(trainer, model)
    assert rebase(model) is not None
    log = read_log(model)
    assert_made_again(log.base.path)
    assert len(log.bases) == 2
    assert served(log) == trainer.now()
    trainer.train()
    trainer.increment()
    assert exported(trainer, model).compared_bytes == 0
    assert served(read_log(model)) == trainer.now()


def test_keys_are_admitted_by_frequency(tmp_path: Path) -> None:
    trainer, model = DeepRecTrainer(tmp_path / "train", records_freqs=True), tmp_path / "model"
    admission = Admission(min_freq=2)

    def expected() -> dict[str, dict[int, bytes]]:
        counts = trainer.freqs
        return {n: {k: r for k, r in t.items() if counts[n][k] >= 2} for n, t in trainer.tables.items()}

    for name in trainer.names:
        trainer.upsert(name, [*range(200), *range(100)])
    trainer.save()
    publish_base(trainer, model, admission=admission)
    assert served(read_log(model)) == expected()
    for by_saving in (False, True, False, False, True):
        trainer.step += 1
        for name in trainer.names:
            trainer.upsert(name, trainer.rng.integers(50, 300, 40).tolist())
        trainer.save() if by_saving else trainer.increment()
        exported(trainer, model)
        assert served(read_log(model)) == expected()
    with pytest.raises(SchemaChanged) as refused:
        export_incremental(request(trainer, model, min_freq=3))
    assert refused.value.cause == "--keys min-freq was 2, is 3"


def test_a_table_without_room_says_so_and_publishes_nothing(trainer: DeepRecTrainer, model: Path) -> None:
    trainer.upsert("emb/user", range(10_000, 12_000))
    trainer.step += 1
    trainer.increment()
    before = read_log(model).at
    with pytest.raises(TableFull, match="'emb/user' is full: 2000 new keys"):
        export_incremental(request(trainer, model))
    assert read_log(model).at == before
    assert not list(model.glob(".staging*"))


def test_a_table_that_is_gone_or_another_is_named(trainer: DeepRecTrainer, model: Path) -> None:
    trainer.step += 1
    wide = Ev.random(9, dim=4)
    for tables, words in (
        ({"item": wide}, r"has no embedding variable 'emb/user', which is served"),
        ({"emb/user": wide, "item": wide}, r"has rows float32\[4\] of 'emb/user', the base was made of"),
    ):
        dense = {"kernel": trainer.kernel}
        write_full(trainer.directory / f"model.ckpt-{trainer.step}", tables, dense=dense, step=trainer.step)
        state = f'model_checkpoint_path: "model.ckpt-{trainer.step}"\n'
        (trainer.directory / "checkpoint").write_text(state)
        with pytest.raises(SchemaChanged, match=words):
            export_incremental(request(trainer, model))


@pytest.mark.parametrize("part", ["index_seeds", "index_rows", "keys"])
def test_a_damaged_index_places_no_key(trainer: DeepRecTrainer, model: Path, part: str) -> None:
    trainer.train()
    trainer.increment()
    damage_tensor(model / "10" / VARIABLES_PREFIX, f"emb/user/{part}")
    with pytest.raises(CorruptFile, match="its checksum is"):
        export_incremental(request(trainer, model))
    assert not read_log(model).deltas


OPERATIONS = (
    "train",
    "evict",
    "save",
    "increment",
    "restart",
    "export",
    "export",
    "rollback",
    "resume",
    "merge",
)


@settings(max_examples=times(30))
@given(st.integers(0, 99), st.lists(st.sampled_from(OPERATIONS), max_size=14))
def test_any_history_serves_what_a_dict_holds(
    tmp_path_factory: pytest.TempPathFactory, seed: int, operations: list[str]
) -> None:
    directory = tmp_path_factory.mktemp("history")
    trainer, model = DeepRecTrainer(directory / "train", seed=seed), directory / "model"
    trainer.train(keys=40)
    trainer.save()
    publish_base(trainer, model)
    on_disk, states = trainer.now(), {read_log(model).at.position: trainer.now()}
    for what in operations:
        log = read_log(model)
        if what == "train":
            trainer.train(keys=int(trainer.rng.integers(0, 30)))
        elif what == "evict":
            for name in trainer.names:
                known = sorted(trainer.tables[name].keys() - trainer.touched.get(name, set()))
                trainer.evict(name, known[:: int(trainer.rng.integers(2, 9))])
        elif what in ("save", "increment"):
            trainer.step += 1
            before = trainer.saved[max(trainer.saved)][0]
            trainer.save() if what == "save" else trainer.increment()
            on_disk = trainer.now()
            if what == "increment":  # it does not tell what was deleted
                on_disk = {
                    name: before[name] | {k: table[k] for k in trainer.touched.get(name, ())}
                    for name, table in on_disk.items()
                }
        elif what == "restart":
            trainer.restart()
        elif what == "export":
            export_incremental(request(trainer, model))
            states[read_log(model).at.position] = on_disk
        elif what == "rollback":
            target = int(trainer.rng.choice([p for p in states if p < log.at.position] or [0]))
            if target:
                log_maintenance.rollback(model, target)
                states[read_log(model).at.position] = states[target]
        elif what == "resume" and log.hold.is_set:
            done = log_maintenance.resume(model)
            states[read_log(model).at.position] = states[done.values_of.position]
        elif what == "merge":
            log_maintenance.merge(model)
        newest = read_log(model)
        assert served(newest) == states[newest.at.position], what


def test_inspect_shows_how_full_tables_are(trainer: DeepRecTrainer, model: Path) -> None:
    trainer.upsert("emb/user", range(5_000, 5_100))
    trainer.step += 1
    trainer.increment()
    exported(trainer, model)
    found = export_model("inspect", model, "--json")
    assert found.code == 0, found.err
    user, item = found.document["tables"]
    geometry = TableGeometry.for_keys(306)
    assert user == {
        "name": "emb/user",
        "dtype": "float32",
        "dimension": 3,
        "keys": 406,
        "free_rows": 900,
        "load_factor": round(406 / geometry.slots, 3),
        "bytes": geometry.capacity * 12,
        "index_bytes": geometry.index_bytes,
    }
    assert (item["name"], item["keys"], item["free_rows"]) == ("item", 50, 1000)
    assert "emb/user: 406 keys, room for 900 more, float32[3]" in export_model("inspect", model).out


def test_the_doctor_sees_a_table_that_is_nearly_full(trainer: DeepRecTrainer, model: Path) -> None:
    assert not [finding for finding in findings(model) if finding["check"] == "tables"]
    trainer.upsert("item", range(1_000, 1_960))
    trainer.step += 1
    trainer.increment()
    exported(trainer, model)
    (found,) = (finding for finding in findings(model) if finding["check"] == "tables")
    assert found["message"] == "table 'item' holds 1010 keys and has room for 40 more"
    assert found["command"].endswith(f"--out {model} --new-base always --again")


def findings(model: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = export_model("doctor", model, "--json").document["findings"]
    return found


def test_rows_are_counted_as_people_count_them(trainer: DeepRecTrainer, model: Path) -> None:
    trainer.upsert("emb/user", range(1_000, 1_050))
    trainer.step += 1
    trainer.increment()
    assert exported(trainer, model).rows == 50, "and not the elements of the index"


def test_an_increment_that_vanished_costs_a_larger_delta_alone(trainer: DeepRecTrainer, model: Path) -> None:
    trainer.train()
    first = trainer.increment()
    exported(trainer, model)
    trainer.train()
    trainer.increment()
    damage_tensor(first, "emb/user/part_0-sparse_incr_values")
    assert exported(trainer, model).compared_bytes == 0
    assert served(read_log(model)) == trainer.now()


def test_two_exporters_at_once_place_each_key_once(trainer: DeepRecTrainer, model: Path) -> None:
    for _ in range(3):
        trainer.train(keys=200)
        trainer.increment()
        with ThreadPoolExecutor(3) as pool:
            done = [*pool.map(lambda _: exported(trainer, model), range(3))]
        assert sum(each.published is not None for each in done) == 1
        assert served(read_log(model)) == trainer.now()


def test_a_model_that_was_moved_goes_on(trainer: DeepRecTrainer, model: Path) -> None:
    trainer.train()
    trainer.increment()
    exported(trainer, model)
    moved = model.rename(model.with_name("moved"))
    trainer.train()
    trainer.increment()
    assert exported(trainer, moved).compared_bytes == 0
    assert served(read_log(moved)) == trainer.now()


@pytest.mark.parametrize("defaults", [0, 1, 2, 3, 5, 7, 200, 1 << 40])
def test_another_number_of_default_rows_in_the_manifest_is_damage_by_name(
    trainer: DeepRecTrainer, model: Path, defaults: int
) -> None:
    """Where default rows begin says where the cursor is: what is believed wrongly would overwrite rows."""
    trainer.upsert("emb/user", range(1_000, 1_040))
    trainer.step += 1
    trainer.save()
    (manifest,) = model.glob("[0-9]*/manifest.json")
    document = json.loads(manifest.read_text())
    table = document["incremental"]["recipe"]["dynamic"][0]
    true = table["defaults"]
    if defaults == true:
        defaults = 4
    table["defaults"] = defaults
    manifest.chmod(0o644)
    manifest.write_text(json.dumps(document))
    before = sorted(model.rglob("*-*"))
    ran = export_model("--ckpt-dir", trainer.directory, "--out", model, "--incr", "--json")
    assert (ran.code, ran.error["error"]) == (3, "CorruptFile"), ran.err
    assert ran.error["hint"].startswith("publish a new base")
    assert "emb/user" in ran.error["message"]
    assert sorted(model.rglob("*-*")) == before
