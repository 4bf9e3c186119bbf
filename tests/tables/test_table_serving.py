"""Models with dynamic tables served: bases, deltas, rollback, full tables; answers equal a dict's bits."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from exporter.catalog import Catalog, SliceRef, TensorRef
from exporter.checkpoint.tensor_bundle import check_values
from exporter.errors import TableFull, TruncatedFile, UsageError
from exporter.options import Jobs
from exporter.pipeline import log_maintenance
from exporter.pipeline.full import Exported
from exporter.pipeline.incremental import export_incremental
from exporter.pipeline.rebase import rebase
from exporter.publish.delta_log import read_log
from tests.support.commands import export_model
from tests.support.deeprec_logs import DeepRecTrainer, served, train_on
from tests.support.made_again import assert_made_again
from tests.support.publishing import delta_of
from tests.support.served_tables import DEFAULTS, assert_serves, request, trained
from tests.support.updatable import loaded


@pytest.fixture
def trainer(tmp_path: Path) -> DeepRecTrainer:
    return trained(tmp_path / "train")


@pytest.mark.landing
def test_a_server_follows_increments_and_full_checkpoints(trainer: DeepRecTrainer) -> None:
    done = export_incremental(request(trainer))
    assert isinstance(done, Exported)
    with loaded(done.published.path) as server:
        assert_serves(server, trainer)
        for what in ("increment", "increment", "save", "increment", "save"):
            train_on(trainer, what)
            delta = delta_of(request(trainer))
            assert server.update()["position"] == delta.at.position
            assert_serves(server, trainer)
            assert export_incremental(request(trainer)).published is None
    with loaded(done.published.path) as server:
        server.update()
        assert_serves(server, trainer)
    merged = log_maintenance.merge(request(trainer).out, jobs=Jobs(task_bytes=1))
    assert merged is not None
    assert merged.tasks > 20, "its tensors are slices"
    with loaded(done.published.path) as server:
        assert server.update()["deltas"] == 1
        assert_serves(server, trainer)
    assert served(read_log(request(trainer).out), defaults=DEFAULTS) == trainer.now()


def test_the_index_of_a_base_is_not_read_again_for_the_first_delta(
    trainer: DeepRecTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    based = export_incremental(request(trainer))
    assert isinstance(based, Exported)
    checked: list[str] = []

    def check(catalog: Catalog, ref: TensorRef, part: SliceRef | None = None, *, keep: bool) -> None:
        checked.append(ref.name)
        check_values(catalog, ref, part, keep=keep)

    monkeypatch.setattr("exporter.delta.row_reader.check_values", check)
    for _ in range(2):
        trainer.train()
        trainer.increment()
        delta_of(request(trainer))
        assert checked == []
        (based.published.path / "variables" / "variables.data-00001-of-00002").touch()
        trainer.train()
        trainer.increment()
        export_incremental(request(trainer))
        assert "item/index_rows" in checked, "the file is not known to be as it was"
        checked.clear()


@pytest.mark.landing
def test_a_server_goes_back_and_forth(trainer: DeepRecTrainer) -> None:
    done = export_incremental(request(trainer))
    assert isinstance(done, Exported)
    before = trainer.now(), trainer.kernel
    with loaded(done.published.path) as server:
        trainer.train()
        trainer.increment()
        export_incremental(request(trainer))
        server.update()
        after = trainer.now(), trainer.kernel
        log_maintenance.rollback(request(trainer).out, done.published.manifest.position)
        server.update()
        trainer.tables, trainer.kernel = before
        assert_serves(server, trainer, more=list(after[0]["item"]))
        log_maintenance.resume(request(trainer).out)
        server.update()
        trainer.tables, trainer.kernel = after
        assert_serves(server, trainer)


@pytest.mark.landing
@pytest.mark.parametrize("casts", [(), (".*/values=bfloat16",)])
def test_a_base_that_was_rebased_serves_the_same(trainer: DeepRecTrainer, casts: tuple[str, ...]) -> None:
    first = export_incremental(request(trainer, casts=casts))
    assert isinstance(first, Exported)
    trainer.train()
    trainer.increment()
    export_incremental(request(trainer, casts=casts))
    assert rebase(request(trainer).out, jobs=Jobs(task_bytes=1)) is not None
    keys = np.array(sorted(trainer.tables["emb/user"]), np.int64)
    newest = read_log(request(trainer).out).base.path
    assert_made_again(newest)
    with loaded(first.published.path) as old, loaded(newest) as new:
        old.update()
        assert new.update()["deltas"] == 0
        answers = [server.predict(user=keys, item=keys) for server in (old, new)]
        assert answers[0]["users"].tobytes() == answers[1]["users"].tobytes()
        if not casts:
            assert_serves(new, trainer)


@pytest.mark.landing
def test_a_full_table_is_an_error_by_hand_and_a_new_base_for_a_watch(trainer: DeepRecTrainer) -> None:
    done = export_incremental(request(trainer))
    assert isinstance(done, Exported)
    trainer.upsert("item", range(10_000, 13_000))
    trainer.step += 1
    trainer.increment()
    with pytest.raises(TableFull, match="'item' is full"):
        export_incremental(request(trainer))
    based = export_incremental(request(trainer), is_watching=True)
    assert isinstance(based, Exported)
    assert "a new base, not a delta: table 'item' is full" in based.plan.notes[0]
    delta = delta_of(request(trainer), is_watching=True)
    log = read_log(request(trainer).out)
    assert log.base.at.position == based.published.manifest.position > done.published.manifest.position
    assert served(log, defaults=DEFAULTS) == trainer.now()
    with loaded(based.published.path) as server:
        assert server.update()["position"] == delta.at.position
        assert_serves(server, trainer)


def test_a_watch_publishes_the_new_base_and_goes_on(trainer: DeepRecTrainer, tmp_path: Path) -> None:
    builder = tmp_path / "builder.py"
    builder.write_text("from tests.support.served_tables import model\n")
    options = ("--ckpt-dir", trainer.directory, "--model", f"{builder}:model", "--out", tmp_path / "model")
    first = export_model(*options, "--incr", "--table-head-room", "0.1")
    assert first.code == 0, first.err
    trainer.upsert("emb/user", range(10_000, 12_000))
    trainer.step += 1
    trainer.increment()
    refused = export_model(*options, "--incr", "--json")
    assert (refused.code, refused.error["error"]) == (5, "TableFull")
    watched = export_model(*options, "--incr", "--watch", "--interval", "0.05", "--until", "count=2")
    assert watched.code == 0, watched.err
    log = read_log(tmp_path / "model")
    assert (len(log.bases), len(log.deltas)) == (1, 1)
    assert served(log, defaults=DEFAULTS) == trainer.now()


def test_keys_are_filtered_in_bases_and_deltas(tmp_path: Path) -> None:
    trainer = DeepRecTrainer(tmp_path / "train", records_freqs=True)
    for name in trainer.names:
        trainer.upsert(name, [*range(200), *range(100)])
    trainer.save()

    def expected() -> dict[str, dict[int, bytes]]:
        counts = trainer.freqs
        return {n: {k: r for k, r in t.items() if counts[n][k] >= 2} for n, t in trainer.tables.items()}

    export_incremental(request(trainer, min_freq=2))
    for what in ("base", "increment", "save"):
        if what != "base":
            trainer.step += 1
            trainer.upsert("item", range(90, 150))
            trainer.save() if what == "save" else trainer.increment()
            export_incremental(request(trainer, min_freq=2))
        assert served(read_log(request(trainer).out), defaults=DEFAULTS) == expected()


def test_a_filter_that_nothing_was_recorded_for_is_refused(trainer: DeepRecTrainer) -> None:
    with pytest.raises(UsageError, match=r"--keys min-freq filters keys"):
        export_incremental(request(trainer, min_freq=2))
    with pytest.raises(UsageError, match="--keys max-age-steps filters keys"):
        export_incremental(request(trainer, max_age_steps=2))


def test_a_damaged_increment_does_not_keep_a_base_from_being_made(trainer: DeepRecTrainer) -> None:
    trainer.train()
    prefix = trainer.increment()
    prefix.with_name(f"{prefix.name}.index").write_bytes(b"no index")
    assert isinstance(export_incremental(request(trainer)), Exported)
    with pytest.raises(TruncatedFile):
        export_incremental(request(trainer))


def test_inspect_shows_the_tables_of_a_version(trainer: DeepRecTrainer) -> None:
    done = export_incremental(request(trainer))
    assert isinstance(done, Exported)
    found = export_model("inspect", done.published.path, "--json")
    assert found.code == 0, found.err
    tables = {table["name"]: table for table in found.document["tables"]}
    assert (tables["emb/user"]["keys"], tables["emb/user"]["free_rows"]) == (304, 1000)
    assert (tables["item"]["keys"], tables["item"]["free_rows"]) == (50, 1000)
    assert "item: 50 keys, room for 1000 more" in export_model("inspect", done.published.path).out


@pytest.mark.landing
@pytest.mark.parametrize("seed", range(2))
def test_any_history_is_served(tmp_path: Path, seed: int) -> None:
    """As the histories of `test_table_deltas`, by a server that follows, also over to new bases."""
    trainer = DeepRecTrainer(tmp_path / "train", seed=seed)
    trainer.train(keys=50)
    trainer.save()
    told = request(trainer)
    done = export_incremental(told)
    known = {read_log(told.out).at.position: (trainer.now(), trainer.kernel)}
    choices = ["train", "train", "save", "increment", "increment", "restart", "crowd", "rollback", "merge"]
    with ExitStack() as servers:
        server = servers.enter_context(loaded(done.published.path))
        for what in [*trainer.rng.choice(choices, 7).tolist(), "crowd", "increment", "train", "increment"]:
            if what in ("train", "crowd"):
                trainer.train(keys=3000 if what == "crowd" else 40)
                continue
            if what == "restart":
                trainer.restart()
                continue
            if what == "rollback":
                log = read_log(told.out)
                earlier = [at for at in known if log.base.entry.log <= at < log.at.position]
                if earlier:
                    to = int(trainer.rng.choice(earlier))
                    log_maintenance.rollback(told.out, to)
                    known[read_log(told.out).at.position] = known[to]
                    log_maintenance.resume(told.out, lift_only=True)
            elif what == "merge":
                log_maintenance.merge(told.out)
            else:
                trainer.step += 1
                if what == "save":
                    trainer.evict("item", list(trainer.tables["item"])[::3])
                    trainer.save()
                else:
                    trainer.increment()
                made = export_incremental(told, is_watching=True)
                if isinstance(made, Exported):  # a table was full
                    server = servers.enter_context(loaded(made.published.path))
                    export_incremental(told, is_watching=True)
                known[read_log(told.out).at.position] = trainer.now(), trainer.kernel
            at = read_log(told.out).at.position
            assert server.update()["position"] == at, what
            was = trainer.now(), trainer.kernel
            trainer.tables, trainer.kernel = known[at]
            assert_serves(server, trainer, more=[key for table in was[0].values() for key in table])
            trainer.tables, trainer.kernel = was
    assert len([child for child in told.out.iterdir() if child.name.isdecimal()]) > 1, "a table was full"
