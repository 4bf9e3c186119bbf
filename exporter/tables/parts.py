"""The variables that a table by keys is served from."""

from __future__ import annotations

INDEX_SEEDS, INDEX_ROWS, KEYS, VALUES = "index_seeds", "index_rows", "keys", "values"
PARTS = (INDEX_SEEDS, INDEX_ROWS, KEYS, VALUES)
"""The served variables of a table, after its name and a slash."""
