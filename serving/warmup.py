"""Warm-up: run the requests that a SavedModel brings along before it serves.

They are `PredictionLog` messages in an uncompressed TFRecord file
(source: tensorflow_serving/g3doc/saved_model_warmup.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from exporter.files import open_regular
from exporter.layout import WARMUP_FILE
from exporter.wire.protos import Proto, message_class
from serving.inference import DEFAULT_INFERENCE, Inference, Model, classify, multi_inference, predict, regress
from serving.status import Code, StatusError, invalid

MAX_RECORDS = 1000


def warm_up(model: Model, directory: Path, how: Inference = DEFAULT_INFERENCE, *, iterations: int = 1) -> int:
    """Replay the warm-up requests of the SavedModel in `directory`, in file order; returns their number.

    Each is sent `iterations` times before the next one.

    Raises:
        StatusError: DATA_LOSS, the file is damaged; INVALID_ARGUMENT, a record is not a PredictionLog or
            there are more than 1000; UNIMPLEMENTED, a session run log; or whatever a request ends in.
        tensorflow.errors.OpError: whatever a request raises in the graph.
    """
    from exporter.wire.tfrecord import DamagedRecord, read_records

    path = directory / WARMUP_FILE
    if not path.is_file() or not iterations:
        return 0
    count = 0
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            for count, record in enumerate(read_records(file), 1):
                if count > MAX_RECORDS:
                    raise invalid(f"Number of warmup records exceeds the maximum ({MAX_RECORDS}) at {path}")
                _replay(model, record, path, how, iterations)
        except DamagedRecord:
            text = f"{path} is damaged. Please verify your warmup data is in TFRecord format."
            raise StatusError(Code.DATA_LOSS, text) from None
    return count


_REPLAYS: dict[str, tuple[Callable[[Model, Proto, Proto, Inference], None], str]] = {
    "predict_log": (predict, "serving.PredictResponse"),
    "classify_log": (classify, "serving.ClassificationResponse"),
    "regress_log": (regress, "serving.RegressionResponse"),
    "multi_inference_log": (multi_inference, "serving.MultiInferenceResponse"),
}


def _replay(model: Model, record: bytes, path: Path, how: Inference, iterations: int) -> None:
    from google.protobuf.message import DecodeError

    try:
        log = message_class("serving.PredictionLog").FromString(record)
    except DecodeError:
        raise invalid(f"Failed to parse warmup record from {path}") from None
    kind = log.WhichOneof("log_type")
    if kind is None:
        return
    if kind not in _REPLAYS:
        raise StatusError(Code.UNIMPLEMENTED, f"Unsupported log_type for warmup: {kind}")
    run, response = _REPLAYS[kind]
    for _ in range(iterations):
        run(model, getattr(log, kind).request, message_class(response)(), how)
