"""The options of a model server: one declaration of each, for the command line and for Python."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Struct, field
from msgspec.structs import replace

from exporter.errors import UsageError
from exporter.options import Option
from exporter.options.words import Part, count, fields_of, seconds, text_of
from exporter.storage.local_paths import local_path, path_parser
from serving.status import MAX_FILLED_BYTES

if TYPE_CHECKING:
    from serving.inference import Inference
    from serving.loader import Loading


_REST, _MODELS, _NETWORK, _COMPUTING = "REST, metrics, TLS", "Models", "Network", "Loading and computing"

_INT32 = tuple(f"tensorflow_{each}_parallelism" for each in ("intra_op", "inter_op", "session"))
"""Fields that are int32 in TensorFlow's ConfigProto."""
_MOST_INT32 = (1 << 31) - 1
_LONGEST_INT32 = len(str(-(1 << 31)))

_of_rest = partial(typer.Option, rich_help_panel=_REST)
_of_models = partial(typer.Option, rich_help_panel=_MODELS)
_of_network = partial(typer.Option, rich_help_panel=_NETWORK)
_of_computing = partial(typer.Option, rich_help_panel=_COMPUTING)


FLAGS = {
    "rest_api_num_threads=N": Part(
        "rest_api_num_threads", "how many HTTP requests to handle at once, by default 4 a CPU", count, least=1
    ),
    "rest_api_timeout_in_ms=N": Part(
        "rest_api_timeout_in_ms",
        "stop computing a REST request after this, by default 30000; 0 is never",
        count,
    ),
    "rest_api_enable_cors_support": Part(
        "rest_api_enable_cors_support", "allow requests from web pages of other origins"
    ),
    "model_config_file_poll_wait_seconds=N": Part(
        "model_config_file_poll_wait_seconds",
        "read --model-config-file again this often; 0, the default, reads it once",
        seconds,
        least=0,
    ),
    "allow_version_labels_for_unavailable_models": Part(
        "allow_version_labels_for_unavailable_models",
        "accept new labels for versions that are not available yet",
    ),
    "grpc_socket_path=PATH": Part("grpc_socket_path", "also listen on this UNIX socket", local_path),
    "grpc_channel_arguments=NAME=VALUE,...": Part(
        "grpc_channel_arguments", "as in grpc.max_connection_age_ms=2000", text_of
    ),
    "enable_signature_method_name_check": Part(
        "enable_signature_method_name_check",
        "Classify and Regress call signatures of their own method alone; models of TensorFlow 2 name "
        "`predict` in all of them",
    ),
    "enable_serialization_as_tensor_content": Part(
        "enable_serialization_as_tensor_content", "respond to Predict with bytes instead of lists of numbers"
    ),
    "enable_model_warmup=false": Part("no_model_warmup", "do not replay the warm-up requests of versions"),
    "num_request_iterations_for_warmup=N": Part(
        "num_request_iterations_for_warmup", "replay each of them this often", count
    ),
    "saved_model_tags=TAG,...": Part(
        "saved_model_tags", "tags of the graph to load, by default serve", text_of
    ),
    "tensorflow_session_config_file=FILE": Part(
        "tensorflow_session_config_file", "a session's ConfigProto in text form", local_path
    ),
    "tensorflow_intra_op_parallelism=N": Part(
        "tensorflow_intra_op_parallelism", "threads for one operation; 0 is TensorFlow's choice", count
    ),
    "tensorflow_inter_op_parallelism=N": Part(
        "tensorflow_inter_op_parallelism", "operations at the same time; 0 is TensorFlow's choice", count
    ),
    "tensorflow_session_parallelism=N": Part(
        "tensorflow_session_parallelism", "the value of both if they are 0", count
    ),
}
"""Flags of TensorFlow Serving, and the fields of `ServerOptions` or its `network` that they set."""


def _flags(option: str, texts: Sequence[str]) -> Mapping[str, Any]:
    return dict(fields_of(FLAGS, option, texts))


class StockFlags(Struct, frozen=True):
    """Flags of TensorFlow Serving that few need."""

    fields: Annotated[
        Mapping[str, Any],
        Option(
            "A flag of TensorFlow Serving, which may be typed as there: --NAME=VALUE; repeatable:",
            name="--flag",
            metavar="NAME=VALUE",
            words={word: part.meaning for word, part in FLAGS.items()},
            heading="TensorFlow Serving's flags",
            typed=tuple[str, ...],
            parse=_flags,
        ),
    ] = field(default_factory=dict)

    def put_into(self, options: ServerOptions, network: NetworkOptions) -> ServerOptions:
        """Return a copy of `options` with this network, and with the fields of both that the flags set."""
        own = {name: value for name, value in self.fields.items() if hasattr(options, name)}
        others = {name: value for name, value in self.fields.items() if name not in own}
        return replace(options, **own, network=replace(network, **others))


NO_FLAGS = StockFlags()


