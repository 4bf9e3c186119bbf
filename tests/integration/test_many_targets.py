"""A thousand targets of one agent: a tenth is dead, a tenth never answers, and nobody else notices."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.benchmarks.fleet_of_servers import fleet_of_servers
from tests.support.agents import DEADLINE_S, Agent, process, wait
from tests.support.remote_models import incr, went_on
from tests.support.setting import FIRST, followed

TARGETS = 1000
TENTH = TARGETS // 10


@pytest.mark.landing
def test_a_thousand_targets(tmp_path: Path) -> None:
    trainer, model = followed(tmp_path), tmp_path / "model"

    def publish() -> int:
        went_on(trainer, trainer.step + 1)
        assert incr(trainer, str(model)).code == 0
        return int(trainer.step)

    def states() -> dict[str, int]:
        """How many replicas the agent knows at each position."""
        assert agent.get("/healthz")[0] == agent.get("/")[0] == agent.get("/metrics")[0] == 200
        (told,) = json.loads(agent.get("/status.json")[1])["models"]
        assert len(told["replicas"]) == TARGETS
        return {
            each["address"]: each["versions"][0]["position"] for each in told["replicas"] if each["versions"]
        }

    assert publish() > FIRST
    with fleet_of_servers(model, TARGETS, 0.0) as fleet:
        targets = [part for address in fleet.addresses for part in ("--target", address)]
        arguments = (
            "agent",
            "--model-base-path",
            model,
            *targets,
            "--port",
            "0",
            "--json",
            "--deadline",
            "5",
        )
        with process(*arguments) as started:
            agent = Agent(started)
            wait(lambda: fleet.least() == trainer.step)
            fleet.tell("stop", 0, TENTH)
            fleet.tell("hang", TENTH, 2 * TENTH)
            for _ in range(3):
                position = publish()
                wait(lambda position=position: fleet.least(2 * TENTH) == position)
                well = dict.fromkeys(fleet.addresses[2 * TENTH :], position)
                wait(lambda well=well: well.items() <= states().items())
            fleet.tell("start", 0, TENTH)
            fleet.tell("on time", TENTH, 2 * TENTH)
            wait(lambda: fleet.least() == trainer.step)
            started.send_signal(signal.SIGTERM)
            assert started.wait(DEADLINE_S) == 0
