"""TF Serving's flags on the command line of `serve-model run`: a start script works with either server.

TF Serving writes `--flag=value` with underscores, and booleans as `--flag`, `--flag=true` or `--flag=false`.
`translate` turns them into options of this program. It drops a flag that has no effect here, with a note, and
refuses a flag whose absence clients would notice, unless its value asks for this server's own behaviour.

Batching parameters have no effect, because requests are computed one by one. Their file is checked
nevertheless, so that a start script that works here also works with the stock server.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path

from msgspec import Struct

from exporter.errors import UsageError
from exporter.wire.protos import Proto
from serving.text_config import read_text_config

_MAX_BATCH_SIZE = 1000
"""The stock server's default."""
_AT_LEAST = {
    "max_batch_size": 1,
    "max_execution_batch_size": 1,
    "batch_timeout_micros": 0,
    "max_enqueued_batches": 0,
    "num_batch_threads": 1,
}


def check_batching_parameters(path: Path) -> None:
    """Raise UsageError unless a file holds `BatchingParameters`, in text form, that TF Serving accepts."""
    found = read_text_config("--batching_parameters_file", path, "BatchingParameters")
    for problem in _problems(found):
        raise UsageError(
            f"--batching_parameters_file {path} cannot be used",
            cause=problem,
            hint="correct it: TF Serving refuses it, too",
        )


def _problems(found: Proto) -> Iterator[str]:
    """Yield the problems that the stock server would report.

    Source: batching_util.cc, batching_session.cc; TensorFlow's shared_batch_scheduler.h.
    """
    for name, least in _AT_LEAST.items():
        if found.HasField(name) and (value := getattr(found, name).value) < least:
            yield f"{name} is {value}, expected at least {least}"
    sizes = list(found.allowed_batch_sizes)
    if not sizes:
        return
    if sizes != sorted(set(sizes)) or sizes[0] < 1:
        yield f"allowed_batch_sizes are {sizes}, expected them to grow"
    limit = found.max_batch_size.value if found.HasField("max_batch_size") else _MAX_BATCH_SIZE
    last = f"the last of allowed_batch_sizes is {sizes[-1]}"
    if not found.enable_large_batch_splitting.value:
        if sizes[-1] != limit:
            yield f"{last}, max_batch_size {limit}: they must be equal"
        return
    executed = found.max_execution_batch_size.value
    if sizes[-1] > limit:
        yield f"{last}, max_batch_size {limit}: it must not be greater"
    if executed and sizes[-1] != executed:
        yield f"{last}, max_execution_batch_size {executed}: they must be equal"


class Treatment(Enum):
    """The way in which this program handles a flag of TF Serving."""

    SAME = "same"
    IGNORED = "accepted, no effect"
    REFUSED = "refused"


class StockFlag(Struct, frozen=True):
    """A flag of `tensorflow_model_server`."""

    name: str
    treatment: Treatment
    option: str = ""
    """The option of this program; by default the one of the same name, with dashes."""
    is_boolean: bool = False
    option_if_false: str = ""
    """For a boolean that is true by default: the option that turns it off."""
    why: str = ""
    """The difference, or the reason why the flag has no effect or is refused."""
    harmless: tuple[str, ...] = ()
    """Values that ask for this server's own behaviour; they are accepted without a note."""

    @property
    def own(self) -> str:
        """The option of this program."""
        return self.option or f"--{self.name.replace('_', '-')}"


def _same(name: str, option: str = "", why: str = "") -> StockFlag:
    return StockFlag(name, Treatment.SAME, option, why=why)


def _switch(name: str) -> StockFlag:
    return StockFlag(name, Treatment.SAME, is_boolean=True)


def _ignored(name: str, why: str, *harmless: str, is_boolean: bool = False) -> StockFlag:
    return StockFlag(name, Treatment.IGNORED, is_boolean=is_boolean, why=why, harmless=harmless)


def _refused(name: str, why: str, *harmless: str, is_boolean: bool = False) -> StockFlag:
    return StockFlag(name, Treatment.REFUSED, is_boolean=is_boolean, why=why, harmless=harmless)


