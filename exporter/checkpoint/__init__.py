"""Read checkpoints: one module for each family, and `open_checkpoint` for any path."""

from typing import TYPE_CHECKING

from exporter.late_names import late_names

if TYPE_CHECKING:
    from exporter.checkpoint.locate import candidates as candidates
    from exporter.checkpoint.locate import is_named as is_named
    from exporter.checkpoint.locate import open_checkpoint as open_checkpoint

__all__ = ["candidates", "is_named", "open_checkpoint"]
__getattr__ = late_names(__name__, dict.fromkeys(__all__, "exporter.checkpoint.locate"))
