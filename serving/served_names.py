"""The names of a server's models, in the answer to a client that named another.

TensorFlow Serving's interface lists no models. `serve-model run` tells the names in the trailing metadata of
its NOT_FOUND, which other clients do not look at.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

_KEY = "export-model-served-bin"  # -bin: any bytes
_MOST_BYTES = 4096
"""gRPC takes 8 KiB of metadata with an answer."""


def as_metadata(names: Iterable[str]) -> tuple[tuple[str, bytes], ...]:
    """The metadata with these names, sorted; none if they are too many."""
    content = msgspec.json.encode(sorted(names))
    return ((_KEY, content),) if len(content) <= _MOST_BYTES else ()


def names_in(metadata: Iterable[Any] | None) -> tuple[str, ...]:
    """The names in an answer's metadata; empty if the server does not tell them, or something else."""
    found = next((value for key, value in metadata or () if key == _KEY), b"")
    try:
        names = msgspec.json.decode(found[:_MOST_BYTES], type=list[str])
    except ValueError:
        return ()
    return tuple(name for name in names if name.isprintable())
