"""The command `export-model`: parse options, call the pipeline, print. Heavy imports come late."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import Struct
from msgspec.structs import replace

from exporter.cli.notify import Servers
from exporter.errors import UsageError
from exporter.options import CHECKS, DELTAS, FOLLOWING, PLACES, ExportRequest, Option, Updates
from exporter.pipeline.watch_loop import EVERY_SECOND, Watching
from exporter.storage.local_paths import checkpoint_path, quoted
from exporter.terminal.commands import LateCommand, application
from exporter.terminal.edge import AS_TEXT, EXIT_CODES, OutputFlags, VersionFlag, command, run
from exporter.terminal.parameters import ARGUMENTS, with_structs
from exporter.terminal.server_access import ServerAccess
from exporter.training.roles import node_role
from exporter.transfer.opened import data_mode, opened, require_apart

HELP = f"""Export a distributed TensorFlow checkpoint as a SavedModel that TensorFlow Serving can serve.

The inference graph comes from --model: a builder (pkg.mod:fn or file.py:fn), a .meta file, or a SavedModel
directory; without it, from the .meta beside the checkpoint. Data is linked, not copied, where the file system
allows it.

\b
Examples:
  export-model --ckpt-dir train/ --model my_model.py:serving --out models/ranker
  export-model --ckpt-dir train/model.ckpt-900 --input x=Placeholder:0 --output y=Softmax:0 --out models/cnn
  export-model --ckpt-dir train/ --model models/cnn/900 --average ema --verify outputs --out models/cnn
  export-model --ckpt-dir train/ --model my_model.py:serving --out models/ranker --dry-run
  export-model --ckpt-dir train/ --model my_model.py:serving --out models/ranker --watch --until idle=2h
  export-model --ckpt-dir train/ --model my_model.py:serving --out models/ranker --incr
  export-model inspect train/

Each option has an environment variable: EXPORT_MODEL_KEEP is --keep, EXPORT_MODEL_MERGE_KEEP that of merge.

