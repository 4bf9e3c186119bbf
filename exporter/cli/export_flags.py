"""The options of an export: what to serve, from where, to where, and how it is stored and checked.

A struct for each heading of the help, as it is typed; and the help's own text.

The options of commands that work on many bytes: how, and on which engine.
"""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct

from exporter.errors import UsageError
from exporter.local_paths import checkpoint_parser, local_name, path_parser
from exporter.options import DataMode, DeltaDtype, EngineName, ExportFormat, Isolation, Jobs, Updates, Verify
from exporter.pipeline.watch_loop import StopWhen, Watching, parse_duration
from exporter.storage.url import Url
from exporter.terminal.edge import EXIT_CODES, pairs

SERVED = "What to serve"
PLACES = "Where from, where to"
NAMES = "Which tensor is which"
STORAGE = "Storage"
CHECKS = "Checks"
DELTAS = "Deltas"
FOLLOWING = "Following training"
KEYED = "Tables by keys"
WORK = "Work on many bytes"

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

{EXIT_CODES}"""


_deltas = partial(typer.Option, rich_help_panel=DELTAS)
_following = partial(typer.Option, rich_help_panel=FOLLOWING)


class DeltaFlags(Struct, frozen=True):
    """Deltas: the first five go with `--incr` or `--updatable`, and the others with `--incr`."""

    incr: Annotated[
        bool, _deltas("--incr", help="Publish what changed as a delta; the first time, publish a base.")
    ] = False
    updatable: Annotated[bool, _deltas("--updatable", help="Publish a new base that takes deltas.")] = False
    isolation: Annotated[
        Isolation, _deltas(help="Consistency during an update: snapshot never mixes two positions; row may.")
    ] = Isolation.SNAPSHOT
    snapshot_max_rows: Annotated[
        int, _deltas(metavar="N", min=0, help="Apply larger deltas in visible pieces.")
    ] = 4_000_000
    stamp: Annotated[
        bool, _deltas("--stamp", help="Add model_position and model_step to predict responses.")
    ] = False
    with_digest: Annotated[
        bool, _deltas("--with-digest", help="Add a signature that returns checksums of the served values.")
    ] = False
    require_finite: Annotated[
        bool, _deltas("--require-finite", help="Refuse deltas with NaN or infinity.")
    ] = False
    full_on_mismatch: Annotated[
        bool, _deltas("--full-on-mismatch", help="With --incr: publish a new base if no delta fits.")
    ] = False
    min_change: Annotated[
        float,
        _deltas(
            metavar="X",
            min=0.0,
            help="With --incr: hold back rows that are less than X (Euclidean norm) from what is published.",
        ),
    ] = 0.0
    delta_dtype: Annotated[
        DeltaDtype | None,
        _deltas(help="With --incr: send table rows as bfloat16 or int8; reports the largest error."),
    ] = None
    rebase: Annotated[
        bool, _deltas("--rebase", help="With --incr: also publish a new base that includes all deltas.")
    ] = False
    check_graph: Annotated[
        bool,
        _deltas("--check-graph", help="With --incr: build the graph again and compare it with the base's."),
    ] = False
    notify: Annotated[
        list[str],
        _deltas(
            metavar="HOST[:PORT]",
            help="With --incr: ask this model server to apply what was published. Repeat it for several.",
        ),
    ] = []

    @property
    def updates(self) -> Updates | None:
        """How a base takes deltas; None if it is to take none."""
        return self._as_asked if self.incr or self.updatable else None

    @property
    def _as_asked(self) -> Updates:
        """How a base would take deltas, whether or not one is asked for."""
        baked = self.isolation, self.snapshot_max_rows, self.stamp, self.with_digest, self.require_finite
        return Updates(*baked)

    def check(self) -> None:
        """Refuse what would have no effect.

        Raises:
            UsageError: an option goes with another one, which is not there, or is no distance.
        """
        if not math.isfinite(self.min_change):
            raise UsageError(
                f"--min-change {self.min_change} is not a distance", hint="as in --min-change 0.001"
            )
        of_incr = (
            self.min_change
            or self.delta_dtype
            or self.rebase
            or self.full_on_mismatch
            or self.check_graph
            or self.notify
        )
        if of_incr and not self.incr:
            options = "--min-change, --delta-dtype, --rebase, --full-on-mismatch, --check-graph and --notify"
            raise UsageError(f"{options} go with --incr")
        if self.updates is None and self._as_asked != Updates():
            options = "--isolation, --snapshot-max-rows, --stamp, --with-digest and --require-finite"
            raise UsageError(f"{options} go with --incr and --updatable: only such a base takes deltas")


class WatchFlags(Struct, frozen=True):
    """Following training."""

    watch: Annotated[
        bool,
        _following("--watch", help="Keep running: export each new checkpoint or, with --incr, each change."),
    ] = False
    interval: Annotated[
        float, _following(metavar="SECONDS", min=0.05, help="Longest pause of --watch between looks.")
    ] = 1.0
    stop_after: Annotated[
        str | None,
        _following(metavar="DURATION", help="End --watch after this time: 90 (seconds), 15m, 2h, 1d."),
    ] = None
    stop_count: Annotated[
        int | None, _following(metavar="N", min=1, help="End --watch after N publications.")
    ] = None
    stop_step: Annotated[
        int | None, _following(metavar="STEP", min=0, help="End --watch once this step is published.")
    ] = None
    stop_idle: Annotated[
        str | None, _following(metavar="DURATION", help="End --watch after this time without news.")
    ] = None

    def watching(self) -> Watching | None:
        """How training is followed; None if it is not.

        Raises:
            UsageError: an option is no duration, or goes with --watch, which is not there.
        """
        stop = StopWhen(
            math.inf if self.stop_after is None else parse_duration("--stop-after", self.stop_after),
            math.inf if self.stop_count is None else self.stop_count,
            math.inf if self.stop_step is None else self.stop_step,
            math.inf if self.stop_idle is None else parse_duration("--stop-idle", self.stop_idle),
        )
        if not self.watch and stop != StopWhen():
            raise UsageError("--stop-after, --stop-count, --stop-step and --stop-idle go with --watch")
        return Watching(self.interval, stop) if self.watch else None


def check_places(places: PlaceFlags, deltas: DeltaFlags, watch: WatchFlags) -> None:
    """Refuse options about one version that do not go with deltas or a watch.

    Raises:
        UsageError: there is such an option.
    """
    if places.again and (watch.watch or (deltas.incr and not deltas.updatable)):
        raise UsageError("--again publishes one version: it does not go with --watch and --incr")
    if places.plain and deltas.updates is not None:
        raise UsageError(
            "--plain publishes a version that takes no deltas: it does not go with --incr and --updatable"
        )


_places = partial(typer.Option, rich_help_panel=PLACES)
_served = partial(typer.Option, rich_help_panel=SERVED)
_names = partial(typer.Option, rich_help_panel=NAMES)
_storage = partial(typer.Option, rich_help_panel=STORAGE)
_keyed = partial(typer.Option, rich_help_panel=KEYED)
_checks = partial(typer.Option, rich_help_panel=CHECKS)


class PlaceFlags(Struct, frozen=True):
    """Where from, where to."""

    ckpt_dir: Annotated[
        Path | None,
        _places(
            metavar="DIR|PREFIX",
            parser=checkpoint_parser("--ckpt-dir"),
            help="Checkpoint directory (its newest one), or one checkpoint's prefix; also s3://, gs://, az://.",
        ),
    ] = None
    out: Annotated[
        Path | None,
        _places(
            metavar="MODEL",
            parser=checkpoint_parser("--out"),
            help="Model base path: the directory of the versions; also s3://, gs://, az://.",
        ),
    ] = None
    format: Annotated[ExportFormat, _places(help="Write a SavedModel, Cloud ML's pair, or both.")] = (
        ExportFormat.SAVED_MODEL
    )
    version: Annotated[
        str | None,
        _places(
            metavar="N|time",
            help="Version number, or time (seconds since 1970).",
            show_default="the training step while it grows",
        ),
    ] = None
    plain: Annotated[
        bool, _places("--plain", help="Publish a version that takes no deltas, although the newest one does.")
    ] = False
    despite_hold: Annotated[
        bool, _places("--despite-hold", help="Publish a version although the model is held.")
    ] = False
    again: Annotated[
        bool, _places("--again", help="Publish a checkpoint again that is already published.")
    ] = False
    any_role: Annotated[
        bool, _places("--any-role", help="Export even if this node of a cluster is not the chief.")
    ] = False

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
        _served(
            metavar="WHAT",
            help="What to serve: pkg.mod:fn, path/file.py:fn, a .meta file or a SavedModel directory.",
        ),
    ] = None
    model_arg: Annotated[
        list[str], _served(metavar="NAME=VALUE", help="Builder's argument. Repeatable.")
    ] = []
    input: Annotated[
        list[str], _served(metavar="NAME=TENSOR", help="Input, by tensor name. Repeatable.")
    ] = []
    output: Annotated[
        list[str], _served(metavar="NAME=TENSOR", help="Output, by tensor name. Repeatable.")
    ] = []
    signatures: Annotated[
        Path | None,
        _served(
            metavar="FILE",
            parser=path_parser("--signatures"),
            help="JSON file that defines several signatures.",
        ),
    ] = None
    tag: Annotated[
        str | None, _served(metavar="TAG,TAG", help="Serve a SavedModel's graph with these tags.")
    ] = None
    train_tag: Annotated[
        str | None, _served(metavar="TAG", help="Also keep the SavedModel's training graph of this tag.")
    ] = None
    feed: Annotated[
        list[str], _served(metavar="PLACEHOLDER=VALUE", help="Fix a placeholder: keep_prob=1.0. Repeatable.")
    ] = []
    absent_key: Annotated[
        list[str], _served(metavar="TABLE=NUMBER", help="What keys read that a table lacks. Repeatable.")
    ] = []
    allow_code: Annotated[
        bool,
        _served(
            "--allow-code", help="Trust the model: run code of an archive, and here whatever its graph does."
        ),
    ] = False
    allow_files: Annotated[
        list[str],
        _served(metavar="DIR", help="Let a graph that is not named take files from here, too. Repeatable."),
    ] = []
    allow_file_ops: Annotated[
        bool,
        _served("--allow-file-ops", help="Serve operations that read or write files, or call out."),
    ] = False
    allow_foreign_ops: Annotated[
        bool,
        _served(
            "--allow-foreign-ops",
            help="Serve operations that stock TensorFlow lacks, with all that they need.",
        ),
    ] = False
    allow_batch_statistics: Annotated[
        bool,
        _served(
            "--allow-batch-statistics",
            help="Serve batch normalisation by each request's own batch, although moving statistics exist.",
        ),
    ] = False
    custom_objects: Annotated[
        list[str],
        _served(
            metavar="PKG.MOD|FILE.PY", help="Module with classes that a Keras archive may use. Repeatable."
        ),
    ] = []


class NameFlags(Struct, frozen=True):
    """Which tensor is which."""

    rename: Annotated[
        list[str],
        _names(
            metavar="PATTERN=NAME", help="Map variables (regular expression) to tensor names. Repeatable."
        ),
    ] = []
    rename_file: Annotated[
        Path | None,
        _names(
            metavar="FILE",
            parser=path_parser("--rename-file"),
            help="File with lines 'variable tensor'; # begins a comment.",
        ),
    ] = None
    by_order: Annotated[
        bool, _names("--by-order", help="Match arrays without names to variables by the graph's order.")
    ] = False
    average: Annotated[
        str | None, _names(metavar="ema|NAME", help="Serve moving averages instead of raw weights.")
    ] = None
    partition_strategy: Annotated[
        list[str], _names(metavar="NAME=mod|div", help="How training looked up a table. Repeatable.")
    ] = []
    object_path: Annotated[
        str | None, _names(metavar="PATH", help="Path to the served model in a TF2 checkpoint: net/tower.")
    ] = None


class StorageFlags(Struct, frozen=True):
    """How values and what is beside them are stored."""

    cast: Annotated[
        list[str],
        _storage(
            metavar="[PATTERN=]bfloat16|float16", help="Store matching variables in 16 bits. Repeatable."
        ),
    ] = []
    data: Annotated[
        DataMode, _storage(help="How values reach the version; compact copies the needed bytes alone.")
    ] = DataMode.AUTO
    warmup: Annotated[
        Path | None,
        _storage(
            metavar="FILE",
            parser=path_parser("--warmup"),
            help="Warm-up requests: one request in REST's JSON on each line.",
        ),
    ] = None
    no_warmup: Annotated[
        bool, _storage("--no-warmup", help="Make no warm-up requests for a base that takes deltas.")
    ] = False
    keep: Annotated[int | None, _storage(metavar="N", min=1, help="Keep only the newest N versions.")] = None


class KeyFlags(Struct, frozen=True):
    """Tables by keys."""

    table_head_room: Annotated[
        float | None, _keyed(metavar="X", help="Room for X times more keys in tables.", show_default="0.25")
    ] = None
    min_freq: Annotated[
        int, _keyed(metavar="N", min=0, help="Serve keys that were seen N times or more.")
    ] = 0
    max_age_steps: Annotated[
        int | None, _keyed(metavar="N", min=0, help="Serve keys that were updated in the last N steps.")
    ] = None


class CheckFlags(Struct, frozen=True):
    """Checks before anything is published."""

    verify: Annotated[Verify, _checks(help="What to check before publishing.")] = Verify.FILES
    verify_inputs: Annotated[
        Path | None,
        _checks(
            metavar="FILE",
            parser=path_parser("--verify-inputs"),
            help="Requests for --verify outputs, in the form of --warmup.",
        ),
    ] = None
    tolerance: Annotated[
        float, _checks(metavar="X", help="Largest difference that --verify outputs accepts.")
    ] = 1e-6
    golden: Annotated[
        Path | None,
        _checks(
            metavar="FILE",
            parser=path_parser("--golden"),
            help="Golden requests that a version or base must pass.",
        ),
    ] = None
    dry_run: Annotated[bool, _checks("--dry-run", help="Print the plan and write nothing.")] = False


_SIZE = re.compile(r"([1-9][0-9]{0,9})(B|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}

_Option = partial(typer.Option, rich_help_panel=WORK)


class JobFlags(Struct, frozen=True):
    """How work on many bytes is run, as it is typed."""

    engine: Annotated[
        EngineName | None,
        _Option(
            help="Move, cast, compare and check as tasks of this engine; what was begun is gone on with."
        ),
    ] = None
    workers: Annotated[
        int, _Option(metavar="N", min=0, help="Tasks that run at once; 0: as many as there are processors.")
    ] = 0
    engine_address: Annotated[
        str | None,
        _Option(metavar="ADDRESS", help="The cluster of the engine: ray://HOST:10001, tcp://HOST:8786."),
    ] = None
    engine_option: Annotated[
        list[str], _Option(metavar="NAME=VALUE", help="An option of the engine's own. Repeatable.")
    ] = []
    job_dir: Annotated[
        str | None,
        _Option(
            metavar="DIR|URL",
            help="Keep tasks' results here, where all workers see them; an export's lie below the model.",
        ),
    ] = None
    task_size: Annotated[str, _Option(metavar="SIZE", help="What one task reads, as in 64MiB.")] = "64MiB"

    def jobs(self) -> Jobs:
        """What the options say.

        Raises:
            UsageError: an option is malformed, or goes with --engine, which is not there.
        """
        size = _SIZE.fullmatch(self.task_size)
        if size is None:
            raise UsageError(f"--task-size {self.task_size!r} is not a size", hint="as in --task-size 256MiB")
        if self.engine is None and (self.engine_address or self.engine_option or self.job_dir):
            raise UsageError("--engine-address, --engine-option and --job-dir go with --engine")
        settings = pairs("--engine-option", self.engine_option)
        directory = self.job_dir or ""
        if Url.parse(directory) is None:
            directory = local_name("--job-dir", directory)
        task_bytes = int(size[1]) * _UNITS[size[2].lower()]
        return Jobs(self.engine, self.workers, self.engine_address or "", settings, task_bytes, directory)


LOCALLY = JobFlags()
