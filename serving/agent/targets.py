"""Which servers there are: addresses as they are, and names that stand for many."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from msgspec import Struct

from exporter.errors import UsageError
from serving.address import GRPC_PORT, with_port

MANY = "dns:///"
"""A target of this form, as gRPC writes it, stands for every address that the name has."""


class Resolved(Struct, frozen=True):
    """The servers' addresses, each once; `problems` are the names that nobody knows now."""

    addresses: tuple[str, ...]
    problems: tuple[str, ...] = ()


class Targets:
    """What was given with --target. A name that cannot be resolved now keeps the addresses it had."""

    def __init__(self, targets: Sequence[str]) -> None:
        """Check what was given.

        Raises:
            UsageError: there is none, or one is no address.
        """
        if not targets:
            raise UsageError("there is no server to keep fresh", hint="name each: --target HOST:PORT")
        for target in targets:
            if target.startswith(MANY):
                _host_and_port(target)
            else:
                with_port(target)
        self._targets = tuple(targets)
        self._known: dict[str, tuple[str, ...]] = {}

    def resolve(self) -> Resolved:
        """Who is there now."""
        addresses: dict[str, None] = {}
        problems = []
        for target in self._targets:
            if not target.startswith(MANY):
                addresses[with_port(target)] = None
                continue
            try:
                self._known[target] = _all_addresses(target)
            except (OSError, UnicodeError) as error:  # a label of more than 63 letters is no name at all
                problems.append(f"{target}: {getattr(error, 'strerror', None) or error}")
            addresses.update(dict.fromkeys(self._known.get(target, ())))
        return Resolved(tuple(addresses), tuple(problems))


def _all_addresses(target: str) -> tuple[str, ...]:
    """IPv4 addresses if the name has any, else IPv6: a replica with both is one replica."""
    host, port = _host_and_port(target)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, form in ((socket.AF_INET, "{}:{}"), (socket.AF_INET6, "[{}]:{}")):
        addresses = sorted({form.format(*where[:2]) for kind, _, _, _, where in found if kind == family})
        if addresses:
            return tuple(addresses)
    return ()


def _host_and_port(target: str) -> tuple[str, int]:
    try:
        host, _, port = with_port(target.removeprefix(MANY)).rpartition(":")
    except UsageError:
        host = port = ""
    if not host or not port.isdecimal():
        raise UsageError(
            f"--target {target} is not an address",
            cause=f"after {MANY} a name is expected, and a port if it is not {GRPC_PORT}",
            hint=f"write {MANY}model-servers:8500",
        )
    return host.strip("[]"), int(port)
