"""Dynamic embedding tables: keys are any 64-bit integers, and stock TensorFlow Serving looks them up."""

from __future__ import annotations

from exporter.tables.dynamic_table import DynamicTable, dynamic_embedding
from exporter.tables.trainable_table import TrainableTable, trainable_embedding, trainable_embedding_class

__all__ = [
    "DynamicTable",
    "TrainableTable",
    "dynamic_embedding",
    "trainable_embedding",
    "trainable_embedding_class",
]
