"""Which pages are made from the code, and where they lie."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from exporter.cli.app import app as export_model
from serving.cli import app as serve_model
from tools.reference import (
    alerts,
    budget_chart,
    commands,
    documents,
    failures,
    files,
    findings,
    keywords,
    metrics,
    python_api,
    rooms,
    tf_serving,
)

ROOT = Path(__file__).parent.parent.parent
NOTE = "<!-- Made from the code by `python -m tools.reference`; edit the code instead. -->\n\n"


_REFERENCE: dict[str, Callable[[], str]] = {
    "export-model.md": lambda: commands.page(export_model, "export-model"),
    "serve-model.md": lambda: commands.page(serve_model, "serve-model"),
    "tensorflow-serving.md": tf_serving.page,
    "documents.md": documents.page,
    "exit-codes.md": failures.exit_codes,
    "findings.md": findings.page,
    "metrics.md": metrics.page,
    "python.md": python_api.page,
    "troubleshooting.md": failures.troubleshooting,
}
_WHOLE: dict[str, Callable[[], str]] = {
    f"docs/reference/{documents.SCHEMA_FILE}": documents.schema,
    f"docs/reference/{files.SCHEMA_FILE}": files.schema,
    "docs/reference/formats.md": files.page,
    "docs/architecture.md": rooms.page,
    "docs/assets/delta-budgets.svg": budget_chart.made,
    "exporter/options/keywords.py": keywords.module,
    "deploy/kubernetes/monitoring/alerts.yaml": alerts.prometheus_rule,
}
PATHS = [*(f"docs/reference/{name}" for name in _REFERENCE), *_WHOLE]
"""Where the pages lie."""


@cache
def made(path: str) -> str:
    """The page at one of `PATHS`."""
    if make := _WHOLE.get(path):
        return make()
    return NOTE + _REFERENCE[Path(path).name]()
