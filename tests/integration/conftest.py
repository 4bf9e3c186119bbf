from __future__ import annotations

import pytest

from tests.clusters import DigitsTraining, train_digits


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> DigitsTraining:
    """A sharded checkpoint of a real cluster and what its training graph answers; trained once a test run."""
    return train_digits(tmp_path_factory)
