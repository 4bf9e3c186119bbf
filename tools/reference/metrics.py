"""The page of metrics: those of the agent, and those of an exporter that watches."""

from __future__ import annotations

from collections.abc import Iterable

from exporter.cli import watched
from exporter.terminal.process_metrics import Described
from serving.agent import metrics as agent
from tools.reference.markdown import code, table, text

_PAGE = """\
# Metrics

## Of the agent

`serve-model agent` serves these metrics at `/metrics`, in Prometheus' text format. A gauge without a value is
left out: a replica that does not answer has no position, and a model without a canary has none of a canary's
gauges. `deploy/prometheus/alerts.yaml` has alerts for them, `deploy/grafana/export-model.json` a dashboard.
The [production guide](../agent.md) says what to do.

{agent}
## Of the exporter

`export-model --watch --metrics-port PORT` serves these at `/metrics` of its own port. `kind` is the kind
of a publication, or the class of an error, as in [troubleshooting](troubleshooting.md).

{exporter}
## Of each process

Agent, exporter and `serve-model run` also have `process_cpu_seconds_total`, `process_resident_memory_bytes`,
`process_open_fds` and the like, as every program does that uses Prometheus' own library.

TensorFlow Serving and `serve-model run` have metrics of their own, with `--monitoring_config_file`.
"""


def page() -> str:
    """The page."""
    return _PAGE.format(agent=_table(agent.described()), exporter=_table(watched.described()))


def _table(described: Iterable[Described]) -> str:
    rows = (
        (code(metric.name), metric.kind, ", ".join(map(code, metric.labels)), text(metric.text))
        for metric in described
    )
    return table(("metric", "kind", "labels", "what it says"), rows)
