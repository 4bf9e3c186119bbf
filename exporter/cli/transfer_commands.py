"""`export-model push MODEL URL` and `export-model pull URL MODEL`: a published model in an object store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from exporter.cli.documents import Status
from exporter.cli.log_commands import DryRunFlag
from exporter.errors import ExportError, UsageError, as_export_error
from exporter.options import ANYBODY, Option, Trusting
from exporter.storage.layout import SAVED_MODEL_FILE
from exporter.storage.local_paths import checkpoint_parser, local_path, quoted
from exporter.storage.url import Url
from exporter.terminal.edge import AS_TEXT, OutputFlags, command, outlived, until_interrupted
from exporter.terminal.output import Output, labelled
from exporter.terminal.progress import count, human_bytes
from exporter.transfer.opened import trust_in

if TYPE_CHECKING:
    from exporter.transfer.pull import Pulled
    from exporter.transfer.push import PushPlan


def push(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Model base path.", parser=checkpoint_parser("MODEL"))
    ],
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="s3://BUCKET/MODEL, gs://BUCKET/MODEL or az://CONTAINER/MODEL."),
    ],
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove publications from the store that are gone here.")
    ] = False,
    trusting: Trusting = ANYBODY,
    dry_run: DryRunFlag = False,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """Upload a published model to an object store: versions, deltas, the hold, each whole or not at all.

    \b
    Examples:
      export-model push models/ranker s3://models/ranker
      export-model push models/ranker s3://models/ranker --prune --dry-run
    """
    with command(printing) as sink:
        from exporter import api

        _require_order("push", model, url)
        plan = api.push(model, url, prune=prune, progress=sink.progress, trusting=trusting, dry_run=dry_run)
        _print_push(plan, sink, dry_run=dry_run)


def _require_order(command: str, model: Path, url: str) -> None:
    """Raise UsageError for a model and a URL in the wrong order, two URLs, or a malformed URL as `model`.

    `command` is push or pull, for the hint.
    """
    stored = Url.parse(str(model))
    if stored is None:
        return
    if Url.parse(url) is not None:
        local_path("MODEL", str(stored))
    order = "model, then the URL" if command == "push" else "URL, then the model"
    first, second = (url, stored) if command == "push" else (stored, url)
    hint = f"export-model {command} {quoted(first)} {quoted(second)}"
    raise UsageError(f"{command} takes the {order}", hint=hint)


def _print_push(plan: PushPlan, sink: Output, *, dry_run: bool) -> None:
    from exporter.cli.documents.logs import Push

    is_nothing = not (plan.upload or plan.remove or plan.changes_holds)
    status = Status.NOTHING_TO_DO if is_nothing else Status.done(is_plan=dry_run)
    document = Push(
        dry_run=dry_run,
        status=status,
        url=str(plan.url),
        uploaded=[item.path for item in plan.upload],
        removed=plan.remove,
        bytes=plan.bytes_,
        copied=plan.copied,
        position=plan.position,
    )
    what = f"{count(len(plan.upload), 'publication')}, {human_bytes(plan.bytes_)}, to {plan.url}"
    lines = [labelled("would upload" if dry_run else "uploaded", what)]
    if plan.copied:
        said = f"{human_bytes(plan.copied)} that the store has in another version"
        lines.append(labelled("would copy" if dry_run else "copied", said))
    if plan.remove:
        lines.append(labelled("would remove" if dry_run else "removed", ", ".join(plan.remove)))
    lines.append(labelled("position", plan.position))
    if not dry_run:
        lines.append(labelled("next", f"export-model pull {quoted(plan.url)} MODEL"))
    sink.result(document, lines, is_done=not dry_run)


class LookFlags(Struct, frozen=True):
    """Options for a `pull` that keeps running, and the time between two looks into the store."""

    watch: Annotated[bool, Option("Keep running: fetch new publications of the store.")] = False
    interval: Annotated[
        float,
        Option("With --watch: how often to look.", metavar="SECONDS", least=0.05, goes_with="--watch"),
    ] = 1.0


ONCE = LookFlags()


def pull(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where a model was pushed to.")],
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Model base path, for servers that read files.",
            parser=checkpoint_parser("MODEL"),
        ),
    ],
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove publications here that are gone from the store.")
    ] = False,
    looks: LookFlags = ONCE,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            metavar="N",
            min=0,
            help="Threads that merge a base here, at idle priority; 0: as many as there are processors.",
        ),
    ] = 0,
    trusting: Trusting = ANYBODY,
    dry_run: DryRunFlag = False,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """Fetch a published model from a store into a local directory, checked, in order of positions.

    \b
    Examples:
      export-model pull s3://models/ranker models/ranker
      export-model pull s3://models/ranker models/ranker --watch --interval 0.5 --prune
      export-model pull s3://models/ranker models/ranker --trust publisher.pem
      export-model pull s3://models/ranker models/ranker --dry-run
    """
    with command(printing) as sink:
        from exporter.transfer import pull as transfer

        _require_order("pull", model, url)
        if dry_run and looks.watch:
            raise UsageError("--dry-run looks once, and --watch for ever", hint="leave out --watch")
        copy = transfer.LocalCopy(url, model, prune=prune, trust=trust_in(trusting, url), workers=workers)
        if not looks.watch:
            done = copy.plan() if dry_run else copy.update(sink.progress)
            _print_pull(done, model, sink, dry_run=dry_run)
            if trusting.trust and not done.identity and not done.untrusted:
                sink.note(
                    f"{url} does not say which model it is: another model of its name that a trusted key has "
                    "signed could take its place. A new base says it: export-model merge "
                    f"{quoted(url)} --rebase --sign-key KEY"
                )
            # Last: what is trusted has been fetched, and is printed.
            for refused in done.untrusted:
                raise refused
            return
        sink.json_lines = True
        with until_interrupted(sink) as published:
            said = ""
            while True:
                try:
                    done = copy.update(sink.progress)
                except UsageError:  # only a person mends it
                    raise
                except (ExportError, OSError) as error:  # store, disk or publisher may be well again
                    said = _tell_once(as_export_error(error), said, sink)
                else:
                    said = _tell_once(done.untrusted[0], said, sink) if done.untrusted else ""
                    for fetched in done.fetched:
                        published.add(model / fetched)
                    if done.fetched or done.removed or done.repeated:
                        _print_pull(done, model, sink)
                time.sleep(looks.interval)


def _tell_once(error: ExportError, said: str, sink: Output) -> str:
    if error.message != said:
        outlived(sink, error)
    return error.message


def _print_pull(done: Pulled, model: Path, sink: Output, *, dry_run: bool = False) -> None:
    from exporter.cli.documents.logs import Pull

    is_something = done.fetched or done.removed or done.repeated
    document = Pull(
        dry_run=dry_run,
        status=Status.done(is_plan=dry_run) if is_something else Status.NOTHING_TO_DO,
        model=str(model),
        fetched=done.fetched,
        removed=done.removed,
        incomplete=done.incomplete,
        waiting=done.waiting,
        way_on=done.way_on,
        repeated=done.repeated,
        untrusted=[error.message for error in done.untrusted],
        bytes=done.bytes_,
        spared=done.spared,
        position=done.position,
        identity=done.identity,
    )
    sink.result(document, [*_pull_lines(done, model, dry_run=dry_run)], is_done=not dry_run)


_WAITS = "they wait for what the store publishes next"


def _pull_lines(done: Pulled, model: Path, *, dry_run: bool) -> Iterator[str]:
    size = f"{'at most ' if dry_run else ''}{human_bytes(done.bytes_)}"
    what = f"{count(len(done.fetched), 'publication')}, {size}, to {model}"
    yield labelled("would fetch" if dry_run else "fetched", what)
    yield from (labelled("would spare" if dry_run else "spared", each.text) for each in done.spared)
    if done.removed:
        yield labelled("would remove" if dry_run else "removed", ", ".join(done.removed))
    if done.incomplete:
        yield labelled("not whole yet", ", ".join(done.incomplete))
    if done.repeated:
        yield labelled("repeated", f"{done.repeated}: what the store went back to, or resumed")
    if done.waiting:
        then = f"{done.way_on}, then pull again" if done.way_on else _WAITS
        yield labelled("waiting", f"{', '.join(done.waiting)}: this copy was rolled back; {then}")
    if done.untrusted:
        yield labelled("not trusted", "; ".join(error.message for error in done.untrusted))
    if done.identity:
        pinned = ": from now on this copy takes no other" if done.is_pinned_now else ""
        yield labelled("model", f"{done.identity}{pinned}")
    if done.position is not None:
        yield labelled("position", done.position)
        if not dry_run:
            yield labelled("next", _next(model))


def _next(model: Path) -> str:
    """Return a command for a pulled model: one that serves it, or inspects its newest version if ours cannot.

    Our server loads neither a pair of graph and checkpoint nor operations that stock TensorFlow lacks.
    """
    from exporter.publish.versions import version_dirs

    newest = version_dirs(model)[0].path
    if (newest / SAVED_MODEL_FILE).exists() and not _has_foreign_ops(newest):
        return f"serve-model run {quoted(model)}"
    return f"export-model inspect {quoted(newest)}"


def _has_foreign_ops(version: Path) -> bool:
    """True if a version's graph has operations that stock TensorFlow lacks; False if it cannot be read."""
    from exporter.graph.graph_files import read_saved_model
    from exporter.graph.servable import foreign_ops
    from exporter.wire.protos import all_nodes

    with suppress(ExportError, OSError):
        graphs = [each.graph_def for each in read_saved_model(version).meta_graphs]
        return any(
            foreign_ops(all_nodes(graph), {each.signature.name for each in graph.library.function})
            for graph in graphs
        )
    return False
