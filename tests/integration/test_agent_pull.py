"""`serve-model agent --pull`: servers follow what is published in an object store."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from exporter.errors import ManifestError
from exporter.publish.delta_log import read_log
from exporter.transfer.pull import pull
from tests.support.agents import Agent, Published, Server, agent, wait
from tests.support.commands import export_model, run_app
from tests.support.object_stores import Bucket


def test_servers_follow_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    published, url = Published(tmp_path / "exporter"), bucket.url("models/ranker")
    assert export_model("push", published.model, url).code == 0
    copy = tmp_path / "copy" / "ranker"
    pull(url, copy)
    version = int(read_log(copy).base.path.name)
    server = Server(copy).start()
    published.train()
    ran = export_model(*published.arguments(), "--notify", server.address, "--json")
    (notified,) = ran.document["notified"]
    assert notified["position"] < ran.document["position"]
    assert "nothing newer" in notified["problem"], "nobody has fetched it into the server's copy"
    with agent(copy, server.address, more=("--pull", url, "--poll-seconds", "0.2")) as running:
        for _ in range(3):
            newest = published.publish()
            assert export_model("push", published.model, url).code == 0
            wait(lambda: server.position(version) == newest)  # noqa: B023
        before = read_log(copy).deltas[-2].end
        assert export_model("rollback", url, "--to", before).code == 0
        wait(lambda: server.position(version) == newest + 1)
        wait(lambda: held(copy) == newest + 1)  # until then it says that a rollback is being published
        assert store(running)["problem"] == ""
        assert 'export_model_agent_store_visible{model="ranker"} 1.0' in running.get("/metrics")[1]
        head = bucket.keys("models/ranker/head.json")
        bucket.put("models/ranker/head.json", b"no head")
        told = wait(lambda: running.of("failed"))
        assert "head.json" in told[0]["message"]
        found = wait(lambda: store(running) if store(running)["age_s"] > 1 else None)
        assert (found["url"], found["waiting"]) == (url, [])
        assert told[0]["message"] in found["problem"] and told[0]["message"] in running.get("/")[1]
        metrics = running.get("/metrics")[1]
        assert 'export_model_agent_store_visible{model="ranker"} 0.0' in metrics
        assert "Every replica is fresh" not in running.get("/")[1]
        assert running.get("/readyz")[0] == 200, "what was fetched is served; all replicas would be taken out"
        bucket.put(*head.popitem())
        wait(lambda: any("is fetched again" in event["message"] for event in running.of("seen")))
        assert store(running)["problem"] == ""
    server.kill()


def held(copy: Path) -> int | None:
    with suppress(ManifestError):
        return read_log(copy).hold.read()
    return None


def store(running: Agent) -> dict[str, Any]:
    found = json.loads(running.get("/status.json")[1])["models"][0]["store"]
    return dict(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--pull", "models/ranker"), "expected s3://"),
        (("--pull", "other=s3://models/ranker"), "does not name a model"),
        (("--pull", "s3://models/a", "--pull", "ranker=s3://models/a"), "twice"),
    ],
)
def test_what_cannot_be_fetched_is_a_usage_error(
    options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    from serving import cli

    arguments = ("agent", "--model-base-path", tmp_path / "ranker", "--target", "127.0.0.1:1", "--json")
    ran = run_app(cli.app, *arguments, *options)
    assert ran.code == 2, ran.err
    assert message in ran.error["message"]


def test_two_models_are_not_fetched_into_one_directory(tmp_path: Path) -> None:
    from serving import cli

    models = ("--model-base-path", f"a={tmp_path}/m", "--model-base-path", f"b={tmp_path}/m")
    pulls = ("--pull", "a=s3://models/a", "--pull", "b=s3://models/b")
    ran = run_app(cli.app, "agent", *models, *pulls, "--target", "127.0.0.1:1", "--json")
    assert (ran.code, "into one directory" in ran.error["message"]) == (2, True), ran.err


def test_a_canarys_hold_on_the_copy_stays(bucket: Bucket, tmp_path: Path) -> None:
    """How far a canary has approved is a matter of the servers, not of the store."""
    from exporter.publish.staging import Staging

    published, url = Published(tmp_path / "exporter"), bucket.url("models/ranker")
    published.publish()
    assert export_model("push", published.model, url).code == 0
    copy = tmp_path / "copy"
    pull(url, copy)
    log = read_log(copy)
    with Staging(copy) as staging:
        log.hold.put(log.at.position, staging, canary=True)
    published.publish()
    assert export_model("push", published.model, url).code == 0
    pull(url, copy)
    assert read_log(copy).approved == log.at.position
    assert export_model("rollback", url, "--to", log.at.position).code == 0
    pull(url, copy)
    assert (read_log(copy).approved, read_log(copy).hold.read()) == (None, read_log(copy).at.position)


def test_an_agent_makes_a_merged_base_and_says_so(bucket: Bucket, tmp_path: Path) -> None:
    published, url = Published(tmp_path / "exporter"), bucket.url("models/ranker")
    published.publish()
    assert export_model("push", published.model, url).code == 0
    with agent(tmp_path / "ranker", "127.0.0.1:1", more=("--pull", url, "--poll-seconds", "0.2")) as running:
        wait(lambda: store(running)["newest"] and store(running)["problem"] == "")
        assert export_model("merge", published.model, "--rebase").code == 0
        assert export_model("push", published.model, url).code == 0
        spared = wait(lambda: store(running)["spared"], seconds=600)  # it is made at idle priority
        assert (spared["fetched"], spared["why_fetched"]) == (0, "") and spared["made"] > 0
        said = f"version {spared['path']}: made here from {spared['deltas']} delta"
        assert said in running.get("/")[1]
        assert any(said.removeprefix("version ") in event["message"] for event in running.of("seen"))
