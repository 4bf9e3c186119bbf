"""The options of an export: what to serve, from where, to where, and how it is stored and checked.

A struct for each heading of the help, as it is typed; deltas and watching: see `delta_flags`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from exporter.errors import UsageError
from exporter.local_paths import checkpoint_parser
from exporter.options import DataMode, ExportFormat, Verify
from exporter.terminal.parameters import Option


class PlaceFlags(Struct, frozen=True):
    """Where from, where to."""

    ckpt_dir: Annotated[
        Path | None,
        Option(
            metavar="DIR|PREFIX",
            parser=checkpoint_parser("--ckpt-dir"),
            help="Checkpoint directory (its newest one), or one checkpoint's prefix; also s3://, gs://, az://.",
        ),
    ] = None
    out: Annotated[
        Path | None,
        Option(
            metavar="MODEL",
            parser=checkpoint_parser("--out"),
            help="Model base path: the directory of the versions; also s3://, gs://, az://.",
        ),
    ] = None
    format: Annotated[ExportFormat, Option(help="Write a SavedModel, Cloud ML's pair, or both.")] = (
        ExportFormat.SAVED_MODEL
    )
    version: Annotated[
        str | None,
        Option(
            metavar="N|time",
            help="Version number, or time (seconds since 1970). [default: the training step while it grows]",
        ),
    ] = None
    plain: Annotated[
        bool, Option(help="Publish a version that takes no deltas, although the newest one does.")
    ] = False
    despite_hold: Annotated[bool, Option(help="Publish a version although the model is held.")] = False
    again: Annotated[bool, Option(help="Publish a checkpoint again that is already published.")] = False
    any_role: Annotated[bool, Option(help="Export even if this node of a cluster is not the chief.")] = False

    def both(self) -> tuple[Path, Path]:
        """The checkpoint and the model.

        Raises:
            UsageError: one is missing.
        """
        if self.ckpt_dir is None or self.out is None:
            missing = "--ckpt-dir" if self.ckpt_dir is None else "--out"
            raise UsageError(
                f"{missing} is missing", hint="export-model --ckpt-dir DIR --out MODEL; see --help"
            )
        return self.ckpt_dir, self.out


class ServedFlags(Struct, frozen=True):
    """What to serve."""

    model: Annotated[
        str | None,
        Option(
            metavar="WHAT",
            help="What to serve: pkg.mod:fn, path/file.py:fn, a .meta file or a SavedModel directory.",
        ),
    ] = None
    model_arg: Annotated[
        tuple[str, ...], Option(metavar="NAME=VALUE", help="Builder's argument. Repeatable.")
    ] = ()
    input: Annotated[
        tuple[str, ...], Option(metavar="NAME=TENSOR", help="Input, by tensor name. Repeatable.")
    ] = ()
    output: Annotated[
        tuple[str, ...], Option(metavar="NAME=TENSOR", help="Output, by tensor name. Repeatable.")
    ] = ()
    signatures: Annotated[
        Path | None, Option(metavar="FILE", help="JSON file that defines several signatures.")
    ] = None
    tag: Annotated[
        str | None, Option(metavar="TAG,TAG", help="Serve a SavedModel's graph with these tags.")
    ] = None
    train_tag: Annotated[
        str | None, Option(metavar="TAG", help="Also keep the SavedModel's training graph of this tag.")
    ] = None
    feed: Annotated[
        tuple[str, ...],
        Option(metavar="PLACEHOLDER=VALUE", help="Fix a placeholder: keep_prob=1.0. Repeatable."),
    ] = ()
    absent_key: Annotated[
        tuple[str, ...],
        Option(metavar="TABLE=NUMBER", help="What keys read that a table lacks. Repeatable."),
    ] = ()
    allow_code: Annotated[bool, Option(help="Trust a Keras archive: run code that it carries or names.")] = (
        False
    )
    allow_batch_statistics: Annotated[
        bool,
        Option(
            help="Serve batch normalisation by each request's own batch, although moving statistics exist."
        ),
    ] = False
    custom_objects: Annotated[
        tuple[str, ...],
        Option(
            metavar="PKG.MOD|FILE.PY", help="Module with classes that a Keras archive may use. Repeatable."
        ),
    ] = ()


class NameFlags(Struct, frozen=True):
    """Which tensor is which."""

    rename: Annotated[
        tuple[str, ...],
        Option(
            metavar="PATTERN=NAME",
            help="Map variables (regular expression) to tensor names. Repeatable.",
        ),
    ] = ()
    rename_file: Annotated[
        Path | None, Option(metavar="FILE", help="File with lines 'variable tensor'; # begins a comment.")
    ] = None
    by_order: Annotated[
        bool, Option(help="Match arrays without names to variables by the graph's order.")
    ] = False
    average: Annotated[
        str | None, Option(metavar="ema|NAME", help="Serve moving averages instead of raw weights.")
    ] = None
    partition_strategy: Annotated[
        tuple[str, ...], Option(metavar="NAME=mod|div", help="How training looked up a table. Repeatable.")
    ] = ()
    object_path: Annotated[
        str | None, Option(metavar="PATH", help="Path to the served model in a TF2 checkpoint: net/tower.")
    ] = None


class StorageFlags(Struct, frozen=True):
    """How values and what is beside them are stored."""

    cast: Annotated[
        tuple[str, ...],
        Option(metavar="[PATTERN=]bfloat16|float16", help="Store matching variables in 16 bits. Repeatable."),
    ] = ()
    data: Annotated[
        DataMode, Option(help="How values reach the version; compact copies the needed bytes alone.")
    ] = DataMode.AUTO
    warmup: Annotated[
        Path | None,
        Option(metavar="FILE", help="Warm-up requests: one request in REST's JSON on each line."),
    ] = None
    no_warmup: Annotated[bool, Option(help="Make no warm-up requests for a base that takes deltas.")] = False
    keep: Annotated[int | None, Option(metavar="N", min=1, help="Keep only the newest N versions.")] = None


class KeyFlags(Struct, frozen=True):
    """Tables by keys."""

    table_head_room: Annotated[
        float | None, Option(metavar="X", help="Room for X times more keys in tables. [default: 0.25]")
    ] = None
    min_freq: Annotated[
        int, Option(metavar="N", min=0, help="Serve keys that were seen N times or more.")
    ] = 0
    max_age_steps: Annotated[
        int | None, Option(metavar="N", min=0, help="Serve keys that were updated in the last N steps.")
    ] = None


class CheckFlags(Struct, frozen=True):
    """Checks before anything is published."""

    verify: Annotated[Verify, Option(help="What to check before publishing.")] = Verify.FILES
    verify_inputs: Annotated[
        Path | None, Option(metavar="FILE", help="Requests for --verify outputs, in the form of --warmup.")
    ] = None
    tolerance: Annotated[
        float, Option(metavar="X", help="Largest difference that --verify outputs accepts.")
    ] = 1e-6
    golden: Annotated[
        Path | None, Option(metavar="FILE", help="Golden requests that a version or base must pass.")
    ] = None
    dry_run: Annotated[bool, Option(help="Print the plan and write nothing.")] = False
