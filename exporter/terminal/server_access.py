"""The options by which a command reaches model servers over TLS, the same for all commands."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer
from msgspec import Struct

SYSTEM_CA = "system"
"""The value for gRPC's own certificate authorities, instead of a file."""


GROUP = "Reaching model servers over TLS"

_Option = partial(typer.Option, rich_help_panel=GROUP)


class ServerAccess(Struct, frozen=True):
    """Access to model servers: without TLS, unless a certificate authority is named.

    These are names of files. Their content is read when it is needed, and never part of a message.
    """

    grpc_ca: Annotated[
        str | None,
        _Option(
            metavar="FILE|system",
            help="Speak TLS with model servers whose certificate this authority (PEM) has signed.",
        ),
    ] = None
    grpc_cert: Annotated[
        str | None, _Option(metavar="FILE", help="Certificate (PEM) that a model server is shown.")
    ] = None
    grpc_key: Annotated[str | None, _Option(metavar="FILE", help="Its private key (PEM).")] = None
    grpc_name: Annotated[
        str | None,
        _Option(
            metavar="NAME",
            help="The name in the certificate of a model server, if it is not the address's host.",
        ),
    ] = None
    grpc_token_file: Annotated[
        str | None,
        _Option(
            metavar="FILE",
            help="Send this file's content as a bearer token with each call; it is read again each time.",
        ),
    ] = None


WITHOUT_TLS = ServerAccess()
