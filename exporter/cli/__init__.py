"""The command `export-model`: what is typed, and what is printed. Nothing here knows how a model is made."""

from __future__ import annotations


def main() -> None:
    """The console script."""
    from exporter.cli import app

    app.main()
