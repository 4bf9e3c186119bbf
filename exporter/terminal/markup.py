"""Styled words in lines: `[bold]label[/] text`, for a stream with colours or without.

A backslash makes the next character plain text. Nothing else in a line is obeyed by a terminal.

Lines are most of what is printed. rich, which takes longer to import than many a command to run, is left for
tables and progress bars.
"""

from __future__ import annotations

import re
from typing import Any

from exporter.printable import printable

_SPECIAL = re.compile(r"[\\\[]")
_CODES = {"/": "0", "bold": "1", "red": "31", "yellow": "33"}
_STYLE = "|".join(_CODES)
_ESCAPED_OR_STYLE = re.compile(rf"\\([\\\[])|\[((?:{_STYLE})(?: (?:{_STYLE}))*)\]")


def escape(value: Any) -> str:
    """Text that is to be printed as it is."""
    return _SPECIAL.sub(r"\\\g<0>", str(value))


def labelled(label: str, value: Any) -> str:
    """A line of a result: what it is, and in a column of its own what was found."""
    return f"[bold]{label:<14}[/]{escape(value)}"


def rendered(line: str, *, coloured: bool) -> str:
    """A line as a terminal takes it, or without styles: no control character but those of the styles."""

    def style(found: re.Match[str]) -> str:
        literal, words = found.groups()
        if words is None:
            return str(literal)
        return f"\x1b[{';'.join(_CODES[word] for word in words.split())}m" if coloured else ""

    return _ESCAPED_OR_STYLE.sub(style, printable(line))
