"""Names of positions: tags, @latest, times; and what tags keep from retention."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from threading import Thread

import pytest

import exporter
from exporter.errors import ExportError, ManifestError, PositionUnknown, UsageError
from exporter.pipeline import log_maintenance
from exporter.pipeline.rebase import rebase
from exporter.pipeline.tagging import delete_tag, set_tag
from exporter.publish.delta_log import read_log
from exporter.publish.hold import HeldBy
from exporter.publish.retention import Keep, retire, retire_deltas
from exporter.publish.tags import LONGEST_TAGS, read_tags, resolve_position, split_position, tags_of
from exporter.publish.versions import read_head, version_dirs
from tests.support.commands import export_model
from tests.support.kills import count_steps, killed_at, points
from tests.support.setting import Setting, followed

LATER = 1e12


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Published: a base at 10, deltas to 20, 30 and 40, an hour apart; the newest came an hour ago."""
    directory = tmp_path_factory.mktemp("origin")
    followed(directory, (20, 30, 40), published=40)
    setting = Setting(directory)
    for hours, path in enumerate([setting.base, *setting.deltas]):
        published(path, datetime.now(timezone.utc) - timedelta(hours=4 - hours))
    return setting.model


def published(path: Path, time: datetime) -> None:
    """Set the time at which a version or delta was published."""
    file = path / "manifest.json"
    created = json.loads(file.read_text())["created"]
    file.write_text(file.read_text().replace(created, time.isoformat().replace("+00:00", "Z")))
    assert read_head(path).created == time


@pytest.fixture
def model(origin: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(origin, tmp_path / "model"))


def test_a_tag_is_said_in_place_of_a_position_by_every_command(model: Path) -> None:
    assert export_model("tag", model, "good", 20, "--reason", "offline test").code == 0
    assert export_model("diff", f"{model}@good", f"{model}@20", "--exit-code").code == 0
    assert export_model("diff", f"{model}@good", f"{model}@latest", "--exit-code").code == 10
    merged = export_model("merge", model, "--from", "good", "--to", "@latest", "--dry-run", "--json").document
    assert (merged["from_position"], merged["position"]) == (20, 40)
    planned = export_model("rollback", model, "--to", "good", "--dry-run", "--json").document
    assert planned["values_of"] == 20
    done = export_model("rollback", model, "--to", "good", "--json").document
    assert (done["values_of"], done["position"]) == (20, 41)
    assert exporter.rollback(model, "@previous").values_of.position == 40


def test_what_is_tagged_is_told(model: Path) -> None:
    tagging = exporter.tag(model, "good", 20, reason="offline test")
    assert (tagging.tag and tagging.tag.position, tagging.before) == (20, None)
    assert exporter.tag(model, "prod").tag == read_tags(model)["prod"]
    (good, prod) = export_model("tag", model, "--json").document["tags"]
    assert (good["name"], good["position"], good["why"], good["gone"]) == ("good", 20, "offline test", "")
    assert (prod["name"], prod["position"], "@" in prod["who"]) == ("prod", 40, True)
    told = export_model("history", model, "--json").document
    assert told["tags"] == [good, prod]
    assert [event["tags"] for event in told["events"]] == [[], ["good"], [], ["prod"]]
    assert "good 20, prod 40" in export_model("history", model).out
    assert export_model("doctor", model, "--json").document["tags"] == {"good": 20, "prod": 40}


def test_a_tag_moves_and_is_deleted(model: Path) -> None:
    assert export_model("tag", model, "prod", 20, "--dry-run", "--json").document["status"] == "planned"
    assert not (model / "tags.json").exists()
    before = [export_model("tag", model, "prod", at, "--json").document for at in (20, 30, 30)]
    assert [(one["status"], one["before"]) for one in before] == [
        ("published", None),
        ("published", 20),
        ("nothing_to_do", 30),
    ]
    assert export_model("tag", model, "prod", "--delete", "--dry-run").code == 0
    assert read_tags(model)["prod"].position == 30
    deleted = exporter.untag(model, "prod")
    assert (deleted.tag, deleted.before and deleted.before.position) == (None, 30)
    assert exporter.tags(model) == ()
    refused = export_model("tag", model, "prod", "--delete", "--json")
    assert (refused.code, refused.error["error"]) == (5, "PositionUnknown")


@pytest.mark.parametrize(
    ("named", "position"),
    [
        ("20", 20),
        ("@latest", 40),
        ("@previous", 30),
        ("@30m", 40),
        ("@90m", 30),
        ("@2h", 30),
        ("@150m", 20),
        ("@0s", 40),
        ("@2999-01-01", 40),
    ],
)
def test_names_that_need_no_tag(model: Path, named: str, position: int) -> None:
    assert resolve_position(named, model) == position


