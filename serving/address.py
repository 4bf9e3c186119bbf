"""The address of a model server, and the arguments that all commands with such an address share."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from exporter.errors import UsageError
from exporter.storage.local_paths import quoted

GRPC_PORT = 8500
"""The gRPC port of TF Serving's image and of `serve-model run`."""

_HOST = r"[^:/\[\]\s]+|\[[0-9A-Fa-f:.%\w]+\]"
_WITHOUT_PORT = re.compile(_HOST)
_WITH_PORT = re.compile(rf"(?:{_HOST}):([0-9]+)")
_OF_GRPC = re.compile(r"(?:dns|unix|unix-abstract|vsock|ipv4|ipv6|xds|passthrough|google-c2p):.+")
_LARGEST_PORT = 65535
_REST_PORT = 8501
_THIS_MACHINE = ("localhost", "127.0.0.1", "[::1]")


def with_port(address: str) -> str:
    """Return the address with the default port if it has none; addresses with a gRPC scheme stay unchanged.

    `localhost` becomes `localhost:8500`, `[::1]` and `::1` become `[::1]:8500`; `unix:/tmp/socket` stays.

    Raises:
        UsageError: it is neither HOST nor HOST:PORT with a port of 1 to 65535. gRPC would wrap port 99999 to
            another port.
    """
    if _OF_GRPC.fullmatch(address):
        return address
    if address.isdecimal():  # to gRPC a number is a host: 8500 would be 0.0.33.52
        raise UsageError(f"{address} is a port: a host is missing", hint=f"write 127.0.0.1:{address}")
    if _WITHOUT_PORT.fullmatch(address):
        return f"{address}:{GRPC_PORT}"
    is_ipv6 = address.count(":") > 1 and re.fullmatch(r"[0-9A-Fa-f:.]+", address)
    if is_ipv6 and not re.match(r"[0-9.]+\.[0-9]+:", address):
        return f"[{address}]:{GRPC_PORT}"
    found = _WITH_PORT.fullmatch(address)
    if found is None or not 0 < int(found[1]) <= _LARGEST_PORT:
        raise UsageError(
            f"{address!r} is not the address of a model server",
            cause="a host is expected, or HOST:PORT with a port up to 65535",
            hint=f"write {_meant(address)}",
        )
    return address


def _meant(address: str) -> str:
    """Return the end of a hint that begins with "write": the address probably meant, often explained.

    Of a URL the address is host and port, with gRPC's port in place of REST's; of HOST:PORT:MORE it is
    HOST:PORT. Without either, the text has two examples.
    """
    found = re.match(rf"https?://({_HOST})(:[0-9]+)?(?:/|$)", address)
    if found and found[2] == f":{_REST_PORT}":
        return f"{found[1]}:{GRPC_PORT}: {_REST_PORT} is usually the port of REST, and this is gRPC"
    if found:
        return f"{found[1]}{found[2] or ''}"
    if (longer := re.match(rf"({_HOST}:[0-9]+):", address)) and re.fullmatch(_WITH_PORT, longer[1]):
        return f"{longer[1]}; --version or --label names a version where a command takes one"
    return f"127.0.0.1:{GRPC_PORT}, or [::1]:{GRPC_PORT}; --model-name names the model"


def to_reach(address: str, *, is_unknown: bool = False) -> str:
    """Return a hint for an address, HOST:PORT, at which no server answers.

    `is_unknown`: its host name does not resolve.
    """
    host, _, port = address.rpartition(":")
    if is_unknown:
        return f"this machine knows no host of that name: getent hosts {quoted(host)}"
    if port == str(_REST_PORT):
        return f"{port} is usually the port of REST; gRPC's is {GRPC_PORT}: {host}:{GRPC_PORT}"
    if host in _THIS_MACHINE:
        return f"start a server: serve-model run MODEL --port {port}"
    return "compare host and port with those that the server printed when it started"


Address = Annotated[
    str,
    typer.Argument(
        metavar="HOST:PORT",
        help="gRPC address of a model server; the port is 8500 if left out.",
        parser=with_port,
    ),
]
OneModel = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="The model's name on the server.", show_default="the one that it serves"
    ),
]
Deadline = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.001, help="Fail when a call takes longer than this.")
]
