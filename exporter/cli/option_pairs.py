"""Options that go with others, or do not: one that would have no effect is an error, not a surprise."""

from __future__ import annotations

from msgspec import Struct

from exporter.errors import UsageError


class Given(Struct, frozen=True):
    """What was said beside `--incr`, `--updatable` and `--watch`."""

    of_incr: bool
    of_updates: bool
    of_watch: bool
    again: bool
    plain: bool

    def check(self, *, incr: bool, updatable: bool, watch: bool) -> None:
        """Refuse what has no effect, or contradicts itself.

        Raises:
            UsageError: it does.
        """
        if self.of_incr and not incr:
            options = "--min-change, --delta-dtype, --rebase, --full-on-mismatch, --check-graph and --notify"
            raise UsageError(f"{options} go with --incr")
        if self.of_updates and not (incr or updatable):
            options = "--isolation, --snapshot-max-rows, --stamp, --with-digest and --require-finite"
            raise UsageError(f"{options} go with --incr and --updatable: only such a base takes deltas")
        if self.again and (watch or (incr and not updatable)):
            raise UsageError("--again publishes one version: it does not go with --watch and --incr")
        if self.plain and (incr or updatable):
            raise UsageError(
                "--plain publishes a version that takes no deltas: it does not go with --incr and --updatable"
            )
        if self.of_watch and not watch:
            raise UsageError("--stop-after, --stop-count, --stop-step and --stop-idle go with --watch")
