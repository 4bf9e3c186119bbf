"""A server is led to a named position, and its labels are given the versions of tags."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.pipeline.tagging import set_tag
from exporter.publish.delta_log import read_log
from serving.cli import app
from serving.server import ModelServer
from tests.support.commands import run_app

GOLDEN = Path(__file__).parents[1] / "golden/0.2.1/models"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    """A base at 10, and deltas; a hold keeps the server there, unless a call names a position."""
    model = Path(shutil.copytree(GOLDEN / "ranker", tmp_path_factory.mktemp("models") / "ranker"))
    read_log(model).hold.path.write_text("10\n")
    set_tag(model, "good", 20)
    with ModelServer(model) as server:
        server.wait_available(60)
        yield server


def test_a_server_is_led_to_a_tag(server: ModelServer) -> None:
    model = server.models.served()["ranker"].base_path
    asked = ("update", server.address, "--model-name", "ranker", "--json", "--up-to")
    refused = run_app(app, *asked, "good")
    assert (refused.code, "--model-base-path MODEL" in refused.error["hint"]) == (2, True)
    refused = run_app(app, *asked, "nobody", "--model-base-path", model)
    assert (refused.code, refused.error["error"]) == (5, "PositionUnknown")
    for named, position in (("good", 20), ("30", 30), ("@previous", 82), ("@latest", 83)):
        done = run_app(app, *asked, named, "--model-base-path", model)
        assert (done.code, done.document["position"]) == (0, position), done.err


def test_a_label_is_given_the_version_of_a_tag(server: ModelServer, tmp_path: Path) -> None:
    """A label names a version: that of a delta's position is the base that deltas lead there from."""
    model = server.models.served()["ranker"].base_path
    plain = Path(shutil.copytree(GOLDEN / "plain", tmp_path / "plain"))
    first = min(int(path.name) for path in plain.glob("[0-9]*"))
    set_tag(plain, "first", first)
    asked = (
        "reload",
        server.address,
        "--json",
        "--model-config-file",
        tmp_path / "models.config",
        "--model-name",
    )
    place = "name: '{0.name}' base_path: '{0}' model_platform: 'tensorflow'".format
    entries = " ".join(f"config {{ {place(path)} }}" for path in (model, plain))
    (tmp_path / "models.config").write_text(f"model_config_list {{ {entries} }}")
    done = run_app(app, *asked, "ranker", "--label", "stable=good")
    assert done.code == 0, done.err
    assert server.models.labels("ranker") == {"stable": 10}
    done = run_app(app, *asked, "plain", "--all-versions", "--label", "old=first", "--label", "new=@latest")
    assert done.code == 0, done.err
    assert server.models.labels("plain")["old"] == first
    assert server.models.labels("plain")["new"] > first
    refused = run_app(app, *asked, "plain", "--label", "x=nobody")
    assert json.loads(refused.err)["error"] == "PositionUnknown"
