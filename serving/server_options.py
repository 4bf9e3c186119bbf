"""The options of a model server: one declaration of each, for the command line and for Python.

How a model server is reached beside its gRPC port: REST, metrics, TLS; and how it ends. One declaration of
each option, for the command line and for Python.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from exporter.errors import UsageError
from exporter.local_paths import path_parser
from serving.status import MAX_FILLED_BYTES

if TYPE_CHECKING:
    from serving.inference import Inference
    from serving.loader import Loading


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


_MODELS, _NETWORK, _COMPUTING = "Models", "Network", "Loading and computing"

_of_models = partial(typer.Option, rich_help_panel=_MODELS)
_of_network = partial(typer.Option, rich_help_panel=_NETWORK)
_of_computing = partial(typer.Option, rich_help_panel=_COMPUTING)


class ServerOptions(Struct, frozen=True, kw_only=True):
    """How a `ModelServer` finds versions, listens, loads and answers, by TF Serving's names for it."""

    model_config_file: Annotated[
        Path | None,
        _of_models(
            metavar="FILE",
            parser=path_parser("--model-config-file"),
            help="Serve the models that a ModelServerConfig lists, in text form, with their version policies "
            "and labels. Other options that name a model have no effect then.",
        ),
    ] = None
    model_config_file_poll_wait_seconds: Annotated[
        float,
        _of_models(
            metavar="SECONDS",
            min=0,
            help="Read that file again this often, and serve what it says; 0 reads it once.",
        ),
    ] = 0.0
    allow_version_labels_for_unavailable_models: Annotated[
        bool,
        _of_models(
            "--allow-version-labels-for-unavailable-models",
            help="Take new labels for versions that are not available yet.",
        ),
    ] = False
    poll_seconds: Annotated[
        float, _of_models(metavar="SECONDS", min=0, help="How often to look for new versions; 0 looks once.")
    ] = 1.0
    host: Annotated[str, _of_network(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, _of_network(metavar="PORT", min=0, max=65535, help="gRPC port; 0 takes a free one.")
    ] = 0
    grpc_socket_path: Annotated[
        Path | None,
        _of_network(
            metavar="PATH", parser=path_parser("--grpc-socket-path"), help="Listen on this UNIX socket, too."
        ),
    ] = None
    grpc_channel_arguments: Annotated[
        str | None,
        _of_network(
            metavar="NAME=VALUE,...",
            help="More arguments of the gRPC server, as grpc.max_connection_age_ms=2000.",
        ),
    ] = None
    threads: Annotated[
        int, _of_network(metavar="N", min=1, help="How many gRPC calls to work on at a time.")
    ] = 8
    max_filled_bytes: Annotated[
        int,
        _of_computing(
            metavar="BYTES",
            min=0,
            help="Refuse requests that grow by more than this when tensors are filled to their shapes.",
        ),
    ] = MAX_FILLED_BYTES
    enable_signature_method_name_check: Annotated[
        bool,
        _of_computing(
            "--enable-signature-method-name-check",
            help="Let Classify and Regress call signatures of their own method alone. Models of TensorFlow 2 "
            "name `predict` in all.",
        ),
    ] = False
    enable_serialization_as_tensor_content: Annotated[
        bool,
        _of_computing(
            "--enable-serialization-as-tensor-content",
            help="Answer Predict with bytes instead of lists of numbers.",
        ),
    ] = False
    no_model_warmup: Annotated[
        bool, _of_computing("--no-model-warmup", help="Send no warm-up requests to versions that bring some.")
    ] = False
    num_request_iterations_for_warmup: Annotated[
        int, _of_computing(metavar="N", min=0, help="Send each warm-up request so often.")
    ] = 1
    saved_model_tags: Annotated[str, _of_computing(metavar="TAG,...", help="Tags of the graph to load.")] = (
        "serve"
    )
    tensorflow_session_config_file: Annotated[
        Path | None,
        _of_computing(
            metavar="FILE",
            parser=path_parser("--tensorflow-session-config-file"),
            help="A session's ConfigProto in text form.",
        ),
    ] = None
    tensorflow_intra_op_parallelism: Annotated[
        int, _of_computing(metavar="N", min=0, help="Threads for one operation; 0 is TensorFlow's choice.")
    ] = 0
    tensorflow_inter_op_parallelism: Annotated[
        int, _of_computing(metavar="N", min=0, help="Operations at once; 0 is TensorFlow's choice.")
    ] = 0
    tensorflow_session_parallelism: Annotated[
        int, _of_computing(metavar="N", min=0, help="Both of these, where they are 0.")
    ] = 0
    network: NetworkOptions = GRPC_ALONE

    def __post_init__(self) -> None:
        """Check what a command line checks by itself.

        Raises:
            UsageError: a number is out of range.
        """
        if self.poll_seconds < 0 or self.threads < 1 or not 0 <= self.port <= 65535:
            raise UsageError("poll_seconds must not be negative, threads positive, and port within 0..65535")

    def channel_arguments(self) -> list[tuple[str, int | str]]:
        """More arguments of the gRPC server; a value that is a whole number is one.

        Raises:
            UsageError: they are not of the form NAME=VALUE,...
        """
        arguments: list[tuple[str, int | str]] = []
        for part in filter(None, (self.grpc_channel_arguments or "").split(",")):
            name, equals, value = part.partition("=")
            if not equals:
                raise UsageError(f"--grpc-channel-arguments: {part!r} is not of the form NAME=VALUE")
            arguments.append((name, int(value) if value.lstrip("-").isdecimal() else value))
        return arguments

    def loading(self) -> Loading:
        """How versions are loaded.

        Raises:
            UsageError: the session's configuration cannot be read.
        """
        from serving.loader import Loading
        from serving.text_config import read_text_config

        file, config = self.tensorflow_session_config_file, b""
        if file is not None:
            option = "--tensorflow-session-config-file"
            config = read_text_config(option, file, "ConfigProto").SerializeToString()
        session = self.tensorflow_session_parallelism
        return Loading(
            tags=tuple(self.saved_model_tags.split(",")),
            session_config=config,
            intra_op_threads=self.tensorflow_intra_op_parallelism or session,
            inter_op_threads=self.tensorflow_inter_op_parallelism or session,
            warmup_iterations=0 if self.no_model_warmup else max(1, self.num_request_iterations_for_warmup),
        )

    def inference(self) -> Inference:
        """How requests are answered."""
        from serving.inference import Inference

        return Inference(
            max_filled_bytes=self.max_filled_bytes,
            checks_method_names=self.enable_signature_method_name_check,
            as_tensor_content=self.enable_serialization_as_tensor_content,
        )


DEFAULT_OPTIONS = ServerOptions()
