"""The agent and `--notify` towards a server that lets in nobody without a certificate, as real processes."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from exporter.publish.delta_log import read_log
from exporter.terminal.server_access import ServerAccess
from serving.cli import app
from serving.client import ModelClient
from serving.updates import read_incremental_status
from tests.support.agents import Published, Server, agent, wait
from tests.support.certificates import Certified
from tests.support.commands import export_model, run_app


def test_a_chain_of_certificates(tmp_path: Path) -> None:
    certified = Certified(tmp_path / "tls")
    published = Published(tmp_path / "world")
    config = certified.config(tmp_path / "ssl.config", verify=True)
    files = {"ca": certified.ca, "cert": certified.client.cert, "key": certified.client.key}
    options = tuple(f"--grpc={word}={file}" for word, file in files.items())
    access = ServerAccess(str(certified.ca), str(certified.client.cert), str(certified.client.key))
    with ExitStack() as stack:
        server = Server(published.model, stack=stack, more=(f"--ssl_config_file={config}",)).start()

        def position() -> int:
            with ModelClient(server.address, published.model.name, access=access) as client:
                found = read_incremental_status(client, int(read_log(published.model).base.path.name))
            assert found is not None
            return found.position

        with agent(published.model, server.address, more=options) as running:
            newest = published.publish()
            wait(lambda: position() == newest)
            wait(lambda: running.get("/readyz")[0] == 200)
            _, status = running.get("/status.json")
            assert json.loads(status)["models"][0]["replicas"][0]["versions"][0]["position"] == newest
        newest = published.publish("--notify", server.address, *options)
        assert position() == newest
        without = export_model("doctor", published.model, "--target", server.address)
        assert (without.code, "no model server" in without.err) == (7, True)
        shown = run_app(app, "status", server.address, "--model-name", "ranker", *options)
        assert shown.code == 0, shown.err
        refused = run_app(app, "agent", "--model-base-path", published.model, "--target", server.address,
                          "--grpc", f"ca={tmp_path / 'missing.pem'}")  # fmt: skip
        assert (refused.code, "cannot be read" in refused.err) == (2, True)
