"""What a store answers, as errors by name; of its text only what can hold no secret is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from exporter.errors import CheckpointChanged, CheckpointError, CheckpointNotFound, PublishError

if TYPE_CHECKING:
    from exporter.storage.objects import Url


@contextmanager
def asking(url: Url, key: str | None = None) -> Iterator[None]:
    """Turn what a store answers to reading into errors by name.

    Raises:
        CheckpointNotFound: there is no such bucket.
        CheckpointChanged: the object `key` is gone, or was replaced.
        CheckpointError: anything else that the store refuses, or no answer.
    """
    from obstore import exceptions

    where = str(url) if key is None else f"{url.scheme}://{url.bucket}/{key}"
    try:
        yield
    except (exceptions.PreconditionError, FileNotFoundError) as error:
        if key is None:
            raise CheckpointNotFound(f"there is no {where}", hint="name a bucket that is there") from None
        gone = isinstance(error, FileNotFoundError)
        raise CheckpointChanged(
            f"{where} {'vanished' if gone else 'was replaced'} after it was listed"
        ) from None
    except (PermissionError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
        raise CheckpointError(
            f"{where}: the store refuses these credentials",
            hint=_CREDENTIALS[url.scheme],
        ) from None
    except exceptions.InvalidPathError:
        raise CheckpointError(
            f"{where}: a name below it is no path",
            cause="it has an empty part, or one that is '.' or '..'",
            hint="name the directory of the checkpoint alone, or remove that object",
        ) from None
    except exceptions.BaseError as error:
        raise CheckpointError(
            f"{where}: the store cannot be read", cause=_said(error), hint=_CREDENTIALS[url.scheme]
        ) from None


_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, and AWS_ENDPOINT_URL for other clouds",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or what else identifies you",
}
_STATUS = re.compile(r"\b(?:status:? |HTTP error: )?([45][0-9]{2} [A-Z][A-Za-z ]+)")


def _said(error: Exception) -> str:
    """The status that a store answered with, or that it did not: its text may hold a signed URL."""
    text = str(error)
    if found := _STATUS.search(text):
        return found[1].strip()
    return "no answer in time" if "timed out" in text.lower() else "no connection, or no answer to be read"


@contextmanager
def writing_to(url: Url, key: str) -> Iterator[None]:
    """`asking`, for writes.

    Raises:
        PublishError: the store cannot be written.
    """
    try:
        with asking(url, key):
            yield
    except CheckpointError as error:
        raise PublishError(
            f"{url.scheme}://{url.bucket}/{key}: the store cannot be written",
            cause=error.cause or error.message,
            hint=error.hint,
        ) from None
