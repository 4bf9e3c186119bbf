"""How much chance a test takes: enough for every change, or many times that with `make thorough`."""

from __future__ import annotations

import os

import pytest

THOROUGH = "THOROUGH" in os.environ

thorough = pytest.mark.skipif(not THOROUGH, reason="a campaign of `make thorough`")
"""Marks a test whose short form every run has."""


def times(rounds: int) -> int:
    """How often to do what is left to chance, given how often every run of the tests does it."""
    return 10 * rounds if THOROUGH else rounds
