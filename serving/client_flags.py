"""What commands that ask a model server have in common."""

from __future__ import annotations

from typing import Annotated

import typer

from serving.address import with_port

Address = Annotated[
    str,
    typer.Argument(
        metavar="HOST:PORT",
        help="gRPC address of a model server; the port is 8500 if left out.",
        parser=with_port,
    ),
]
ModelName = Annotated[str, typer.Option(metavar="NAME", help="The model's name there.")]
Deadline = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.001, help="Fail when a call takes longer than this.")
]
