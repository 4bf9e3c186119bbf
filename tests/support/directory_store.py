"""A store whose objects are the files of a directory, by what of S3's protocol we use; it can take its time.

Files may be sparse, where an emulator would hold a terabyte in memory; and a model of thousands of objects is
there at once. What is written depends on conditions as it does at S3.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from functools import lru_cache
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

import pytest

from tests.support.http_proxy import Traffic, serving

BUCKET = "shown"
_PAGE = 1000
_HASHED_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_KEY = re.compile(r"<Key>(.*?)</Key>")


@contextmanager
def directory_store(directory: Path, wait: float = 0.0) -> Iterator[tuple[dict[str, str], Traffic]]:
    """The environment in which `s3://shown/` leads to a directory, and the requests so far.

    Each request waits so many seconds.
    """
    traffic, lock = Traffic(), threading.Lock()

    class Answering(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def take(self) -> None:
            time.sleep(wait)
            place = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            key = unquote(place.path).removeprefix(f"/{BUCKET}").strip("/")
            self.told: dict[str, str] = {}
            with lock:
                if key:
                    status, content = getattr(self, self.command.lower())(directory / key, body)
                elif self.command == "POST":
                    status, content = 200, self.removed(body)
                else:
                    status, content = 200, _listing(directory, parse_qs(place.query))
            traffic.requests.append((self.command, self.path, len(content)))
            self.send_response(status)
            for name, value in self.told.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = take

        def get(self, path: Path, _: bytes) -> tuple[int, bytes]:
            if not path.is_file():
                return 404, b""
            if self.headers.get("If-Match", _tag(path)) != _tag(path):
                return 412, b""
            size = path.stat().st_size
            asked = _RANGE.fullmatch(self.headers.get("Range", f"bytes=0-{size - 1}"))
            assert asked is not None, self.headers["Range"]
            start, stop = int(asked[1]), min(int(asked[2]) + 1, size)
            with path.open("rb") as file:
                file.seek(start)
                content = file.read(stop - start)
            modified = formatdate(path.stat().st_mtime, usegmt=True)
            about = {"ETag": _tag(path), "Last-Modified": modified}
            self.told = about | {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}
            return (206 if "Range" in self.headers else 200), content

        head = get

        def put(self, path: Path, body: bytes) -> tuple[int, bytes]:
            is_there, match = path.is_file(), self.headers.get("If-Match")
            if (is_there and "If-None-Match" in self.headers) or (match and match != _tag(path)):
                return 412, b""
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f".{path.name}.new")
            if source := self.headers.get("x-amz-copy-source"):
                found = directory / unquote(source).strip("/").removeprefix(f"{BUCKET}/")
                if not found.is_file():
                    return 404, b""
                shutil.copyfile(found, new)
            else:
                new.write_bytes(body)
            new.replace(path)
            self.told = {"ETag": _tag(path)}
            copied = f"<CopyObjectResult><ETag>{escape(_tag(path))}</ETag></CopyObjectResult>"
            return 200, copied.encode() if source else b""

        def delete(self, path: Path, _: bytes) -> tuple[int, bytes]:
            path.unlink(missing_ok=True)
            return 204, b""

        def removed(self, body: bytes) -> bytes:
            keys = _KEY.findall(body.decode())
            for key in keys:
                (directory / unescape(key)).unlink(missing_ok=True)
            done = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            return f"<DeleteResult>{done}</DeleteResult>".encode()

        def log_message(self, *rest: Any) -> None:
            pass

    with serving(Answering) as address:
        yield (
            {
                "AWS_ACCESS_KEY_ID": "tests",
                "AWS_SECRET_ACCESS_KEY": "tests",
                "AWS_REGION": "us-east-1",
                "AWS_ENDPOINT_URL": address,
            },
            traffic,
        )


@contextmanager
def reached(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    """`directory_store`, which commands of this process reach: the requests so far."""
    with directory_store(directory) as (environment, traffic):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield traffic


def _listing(directory: Path, query: dict[str, list[str]]) -> bytes:
    """A page of what is below a prefix, or with a delimiter of what is beside it."""
    (prefix,), is_flat = query.get("prefix", [""]), "delimiter" in query
    (after,) = query.get("continuation-token") or query.get("start-after", [""])
    keys = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    found = sorted(key for key in keys if key.startswith(prefix) and key > after)
    below = [key for key in found if is_flat and "/" in key.removeprefix(prefix)]
    found = sorted({*found} - {*below})
    directories = sorted({f"{prefix}{key.removeprefix(prefix).partition('/')[0]}/" for key in below})
    page = found[:_PAGE]
    parts = [_described(key, keys[key]) for key in page]
    parts += [f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>" for key in directories]
    more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if found[_PAGE:] else ""
    truncated = f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>"
    return f"<ListBucketResult>{truncated}{more}{''.join(parts)}</ListBucketResult>".encode()


def _described(key: str, path: Path) -> str:
    found = path.stat()
    modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.st_mtime))
    return (
        f"<Contents><Key>{escape(key)}</Key><Size>{found.st_size}</Size>"
        f"<ETag>{escape(_tag(path))}</ETag><LastModified>{modified}</LastModified></Contents>"
    )


def _tag(path: Path) -> str:
    """The MD5 of what is small, as S3 tells it."""
    if not path.is_file():
        return '""'
    found = path.stat()
    return _tag_of(path, found.st_size, found.st_mtime_ns, found.st_ino)


@lru_cache(maxsize=1 << 14)
def _tag_of(path: Path, size: int, changed_ns: int, inode: int) -> str:
    if size <= _HASHED_BYTES:
        return f'"{hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()}"'
    return f'"{size}-{changed_ns}-{inode}"'
