"""`serve-model run`: options in, a model server until a signal comes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from exporter.errors import Exit, UsageError
from exporter.terminal.edge import DebugFlag, JsonFlag, QuietFlag, VersionFlag, command
from exporter.terminal.output import Output
from exporter.terminal.parameters import App, Argument, Option, Options
from serving.documents import ServedModel, Serving
from serving.network_options import GROUP as REST_METRICS_TLS
from serving.network_options import GRPC_ALONE, NetworkOptions
from serving.signals import sleep_until_a_signal, stop_on_sigterm
from serving.status import VersionState, VersionStatus, error_text
from serving.stock_flags import translate

if TYPE_CHECKING:
    from serving.server import ModelServer
    from serving.server_options import ServerOptions

HELP = """Serve models with TF Serving's gRPC services: one directory of versions, or those of a file.

New versions are picked up as TF Serving picks them up: loaded first, then the old one is unloaded; a version
that cannot be loaded never takes the good one away. When every model has an available version, one line for
each (with --json one document) says which, and where. SIGTERM and SIGINT end the server after its calls. It
computes on CPUs unless CUDA_VISIBLE_DEVICES says otherwise.

The flags of tensorflow_model_server are taken, too, as it writes them: --model_base_path=DIR.

\b
Examples:
  serve-model run models/ranker
  serve-model run models/ranker --port 8500 --host 0.0.0.0 --model-name prod --poll-seconds 5
  serve-model run --model_config_file=models.config --model_config_file_poll_wait_seconds=60"""

_NOTES = "serving.run_command.notes"
_DEFAULT_NAME = "default"
_MODELS, _NETWORK, _COMPUTING = "Models", "Network", "Loading and computing"


def register(app: App) -> None:
    """Add the command to `serve-model`."""
    app.subcommand("run", help=HELP, short_help="Serve models over gRPC.", rewrite=_from_stock)(run_server)


def _from_stock(context: click.Context, arguments: list[str]) -> list[str]:
    translated, context.meta[_NOTES] = translate(arguments)
    return translated


def run_server(
    context: click.Context,
    model_base_path: Annotated[
        Path | None, Argument("[MODEL_BASE_PATH]", "Directory that holds the versions of a model.")
    ] = None,
    base_path_option: Annotated[
        Path | None,
        Option(
            "--model-base-path",
            metavar="DIR",
            help=f"The same as MODEL_BASE_PATH, as TF Serving names it: the model is called "
            f"`{_DEFAULT_NAME}` then, unless --model-name says otherwise.",
            group=_MODELS,
        ),
    ] = None,
    model_name: Annotated[
        str | None,
        Option(
            metavar="NAME", help="Name in requests. [default: MODEL_BASE_PATH's last part]", group=_MODELS
        ),
    ] = None,
    model_config_file: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Serve the models that a ModelServerConfig lists, in text form, with their version policies "
            "and labels. Other options that name a model have no effect then.",
            group=_MODELS,
        ),
    ] = None,
    model_config_file_poll_wait_seconds: Annotated[
        float,
        Option(
            metavar="SECONDS",
            min=0,
            help="Read that file again this often, and serve what it says; 0 reads it once.",
            group=_MODELS,
        ),
    ] = 0.0,
    allow_version_labels_for_unavailable_models: Annotated[
        bool, Option(help="Take new labels for versions that are not available yet.", group=_MODELS)
    ] = False,
    poll_seconds: Annotated[
        float,
        Option(
            metavar="SECONDS",
            min=0,
            help="How often to look for new versions; 0 looks once.",
            group=_MODELS,
        ),
    ] = 1.0,
    wait: Annotated[
        float,
        Option(
            metavar="SECONDS",
            min=0,
            help="Give up if a model has no available version after this time.",
            group=_MODELS,
        ),
    ] = 60.0,
    host: Annotated[
        str, Option(metavar="ADDRESS", help="Address to listen on.", group=_NETWORK)
    ] = "127.0.0.1",
    port: Annotated[
        int, Option(metavar="PORT", min=0, max=65535, help="gRPC port; 0 takes a free one.", group=_NETWORK)
    ] = 8500,
    grpc_socket_path: Annotated[
        Path | None, Option(metavar="PATH", help="Listen on this UNIX socket, too.", group=_NETWORK)
    ] = None,
    grpc_channel_arguments: Annotated[
        str,
        Option(
            metavar="NAME=VALUE,...",
            help="More arguments of the gRPC server, as grpc.max_connection_age_ms=2000.",
            group=_NETWORK,
        ),
    ] = "",
    threads: Annotated[
        int, Option(metavar="N", min=1, help="How many calls to work on at a time.", group=_NETWORK)
    ] = 8,
    max_filled_bytes: Annotated[
        int,
        Option(
            metavar="BYTES",
            min=0,
            help="Refuse requests that grow by more than this when tensors are filled to their shapes.",
            group=_COMPUTING,
        ),
    ] = 64 << 20,
    enable_signature_method_name_check: Annotated[
        bool,
        Option(
            help="Let Classify and Regress call signatures of their own method alone. Models of TensorFlow 2 "
            "name `predict` in all.",
            group=_COMPUTING,
        ),
    ] = False,
    enable_serialization_as_tensor_content: Annotated[
        bool, Option(help="Answer Predict with bytes instead of lists of numbers.", group=_COMPUTING)
    ] = False,
    no_model_warmup: Annotated[
        bool, Option(help="Send no warm-up requests to versions that bring some.", group=_COMPUTING)
    ] = False,
    num_request_iterations_for_warmup: Annotated[
        int, Option(metavar="N", min=0, help="Send each warm-up request so often.", group=_COMPUTING)
    ] = 1,
    saved_model_tags: Annotated[
        str, Option(metavar="TAG,...", help="Tags of the graph to load.", group=_COMPUTING)
    ] = "serve",
    tensorflow_session_parallelism: Annotated[
        int, Option(metavar="N", min=0, help="The next two at once.", group=_COMPUTING)
    ] = 0,
    tensorflow_intra_op_parallelism: Annotated[
        int,
        Option(
            metavar="N", min=0, help="Threads for one operation; 0 is TensorFlow's choice.", group=_COMPUTING
        ),
    ] = 0,
    tensorflow_inter_op_parallelism: Annotated[
        int,
        Option(metavar="N", min=0, help="Operations at once; 0 is TensorFlow's choice.", group=_COMPUTING),
    ] = 0,
    network: Annotated[NetworkOptions, Options(REST_METRICS_TLS)] = GRPC_ALONE,
    own_version: VersionFlag = False,
    json_: JsonFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Serve until a signal comes."""
    with command(json_, quiet, debug) as sink:
        stop_on_sigterm()
        for note in context.meta.get(_NOTES, ()):
            sink.note(note)
        base_path, name = _the_model(sink, model_base_path, base_path_option, model_name, model_config_file)
        if network.monitoring_config_file is not None and network.rest_api_port is None:
            sink.note("--monitoring-config-file has no effect without --rest-api-port")
        from serving.inference import Inference
        from serving.loader import Loading
        from serving.server_options import ServerOptions

        options = ServerOptions(
            host=host,
            port=port,
            grpc_socket_path=grpc_socket_path,
            grpc_channel_arguments=_channel_arguments(grpc_channel_arguments),
            threads=threads,
            network=network,
            poll_seconds=poll_seconds,
            model_config_file=model_config_file,
            model_config_poll_seconds=model_config_file_poll_wait_seconds,
            labels_unavailable_versions=allow_version_labels_for_unavailable_models,
            loading=Loading(
                tags=tuple(saved_model_tags.split(",")),
                intra_op_threads=tensorflow_intra_op_parallelism or tensorflow_session_parallelism,
                inter_op_threads=tensorflow_inter_op_parallelism or tensorflow_session_parallelism,
                warmup_iterations=0 if no_model_warmup else max(1, num_request_iterations_for_warmup),
            ),
            inference=Inference(
                max_filled_bytes=max_filled_bytes,
                checks_method_names=enable_signature_method_name_check,
                as_tensor_content=enable_serialization_as_tensor_content,
            ),
        )
        _serve(sink, base_path, name, options, wait)


