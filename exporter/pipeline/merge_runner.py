"""How mergers are run."""

from __future__ import annotations

from pathlib import Path

from exporter.jobs.runner import Runner
from exporter.options import Jobs


def runner_for(jobs: Jobs, model: Path, tasks: int) -> Runner:
    """How a merger is run: what a single task does is not worth keeping, unless it is asked for."""
    return Runner.of(jobs, model if jobs.engine is not None or tasks > 1 else None)
