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
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from exporter.cli import watched
from exporter.publish.judge import Silence
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
from serving.run_command import MEMORY_THRESHOLDS
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


def test_servers_keep_as_much_freed_memory_as_serve_model_run() -> None:
    found = [
        {each["name"]: each.get("value") for each in container["env"]}
        for pod in pods()
        for container in pod["containers"]
        if any(each["name"] == "MALLOC_ARENA_MAX" for each in container.get("env", ()))
    ]
    (compose,) = documents(DEPLOY / "compose.yaml")
    found += [each["environment"] for each in compose["services"].values() if "environment" in each]
    servers = [environment for environment in found if "MALLOC_ARENA_MAX" in environment]
    assert len(servers) == 4
    for environment in servers:
        assert {name: environment.get(name) for name in MEMORY_THRESHOLDS} == {
            name: str(size) for name, size in MEMORY_THRESHOLDS.items()
        }


def test_the_kustomization_names_every_manifest() -> None:
    (found,) = documents(DEPLOY / "kubernetes/kustomization.yaml")
    assert sorted(found["resources"]) == [
        path.name for path in KUBERNETES if path.parent.name == "kubernetes"
    ]


CUSTOM_RESOURCES = [
    document
    for name in (
        "kserve/ranker.yaml",
        "kubernetes/monitoring/agents.yaml",
        "kubernetes/monitoring/alerts.yaml",
    )
    for document in documents(DEPLOY / name)
]


@pytest.mark.parametrize("document", CUSTOM_RESOURCES, ids=lambda each: each["kind"])
def test_custom_resources_fit_their_schemas(document: dict[str, Any]) -> None:
    """KServe's and the Prometheus operator's, as far as the manifests use them."""
    schema = json.loads((FIXTURES / "custom_resources/schemas.json").read_text())[document["kind"]]
    jsonschema.validate(document, schema)
    mistyped = json.loads(json.dumps(document).replace('"spec": {', '"spec": {"volumeMount": 1, ', 1))
    with pytest.raises(jsonschema.ValidationError, match="volumeMount"):
        jsonschema.validate(mistyped, schema)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_the_base_and_its_component(tmp_path: Path) -> None:
    base = shutil.copytree(DEPLOY / "kubernetes", tmp_path / "kubernetes")
    kustomization = base / "kustomization.yaml"
    kustomization.write_text(kustomization.read_text().replace("# components:", "components:"))
    done = subprocess.run(["kubectl", "kustomize", base], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    built = [document for document in yaml.safe_load_all(done.stdout) if document["kind"] != "Namespace"]
    assert {document["metadata"]["namespace"] for document in built} == {"ranker"}
    assert {"PodMonitor", "PrometheusRule", "PodDisruptionBudget", "NetworkPolicy"} <= {
        document["kind"] for document in built
    }


def test_every_container_is_one_that_the_restricted_standard_admits() -> None:
    """Kubernetes' pod security standard: https://kubernetes.io/docs/concepts/security/pod-security-standards/."""
    found = 0
    for pod in pods():
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            merged = {**pod.get("securityContext", {}), **container["securityContext"]}
            assert merged["runAsNonRoot"] and merged["runAsUser"] > 0
            assert merged["seccompProfile"] == {"type": "RuntimeDefault"}
            assert merged["capabilities"] == {"drop": ["ALL"]}
            assert merged["allowPrivilegeEscalation"] is False
            found += 1
    assert found == 8


def test_every_server_is_given_the_time_that_it_needs() -> None:
    """To load a base before it is asked, and to answer who has asked before it ends."""
    for pod in pods():
        for server in pod["containers"]:
            if server["command"] == ["tensorflow_model_server"]:
                startup = server["startupProbe"]
                assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
                waits = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
                assert waits < pod.get("terminationGracePeriodSeconds", 30)


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
        (everything, requirements("agent", "stores", "signing")),
        (
            slim,
            map(Requirement, re.findall(r"^[a-z].*", (DEPLOY / "requirements-slim.txt").read_text(), re.M)),
        ),
    ]:
        for each in wanted:
            if each.marker and not each.marker.evaluate({"python_version": "3.11"}):
                continue  # for Pythons older than the image's
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
    assert len(ours) == 7
    for line in ours:
        words = [word for word in line[1:] if not word.startswith("-")]
        run = export_model if line[0] == "export-model" else lambda *given: run_app(serving_app, *given)
        has_all = not words or words[0] in ("run", "agent")
        options = set(re.findall(r"--[a-z-]+", run(*words, "--help-all" if has_all else "--help").out))
        given = {word.partition("=")[0] for word in line if word.startswith("--")}
        assert given <= options, f"{line[0]} has no {given - options}"


