"""What people read: tables in a narrow terminal, parts of variables, a word where work takes long."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

import pytest

from exporter.cli.export_commands import changed
from exporter.cli.render import in_rows
from exporter.terminal import output
from exporter.terminal.output import Output, OutputMode
from tests.support.commands import Terminal, export_model

MODEL = Path(__file__).parents[1] / "golden/0.1.1/models/ranker"


def test_a_table_keeps_its_form_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = export_model("history", MODEL).out.splitlines()
    rows = [line for line in lines if re.match(r" ?\d{4}-\d\d-\d\d ", line)]
    assert len(rows) == 13
    assert all(re.match(r" ?\S+ \d\d:\d\d:\d\d +\w+ +\d+ +\d+ ", row) for row in rows), rows
    assert max(map(len, lines[lines.index(rows[0]) - 2 :])) <= 60


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("items[7 16 0,4:0,16]", "items[0:4]"),
        ("items[7 16 4,3:8,8]", "items[4:7,8:16]"),
        ("items", "items"),
        ("odd[name]", "odd[name]"),
    ],
)
def test_a_part_is_written_as_people_write_it(name: str, text: str) -> None:
    assert in_rows(name) == text
    found = export_model("diff", f"{MODEL}@30", f"{MODEL}@80").out
    assert "items[0:4]" in found
    assert "items[4:7]" in found


def test_what_changed() -> None:
    said = [changed(*each) for each in ((12, 3), (1, 1), (0, 1), (0, 2), (0, 0))]
    assert said == [
        "12 rows in 3 variables",
        "1 row in 1 variable",
        "1 variable, whole",
        "2 variables, whole",
        "no change",
    ]


def test_a_word_is_said_where_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_SILENCE_S", 0.01)
    silent = Output(stderr=Terminal())
    with silent.at_work("export-model diff"):
        until = time.monotonic() + 60
        while not silent.stderr.getvalue() and time.monotonic() < until:  # type: ignore[attr-defined]
            time.sleep(0.01)
    assert "export-model diff is at work" in silent.stderr.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "sink",
    [Output(stderr=io.StringIO()), Output(OutputMode.JSON, stderr=Terminal()), Output(OutputMode.QUIET)],
)
def test_no_word_is_said_where_nobody_reads(sink: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_SILENCE_S", 0.0)
    with sink.at_work("export-model diff"):
        time.sleep(0.05)
    assert not sink.has_spoken


def test_a_bar_has_the_units_of_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    sink = Output(stderr=Terminal())
    with sink.progress("copying", 3 << 20) as bar:
        bar.advance(3 << 20)
    assert "3.0 MiB of 3.0 MiB" in sink.stderr.getvalue()  # type: ignore[attr-defined]
