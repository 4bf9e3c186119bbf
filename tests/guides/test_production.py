from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.guide_pages import Block, followed

FOLLOWED = [
    "docs/production.md",
    "docs/agent.md",
    "docs/rollback.md",
    "docs/upkeep.md",
    "docs/canary.md",
    "docs/signed-publications.md",
]


@pytest.mark.parametrize("block", followed(*FOLLOWED), ids=str)
def test_the_guide(block: Block, follow: Callable[[Block], None]) -> None:
    follow(block)
