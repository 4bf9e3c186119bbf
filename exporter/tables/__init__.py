"""Dynamic embedding tables: keys are any 64-bit integers, and stock TensorFlow Serving looks them up.

Each name is imported when first used: an export needs neither the tables of builders nor those of trainers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from exporter.late_names import late_names, short_help

if TYPE_CHECKING:
    from exporter.tables.dynamic_table import DynamicTable as DynamicTable
    from exporter.tables.dynamic_table import dynamic_embedding as dynamic_embedding
    from exporter.tables.trainable_table import TrainableTable as TrainableTable
    from exporter.tables.trainable_table import trainable_embedding as trainable_embedding
    from exporter.tables.trainable_table import trainable_embedding_class as trainable_embedding_class

_HOMES = {
    "DynamicTable": "exporter.tables.dynamic_table",
    "TrainableTable": "exporter.tables.trainable_table",
    "dynamic_embedding": "exporter.tables.dynamic_table",
    "trainable_embedding": "exporter.tables.trainable_table",
    "trainable_embedding_class": "exporter.tables.trainable_table",
}
__all__ = sorted(_HOMES)
__getattr__ = late_names(__name__, _HOMES)
short_help(__name__)


def __dir__() -> list[str]:
    return __all__
