"""The options of `export-model` that are not fields of a request: what to do, and how often; and its help."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from msgspec import Struct

from exporter.errors import UsageError
from exporter.options import CHECKS, DELTAS, FOLLOWING, PLACES, Option
from exporter.storage.local_paths import checkpoint_path
from exporter.terminal.edge import EXIT_CODES

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
  export-model --ckpt-dir train/ --model my_model.py:serving --out models/ranker --watch --stop-idle 2h
  export-model --ckpt-dir train/ --model my_model.py:serving --out models/ranker --incr
  export-model inspect train/

Each option has an environment variable: EXPORT_MODEL_KEEP is --keep, EXPORT_MODEL_MERGE_KEEP that of merge.

{EXIT_CODES}"""

_place = partial(Option, heading=PLACES)
_delta = partial(Option, heading=DELTAS)
_of_incr = partial(_delta, goes_with="--incr")


class PlaceFlags(Struct, frozen=True):
    """Where from, where to."""

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
    again: Annotated[bool, _place("Publish a checkpoint again that is already published.")] = False
    any_role: Annotated[bool, _place("Export even if this node of a cluster is not the chief.")] = False
    options: Annotated[
        Path | None,
        _place('Take options that are not typed from this JSON file: {"keep": 3}.', metavar="FILE"),
    ] = None

    def both(self) -> tuple[Path, Path]:
        """The checkpoint and the model.

        Raises:
            UsageError: one is missing.
        """
        if self.ckpt_dir is None or self.out is None:
            missing = "--ckpt-dir" if self.ckpt_dir is None else "--out"
            raise UsageError(
                f"{missing} is missing", hint="export-model --ckpt-dir DIR --out MODEL --model WHAT"
            )
        return self.ckpt_dir, self.out


class RunFlags(Struct, frozen=True):
    """What to do with a request."""

    dry_run: Annotated[bool, Option("Print the plan and write nothing.", CHECKS)] = False
    incr: Annotated[bool, _delta("Publish what changed, as a delta; first a base.")] = False
    updatable: Annotated[bool, _delta("Publish a new base that takes deltas.")] = False
    full_on_mismatch: Annotated[bool, _of_incr("With --incr: publish a new base if no delta fits.")] = False
    rebase: Annotated[bool, _of_incr("With --incr: also publish a new base that includes all deltas.")] = (
        False
    )
    notify: Annotated[
        tuple[str, ...],
        _of_incr(
            "With --incr: ask this model server to apply what was published. Repeat it for several.",
            metavar="HOST[:PORT]",
        ),
    ] = ()
    watch: Annotated[
        bool, Option("Keep running: export each new checkpoint or, with --incr, each change.", FOLLOWING)
    ] = False

    verbose: Annotated[
        bool,
        Option("With --watch: print each publication in full.", FOLLOWING, letter="-v", goes_with="--watch"),
    ] = False

    @property
    def takes_deltas(self) -> bool:
        """True if what is published takes deltas."""
        return self.incr or self.updatable

    @property
    def publishes_deltas(self) -> bool:
        """True if what is published is a delta, once there is a base."""
        return self.incr and not self.updatable


def check_places(places: PlaceFlags, run: RunFlags, *, plain: bool) -> None:
    """Refuse options about one version that do not go with deltas or a watch.

    Raises:
        UsageError: there is such an option.
    """
    if places.again and (run.watch or run.publishes_deltas):
        raise UsageError(
            "--again publishes one version: it does not go with --watch and --incr", hint="leave out --again"
        )
    if plain and run.takes_deltas:
        raise UsageError(
            "--plain publishes a version that takes no deltas: it does not go with --incr and --updatable",
            hint="leave out --plain",
        )
