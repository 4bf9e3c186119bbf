"""`make fuzz`: thousands of damaged files of every kind, and none ends in a hang or a nameless error.

pytest does not collect this by itself; the short form is in `test_fuzz`. FUZZ_ATTEMPTS and FUZZ_SEED change
how long it takes, and the damage; a seed that failed is run again by FUZZ_SEED=that FUZZ_ATTEMPTS=1.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.support.fuzzing import DOCUMENTS, KINDS, attempt, attempt_field, fields, make_all

ATTEMPTS = int(os.environ.get("FUZZ_ATTEMPTS", "300"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made")
    make_all(directory)
    return directory


@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files(made: Path, tmp_path: Path, kind: str) -> None:
    bad = []
    for seed in range(SEED, SEED + ATTEMPTS):
        outcome = attempt(made, tmp_path, kind, seed)
        if not outcome.is_good:
            print(f"{kind}, FUZZ_SEED={seed}, {', '.join(outcome.files)}: {outcome.said}")
            bad.append(seed)
    assert not bad


@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_every_field_of_a_document(made: Path, tmp_path: Path, kind: str) -> None:
    """As many as FUZZ_ATTEMPTS, drawn from all fields and values; all of them if that is more."""
    every = fields(made, kind)
    assert every
    drawn = random.Random(SEED).sample(every, min(ATTEMPTS, len(every)))
    bad = []
    for field in drawn:
        outcome = attempt_field(made, tmp_path, kind, field)
        if not outcome.is_good:
            print(f"{kind}, {outcome.files[0]}, value {outcome.seed}: {outcome.said}")
            bad.append(field)
    assert not bad
