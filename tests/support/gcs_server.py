"""A stand-in for Google's object store, as a process on loopback: what TensorFlow and obstore ask of it.

It is a proxy that answers by itself: who has `https_proxy` set to it asks for `storage.googleapis.com`, and
meets a certificate signed by the tests' own authority. Of the JSON interface it has what TensorFlow's `gs://`
file system reads; of the XML one what obstore reads and writes, with
generations and conditions. Service accounts get a token, without which nothing is answered.

A bucket whose name begins with `careless` ignores conditions.

    python -m tests.support.gcs_server CERTIFICATE KEY TOKEN LOG     prints its port, and logs each request
"""

from __future__ import annotations

import hashlib
import json
import ssl
import sys
import threading
from datetime import datetime, timezone
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from time import time
from typing import IO, ClassVar, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree as Xml

from tests.support.http_proxy import ThreadedServer

HOSTS = ("storage.googleapis.com", "www.googleapis.com", "oauth2.googleapis.com")


class Stored(NamedTuple):
    content: bytes
    generation: int
    modified: float

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.content + str(self.generation).encode()).hexdigest()}"'

    @property
    def updated(self) -> str:
        return formatdate(self.modified, usegmt=True)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[tuple[str, str], Stored]] = {}
    uploads: ClassVar[dict[str, dict[int, bytes]]] = {}
    lock = threading.Lock()
    generations = 0
    tls: ssl.SSLContext
    token: str
    log: IO[str]

    def do_CONNECT(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.connection = self.tls.wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb")
        self.close_connection = False

    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        print(self.command, self.path, self.headers.get("Range", ""), file=self.log, flush=True)
        address = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(address.query, True).items()}
        parts = [unquote(part) for part in address.path.strip("/").split("/", 5)]
        if parts[-1] == "token":
            token = {"access_token": self.token, "token_type": "Bearer", "expires_in": 3600}
            self.answer(200, json.dumps(token).encode())
        elif not self.is_known(self.headers.get("Authorization", "")):
            self.answer(401)
        elif parts[:3] == ["storage", "v1", "b"]:
            self.json(parts[3], parts[5] if len(parts) > 5 else None, query)
        else:
            bucket, _, key = unquote(address.path).lstrip("/").partition("/")
            self.xml(bucket, key, query, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve

    def is_known(self, said: str) -> bool:
        """True of our token, and of the signed claim that obstore sends without asking for one."""
        return said == f"Bearer {self.token}" or (said.startswith("Bearer ey") and said.count(".") == 2)

    def json(self, bucket: str, key: str | None, query: dict[str, str]) -> None:
        """What TensorFlow asks: what is there, and of what size."""
        if key is None:
            names, prefixes, rest = self.listed(bucket, query, query.get("pageToken", ""))
            found = {
                "items": [{"name": name} for name in names],
                "prefixes": prefixes,
                **({"nextPageToken": rest} if rest else {}),
            }
            self.answer(200, json.dumps(found).encode())
        elif stored := self.objects.get((bucket, key)):
            seconds = f"{stored.modified % 60:06.3f}"
            self.answer(
                200,
                json.dumps(
                    {
                        "size": str(len(stored.content)),
                        "generation": str(stored.generation),
                        "updated": f"2026-01-01T00:00:{seconds}Z",
                    }
                ).encode(),
            )
        else:
            self.answer(404)

    def listed(
        self, bucket: str, query: dict[str, str], after: str
    ) -> tuple[list[str], list[str], str | None]:
        """Names, directories if a delimiter is given, and where the next page begins."""
        prefix, delimiter, names, directories = query.get("prefix", ""), query.get("delimiter"), [], set()
        with self.lock:
            keys = sorted(key for at, key in self.objects if at == bucket and key.startswith(prefix))
        most = int(query.get("maxResults") or query.get("max-keys") or 1000)
        keys = [key for key in keys if key > after]
        for key in keys[:most]:
            head, found, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else ("", "", "")
            directories.add(f"{prefix}{head}{found}") if found else names.append(key)
        return names, sorted(directories), keys[most - 1] if len(keys) > most else None

    def xml(self, bucket: str, key: str, query: dict[str, str], body: bytes) -> None:
        """What obstore asks."""
        if not key:
            after = query.get("continuation-token") or query.get("start-after", "")
            names, prefixes, rest = self.listed(bucket, query, after)
            found = Xml.Element("ListBucketResult")
            for name in names:
                stored, entry = self.objects[bucket, name], Xml.SubElement(found, "Contents")
                for field, text in {
                    "Key": name,
                    "ETag": stored.etag,
                    "Size": str(len(stored.content)),
                    "LastModified": datetime.fromtimestamp(stored.modified, timezone.utc).isoformat(),
                }.items():
                    Xml.SubElement(entry, field).text = text
            for name in prefixes:
                Xml.SubElement(Xml.SubElement(found, "CommonPrefixes"), "Prefix").text = name
            if rest:
                Xml.SubElement(found, "NextContinuationToken").text = rest
            self.answer(200, Xml.tostring(found))
        elif self.command == "POST" and "uploads" in query:
            name = f"upload-{time()}-{threading.get_ident()}"
            self.uploads[name] = {}
            self.answer(200, f"<R><Bucket>b</Bucket><Key>k</Key><UploadId>{name}</UploadId></R>".encode())
        elif self.command == "PUT" and "partNumber" in query:
            self.uploads[query["uploadId"]][int(query["partNumber"])] = body
            self.answer(200, headers={"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
        elif self.command == "POST":
            parts = self.uploads.pop(query["uploadId"])
            stored = self.put(bucket, key, b"".join(parts[number] for number in sorted(parts)))
            assert stored
            self.answer(200, f"<R><ETag>{stored.etag}</ETag></R>".encode(), self.heads(stored))
        elif self.command == "PUT" and self.source() is not None and self.source() not in self.objects:
            self.answer(404)
        elif self.command == "PUT":
            if (source := self.source()) is not None:
                body = self.objects[source].content
            new = self.put(bucket, key, body, self.headers.get("x-goog-if-generation-match"))
            self.answer(200, headers=self.heads(new)) if new else self.answer(412)
        elif self.command == "DELETE":
            with self.lock:
                self.answer(204 if self.objects.pop((bucket, key), None) else 404)
        else:
            self.get(self.objects.get((bucket, key)))

    def source(self) -> tuple[str, str] | None:
        """What is to be copied."""
        bucket, _, key = unquote(self.headers.get("x-goog-copy-source", "")).lstrip("/").partition("/")
        return (bucket, key) if key else None

    def get(self, stored: Stored | None) -> None:
        if stored is None:
            return self.answer(404)
        if self.headers.get("If-Match", stored.etag) != stored.etag:
            return self.answer(412)
        size, heads = len(stored.content), self.heads(stored)
        if not (asked := self.headers.get("Range")):
            return self.answer(200, stored.content, heads)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last or size), size - 1) + 1
        if start >= size:
            return self.answer(416)
        heads["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        return self.answer(206, stored.content[start:stop], heads)

    def put(self, bucket: str, key: str, content: bytes, condition: str | None = None) -> Stored | None:
        with self.lock:
            there = self.objects.get((bucket, key))
            heeds = condition is not None and not bucket.startswith("careless")
            if heeds and int(condition or 0) != (there.generation if there else 0):
                return None
            Handler.generations += 1
            new = self.objects[bucket, key] = Stored(content, 1000 + self.generations, time())
            return new

    def heads(self, stored: Stored) -> dict[str, str]:
        return {
            "ETag": stored.etag,
            "x-goog-generation": str(stored.generation),
            "Last-Modified": stored.updated,
        }

    def answer(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.wfile.flush()

    def log_message(self, *rest: object) -> None:
        pass


def main(certificate: str, key: str, token: str, log: str) -> None:
    Handler.log = Path(log).open("w")  # noqa: SIM115  as long as the process lives
    Handler.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    Handler.tls.load_cert_chain(certificate, key)
    Handler.token = token
    server = ThreadedServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
