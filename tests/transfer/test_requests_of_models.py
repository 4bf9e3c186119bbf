"""How many requests commands on a model in a store take: of many deltas, what a question needs."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.publish.model import Model
from exporter.storage.layout import HEAD_FILE, JOBS_DIRECTORY, MANIFEST_FILE, RECEIPTS_DIRECTORY
from exporter.storage.mirror import ReadAhead
from exporter.transfer.items import local_items
from exporter.transfer.opened import opened
from exporter.transfer.pull import LocalCopy, pull
from exporter.transfer.push import plan_push
from tests.support.commands import export_model
from tests.support.directory_store import BUCKET, reached
from tests.support.http_proxy import Traffic
from tests.support.logs import Trainer
from tests.support.machines import Machine, pushed
from tests.support.many_deltas import many_deltas, merged_deltas
from tests.support.remote_models import incr, went_on
from tests.support.setting import Setting

DELTAS = 60
URL = f"s3://{BUCKET}/model"


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """A model of many deltas that were merged a moment ago, where the store shows it."""
    return many_deltas(tmp_path, DELTAS)


@pytest.fixture
def traffic(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    with reached(tmp_path, monkeypatch) as found:
        yield found


def gets(traffic: Traffic) -> Counter[str]:
    """The objects that were fetched since the last time, and how often each."""
    found = Counter(path.split("?")[0] for method, path, _ in traffic.requests if method == "GET")
    traffic.requests.clear()
    return found


def test_an_export_asks_for_the_newest_manifest(trainer: Trainer, traffic: Traffic) -> None:
    """And for the base's; the deltas before it are known by their names."""
    went_on(trainer, 5010)
    ran = incr(trainer, URL)
    assert (ran.code, ran.document["position"]) == (0, 5010), ran.err
    assert len(traffic.requests) <= 24
    assert sum("deltas" in path and MANIFEST_FILE in path for path in gets(traffic)) <= 4
    ran = incr(trainer, URL)
    assert (ran.code, ran.document["status"]) == (0, "nothing_to_do")
    assert len(traffic.requests) <= 6


