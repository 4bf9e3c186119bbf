"""How a model server is reached beside its gRPC port: REST, metrics, TLS; and how it ends. One declaration of
each option, for the command line and for Python.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct

from exporter.local_paths import path_parser

GROUP = "REST, metrics, TLS"

_Option = partial(typer.Option, rich_help_panel=GROUP)


class NetworkOptions(Struct, frozen=True, kw_only=True):
    """TF Serving's options, as far as it has them; gRPC alone by default."""

    rest_api_port: Annotated[
        int | None,
        _Option(
            metavar="PORT",
            min=0,
            max=65535,
            help="Also answer TF Serving's REST interface here; 0 takes a free port.",
            show_default="no REST",
        ),
    ] = None
    rest_api_num_threads: Annotated[
        int | None,
        _Option(
            metavar="N",
            min=1,
            help="How many HTTP requests to work on at a time.",
            show_default="4 for each CPU",
        ),
    ] = None
    rest_api_timeout_in_ms: Annotated[
        int, _Option(metavar="MS", min=0, help="Stop computing a REST request after this time; 0 is never.")
    ] = 30_000
    rest_api_enable_cors_support: Annotated[
        bool, _Option("--rest-api-enable-cors-support", help="Let web pages of other origins ask.")
    ] = False
    monitoring_config_file: Annotated[
        Path | None,
        _Option(
            metavar="FILE",
            parser=path_parser("--monitoring-config-file"),
            help="A MonitoringConfig in text form: shows Prometheus metrics on the REST port if it says "
            "`prometheus_config { enable: true }`.",
        ),
    ] = None
    ssl_config_file: Annotated[
        Path | None,
        _Option(
            metavar="FILE",
            parser=path_parser("--ssl-config-file"),
            help="An SSLConfig in text form: TLS on the gRPC port, with client certificates if it says so.",
        ),
    ] = None
    drain_seconds: Annotated[
        float,
        _Option(
            metavar="SECONDS",
            min=0,
            help="After a signal, say NOT_SERVING to health checks and go on answering for this time, until "
            "nobody sends requests here any more.",
        ),
    ] = 0.0
    grace_seconds: Annotated[
        float, _Option(metavar="SECONDS", min=0, help="Then give calls under way this long to end.")
    ] = 5.0


GRPC_ALONE = NetworkOptions()
