"""The command `export-model`: parse options, call the pipeline, print. Heavy imports come late.

Refuse options of an export that stand before a subcommand, where they have no effect.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import typer
from msgspec.structs import replace

from exporter.cli import doctor_command, inspect_command, log_commands, transfer_commands
from exporter.cli.export_flags import (
    HELP,
    CheckFlags,
    DeltaFlags,
    JobFlags,
    KeyFlags,
    NameFlags,
    PlaceFlags,
    ServedFlags,
    StorageFlags,
    WatchFlags,
    check_places,
)
from exporter.cli.notify import Servers
from exporter.errors import UsageError
from exporter.options import ExportRequest
from exporter.roles import node_role
from exporter.terminal.edge import (
    AS_TEXT,
    OutputFlags,
    VersionFlag,
    application,
    command,
    pairs,
    run,
    with_structs,
)
from exporter.terminal.server_access import ServerAccess
from exporter.transfer.opened import data_mode, opened, require_apart


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


app = application(HELP, invoke_without_command=True)


@app.callback()
@with_structs
def export(
    context: typer.Context,
    places: PlaceFlags,
    served: ServedFlags,
    names: NameFlags,
    storage: StorageFlags,
    keyed: KeyFlags,
    checks: CheckFlags,
    deltas: DeltaFlags,
    access: ServerAccess,
    watch: WatchFlags,
    job_flags: JobFlags,
    printing: OutputFlags = AS_TEXT,
    own_version: VersionFlag = False,
) -> None:
    """Export (the root command)."""
    if context.invoked_subcommand is not None:
        with command(printing):
            refuse_root_options(context)
        return
    with command(printing) as sink, ExitStack() as stack:
        ckpt_dir, out = places.both()
        require_apart(ckpt_dir, out)
        request = ExportRequest(
            ckpt_dir=ckpt_dir,
            out=Path(out.name),  # until it is opened
            format=places.format,
            version=places.version,
            plain=places.plain,
            despite_hold=places.despite_hold,
            again=places.again,
            model=served.model,
            model_args=pairs("--model-arg", served.model_arg),
            inputs=pairs("--input", served.input),
            outputs=pairs("--output", served.output),
            signatures=served.signatures,
            tag=served.tag,
            train_tag=served.train_tag,
            feeds=pairs("--feed", served.feed),
            absent_keys=pairs("--absent-key", served.absent_key),
            allow_code=served.allow_code,
            allow_foreign_ops=served.allow_foreign_ops,
            allow_files=tuple(map(Path, served.allow_files)),
            allow_file_ops=served.allow_file_ops,
            allow_batch_statistics=served.allow_batch_statistics,
            custom_objects=tuple(served.custom_objects),
            renames=tuple(names.rename),
            rename_file=names.rename_file,
            by_order=names.by_order,
            average=names.average,
            partition_strategies=pairs("--partition-strategy", names.partition_strategy),
            object_path=names.object_path,
            casts=tuple(storage.cast),
            data=data_mode(out, storage.data),
            warmup=storage.warmup,
            no_warmup=storage.no_warmup,
            keep=storage.keep,
            table_head_room=keyed.table_head_room,
            min_freq=keyed.min_freq,
            max_age_steps=keyed.max_age_steps,
            verify=checks.verify,
            verify_inputs=checks.verify_inputs,
            tolerance=checks.tolerance,
            golden=checks.golden,
            min_change=deltas.min_change,
            delta_dtype=deltas.delta_dtype,
            check_graph=deltas.check_graph,
            updates=deltas.updates,
            jobs=job_flags.jobs(),
        )
        servers = Servers(tuple(deltas.notify), access)
        servers.check()
        deltas.check()
        check_places(places, deltas, watch)
        watching = watch.watching()
        sink.json_lines = watch.watch
        from exporter.cli import export_commands  # late: refused options need none of this

        if not places.any_role and not (role := node_role()).is_chief:
            export_commands.stand_by(role, sink)
            return
        target = stack.enter_context(opened(out, read_only=checks.dry_run))
        request = replace(request, out=target.path)
        if deltas.incr and not deltas.updatable:
            how = export_commands.RunOptions(
                target, deltas.full_on_mismatch, deltas.rebase, watching, servers
            )
            export_commands.run_incremental(request, sink, how, dry_run=checks.dry_run)
            return
        export_commands.run_full(request, sink, target, watching, dry_run=checks.dry_run)


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
):
    app.command()(with_structs(function))


def main(arguments: list[str] | None = None) -> None:
    """The console script."""
    run(app, "export-model", arguments)