def test_a_time_is_utc_unless_it_says_another_zone(model: Path) -> None:
    deltas = Setting(model.parent).deltas
    for path, hour in zip([model / "10", *deltas], (5, 6, 7, 8), strict=True):
        published(path, datetime(2026, 11, 26, hour, tzinfo=timezone.utc))
    for named, position in (
        ("@2026-11-26T07:00Z", 30),
        ("@2026-11-26T07:00", 30),
        ("@2026-11-26T06:59:59", 20),
        ("@2026-11-26T09:00+02:00", 30),
        ("@2026-11-27", 40),
    ):
        assert resolve_position(named, model) == position, named
    with pytest.raises(PositionUnknown) as caught:
        resolve_position("@2026-11-26", model)
    assert "by 2026-11-26 00:00:00 UTC" in caught.value.message
    assert "10, at 2026-11-26 05:00:00 UTC" in caught.value.cause
    log_maintenance.merge(model, 10, 30)  # a merger of now leads to 30, which was published at 7
    assert resolve_position("@2026-11-26T07:30", model) == 30


@pytest.mark.parametrize(
    ("named", "error", "said"),
    [
        ("nobody", PositionUnknown, "it has none"),
        ("2h", UsageError, "write @2h"),
        ("latest", UsageError, "write @latest"),
        ("2026-11-26T08:00", UsageError, "write @2026"),
        ("@nobody", UsageError, "expected a number, a tag"),
        ("", UsageError, "expected a number, a tag"),
        ("../x", UsageError, "expected a number, a tag"),
        ("9" * 19, UsageError, "expected a number, a tag"),
        ("9" * 5000, UsageError, "expected a number, a tag"),
        ("+5", UsageError, "expected a number, a tag"),
        ("٣", UsageError, "expected a number, a tag"),
        ("@٣h", UsageError, "expected a number, a tag"),
        ("@-1h", UsageError, "expected a number, a tag"),
        ("@20261126", UsageError, "expected a number, a tag"),
        ("@2026-W48-4", UsageError, "expected a number, a tag"),
        (f"@{'9' * 9}w", UsageError, "expected a number, a tag"),
        ("@0001-01-01T00:00+14:00", UsageError, "expected a number, a tag"),
        ("@2001-01-01", PositionUnknown, "the oldest that is left is 10"),
    ],
)
def test_what_names_no_position(model: Path, named: str, error: type[ExportError], said: str) -> None:
    with pytest.raises(error) as caught:
        resolve_position(named, model)
    told = f"{caught.value.message} {caught.value.cause} {caught.value.hint}"
    assert said in told
    assert len(told) < 500


@pytest.mark.parametrize(
    ("named", "hint"),
    [
        ("prd", "did you mean prod?"),
        ("@prod", "write prod"),
        ("@previos", "did you mean @previous?"),
        ("@x", "for example: @latest, or @2h"),
    ],
)
def test_a_slip_is_answered_with_the_name_that_is_there(model: Path, named: str, hint: str) -> None:
    set_tag(model, "prod", 20)
    with pytest.raises(ExportError) as caught:
        resolve_position(named, model)
    assert caught.value.hint == hint


def test_what_is_allowed_is_written_for_a_name_that_is_not(model: Path) -> None:
    with pytest.raises(UsageError) as caught:
        set_tag(model, "My Stable", 20)
    assert caught.value.hint == "write my-stable"
    with pytest.raises(UsageError, match="cannot be the name of a tag"):
        exporter.tag(model, 20, "prod")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected True or False"):
        exporter.tag(model, "prod", 20, dry_run="no")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected a position: a whole number, a tag"):
        exporter.rollback(model, None)  # type: ignore[arg-type]


def test_a_position_between_two_was_not_merged_away(model: Path) -> None:
    with pytest.raises(PositionUnknown) as caught:
        set_tag(model, "prod", 25)
    assert "merged away" not in caught.value.cause


@pytest.mark.parametrize(
    "name",
    [
        *("12", "@x", "latest", "2h", "Prod", "-x", ".x", "a/b", "a b", "", "x" * 65, "a\n", "../x"),
        *("1e3", "1_000", "0x1f", "+5", "٣", "²"),
    ],
)
def test_names_that_no_tag_has(model: Path, name: str) -> None:
    with pytest.raises(UsageError):
        set_tag(model, name, 20)
    assert not (model / "tags.json").exists()


