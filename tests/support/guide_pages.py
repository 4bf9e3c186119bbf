"""The guide as its tests see it: pages, their blocks of code, and what a comment says of a block.

A comment on the line before a block, which no reader sees:

    <!-- not run: REASON -->         nobody runs it, and why
    <!-- tested by: FILE::TEST -->   that test runs it, among names that it needs
    <!-- file: NAME -->              its text is a file that the next commands read

and anywhere in a page:

    <!-- starts with: A, B -->       what is there already (see `guide_artefacts`)
    <!-- continues: PAGE -->         its reader has followed that page, and goes on in its directory
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
OUTPUT = {"text", "mermaid"}
"""Languages of blocks that are nothing to run."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!-- (not run|tested by|file): (.+?) -->\n\Z")
_SHOWN = re.compile(r"\s*^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_CONTINUES = re.compile(r"<!-- continues: (.+?) -->")
_STARTS_WITH = re.compile(r"<!-- starts with: (.+?) -->")


@dataclass(frozen=True)
class Command:
    """A line that a reader types, and what the guide shows below it."""

    text: str
    shown: str


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    marker: str = ""
    """`not run`, `tested by`, `file`, or none."""
    argument: str = ""
    shown: str = ""
    """A block of output that stands right below."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_followed(self) -> bool:
        """Whether it is run in the order of its page, as a reader would."""
        return self.language not in OUTPUT and self.marker not in ("not run", "tested by")

    @property
    def commands(self) -> list[Command]:
        joined = re.sub(r"\\\n\s*", "", self.text)
        _, *typed = re.split(r"^\$ ", joined, flags=re.MULTILINE)
        return [Command(*_first_line(each)) for each in typed]


def _first_line(text: str) -> tuple[str, str]:
    command, _, shown = text.partition("\n")
    return command, shown


@dataclass(frozen=True)
class Page:
    """A page of Markdown under the repository's root."""

    name: str

    @property
    def text(self) -> str:
        return (ROOT / self.name).read_text()

    @property
    def blocks(self) -> list[Block]:
        """All fenced blocks, in their order."""
        return [self._block(match) for match in _FENCE.finditer(self.text)]

    def _block(self, match: re.Match[str]) -> Block:
        before = self.text[: match.start()]
        comment = _COMMENT.search(before)
        marker, argument = comment.groups() if comment else ("", "")
        below = _SHOWN.match(self.text, match.end())
        line = before.count("\n") + 1
        return Block(self.name, line, match[1], match[2], marker, argument, below[1] if below else "")

    @property
    def starts_with(self) -> list[str]:
        """The names of what is there before the page's first block."""
        return [name.strip() for match in _STARTS_WITH.finditer(self.text) for name in match[1].split(",")]

    @property
    def story(self) -> list[Page]:
        """The pages that a reader follows up to this one, in their order."""
        continued = _CONTINUES.search(self.text)
        return [*(Page(continued[1]).story if continued else []), self]

    def tested_by(self, test: str) -> list[Block]:
        """The blocks that name this test as theirs."""
        marked = [block for block in self.blocks if block.marker == "tested by"]
        return [block for block in marked if block.argument.split("::")[-1] == test]


def pages() -> list[Page]:
    """README.md and every page of docs/."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [Page(str(path.relative_to(ROOT))) for path in found]


def followed(*names: str) -> list[Block]:
    """The blocks of these pages that are run in their order."""
    return [block for name in names for block in Page(name).blocks if block.is_followed]
