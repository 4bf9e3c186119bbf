"""Status pages in a real browser: fleets to show, and Chromium without a window.

`python -m tests.support.status_pages docs/assets` makes the pictures of the guide (`make pictures`).
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from serving.agent.http import Site, page, serving
from serving.agent.journal import EventKind, FleetEvent, Journal
from serving.agent.metrics import Metrics
from serving.agent.recorder import Recorder, Sample
from serving.agent.view import FleetView, ModelView, ReplicaView, VersionView

NOON = datetime(2026, 3, 2, 12, 0, tzinfo=timezone.utc)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PICTURES = {"agent-light.png": False, "agent-dark.png": True}
"""The pictures of the guide, by whether the reader's system is dark."""
_SIZE = (1180, 760)
_SECONDS = 600


def replica(address: str, *, position: int = 48_200, stale_s: float = 0.0, error: str = "") -> ReplicaView:
    behind = 0 if not stale_s else 3
    version = VersionView(
        41_000, "AVAILABLE", position, position, behind, stale_s, 0.8 + stale_s, 2.4 + stale_s, ""
    )
    return ReplicaView("ranker", address, not error, error, (version,))


def usual() -> FleetView:
    """Three replicas of one model: two are fresh, one was started anew a few minutes ago."""
    replicas = tuple(replica(f"10.0.3.{host}:8500") for host in (11, 12, 17))
    return FleetView(
        NOON, (ModelView("ranker", "/models/ranker", "", 41_000, 48_200, None, (), False, replicas),)
    )


def large(count: int) -> FleetView:
    """So many replicas, every tenth of which lags, every fiftieth of which is gone."""
    replicas = tuple(
        replica(
            f"10.1.{number // 250}.{number % 250}:8500",
            stale_s=45.0 if number % 10 == 3 else 0.0,
            error="UNAVAILABLE: connection refused" if number % 50 == 7 else "",
        )
        for number in range(count)
    )
    return FleetView(
        NOON, (ModelView("ranker", "/models/ranker", "", 41_000, 48_200, None, (), False, replicas),)
    )


def journal_of(view: FleetView) -> Journal:
    """What may have happened to it."""
    journal = Journal()
    for model in view.models:
        for number, each in enumerate(model.replicas[:3]):
            at = view.at - timedelta(seconds=3 - number)
            text = "version 41000 is at position 48200: 1 delta, 1840 rows"
            applied = FleetEvent(
                EventKind.APPLIED,
                text,
                model.name,
                each.address,
                41_000,
                48_200,
                behind_seconds=0.06 + number / 50,
            )
            journal.write(replace(applied, at=at))
    return journal


def recorded(view: FleetView) -> Recorder:
    """Ten minutes: small steps up and down, and of the last replica a time when it was away."""
    recorder = Recorder(lambda: view)
    replicas = [(model.name, each.address) for model in view.models for each in model.replicas]
    for second in range(_SECONDS):
        behind: dict[tuple[str, str], float | None] = {}
        for number, key in enumerate(replicas):
            behind[key] = 0.4 if (second + 7 * number) % 41 == 0 else 0.0
            if number == len(replicas) - 1 and 300 <= second < 420:
                behind[key] = None if second < 380 else (420 - second) / 5
        recorder.samples.append(Sample(view.at - timedelta(seconds=_SECONDS - second), behind))
    return recorder


@contextmanager
def shown(view: FleetView, journal: Journal | None = None) -> Iterator[str]:
    """The address of its page, answered by the agent's own port."""
    show = partial(page, lambda: view, recorded(view), journal or journal_of(view), 30.0)
    with serving(Site(lambda: view, Metrics(lambda: view), show, 30.0), "127.0.0.1", 0) as port:
        yield f"http://127.0.0.1:{port}/"


def chromium(address: str, *options: str, dark: bool = False) -> str:
    """What a browser without a window prints of a page."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                CHROMIUM,
                *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
                *("--hide-scrollbars", "--virtual-time-budget=1000", f"--user-data-dir={profile}"),
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                *options,
                address,
            ],
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def take_picture(address: str, file: Path, *, dark: bool, size: tuple[int, int] = _SIZE) -> None:
    """A picture of a page, as PNG."""
    chromium(address, f"--screenshot={file.absolute()}", f"--window-size={size[0]},{size[1]}", dark=dark)


def size_and_corner(png: bytes) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """A picture's width and height, and the colour of its first pixel."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, depth, kind = struct.unpack(">IIBB", png[16:26])
    assert depth == 8
    assert kind in (2, 6), "colours, not a palette"
    data, at = b"", 8
    while at < len(png):
        length, name = struct.unpack(">I4s", png[at : at + 8])
        data += png[at + 8 : at + 8 + length] if name == b"IDAT" else b""
        at += length + 12
    red, green, blue = zlib.decompress(data)[1:4]  # whatever filter a row has, its first pixel is as it is
    return (width, height), (red, green, blue)


def main(directory: Path) -> None:
    """Make the pictures of the guide."""
    with shown(usual()) as address:
        for name, dark in PICTURES.items():
            take_picture(address, directory / name, dark=dark)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
