"""SECURITY.md: each promise stands beside the rule that keeps it and the test that proves it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def rows() -> list[list[str]]:
    lines = (ROOT / "SECURITY.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_every_promise_has_a_rule_and_tests_that_are_there() -> None:
    for promise, rule, tests, _ in rows():
        assert promise and rule
        named = re.findall(r"`(tests/[^`]+)`", tests)
        assert named, promise
        for path in (*named, *re.findall(r"`((?:exporter|serving)/[^`]+)`", rule)):
            assert (ROOT / path).is_file(), path


def test_functions_that_keep_a_promise_are_there() -> None:
    named = [found for _, rule, *_ in rows() for found in re.findall(r"`(\w+)`,? in `([^`]+\.py)`", rule)]
    assert named
    for function, path in named:
        assert f"def {function}(" in (ROOT / path).read_text(), function
