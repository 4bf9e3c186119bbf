"""Versions with mapped tables, from the options to what servers do with what is published."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import exporter.bundle.mapped_tables as mapped_tables
from exporter.errors import ManifestError, UsageError
from exporter.options import DataMode, EngineName, ExportFormat, Jobs, Verify
from exporter.pipeline.full import Exported, export, plan
from exporter.publish.manifest import Manifest, from_json
from exporter.publish.mapped_state import network_file_system, why_restored
from exporter.publish.versions import read_manifest
from exporter.wire.int8_codes import to_codes
from tests.support.commands import export_model
from tests.support.deeprec_logs import DIM as SMALL_DIM
from tests.support.deeprec_logs import DeepRecTrainer
from tests.support.mapped_models import DIM, IDS, ROWS, MappedModel, in_session, mapped_below
from tests.support.object_stores import Bucket
from tests.support.served_tables import assert_serves, request
from tests.support.updatable import loaded


@pytest.fixture
def model(tmp_path: Path) -> MappedModel:
    return MappedModel(tmp_path)


def assert_served(version: Path, table: Any, maps: int, under: Path, tolerance: float = 0.0) -> None:
    """It answers with the table's rows, and so many files are its memory."""
    with in_session(version) as answer:
        found = answer(ids=IDS)
        np.testing.assert_allclose(found["rows"], table[IDS], rtol=0, atol=tolerance)
        assert len(mapped_below(under)) == maps


def manifest(done: Exported) -> Manifest:
    return read_manifest(done.published.path)


def test_a_published_version_is_mapped_where_it_lies(model: MappedModel) -> None:
    done = export(model.request())
    assert_served(done.published.path, model.table, 1, model.out)
    record = manifest(done).mapped
    assert record is not None
    assert record.directory == str(model.out / "7")
    ((name, size),) = [(table.name, table.bytes_) for table in record.tables]
    assert (name, size) == ("emb", model.table.nbytes)
    (left,) = record.restored
    assert (left.name, left.bytes_, left.why) == ("whole", model.table.nbytes, "read whole by tower/total")
    table = model.out / "7/variables" / record.tables[0].file
    assert table.read_bytes() == model.table.tobytes()
    assert (model.out / "7/variables/mapped.id").read_text() == record.id
    assert done.variables.bytes_linked == 0  # a linked shard would hold the table a second time


def test_the_plan_says_what_is_mapped(model: MappedModel) -> None:
    planned = export_model(*arguments(model), "--dry-run")
    assert planned.code == 0, planned.err
    assert f"mapped      1 variable, 1.2 MiB, where servers see {model.out}\n" in planned.out
    assert "whole (1.2 MiB) is restored: read whole by tower/total\n" in planned.out
    document = export_model(*arguments(model), "--dry-run", "--json").document
    found = {each["name"]: (each["mapped"], each["not_mapped"]) for each in document["variables"]}
    assert found["emb"] == (True, None)
    assert found["whole"] == (False, "read whole by tower/total")
    assert found["kernel"] == (False, None)
    assert (document["bytes_mapped"], document["served_at"]) == (model.table.nbytes, str(model.out))
    assert not model.out.exists()


def arguments(model: MappedModel, *more: str) -> list[str]:
    places = ["--ckpt-dir", str(model.train), "--out", str(model.out), "--model", model.model]
    return [*places, "--map-tables", *more]