def test_a_position_that_never_was_is_not_tagged(model: Path) -> None:
    with pytest.raises(PositionUnknown) as caught:
        set_tag(model, "future", 50)
    assert caught.value.cause == "nothing is published there, or no longer; there are 10, 20, 30, 40"
    assert not (model / "tags.json").exists()


def test_sides_of_a_comparison() -> None:
    assert split_position("models/ranker") is None
    assert split_position("m@900") == ("m", "900")
    assert split_position("a@b/m@prod") == ("a@b/m", "prod")
    for text in ("m@2h", "m@@2h"):
        assert split_position(text) == ("m", "@2h")
    assert split_position("m@2026-11-26T08:00Z") == ("m", "@2026-11-26T08:00Z")


def retention(model: Path) -> tuple[int, ...]:
    """Everything that nobody needs goes, long after it was published."""
    for _ in range(2):
        retire_deltas(read_log(model), now=LATER, rollback_positions=1)
    return retire(version_dirs(model), keep=Keep(1), now=LATER, grace_seconds=0).removed


def test_retention_keeps_what_leads_to_a_tagged_position(model: Path) -> None:
    set_tag(model, "good", 20)
    log_maintenance.merge(model, 10)
    rebase(model)
    assert retention(model) == ()
    kept = retire(version_dirs(model), keep=Keep(1), now=LATER, grace_seconds=0).kept
    assert [(one.version, one.reason) for one in kept] == [(10, "the tag good needs it")]
    assert not (Setting(model.parent).log / f"{20:020d}-{30:020d}").exists()
    done = log_maintenance.rollback(model, "good")
    assert (done.values_of.position, done.position) == (20, 41)


def test_a_tag_tells_that_its_position_is_gone(model: Path) -> None:
    set_tag(model, "good", 20)
    tags = (model / "tags.json").read_bytes()
    delete_tag(model, "good")
    log_maintenance.merge(model, 10)
    retention(model)
    (model / "tags.json").write_bytes(tags)
    (found,) = tags_of(model)
    assert found.gone == f"it was merged away, into {10:020d}-{40:020d}"
    refused = export_model("rollback", model, "--to", "good", "--json")
    assert (refused.code, refused.error["error"]) == (5, "PositionUnknown")
    assert "good" in refused.error["message"]
    assert "merged away" in refused.error["cause"]
    findings = export_model("doctor", model, "--json").document["findings"]
    (finding,) = [one for one in findings if one["check"] == "tags"]
    assert (finding["code"], finding["command"]) == ("tag-gone", f"export-model tag {model} good --delete")
    assert "(gone)" in export_model("history", model).out
    with pytest.raises(PositionUnknown, match="leads to position 20"):
        set_tag(model, "good", 20)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"tags": {"@x": {"position": 1, "who": "a", "when": "2026-11-26T08:00:00Z"}}}',
        b'{"tags": {"x": {"position": -1, "who": "a", "when": "2026-11-26T08:00:00Z"}}}',
        b'{"tags": {"x": {"position": 1, "who": "a", "when": "2026-11-26T08:00:00"}}}',
        b'{"tags": {}, "tags": {}}',
        b" " * (LONGEST_TAGS + 1),
        b'{"tags": {"\xff": {"position": 1, "who": "a", "when": "2026-11-26T08:00:00Z"}}}',
        b'{"tags": {"1e3": {"position": 1, "who": "a", "when": "2026-11-26T08:00:00Z"}}}',
        b'{"tags": %s}' % (b"[" * 20_000),
    ],
)
def test_a_document_of_somebody_else_is_refused_by_name_and_nothing_is_removed(
    model: Path, content: bytes
) -> None:
    log_maintenance.merge(model, 10)
    rebase(model)
    path = model / "tags.json"
    path.write_bytes(content)
    before = sorted(model.rglob("*"))
    assert not retire_deltas(read_log(model), now=LATER, rollback_positions=1).removed
    with pytest.raises(ManifestError):
        retire(version_dirs(model), keep=Keep(1), now=LATER, grace_seconds=0)
    assert sorted(model.rglob("*")) == before
    for command in (("tag", model), ("tag", model, "x"), ("rollback", model, "--to", "x")):
        refused = export_model(*command, "--json")
        assert (refused.code, refused.error["error"]) == (6, "ManifestError")
        assert str(path) in refused.error["message"]
        assert refused.error["hint"].endswith(f"rm -r {path}")
    assert export_model("history", model).code == 0
    assert export_model("rollback", model, "--to", 20).code == 0, "numbers need no tags"


