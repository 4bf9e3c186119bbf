"""Check a match that was found in another way against the variables' names.

An object-based checkpoint is matched by its objects' edges: `layers/2` is restored into `layers/2`. A program
that makes its layers in another order than the trainer did has the same edges, and every shape may fit. The
names tell: two names agree if they are equal but for the numbers that a framework puts behind a name in use
(`dense_4` for `dense`) and for scopes that one of them has in addition (`dense/kernel`, `net/dense/kernel`).
Numbers are not compared, since they count what a process made before; but they must grow in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from msgspec import Struct

_NUMBER = re.compile(r"_([0-9]+)$")
_SAYS_NOTHING = re.compile(r"((Sharded)?Variable(_[0-9]+)?)?")


class NamedPair(Struct, frozen=True):
    """A variable to serve and the trained one that shall give its values; `kind` is its dtype and shape."""

    served: str
    trained: str
    kind: str


def conflicts(pairs: Iterable[NamedPair]) -> Iterator[str]:
    """Each reason why the names speak against the pairs, for a person."""
    groups: dict[tuple[object, ...], list[NamedPair]] = {}
    for pair in pairs:
        if _SAYS_NOTHING.fullmatch(pair.served) or _SAYS_NOTHING.fullmatch(pair.trained):
            continue
        served, trained = stems(pair.served), stems(pair.trained)
        if not _agree(served, trained):
            yield f"{pair.served!r} would get the values of {pair.trained!r}"
            continue
        groups.setdefault((served, trained, pair.kind), []).append(pair)
    for group in groups.values():
        group.sort(key=lambda pair: numbers(pair.served))
        for before, after in pairwise(group):
            if numbers(before.trained) > numbers(after.trained):
                yield (
                    f"{before.served!r} would get the values of {before.trained!r}, and "
                    f"{after.served!r} those of {after.trained!r}, which is the reverse order"
                )


def left_over_twins(used: Mapping[str, object], left: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Each (name left over, name in use) that differ in numbers alone; both map names to dtypes and shapes.

    They are of one dtype and shape, too: a program with a layer less gives such names to other layers.
    """
    bare = {(_unnumbered(name), kind): name for name, kind in used.items()}
    for name, kind in left.items():
        if (twin := bare.get((_unnumbered(name), kind))) is not None:
            yield name, twin


def _unnumbered(name: str) -> str:
    return "/".join(stems(name)) if "_" in name else name


def stems(name: str) -> tuple[str, ...]:
    """The parts of a name without the numbers that a framework puts behind names in use."""
    return tuple(_NUMBER.sub("", part) for part in name.split("/"))


def numbers(name: str) -> tuple[int, ...]:
    """Those numbers, 0 where there is none: what tells names of equal stems apart."""
    found = (_NUMBER.search(part) for part in name.split("/"))
    return tuple(int(number[1]) if number else 0 for number in found)


def _agree(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """True if the shorter is the longer without some of its scopes."""
    shorter, longer = sorted((one, other), key=len)
    rest = iter(longer)
    return shorter[-1] == longer[-1] and all(part in rest for part in shorter)
