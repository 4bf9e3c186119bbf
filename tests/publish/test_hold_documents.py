"""A hold has a document beside its number: who set it, why and when; the number alone decides."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
from pathlib import Path

import pytest

from exporter.errors import ManifestError, PublishError
from exporter.pipeline import log_maintenance
from exporter.publish.approval import approve
from exporter.publish.delta_log import read_log
from exporter.publish.hold import LONGEST_DOCUMENT, HeldAt, HeldBy, Hold
from exporter.publish.model import Model
from exporter.publish.staging import Staging
from exporter.transfer.items import local_holds
from tests.support.commands import export_model
from tests.support.key_pairs import key_pair
from tests.support.kills import count_steps, killed_at, points
from tests.support.logs import Serving, set_hold
from tests.support.setting import followed

REASON = "scores are wrong: see the dashboard"


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Published: a base at 10, deltas to 20 and 30; a canary approved 20."""
    directory = tmp_path_factory.mktemp("origin")
    followed(directory, (20, 30), published=30, serving=Serving(parts=2))
    assert approve(read_log(directory / "model").path, directory / "model", expected=None, position=20)
    return directory / "model"


@pytest.fixture
def model(origin: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(origin, tmp_path / "model"))


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"


def hold_of(model: Path) -> Hold:
    return read_log(model).hold


def test_a_canarys_number_is_written_as_any_other_and_its_document_says_what_it_is(model: Path) -> None:
    hold = hold_of(model)
    assert hold.path.read_bytes() == b"20\n"
    assert (hold.read(), hold.is_canary, hold.binds, hold.approved()) == (20, True, False, 20)
    document = json.loads(hold.path.with_name("hold.json").read_bytes())
    assert (document["position"], document["canary"], document["instead_of"]) == (20, True, None)
    assert "@" in document["who"]


def test_a_persons_reason_is_told_wherever_the_hold_is(model: Path) -> None:
    assert export_model("rollback", model, "--to", 20, "--reason", REASON).code == 0
    held = hold_of(model)
    assert held.path.read_bytes() == b"31\n"
    assert held.by is not None
    assert (held.by.position, held.by.why, held.by.canary) == (31, REASON, False)
    told = export_model("history", model, "--json").document
    assert (told["hold"], told["held_by"]["why"], told["held_by"]["who"]) == (31, REASON, held.by.who)
    shown = export_model("history", model).out
    assert f"at 31, {held.by.origin}" in shown
    assert REASON in shown
    found = export_model("doctor", model, "--json").document["findings"]
    (finding,) = [one for one in found if one["code"] == "held"]
    assert held.by.origin in finding["message"]
    assert REASON in finding.values()


@pytest.mark.parametrize("is_signed", [False, True])
def test_a_rollback_prints_the_command_that_lifts_its_hold(
    model: Path, tmp_path: Path, *, is_signed: bool
) -> None:
    key = ["--sign-key", key_pair(tmp_path)[0]] if is_signed else []
    assert "\nto lift it" not in export_model("rollback", model, "--to", 20, "--dry-run").out
    done = export_model("rollback", model, "--to", 20, *key)
    assert re.search("(?m)^hold +at 31: servers go no further until it is lifted$", done.out), done.err
    (line,) = re.findall("(?m)^to lift it +export-model (.*)", done.out)
    lifted = export_model(*shlex.split(line), "--json")
    assert lifted.document["hold"] is None or lifted.document["is_canary"], lifted.err
    assert not hold_of(model).binds


@pytest.mark.parametrize("reason", [None, "the one before, too"])
def test_a_second_rollback_says_whose_hold_it_replaces_and_why_that_was_set(
    model: Path, reason: str | None
) -> None:
    first = export_model("rollback", model, "--to", 20, "--reason", REASON, "--json").document
    assert first["replaced"] is None  # a canary's hold was no person's
    held = hold_of(model).by
    assert held is not None
    again = ("rollback", model, "--to", 10, *(["--reason", reason] if reason else []))
    planned = export_model(*again, "--dry-run")
    assert f"would replace the hold at 31, {held.origin}: {REASON}" in " ".join(planned.out.split())
    done = export_model(*again, "--json").document
    assert (done["hold"], done["replaced"]["position"], done["replaced"]["why"]) == (32, 31, REASON)
    assert f"for {REASON}" in export_model("history", model).out
    assert export_model("resume", model, "--json").document["replaced"] is None


def test_the_number_decides_and_a_document_of_another_position_is_ignored(model: Path) -> None:
    hold = hold_of(model)
    for text, is_canary in (
        ("30\n", False),  # by an earlier release, or a person with an editor
        ("000000000000000030\n", True),  # a canary's, by an earlier release
        ("000000000000000020\n", True),
        ("20\n", True),
    ):
        hold.path.write_text(text)
        assert (hold.read(), hold.is_canary, hold.binds) == (int(text), is_canary, not is_canary), text
    hold.path.write_text("30\n")
    assert hold.by is None
    assert export_model("history", model, "--json").document["held_by"] is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b'{"position": 20}',
        b'{"position": -1, "who": "a", "when": "2026-01-01T00:00:00Z"}',
        b'{"position": 20, "who": 7, "when": "2026-01-01T00:00:00Z", "canary": true}',
        b'{"position": 20, "who": "a", "when": "yesterday", "canary": true}',
        b" " * (LONGEST_DOCUMENT + 1),
        b'{"instead_of":' * 5_000,
        b"\xff\xfe",
    ],
)
def test_a_damaged_document_says_nothing_and_the_hold_binds(model: Path, text: bytes) -> None:
    hold = hold_of(model)
    hold.path.with_name("hold.json").write_bytes(text)
    assert hold.for_servers() == HeldAt(20)
    assert hold.binds
    assert export_model("history", model).code == 0


