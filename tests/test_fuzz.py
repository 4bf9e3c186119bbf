"""The short form of `make fuzz`: some damaged files of every kind, the same ones each time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.fuzzing import KINDS, attempt, make_all

_EACH = 5


@pytest.mark.landing
@pytest.mark.skipif(sys.platform != "linux", reason="limits a process by what Linux says of its memory")
def test_damaged_files_end_in_named_errors(tmp_path: Path) -> None:
    made, scratch = tmp_path / "made", tmp_path / "scratch"
    made.mkdir()
    scratch.mkdir()
    make_all(made)
    outcomes = [attempt(made, scratch, kind, seed) for kind in KINDS for seed in range(_EACH)]
    assert [outcome for outcome in outcomes if not outcome.is_good] == []
