"""`serve-model agent` beside real servers: some restart, hang, refuse or vanish."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from exporter.publish.delta_log import read_log
from tests.support.agents import DEADLINE_S, Published, Server, agent, give_other_values, process, wait
from tests.support.commands import export_model
from tests.support.logs import set_hold


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("agent"))


@pytest.fixture(scope="module")
def servers(published: Published) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        servers = [Server(published.model, stack=stack) for _ in range(2)]
        yield [server.start() for server in servers]


def base_of(published: Published) -> int:
    return int(read_log(published.model).base.path.name)


def test_every_replica_follows_and_one_that_hangs_holds_back_nobody(
    published: Published, servers: list[Server]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hung = f"127.0.0.1:{silent.getsockname()[1]}"
        with agent(published.model, hung, *(server.address for server in servers)) as running:
            for _ in range(5):
                newest = published.publish()
                version = base_of(published)
                wait(lambda: all(server.position(version) == newest for server in servers))  # noqa: B023
            served = [event["position"] for event in running.of("applied") if event["replica"] != hung]
            assert max(served) == newest
            assert all(event["behind_seconds"] >= 0 for event in running.of("applied"))
            wait(lambda: [event for event in running.of("failed") if event["replica"] == hung])
            status, text = running.get("/readyz")
            assert status == 503
            assert f"ranker on {hung} does not answer" in text
            assert text.count("\n") == 1, "the others are fresh"


def test_metrics_status_and_page_tell_where_each_replica_stands(
    published: Published, servers: list[Server]
) -> None:
    with agent(published.model, servers[0].address) as running:
        newest = published.publish()
        wait(lambda: running.get("/readyz")[0] == 200 and servers[0].position(base_of(published)) == newest)
        version, replica = base_of(published), servers[0].address
        labels = f'{{model="ranker",replica="{replica}",version="{version}"}}'
        stands = f"export_model_agent_position{labels} {float(newest)}"
        wait(lambda: stands in running.get("/metrics")[1])  # the server is there before the agent has asked
        _, metrics = running.get("/metrics")
        assert f"export_model_agent_behind_deltas{labels} 0.0" in metrics
        assert "export_model_agent_commit_to_served_seconds_bucket" in metrics
        _, text = running.get("/status.json")
        (model,) = json.loads(text)["models"]
        assert model["position"] == newest
        assert model["replicas"][0]["versions"][0]["position"] == newest
        _, page = running.get("/")
        assert replica in page
        assert "Every replica is fresh" in page
        assert page.count("<script") == 1, "its own"
        assert running.get("/healthz") == (200, "ok\n")
        assert running.get("/nowhere")[0] == 404


@pytest.mark.landing
def test_a_server_and_an_agent_that_are_killed_go_on_where_they_should(
    published: Published, servers: list[Server]
) -> None:
    version = base_of(published)
    with agent(published.model, *(server.address for server in servers)) as running:
        wait(lambda: running.get("/readyz")[0] == 200)
        servers[1].kill()
        newest = published.publish()
        wait(lambda: servers[0].position(version) == newest)
        servers[1].start()
        wait(lambda: servers[1].position(version) == newest)
        running.process.kill()
    newest = published.publish()
    with (
        agent(published.model, *(server.address for server in servers)) as one,
        agent(published.model, *(server.address for server in servers)) as other,
    ):
        wait(lambda: all(server.position(version) == newest for server in servers))
        newest = published.publish()
        wait(lambda: all(server.position(version) == newest for server in servers))
        for running in (one, other):  # what one applied is no trouble for the other
            wait(lambda: running.get("/readyz")[0] == 200)  # noqa: B023
            assert not running.of("refused")
        one.process.terminate()
        assert one.process.wait(DEADLINE_S) == 0


@pytest.mark.landing
def test_a_restart_between_two_looks_is_counted_where_the_position_falls_back(
    published: Published, servers: list[Server]
) -> None:
    """The agent does not look meanwhile; the server begins at the hold, behind where it was."""
    version, held, server = base_of(published), published.position, servers[0]

    def replica() -> Any:
        return json.loads(running.get("/status.json")[1])["models"][0]["replicas"][0]

    with agent(published.model, server.address) as running:
        newest = published.publish()
        wait(lambda: replica()["versions"] and replica()["versions"][0]["position"] == newest)
        assert replica()["restarts"] == 0
        set_hold(read_log(published.model), held)
        os.kill(running.process.pid, signal.SIGSTOP)
        server.kill()
        server.start()
        assert server.position(version) == held
        os.kill(running.process.pid, signal.SIGCONT)
        wait(lambda: replica()["versions"][0]["position"] == held)
        assert (replica()["restarts"], len(running.of("failed"))) == (1, 0)
        set_hold(read_log(published.model), None)
        wait(lambda: server.position(version) == newest)
        assert replica()["restarts"] == 1


def test_a_hold_is_kept_and_a_new_base_is_followed(published: Published, servers: list[Server]) -> None:
    version, held = base_of(published), published.position
    server = servers[0]
    with agent(published.model, server.address) as running:
        wait(lambda: running.get("/readyz")[0] == 200)
        newest = published.publish()
        wait(lambda: server.position(version) == newest)
        done = export_model("rollback", published.model, "--to", held)
        assert done.code == 0, done.err
        back = published.position
        wait(lambda: server.position(version) == back)
        published.publish()
        time.sleep(1.0)
        assert server.position(version) == back
        _, text = running.get("/status.json")
        document = json.loads(text)
        assert document["models"][0]["hold"] == back
        assert document["models"][0]["waiting"] == 1
        (finding,) = document["findings"]
        assert (finding["level"], finding["state"]) == ("bad", "rolled back")
        assert f"1 publication waits (newest {published.position}, serving {back})" in finding["text"]
        _, metrics = running.get("/metrics")
        for sample in ("held", "waiting_publications", "rolled_back"):
            assert re.search(rf"^export_model_agent_{sample}\{{.*\}} 1\.0$", metrics, re.M), sample
        assert f'published_position{{model="{published.model.name}"}} {published.position}.0' in metrics
        assert f'released_position{{model="{published.model.name}"}} {back}.0' in metrics
        assert export_model("resume", published.model).code == 0
        wait(lambda: server.position(version) == published.position)
        newest = published.publish("--new-base=merged")
        wait(lambda: server.position(base_of(published)) == newest)
        newest = published.publish()
        wait(lambda: server.position(base_of(published)) == newest)
        assert not running.of("refused")


def test_a_damaged_delta_is_quarantined_and_a_base_asked_for(
    published: Published, servers: list[Server]
) -> None:
    version = base_of(published)
    with agent(published.model, *(server.address for server in servers)) as running:
        newest = published.publish()
        wait(lambda: all(server.position(version) == newest for server in servers))
        for server in servers:
            server.kill()
        damaged = next(delta for delta in read_log(published.model).deltas if delta.end == newest)
        data = next(damaged.path.glob("delta.data-*"))
        good = data.read_bytes()
        data.write_bytes(bytes([good[0] ^ 1]) + good[1:])
        for server in servers:
            server.start()
        wait(lambda: len({event["replica"] for event in running.of("refused")}) == 2)

        def quarantined() -> dict[str, Any] | None:
            models = json.loads(running.get("/status.json")[1])["models"]
            return next((model for model in models if model["quarantined"]), None)

        model = wait(quarantined)
        (found,) = model["quarantined"]
        assert found["delta"] == f"{damaged.start}-{damaged.end}"
        assert f"{damaged.path}/{data.name}" in found["reason"], "the file, which no server names"
        assert "checksum" in found["reason"]
        (event,) = wait(lambda: running.of("damaged"))
        assert event["command"] == f"export-model doctor {published.model}"
        assert model["base_wanted"]
        assert "--new-base always" in running.get("/")[1]
        data.write_bytes(good)


@pytest.mark.landing
def test_a_replica_that_holds_something_else_is_to_be_started_anew(tmp_path: Path) -> None:
    """It loaded other values at the same position, as no checksum of a file can tell."""
    published = Published(tmp_path, ("--add=digest",))
    published.publish()
    copy = tmp_path / "other" / "ranker"
    shutil.copytree(published.model, copy)
    give_other_values(copy / str(base_of(published)))
    with ExitStack() as stack:
        good, bad = (Server(base, stack=stack).start() for base in (published.model, copy))
        with agent(published.model, good.address, bad.address, more=("--every", "audit=0.2")) as running:
            found = wait(lambda: running.of("differs"))
            assert {event["replica"] for event in found} == {bad.address}
            assert running.get("/livez")[0] == 503
            assert (
                f'replica_right{{model="ranker",replica="{bad.address}"}} 0.0' in running.get("/metrics")[1]
            )
            wait(
                lambda: (
                    f'replica_right{{model="ranker",replica="{good.address}"}} 1.0'
                    in running.get("/metrics")[1]
                )
            )
            shutil.rmtree(copy)
            shutil.copytree(published.model, copy)
            bad.kill()
            bad.start()
            wait(lambda: running.get("/livez")[0] == 200)


def test_what_is_not_mounted_is_said_and_found_again(published: Published, servers: list[Server]) -> None:
    away = published.model.with_name("away")
    with agent(published.model, servers[0].address) as running:
        wait(lambda: running.get("/readyz")[0] == 200)
        published.model.rename(away)
        try:
            wait(lambda: "is its volume mounted?" in running.get("/freshz")[1])
        finally:
            away.rename(published.model)
        wait(lambda: running.of("seen"))


def test_a_token_guards_all_but_the_probes(published: Published, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    options = ("--token-file", str(token))
    with agent(published.model, "127.0.0.1:9", more=options) as running:
        for path in ("/", "/metrics", "/status.json", "/nowhere"):
            assert running.get(path)[0] == 401
            assert running.get(path, Authorization="Bearer guess")[0] == 401
        assert running.get("/metrics", Authorization="Bearer s3cret")[0] == 200
        assert running.get("/healthz")[0] == 200
        wait(lambda: running.of("failed"))
        status, text = running.get("/readyz")
        assert status == 503
        assert "127.0.0.1" not in text


def test_without_an_agent_a_command_tells_the_servers_that_it_is_given(
    published: Published, servers: list[Server]
) -> None:
    version = base_of(published)
    published.train()
    addresses = [*(server.address for server in servers), "127.0.0.1:9"]
    told = [part for address in addresses for part in ("--notify", address)]
    done = export_model(*published.arguments(), *told, "--json")
    assert done.code == 0, "it is published, whoever answers"
    *answered, silent = done.document["notified"]
    assert [one["position"] for one in answered] == [published.position] * 2
    assert not any(one["problem"] for one in answered)
    assert (silent["position"], silent["problem"][:11]) == (None, "UNAVAILABLE")
    assert all(server.position(version) == published.position for server in servers)
    again = export_model(*published.arguments(), *told, "--json")
    assert again.document["status"] == "nothing_to_do"
    *at, _ = again.document["notified"]  # they may have been down, or named wrongly, when it was published
    assert [one["position"] for one in at] == [published.position] * 2
    assert "hint: serve-model update 127.0.0.1:9 --model-name" in again.err
    plain = [argument for argument in published.arguments() if argument != "--incr"]
    assert export_model(*plain, *told).code == 2


@pytest.mark.landing
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model-base-path", "gs://b/m", "--target", "h:1"), "gs://"),
        (("--model-base-path", "a/m", "--model-base-path", "b/m", "--target", "h:1"), "twice"),
        (("--model-base-path", "m", "--target", "dns:///"), "is not an address"),
        (("--model-base-path", "m", "--target", "h:1", "--token-file", "missing"), "cannot be read"),
    ],
)
def test_what_is_no_fleet_is_a_usage_error(options: tuple[str, ...], message: str) -> None:
    with process("agent", *options, "--port", "0") as started:
        _, err = started.communicate(timeout=DEADLINE_S)
    assert started.returncode == 2
    assert message in err


@pytest.mark.landing
def test_a_model_that_is_configured_away_and_back(published: Published, servers: list[Server]) -> None:
    """The agent says so while it is away, and brings it to what was published meanwhile."""
    server, version = servers[0], base_of(published)

    def configure(name: str, base_path: Path) -> None:
        arguments = (server.address, "--only", "--model", name, "--model-base-path", base_path)
        with process("reload", *arguments) as reload:
            assert reload.wait(DEADLINE_S) == 0, reload.stderr and reload.stderr.read()

    with agent(published.model, server.address) as running:
        newest = published.publish()
        wait(lambda: server.position(version) == newest)
        configure("other", published.model)
        wait(lambda: running.get("/readyz")[0] == 503)
        newest = published.publish()
        configure("ranker", published.model)
        wait(lambda: server.position(version) == newest)
        wait(lambda: running.get("/readyz")[0] == 200)
        newest = published.publish()
        wait(lambda: server.position(version) == newest)
