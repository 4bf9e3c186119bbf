"""A file that a copy, or the store, has already does not cross the network again; nothing else changes."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.errors import CheckpointChanged, DiskFull, ExportError, PublishError
from exporter.pipeline.log_maintenance import rollback
from exporter.publish import signing
from exporter.publish.signing import Signer, Trust, verify_digests
from exporter.publish.versions import in_force, read_manifest
from exporter.storage.objects import ObjectWriter
from exporter.transfer import same_files
from exporter.transfer.pull import pull
from exporter.transfer.push import plan_push, push
from tests.support.commands import export_model
from tests.support.directory_store import BUCKET, reached
from tests.support.http_proxy import Traffic
from tests.support.key_pairs import key_pair
from tests.support.machines import files, pushed, stored
from tests.support.object_stores import BASE, Bucket
from tests.support.publishers import Killed, killed_at
from tests.support.table_versions import publish_tables, some_tables

URL = f"s3://{BUCKET}/models/m"
SMALL = 20_000
"""More than manifests, listings and the head are together, and less than a table."""


@pytest.fixture
def traffic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    with reached(tmp_path / "store", monkeypatch) as found:
        yield found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    publish_tables(tmp_path / "one", some_tables(), step=10)
    return tmp_path / "one"


def fetched(traffic: Traffic) -> int:
    """Bytes that the store has sent since the last call."""
    found = sum(size for command, _, size in traffic.requests if command == "GET")
    traffic.requests.clear()
    return found


def one_changed(model: Path, step: int = 20, *, graph: bytes = b"a graph") -> None:
    tables = some_tables()
    tables["table3"] += 1
    publish_tables(model, tables, step=step, graph=graph)


def test_of_ten_tables_one_is_fetched(model: Path, tmp_path: Path, traffic: Traffic) -> None:
    pushed(model, URL)
    copy = tmp_path / "copy"
    pull(URL, copy)
    whole = fetched(traffic)
    one_changed(model)
    pushed(model, URL)
    fetched(traffic)
    done = pull(URL, copy)
    assert fetched(traffic) < whole * 0.25
    assert files(copy) == files(model)
    shards = sorted(path.name for path in (copy / "20/variables").glob("*.data-*"))
    shared = [
        name for name in shards if (copy / "10/variables" / name).samefile(copy / "20/variables" / name)
    ]
    assert len(shared) == 9
    size = sum(path.stat().st_size for path in (copy / "20").rglob("*") if path.is_file())
    (spared,) = done.spared
    assert (
        spared.path == "20"
        and done.bytes_ + spared.bytes_ == size - (copy / "20/manifest.json").stat().st_size
    )


def test_a_rollback_and_its_resumption_fetch_nothing(model: Path, tmp_path: Path, traffic: Traffic) -> None:
    copy = tmp_path / "copy"
    publish_tables(model, some_tables(seed=1), step=20)
    pushed(model, URL)
    pull(URL, copy)
    for command in (("rollback", model, "--to", 10), ("resume", model)):
        assert export_model(*command).code == 0
        pushed(model, URL)
        fetched(traffic)
        done = pull(URL, copy)
        assert (done.bytes_, len(done.spared)) == (0, 1)
        assert fetched(traffic) < SMALL
        assert of_version(copy, done.position) == of_version(model, done.position)


def altered(version: Path) -> None:
    """Write into files of a version, and set their times back."""
    for path in [*version.rglob("*.data-*"), version / "assets/words.txt"]:
        found, content = path.stat(), path.read_bytes()
        path.write_bytes(content[:-4] + b"evil")
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def of_version(model: Path, version: int | None) -> dict[str, bytes]:
    return {name: content for name, content in files(model).items() if name.startswith(f"{version}/")}


@pytest.mark.parametrize("is_signed", [False, True])
def test_what_was_altered_here_is_fetched(
    tmp_path: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch, *, is_signed: bool
) -> None:
    """Its digest is taken anew, whatever this process knows of a file with such times."""
    private, public = key_pair(tmp_path)
    signer, trust = (Signer.of(str(private), "m"), Trust.of([public], "m")) if is_signed else (None, None)
    model, copy = tmp_path / "one", tmp_path / "copy"
    monkeypatch.setattr(signing, "SETTLED_NS", -1)  # what is known is known at once
    with in_force(model, signer):
        publish_tables(model, some_tables(), step=10)
        one_changed(model)
        pushed(model, URL)
        pull(URL, copy, trust=trust)
        verify_digests(copy / "20", read_manifest(copy / "20").files)
        altered(copy / "10")
        evil = of_version(copy, 10)
        assert rollback(model, 10).position == 21
        pushed(model, URL)
    done = pull(URL, copy, trust=trust)
    assert done.position == 21 and done.bytes_ > 0
    assert of_version(copy, 21) == of_version(model, 21)
    assert of_version(copy, 10) == evil, "what is served is not written to"


def test_a_pull_that_links_is_killed_anywhere(
    model: Path, tmp_path: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed(model, URL)
    copy, calls = tmp_path / "copy", 0
    pull(URL, copy)
    one_changed(model, step=30)
    pushed(model, URL)
    before = files(copy)
    while True:
        with killed_at(monkeypatch, same_files, ("link_or_copy",), 1):
            try:
                pull(URL, copy)
                break
            except Killed:
                calls += 1
        assert files(copy).items() >= before.items() and not (copy / "30").exists()
        if calls % 3 == 0:
            for path in copy.glob(".pull-*/**/*.data-*"):  # what was left is nobody's word
                content = path.read_bytes()
                path.unlink()
                path.write_bytes(content[:-4] + b"evil")
    assert calls > 5 and files(copy) == files(model)


def test_where_files_cannot_be_linked_they_are_copied(
    model: Path, tmp_path: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed(model, URL)
    copy = tmp_path / "copy"
    pull(URL, copy)
    assert rollback_to_first(model) == 21
    pushed(model, URL)

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))

    monkeypatch.setattr(os, "link", refused)
    done = pull(URL, copy)
    assert done.bytes_ == 0 or done.position == 21
    assert of_version(copy, 21) == of_version(model, 21)


def rollback_to_first(model: Path) -> int:
    one_changed(model)
    return rollback(model, 10).position


def test_links_need_no_room(
    model: Path, tmp_path: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_changed(model)
    pushed(model, URL)
    copy = tmp_path / "copy"
    pull(URL, copy)
    assert rollback(model, 10).position == 21
    pushed(model, URL)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 100))  # type: ignore[attr-defined]
    assert pull(URL, copy).position == 21
    export_model("resume", model)
    one_changed(model, step=40, graph=b"g" * 200)
    pushed(model, URL)
    with pytest.raises(DiskFull):
        pull(URL, copy)


def test_a_damaged_version_lends_nothing(model: Path, tmp_path: Path, traffic: Traffic) -> None:
    pushed(model, URL)
    copy = tmp_path / "copy"
    pull(URL, copy)
    (copy / "10/variables/variables.index").write_bytes(b"not an index")
    (copy / "10/variables/variables.data-00003-of-00010").unlink()
    one_changed(model)
    pushed(model, URL)
    assert pull(URL, copy).position == 20
    assert of_version(copy, 20) == of_version(model, 20)


@pytest.fixture(params=["bucket", "gs_bucket", "container"])
def any_bucket(request: pytest.FixtureRequest) -> Bucket:
    found: Bucket = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def uploaded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each file that was uploaded."""
    upload, found = ObjectWriter.upload, list[int]()

    def counting(self: ObjectWriter, key: str, file: Path, *rest: Any) -> str:
        found.append(file.stat().st_size)
        return upload(self, key, file, *rest)

    monkeypatch.setattr(ObjectWriter, "upload", counting)
    return found


