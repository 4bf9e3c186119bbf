"""A watch that sleeps is woken by what a trainer finishes; where nobody tells, time does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from exporter.pipeline import watch_loop
from exporter.pipeline.watch_loop import Arrivals
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


def test_what_is_not_finished_does_not_wake(tmp_path: Path) -> None:
    waiting = Arrivals([tmp_path])
    waiting.sleep(0.0)
    (tmp_path / "half").write_text("not finished")
    began = time.monotonic()
    waiting.sleep(0.2)
    assert time.monotonic() - began >= 0.19


def test_without_news_it_sleeps_as_long_as_it_is_told(tmp_path: Path) -> None:
    began = time.monotonic()
    Arrivals([tmp_path, tmp_path / "not there"]).sleep(0.2)
    assert time.monotonic() - began >= 0.19


def test_where_the_kernel_cannot_be_asked_time_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_loop, "_inotify", lambda: (None, -1))
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
