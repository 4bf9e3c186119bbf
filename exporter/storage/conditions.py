"""Probe whether a store honours conditions, by which publishers keep out of each other's way."""

from __future__ import annotations

import os

from exporter.errors import PublishError
from exporter.storage.objects import ObjectWriter, Tag
from exporter.storage.store_errors import NOT_IMPLEMENTED


def require_conditions(store: ObjectWriter, path: str) -> None:
    """Refuse a store that creates what is there, or replaces what has changed, against its conditions.

    Raises:
        PublishError: it does, or cannot be written.
    """
    key = f"{path}/.probe-{os.urandom(8).hex()}"
    try:
        wrong = (
            "" if _honours(store, key) else "it replaced an object that it was asked to create only if absent"
        )
    except PublishError as error:
        if not error.cause.startswith(NOT_IMPLEMENTED):
            raise
        wrong = error.cause
    if wrong:
        raise PublishError(
            f"{store.url}: this store ignores conditional requests",
            cause=wrong,
            hint="use a store that honours If-None-Match and If-Match: S3, GCS, Azure, R2, MinIO",
        )


def _honours(store: ObjectWriter, key: str) -> bool:
    try:
        first = store.create(key, b"1") or _tag_of(store, key, b"1")
        second = store.create(key, b"2")
        moved = first and (store.replace(key, b"3", first) or _tag_of(store, key, b"3"))
        stale = first and store.replace(key, b"4", first)
    finally:
        store.delete(key)
    return first is not None and second is None and moved is not None and stale is None


def _tag_of(store: ObjectWriter, key: str, content: bytes) -> Tag | None:
    """The tag of an object that nobody else writes, if it is this: the answer to its writing was lost."""
    found = store.fetch(key, len(content))
    return found[1] if found is not None and found[0] == content else None
