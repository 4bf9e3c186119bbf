"""Canonical status codes and version states, as model servers and clients exchange them."""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct

from exporter.errors import CheckpointError
from exporter.publish.served import VersionState as VersionState

MAX_MESSAGE_CHARACTERS = 1024
"""TF Serving shortens the message of a failed call to this length."""

MAX_FILLED_BYTES = 64 << 20
"""The most bytes by which a request may grow: by a value that fills a shape, or a context for each example.
TF Serving has no limit, so that a request of 60 bytes can cost gigabytes."""


class Code(IntEnum):
    """Canonical status codes; gRPC, TensorFlow and TF Serving share the numbers."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16

    @classmethod
    def _missing_(cls, value: object) -> Code:
        """Return `UNKNOWN` for a code of a later server."""
        return cls.UNKNOWN


class VersionStatus(Struct, frozen=True):
    """One version of a model in `GetModelStatus`; `code` and `message` say why loading failed."""

    version: int
    state: VersionState
    code: Code = Code.OK
    message: str = ""


def error_text(status: VersionStatus) -> str:
    """Return the reason why a version failed to load, with its code; "" if it did not."""
    return f"{status.code.name}: {status.message}" if status.code else ""


class StatusError(Exception):
    """A request or a load that ends in a canonical status other than OK."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def invalid(message: str) -> StatusError:
    """Return the error for a request that does not fit the model: INVALID_ARGUMENT."""
    return StatusError(Code.INVALID_ARGUMENT, message)


def status_of(error: BaseException) -> StatusError:
    """Return the canonical status of any exception, TensorFlow's own included; UNKNOWN if nothing fits."""
    if isinstance(error, StatusError):
        return error
    code = getattr(error, "error_code", None)  # tf.errors.OpError, recognised without importing TensorFlow
    if isinstance(code, int) and code in set(Code):
        return StatusError(Code(code), str(getattr(error, "message", error)))
    if isinstance(error, FileNotFoundError):
        return StatusError(Code.NOT_FOUND, str(error))
    if isinstance(error, CheckpointError):  # a file of the version is damaged, or a pointer of Git LFS
        return StatusError(Code.DATA_LOSS, "; ".join(filter(None, (error.message, error.cause, error.hint))))
    if isinstance(error, MemoryError):
        return StatusError(Code.RESOURCE_EXHAUSTED, str(error) or "out of memory")
    if isinstance(error, PermissionError):
        return StatusError(Code.PERMISSION_DENIED, str(error))
    return StatusError(Code.UNKNOWN, f"{type(error).__name__}: {error}")
