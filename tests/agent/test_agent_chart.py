"""The chart of the last hour: what it draws of publications, samples and events, and when there is none."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

from exporter.publish.model import Model, Published
from exporter.terminal.progress import human_bytes
from serving.agent.chart import HEIGHT, WIDTH, Chart, Hour, chart
from serving.agent.http import seconds
from tests.support.commands import export_model
from tests.support.logs import Serving
from tests.support.setting import followed

NOW = datetime(2026, 3, 2, 12, tzinfo=timezone.utc)


def ago(minutes: float) -> datetime:
    return NOW - timedelta(minutes=minutes)


def published(minutes: float, position: int, rows: int | None = None, back: bool = False) -> Published:
    return Published(ago(minutes), position, None, rows, rows and rows * 100, back, position=position)


def drawn(*publications: Published, hours: tuple[Hour, ...] = ()) -> Chart:
    swaps = [(ago(15), "r1: version 2 is AVAILABLE"), (ago(90), "long ago")]
    found = chart(NOW, publications, hours, swaps, seconds, human_bytes)
    assert found is not None
    return found


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([0-9.]+) ([0-9.]+)", path)]


def test_publications_are_steps_from_edge_to_edge_and_bars() -> None:
    found = drawn(published(90, 100), published(30, 200, rows=10), published(0, 300, rows=40))
    position, behind, rows, size = found.panels
    (kind, path), *_ = position.lines
    assert kind == "published"
    line = points(path)
    assert (line[0][0], line[-1][0]) == (0, WIDTH), "what was there before, until now"
    assert line[0][1] > line[-1][1], "upwards"
    assert [x for x, _ in line].count(WIDTH / 2) == 2, "a step"
    assert (position.least, position.most) == ("100", "300")
    assert (behind.title, behind.most) == ("Behind", "1.0 s")
    assert [panel.most for panel in (rows, size)] == ["40", "3.9 KiB"]
    assert rows.lines[0][1].count("M") == 2
    assert all(0 <= y <= HEIGHT for panel in found.panels for _, path in panel.lines for _, y in points(path))


def test_a_gap_is_a_gap_and_a_level_line_has_two_points() -> None:
    level = [Hour(ago(60 - minute), 5, 5, 0.0) for minute in range(40)]
    gap = [Hour(ago(20), None, None, None)]
    after = [Hour(ago(19 - minute), 7, 9, 12.0) for minute in range(20)]
    found = drawn(hours=(*level, *gap, *after))
    (_, highest), (_, lowest) = found.panels[0].lines[1:]
    assert highest.count("M") == lowest.count("M") == 2
    assert len(points(highest)) == 4
    assert found.panels[1].most == "12.0 s"


def test_rollbacks_and_swaps_of_the_hour_are_marked() -> None:
    found = drawn(published(70, 1, back=True), published(40, 3, back=True))
    assert [(mark.kind, mark.x) for mark in found.marks] == [("rollback", WIDTH / 3), ("swap", WIDTH * 0.75)]


def test_without_anything_there_is_no_chart() -> None:
    assert chart(NOW, [published(61, 1)], [], [], seconds, human_bytes) is None


def test_rows_and_bytes_are_those_of_the_delta_and_a_rollback_is_told(tmp_path: Path) -> None:
    trainer = followed(tmp_path, serving=Serving(parts=2, cast=True), parts=3, name="ranker")
    trainer.train()
    trainer.step = 20
    trainer.increment()
    options = ["--ckpt-dir", tmp_path / "train", "--out", tmp_path / "ranker", "--incr", "--json"]
    rows = export_model(*options).document["rows"]
    assert export_model("rollback", tmp_path / "ranker", "--to", "10").code == 0
    base, delta, back = Model.read(tmp_path / "ranker").published
    assert (base.position, base.rows, base.is_rollback) == (10, None, False)
    assert (delta.position, delta.rows, delta.is_rollback) == (20, rows, False)
    assert delta.bytes_ is not None and delta.bytes_ > rows
    assert (back.position, back.is_rollback) == (21, True)
