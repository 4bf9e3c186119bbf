"""What is damaged in a store, or was put there by another program: it is named, and nothing is made worse."""

from __future__ import annotations

import errno
import json
import ssl
import tempfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from exporter.storage import objects
from tests.support.certificates import Authority
from tests.support.commands import export_model
from tests.support.object_stores import Bucket
from tests.support.remote_models import published_log

DELTA = f"deltas/{10:020d}/{10:020d}-{20:020d}"


@pytest.fixture
def url(bucket: Bucket, tmp_path: Path) -> str:
    """A model with a base at 10 and a delta to 20, put there by `push`."""
    url = bucket.url("ranker")
    assert export_model("push", published_log(tmp_path, 20), url).code == 0
    return url


def test_a_head_of_a_later_release_is_not_replaced(bucket: Bucket, url: str, tmp_path: Path) -> None:
    later = {"path": DELTA, "format_version": 2, "of_a_later_release": 1}
    bucket.put("ranker/head.json", json.dumps(later).encode())
    for command in (("history", url), ("pull", url, tmp_path / "copy"), ("resume", url)):
        ran = export_model(*command, "--json")
        assert (ran.code, ran.error["error"]) == (6, "ManifestError")
        assert "format version 2, this program reads 1" in ran.error["message"]
    assert json.loads(bucket.keys()["ranker/head.json"]) == later


def test_a_head_that_is_damaged(bucket: Bucket, url: str) -> None:
    bucket.put("ranker/head.json", b'{"path')
    ran = export_model("history", url, "--json")
    assert (ran.code, "remove it" in ran.error["hint"]) == (6, True)
    bucket.delete("ranker/head.json")
    ran = export_model("rollback", url, "--to", 10, "--json")
    assert (ran.code, ran.document["position"]) == (0, 21), ran.err


def test_damage_is_named_where_it_lies(bucket: Bucket, url: str, tmp_path: Path) -> None:
    """Not by the copy of it, which is removed."""
    name = f"ranker/{DELTA}/delta.data-00000-of-00001"
    content = bytearray(bucket.keys()[name])
    content[0] ^= 1
    bucket.put(name, bytes(content))
    ran = export_model("pull", url, tmp_path / "copy", "--json")
    assert (ran.code, ran.error["error"]) == (6, "PublicationDamaged"), ran.err
    assert (bucket.url(name) in ran.error["cause"]) is True, ran.err
    assert ran.error["hint"].endswith(f"export-model doctor {url}")
    bucket.delete(name)
    ran = export_model("verify", url, "--json")
    assert ran.error["message"] == f"{bucket.url(name)} is in the manifest and not there as a file"


def test_nothing_that_could_be_pulled_is_nothing_to_serve(bucket: Bucket, url: str, tmp_path: Path) -> None:
    bucket.delete("ranker/10/saved_model.pb")
    ran = export_model("pull", url, tmp_path / "copy")
    assert (ran.code, "not whole yet" in ran.out, "serve-model" in ran.out) == (0, True, False)


def test_what_another_tool_has_copied_there(bucket: Bucket, tmp_path: Path) -> None:
    """A model without a head, at a URL with an @."""
    bucket.upload(published_log(tmp_path, 20), "me@home/ranker")
    url = bucket.url("me@home/ranker")
    for sides, equal in (((url, f"{url}@10"), False), ((tmp_path / "train", f"{url}@10"), True)):
        ran = export_model("diff", *sides, "--json")
        assert (ran.code, ran.document["equal"]) == (0, equal), ran.err


def test_why_a_server_cannot_be_asked(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_RETRIES", 0)
    plain = bucket.environment["AWS_ENDPOINT_URL"].replace("http:", "https:")
    pair = Authority(tmp_path, "unknown").sign("store", "IP:127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        Thread(target=server.serve_forever, daemon=True).start()
        for address, cause in (
            (f"https://127.0.0.1:{server.server_port}", "does not trust its certificate"),
            (plain, "answers without TLS"),
            ("http://127.0.0.1:9", "nothing listens"),
        ):
            monkeypatch.setenv("AWS_ENDPOINT_URL", address)
            ran = export_model("history", bucket.url("ranker"), "--json")
            assert (ran.code, cause in ran.error["cause"]) == (3, True), ran.err
        server.shutdown()


def test_a_temporary_directory_that_is_full(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither the store that is full, nor the model that is damaged."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(objects, "write_at", full)
    ran = export_model("verify", url, "--bytes", "--json")
    assert (ran.code, ran.error["error"], ran.out) == (1, "DiskFull", ""), ran.err
    assert "TMPDIR" in ran.error["hint"]
    assert tempfile.gettempdir() in ran.error["cause"]
