"""What a trainer imports: increments between full checkpoints, recorded where the variables live."""

from exporter.training.hook import IncrementHook
from exporter.training.restore import restore_increments

__all__ = ["IncrementHook", "restore_increments"]
