from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.guide_pages import Block, Page
from tests.support.guide_reader import Reader


@pytest.fixture(scope="module")
def follow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Block], None]]:
    """Run a block after those before it, in the directory of its page or of the one that it continues."""
    readers: dict[str, Reader] = {}

    def run(block: Block) -> None:
        first = Page(block.page).story[0]
        if first.name not in readers:
            readers[first.name] = Reader(first, tmp_path_factory.mktemp("guide"), tmp_path_factory)
        readers[first.name].follow(block)

    yield run
    for reader in readers.values():
        reader.close()
