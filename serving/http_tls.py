"""TLS of an HTTP port, and a bound on how long one request may keep a thread.

The handshake happens when the first bytes are read, by a thread that works on requests: a client that
connects and says nothing keeps nobody waiting. A certificate is asked for, and not demanded: what may be
seen without one is the application's decision (`environ["SSL_CLIENT_VERIFY"]`), for probes of an
orchestrator show none. A certificate of another authority ends the handshake.
"""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from exporter.errors import UsageError
from exporter.local_paths import local_path
from serving.credentials import require_key_pair

CLIENT_VERIFY = "SSL_CLIENT_VERIFY"
"""In the environment of a request: `SUCCESS` if the client showed a certificate that the authority signed."""
VERIFIED = "SUCCESS"


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


def secure(server: Any, tls: HttpTls) -> None:
    """Have a cheroot server speak TLS, before it is prepared."""
    from cheroot import wsgi
    from cheroot.makefile import MakeFile

    context = tls.context()

    class Adapter:
        """What cheroot asks of an adapter; its own does the handshake in the thread that accepts."""

        makefile = staticmethod(MakeFile)

        def bind(self, listening: socket.socket) -> socket.socket:
            return listening

        def wrap(self, accepted: socket.socket) -> tuple[ssl.SSLSocket, dict[str, str]]:
            wrapped = context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
            return wrapped, {"wsgi.url_scheme": "https", "HTTPS": "on"}

    class Gateway(wsgi.Gateway_10):
        """Says whether the client has shown a certificate; by now the handshake is over."""

        def get_environ(self) -> Any:
            found = super().get_environ()  # type: ignore[no-untyped-call]  # cheroot has no types here
            connection = self.req.conn.socket
            is_shown = isinstance(connection, ssl.SSLSocket) and bool(connection.getpeercert())
            found[CLIENT_VERIFY] = VERIFIED if is_shown else "NONE"
            return found

    server.ssl_adapter, server.gateway = Adapter(), Gateway


def bound(server: Any, seconds: float) -> None:
    """Cut connections whose request is not read and answered in time: a client may send a byte a minute."""

    class Connection(server.ConnectionClass):  # type: ignore[misc]  # cheroot is untyped here
        def communicate(self) -> Any:
            timer = threading.Timer(seconds, self._cut)
            timer.daemon = True
            timer.start()
            try:
                return super().communicate()
            finally:
                timer.cancel()

        def _cut(self) -> None:
            with suppress(OSError):
                socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    server.ConnectionClass = Connection
