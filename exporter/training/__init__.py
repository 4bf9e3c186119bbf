"""For trainers: write increments, export while training, save on the chief alone, warm starts.

    from exporter.training import ExportHook, IncrementHook, checkpoint_dir, is_chief, load_checkpoint

Each name is imported when first used. A TensorFlow that does not fit is an error then.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from exporter.terminal.tensorflow_import import require_fitting

if TYPE_CHECKING:
    from exporter.training.chief import checkpoint_dir as checkpoint_dir
    from exporter.training.chief import is_chief as is_chief
    from exporter.training.exports import ExportCallback as ExportCallback
    from exporter.training.exports import ExportHook as ExportHook
    from exporter.training.exports import ExportOutcome as ExportOutcome
    from exporter.training.hook import IncrementHook as IncrementHook
    from exporter.training.hook import MonitoredTrainingSession as MonitoredTrainingSession
    from exporter.training.keras import IncrementCallback as IncrementCallback
    from exporter.training.publisher import restore_increments as restore_increments
    from exporter.training.stop_after import StopAfterCallback as StopAfterCallback
    from exporter.training.stop_after import StopAfterHook as StopAfterHook
    from exporter.training.warm_start import LoadReport as LoadReport
    from exporter.training.warm_start import load_checkpoint as load_checkpoint

_HOMES = {
    "ExportCallback": "exports",
    "ExportHook": "exports",
    "ExportOutcome": "exports",
    "IncrementCallback": "keras",
    "IncrementHook": "hook",
    "LoadReport": "warm_start",
    "MonitoredTrainingSession": "hook",
    "StopAfterCallback": "stop_after",
    "StopAfterHook": "stop_after",
    "checkpoint_dir": "chief",
    "is_chief": "chief",
    "load_checkpoint": "warm_start",
    "restore_increments": "publisher",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'exporter.training' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    if _HOMES[name] != "chief":  # what it has is asked without TensorFlow, too
        require_fitting()
    return getattr(import_module(f"exporter.training.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
