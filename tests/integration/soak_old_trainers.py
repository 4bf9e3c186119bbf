"""`make soak`: a cluster on TensorFlow 1.15 whose processes die at random, 200 times, and nothing is lost.

Each time that the training has ended, every full checkpoint that increments lead on from to the end gives,
with them, its last state, and a model that follows answers with the last values, bit for bit. SOAK_DEATHS and
SOAK_SEED change how long it takes, and who dies.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from exporter import export_incremental
from tests.support.environments import python_of
from tests.support.trainer_environments import TrainerCluster, Trainings, wait_for_increments

DEATHS = int(os.environ.get("SOAK_DEATHS", "200"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
BETWEEN_ENDS = 12
"""Deaths until the training ends and what is there is compared; then it goes on."""


@pytest.mark.timeout(4 * 3600)
def test_a_cluster_on_tensorflow_1_that_dies_piece_by_piece(tmp_path: Path) -> None:
    trainings = Trainings(
        python_of("1.15.5"),
        tmp_path,
        ["adagrad", "lazy_adam"],
        steps=10**9,
        save_checkpoint_steps=150,
        save_increment_steps=4,
        pause_s=0.02,
    )
    dice = random.Random(SEED)
    deaths = exact = 0
    end = trainings.train / "end"
    with TrainerCluster(trainings, workers=2) as cluster:
        wait_for_increments(trainings, 2)
        with trainings.served(is_quiet=False) as server:
            while True:
                goal = min(DEATHS, deaths + BETWEEN_ENDS)
                while deaths < goal:
                    wait_for_increments(trainings, dice.randint(1, 8))
                    time.sleep(dice.random() * 0.3)
                    victims = dice.sample(cluster.names, dice.choice([1, 1, 1, 2, 3]))
                    for name in victims:
                        cluster.kill(name)
                    for name in victims:
                        cluster.start(name)
                    deaths += len(victims)
                wait_for_increments(trainings, 1)
                end.touch()
                cluster.wait(900)
                exact += trainings.assert_exact()
                export_incremental(trainings.request)
                server.update()
                trainings.assert_answers(server)
                print(f"{deaths} deaths, {exact} full checkpoints were exact", flush=True)
                if deaths >= DEATHS:
                    break
                end.unlink()
                for name in cluster.names:
                    cluster.kill(name)
                    cluster.start(name)
