"""The command `export-model`: parse options, call the pipeline, print. Heavy imports come late."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import click
from msgspec.structs import replace

from exporter.cli import doctor_command, history_command, inspect_command, log_commands, transfer_commands
from exporter.cli.export_help import (
    CHECKS,
    DELTAS,
    FOLLOWING,
    HELP,
    KEYED,
    NAMES,
    PLACES,
    SERVED,
    STORAGE,
    WORK,
)
from exporter.cli.job_flags import LOCALLY, JobFlags
from exporter.cli.notify import Servers
from exporter.cli.option_pairs import Given
from exporter.cli.root_options import refuse_root_options
from exporter.cli.stop_options import stop_when
from exporter.errors import UsageError
from exporter.local_paths import checkpoint_parser
from exporter.options import DataMode, DeltaDtype, ExportFormat, ExportRequest, Isolation, Updates, Verify
from exporter.pipeline.watch_loop import StopWhen, Watching
from exporter.roles import node_role
from exporter.terminal import completion
from exporter.terminal.edge import DebugFlag, JsonFlag, QuietFlag, VersionFlag, command, pairs, run
from exporter.terminal.parameters import App, Option, Options
from exporter.terminal.server_access import WITHOUT_TLS, ServerAccess
from exporter.transfer.opened import data_mode, opened, require_apart

app = App("export-model")


@app.root(invoke_without_command=True, help=HELP)
def export(
    context: click.Context,
    ckpt_dir: Annotated[
        Path | None,
        Option(
            group=PLACES,
            metavar="DIR|PREFIX",
            parser=checkpoint_parser("--ckpt-dir"),
            help="Checkpoint directory (its newest one), or one checkpoint's prefix; also s3://, gs://, az://.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Option(
            group=PLACES,
            metavar="MODEL",
            parser=checkpoint_parser("--out"),
            help="Model base path: the directory of the versions; also s3://, gs://, az://.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        Option(
            group=SERVED,
            metavar="WHAT",
            help="What to serve: pkg.mod:fn, path/file.py:fn, a .meta file or a SavedModel directory.",
        ),
    ] = None,
    model_arg: Annotated[
        tuple[str, ...],
        Option(group=SERVED, metavar="NAME=VALUE", help="Builder's argument. Repeatable."),
    ] = (),
    input_: Annotated[
        tuple[str, ...],
        Option("--input", group=SERVED, metavar="NAME=TENSOR", help="Input, by tensor name. Repeatable."),
    ] = (),
    output: Annotated[
        tuple[str, ...],
        Option(group=SERVED, metavar="NAME=TENSOR", help="Output, by tensor name. Repeatable."),
    ] = (),
    signatures: Annotated[
        Path | None, Option(group=SERVED, metavar="FILE", help="JSON file that defines several signatures.")
    ] = None,
    tag: Annotated[
        str | None,
        Option(group=SERVED, metavar="TAG,TAG", help="Serve a SavedModel's graph with these tags."),
    ] = None,
    train_tag: Annotated[
        str | None,
        Option(group=SERVED, metavar="TAG", help="Also keep the SavedModel's training graph of this tag."),
    ] = None,
    feed: Annotated[
        tuple[str, ...],
        Option(
            group=SERVED, metavar="PLACEHOLDER=VALUE", help="Fix a placeholder: keep_prob=1.0. Repeatable."
        ),
    ] = (),
    absent_key: Annotated[
        tuple[str, ...],
        Option(group=SERVED, metavar="TABLE=NUMBER", help="What keys read that a table lacks. Repeatable."),
    ] = (),
    rename: Annotated[
        tuple[str, ...],
        Option(
            group=NAMES,
            metavar="PATTERN=NAME",
            help="Map variables (regular expression) to tensor names. Repeatable.",
        ),
    ] = (),
    rename_file: Annotated[
        Path | None,
        Option(group=NAMES, metavar="FILE", help="File with lines 'variable tensor'; # begins a comment."),
    ] = None,
    by_order: Annotated[
        bool,
        Option(group=NAMES, help="Match arrays without names to variables by the graph's order."),
    ] = False,
    allow_code: Annotated[
        bool,
        Option(group=SERVED, help="Trust a Keras archive: run code that it carries or names."),
    ] = False,
    allow_batch_statistics: Annotated[
        bool,
        Option(
            group=SERVED,
            help="Serve batch normalisation by each request's own batch, although moving statistics exist.",
        ),
    ] = False,
    custom_objects: Annotated[
        tuple[str, ...],
        Option(
            group=SERVED,
            metavar="PKG.MOD|FILE.PY",
            help="Module with classes that a Keras archive may use. Repeatable.",
        ),
    ] = (),
    average: Annotated[
        str | None,
        Option(group=NAMES, metavar="ema|NAME", help="Serve moving averages instead of raw weights."),
    ] = None,
    partition_strategy: Annotated[
        tuple[str, ...],
        Option(group=NAMES, metavar="NAME=mod|div", help="How training looked up a table. Repeatable."),
    ] = (),
    object_path: Annotated[
        str | None,
        Option(group=NAMES, metavar="PATH", help="Path to the served model in a TF2 checkpoint: net/tower."),
    ] = None,
    cast: Annotated[
        tuple[str, ...],
        Option(
            group=STORAGE,
            metavar="[PATTERN=]bfloat16|float16",
            help="Store matching variables in 16 bits. Repeatable.",
        ),
    ] = (),
    format_: Annotated[
        ExportFormat,
        Option("--format", group=PLACES, help="Write a SavedModel, Cloud ML's pair, or both."),
    ] = ExportFormat.SAVED_MODEL,
    data: Annotated[
        DataMode,
        Option(group=STORAGE, help="How values reach the version; compact copies the needed bytes alone."),
    ] = DataMode.AUTO,
    warmup: Annotated[
        Path | None,
        Option(
            group=STORAGE, metavar="FILE", help="Warm-up requests: one request in REST's JSON on each line."
        ),
    ] = None,
    no_warmup: Annotated[
        bool, Option(group=STORAGE, help="Make no warm-up requests for a base that takes deltas.")
    ] = False,
    version: Annotated[
        str | None,
        Option(
            group=PLACES,
            metavar="N|time",
            help="Version number, or time (seconds since 1970). [default: the training step while it grows]",
        ),
    ] = None,
    table_head_room: Annotated[
        float | None,
        Option(group=KEYED, metavar="X", help="Room for X times more keys in tables. [default: 0.25]"),
    ] = None,
    keep: Annotated[
        int | None, Option(group=STORAGE, metavar="N", min=1, help="Keep only the newest N versions.")
    ] = None,
    verify: Annotated[Verify, Option(group=CHECKS, help="What to check before publishing.")] = Verify.FILES,
    verify_inputs: Annotated[
        Path | None,
        Option(group=CHECKS, metavar="FILE", help="Requests for --verify outputs, in the form of --warmup."),
    ] = None,
    tolerance: Annotated[
        float, Option(group=CHECKS, metavar="X", help="Largest difference that --verify outputs accepts.")
    ] = 1e-6,
    golden: Annotated[
        Path | None,
        Option(group=CHECKS, metavar="FILE", help="Golden requests that a version or base must pass."),
    ] = None,
    incr: Annotated[
        bool, Option(group=DELTAS, help="Publish what changed as a delta; the first time, publish a base.")
    ] = False,
    updatable: Annotated[bool, Option(group=DELTAS, help="Publish a new base that takes deltas.")] = False,
    isolation: Annotated[
        Isolation,
        Option(
            group=DELTAS, help="Consistency during an update: snapshot never mixes two positions; row may."
        ),
    ] = Isolation.SNAPSHOT,
    snapshot_max_rows: Annotated[
        int,
        Option(group=DELTAS, metavar="N", min=0, help="Apply larger deltas in visible pieces."),
    ] = 4_000_000,
    stamp: Annotated[
        bool, Option(group=DELTAS, help="Add model_position and model_step to predict responses.")
    ] = False,
    with_digest: Annotated[
        bool, Option(group=DELTAS, help="Add a signature that returns checksums of the served values.")
    ] = False,
    require_finite: Annotated[
        bool, Option(group=DELTAS, help="Make the model refuse deltas with NaN or infinity.")
    ] = False,
    full_on_mismatch: Annotated[
        bool, Option(group=DELTAS, help="With --incr: publish a new base if no delta fits.")
    ] = False,
    min_change: Annotated[
        float,
        Option(
            group=DELTAS,
            metavar="X",
            min=0.0,
            help="With --incr: hold back rows that are less than X (Euclidean norm) from what is published.",
        ),
    ] = 0.0,
    delta_dtype: Annotated[
        DeltaDtype | None,
        Option(
            group=DELTAS, help="With --incr: send table rows as bfloat16 or int8; reports the largest error."
        ),
    ] = None,
    rebase: Annotated[
        bool, Option(group=DELTAS, help="With --incr: also publish a new base that includes all deltas.")
    ] = False,
    notify: Annotated[
        tuple[str, ...],
        Option(
            group=DELTAS,
            metavar="HOST[:PORT]",
            help="With --incr: ask this model server to apply what was published. Repeat it for several.",
        ),
    ] = (),
    access: Annotated[ServerAccess, Options(DELTAS)] = WITHOUT_TLS,
    plain: Annotated[
        bool,
        Option(group=PLACES, help="Publish a version that takes no deltas, although the newest one does."),
    ] = False,
    check_graph: Annotated[
        bool, Option(group=DELTAS, help="With --incr: build the graph again and compare it with the base's.")
    ] = False,
    despite_hold: Annotated[
        bool, Option(group=PLACES, help="Publish a version although the model is held.")
    ] = False,
    again: Annotated[
        bool, Option(group=PLACES, help="Publish a checkpoint again that is already published.")
    ] = False,
    min_freq: Annotated[
        int, Option(group=KEYED, metavar="N", min=0, help="Serve keys that were seen N times or more.")
    ] = 0,
    max_age_steps: Annotated[
        int | None,
        Option(group=KEYED, metavar="N", min=0, help="Serve keys that were updated in the last N steps."),
    ] = None,
    watch: Annotated[
        bool,
        Option(
            group=FOLLOWING, help="Keep running: export each new checkpoint or, with --incr, each change."
        ),
    ] = False,
    interval: Annotated[
        float,
        Option(group=FOLLOWING, metavar="SECONDS", min=0.05, help="Longest pause of --watch between looks."),
    ] = 1.0,
    stop_after: Annotated[
        str | None,
        Option(
            group=FOLLOWING,
            metavar="DURATION",
            help="End --watch after this time: 90 (seconds), 15m, 2h, 1d.",
        ),
    ] = None,
    stop_count: Annotated[
        int | None, Option(group=FOLLOWING, metavar="N", min=1, help="End --watch after N publications.")
    ] = None,
    stop_step: Annotated[
        int | None,
        Option(group=FOLLOWING, metavar="STEP", min=0, help="End --watch once this step is published."),
    ] = None,
    stop_idle: Annotated[
        str | None,
        Option(group=FOLLOWING, metavar="DURATION", help="End --watch after this time without news."),
    ] = None,
    job_flags: Annotated[JobFlags, Options(WORK)] = LOCALLY,
    any_role: Annotated[
        bool,
        Option(group=PLACES, help="Export even if this node of a cluster is not the chief."),
    ] = False,
    dry_run: Annotated[bool, Option(group=CHECKS, help="Print the plan and write nothing.")] = False,
    json_: JsonFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
    own_version: VersionFlag = False,
) -> None:
    """Export (the root command)."""
    if context.invoked_subcommand is not None:
        with command(json_, quiet, debug):
            refuse_root_options(context)
        return
    with command(json_, quiet, debug) as sink, ExitStack() as stack:
        if ckpt_dir is None or out is None:
            missing = "--ckpt-dir" if ckpt_dir is None else "--out"
            raise UsageError(
                f"{missing} is missing", hint="export-model --ckpt-dir DIR --out MODEL; see --help"
            )
        updates = Updates(isolation, snapshot_max_rows, stamp, with_digest, require_finite)
        require_apart(ckpt_dir, out)
        data = data_mode(out, data)
        request = ExportRequest(
            ckpt_dir=ckpt_dir,
            out=Path(out.name),  # until it is opened
            model=model,
            model_args=pairs("--model-arg", model_arg),
            inputs=pairs("--input", input_),
            outputs=pairs("--output", output),
            signatures=signatures,
            tag=tag,
            train_tag=train_tag,
            feeds=pairs("--feed", feed),
            absent_keys=pairs("--absent-key", absent_key),
            renames=tuple(rename or ()),
            rename_file=rename_file,
            by_order=by_order,
            allow_code=allow_code,
            allow_batch_statistics=allow_batch_statistics,
            custom_objects=tuple(custom_objects or ()),
            average=average,
            casts=tuple(cast or ()),
            partition_strategies=pairs("--partition-strategy", partition_strategy),
            object_path=object_path,
            format=format_,
            data=data,
            warmup=warmup,
            no_warmup=no_warmup,
            version=version,
            keep=keep,
            verify=verify,
            verify_inputs=verify_inputs,
            tolerance=tolerance,
            golden=golden,
            min_change=min_change,
            min_freq=min_freq,
            max_age_steps=max_age_steps,
            table_head_room=table_head_room,
            delta_dtype=delta_dtype,
            plain=plain,
            despite_hold=despite_hold,
            check_graph=check_graph,
            again=again,
            updates=updates if updatable or incr else None,
            jobs=job_flags.jobs(),
        )
        options_of_incr = min_change or delta_dtype or rebase or full_on_mismatch or check_graph or notify
        servers = Servers(notify, access)
        servers.check()
        if not math.isfinite(min_change):
            raise UsageError(f"--min-change {min_change} is not a distance", hint="as in --min-change 0.001")
        stop = stop_when(stop_after, stop_count, stop_step, stop_idle)
        given = Given(
            bool(options_of_incr), updates != Updates(), stop != StopWhen(), again=again, plain=plain
        )
        given.check(incr=incr, updatable=updatable, watch=watch)
        sink.json_lines = watch
        if not any_role and not (role := node_role()).is_chief:
            from exporter.cli.stand_by import stand_by

            stand_by(role, sink)
            return
        watching = Watching(interval, stop) if watch else None
        target = stack.enter_context(opened(out, read_only=dry_run))
        request = replace(request, out=target.path)
        if incr and not updatable:
            from exporter.cli import incremental_command

            how = incremental_command.RunOptions(target, full_on_mismatch, rebase, watching, servers)
            incremental_command.run(request, sink, how, dry_run=dry_run)
            return
        from exporter.cli import full_command

        full_command.run(request, sink, target, watching, dry_run=dry_run)


inspect_command.register(app)
completion.register(app, "export-model")
for commands in (history_command, log_commands, transfer_commands):
    commands.register(app)
app.subcommand()(doctor_command.doctor)


def main() -> None:
    """The console script."""
    run(app)
