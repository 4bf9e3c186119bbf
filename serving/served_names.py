"""The names of a server's models, in the answer to a client that asked for another.

TensorFlow Serving's interface does not list models. `serve-model run` sends their names in the trailing
metadata of its NOT_FOUND, which other clients ignore.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

_KEY = "export-model-served-bin"  # -bin: any bytes
_MOST_BYTES = 4096
"""The most bytes of names; gRPC accepts 8 KiB of metadata with an answer."""


def as_metadata(names: Iterable[str]) -> tuple[tuple[str, bytes], ...]:
    """Return the trailing metadata with these names, sorted; () if they take more than 4 KiB as JSON."""
    content = msgspec.json.encode(sorted(names))
    return ((_KEY, content),) if len(content) <= _MOST_BYTES else ()


def names_in(metadata: Iterable[Any] | None) -> tuple[str, ...]:
    """Return the names of models in an answer's metadata; empty if it has none, or they do not parse.

    `metadata` has pairs of key and value; None counts as empty. Names that are not printable are left out.
    """
    found = next((value for key, value in metadata or () if key == _KEY), b"")
    try:
        names = msgspec.json.decode(found[:_MOST_BYTES], type=list[str])
    except ValueError:
        return ()
    return tuple(name for name in names if name.isprintable())
