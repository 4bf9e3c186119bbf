"""Read ahead: who reads a second one of many small files is likely to read the others too.

Each delta of a log has a directory of its own, with files of the same names. Some work reads the manifest of
the newest delta alone, some those of all, one after another; it need not know that each is a request. The
first file of a name is fetched alone, the second brings one neighbour with it, the third three, up to as many
as are fetched at once. So who reads few files asks for few, and who reads all waits seldom.
The count is never set back: a process that runs for long may fetch each file of a kind once, read or not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import chain, islice

AT_ONCE = 16
"""Files that are fetched together, each with a request of its own."""


class ReadAhead:
    """Files by name, and how often one of each kind had to be fetched.

    Of a kind are files of one name whose directories lie in one directory.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], list[str]] = {}
        self._misses: Counter[tuple[str, str]] = Counter()

    def show(self, names: Iterable[str]) -> None:
        """The files that there are now."""
        kinds = defaultdict(list)
        for name in sorted(names):
            kinds[_kind(name)].append(name)
        self._kinds = kinds

    def with_neighbours(self, name: str, is_wanted: Callable[[str], bool]) -> list[str]:
        """What to fetch together with a file: of its kind what is wanted, the next ones first."""
        kind = _kind(name)
        files, ahead = self._kinds.get(kind, []), min(1 << self._misses[kind], AT_ONCE) - 1
        self._misses[kind] += 1
        at = bisect_left(files, name)
        following, before = islice(files, at + 1, None), reversed(files[:at])
        return list(islice(filter(is_wanted, chain(following, before)), ahead))


def _kind(name: str) -> tuple[str, str]:
    directory, _, file = name.rpartition("/")
    return directory.rpartition("/")[0], file
