"""The alerts of deploy/prometheus as the object that the Prometheus operator reads."""

from __future__ import annotations

import textwrap
from pathlib import Path

RULES = Path(__file__).parent.parent.parent / "deploy/prometheus/alerts.yaml"
_OBJECT = """\
# Made from ../../prometheus/alerts.yaml by `python -m tools.reference`; edit that file instead.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: ranker
  labels: {app: ranker}
spec:
"""


def prometheus_rule() -> str:
    """The PrometheusRule that holds the rules, as YAML."""
    groups = RULES.read_text().partition("groups:\n")[2]
    return _OBJECT + textwrap.indent(f"groups:\n{groups}", "  ")