class NetworkOptions(Struct, frozen=True, kw_only=True):
    """Options for REST, metrics, TLS and the server's end; by default only gRPC. Names are TF Serving's."""

    rest_api_port: Annotated[
        int | None,
        _of_rest(
            metavar="PORT",
            min=0,
            max=65535,
            help="Also serve TF Serving's REST interface on this port; 0 takes a free one.",
            show_default="no REST",
        ),
    ] = None
    rest_api_num_threads: int | None = None
    rest_api_timeout_in_ms: int = 30_000
    rest_api_enable_cors_support: bool = False
    allow_host: Annotated[
        str | None,
        _of_rest(
            metavar="NAME,...",
            help="Further names of the REST port; requests for other names are refused. Its own are "
            "addresses, localhost and --host, and names without a dot unless it listens on a loopback "
            "address. `*.NAME` is every name below it, `*` every name.",
        ),
    ] = None
    monitoring_config_file: Annotated[
        Path | None,
        _of_rest(
            metavar="FILE",
            parser=path_parser("--monitoring-config-file"),
            help="A MonitoringConfig in text form: the REST port serves Prometheus metrics if it holds "
            "`prometheus_config { enable: true }`.",
        ),
    ] = None
    ssl_config_file: Annotated[
        Path | None,
        _of_rest(
            metavar="FILE",
            parser=path_parser("--ssl-config-file"),
            help="An SSLConfig in text form: TLS on the gRPC port, with client certificates if it says so.",
        ),
    ] = None
    drain_seconds: Annotated[
        float,
        _of_rest(
            metavar="SECONDS",
            min=0,
            help="After a signal, report NOT_SERVING to health checks and serve for this time, while load "
            "balancers stop sending requests.",
        ),
    ] = 0.0
    grace_seconds: Annotated[
        float, _of_rest(metavar="SECONDS", min=0, help="Then give calls in progress this long to end.")
    ] = 5.0


GRPC_ALONE = NetworkOptions()


class ServerOptions(Struct, frozen=True, kw_only=True):
    """Options of a `ModelServer` for finding and loading versions, listening and computing.

    Names are TF Serving's own.
    """

    model_config_file: Annotated[
        Path | None,
        _of_models(
            metavar="FILE",
            parser=path_parser("--model-config-file"),
            help="Serve the models that a ModelServerConfig lists, in text form, with their version policies "
            "and labels. Other options that name a model have no effect then.",
        ),
    ] = None
    model_config_file_poll_wait_seconds: float = 0.0
    allow_version_labels_for_unavailable_models: bool = False
    poll_seconds: Annotated[
        float, _of_models(metavar="SECONDS", min=0, help="How often to look for new versions; 0 looks once.")
    ] = 1.0
    host: Annotated[str, _of_network(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, _of_network(metavar="PORT", min=0, max=65535, help="gRPC port; 0 takes a free one.")
    ] = 0
    grpc_socket_path: Path | None = None
    grpc_channel_arguments: str | None = None
    threads: Annotated[
        int, _of_network(metavar="N", min=1, help="How many gRPC calls to handle at the same time.")
    ] = 8
    max_filled_bytes: Annotated[
        int,
        _of_computing(
            metavar="BYTES",
            min=0,
            help="Refuse requests that grow by more than this when tensors are filled to their shapes.",
        ),
    ] = MAX_FILLED_BYTES
    enable_signature_method_name_check: bool = False
    enable_serialization_as_tensor_content: bool = False
    no_model_warmup: bool = False
    num_request_iterations_for_warmup: int = 1
    saved_model_tags: str = "serve"
    tensorflow_session_config_file: Path | None = None
    tensorflow_intra_op_parallelism: int = 0
    tensorflow_inter_op_parallelism: int = 0
    tensorflow_session_parallelism: int = 0
    network: NetworkOptions = GRPC_ALONE

    def __post_init__(self) -> None:
        """Raise UsageError for a number out of its range: seconds, threads, or a port."""
        if self.poll_seconds < 0 or self.threads < 1 or not 0 <= self.port <= 65535:
            raise UsageError("poll_seconds must not be negative, threads positive, and port within 0..65535")
        for name in _INT32:
            if not 0 <= getattr(self, name) <= _MOST_INT32:
                raise UsageError(f"{name} must be within 0..{_MOST_INT32}")

    def channel_arguments(self) -> list[tuple[str, int | str]]:
        """Return gRPC's channel arguments as pairs of name and value, in order; [] without any.

        A value of digits, perhaps after a minus, becomes a number. UsageError for another form than
        NAME=VALUE, or a number that is no int32.
        """
        arguments: list[tuple[str, int | str]] = []
        for part in filter(None, (self.grpc_channel_arguments or "").split(",")):
            name, equals, value = part.partition("=")
            if not equals:
                raise UsageError(f"--flag grpc_channel_arguments: {part!r} is not of the form NAME=VALUE")
            is_number = re.fullmatch("-?[0-9]+", value) is not None
            # The length first: beyond 4300 digits `int` raises ValueError.
            if is_number and (len(value) > _LONGEST_INT32 or not -(1 << 31) <= int(value) < 1 << 31):
                raise UsageError(
                    f"--flag grpc_channel_arguments: {part[:80]!r} is out of range",
                    cause="gRPC takes numbers from -2147483648 to 2147483647",
                )
            arguments.append((name, int(value) if is_number else value))
        return arguments

    def loading(self) -> Loading:
        """Return the settings for loading versions; reads the file of the session's configuration, if any.

        UsageError if the file cannot be used, LfsPointer if it is a pointer of Git LFS.
        """
        from serving.loader import Loading
        from serving.text_config import read_text_config

        file, config = self.tensorflow_session_config_file, b""
        if file is not None:
            option = "--flag tensorflow_session_config_file"
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
        """Return the settings for computing responses, without a time limit."""
        from serving.inference import Inference

        return Inference(
            max_filled_bytes=self.max_filled_bytes,
            checks_method_names=self.enable_signature_method_name_check,
            as_tensor_content=self.enable_serialization_as_tensor_content,
        )


DEFAULT_OPTIONS = ServerOptions()
