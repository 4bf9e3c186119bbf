"""Tables by keys for `inspect`: how large they are, and how their keys are spread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.catalog import Catalog
from exporter.checkpoint.embedding_variables import EmbeddingVariable, bucket_sizes, embedding_variables

Array = np.ndarray[Any, Any]


class EmbeddingView(Struct, frozen=True):
    """An embedding variable with the names of its optimizer slots; `buckets` counts keys by key % 1000."""

    variable: EmbeddingVariable
    slots: tuple[str, ...]
    buckets: Array


def embedding_views(catalog: Catalog) -> Iterator[EmbeddingView]:
    """The embedding variables of a checkpoint; slots are told with the variable that they belong to.

    Raises:
        CheckpointError: one is damaged, or has rows outside the checkpoint's tensors.
    """
    variables = embedding_variables(catalog)
    for variable in variables.values():
        if variable.slot_of is None:
            below = f"{variable.name}/"
            slots = (name for name, other in variables.items() if other.slot_of == variable.name)
            names = tuple(name.removeprefix(below) for name in slots)
            yield EmbeddingView(variable, names, bucket_sizes(catalog, variable))
