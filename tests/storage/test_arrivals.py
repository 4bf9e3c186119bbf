"""A watch that sleeps is woken by what a trainer finishes; where nobody tells, time does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from exporter.storage import arrivals
from exporter.storage.arrivals import CHANGED, Arrivals
from exporter.storage.layout import INCREMENTS_DIRECTORY

FOREVER_S = 600.0


def finish(path: Path) -> None:
    """As a trainer does: write aside, then rename."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text("x")
    aside.replace(path)


def wake(waiting: Arrivals, happening: Callable[[], object]) -> None:
    """Let it happen again and again, until the sleeper wakes."""
    thread = threading.Thread(target=waiting.sleep, args=(FOREVER_S,), daemon=True)
    thread.start()
    while thread.is_alive():
        happening()
        thread.join(0.05)


def test_what_is_renamed_into_place_wakes(tmp_path: Path) -> None:
    increments = tmp_path / INCREMENTS_DIRECTORY
    waiting = Arrivals.of_trainer(tmp_path)
    wake(waiting, lambda: finish(tmp_path / "checkpoint"))
    increments.mkdir()
    wake(waiting, lambda: finish(increments / "model.ckpt-3.json"))


def test_an_archive_that_is_written_in_place_wakes_when_it_is_closed(tmp_path: Path) -> None:
    model = tmp_path / "model.keras"
    wake(Arrivals.of_trainer(tmp_path, (".keras",)), lambda: model.write_text("whole"))
    wake(Arrivals.of_trainer(model, (".keras",)), lambda: model.write_text("whole"))
    waiting = Arrivals.of_trainer(tmp_path, (".keras",))
    waiting.sleep(0.0)
    began = time.monotonic()
    with model.open("a"):  # still open
        for name in ("model.index", ".model.keras"):
            (tmp_path / name).write_text("closed")
        waiting.sleep(0.2)
        assert time.monotonic() - began >= 0.19
    wake(waiting, lambda: finish(tmp_path / "checkpoint"))


def test_what_is_not_finished_does_not_wake(tmp_path: Path) -> None:
    waiting = Arrivals([tmp_path])
    waiting.sleep(0.0)
    (tmp_path / "half").write_text("not finished")
    began = time.monotonic()
    waiting.sleep(0.2)
    assert time.monotonic() - began >= 0.19


@pytest.mark.parametrize("goes", ["moved", "removed"])
def test_a_directory_that_goes_wakes_who_wants_all_changes(tmp_path: Path, goes: str) -> None:
    """As a volume does: nothing of what was in it is reported."""
    directory = tmp_path / "model"
    directory.mkdir()
    waiting = Arrivals([directory], CHANGED)
    waiting.sleep(0.0)
    directory.rename(tmp_path / "away") if goes == "moved" else directory.rmdir()
    began = time.monotonic()
    waiting.wait(FOREVER_S)
    assert time.monotonic() - began < FOREVER_S / 10


def test_without_news_it_sleeps_as_long_as_it_is_told(tmp_path: Path) -> None:
    began = time.monotonic()
    Arrivals([tmp_path, tmp_path / "not there"]).sleep(0.2)
    assert time.monotonic() - began >= 0.19


def test_where_the_kernel_cannot_be_asked_time_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "_inotify", lambda: (None, -1))
    began = time.monotonic()
    Arrivals([tmp_path]).sleep(0.1)
    assert time.monotonic() - began >= 0.09


def test_several_renames_of_one_save_wake_once(tmp_path: Path) -> None:
    waiting = Arrivals([tmp_path])
    waiting.sleep(0.0)
    for name in ("a", "b", "c"):
        finish(tmp_path / name)
    waiting.sleep(FOREVER_S)
    began = time.monotonic()
    waiting.sleep(0.1)
    assert time.monotonic() - began >= 0.09


def test_locks_and_what_is_staged_wake_nobody(tmp_path: Path) -> None:
    """Else each publication would have an agent list the directory several times."""
    waiting = Arrivals(kind=CHANGED)
    assert waiting.watch([tmp_path]) == ""
    began = time.monotonic()
    for name in (".lock", ".staging-1"):
        (tmp_path / name).touch()
        waiting.wait(0.1)
    (tmp_path / ".lock").unlink()
    waiting.wait(0.1)
    assert time.monotonic() - began >= 0.29


@pytest.mark.parametrize("change", ["made", "renamed away", "removed", "written"])
def test_whatever_changes_what_is_there_wakes(tmp_path: Path, change: str) -> None:
    hold = tmp_path / "hold"
    if change != "made":
        hold.touch()
    waiting = Arrivals(kind=CHANGED)
    waiting.watch([tmp_path])
    if change == "renamed away":
        hold.rename(tmp_path / ".hold")
    elif change == "removed":
        hold.unlink()
    else:
        hold.write_text("3")
    began = time.monotonic()
    waiting.wait(FOREVER_S)
    assert time.monotonic() - began < FOREVER_S / 2


def test_what_came_before_the_call_is_not_lost(tmp_path: Path) -> None:
    """An agent lists between two calls: what appears while it does has to be listed, too."""
    waiting = Arrivals(kind=CHANGED)
    waiting.watch([tmp_path])
    finish(tmp_path / "1")
    waiting.wait(FOREVER_S)
    (tmp_path / "deltas").mkdir()
    waiting.watch([tmp_path, tmp_path / "deltas"])
    waiting.wait(FOREVER_S)


def test_who_stops_does_not_wait_for_the_time(tmp_path: Path) -> None:
    stop = threading.Event()
    waiting = threading.Thread(target=Arrivals([tmp_path]).wait, args=(FOREVER_S, stop))
    waiting.start()
    stop.set()
    waiting.join(FOREVER_S / 10)
    assert not waiting.is_alive()


def test_a_limit_of_the_kernel_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Arrivals()
    assert waiting.watch([tmp_path / "not there"]) == ""
    monkeypatch.setattr(waiting, "_kind", 0)  # which the kernel refuses
    assert waiting.watch([tmp_path]) == "Invalid argument"
