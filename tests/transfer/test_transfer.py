"""Push and pull: a model in an object store has one history, and is met whole, in order, or not at all."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from exporter.checkpoint.tensor_bundle import BundleWriter, read_array, read_catalog
from exporter.errors import (
    CheckpointError,
    CheckpointNotFound,
    ForeignLineage,
    NotUpdatable,
    PublishError,
    TargetBusy,
    TargetNotWritable,
    UsageError,
    VerificationError,
)
from exporter.pipeline.incremental import export_incremental
from exporter.pipeline.log_maintenance import merge
from exporter.publish.commit import model_lock
from exporter.publish.delta_log import read_log
from exporter.publish.staging import Staging
from exporter.storage.layout import DELTA_NAME, HEAD_FILE, PULL_LOCK_FILE, PUSHED_FILE
from exporter.storage.objects import ObjectReader, ObjectWriter
from exporter.storage.url import Url
from exporter.transfer import pull as pulling
from exporter.transfer.head import fetch_head
from exporter.transfer.pull import pull
from exporter.transfer.push import plan_push
from tests.support.commands import export_model
from tests.support.http_proxy import careless
from tests.support.logs import Serving, assert_same_bits, request, served_now, values_at
from tests.support.machines import (
    Machine,
    _at_once,
    files,
    killed_at,
    pushed,
    race,
    stored,
    survives_kills,
    take_back,
)
from tests.support.object_stores import Bucket
from tests.support.publishers import Killed
from tests.support.setting import Setting, followed


def test_there_and_back(machine: Machine, bucket: Bucket, url: str, tmp_path: Path) -> None:
    ran = export_model("push", machine.model, url, "--json")
    assert (ran.code, ran.document["status"], ran.document["position"]) == (0, "published", 30), ran.err
    assert stored(bucket) == files(machine.model)
    ran = export_model("pull", url, tmp_path / "two", "--json")
    assert (ran.code, ran.document["fetched"]) == (
        0,
        [
            "10",
            "deltas/00000000000000000010/00000000000000000010-00000000000000000020",
            "deltas/00000000000000000010/00000000000000000020-00000000000000000030",
        ],
    ), ran.err
    assert files(tmp_path / "two") == files(machine.model)
    assert_same_bits(values_at(read_log(tmp_path / "two")), served_now(machine.trainer, Serving()))
    assert export_model("push", machine.model, url, "--json").document["status"] == "nothing_to_do"
    assert export_model("pull", url, tmp_path / "two", "--json").document["status"] == "nothing_to_do"
    machine.go_on(40)
    planned = export_model("push", machine.model, url, "--dry-run", "--json").document
    assert (planned["status"], len(planned["uploaded"])) == ("planned", 1)
    assert stored(bucket) != files(machine.model)
    assert export_model("push", machine.model, url).code == 0
    pull(url, tmp_path / "two")
    assert files(tmp_path / "two") == files(machine.model)


def test_another_machine_goes_on(machine: Machine, url: str, tmp_path: Path) -> None:
    pushed(machine.model, url)
    pull(url, tmp_path / "two" / "model")
    shutil.copytree(machine.train, tmp_path / "two" / "train")
    shutil.rmtree(machine.model)
    machine.trainer.directory = tmp_path / "two" / "train"
    object.__setattr__(machine, "directory", tmp_path / "two")
    machine.go_on(40)
    pushed(machine.model, url)
    assert pull(url, tmp_path / "three").position == 40


def test_who_does_not_lead_on_is_refused(machine: Machine, bucket: Bucket, url: str, tmp_path: Path) -> None:
    pushed(machine.model, url)
    other = tmp_path / "other"
    pull(url, other)
    machine.go_on(40)
    pushed(machine.model, url)
    before = stored(bucket)
    machine.trainer.train()
    machine.trainer.step = 41
    machine.trainer.increment()
    export_incremental(request(machine.trainer, other))  # from 30 on: 40 is not known there
    ran = export_model("push", other, url, "--json")
    assert (ran.code, ran.error["error"]) == (5, "PositionMoved")
    assert f"export-model pull {url}" in ran.error["hint"]
    assert stored(bucket) == before
    with pytest.raises(ForeignLineage, match="another publication"):
        pull(bucket.url("models/ranker"), _another_model(tmp_path))


def _another_model(tmp_path: Path) -> Path:
    setting = Setting(tmp_path / "foreign")
    followed(setting.directory, (), published=0)
    return setting.model


def test_a_store_that_something_else_filled(
    machine: Machine, bucket: Bucket, url: str, tmp_path: Path
) -> None:
    bucket.upload(_another_model(tmp_path), "models/ranker")
    with pytest.raises(ForeignLineage, match="another publication than"):
        plan_push(machine.model, url)


def test_a_push_that_is_killed_anywhere(
    machine: Machine, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survives_kills(machine, url, tmp_path, monkeypatch)


def test_a_pull_that_is_killed_anywhere(
    machine: Machine, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed(machine.model, url)
    monkeypatch.setattr(pulling, "_AHEAD", 1)
    here, copied, rounds = tmp_path / "here", 0, 0
    while True:
        with killed_at(monkeypatch, ObjectReader, ("copy",), 1) as calls:
            try:
                pull(url, here)
                break
            except Killed:
                assert len(calls) == 1, "one more file with each run"
        copied += len(calls)
        rounds += 1
        positions = [delta.end for delta in (read_log(here).chain(10) if (here / "10").exists() else ())]
        assert positions == [20, 30][: len(positions)]
    assert copied + len(calls) == len([name for name in files(machine.model) if "manifest.json" not in name])
    assert files(here) == files(machine.model)
    assert not list(here.glob(".pull-*"))


@pytest.mark.landing
def test_two_machines_at_once(machine: Machine, url: str, tmp_path: Path) -> None:
    race(machine, url, tmp_path, range(40, 160, 10))


def test_a_rollback_and_its_hold(machine: Machine, bucket: Bucket, url: str, tmp_path: Path) -> None:
    pushed(machine.model, url)
    here = tmp_path / "here"
    pull(url, here)
    assert export_model("rollback", machine.model, "--to", "20").code == 0
    pushed(machine.model, url)
    done = pull(url, here)
    assert (done.position, read_log(here).hold.read()) == (31, 31)
    assert _but_for_documents(here) == _but_for_documents(machine.model)
    assert_same_bits(values_at(read_log(here)), values_at(read_log(here), 20))
    assert export_model("resume", machine.model).code == 0
    pushed(machine.model, url)
    pull(url, here)
    assert read_log(here).hold.read() is None
    assert files(here) == files(machine.model)


def test_while_a_rollback_is_pushed_nobody_moves(
    machine: Machine, bucket: Bucket, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed(machine.model, url)
    assert export_model("rollback", machine.model, "--to", "20").code == 0
    with killed_at(monkeypatch, ObjectWriter, ("upload",), 1), pytest.raises(Killed):
        pushed(machine.model, url)
    assert (pull(url, tmp_path / "here").position, read_log(tmp_path / "here").hold.read()) == (30, None)
    with killed_at(monkeypatch, ObjectWriter, ("copy_if_there",), 0), pytest.raises(Killed):
        pushed(machine.model, url)  # what did not come is the manifest
    pull(url, tmp_path / "here")
    assert not read_log(tmp_path / "here").hold.content()[:1].isdigit()  # type: ignore[index]
    pushed(machine.model, url)
    pull(url, tmp_path / "here")
    assert read_log(tmp_path / "here").hold.read() == 31


def test_what_is_not_whole_yet_is_waited_for(
    machine: Machine, bucket: Bucket, url: str, tmp_path: Path
) -> None:
    """As a tool leaves it that copies files in any order."""
    bucket.upload(machine.model, "models/ranker")
    missing = next(key for key in bucket.keys("models/ranker/deltas") if "20-" in key and ".data-" in key)
    content = bucket.keys(missing)[missing]
    bucket.delete(missing)
    ran = export_model("pull", url, tmp_path / "here", "--json")
    assert (ran.code, ran.document["position"], len(ran.document["incomplete"])) == (0, 20, 1)
    bucket.put(missing, content[:-1])
    ran = export_model("pull", url, tmp_path / "here", "--json")
    assert (ran.code, ran.error["error"]) == (6, "PublicationDamaged")
    assert f"has {len(content) - 1} bytes, expected {len(content)}" in ran.error["cause"]
    bucket.put(missing, content)
    assert pull(url, tmp_path / "here").position == 30


def test_damage_is_fetched_anew_and_never_published(
    machine: Machine, bucket: Bucket, url: str, tmp_path: Path
) -> None:
    pushed(machine.model, url)
    for part in ("models/ranker/10/", "models/ranker/deltas/"):
        here = tmp_path / part.split("/")[2]
        key = max(key for key in bucket.keys(part) if ".data-" in key)
        content = bucket.keys(key)[key]
        damaged = bytes(255 - byte for byte in content)
        bucket.put(key, damaged)
        with pytest.raises((VerificationError, CheckpointError)):
            pull(url, here)
        assert damaged not in [path.read_bytes() for path in here.rglob("*") if path.is_file()]
        bucket.put(key, content)
        assert pull(url, here).position == 30
        assert files(here) == files(machine.model)


def another(machine: Machine, tmp_path: Path) -> Path:
    """The same model, trained to other values: the files of its deltas have the same names and sizes."""
    other = Machine(tmp_path / "other")
    shutil.copytree(machine.directory, other.directory)
    first = read_log(other.model).deltas[0]
    (tmp_path / "forged").mkdir()
    with BundleWriter(tmp_path / "forged/delta") as writer:
        catalog = read_catalog(first.path / DELTA_NAME)
        for name, ref in catalog.tensors.items():
            value = read_array(catalog, ref)
            writer.add(name, value + 1000 if name.endswith("/values") else value)
    for name in ("delta.index", "delta.data-00000-of-00001"):
        assert (tmp_path / "forged" / name).stat().st_size == (first.path / name).stat().st_size
        (first.path / name).write_bytes((tmp_path / "forged" / name).read_bytes())
    return first.path


def test_a_delta_is_what_its_manifest_says(
    machine: Machine, bucket: Bucket, url: str, tmp_path: Path
) -> None:
    """Another index, with data that go with it, of the same sizes: whole, and not what was published."""
    forged = another(machine, tmp_path)
    refused = export_model("push", tmp_path / "other/model", url, "--json")
    assert (refused.code, refused.error["error"]) == (6, "VerificationError"), refused.err
    assert not [key for key in bucket.names() if forged.name in key]
    assert export_model("verify", tmp_path / "other/model").code == 6
    for key in bucket.names():
        bucket.delete(key)
    pushed(machine.model, url)
    good = bucket.keys("models/ranker/deltas")
    place = forged.relative_to(tmp_path / "other/model").as_posix()
    for file in forged.glob("delta.*"):
        bucket.put(f"models/ranker/{place}/{file.name}", file.read_bytes())
    ran = export_model("pull", url, tmp_path / "here", "--json")
    assert (ran.code, ran.error["error"]) == (6, "PublicationDamaged"), ran.err
    assert "has checksum" in ran.error["cause"] and url in ran.error["cause"]
    false = [path.read_bytes() for path in forged.glob("delta.*")]
    assert not [
        path for path in (tmp_path / "here").rglob("*") if path.is_file() and path.read_bytes() in false
    ]
    for key, content in good.items():
        bucket.put(key, content)
    assert pull(url, tmp_path / "here").position == 30
    assert files(tmp_path / "here") == files(machine.model)


def test_a_version_is_what_its_manifest_says(
    machine: Machine, bucket: Bucket, url: str, tmp_path: Path
) -> None:
    pushed(machine.model, url)
    for name in ("saved_model.pb", "variables/variables.index"):
        key = f"models/ranker/10/{name}"
        content = bucket.keys(key)[key]
        bucket.put(key, content[:-1] + bytes([content[-1] ^ 1]))
        ran = export_model("pull", url, tmp_path / "here", "--json")
        assert (ran.code, f"{url}/10/{name} has checksum" in ran.error["cause"]) == (6, True), ran.err
        bucket.put(key, content)
    assert pull(url, tmp_path / "here").position == 30


def test_what_changes_while_it_is_sent_is_not_published(
    machine: Machine, bucket: Bucket, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload, shard = ObjectWriter.upload, next(machine.model.glob("deltas/*/*/*.data-*"))

    def changed(self: ObjectWriter, key: str, file: Path, *rest: Any) -> str:
        if file == shard:
            content = shard.read_bytes()
            shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            try:
                return upload(self, key, file, *rest)
            finally:
                shard.write_bytes(content)
        return upload(self, key, file, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectWriter, "upload", changed)
        ran = export_model("push", machine.model, url, "--json")
    assert (ran.code, ran.error["error"]) == (6, "VerificationError"), ran.err
    delta = shard.parent.relative_to(machine.model).as_posix()
    assert f"models/ranker/{delta}/manifest.json" not in bucket.names()
    pushed(machine.model, url)
    assert stored(bucket) == files(machine.model)


def test_what_came_before_a_pull_was_killed_is_compared_too(
    machine: Machine, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed(machine.model, url)
    here = tmp_path / "here"
    with killed_at(monkeypatch, ObjectReader, ("copy",), 4), pytest.raises(Killed):
        pull(url, here)
    found = (path for path in here.glob(".pull-*/**/*") if path.is_file() and path.suffix != ".part")
    left = [path for path in found if path.stat().st_size]
    assert left
    for path in left:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for directory in here.glob(
        ".pull-*"
    ):  # of files that the next pull does not fetch: it links or merges them
        for name in (".saved_model.pb.part", "variables/.variables.index.part"):
            (directory / "variables").mkdir(exist_ok=True)
            (directory / name).write_bytes(b"half")
    assert pull(url, here).position == 30
    assert files(here) == files(machine.model)


def test_manifests_that_tell_of_another_place(
    machine: Machine, bucket: Bucket, url: str, tmp_path: Path
) -> None:
    """They are refused, and the copy goes on once the store is mended."""
    pushed(machine.model, url)
    here = tmp_path / "here"
    base = bucket.keys("models/ranker/10/")
    second = f"models/ranker/{read_log(machine.model).deltas[1].path.relative_to(machine.model).as_posix()}"
    for key, change in (
        (f"{second}/manifest.json", {"position": 31}),
        (f"{second}/manifest.json", {"from_position": 10}),
        (f"{second}/manifest.json", {"files": []}),
        ("models/ranker/10/manifest.json", {"position": 11}),
        ("models/ranker/10/manifest.json", {"files": []}),
    ):
        content = bucket.keys(key)[key]
        bucket.put(key, json.dumps(json.loads(content) | change).encode())
        ran = export_model("pull", url, here, "--json")
        assert (ran.code, ran.error["error"]) == (6, "ManifestError"), (change, ran.out)
        assert key.removeprefix("models/ranker") in ran.error["message"]
        assert export_model("push", machine.model, url, "--json").error["error"] == "ManifestError"
        assert export_model("verify", url).code == 6
        bucket.put(key, content)
    for key, content in base.items():
        bucket.put(key.replace("/10/", "/50/"), content)
    ran = export_model("pull", url, here, "--json")
    assert (ran.code, ran.error["error"]) == (6, "ManifestError")
    assert export_model("verify", url).code == 6
    for key in base:
        bucket.delete(key.replace("/10/", "/50/"))
    assert pull(url, here).position == 30
    assert files(here) == files(machine.model)


def test_a_copy_holds_nothing_that_no_manifest_lists(
    machine: Machine, bucket: Bucket, url: str, tmp_path: Path
) -> None:
    """Servers run what lies in `assets.extra`, and list the deltas of a log."""
    pushed(machine.model, url)
    (first, *_) = read_log(machine.model).deltas
    for path in (
        "10/assets.extra/tf_serving_warmup_requests",
        "10/assets/words.txt",
        f"{first.path.relative_to(machine.model)}/delta.data-00001-of-00002",
        f"{first.path.parent.relative_to(machine.model)}/{20:020d}-{90:020d}/delta.index",
        "99/saved_model.pb",
    ):
        bucket.put(f"models/ranker/{path}", b"of somebody else")
    pull(url, tmp_path / "here")
    assert files(tmp_path / "here") == files(machine.model)


def test_hostile_manifests(machine: Machine, bucket: Bucket, url: str, tmp_path: Path) -> None:
    pushed(machine.model, url)
    key = "models/ranker/10/manifest.json"
    document = json.loads(bucket.keys(key)[key])
    for path in ("../../outside", "/etc/outside"):
        bucket.put(
            key, json.dumps(document | {"files": [{"path": path, "bytes": 1, "crc32c": None}]}).encode()
        )
        ran = export_model("pull", url, tmp_path / "here", "--json")
        assert (ran.code, ran.error["error"]) == (6, "ManifestError"), ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    bucket.put(f"models/ranker/{HEAD_FILE}", b"[]")
    assert export_model("push", machine.model, url, "--json").error["error"] == "ManifestError"


def test_merged_away(
    machine: Machine, bucket: Bucket, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed(machine.model, url)
    pull(url, tmp_path / "here")
    merge(machine.model)
    for delta in machine.deltas:
        if not delta.name.endswith("10-00000000000000000030"):
            shutil.rmtree(delta)  # as retention does, in time
    pushed(machine.model, url)
    assert len(pull(url, tmp_path / "here").fetched) == 1
    assert export_model("push", machine.model, url, "--prune").code == 0
    assert stored(bucket) == files(machine.model)
    assert pull(url, tmp_path / "here", prune=True).removed == ()
    monkeypatch.setattr(pulling, "GRACE_SECONDS", 0.0)
    assert len(pull(url, tmp_path / "here", prune=True).removed) == 2
    assert files(tmp_path / "here") == files(machine.model)
    machine.go_on(40)
    pushed(machine.model, url)


@pytest.mark.parametrize("call", [1, 3, 4, 6])
def test_merged_away_while_it_is_pulled(
    machine: Machine, bucket: Bucket, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Another machine merges, and removes the parts, before the pull's `call`-th read: it looks again."""
    pushed(machine.model, url)
    merge(machine.model)
    monkeypatch.setattr(pulling, "_AHEAD", 1)  # one read after the other
    real, calls = ObjectReader.read, count(1)

    def read(self: ObjectReader, *rest: Any) -> memoryview:
        if next(calls) == call:
            with monkeypatch.context() as patch:
                patch.setattr(ObjectReader, "read", real)
                pushed(machine.model, url)
                for key in [name for name in bucket.names() if re.search("/0*(10-0*20|20-0*30)/", name)]:
                    bucket.delete(key)
        return real(self, *rest)

    monkeypatch.setattr(ObjectReader, "read", read)
    done = pull(url, tmp_path / "two")
    assert done.position == 30
    assert {path.rpartition("/")[2] for path in done.fetched} >= {"10", f"{10:020d}-{30:020d}"}
    assert_same_bits(values_at(read_log(tmp_path / "two")), served_now(machine.trainer, Serving()))


