"""What copies merge is merged at once in tests: at idle priority it waits for all else that runs here."""

from __future__ import annotations

from exporter.jobs.engines import process

_AT_ONCE = "from exporter.jobs.engines import idle; idle._give_way = int; "
COMMAND = (
    "from tests.support.mergers import merge_at_once; merge_at_once(); from exporter.cli import main; main()"
)
"""`export-model`, for `python -c`."""


def merge_at_once() -> None:
    """Let every merger that this process starts do without idle priority."""
    if not process._MAIN.startswith(_AT_ONCE):
        process._MAIN = f"{_AT_ONCE}{process._MAIN}"