_ONE_BY_ONE = "requests are computed one by one; what batching demands of inputs is not checked"
_ONE_LOADER = "the versions of a model are loaded one after another, models beside each other"
_RETRIES = "a version that fails to load is tried again when its directory changes"
_NO_TFLITE = "models in TensorFlow Lite's format are not served"
_XLA = "XLA compiles what a model marks for it, as in TensorFlow itself"

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
    StockFlag("enable_model_warmup", Treatment.SAME, is_boolean=True, option_if_false="--no-model-warmup"),
    _same("num_request_iterations_for_warmup"),
    _same("saved_model_tags"),
    _same("tensorflow_session_config_file"),
    _same("tensorflow_session_parallelism"),
    _same("tensorflow_intra_op_parallelism"),
    _same("tensorflow_inter_op_parallelism"),
    StockFlag("version", Treatment.SAME, "-V", is_boolean=True, why="of this program"),
    _ignored("enable_batching", _ONE_BY_ONE, "false", is_boolean=True),
    _ignored("batching_parameters_file", f"{_ONE_BY_ONE}; mistakes in the file are errors", ""),
    _ignored("enable_per_model_batching_parameters", _ONE_BY_ONE, "false", is_boolean=True),
    _ignored("num_load_threads", _ONE_LOADER),
    _ignored("num_unload_threads", _ONE_LOADER),
    _ignored("max_num_load_retries", _RETRIES),
    _ignored("load_retry_interval_micros", _RETRIES),
    _ignored("flush_filesystem_caches", "files stay in the page cache", is_boolean=True),
    _ignored("remove_unused_fields_from_bundle_metagraph", "it only saves memory", is_boolean=True),
    _ignored("per_process_gpu_memory_fraction", "TensorFlow takes GPU memory as it needs it"),
    _ignored("enable_profiler", "there is no profiler service", is_boolean=True),
    _ignored("enable_grpc_healthcheck_service", "it is always there", is_boolean=True),
    _ignored("thread_pool_factory_config_file", "all models share TensorFlow's thread pools"),
    _ignored("num_tflite_pools", _NO_TFLITE),
    _ignored("num_tflite_interpreters_per_pool", _NO_TFLITE),
    _ignored("skip_initialize_tpu", "there are no TPUs here", is_boolean=True),
    _ignored("xla_cpu_compilation_enabled", _XLA, is_boolean=True),
    _ignored("xla_gpu_compilation_enabled", _XLA, is_boolean=True),
    _refused("platform_config_file", "SavedModels are all that is served", ""),
    _refused("use_alts_credentials", "ALTS is Google Cloud's", "false", is_boolean=True),
    _refused("prefer_tflite_model", _NO_TFLITE, "false", is_boolean=True),
    _refused("mixed_precision", "it would change what models answer", ""),
)
"""The flags of `tensorflow_model_server` (source: tensorflow_serving/model_servers/main.cc)."""

_BY_NAME = {flag.name.replace("_", "-"): flag for flag in STOCK_FLAGS}
_TRUE, _FALSE = ("true", "1", "t"), ("false", "0", "f")


def translate(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace TF Serving's flags by this program's options; also return notes on flags without effect.

    UsageError for a flag that is not supported.
    """
    translated: list[str] = []
    notes: list[str] = []
    ignored: dict[str, str] = {}
    for place, argument in enumerate(arguments):
        if argument == "--":
            translated += arguments[place:]
            break
        name, equals, value = argument.partition("=")
        flag = _BY_NAME.get(name.removeprefix("--").replace("_", "-")) if name.startswith("--") else None
        if flag is None:
            translated.append(_with_dashes(argument))
        elif flag.treatment is Treatment.SAME:
            translated += _options(flag, value if equals else None)
        elif value not in flag.harmless or not equals:
            _require_whole(flag, has_value=bool(equals))
            if flag.is_boolean:
                _truth(flag, value if equals else None)
            if flag.treatment is Treatment.REFUSED:
                raise UsageError(f"--{flag.name} is not supported", cause=flag.why, hint="leave it out")
            ignored[flag.name] = value
            notes.append(f"--{flag.name} has no effect: {flag.why}")
    _check_batching(ignored)
    return translated, notes


def _check_batching(given: Mapping[str, str]) -> None:
    """Refuse a use of the batching parameters that the stock server refuses."""
    file = given.get("batching_parameters_file")
    if file is None:
        return
    if given.get("enable_batching", "false").lower() in _FALSE:
        raise UsageError(
            "--batching_parameters_file without --enable_batching",
            cause="TF Serving refuses to start with it",
            hint="add --enable_batching, or leave the file out",
        )

    check_batching_parameters(Path(file))


def _options(flag: StockFlag, value: str | None) -> Iterable[str]:
    if not flag.is_boolean:
        return [flag.own if value is None else f"{flag.own}={value}"]
    if not _truth(flag, value):
        return [flag.option_if_false] if flag.option_if_false else []
    return [] if flag.option_if_false else [flag.own]


def _truth(flag: StockFlag, value: str | None) -> bool:
    text = "true" if value is None else value.lower()
    if text not in (*_TRUE, *_FALSE):
        raise UsageError(f"--{flag.name}={value}: expected true or false")
    return text in _TRUE


def _require_whole(flag: StockFlag, *, has_value: bool) -> None:
    """Refuse `--flag VALUE`: the value would be read as a model base path."""
    if not flag.is_boolean and not has_value:
        raise UsageError(f"--{flag.name} needs a value", hint=f"write it in one word: --{flag.name}=VALUE")


def _with_dashes(argument: str) -> str:
    """Replace underscores in the name of an option of this program."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}"
