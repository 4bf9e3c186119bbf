"""Google's and Azure's stores: what `test_object_stores` and `test_transfer` hold of S3, in short.

They differ in what conditions name (generations, tags), in how keys are listed and in who may read.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from exporter.errors import CheckpointChanged, PublishError
from exporter.publish.delta_log import read_log
from exporter.storage.layout import HEAD_FILE
from exporter.storage.objects import ObjectReader, ObjectWriter, require_conditions
from exporter.storage.url import Url
from exporter.transfer.pull import pull
from tests.support.commands import export_model
from tests.support.http_proxy import careless
from tests.support.logs import Serving, assert_same_bits, served_now, values_at
from tests.support.machines import Machine, files, pushed, race, stored, survives_kills
from tests.support.object_stores import SECRET, Bucket, google_bucket
from tests.support.setting import Setting, followed
from tests.support.stored_tables import assert_right, train


@pytest.fixture(params=["gs_bucket", "container"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    return cast("Bucket", request.getfixturevalue(request.param))


def test_checkpoints(bucket: Bucket, tmp_path: Path) -> None:
    trainer = followed(tmp_path, (20, 30), published=20)
    bucket.upload(trainer.directory, "train")
    ran = export_model("inspect", bucket.url("train"), "--json")
    assert (ran.code, ran.document["step"]) == (0, 10), ran.err
    model = Setting(tmp_path).model
    ran = export_model("--ckpt-dir", bucket.url("train"), "--out", model, "--incr", "--json")
    assert (ran.code, SECRET in ran.out + ran.err) == (0, False), ran.err
    assert_same_bits(values_at(read_log(model)), served_now(trainer, Serving()))


def test_what_is_replaced_meanwhile(bucket: Bucket) -> None:
    bucket.put("train/shard", b"old bytes")
    store = ObjectReader(cast("Url", Url.parse(bucket.url("train"))))
    (found,) = store.below("train")
    assert bytes(store.read(found, 4, 9)) == b"bytes"
    bucket.put("train/shard", b"new bytes")
    with pytest.raises(CheckpointChanged, match=rf"{bucket.url('train/shard')} was replaced"):
        store.read(found, 4, 9)
    bucket.delete("train/shard")
    with pytest.raises(CheckpointChanged, match="vanished" if bucket.scheme == "gs" else "was replaced"):
        store.read(found, 4, 9)


def test_what_sorts_after_a_name_is_listed(bucket: Bucket) -> None:
    names = [".jobs/5/driver", "10/manifest.json", "deltas/1/2", "head.json"]
    for name in (*names, "../other"):
        bucket.put(f"m/n/{name}".replace("n/../", ""), b"1")
    store = ObjectReader(cast("Url", Url.parse(bucket.url("m/n"))))
    assert [*store.contents()] == names
    assert [*store.contents(after=".jobs0")] == names[1:]
    assert store.directories("m/n/.jobs") == ["m/n/.jobs/5"]


def test_there_and_back(machine: Machine, bucket: Bucket, tmp_path: Path) -> None:
    url = bucket.url("models/ranker")
    for step in (40, 50):  # the head is created, then replaced
        ran = export_model("push", machine.model, url, "--json")
        assert (ran.code, ran.document["status"], SECRET in ran.out + ran.err) == (0, "published", False)
        assert stored(bucket) == files(machine.model)
        pull(url, tmp_path / "here")
        assert files(tmp_path / "here") == files(machine.model)
        machine.go_on(step)
    pushed(machine.model, url)
    assert not [key for key in [*bucket.keys()] if ".probe-" in key]


def test_a_version_is_written_in_the_store_by_tasks(
    bucket: Bucket,
    tmp_path: Path,
) -> None:
    (trained := tmp_path / "trained").mkdir()
    bucket.upload(train(trained), "train")
    url = bucket.url("models/tables")
    model = ("--model", f"{trained / 'model.py'}:serving", "--engine", "task-size=64KiB", "--verify", "bytes")
    ran = export_model("--ckpt-dir", bucket.url("train/model.ckpt-7"), "--out", url, *model, "--json")
    assert (ran.code, ran.document["tasks"], SECRET in ran.out + ran.err) == (0, 6, False), ran.err
    pull(url, tmp_path / "here")
    assert_right(tmp_path / "here")
    assert not [key for key in bucket.names() if SECRET in key]
    assert not [key for key, content in bucket.keys().items() if SECRET.encode() in content]


def test_two_machines_at_once(machine: Machine, bucket: Bucket, tmp_path: Path) -> None:
    race(machine, bucket.url("models/ranker"), tmp_path, range(40, 90, 10))


def test_a_push_that_is_killed_anywhere(
    machine: Machine,
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    survives_kills(machine, bucket.url("models/ranker"), tmp_path, monkeypatch)


def test_conditions_are_probed_for(bucket: Bucket) -> None:
    store = ObjectWriter(cast("Url", Url.parse(bucket.url("m"))))
    require_conditions(store, "m")
    assert bucket.keys() == {}
    first = store.create("m/x", b"1")
    assert first is not None
    assert store.create("m/x", b"2") is None
    second = store.replace("m/x", b"3", first)
    assert second is not None
    assert store.replace("m/x", b"4", first) is None
    assert store.fetch("m/x", 9) == (b"3", second)
    store.delete("m/x", "m/x")
    assert store.fetch("m/x", 9) is None
    assert store.replace("m/x", b"5", second) is None


def test_google_ignoring_conditions(machine: Machine, gs_bucket: Bucket) -> None:
    with pytest.raises(PublishError, match="ignores conditional requests"):
        pushed(machine.model, f"gs://careless-{gs_bucket.name}/models/ranker")
    assert google_bucket(gs_bucket.environment, f"careless-{gs_bucket.name}").keys() == {}


def test_azure_ignoring_conditions(
    machine: Machine,
    container: Bucket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, _, account = container.environment["AZURE_STORAGE_ENDPOINT"].rpartition("/")
    with careless(address) as here:
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{here}/{account}")
        with pytest.raises(PublishError, match="ignores conditional requests"):
            pushed(machine.model, container.url("models/ranker"))
    assert HEAD_FILE not in " ".join(container.keys())
