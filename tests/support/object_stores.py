"""Object stores of their own processes on loopback: S3 (moto), Google's (our stand-in), Azure's (Azurite).

They honour conditions as the real ones do.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any

from tests.support.certificates import Authority
from tests.support.gcs_server import HOSTS

SECRET = "S3cr3tOfTheTests"
AZURITE = Path(os.environ.get("AZURITE", "build/azurite"))
"""Where `npm install azurite` was run, as `make stores` does."""
BASE = "models/ranker"
"""Where tests put a model in a bucket."""
_START_SECONDS = 60


@dataclass(frozen=True)
class Bucket:
    """A bucket, and the environment by which programs reach it."""

    name: str
    environment: Mapping[str, str]
    client: Any = field(repr=False)
    scheme: str = "s3"

    def url(self, path: str = "") -> str:
        return f"{self.scheme}://{self.name}/{path}"

    def upload(self, directory: Path, path: str = "") -> None:
        """Every file below a directory."""
        for file in sorted(each for each in directory.rglob("*") if each.is_file()):
            key = "/".join(part for part in (path, file.relative_to(directory).as_posix()) if part)
            self.put(key, file.read_bytes())

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=content)

    def names(self) -> list[str]:
        """The keys of all objects, while they may change."""
        found = self.client.list_objects_v2(Bucket=self.name).get("Contents", ())
        return [each["Key"] for each in found]

    def keys(self, path: str = "") -> dict[str, bytes]:
        """Every object below a path."""
        found = self.client.list_objects_v2(Bucket=self.name, Prefix=path).get("Contents", ())
        return {
            each["Key"]: self.client.get_object(Bucket=self.name, Key=each["Key"])["Body"].read()
            for each in found
        }

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=key)


@dataclass(frozen=True)
class OtherBucket(Bucket):
    """A bucket that is not of S3, or a container: `client` is obstore's, made in its environment."""

    def put(self, key: str, content: bytes) -> None:
        self.client.put(key, content, use_multipart=False)

    def names(self, path: str = "") -> list[str]:
        found = [each["path"] for batch in self.client.list() for each in batch]
        return [key for key in found if key.startswith(path)]

    def keys(self, path: str = "") -> dict[str, bytes]:
        return {key: bytes(self.client.get(key).bytes()) for key in self.names(path)}

    def delete(self, key: str) -> None:
        self.client.delete(key)


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of a server that has no buckets yet."""
    port = _free_port()
    command = [sys.executable, "-m", "tests.support.s3_emulator", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _await(f"http://127.0.0.1:{port}/moto-api/")
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


@contextmanager
def google_server(directory: Path) -> Iterator[dict[str, str]]:
    """The environment in which `gs://` leads to a stand-in: of obstore, and of TensorFlow's file system."""
    authority = Authority(directory, "google")
    pair = authority.sign("googleapis", ",".join(f"DNS:{host}" for host in HOSTS))
    key = subprocess.run(
        ["openssl", "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    account = directory / "service-account.json"
    who = {"type": "service_account", "client_email": "tests@example.com", "client_id": "1"}
    what = {"private_key_id": SECRET, "private_key": key, "token_uri": f"https://{HOSTS[-1]}/token"}
    account.write_text(json.dumps(who | what))
    command = [
        sys.executable,
        "-m",
        "tests.support.gcs_server",
        pair.cert,
        pair.key,
        SECRET,
        directory / "log",
    ]
    with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            address = f"http://127.0.0.1:{int(process.stdout.readline())}"
            yield {
                "https_proxy": address,
                "no_proxy": "",
                "SSL_CERT_FILE": str(authority.own.cert),
                "CURL_CA_BUNDLE": str(authority.own.cert),
                "GOOGLE_APPLICATION_CREDENTIALS": str(account),
                "NO_GCE_CHECK": "true",
            }
        finally:
            process.kill()


def google_bucket(environment: Mapping[str, str], name: str | None = None) -> Bucket:
    """A new bucket: any name is one. The environment is set already."""
    from obstore.store import GCSStore

    name = name or f"bucket-{secrets.token_hex(8)}"
    return OtherBucket(name, environment, GCSStore(name), "gs")


@contextmanager
def azure_server(directory: Path) -> Iterator[dict[str, str]]:
    """The environment in which `az://` leads to Azurite."""
    port, account = _free_port(), "tests"
    key = base64.b64encode(SECRET.encode()).decode()
    program = AZURITE / "node_modules" / ".bin" / "azurite-blob"
    quiet = ["--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    with subprocess.Popen(
        [*map(str, [program, *quiet, "--location", directory, "--blobPort", port])],
        env={**os.environ, "AZURITE_ACCOUNTS": f"{account}:{key}"},
        stdout=subprocess.DEVNULL,
    ) as process:
        try:
            _await(f"http://127.0.0.1:{port}")
            yield {
                "AZURE_STORAGE_ACCOUNT_NAME": account,
                "AZURE_STORAGE_ACCOUNT_KEY": key,
                "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{account}",
            }
        finally:
            process.terminate()


def azure_container(environment: Mapping[str, str]) -> Bucket:
    """A new container. The environment is set already."""
    from obstore.store import AzureStore

    name, account = f"box-{secrets.token_hex(8)}", environment["AZURE_STORAGE_ACCOUNT_NAME"]
    heads = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "".join(f"{key}:{value}\n" for key, value in heads.items())
    text = "PUT" + 12 * "\n" + signed + f"/{account}/{account}/{name}\nrestype:container"
    key = base64.b64decode(environment["AZURE_STORAGE_ACCOUNT_KEY"])
    signature = base64.b64encode(hmac.new(key, text.encode(), hashlib.sha256).digest()).decode()
    asked = urllib.request.Request(
        f"{environment['AZURE_STORAGE_ENDPOINT']}/{name}?restype=container",
        headers={**heads, "Authorization": f"SharedKey {account}:{signature}", "Content-Length": "0"},
        method="PUT",
    )
    urllib.request.urlopen(asked, timeout=30).close()
    return OtherBucket(name, environment, AzureStore(name, client_options={"allow_http": True}), "az")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await(address: str) -> None:
    """Until a server answers, whatever it says."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
