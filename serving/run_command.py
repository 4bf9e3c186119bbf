"""`serve-model run`: options in, a model server until a signal comes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from exporter.errors import Exit, UsageError
from exporter.local_paths import path_parser
from exporter.terminal.edge import AS_TEXT, NOTES, OutputFlags, VersionFlag, command
from exporter.terminal.output import Output, escape
from serving.documents import ServedModel, Serving
from serving.server_options import GRPC_ALONE, NetworkOptions, ServerOptions
from serving.signals import sleep_until_a_signal, stop_on_sigterm
from serving.status import VersionState, VersionStatus, error_text
from serving.stock_flags import translate

if TYPE_CHECKING:
    from serving.server import ModelServer

_DEFAULT_NAME = "default"
_MODELS = "Models"
_DEFAULTS = ServerOptions(port=8500)


def from_stock(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What is typed with TensorFlow Serving's flags for `run` as ours, and notes about flags without effect.

    Raises:
        UsageError: a flag that is not served, or a value that it does not take.
    """
    if arguments[:1] != ["run"]:
        return arguments, []
    translated, notes = translate(arguments[1:])
    return ["run", *translated], notes


def run_server(
    context: typer.Context,
    model_base_path: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL_BASE_PATH",
            help="Directory that holds the versions of a model.",
            parser=path_parser("MODEL_BASE_PATH"),
        ),
    ] = None,
    base_path_option: Annotated[
        Path | None,
        typer.Option(
            "--model-base-path",
            metavar="DIR",
            parser=path_parser("--model-base-path"),
            help=f"The same as MODEL_BASE_PATH, as TF Serving names it: the model is called "
            f"`{_DEFAULT_NAME}` then, unless --model-name says otherwise.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name in requests.",
            show_default="MODEL_BASE_PATH's last part",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Give up if a model has no available version after this time; inf is never.",
            rich_help_panel=_MODELS,
        ),
    ] = 60.0,
    options: ServerOptions = _DEFAULTS,
    network: NetworkOptions = GRPC_ALONE,
    own_version: VersionFlag = False,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """Serve models with TF Serving's gRPC services: one directory of versions, or those of a file.

    New versions are picked up as TF Serving picks them up: loaded first, then the old one is unloaded; a
    version that cannot be loaded never takes the good one away. When every model has an available
    version, one line for each (with --json one document) says which, and where. SIGTERM and SIGINT end
    the server after its calls. It computes on CPUs unless CUDA_VISIBLE_DEVICES says otherwise.

    The flags of tensorflow_model_server are taken, too, as it writes them: --model_base_path=DIR.

    \b
    Examples:
      serve-model run models/ranker
      serve-model run models/ranker --port 8500 --host 0.0.0.0 --model-name prod --poll-seconds 5
      serve-model run --model_config_file=models.config --model_config_file_poll_wait_seconds=60
    """
    with command(printing) as sink:
        stop_on_sigterm()
        for note in context.ensure_object(dict).get(NOTES, ()):
            sink.note(note)
        base_path, name = _the_model(
            sink, model_base_path, base_path_option, model_name, options.model_config_file
        )
        if network.monitoring_config_file is not None and network.rest_api_port is None:
            sink.note("--monitoring-config-file has no effect without --rest-api-port")
        options = replace(options, network=network)
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
            # What TensorFlow made at import is not looked at again by collections of garbage: a request of
            # 60 MB has one every few thousand rows, and they took longer than all the rest.
            gc.freeze()
            _announce(sink, server)
            news.begin()
            sleep_until_a_signal()
    except KeyboardInterrupt:
        raise SystemExit(int(Exit.INTERRUPTED)) from None


def _announce(sink: Output, server: ModelServer) -> None:
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
        lines.append(f"REST on {server.rest_url}")
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
