"""What the agent knows of a model's directory: current, and no more than what is there."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest

from exporter.publish.delta_log import read_log
from exporter.publish.retention import retire_deltas
from serving.agent import directory
from serving.agent.directory import ModelDirectory
from serving.agent.publications import changes
from serving.agent.rollout import Version
from serving.agent.view import _version, superseded_s
from serving.status import VersionState
from tests.support.logs import Serving, publish_base
from tests.support.setting import FIRST, Setting, followed


def test_what_was_removed_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    followed(tmp_path, range(11, 20), published=19)  # eight are merged
    model = Setting(tmp_path).model
    known = ModelDirectory(model)
    before = next(iter(known.read().logs.values()))
    retired = retire_deltas(read_log(model), now=2.0**40, rollback_positions=1)
    assert retired.removed
    after = next(iter(known.read().logs.values()))
    assert {span.end for span in before.deltas} > {span.end for span in after.deltas}
    assert len(after.deltas) == len(before.deltas) - len(retired.removed)
    ((_, listed),) = known._deltas.items()
    assert len(listed) == len(after.deltas)
    assert known.size(before.lineage, before.deltas) == known.size(after.lineage, after.deltas) > 0
    gone = min({span.end for span in before.deltas} - {span.end for span in after.deltas})
    assert known.commit(before.lineage, gone), "a replica may still stand there"
    monkeypatch.setattr(directory, "_MOST_COMMITS", 2)
    fresh = ModelDirectory(model)
    fresh.read()
    assert len(fresh._commits) <= 2


def test_another_model_in_the_same_place_is_read_anew(tmp_path: Path) -> None:
    """Somebody removed the model and exported again: the same names, another lineage."""
    known = ModelDirectory(Setting(tmp_path).model)
    lineages, places = [], []
    for _ in range(2):
        followed(tmp_path, range(11, 13), published=12)
        listed = known.read()
        ((lineage, log),) = listed.logs.items()
        assert (listed.problem, log.newest) == ("", 12)
        assert known.commit(lineage, 12) is not None
        lineages.append(lineage)
        places.append(known.places())
        for name in ("model", "train"):
            (tmp_path / name).rename(tmp_path / f"{name}-{len(lineages)}")
        assert known.read().problem
    assert lineages[0] != lineages[1]
    assert places[0].keys() == places[1].keys()
    assert places[0] != places[1], "what watches the first directories has to watch the others now"


def test_another_model_without_deltas_lacks_none(tmp_path: Path) -> None:
    followed(tmp_path, range(11, 13), published=12)
    known = ModelDirectory(Setting(tmp_path).model)
    assert not known.read().problem
    for name in ("model", "train"):
        (tmp_path / name).rename(tmp_path / f"{name}-before")
    followed(tmp_path, (), published=0)
    found = known.read()
    assert not found.problem
    assert found.newest_log is not None
    assert found.newest_log.released == found.newest_log.base > found.newest_log.newest, "nothing but a base"


def test_a_version_is_as_stale_as_the_oldest_delta_that_it_lacks(tmp_path: Path) -> None:
    followed(tmp_path, range(11, 14), published=13)
    known = ModelDirectory(Setting(tmp_path).model)
    listed = known.read()
    ((lineage, _),) = listed.logs.items()
    published = known.commit(lineage, 12)
    assert published is not None

    def stale_s(position: int) -> float | None:
        version = Version(FIRST, VersionState.AVAILABLE, position, position, lineage)
        return _version(version, listed, known, published.created + timedelta(minutes=1)).stale_s

    assert [stale_s(11), stale_s(13)] == [60.0, 0.0]


def test_a_log_that_was_begun_supersedes_versions_of_others(tmp_path: Path) -> None:
    trainer = followed(tmp_path, range(11, 13), published=12)
    model = Setting(tmp_path).model
    known = ModelDirectory(model)
    (old,) = known.read().logs.values()
    trainer.save()
    publish_base(trainer, Serving(), model)
    found = known.read()
    new = found.newest_log
    assert new is not None
    assert new.lineage != old.lineage
    begun = known.begun(new.lineage)
    assert begun is not None
    for lineage, number, state, position, expected in (
        (old.lineage, FIRST, VersionState.AVAILABLE, 12, 60.0),
        ("of nowhere", new.base, VersionState.AVAILABLE, new.base, 60.0),
        ("", FIRST - 1, VersionState.AVAILABLE, None, 60.0),  # a plain version before
        (new.lineage, new.base, VersionState.AVAILABLE, new.base, 0.0),
        ("", new.base + 1, VersionState.AVAILABLE, None, None),  # a plain version after
        ("", new.base, VersionState.LOADING, None, None),
    ):
        version = Version(number, state, position, lineage=lineage)
        assert superseded_s(version, found, known, begun + timedelta(seconds=60)) == expected


def test_locks_and_what_is_staged_wake_nobody(tmp_path: Path) -> None:
    """Else each publication would have the directory listed several times."""
    stop, woken = threading.Event(), []

    def follow() -> None:
        told = changes([tmp_path], stop, poll_s=60.0)
        woken.extend({path.name for path in tmp_path.iterdir()} for _ in told)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        while not woken:
            stop.wait(0.01)
        stop.wait(0.3)  # until the kernel watches
        for name in (".lock", ".staging-1"):
            (tmp_path / name).touch()
            stop.wait(0.2)
        (tmp_path / "hold").touch()
        for _ in range(500):
            if len(woken) > 1:
                break
            stop.wait(0.01)
        assert ["hold" in names for names in woken] == [False, True]
    finally:
        stop.set()
        thread.join()
