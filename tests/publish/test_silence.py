"""A publisher that is silent for longer than it usually is: what is usual, and who says so."""

from __future__ import annotations

import random
from datetime import datetime, timedelta, timezone
from itertools import accumulate
from pathlib import Path

import pytest

from exporter.publish.judge import Code, Habit, Level, Silence, longest_silence_s
from exporter.publish.model import Model
from serving.agent.standing import assess
from tests.support.commands import export_model
from tests.support.logs import Serving
from tests.support.setting import followed
from tests.support.status_pages import fleet, model, two

BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)


def times(*intervals: float) -> list[datetime]:
    return [BEGAN + timedelta(seconds=at) for at in accumulate(intervals, initial=0.0)]


def test_a_habit_takes_samples() -> None:
    assert longest_silence_s([]) is None
    assert longest_silence_s(times(*[300] * 7)) is None
    assert longest_silence_s(times(*[300] * 8)) == 900
    assert longest_silence_s(times(*[1] * 30)) == 60, "a second's silence is none"
    assert longest_silence_s([BEGAN] * 30) is None


def test_a_pause_is_no_habit_and_one_that_comes_again_and_again_is() -> None:
    assert longest_silence_s(times(*[300] * 30, 86_400, *[300] * 30)) == 900, "a day of maintenance"
    bursts = [*[5] * 9, 3600] * 6
    assert longest_silence_s(times(*bursts)) == 3 * 3600, "ten at once each hour"


def test_the_order_of_times_does_not_matter_and_only_the_newest_count() -> None:
    found = times(*[3600] * 50, *[60] * 70)
    random.Random(1).shuffle(found)
    assert longest_silence_s(found) == 180


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A model that is published every five minutes, by its manifests."""
    trainer = followed(tmp_path, serving=Serving(parts=2, cast=True), parts=3, name="ranker")
    for step in range(20, 120, 10):
        trainer.train()
        trainer.step = step
        trainer.increment()
        done = export_model("--ckpt-dir", tmp_path / "train", "--out", tmp_path / "ranker", "--incr")
        assert done.code == 0, done.err
    backdate(tmp_path / "ranker")
    return tmp_path / "ranker"


def backdate(model: Path) -> None:
    now = datetime.now(timezone.utc).replace(microsecond=0)
    for manifest in [*model.glob("*/manifest.json"), *model.glob("deltas/*/*/manifest.json")]:
        position = int(manifest.parent.name.rpartition("-")[2])
        created = now - timedelta(hours=2) - timedelta(seconds=30 * (120 - position))
        old = next(line for line in manifest.read_text().splitlines() if '"created"' in line)
        new = f' "created": "{created.isoformat().replace("+00:00", ".000000Z")}",'
        manifest.write_text(manifest.read_text().replace(old, new))


def test_a_silent_publisher_is_a_finding_of_page_and_doctor(published: Path) -> None:
    now = datetime.now(timezone.utc)
    found = Habit.of(Model.read(published)).silence(now)
    assert found.longest_s == pytest.approx(900)
    assert found.seconds == pytest.approx(7800 - 300, abs=60)
    assert found.is_too_long
    assert not Habit.of(Model.read(published)).silence(now, expected_s=86_400.0).is_too_long, (
        "who says so knows better"
    )

    doctor = export_model("doctor", published, "--json")
    (told,) = (each for each in doctor.document["findings"] if each["check"] == "publisher")
    assert (doctor.code, told["code"], told["level"]) == (0, "publisher-silent", "warning")
    assert told["message"] == "nothing was published for 2 h"
    assert told["command"] == f"export-model doctor {published}", "nothing says where the trainer saves"

    view = fleet(model(*two(), path=str(published), silence=found))
    (finding,) = assess(view, 30.0).findings
    assert (finding.code, finding.level) == (Code.PUBLISHER_SILENT, Level.WARNING)
    assert not assess(fleet(model(*two(), silence=Silence(10.0, 900.0))), 30.0).findings


def test_what_cannot_be_read_is_not_called_silent(published: Path) -> None:
    before = Model.read(published)
    published.rename(published.with_name("away"))
    assert Habit.of(Model.look(published, before)).silence(datetime.now(timezone.utc)) == Silence(None, None)


def test_two_machines_that_publish_in_turn_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes over from another is one."""
    trainer = followed(tmp_path, serving=Serving(parts=2, cast=True), parts=3, name="ranker")
    model, step = tmp_path / "ranker", trainer.step
    for name, found in (("ann", ()), ("ann", ()), ("bob", ()), ("ann", ("ann", "bob"))):
        trainer.train()
        trainer.step = step = step + 10
        trainer.increment()
        monkeypatch.setenv("LOGNAME", name)
        assert export_model("--ckpt-dir", tmp_path / "train", "--out", model, "--incr").code == 0
        assert tuple(each.partition("@")[0] for each in Model.read(model).publishers) == found
    codes = {each["code"]: each for each in export_model("doctor", model, "--json").document["findings"]}
    assert codes["two-publishers"]["message"].startswith("ann@")
    typed = export_model(*codes["two-publishers"]["command"].split()[1:])
    rows = [name for line in typed.out.splitlines() for name in ("ann@", "bob@") if name in line]
    assert (typed.code, rows) == (0, ["ann@", "ann@", "bob@", "ann@"])
    told = [event["publisher"] for event in export_model("history", model, "--json").document["events"]]
    assert [each.partition("@")[0] for each in told[1:]] == ["ann", "ann", "bob", "ann"]
    assert "ann@" not in export_model("history", model, "--last", 1).out, "all that is shown is one user's"


def test_silence_of_a_copy_is_that_of_its_store() -> None:
    now = datetime.now(timezone.utc)
    habit = Habit(now - timedelta(seconds=500), 300.0)
    assert habit.silence(now).is_too_long
    assert not habit.silence(now, in_store=now - timedelta(seconds=5)).is_too_long, "the copy is behind"
