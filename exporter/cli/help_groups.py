"""The options of `export-model --help` in groups, as plain text that looks the same in a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.core import TyperGroup

GROUPS: dict[str, str] = {
    "What to serve": "model model-arg input output signatures tag train-tag feed custom-objects allow-code "
    "allow-batch-statistics",
    "Where from, where to": "ckpt-dir out format version plain again despite-hold any-role",
    "Which tensor is which": "rename rename-file by-order average partition-strategy object-path",
    "Storage": "data cast keep warmup no-warmup",
    "Checks": "verify verify-inputs tolerance dry-run",
    "Deltas": "incr updatable isolation snapshot-max-rows stamp with-digest require-finite full-on-mismatch "
    "min-change delta-dtype rebase check-graph",
    "Following training": "watch interval stop-after stop-count stop-step stop-idle",
}
"""Options by the heading that they stand under; all others are the last group."""

REST = "Output"


def group_of(option: str) -> str:
    """The heading that an option (`--name`) stands under."""
    name = option.lstrip("-")
    return next((group for group, names in GROUPS.items() if name in names.split()), REST)


class GroupedHelp(TyperGroup):
    """A command whose options are shown in groups, before its subcommands."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, group by group, and then the subcommands."""
        records = list(self._records(ctx))
        for group in (*GROUPS, REST):
            rows = [record for heading, record in records if heading == group]
            if rows:
                with formatter.section(group):
                    formatter.write_dl(rows)
        self.format_commands(ctx, formatter)

    def _records(self, ctx: Any) -> Iterator[tuple[str, tuple[str, str]]]:
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                yield group_of(max(parameter.opts, key=len)), record
