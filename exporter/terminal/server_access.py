"""The option by which a command reaches model servers over TLS, the same for all commands."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from exporter.options import in_parts
from exporter.options.words import Part, text_of

SYSTEM_CA = "system"
"""The value for gRPC's own certificate authorities, instead of a file."""


GROUP = "Reaching model servers over TLS"
_WORDS = {
    f"ca=FILE|{SYSTEM_CA}": Part(
        "grpc_ca", "speak TLS with servers whose certificate this authority (PEM) has signed", text_of
    ),
    "cert=FILE": Part("grpc_cert", "the certificate (PEM) that a server is shown", text_of),
    "key=FILE": Part("grpc_key", "its private key (PEM)", text_of),
    "name=NAME": Part("grpc_name", "the name in a server's certificate, if it is not its host", text_of),
    "token=FILE": Part(
        "grpc_token_file",
        "send this file's content as a bearer token with each call; it is read each time",
        text_of,
    ),
}


class ServerAccess(Struct, frozen=True):
    """Access to model servers: without TLS, unless a certificate authority is named.

    These are names of files. Their content is read when it is needed, and never part of a message.
    """

    grpc_ca: Annotated[
        str | None,
        in_parts(_WORDS, "How model servers are reached", heading=GROUP, name="--grpc", metavar="WORD=FILE"),
    ] = None
    grpc_cert: str | None = None
    grpc_key: str | None = None
    grpc_name: str | None = None
    grpc_token_file: str | None = None


WITHOUT_TLS = ServerAccess()
