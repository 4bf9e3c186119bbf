"""Print tables by keys: as documents, and as lines for people."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from exporter.cli.documents import inspections
from exporter.pipeline.table_views import EmbeddingView, ServedTableView
from exporter.progress import human_bytes


def embedding_document(view: EmbeddingView) -> inspections.EmbeddingTable:
    """An embedding variable of a checkpoint as a document."""
    variable = view.variable
    return inspections.EmbeddingTable(
        name=variable.name,
        key_dtype=variable.key_dtype.label,
        dtype=variable.value_dtype.label,
        dimension=variable.dim,
        keys=variable.rows,
        bytes=variable.bytes_,
        filtered_keys=variable.filtered_keys,
        parts=len(variable.parts),
        slots=view.slots,
        keys_by_remainder=view.buckets.tolist(),
    )


def embedding_lines(view: EmbeddingView) -> Iterator[tuple[str, str]]:
    """An embedding variable for people: labels and texts."""
    variable, buckets = view.variable, view.buckets
    filtered = f", {variable.filtered_keys} more filtered" if variable.filtered_keys else ""
    parts = f", {len(variable.parts)} parts" if len(variable.parts) > 1 else ""
    slots = f", slots {', '.join(view.slots)}" if view.slots else ""
    yield (
        "table",
        f"{variable.name}: {variable.rows} keys{filtered}, {variable.value_dtype.label}[{variable.dim}], "
        f"{human_bytes(variable.bytes_)}{parts}{slots}",
    )
    if variable.rows:
        spread = f"{buckets.min()} to {buckets.max()}, median {np.median(buckets):g}"
        yield "", f"keys in each of {len(buckets)} buckets (key % {len(buckets)}): {spread}"


def served_document(view: ServedTableView) -> inspections.ServedTable:
    """A dynamic table as it is served, as a document."""
    return inspections.ServedTable(
        name=view.name,
        dtype=view.dtype.label,
        dimension=view.dim,
        keys=view.keys,
        free_rows=view.free_rows,
        load_factor=round(view.load_factor, 3),
        bytes=view.bytes_,
        index_bytes=view.index_bytes,
    )


def served_text(view: ServedTableView) -> str:
    """A dynamic table as it is served, for people."""
    return (
        f"{view.name}: {view.keys} keys, room for {view.free_rows} more, {view.dtype.label}[{view.dim}], "
        f"{human_bytes(view.bytes_)}, index {human_bytes(view.index_bytes)} with load factor "
        f"{view.load_factor:.2f}"
    )
