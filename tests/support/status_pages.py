"""Status pages in a real browser: fleets to show, and Chromium without a window.

`python -m tests.support.status_pages docs/assets build/pictures` makes the pictures of the guide, and those
of every scene to look at, on a light, a dark and a narrow screen (`make pictures`).
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from exporter.delta.chunk_digest import Chunk
from exporter.delta.spans import Span
from exporter.publish.judge import Code, Silence
from exporter.publish.model import Published, Rollback
from serving.agent.audit import Audited
from serving.agent.chart import Hour
from serving.agent.http import Site, page, serving
from serving.agent.journal import AgentEvent, EventKind, Journal
from serving.agent.metrics import Metrics
from serving.agent.puller import Trouble
from serving.agent.rollout import Quarantined
from serving.agent.view import (
    CanaryView,
    FleetView,
    ModelView,
    Recorder,
    ReplicaView,
    Sample,
    StoreView,
    VersionView,
)

NOON = datetime(2026, 3, 2, 12, 0, tzinfo=timezone.utc)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PICTURES = {"agent-light.png": False, "agent-dark.png": True}
"""The pictures of the guide, by whether the reader's system is dark."""
_SIZE = (1180, 700)
SCREENS = {"light": ((1180, 900), False), "dark": ((1180, 900), True), "narrow": ((390, 844), False)}
"""Sizes of a scene's pictures, and whether the reader's system is dark."""
_SECONDS = 600
_NEWEST, _VERSION = 48_200, 41_000
_LONG = (
    "INVALID_ARGUMENT: delta 48100-48200: log/00000000000000041000/00000000000000048100-00000000000000048200"
    ": checksum of tensor 'user/embedding' is 0x5a1c77e2, expected 0x91ab03f4; the file was changed after it"
    " was published, or the disk returned wrong bytes; " * 3
)


def replica(address: str, *, position: int = _NEWEST, stale_s: float = 0.0, error: str = "") -> ReplicaView:
    """A replica of the model; one that lacks deltas is 300 steps behind, if `position` does not say so."""
    behind = 0 if not stale_s else 3
    position = position - 300 if stale_s and position == _NEWEST else position
    age = 0.8 + stale_s
    version = VersionView(_VERSION, "AVAILABLE", position, position, behind, stale_s, age, 1.6 + age, "", 0.0)
    return ReplicaView("ranker", address, not error, error, (version,))


def hour() -> tuple[Published, ...]:
    """A delta each minute, of which one brought earlier values back."""
    return tuple(
        Published(
            NOON - timedelta(seconds=8 + 60 * back),
            _NEWEST - 100 * back,
            None,
            1200 + 900 * (back * 7 % 11),
            400_000 + 90_000 * (back * 5 % 13),
            back == 40,
            position=_NEWEST - 100 * back,
        )
        for back in reversed(range(75))
    )


def model(*replicas: ReplicaView, **fields: Any) -> ModelView:
    """The model; `fields` replace what is usual."""
    usual = ModelView(
        "ranker",
        "/models/ranker",
        "",
        _VERSION,
        _NEWEST,
        None,
        (),
        False,
        replicas,
        published=_NEWEST,
        silence=Silence(8.0, 60.0),
        recent=hour(),
    )
    return replace(usual, **fields)


def fleet(*models: ModelView) -> FleetView:
    """The models at noon."""
    return FleetView(NOON, models)


def usual() -> FleetView:
    """Three replicas of one model: two are fresh, one restarted a few minutes ago."""
    return fleet(model(*(replica(f"10.0.3.{host}:8500") for host in (11, 12, 17))))


def large(count: int) -> FleetView:
    """So many replicas, every tenth of which lags, every fiftieth of which is gone."""
    return fleet(
        model(
            *(
                replica(
                    f"10.1.{number // 250}.{number % 250}:8500",
                    stale_s=45.0 if number % 10 == 3 else 0.0,
                    error="UNAVAILABLE: connection refused" if number % 50 == 7 else "",
                )
                for number in range(count)
            )
        )
    )


def two(**fields: Any) -> tuple[ReplicaView, ...]:
    """Two replicas."""
    return tuple(replica(f"r{number}:8500", **fields) for number in (1, 2))


def thirty(*troubled: ReplicaView) -> tuple[ReplicaView, ...]:
    """Thirty replicas: the first of them in trouble, the others fresh."""
    return (*troubled, *(replica(f"r{number}:8500") for number in range(len(troubled) + 1, 31)))


