"""Probe whether a store honours conditions, by which publishers keep out of each other's way."""

from __future__ import annotations

import os
from contextlib import nullcontext, suppress

from exporter.errors import PublishError
from exporter.storage.objects import ObjectWriter, Tag
from exporter.storage.store_errors import NOT_IMPLEMENTED


def require_conditions(store: ObjectWriter, path: str) -> None:
    """Refuse a store that creates what is there, or replaces what has changed, against its conditions.

    Raises:
        PublishError: it does, or cannot be written or removed from.
    """
    key = f"{path}/.probe-{os.urandom(8).hex()}"
    wrong = _wrong_of(store, key)
    with suppress(PublishError) if wrong else nullcontext():
        store.delete(key)  # what a failure leaves goes with other old probes
    if wrong:
        raise PublishError(
            f"{store.url}: this store ignores conditional requests",
            cause=wrong,
            hint="use a store that honours If-None-Match and If-Match: S3, GCS, Azure, R2, MinIO",
        )


def _wrong_of(store: ObjectWriter, key: str) -> str:
    """What a store does in place of honouring conditions; empty if it honours them."""
    try:
        first = store.create(key, b"1") or _tag_of(store, key, b"1")
        second = store.create(key, b"2")
        moved = first and (store.replace(key, b"3", first) or _tag_of(store, key, b"3"))
        stale = first and store.replace(key, b"4", first)
    except PublishError as error:
        if not error.cause.startswith(NOT_IMPLEMENTED):
            raise
        return error.cause
    if first is not None and second is None and moved is not None and stale is None:
        return ""
    return "it replaced an object that it was asked to create only if absent"


def _tag_of(store: ObjectWriter, key: str, content: bytes) -> Tag | None:
    """The tag of an object that nobody else writes, if it is this: the answer to its writing was lost."""
    found = store.fetch(key, len(content))
    return found[1] if found is not None and found[0] == content else None
