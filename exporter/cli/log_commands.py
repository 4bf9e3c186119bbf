"""The subcommands on published models: merge, rollback, resume, tag, diff, verify, history.

The shell completes positions from the local model's publications. A completion makes no network request, and
an error gives no completions.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import Struct

from exporter.errors import Exit, UsageError
from exporter.options import ANYBODY, LOCALLY, UNSIGNED, Jobs, Option, Signing, Trusting
from exporter.storage.local_paths import checkpoint_parser, quoted
from exporter.storage.url import Url
from exporter.terminal.edge import AS_TEXT, OutputFlags, command

DryRunFlag = Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")]
ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="Model base path, or its URL: s3://, gs://, az://.",
        parser=checkpoint_parser("MODEL"),
    ),
]


_of_rebase = partial(Option, goes_with="--rebase")


class RebaseFlags(Struct, frozen=True):
    """Options of a merger that publishes a new base."""

    rebase: Annotated[bool, Option("Merge base and deltas into a new base instead.")] = False
    keep: Annotated[
        int | None, _of_rebase("With --rebase: keep the newest N versions.", metavar="N", least=1)
    ] = None
    despite: Annotated[
        tuple[str, ...],
        _of_rebase(
            "With --rebase: publish the base although something speaks against it:",
            metavar="hold",
            words={"hold": "the model is held"},
        ),
    ] = ()


DELTAS_ALONE = RebaseFlags()


def merge(
    model: ModelArgument,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="POSITION",
            help="Position at which the first delta begins: a number or a name.",
            autocompletion=positions,
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="POSITION",
            help="Position at which the last delta ends: a number or a name.",
            autocompletion=positions,
        ),
    ] = None,
    base: RebaseFlags = DELTAS_ALONE,
    jobs: Jobs = LOCALLY,
    signing: Signing = UNSIGNED,
    dry_run: DryRunFlag = False,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """Merge published deltas into one, or with --rebase base and deltas into a new base.

    \b
    Examples:
      export-model merge models/ranker
      export-model merge models/ranker --from 900 --to 1200
      export-model merge models/ranker --rebase --keep 2
      export-model merge models/ranker --dry-run
      export-model merge s3://bucket/models/ranker --engine ray://head:10001
    """
    with command(printing) as sink:
        from exporter import api
        from exporter.cli import render_log

        if base.rebase and (from_ is not None or to is not None):
            raise UsageError(
                "--from and --to choose deltas: --rebase merges all of them with the base",
                hint=f"export-model merge {quoted(model)} --rebase",
            )
        if base.rebase:
            based = api.rebase(
                model,
                keep=base.keep,
                despite_hold="hold" in base.despite,
                jobs=jobs,
                progress=sink.progress,
                signing=signing,
                dry_run=dry_run,
            )
            render_log.rebased(based, sink, dry_run=dry_run)
        else:
            done = api.merge(model, from_, to, jobs, sink.progress, signing, dry_run=dry_run)
            render_log.merged(done, sink, dry_run=dry_run)


def rollback(
    model: ModelArgument,
    to: Annotated[
        str,
        typer.Option(
            metavar="POSITION",
            help="Position (or plain version) whose values to restore: a number, a tag, @previous, "
            "@2h (two hours ago), @yesterday or @2026-11-26T08:00 (UTC).",
            autocompletion=positions,
        ),
    ],
    reason: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Why, to be kept with it: `export-model history` shows it."),
    ] = None,
    if_canary: Annotated[
        bool,
        typer.Option(
            "--if-canary",
            help="Only if a canary approved POSITION last; `serve-model agent` uses this.",
        ),
    ] = False,
    signing: Signing = UNSIGNED,
    dry_run: DryRunFlag = False,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """Publish an earlier position's values as the newest, and hold the model there.

    Where versions take no deltas, an earlier version is published again as the newest; its data is linked.

    \b
    Examples:
      export-model rollback models/ranker --to 900 --dry-run
      export-model rollback models/ranker --to 900 --reason "scores fell"
      export-model rollback models/ranker --to @2h --dry-run
    """
    with command(printing) as sink:
        from exporter import api
        from exporter.cli import render_log

        done = api.rollback(model, to, reason=reason, if_canary=if_canary, signing=signing, dry_run=dry_run)
        render_log.taken_back(done, model, signing, sink, dry_run=dry_run)


def resume(
    model: ModelArgument,
    lift_only: Annotated[
        bool, typer.Option("--lift-only", help="Lift the hold and leave the values as they are.")
    ] = False,
    lift_canary: Annotated[
        bool,
        typer.Option(
            "--lift-canary",
            help="Lift a canary's hold, too: servers then take deltas that none approved, or one failed.",
        ),
    ] = False,
    signing: Signing = UNSIGNED,
    dry_run: DryRunFlag = False,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """Lift the hold; after a rollback, restore the values from before it, unless newer ones are published.

    If the model has a canary, its hold returns, and it must approve the resumed values, too; repeating the
    command changes nothing. To do without a canary, stop the agent and say --lift-canary.

    \b
    Examples:
      export-model resume models/ranker
      export-model resume models/ranker --lift-only
      export-model resume models/ranker --lift-canary --dry-run
    """
    with command(printing) as sink:
        from exporter import api
        from exporter.cli import render_log

        done = api.resume(
            model, lift_only=lift_only, lift_canary=lift_canary, signing=signing, dry_run=dry_run
        )
        render_log.taken_back(done, model, signing, sink, dry_run=dry_run)


def tag(
    model: ModelArgument,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="The tag: a-z, 0-9, '.', '_', '-'. Without it, tags are listed."),
    ] = None,
    position: Annotated[
        str | None,
        typer.Argument(
            metavar="POSITION",
            help="What it names: a number or a name, as of rollback --to.",
            show_default="@latest",
            autocompletion=positions,
        ),
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the tag.")] = False,
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Why, to be kept with it: `export-model tag` shows it.")
    ] = None,
    dry_run: DryRunFlag = False,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """Give a position a name that all commands accept; list the names, or delete one.

    Retention keeps what leads to a tagged position. A tag that exists moves.

    \b
    Examples:
      export-model tag models/ranker
      export-model tag models/ranker prod 900 --reason "offline test passed"
      export-model rollback models/ranker --to prod
      export-model tag models/ranker prod --delete
    """
    with command(printing) as sink:
        _require_one_use(model, name, position, delete=delete, reason=reason)
        from exporter import api
        from exporter.cli import render_log

        if name is None:
            render_log.tags(api.tags(model), Url.parse(str(model)) or model, sink)
            return
        if delete:
            done = api.untag(model, name, dry_run=dry_run)
        else:
            done = api.tag(model, name, position or "@latest", reason=reason, dry_run=dry_run)
        render_log.tagged(done, sink, dry_run=dry_run)


def _require_one_use(
    model: Path, name: str | None, position: str | None, *, delete: bool, reason: str | None
) -> None:
    """Raise UsageError for arguments of `tag` that do not go together: to list, to set or to delete.

    Without a `name`, tags are listed; `delete` deletes one; otherwise one is set to `position`.
    """
    if name is None and (delete or reason is not None):
        given = "--delete" if delete else "--reason"
        raise UsageError(f"{given} needs a tag", hint=f"name it: export-model tag {quoted(model)} NAME")
    if delete and (position is not None or reason is not None):
        given = "--reason" if position is None else position
        raise UsageError(
            f"--delete and {given} exclude each other",
            hint=f"export-model tag {quoted(model)} {quoted(str(name))} --delete",
        )


def diff(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="Checkpoint, version, MODEL or MODEL@POSITION, by number or name.",
            autocompletion=states,
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="What to compare A with.", autocompletion=states)],
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 10 if A and B differ.")] = False,
    jobs: Jobs = LOCALLY,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """Show the differences of two states: variables, rows, norms.

    \b
    Examples:
      export-model diff train/model.ckpt-900 train/model.ckpt-1000
      export-model diff models/ranker@900 models/ranker --exit-code
      export-model diff models/ranker@prod models/ranker@latest
      export-model diff models/ranker train/
      export-model diff s3://bucket/train/model.ckpt-900 s3://bucket/train/model.ckpt-1000 --engine ray
    """
    with command(printing) as sink:
        from exporter import api
        from exporter.cli import render_differences

        found = api.diff(a, b, jobs=jobs)
        render_differences.differences(found, sink)
    # Outside `command`, which would take typer.Exit, a RuntimeError, for an unexpected error.
    if exit_code and not found.is_empty:
        raise typer.Exit(Exit.DIFFERENT)


def verify(
    model: ModelArgument,
    bytes_: Annotated[bool, typer.Option("--bytes", help="Also read all values of the versions.")] = False,
    jobs: Jobs = LOCALLY,
    trusting: Trusting = ANYBODY,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """Check everything that is published: files, checksums, and that each base reaches the newest position.

    \b
    Examples:
      export-model verify models/ranker
      export-model verify models/ranker --bytes --json
      export-model verify models/ranker --bytes --engine ray://head:10001
    """
    with command(printing) as sink:
        from exporter import api
        from exporter.cli import render_log

        found = api.verify_model(model, bytes_=bytes_, jobs=jobs, trusting=trusting)
        render_log.verified(found, sink, says_model=bool(trusting.trust))
        if found.problems:
            raise found.problems[0]


def history(
    model: ModelArgument,
    last: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Show only the newest N events.")
    ] = None,
    changes: Annotated[
        bool, typer.Option("--changes", help="Also show what each delta changed: rows, and largest moves.")
    ] = False,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """List publications in order: versions, bases, deltas, mergers, rollbacks; the hold, and tags.

    \b
    Examples:
      export-model history models/ranker
      export-model history models/ranker --last 20 --json
      export-model history models/ranker --last 1 --changes
    """
    with command(printing) as sink:
        from exporter import api
        from exporter.cli import render_log

        render_log.history(api.history(model), sink, last, changes=changes)


def positions(context: typer.Context, incomplete: str) -> list[str]:
    """Return a shell's completions of a position, from the model that was typed before it; [] without one."""
    words = (
        context.args
    )  # an option without its value ends Click's parsing: earlier words are still in `args`
    model = context.params.get("model") or next((word for word in words if not word.startswith("-")), None)
    return _starting(incomplete, _positions_of(model))


def states(incomplete: str) -> list[str]:
    """Return a shell's completions of `MODEL@`: the model with each of its positions; [] before the @."""
    model, at, position = incomplete.rpartition("@")
    return [f"{model}@{each}" for each in _starting(position, _positions_of(model))] if at else []


def _starting(incomplete: str, found: list[str]) -> list[str]:
    return [text for text in found if text.startswith(incomplete)]


def _positions_of(model: Any) -> list[str]:
    """Return the positions of a local model as text, the newest first, then tags and names as `@latest`.

    Empty for a URL, also a malformed one, None, or a model that cannot be read.
    """
    with suppress(Exception):
        from exporter.publish.model import Model

        if not model or Url.parse(str(model)) is not None:
            return []
        found = Model.read(Path(model))
        numbers = sorted({event.position for event in found.publications}, reverse=True)
        return [
            *map(str, numbers),
            *(tag.name for tag in found.listed_tags),
            "@latest",
            "@previous",
            "@yesterday",
        ]
    return []
