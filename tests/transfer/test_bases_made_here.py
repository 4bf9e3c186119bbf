"""A copy makes a merged base of its own base and deltas: the same bytes, or it fetches what differs."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from exporter.errors import DiskFull
from exporter.jobs import runner
from exporter.options import Jobs
from exporter.pipeline import merged_base
from exporter.pipeline.rebase import rebase
from exporter.publish.delta_log import read_log
from exporter.publish.signing import Signer, Trust
from exporter.publish.versions import in_force
from exporter.storage.objects import ObjectReader
from exporter.transfer import pull as pulling
from exporter.transfer.pull import pull
from tests.support.budget import times
from tests.support.commands import export_model
from tests.support.copy_lives import PLACE, RECORDS, URL, altered, play
from tests.support.http_proxy import Traffic
from tests.support.key_pairs import key_pair
from tests.support.machines import Machine, files, pushed
from tests.support.publishers import Killed, killed_at


def of(model: Path, path: str) -> dict[str, bytes]:
    return {name: content for name, content in files(model).items() if name.startswith(f"{path}/")}


def test_nothing_of_a_merged_base_is_fetched(machine: Machine, copy: Path) -> None:
    ran = export_model("pull", URL, copy, "--json").document
    (spared,) = ran["spared"]
    assert (ran["fetched"], ran["bytes"], spared["deltas"], spared["why_fetched"]) == (["30"], 0, 2, "")
    assert files(copy) == files(machine.model)
    assert not [*copy.glob(".staging-*"), *copy.glob(".jobs/*"), *copy.glob(".pull-*")]


def test_it_is_said_how_the_base_came(copy: Path) -> None:
    ran = export_model("pull", URL, copy)
    assert "30: made here from 2 deltas: " in ran.out, ran.err
    assert " not fetched" in ran.out


def test_a_new_copy_makes_the_base_when_its_parts_have_come(
    machine: Machine, copy: Path, tmp_path: Path
) -> None:
    done = pull(URL, tmp_path / "new")
    assert [path.rpartition("-")[2] for path in done.fetched][-2:] == [f"{30:020d}", "30"]
    assert [each.why_fetched for each in done.spared] == [""]
    assert files(tmp_path / "new") == files(machine.model)


def test_a_base_of_tasks_is_divided_alike(machine: Machine, tmp_path: Path, traffic: Traffic) -> None:
    pushed(machine.model, URL)
    pull(URL, tmp_path / "copy")
    assert rebase(machine.model, jobs=Jobs(task_bytes=64)) is not None
    pushed(machine.model, URL)
    assert pull(URL, tmp_path / "copy").bytes_ == 0
    assert files(tmp_path / "copy") == files(machine.model)


PARTS = ("10/variables/*.data-*", "10/variables/*.index", "10/saved_model.pb", "10/assets/*", "deltas/*/*/*")


@pytest.mark.parametrize("is_signed", [False, True])
def test_what_a_thief_alters_here_is_not_served(
    machine: Machine, tmp_path: Path, traffic: Traffic, *, is_signed: bool
) -> None:
    private, public = key_pair(tmp_path)
    signer, trust = (Signer.of(str(private), "m"), Trust.of([public], "m")) if is_signed else (None, None)
    with in_force(machine.model, signer):
        if is_signed:
            assert rebase(machine.model) is not None  # the first that is signed
            machine.go_on(40)
        pushed(machine.model, URL)
        before = tmp_path / "before"
        pull(URL, before, trust=trust)
        assert rebase(machine.model) is not None
        pushed(machine.model, URL)
    newest = str(read_log(machine.model).base.at.position)
    first = "30" if is_signed else "10"
    fetched = []
    for number, pattern in enumerate(PARTS):
        for path in sorted(before.glob(pattern.replace("10/", f"{first}/"))):
            if path.name == "manifest.json":
                continue
            copy = tmp_path / f"copy-{number}"
            shutil.copytree(before, copy)
            altered(copy / path.relative_to(before))
            done = pull(URL, copy, trust=trust)
            assert of(copy, newest) == of(machine.model, newest), path
            fetched.append(done.bytes_)
            shutil.rmtree(copy)
    assert sum(map(bool, fetched)) > len(fetched) / 2, "but for bytes of which nothing is made"


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_that_says_something_else_brings_the_stores_bytes(
    machine: Machine, copy: Path, tmp_path: Path, record: str
) -> None:
    """Nobody has signed it: what the copy makes is compared, whatever it was made of."""
    manifest = tmp_path / "store" / PLACE / "30/manifest.json"
    document = json.loads(manifest.read_text())
    RECORDS[record](document["merged_from"])
    manifest.write_text(json.dumps(document))
    done = pull(URL, copy)
    assert of(copy, "30") == of(machine.model, "30") | {"30/manifest.json": manifest.read_bytes()}
    is_same = record in ("a delta twice", "tasks of a byte")
    assert all(each.why_fetched for each in done.spared) or is_same


def test_a_copy_that_lacks_a_delta_fetches_the_base(machine: Machine, copy: Path) -> None:
    lost = max(path for path in copy.glob("deltas/*/*") if path.is_dir())
    shutil.rmtree(lost)
    for path in (Path(str(lost).replace(str(copy), str(machine.model))),):
        shutil.rmtree(path)
    export_model("push", machine.model, URL, "--prune")
    (spared,) = pull(URL, copy).spared
    assert spared.why_fetched == f"this copy lacks {lost.relative_to(copy)}, as does the store"
    assert of(copy, "30") == of(machine.model, "30")


def test_a_pull_that_merges_is_killed_anywhere(
    machine: Machine, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, published = files(copy), files(machine.model)
    for where, names, most in (
        (merged_base, ("write_files", "merger_of", "_copy_graph", "verify_files"), 4),
        (runner.Job, ("_run",), 1),
        (pulling._MergedHere, ("give",), 5),
        (pulling._Pull, ("_publish",), 1),
    ):
        for call in range(most):
            with killed_at(monkeypatch, where, names, call), suppress(Killed):
                pull(URL, copy)
            assert files(copy).items() >= before.items()
            assert not (copy / "30").exists() or of(copy, "30") == of(machine.model, "30")
            if (copy / "30").exists():
                shutil.rmtree(copy / "30")
                (copy / ".pushed").unlink()
    pull(URL, copy)
    assert files(copy) == published


def test_a_full_disk_is_found_before_anything_is_merged(
    machine: Machine, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 100))  # type: ignore[attr-defined]
        patch.setattr(merged_base, "write_again", None)
        with pytest.raises(DiskFull):
            pull(URL, copy)
    assert pull(URL, copy).bytes_ == 0
    assert files(copy) == files(machine.model)


def test_it_is_made_without_the_store(machine: Machine, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectReader, "copy", None)
    pull(URL, copy)
    assert files(copy) == files(machine.model)


@pytest.mark.landing
@pytest.mark.parametrize("is_signed", [False, True])
def test_random_lives(tmp_path: Path, *, is_signed: bool) -> None:
    made = 0
    for seed in range(times(4)):
        made += play(tmp_path / f"life-{seed}", seed, is_signed=is_signed)
        shutil.rmtree(tmp_path / f"life-{seed}")
    assert made > 0
