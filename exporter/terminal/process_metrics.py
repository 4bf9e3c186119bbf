"""Metrics of each program about its own process: version, processor time, memory, open files."""

from __future__ import annotations

import platform
from typing import Any

from msgspec import Struct

from exporter.version import __version__


class Described(Struct, frozen=True):
    """A metric: its full name, its kind in Prometheus' words, its labels, and its help text."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def build_info(prefix: str) -> Described:
    """Return the description of the metric `PREFIX_build_info`, with a program's version as a label."""
    text = "1, with the program's version and Python's as labels."
    return Described(f"{prefix}_build_info", "gauge", ("version", "python"), text)


def register_process(registry: Any, prefix: str) -> None:
    """Add metrics of this process to a Prometheus registry: `PREFIX_build_info`, and metrics from /proc.

    ValueError (of prometheus_client) if the registry has them already.
    """
    from prometheus_client import Gauge, ProcessCollector

    info = build_info(prefix)
    gauge = Gauge(info.name, info.text, info.labels, registry=registry)
    gauge.labels(__version__, platform.python_version()).set(1)
    ProcessCollector(registry=registry)
