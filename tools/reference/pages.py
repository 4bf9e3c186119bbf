"""Which pages are made from the code, and where they lie."""

from __future__ import annotations

from pathlib import Path

from exporter.cli.app import app as export_model
from serving.cli import app as serve_model
from tools.reference import commands, documents, failures, files, rooms, tf_serving

ROOT = Path(__file__).parent.parent.parent
NOTE = "<!-- Made from the code by `python -m tools.reference`; edit the code instead. -->\n\n"


def made() -> dict[str, str]:
    """The pages, by path."""
    pages = {
        "export-model.md": commands.page(export_model, "export-model"),
        "serve-model.md": commands.page(serve_model, "serve-model"),
        "tensorflow-serving.md": tf_serving.page(),
        "documents.md": documents.page(),
        "exit-codes.md": failures.exit_codes(),
        "troubleshooting.md": failures.troubleshooting(),
    }
    return {
        **{f"docs/reference/{name}": NOTE + content for name, content in pages.items()},
        f"docs/reference/{documents.SCHEMA_FILE}": documents.schema(),
        f"docs/reference/{files.SCHEMA_FILE}": files.schema(),
        "docs/reference/formats.md": files.page(),
        "docs/architecture.md": rooms.page(),
    }
