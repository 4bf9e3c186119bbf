"""Read the table of names for `--rename-file`, written by hand or begun by `inspect --unmatched`.

    # variable            tensor
    ranker/hidden/kernel  model/dense_1/w

Two columns separated by blanks; `#` begins a comment at the beginning of a line or behind a blank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from exporter.catalog import Catalog
from exporter.checkpoint.embedding_variables import embedding_variables
from exporter.errors import UsageError
from exporter.files import read_regular
from exporter.graph.inference_graph import InferenceGraph
from exporter.mapping.mapping_rules import RenameRule

_MAX_BYTES = 64 << 20
_COMMENT = re.compile(r"(^|\s)#.*$")


class Entry(Struct, frozen=True):
    """One line of a table."""

    line: int
    tensor: str


class RenameTable(Struct, frozen=True):
    """Tensor names by variable name; `path` is for messages."""

    path: Path
    entries: Mapping[str, Entry]

    @property
    def rules(self) -> tuple[RenameRule, ...]:
        """The table as rules for whole names."""
        return tuple(
            RenameRule(re.compile(re.escape(variable)), entry.tensor.replace("\\", r"\\"))
            for variable, entry in self.entries.items()
        )

    def check(self, graph: InferenceGraph, catalog: Catalog) -> None:
        """Refuse names that do not exist: a typing error would silently leave a variable to other rules.

        Raises:
            UsageError: names the line.
        """
        variables = {variable.key for variable in graph.variables}
        tables = {table.name for table in graph.dynamic_tables}
        stored = embedding_variables(catalog) if tables & self.entries.keys() else {}
        for name, entry in self.entries.items():
            if name in tables and entry.tensor in stored:
                continue
            if name not in variables | tables:
                raise self._error(entry.line, f"the graph has no variable {name!r}")
            if entry.tensor not in catalog.tensors:
                raise self._error(entry.line, f"{catalog.prefix.name} has no tensor {entry.tensor!r}")

    def _error(self, line: int, what: str) -> UsageError:
        return UsageError(
            f"{self.path}, line {line}: {what}",
            hint="list both sides: export-model inspect CHECKPOINT --unmatched MODEL",
        )


def read_renames(path: Path) -> RenameTable:
    """The table in a file.

    Raises:
        UsageError: it cannot be read, or a line is not of the form; the message names the line.
    """
    try:
        text = read_regular(path, _MAX_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the table of names {path} cannot be read", cause=str(error)) from error
    return parse_renames(text, path)


def parse_renames(text: str, path: Path) -> RenameTable:
    """The table in a text.

    Raises:
        UsageError: see `read_renames`.
    """
    entries: dict[str, Entry] = {}
    for number, line in enumerate(text.splitlines(), 1):
        columns = _COMMENT.sub("", line).split()
        if not columns:
            continue
        if len(columns) != 2:
            raise UsageError(
                f"{path}, line {number}: expected a variable and a tensor, found {len(columns)} columns",
                hint="one 'variable tensor' a line, separated by blanks",
            )
        variable, tensor = columns
        if variable in entries:
            raise UsageError(
                f"{path}, line {number}: {variable!r} is in line {entries[variable].line} already"
            )
        entries[variable] = Entry(number, tensor)
    return RenameTable(path, entries)
