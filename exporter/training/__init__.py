"""What a trainer imports: increments between full checkpoints, recorded where the variables live."""

from exporter.training.hook import IncrementHook
from exporter.training.keras import IncrementCallback
from exporter.training.restore import restore_increments
from exporter.training.session import MonitoredTrainingSession

__all__ = ["IncrementCallback", "IncrementHook", "MonitoredTrainingSession", "restore_increments"]
