"""Options of the agent that are typed for each model, and which models are fetched."""

from __future__ import annotations

from pathlib import Path

from exporter.options import ANYBODY
from serving.agent.by_model import by_model
from serving.agent.journal import Journal
from serving.agent.puller import pullers_of
from serving.agent_command import _followed


def test_only_what_is_fetched_is_a_copy(tmp_path: Path) -> None:
    """Of the others the agent sees when something appears, and by how much the publisher's clock is off."""
    paths = {"a": tmp_path / "a", "b": tmp_path / "b"}
    pullers = pullers_of(["b=s3://models/b"], paths, Journal(), 1.0, ANYBODY)
    assert {model.name: model.is_copy for model in _followed(paths, pullers)} == {"a": False, "b": True}


def test_a_url_may_have_an_equals_sign(tmp_path: Path) -> None:
    url = "s3://models/day=2026-11-28/a"
    (puller,) = pullers_of([url], {"a": tmp_path}, Journal(), 1.0, ANYBODY).values()
    assert puller.fetched.url == url
    assert by_model("--pull", [f"b={url}", f"a={url}"], ["a", "b"]) == {"a": url, "b": url}