def test_a_model_that_nothing_can_be_mapped_of(model: MappedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", 1 << 30)
    done = export(model.request())
    assert_served(done.published.path, model.table, 0, model.out)
    assert not (done.published.path / "variables/mapped.id").exists()
    record = manifest(done).mapped
    assert record is not None
    assert not record.tables


def test_without_the_option_nothing_is_written_about_it(model: MappedModel) -> None:
    done = export(model.request(map_tables=False))
    assert manifest(done).mapped is None
    assert "mapped" not in (done.published.path / "manifest.json").read_text()
    assert not (done.published.path / "variables/mapped.id").exists()


def test_servers_see_the_model_elsewhere(model: MappedModel, tmp_path: Path) -> None:
    """As in a container: here it is restored, there it is mapped."""
    there = tmp_path / "models" / "ranker"
    done = export(model.request(served_at=str(there)))
    assert_served(done.published.path, model.table, 0, tmp_path)
    shutil.copytree(model.out, there)
    assert_served(there / "7", model.table, 1, there)


def test_versions_map_their_own_tables(model: MappedModel) -> None:
    first, old = export(model.request()), model.table
    model.save(9)
    second = export(model.request())
    assert second.published.version == 9
    assert_served(first.published.path, old, 1, model.out)
    assert_served(second.published.path, model.table, 1, model.out)
    again = export(model.request(again=True))  # the same checkpoint, at the next position
    assert_served(again.published.path, model.table, 1, model.out)
    assert read_manifest(again.published.path).mapped != read_manifest(second.published.path).mapped


def test_a_version_may_be_named(model: MappedModel) -> None:
    done = export(model.request(version="41"))
    assert_served(model.out / "41", model.table, 1, model.out)
    assert done.published.version == 41


def test_retention_unlinks_what_is_still_mapped(model: MappedModel) -> None:
    first, old = export(model.request()), model.table
    with in_session(first.published.path) as answer:
        for step in (9, 11):
            model.save(step)
            export(model.request(keep=1))
        shutil.rmtree(first.published.path, ignore_errors=True)  # retention waits a grace period
        np.testing.assert_array_equal(answer(ids=np.arange(ROWS))["rows"], old)


def test_a_rollback_maps_the_files_of_the_version_it_goes_back_to(model: MappedModel) -> None:
    export(model.request())
    old = model.table
    model.save(9)
    export(model.request())
    ran = export_model("rollback", model.out, "--to", "7")
    assert ran.code == 0, ran.err
    assert_served(model.out / "10", old, 1, model.out / "7")
    shutil.rmtree(model.out / "7")
    assert_served(model.out / "10", old, 0, model.out)
    assert export_model("verify", model.out).code == 0


@pytest.mark.parametrize("parts", ["0", "1"])
@pytest.mark.parametrize("data", [DataMode.AUTO, DataMode.COPY, DataMode.COMPACT])
def test_ways_of_storing(model: MappedModel, data: DataMode, parts: str) -> None:
    done = export(model.request(data=data, verify=Verify.OUTPUTS, model_args={"parts": parts}))
    assert_served(done.published.path, model.table, 1, model.out)
    assert export_model("verify", model.out).code == 0


def test_cast(model: MappedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", ROWS * DIM)
    done = export(model.request(casts=("emb=bfloat16",), verify=Verify.OUTPUTS, tolerance=0.5))
    assert_served(done.published.path, model.table, 1, model.out, tolerance=0.05)
    record = manifest(done).mapped
    assert record is not None
    assert record.tables[0].bytes_ == model.table.nbytes // 2


def test_8_bits(model: MappedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", ROWS * DIM)
    done = export(model.request(casts=("int8",), verify=Verify.OUTPUTS, tolerance=0.1))
    codes, scales, _ = to_codes(model.table)
    assert_served(done.published.path, codes * scales[:, np.newaxis], 1, model.out)
    (table,) = manifest(done).mapped.tables
    assert table.bytes_ == ROWS * (DIM + 4)
    assert table.bytes_ / model.table.nbytes == (DIM + 4) / (4 * DIM)
    assert done.variables.rounded["emb"].largest <= np.abs(model.table).max() / 127
    (note,) = (note for note in done.plan.notes if note.startswith("--cast int8 leaves as they are: "))
    assert "kernel (read whole by " in note
    assert "whole (read whole by tower/total)" in note
    assert export_model("verify", model.out).code == 0


def test_8_bits_are_reported(model: MappedModel) -> None:
    places = ["--ckpt-dir", model.train, "--out", model.out, "--model", model.model]
    ran = export_model(*places, "--cast", "emb=int8", "--verify", "bytes", "--json")
    assert ran.code == 0, ran.err
    rounded = ran.document["rounded"]["emb"]
    assert 0 < rounded["mean"] < rounded["largest"] < 0.05
    ran = export_model(*places, "--cast", "emb=int8", "--again")
    assert f"rounded     emb to 8 bits: largest error {rounded['largest']:.3g}, mean " in ran.out
    ran = export_model(*places, "--cast", "emb=int8", "--again", "--verify", "outputs")
    assert ran.code != 0
    assert "--cast needs a larger --tolerance" in ran.err


def test_average(model: MappedModel) -> None:
    from exporter.checkpoint.tensor_bundle import BundleWriter

    with BundleWriter(model.train / "model.ckpt-8") as writer:
        for name, value in (("emb", model.table), ("whole", model.table * 0), ("kernel", np.ones((DIM, 2)))):
            writer.add(name, np.zeros_like(value, np.float32))
            writer.add(f"{name}/ExponentialMovingAverage", value.astype(np.float32))
    done = export(model.request(ckpt_dir=model.train / "model.ckpt-8", average="ema", verify=Verify.OUTPUTS))
    assert_served(done.published.path, model.table, 1, model.out)


def test_an_archive_is_mapped(model: MappedModel, tmp_path: Path) -> None:
    values = {"emb": model.table, "whole": model.table * 0, "kernel": np.ones((DIM, 2), np.float32)}
    np.savez(tmp_path / "weights.npz", **values)
    done = export(model.request(ckpt_dir=tmp_path / "weights.npz"))
    assert_served(done.published.path, model.table, 1, model.out)


def test_a_mapped_version_can_be_exported_again(model: MappedModel, tmp_path: Path) -> None:
    """Its graph, and its variables, are those of an ordinary SavedModel."""
    done = export(model.request())
    again = model.request(
        ckpt_dir=done.published.path, model=None, out=tmp_path / "again", verify=Verify.OUTPUTS
    )
    assert_served(export(again).published.path, model.table, 1, tmp_path / "again")


def test_an_old_manifest_says_nothing(model: MappedModel) -> None:
    done = export(model.request())
    text = (done.published.path / "manifest.json").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(' "mapped"')]
    assert from_json("\n".join(lines)).mapped is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"format": ExportFormat.METAGRAPH}, "--map-tables --format metagraph"),
        ({"format": ExportFormat.BOTH}, "--map-tables --format both"),
        ({"data": DataMode.LINK}, "--data link copies nothing"),
        ({"version": "time"}, "--map-tables --version time"),
        ({"served_at": "models/ranker"}, "--served-at 'models/ranker': expected an absolute path"),
        ({"served_at": "gs://bucket/ranker"}, "expected an absolute path"),
        ({"served_at": "/a\0b"}, "expected an absolute path"),
    ],
)
def test_what_does_not_go_together(model: MappedModel, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(model.request(**options))
    assert says in caught.value.message


def test_a_place_without_mapped_tables_is_refused(model: MappedModel) -> None:
    arguments = ["--ckpt-dir", model.train, "--out", model.out, "--model", model.model]
    ran = export_model(*arguments, "--served-at", "/models/ranker")
    assert ran.code == 2
    assert "--served-at goes with --map-tables" in ran.err


def test_a_store_keeps_it_and_a_pulled_copy_is_mapped(
    model: MappedModel, bucket: Bucket, tmp_path: Path
) -> None:
    url, copy = bucket.url("ranker"), tmp_path / "models" / "ranker"
    arguments = ["--ckpt-dir", model.train, "--out", url, "--model", model.model, "--map-tables"]
    ran = export_model(*arguments)
    assert ran.code == 2
    assert "servers do not map files of" in ran.err
    ran = export_model(*arguments, "--served-at", copy)
    assert ran.code == 0, ran.err
    assert export_model("pull", url, copy).code == 0
    assert_served(copy / "7", model.table, 1, copy)


@pytest.mark.landing
@pytest.mark.parametrize("cast", ["bfloat16", "int8"])
@pytest.mark.parametrize("engine", [EngineName.LOCAL, EngineName.DASK])
def test_an_engine_writes_the_same_files(
    model: MappedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: EngineName, cast: str
) -> None:
    """A table whose bytes change is one task, however small tasks are; it counts what rounding cost."""
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", model.table.nbytes // 4)
    here = export(model.request(casts=(cast,)))
    jobs = Jobs(engine=engine, workers=2, task_bytes=1 << 16)
    there = export(model.request(casts=(cast,), jobs=jobs, out=tmp_path / "there"))
    assert here.variables.rounded == there.variables.rounded
    assert bool(here.variables.rounded) is (cast == "int8")
    tables = [done.published.path / "variables" / mapped_file(done) for done in (here, there)]
    assert tables[0].read_bytes() == tables[1].read_bytes()
    assert_served(there.published.path, model.table, 1, tmp_path / "there", tolerance=0.05)


def mapped_file(done: Exported) -> str:
    record = manifest(done).mapped
    assert record is not None
    (table,) = record.tables
    return table.file


def test_dynamic_tables_are_mapped_with_their_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", 1)
    trainer = DeepRecTrainer(tmp_path / "train")
    trainer.train(200)
    trainer.save()
    done = export(request(trainer, updates=None, map_tables=True))
    record = manifest(done).mapped
    assert record is not None
    assert {table.name for table in record.tables} > {"emb/user/values", "item/values"}
    with loaded(done.published.path) as server:
        assert len(mapped_below(done.published.path)) == len(record.tables)
        assert_serves(server, trainer)


def test_doctor_names_a_model_that_is_restored(model: MappedModel, tmp_path: Path) -> None:
    export(model.request())
    assert doctor(model.out) == []
    moved = Path(shutil.move(model.out, tmp_path / "moved"))
    ((message, cause),) = doctor(moved)
    assert message == "a server on this machine restores the tables of version 7"
    assert cause == f"{model.out}/7/variables/mapped.id: No such file or directory"


def test_a_copy_says_that_it_maps_the_original(model: MappedModel, tmp_path: Path) -> None:
    """It does while that is there; the version that a rollback publishes again maps its own model's files."""
    export(model.request())
    copy = Path(shutil.copytree(model.out, tmp_path / "copy"))
    assert mapped_by_inspect(model.out) == ["mapped"]
    assert mapped_by_inspect(copy) == [f"mapped from {model.out / '7'}"]
    assert f"tables      mapped from {model.out / '7'}\n" in export_model("inspect", copy / "7").out
    ((message, _),) = doctor(copy)
    assert f"maps the tables of {model.out / '7'}" in message
    with in_session(copy / "7"):
        assert {Path(path).parts[-3] for path in mapped_below(model.out)} == {"7"}
    model.save(8)
    export(model.request())
    assert export_model("rollback", model.out, "--to", "7").code == 0
    assert doctor(model.out) == []
    assert mapped_by_inspect(model.out) == [f"mapped from {model.out / '7'}", "mapped", "mapped"]
    shutil.rmtree(model.out)
    (state,) = mapped_by_inspect(copy)
    assert state.startswith("restored: ")


def mapped_by_inspect(model: Path) -> list[str]:
    return [version["mapped"] for version in export_model("inspect", model, "--json").document["versions"]]


def doctor(model: Path) -> list[tuple[str, str]]:
    found = export_model("doctor", model, "--json").document["findings"]
    return [(each["message"], each["cause"]) for each in found if each["check"] == "mapped"]


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (
            lambda version: (version / "variables/mapped.id").write_text("0" * 32),
            "is that of another version",
        ),
        (lambda version: (version / "variables/mapped.id").write_text("0" * 99), "it has more than 64 bytes"),
        (lambda version: None, ""),
        (lambda version: os.truncate(version / "variables/variables.data-00000-of-00002", 9), "is shorter"),
        (lambda version: (version / "variables/variables.data-00000-of-00002").unlink(), "No such file"),
    ],
)
def test_why_a_version_is_restored(model: MappedModel, harm: Callable[[Path], None], why: str) -> None:
    done = export(model.request())
    assert done.variables.catalog.shards[0].name == mapped_file(done) == "variables.data-00000-of-00002"
    record = manifest(done).mapped
    assert record is not None
    harm(done.published.path)
    assert why in why_restored(record)
    assert bool(why) is bool(why_restored(record))


