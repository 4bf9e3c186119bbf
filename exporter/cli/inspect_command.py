"""`export-model inspect`: show the contents of a checkpoint, a graph or a published model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct, field

from exporter.options import ExportRequest, Option
from exporter.storage.local_paths import checkpoint_parser, local_path
from exporter.terminal.edge import AS_TEXT, OutputFlags, command

_compared = partial(Option, goes_with="--unmatched")


class ComparisonFlags(Struct, frozen=True):
    """The graph that a checkpoint's names are compared with."""

    unmatched: Annotated[
        str | None,
        Option(
            "Compare a checkpoint with this graph (as --model names it), and list unmatched names.",
            metavar="WHAT",
        ),
    ] = None
    model_args: Annotated[
        Mapping[str, str],
        _compared("With --unmatched: a builder's argument.", name="--model-arg", metavar="NAME=VALUE"),
    ] = field(default_factory=dict)
    inputs: Annotated[
        Mapping[str, str],
        _compared("With --unmatched: an input of a .meta's graph.", name="--input", metavar="NAME=TENSOR"),
    ] = field(default_factory=dict)
    outputs: Annotated[
        Mapping[str, str],
        _compared("With --unmatched: an output of a .meta's graph.", name="--output", metavar="NAME=TENSOR"),
    ] = field(default_factory=dict)
    rename_file: Annotated[
        Path | None,
        _compared(
            "With --unmatched: the table of names so far.", name="--rename", metavar="FILE", parse=local_path
        ),
    ] = None

    def request(self, ckpt_dir: Path) -> ExportRequest | None:
        """Return the request of an export whose names are to be compared; None without `--unmatched`.

        It reads `ckpt_dir`; its place to publish is not used.
        """
        if self.unmatched is None:
            return None
        return ExportRequest(
            ckpt_dir,
            Path(),
            model=self.unmatched,
            model_args=self.model_args,
            inputs=self.inputs,
            outputs=self.outputs,
            rename_file=self.rename_file,
        )


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
    """Show the contents of a checkpoint, a graph or a published model.

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
        from exporter import api

        render_inspection.inspected(api.inspect(path), sink, tensors=tensors)
