"""Credentials of a role: each way to them that the guide names, renewed in time; and what is said without."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.storage.objects import ObjectReader, missing_credentials
from exporter.storage.url import Url
from tests.support.certificates import Authority
from tests.support.cloud_roles import TOKEN, role_server
from tests.support.commands import export_model
from tests.support.http_proxy import Forwarding, serving
from tests.support.object_stores import Bucket


@pytest.fixture
def keys(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The access keys of requests that reached the bucket, which none in the environment leads to."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    found: list[str] = []

    class Noting(Forwarding):
        target = bucket.environment["AWS_ENDPOINT_URL"]

        def forward(self) -> None:
            found.extend(re.findall(r"Credential=(\w+)/", self.headers["Authorization"]))
            self.answer(self.ask())

    with serving(Noting) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        yield found


@pytest.mark.parametrize("how", ["token", "container", "machine"])
def test_a_role(
    how: str, keys: list[str], bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    authority = Authority(tmp_path, "amazon") if how == "token" else None
    pair = authority.sign("sts", "IP:127.0.0.1") if authority else None
    with role_server(pair) as (address, roles):
        environment = {
            "token": {
                "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/exporter",
                "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
                "AWS_ENDPOINT_URL_STS": address,
                "SSL_CERT_FILE": str(authority.own.cert) if authority else "",
            },
            "container": {
                "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{address}/v1/credentials",
                "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(token),
            },
            "machine": {"AWS_METADATA_ENDPOINT": address},
        }[how]
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        url = bucket.url("m")
        store = ObjectReader(Url("s3", bucket.name, "m"))
        for _ in range(3):
            assert store.look("m/x") is None
        assert {*keys} == {"GIVEN1"}
        roles.seconds = 60.0  # renewed when five minutes are left, so at each request
        store = ObjectReader(Url("s3", bucket.name, "m"))
        for _ in range(3):
            store.look("m/x")
            time.sleep(0.2)
        assert len({*keys}) >= 3, "a watch goes on beyond the end of its first credentials"
        roles.is_there = False
        ran = export_model("inspect", url)
    assert ran.code == 3
    assert f"{url}/head.json: there are no credentials" in ran.err
    assert TOKEN not in ran.err
    named = {
        "token": "AWS_ROLE_ARN with",
        "container": "FULL_URI with",
        "machine": "none of AWS_ACCESS_KEY_ID",
    }
    assert named[how] in ran.err


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ("gs", "Error performing token request: Error performing GET http://metadata in 1s - 404 Not Found"),
        ("az", "Error performing token request: Error performing GET http://127.0.0.1/msi in 1s"),
        ("s3", "Failed to read token file '/nowhere': No such file"),
        ("s3", "Error performing GET http://169.254.170.2/v2/credentials in 1s"),
    ],
)
def test_who_gives_none(scheme: str, said: str) -> None:
    assert missing_credentials(scheme, said).endswith("gives none")
    assert not missing_credentials(scheme, f"Error performing GET http://{scheme}/bucket/token in 1s")


def test_a_removal_that_is_refused_is_no_lack_of_credentials() -> None:
    """Azure's is a POST to the store, whose URL is not told where it holds a signature."""
    said = "Error performing bulk delete request: Error performing POST REDACTED in 1s - 403 Forbidden"
    assert not missing_credentials("az", said)
