"""Labels of servers follow tags, and no model of a server is lost by that."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from exporter.options import Updates
from exporter.pipeline.full import export
from exporter.pipeline.tagging import delete_tag, set_tag
from exporter.terminal.server_access import WITHOUT_TLS
from serving.agent import labels
from serving.agent.journal import EventKind, Journal
from serving.agent.labels import LabelRules
from serving.agent.publications import FollowedModel, Publications
from serving.agent.replica import Replica, Settings
from serving.cli import app
from serving.client import ModelClient
from serving.server import ModelServer
from serving.server_options import ServerOptions
from serving.status import VersionState
from tests.support.agents import wait
from tests.support.commands import run_app
from tests.support.step_models import published

GOLDEN = Path(__file__).parents[1] / "golden/0.2.1/models"


class World:
    """Two models, a server that serves all versions of both, and the file that it runs with."""

    def __init__(self, directory: Path) -> None:
        self.models = {
            name: Path(shutil.copytree(GOLDEN / "plain", directory / name)) for name in ("left", "right")
        }
        self.old, self.new = sorted(int(path.name) for path in self.models["left"].glob("[0-9]*"))[-2:]
        self.file = directory / "models.config"
        self.list("left", "right")
        self.rules = LabelRules({"stable": "prod"}, self.file, {"left": self.models["left"]})

    def list(self, *names: str, policy: str = "all {}") -> None:
        """Write a file that lists these models."""
        entries = "".join(
            f"config {{ name: '{name}' base_path: '{self.models.get(name, self.file.parent / name)}' "
            f"model_platform: 'tensorflow' model_version_policy {{ {policy} }} }}\n"
            for name in names
        )
        self.file.write_text(f"model_config_list {{ {entries} }}")

    @contextmanager
    def serving(self, *available: int) -> Iterator[ModelServer]:
        """A server with that file, once these versions of both models are available; all by default."""
        wanted = {*available} or {int(path.name) for path in self.models["left"].glob("[0-9]*")}
        with ModelServer(options=ServerOptions(model_config_file=self.file)) as server:
            for name in self.models:
                with ModelClient(server.address, name) as client:
                    wait(partial(is_served, client, *wanted))
            yield server


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def server(world: World) -> Iterator[ModelServer]:
    with world.serving() as server:
        yield server


def is_served(client: ModelClient, *versions: int) -> bool:
    """Whether these versions are available, and no others; CallFailed before the server looked for any."""
    served = [status.version for status in client.status() if status.state is VersionState.AVAILABLE]
    return set(served) == set(versions)


def follow(server: ModelServer, rules: LabelRules, model: str = "left") -> labels.Labelled:
    with ModelClient(server.address, model) as client:
        return labels.follow_tags(client, rules, WITHOUT_TLS, 20)


def test_a_label_follows_a_tag_and_is_given_again_after_a_restart(world: World, server: ModelServer) -> None:
    left = world.models["left"]
    set_tag(left, "prod", world.old)
    assert follow(server, world.rules).moved == {"stable": world.old}
    assert follow(server, world.rules) == labels.Labelled({}, [])
    set_tag(left, "prod", world.new)
    assert follow(server, world.rules) == labels.Labelled({"stable": world.new}, [])
    assert server.models.labels("left") == {"stable": world.new}
    assert {*server.models.served()} == {"left", "right"}
    with world.serving() as restarted:
        assert follow(restarted, world.rules).moved == {"stable": world.new}


def test_a_tag_that_leads_nowhere_moves_no_label(world: World, server: ModelServer) -> None:
    left = world.models["left"]
    (said,) = follow(server, world.rules).problems
    assert "has no tag 'prod'" in said
    set_tag(left, "prod", world.old)
    follow(server, world.rules)
    delete_tag(left, "prod")
    (said,) = follow(server, world.rules).problems
    assert "has no tag 'prod'" in said
    set_tag(left, "prod", world.new)
    shutil.rmtree(left / str(world.old))
    (left / "tags.json").write_text((left / "tags.json").read_text().replace(str(world.new), str(world.old)))
    (said,) = follow(server, world.rules).problems
    assert "which is gone" in said
    (left / "tags.json").write_bytes(b"\xff{")
    (said,) = follow(server, world.rules).problems
    assert "does not hold the model's tags" in said


def test_a_label_stays_at_a_base_before_the_newest_log_and_is_given_back(tmp_path: Path) -> None:
    """As after a change of structure: both versions are published, and servers have both."""
    request = published(tmp_path, 10, 20)
    model = request.out
    set_tag(model, "good", 10)
    export(replace(request, updates=Updates(stamp=True)))
    config = tmp_path / "models.config"
    config.write_text(
        f"model_config_list {{ config {{ name: 'left' base_path: '{model}' model_platform: 'tensorflow' "
        "model_version_policy { all {} } } }"
    )
    rules = LabelRules({"stable": "good", "fresh": "@latest"}, config, {"left": model})
    with ModelServer(options=ServerOptions(model_config_file=config)) as server:
        with ModelClient(server.address, "left") as client:
            wait(lambda: is_served(client, 10, 21))
        assert follow(server, rules) == labels.Labelled({"stable": 10, "fresh": 21}, [])
        set_tag(model, "good", 21)
        assert follow(server, rules).moved == {"stable": 21}
        set_tag(model, "good", 20)
        assert follow(server, rules).moved == {"stable": 10}


def test_a_version_that_is_not_loaded_gets_no_label_and_others_move(world: World) -> None:
    world.list("left", "right", policy="latest { num_versions: 1 }")
    rules = LabelRules({"stable": "prod", "fresh": "@latest"}, world.file, world.rules.models)
    with world.serving(world.new) as server:
        set_tag(world.models["left"], "prod", world.old)
        done = follow(server, rules)
        assert done.moved == {"fresh": world.new}
        assert "not available there" in done.problems[0]
        assert server.models.labels("left") == {"fresh": world.new}
        assert follow(server, rules) == labels.Labelled({}, done.problems)


def test_two_models_keep_each_others_labels(world: World, server: ModelServer) -> None:
    rules = LabelRules({"stable": "prod"}, world.file, world.models)
    for model, version in zip(world.models.values(), (world.old, world.new), strict=True):
        set_tag(model, "prod", version)
    assert follow(server, rules, "left").moved
    assert not follow(server, rules, "right").moved
    assert [server.models.labels(name)["stable"] for name in world.models] == [world.old, world.new]


def test_labels_of_the_file_stay_but_for_those_of_versions_that_are_gone(world: World) -> None:
    with world.serving() as server:
        labelled = "{{ version_labels {{ key: 'a' value: {} }} version_labels {{ key: 'b' value: 4711 }} name"
        text = world.file.read_text().replace("{ name", labelled.format(world.old))
        world.file.write_text(text)
        set_tag(world.models["left"], "prod", world.new)
        assert follow(server, world.rules).moved == {"stable": world.new}
        assert server.models.labels("left") == {"a": world.old, "stable": world.new}
        assert server.models.labels("right") == {"a": world.old}


def test_a_file_that_is_not_the_servers_is_not_sent(world: World, server: ModelServer) -> None:
    set_tag(world.models["left"], "prod", world.new)
    world.list("left")  # the server would unload the other
    assert "does not list right" in follow(server, world.rules).problems[0]
    world.list("left", "right", "new")  # a stock server would wait for it
    assert "no version of new is available" in follow(server, world.rules).problems[0]
    assert {*server.models.served()} == {"left", "right"}
    assert server.models.labels("left") == {}
    world.list("left", "right")
    assert follow(server, world.rules).moved


def test_an_agent_says_once_why_a_label_does_not_move(world: World, server: ModelServer) -> None:
    journal = Journal()
    publications = Publications(FollowedModel("left", world.models["left"]), journal, 0.05)
    settings = Settings(labels=world.rules)
    replica = Replica(server.address, publications, journal, settings, lambda model, address, log: log)
    with ModelClient(server.address, "left") as client:
        for _ in range(2):
            replica._observe(client)
        set_tag(world.models["left"], "prod", world.old)
        replica._observe(client)
        world.file.unlink()
        set_tag(world.models["left"], "prod", world.new)
        for _ in range(2):
            replica._observe(client)
        kinds = (EventKind.FAILED, EventKind.LABELLED)
        said = [event.message for event in reversed(journal.last()) if event.what in kinds]
    assert [text.split(":")[0] for text in said] == [
        "the label stable does not move",
        f"the label stable names version {world.old}",
        "labels do not move",
    ], said


def test_what_the_agent_cannot_follow_is_refused_at_its_start(world: World) -> None:
    started = ("agent", "--json", "--model-base-path", world.models["left"], "--target", "127.0.0.1:9")
    label, file = ("--label", "stable=prod"), ("--model-config-file", world.file)
    for options, said in (
        (label, "--label needs --model-config-file"),
        (file, "--label"),
        (("--label", "stable", *file), "is not of the form"),
        (("--label", "stable=20", *file), "name that position by a tag: export-model tag"),
        (("--label", "stable=@latest", *file), "name that position by a tag: export-model tag"),
        (("--label", "stable=Prod", *file), "write prod"),
        ((*label, *label, *file), "twice"),
        ((*label, *file, "--trust", world.file), "exclude each other"),
    ):
        refused = run_app(app, *started, *options)
        assert (refused.code, refused.error["error"]) == (2, "UsageError"), refused.err
        assert said in f"{refused.error['message']}; {refused.error['hint']}"
    world.list("right")
    refused = run_app(app, *started, *label, *file)
    assert "does not list 'left'" in refused.error["message"]
