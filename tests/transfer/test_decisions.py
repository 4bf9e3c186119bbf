"""A person's decision about a model in a store goes before all who publish there."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from exporter.errors import PositionMoved, PublishError
from exporter.publish.commit import model_lock
from exporter.publish.delta_log import read_log
from exporter.storage.layout import HEAD_FILE
from exporter.storage.objects import ObjectWriter
from exporter.terminal.progress import no_progress
from exporter.transfer import carrier
from exporter.transfer.carrier import Carrier
from exporter.transfer.head import Head
from exporter.transfer.opened import opened
from exporter.transfer.pull import pull
from exporter.transfer.push import parse
from tests.support.bundles import write
from tests.support.commands import export_model
from tests.support.logs import Serving, Trainer, assert_same_bits, served_now, values_at
from tests.support.object_stores import BASE, Bucket
from tests.support.publishers import Killed, killed_at, published_to, whole
from tests.support.remote_models import incr, went_on

LOG = f"deltas/{10:020d}"


@pytest.fixture
def trainer(tmp_path: Path, url: str) -> Trainer:
    found = published_to(url, tmp_path)
    went_on(found, 40)
    return found


def head(bucket: Bucket) -> Head:
    key = f"{BASE}/{HEAD_FILE}"
    return msgspec.json.decode(bucket.keys(key)[key], type=Head)


def decider(url: str) -> Carrier:
    """Another person's process, which decides and has not published yet."""
    found = Carrier(ObjectWriter(parse(url)))
    found.decide("rollback", no_progress)
    return found


