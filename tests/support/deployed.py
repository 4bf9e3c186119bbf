"""The manifests of deploy/, as Kubernetes and KServe read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
KUBERNETES = sorted(path for path in DEPLOY.glob("kubernetes*/*.yaml") if path.stem != "kustomization")


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def kserve_pod() -> dict[str, Any]:
    """What KServe makes of the runtime and the service: one pod with the containers of both."""
    runtime, service = documents(DEPLOY / "kserve/ranker.yaml")
    assert service["spec"]["predictor"]["model"]["runtime"] == runtime["metadata"]["name"]
    (server,) = runtime["spec"]["containers"]
    name = service["metadata"]["name"]
    server = {**server, "args": [word.replace("{{.Name}}", name) for word in server["args"]]}
    containers = [server, *service["spec"]["predictor"]["containers"]]
    return {"containers": containers, "volumes": runtime["spec"]["volumes"]}


def pods() -> Iterator[dict[str, Any]]:
    """The specification of every pod."""
    for path in KUBERNETES:
        yield from pods_of(path)
    yield kserve_pod()


def pods_of(path: Path) -> Iterator[dict[str, Any]]:
    """The specification of every pod in a manifest of Kubernetes."""
    for document in documents(path):
        if "template" in document.get("spec", {}):
            yield document["spec"]["template"]["spec"]


def agent_of(pod: dict[str, Any]) -> dict[str, Any]:
    """The agent's container."""
    (found,) = (each for each in pod["containers"] if each["name"] == "agent")
    return dict(found)