def test_an_export_asks_for_what_may_be_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a log that is merged as it should be: the newest few of each size."""
    trainer = merged_deltas(tmp_path, 2 * 64 + 3 * 8 + 4)
    with reached(tmp_path, monkeypatch) as traffic:
        went_on(trainer, 5010)
        ran = incr(trainer, URL)
        assert (ran.code, ran.document["position"]) == (0, 5010), ran.err
        assert sum("deltas" in path and MANIFEST_FILE in path for path in gets(traffic)) <= 16


def test_what_is_newest_is_inspected_with_few_requests(traffic: Traffic) -> None:
    assert export_model("inspect", URL, "--json").document["position"] == 5000
    assert len(traffic.requests) <= 9


def test_nothing_is_fetched_twice(traffic: Traffic) -> None:
    for command in ("history", "verify"):
        ran = export_model(command, URL, "--json")
        assert ran.code in (0, 6), ran.err  # the parts' headers tell of other positions
        found = gets(traffic)
        assert sum(MANIFEST_FILE in path for path in found) == DELTAS + 2
        again = {path for path, times in found.items() if times > 1}
        assert again <= {f"/{BUCKET}", f"/{BUCKET}/model/{HEAD_FILE}"}


def test_what_another_machine_removes_meanwhile(traffic: Traffic, tmp_path: Path) -> None:
    """It was listed, and its manifest is not there when it is read: all is looked at again."""
    first, *_ = Setting(tmp_path).deltas
    with opened(URL, read_only=True) as model:
        shutil.rmtree(first)
        found = model.carry(lambda: Model.history(model.path))
    assert len(found.publications) == DELTAS + 1
    assert first.name not in {event.path.name for event in found.publications}


def test_a_copy_asks_for_what_it_lacks(trainer: Trainer, traffic: Traffic, tmp_path: Path) -> None:
    here = tmp_path / "here"
    first = pull(URL, here)
    assert (first.position, len(first.fetched)) == (5000, DELTAS + 2)
    assert max(times for path, times in gets(traffic).items() if path != f"/{BUCKET}") == 1
    assert pull(URL, here).fetched == ()
    assert set(gets(traffic)) == {f"/{BUCKET}", f"/{BUCKET}/model/{HEAD_FILE}"}
    assert plan_push(here, URL).upload == ()
    assert set(gets(traffic)) == {f"/{BUCKET}", f"/{BUCKET}/model/{HEAD_FILE}"}


def test_a_watch_asks_for_the_head(trainer: Trainer, traffic: Traffic, tmp_path: Path) -> None:
    """Until that is another one, or has not come true yet."""
    here = tmp_path / "here"
    newest = local_items(Setting(tmp_path).model)[-1]
    manifest = Setting(tmp_path).model / newest.path / MANIFEST_FILE
    content = manifest.read_bytes()
    manifest.unlink()  # the head is replaced before the manifest can be seen
    copy = LocalCopy(URL, here)
    for _ in range(2):
        assert newest.path not in copy.update().fetched
    manifest.write_bytes(content)
    assert copy.update().fetched == (newest.path,)
    gets(traffic)
    for _ in range(3):
        assert copy.update().fetched == ()
    assert gets(traffic) == {f"/{BUCKET}/model/{HEAD_FILE}": 3}
    went_on(trainer, 5010)
    assert incr(trainer, URL).code == 0
    assert copy.update().position == 5010


def test_nobody_pages_through_the_objects_of_jobs(trainer: Trainer, traffic: Traffic, tmp_path: Path) -> None:
    """A job of many tasks may go on for days while others pull and publish."""
    job = Setting(tmp_path).model / JOBS_DIRECTORY / ("5" * 32)
    for name in ("driver", *(f"{RECEIPTS_DIRECTORY}/{number:05}.json" for number in range(1100))):
        (job / name).parent.mkdir(parents=True, exist_ok=True)
        (job / name).touch()
    pull(URL, tmp_path / "here")
    assert gets(traffic)[f"/{BUCKET}"] == 1
    went_on(trainer, 5010)
    assert incr(trainer, URL).code == 0
    assert gets(traffic)[f"/{BUCKET}"] == 2, "the model, and which jobs there are"
    assert (job / "driver").exists()


def test_a_decision_lists_the_store_once(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And reads its head before each write of which the last one may have been another machine's."""
    (tmp_path / "store").mkdir()
    most = {("rollback", "--to", 20): 39, ("resume",): 37, ("tag", "good"): 14, ("merge",): 31}
    with reached(tmp_path / "store", monkeypatch) as traffic:
        pushed(machine.model, URL)
        for (name, *options), count in most.items():
            traffic.requests.clear()
            ran = export_model(name, URL, *options, "--json")
            assert ran.code == 0, ran.err
            assert len(traffic.requests) <= count, traffic.requests
            lists = [path for _, path, _ in traffic.requests if "list-type" in path]
            assert len(lists) == 1, lists
            manifests = Counter(path for method, path, _ in traffic.requests if method == "GET")
            assert all(times == 1 for path, times in manifests.items() if MANIFEST_FILE in path)


def test_neighbours_come_with_who_reads_on() -> None:
    files = [f"log/{number:03}/manifest" for number in range(40)]
    ahead, fetched = ReadAhead(), set[str]()
    ahead.show([*files, "log/001/data", "base/manifest"])

    def fetch(name: str) -> list[str]:
        found = ahead.with_neighbours(name, fetched.__contains__, lambda other: other not in {*fetched, name})
        fetched.update(found, [name])
        return found

    assert fetch("base/manifest") == fetch(files[20]) == fetch(files[30]) == fetch(files[39]) == []
    assert fetch(files[38]) == files[37:38]
    assert fetch(files[36]) == files[35:32:-1]
    assert [len(fetch(files[number])) for number in (0, 1, 3, 7)] == [0, 1, 3, 7]
    assert fetch(files[15]) == [*files[16:20], *files[21:30], *files[31:33]]
    assert fetched == {*files, "base/manifest"}
