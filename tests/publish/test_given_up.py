"""What another machine gave up uploading keeps nobody from merging; what it published late stays removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.publish.delta_log import read_log
from exporter.storage.layout import HEAD_FILE
from exporter.storage.objects import ObjectWriter
from exporter.transfer.items import stored_model
from exporter.transfer.push import parse, remove_stored
from tests.support.commands import export_model
from tests.support.logs import Serving, Trainer, assert_same_bits, served_now, values_at
from tests.support.object_stores import BASE, Bucket
from tests.support.publishers import Killed, counted_writes, lose_patience, published_to, whole
from tests.support.remote_models import incr, went_on

DELTA = f"deltas/{10:020d}/{30:020d}-{40:020d}"


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    lose_patience(monkeypatch)


@pytest.fixture
def trainer(tmp_path: Path, url: str) -> Trainer:
    return published_to(url, tmp_path)


@pytest.mark.landing
@pytest.mark.parametrize("options", [("--rebase",), ()])
def test_a_merger_that_was_killed_is_made_again_with_other_bytes(
    options: tuple[str, ...],
    trainer: Trainer,
    url: str,
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ("merge", url, *options, "--json")
    shown = f"{BASE}/30/" if options else f"/{10:020d}-{30:020d}/"

    def is_uploading() -> bool:
        return any(shown in key and ".data-" in key for key in bucket.names())

    def before(calls: list[str]) -> bool:
        if is_uploading():
            raise Killed
        return True

    with counted_writes(monkeypatch, before, "duplicate"), pytest.raises(Killed):
        export_model(*command, "--engine", "task-size=64B")
    ran = export_model(*command)
    assert ran.code == 0, ran.err
    assert ran.document["position"] == 31
    log = read_log(whole(url, tmp_path / "here"))
    assert_same_bits(values_at(log), served_now(trainer, Serving()))
    assert (log.base.at.position, log.base.at.step) == ((31, 30) if options else (10, 10))
    assert not log.chain(31)
    assert not is_uploading(), "what was given up is removed"
    assert export_model(*command).document["status"] == "nothing_to_do"
    went_on(trainer, 40)
    assert incr(trainer, url).code == 0
    assert_same_bits(values_at(read_log(whole(url, tmp_path / "here"))), served_now(trainer, Serving()))
    assert export_model("merge", url, "--rebase", "--json").document["position"] == 40


@pytest.mark.parametrize("later", [0, 1])
def test_what_a_suspended_publisher_shows_late_stays_removed(
    later: int,
    trainer: Trainer,
    url: str,
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others publish, go on, and remove it: right before its manifest is shown, and right after."""
    happened = []

    def before(calls: list[str]) -> bool:
        """The head is replaced twice: to reserve, and to commit. What follows shows what is published."""
        if happened:
            return len(happened) > 1
        heads = [number for number, call in enumerate(calls, 1) if call == f"replace {BASE}/{HEAD_FILE}"]
        if len(heads) == 2 and len(calls) == heads[-1] + later:
            happened.append("begun")
            overtakes()
            happened.append("ended")
        return True

    def overtakes() -> None:
        went_on(trainer, 50)
        assert incr(trainer, url).code == 0
        assert export_model("merge", url).code == 0
        store = ObjectWriter(parse(url))
        remove_stored(store, stored_model(store), DELTA)  # as retention does, in its time
        assert not bucket.keys(f"{BASE}/{DELTA}/")

    went_on(trainer, 40)
    with counted_writes(monkeypatch, before, "copy_if_there"):
        ran = incr(trainer, url)
    assert ran.code == 0, ran.err
    assert happened == ["begun", "ended"]
    assert not bucket.keys(f"{BASE}/{DELTA}/")
    log = read_log(whole(url, tmp_path / "here"))
    assert_same_bits(values_at(log), served_now(trainer, Serving()))