def _serve(
    sink: Output, base_path: Path | None, name: str | None, options: ServerOptions, wait: float
) -> None:
    from serving.server import ModelServer

    news = _News(sink)
    try:
        with ModelServer(base_path, name=name, options=options, listener=news) as server:
            for model in server.models.served().values():
                if not model.base_path.is_dir():
                    sink.note(f"{model.base_path} does not exist yet: waiting for it")
            server.wait_available(wait)
            _announce(sink, server)
            news.begin()
            sleep_until_a_signal()
    except KeyboardInterrupt:
        raise SystemExit(int(Exit.INTERRUPTED)) from None


def _announce(sink: Output, server: ModelServer) -> None:
    from rich.markup import escape

    models = [
        ServedModel(name, max(model.available())) for name, model in sorted(server.models.served().items())
    ]
    first = models[0] if models else None
    document = Serving(
        first.model if first else None,
        first.version if first else None,
        models,
        server.host,
        server.port,
        server.rest_port,
    )
    lines = [f"serving {model.model} version {model.version} on {server.address}" for model in models]
    lines = lines or [f"serving no model on {server.address}"]
    if server.rest_port is not None:
        lines.append(f"REST on http://{server.host}:{server.rest_port}/v1/models")
    sink.result(document, [escape(line) for line in lines], is_done=True)


def _the_model(
    sink: Output, argument: Path | None, option: Path | None, name: str | None, config_file: Path | None
) -> tuple[Path | None, str | None]:
    """The one model to serve, unless a file lists the models."""
    if config_file is not None:
        if argument or option or name:
            sink.note(f"the models are those of {config_file}: options that name one have no effect")
        return None, None
    if argument is not None and option is not None and argument != option:
        raise UsageError(
            f"MODEL_BASE_PATH is {argument}, --model-base-path {option}", hint="name one of them"
        )
    if argument is None and option is None:
        raise UsageError(
            "there is no model to serve",
            cause="neither a model base path nor a configuration file was named",
            hint="serve-model run MODEL_BASE_PATH, or serve-model run --model-config-file FILE",
        )
    return argument or option, name or (_DEFAULT_NAME if option else None)


def _channel_arguments(text: str) -> tuple[tuple[str, int | str], ...]:
    """`NAME=VALUE,...`; a value that is a whole number is one."""
    arguments: list[tuple[str, int | str]] = []
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"--grpc-channel-arguments: {part!r} is not of the form NAME=VALUE")
        arguments.append((name, int(value) if value.lstrip("-").isdecimal() else value))
    return tuple(arguments)


class _News:
    """Tells a person what happens to versions after the first ones are served."""

    def __init__(self, sink: Output) -> None:
        self._sink = sink
        self._began = False

    def begin(self) -> None:
        """Report good news, too, from now on."""
        self._began = True

    def __call__(self, model: str, status: VersionStatus) -> None:
        text = f"{model} version {status.version}: {status.state.name}"
        if status.code:
            self._sink.warn(f"{text}, {error_text(status)}")
        elif self._began and status.state is VersionState.AVAILABLE:
            self._sink.note(text)
