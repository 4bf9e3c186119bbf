"""Signed publications from end to end: an exporter signs, servers follow a store that a thief writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.publish.delta_log import read_log
from serving import cli
from tests.support.agents import Published, Server, agent, wait
from tests.support.commands import export_model, run_app
from tests.support.key_pairs import key_pair
from tests.support.object_stores import BASE, Bucket


def test_a_thief_who_writes_the_bucket_reaches_no_server(bucket: Bucket, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path)
    published = Published(tmp_path / "exporter", options=("--sign-key", str(private)))
    thief, url, copy = Published(tmp_path / "thief"), bucket.url(BASE), tmp_path / "copy" / "ranker"
    assert export_model("push", published.model, url, "--trust", public).code == 0
    done = export_model("pull", url, copy, "--trust", public, "--json")
    assert done.document["untrusted"] == [], done.err
    version = int(read_log(copy).base.path.name)
    server = Server(copy).start()
    more = ("--pull", url, "--trust", str(public), "--poll-seconds", "0.2")
    with agent(copy, server.address, more=more) as running:
        newest = published.publish()
        assert export_model("push", published.model, url).code == 0
        wait(lambda: server.position(version) == newest)

        before = bucket.keys(BASE)
        for path in (path for path in thief.model.rglob("*") if path.is_file()):
            name = path.relative_to(thief.model).as_posix()
            if name[0].isdigit():
                bucket.put(
                    f"{BASE}/{int(name.partition('/')[0]) + 1000}/{name.partition('/')[2]}", path.read_bytes()
                )
        told = wait(lambda: running.of("failed"))
        assert "is not signed" in told[0]["message"]
        assert told[0]["message"].removeprefix("not taken: ") in running.get("/status.json")[1]
        assert running.get("/readyz")[0] == 200
        assert server.position(version) == newest and not (copy / str(version + 1000)).exists()

        for key in bucket.keys(BASE).keys() - before.keys():
            bucket.delete(key)
        rolled = export_model("rollback", url, "--to", version, "--sign-key", private, "--json")
        assert rolled.code == 0, rolled.err
        wait(lambda: server.position(version) == newest + 1)
        assert export_model("resume", url).code == 2
        unsigned = export_model("resume", url, "--unsigned")
        assert unsigned.code == 0, unsigned.err
        wait(lambda: len(running.of("failed")) > 1)
        assert server.position(version) == newest + 1, "who has no key publishes nothing, with no command"
    server.kill()


def test_a_server_of_a_volume_is_led_no_further_than_the_last_trusted_delta(tmp_path: Path) -> None:
    """What such a server does by itself nobody can keep it from: the agent and `update` lead it nowhere."""
    private, public = key_pair(tmp_path)
    published = Published(tmp_path / "exporter", options=("--sign-key", str(private)))
    good = published.publish()
    version = int(read_log(published.model).base.path.name)
    server = Server(published.model).start()
    published.options = ("--unsigned",)
    published.publish()
    asked = ("update", server.address, "--model-name", "ranker", "--json")
    refused = run_app(cli.app, *asked, "--trust", public)
    assert refused.code == 2 and "--model-base-path" in refused.error["hint"]
    asked = (*asked, "--model-base-path", published.model, "--trust", public)
    refused = run_app(cli.app, *asked, "--up-to", published.position)
    assert refused.code == 6 and "is not signed" in refused.error["cause"]
    done = run_app(cli.app, *asked)
    assert (done.code, done.document["position"]) == (0, good), done.err
    with agent(published.model, server.address, more=("--trust", str(public))) as running:
        told = wait(lambda: running.of("failed"))
        assert "is not signed" in told[0]["message"]
        assert server.position(version) == good
    server.kill()


@pytest.mark.parametrize("command", ["pull", "push", "verify", "doctor"])
def test_a_key_that_is_none_is_a_usage_error(command: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("none")
    places = {"pull": ("s3://models/ranker", "ranker"), "push": ("ranker", "s3://models/ranker")}
    ran = export_model(command, *places.get(command, ("ranker",)), "--trust", tmp_path / "key", "--json")
    assert ran.code == 2, ran.err
    assert "holds no public key" in ran.error["message"] and "openssl pkey" in ran.error["hint"]