def test_of_ten_tables_one_is_uploaded(
    model: Path, tmp_path: Path, any_bucket: Bucket, uploaded: list[int]
) -> None:
    url = any_bucket.url(BASE)
    pushed(model, url)
    whole = sum(uploaded)
    uploaded.clear()
    one_changed(model)
    plan = plan_push(model, url)
    done = push(plan)
    assert sum(uploaded) == done.bytes_ == plan.bytes_ < whole * 0.11
    assert done.copied == whole - 16_000 - (model / "20/variables/variables.index").stat().st_size
    assert stored(any_bucket) == files(model)
    uploaded.clear()
    pull(url, tmp_path / "copy")
    for command in (("rollback", url, "--to", 10), ("resume", url)):
        ran = export_model(*command)
        assert (ran.code, uploaded) == (0, []), ran.err
    assert pull(url, tmp_path / "copy").bytes_ == 0
    for name, content in of_version(tmp_path / "copy", 21).items():
        if not name.endswith("manifest.json"):
            assert (model / name.replace("21/", "10/", 1)).read_bytes() == content


def test_versions_that_go_together_share_their_files(
    model: Path, bucket: Bucket, uploaded: list[int]
) -> None:
    assert rollback_to_first(model) == 21
    url = bucket.url(BASE)
    plan = plan_push(model, url)
    done = push(plan)
    sizes = {path: path.stat().st_size for path in (model / "10").rglob("*") if path.name != "manifest.json"}
    whole = sum(size for path, size in sizes.items() if path.is_file())
    assert sum(uploaded) == done.bytes_ == plan.bytes_ < whole * 1.11
    assert stored(bucket) == files(model)


def test_an_object_that_was_written_later_is_not_copied(
    model: Path, bucket: Bucket, uploaded: list[int]
) -> None:
    """Whatever it is of: the new version heals what the old one has lost."""
    url = bucket.url(BASE)
    pushed(model, url)
    time.sleep(1.1)  # stores tell seconds
    for name, content in bucket.keys(f"{BASE}/10/variables").items():
        if ".data-" in name:
            bucket.put(name, content[:-4] + b"evil")
    uploaded.clear()
    one_changed(model)
    pushed(model, url)
    assert sum(uploaded) > 10 * 16_000
    assert {
        name: content for name, content in stored(bucket).items() if name.startswith("20/")
    } == of_version(model, 20)


@pytest.mark.parametrize("error", [PublishError("it cannot copy"), CheckpointChanged("it was replaced")])
def test_a_store_that_does_not_copy_gets_the_bytes(
    model: Path, bucket: Bucket, uploaded: list[int], monkeypatch: pytest.MonkeyPatch, error: ExportError
) -> None:
    url = bucket.url(BASE)
    pushed(model, url)
    one_changed(model)
    uploaded.clear()

    def refused(*_: object) -> None:
        raise error

    monkeypatch.setattr(ObjectWriter, "duplicate", refused)
    done = push(plan_push(model, url))
    assert (sum(uploaded), done.copied) == (done.bytes_, 0)
    assert stored(bucket) == files(model)


def test_a_push_that_copies_is_killed_anywhere(
    model: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, rounds = bucket.url(BASE), 0
    pushed(model, url)
    one_changed(model)
    writes = ("upload", "duplicate", "create", "replace", "put", "copy_if_there")
    while True:
        with killed_at(monkeypatch, ObjectWriter, writes, rounds):
            try:
                pushed(model, url)
                break
            except Killed:
                rounds += 1
        done = pull(url, tmp_path / "copy")
        assert of_version(tmp_path / "copy", done.position) == of_version(model, done.position)
    found = {name: content for name, content in stored(bucket).items() if not name.startswith(".probe-")}
    assert rounds > 4 and found == files(model)
