"""Bases that take deltas and map their tables: through the exporter's own ways, from one base to the next."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import exporter.bundle.mapped_tables as mapped_tables
from exporter.delta.chunk_digest import chunks, served_digests
from exporter.errors import OverlayFull, UsageError
from exporter.options import EngineName, Jobs, Updates, Verify
from exporter.pipeline.full import Exported, export, plan
from exporter.pipeline.incremental import ExportedDelta, as_base, export_incremental
from exporter.pipeline.overlay_room import OverlaidRows, OverlaidTable
from exporter.publish.delta_log import read_log
from exporter.publish.mapped_state import read_ahead
from exporter.publish.versions import read_manifest
from serving.agent.journal import Journal
from serving.agent.publications import FollowedModel, Publications
from tests.support.agents import Published
from tests.support.commands import export_model
from tests.support.deeprec_logs import DeepRecTrainer
from tests.support.made_again import assert_made_again
from tests.support.mapped_models import IDS, ROWS, MappedModel, mapped_below
from tests.support.object_stores import Bucket
from tests.support.served_tables import assert_serves, request
from tests.support.updatable import Loaded, loaded

UPDATES = Updates(stamp=True, digest=True)
ALL = np.arange(ROWS)


@pytest.fixture
def model(tmp_path: Path) -> MappedModel:
    return MappedModel(tmp_path)


def base(model: MappedModel, **options: Any) -> Exported:
    return export(model.request(updates=UPDATES, **options))


def delta(model: MappedModel, step: int, ids: np.ndarray, **options: Any) -> Any:
    """Change rows, save a checkpoint, publish what changed."""
    model.table[ids] += 1
    model.save(step, model.table)
    return export_incremental(model.request(updates=UPDATES), **options)


def assert_answers(server: Loaded, model: MappedModel, position: int) -> None:
    found = server.predict(ids=ALL)
    np.testing.assert_array_equal(found["rows"], model.table)
    assert set(found["model_position"].tolist()) == {position}


@pytest.mark.landing
def test_a_base_is_mapped_and_takes_deltas(model: MappedModel) -> None:
    version = base(model).published.path
    record = read_manifest(version).mapped
    assert record is not None
    assert [(table.name, table.overlay_rows) for table in record.tables] == [("emb", ROWS // 4)]
    with loaded(version) as server:
        assert len(mapped_below(model.out)) == 1
        assert_answers(server, model, 7)
        for step, ids in ((8, IDS), (9, np.arange(50, 90)), (10, np.arange(3, 60))):
            assert delta(model, step, ids).rows == len(set(ids.tolist()))
            assert server.update()["position"] == step
            assert_answers(server, model, step)
        log = read_log(model.out)
        every = list(chunks(log.schema))
        found = server.call("incremental_digest", rows=np.arange(len(every)))
        assert [int(each) for each in found["digest"]] == served_digests(log.schema, log.state(), every)
    with loaded(version) as late:
        assert late.update()["position"] == 10
        assert_answers(late, model, 10)
    assert export_model("verify", model.out, "--bytes").code == 0


def test_the_answers_are_those_of_a_base_in_memory(model: MappedModel, tmp_path: Path) -> None:
    mapped = base(model).published.path
    plain = base(model, map_tables=False, out=tmp_path / "plain").published.path
    delta(model, 8, np.arange(0, ROWS, 11))
    export_incremental(model.request(map_tables=False, updates=UPDATES, out=tmp_path / "plain"))
    with loaded(mapped) as one, loaded(plain) as other:
        assert one.update()["position"] == other.update()["position"] == 8
        found = [server.predict(ids=ALL) for server in (one, other)]
        for name in found[1]:
            np.testing.assert_array_equal(found[0][name], found[1][name])


def test_changes_without_room_are_no_delta(model: MappedModel) -> None:
    base(model, overlay_rows=100)
    delta(model, 8, np.arange(60))
    delta(model, 9, np.arange(30, 90))  # 30 of them have their places
    log = read_log(model.out)
    assert OverlaidRows.of(log).tables == (OverlaidTable("emb", 90, 100),)
    shutil.rmtree(log.path / ".state")  # the row numbers of the deltas tell the same
    assert OverlaidRows.of(read_log(model.out)).tables == (OverlaidTable("emb", 90, 100),)
    with pytest.raises(OverlayFull, match="room for 100") as caught:
        delta(model, 10, np.arange(20, 110))
    assert "--new-base if-needed" in caught.value.hint
    assert read_log(model.out).at.position == 9
    arguments = ["--ckpt-dir", model.train, "--out", model.out, "--model", model.model, "--incr"]
    assert export_model(*arguments).code == 5


@pytest.mark.landing
@pytest.mark.parametrize("how", [{"full_on_mismatch": True}, {"is_watching": True}], ids=str)
def test_a_new_base_begins_where_there_is_no_room(model: MappedModel, how: dict[str, bool]) -> None:
    """Also if the options are not given again; its overlay is empty."""
    base(model, overlay_rows=100)
    delta(model, 8, np.arange(60))
    model.table[:200] += 1
    model.save(9, model.table)
    done = export_incremental(model.request(map_tables=False, updates=None), **how)
    assert isinstance(done, Exported)
    assert done.plan.notes[0].startswith("a new base, not a delta: the overlay of table 'emb' is full")
    assert OverlaidRows.of(read_log(model.out)).tables[0].rows == 0
    with loaded(done.published.path) as server:
        assert len(mapped_below(done.published.path)) == 1
        assert_answers(server, model, 9)
        assert isinstance(delta(model, 10, IDS), ExportedDelta)
        assert server.update()["position"] == 10
        assert_answers(server, model, 10)


@pytest.mark.landing
def test_a_base_merged_with_its_deltas_maps_its_own_files(model: MappedModel) -> None:
    old = base(model).published.path
    delta(model, 8, np.arange(100))
    delta(model, 9, np.arange(50, 200))
    ran = export_model("merge", model.out, "--rebase")
    assert ran.code == 0, ran.err
    new = model.out / "9"
    assert_made_again(new)
    before, now = (read_manifest(path).mapped for path in (old, new))
    assert before is not None
    assert now is not None
    assert (now.directory, now.id == before.id) == (str(new), False)
    with loaded(old) as first, loaded(new) as second:
        assert {Path(path).parts[-3] for path in mapped_below(model.out)} == {"7", "9"}
        assert first.update()["position"] == 9
        for server in (first, second):
            assert_answers(server, model, 9)
        assert second.call("incremental_status", probe=[0])["mapped_tables"][0] == 1
        assert OverlaidRows.of(read_log(model.out)).tables[0].rows == 0
        delta(model, 10, IDS)
        for server in (first, second):
            assert server.update()["position"] == 10
            assert_answers(server, model, 10)
    assert export_model("verify", model.out, "--bytes").code == 0


@pytest.mark.landing
def test_a_rollback_takes_no_more_places(model: MappedModel) -> None:
    version = base(model, overlay_rows=50).published.path
    old = model.table.copy()
    with loaded(version) as server:
        delta(model, 8, np.arange(50))
        new = model.table.copy()
        assert server.update()["position"] == 8
        assert export_model("rollback", model.out, "--to", "7").code == 0
        model.table = old
        assert_answers(server, model, server.update(read_log(model.out).at.position)["position"])
        assert export_model("resume", model.out).code == 0
        model.table = new
        assert_answers(server, model, server.update()["position"])
        assert server.call("incremental_status", probe=[0])["overlay_percent"][0] == 100


def test_a_rollback_without_room_is_refused_before_anything_is_held(model: MappedModel) -> None:
    """Rows that changed before the newest base have no places beside it."""
    base(model, overlay_rows=100)
    delta(model, 8, np.arange(80))
    assert export_model("merge", model.out, "--rebase").code == 0
    delta(model, 9, np.arange(100, 180))
    for more in ([], ["--dry-run"]):
        ran = export_model("rollback", model.out, "--to", "7", *more)
        assert ran.code == 5
        assert "the overlay of table 'emb' is full: 160 rows have changed" in ran.err
        assert "publish a base of that checkpoint" in ran.err
    assert read_log(model.out).hold.read() is None
    assert read_log(model.out).at.position == 9
    assert export_model("rollback", model.out, "--to", "8").code == 0


@pytest.mark.landing
@pytest.mark.parametrize("jobs", [None, Jobs(engine=EngineName.LOCAL, workers=2, task_bytes=1 << 16)])
def test_ways_of_making_one(model: MappedModel, monkeypatch: pytest.MonkeyPatch, jobs: Jobs | None) -> None:
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", model.table.nbytes // 4)
    options: dict[str, Any] = {} if jobs is None else {"jobs": jobs}
    done = base(model, casts=("emb=bfloat16",), verify=Verify.OUTPUTS, tolerance=0.5, **options)
    with loaded(done.published.path) as server:
        assert len(mapped_below(model.out)) == 1
        delta(model, 8, IDS)
        assert server.update()["position"] == 8
        found = server.predict(ids=ALL)["rows"]
        np.testing.assert_allclose(found, model.table, atol=0.05)


@pytest.mark.landing
def test_dynamic_tables_keep_their_index_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", 1)
    trainer = DeepRecTrainer(tmp_path / "train")
    trainer.train(200)
    trainer.save()
    done = export(request(trainer, updates=UPDATES, map_tables=True))
    record = read_manifest(done.published.path).mapped
    assert record is not None
    assert {table.name for table in record.tables} >= {"emb/user/values", "item/values"}
    assert {"it is the index of a table by keys"} == {
        each.why for each in record.restored if each.name.startswith(("emb/user/", "item/"))
    }
    with loaded(done.published.path) as server:
        assert len(mapped_below(done.published.path)) == len(record.tables)
        assert_serves(server, trainer)
        trainer.train(50)
        trainer.increment()
        export_incremental(request(trainer, updates=UPDATES, map_tables=True))
        server.update()
        assert_serves(server, trainer)


def test_a_pulled_copy_is_mapped_and_updated(model: MappedModel, bucket: Bucket, tmp_path: Path) -> None:
    url, copy = bucket.url("ranker"), tmp_path / "models" / "ranker"
    places = ["--ckpt-dir", model.train, "--out", url, "--model", model.model]
    arguments = [*places, "--incr", "--add=stamp", "--add=digest", "--map-tables", "--served-at", copy]
    assert export_model(*arguments).code == 0
    assert export_model("pull", url, copy).code == 0
    with loaded(copy / "7") as server:
        assert len(mapped_below(copy)) == 1
        model.table[IDS] += 1
        model.save(8, model.table)
        ran = export_model(*arguments)
        assert ran.code == 0, ran.err
        assert export_model("pull", url, copy).code == 0
        assert server.update()["position"] == 8
        assert_answers(server, model, 8)
    # The next command on another machine need not read the deltas to know how full overlays are.
    caches = [name for name in bucket.names() if "/.state/overlaid-" in name]
    assert len(caches) == 2
    model.save(9, model.table + 1)
    assert export_model(*arguments).code == 5


def test_what_doctor_says_of_a_copy_makes_a_base_that_is_mapped_there(
    model: MappedModel, tmp_path: Path
) -> None:
    base(model)
    copy = Path(shutil.copytree(model.out, tmp_path / "copy"))
    command = shlex.split(mapped_findings(copy)[0]["command"])
    places = {"CKPT_DIR": str(model.train), "DIR": str(copy)}
    ran = export_model(*(places.get(word, word) for word in command[1:]), "--model", model.model)
    assert ran.code == 0, ran.err
    assert mapped_findings(copy) == []


def mapped_findings(directory: Path) -> list[dict[str, Any]]:
    found = export_model("doctor", directory, "--json").document["findings"]
    return [each for each in found if each["check"] == "mapped"]


def test_room_is_for_bases_that_take_deltas(model: MappedModel) -> None:
    with pytest.raises(UsageError, match="this version takes no deltas"):
        plan(model.request(overlay_rows=5))
    with pytest.raises(UsageError, match="--overlay-rows goes with --map-tables"):
        plan(model.request(map_tables=False, overlay_rows=5, updates=UPDATES))


@pytest.mark.landing
def test_a_new_version_is_read_ahead(model: MappedModel) -> None:
    """By the kernel: the pages of its tables are in memory, although nothing has read them."""
    base(model)
    publications = Publications(FollowedModel("m", model.out), Journal(), 0.05)
    model.save(9)
    done = base(model).published
    assert done.manifest.mapped is not None
    table = done.path / "variables" / done.manifest.mapped.tables[0].file
    evict(table)
    if resident(table) > 0.5:
        pytest.skip("this file system keeps its pages")
    publications.look()
    deadline = time.monotonic() + 30
    while resident(table) < 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    evict(table)
    assert read_ahead(done.path, done.manifest.mapped, lambda: False) == 0
    with_none = Publications(FollowedModel("m", model.out), Journal(), 0.05, reads_ahead=False)
    with_none.look()
    assert resident(table) < 0.5


def evict(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident(path: Path) -> float:
    """The share of a file's pages that are in memory."""
    library = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as found:
        pages = -(-len(found) // mmap.PAGESIZE)
        flags = (ctypes.c_ubyte * pages)()
        start = ctypes.addressof(ctypes.c_char.from_buffer(found))
        failed = library.mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(found)), flags)
        assert not failed
        share = sum(flag & 1 for flag in flags) / pages
        gc.collect()
        return share


