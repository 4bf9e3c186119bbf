"""The servers of a fleet: fixed addresses, and names that resolve to many addresses."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from msgspec import Struct

from exporter.errors import UsageError
from serving.address import GRPC_PORT, with_port

MANY = "dns:///"
"""The prefix of a target that means every address of a name, in gRPC's notation."""


class Resolved(Struct, frozen=True):
    """The servers' addresses, each once; `problems` lists the names that did not resolve."""

    addresses: tuple[str, ...]
    problems: tuple[str, ...] = ()


class Targets:
    """The values of --target. A name that does not resolve keeps its last addresses."""

    def __init__(self, targets: Sequence[str]) -> None:
        """Check the targets.

        Raises:
            UsageError: there is none, or one is not an address.
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
        """Resolve all names now."""
        addresses: dict[str, None] = {}
        problems = []
        for target in self._targets:
            if not target.startswith(MANY):
                addresses[with_port(target)] = None
                continue
            try:
                self._known[target] = _all_addresses(target)
            except (OSError, UnicodeError) as error:  # UnicodeError: a label of more than 63 letters
                problems.append(f"{target}: {getattr(error, 'strerror', None) or error}")
            addresses.update(dict.fromkeys(self._known.get(target, ())))
        return Resolved(tuple(addresses), tuple(problems))


def _all_addresses(target: str) -> tuple[str, ...]:
    """IPv4 addresses if the name has any, else IPv6: a replica that has both must not count twice."""
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
            cause=f"expected {MANY}NAME, with a port unless it is {GRPC_PORT}",
            hint=f"write {MANY}model-servers:8500",
        )
    return host.strip("[]"), int(port)