{EXIT_CODES}"""

_place = partial(Option, heading=PLACES)
_delta = partial(Option, heading=DELTAS)
_of_incr = partial(_delta, goes_with="--incr")


_DESPITE = {
    "hold": "the model is held",
    "deltas": "the newest version takes deltas, and this one would not",
    "role": "this node of a cluster is not the chief",
}


class PlaceFlags(Struct, frozen=True):
    """The options that say where a checkpoint is read, and where its version is published."""

    ckpt_dir: Annotated[
        Path | None,
        _place(
            "Checkpoint directory (its newest one), or one checkpoint's prefix; also s3://, gs://, az://.",
            metavar="DIR|PREFIX",
            parse=checkpoint_path,
        ),
    ] = None
    out: Annotated[
        Path | None,
        _place(
            "The model's directory or its URL: s3://, gs://, az://.",
            metavar="MODEL",
            parse=checkpoint_path,
        ),
    ] = None
    again: Annotated[bool, _place("Publish the checkpoint even if it is published already.")] = False
    despite: Annotated[
        tuple[str, ...],
        _place("Publish although something speaks against it; repeatable:", metavar="WORD", words=_DESPITE),
    ] = ()
    config: Annotated[
        Path | None,
        _place(
            "Read further options from this JSON or TOML file. With [models.NAME] tables in it, export each "
            "model, or only FILE#NAME.",
            metavar="FILE[#NAME]",
        ),
    ] = None

    def both(self) -> tuple[Path, Path]:
        """Return the checkpoint's path and the model's; UsageError if either is missing."""
        if self.ckpt_dir is None or self.out is None:
            missing = "--ckpt-dir" if self.ckpt_dir is None else "--out"
            raise UsageError(
                f"{missing} is missing", hint="export-model --ckpt-dir DIR --out MODEL --model WHAT"
            )
        return self.ckpt_dir, self.out


_NEW_BASES = {
    "always": "in place of a delta",
    "if-needed": "with --incr, where no delta fits",
    "merged": "with --incr, after the delta: the base and all deltas in one",
}


class RunFlags(Struct, frozen=True):
    """The options that say whether to plan, to publish deltas, to watch, and which servers to notify."""

    dry_run: Annotated[bool, Option("Print the plan and write nothing.", CHECKS)] = False
    incr: Annotated[bool, _delta("Publish changes as a delta; first a base.")] = False
    new_base: Annotated[
        tuple[str, ...],
        _delta("Publish a base that takes deltas; repeatable:", metavar="WHEN", words=_NEW_BASES),
    ] = ()
    notify: Annotated[
        tuple[str, ...],
        _of_incr(
            "With --incr: ask this model server to apply the publication. Repeat it for several.",
            metavar="HOST[:PORT]",
        ),
    ] = ()
    watch: Annotated[
        bool, Option("Keep running: export each new checkpoint or, with --incr, each change.", FOLLOWING)
    ] = False

    metrics_port: Annotated[
        str,
        Option(
            "With --watch: serve metrics for Prometheus on this port, of 127.0.0.1 if no address is given.",
            FOLLOWING,
            metavar="[ADDRESS:]PORT",
            default="none",
            goes_with="--watch",
        ),
    ] = ""
    heartbeat: Annotated[
        str,
        Option(
            "With --watch: write this file at each look, and while work goes on, for a liveness probe.",
            FOLLOWING,
            metavar="FILE",
            default="none",
            goes_with="--watch",
        ),
    ] = ""
    verbose: Annotated[
        bool,
        Option("With --watch: print each publication in full.", FOLLOWING, letter="-v", goes_with="--watch"),
    ] = False

    @property
    def takes_deltas(self) -> bool:
        """True if the run publishes a base that takes deltas, or a delta."""
        return self.incr or bool(self.new_base)

    @property
    def publishes_deltas(self) -> bool:
        """True if the run publishes a delta, or a base as long as there is none."""
        return self.incr and "always" not in self.new_base


def check_places(places: PlaceFlags, run: RunFlags, request: ExportRequest) -> None:
    """Raise UsageError for options that lack --incr, or that exclude the typed deltas or watch.

    `--new-base if-needed` and `merged` and `--verify graph` need --incr; `--again` excludes --watch and
    deltas, `--despite deltas` excludes --incr and --new-base.
    """
    if alone := [when for when in run.new_base if when != "always" and not run.publishes_deltas]:
        raise UsageError(
            f"--new-base {alone[0]} goes with --incr", hint=f"add --incr, or leave out --new-base {alone[0]}"
        )
    if places.again and (run.watch or run.publishes_deltas):
        raise UsageError(
            "--again publishes one version: it does not go with --watch and --incr", hint="leave out --again"
        )
    if request.check_graph and not run.incr:
        raise UsageError("--verify graph goes with --incr", hint="add --incr, or leave out --verify graph")
    if "deltas" in places.despite and run.takes_deltas:
        raise UsageError(
            "--despite deltas publishes a version that takes none: it does not go with --incr and --new-base",
            hint="leave out --despite deltas",
        )


def _short_help(context: typer.Context, is_asked: bool) -> None:
    if is_asked:
        from exporter.cli import help_command

        help_command.echo(help_command.HELP.short(context))
        raise typer.Exit


def _all_help(context: typer.Context, is_asked: bool) -> None:
    if is_asked:
        typer.echo(context.get_help())
        raise typer.Exit


HelpFlag = Annotated[
    bool,
    typer.Option(
        "--help", "-h", callback=_short_help, is_eager=True, help="Show the options that most runs need."
    ),
]
HelpAllFlag = Annotated[
    bool, typer.Option("--help-all", callback=_all_help, is_eager=True, help="Show all options.")
]

# With `updates`, because typed options of bases are filled into it; without --incr they are left out again.
NOTHING_TYPED = ExportRequest(Path(), Path(), updates=Updates())


def refuse_root_options(context: typer.Context) -> None:
    """Raise UsageError if options were typed before the subcommand; the hint corrects the command line."""
    given = [
        f"--{name.rstrip('_').replace('_', '-')}"
        for name, value in context.params.items()
        if value not in (None, False)
        and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise UsageError(
            f"{', '.join(given)} before {context.invoked_subcommand!r} has no effect",
            hint=_without_root_options(context, given),
        )


def _without_root_options(context: typer.Context, given: Sequence[str]) -> str:
    """Return a hint: the typed command line with the options before the subcommand moved after it.

    `given` has the names of these options; the hint says which of them the subcommand does not have, to be
    left out.
    """
    name = str(context.invoked_subcommand)
    typed = [*ARGUMENTS.get()]
    at = typed.index(name)
    command: Any = context.command
    known = {opt: one for one in command.get_command(context, name).params for opt in one.opts}
    moved, before = list[str](), iter(typed[:at])
    for each in before:
        if (option := known.get(each.partition("=")[0])) is not None:
            moved += [each] if "=" in each or getattr(option, "is_flag", True) else [each, next(before, "")]
    left = [option for option in given if option not in known]
    line = " ".join(["export-model", *map(quoted, [*typed[at:], *moved])])
    return f"{f'leave out {chr(44).join(left)}: ' if left else ''}{line}"


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
    """Run `export-model` without a subcommand: export the newest checkpoint, or follow training with --watch.

    Before a subcommand it only refuses options that were typed there. A node of a cluster that is not the
    chief prints that, and exports nothing. An error is printed, and ends in typer.Exit with its exit code.
    """
    if context.invoked_subcommand is not None:
        with command(printing):
            refuse_root_options(context)
        return
    # `command` first: errors at the end of a block on the stack are printed like all others.
    with command(printing) as sink, ExitStack() as stack:
        if places.config is not None:
            from exporter.terminal.options_file import models_in  # late, as below

            if models := models_in(places.config):
                from exporter.cli.several import run_all

                run_all(places.config, models, ARGUMENTS.get(), sink, watch=flags.watch, out=places.out)
                return
        ckpt_dir, out = places.both()
        require_apart(ckpt_dir, out)
        servers = Servers(flags.notify, access)
        servers.check()
        check_places(places, flags, request)
        request = replace(
            request,
            ckpt_dir=ckpt_dir,
            again=places.again,
            plain="deltas" in places.despite,
            despite_hold="hold" in places.despite,
            data=data_mode(out, request.data),
            updates=request.updates if flags.takes_deltas else None,
        )
        watch = watching if flags.watch else None
        sink.json_lines, sink.is_brief = flags.watch, flags.watch and not flags.verbose
        from exporter.cli import export_commands  # late: refused options need none of this

        # Before the model is opened: a node that does not export leaves a store alone.
        if "role" not in places.despite and not (role := node_role()).is_chief:
            export_commands.stand_by(role, sink)
            return
        target = stack.enter_context(opened(out, read_only=flags.dry_run, signing=request.signing))
        request, seen = replace(request, out=target.path), None
        if watch is not None and not flags.dry_run:
            from exporter.cli.watched import watched

            seen = stack.enter_context(watched(request.out, sink, flags.metrics_port, flags.heartbeat))
        if flags.publishes_deltas:
            how = export_commands.RunOptions(
                target, "if-needed" in flags.new_base, "merged" in flags.new_base, watch, servers, seen
            )
            export_commands.run_incremental(request, sink, how, dry_run=flags.dry_run)
            return
        export_commands.run_full(request, sink, target, watch, seen, dry_run=flags.dry_run)


_IN_LOG = ("history", "merge", "rollback", "resume", "tag", "diff", "verify")
COMMANDS = {
    "init": LateCommand("exporter.cli.init_command", "init"),
    "inspect": LateCommand("exporter.cli.inspect_command", "inspect"),
    **{name: LateCommand("exporter.cli.log_commands", name) for name in _IN_LOG},
    "push": LateCommand("exporter.cli.transfer_commands", "push"),
    "pull": LateCommand("exporter.cli.transfer_commands", "pull"),
    "doctor": LateCommand("exporter.cli.doctor_command", "doctor"),
    "help": LateCommand("exporter.cli.help_command", "help"),
}
app = application(HELP, COMMANDS, invoke_without_command=True)
app.callback()(with_structs(export))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, and end the process with its exit code (SystemExit).

    `arguments` are the words after the program's name; None: the process's own.
    """
    run(app, "export-model", arguments, takes=("--ckpt-dir", "--out", "--model"))
