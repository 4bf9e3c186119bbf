"""Read ahead: who reads many small files one after another is likely to read the next ones too.

Each delta of a log has a directory of its own, with files of the same names. Some work reads the manifest of
the newest delta alone, some those of a few here and there, some those of all; it need not know that each is a
request. With a file come as many of its next ones as there are before it that were fetched already, in either
direction: so who reads all waits seldom, and what nobody reads is not fetched.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import islice, takewhile

AT_ONCE = 16
"""Files that are fetched together, each with a request of its own."""


class ReadAhead:
    """Files by name and kind: of a kind are files of one name whose directories lie in one directory."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], list[str]] = {}

    def show(self, names: Iterable[str]) -> None:
        """The files that there are now."""
        kinds = defaultdict(list)
        for name in sorted(names):
            kinds[_kind(name)].append(name)
        self._kinds = kinds

    def with_neighbours(
        self, name: str, is_there: Callable[[str], bool], is_wanted: Callable[[str], bool]
    ) -> list[str]:
        """What to fetch together with a file: of its kind what is wanted, the next ones first."""
        files = self._kinds.get(_kind(name), [])
        at = bisect_left(files, name)
        before, following = files[:at][::-1], files[at + 1 :]
        for passed, coming in ((before, following), (following, before)):
            if count := len([*takewhile(is_there, passed[: AT_ONCE - 1])]):
                return [*islice(filter(is_wanted, coming), count)]
        return []


def _kind(name: str) -> tuple[str, str]:
    directory, _, file = name.rpartition("/")
    return directory.rpartition("/")[0], file
