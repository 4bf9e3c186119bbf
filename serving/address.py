"""Parse the address of a model server; the port may be left out."""

from __future__ import annotations

import re

GRPC_PORT = 8500
"""Where TF Serving's image and `serve-model run` listen."""

_WITHOUT_PORT = re.compile(r"[^:/\[\]]+|\[[^\]]*\]")


def with_port(address: str) -> str:
    """`address` with the default port where it names none; what gRPC resolves otherwise stays as it is.

    `localhost` is `localhost:8500`, `[::1]` and `::1` are `[::1]:8500`; `unix:/tmp/socket` is itself.
    """
    if _WITHOUT_PORT.fullmatch(address):
        return f"{address}:{GRPC_PORT}"
    if address.count(":") > 1 and re.fullmatch(r"[0-9A-Fa-f:.]+", address):
        return f"[{address}]:{GRPC_PORT}"
    return address