def test_a_manifest_that_leads_out_is_refused(model: MappedModel) -> None:
    record = manifest(export(model.request())).mapped
    assert record is not None
    with pytest.raises(ManifestError, match="not the name of a file below"):
        why_restored(replace(record, tables=(replace(record.tables[0], file="../../etc/passwd"),)))


def test_a_network_file_system_is_known_by_its_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path}/a\\040b nfs4 rw 0 0\n")
    assert network_file_system(tmp_path / "a b" / "c", mounts) == "nfs4"
    assert network_file_system(tmp_path / "d", mounts) == ""
    assert network_file_system(tmp_path, tmp_path / "none") == ""


def test_dynamic_tables_in_8_bits(tmp_path: Path) -> None:
    trainer = DeepRecTrainer(tmp_path / "train")
    trainer.train(200)
    rng = np.random.default_rng(0)
    items = {key: rng.normal(size=SMALL_DIM).astype(np.float32).tobytes() for key in trainer.tables["item"]}
    trainer.tables["item"] = items  # the trainer's own have every bit pattern, NaN among them
    trainer.save()
    done = export(request(trainer, updates=None, casts=("item/values=int8",)))
    keys = np.array(sorted(items), np.int64)
    rows = np.frombuffer(b"".join(items[key] for key in keys.tolist()), np.float32).reshape(len(keys), -1)
    codes, scales, _ = to_codes(rows)
    with in_session(done.published.path) as answer:
        found = answer(user=keys, item=keys)["items"]
    np.testing.assert_array_equal(found, codes * scales[:, np.newaxis])
