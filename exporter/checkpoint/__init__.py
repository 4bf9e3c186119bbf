"""Bytes to Catalog: one module a checkpoint family, and `open_checkpoint` for whatever a path means."""

from exporter.checkpoint.locate import candidates, open_checkpoint

__all__ = ["candidates", "open_checkpoint"]
