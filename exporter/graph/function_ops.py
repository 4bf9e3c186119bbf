"""Ops that call functions, and where a handle that is passed to them arrives."""

from __future__ import annotations

LOOPS = {"While", "StatelessWhile"}
CALLS = {
    "PartitionedCall": 0,
    "StatefulPartitionedCall": 0,
    "While": 0,
    "StatelessWhile": 0,
    "If": 1,
    "StatelessIf": 1,
    "Case": 1,
    "StatelessCase": 1,
}
"""Ops that call functions, with the number of inputs before the functions' arguments."""
