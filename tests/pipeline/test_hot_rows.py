"""Hot rows behind mapped tables: what is served is what was trained, by rows, before and after deltas."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import exporter.bundle.hot_rows as hot_rows
import exporter.bundle.mapped_tables as mapped_tables
from exporter.checkpoint.tensor_bundle import BundleWriter, read_array, read_catalog
from exporter.delta.chunk_digest import chunks, served_digests
from exporter.errors import CorruptFile, NotServable, UsageError
from exporter.options import EngineName, Jobs, Updates, Verify
from exporter.pipeline.full import Exported, export, plan
from exporter.pipeline.incremental import export_incremental, plan_incremental
from exporter.publish.delta_log import read_log
from exporter.publish.mapped_state import read_ahead, why_restored
from exporter.publish.versions import read_manifest
from exporter.wire.dtypes import DType
from exporter.wire.int8_codes import to_codes
from tests.support.agents import Published
from tests.support.commands import export_model
from tests.support.deeprec_logs import DeepRecTrainer
from tests.support.made_again import assert_made_again
from tests.support.mapped_models import DIM, ROWS, MappedModel, in_session, mapped_below
from tests.support.object_stores import Bucket
from tests.support.served_tables import assert_serves, request
from tests.support.updatable import Loaded, loaded

UPDATES = Updates(stamp=True, digest=True)
ALL = np.arange(ROWS)
HOT = np.random.default_rng(3).permutation(ROWS)[:1500]
TOUCHED = np.unique([*HOT[:40], *range(60, 130)])


@pytest.fixture
def model(tmp_path: Path) -> MappedModel:
    np.save(tmp_path / "hot.npy", HOT)
    return MappedModel(tmp_path)


def hot(model: MappedModel, /, **options: Any) -> Any:
    return model.request(**{"hot_rows": {"emb": str(model.directory / "hot.npy")}, **options})


def delta(model: MappedModel, step: int, ids: np.ndarray) -> None:
    model.table[ids] += 1
    model.save(step, model.table)
    export_incremental(model.request(updates=UPDATES))


def assert_answers(server: Loaded, model: MappedModel, position: int) -> None:
    found = server.predict(ids=ALL)
    assert found["rows"].tobytes() == model.table.tobytes()
    assert set(found["model_position"].tolist()) == {position}


def assert_laid(version: Path, table: np.ndarray, ids: np.ndarray = HOT) -> None:
    """The file of the table is the table, and behind it the hot rows; lookups of these are led there."""
    record = read_manifest(version).mapped
    assert record is not None
    found = next(each for each in record.tables if each.name == "emb")
    assert found.hot_rows == len(ids)
    assert (version / "variables" / found.file).read_bytes() == table.tobytes() + table[ids].tobytes()
    places = np.fromfile(version / "variables" / found.places, np.int32)
    expected = np.arange(len(table), dtype=np.int32)
    expected[ids] = np.arange(len(table), len(table) + len(ids))
    np.testing.assert_array_equal(places, expected)
    catalog = read_catalog(version / "variables/variables")
    np.testing.assert_array_equal(read_array(catalog, catalog.tensors["emb"]), table)


def test_hot_rows_lie_behind_their_table(model: MappedModel) -> None:
    done = export(hot(model, verify=Verify.OUTPUTS))
    assert_laid(done.published.path, model.table)
    with in_session(done.published.path) as answer:
        assert answer(ids=ALL)["rows"].tobytes() == model.table.tobytes()
        assert len(mapped_below(model.out)) == 2
        with pytest.raises(Exception, match=f"indices.* = {ROWS} is not in"):
            answer(ids=np.array([ROWS]))
    assert export_model("verify", model.out, "--bytes").code == 0


def test_a_copy_and_a_version_without_its_places_are_restored(model: MappedModel, tmp_path: Path) -> None:
    version = export(hot(model)).published.path
    copy = tmp_path / "copy" / "7"
    shutil.copytree(version, copy)
    record = read_manifest(version).mapped
    assert record is not None
    assert why_restored(record) == ""
    (version / "variables" / record.tables[0].places).unlink()
    assert "is not there" in why_restored(record)
    (version / "variables/mapped.id").unlink()
    with in_session(copy) as answer:
        assert answer(ids=ALL)["rows"].tobytes() == model.table.tobytes()
        assert not mapped_below(tmp_path)


@pytest.mark.landing
def test_deltas_rollbacks_and_merges_keep_to_row_numbers(model: MappedModel) -> None:
    version = export(hot(model, updates=UPDATES)).published.path
    trained = model.table.copy()
    assert_laid(version, trained)
    with loaded(version) as server:
        assert len(mapped_below(model.out)) == 2
        assert server.call("incremental_status", probe=[0])["mapped_tables"][0] == 1
        assert_answers(server, model, 7)
        delta(model, 8, TOUCHED)
        assert server.update()["position"] == 8
        assert_answers(server, model, 8)
        delta(model, 9, np.union1d(TOUCHED[::2], HOT[100:140]))
        assert server.update()["position"] == 9
        assert_answers(server, model, 9)
        newest = model.table.copy()
        log = read_log(model.out)
        every = list(chunks(log.schema))
        found = server.call("incremental_digest", rows=np.arange(len(every)))
        assert [int(each) for each in found["digest"]] == served_digests(log.schema, log.state(), every)
        assert export_model("rollback", model.out, "--to", "7").code == 0
        model.table = trained.copy()
        assert_answers(server, model, server.update(read_log(model.out).at.position)["position"])
        assert export_model("resume", model.out).code == 0
        model.table = newest
        assert_answers(server, model, server.update()["position"])
        assert export_model("merge", model.out).code == 0
    with loaded(version) as late:
        at = late.update()["position"]
        assert_answers(late, model, at)
        ran = export_model("merge", model.out, "--rebase")
        assert ran.code == 0, ran.err
        rebased = read_log(model.out).base.path
        assert rebased != version
        assert_made_again(rebased)
        assert_laid(rebased, newest)  # the layout stays, with the newest values
        with loaded(rebased) as anew:
            assert len(mapped_below(rebased)) == 2
            delta(model, 20, np.union1d(HOT[:20], np.arange(5)))
            for server in (late, anew):
                assert_answers(server, model, server.update()["position"])
    assert export_model("verify", model.out, "--bytes").code == 0


def test_the_next_version_lays_what_it_is_told(model: MappedModel) -> None:
    export(hot(model))
    model.save(9)
    np.save(model.directory / "hot.npy", HOT[:7])
    done = export(hot(model))
    assert_laid(done.published.path, model.table, HOT[:7])


def test_options_that_wait_for_the_next_base_are_told(model: MappedModel) -> None:
    plain = model.request(updates=UPDATES, map_tables=False, overlay_rows=None)
    export(plain)
    model.save(9)
    told = plan_incremental(hot(model, updates=UPDATES)).notes
    assert [note.partition(" is for the next base")[0] for note in told] == ["--map-tables", "--hot-rows"]
    assert plan_incremental(plain).notes == ()
    export(model.request(updates=UPDATES, again=True))
    (note,) = plan_incremental(hot(model, updates=UPDATES)).notes
    assert note.startswith("--hot-rows is for the next base")
    export(hot(model, updates=UPDATES, again=True))
    assert plan_incremental(hot(model, updates=UPDATES)).notes == ()


@pytest.mark.landing
def test_a_rollback_of_plain_versions_maps_the_files_of_the_first(model: MappedModel) -> None:
    export(hot(model))
    old = model.table
    model.save(9)
    export(hot(model))
    assert export_model("rollback", model.out, "--to", "7").code == 0
    newest = max(int(path.name) for path in model.out.iterdir() if path.name.isdecimal())
    with in_session(model.out / str(newest)) as answer:
        assert answer(ids=ALL)["rows"].tobytes() == old.tobytes()


@pytest.mark.parametrize("parts", ["0", pytest.param("3", marks=pytest.mark.landing)])
def test_parts_and_8_bits(model: MappedModel, monkeypatch: pytest.MonkeyPatch, parts: str) -> None:
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", 1 << 10)
    done = export(hot(model, model_args={"parts": parts}, casts=("emb=int8",), updates=UPDATES))
    with loaded(done.published.path) as server:
        assert len(mapped_below(model.out)) == 2 * max(1, int(parts))
        for step in (7, 8):
            codes, scales, _ = to_codes(model.table)
            expected = codes * scales[:, np.newaxis]
            assert server.predict(ids=ALL)["rows"].tobytes() == expected.tobytes()
            if step == 7:
                model.table[TOUCHED] += 1
                model.save(8, model.table)
                asked = {"model_args": {"parts": parts}, "casts": ("emb=int8",)}
                export_incremental(model.request(updates=UPDATES, **asked))
                assert server.update()["position"] == 8


@pytest.mark.landing
def test_an_engines_shards_in_small_blocks(model: MappedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_rows, "BLOCK_ROWS", 97)
    monkeypatch.setattr(hot_rows, "_BLOCK_BYTES", 640)
    jobs = Jobs(engine=EngineName.LOCAL, workers=2, task_bytes=1 << 16)
    done = export(hot(model, jobs=jobs))
    assert_laid(done.published.path, model.table)


def test_a_trainers_shard_that_is_linked_stays_as_it_is(model: MappedModel) -> None:
    """A shard that is the table alone is a link, behind which nothing may be written."""

    with BundleWriter(model.train / "alone-7") as writer:
        writer.add("emb", model.table)
    (shard,) = model.train.glob("alone-7.data-*")

    def lookup() -> Any:
        import tensorflow as tf

        ids = tf.compat.v1.placeholder(tf.int64, [None], "ids")
        emb = tf.compat.v1.get_variable("emb", [ROWS, DIM], use_resource=True)
        return {"ids": ids}, {"rows": tf.gather(emb, ids)}

    done = export(hot(model, ckpt_dir=model.train / "alone-7", model=lookup))
    assert_laid(done.published.path, model.table)
    assert shard.read_bytes() == model.table.tobytes()
    assert shard.stat().st_nlink == 1


@pytest.mark.parametrize("choice", ["keys", "auto"])
@pytest.mark.parametrize("updates", [None, pytest.param(UPDATES, marks=pytest.mark.landing)])
def test_tables_by_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, updates: Updates | None
) -> None:
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", 1)
    trainer = DeepRecTrainer(tmp_path / "train", records_freqs=True)
    trainer.train(200)
    trainer.save()
    keys = [*trainer.tables["emb/user"]][::3]
    np.save(tmp_path / "hot.npy", np.array([*keys, 10**15, keys[0]]))
    how = str(tmp_path / "hot.npy") if choice == "keys" else "auto"
    asked = {"updates": updates, "map_tables": True, "hot_rows": {"emb/user": how}}
    done = export(request(trainer, **asked))
    record = read_manifest(done.published.path).mapped
    assert record is not None
    (table,) = [each for each in record.tables if each.hot_rows]
    assert table.name == "emb/user/values"
    wanted = len(keys) if choice == "keys" else -(-len(trainer.tables["emb/user"]) // 10)
    assert table.hot_rows == wanted
    catalog = read_catalog(done.published.path / "variables/variables")
    rows, stored = catalog.tensors["emb/user/values"], catalog.tensors["hot_rows/emb/user/values"]
    behind = read_array(catalog, stored)[rows.shape[0] :]
    if choice == "auto":
        freqs = trainer.freqs["emb/user"]
        keys = sorted(freqs, key=lambda key: -freqs[key])[:wanted]
        least = freqs[keys[-1]]
        sure = [key for key in keys if freqs[key] > least]
        expected = {trainer.tables["emb/user"][key] for key in sure}
        assert expected <= {row.tobytes() for row in behind}
    else:
        assert [row.tobytes() for row in behind] == [trainer.tables["emb/user"][key] for key in keys]
    with loaded(done.published.path) as server:
        assert_serves(server, trainer)
        if updates is not None:
            trainer.train(50)
            trainer.increment()
            export_incremental(request(trainer, **asked))
            server.update()
            assert_serves(server, trainer)


def _object(path: Path) -> None:
    np.save(path, np.array([{}, 1], object), allow_pickle=True)


def _short(path: Path) -> None:
    np.save(path, HOT)
    os.truncate(path, path.stat().st_size - 4)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda path: np.save(path, [0, 1, 0]), "names row 0 twice"),
        (lambda path: np.save(path, np.array([3, ROWS])), f"there is no row {ROWS}"),
        (lambda path: np.save(path, np.array([-1])), "there is no row -1"),
        (lambda path: np.save(path, np.ones((2, 2), np.int64)), "expected whole numbers"),
        (lambda path: np.save(path, np.ones(2)), "float64"),
        (lambda path: np.save(path, np.array(["a"])), "holds texts"),
        (_object, "is a pickle"),
        (_short, "its header declares"),
        (lambda path: path.write_bytes(b"\x93NUMPY\x01\x00" + b"\xff" * 99), "header"),
        (lambda path: path.write_bytes(b"1 2 3\n"), "cannot be read"),
        (lambda path: path.unlink(), "cannot be read"),
        (_pipe, "cannot be read"),
    ],
)
def test_a_file_that_is_not_as_expected(
    model: MappedModel, write: Callable[[Path], object], says: str
) -> None:
    write(model.directory / "hot.npy")
    for do in (plan, export):  # a dry run plans
        with pytest.raises(UsageError) as caught:
            do(hot(model))
        assert says in f"{caught.value.message} {caught.value.cause}"
    assert not list(model.out.glob("[0-9]*"))


@pytest.mark.parametrize(
    ("table", "value", "says"),
    [
        ("emb2", "hot.npy", "no table is called so"),
        ("emb", "s3://bucket/hot.npy", "expected a local file"),
        ("whole", "hot.npy", "not mapped: read whole by"),
        ("kernel", "hot.npy", "not mapped: it is small"),
        ("emb", "auto", "counts of tables by keys alone"),
    ],
)
def test_a_table_that_has_no_hot_rows(model: MappedModel, table: str, value: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        export(model.request(hot_rows={table: value}))


def test_of_a_name_that_is_taken_nothing_is_renamed(tmp_path: Path) -> None:
    prefix = tmp_path / "variables"
    with BundleWriter(prefix) as writer:
        writer.add("t", np.eye(4, dtype=np.float32))
    catalog = read_catalog(prefix)
    (extent,), shape = catalog.tensors["t"].extents, (4, 4)
    table = hot_rows.HotRows(
        "t", DType.FLOAT, shape, extent, 0, lambda: iter([np.array([2, 1])]), "--hot-rows"
    )
    taken = replace(catalog, tensors={**catalog.tensors, "hot_places/t": catalog.tensors["t"]})
    with pytest.raises(NotServable, match="hot_places/t"):
        hot_rows.lay_hot_rows(prefix, taken, [table])
    assert read_catalog(prefix) == catalog
    laid, found = hot_rows.lay_hot_rows(prefix, catalog, [replace(table, name="other")])
    assert (laid.tensors.keys(), found["other"].rows) == ({"t", "hot_places/other", "hot_rows/other"}, 2)


@pytest.mark.parametrize("hot", [0, 2])
def test_places_lead_to_hot_rows(tmp_path: Path, hot: int) -> None:
    places = np.arange(4)
    places[[3, 1][:hot]] = [4, 5][:hot]
    blocks = hot_rows.hot_in(places, hot, tmp_path / "scratch")
    assert [row for block in blocks() for row in block] == [3, 1][:hot]
    for wrong in (1, 3, 5):
        with pytest.raises(CorruptFile):
            hot_rows.hot_in(places, wrong, tmp_path / f"scratch-{wrong}")
    assert not (tmp_path / "scratch-5").exists(), "a manifest's number would fill the disk"


def test_keys_that_nobody_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", 1)
    trainer = DeepRecTrainer(tmp_path / "train")
    trainer.train(200)
    trainer.save()
    with pytest.raises(UsageError, match="how often keys were seen"):
        export(request(trainer, updates=None, map_tables=True, hot_rows={"item": "auto"}))


@pytest.mark.landing
def test_a_model_in_a_store_is_pushed(model: MappedModel, bucket: Bucket, tmp_path: Path) -> None:
    copy = tmp_path / "models" / "ranker"
    places = ["--ckpt-dir", model.train, "--out", bucket.url("ranker"), "--model", model.model]
    chosen = ["--map-tables", "--served-at", copy, "--hot-rows", f"emb={model.directory / 'hot.npy'}"]
    ran = export_model(*places, *chosen)
    assert ran.code == 2
    assert "laid out in files" in ran.err
    export(hot(model, served_at=str(copy)))
    for step in (("push", str(model.out), bucket.url("ranker")), ("pull", bucket.url("ranker"), str(copy))):
        ran = export_model(*step)
        assert ran.code == 0, ran.err
    with in_session(copy / "7") as answer:
        assert answer(ids=ALL)["rows"].tobytes() == model.table.tobytes()
        assert len(mapped_below(copy)) == 2


@pytest.mark.landing
def test_a_base_in_a_store_is_refused_before_anything_is_read(model: MappedModel, bucket: Bucket) -> None:
    """Its directory can be merged, and pushed again."""
    export(hot(model, updates=UPDATES, served_at=str(model.out)))
    delta(model, 8, TOUCHED)
    url = bucket.url("ranker")
    assert export_model("push", model.out, url).code == 0
    before = sorted(bucket.names())
    for more in ((), ("--dry-run",)):
        ran = export_model("merge", url, "--rebase", *more)
        assert ran.code == 2, ran.out
        assert "laid out in files, and the model is in an object store" in ran.err
    assert sorted(bucket.names()) == before, "no position was taken for the merger"
    assert export_model("merge", model.out, "--rebase").code == 0
    assert export_model("push", model.out, url).code == 0


def exported_again(done: Exported, out: Path) -> Path:
    from exporter.options import ExportRequest

    return export(ExportRequest(done.published.path, out)).published.path


@pytest.mark.landing
def test_a_version_with_hot_rows_can_be_exported_again(model: MappedModel, tmp_path: Path) -> None:
    again = exported_again(export(hot(model)), tmp_path / "again")
    with in_session(again) as answer:
        assert answer(ids=ALL)["rows"].tobytes() == model.table.tobytes()


def test_the_guides_commands(model: MappedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = np.random.default_rng(5).integers(0, 1 << 30, ROWS)
    np.save(model.directory / "counts.npy", counts)
    page = Path(__file__).parent.parent.parent / "docs/terabytes.md"
    commands = [
        line[2:] for line in page.read_text().splitlines() if line.startswith("$ ") and "hot.npy" in line
    ]
    made, exported = map(shlex.split, commands)
    monkeypatch.chdir(model.directory)
    subprocess.run([sys.executable, *made[1:]], check=True)
    names = {"my_model.py:serving": "model.py:build", "models/ranker": "served"}
    ran = export_model(*(names.get(word, word) for word in exported[1:]))
    assert ran.code == 0, ran.err
    assert_laid(model.out / "7", model.table, np.argsort(-counts)[: ROWS // 10])


def test_differences_are_those_of_rows(model: MappedModel) -> None:
    """Whichever of them are hot, on one side or on both."""
    plain = export(model.request()).published.path
    model.table[3] += 1
    model.save(9, model.table)
    laid = export(hot(model)).published.path
    np.save(model.directory / "hot.npy", HOT[:9])
    other = export(hot(model, again=True)).published.path
    ran = export_model("diff", plain, laid)
    assert (ran.code, "only in" in ran.out) == (0, False)
    assert "differ        1 of 3 variables" in ran.out
    assert "differ        0 of 3 variables" in export_model("diff", laid, other).out


def test_the_plan_says_whose_rows_they_are(model: MappedModel) -> None:
    places = ["--ckpt-dir", str(model.train), "--out", str(model.out), "--model", model.model]
    chosen = ["--map-tables", "--hot-rows", f"emb={model.directory / 'hot.npy'}"]
    ran = export_model(*places, *chosen, "--dry-run")
    assert ran.code == 0, ran.err
    said = f"emb: its most read rows lie side by side, {len(HOT)} rows of {model.directory / 'hot.npy'}\n"
    assert said in ran.out
    assert export_model(*places, *chosen[1:]).code == 2


@pytest.mark.landing
def test_increments_in_a_new_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are merged into the staged tables, behind which the rows are laid once more."""
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", 1)
    np.save(tmp_path / "hot.npy", [3, 0, 7])
    more = ("--map-tables", "--overlay-rows", "4", "--hot-rows", f"s/users={tmp_path / 'hot.npy'}")
    published = Published(tmp_path, options=more)
    trainer = published.trainer
    for _ in range(2):
        trainer.train()
        trainer.increment()
        done = export_model(*published.arguments(), "--new-base=if-needed")
        assert done.code == 0, done.err
    assert trainer.session is not None
    base, values = read_log(published.model).base.path, trainer.session.variables.values
    catalog = read_catalog(base / "variables/variables")
    users = read_array(catalog, catalog.tensors["s/users"])
    behind = read_array(catalog, catalog.tensors["hot_rows/s/users"])
    np.testing.assert_array_equal(behind, [*users, *users[[3, 0, 7]]])
    with loaded(base) as server:
        server.update()
        found = server.predict(user=np.arange(len(users)), item=np.arange(4))
        np.testing.assert_array_equal(found["user_rows"], values["net/users"])


@pytest.mark.landing
def test_hot_rows_are_read_ahead_first(model: MappedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    done = export(hot(model)).published
    record, asked = done.manifest.mapped, list[int]()
    assert record is not None
    monkeypatch.setattr(os, "posix_fadvise", lambda _, at, *more: asked.append(at))
    files = record.tables[0].file, record.tables[0].places
    size = sum((done.path / "variables" / file).stat().st_size for file in files)
    assert read_ahead(done.path, record, lambda: True) == size
    table = asked[1:]
    assert table == sorted(table, reverse=True)
    assert table[0] > model.table.nbytes - (128 << 10)
