"""Dynamic embedding tables: keys are any 64-bit integers, and stock TensorFlow Serving looks them up.

Each name is imported when first used: an export needs neither the builders' tables nor the trainers'.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exporter.tables.dynamic_table import DynamicTable as DynamicTable
    from exporter.tables.dynamic_table import dynamic_embedding as dynamic_embedding
    from exporter.tables.trainable_table import TrainableTable as TrainableTable
    from exporter.tables.trainable_table import trainable_embedding as trainable_embedding
    from exporter.tables.trainable_table import trainable_embedding_class as trainable_embedding_class

_HOMES = {
    "DynamicTable": "dynamic_table",
    "TrainableTable": "trainable_table",
    "dynamic_embedding": "dynamic_table",
    "trainable_embedding": "trainable_table",
    "trainable_embedding_class": "trainable_table",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'exporter.tables' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    return getattr(import_module(f"exporter.tables.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
