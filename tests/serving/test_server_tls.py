"""The file of `--ssl-config-file`: what is read, and what is said of one that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from exporter.errors import CallFailed, ExportError, UsageError
from exporter.terminal.server_access import ServerAccess
from serving.client import ModelClient
from serving.credentials import _authorization, server_credentials
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


LFS_POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1234\n"


@pytest.mark.parametrize("file", ["ca", "cert", "key"])
@pytest.mark.parametrize("content", [LFS_POINTER, "no certificate", None], ids=["pointer", "text", "gone"])
def test_files_that_become_unusable_leave_a_call_its_own_error(
    certified: Certified, tmp_path: Path, file: str, content: str | None
) -> None:
    own = {"ca": certified.ca, "cert": certified.client.cert, "key": certified.client.key}
    copies = {name: tmp_path / name for name in own}
    for name, path in own.items():
        copies[name].write_bytes(path.read_bytes())
    access = ServerAccess(**{f"grpc_{name}": str(path) for name, path in copies.items()})
    with ModelClient("127.0.0.1:1", "ranker", access=access) as client:
        copies[file].unlink()
        if content is not None:
            copies[file].write_text(content)
        with pytest.raises(CallFailed) as caught:
            client.status()
    assert caught.value.code == "UNAVAILABLE"


@pytest.mark.parametrize("content", [LFS_POINTER, "two words", None], ids=["pointer", "words", "gone"])
def test_a_token_that_becomes_unusable_fails_calls_without_a_traceback(
    tmp_path: Path, content: str | None
) -> None:
    file, told = tmp_path / "token", []
    if content is not None:
        file.write_text(content)
    _authorization(str(file))(None, lambda *answer: told.append(answer))
    ((metadata, error),) = told
    assert (metadata, isinstance(error, ExportError)) == ((), True)
