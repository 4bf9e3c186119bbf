"""What is under deploy/ fits the real schemas, and names options and metrics that exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from exporter.publish.served import ServedTables
from exporter.version import __version__
from serving.agent.audit import Audited
from serving.agent.journal import AgentEvent, EventKind
from serving.agent.metrics import PREFIX, Metrics, described
from serving.agent.view import (
    CanaryView,
    FleetView,
    ModelView,
    PaceView,
    ReplicaView,
    StoreView,
    VersionView,
)
from serving.cli import app as serving_app
from tests.support.commands import export_model, run_app
from tests.support.deployed import DEPLOY, KUBERNETES, agent_of, documents, kserve_pod, pods
from tests.support.forks import run_warm
from tests.support.guide_pages import pages
from tests.support.project import requirements

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_manifests_fit_kubernetes_schema(path: Path) -> None:
    for document in documents(path):
        kubernetes_validate.validate(document, "1.31", strict=True)


def test_the_kustomization_names_every_manifest() -> None:
    (found,) = documents(DEPLOY / "kubernetes/kustomization.yaml")
    assert sorted(found["resources"]) == [
        path.name for path in KUBERNETES if path.parent.name == "kubernetes"
    ]


@pytest.mark.parametrize("document", documents(DEPLOY / "kserve/ranker.yaml"), ids=lambda each: each["kind"])
def test_the_manifests_of_kserve_fit_its_schemas(document: dict[str, Any]) -> None:
    """Those of its custom resources, as far as the manifests use them; no field that they do not have."""
    schema = json.loads((FIXTURES / "kserve/schemas.json").read_text())["schemas"][document["kind"]]
    jsonschema.validate(document, schema)
    mistyped = json.loads(json.dumps(document).replace('"volumeMounts"', '"volumeMount"'))
    with pytest.raises(jsonschema.ValidationError, match="volumeMount"):
        jsonschema.validate(mistyped, schema)


def test_kserve_admits_the_service() -> None:
    """Its webhook wants one implementation; since 0.15 a container beside a model is one by its name only."""
    _, service = documents(DEPLOY / "kserve/ranker.yaml")
    predictor = service["spec"]["predictor"]
    assert "model" in predictor
    assert "kserve-container" not in {container["name"] for container in predictor["containers"]}


def test_the_pod_of_kserve_fits_kubernetes_schema() -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ranker"}, "spec": kserve_pod()}
    kubernetes_validate.validate(pod, "1.31", strict=True)


def test_claims_are_defined_once_and_servers_read_what_the_exporter_writes() -> None:
    (claim,) = documents(DEPLOY / "kubernetes/volume.yaml")
    seen: dict[str, set[str]] = {}  # where a model lies in the claim, of each program
    for pod in pods():
        claims = {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"]
            for volume in pod["volumes"]
            if "persistentVolumeClaim" in volume
        }
        assert set(claims.values()) <= {claim["metadata"]["name"]}
        for container in pod["containers"]:
            for mount in container["volumeMounts"]:
                if mount["name"] not in claims:
                    continue
                given = [word.partition("=")[2] for word in container["args"] if "=" in word]
                below = [Path(word) for word in given if word.startswith(f"{mount['mountPath']}/")]
                root = Path("/", mount.get("subPath", ""))
                places = {str(root / path.relative_to(mount["mountPath"])) for path in below}
                seen.setdefault(container["name"], set()).update(places)
    assert "/models/ranker" in seen.pop("exporter")
    assert len(seen) == 3  # servers, and agents
    assert set(map(frozenset, seen.values())) == {frozenset({"/models/ranker"})}


def test_no_layout_makes_readiness_hang_on_freshness() -> None:
    """All pods share what is published; what the probe says of that, `test_agent_ready.py` tries."""
    probes = [
        agent_of(pod)["readinessProbe"]["httpGet"]["path"] for pod in pods() if len(pod["containers"]) > 1
    ]
    assert probes == ["/readyz"] * 3


def test_images_have_versions_and_ours_is_this_one() -> None:
    text = "".join(path.read_text() for path in DEPLOY.rglob("*.yaml"))
    images = set(re.findall(r"image: (\S+)", text))
    assert images == {"tensorflow/serving:2.19.1", f"export-model:{__version__}"}
    for name in ("Dockerfile", "README.md"):
        assert set(re.findall(r"-t export-model\S*:(\S+)", (DEPLOY / name).read_text())) == {__version__}
    assert set(re.findall(r"export_model-([0-9.]+)-py3", text)) == {__version__}
    typed = [block.text for page in pages() for block in page.blocks]
    named = re.findall(r"(?:tensorflow/serving|export-model(?=:))[\w:.]*", "\n".join(typed))
    assert set(named) == images


def locked(name: str) -> dict[str, str]:
    """The pinned version of each library of a lock file; each has hashes."""
    text = (DEPLOY / name).read_text()
    assert "uv pip compile" in text.partition("\n\n")[0]
    pins = re.findall(r"^(\S+)==(\S+) \\\n +--hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)
    assert len(pins) == len(re.findall(r"^[^\s#]", text, re.MULTILINE))
    return dict(pins)


def test_the_image_installs_what_the_package_allows() -> None:
    everything, slim = locked("requirements.lock"), locked("requirements-slim.lock")
    for found, wanted in [
        (everything, requirements("agent", "stores")),
        (
            slim,
            map(Requirement, re.findall(r"^[a-z].*", (DEPLOY / "requirements-slim.txt").read_text(), re.M)),
        ),
    ]:
        for each in wanted:
            assert each.specifier.contains(found[canonicalize_name(each.name)]), f"{each}: make lock"
    assert slim.items() < everything.items()
    assert "tensorflow" in everything and "tensorflow" not in slim


def commands() -> Iterator[list[str]]:
    """Every command line of ours: containers of Kubernetes, services of compose."""
    for pod in pods():
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            yield [*container["command"], *container["args"]]
    (compose,) = documents(DEPLOY / "compose.yaml")
    for service in compose["services"].values():
        yield [*service.get("entrypoint", []), *service["command"]]


def test_commands_take_the_options_that_they_are_given() -> None:
    ours = [line for line in commands() if line[0] in ("export-model", "serve-model")]
    assert len(ours) == 6
    for line in ours:
        words = [word for word in line[1:] if not word.startswith("-")]
        run = export_model if line[0] == "export-model" else lambda *given: run_app(serving_app, *given)
        options = set(re.findall(r"--[a-z-]+", run(*words, "--help" if words else "--help-all").out))
        given = {word.partition("=")[0] for word in line if word.startswith("--")}
        assert given <= options, f"{line[0]} has no {given - options}"


def workflow_steps() -> list[dict[str, Any]]:
    (workflow,) = documents(DEPLOY / "ci/export.yaml")
    found = workflow["jobs"]["export"]["steps"]
    assert len(found) > 5
    return list(found)


@pytest.mark.parametrize(
    ("schema", "file"), [("github-workflows", "ci/export.yaml"), ("compose-spec", "compose.yaml")]
)
def test_files_fit_the_schema_of_who_reads_them(schema: str, file: str) -> None:
    checker = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*checker, DEPLOY / file], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.landing
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_workflow_exports_what_it_has_tried(tmp_path: Path) -> None:
    """Its steps, as the runner runs them, but with directories of the test's own, and a free port."""
    (workflow,) = documents(DEPLOY / "ci/export.yaml")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = DEPLOY.parent
    (tmp_path / "examples").symlink_to(root / "examples")
    run_warm(root / "examples/ranker/train.py", "--out", tmp_path / "train", "--steps", "20")
    environment = {
        **os.environ,
        **workflow["jobs"]["export"]["env"],
        "CKPT_DIR": str(tmp_path / "train"),
        "MODEL": str(tmp_path / "models/ranker"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    for step in workflow_steps():
        if "run" not in step or step["name"] == "Install":
            continue
        script = step["run"].replace("8599", str(port))
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{step['name']}: {done.stdout}{done.stderr}"
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert len(answer["predictions"]) == 1
    published = json.loads((tmp_path / "published.json").read_text())
    assert published["status"] == "published"
    assert (tmp_path / "models/ranker/20/saved_model.pb").is_file()


def test_rules_and_dashboard_name_metrics_that_exist() -> None:
    known = set(re.findall(rf"^{PREFIX}_[a-z0-9_]+", every_metric(), re.MULTILINE))
    assert {metric.name for metric in described()} == {
        re.sub("_(bucket|count|sum)$", "", name) for name in known if not name.endswith("_created")
    }, "the page of metrics has them all"
    for path in (DEPLOY / "prometheus/alerts.yaml", DEPLOY / "grafana/export-model.json"):
        named = set(re.findall(rf"{PREFIX}_[a-z0-9_]+", path.read_text()))
        assert len(named) > 5
        assert named <= known, f"{path.name} names {named - known}"


def test_the_dashboard_is_one() -> None:
    board = json.loads((DEPLOY / "grafana/export-model.json").read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    kinds = set(re.search(r'kind=~"([^"]+)"', json.dumps(board).replace('\\"', '"'))[1].split("|"))  # type: ignore[index]
    assert kinds <= set(EventKind)
    first = [panel for panel in board["panels"] if panel["gridPos"]["y"] == 0]
    assert [panel["type"] for panel in first] == ["stat"] * 4, "a row of single numbers"
    covered = [
        (x, y)
        for panel in board["panels"]
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(covered)) == len(covered), "no panel covers another"


def test_no_two_alerts_are_of_one_thing() -> None:
    (rules,) = documents(DEPLOY / "prometheus/alerts.yaml")
    watched = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    assert len({*watched}) == len(watched) > 10


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_the_rules() -> None:
    rules = DEPLOY / "prometheus/alerts.yaml"
    done = subprocess.run(["promtool", "check", "rules", rules], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


SERIES = """
rule_files: [{rules}]
tests:
  - interval: 1m
    input_series:
      - {{series: 'export_model_agent_replica_fresh{{model="late", replica="r1"}}', values: '0x30'}}
      - {{series: 'export_model_agent_replica_up{{model="late", replica="r1"}}', values: '1x30'}}
      - {{series: 'export_model_agent_waiting_publications{{model="late"}}', values: '0x30'}}
      - {{series: 'export_model_agent_replica_fresh{{model="held", replica="r1"}}', values: '0x30'}}
      - {{series: 'export_model_agent_replica_up{{model="held", replica="r1"}}', values: '1x30'}}
      - {{series: 'export_model_agent_waiting_publications{{model="held"}}', values: '3x30'}}
      - {{series: 'export_model_agent_replica_fresh{{model="down", replica="r1"}}', values: '0x30'}}
      - {{series: 'export_model_agent_replica_up{{model="down", replica="r1"}}', values: '0x30'}}
    promql_expr_test:
      - expr: count by (alertname, model) (ALERTS{{alertstate="firing"}})
        eval_time: 20m
        exp_samples:
          - {{labels: '{{alertname="ReplicaNotUpdatable", model="late"}}', value: 1}}
          - {{labels: '{{alertname="PublicationsWait", model="held"}}', value: 1}}
          - {{labels: '{{alertname="ReplicaDown", model="down"}}', value: 1}}
"""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_each_incident_has_one_alert(tmp_path: Path) -> None:
    """A replica that is held back or down is not also called one that cannot be updated."""
    series = tmp_path / "series.yaml"
    series.write_text(SERIES.format(rules=DEPLOY / "prometheus/alerts.yaml"))
    done = subprocess.run(["promtool", "test", "rules", series], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def every_metric() -> str:
    """The text of a fleet about which everything is known."""
    version = VersionView(1, "AVAILABLE", 5, 5, 0, 0.0, 1.0, 2.0, "", 0.0, 0, ServedTables(1, 1, 5))
    replica = ReplicaView("m", "h:1", True, "", (version,), Audited(5, 1), PaceView(0.1, 0.01, 0.02))
    canary = CanaryView(5, 0.0, None, "")
    store = StoreView("s3://b/m", 0.0, "", ())
    model = ModelView("m", "/m", "", 1, 5, None, (), False, (replica,), canary, store=store, published=5)
    metrics = Metrics(lambda: FleetView(datetime.now(timezone.utc), (model,)))
    applied = AgentEvent(
        EventKind.APPLIED,
        "",
        "m",
        "h:1",
        rows=1,
        deltas=1,
        seconds=0.1,
        behind_seconds=0.1,
        event_age_seconds=0.2,
    )
    metrics(applied)
    return metrics.text().decode()
