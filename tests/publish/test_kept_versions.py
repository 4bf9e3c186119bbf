"""`--keep N` that keeps more than N versions says which, and why."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from exporter.publish.retention import Keep, retire
from exporter.publish.versions import lease, version_dirs
from tests.support.commands import export_model
from tests.support.setting import followed
from tests.support.step_models import MODEL, save

GOLDEN = Path(__file__).parents[1] / "golden/0.1.1"
RECENT = "it was superseded less than 300 s ago"


def test_an_export_says_why_it_kept_more(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    options = ("--ckpt-dir", tmp_path / "train", "--model", f"{tmp_path / 'model.py'}:build")
    options = (*options, "--out", tmp_path / "model", "--keep", 1)
    save(tmp_path / "train", 10)
    first = export_model(*options, "--json").document
    assert first["versions_kept"] == []
    save(tmp_path / "train", 20)
    ran = export_model(*options)
    assert ran.code == 0
    assert f"version 10, too: {RECENT}" in ran.out
    save(tmp_path / "train", 30)
    with lease(tmp_path / "model" / "10"):
        third = export_model(*options, "--json").document
    assert third["versions_kept"] == [{"version": number, "reason": RECENT} for number in (10, 20)]


@pytest.mark.parametrize("as_json", [True, False])
def test_so_does_a_new_base(tmp_path: Path, as_json: bool) -> None:
    trainer, model = followed(tmp_path), tmp_path / "model"
    trainer.train()
    trainer.increment()
    assert export_model("--ckpt-dir", trainer.directory, "--out", model, "--incr", "-q").code == 0
    ran = export_model("merge", model, "--rebase", "--keep", 1, *(["--json"] if as_json else []))
    if as_json:
        assert ran.document["versions_kept"] == [{"version": 10, "reason": RECENT}]
    else:
        assert f"version 10, too: {RECENT}" in ran.out


def test_versions_of_hours_and_days_stay(tmp_path: Path) -> None:
    """Versions of every half hour for three days: of the last three hours and two days the newest stay."""
    begin = datetime(2026, 3, 1, tzinfo=timezone.utc)
    for number in range(1, 145):
        version(tmp_path / str(number), begin + timedelta(minutes=30 * (number - 1)))
    version(tmp_path / "145", None)  # nobody knows when
    version(tmp_path / "146", begin + timedelta(days=3))
    done = retire(version_dirs(tmp_path), keep=Keep(1, hourly=3, daily=2), now=2e9, grace_seconds=0)
    left = sorted(child.version for child in version_dirs(tmp_path))
    assert left == [142, 144, 145, 146]
    assert len(done.removed) == 142
    assert done.kept == ()
    assert retire(version_dirs(tmp_path), keep=Keep(1), now=2e9, grace_seconds=0).removed == (142, 144, 145)


def version(directory: Path, created: datetime | None) -> None:
    """A version with the manifest of a release, but its own time; damaged without one."""
    golden = (GOLDEN / "models/plain/10/manifest.json").read_text()
    time = f"{created:%Y-%m-%dT%H:%M:%S}.000000Z" if created else "some day"
    directory.mkdir()
    (directory / "manifest.json").write_text(golden.replace("2025-06-15T15:23:40.000000Z", time))


def test_options_of_periods_go_with_keep(tmp_path: Path) -> None:
    ran = export_model("--ckpt-dir", "t", "--out", tmp_path / "m", "--keep", "daily=7")
    assert (ran.code, "add --keep N, or leave out --keep daily" in ran.err) == (2, True)


def test_a_version_stays_if_the_next_ones_manifest_is_a_pointer_of_git_lfs(tmp_path: Path) -> None:
    """It was known to no caller which versions had gone before the error."""
    for number in (1, 2, 3):
        version(tmp_path / str(number), datetime(2026, 3, number, tzinfo=timezone.utc))
    (tmp_path / "2/manifest.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    done = retire(version_dirs(tmp_path), keep=Keep(1), now=2e9, grace_seconds=1)
    assert done.removed == (2,)
    ((kept, why),) = [(each.version, each.reason) for each in done.kept]
    assert kept == 1
    assert "when it was superseded is unknown" in why
