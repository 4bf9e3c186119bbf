"""Tags go with a model: pushed, pulled, and set in a store; who overwrites whose."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

import exporter
from exporter.errors import ManifestError, PositionMoved
from exporter.pipeline.log_maintenance import merge
from exporter.pipeline.tagging import delete_tag, set_tag
from exporter.publish.commit import model_lock
from exporter.publish.delta_log import read_log
from exporter.publish.retention import retire_deltas
from exporter.publish.tags import LONGEST_TAGS, read_tags
from exporter.storage.layout import PUSHED_FILE
from exporter.transfer.pull import pull
from exporter.transfer.push import plan_push
from tests.support.commands import export_model
from tests.support.machines import Machine, pushed
from tests.support.object_stores import Bucket

HEAD, TAGS = "models/ranker/head.json", "models/ranker/tags.json"


def named(model: Path) -> dict[str, int]:
    return {name: tag.position for name, tag in read_tags(model).items()}


def test_a_copy_has_the_tags_of_what_was_pushed(machine: Machine, url: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    set_tag(machine.model, "good", 20)
    pushed(machine.model, url)
    pull(url, copy)
    assert named(copy) == {"good": 20}
    set_tag(machine.model, "good", 30)
    set_tag(machine.model, "old", 10)
    assert export_model("push", machine.model, url, "--json").document["status"] == "published"
    pull(url, copy)
    assert named(copy) == {"good": 30, "old": 10}
    for name in ("good", "old"):
        delete_tag(machine.model, name)
    pushed(machine.model, url)
    pull(url, copy)
    assert named(copy) == {}


def test_tags_of_a_copy_stay_until_those_of_the_store_change(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    pushed(machine.model, url)
    pull(url, copy)
    set_tag(copy, "here", 20)
    machine.go_on(40)
    pushed(machine.model, url)
    pull(url, copy)
    assert named(copy) == {"here": 20}
    set_tag(machine.model, "good", 20)
    pushed(machine.model, url)
    pull(url, copy)
    assert named(copy) == {"good": 20, "here": 20}


def test_tags_that_changed_here_and_in_the_store_are_merged_each_for_itself(
    machine: Machine, url: str
) -> None:
    for name in ("moved", "deleted", "both", "theirs"):
        set_tag(machine.model, name, 10)
    pushed(machine.model, url)
    exporter.tag(url, "both", 20)
    exporter.tag(url, "new", 20)
    exporter.untag(url, "theirs")
    set_tag(machine.model, "moved", 30)
    set_tag(machine.model, "both", 30)
    delete_tag(machine.model, "deleted")
    with pytest.raises(PositionMoved, match="another machine has changed the tags"):
        plan_push(machine.model, url)
    for _ in range(2):  # the second finds nothing new
        pull(url, machine.model)
        assert named(machine.model) == {"both": 20, "moved": 30, "new": 20}
    pushed(machine.model, url)
    assert {tag.name: tag.position for tag in exporter.tags(url)} == {"both": 20, "moved": 30, "new": 20}


def test_a_model_in_a_store_is_tagged_there(
    machine: Machine, bucket: Bucket, url: str, tmp_path: Path
) -> None:
    pushed(machine.model, url)
    before = bucket.keys()
    assert export_model("tag", url, "good", "20", "--dry-run").code == 0
    assert bucket.keys() == before
    assert exporter.tag(url, "good", "@previous", reason="it was good").tag is not None
    told = export_model("tag", url, "--json").document
    assert [(one["name"], one["position"], one["why"]) for one in told["tags"]] == [
        ("good", 20, "it was good")
    ]
    assert export_model("diff", f"{url}@good", f"{url}@20", "--exit-code").code == 0
    with pytest.raises(PositionMoved, match="another machine has changed the tags"):
        plan_push(machine.model, url)
    pull(url, machine.model)
    assert named(machine.model) == {"good": 20}
    assert exporter.rollback(url, "good").values_of.position == 20
    pull(url, tmp_path / "copy")
    assert named(tmp_path / "copy") == {"good": 20}
    assert exporter.untag(url, "good").before is not None
    assert exporter.tags(url) == ()


@pytest.mark.parametrize("is_tidied", [False, True])
def test_who_has_published_more_takes_over_the_tags_of_the_store(
    machine: Machine, url: str, is_tidied: bool
) -> None:
    """Else the push that asked for a pull would take them away; what retention removed does not come back."""
    if is_tidied:
        assert merge(machine.model) is not None
    pushed(machine.model, url)
    exporter.tag(url, "good", 30)
    machine.go_on(40)
    if is_tidied:
        assert retire_deltas(read_log(machine.model), now=2.0**40, rollback_positions=1).removed
    before = {delta.path for delta in read_log(machine.model).deltas}
    with pytest.raises(PositionMoved, match="another machine has changed the tags"):
        plan_push(machine.model, url)
    pull(url, machine.model)
    assert named(machine.model) == {"good": 30}
    assert {delta.path for delta in read_log(machine.model).deltas} == before
    set_tag(machine.model, "new", 40)
    pull(url, machine.model)
    pushed(machine.model, url)
    assert [tag.name for tag in exporter.tags(url)] == ["good", "new"]


def test_a_pull_leaves_a_publishers_tags_where_nothing_tells_what_the_store_had(
    machine: Machine, url: str
) -> None:
    set_tag(machine.model, "good", 20)
    pushed(machine.model, url)
    (machine.model / PUSHED_FILE).unlink()
    machine.go_on(40)
    set_tag(machine.model, "new", 40)
    pull(url, machine.model)
    assert named(machine.model) == {"good": 20, "new": 40}


def _point_nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


def _grow(path: Path) -> None:
    path.write_bytes(b" " * (LONGEST_TAGS + 1))


@pytest.mark.parametrize("damage", [_grow, _point_nowhere, Path.mkdir])
def test_tags_that_cannot_be_read_are_not_pushed_and_keep_no_copy_from_being_fresh(
    machine: Machine, url: str, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    copy = tmp_path / "copy"
    pushed(machine.model, url)
    pull(url, copy)
    damage(copy / "tags.json")
    machine.go_on(40)
    pushed(machine.model, url)
    pull(url, copy)
    assert read_log(copy).newest.path.name == read_log(machine.model).newest.path.name
    with pytest.raises(ManifestError, match="does not hold the model's tags"):
        read_tags(copy)
    damage(machine.model / "tags.json")
    refused = export_model("push", machine.model, url, "--json")
    assert (refused.code, refused.error["error"]) == (6, "ManifestError"), refused.err


def test_a_document_that_is_none_stays_until_the_store_has_other_tags(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    pushed(machine.model, url)
    pull(url, copy)
    for damaged in (b"", b"{}", b"x"):
        (copy / "tags.json").write_bytes(damaged)
        pull(url, copy)
        assert (copy / "tags.json").read_bytes() == damaged
    exporter.tag(url, "good", 20)
    pull(url, copy)
    assert named(copy) == {"good": 20}


def test_a_pull_waits_for_somebody_who_sets_a_tag(machine: Machine, url: str, tmp_path: Path) -> None:
    """Who sets one has read the others, and would write them over those of the store."""
    copy = tmp_path / "copy"
    pushed(machine.model, url)
    pull(url, copy)
    set_tag(machine.model, "good", 20)
    pushed(machine.model, url)
    with ThreadPoolExecutor(1) as pool:
        with model_lock(copy):
            pulling = pool.submit(pull, url, copy)
            assert not wait([pulling], 1).done
            assert named(copy) == {}
        pulling.result(60)
    assert named(copy) == {"good": 20}


def test_a_publisher_of_an_earlier_release_takes_no_tag_away(
    machine: Machine, bucket: Bucket, url: str, tmp_path: Path
) -> None:
    """It writes a head without them, and leaves what it does not know."""
    set_tag(machine.model, "good", 20)
    pushed(machine.model, url)
    head = json.loads(bucket.keys()[HEAD])
    del head["tags"]
    bucket.put(HEAD, json.dumps(head).encode())
    content = bucket.keys()[TAGS]
    pull(url, tmp_path / "copy")
    assert named(tmp_path / "copy") == {"good": 20}
    assert export_model("rollback", url, "--to", "good").code == 0
    assert bucket.keys()[TAGS] == content
    assert json.loads(bucket.keys()[HEAD])["tags"] == content.decode()
