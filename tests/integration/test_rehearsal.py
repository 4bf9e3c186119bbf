"""Twelve incidents of a model in a bucket: the commands that the page proposes, typed literally, end them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rehearsal import failures

# Alone it takes four minutes; beside the others of its tier, on two busy cores, it has taken fifteen.
pytestmark = [pytest.mark.landing, pytest.mark.timeout(2400)]


def test_the_commands_of_the_page_end_the_incidents(tmp_path: Path) -> None:
    assert failures(tmp_path, print) == {}
