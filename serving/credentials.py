"""TLS and tokens of gRPC, for both sides: a client's channel, and a model server's port.

A client's files are named in `ServerAccess`, a port's keys are in the file of TF Serving's
`--ssl_config_file`. Private keys and tokens are read from files and passed to gRPC; no error quotes them.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from exporter.errors import ExportError, UsageError
from exporter.storage.files import identity_of, read_regular
from exporter.storage.local_paths import local_path
from exporter.terminal.server_access import SYSTEM_CA, ServerAccess
from serving.text_config import read_text_config

if TYPE_CHECKING:
    import grpc

_OPTION = "--ssl-config-file"
_LARGEST_PEM = 4 << 20
_LONGEST_TOKEN = 16 << 10  # gRPC's hard limit for all metadata of a call


def open_channel(address: str, access: ServerAccess, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
    """Return a channel to a model server; it sends nothing before the first call.

    `address` is HOST:PORT or a name that gRPC resolves; `options` are gRPC's channel arguments. UsageError if
    options of `access` exclude each other, or a file of it cannot be used; LfsPointer if a file is a pointer
    of Git LFS.
    """
    import grpc

    credentials = channel_credentials(access)
    if credentials is None:
        return grpc.insecure_channel(address, options)
    if access.grpc_name is not None:
        options = [*options, ("grpc.ssl_target_name_override", access.grpc_name)]
    return grpc.secure_channel(address, credentials, options)


def channel_credentials(access: ServerAccess) -> grpc.ChannelCredentials | None:
    """Return the credentials of a client's channel; None without TLS.

    All files of `access` are read now, so that errors come early; a token's is read again for each call.

    Raises:
        UsageError: options exclude each other, or a file cannot be read or has other content.
        LfsPointer: a file is a pointer of Git LFS.
    """
    import grpc

    _require_complete(access)
    if access.grpc_ca is None:
        return None
    authorities = None if access.grpc_ca == SYSTEM_CA else _authorities(access.grpc_ca)
    key, certificate = _key_pair(access)
    credentials = grpc.ssl_channel_credentials(authorities, key, certificate)
    if access.grpc_token_file is None:
        return credentials
    file = access.grpc_token_file
    _token(file)
    calls = grpc.metadata_call_credentials(_authorization(file), name="token")  # type: ignore[arg-type]
    return grpc.composite_channel_credentials(credentials, calls)


def identity(access: ServerAccess) -> tuple[object, ...]:
    """Return a value that changes when the file of a certificate, key or authority is replaced.

    A missing file is not an error. The file of a token is left out: it is read for each call.
    """
    files = filter(None, (access.grpc_ca, access.grpc_cert, access.grpc_key))
    return tuple(identity_of(Path(file)) for file in files)


def _require_complete(access: ServerAccess) -> None:
    needs_tls = {
        "--grpc cert": access.grpc_cert,
        "--grpc key": access.grpc_key,
        "--grpc name": access.grpc_name,
        "--grpc token": access.grpc_token_file,
    }
    given = [option for option, value in needs_tls.items() if value is not None]
    if given and access.grpc_ca is None:
        raise UsageError(
            f"{' and '.join(given)} without --grpc ca",
            cause="certificates and tokens are sent over TLS only",
            hint=f"name the certificate authority: --grpc ca=FILE, or --grpc ca={SYSTEM_CA}",
        )
    if (access.grpc_cert is None) != (access.grpc_key is None):
        raise UsageError(
            "--grpc cert and --grpc key go together",
            cause="a certificate cannot be used without its key",
            hint="name both files, or none",
        )


def _authorities(file: str) -> bytes:
    pem = _read("--grpc ca", file, _LARGEST_PEM)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        _not_pem("--grpc ca", file, error)
    return pem


def _key_pair(access: ServerAccess) -> tuple[bytes | None, bytes | None]:
    if access.grpc_cert is None or access.grpc_key is None:
        return None, None
    certificate = _read("--grpc cert", access.grpc_cert, _LARGEST_PEM)
    key = _read("--grpc key", access.grpc_key, _LARGEST_PEM)
    try:
        require_key_pair(Path(access.grpc_cert), Path(access.grpc_key))
    except (ssl.SSLError, ValueError) as error:
        _not_pem("--grpc cert and --grpc key", f"{access.grpc_cert} and {access.grpc_key}", error)
    return key, certificate


def require_key_pair(certificate: Path, key: Path) -> None:
    """Raise OSError (SSLError included) or ValueError unless a certificate and its private key can be used.

    They must be readable and belong together; ValueError is for a key with a password.
    """
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key, _no_password)


def _no_password() -> NoReturn:
    raise ValueError("the key has a password")


def _authorization(file: str) -> Callable[[Any, Callable[..., None]], None]:
    """Return the plugin by which gRPC gets the token for each call; it reads the file each time.

    So a new token is used at once. A call fails if the file has no token.
    """

    def authorize(context: Any, callback: Callable[..., None]) -> None:
        try:
            metadata = (("authorization", f"Bearer {_token(file)}"),)
        except ExportError as error:
            callback((), error)
        else:
            callback(metadata, None)

    return authorize


def _token(file: str) -> str:
    data = _read("--grpc token", file, _LONGEST_TOKEN).strip()
    if not data or not data.isascii() or any(byte <= ord(" ") for byte in data):
        raise UsageError(
            f"--grpc token={file} does not hold a token",
            cause="expected one word of ASCII characters",
            hint="write only the token into the file",
        )
    return data.decode("ascii")


def _read(option: str, file: str, most_bytes: int) -> bytes:
    try:
        return read_regular(local_path(option, file), most_bytes)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{option}={file} cannot be read",
            cause=getattr(error, "strerror", None) or str(error),
            hint="name a file that this user can read",
        ) from error


def _not_pem(option: str, file: str, error: Exception) -> NoReturn:
    reason = getattr(error, "reason", None) or str(error) or "it is not PEM"
    raise UsageError(
        f"{option}: {file} cannot be used", cause=str(reason), hint="name PEM files that belong together"
    ) from None


def server_credentials(path: Path) -> grpc.ServerCredentials:
    """Return the credentials of a port: the server's key and certificate, and the authority of its clients.

    They are read from the file `path`, an `SSLConfig` in text form. With its `client_verify`, clients must
    present a certificate that the authority `custom_ca` has signed; otherwise none is requested. UsageError
    if the file, or a key or certificate in it, cannot be used; LfsPointer if it is a pointer of Git LFS.
    """
    import grpc

    config = read_text_config(_OPTION, path, "SSLConfig", is_secret=True)
    _check_pair(path, config.server_key, config.server_cert)
    if config.custom_ca:
        _check_authorities(path, config.custom_ca)
    elif config.client_verify:
        _cannot_be_used(path, "client_verify without custom_ca: the server could not verify any client")
    return grpc.ssl_server_credentials(
        [(config.server_key.encode(), config.server_cert.encode())],
        root_certificates=config.custom_ca.encode() or None,
        require_client_auth=config.client_verify,
    )


def _check_pair(path: Path, key: str, certificate: str) -> None:
    if not key or not certificate:
        _cannot_be_used(path, f"{'server_key' if not key else 'server_cert'} is empty")
    try:
        with _in_memory(certificate) as certificate_file, _in_memory(key) as key_file:
            require_key_pair(certificate_file, key_file)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error) or "it is not PEM"
        _cannot_be_used(path, f"server_key and server_cert: {reason}")


def _check_authorities(path: Path, pem: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=pem)
    except (ssl.SSLError, ValueError, TypeError) as error:  # TypeError: it is not ASCII
        _cannot_be_used(path, f"custom_ca: {getattr(error, 'reason', None) or 'no PEM'}")


@contextmanager
def _in_memory(text: str) -> Iterator[Path]:
    """Yield the path of a file in memory with this text, which is gone after the block.

    Python's ssl reads key pairs only from files, and the key must not be on a disk.
    """
    descriptor = os.memfd_create("pem")
    try:
        os.write(descriptor, text.encode())
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _cannot_be_used(path: Path, cause: str) -> NoReturn:
    raise UsageError(
        f"{_OPTION} {path} cannot be used",
        cause=cause,
        hint="write server_key, server_cert and custom_ca as PEM, with \\n for each end of line",
    )
