"""What processes take of the processors while something goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of processors that each of some processes had taken at a moment, by names of ours."""

    at: float
    pids: Mapping[str, int]
    taken: Mapping[str, float]

    @classmethod
    def of(cls, pids: Mapping[str, int]) -> CpuTimes:
        """Those of now."""
        return cls(time.monotonic(), pids, {name: _taken(pid) for name, pid in pids.items()})

    def since(self) -> dict[str, float]:
        """How much of one processor each has taken on average since then."""
        now = CpuTimes.of(self.pids)
        return {name: (now.taken[name] - self.taken[name]) / (now.at - self.at) for name in self.pids}


def _taken(pid: int) -> float:
    """User and system time of all threads: fields 14 and 15, of which the name before may hold anything."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
