"""`make faults MINUTES=10`: accidents at random around real processes; see `fault_world`.

pytest does not collect this by itself; the short form is `test_faults`. FAULT_MINUTES says for how long, in
worlds of FAULT_WORLD_S seconds; FAULT_SEED is the first world's. FAULT_SLOWNESS is how many times slower than
two idle cores the machine is.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.fault_world import SLOWNESS, Fault, World, small_disk

MINUTES = float(os.environ.get("FAULT_MINUTES", "10"))
FIRST = int(os.environ.get("FAULT_SEED", "1"))
_WORLD_S = float(os.environ.get("FAULT_WORLD_S", "120"))


def seeds() -> range:
    return range(FIRST, FIRST + max(1, round(MINUTES * 60 / _WORLD_S)))


@pytest.mark.timeout(600 * SLOWNESS)
@pytest.mark.parametrize("seed", seeds())
def test_every_replica_ends_as_the_trainer(tmp_path: Path, seed: int) -> None:
    play(tmp_path, seed, min(_WORLD_S, MINUTES * 60), replicas=3)


def play(directory: Path, seed: int, seconds: float, *, replicas: int) -> None:
    """A world of so many seconds of accidents, and its end."""
    with small_disk(directory) as disk:
        world = World(directory, seed, replicas=replicas, disk=disk, say=lambda line: print(line, flush=True))
        try:
            world.begin()
            world.play(seconds)
            world.finish()
        except Fault:
            print(f"seed {seed}; logs are in {directory}")
            raise
        finally:
            world.close()
    answers, back, unknown = (
        sum(getattr(client, what) for client in world.clients) for what in ("answers", "back", "unknown")
    )
    print(
        f"seed {seed}: {dict(sorted(world.happened.items()))}; {len(world.answers)} positions in {answers} "
        f"answers, {back} went back after a swap or damage, {unknown} did not know"
    )
