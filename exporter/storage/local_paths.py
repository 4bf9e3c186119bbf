"""Parse paths from people: local ones, `file://` URLs, and, where checkpoints are read, URLs of object
stores.

Without this check `gs://bucket/m` would be the local directory `gs:` with `bucket/m` in it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from exporter.errors import UsageError
from exporter.storage.mirror import shown
from exporter.storage.url import Url

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
# A URL after `Path` has merged its doubled slash.
_URL_AS_PATH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(.*)", re.DOTALL)

# A URL with another number of slashes, or without its colon.
_ALMOST = re.compile(
    "(s3[an]?|gs|gcs|az|abfss?|wasbs?|hdfs|viewfs|https?)(?::/?|//+)([^/].*)|(file):(?!//)(.+)",
    re.DOTALL | re.IGNORECASE,
)
_PATTERN = re.compile(r"[*?\[\\]")

_GET = {
    "gs": "gcloud storage cp -r {url} LOCAL",
    "s3": "aws s3 cp --recursive {url} LOCAL",
    "hdfs": "hdfs dfs -get {url} LOCAL",
    "viewfs": "hdfs dfs -get {url} LOCAL",
    "http": "curl -L -o LOCAL {url}",
    "https": "curl -L -o LOCAL {url}",
}
_PUT = {
    "gs": "gcloud storage cp -r LOCAL/VERSION {url}/",
    "s3": "aws s3 cp --recursive LOCAL/VERSION {url}/VERSION",
    "hdfs": "hdfs dfs -put LOCAL/VERSION {url}/",
    "viewfs": "hdfs dfs -put LOCAL/VERSION {url}/",
}
_HERE = "name a local directory; `export-model pull URL DIR` copies what is published in a store"
# Names of the arguments for published models.
_MODELS = ("--model-base-path", "base_path")
_BUCKETS = {"s3": "BUCKET", "gs": "BUCKET", "az": "CONTAINER"}
_SAME = {"s3a": "s3://{rest}", "s3n": "s3://{rest}", "gcs": "gs://{rest}"}
# The text after `abfss://` and `wasbs://`: container, account, path.
_AZURE = re.compile(r"([^@/]+)@([^./]+)[^/]*/?(.*)", re.DOTALL)


def local_path(what: str, place: str | os.PathLike[str]) -> Path:
    """Return the local path that `place`, the value of an option or argument, means; errors call it `what`.

    A text with a URL's beginning and wrong slashes, such as `s3:/b`, counts as a URL unless such a path
    exists.

    Raises:
        UsageError: the value is empty, a URL of another scheme than `file`, or a `file://` URL of another
            machine or without a path.
    """
    return _local(what, place, "only local paths are read and written")


_OR_STORES = "only local paths, s3://, gs:// and az:// are read and written"


def _local(what: str, place: str | os.PathLike[str], expected: str) -> Path:
    text = os.fspath(place)
    if not text:  # an unset variable of the shell; pathlib takes it for the working directory
        raise UsageError(f"{what} is empty: expected a path", hint="the working directory is .")
    text = _as_meant(text)
    text = str(Url.parse(text) or text)
    found = (_URL if "://" in text or isinstance(place, str) else _URL_AS_PATH).match(text)
    if found is None:
        return Path(place)
    scheme, rest = found[1].lower(), found[2]
    if scheme == "file":
        return _of_file_url(what, text, rest, is_whole="://" in text)
    url = without_secrets(f"{scheme}://{rest}").rstrip("/")
    if scheme in _BUCKETS and Url.parse(text) is None:
        told = without_secrets(text)
        raise UsageError(f"{what} {told}: expected {scheme}://{_BUCKETS[scheme]}/PATH, or a local path")
    if what == "--out" and Url.parse(text) is not None:
        raise UsageError(
            f"{what} {url}: only local paths are read and written here",
            cause="the commands and exporter.export take URLs of models, a plan is made for a local path",
            hint="export(..., out=URL), or export_incremental(..., out=URL)",
        )
    hint = _copy(scheme, url, writes=what == "--out")
    if what == "MODEL":
        hint = _HERE
    elif any(name in what for name in _MODELS) and Url.parse(text) is not None:
        hint = _serve_a_copy(url)
    raise UsageError(
        f"{what} {url}: {expected}",
        cause=f"{scheme}:// names a store elsewhere",
        hint=hint,
    )


def require_no_pattern(what: str, place: Path) -> None:
    """Refuse a directory from which TensorFlow cannot serve a model, because it takes the path for a pattern.

    `what` is the name of the option or argument in the error.

    Raises:
        UsageError: the absolute path of `place` has one of * ? [ \\.
    """
    # TensorFlow does so for variables and for deltas (`internal::GetMatchingPaths`)
    if found := _PATTERN.search(path := str(place.absolute())):
        raise UsageError(
            f"{what} {path} cannot be served: TensorFlow takes a path with {found[0]} for a pattern",
            cause="servers would find no variables there, or the deltas of other models",
            hint="name a directory whose whole path has none of * ? [ \\",
        )


def quoted(place: object) -> str:
    """Return a path, URL or name, quoted for a shell: for commands that hints propose.

    A local path that stands for an object in a store is written as the object's URL.
    """
    text = shown(str(place))
    found = _URL_AS_PATH.match(text) if isinstance(place, Path) else None
    if found is not None and found[1] in _BUCKETS and not found[2].startswith("/"):
        text = f"{found[1]}://{found[2]}"
    # unprintable characters are written as bash, zsh and ksh read them, `$'a\x1b'`, byte by byte
    return shlex.quote(text) if text.isprintable() else f"$'{''.join(map(_in_dollar_quotes, text))}'"


def _in_dollar_quotes(character: str) -> str:
    if character.isprintable():
        return f"\\{character}" if character in "\\'" else character
    is_byte = "\udc80" <= character <= "\udcff"
    data = character.encode(errors="surrogateescape" if is_byte else "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in data)


def without_secrets(url: str) -> str:
    """Return a URL for messages: `...` replaces credentials, and all text after a question mark."""
    return re.sub(r"\?.*", "?...", re.sub(r"[^/@]*:[^/@]*@", "...@", url), flags=re.DOTALL)


def _as_meant(text: str) -> str:
    """Return the URL that a text with wrong slashes, or without a colon, means: `s3://b` for `s3:/b`.

    An existing path, and any other text, is returned unchanged. A new path of such a name is written with
    `./` before it.
    """
    found = _ALMOST.fullmatch(text)
    if found is None or os.path.lexists(text):
        return text
    return f"{(found[1] or found[3]).lower()}://{found[2] or found[4]}"


def store_url(text: str) -> str | None:
    """Return our URL (s3, gs, az) for an object store's URL in another spelling.

    None for any other text, also for one of our URLs without a mistake.
    """
    found = _URL.match(_as_meant(text))
    if found is None:
        return None
    scheme, rest = found[1].lower(), found[2]
    if found[0] != text and scheme in _BUCKETS:
        return found[0]
    if scheme in _SAME:
        return _SAME[scheme].format(rest=rest)
    if re.fullmatch("abfss?|wasbs?", scheme) and (parts := _AZURE.fullmatch(rest)):
        return f"az://{parts[1]}/{parts[3]}"
    return None


def _serve_a_copy(url: str) -> str:
    """Return the hint with the commands that serve the model at a store's `url`."""
    name = url.rpartition("/")[2]
    return (
        f"serve a copy: export-model pull {quoted(url)} {quoted(name)}, then serve-model run {quoted(name)} "
        "(`pull --watch` follows what is published; serve-model agent has --pull)"
    )


def _copy(scheme: str, url: str, *, writes: bool) -> str:
    command = (_PUT if writes else _GET).get(scheme, "").format(url=quoted(url))
    steps = "publish to a local directory, then copy the new version" if writes else "copy it here first"
    return f"{steps}: {command}" if command else f"{steps} with the store's own tool"


def checkpoint_path(what: str, place: str | os.PathLike[str]) -> Path:
    """Return the path in `place`, the value of an option from which a checkpoint is read.

    It is a local path as of `local_path`, or the `Path` of an object store's URL. Errors call it `what`.

    Raises:
        UsageError: the value is empty, a URL of a store in another spelling than s3://, gs:// or az://, or
            another URL that names no path on this machine.
    """
    text = os.fspath(place)
    if Url.parse(text) is not None:
        return Path(place)
    if (known := store_url(text)) is not None:
        raise UsageError(
            f"{what} {without_secrets(text)}: {_OR_STORES}",
            hint=f"write {without_secrets(known)}"
            + (", and set AZURE_STORAGE_ACCOUNT_NAME" if known.startswith("az") else ""),
        )
    return _local(what, place, _OR_STORES)


def trained_path(what: str, place: str | os.PathLike[str]) -> Path:
    """Return the local directory `place`, into which a trainer writes; errors call its option `what`.

    Raises:
        UsageError: the value is empty, or a URL that names no path on this machine; for an object store's
            URL, the hint says how to export there.
    """
    if (url := Url.parse(os.fspath(place))) is not None:
        raise UsageError(
            f"{what} {url}: only local paths are written by a training",
            cause="its files are renamed and locked, which stores cannot do",
            hint="name a directory here; what is exported from it may go to a store: out=URL",
        )
    return local_path(what, place)


def local_name(what: str, name: str) -> str:
    """Return the local path of a `file://` URL; a name that is not a URL, such as `pkg.mod:fn`, unchanged.

    Errors call the name `what`.

    Raises:
        UsageError: it is a URL of another scheme or another machine.
    """
    return str(local_path(what, name)) if _URL.match(name) else name


def checkpoint_parser(what: str) -> Callable[[str], Path]:
    """Return a function that parses a text of the command line as `checkpoint_path` does.

    `what` is the name of the option or argument in errors. The function raises UsageError for a text that is
    not such a path.
    """

    def path(text: str) -> Path:
        return checkpoint_path(what, text)

    return path


def path_parser(what: str) -> Callable[[str], Path]:
    """Return a function that parses a text of the command line as `local_path` does.

    `what` is the name of the option or argument in errors. The function raises UsageError for a text that is
    not a local path.
    """

    def path(text: str) -> Path:
        return local_path(what, text)

    return path


def _of_file_url(what: str, text: str, rest: str, *, is_whole: bool) -> Path:
    """Return the path in `file:///a/b` or `file://localhost/a/b`; a `Path` has only the first form.

    `rest` follows `file://`, or the single slash after `file:` unless `is_whole`; errors call the value
    `what`, and quote `text`. UsageError if it names another machine, or no path.
    """
    host, _, path = rest.partition("/") if is_whole else ("", "", rest)
    if host not in ("", "localhost") or not path:
        raise UsageError(
            f"{what} {text}: expected a path on this machine",
            cause=f"what follows file:// is a machine's name: {host}" if host else "no path follows file://",
            hint="write file:///path/from/the/root, or the path alone",
        )
    return Path(f"/{path}")
