"""Choose an engine by its name."""

from __future__ import annotations

from collections.abc import Mapping

from exporter.errors import UsageError
from exporter.jobs.engines import Engine
from exporter.jobs.engines.local import LocalEngine
from exporter.jobs.engines.process import Asked, ProcessEngine
from exporter.options import EngineName


def choose_engine(
    name: str, workers: int = 0, address: str = "", options: Mapping[str, str] | None = None
) -> Engine:
    """The engine of a name.

    Raises:
        UsageError: there is none, its library is not installed, or `local` is given an address or options.
    """
    if name not in [*EngineName]:
        raise UsageError(f"there is no engine {name!r}", hint=f"one of {', '.join(EngineName)}")
    if name != EngineName.LOCAL:
        return ProcessEngine(Asked(name, workers, address, options or {}))
    if address or options:
        raise UsageError("the engine local takes neither an address nor options", hint="add --engine ray")
    return LocalEngine(workers)
