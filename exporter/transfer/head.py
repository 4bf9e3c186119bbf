"""The head of a model in a store: what was published there last, or is being published now.

A publisher goes on from a head that it made itself, that it pulled, or whose publication it holds; it is
replaced on the condition that nobody else has replaced it. So a model in a store has one history, whoever
publishes: what is published beside it is refused before a reader can see it.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from exporter.errors import ManifestError
from exporter.files import read_regular, writing
from exporter.layout import HEAD_FILE, PUSHED_FILE
from exporter.storage.objects import ObjectWriter, Tag, Url

_LONGEST = 1 << 16


class Head(Struct, frozen=True):
    """The path of a publication below the model, and the lower-case SHA-256 of its manifest."""

    path: str
    manifest: str
    format_version: int = 1

    def encoded(self) -> bytes:
        """The object's content."""
        return msgspec.json.encode(self)


def fetch_head(store: ObjectWriter, url: Url) -> tuple[Head, Tag] | None:
    """The head in a store and its tag; None where nothing was pushed yet.

    Raises:
        ManifestError: there is one, and it says nothing.
        CheckpointError: it cannot be read.
    """
    found = store.fetch(f"{url.path}/{HEAD_FILE}", _LONGEST)
    if found is None:
        return None
    try:
        return msgspec.json.decode(found[0], type=Head), found[1]
    except msgspec.DecodeError as error:
        raise ManifestError(
            f"{url}/{HEAD_FILE} is no head of a model", cause=str(error), hint="push to a URL of its own"
        ) from None


def remember(model: Path, url: Url, head: Head) -> None:
    """Keep a store's head beside the model: what it names may be merged away locally by the next push."""
    heads = _heads(model) | {str(url): head}
    path = model / PUSHED_FILE
    new = path.with_name(f"{PUSHED_FILE}.{os.getpid()}")
    with writing(path):
        new.write_bytes(msgspec.json.encode(heads))
        new.replace(path)


def recall(model: Path, url: Url) -> Head | None:
    """The head that this directory knows of a store."""
    return _heads(model).get(str(url))


def _heads(model: Path) -> dict[str, Head]:
    try:
        return msgspec.json.decode(read_regular(model / PUSHED_FILE, _LONGEST), type=dict[str, Head])
    except (OSError, msgspec.DecodeError):
        return {}  # the publications themselves tell, as long as they are there
