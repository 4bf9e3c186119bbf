"""What `serve-model agent --json` prints: one document a line, as the reference says."""

from __future__ import annotations

import io
import json
import urllib.request
from pathlib import Path

import pytest

from exporter.terminal.output import Output, OutputMode
from serving.agent.journal import AgentEvent, EventKind
from serving.agent.view import FleetView
from serving.agent_command import _EventPrinter
from serving.cli import app
from serving.documents import AgentStarted
from tests.support.commands import run_app
from tests.support.printed_documents import checked
from tests.support.status_pages import NOON, shown, usual


def test_each_event_is_one_document_on_a_line() -> None:
    out = io.StringIO()
    sink = Output(OutputMode.JSON, json_lines=True, stdout=out)
    tell = _EventPrinter(sink)
    sink.result(AgentStarted("started", "127.0.0.1", 8600))
    tell(AgentEvent(EventKind.APPLIED, "2 deltas", "ranker", "10.0.0.7:8500", 7, 40, 400, 12, 2, 0.01, 0.25))
    tell(AgentEvent(EventKind.TARGETS, "no name is known"))
    started, applied, targets = (checked(json.loads(line)) for line in out.getvalue().splitlines())
    assert (started["what"], started["port"]) == ("started", 8600)
    assert (applied["replica"], applied["behind_seconds"]) == ("10.0.0.7:8500", 0.25)
    assert (targets["what"], targets["model"], targets["position"]) == ("targets", "", None)


def test_the_status_fits_its_schema() -> None:
    for fleet in (usual(), FleetView(NOON, ())):
        with shown(fleet) as address, urllib.request.urlopen(f"{address}status.json", timeout=60) as answer:
            assert len(checked(json.load(answer))["models"]) == len(fleet.models)


@pytest.mark.parametrize(
    ("content", "message"), [("\n", "is empty"), ("one two\n", "one word"), ("caf\xe9", "cannot be read")]
)
def test_a_token_that_no_client_could_send(content: str, message: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(content)
    ran = run_app(
        app, "agent", "--model-base-path", tmp_path, "--target", "h:1", "--token-file", token, "--json"
    )
    assert ran.code == 2
    assert message in ran.error["message"]
