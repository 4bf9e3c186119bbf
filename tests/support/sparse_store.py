"""A store that shows a directory's files under one bucket, by what of S3's protocol readers use.

An emulator would read a terabyte into memory; files may be sparse. Each answer can be made to wait.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.support.http_proxy import Traffic, serving

BUCKET = "shown"
_TAG = '"as-it-is"'
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@contextmanager
def sparse_store(directory: Path, wait: float = 0.0) -> Iterator[tuple[dict[str, str], Traffic]]:
    """The environment in which `s3://shown/` leads to a directory, and the requests so far.

    Each request waits so many seconds before it is answered.
    """
    traffic = Traffic()

    class Shown(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            time.sleep(wait)
            place = urlsplit(self.path)
            key = unquote(place.path).removeprefix(f"/{BUCKET}").strip("/")
            if key:
                status, content = self.ranged(directory / key)
            else:
                status, content = 200, _listing(directory, parse_qs(place.query))
            traffic.requests.append(("GET", self.path, len(content)))
            self.send_response(status)
            for name, value in self.described.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def ranged(self, path: Path) -> tuple[int, bytes]:
            if not path.is_file():
                return 404, b""
            size = path.stat().st_size
            asked = _RANGE.fullmatch(self.headers.get("Range", f"bytes=0-{size - 1}"))
            assert asked is not None, self.headers["Range"]
            start, stop = int(asked[1]), min(int(asked[2]) + 1, size)
            with path.open("rb") as file:
                file.seek(start)
                content = file.read(stop - start)
            self.described = {
                "ETag": _TAG,
                "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True),
                "Content-Range": f"bytes {start}-{stop - 1}/{size}",
            }
            return (206 if "Range" in self.headers else 200), content

        def handle_one_request(self) -> None:
            self.described: dict[str, str] = {}
            super().handle_one_request()

        def log_message(self, *rest: Any) -> None:
            pass

    with serving(Shown) as address:
        yield (
            {
                "AWS_ACCESS_KEY_ID": "tests",
                "AWS_SECRET_ACCESS_KEY": "tests",
                "AWS_REGION": "us-east-1",
                "AWS_ENDPOINT_URL": address,
            },
            traffic,
        )


def _listing(directory: Path, query: dict[str, list[str]]) -> bytes:
    """What is below a prefix, or with a delimiter beside it: all at once."""
    (prefix,), is_flat = query.get("prefix", [""]), "delimiter" in query
    keys = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    found = sorted(key for key in keys if key.startswith(prefix))
    parts = [
        f"<Contents><Key>{escape(key)}</Key><Size>{keys[key].stat().st_size}</Size>"
        f"<ETag>{escape(_TAG)}</ETag><LastModified>{_iso(keys[key])}</LastModified></Contents>"
        for key in found
        if not (is_flat and "/" in key.removeprefix(prefix))
    ]
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(parts)}</ListBucketResult>".encode()


def _iso(path: Path) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(path.stat().st_mtime))
