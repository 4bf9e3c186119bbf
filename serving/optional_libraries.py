"""Libraries that only some commands need; the package installs them as extras."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from exporter.errors import UsageError, to_install


def require_libraries(extra: str, purpose: str, *names: str) -> None:
    """Import the libraries of an extra, before anything starts that would have to be stopped without them.

    `names` are names of modules; `purpose`, the part of the program that needs them, begins the error;
    `extra`, the name of the package's extra, is in the hint.

    Raises:
        UsageError: one of them is not installed, or cannot be imported.
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{purpose} needs {', '.join(missing)}",
            cause="it is an extra of this package",
            hint=to_install(extra),
        )
    for name in names:
        _require_import(extra, purpose, name)


def _require_import(extra: str, purpose: str, name: str) -> None:
    try:
        import_module(name)
    except (Exception, SystemExit) as error:  # a module that is broken raises what it likes
        raise UsageError(
            f"{purpose} needs {name}, which is installed and cannot be imported",
            cause=f"{type(error).__name__}: {error}",
            hint=f"see what python -c 'import {name}' says, or install it again: {to_install(extra)}",
        ) from error
