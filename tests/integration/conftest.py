from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.clusters import DigitsTraining, train_digits
from tests.support.family_server import FamilyServer, family_server


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> DigitsTraining:
    """A sharded checkpoint of a real cluster and what its training graph answers; trained once a test run."""
    return train_digits(tmp_path_factory)


@pytest.fixture(scope="session")
def server() -> Iterator[FamilyServer]:
    """A `serve-model run` process; one for each process of a test run."""
    with family_server() as running:
        yield running
