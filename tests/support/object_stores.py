"""An S3 server of its own process on loopback: moto, which honours conditions as the real one does."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECRET = "S3cr3tOfTheTests"
_START_SECONDS = 60


@dataclass(frozen=True)
class Bucket:
    """A bucket, and the environment by which programs reach it."""

    name: str
    environment: Mapping[str, str]
    client: Any

    def url(self, path: str = "") -> str:
        return f"s3://{self.name}/{path}"

    def upload(self, directory: Path, path: str = "") -> None:
        """Every file below a directory."""
        for file in sorted(each for each in directory.rglob("*") if each.is_file()):
            key = "/".join(part for part in (path, file.relative_to(directory).as_posix()) if part)
            self.client.put_object(Bucket=self.name, Key=key, Body=file.read_bytes())

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=content)

    def keys(self, path: str = "") -> dict[str, bytes]:
        """Every object below a path."""
        found = self.client.list_objects_v2(Bucket=self.name, Prefix=path).get("Contents", ())
        return {
            each["Key"]: self.client.get_object(Bucket=self.name, Key=each["Key"])["Body"].read()
            for each in found
        }

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=key)


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of a server that has no buckets yet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _await(f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def new_bucket(address: str) -> Bucket:
    import boto3

    name = f"bucket-{secrets.token_hex(8)}"

    environment = {
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": address,
    }
    client = boto3.client(
        "s3",
        endpoint_url=address,
        aws_access_key_id="tests",
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=name)
    return Bucket(name, environment, client)


def _await(address: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{address}/moto-api/", timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
