from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.guide_pages import Block, followed

FOLLOWED = [
    "docs/from/deeprec.md",
    "docs/from/estimator.md",
    "docs/from/index.md",
    "docs/from/keras.md",
    "docs/from/others.md",
    "docs/from/tables-by-keys.md",
    "docs/from/triton.md",
]


@pytest.mark.parametrize("block", followed(*FOLLOWED), ids=str)
def test_the_guide(block: Block, follow: Callable[[Block], None]) -> None:
    follow(block)