def test_the_head_is_kept_when_what_it_names_is_merged_away(machine: Machine, url: str) -> None:
    pushed(machine.model, url)
    merge(machine.model)
    for delta in machine.deltas:
        if not delta.name.endswith("10-00000000000000000030"):
            shutil.rmtree(delta)
    assert (machine.model / PUSHED_FILE).is_file()
    machine.go_on(40)
    pushed(machine.model, url)


def test_two_pulls_at_once(
    machine: Machine, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed(machine.model, url)
    outcomes = _at_once(lambda model: pull(url, model) and None, [tmp_path / "here"] * 2)
    assert outcomes == [None, None]
    assert files(tmp_path / "here") == files(machine.model)
    monkeypatch.setattr(pulling, "_LOCK_SECONDS", 0.1)
    with model_lock(tmp_path / "here", 1, PULL_LOCK_FILE), pytest.raises(TargetBusy):
        pull(url, tmp_path / "here")


def test_a_store_that_ignores_conditions(
    machine: Machine, bucket: Bucket, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with careless(bucket.environment["AWS_ENDPOINT_URL"]) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        with pytest.raises(PublishError, match="ignores conditional requests"):
            pushed(machine.model, url)
    assert bucket.keys() == {}


def test_what_cannot_be_pushed_or_pulled(machine: Machine, url: str, tmp_path: Path) -> None:
    with pytest.raises(NotUpdatable, match="there is no model"):
        plan_push(tmp_path / "empty", url)
    with pytest.raises(CheckpointNotFound, match="no model"):
        pull(url, tmp_path / "here")
    assert not (tmp_path / "here").exists()
    for wrong in ("s3://bucket", "hdfs://name/x", "models/local"):
        with pytest.raises(UsageError, match="expected"):
            pull(wrong, tmp_path / "here")
        with pytest.raises(UsageError, match="expected"):
            plan_push(machine.model, wrong)
    assert export_model("pull", url, tmp_path / "here", "--interval", "2").code == 2


def test_damage_does_not_travel(machine: Machine, bucket: Bucket, url: str) -> None:
    (first, *_) = read_log(machine.model).deltas
    shard = first.path / "delta.data-00000-of-00001"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    ran = export_model("push", machine.model, url)
    assert (ran.code, "checksum" in ran.err) == (6, True), ran.err
    assert not [key for key in bucket.names() if first.path.name in key]


def test_a_model_that_is_read_only_is_pushed(
    machine: Machine, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise TargetNotWritable("cannot write")

    monkeypatch.setattr("exporter.transfer.push.remember", refused)
    pushed(machine.model, url)
    assert pull(url, tmp_path / "here").position == read_log(machine.model).at.position


def test_a_pull_into_the_trainers_directory(machine: Machine, url: str, tmp_path: Path) -> None:
    pushed(machine.model, url)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-1"')
    ran = export_model("pull", url, tmp_path / "train")
    assert (ran.code, "is a directory of checkpoints" in ran.err) == (2, True), ran.err
    assert [path.name for path in (tmp_path / "train").iterdir()] == ["checkpoint"]


def _await_position(process: subprocess.Popen[str], position: int) -> None:
    """It may look while a push goes on."""
    assert process.stdout is not None and process.stderr is not None
    while line := process.stdout.readline():
        if json.loads(line)["position"] == position:
            return
    raise AssertionError(process.stderr.read())


def test_a_watch_fetches_what_appears(machine: Machine, url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "exporter", "pull", url, str(tmp_path / "here"), "--watch"]
    with subprocess.Popen(
        [*command, "--interval", "0.1", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            time.sleep(1)  # there is nothing yet
            pushed(machine.model, url)
            _await_position(process, 30)
            machine.go_on(40)
            pushed(machine.model, url)
            _await_position(process, 40)
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert files(tmp_path / "here") == files(machine.model)


def test_a_watch_outlives_what_the_system_refuses(machine: Machine, url: str, tmp_path: Path) -> None:
    pushed(machine.model, url)
    (lock := tmp_path / "here/.pull").parent.mkdir()
    lock.symlink_to("nowhere")  # it is refused with ELOOP, as all is with EROFS on a disk with errors
    command = [sys.executable, "-m", "exporter", "pull", url, str(lock.parent), "--watch"]
    with subprocess.Popen(
        [*command, "--interval", "0.1", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            assert json.loads(process.stderr.readline())["error"] == "Unreachable"
            lock.unlink()
            _await_position(process, 30)
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert files(lock.parent) == files(machine.model)


def test_a_pull_never_mixes_two_histories(
    machine: Machine, bucket: Bucket, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was published here and not pushed stays alone; it is refused, and nothing of it is changed."""
    monkeypatch.setattr(pulling, "GRACE_SECONDS", 0.0)
    pushed(machine.model, url)
    other = tmp_path / "other"
    pull(url, other)
    machine.go_on(40)
    assert export_model("rollback", machine.model, "--to", "20").code == 0
    before = files(machine.model)
    for options in ((), ("--prune",)):  # the store has no news
        ran = export_model("pull", url, machine.model, "--json", *options)
        assert (ran.code, ran.document["status"], ran.document["position"]) == (0, "nothing_to_do", 41), (
            ran.err
        )
        assert files(machine.model) == before
    pushed(machine.model, url)
    assert stored(bucket) == before
    pull(url, other)
    machine.go_on(50)
    pushed(machine.model, url)
    machine.trainer.train()
    machine.trainer.step = 51
    machine.trainer.increment()
    export_incremental(request(machine.trainer, other))  # both have gone on from 41
    before = files(other)
    for options in ((), ("--prune",)):
        ran = export_model("pull", url, other, "--json", *options)
        assert (ran.code, ran.error["error"]) == (5, "PositionMoved"), ran.err
        assert f"export-model pull {url}" in ran.error["hint"]
        assert files(other) == before


def test_a_canarys_rollback_in_a_copy_is_a_decision_about_its_servers(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    """The store knows nothing of it; the copy goes on with what leads its servers to the right values."""
    copy = _taken_back_by_canary(machine, url, tmp_path / "copy")
    assert read_log(copy).hold.read() == 31
    machine.go_on(40)
    pushed(machine.model, url)
    before = files(copy)
    ran = export_model("pull", url, copy, "--prune", "--json")
    assert (ran.code, ran.document["status"]) == (0, "nothing_to_do"), ran.err
    assert ran.document["waiting"] == [f"deltas/{10:020d}/{30:020d}-{40:020d}"]
    assert files(copy) == before, "a server at 31 has the values of 20, and would take the delta"
    assert "waiting" in export_model("pull", url, copy).out
    refused = export_model("push", copy, url, "--json")
    assert (refused.code, refused.error["error"]) == (5, "PositionMoved"), refused.err
    assert refused.error["hint"] == f"roll the store's back, too: export-model rollback {url} --to 20"

    assert export_model("merge", url).code == 0
    assert pull(url, copy).fetched == (f"deltas/{10:020d}/{10:020d}-{40:020d}",)
    assert read_log(copy).hold.read() == 31, "until a person lifts it"
    assert export_model("resume", copy).code == 0
    log = read_log(copy)
    assert log.approved == 31, "the canary is to approve what comes"
    assert [(delta.start, delta.end) for delta in log.chain(31)] == [(10, 40)]
    assert_same_bits(values_at(log), served_now(machine.trainer, Serving()))


def test_a_rollback_of_the_store_is_that_which_a_canary_made_in_a_copy(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    copy = _taken_back_by_canary(machine, url, tmp_path / "copy")
    assert export_model("rollback", url, "--to", 20).code == 0
    for _ in range(2):
        assert pull(url, copy).waiting == ()
    assert export_model("resume", url).code == 0
    assert len(pull(url, copy).fetched) == 1
    assert read_log(copy).approved == 31, "the canary is to approve what comes"
    assert_same_bits(values_at(read_log(copy)), served_now(machine.trainer, Serving()))


@pytest.mark.parametrize("way", ["resume", "pull"])
def test_a_hold_that_another_machine_lifted_is_not_set_again(
    machine: Machine, url: str, tmp_path: Path, way: str
) -> None:
    assert export_model("rollback", machine.model, "--to", "20").code == 0
    pushed(machine.model, url)
    assert export_model("resume", url, "--lift-only").code == 0
    machine.go_on(40)
    ran = export_model("push", machine.model, url, "--json")
    assert (ran.code, ran.error["error"]) == (5, "PositionMoved"), ran.err
    assert "hold" in ran.error["message"]
    words = (machine.model, "--lift-only") if way == "resume" else (url, machine.model)
    assert export_model(way, *words).code == 0
    assert export_model("push", machine.model, url).code == 0
    assert read_log(_pulled(url, tmp_path / "here")).hold.read() is None


def test_a_hold_that_was_set_here_since_the_last_push_stays(machine: Machine, url: str) -> None:
    pushed(machine.model, url)
    assert export_model("rollback", machine.model, "--to", "20").code == 0
    pull(url, machine.model)
    assert read_log(machine.model).hold.read() == 31


def _held_by_canary(model: Path, position: int) -> None:
    with Staging(model) as staging:
        read_log(model).hold.put(position, staging, canary=True)


@pytest.mark.parametrize("own", [None, 20], ids=["the store's", "the copy's"])
def test_a_canarys_hold_that_came_with_the_store_is_lifted_with_it(
    machine: Machine, url: str, tmp_path: Path, own: int | None
) -> None:
    """A copy without a canary of its own would wait for ever; one with a canary keeps what that approved."""
    _held_by_canary(machine.model, 30)
    pushed(machine.model, url)
    copy = tmp_path / "copy"
    pull(url, copy)
    assert read_log(copy).approved == 30
    if own is not None:
        _held_by_canary(copy, own)
    assert export_model("resume", machine.model, "--lift-canary").code == 0
    pushed(machine.model, url)
    pull(url, copy)
    assert read_log(copy).approved == own


def test_who_holds_a_model_and_why_goes_with_it(machine: Machine, url: str, tmp_path: Path) -> None:
    assert export_model("rollback", machine.model, "--to", "20", "--reason", "NaN in scores").code == 0
    pushed(machine.model, url)
    pushed(machine.model, url)
    ours = read_log(machine.model).hold.by
    assert ours is not None
    copy = _pulled(url, tmp_path / "copy")
    assert read_log(copy).hold.by == replace(ours, url=url)
    assert export_model("history", url, "--json").document["held_by"]["why"] == "NaN in scores"
    assert export_model("rollback", url, "--to", "10", "--reason", "worse").code == 0
    found = read_log(_pulled(url, copy)).hold.by
    assert found is not None
    assert found.why == "worse"
    assert export_model("resume", url, "--lift-only").code == 0
    pull(url, copy)
    assert read_log(copy).hold.for_servers() is None
    assert not read_log(copy).hold.path.with_name("hold.json").exists()


def _but_for_documents(model: Path) -> dict[str, bytes]:
    """All that readers may see; a copy's document of a hold names the store where it was set."""
    return {name: content for name, content in files(model).items() if not name.endswith("hold.json")}


def _parsed(url: str) -> Url:
    parsed = Url.parse(url)
    assert parsed is not None
    return parsed


def test_a_publisher_of_an_earlier_release_leaves_a_document_that_is_ignored(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    """It sets numbers alone, in the head and beside the deltas."""
    _held_by_canary(machine.model, 20)
    pushed(machine.model, url)
    copy = _pulled(url, tmp_path / "copy")
    assert read_log(copy).approved == 20
    store = ObjectWriter(_parsed(url))
    found = fetch_head(store)
    assert found is not None
    head, tag = found
    number = next(name for name in head.holds or {})
    content = msgspec.json.decode(head.encoded())
    del content["hold_documents"]
    content["holds"] = {number: "30\n"}
    assert store.replace(store.url.key(HEAD_FILE), msgspec.json.encode(content), tag)
    store.put(store.url.key(number), b"30\n")
    pull(url, copy)
    held = read_log(copy).hold.for_servers()
    assert held is not None and held.by is not None
    assert (held.position, held.is_canary, held.by.who, held.by.url) == (30, False, "", url)
    assert export_model("history", url, "--json").document["held_by"] is None


def _taken_back_by_canary(machine: Machine, url: str, copy: Path) -> Path:
    """A copy of the model, which servers read whose canary did not approve of 30."""
    pushed(machine.model, url)
    pull(url, copy)
    take_back(copy, 20)
    return copy


def _pulled(url: str, directory: Path) -> Path:
    pull(url, directory)
    return directory
