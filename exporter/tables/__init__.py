"""Dynamic embedding tables: keys are any 64-bit integers, and stock TensorFlow Serving looks them up."""

from __future__ import annotations

from exporter.tables.dynamic_table import DynamicTable

__all__ = ["DynamicTable"]
