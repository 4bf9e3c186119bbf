"""`make chaos`: many worlds, each with hundreds of happenings; see `chaos_world`.

pytest does not collect this by itself; the short form is `test_chaos`. CHAOS_SEEDS (`7` or `1-40`) and
CHAOS_STEPS change which worlds there are, and how long each lasts. A world that fails is told by its seed,
and happens again in the same way, but for kills and for commands at once.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.chaos_world import World

STEPS = int(os.environ.get("CHAOS_STEPS", "150"))


def seeds() -> range:
    first, _, last = os.environ.get("CHAOS_SEEDS", "1-20").partition("-")
    return range(int(first), int(last or first) + 1)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", seeds())
def test_nothing_but_the_reference_is_ever_served(tmp_path: Path, seed: int) -> None:
    play(tmp_path, seed, STEPS)


def play(directory: Path, seed: int, steps: int) -> None:
    """A world of so many happenings, and its end."""
    world = World(directory, seed, say=lambda line: print(line, flush=True))
    try:
        for _ in range(steps):
            world.step()
        world.finish()
    finally:
        world.close()
    positions, answers = len(world.at), set().union(*(replica.answers for replica in world.replicas))
    kind = " ".join((*world.kind.maps, *world.kind.cast)) or "plain"
    print(f"seed {seed} ({kind}): {steps} happenings, {positions} positions, updates said {sorted(answers)}")
    if world.kind.maps:
        print(f"seed {seed}: {world.bases_for_room} bases because an overlay was full")
