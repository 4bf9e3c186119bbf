"""TLS of an HTTP port.

A certificate is asked for, and not demanded: what may be seen without one is the application's decision
(`Request.is_certified`), for probes of an orchestrator show none. A certificate of another authority ends the
handshake.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from msgspec import Struct

from exporter.errors import UsageError
from exporter.local_paths import local_path
from serving.credentials import require_key_pair


class HttpTls(Struct, frozen=True):
    """Files of an HTTP port's certificate and key, and of the authority that clients' certificates are of."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @classmethod
    def of(cls, certificate: str | None, key: str | None, client_ca: str | None) -> HttpTls | None:
        """What `--tls-cert`, `--tls-key` and `--client-ca` say; None without them.

        Raises:
            UsageError: some do not go without another, or a file cannot be used.
        """
        if certificate is None and key is None and client_ca is None:
            return None
        if certificate is None or key is None:
            raise UsageError(
                "--tls-cert and --tls-key go together, and --client-ca needs them",
                hint="name the certificate and its key, both in PEM",
            )
        ca = None if client_ca is None else local_path("--client-ca", client_ca)
        found = cls(local_path("--tls-cert", certificate), local_path("--tls-key", key), ca)
        try:
            require_key_pair(found.certificate, found.key)
            found.context()
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise UsageError(
                "the agent's certificate, its key or the clients' authority cannot be used",
                cause=str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error),
                hint="name PEM files that this user may read, and a key that belongs to the certificate",
            ) from None
        return found

    def context(self) -> ssl.SSLContext:
        """For the server's side of connections."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certificate, self.key)
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_OPTIONAL
        return context
