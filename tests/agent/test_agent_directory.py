"""What the agent knows of a model's directory: current, and no more than what is there."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from exporter.publish import model as model_module
from exporter.publish.delta_log import read_log
from exporter.publish.model import Model
from exporter.publish.retention import retire_deltas
from exporter.publish.served import Served
from exporter.storage.layout import MANIFEST_FILE
from serving.agent.journal import Journal
from serving.agent.publications import FollowedModel, Publications
from serving.agent.view import _version, superseded_s
from serving.status import VersionState
from tests.support.logs import Serving, publish_base
from tests.support.setting import FIRST, Setting, followed


def test_what_was_removed_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    followed(tmp_path, range(11, 20), published=19)  # eight are merged
    model = Setting(tmp_path).model
    seen = Model.look(model)
    before = next(iter(seen.logs.values()))
    retired = retire_deltas(read_log(model), now=2.0**40, rollback_positions=1)
    assert retired.removed
    after = next(iter(Model.look(model, seen).logs.values()))
    assert {span.end for span in before.deltas} > {span.end for span in after.deltas}
    assert len(after.deltas) == len(before.deltas) - len(retired.removed)
    assert after.sizes.keys() == {*after.deltas}
    assert after.size(before.deltas) == after.size(after.deltas) > 0
    gone = min({span.end for span in before.deltas} - {span.end for span in after.deltas})
    assert after.commits[gone], "a replica may still stand there"
    monkeypatch.setattr(model_module, "_MOST_COMMITS", 2)
    monkeypatch.setattr(model_module, "_LAST_PUBLISHERS", 1)
    found = Model.look(model)
    ((_, fresh),) = found.logs.items()
    assert len(fresh.commits) <= 2
    assert 0 < len(found.known.publishers) <= 2


def test_another_model_in_the_same_place_is_read_anew(tmp_path: Path) -> None:
    """Somebody removed the model and exported again: the same names, another lineage."""
    model = Setting(tmp_path).model
    seen, lineages = Model.look(model), []
    for _ in range(2):
        followed(tmp_path, range(11, 13), published=12)
        seen = Model.look(model, seen)
        ((lineage, log),) = seen.logs.items()
        assert (seen.problem, log.newest) == ("", 12)
        assert 12 in log.commits
        lineages.append(lineage)
        for name in ("model", "train"):
            (tmp_path / name).rename(tmp_path / f"{name}-{len(lineages)}")
        seen = Model.look(model, seen)
        assert seen.problem
    assert lineages[0] != lineages[1]


def test_another_model_without_deltas_lacks_none(tmp_path: Path) -> None:
    followed(tmp_path, range(11, 13), published=12)
    seen = Model.look(Setting(tmp_path).model)
    assert not seen.problem
    for name in ("model", "train"):
        (tmp_path / name).rename(tmp_path / f"{name}-before")
    followed(tmp_path, (), published=0)
    found = Model.look(Setting(tmp_path).model, seen)
    assert not found.problem
    assert found.newest_log is not None
    assert found.newest_log.released == found.newest_log.base > found.newest_log.newest, "nothing but a base"


def test_a_version_is_as_stale_as_the_oldest_delta_that_it_lacks(tmp_path: Path) -> None:
    followed(tmp_path, range(11, 14), published=13)
    published = Model.read(Setting(tmp_path).model)
    ((lineage, log),) = published.logs.items()
    missing = log.commits[12]

    def stale_s(position: int) -> float | None:
        version = Served(FIRST, VersionState.AVAILABLE, position, position, lineage)
        return _version(version, published, missing.created + timedelta(minutes=1)).stale_s

    assert [stale_s(11), stale_s(13)] == [60.0, 0.0]


@pytest.mark.parametrize("ahead", [timedelta(minutes=20), timedelta(minutes=-20)])
def test_a_publication_is_as_old_as_it_can_be_here_whatever_its_publishers_clock_says(
    tmp_path: Path, ahead: timedelta
) -> None:
    """Where it is a copy, it may have been published long before it was fetched."""
    followed(tmp_path, range(11, 14), published=13)
    model, away = Setting(tmp_path).model, tmp_path / "away"
    (newest,) = (delta.path for delta in read_log(model).deltas if delta.end == 13 and delta.start == 12)
    newest.rename(away)
    manifest = away / MANIFEST_FILE
    text = manifest.read_text()
    (told,) = re.findall(r'"created": ?"([^"]+)"', text)
    said = datetime.now(timezone.utc) + ahead
    manifest.write_text(text.replace(told, said.isoformat().replace("+00:00", "Z")))
    followed_, copied = (
        Publications(FollowedModel("m", model, is_copy), Journal(), 60.0) for is_copy in (False, True)
    )
    before = datetime.now(timezone.utc)
    away.rename(newest)

    def seen(publications: Publications) -> datetime:
        publications.look()
        ((_, log),) = publications.current.logs.items()
        return log.commits[13].created

    assert before - timedelta(minutes=1) <= seen(followed_) <= datetime.now(timezone.utc)
    if ahead > timedelta():
        assert seen(copied) <= datetime.now(timezone.utc)
    else:
        assert seen(copied) == said


def test_a_log_that_was_begun_supersedes_versions_of_others(tmp_path: Path) -> None:
    trainer = followed(tmp_path, range(11, 13), published=12)
    model = Setting(tmp_path).model
    seen = Model.look(model)
    (old,) = seen.logs.values()
    trainer.save()
    publish_base(trainer, Serving(), model)
    found = Model.look(model, seen)
    new = found.newest_log
    assert new is not None
    assert new.lineage != old.lineage
    assert new.begun is not None
    for lineage, number, state, position, expected in (
        (old.lineage, FIRST, VersionState.AVAILABLE, 12, 60.0),
        ("of nowhere", new.base, VersionState.AVAILABLE, new.base, 60.0),
        ("", FIRST - 1, VersionState.AVAILABLE, None, 60.0),  # a plain version before
        (new.lineage, new.base, VersionState.AVAILABLE, new.base, 0.0),
        ("", new.base + 1, VersionState.AVAILABLE, None, None),  # a plain version after
        ("", new.base, VersionState.LOADING, None, None),
    ):
        version = Served(number, state, position, lineage=lineage)
        assert superseded_s(version, found, new.begun + timedelta(seconds=60)) == expected