def scenes() -> dict[str, FleetView]:
    """Fleets of each size, and each incident."""
    held = {"hold": 47_900, "position": 47_900, "waiting": 3, "is_held": True}
    behind = two(position=47_900)
    first = replica("r1:8500")
    plain = replace(first.versions[0], number=40_000, position=None, step=None, behind_deltas=None)
    loading = VersionView(48_000, "LOADING", None, None, None, None, None, None, "")
    canary = CanaryView(47_900, 0.4, "r1:8500", "is judged at 48200")
    differs = Audited(_NEWEST, 1, (Chunk("table", 0, 4),))
    away = Trouble(
        Code.STORE, "the store does not answer", "s3://models/ranker/head.json was asked for", NOON
    )
    store = StoreView("s3://models/ranker", 400.0, away, (), read_by="agent@ranker-0")
    return {
        "none": fleet(model()),
        "two": fleet(model(*two())),
        "thirty": fleet(model(*thirty())),
        "thirty-one-down": fleet(model(*thirty(replica("r1:8500", error="UNAVAILABLE: connection refused")))),
        "large": large(200),
        "updating": fleet(model(first, replica("r2:8500", stale_s=0.2))),
        "late": fleet(model(*thirty(replica("r1:8500", stale_s=45.0), replica("r2:8500", stale_s=600.0)))),
        "not-updatable": fleet(model(replace(first, versions=(plain, loading)), replica("r2:8500"))),
        "refused": fleet(
            model(
                *(replace(each, error=_LONG) for each in two(stale_s=300.0)),
                quarantined=(Quarantined("x", Span(48_100, 48_200), _LONG),),
                base_wanted=True,
            )
        ),
        "all-down": fleet(model(*two(error="UNAVAILABLE: failed to connect to all addresses"))),
        "held": fleet(model(*behind, **held)),
        "rolled-back": fleet(
            model(
                *behind,
                **held,
                rollback=Rollback(47_900, 47_700, "canary: score of 'a known user' is NaN", True),
                canary=CanaryView(None, 0.0, None, "waits: the model is rolled back to the values of 47700"),
            )
        ),
        "golden": fleet(
            model(*two(), canary=CanaryView(_NEWEST, 0.0, None, "all is approved", "score is NaN"))
        ),
        "canary": fleet(
            model(first, replica("r2:8500", position=47_900), hold=47_900, waiting=1, canary=canary)
        ),
        "differs": fleet(model(replace(first, audited=differs), replica("r2:8500"))),
        "unseen": fleet(
            model(
                *two(),
                problem="/models/ranker does not exist: is its volume mounted?",
                newest_version=None,
                position=None,
                published=None,
            )
        ),
        "silent": fleet(model(*two(), silence=Silence(7500.0, 900.0))),
        "damaged": fleet(
            model(
                *(replace(each, error=_LONG) for each in two(stale_s=300.0)),
                quarantined=(Quarantined("x", Span(48_100, 48_200), _LONG, True),),
            )
        ),
        "store": fleet(model(*two(), store=store)),
        "several-models": fleet(model(*two()), replace(model(*behind, **held), name="retrieval")),
    }


def journal_of(view: FleetView) -> Journal:
    """What may have happened to it: a rollback a while ago, and three deltas that each replica took."""
    journal = Journal()
    for shown in view.models:
        if shown.rollback is not None or shown.canary is not None:
            text = "rolled back to the values of 47700: score of 'a known user' is NaN"
            rolled_back = AgentEvent(EventKind.ROLLED_BACK, text, shown.name, position=47_700)
            journal.write(replace(rolled_back, at=view.at - timedelta(hours=2)))
        for back in (2, 1, 0):
            position, at = _NEWEST - 100 * back, view.at - timedelta(seconds=3 + 10 * back)
            if shown.canary is not None:
                goes = AgentEvent(EventKind.CANARY, f"goes first, to {position}", shown.name, "r1:8500")
                journal.write(replace(goes, position=position, at=at))
                text = f"position {position} is approved: r1:8500 passed 12 golden requests"
                approved = AgentEvent(EventKind.APPROVED, text, shown.name, position=position)
                journal.write(replace(approved, at=at))
            for number, each in enumerate(shown.replicas):
                if not each.is_answering:
                    continue
                text = f"version {_VERSION} is at position {position}: 1 delta, 1840 rows"
                applied = AgentEvent(EventKind.APPLIED, text, shown.name, each.address, _VERSION, position)
                behind = 0.06 + number / 50
                counted = replace(applied, rows=1840, deltas=1, behind_seconds=behind)
                journal.write(replace(counted, at=at + timedelta(seconds=behind)))
        text = f"version {_VERSION} is AVAILABLE"
        swap = AgentEvent(EventKind.VERSION, text, shown.name, "r1:8500", _VERSION)
        journal.write(replace(swap, at=view.at - timedelta(minutes=25)))
        for each in shown.replicas:
            if each.error:
                failed = AgentEvent(EventKind.FAILED, each.error, shown.name, each.address)
                journal.write(replace(failed, at=view.at - timedelta(seconds=1)))
    return journal


def recorded(view: FleetView) -> Recorder:
    """Ten minutes: small steps up and down, and of the last replica a time when it was away."""
    recorder = Recorder(lambda: view)
    for back in reversed(range(360)):
        at = view.at - timedelta(seconds=10 * back)
        served = [one.position for one in hour() if one.created <= at - timedelta(seconds=back % 4)]
        late = max(0.0, 100.0 - abs(back - 200) * 10)
        hours = {
            each.name: Hour(at, max(served) - int(late) * 5, max(served), late or 0.3) for each in view.models
        }
        recorder.hours.append((at, hours))
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
def shown(
    fleet: FleetView, journal: Journal | None = None, *, view: Callable[[], FleetView] | None = None
) -> Iterator[str]:
    """The address of its page, answered by the agent's own port; `view` gives the fleet at each look."""
    look = view or (lambda: fleet)
    show = partial(page, look, recorded(fleet), journal or journal_of(fleet), 30.0)
    with serving(Site(look, Metrics(look), show, 30.0), "127.0.0.1", 0) as port:
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


def take_pictures(
    view: FleetView, name: str, directory: Path, screens: Iterable[str] = tuple(SCREENS)
) -> list[Path]:
    """Pictures of a scene, for some of `SCREENS`."""
    files = []
    with shown(view) as address:
        for screen in screens:
            size, dark = SCREENS[screen]
            files.append(directory / f"{name}-{screen}.png")
            take_picture(address, files[-1], dark=dark, size=size)
    return files


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


def main(directory: Path, to_look_at: Path | None = None) -> None:
    """Make the pictures of the guide, and those of all scenes."""
    with shown(usual()) as address:
        for name, dark in PICTURES.items():
            take_picture(address, directory / name, dark=dark)
    if to_look_at is not None:
        to_look_at.mkdir(parents=True, exist_ok=True)
        for name, view in scenes().items():
            take_pictures(view, name, to_look_at)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
