"""Another machine changes a model in a store between this one's listing and reading: it looks again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from exporter.errors import ExportError
from exporter.pipeline.incremental import ExportedDelta, export_incremental
from exporter.publish.manifest import FileEntry
from exporter.publish.versions import read_head
from exporter.storage.layout import HEAD_FILE, HOLD_FILE, MANIFEST_FILE
from exporter.storage.objects import ObjectWriter
from exporter.transfer.carrier import Carrier
from exporter.transfer.head import Head
from exporter.transfer.items import local_items
from exporter.transfer.opened import opened
from exporter.transfer.push import parse
from exporter.transfer.remote_model import RemoteModel
from exporter.transfer.same_files import StoredFiles
from tests.support.commands import export_model
from tests.support.directory_store import BUCKET, reached
from tests.support.http_proxy import Traffic
from tests.support.logs import Trainer, request
from tests.support.remote_models import went_on
from tests.support.setting import Setting, followed

URL = f"s3://{BUCKET}/model"


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """A model with deltas to 20 and 30, where the store shows it."""
    found = followed(tmp_path, (20, 30), published=30)
    newest = local_items(Setting(tmp_path).model)[-1]
    head = Head(newest.path, newest.digest, holds={})
    (Setting(tmp_path).model / HEAD_FILE).write_bytes(head.encoded())
    return found


@pytest.fixture
def traffic(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    with reached(tmp_path, monkeypatch) as found:
        yield found


class AfterListing(list[tuple[str, str, int]]):
    """Requests, and what another machine does once the first listing is made, before it is answered."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.work, self.times = work, 0

    def append(self, asked: tuple[str, str, int]) -> None:
        super().append(asked)
        if asked[0] == "GET" and "list-type" in asked[1]:
            self.times += 1
            if self.times == 1:
                self.work()


def rewrite(manifest: Path) -> None:
    """Publish the same again: another object of the same name."""
    manifest.write_bytes(manifest.read_bytes() + b"\n")


def test_a_publisher_looks_again(trainer: Trainer, traffic: Traffic, tmp_path: Path) -> None:
    """And at once: what it has listed will be no more right the second time."""
    went_on(trainer, 40)
    attempts: list[int] = []
    with opened(URL) as model:

        def work() -> object:
            if not attempts:
                rewrite(Setting(tmp_path).deltas[-1] / MANIFEST_FILE)
            attempts.append(1)
            return export_incremental(request(trainer, model.path))

        done = model.carry(work)
    assert isinstance(done, ExportedDelta)
    assert (done.at.position, len(attempts)) == (40, 2)
    assert Setting(tmp_path).deltas[-1].name.endswith("40")


@pytest.mark.parametrize(
    "command",
    [["inspect"], ["history"], ["verify"], ["doctor"], ["diff", f"{URL}@20"], ["merge", "--dry-run"]],
)
def test_whoever_reads_looks_again(traffic: Traffic, tmp_path: Path, command: list[str]) -> None:
    """Also where a damaged manifest would be passed over."""
    expected = export_model(*command, URL, "--json")
    traffic.requests = requests = AfterListing(lambda: rewrite(Setting(tmp_path).deltas[-1] / MANIFEST_FILE))
    ran = export_model(*command, URL, "--json")
    assert ran.code == expected.code, ran.err
    assert requests.times > 1


def test_a_reader_that_passes_over_what_is_gone_looks_again(traffic: Traffic, tmp_path: Path) -> None:
    attempts: list[int] = []
    with opened(URL, read_only=True) as model:

        def work() -> int:
            if not attempts:
                shutil.rmtree(Setting(tmp_path).deltas[0])
            attempts.append(1)
            found = []
            for path in model.path.glob("deltas/*/*-*"):
                with suppress(ExportError):
                    found.append(read_head(path))
            return len(found)

        assert model.carry(work) == 1
    assert len(attempts) == 2


def test_no_copy_begins_after_a_publication_is_given_up(traffic: Traffic, tmp_path: Path) -> None:
    remote = RemoteModel(URL)
    remote.refresh()
    item = local_items(remote.path)[-1]
    part = remote._store.contents()[f"{item.path}/{item.manifest.files[0].path}"]
    entries = tuple(FileEntry(f"copy-{number:03}", part.size) for number in range(200))
    for entry in entries:
        remote._mirror.stand_in(remote.path / item.path / entry.path, part)
    many = replace(item, manifest=replace(item.manifest, files=entries))
    traffic.requests.clear()
    sizes = remote._carrier._put_files(remote.path, many, StoredFiles(remote.path, remote._stored, ()))
    next(sizes)
    sizes.close()
    remote.close()
    copied = [path for method, path, _ in traffic.requests if method == "PUT"]
    assert 1 <= len(copied) < len(entries)


def test_the_holds_are_those_of_the_last_listing(traffic: Traffic, tmp_path: Path) -> None:
    """The first one showed a publication that another machine was making visible, with its hold."""
    model = Setting(tmp_path).model
    newest = local_items(model)[-1]
    waiting = model / newest.path / f"{MANIFEST_FILE}.{newest.digest[:16]}"
    waiting.write_bytes(newest.content)

    def reveal() -> None:
        waiting.unlink()
        (model / HOLD_FILE).write_text("20\n")

    carrier = Carrier(ObjectWriter(parse(URL)))
    carrier.look()
    traffic.requests = AfterListing(reveal)
    found = carrier.completed()
    assert carrier.shown == found.holds == {HOLD_FILE: b"20\n"}
