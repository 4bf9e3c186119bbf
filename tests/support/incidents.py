"""What everybody is told of an incident: page, probes, metrics, alerts, event command, doctor.

One agent beside real servers; alerts are those of deploy/, over the metrics that the agent serves.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.agents import Agent, Published, Server, agent, wait
from tests.support.commands import Ran, export_model
from tests.support.deployed import DEPLOY

ROOT = Path(__file__).parents[2]
PREFIX = "export_model_agent"


@dataclass
class World:
    """A trainer, what is published of it, two servers, and an agent whose events run a command."""

    published: Published
    servers: list[Server]
    agent: Agent
    directory: Path
    alerts: set[str] = field(default_factory=set)

    @property
    def events(self) -> list[dict[str, Any]]:
        """What the event command was given."""
        file = self.directory / "events"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def findings(self) -> list[dict[str, Any]]:
        """What `/status.json` finds."""
        return list(json.loads(self.agent.get("/status.json")[1])["findings"])

    def codes(self) -> list[str]:
        return [finding["code"] for finding in self.findings]

    @property
    def page(self) -> str:
        return self.agent.get("/")[1]

    def metric(self, name: str) -> list[float]:
        """The values of a metric, of each model or replica."""
        families = text_string_to_metric_families(self.agent.get("/metrics")[1])
        return [one.value for each in families for one in each.samples if one.name == f"{PREFIX}_{name}"]

    def doctor(self) -> Ran:
        """The doctor, which also asks servers and the agent."""
        targets = [part for server in self.servers for part in ("--target", server.address)]
        there = f"http://127.0.0.1:{self.agent.port}"
        return export_model(
            "doctor", self.published.model, *targets, "--agent", there, "--json", "--deadline", "2"
        )


@contextmanager
def world(published: Published, directory: Path, *more: str, already: str = "") -> Iterator[World]:
    """The servers follow before anything happens; `already`: a finding that may be there by then."""
    told = directory / "events"
    line = 'read -r line; printf "%s\\n" "$line"'  # which takes no backslash for more than it is
    notify = f"--on-event=sh -c '{line} >> {told}'"
    with ExitStack() as stack:
        servers = [Server(published.model, stack=stack).start() for _ in range(2)]
        addresses = [server.address for server in servers]
        running = stack.enter_context(agent(published.model, *addresses, more=(notify, *more)))
        found = World(published, servers, running, directory)
        wait(lambda: running.get("/readyz")[0] == 200 and {*found.codes()} <= {already})
        yield found


def firing(metrics: str, directory: Path, job: str = "export-model-agent") -> set[str]:
    """The alerts of deploy/ that fire if a process of this job serves these metrics for an hour."""
    inputs = [{"series": f'up{{job="{job}", instance="a:8600"}}', "values": "1x60"}]
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            labels = {**sample.labels, "job": job, "instance": "a:8600"}
            text = ", ".join(f"{key}={json.dumps(value)}" for key, value in labels.items())
            inputs.append({"series": f"{sample.name}{{{text}}}", "values": f"{sample.value}x60"})
    test = {
        "interval": "1m",
        "input_series": [one for one in inputs if "NaN" not in one["values"] and "+Inf" not in one["series"]],
        "promql_expr_test": [
            {
                "expr": "count by (alertname) (ALERTS{alertstate='firing'})",
                "eval_time": "40m",
                "exp_samples": [{"labels": '{alertname="none"}', "value": 1}],
            }
        ],
    }
    file = directory / "alerts-test.yaml"
    rules = [str(DEPLOY / "prometheus/alerts.yaml")]
    file.write_text(yaml.safe_dump({"rule_files": rules, "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, timeout=120)
    told = (done.stdout + done.stderr).partition("got:")[2]  # what it found in the place of "none"
    assert told, done.stdout + done.stderr
    return set(re.findall(r'alertname="(\w+)"', told))


def type_it(
    line: str, directory: Path, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Type a printed command into a shell, in a directory that has nothing to do with it."""
    programs = directory / "bin"
    if not programs.exists():
        programs.mkdir()
        for name, module in (("export-model", "exporter"), ("serve-model", "serving")):
            script = programs / name
            script.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
            script.chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **(variables or {}), "PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-c", line], cwd="/", env=environment, capture_output=True, text=True, timeout=300
    )


HAS_PROMTOOL = shutil.which("promtool") is not None
