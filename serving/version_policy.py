"""Decide which version is served, as TF Serving decides it.

The names of directories give the versions that are there, a policy those that ought to be served, and
`next_action` the one step from what is loaded to what ought to be that keeps the model available.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from serving.status import VersionState

_INT64_MAX = (1 << 63) - 1


class Latest(Struct, frozen=True):
    """Serve the newest versions: TF Serving's default, with one."""

    count: int = 1

    def choose(self, versions: Iterable[int]) -> frozenset[int]:
        """The versions to serve of those that are there."""
        return frozenset(sorted(versions)[-max(1, self.count) :])


class Every(Struct, frozen=True):
    """Serve all versions that are there."""

    def choose(self, versions: Iterable[int]) -> frozenset[int]:
        """The versions to serve of those that are there."""
        return frozenset(versions)


class Specific(Struct, frozen=True):
    """Serve the named versions, as far as they are there."""

    versions: frozenset[int]

    def choose(self, versions: Iterable[int]) -> frozenset[int]:
        """The versions to serve of those that are there."""
        return self.versions & frozenset(versions)


Policy = Latest | Every | Specific
NEWEST: Policy = Latest()
"""The default."""


class Load(Struct, frozen=True):
    """Load this version."""

    version: int


class Unload(Struct, frozen=True):
    """Unload this version."""

    version: int


def versions_among(names: Iterable[str]) -> dict[int, str]:
    """Version to directory name; names that are not wholly a non-negative int64 are no versions."""
    numbers = {}
    for name in sorted(names):
        if name.isascii() and name.isdigit() and int(name) <= _INT64_MAX:
            numbers[int(name)] = name
    return numbers


def next_action(wanted: frozenset[int], states: Mapping[int, VersionState]) -> Load | Unload | None:
    """The next step towards serving exactly `wanted`, or None when there is none to take.

    A version that is no longer wanted stays until a wanted one is available: a new version that cannot be
    loaded never takes the good one away. With nothing wanted, all go.

    Args:
        wanted: the versions that ought to be served.
        states: the state of each version that is known; one that failed to load is left in `END`.
    """
    serving = {version for version, state in states.items() if state is VersionState.AVAILABLE}
    unwanted = serving - wanted
    if unwanted and (not wanted or serving & wanted):
        return Unload(min(unwanted))
    unknown = [version for version in wanted if version not in states]
    return Load(max(unknown)) if unknown else None
