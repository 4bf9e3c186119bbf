"""Libraries that only some commands need; the package installs them as extras."""

from __future__ import annotations

from importlib.util import find_spec

from exporter.errors import UsageError, to_install


def require_libraries(extra: str, purpose: str, *names: str) -> None:
    """Check that the libraries of an extra are installed, before they are imported.

    Raises:
        UsageError: one of them is not installed.
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{purpose} needs {', '.join(missing)}",
            cause="it is an extra of this package",
            hint=to_install(extra),
        )
