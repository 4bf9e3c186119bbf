"""`export-model init`: print the command of a first export, made of a checkpoint and the graph beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exporter.storage.local_paths import checkpoint_parser, path_parser, quoted
from exporter.terminal.edge import AS_TEXT, OutputFlags, command
from exporter.terminal.output import escape, labelled

if TYPE_CHECKING:
    from exporter.pipeline.proposal import Proposal


def init(
    ckpt_dir: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|PREFIX",
            help="Checkpoint directory (its newest one), or one checkpoint's prefix; also a URL.",
            parser=checkpoint_parser("DIR"),
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="MODEL", help="The directory to publish the model in.", parser=checkpoint_parser("--out")
        ),
    ] = Path("models/model"),
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="If no graph is found, or none can be served, write the beginning of a builder here.",
            parser=path_parser("--write"),
        ),
    ] = None,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """Propose a first export: the whole command, with inputs named after the variables that use them.

    Looks at the newest checkpoint, and at the .meta file, SavedModel or archive beside it, and plans an
    export before it proposes one. Where there is no graph, or only that of a training, prints the beginning
    of a builder: it has the checkpoint's variables, and says what to add.

    \b
    Examples:
      export-model init train/
      export-model init train/ --out models/ranker --write model.py
    """
    with command(printing) as sink:
        from exporter.cli.documents.inspections import Proposed
        from exporter.errors import UsageError
        from exporter.pipeline.proposal import propose

        found = propose(ckpt_dir)
        if write is not None:
            if not found.builder:
                raise UsageError(
                    f"{found.model} says what to serve: no builder is needed", hint="leave out --write"
                )
            try:
                with write.open("x") as file:  # a builder that somebody has completed is not overwritten
                    file.write(found.builder)
            except FileExistsError:
                raise UsageError(f"{write} exists", hint="name a new file: --write FILE") from None
            except OSError as error:
                raise UsageError(f"{write} cannot be written", cause=error.strerror or str(error)) from None
        next_, easier = found.command(ckpt_dir, out, write), None
        if found.archive is not None:
            easier = f"export-model --ckpt-dir {quoted(found.archive)} --out {quoted(out)}"
        document = Proposed(
            checkpoint=str(found.catalog.prefix),
            model=found.model,
            inputs=found.inputs,
            outputs=found.outputs,
            signatures=found.signatures,
            builder=found.builder or None,
            command=next_,
            easier=easier,
            refused=str(found.refused.message) if found.refused else None,
        )
        if found.builder and write is None:
            next_ = f"export-model init {quoted(ckpt_dir)} --out {quoted(out)} --write model.py"
        sink.result(document, _lines(found, next_, easier, write))


def _lines(found: Proposal, next_: str, easier: str | None, written: Path | None) -> Iterator[str]:
    yield labelled("checkpoint", found.catalog.prefix)
    if found.refused is None:
        yield labelled("graph", found.model or "none beside it: a builder makes one")
    else:
        yield labelled("graph", "the one beside it cannot be served: a builder makes another")
        refused = (found.refused.message, found.refused.cause, found.refused.hint)
        yield from (
            labelled("refused" if n == 0 else "", text) for n, text in enumerate(filter(None, refused))
        )
    for one in found.inputs:
        used = f", used with {', '.join(one.feeds)}" if one.feeds else ""
        yield labelled("input", f"{one.name} = {one.tensor}{used}")
    for name, tensor in found.outputs.items():
        yield labelled("output", f"{name} = {tensor}")
    for name in found.signatures:
        yield labelled("signature", name)
    for option, value in found.options:
        yield labelled("option", f"{option} {value}")
    if written is not None:
        yield labelled("builder", f"{written}: complete it as its comments say")
    elif found.builder:
        yield from ("", *map(escape, found.builder.splitlines()), "")
    yield labelled("next", next_)
    if easier is not None:
        yield labelled("easier", "the archive beside it has its model, and needs no builder:")
        yield labelled("", easier)
