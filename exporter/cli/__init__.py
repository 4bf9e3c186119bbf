"""The command `export-model`: what is typed, and what is printed. Nothing here knows how a model is made."""

from __future__ import annotations

import atexit
import gc


def main() -> None:
    """The console script."""
    gc.set_threshold(100_000, 20, 20)  # modules and plans of models: many objects, few cycles
    atexit.register(gc.freeze)  # the interpreter looks for cycles once more at its end: 15 to 35 ms
    from exporter.cli import app

    app.main()
