"""`export-model inspect`: show what a checkpoint, a graph or a published model holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct

from exporter.errors import UsageError
from exporter.local_paths import checkpoint_parser, path_parser
from exporter.options import ExportRequest
from exporter.terminal.edge import AS_TEXT, OutputFlags, command, pairs
from exporter.transfer.opened import LocalModel, OpenModel, opened_if_model


class ComparisonFlags(Struct, frozen=True):
    """The graph that a checkpoint's names are compared with."""

    unmatched: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Compare a checkpoint with this graph (as --model names it), and list what has no partner.",
        ),
    ] = None
    model_arg: Annotated[
        list[str], typer.Option(metavar="NAME=VALUE", help="With --unmatched: a builder's argument.")
    ] = []
    input: Annotated[
        list[str], typer.Option(metavar="NAME=TENSOR", help="With --unmatched: an input of a .meta's graph.")
    ] = []
    output: Annotated[
        list[str], typer.Option(metavar="NAME=TENSOR", help="With --unmatched: an output of a .meta's graph.")
    ] = []
    rename_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=path_parser("--rename-file"),
            help="With --unmatched: the table of names so far.",
        ),
    ] = None

    def request(self, ckpt_dir: Path) -> ExportRequest | None:
        """The export whose names are compared; None if none is asked for.

        Raises:
            UsageError: an option goes with --unmatched, which is not there.
        """
        if self.unmatched is not None:
            return ExportRequest(
                ckpt_dir=ckpt_dir,
                out=Path(),
                model=self.unmatched,
                model_args=pairs("--model-arg", self.model_arg),
                inputs=pairs("--input", self.input),
                outputs=pairs("--output", self.output),
                rename_file=self.rename_file,
            )
        if self != ComparisonFlags():
            raise UsageError("--model-arg, --input, --output and --rename-file go with --unmatched")
        return None


NOT_COMPARED = ComparisonFlags()


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="Checkpoint, .meta, SavedModel or model base path; also a URL.",
            parser=checkpoint_parser("PATH"),
        ),
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    comparison: ComparisonFlags = NOT_COMPARED,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """Show what a checkpoint, a graph or a published model holds.

    \b
    Examples:
      export-model inspect train/
      export-model inspect train/model.ckpt-900 --tensors
      export-model inspect train/model.ckpt-900.meta
      export-model inspect models/ranker/900 --json
      export-model inspect weights.npz --unmatched my_model.py:serving
    """
    with command(printing) as sink:
        request = comparison.request(path)
        from exporter.cli import render_inspection

        if request is not None:
            from exporter.pipeline.both_sides import compare_names

            render_inspection.compared(compare_names(request), sink)
            return
        from exporter.pipeline import inspection

        with opened_if_model(str(path)) as stored:
            target: OpenModel = stored or LocalModel(path)
            found = target.carry(lambda: inspection.inspect(target.path))
            render_inspection.inspected(found, sink, tensors=tensors)
