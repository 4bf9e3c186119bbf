"""The options of an export that takes part in a log of deltas, or follows training."""

from __future__ import annotations

import math
from typing import Annotated

from msgspec import Struct

from exporter.cli.export_flags import PlaceFlags
from exporter.errors import UsageError
from exporter.options import DeltaDtype, Isolation, Updates
from exporter.pipeline.watch_loop import StopWhen, Watching, parse_duration
from exporter.terminal.parameters import Option


class DeltaFlags(Struct, frozen=True):
    """Deltas: the first five go with `--incr` or `--updatable`, and the others with `--incr`."""

    incr: Annotated[bool, Option(help="Publish what changed as a delta; the first time, publish a base.")] = (
        False
    )
    updatable: Annotated[bool, Option(help="Publish a new base that takes deltas.")] = False
    isolation: Annotated[
        Isolation,
        Option(help="Consistency during an update: snapshot never mixes two positions; row may."),
    ] = Isolation.SNAPSHOT
    snapshot_max_rows: Annotated[
        int, Option(metavar="N", min=0, help="Apply larger deltas in visible pieces.")
    ] = 4_000_000
    stamp: Annotated[bool, Option(help="Add model_position and model_step to predict responses.")] = False
    with_digest: Annotated[
        bool, Option(help="Add a signature that returns checksums of the served values.")
    ] = False
    require_finite: Annotated[bool, Option(help="Make the model refuse deltas with NaN or infinity.")] = False
    full_on_mismatch: Annotated[bool, Option(help="With --incr: publish a new base if no delta fits.")] = (
        False
    )
    min_change: Annotated[
        float,
        Option(
            metavar="X",
            min=0.0,
            help="With --incr: hold back rows that are less than X (Euclidean norm) from what is published.",
        ),
    ] = 0.0
    delta_dtype: Annotated[
        DeltaDtype | None,
        Option(help="With --incr: send table rows as bfloat16 or int8; reports the largest error."),
    ] = None
    rebase: Annotated[bool, Option(help="With --incr: also publish a new base that includes all deltas.")] = (
        False
    )
    check_graph: Annotated[
        bool, Option(help="With --incr: build the graph again and compare it with the base's.")
    ] = False
    notify: Annotated[
        tuple[str, ...],
        Option(
            metavar="HOST[:PORT]",
            help="With --incr: ask this model server to apply what was published. Repeat it for several.",
        ),
    ] = ()

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
        bool, Option(help="Keep running: export each new checkpoint or, with --incr, each change.")
    ] = False
    interval: Annotated[
        float, Option(metavar="SECONDS", min=0.05, help="Longest pause of --watch between looks.")
    ] = 1.0
    stop_after: Annotated[
        str | None,
        Option(metavar="DURATION", help="End --watch after this time: 90 (seconds), 15m, 2h, 1d."),
    ] = None
    stop_count: Annotated[
        int | None, Option(metavar="N", min=1, help="End --watch after N publications.")
    ] = None
    stop_step: Annotated[
        int | None, Option(metavar="STEP", min=0, help="End --watch once this step is published.")
    ] = None
    stop_idle: Annotated[
        str | None, Option(metavar="DURATION", help="End --watch after this time without news.")
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
