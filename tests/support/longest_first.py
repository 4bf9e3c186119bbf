"""The order of test files: those that took longest begin first, so that all workers end together.

pytest-xdist hands files out as they come (with --no-loadscope-reorder); by default those of many tests go
first, and the longest have few. `durations.json` has what each file took on an idle machine, its tests of
`make test` and those of `make test-all` apart; `make durations` measures anew.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
DURATIONS = TESTS / "durations.json"
LANDING = "landing"
_SECONDS: dict[str, int] = json.loads(DURATIONS.read_text()) if DURATIONS.is_file() else {}
_LEAST_SECONDS = 1.0


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by the time that their file takes in their tier; files that nobody measured come last."""
    items.sort(key=lambda item: -_SECONDS.get(_key(item), 0))


def _key(item: pytest.Item) -> str:
    tier = f" {LANDING}" if item.get_closest_marker(LANDING) else ""
    return f"{item.path.relative_to(TESTS)}{tier}"


class Stopwatch:
    """A pytest plugin that writes `durations.json`, from the tests of one run or of both tiers' runs."""

    def __init__(self) -> None:
        self._seconds = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        tier = f" {LANDING}" if LANDING in report.keywords else ""
        self._seconds[report.nodeid.partition("::")[0].removeprefix("tests/") + tier] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if "PYTEST_XDIST_WORKER" in os.environ:
            return
        measured = {key: round(took) for key, took in self._seconds.items() if took >= _LEAST_SECONDS}
        found = {key: took for key, took in (_SECONDS | measured).items() if _is_there(key)}
        lines = ",\n".join(f"  {json.dumps(key)}: {found[key]}" for key in sorted(found))
        DURATIONS.write_text(f"{{\n{lines}\n}}\n")


def _is_there(key: str) -> bool:
    return (TESTS / key.removesuffix(f" {LANDING}")).is_file()
