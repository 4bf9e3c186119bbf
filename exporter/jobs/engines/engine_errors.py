"""What the library of an engine raised, as an error of ours."""

from __future__ import annotations

_LACKS = ("ModuleNotFoundError:", "ImportError:", "AttributeError: Can't get attribute")


def why(error: BaseException) -> tuple[str, str]:
    """Why an engine gave up, and what helps; empty if that is what helps with any engine.

    Of a worker's error libraries tell the traceback, of which the last line says what it was.
    """
    said = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    is_traceback = any(line.startswith('File "') for line in said)
    cause = said[-1] if is_traceback else " ".join(said)
    lacks = any(name in cause for name in _LACKS)
    hint = "install the same version of export-model, with the same extras, on every worker" if lacks else ""
    return cause, hint