def workflow_steps() -> list[dict[str, Any]]:
    (workflow,) = documents(DEPLOY / "ci/export.yaml")
    found = workflow["jobs"]["export"]["steps"]
    assert len(found) > 5
    return list(found)


@pytest.mark.parametrize(
    ("schema", "file"),
    [
        ("github-workflows", "ci/export.yaml"),
        ("github-workflows", "../.github/workflows/ci.yml"),
        ("github-workflows", "../.github/workflows/nightly.yml"),
        ("compose-spec", "compose.yaml"),
    ],
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
    exporters = {metric.name for metric in watched.described()}
    named = set(re.findall(rf"{watched.PREFIX}_[a-z0-9_]+", (DEPLOY / "prometheus/alerts.yaml").read_text()))
    assert named and named <= exporters
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


AGENT = 'job="export-model-agent", instance="{pod}:8600", namespace="ml", pod="{pod}"'


def series(name: str, values: str, pod: str = "a", **labels: str) -> str:
    """A line of a rule test: a metric of the agent in one pod."""
    more = "".join(f', {key}="{value}"' for key, value in labels.items())
    return f"{{series: '{name}{{{AGENT.format(pod=pod)}{more}}}', values: '{values}'}}"


def metric(name: str, values: str, pod: str = "a") -> str:
    """The same for a metric of a model, and of the pod's own server, as every agent of a sidecar calls it."""
    return series(f"{PREFIX}_{name}", values, pod, model="ranker", replica="127.0.0.1:8500")


UP = series("up", "1x60")


def exporter(name: str, values: str, **labels: str) -> str:
    """A line of a rule test: a metric of the exporter."""
    return series(name, values, **labels).replace("-agent", "-exporter").replace("8600", "8601")


FIRES = {
    "AgentDown": [series("up", "0x60")],
    "NoAgent": ["{series: 'up{job=\"other\"}', values: '1x60'}"],
    "ExporterDown": [UP, exporter("up", "0x60")],
    "ExporterFails": [
        UP,
        exporter(f"{watched.PREFIX}_failing", "1x60", model="ranker", kind="DiskFull"),
        exporter(f"{watched.PREFIX}_lag_seconds", "0+60x60", model="ranker"),
    ],
    "ExporterBehind": [UP, exporter(f"{watched.PREFIX}_lag_seconds", "901x60", model="ranker")],
    "WildRows": [UP, exporter(f"{watched.PREFIX}_wild_rows", "3x60", model="ranker")],
    "BudgetExceeded": [UP, exporter(f"{watched.PREFIX}_budget_excess_bytes", "100x60", model="ranker")],
    "ReplicaNotFresh": [UP, metric("stale_seconds", "61x60")],
    "ReplicaNotUpdatable": [
        UP,
        metric("replica_fresh", "0x60"),
        metric("replica_up", "1x60"),
        metric("waiting_publications", "0x60"),
        metric("waiting_publications", "3x60", pod="b"),
    ],
    "NewBaseNotServed": [UP, metric("superseded_seconds", "901x60")],
    "ReplicaDown": [UP, metric("replica_up", "0x60")],
    "ReplicaDiffers": [UP, metric("replica_right", "0x60")],
    "BaseWanted": [UP, metric("base_wanted", "1x60"), metric("base_wanted", "1x60", pod="b")],
    "PublicationsWait": [UP, metric("waiting_publications", "1x60")],
    "RolledBack": [UP, metric("rolled_back", "1x60")],
    "GoldenRequestsFail": [UP, metric("golden_failing", "1x60")],
    "CanaryWaits": [UP, metric("canary_waiting_seconds", "301x60")],
    "OverlayFills": [UP, metric("overlay_ratio", "0.81x60")],
    "PublisherSilent": [UP, metric("publisher_silent", "1x60")],
    "ClockSkew": [UP, metric("publisher_clock_ahead_seconds", "-61x60")],
    "NothingPublished": [UP, metric("worst_served_age_seconds", "3601x60")],
    "TrainingEventsOld": [UP, metric("worst_event_age_seconds", "3601x60")],
    "CopyOld": [UP, metric("copy_age_seconds", "301x60")],
    "StoreUnseen": [UP, metric("store_visible", "0x60")],
    "PublicationDamaged": [UP, metric("store_damaged", "1x60"), metric("store_damaged", "1x60", pod="b")],
    "CopyDiskFull": [UP, metric("copy_disk_full", "1x60")],
    "ReplicaRestarts": [UP, metric("replica_restarts", "3x60")],
    "TwoPublishers": [UP, metric("publishers", "2x60"), metric("publishers", "2x60", pod="b")],
    "PublicationsWithheld": [UP, metric("withheld_publications", "1x60")],
    "ModelDirectoryUnseen": [UP, metric("published_visible", "0x60")],
}
SILENT = {
    "all is well": [
        UP,
        *(
            metric(name, values)
            for name, values in {
                "stale_seconds": "59x60",
                "replica_fresh": "1x60",
                "replica_up": "1x60",
                "replica_right": "1x60",
                "replica_restarts": "2x60",
                "publishers": "1x60",
                "store_visible": "1x60",
                "store_damaged": "0x60",
                "copy_disk_full": "0x60",
                "superseded_seconds": "900x60",
                "base_wanted": "0x60",
                "waiting_publications": "0x60",
                "rolled_back": "0x60",
                "publisher_silent": "0x60",
                "publisher_clock_ahead_seconds": "60x60",
                "golden_failing": "0x60",
                "canary_waiting_seconds": "300x60",
                "overlay_ratio": "0.8x60",
                "worst_served_age_seconds": "3600x60",
                "worst_event_age_seconds": "3600x60",
                "copy_age_seconds": "300x60",
                "withheld_publications": "0x60",
                "published_visible": "1x60",
            }.items()
        ),
        exporter("up", "1x60"),
        exporter(f"{watched.PREFIX}_lag_seconds", "900x60", model="ranker"),
    ],
    "an exporter restarts, and fails for a moment": [
        UP,
        exporter("up", "1x10 0x4 1x46"),
        exporter(f"{watched.PREFIX}_failing", "1x8", model="ranker", kind="DiskFull"),
    ],
    "an agent restarts": [series("up", "1x10 0x4 1x46")],
    "a server restarts": [UP, metric("replica_up", "1x10 0x1 1x49")],
}
PROMTOOL = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def firing(directory: Path, inputs: list[str], expected: list[dict[str, str]]) -> None:
    """Fail unless exactly these alerts fire after 40 minutes of such metrics."""
    samples = [
        {"labels": "{" + ", ".join(f'{key}="{value}"' for key, value in labels.items()) + "}", "value": 1}
        for labels in expected
    ]
    by = "count by (alertname, pod) (ALERTS{alertstate='firing'})"
    test = {
        "interval": "1m",
        "input_series": [yaml.safe_load(line) for line in inputs],
        "promql_expr_test": [{"expr": by, "eval_time": "40m", "exp_samples": samples}],
    }
    file = directory / "test.yaml"
    rules = [str(DEPLOY / "prometheus/alerts.yaml")]
    file.write_text(yaml.safe_dump({"rule_files": rules, "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_its_test() -> None:
    (rules,) = documents(DEPLOY / "prometheus/alerts.yaml")
    assert [rule["alert"] for group in rules["groups"] for rule in group["rules"]] == list(FIRES)


def test_every_alert_has_a_runbook() -> None:
    (rules,) = documents(DEPLOY / "prometheus/alerts.yaml")
    page = (DEPLOY.parent / "docs/runbooks.md").read_text()
    titles = re.findall(r"^## (\w+)$", page, re.MULTILINE)
    found = [rule for group in rules["groups"] for rule in group["rules"]]
    assert titles == [rule["alert"] for rule in found]
    assert [rule["annotations"]["runbook_url"] for rule in found] == [
        f"runbooks.html#{title.lower()}" for title in titles
    ]


ONCE_A_MODEL = re.compile(r"max by \(namespace, model\)|absent")


@PROMTOOL
@pytest.mark.parametrize("alert", FIRES)
def test_an_alert_fires_when_it_must_and_alone(alert: str, tmp_path: Path) -> None:
    """Of a server or an agent it names the pod, though all have the same address; of a model it is one."""
    (rules,) = documents(DEPLOY / "prometheus/alerts.yaml")
    (rule,) = (rule for group in rules["groups"] for rule in group["rules"] if rule["alert"] == alert)
    pod = {} if ONCE_A_MODEL.match(rule["expr"]) else {"pod": "a"}
    also = [{"alertname": "PublicationsWait"}] if alert == "ReplicaNotUpdatable" else []
    firing(tmp_path, FIRES[alert], [{"alertname": alert, **pod}, *also])


@PROMTOOL
@pytest.mark.parametrize("world", SILENT)
def test_no_alert_fires_when_none_must(world: str, tmp_path: Path) -> None:
    firing(tmp_path, SILENT[world], [])


@PROMTOOL
def test_a_pod_that_is_down_is_not_also_called_late(tmp_path: Path) -> None:
    """Another pod's server that is up has the same address."""
    down = [metric("replica_fresh", "0x60"), metric("replica_up", "0x60")]
    up = [metric("replica_fresh", "1x60", pod="b"), metric("replica_up", "1x60", pod="b")]
    firing(tmp_path, [UP, *down, *up], [{"alertname": "ReplicaDown", "pod": "a"}])


@PROMTOOL
def test_prometheus_takes_the_scrape_configuration(tmp_path: Path) -> None:
    """Without the discovery of pods, which not every build of promtool knows."""
    (configuration,) = documents(DEPLOY / "prometheus/prometheus.yaml")
    (job,) = configuration["scrape_configs"]
    kept, _, job_label, *_ = job["relabel_configs"]
    assert job_label["target_label"] == "job" and job_label["source_labels"] == kept["source_labels"]
    known = set(re.findall(r'job="([^"]+)"', (DEPLOY / "prometheus/alerts.yaml").read_text()))
    assert known == {"export-model-agent", "export-model-exporter"}, "the names by which alerts know them"
    assert all(re.fullmatch(kept["regex"], name) for name in known)
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    job["static_configs"] = [{"targets": ["127.0.0.1:8600"]}]
    file = tmp_path / "prometheus.yaml"
    file.write_text(yaml.safe_dump(configuration))
    shutil.copy(DEPLOY / "prometheus/alerts.yaml", tmp_path)
    done = subprocess.run(["promtool", "check", "config", file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def every_metric() -> str:
    """The text of a fleet about which everything is known."""
    version = VersionView(1, "AVAILABLE", 5, 5, 0, 0.0, 1.0, 2.0, "", 0.0, 0, ServedTables(1, 1, 5))
    replica = ReplicaView("m", "h:1", True, "", (version,), Audited(5, 1), PaceView(0.1, 0.01, 0.02))
    canary = CanaryView(5, 0.0, None, "")
    store = StoreView("s3://b/m", 0.0, None, ())
    model = ModelView(
        "m",
        "/m",
        "",
        1,
        5,
        None,
        (),
        False,
        (replica,),
        canary,
        store=store,
        published=5,
        silence=Silence(1.0, 2.0),
        skew_s=0.0,
    )
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
