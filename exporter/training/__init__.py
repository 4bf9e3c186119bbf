"""For trainers: write increments, export while training, save only on the chief, warm starts.

    from exporter.training import ExportHook, IncrementHook, checkpoint_dir, is_chief, load_checkpoint

Each name is imported when first used. An unsuitable TensorFlow is an error then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exporter.late_names import late_names, short_help
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
    from exporter.training.restoring import restore_increments as restore_increments
    from exporter.training.stop_after import StopAfterCallback as StopAfterCallback
    from exporter.training.stop_after import StopAfterHook as StopAfterHook
    from exporter.training.warm_start import LoadReport as LoadReport
    from exporter.training.warm_start import load_checkpoint as load_checkpoint
    from exporter.training.writer import IncrementWriter as IncrementWriter

_CHIEF, _WRITER = "exporter.training.chief", "exporter.training.writer"
_HOMES = {
    "ExportCallback": "exporter.training.exports",
    "ExportHook": "exporter.training.exports",
    "ExportOutcome": "exporter.training.exports",
    "IncrementCallback": "exporter.training.keras",
    "IncrementHook": "exporter.training.hook",
    "IncrementWriter": _WRITER,
    "LoadReport": "exporter.training.warm_start",
    "MonitoredTrainingSession": "exporter.training.hook",
    "StopAfterCallback": "exporter.training.stop_after",
    "StopAfterHook": "exporter.training.stop_after",
    "checkpoint_dir": _CHIEF,
    "is_chief": _CHIEF,
    "load_checkpoint": "exporter.training.warm_start",
    "restore_increments": "exporter.training.restoring",
}
__all__ = sorted(_HOMES)
_get = late_names(__name__, _HOMES)
short_help(__name__)


def __getattr__(name: str) -> Any:
    if _HOMES.get(name, _CHIEF) not in (_CHIEF, _WRITER):  # the names in these work without TensorFlow
        require_fitting()
    return _get(name)


def __dir__() -> list[str]:
    return __all__
