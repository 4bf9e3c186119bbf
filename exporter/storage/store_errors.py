"""What a store answers: ask again where an answer breaks off, and turn failures into errors by name.

Only those parts of a store's text are kept that can hold no secret.

Where credentials come from, and what is said where there are none.

obstore takes them from the environment; here stands what it looks for, in that order.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from exporter.errors import CheckpointChanged, CheckpointError, CheckpointNotFound, PublishError
from exporter.storage.url import Url
from exporter.storage.waiting import awaited

_AWS = (
    ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    ("AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
)
"""Variables that name credentials, or who gives them: the first of these that are set together count."""
_NOT_GIVEN = re.compile(
    r"token request|token file|performing POST REDACTED|/latest/(?:api/token|meta-data)\b"
)
"""What obstore says of asking for credentials, and not of asking the store."""

HINTS = {
    "s3": "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, and AWS_ENDPOINT_URL for other clouds",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or what else identifies you",
}
"""What to set, by the scheme of a URL."""


def not_given(scheme: str, said: str) -> str:
    """Who was asked for credentials and gave none, by an error's text; empty if that is not the error."""
    if "bulk delete" in said:  # a POST, too, and to the store itself
        return ""
    container = os.environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI") or "http://169.254.170.2/"
    if not _NOT_GIVEN.search(said) and not (scheme == "s3" and container in said):
        return ""
    if scheme != "s3":
        return "the account that is named, or the role of this machine, gives none"
    if named := next((names for names in _AWS if all(map(os.environ.get, names))), None):
        return f"{' with '.join(named)} gives none"
    looked_for = ", ".join(" with ".join(names) for names in _AWS)
    return f"none of {looked_for} is set, and the role of this machine gives none"


T = TypeVar("T")

_PAUSES = (0.1, 0.5, 2.0)
_AGAIN_SECONDS = 60.0
"""An answer that breaks off later than this is not asked for again."""
_LATER = "run the command again: the store is busy, or ill"
_STATUS = re.compile(r"\b(?:status:? |HTTP error: )?([45][0-9]{2} [A-Z][A-Za-z ]+)")
_CODE = re.compile(
    "<Code>(AccessDenied|AuthenticationFailed|AuthorizationFailure|AuthorizationHeaderMalformed|"
    "AuthorizationPermissionMismatch|ExpiredToken|InvalidAccessKeyId|InvalidToken|RequestTimeTooSkewed|"
    "SignatureDoesNotMatch)</Code>"
)
"""The stores' own words for what is wrong with credentials; what else they say may repeat these."""
_MAY = "publishing needs to list, read, write and delete"
NOT_IMPLEMENTED = "501"
_KINDS = {
    "TimedOut": "no answer in time",
    "NotPartial": "it sends whole objects where it is asked for a range",
    "body error": "its answers break off",
    "ConnectionRefused": "no connection: nothing listens at its address",
    "dns error": "no connection: its host's name is not known",
    "InvalidCertificate": "this machine does not trust its certificate; SSL_CERT_FILE names authorities",
    "InvalidContentType": "it answers without TLS, and its address begins with https://",
    "token file": "the file of its token cannot be read",
    "redirect without LOCATION": "the bucket is in another region than AWS_REGION says",
}
"""What of obstore's text tells the kind of a failure."""


class BrokenOff(Exception):
    """An answer that is not what was asked for; the text says how."""


def again(ask: Callable[[], T]) -> T:
    """Ask, and ask again if the answer breaks off: obstore repeats what was not answered at all."""
    from obstore.exceptions import GenericError

    deadline = time.monotonic() + _AGAIN_SECONDS
    for pause in _PAUSES:
        try:
            return awaited(ask)
        except (BrokenOff, GenericError) as error:
            breaks_off = isinstance(error, BrokenOff) or "body error" in str(error)
            if not breaks_off or time.monotonic() >= deadline:
                raise
        time.sleep(pause)
    return awaited(ask)


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
    bucket = f"{'container' if url.scheme == 'az' else 'bucket'} {url.scheme}://{url.bucket}"
    absent = CheckpointNotFound(f"there is no {bucket}", hint="name one that is there")

    def refused(error: Exception) -> CheckpointError:
        code = "".join(f" ({found})" for found in _CODE.findall(str(error))[:1])
        said = f"{where}: the store refuses these credentials{code}"
        return CheckpointError(said, hint=f"{HINTS[url.scheme]}; {_MAY}")

    try:
        yield
    except (exceptions.PreconditionError, FileNotFoundError) as error:
        if key is None:
            raise absent from None
        gone = isinstance(error, FileNotFoundError)
        raise CheckpointChanged(
            f"{where} {'vanished' if gone else 'was replaced'} after it was listed",
            hint="run the command again: it reads what is there now",
        ) from None
    except (PermissionError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise refused(error) from None
    except exceptions.InvalidPathError:
        raise CheckpointError(
            f"{where}: a name below it is no path",
            cause="it has an empty part, or one that is '.' or '..'",
            hint="name the directory of the checkpoint alone, or remove that object",
        ) from None
    except BrokenOff as error:
        raise CheckpointError(f"{where}: the store cannot be read", cause=str(error), hint=_LATER) from None
    except exceptions.BaseError as error:
        said = _said(error)
        if why := not_given(url.scheme, str(error)):
            raise CheckpointError(
                f"{where}: there are no credentials", cause=f"{why}: {said}", hint=HINTS[url.scheme]
            ) from None
        if said[:3] in ("401", "403") or (said[:3] == "400" and _CODE.search(str(error))):
            raise refused(error) from None
        if said[:3] == "404" and key is None:
            raise absent from None
        is_ill = said[:3] == "429" or (said[:1] == "5" and said[:3] != NOT_IMPLEMENTED)
        hint = _LATER if is_ill else HINTS[url.scheme]
        raise CheckpointError(f"{where}: the store cannot be read", cause=said, hint=hint) from None


def _said(error: Exception) -> str:
    """The status that a store answered with, or that it did not: its text may hold a signed URL."""
    text = str(error)
    if found := _STATUS.search(text):
        return found[1].strip()
    kinds = (kind for word, kind in _KINDS.items() if word in text)
    return next(kinds, "no connection, or no answer to be read")


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
