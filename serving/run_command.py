"""`serve-model run`: read options, and run a model server until a signal."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exporter.errors import Exit, ManifestError, UsageError
from exporter.storage.layout import CHECKPOINT_STATE_FILE
from exporter.storage.local_paths import path_parser, quoted, require_no_pattern
from exporter.terminal import Leave, sleep_until_a_signal, stop_on_sigterm
from exporter.terminal.edge import AS_TEXT, NOTES, OutputFlags, VersionFlag, command
from exporter.terminal.output import Output, escape, quote_logs
from exporter.terminal.tensorflow_import import require_tensorflow
from serving.documents import ServedModel, Serving
from serving.server_options import GRPC_ALONE, NO_FLAGS, NetworkOptions, ServerOptions, StockFlags
from serving.status import VersionState, VersionStatus, error_text

if TYPE_CHECKING:
    from serving.server import ModelServer

_DEFAULT_NAME = "default"
_MODELS = "Models"
_DEFAULTS = ServerOptions(port=8500)


def run_server(
    context: typer.Context,
    model_base_path: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help="Directory that holds the versions of a model.",
            parser=path_parser("--model-base-path"),
        ),
    ] = None,
    base_path_option: Annotated[
        Path | None,
        typer.Option(
            "--model-base-path",
            metavar="DIR",
            parser=path_parser("--model-base-path"),
            help=f"The same as MODEL, by TF Serving's name: the model's name is then "
            f"`{_DEFAULT_NAME}`, unless --model-name gives another.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name in requests.",
            show_default="MODEL's last part",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Fail if a model has no available version after this time; inf is never.",
            rich_help_panel=_MODELS,
        ),
    ] = 60.0,
    options: ServerOptions = _DEFAULTS,
    network: NetworkOptions = GRPC_ALONE,
    flags: StockFlags = NO_FLAGS,
    own_version: VersionFlag = False,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """Serve the model in a directory of versions, or all models that a file lists, as TF Serving does.

    The server loads new versions as TF Serving does: it loads the new version first, then unloads the old
    one; a version that cannot be loaded never replaces a working one. When every model has an available
    version, it prints one line for each (with --json one document). SIGTERM and SIGINT end the server after
    the calls in progress. It computes on CPUs unless CUDA_VISIBLE_DEVICES names GPUs.

    The command also accepts the flags of tensorflow_model_server in their own form: --model_base_path=DIR.

    \b
    Examples:
      serve-model run models/ranker
      serve-model run models/ranker --port 8500 --host 0.0.0.0 --model-name prod --poll-seconds 5
      serve-model run --model_config_file=models.config --model_config_file_poll_wait_seconds=60
    """
    with command(printing) as sink:
        # After `command`, whose handler of SIGTERM this replaces: here SIGTERM is the usual end, exit code 0.
        stop_on_sigterm()
        quote_logs()
        for note in context.ensure_object(dict).get(NOTES, ()):
            sink.note(note)
        base_path, name = _the_model(
            sink, model_base_path, base_path_option, model_name, options.model_config_file
        )
        if network.monitoring_config_file is not None and network.rest_api_port is None:
            sink.note("--monitoring-config-file has no effect without --rest-api-port")
        _serve(sink, base_path, name, flags.put_into(options, network), wait)


def _serve(
    sink: Output, base_path: Path | None, name: str | None, options: ServerOptions, wait: float
) -> None:
    require_tensorflow("serve-model run")
    from serving.server import ModelServer

    keep_freed_memory()

    printer = _StatusPrinter(sink)
    try:
        with ModelServer(base_path, name=name, options=options, listener=printer) as server:
            for model in server.models.served().values():
                if not model.base_path.is_dir():
                    sink.note(f"{model.base_path} does not exist yet: the server waits for it")
            server.wait_available(wait)
            # Exclude TensorFlow's objects from garbage collection: a request of 60 MB triggers a collection
            # every few thousand rows, and these took longer than all other work.
            gc.freeze()
            _announce(sink, server)
            printer.begin(server)
            sleep_until_a_signal()
    except KeyboardInterrupt:
        raise Leave(int(Exit.INTERRUPTED)) from None


# Both are set: setting one stops glibc from adapting the other. Before 2.35 glibc accepts 32 MiB at most.
MEMORY_THRESHOLDS = {"MALLOC_TRIM_THRESHOLD_": 64 << 20, "MALLOC_MMAP_THRESHOLD_": 32 << 20}
"""Bytes, by the environment variables that set them; `deploy/` sets the same for other servers."""

# M_..._THRESHOLD of <malloc.h>
_MALLOC_OPTIONS = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}


def keep_freed_memory() -> None:
    """Let each arena of glibc keep 64 MiB of free memory, unless the environment sets a limit of its own.

    Blocks of less than 32 MiB then come from arenas. Changes the whole process; without glibc nothing
    happens. An update reads its delta into new memory. If the kernel has to clear that each time, 100,000
    rows of 64 floats take 40 ms instead of 24 (TensorFlow 2.21, tables in memory), on cores that predictions
    need.
    """
    import ctypes  # late: `--help` needs none of it

    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
    is_set = any(name in os.environ for name in MEMORY_THRESHOLDS)
    if set_option is not None and not is_set and "_threshold" not in os.environ.get("GLIBC_TUNABLES", ""):
        for name, size in MEMORY_THRESHOLDS.items():
            set_option(_MALLOC_OPTIONS[name], size)


def _announce(sink: Output, server: ModelServer) -> None:
    models = [
        ServedModel(name, version, _tables(model.base_path / str(version)))
        for name, model in sorted(server.models.served().items())
        for version in (max(model.available()),)
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
    for model in models:
        if model.tables is not None:
            sink.note(f"{model.model} version {model.version}: tables {model.tables}")


def _tables(version: Path) -> str | None:
    """Return the state of mapped tables in words; None for a version that was not made to map any.

    `version` is its directory. None, too, if its manifest cannot be read, as for a version of another
    program.
    """
    from exporter.publish.mapped_state import tables_state
    from exporter.publish.versions import read_manifest

    with suppress(ManifestError):  # another program's version has no manifest
        record = read_manifest(version).mapped
        return None if record is None else tables_state(record, version)
    return None


def _the_model(
    sink: Output, argument: Path | None, option: Path | None, name: str | None, config_file: Path | None
) -> tuple[Path | None, str | None]:
    """Return the path and name of the one model to serve; None for both if a file lists the models.

    `argument` is MODEL, `option` --model-base-path. The name is also None if MODEL is given without a name.
    Prints a note if options have no effect, or the path has no version yet. UsageError for no path, two
    different ones, or one that cannot be a model's; OSError if it cannot be listed.
    """
    if config_file is not None:
        if argument or option or name:
            sink.note(f"{config_file} lists the models: options that name one have no effect")
        return None, None
    if argument is not None and option is not None and argument != option:
        raise UsageError(f"MODEL is {argument}, --model-base-path {option}", hint="name one of them")
    if argument is None and option is None:
        raise UsageError(
            "there is no model to serve",
            cause="neither a model base path nor a configuration file is given",
            hint="serve-model run MODEL, or serve-model run --model-config-file FILE",
        )
    path = argument or option
    if path is not None:
        require_no_pattern("MODEL", path)
        _require_no_neighbour(sink, path)
    return path, name or (_DEFAULT_NAME if option else None)


def _require_no_neighbour(sink: Output, path: Path) -> None:
    """Raise UsageError for a file, a directory of checkpoints, or a path beside a model, probably meant.

    Another directory without versions is accepted, and a note is printed; a path that does not exist is
    accepted without a note. OSError if the directory cannot be listed.
    """
    from exporter.publish.versions import likely_model

    if path.is_file():
        found = likely_model(path.parent)
        raise UsageError(
            f"{path} is a file: the directory is expected that holds a model's versions",
            hint=f"serve-model run {quoted(found)}" if found else "name that directory",
        )
    if not path.is_dir() or any(child.name.isdecimal() for child in path.iterdir()):
        return
    if (found := likely_model(path)) is not None:
        what = "is one version of a model" if found == path.parent else "is not a model"
        raise UsageError(f"{path} {what}: it holds no versions", hint=f"serve-model run {quoted(found)}")
    if (path / CHECKPOINT_STATE_FILE).exists():
        raise UsageError(
            f"{path} holds checkpoints, and no versions of a model", hint=f"export-model init {quoted(path)}"
        )
    sink.note(f"{path} holds no version yet: the server waits for one")


class _StatusPrinter:
    """A printer of failures of versions; after `begin` also of versions that become available."""

    def __init__(self, sink: Output) -> None:
        self._sink = sink
        self._server: ModelServer | None = None

    def begin(self, server: ModelServer) -> None:
        """Print versions of this server that become available, too, from now on."""
        self._server = server

    def __call__(self, model: str, status: VersionStatus) -> None:
        text = f"{model} version {status.version}: {status.state.name}"
        if status.code:
            self._sink.warn(f"{text}, {error_text(status)}")
        elif self._server is not None and status.state is VersionState.AVAILABLE:
            served = self._server.models.served().get(model)
            tables = served and _tables(served.base_path / str(status.version))
            self._sink.note(f"{text}, tables {tables}" if tables else text)