def test_the_next_base_has_as_much_room_as_was_asked_for(model: MappedModel) -> None:
    for room, expected in ((100, 100), (None, ROWS // 4)):
        base(model, overlay_rows=room, again=True)
        assert as_base(model.request(map_tables=False)).overlay_rows == room
        done = export(as_base(model.request(map_tables=False, updates=None)))
        record = read_manifest(done.published.path).mapped
        assert record is not None
        assert [table.overlay_rows for table in record.tables] == [expected]


@pytest.mark.landing
def test_a_new_base_holds_the_increments_that_had_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also increments that the checkpoint alone does not have; each table has a file of its own again."""
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", 1)
    published = Published(tmp_path, options=("--map-tables", "--overlay-rows", "4"))
    trainer, first = published.trainer, read_log(published.model).number
    for _ in range(3):
        trainer.train()
        trainer.increment()
        done = export_model(*published.arguments(), "--new-base=if-needed")
        assert done.code == 0, done.err
        log = read_log(published.model)
        assert log.at.step == int(trainer.session.variables.values["global_step"])
        with loaded(log.base.path) as server:
            assert len(mapped_below(log.base.path)) == 2
            server.update()
            values = trainer.session.variables.values
            users, items = values["net/users"], values["net/items"]
            found = server.predict(user=np.arange(len(users)), item=np.arange(len(items)))
            np.testing.assert_array_equal(found["user_rows"], users)
            np.testing.assert_array_equal(found["item_rows"], items)
    assert log.number > first
