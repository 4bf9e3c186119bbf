"""Refuse options of an export that stand before a subcommand, where they have no effect."""

from __future__ import annotations

import click

from exporter.errors import UsageError


def refuse_root_options(context: click.Context) -> None:
    """Refuse what was given before the subcommand.

    Raises:
        UsageError: something was.
    """
    given = [
        f"--{name.rstrip('_').replace('_', '-')}"
        for name, value in context.params.items()
        if value not in (None, False)
        and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise UsageError(
            f"{', '.join(given)} before {context.invoked_subcommand!r} has no effect",
            hint=f"put options behind it: export-model {context.invoked_subcommand} ... {given[0]}",
        )