def once_uploading(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Something happens once, while a publisher uploads its first file."""
    upload, done = ObjectWriter.upload, list[str]()

    def interrupted(self: Any, key: str, *rest: Any) -> str:
        if not done and "/deltas/" in key:
            done.append(key)
            happens()
        return upload(self, key, *rest)

    monkeypatch.setattr(ObjectWriter, "upload", interrupted)


def test_who_publishes_meets_a_decision_and_says_so(trainer: Trainer, url: str, bucket: Bucket) -> None:
    other = decider(url)
    before = head(bucket)
    ran = incr(trainer, url)
    assert (ran.code, ran.error["error"]) == (5, "ModelHeld"), ran.err
    assert "export-model rollback" in ran.error["message"]
    assert head(bucket) == before
    for words in (("rollback", url, "--to", 20), ("merge", url), ("tag", url, "prod")):
        met = export_model(*words, "--dry-run", "--json")
        assert met.code == 0, met.err
        assert "export-model rollback" in met.document["meets"][0]
    other.end_decision()
    assert incr(trainer, url).code == 0


def test_a_decision_that_shows_no_life_binds_nobody(
    trainer: Trainer, url: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    decider(url)
    monkeypatch.setattr(carrier, "LEASE_SECONDS", -10.0)
    assert incr(trainer, url).code == 0
    assert head(bucket).deciding is None


def another(url: str) -> Carrier:
    """The process of another publisher, which has read the head."""
    found = Carrier(ObjectWriter(parse(url)))
    found.look()
    return found


def test_beats_of_an_upload_do_not_end_a_long_decision(
    trainer: Trainer, url: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merger may take as long as the upload beside it: both show life in one head."""
    monkeypatch.setattr(carrier, "BEAT_SECONDS", 0.1)
    person, publisher = decider(url), another(url)
    with person.beating():
        for _ in range(8):
            time.sleep(0.12)
            publisher.look()
            with suppress(PositionMoved):  # a beat of the decision came first
                publisher._replace()
    person.end_decision()
    assert head(bucket).deciding is None


def test_beats_of_an_upload_do_not_keep_a_killed_decision_alive(
    trainer: Trainer, url: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no other person could decide until the upload ends."""
    monkeypatch.setattr(carrier, "BEAT_SECONDS", 0.05)
    decider(url)
    publisher = another(url)
    monkeypatch.setattr(carrier, "LEASE_SECONDS", 0.5)
    with publisher._beating(lambda: True):
        time.sleep(1.5)
    assert head(bucket).deciding is None


def test_a_decision_that_was_taken_for_abandoned_publishes_nothing(trainer: Trainer, url: str) -> None:
    person, publisher = decider(url), another(url)
    with pytest.raises(PositionMoved, match="taken for abandoned"), person.beating():
        publisher.end_decision()


def test_a_store_that_lost_its_probe_tells_how_long_a_head_is_silent(
    trainer: Trainer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = ObjectWriter.look
    monkeypatch.setattr(ObjectWriter, "look", lambda self, key: None if ".probe" in key else look(self, key))
    assert abs(another(url)._silence()) < 60


def test_a_second_person_waits_for_the_first(
    trainer: Trainer, url: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = decider(url)
    look, looks = Carrier.look, list[None]()

    def ending(self: Carrier) -> None:
        looks.append(None)
        if len(looks) == 4:
            other.end_decision()
        look(self)

    monkeypatch.setattr(Carrier, "look", ending)
    assert export_model("rollback", url, "--to", 20).code == 0
    assert head(bucket).deciding is None
    assert len(looks) >= 4


def test_a_decision_ends_in_the_store_also_where_its_tags_cannot_be_read(
    trainer: Trainer, url: str, bucket: Bucket
) -> None:
    """Publishers met it until nobody had seen a sign of life for a minute."""
    with opened(url, deciding="tag prod") as model:

        def work() -> None:
            with model_lock(model.path):
                assert head(bucket).deciding is not None
                (model.path / "tags.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid")
                raise PublishError("the work fails")

        with pytest.raises(PublishError, match="the work fails"):
            model.carry(work)
    assert head(bucket).deciding is None


def test_a_hold_in_a_store_that_cannot_be_read_is_said_to_be_so(
    trainer: Trainer, url: str, bucket: Bucket
) -> None:
    found = replace(head(bucket), holds={f"{LOG}/hold": "soon"})
    bucket.put(f"{BASE}/{HEAD_FILE}", found.encoded())
    met = export_model("merge", url, "--dry-run", "--json").document["meets"]
    assert met == ["its hold: it cannot be read, and servers follow no delta"]


@pytest.mark.parametrize("content", [b"{}", b'{"head": "softmax"}', b"no JSON"])
def test_a_file_that_has_the_name_of_a_head_makes_no_model_of_a_checkpoint(
    tmp_path: Path, url: str, bucket: Bucket, content: bytes
) -> None:
    write(tmp_path / "train" / "model.ckpt-7")
    bucket.upload(tmp_path / "train", BASE)
    bucket.put(f"{BASE}/{HEAD_FILE}", content)
    bucket.put(f"{BASE}/12/arrays.bin", b"not a version")
    for where in (url, f"{url}/model.ckpt-7"):
        found = export_model("inspect", where, "--json")
        assert (found.code, found.document["kind"]) == (0, "checkpoint"), found.err


def test_a_damaged_head_of_a_model_is_told(trainer: Trainer, url: str, bucket: Bucket) -> None:
    bucket.put(f"{BASE}/{HEAD_FILE}", b"{}")
    found = export_model("inspect", url, "--json")
    assert (found.code, found.error["error"]) == (6, "ManifestError"), found.err


def test_a_tag_lets_an_upload_go_on(
    trainer: Trainer, url: str, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes nothing of what the upload leads on from: a large one is not made again."""

    def happens() -> None:
        met = export_model("rollback", url, "--to", 20, "--dry-run", "--json").document["meets"]
        assert "another machine is uploading" in met[0]
        assert export_model("tag", url, "prod", 20).code == 0

    once_uploading(monkeypatch, happens)
    ran = incr(trainer, url)
    assert ran.code == 0, ran.err
    assert head(bucket).given_up == {}
    assert '"prod"' in (head(bucket).tags or "")
    assert read_log(whole(url, tmp_path / "here")).at.position == 40


def test_a_rollback_abandons_an_upload_and_what_comes_then_waits_behind_it(
    trainer: Trainer, url: str, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once_uploading(monkeypatch, lambda: _done("rollback", url, "--to", 20))
    ran = incr(trainer, url)
    assert ran.code == 0, ran.err
    log = read_log(whole(url, tmp_path / "here"))
    assert log.hold.read() == 41, "40 was begun, and is abandoned"
    assert log.at.position > 41
    assert_same_bits(values_at(log), served_now(trainer, Serving()))


def test_an_upload_that_a_resumption_outdates_keeps_nobody_waiting(
    trainer: Trainer, url: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    _done("rollback", url, "--to", 20)
    once_uploading(monkeypatch, lambda: _done("resume", url, "--lift-only"))
    monkeypatch.setattr(carrier, "WAIT_SECONDS", 1.0)
    ran = incr(trainer, url)
    assert ran.code == 0, ran.err
    assert (head(bucket).uploading, head(bucket).holds) == (None, {})


def _done(*words: object) -> None:
    ran = export_model(*words, "--json")
    assert ran.code == 0, ran.err


def test_the_hold_is_there_before_the_values_are_made(
    trainer: Trainer, url: str, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed then has stopped servers; the next command goes on from there."""
    with killed_at(monkeypatch, ObjectWriter, ("upload",), 0), pytest.raises(Killed):
        export_model("rollback", url, "--to", 20)
    assert bucket.keys()[f"{BASE}/{LOG}/hold"] == b"20\n"
    pull(url, tmp_path / "copy")
    assert read_log(tmp_path / "copy").hold.read() == 20
    monkeypatch.setattr(carrier, "LEASE_SECONDS", -10.0)
    assert export_model("rollback", url, "--to", 20).code == 0
    pull(url, tmp_path / "copy")
    assert read_log(tmp_path / "copy").hold.read() == 32, "31 was begun, and is abandoned"
    assert export_model("resume", url).code == 0
    pull(url, tmp_path / "copy")
    assert read_log(tmp_path / "copy").hold.read() is None


def test_a_rollback_that_fails_leaves_neither_hold_nor_decision(
    trainer: Trainer, url: str, bucket: Bucket
) -> None:
    key = f"{BASE}/{LOG}/{20:020d}-{30:020d}/delta.data-00000-of-00001"
    content = bytearray(bucket.keys()[key])
    content[-1] ^= 1
    bucket.put(key, bytes(content))
    bucket.put(f"{BASE}/10/variables/variables.data-00000-of-00001", b"")
    ran = export_model("rollback", url, "--to", 10, "--json")
    assert ran.code not in (0, 1), ran.err
    assert not [name for name in bucket.names() if name.endswith("/hold")]
    assert (head(bucket).deciding, head(bucket).holds) == (None, {})
