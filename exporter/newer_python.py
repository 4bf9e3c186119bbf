"""Parts of Python 3.11's standard library that Python 3.10 lacks, for as long as 3.10 is supported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any, BinaryIO, Union, get_args, get_origin, get_type_hints

if sys.version_info >= (3, 11):
    from enum import StrEnum as StrEnum
else:
    from enum import Enum

    class StrEnum(str, Enum):
        """Members are strings, and print as their values."""

        __str__ = str.__str__

        def __format__(self, format_spec: str) -> str:
            return str.__format__(self, format_spec)


def sha256_of(file: BinaryIO) -> str:
    """Return the SHA-256, in lower-case hex, of an open file from its present offset.

    OSError if reading fails.
    """
    import hashlib  # late: OpenSSL takes 3 ms, and most of a help text's time is imports

    if sys.version_info >= (3, 11):
        return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    while block := file.read(1 << 18):
        digest.update(block)
    return digest.hexdigest()


def module_command(module: str) -> list[str]:
    """Return the command `python -P -m MODULE` of this interpreter, or its equivalent in Python 3.10.

    Modules are not searched in the working directory.
    """
    if sys.version_info >= (3, 11):
        return [sys.executable, "-P", "-m", module]
    run = f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", f"import runpy, sys; del sys.path[0]; {run}"]


def timeout(seconds: float) -> Any:
    """Return an asynchronous context manager that raises TimeoutError after this many seconds.

    As `asyncio.timeout`, it cancels what the task waits for. RuntimeError outside of a running loop.
    """
    if sys.version_info < (3, 11):
        return _Timeout(seconds)
    import asyncio

    return asyncio.timeout(seconds)


class _Timeout:
    """A block of a task that raises TimeoutError where the task waits when the time is over."""

    def __init__(self, seconds: float) -> None:
        import asyncio

        self._loop, self._is_late = asyncio.get_running_loop(), False
        self._task = asyncio.current_task()
        self._when = self._loop.time() + seconds

    async def __aenter__(self) -> _Timeout:
        self._handle = self._loop.call_at(self._when, self._end)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        from asyncio import CancelledError

        self._handle.cancel()
        if self._is_late and kind is CancelledError:
            raise TimeoutError

    def when(self) -> float:
        """Return the time of the event loop's clock, in seconds, at which the block ends."""
        return self._when

    def reschedule(self, when: float) -> None:
        """Let the block, once entered, end at another time of the event loop's clock, in seconds."""
        self._handle.cancel()
        self._when, self._handle = when, self._loop.call_at(when, self._end)

    def _end(self) -> None:
        self._is_late = True
        if self._task is not None:
            self._task.cancel()


def type_hints(annotated: Callable[..., Any]) -> dict[str, Any]:
    """Return {parameter or field: type} of a function or class, and "return" for a function's result.

    `Annotated` stays outermost: Python 3.10 would put it into an Optional where the default is None.
    NameError if an annotation uses a name that its module lacks.
    """
    hints = get_type_hints(annotated, include_extras=True)
    if sys.version_info < (3, 11):  # which makes it Optional[Annotated[...]]
        for name, hint in hints.items():
            for within in get_args(hint):
                if get_origin(hint) is Union and get_origin(within) is Annotated:
                    hints[name] = within
    return hints
