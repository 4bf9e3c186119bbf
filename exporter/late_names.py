"""What is imported when it is first used: the names of a package, and TensorFlow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def late_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a package's `__getattr__`, which imports a name from its module in `homes` on first use.

    It raises AttributeError for any other name.
    """

    def get(name: str) -> Any:
        if name not in homes:
            message = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=sys.modules[package])
        return getattr(import_module(homes[name]), name)

    return get


class _LateModule:
    """A module that is imported when one of its names is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


tf: Any = _LateModule("tensorflow")
"""TensorFlow, which takes seconds to import: most commands never ask it for anything."""
