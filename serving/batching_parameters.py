"""Check TF Serving's `--batching_parameters_file`: what the stock server refuses is refused here, too.

Requests are computed one by one here, so that the parameters have no effect; but a start script that works
here is to work there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from exporter.errors import UsageError
from exporter.wire.protos import Proto
from serving.text_config import read_text_config

_MAX_BATCH_SIZE = 1000
"""The stock server's own choice."""
_AT_LEAST = {
    "max_batch_size": 1,
    "max_execution_batch_size": 1,
    "batch_timeout_micros": 0,
    "max_enqueued_batches": 0,
    "num_batch_threads": 1,
}


def check_batching_parameters(path: Path) -> None:
    """Check a file of `BatchingParameters` in text form.

    Raises:
        UsageError: it cannot be read, holds something else, or numbers that do not go together.
    """
    found = read_text_config("--batching_parameters_file", path, "BatchingParameters")
    for problem in _problems(found):
        raise UsageError(
            f"--batching_parameters_file {path} cannot be used",
            cause=problem,
            hint="correct it: TF Serving refuses it, too",
        )


def _problems(found: Proto) -> Iterator[str]:
    """Sources: batching_util.cc and batching_session.cc; shared_batch_scheduler.h of TensorFlow."""
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
