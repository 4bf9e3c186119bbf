"""What the library of an engine raised, as an error of ours."""

from __future__ import annotations

from exporter.errors import EngineFailed

_LACKS = ("ModuleNotFoundError:", "ImportError:", "AttributeError: Can't get attribute")


def gave_up(what: str, error: BaseException) -> EngineFailed:
    """The error that says why an engine gave up; `what` did.

    Of a worker's error libraries tell the traceback, of which the last line says what it was.
    """
    said = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    is_traceback = any(line.startswith('File "') for line in said)
    cause = said[-1] if is_traceback else " ".join(said)
    lacks = any(name in cause for name in _LACKS)
    hint = "install the same version of export-model, with the same extras, on every worker" if lacks else ""
    return EngineFailed(what, cause=cause, hint=hint)
