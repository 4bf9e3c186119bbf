"""Versions that tasks write straight into a store: resumed, raced, verified there, and never on our disk."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Barrier

import ml_dtypes
import numpy as np
import pytest
from msgspec.structs import replace

from exporter.bundle.variables import Move
from exporter.checkpoint.tensor_bundle import read_array, read_catalog
from exporter.errors import CheckpointChanged, DiskFull
from exporter.jobs.runner import Runner
from exporter.jobs.task import Input, Range
from exporter.options import DataMode, ExportRequest
from exporter.pipeline.full import export
from exporter.storage import mirror, requests
from exporter.storage.layout import INPUTS_DIRECTORY, JOBS_DIRECTORY, RECEIPTS_DIRECTORY, VARIABLES_PREFIX
from exporter.storage.objects import ObjectReader, ObjectWriter, RemoteObject
from exporter.storage.output_directory import open_directory
from exporter.storage.url import Url
from exporter.transfer import carrier
from exporter.transfer.opened import opened
from exporter.transfer.pull import pull
from exporter.verify.log import verify_model
from exporter.verify.version_files import Checksum
from exporter.wire.crc32c import extend
from tests.support.budget import thorough
from tests.support.commands import export_model
from tests.support.deeprec import Ev, write_full
from tests.support.deeprec_models import INPUTS, OUTPUTS, Trainer
from tests.support.directory_store import BUCKET, directory_store
from tests.support.engine_runs import python_of, wait_until
from tests.support.object_stores import Bucket
from tests.support.stored_tables import ROWS, TABLES, WIDTH, assert_right, table, train

BY_KEYS = """
import tensorflow as tf
from exporter.tables import DynamicTable

def serving():
    ids = tf.compat.v1.placeholder(tf.int64, [None], name="ids")
    return {"ids": ids}, {"rows": DynamicTable("emb", 4).lookup(ids)}
