"""The command `export-model`: parse options, call the pipeline, print. Heavy imports come late."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import typer
from msgspec.structs import replace

from exporter.cli import doctor_command, help_command, inspect_command, log_commands, transfer_commands
from exporter.cli.export_flags import HELP, PlaceFlags, RunFlags, check_places
from exporter.cli.help_command import HelpAllFlag, HelpFlag
from exporter.cli.notify import Servers
from exporter.errors import UsageError
from exporter.options import ExportRequest, Updates
from exporter.pipeline.watch_loop import EVERY_SECOND, Watching
from exporter.terminal.edge import AS_TEXT, OutputFlags, VersionFlag, application, command, run
from exporter.terminal.parameters import with_structs
from exporter.terminal.server_access import ServerAccess
from exporter.training.roles import node_role
from exporter.transfer.opened import data_mode, opened, require_apart

VARIABLES = "EXPORT_MODEL"
"""Begins the names of variables for options, of `export` as of the command without a name."""
NOTHING_TYPED = ExportRequest(Path(), Path(), updates=Updates())


def refuse_root_options(context: typer.Context) -> None:
    """Refuse what was given before the subcommand.

    Raises:
        UsageError: something was.
    """
    given = [
        f"--{name.rstrip('_').replace('_', '-')}"
        for name, value in context.params.items()
        if value not in (None, False)
        and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise UsageError(
            f"{', '.join(given)} before {context.invoked_subcommand!r} has no effect",
            hint=f"put options behind it: export-model {context.invoked_subcommand} ... {given[0]}",
        )


def export(
    context: typer.Context,
    places: PlaceFlags,
    flags: RunFlags,
    access: ServerAccess,
    request: ExportRequest = NOTHING_TYPED,
    watching: Watching = EVERY_SECOND,
    printing: OutputFlags = AS_TEXT,
    own_version: VersionFlag = False,
    help_: HelpFlag = False,
    help_all: HelpAllFlag = False,
) -> None:
    """Export the newest checkpoint: the same as export-model without a command."""
    if context.invoked_subcommand is not None:
        with command(printing):
            refuse_root_options(context)
        return
    with command(printing) as sink, ExitStack() as stack:
        ckpt_dir, out = places.both()
        require_apart(ckpt_dir, out)
        servers = Servers(flags.notify, access)
        servers.check()
        check_places(places, flags, plain=request.plain)
        request = replace(
            request,
            ckpt_dir=ckpt_dir,
            again=places.again,
            data=data_mode(out, request.data),
            updates=request.updates if flags.takes_deltas else None,
        )
        watch = watching if flags.watch else None
        sink.json_lines, sink.is_brief = flags.watch, flags.watch and not flags.verbose
        from exporter.cli import export_commands  # late: refused options need none of this

        if not places.any_role and not (role := node_role()).is_chief:
            export_commands.stand_by(role, sink)
            return
        target = stack.enter_context(opened(out, read_only=flags.dry_run))
        request = replace(request, out=target.path)
        if flags.publishes_deltas:
            how = export_commands.RunOptions(target, flags.full_on_mismatch, flags.rebase, watch, servers)
            export_commands.run_incremental(request, sink, how, dry_run=flags.dry_run)
            return
        export_commands.run_full(request, sink, target, watch, dry_run=flags.dry_run)


app = application(HELP, invoke_without_command=True)
app.callback()(with_structs(export))
app.command(add_help_option=False, context_settings={"auto_envvar_prefix": VARIABLES})(with_structs(export))
for function in (
    inspect_command.inspect,
    log_commands.history,
    log_commands.merge,
    log_commands.rollback,
    log_commands.resume,
    log_commands.diff,
    log_commands.verify,
    transfer_commands.push,
    transfer_commands.pull,
    doctor_command.doctor,
    help_command.help,
):
    app.command()(with_structs(function))


def main(arguments: list[str] | None = None) -> None:
    """The console script."""
    run(app, "export-model", arguments, takes=("--ckpt-dir", "--out", "--model"))
