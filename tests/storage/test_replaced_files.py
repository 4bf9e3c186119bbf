"""Files that are replaced by a rename: whole at any moment, and nothing is left of killed writers."""

from __future__ import annotations

import errno
import signal
import threading
from pathlib import Path

import pytest

from exporter.storage import files
from exporter.storage.files import replace_file, try_lock
from tests.support.kills import count_steps, killed_at


def replace_note(directory: Path, name: str) -> None:
    replace_file(directory / name, b"new" * 9000, durably=True)


@pytest.mark.parametrize(
    ("name", "anothers"), [(".pushed", ".pushed.bak"), ("models.config", "models.config.1")]
)
def test_the_next_writer_removes_what_a_killed_one_left(tmp_path: Path, name: str, anothers: str) -> None:
    others = {name, anothers, f".other{name}.7-00ff"}
    for each in others:
        (tmp_path / each).touch()
    steps, left = count_steps(replace_note, tmp_path, name), 0
    for point in range(1, steps + 1):
        replace_file(tmp_path / name, b"old")
        assert killed_at(point, replace_note, tmp_path, name) == -signal.SIGKILL
        assert (tmp_path / name).read_bytes() in (b"old", b"new" * 9000)
        left += {path.name for path in tmp_path.iterdir()} != others
        replace_file(tmp_path / name, b"next")
        assert {path.name for path in tmp_path.iterdir()} == others, f"killed at step {point}"
        assert (tmp_path / name).read_bytes() == b"next"
    assert left


def test_what_earlier_releases_left_is_removed_and_what_is_being_written_stays(tmp_path: Path) -> None:
    for old in (".note.4711", ".note.4711-4712"):
        (tmp_path / old).write_bytes(b"half")
    with (tmp_path / ".note.1-beef").open("wb") as written:
        assert try_lock(written.fileno())
        replace_file(tmp_path / "note", b"whole")
        assert {path.name for path in tmp_path.iterdir()} == {"note", ".note.1-beef"}
    replace_file(tmp_path / "note", b"whole")
    assert [*tmp_path.iterdir()] == [tmp_path / "note"]


def test_writers_at_once_do_not_stop_each_other(tmp_path: Path) -> None:
    contents, failed = [bytes([number]) * 5000 for number in range(4)], list[BaseException]()

    def write(content: bytes) -> None:
        try:
            for _ in range(100):
                replace_file(tmp_path / "note", content)
                assert (tmp_path / "note").read_bytes() in contents
        except BaseException as error:  # noqa: BLE001  the test shows it
            failed.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert [*tmp_path.iterdir()] == [tmp_path / "note"]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    replace_file(tmp_path / "note", b"old")
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "note", b"new", durably=True)
    assert [*tmp_path.iterdir()] == [tmp_path / "note"]
    assert (tmp_path / "note").read_bytes() == b"old"
