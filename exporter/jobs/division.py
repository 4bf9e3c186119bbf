"""Divide work into tasks of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from exporter.storage.requests import MOST_COPIED

T = TypeVar("T")

_WHOLE, _DIVIDED = 16, 4
"""A table of more than 16 tasks' bytes is divided into pieces of 4 tasks' bytes: a server reads a table
faster in one piece, and two workers write one faster in two."""


def piece_bytes(size: int, task_bytes: int) -> int | None:
    """How large the pieces are in which a table of `size` bytes is written; None if it is written in one.

    No piece is larger than what a store copies by one request to where it is published.
    """
    if size <= min(_WHOLE * task_bytes, MOST_COPIED):
        return None
    return min(_DIVIDED * task_bytes, MOST_COPIED)


def batches(pieces: Iterable[T], most: int, size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Neighbouring pieces of at most so many bytes together, or one that has more."""
    batch: list[T] = []
    size = 0
    for piece in pieces:
        more = size_of(piece)
        if batch and size + more > most:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += more
    if batch:
        yield batch