"""
BASE = "models/tables"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a checkpoint of six tables, `graph.meta` and `model.py`."""
    return train(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def command(trained: Path, bucket: Bucket) -> list[str]:
    """An export of 24 tasks that reads 64 KiB a task."""
    places = ["--ckpt-dir", trained / "model.ckpt-7", "--model", f"{trained / 'model.py'}:serving"]
    return [*map(str, places), "--out", bucket.url(BASE), "--engine", "task-size=64KiB", "--json"]


@pytest.mark.landing
@pytest.mark.parametrize(
    ("cast", "size", "tasks"), [(None, "64KiB", 6), ("bfloat16", "64KiB", 6), (None, "8KiB", 48)]
)
def test_shards_are_written_by_tasks_and_copied_by_the_store(
    command: list[str], bucket: Bucket, tmp_path: Path, cast: str | None, size: str, tasks: int
) -> None:
    command = [f"task-size={size}" if word.startswith("task-size") else word for word in command]
    ran = export_model(*command, *(("--cast", cast) if cast else ()), "--verify", "bytes")
    assert ran.code == 0, ran.err
    found = bucket.keys()
    assert sum("data-" in key for key in found) == ran.document["tasks"] == tasks
    assert not [key for key in found if JOBS_DIRECTORY in key]
    pull(bucket.url(BASE), tmp_path / "here")
    assert_right(tmp_path / "here", np.float32 if cast is None else ml_dtypes.bfloat16)
    verified = export_model(
        "verify", bucket.url(BASE), "--bytes", "--engine", "local", "--engine", "task-size=8KiB"
    )
    assert verified.code == 0, verified.err


def test_what_tasks_wrote_answers_before_it_is_published(command: list[str], tmp_path: Path) -> None:
    """TensorFlow reads it, which knows nothing of files that stand for objects."""
    within = {"expect": {"rows": {"min": -9, "max": 9}}}
    golden = {"requests": [{"name": "a row", "instances": [{"ids": 3}], **within}]}
    (tmp_path / "golden.json").write_text(json.dumps(golden))
    ran = export_model(*command, "--verify", "outputs", "--golden", tmp_path / "golden.json")
    assert (ran.code, ran.document["max_errors"]) == (0, {"serving_default/rows": 0.0}), ran.err


def test_who_has_published_reads_on_where_it_is_published(trained: Path, bucket: Bucket) -> None:
    """Not where tasks wrote it, which is removed: a watch compares the next checkpoint with its base."""
    out, graph = bucket.url(BASE), f"{trained / 'model.py'}:serving"
    with opened(out) as model:
        request = ExportRequest(trained / "model.ckpt-7", model.path, model=graph, data=DataMode.COMPACT)
        for _ in range(2):
            model.carry(lambda: export(replace(request, again=True)))
            found = model.carry(lambda: verify_model(model.path, bytes_=True))
            assert not found.problems
    assert export_model("verify", out, "--bytes").code == 0


def test_the_store_copies_several_shards_at_a_time(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    together, duplicate = Barrier(2, timeout=60), ObjectWriter.duplicate

    def awaited(self: ObjectWriter, found: RemoteObject, key: str) -> None:
        together.wait()
        duplicate(self, found, key)

    monkeypatch.setattr(ObjectWriter, "duplicate", awaited)
    ran = export_model(*command)
    assert (ran.code, ran.document["tasks"] % 2) == (0, 0), ran.err


def test_nothing_of_the_values_stays_on_our_disk(
    command: list[str], trained: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a task writes is removed once it is uploaded; the version's shards are files without blocks."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    used: list[int] = []
    stand_in = mirror.Mirror.stand_in

    def noted(self: mirror.Mirror, path: Path, each: object) -> None:
        stand_in(self, path, each)  # type: ignore[arg-type]
        used.append(sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*") if file.is_file()))

    monkeypatch.setattr(mirror.Mirror, "stand_in", noted)
    assert export_model(*command).code == 0
    assert len(used) == TABLES
    assert max(used) < ROWS * WIDTH * 4  # of six tables, not one


@pytest.mark.landing
@pytest.mark.parametrize("when", ["some receipts", "all receipts", "while it is published"])
def test_an_export_that_is_killed_is_gone_on_with(
    command: list[str], bucket: Bucket, tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrier, "LEASE_SECONDS", 2.0)  # how long the second one waits for the first
    argv = [sys.executable, "-m", "exporter", *command, "--workers", "1"]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            keys = bucket.names()
            receipts = sum(RECEIPTS_DIRECTORY in key for key in keys)
            published = sum(key.startswith(f"{BASE}/7/") for key in keys)
            if {"some receipts": receipts > 1, "all receipts": receipts == TABLES}.get(when, published > 1):
                break
        process.send_signal(signal.SIGKILL)
    is_killed = process.returncode != 0  # on a busy machine it may be through before we look
    before = [key for key in bucket.names() if RECEIPTS_DIRECTORY in key]
    is_published = f"{BASE}/7/manifest.json" in bucket.names()  # then its job may be removed already
    assert before or is_published or not is_killed
    assert f"{BASE}/7/manifest.json" not in bucket.names() or when != "some receipts" or not is_killed
    ran = export_model(*command)
    assert ran.code == 0, ran.err
    pull(bucket.url(BASE), tmp_path / "here")
    (version,) = (path for path in (tmp_path / "here").iterdir() if path.name.isdigit())
    assert version.name in ("7", "8")  # 7 was given up if the kill came while it was published
    catalog = read_catalog(version / VARIABLES_PREFIX)
    np.testing.assert_array_equal(read_array(catalog, catalog.tensors["t3"]), table(3))


def test_receipts_of_another_engine_count(command: list[str], bucket: Bucket) -> None:
    """The same directory, whatever the engine: a plan has one digest."""
    ran = export_model(*command, "--engine", "local", "--job-dir", bucket.url("jobs"))
    assert ran.code == 0, ran.err
    assert not [key for key in bucket.names() if key.startswith("jobs/")]


def test_a_job_directory_in_a_store_for_a_model_here(
    command: list[str], bucket: Bucket, tmp_path: Path
) -> None:
    """Workers elsewhere write to the store; what they wrote is fetched into the version."""
    at = command.index("--out")
    here = [*command[: at + 1], str(tmp_path / "here"), *command[at + 2 :], "--cast", "bfloat16"]
    ran = export_model(*here, "--engine", "local", "--job-dir", bucket.url("jobs"))
    assert ran.code == 0, ran.err
    assert_right(tmp_path / "here", ml_dtypes.bfloat16)
    assert not bucket.names()


@pytest.mark.parametrize("sees_our_files", [True, False], ids=["threads", "workers elsewhere"])
def test_what_the_command_itself_made_for_its_tasks(
    trained: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees_our_files: bool
) -> None:
    """An archive's tensors become a bundle first. A job that broke off is found again."""
    np.savez(tmp_path / "m.npz", **{f"t{number}": table(number) for number in range(TABLES)})
    monkeypatch.setattr(Runner, "sees_our_files", sees_our_files)
    with monkeypatch.context() as broken:

        def full(*_: object, **__: object) -> None:
            raise DiskFull("full")

        broken.setattr("exporter.pipeline.full.publish_version", full)
        command = ["--ckpt-dir", str(tmp_path / "m.npz"), "--model", f"{trained / 'model.py'}:serving"]
        command += ["--out", bucket.url(BASE), "--version", "7", "--engine", "task-size=64KiB"]
        assert export_model(*command).code == 1
    copies = [key for key in bucket.names() if INPUTS_DIRECTORY in key]
    assert len(copies) == (0 if sees_our_files else 1)
    receipts = sum(RECEIPTS_DIRECTORY in key for key in bucket.names())
    monkeypatch.setattr(Move, "run", None)  # nothing is done again
    ran = export_model(*command)
    assert ran.code == 0, ran.err
    assert receipts == TABLES
    assert not [key for key in bucket.names() if JOBS_DIRECTORY in key]
    pull(bucket.url(BASE), tmp_path / "here")
    assert_right(tmp_path / "here")


@thorough
@pytest.mark.parametrize("engine", ["local", "dask"])
def test_an_index_of_keys_is_built_in_the_store(
    bucket: Bucket, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, engine: str
) -> None:
    """By workers that see the bucket alone; killed when some tasks are done, and gone on with by threads."""
    table = Ev.random(300_000, 4)
    write_full(tmp_path / "train" / "model.ckpt-7", {"emb": table}, parts=2, step=7)
    bucket.upload(tmp_path / "train", "train")
    (tmp_path / "model.py").write_text(BY_KEYS)
    command = ["--ckpt-dir", bucket.url("train"), "--model", f"{tmp_path / 'model.py'}:serving"]
    command += ["--engine", "task-size=256KiB", "--out"]
    python = python_of(engine, tmp_path_factory)
    begun = [python, "-m", "exporter", *command, bucket.url(BASE), "--engine", engine, "--workers", "2"]
    with subprocess.Popen(begun, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        wait_until(
            lambda: process.poll() is not None or sum("/receipts/keys-" in key for key in bucket.names()) > 2,
            "some keys are sorted",
        )
        process.kill()
    done = {key for key in bucket.names() if "/receipts/" in key}
    assert len(done) > 2 and not [key for key in bucket.names() if key.endswith("manifest.json")]
    planned = export_model(*command, bucket.url(BASE), "--json", "--dry-run").document
    ran = export_model(*command, bucket.url(BASE), "--json")
    assert ran.code == 0, ran.err
    assert ran.document["tasks"] == planned["tasks"] > 12
    assert not [key for key in bucket.names() if JOBS_DIRECTORY in key]
    pull(bucket.url(BASE), tmp_path / "here")
    local = export_model(*command, str(tmp_path / "local"), "--json")
    assert local.code == 0, local.err
    here, there = (read_catalog(tmp_path / each / "7" / VARIABLES_PREFIX) for each in ("here", "local"))
    for name in here.tensors:
        found, expected = (read_array(catalog, catalog.tensors[name]) for catalog in (here, there))
        np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize("is_remote", [False, True], ids=["checkpoint here", "checkpoint in a store"])
def test_an_index_of_keys_leaves_nothing_behind_once_it_is_stored(
    bucket: Bucket, tmp_path: Path, is_remote: bool
) -> None:
    """What its tasks wrote in the store is read until the version is there."""
    write_full(tmp_path / "train" / "model.ckpt-7", {"emb": Ev.random(500, 4)}, parts=2, step=7)
    bucket.upload(tmp_path / "train", "train")
    (tmp_path / "model.py").write_text(BY_KEYS)
    place = bucket.url("train") if is_remote else tmp_path / "train"
    model = f"{tmp_path / 'model.py'}:serving"
    ran = export_model(
        "--ckpt-dir", place, "--model", model, "--out", bucket.url(BASE), "--engine", "task-size=1KiB"
    )
    assert ran.code == 0, ran.err
    assert not [key for key in bucket.names() if JOBS_DIRECTORY in key]
    pull(bucket.url(BASE), tmp_path / "here")
    assert not verify_model(tmp_path / "here", bytes_=True).problems


def test_tables_by_keys_go_to_a_store_as_to_a_directory(bucket: Bucket, tmp_path: Path) -> None:
    """Their index is made by the command itself, beside what the trainer wrote."""
    trainer = Trainer(tmp_path / "train")
    trainer.save()
    names = [f"--input={name}={name}" for name in INPUTS] + [f"--output={name}={name}" for name in OUTPUTS]
    for out in (bucket.url(BASE), str(tmp_path / "local")):
        ran = export_model(
            "--ckpt-dir", str(trainer.directory), *names, "--out", out, "--cast", ".*values=float16"
        )
        assert ran.code == 0, ran.err
    pull(bucket.url(BASE), tmp_path / "here")
    here, local = (read_catalog(tmp_path / each / "100" / VARIABLES_PREFIX) for each in ("here", "local"))
    assert here.tensors.keys() == local.tensors.keys()
    for name in here.tensors:
        found, expected = (read_array(catalog, catalog.tensors[name]) for catalog in (here, local))
        np.testing.assert_array_equal(found, expected, strict=True)


def test_checksums_of_an_object_are_taken_as_it_comes(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, in any order, of ranges that overlap, are empty or lie far apart; no byte goes to a disk."""
    monkeypatch.setattr(requests, "PART_BYTES", 100)
    monkeypatch.setattr(requests, "GAP_BYTES", 30)
    content = np.random.default_rng(0).bytes(5000)
    bucket.put("object", content)
    (tmp_path / "file").write_bytes(content)
    store = ObjectReader(Url("s3", bucket.name, ""))
    listed = store.look("object")
    assert listed is not None
    cut = [(0, 5000), (7, 0), (7, 1), (4000, 1000), (0, 100), (0, 100), (99, 2), (2500, 333), (5000, 0)]
    ranges = tuple(Range(0, offset, size) for offset, size in cut)
    found = [
        Checksum(name="a", inputs=(source,), ranges=ranges)
        .run(open_directory(str(tmp_path / "scratch")))
        .read
        for source in (
            Input(bucket.url("object"), 5000, listed.tag or ""),
            Input.of(tmp_path / "file"),
        )
    ]
    assert found[0] == found[1] == tuple(extend(0, content[at : at + size]) for at, size in cut)
    bucket.put("object", content[::-1])
    with pytest.raises(CheckpointChanged):
        Input(bucket.url("object"), 5000, listed.tag or "").checksums(ranges, tmp_path)
    assert not any(path.stat().st_blocks for path in tmp_path.glob("scratch/*"))


def test_another_store_with_a_bucket_of_that_name_is_another_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may publish to one store after the other: by the settings that it has then."""
    found = list[int]()
    for number in range(2):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "object").write_bytes(str(number).encode())
        with directory_store(directory) as (environment, _):
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            listed = ObjectReader(Url("s3", BUCKET, "")).look("object")
            assert listed is not None
            stored = Input(f"s3://{BUCKET}/object", listed.size, listed.tag or "")
            found += stored.checksums([Range(0, 0, 1)], tmp_path)
    assert found == [extend(0, np.frombuffer(content, np.uint8)) for content in (b"0", b"1")]
