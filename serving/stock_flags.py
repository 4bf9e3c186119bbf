"""TF Serving's flags on the command line of `serve-model run`: a start script works with either server.

TF Serving writes `--flag=value` with underscores, and booleans as `--flag`, `--flag=true` or `--flag=false`.
`translate` turns those with an effect into options of this program. Of the others it drops, with a note,
those that no client misses, and refuses the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from exporter.errors import UsageError
from serving.server_options import FLAGS


class StockFlag(Struct, frozen=True):
    """A flag of `tensorflow_model_server` that has an effect here."""

    name: str
    option: str = ""
    """The option of this program; by default the one of the same name, with dashes."""
    is_boolean: bool = False
    is_true: bool = False
    """The default of a boolean."""
    why: str = ""
    """The difference, or the reason why the flag has no effect or is refused."""
    harmless: tuple[str, ...] = ()
    """Values that ask for this server's own behaviour; they are accepted without a note."""

    @property
    def own(self) -> str:
        """Return this program's option with the flag's effect; `--flag` for one without its own option."""
        is_rare = any(word.partition("=")[0] == self.name for word in FLAGS)
        return "--flag" if is_rare else self.option or f"--{self.name.replace('_', '-')}"


def _same(name: str, option: str = "", why: str = "") -> StockFlag:
    return StockFlag(name, option, why=why)


def _switch(name: str) -> StockFlag:
    return StockFlag(name, is_boolean=True)


STOCK_FLAGS = (
    _same("port", why="0 takes a free port instead of turning gRPC off"),
    _same("grpc_socket_path"),
    _same("grpc_max_threads", "--threads", "how many calls are worked on at a time; the default is 8"),
    _same("grpc_channel_arguments"),
    _same("rest_api_port", why="0 takes a free port instead of turning REST off"),
    _same("rest_api_num_threads"),
    _same("rest_api_timeout_in_ms", why="0 is never"),
    _switch("rest_api_enable_cors_support"),
    _same("monitoring_config_file"),
    _same("ssl_config_file"),
    _same("model_name", why="without `--model-base-path`, the default is the directory's last part"),
    _same("model_base_path"),
    _same("model_config_file"),
    _same("model_config_file_poll_wait_seconds"),
    _same("file_system_poll_wait_seconds", "--poll-seconds", "negative values are not taken"),
    _switch("allow_version_labels_for_unavailable_models"),
    _switch("enable_signature_method_name_check"),
    _switch("enable_serialization_as_tensor_content"),
    StockFlag("enable_model_warmup", is_boolean=True, is_true=True),
    _same("num_request_iterations_for_warmup"),
    _same("saved_model_tags"),
    _same("tensorflow_session_config_file"),
    _same("tensorflow_session_parallelism"),
    _same("tensorflow_intra_op_parallelism"),
    _same("tensorflow_inter_op_parallelism"),
    StockFlag("version", "-V", is_boolean=True, why="of this program"),
)
"""The flags of `tensorflow_model_server` with an effect here (its model_servers/main.cc has all)."""

SWITCHES_WITHOUT_EFFECT = (
    "enable_batching",
    "enable_per_model_batching_parameters",
    "flush_filesystem_caches",
    "remove_unused_fields_from_bundle_metagraph",
    "enable_profiler",
    "enable_grpc_healthcheck_service",
    "skip_initialize_tpu",
    "xla_cpu_compilation_enabled",
    "xla_gpu_compilation_enabled",
)
VALUES_WITHOUT_EFFECT = (
    "batching_parameters_file",
    "num_load_threads",
    "num_unload_threads",
    "max_num_load_retries",
    "load_retry_interval_micros",
    "per_process_gpu_memory_fraction",
    "thread_pool_factory_config_file",
    "num_tflite_pools",
    "num_tflite_interpreters_per_pool",
)
"""Flags that are taken, so that a start script works, and do nothing in this server."""
REFUSED = ("platform_config_file", "use_alts_credentials", "prefer_tflite_model", "mixed_precision")
"""Flags that would change what clients get; they are taken if they are empty or false."""

_BY_NAME = {flag.name: flag for flag in STOCK_FLAGS}
_TRUE, _FALSE = ("true", "1", "t"), ("false", "0", "f")


def translate(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace TF Serving's flags in arguments of `run`; return all arguments, and notes on ignored flags.

    Other options get dashes for underscores; words from `--` on are unchanged. UsageError for a flag that is
    not supported, or whose value is missing or wrong.
    """
    translated: list[str] = []
    notes: list[str] = []
    for place, argument in enumerate(arguments):
        if argument == "--":
            translated += arguments[place:]
            break
        name, equals, value = argument.partition("=")
        stock = name.removeprefix("--").replace("-", "_") if name.startswith("--") else ""
        flag = _BY_NAME.get(stock)
        if flag is not None:
            translated += _options(flag, value if equals else None)
        elif stock in (*SWITCHES_WITHOUT_EFFECT, *VALUES_WITHOUT_EFFECT, *REFUSED):
            if equals and value.lower() in ("", *_FALSE):
                continue
            if stock in REFUSED:
                raise UsageError(f"--{stock} is not supported by serve-model run", hint="leave it out")
            if stock in VALUES_WITHOUT_EFFECT and not equals:  # VALUE would be read as a model base path
                hint = f"write it in one word: --{stock}=VALUE"
                raise UsageError(f"--{stock} needs a value", hint=hint)
            notes.append(f"--{stock} has no effect in serve-model run")
        else:
            translated.append(_with_dashes(argument))
    return translated, notes


def _options(flag: StockFlag, value: str | None) -> Iterable[str]:
    is_flag = flag.own == "--flag"
    if not flag.is_boolean:
        option = f"--flag={flag.name}" if is_flag else flag.own
        return [option if value is None else f"{option}={value}"]
    if _truth(flag, value) == flag.is_true:
        return []
    return [f"--flag={flag.name}{'=false' * flag.is_true}"] if is_flag else [flag.own]


def _truth(flag: StockFlag, value: str | None) -> bool:
    text = "true" if value is None else value.lower()
    if text not in (*_TRUE, *_FALSE):
        raise UsageError(f"--{flag.name}={value}: expected true or false")
    return text in _TRUE


def _with_dashes(argument: str) -> str:
    """Return an option with dashes for the underscores in its name; return another argument unchanged."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}"
