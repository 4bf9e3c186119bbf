"""A model server over gRPC whose model moves on while it answers."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from exporter.bundle.warmup import parse_request, write_warmup
from exporter.errors import ServerError
from exporter.subgraph.make_updatable import CATCH_UP_REQUEST
from exporter.wire.protos import message_class
from serving.cli import app
from serving.client import ModelClient
from serving.server import ModelServer
from serving.server_options import ServerOptions
from serving.updates import update
from tests.support.updatable import Model, constant_everywhere, filled, updatable_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """At 100; 101 to 105 are published, and its warm-up catches up."""
    model = updatable_model(tmp_path_factory.mktemp("model"), constant_everywhere, {"ids": [0]})
    for position in range(100, 105):
        model.publish(position, position + 1, filled(model, position + 1))
    saved = message_class("SavedModel").FromString((model.version / "saved_model.pb").read_bytes())
    catch_up = parse_request(CATCH_UP_REQUEST, saved.meta_graphs[0].signature_def)
    write_warmup([catch_up], model.version)
    return model


@pytest.fixture(scope="module")
def client(model: Model) -> Iterator[ModelClient]:
    with ModelServer(model.base) as server:
        server.wait_available(60)
        yield ModelClient(server.address, model.base.name, deadline_s=30)


def position(client: ModelClient) -> int:
    return int(
        client.predict({"probe": np.array([0])}, signature="incremental_status").outputs["position"][0]
    )


def test_a_started_server_has_caught_up_before_its_first_answer(client: ModelClient) -> None:
    answer = client.predict({"ids": np.array([1, 2])}).outputs
    assert answer["low"].tolist() == answer["high"].tolist() == [105, 105]
    assert answer["model_position"].tolist() == [105, 105]
    assert position(client) == 105


def test_answers_stay_whole_while_it_moves_on(client: ModelClient, model: Model) -> None:
    ids = np.random.default_rng(2).integers(0, 20_000, 100)
    seen: set[int] = set()
    done = threading.Event()

    def ask() -> int:
        count = 0
        while not done.is_set():
            answer = client.predict({"ids": ids}).outputs
            assert set(answer["low"]) == set(answer["high"]) == set(answer["model_position"])
            seen.update(answer["model_position"].tolist())
            count += 1
        return count

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(ask) for _ in range(3)]
        for start in range(105, 125):
            model.publish(start, start + 1, filled(model, start + 1))
            up_to = {"up_to": np.array([-1, start + 1])}
            moved = client.predict(up_to, signature="incremental_update").outputs
            assert moved["position"].tolist() == [start + 1] * 2
        done.set()
        assert all(reader.result() for reader in readers)
    assert len(seen) > 3


def test_a_refusal_is_an_error_that_says_why(client: ModelClient) -> None:
    with pytest.raises(ServerError) as caught:
        client.predict({"up_to": np.array([10**6])}, signature="incremental_update")
    reason = "INVALID_ARGUMENT: assertion failed: [unpublished: nothing leads to 1000000; at 125]"
    assert caught.value.cause == reason, "without the places in the graph that TensorFlow names"
    with pytest.raises(ServerError) as caught:
        update(client, up_to=10**6)
    assert "export-model history" in caught.value.hint


def test_the_model_directory_is_all_that_an_update_reads(client: ModelClient, tmp_path: Path) -> None:
    """There is no path in the request: nothing but `up_to` is taken."""
    with pytest.raises(ServerError):
        client.predict(
            {"up_to": np.array([-1]), "directory": np.array([str(tmp_path)])}, signature="incremental_update"
        )


@pytest.mark.landing
def test_a_version_that_is_being_loaded_is_updated_once_it_is_available(tmp_path: Path) -> None:
    """It would answer from where its warm-up began, until somebody updates again."""
    model = updatable_model(tmp_path, constant_everywhere, {"ids": [0]})
    with ModelServer(model.base, options=ServerOptions(poll_seconds=0.1)) as server:
        server.wait_available(60)
        with ModelClient(server.address, model.base.name, deadline_s=60) as client:
            model.publish(100, 101, filled(model, 101))
            copy = tmp_path / "200"
            shutil.copytree(model.version, copy)
            saved = message_class("SavedModel").FromString((copy / "saved_model.pb").read_bytes())
            slow = parse_request('{"inputs": [1]}', saved.meta_graphs[0].signature_def)
            write_warmup([slow] * 1000, copy)
            copy.rename(model.base / "200")
            while {status.version for status in client.status()} == {100}:
                time.sleep(0.01)
            done = update(client)
            assert (done.version, done.position, done.loading) == (200, 101, None)
            assert client.predict({"ids": np.array([1])}, version=200).outputs["low"].tolist() == [101]


def test_a_command_whose_model_cannot_go_on_fails(client: ModelClient, model: Model) -> None:
    arguments = ("update", client.address, "--model-name", client.model, "--json")
    assert CliRunner().invoke(app, arguments).exit_code == 0, "there is nothing to do"
    here = position(client)
    model.publish(here + 1, here + 2, filled(model, here + 2))
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 7
    printed = json.loads(done.stdout)
    assert (printed["status"], printed["message"]) == ("gap", f"gap: no delta leads on from {here}")
    error = json.loads(done.stderr)
    assert f"stays at position {here}" in error["message"]
    assert "export-model doctor" in error["hint"]
    assert position(client) == here
