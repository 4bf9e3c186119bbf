"""Files that a watch reads again and again are parsed once, and again when they were changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exporter.errors import ManifestError
from exporter.increments import history
from exporter.publish import versions
from exporter.publish.delta_log import read_log
from exporter.storage import files
from exporter.transfer import items
from tests.support.setting import Setting, followed


@pytest.fixture(autouse=True)
def all_are_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SETTLED_NS", -(10**18))


def test_manifests_and_increments_that_are_as_they_were_are_parsed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed(tmp_path, range(11, 16), published=15)
    setting = Setting(tmp_path)

    def look() -> None:
        log = read_log(setting.model)
        assert [delta.manifest.position for delta in log.deltas][-1] == 15
        assert len(history.read_history(setting.train).increments) == 5

    look()
    parsed: list[str] = []
    for module in (versions, history):
        real = module.from_json
        monkeypatch.setattr(
            module, "from_json", lambda *given, real=real: (parsed.append(str(given[-1])), real(*given))[1]
        )
    look()
    assert parsed == []
    monkeypatch.setattr(files, "SETTLED_NS", 10**18)  # whatever is new may change within a tick
    newest = setting.deltas[-1] / "manifest.json"
    os.utime(newest, ns=(1, 1))
    for _ in range(2):
        look()
    assert len(parsed) == 2, "the one that looks otherwise, each time"


def test_a_pull_parses_what_is_here_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    followed(tmp_path, range(11, 16), published=15)
    setting = Setting(tmp_path)
    before = items.local_items(setting.model)
    parsed: list[bytes] = []
    real = items.from_json
    monkeypatch.setattr(items, "from_json", lambda content: (parsed.append(content), real(content))[1])
    assert items.local_items(setting.model) == before
    assert parsed == []
    os.utime(setting.deltas[-1] / "manifest.json", ns=(1, 1))
    assert items.local_items(setting.model) == before
    assert len(parsed) == 1


def test_a_manifest_that_is_damaged_after_it_was_read_is_found(tmp_path: Path) -> None:
    followed(tmp_path, range(11, 13), published=12)
    (manifest, *_) = [delta / "manifest.json" for delta in Setting(tmp_path).deltas]
    assert versions.read_manifest(manifest.parent)
    content = manifest.read_bytes()
    manifest.chmod(0o644)
    manifest.write_bytes(content[: len(content) // 2])
    with pytest.raises(ManifestError):
        versions.read_manifest(manifest.parent)


def test_what_is_kept_in_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_KEPT_BYTES", 160)
    known: files.Unchanged[bytes] = files.Unchanged()
    reads = []
    for number in range(100):
        path = tmp_path / str(number)
        path.write_bytes(b"x" * 10)
        for _ in range(2):
            known.of(path, lambda _: reads.append(1) or b"")
    assert len(reads) == 100
    assert len(known._kept) <= 16
    large = tmp_path / "large"
    large.write_bytes(b"x" * 11)
    known.of(large, lambda _: b"")
    assert str(large) not in known._kept
