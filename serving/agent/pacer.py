"""Paces one replica: what probes took gives the pause between its deltas (see `pacing`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from exporter.terminal.server_access import ServerAccess
from serving.agent.pacing import Latencies, PacePolicy, Waiting, next_pause
from serving.agent.probe import Prober
from serving.agent.publications import Model
from serving.agent.rollout import Paced, Published, Version


class Pacer:
    """The pause of one replica; `version` tells which version requests get that name none."""

    def __init__(
        self,
        address: str,
        model: Model,
        policy: PacePolicy,
        access: ServerAccess,
        version: Callable[[], int | None],
    ) -> None:
        self.pause_s = 0.0
        self._policy = policy
        self._access = access
        self._waiting = Waiting()
        self._prober = Prober(address, model.name, model.path, policy.probe_s, version)

    def start(self, stop: threading.Event) -> None:
        """Probe until `stop`, in a thread."""
        threading.Thread(target=self._prober.run, args=(self._access, stop), daemon=True).start()

    def paced(self, versions: Sequence[Version], published: Published, now: float) -> Paced:
        """The pause, and how long a delta has waited that one of the versions may take."""
        logs = published.logs
        pairs = [(version, logs[version.lineage]) for version in versions if version.lineage in logs]
        return Paced(self.pause_s, self._waiting.longest_s(pairs, now), not self._prober.is_measuring)

    def applying(self) -> AbstractContextManager[None]:
        """Deltas are applied inside the block."""
        return self._prober.applying()

    @property
    def latencies(self) -> Latencies:
        """What probes took."""
        return self._prober.latencies()

    def adapt(self) -> str:
        """Choose the pause before the next delta; what there is to tell: pauses begin, or end."""
        before, found = self.pause_s, self.latencies
        self.pause_s = next_pause(before, found, self._policy)
        if found.applying_p99_s is None or found.idle_p99_s is None:
            return ""
        self._prober.begin_anew()
        if (before > 0) == (self.pause_s > 0):
            return ""
        what = "pauses between deltas begin" if self.pause_s else "no more pauses between deltas"
        p99s = f"{found.applying_p99_s * 1000:.1f} ms, {found.idle_p99_s * 1000:.1f} ms when idle"
        return f"{what}: p99 of predictions is {p99s}"
