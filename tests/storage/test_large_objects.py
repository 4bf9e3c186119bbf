"""Objects of any size, on lines of any speed: what stores limit, and what is waited for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.errors import CheckpointError
from exporter.jobs.task import piece_bytes
from exporter.storage import mirror, objects, requests
from exporter.storage.mirror import Mirror
from exporter.storage.objects import ObjectWriter, RemoteObject
from exporter.storage.requests import MOST_COPIED, MOST_PARTS, upload_parts
from exporter.storage.url import Url
from tests.support.http_proxy import serving
from tests.support.object_stores import Bucket

_MB = 1 << 20
_PIECES, _PAUSE = 6, 0.15
_PATIENCE = timedelta(seconds=0.5)
"""Longer than a pause between two pieces, and shorter than all pauses of an object."""


@given(st.integers(0, 5 << 40))
def test_the_parts_of_an_upload(size: int) -> None:
    part, at_once = upload_parts(size)
    assert part * MOST_PARTS >= size
    assert 5 * _MB <= part <= 5 << 30  # what S3 takes
    assert at_once >= 1
    assert part * at_once <= 640 * _MB  # of memory


@given(st.integers(1, 1 << 42), st.integers(1, 1 << 33))
def test_what_a_table_is_written_in_can_be_copied_by_a_store(size: int, task_bytes: int) -> None:
    assert (piece_bytes(size, task_bytes) or size) <= MOST_COPIED


def test_an_upload_of_more_parts_than_a_store_takes(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(requests, "PART_BYTES", 5 * _MB)
    monkeypatch.setattr(requests, "MOST_PARTS", 2)
    file = tmp_path / "shard"
    file.write_bytes(os.urandom(11 * _MB))
    tag = ObjectWriter(Url.parse(bucket.url()) or pytest.fail()).upload("shard", file)
    assert tag.strip('"').endswith("-2")  # S3's tags tell the number of parts
    assert bucket.keys("shard")["shard"] == file.read_bytes()


class _Slow(BaseHTTPRequestHandler):
    """Sends and takes a little at a time; the first to ask for `stalled` gets no end."""

    protocol_version = "HTTP/1.1"
    stalled = 0

    def do_GET(self) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        size = last + 1 - first
        self.send_response(206)
        self.send_header("Content-Length", str(size))
        self.send_header("Content-Range", f"bytes {first}-{last}/{_MB}")
        self.send_header("ETag", '"tag"')
        self.end_headers()
        for number in range(_PIECES):
            time.sleep(_PAUSE)
            if "stalled" in self.path and number and not _Slow.stalled:
                _Slow.stalled += 1
                time.sleep(2 * _PATIENCE.total_seconds())
                self.close_connection = True
                return
            self.wfile.write(bytes(size * (number + 1) // _PIECES - size * number // _PIECES))

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(_PIECES * _PAUSE)
        self.send_response(200)
        self.send_header("ETag", '"tag"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *rest: Any) -> None:
        """Say nothing."""


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectWriter]:
    """A store on a slow line."""
    monkeypatch.setattr(objects, "_REQUEST", _PATIENCE)
    _Slow.stalled = 0
    with serving(_Slow) as address:
        told = {
            "ENDPOINT_URL": address,
            "ACCESS_KEY_ID": "x",
            "SECRET_ACCESS_KEY": "x",
            "REGION": "us-east-1",
        }
        for name, value in told.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield ObjectWriter(Url("s3", "bucket", ""))


@pytest.mark.parametrize("key", ["slow", "stalled"])
def test_what_comes_slowly_comes(slow: ObjectWriter, key: str) -> None:
    """A line that goes on is waited for; on one that stalls, what had not come is asked for again."""
    assert len(slow.read(RemoteObject(key, _MB, '"tag"', 0.0), 0, _MB)) == _MB
    assert _Slow.stalled == (key == "stalled")


def test_what_goes_slowly_goes(slow: ObjectWriter, tmp_path: Path) -> None:
    file = tmp_path / "shard"
    file.write_bytes(bytes(_MB))
    assert slow.upload("shard", file) == '"tag"'


def test_only_a_checkpoints_directory_has_a_limit(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "_MOST_FILES", 3)
    for number in range(4):
        bucket.put(f"jobs/plan/{number}", b"")
    url = Url.parse(bucket.url("jobs")) or pytest.fail()
    assert len(list(ObjectWriter(url).below("jobs"))) == 4
    with pytest.raises(CheckpointError, match="has more than 3 objects"):
        Mirror(url).refresh()
