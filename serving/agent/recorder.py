"""How far behind each replica was during the last ten minutes, for the plots of the status page."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import datetime

from msgspec import Struct, field

from serving.agent.view import FleetView

PERIOD_S = 1.0
_KEPT = 600


class Sample(Struct, frozen=True):
    """Seconds behind what is published at one time, by (model, address); None if unknown."""

    at: datetime
    stale_s: dict[tuple[str, str], float | None]


class Recorder(Struct):
    """Samples the fleet every second, and keeps the last ten minutes."""

    view: Callable[[], FleetView]
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def follow(self, stop: threading.Event) -> None:
        """Sample until `stop`."""
        while not stop.wait(PERIOD_S):
            self.look()

    def look(self) -> None:
        """Take one sample."""
        view = self.view()
        stale = {
            (model.name, replica.address): None
            if not replica.is_answering or replica.served is None
            else replica.served.stale_s
            for model in view.models
            for replica in model.replicas
        }
        self.samples.append(Sample(view.at, stale))

    def series(self, model: str, address: str) -> list[float | None]:
        """The samples of one replica, the oldest first."""
        return [sample.stale_s.get((model, address)) for sample in tuple(self.samples)]
