"""The file of `--ssl-config-file`: what is read, and what is said of one that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from exporter.errors import UsageError
from serving.credentials import server_credentials
from tests.support.certificates import Certified


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Certified:
    return Certified(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("verify", [False, True])
def test_a_file_that_tf_serving_reads(certified: Certified, tmp_path: Path, verify: bool) -> None:
    config = certified.config(tmp_path / "ssl.config", verify=verify)
    assert isinstance(server_credentials(config), grpc.ServerCredentials)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("server_key: 'x' server_cert: 'y'", "server_key and server_cert"),
        ("server_cert: 'y'", "server_key is empty"),
        ("server_key: 'SECRET", "line 1"),
        ("server_kee: 'SECRET'", "line 1"),
        ("{mismatch}", "KEY_VALUES_MISMATCH"),
        ("{no_ca}", "client_verify without custom_ca"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used(
    certified: Certified, tmp_path: Path, text: str | None, said: str
) -> None:
    file = tmp_path / "ssl.config"
    own, other = certified.server, certified.stranger
    pem = {path: json.dumps(path.read_text()) for path in (own.key, own.cert, other.cert)}
    if text == "{mismatch}":
        text = f"server_key: {pem[own.key]} server_cert: {pem[other.cert]}"
    if text == "{no_ca}":
        text = f"server_key: {pem[own.key]} server_cert: {pem[own.cert]} client_verify: true"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError) as caught:
        server_credentials(file)
    told = f"{caught.value.message} {caught.value.cause} {caught.value.hint}"
    assert said in told
    secrets = [*certified.server.key.read_text().splitlines()[1:-1], "SECRET"]
    assert not [secret for secret in secrets if secret in told]
