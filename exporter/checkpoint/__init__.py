"""Read checkpoints: one module for each family, and `open_checkpoint` for any path."""

from exporter.checkpoint.locate import candidates, open_checkpoint

__all__ = ["candidates", "open_checkpoint"]
