from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.guide_pages import Block, Page
from tests.support.guide_reader import Reader


@pytest.fixture(scope="module")
def follow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Block], None]]:
    """Run a block of a page after those that stand before it, in the page's own directory."""
    readers: dict[str, Reader] = {}

    def run(block: Block) -> None:
        if block.page not in readers:
            directory = tmp_path_factory.mktemp("guide")
            readers[block.page] = Reader(Page(block.page), directory, tmp_path_factory)
        readers[block.page].follow(block)

    yield run
    for reader in readers.values():
        reader.close()
