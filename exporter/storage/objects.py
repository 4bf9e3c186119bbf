"""Objects of a store: list them, read byte ranges of exactly the listed versions, write under conditions.

Credentials and endpoints come from the environment variables of each cloud's own tools (`AWS_*`, `GOOGLE_*`,
`AZURE_*`). No error's text contains any of them: of a store's answer, only parts are kept that cannot hold a
secret (a status, a code from a list, a kind of failure). obstore speaks to all three clouds; it is imported
only when a URL is opened.

All retries are here: obstore repeats requests that were not answered (`_RETRIES`); `again` repeats reads
whose answer breaks off. No other module repeats a request.
"""

from __future__ import annotations

import os
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from msgspec import Struct

from exporter.errors import (
    CheckpointChanged,
    CheckpointError,
    CheckpointNotFound,
    PublishError,
    StoreUnavailable,
    UsageError,
    os_error,
    to_install,
)
from exporter.storage.open_files import write_at
from exporter.storage.requests import Request, requests, upload_parts
from exporter.storage.url import Url
from exporter.storage.waiting import awaited, calling, workers

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

# They name another server than the cloud's own; `http://` means without encryption.
_ENDPOINTS = (
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"),
    *("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "GOOGLE_BASE_URL"),
)
# The time limits to connect, to send something, and to repeat requests.
_CONNECT, _REQUEST, _RETRY = timedelta(seconds=10), timedelta(seconds=30), timedelta(seconds=60)
# The time limit of a whole request; the upload of a part is answered only at its end.
_SLOW = timedelta(minutes=10)
_RETRIES = 5
_CONNECTIONS = 16


class RemoteObject(Struct, frozen=True):
    """A listed object: its key, size in bytes, entity tag, and time of last change (seconds since 1970).

    The tag is None if the store gives none.
    """

    key: str
    size: int
    tag: str | None
    modified: float


class Tag(Struct, frozen=True):
    """A tag that distinguishes an object from others under its key: S3 and Azure compare entity tags, GCS
    versions.
    """

    e_tag: str | None
    version: str | None

    @classmethod
    def of(cls, said: Any) -> Tag:
        """Return the tag in a store's report of an object; a field that the store does not give is None."""
        return cls(said.get("e_tag"), said.get("version"))


class ObjectReader:
    """The objects of one bucket, to be read.

    Raises:
        UsageError: the library that reads stores is not installed.
        CheckpointError: the environment's settings are refused.
    """

    def __init__(self, url: Url) -> None:
        self.url = url
        self._store = _open(url)

    def below(self, path: str, *, after: str | None = None) -> Iterator[RemoteObject]:
        """Yield all objects below the directory `path` ("": the bucket), in the store's order of keys.

        With `after` only those whose keys sort after it. During the iteration: CheckpointNotFound if the
        bucket does not exist, StoreUnavailable if it cannot be listed, CheckpointError if a name in it is not
        a path.
        """
        import obstore

        # a list, not a generator: a listing that breaks off begins again from the start
        def listed() -> list[RemoteObject]:
            # a batch for each page of S3: obstore's own of 50 would be twenty calls of the library
            batches = obstore.list(self._store, path or None, offset=after, chunk_size=1000)
            found = (_object(each) for batch in batches for each in batch)
            return [
                each for each in found if after is None or each.key > after
            ]  # some stores ignore `offset`

        with asking(self.url):
            yield from again(listed)

    def contents(self, *, after: str | None = None) -> dict[str, RemoteObject]:
        """Return all objects below the URL, by their names below it; with `after` only names that sort later.

        Empty if there are none. CheckpointNotFound if the bucket does not exist, StoreUnavailable if it
        cannot be listed, CheckpointError if a name in it is not a path.
        """
        base = self.url.key("")
        found = self.below(self.url.path, after=after and base + after)
        return {each.key.removeprefix(base): each for each in found}

    def beside(self, path: str) -> list[RemoteObject]:
        """Return the objects directly in the directory `path` ("": the bucket), in the store's order of keys.

        CheckpointNotFound if the bucket does not exist, StoreUnavailable if it cannot be listed,
        CheckpointError if a name in it is not a path.
        """
        return [_object(each) for each in self._level(path)["objects"]]

    def directories(self, path: str) -> list[str]:
        """Return the paths of the directories directly in a directory, without slashes at their ends.

        `path` and the result are relative to the bucket. CheckpointNotFound if the bucket does not exist,
        StoreUnavailable if it cannot be listed, CheckpointError if a name in it is not a path.
        """
        return [*self._level(path)["common_prefixes"]]

    def _level(self, path: str) -> Any:
        import obstore

        with asking(self.url):
            return again(lambda: obstore.list_with_delimiter(self._store, path or None))

    def look(self, key: str) -> RemoteObject | None:
        """Return the present object of a key; None if there is none.

        StoreUnavailable if the store cannot be read, CheckpointError if the key is not a path.
        """
        import obstore

        with asking(self.url, key):
            try:
                return _object(again(lambda: obstore.head(self._store, key)))
            except (FileNotFoundError, obstore.exceptions.NotFoundError):
                return None

    def read(self, found: RemoteObject, start: int, stop: int) -> memoryview:
        """Return bytes `start` to `stop` (excluded) of a listed object; empty, without a request, for none.

        CheckpointChanged if the object was replaced or vanished, StoreUnavailable if the store cannot be
        read. The replacement of an object without a tag is not noticed.
        """
        import obstore

        if start >= stop:
            return memoryview(b"")
        # if_match in each request: parts of one file must come from one object
        options: Any = {"range": (start, stop), **({"if_match": found.tag} if found.tag else {})}

        def content() -> memoryview:
            got = memoryview(obstore.get(self._store, found.key, options=options).bytes())
            if len(got) != stop - start:
                raise BrokenOff(f"it sent {len(got)} bytes, and was asked for {stop - start}")
            return got

        with asking(self.url, found.key):
            return again(content)

    def copy(
        self,
        found: RemoteObject,
        descriptor: int,
        pieces: Iterable[tuple[int, int, int]],
        target: Path,
        advance: Callable[[int], None] | None = None,
        note: Callable[[int, memoryview], None] | None = None,
    ) -> None:
        """Fetch pieces (start, stop, offset) of a listed object into the open file `descriptor`, in parallel.

        `target` is that file's path, for errors. Once a part is written, a thread calls `note`, if given,
        with its offset in the file and its bytes, and `advance`, if given, with its size. CheckpointChanged
        if the object was replaced or vanished, StoreUnavailable if the store cannot be read; DiskFull or
        PublishError if the file cannot be written.
        """

        def write(offset: int, content: memoryview) -> None:
            try:
                write_at(descriptor, offset, content)
            except OSError as error:
                raise os_error(error, target) from error
            if note is not None:
                note(offset, content)
            if advance is not None:
                advance(len(content))

        self.take(found, pieces, write)

    def take(
        self,
        found: RemoteObject,
        pieces: Iterable[tuple[int, int, int]],
        use: Callable[[int, memoryview], None],
    ) -> None:
        """Fetch pieces (start, stop, offset) of a listed object, and call `use` with each part of them.

        `use` gets the part's offset and bytes: of a piece of more than 8 MiB there are several parts. Several
        threads call it, in any order. CheckpointChanged if the object was replaced or vanished,
        StoreUnavailable if the store cannot be read; errors of `use` pass.
        """

        def take(request: Request) -> None:
            content = self.read(found, request.start, request.stop)
            for start, stop, offset in request.pieces:
                use(offset, content[start - request.start : stop - request.start])

        planned = list(requests(pieces))
        if len(planned) == 1:
            take(planned[0])
            return
        with workers(_CONNECTIONS, "fetch") as pool:
            # a list: all are submitted before the first is waited for
            for task in [pool.submit(take, request) for request in planned]:
                task.result()

    def checksums(self, found: RemoteObject, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """Return the plain crc32c of each range (start, stop) of a listed object, in the order of `ranges`.

        The bytes are not kept. CheckpointChanged if the object was replaced or vanished, StoreUnavailable if
        the store cannot be read.
        """
        import numpy as np

        from exporter.wire.crc32c import combine, extend

        parts: dict[int, tuple[int, int]] = {}

        def check(offset: int, content: memoryview) -> None:
            parts[offset] = extend(0, np.frombuffer(content, np.uint8)), len(content)

        first = [0, *accumulate(stop - start for start, stop in ranges)]  # offsets as if concatenated
        self.take(found, [(*each, at) for each, at in zip(ranges, first, strict=False)], check)
        crcs = [0] * len(ranges)
        for offset in sorted(parts):
            index = bisect_right(first, offset) - 1
            crc, size = parts[offset]
            crcs[index] = crc if offset == first[index] else combine(crcs[index], crc, size)
        return crcs

    def _named(self, key: str) -> str:
        return f"{self.url.scheme}://{self.url.bucket}/{key}"


class ObjectWriter(ObjectReader):
    """The objects of one bucket, to be read and written."""

    @cached_property
    def _patient(self) -> ObjectStore:
        """A client for requests that the store answers only at their end: parts, copies, removal of many."""
        return _open(self.url, _SLOW)

    def upload(self, key: str, file: Path, note: Callable[[int, memoryview], None] | None = None) -> str:
        """Put a file under a key, replacing an existing object; return its tag, "" if the store gives none.

        `note`, if given, is called with the offset and bytes of each part before it is sent. PublishError if
        the store refuses it; OSError if the file cannot be opened or read.
        """
        import obstore

        with file.open("rb") as opened, writing_to(self.url, key):
            whole = os.fstat(opened.fileno()).st_size
            size, at_once = upload_parts(whole)
            how: Any = {"chunk_size": size, "max_concurrency": at_once}
            sent: Any = file
            if note is not None:
                # obstore sends an iterator as an upload in parts, three requests even for one part
                sent = _parts(opened, size, note) if whole > size else b"".join(_parts(opened, size, note))
            return awaited(lambda: obstore.put(self._patient, key, sent, **how))["e_tag"] or ""

    def duplicate(self, found: RemoteObject, key: str) -> None:
        """Have the store copy the listed object `found` to the key `key`, replacing an object there.

        The source is looked at again afterwards: CheckpointChanged if it was replaced or is gone, and the
        copy stays then; StoreUnavailable if the store cannot be read. PublishError if the store refuses to
        copy, also if the source did not exist.
        """
        import obstore

        with writing_to(self.url, key):
            awaited(lambda: obstore.copy(self._patient, found.key, key))
        # a copy takes no condition on its source, so that this comes after it
        now = self.look(found.key)
        if now is None or _bare(now.tag) != _bare(found.tag):
            raise CheckpointChanged(f"{self._named(found.key)} was replaced after it was written")

    def copy_if_there(self, source: str, key: str) -> bool:
        """Have the store copy the object with the key `source` to `key`, replacing an object there.

        Return True; False if the source does not exist. PublishError if the store refuses it.
        """
        import obstore

        with writing_to(self.url, key):
            try:
                awaited(lambda: obstore.copy(self._patient, source, key))
            except (FileNotFoundError, obstore.exceptions.NotFoundError):
                return False
        return True

    def create(self, key: str, content: bytes) -> Tag | None:
        """Put a new object with this content and return its tag; None, without a change, if the key exists.

        PublishError if the store refuses it.
        """
        return self._put(key, content, "create")

    def replace(self, key: str, content: bytes, tag: Tag) -> Tag | None:
        """Replace the object that has this key and tag by this content, and return the new tag.

        None, without a change, if the key has another object, or none. PublishError if the store refuses it.
        """
        told = {"e_tag": tag.e_tag, "version": tag.version}
        return self._put(key, content, {name: value for name, value in told.items() if value is not None})

    def _put(self, key: str, content: bytes, mode: Any) -> Tag | None:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        # only what is replaced may be missing: otherwise the bucket is
        absent = (FileNotFoundError,) if isinstance(mode, dict) else ()
        with writing_to(self.url, key):
            try:
                how: Any = {"mode": mode, "use_multipart": False}
                return Tag.of(awaited(lambda: obstore.put(self._store, key, content, **how)))
            except (FileExistsError, AlreadyExistsError, PreconditionError, *absent):
                return None

    def put(self, key: str, content: bytes) -> None:
        """Put an object with this key and content, replacing an existing one.

        PublishError if the store refuses it.
        """
        self._put(key, content, "overwrite")

    def fetch(self, key: str, limit: int) -> tuple[bytes, Tag] | None:
        """Return the bytes of the object of a key, and its tag; None if there is none.

        CheckpointError if it has more than `limit` bytes, StoreUnavailable if the store cannot be read.
        """
        import obstore

        def fetched() -> tuple[bytes, Tag]:
            found = obstore.get(self._store, key)
            if found.meta["size"] > limit:
                raise CheckpointError(f"{self._named(key)} has more than {limit} bytes")
            return bytes(found.bytes()), Tag.of(found.meta)

        with asking(self.url, key):
            try:
                return again(fetched)
            except (FileNotFoundError, obstore.exceptions.NotFoundError):
                return None

    def delete(self, *keys: str) -> None:
        """Remove objects, in any order; a missing one is not a failure.

        PublishError if the store refuses to remove one; others may be removed then.
        """
        import obstore

        def remove(key: str) -> None:
            with writing_to(self.url, key), suppress(FileNotFoundError, obstore.exceptions.NotFoundError):
                awaited(lambda: obstore.delete(self._store, key))

        if self.url.scheme == "s3" and len(keys) > 1:
            # a thousand per request; if it fails, one by one: not every store supports it, or names the key
            with suppress(obstore.exceptions.BaseError, OSError):
                awaited(lambda: obstore.delete(self._patient, [*keys]))
                return
        with workers(_CONNECTIONS, "delete") as pool:
            for _ in pool.map(remove, keys):
                pass


def _bare(tag: str | None) -> str:
    """Return a tag without its quotes, which Azure leaves out where it lists objects; "" for None."""
    return (tag or "").strip('"')


def _parts(file: BinaryIO, size: int, note: Callable[[int, memoryview], None]) -> Iterator[bytes]:
    """Yield the rest of a file in parts of `size` bytes, the last one shorter.

    `note` gets each part first: its offset, counted from 0, and its bytes.
    """
    offset = 0
    while part := file.read(size):
        note(offset, memoryview(part))
        offset += len(part)
        yield part


def _open(url: Url, silence: timedelta | None = None) -> ObjectStore:
    """Return a client of a bucket; `silence` is the longest time in which a request may receive nothing.

    None means 30 s. UsageError if the library is not installed, or a variable names a malformed address;
    CheckpointError if the environment's settings are refused.
    """
    try:
        from obstore import store
    except ImportError:
        raise UsageError(
            f"{url}: reading object stores needs a library that is not installed", hint=to_install("stores")
        ) from None
    plain = any(_endpoint(name).startswith("http://") for name in _ENDPOINTS)
    options: Any = {
        "client_options": {
            "connect_timeout": _CONNECT,
            "read_timeout": silence or _REQUEST,
            "timeout": _SLOW,
            "allow_http": plain,
        },
        # obstore begins no retry later than this: a patient request may be silent that long before its first
        "retry_config": {"max_retries": _RETRIES, "retry_timeout": _RETRY + (silence or timedelta())},
    }
    with asking(url):
        if url.scheme == "s3":
            if silence is None:  # otherwise obstore removes even one key by the request for many
                options["disable_bulk_delete"] = True
            return store.S3Store(url.bucket, **options)
        if url.scheme == "gs":
            return store.GCSStore(url.bucket, **options)
        return store.AzureStore(url.bucket, **options)


def _endpoint(name: str) -> str:
    """Return the address in an environment variable, "" if it is not set; UsageError if it is malformed."""
    text = os.environ.get(name, "")  # obstore panics at an address without a scheme
    if text and re.fullmatch(r"https?://[^\s/?#@]+(/\S*)?", text) is None:
        raise UsageError(
            f"{name} is not the address of a store: expected https://HOST or http://HOST:PORT",
            hint=f"{name}=http://127.0.0.1:9000 names one on this machine",
        )
    return text


def _object(listed: Any) -> RemoteObject:
    return RemoteObject(listed["path"], listed["size"], listed["e_tag"], listed["last_modified"].timestamp())


def require_conditions(store: ObjectWriter, path: str) -> None:
    """Refuse a store that ignores the conditions of writes: create if absent, replace if unchanged.

    Writes an object `.probe-*` in the directory `path` of the bucket, and removes it.

    Raises:
        PublishError: it ignores conditions, or the object cannot be written or removed.
        CheckpointError: the object cannot be read.
    """
    # publishers on several machines rely on conditional writes to keep out of each other's way
    key = f"{path}/.probe-{os.urandom(8).hex()}"
    wrong = _ignored_condition(store, key)
    with suppress(PublishError) if wrong else nullcontext():
        store.delete(key)  # a probe that stays is removed later with other old ones
    if wrong:
        raise PublishError(
            f"{store.url}: this store ignores conditional requests",
            cause=wrong,
            hint="use a store that honours If-None-Match and If-Match: S3, GCS, Azure, R2, MinIO",
        )


def _ignored_condition(store: ObjectWriter, key: str) -> str:
    """Return how a store ignores conditions, for an error's cause; "" if it honours them.

    Writes a probe under `key`, which stays. PublishError if it cannot be written, CheckpointError if it
    cannot be read.
    """
    try:
        first = store.create(key, b"1") or _tag_of(store, key, b"1")
        second = store.create(key, b"2")
        moved = first and (store.replace(key, b"3", first) or _tag_of(store, key, b"3"))
        stale = first and store.replace(key, b"4", first)
    except PublishError as error:
        if not error.cause.startswith(NOT_IMPLEMENTED):
            raise
        return error.cause
    if first is not None and second is None and moved is not None and stale is None:
        return ""
    return "it replaced an object that it was asked to create only if absent"


def _tag_of(store: ObjectWriter, key: str, content: bytes) -> Tag | None:
    """Return the tag of an object that only this process writes, if it has this content.

    So a write counts whose answer alone was lost. None if the object has another content, or does not exist.
    CheckpointError if it has more bytes than `content`, or cannot be read.
    """
    found = store.fetch(key, len(content))
    return found[1] if found is not None and found[0] == content else None


_PAUSES = (0.1, 0.5, 2.0)  # seconds before a read is repeated because its answer broke off
_AGAIN_SECONDS = 60.0  # a read that breaks off later than this is not repeated
_LATER = "run the command again: the store is busy, or ill"
_STATUS = re.compile(r"\b(?:status:? |HTTP error: )?([45][0-9]{2} [A-Z][A-Za-z ]+)")
# The stores' own codes for wrong credentials; the rest of their texts may repeat the credentials.
_CODE = re.compile(
    "<Code>(AccessDenied|AuthenticationFailed|AuthorizationFailure|AuthorizationHeaderMalformed|"
    "AuthorizationPermissionMismatch|ExpiredToken|InvalidAccessKeyId|InvalidToken|RequestTimeTooSkewed|"
    "SignatureDoesNotMatch)</Code>"
)
_MAY = "publishing needs to list, read, write and delete"
NOT_IMPLEMENTED = "501"
# Words in obstore's texts that identify the kind of a failure.
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
_OF_CONNECTIONS = ("TimedOut", "ConnectionRefused", "dns error", "InvalidContentType")


_NO_CONNECTION = frozenset(
    {"no connection, or no answer to be read", *(_KINDS[word] for word in _OF_CONNECTIONS)}
)
"""Kinds of failures in which no store was reached."""


class BrokenOff(Exception):
    """The store sent another answer than the one requested; the text says how it differs."""


def again(ask: Callable[[], T]) -> T:
    """Return the answer of `ask`; if it breaks off, `ask` is called again after 0.1, 0.5 and 2 s.

    Not after 60 s in total: then, as after the last call, the error is raised, `BrokenOff` or obstore's. Any
    other exception of `ask` is raised at once; GivenUp once the answer is not wanted any more.
    """
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
    """Raise named errors for a store's answers to reads inside the block.

    `key` is the key of the object that is read, None if the bucket of `url` is listed. CheckpointNotFound if
    the bucket does not exist and `key` is None, CheckpointChanged if the object `key` vanished or was
    replaced, CheckpointError for a name that is not a path, otherwise StoreUnavailable. All are
    CheckpointErrors. Until the block ends, `Calls` counts it as a call in progress.
    """
    from obstore import exceptions

    where = str(url) if key is None else f"{url.scheme}://{url.bucket}/{key}"
    bucket = f"{'container' if url.scheme == 'az' else 'bucket'} {url.scheme}://{url.bucket}"
    absent = CheckpointNotFound(f"there is no {bucket}", hint="name one that is there")

    def refused(error: Exception) -> StoreUnavailable:
        code = next(iter(_CODE.findall(str(error))), "")
        said = f"{where}: the store refuses these credentials{code and f' ({code})'}"
        return StoreUnavailable(said, hint=_advice(url.scheme, code or "refused"))

    try:
        with calling(where):
            yield
    # `from None` here and below: the text of obstore's error may have a signed URL
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
            f"{where}: a name below it is not a path",
            cause="it has an empty part, or one that is '.' or '..'",
            hint="name the directory of the checkpoint alone, or remove that object",
        ) from None
    except BrokenOff as error:
        raise StoreUnavailable(f"{where}: the store cannot be read", cause=str(error), hint=_LATER) from None
    except exceptions.BaseError as error:
        said = _status_or_kind(error)
        if why := missing_credentials(url.scheme, str(error)):
            raise StoreUnavailable(
                f"{where}: there are no credentials", cause=f"{why}: {said}", hint=HINTS[url.scheme]
            ) from None
        # S3 says 400 to a token that has expired, or is malformed
        if said[:3] in ("401", "403") or (said[:3] == "400" and _CODE.search(str(error))):
            raise refused(error) from None
        if said[:3] == "404" and key is None:
            raise absent from None
        hint = _LATER if _is_ill(said) else _advice(url.scheme, said)
        raise StoreUnavailable(f"{where}: the store cannot be read", cause=said, hint=hint) from None


def _is_ill(status: str) -> bool:
    """True for an answer that another try may get past: too many requests, or a server's error but 501.

    `status` is an HTTP status with its text, or another failure in words.
    """
    return status[:3] == "429" or (status[:1] == "5" and status[:3] != NOT_IMPLEMENTED)


_VARIABLES_OF = {
    "InvalidAccessKeyId": "AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "AWS_SECRET_ACCESS_KEY",
    "ExpiredToken": "AWS_SESSION_TOKEN",
    "InvalidToken": "AWS_SESSION_TOKEN",
    "AuthorizationHeaderMalformed": "AWS_REGION",
    _KINDS["redirect without LOCATION"]: "AWS_REGION",
}
"""The variable that is probably wrong, by the code of S3's answer."""


def _advice(scheme: str, said: str) -> str:
    """Return the hint for a store's answer `said`: the variable to check, one that is set if possible.

    Only names of variables are shown, never their values.
    """
    if said == "RequestTimeTooSkewed":
        return "this machine's clock is wrong: timedatectl status"
    if said in _NO_CONNECTION:
        name = next(filter(os.environ.get, _ENDPOINTS), None)
        what = f"the address in {name}" if name else "this machine's network and name server"
        return f"look at {what}, and at whether the store runs"
    if scheme == "s3" and (name := _VARIABLES_OF.get(said)):
        is_set = "is set, and" if os.environ.get(name) else "is not set, and what is found elsewhere"
        return f"correct {name}: it {is_set} is not what this store expects; {_MAY}"
    if scheme == "s3" and (named := next((names for names in _AWS if all(map(os.environ.get, names))), None)):
        return f"{' with '.join(named)} {'is' if len(named) == 1 else 'are'} set: {_MAY}"
    return f"{HINTS[scheme]}; {_MAY}"


def _status_or_kind(error: Exception) -> str:
    """Return the status of a store's answer, or the kind of failure.

    The error's own text is not used: it may contain a signed URL.
    """
    text = str(error)
    if found := _STATUS.search(text):
        return found[1].strip()
    kinds = (kind for word, kind in _KINDS.items() if word in text)
    return next(kinds, "no connection, or no answer to be read")


@contextmanager
def writing_to(url: Url, key: str) -> Iterator[None]:
    """Raise PublishError for a store's answers to writes of the object `key` inside the block.

    It has the cause and the hint of the error that `asking` would raise.
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


# Variables that name credentials or their source: the first group of which all are set counts.
_AWS = (
    ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    ("AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
)
# Words in obstore's errors about requests for credentials, not to the store.
_NOT_GIVEN = re.compile(
    r"token request|token file|performing POST REDACTED|/latest/(?:api/token|meta-data)\b"
)

# Variables to set, by the scheme of a URL.
HINTS = {
    "s3": "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, and AWS_ENDPOINT_URL for other clouds",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or what else identifies you",
}

_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}


def variables(scheme: str) -> list[str]:
    """Return the names of the environment variables set for the stores of a scheme, sorted; no values.

    `scheme` is s3, gs or az.
    """
    return sorted(name for name in os.environ if name.startswith(_PREFIXES[scheme]) and os.environ[name])


def missing_credentials(scheme: str, said: str) -> str:
    """Return a clause that says why there are no credentials for a store of this scheme (s3, gs, az).

    `said` is the text of an error of obstore; "" if that is another error.
    """
    if "bulk delete" in said:  # also a POST, but to the store itself
        return ""
    # where ECS gives a task its credentials, by AWS_CONTAINER_CREDENTIALS_RELATIVE_URI
    container = os.environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI") or "http://169.254.170.2/"
    if not _NOT_GIVEN.search(said) and not (scheme == "s3" and container in said):
        return ""
    if scheme != "s3":
        return "the account that is named, or the role of this machine, gives none"
    if named := next((names for names in _AWS if all(map(os.environ.get, names))), None):
        return f"{' with '.join(named)} gives none"
    looked_for = ", ".join(" with ".join(names) for names in _AWS)
    return f"none of {looked_for} is set, and the role of this machine gives none"
