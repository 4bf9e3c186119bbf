"""Opening files of others: nothing but a regular file, and never a wait."""

from __future__ import annotations

import errno
import os
import threading
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest

from exporter.checkpoint import open_checkpoint
from exporter.errors import CheckpointError, ManifestError, UsageError
from exporter.graph.metagraph import read_metagraph
from exporter.publish.versions import read_manifest
from exporter.storage import files
from exporter.storage.files import Unchanged, open_regular, read_given, read_regular
from exporter.storage.open_files import Window
from serving.loader import load
from serving.status import StatusError
from tests.support.bundles import write
from tests.support.commands import export_model


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello")
    (tmp_path / "b").symlink_to("a")
    assert read_regular(tmp_path / "a", 5) == read_regular(tmp_path / "b", 5) == b"hello"
    with pytest.raises(OSError, match="more than 4 bytes") as caught:
        read_regular(tmp_path / "a", 4)
    assert caught.value.errno == errno.EFBIG
    with pytest.raises(OSError) as caught:
        open_regular(tmp_path / "b", follow=False)
    assert caught.value.errno == errno.ELOOP


def test_a_limit_is_not_what_reading_takes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello")
    tracemalloc.start()
    try:
        assert read_regular(tmp_path / "a", 1 << 30) == read_given(tmp_path / "a", 1 << 30) == b"hello"
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


def test_what_comes_through_a_pipe_is_read_to_its_limit(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for limit in (3 << 20, (3 << 20) - 1):
        writer = threading.Thread(target=_write, args=(tmp_path / "pipe", bytes(3 << 20)))
        writer.start()
        if limit < 3 << 20:
            with pytest.raises(OSError, match="more than"):
                read_given(tmp_path / "pipe", limit)
        else:
            assert read_given(tmp_path / "pipe", limit) == bytes(3 << 20)
        writer.join()


def _write(path: Path, content: bytes) -> None:
    with suppress(BrokenPipeError), path.open("wb") as file:
        file.write(content)


@pytest.mark.timeout(60)
def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = len([*Path("/proc/self/fd").iterdir()]) if Path("/proc/self/fd").exists() else 0
    for path, number in (
        (tmp_path / "pipe", errno.EINVAL),
        (Path(os.devnull), errno.EINVAL),
        (tmp_path, errno.EISDIR),
    ):
        with pytest.raises(OSError) as caught:
            read_regular(path, 1 << 20)
        assert caught.value.errno == number
    assert (len([*Path("/proc/self/fd").iterdir()]) if before else 0) == before, "a descriptor stays open"


@pytest.mark.timeout(60)
def test_a_pipe_in_the_place_of_each_file_that_is_read(tmp_path: Path) -> None:
    """The state file is passed over as an unreadable one is; all others are named."""
    prefix = write(tmp_path / "ck" / "model.ckpt-7")
    os.mkfifo(tmp_path / "ck" / "checkpoint")
    assert open_checkpoint(tmp_path / "ck").prefix == prefix
    os.mkfifo(tmp_path / "model.meta")
    with pytest.raises(UsageError, match=r"model\.meta cannot be read"):
        read_metagraph(tmp_path / "model.meta")
    (tmp_path / "m" / "7").mkdir(parents=True)
    os.mkfifo(tmp_path / "m" / "7" / "manifest.json")
    with pytest.raises(ManifestError, match="cannot be opened"):
        read_manifest(tmp_path / "m" / "7")
    for name in ("a.npz", "a.keras", "a.weights.h5", "a.weights.json"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path / name)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["variables/variables.index", "manifest.json", "assets/words"])
def test_a_server_does_not_wait_for_a_pipe_in_a_version(tmp_path: Path, name: str) -> None:
    (tmp_path / "saved_model.pb").write_bytes(b"")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(StatusError, match="not a regular file"):
        load(tmp_path)


def test_a_directory_that_may_not_be_looked_into_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    is_file = Path.is_file

    def denied(path: Path) -> bool:
        if path.name.startswith("saved_model"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", denied)  # permission bits do not bind root
    prefix = write(tmp_path / "ck" / "model.ckpt-7")
    ran = export_model("--ckpt-dir", prefix, "--model", tmp_path / "m", "--out", tmp_path / "o", "--json")
    assert ran.code == 1
    assert ran.error["error"] == "Unreachable"
    assert "Permission denied" in ran.err


def test_a_window_is_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before inside behind")
    with (tmp_path / "file").open("rb") as file:
        window = Window(file.fileno(), 7, 6)
        assert (window.read(), window.read()) == (b"inside", b"")
        assert (window.seek(-2, os.SEEK_END), window.read()) == (4, b"de")
        assert (window.seek(2), window.read(2)) == (2, b"si")
        assert (window.seek(-1, os.SEEK_CUR), window.read(1)) == (3, b"i")
        assert (window.seek(9), window.read()) == (9, b"")
        assert file.tell() == 0


def test_a_file_is_read_again_if_it_changed_or_could_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read, known = tmp_path / "file", list[str](), Unchanged[str]()

    def text(place: Path) -> str:
        read.append(place.read_text())
        return read[-1]

    path.write_text("one")
    monkeypatch.setattr(files, "SETTLED_NS", 10**18)
    assert (known.of(path, text), known.of(path, text), len(read)) == ("one", "one", 2), "just written"
    monkeypatch.setattr(files, "SETTLED_NS", -(10**18))
    assert (known.of(path, text), known.of(path, text), len(read)) == ("one", "one", 3)
    path.with_name("new").write_text("two")
    path.with_name("new").replace(path)
    assert (known.of(path, text), known.of(path, text), len(read)) == ("two", "two", 4)
    monkeypatch.setattr(files, "_MOST_KEPT_BYTES", 16 * 4)
    path.write_text("large")
    assert (known.of(path, text), known.of(path, text), len(read)) == ("large", "large", 6)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        known.of(path, text)
