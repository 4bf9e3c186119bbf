"""Models named by the URL of an object store: every command works there, and nothing is kept locally."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.publish.delta_log import read_log
from exporter.transfer.pull import pull
from exporter.transfer.push import plan_push, push
from tests.support.commands import Ran, export_model
from tests.support.logs import Serving, Trainer, assert_same_bits, served_now, values_at
from tests.support.object_stores import Bucket
from tests.support.setting import Setting, followed

BASE = "models/ranker"


class Followed(Setting):
    """A trainer, whose base at 10 is in a store; the local model is there to compare with."""

    trainer: Trainer

    def train(self, step: int) -> None:
        self.trainer.train()
        self.trainer.step = step
        self.trainer.increment()


@pytest.fixture
def url(bucket: Bucket) -> str:
    return bucket.url(BASE)


@pytest.fixture
def followed_there(tmp_path: Path, url: str) -> Trainer:
    """A base at 10, in the store alone."""
    setting = Setting(tmp_path / "one")
    trainer = followed(setting.directory, (), published=0)
    push(plan_push(setting.model, url))
    return trainer


def went_on(trainer: Trainer, step: int) -> None:
    trainer.train()
    trainer.step = step
    trainer.increment()


def incr(trainer: Trainer, url: str, *options: object) -> Ran:
    return export_model("--ckpt-dir", trainer.directory, "--out", url, "--incr", "--json", *options)


def pulled(url: str, directory: Path) -> Path:
    """What servers would read."""
    pull(url, directory, prune=True)
    return directory


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory: no command leaves anything of a model there."""
    private = tmp_path / "private"
    private.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    yield private
    assert not [path for path in private.rglob("*") if path.is_file() and path.name != ".lock"]


def test_deltas_go_to_a_url(followed_there: Trainer, url: str, bucket: Bucket, tmp_path: Path) -> None:
    trainer = followed_there
    for step in (20, 30):
        went_on(trainer, step)
        ran = incr(trainer, url)
        assert (ran.code, ran.document["status"]) == (0, "published"), ran.err
        name = f"{step - 10:020d}-{step:020d}"
        assert ran.document["path"] == f"{url}/deltas/00000000000000000010/{name}"
    assert "private" not in ran.out + ran.err
    model = pulled(url, tmp_path / "here")
    assert_same_bits(values_at(read_log(model)), served_now(trainer, Serving()))
    assert incr(trainer, url).document["status"] == "nothing_to_do"
    found = bucket.keys()
    assert not [key for key in found if ".json." in key or ".probe" in key]


def test_versions_go_to_a_url(
    ranker: Path, ranker_graph: Path, url: str, bucket: Bucket, tmp_path: Path
) -> None:
    command = ("--ckpt-dir", ranker, "--model", ranker_graph, "--out", url, "--json")
    planned = export_model(*command, "--dry-run")
    assert (planned.code, bucket.keys()) == (0, {}), planned.err
    ran = export_model(*command)
    assert (ran.code, ran.document["path"]) == (0, f"{url}/20"), ran.err
    again = export_model(*command)
    assert (again.code, again.document["status"]) == (0, "nothing_to_do"), again.err
    ran = export_model(*command, "--again", "--keep", "1")
    assert (ran.code, ran.document["version"]) == (0, 21), ran.err
    assert ran.document["bytes_linked"] == 0
    assert [kept["version"] for kept in ran.document["versions_kept"]] == [20]  # servers may be loading it
    assert export_model("verify", url, "--bytes").code == 0
    assert {path.name for path in pulled(url, tmp_path / "here").iterdir()} >= {"20", "21"}
    refused = export_model(*command, "--again", "--data", "link")
    assert (refused.code, refused.error["error"]) == (2, "UsageError")