def _point_nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


def _point_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def _leave_in_git_lfs(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, _point_nowhere, _point_to_itself, _leave_in_git_lfs])
def test_what_is_no_file_is_refused_and_nothing_is_removed(model: Path, make: Callable[[Path], None]) -> None:
    rebase(model)
    make(model / "tags.json")
    with pytest.raises(ManifestError, match="does not hold the model's tags"):
        read_tags(model)
    assert not retire_deltas(read_log(model), now=LATER, rollback_positions=1).removed
    with pytest.raises(ManifestError):
        retire(version_dirs(model), keep=Keep(1), now=LATER, grace_seconds=0)
    assert export_model("history", model).code == 0


def test_a_wrong_key_is_told_with_its_place(model: Path) -> None:
    (model / "tags.json").write_text('{"tags": {"../x": {}}}')
    with pytest.raises(ManifestError) as caught:
        read_tags(model)
    assert caught.value.cause.startswith("tags.json.tags: a key: expected `str` matching regex")


@pytest.mark.parametrize("when", ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59"])
def test_times_that_utc_does_not_have(model: Path, when: str) -> None:
    tag = {"position": 20, "who": "a", "when": when}
    (model / "tags.json").write_text(json.dumps({"tags": {"x": tag}}))
    assert f" {int(when[:4])}-" in export_model("tag", model).out
    moment = datetime.fromisoformat(when)
    assert f"at {moment:%Y-%m-%d}" in HeldBy(20, "a", moment).origin


def test_a_clock_that_was_wrong_hides_only_what_it_dated(model: Path) -> None:
    published(Setting(model.parent).deltas[1], datetime(2999, 1, 1, tzinfo=timezone.utc))
    assert [resolve_position(named, model) for named in ("@latest", "@0s", "@2h", "@3000-01-01")] == [
        40,
        40,
        20,
        40,
    ]


def test_there_is_nothing_before_the_only_position(tmp_path: Path) -> None:
    followed(tmp_path, (), published=10)
    with pytest.raises(PositionUnknown, match="10 is the only position"):
        resolve_position("@previous", Setting(tmp_path).model)


def test_too_many_tags_are_refused_and_those_that_are_there_stay(model: Path) -> None:
    tags = {
        f"t{number}": {"position": 20, "who": "a" * 100, "when": "2026-11-26T08:00:00Z"}
        for number in range(330)
    }
    (model / "tags.json").write_text(json.dumps({"tags": tags}))
    with pytest.raises(UsageError, match="take"):
        for number in range(200):
            set_tag(model, f"more{number}", 20, reason="x" * 1000)
    assert read_tags(model)["t0"].position == 20


def test_two_that_tag_at_once_both_do(model: Path) -> None:
    threads = [Thread(target=set_tag, args=(model, f"t{number}", 20)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(read_tags(model)) == {"t0", "t1", "t2", "t3"}


def test_versions_that_take_no_deltas(tmp_path: Path) -> None:
    golden = Path(__file__).parents[1] / "golden/0.2.1/models/plain"
    model = Path(shutil.copytree(golden, tmp_path / "model"))
    numbers = sorted(child.version for child in version_dirs(model))
    set_tag(model, "good", numbers[0])
    assert resolve_position("@latest", model) == numbers[-1]
    assert retire(version_dirs(model), keep=Keep(1), now=LATER, grace_seconds=0).removed == (*numbers[1:-1],)
    events = export_model("history", model, "--json").document["events"]
    assert events[0]["tags"] == ["good"]
    done = export_model("rollback", model, "--to", "good", "--json")
    assert (done.code, done.document["values_of"]) == (0, numbers[0]), done.err


def _tag(directory: Path) -> None:
    set_tag(directory / "model", "prod", 30)


@pytest.mark.landing
def test_a_command_that_is_killed_leaves_the_old_tags_or_the_new_ones(model: Path) -> None:
    set_tag(model, "prod", 20)
    origin = model.parent
    steps = count_steps(_tag, Path(shutil.copytree(origin, origin.with_name("counted"))))
    outcomes: dict[int, object] = {}
    for point in points(steps, 0, outcomes):
        here = Path(shutil.copytree(origin, origin.with_name(f"killed-{point}")))
        killed_at(point, _tag, here)
        outcomes[point] = read_tags(here / "model")["prod"].position
        assert outcomes[point] in (20, 30)
        _tag(here)
        assert read_tags(here / "model")["prod"].position == 30
        assert not list((here / "model").glob(".staging-*"))
        shutil.rmtree(here)