def test_a_document_that_is_a_pipe_does_not_block(model: Path) -> None:

    document = hold_of(model).path.with_name("hold.json")
    document.unlink()
    os.mkfifo(document)
    assert hold_of(model).for_servers() == HeldAt(20)


def test_a_new_field_of_a_later_release_is_ignored(model: Path) -> None:
    document = hold_of(model).path.with_name("hold.json")
    document.write_text(json.dumps(json.loads(document.read_text()) | {"colour": "red"}))
    assert hold_of(model).is_canary


def test_a_long_reason_is_cut_off_in_the_document_alone(model: Path) -> None:
    reason = "é" * 60_000
    log_maintenance.rollback(model, 20, reason=reason)
    found = Model.read(model)
    assert found.held_by is not None
    assert found.held_by.why == "é" * 997 + "..."
    assert found.publications[-1].reason == reason
    log_maintenance.rollback(model, 10, reason="\U0001f600" * 5_000)
    files = local_holds(model)
    assert all(len(content) <= LONGEST_DOCUMENT for content in files.values())
    assert hold_of(model).by is not None


def test_what_is_lifted_leaves_no_document(model: Path) -> None:
    log_maintenance.rollback(model, 20, reason=REASON)
    log_maintenance.resume(model, lift_canary=True)
    assert hold_of(model).for_servers() is None
    assert not hold_of(model).path.with_name("hold.json").exists()
    set_hold(read_log(model), 30)
    log_maintenance.resume(model)
    assert Model.read(model).hold is None


def _approve(directory: Path, model: Path) -> None:
    assert approve(read_log(model).path, model, expected=20, position=30) == 30


def _roll_back(directory: Path, model: Path) -> None:
    log_maintenance.rollback(model, 20, reason=REASON)


def _resume(directory: Path, model: Path) -> None:
    log_maintenance.resume(model, lift_only=True)


def _state(model: Path) -> tuple[int, bool, str]:
    held = hold_of(model).for_servers()
    assert held is not None, "never, not for an instant, is there no hold"
    return held.position, held.is_canary, held.by.why if held.by is not None else ""


STATES = {
    _approve: {(20, True, ""), (30, True, "")},
    # -1: the number is a link into the delta that is about to appear.
    _roll_back: {(20, True, ""), (-1, False, ""), (31, False, REASON)},
    _resume: {(31, False, REASON), (31, True, "")},
}


@pytest.mark.landing
@pytest.mark.parametrize("action", STATES, ids=lambda action: action.__name__.lstrip("_"))
def test_killed_between_the_two_files_the_hold_is_the_one_before_or_the_one_after(
    origin: Path, tmp_path: Path, action: object
) -> None:
    assert callable(action)
    before = tmp_path / "before"
    shutil.copytree(origin, before)
    if action is _resume:
        log_maintenance.rollback(before, 20, reason=REASON)
    counted = shutil.copytree(before, tmp_path / "counted")
    steps = count_steps(action, counted, counted)
    seen: dict[int, tuple[int, bool, str]] = {}
    for point in points(steps, 0, seen):
        model = shutil.copytree(before, tmp_path / f"killed-{point}", symlinks=True)
        killed_at(point, action, model, model)
        seen[point] = _state(model)
        assert seen[point] in STATES[action], point  # type: ignore[index]
        shutil.rmtree(model)
    assert len(set(seen.values())) > 1


def test_readers_never_see_a_canarys_hold_as_a_persons_while_it_moves(model: Path) -> None:
    """The number is read before the document, and may have moved meanwhile: it is looked at again."""
    hold = hold_of(model)

    class Moving(Hold, frozen=True):
        """As if the canary approved 30 right after the number was read."""

        def content(self) -> bytes | None:
            content = super().content()
            if content == b"20\n":
                approve(self.directory, model, expected=20, position=30)
                approve(self.directory, model, expected=30, position=40)
            return content

    assert Moving(hold.directory).for_servers() == HeldAt(40, True, hold.by)


def test_a_hold_that_is_put_back_after_a_failure_is_the_canarys_again(model: Path) -> None:
    hold = hold_of(model)
    before = hold.for_servers()
    with Staging(model) as staging, pytest.raises(ZeroDivisionError), hold.put_back_on_failure(staging):
        hold.put(10, staging, why=REASON)
        hold.announce(HeldBy.now(31), staging)
        raise ZeroDivisionError
    assert hold.for_servers() == before


def test_a_full_disk_leaves_the_canarys_hold_as_it_was(model: Path) -> None:
    before, limit = hold_of(model).for_servers(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, limit[1]))
    try:
        with pytest.raises(PublishError):
            approve(read_log(model).path, model, expected=20, position=30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert hold_of(model).for_servers() == before


def test_who_publishes_over_a_hold_is_told_whose_it_is(model: Path) -> None:
    log_maintenance.rollback(model, 20, reason=REASON)
    refused = export_model("merge", model, "--rebase", "--json")
    assert (refused.code, refused.error["error"]) == (5, "ModelHeld")
    assert REASON in refused.error["cause"]


def test_a_hold_that_is_a_pointer_of_git_lfs_binds_as_any_that_cannot_be_read(model: Path) -> None:
    (model / "hold").write_bytes(LFS_POINTER)
    (model / "hold.json").write_bytes(LFS_POINTER)
    hold = Hold(model)
    held = hold.for_servers()
    assert held is not None
    assert (held.position, hold.is_canary, hold.content()) == (-1, False, b"")
    with pytest.raises(ManifestError, match="expected a position"):
        hold.read()
