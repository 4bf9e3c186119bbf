"""TLS of a model server's gRPC port, as the file of TF Serving's `--ssl_config_file` says."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from exporter.errors import UsageError
from serving.credentials import require_key_pair
from serving.text_config import read_text_config

if TYPE_CHECKING:
    import grpc

_OPTION = "--ssl-config-file"


def server_credentials(path: Path) -> grpc.ServerCredentials:
    """What a port is opened with: the server's key and certificate, and whose clients are let in.

    Raises:
        UsageError: the file cannot be read, or what it holds cannot be used.
    """
    import grpc

    config = read_text_config(_OPTION, path, "SSLConfig", is_secret=True)
    _check_pair(path, config.server_key, config.server_cert)
    if config.custom_ca:
        _check_authorities(path, config.custom_ca)
    elif config.client_verify:
        _cannot_be_used(path, "client_verify without custom_ca: no client could be verified")
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
        reason = getattr(error, "reason", None) or str(error) or "no PEM"
        _cannot_be_used(path, f"server_key and server_cert: {reason}")


def _check_authorities(path: Path, pem: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=pem)
    except (ssl.SSLError, ValueError, TypeError) as error:  # TypeError: it is not ASCII
        _cannot_be_used(path, f"custom_ca: {getattr(error, 'reason', None) or 'no PEM'}")


@contextmanager
def _in_memory(text: str) -> Iterator[Path]:
    """A file for Python's ssl, which takes key pairs from files alone; a key must not lie in one on disk."""
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
        hint="write server_key, server_cert and custom_ca as PEM, with \\n for the ends of lines",
    )
