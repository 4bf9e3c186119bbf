"""The speed suite's short form: it runs, its results are equal; its figures are nobody's business here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.harness import ROOT, Lab, command
from tests.benchmarks.rows import Quantity, Row, Unit, bounded, bytes_, cost, gain, seconds
from tests.support.budget import thorough


@pytest.mark.parametrize("only", ["full_export.bytes_moved", pytest.param("", marks=thorough)])
def test_benchmarks_still_run(tmp_path: Path, only: str) -> None:
    figures = tmp_path / "figures.json"
    run = [sys.executable, "-m", "tests.benchmarks", only, "--quick", "--json", figures, "--dir", tmp_path]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr
    document = json.loads(figures.read_text())
    assert (document["format_version"], document["quick"]) == (1, True)
    for row in document["rows"]:
        assert row["what"].strip().partition(",")[0] in done.stdout
        assert row["met"] in (True, False, None)
        assert row["ours"] >= 0
    assert list(tmp_path.iterdir()) == [figures]


def test_an_unknown_name_lists_those_there_are() -> None:
    run = [sys.executable, "-m", "tests.benchmarks", "no such benchmark"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "full_export.bytes_moved" in done.stdout.splitlines()


def test_a_command_that_fails_is_no_sample() -> None:
    with pytest.raises(RuntimeError, match="exit code 3\nso it goes"):
        command(sys.executable, "-c", "import sys; print('so it goes'); sys.exit(3)")


def test_turns_leave_the_first_round_out(tmp_path: Path) -> None:
    order: list[str] = []
    lab = Lab(tmp_path, quick=False, say=order.append)

    def contestant(name: str):
        def run():
            order.append(name)
            return command(sys.executable, "-c", "pass")

        return run

    found = lab.side_by_side(contestant("a"), contestant("b"), repeats=2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [len(medians.samples) for medians in found] == [2, 2]


@pytest.mark.parametrize(
    ("row", "is_met"),
    [
        (cost("a", seconds(1.3), seconds(1), at_most=1.3), True),
        (cost("a", seconds(1.4), seconds(1), at_most=1.3), False),
        (gain("a", seconds(1), seconds(100), at_least=100), True),
        (gain("a", seconds(1), seconds(99), at_least=100), False),
        (bounded("a", bytes_(0), at_most=bytes_(0)), True),
        (bounded("a", bytes_(1), at_most=bytes_(0)), False),
        (Row("a", seconds(1)), None),
    ],
)
def test_targets(row: Row, is_met: bool | None) -> None:
    assert row.is_met is is_met


@pytest.mark.parametrize(
    ("quantity", "text"),
    [
        (seconds(2.5), "2.5 s"),
        (seconds(0.0123), "12.3 ms"),
        (seconds(45e-6), "45 us"),
        (seconds(8e-9), "8 ns"),
        (bytes_(1536), "1.5 KiB"),
        (Quantity(1234.5, Unit.RATIO), "1,234 x"),
        (Quantity(0.5, Unit.RATIO), "0.5 x"),
    ],
)
def test_figures_in_the_scale_that_reads_best(quantity: Quantity, text: str) -> None:
    assert str(quantity) == text
