"""How commands reach model servers: TLS, client certificates, tokens, and what is said when it fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from exporter.cli.notify import Servers
from exporter.errors import CallFailed, UsageError
from exporter.pipeline import doctor
from exporter.terminal.server_access import ServerAccess
from serving.cli import app
from serving.client import ModelClient
from tests.support.certificates import Certified, Pair
from tests.support.commands import export_model, run_app

TOKEN = "s3cr3t.t0ken"
DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Certified:
    return Certified(tmp_path_factory.mktemp("certificates"))


@contextmanager
def listening(
    world: Certified, own: Pair, *, verify: bool = False, token: str | None = None
) -> Iterator[str]:
    """A server of the real protocol that knows one version, and wants a token if one is given."""
    from tensorflow_serving.apis import get_model_status_pb2, model_service_pb2_grpc

    class Service(model_service_pb2_grpc.ModelServiceServicer):
        def GetModelStatus(self, request: Any, context: Any) -> Any:
            sent = dict(context.invocation_metadata()).get("authorization")
            if token is not None and sent != f"Bearer {token}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid token")
            answer = get_model_status_pb2.GetModelStatusResponse()
            answer.model_version_status.add(version=7, state=30)
            return answer

    server = grpc.server(ThreadPoolExecutor(2))
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(Service(), server)
    pair = (own.key.read_bytes(), own.cert.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], world.ca.read_bytes() if verify else None, verify)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def versions(address: str, **files: Any) -> list[int]:
    access = ServerAccess(**{name: str(value) for name, value in files.items()})
    with ModelClient(address, "ranker", deadline_s=DEADLINE_S, access=access) as client:
        return [status.version for status in client.status()]


def refused(address: str, **files: Any) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        versions(address, **files)
    return caught.value


def test_the_authority_alone(world: Certified) -> None:
    with listening(world, world.server) as address:
        assert versions(address, grpc_ca=world.ca) == [7]


def test_another_name_in_the_certificate(world: Certified) -> None:
    with listening(world, world.elsewhere) as address:
        assert versions(address, grpc_ca=world.ca, grpc_name="elsewhere") == [7]
        error = refused(address, grpc_ca=world.ca)
    assert "do not agree on TLS" in error.message
    assert "Hostname Verification" in str(error.cause)
    assert "--grpc name" in str(error.hint)


def test_both_show_certificates(world: Certified) -> None:
    mine = {"grpc_cert": world.client.cert, "grpc_key": world.client.key}
    strangers = {"grpc_cert": world.stranger.cert, "grpc_key": world.stranger.key}
    with listening(world, world.server, verify=True) as address:
        assert versions(address, grpc_ca=world.ca, **mine) == [7]
        for files in ({}, strangers):
            error = refused(address, grpc_ca=world.ca, **files)
            assert error.code == "UNAVAILABLE"


@pytest.mark.parametrize("authority", ["other_ca", "system"])
def test_an_authority_that_did_not_sign(world: Certified, authority: str) -> None:
    file = "system" if authority == "system" else getattr(world, authority)
    with listening(world, world.server) as address:
        error = refused(address, grpc_ca=file)
    assert "do not agree on TLS" in error.message
    assert "CERTIFICATE_VERIFY_FAILED" in str(error.cause)


def test_without_tls_to_a_server_with_it(world: Certified) -> None:
    with listening(world, world.server) as address:
        error = refused(address)
    assert error.code == "UNAVAILABLE"
    assert "--grpc ca" in str(error.hint)


def test_a_token_goes_with_each_call_and_is_read_anew(world: Certified, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    with listening(world, world.server, token=TOKEN) as address:
        access = ServerAccess(grpc_ca=str(world.ca), grpc_token_file=str(file))
        with ModelClient(address, "ranker", deadline_s=DEADLINE_S, access=access) as client:
            assert len(client.status()) == 1
            file.write_text("another")
            with pytest.raises(CallFailed) as caught:
                client.status()
            assert caught.value.code == "UNAUTHENTICATED"
            assert "--grpc token" in str(caught.value.hint)
            file.unlink()
            with pytest.raises(CallFailed) as caught:
                client.status()
            assert "cannot be read" in str(caught.value.cause)
            file.write_text(TOKEN)
            assert len(client.status()) == 1, "the next call goes on with the file as it is"
    assert TOKEN not in repr(access)


def test_certificates_are_replaced_while_it_runs(world: Certified, tmp_path: Path) -> None:
    """Those that it began with have expired, so to say: the server does not take them any more."""
    own = Pair(tmp_path / "own.pem", tmp_path / "own.key")
    own.cert.write_bytes(world.stranger.cert.read_bytes())
    own.key.write_bytes(world.stranger.key.read_bytes())
    access = ServerAccess(grpc_ca=str(world.ca), grpc_cert=str(own.cert), grpc_key=str(own.key))
    with (
        listening(world, world.server, verify=True) as address,
        ModelClient(address, "ranker", deadline_s=DEADLINE_S, access=access) as client,
    ):
        with pytest.raises(CallFailed):
            client.status()
        own.cert.write_bytes(world.client.cert.read_bytes())
        with pytest.raises(CallFailed):  # the key is not there yet
            client.status()
        own.key.write_bytes(world.client.key.read_bytes())
        with pytest.raises(CallFailed):  # by which it notices
            client.status()
        assert [status.version for status in client.status()] == [7]


BAD: list[tuple[dict[str, str], str]] = [
    ({"grpc_token_file": "token"}, "--grpc token without --grpc ca"),
    ({"grpc_cert": "client.pem", "grpc_key": "client.key"}, "--grpc cert and --grpc key without --grpc ca"),
    ({"grpc_name": "n"}, "--grpc name without --grpc ca"),
    ({"grpc_ca": "ca.pem", "grpc_cert": "client.pem"}, "go together"),
    ({"grpc_ca": "ca.pem", "grpc_key": "client.key"}, "go together"),
    ({"grpc_ca": "missing.pem"}, "--grpc ca=missing.pem cannot be read"),
    ({"grpc_ca": "token"}, "--grpc ca: token cannot be used"),
    ({"grpc_ca": "."}, "--grpc ca=. cannot be read"),
    ({"grpc_ca": "ca.pem", "grpc_cert": "client.pem", "grpc_key": "stranger.key"}, "cannot be used"),
    ({"grpc_ca": "ca.pem", "grpc_cert": "client.key", "grpc_key": "client.pem"}, "cannot be used"),
    ({"grpc_ca": "ca.pem", "grpc_token_file": "empty"}, "does not hold a token"),
    ({"grpc_ca": "ca.pem", "grpc_token_file": "lines"}, "does not hold a token"),
]


@pytest.mark.parametrize(("files", "text"), BAD)
def test_files_that_cannot_be_used(
    world: Certified, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    contents = {
        "ca.pem": world.ca.read_text(),
        "client.pem": world.client.cert.read_text(),
        "client.key": world.client.key.read_text(),
        "stranger.key": world.stranger.key.read_text(),
        "token": TOKEN,
        "empty": " \n",
        "lines": f"{TOKEN}\nx-other: header",
    }
    for name, content in contents.items():
        Path(name).write_text(content)
    with pytest.raises(UsageError) as caught:
        ModelClient("127.0.0.1:1", "ranker", access=ServerAccess(**files))
    said = f"{caught.value.message} {caught.value.cause} {caught.value.hint}"
    assert text in said
    secrets = [TOKEN, *(line for line in contents["client.key"].splitlines() if "-----" not in line)]
    assert not [secret for secret in secrets if secret in said]


def test_a_key_with_a_password_does_not_ask_for_it(world: Certified, tmp_path: Path) -> None:
    import subprocess

    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-in", world.client.key, "-out", locked, "-passout", "pass:open"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    files = {"grpc_ca": str(world.ca), "grpc_cert": str(world.client.cert), "grpc_key": str(locked)}
    with pytest.raises(UsageError) as caught:
        ModelClient("127.0.0.1:1", "ranker", access=ServerAccess(**files))
    assert caught.value.cause == "the key has a password"


def test_every_command_that_asks_servers_has_the_same_options() -> None:
    options = {"--grpc", "ca=FILE|system:", "cert=FILE:", "key=FILE:", "name=NAME:", "token=FILE:"}
    helps = [run_app(app, command, "--help").out for command in ("status", "update", "reload", "predict")]
    helps += [run_app(app, "agent", "--help-all").out]
    helps += [export_model("--help-all").out, export_model("doctor", "--help").out]
    for text in helps:
        assert options <= set(text.split())


def test_a_command_over_tls(world: Certified, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    with listening(world, world.server, token=TOKEN) as address:
        files = ("--grpc", f"ca={world.ca}", "--grpc", f"token={token}")
        done = run_app(app, "status", address, "--model-name", "ranker", *files, "--json")
        assert [version["version"] for version in json.loads(done.out)["versions"]] == [7]
        without = run_app(app, "status", address, "--model-name", "ranker", "--grpc", f"ca={world.ca}")
    assert without.code == 7
    assert "UNAUTHENTICATED" in without.err
    assert TOKEN not in done.out + done.err + without.err


def test_whom_to_notify_is_checked_before_anything_is_published() -> None:
    with pytest.raises(UsageError, match="goes with --notify"):
        Servers((), ServerAccess(grpc_ca="ca.pem")).check()
    with pytest.raises(UsageError, match="cannot be read"):
        Servers(("127.0.0.1:1",), ServerAccess(grpc_ca="missing.pem")).check()
    Servers(("127.0.0.1:1",)).check()


def test_doctor_refuses_files_that_cannot_be_used() -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        doctor.ask("127.0.0.1:1", "ranker", DEADLINE_S, ServerAccess(grpc_ca="missing.pem"))
