"""Pieces of Markdown: tables, blocks, and text in which nothing is taken for markup."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

_TOKEN = re.compile(
    r"(?<![\w`<./])("
    r"--[a-z][a-z_-]*[a-z](?:[ =]'[^']*')?"  # an option with a quoted value, or a flag of TF Serving
    r"|\{\"[^}]*\}"  # JSON
    r"|<[\w -]+>"  # what HTML would take for a tag
    r"|\*\*?"
    r"|\w*_\w*(?:\.\w+)*(?:=[\w.]*\w)?"  # a name
    r")"
)


def text(words: str) -> str:
    """A sentence, with the options, names and JSON in it as code, which Markdown leaves alone."""
    pieces = words.split("`")
    quoted = [_TOKEN.sub(r"`\1`", piece) if i % 2 == 0 else f"`{piece}`" for i, piece in enumerate(pieces)]
    return "".join(quoted).replace("|", "\\|")


def code(words: str) -> str:
    """Code in a table; a bar in it is written so that GitHub and Python-Markdown both show it."""
    return (
        f"<code>{html.escape(words, quote=False).replace('|', '&#124;')}</code>"
        if "|" in words
        else f"`{words}`"
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns that hold nothing are left out."""
    lines = [list(row) for row in rows]
    used = [i for i, _ in enumerate(headings) if any(line[i] for line in lines)]
    cells = [[headings[i] for i in used], ["---"] * len(used), *([line[i] for i in used] for line in lines)]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def code_block(content: str) -> str:
    """A fenced block."""
    return f"```text\n{content.rstrip()}\n```\n"
