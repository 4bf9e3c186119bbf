"""Text that a terminal shows and does not obey.

Names come from checkpoints, graphs, archives, servers and paths: other people wrote them. A control character
in one of them moves the cursor, hides what was printed or begins a line of its own.
"""

from __future__ import annotations

from collections.abc import Iterable


def printable(text: str) -> str:
    r"""The text in one line: what is not to be seen is written as in Python, `\x1b`, `\n`, `\u202e`.

    These are controls (C0, C1), marks of direction and of no width, separators but the space, and surrogates,
    by which a path's bytes that are no UTF-8 are kept.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


def lines_of(parts: Iterable[str]) -> str:
    """A cause of several lines: each part takes one, below the label, whatever is in it."""
    return "\n  ".join(["", *map(printable, parts)])


def in_lines(text: str) -> str:
    """A text of several lines, each of them printable; all but the first are indented."""
    first, *others = text.split("\n")
    indented = (line if line.startswith(" ") else f"  {line}" for line in map(printable, others))
    return "\n".join([printable(first), *indented])


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
