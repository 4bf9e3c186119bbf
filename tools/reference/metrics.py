"""The page of the agent's metrics."""

from __future__ import annotations

from serving.agent.metrics import described
from tools.reference.markdown import code, table, text

_PAGE = """\
# Metrics of the agent

`serve-model agent` serves these metrics at `/metrics`, in Prometheus' text format. A gauge without a value is
left out: a replica that does not answer has no position, and a model without a canary has none of a canary's
gauges. `deploy/prometheus/alerts.yaml` has alerts for them, `deploy/grafana/export-model.json` a dashboard.
The [production guide](../production.md#keep-every-replica-fresh) says what to do.

{table}
TensorFlow Serving and `serve-model run` have metrics of their own, with `--monitoring_config_file`.
"""


def page() -> str:
    """The page."""
    rows = (
        (code(metric.name), metric.kind, ", ".join(map(code, metric.labels)), text(metric.text))
        for metric in described()
    )
    return _PAGE.format(table=table(("metric", "kind", "labels", "what it says"), rows))
