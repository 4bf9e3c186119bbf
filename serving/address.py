"""Parse the address of a model server; the port may be left out.

What commands that ask a model server have in common.
"""

from __future__ import annotations

import re
from typing import Annotated

import typer

from exporter.errors import UsageError

GRPC_PORT = 8500
"""Where TF Serving's image and `serve-model run` listen."""

_HOST = r"[^:/\[\]\s]+|\[[0-9A-Fa-f:.%\w]+\]"
_WITHOUT_PORT = re.compile(_HOST)
_WITH_PORT = re.compile(rf"(?:{_HOST}):([0-9]+)")
_OF_GRPC = re.compile(r"(?:dns|unix|unix-abstract|vsock|ipv4|ipv6|xds|passthrough|google-c2p):.+")
_LARGEST_PORT = 65535


def with_port(address: str) -> str:
    """`address` with the default port where it names none; what gRPC resolves otherwise stays as it is.

    `localhost` is `localhost:8500`, `[::1]` and `::1` are `[::1]:8500`; `unix:/tmp/socket` is itself.

    Raises:
        UsageError: no server can have this address. gRPC would take port 99999 for another one.
    """
    if _OF_GRPC.fullmatch(address):
        return address
    if _WITHOUT_PORT.fullmatch(address):
        return f"{address}:{GRPC_PORT}"
    if address.count(":") > 1 and re.fullmatch(r"[0-9A-Fa-f:.]+", address):
        return f"[{address}]:{GRPC_PORT}"
    found = _WITH_PORT.fullmatch(address)
    if found is None or not 0 < int(found[1]) <= _LARGEST_PORT:
        raise UsageError(
            f"{address!r} is not the address of a model server",
            cause="a host is expected, or HOST:PORT with a port up to 65535",
            hint="write 127.0.0.1:8500, or [::1]:8500",
        )
    return address


Address = Annotated[
    str,
    typer.Argument(
        metavar="HOST:PORT",
        help="gRPC address of a model server; the port is 8500 if left out.",
        parser=with_port,
    ),
]
ModelName = Annotated[str, typer.Option(metavar="NAME", help="The model's name there.")]
Deadline = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.001, help="Fail when a call takes longer than this.")
]
