"""A replica that holds something else than was published is loaded anew, if the agent may do that."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.publish.delta_log import read_log
from serving.client import ModelClient
from serving.status import VersionState
from tests.support.agents import (
    DEADLINE_S,
    Agent,
    Published,
    agent,
    document,
    give_other_values,
    process,
    wait,
)
from tests.support.budget import thorough
from tests.support.forks import started_warm


class World:
    """A published model, a copy of it with other values, and the configuration that servers are to have."""

    def __init__(self, directory: Path) -> None:
        self.published = Published(directory, ("--add=digest",))
        self.newest = self.published.publish()
        self.version = int(read_log(self.published.model).base.path.name)
        self.copy = directory / "other" / "ranker"
        shutil.copytree(self.published.model, self.copy)
        give_other_values(self.copy / str(self.version))
        self.config = self.configuration(directory / "models.config", self.published.model)
        self.wrong = self.configuration(directory / "wrong.config", self.copy)

    def configuration(self, file: Path, model: Path) -> Path:
        entries = {"ranker": model, "aside": self.published.model}
        listed = [
            f'config {{ name: "{n}" base_path: "{p}" model_platform: "tensorflow" }}'
            for n, p in entries.items()
        ]
        file.write_text("model_config_list { %s }" % " ".join(listed))  # noqa: UP031 - braces
        return file

    def options(self, *more: str) -> tuple[str, ...]:
        return ("--every", "audit=0.2", "--rebuild-config", str(self.config), *more)


def serve(stack: ExitStack, config: Path) -> str:
    """A server with a configuration file; its address."""
    started = stack.enter_context(
        started_warm("serving.cli", "run", "--model-config-file", config, "--port", 0, "--json")
    )
    return f"127.0.0.1:{document(started)['port']}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("rebuild"))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def positions(running: Agent, address: str) -> list[int]:
    return [event["position"] for event in running.of("applied") if event["replica"] == address]


def states(address: str, model: str) -> list[VersionState]:
    with ModelClient(address, model) as client:
        return [status.state for status in client.status()]


@pytest.mark.landing
def test_a_replica_that_differs_is_rebuilt_while_another_serves(world: World, stack: ExitStack) -> None:
    good, bad = serve(stack, world.config), serve(stack, world.wrong)
    with agent(world.published.model, good, bad, more=world.options()) as running:
        (rebuilt,) = wait(lambda: running.of("rebuilt"))
        assert rebuilt["replica"] == bad
        assert {event["replica"] for event in running.of("differs")} == {bad}
        wait(lambda: f'replica_right{{model="ranker",replica="{bad}"}} 1.0' in running.get("/metrics")[1])
        wait(lambda: running.get("/livez")[0] == 200)
        newest = world.published.publish()
        for address in (good, bad):
            wait(lambda: newest in positions(running, address))  # noqa: B023 - it is waited for here
        assert len(running.of("rebuilt")) == 1
        assert states(bad, "aside") == [VersionState.AVAILABLE], "its other models went on"


@pytest.mark.landing
def test_the_only_replica_is_not_rebuilt(world: World, stack: ExitStack) -> None:
    bad = serve(stack, world.wrong)
    with agent(world.published.model, bad, more=world.options()) as running:
        told = wait(
            lambda: [event for event in running.of("audit") if "no other replica" in event["message"]]
        )
        assert told
        assert running.get("/livez")[0] == 503
        assert states(bad, "ranker") == [VersionState.AVAILABLE]
        assert not running.of("rebuilt")


@thorough
def test_what_is_damaged_on_disk_is_not_loaded_in_its_place(world: World, stack: ExitStack) -> None:
    good, bad = serve(stack, world.config), serve(stack, world.wrong)
    catalog = read_catalog(world.published.model / str(world.version) / "variables" / "variables")
    extent = next(ref.extent for ref in catalog.tensors.values() if ref.shape == (23, 3))
    assert extent is not None
    shard = next(catalog.prefix.parent.glob("*.data-*"))
    kept = shard.read_bytes()
    shard.unlink()  # it may be a link to the trainer's
    at = extent.offset
    shard.write_bytes(kept[:at] + bytes([kept[at] ^ 1]) + kept[at + 1 :])
    try:
        with agent(world.published.model, good, bad, more=world.options()) as running:
            wait(lambda: running.of("audit"))
            assert not running.of("rebuilt")
            assert states(bad, "ranker") == [VersionState.AVAILABLE]
    finally:
        shard.write_bytes(kept)


@pytest.mark.landing
def test_a_model_that_an_agent_took_out_and_did_not_put_back_is_put_back(
    world: World, stack: ExitStack
) -> None:
    """Killed between the two configurations: the server has the other model alone."""
    from serving.model_config import read_config_file

    server = serve(stack, world.config)
    without = read_config_file(world.config)
    del without.model_config_list.config[0]
    with ModelClient(server, "ranker") as client:
        client.configure(without, DEADLINE_S)
    wait(lambda: states(server, "ranker") == [VersionState.END])
    with agent(world.published.model, server, more=world.options()) as running:
        wait(lambda: running.of("rebuilt"))
        wait(lambda: running.get("/readyz")[0] == 200)


@pytest.mark.landing
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_config_list { }", "does not list 'ranker'"),
        ("no configuration", "rebuild"),
        (None, "rebuild"),
        ("without audits", "without --every audit"),
    ],
)
def test_a_file_that_is_no_configuration_is_a_usage_error(
    tmp_path: Path, text: str | None, message: str
) -> None:
    file = tmp_path / "rebuild.config"
    if text is not None:
        file.write_text(text)
    options = ("--model-base-path", tmp_path / "ranker", "--target", "127.0.0.1:9", "--rebuild-config", file)
    audits = () if text == "without audits" else ("--every", "audit=1")
    with process("agent", *options, *audits, "--port", 0, "--json") as started:
        _, err = started.communicate(timeout=DEADLINE_S)
    assert started.returncode == 2
    assert message in json.loads(err.strip().splitlines()[-1])["message"]
