"""The names by which a port without TLS may be asked, as `Host` has them.

A page of a site whose name soon leads to another address (DNS rebinding) may ask ports of its reader's
machine or network, and read what they answer. Such requests carry the site's name. An address is no site's
name, and neither is `localhost`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address

from msgspec import Struct

from exporter.errors import UsageError

_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([\w.-]{1,254}))(?::[0-9]*)?")
"""No name is longer (RFC 1035): what is compared takes the square of its length."""

_ALLOWED = re.compile(r"\*|(?:\*\.)?[\w-]+(?:\.[\w-]+)*\.?")


def listed_names(option: str | None) -> tuple[str, ...]:
    """Return the names in the value of --allow-host, separated by commas; empty for None.

    UsageError if one is not a name.
    """
    names = () if option is None else tuple(option.split(","))
    for name in names:
        if not _ALLOWED.fullmatch(name):
            raise UsageError(
                f"--allow-host {option}: {name!r} is not a name",
                hint="give names alone, without a scheme or a port: --allow-host ml.example.com",
            )
    return names


class OwnNames(Struct, frozen=True):
    """Names of a port beside addresses and `localhost`; `*` is every name, `*.NAME` each one below it.

    With `takes_short` names without a dot are among them: in public DNS nobody owns one, and networks call
    machines, containers and services so.
    """

    names: tuple[str, ...] = ()
    takes_short: bool = False

    @classmethod
    def of(cls, names: Sequence[str], address: str) -> OwnNames:
        """Return the names of a port: `names`, and short names unless it listens on a loopback address.

        `address` is the IP address on which it listens. Names are compared without case and a final dot.
        ValueError if `address` is not an IP address.
        """
        return cls(tuple(map(_plain, names)), not ip_address(address).is_loopback)

    def has(self, host: str) -> bool:
        """Return True if a request with this `Host` header is for the port: an address, or one of its names.

        A port's number after the name is ignored. False for a malformed header.
        """
        found = _HOST.fullmatch(host.strip())
        if found is None:
            return False
        name = _plain(found[1] or found[2])
        return _is_address(name) or self._is_own(name)

    def _is_own(self, name: str) -> bool:
        above = (name[at:] for at in range(len(name)) if name[at] == ".")
        known = {name, "*", *(f"*{each}" for each in above)}
        is_local = name == "localhost" or name.endswith(".localhost")
        return is_local or not known.isdisjoint(self.names) or (self.takes_short and "." not in name)


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
