"""Warm-up: run the requests that a SavedModel brings along before it serves.

They are `PredictionLog` messages in an uncompressed TFRecord file
(source: tensorflow_serving/g3doc/saved_model_warmup.md). A record is a length (uint64), its masked crc32c,
the data and its masked crc32c, all little endian.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from exporter.files import open_regular
from exporter.wire.protos import Proto, message_class
from serving.inference import Model, classify, multi_inference, predict, regress
from serving.status import Code, StatusError, invalid

WARMUP_FILE = Path("assets.extra", "tf_serving_warmup_requests")
MAX_RECORDS = 1000
_MAX_RECORD_BYTES = (1 << 31) - 1
_MASK_DELTA = 0xA282EAD8


def warm_up(model: Model, directory: Path) -> int:
    """Replay the warm-up requests of the SavedModel in `directory`, in file order; returns their number.

    Raises:
        StatusError: DATA_LOSS, the file is damaged; INVALID_ARGUMENT, a record is not a PredictionLog or
            there are more than 1000; UNIMPLEMENTED, a session run log; or whatever a request ends in.
        tensorflow.errors.OpError: whatever a request raises in the graph.
    """
    path = directory / WARMUP_FILE
    if not path.is_file():
        return 0
    count = 0
    with os.fdopen(open_regular(path), "rb") as file:
        for count, record in enumerate(_records(file, path), 1):
            if count > MAX_RECORDS:
                raise invalid(f"Number of warmup records exceeds the maximum ({MAX_RECORDS}) at {path}")
            _replay(model, record, path)
    return count


_REPLAYS: dict[str, tuple[Callable[[Model, Proto, Proto], None], str]] = {
    "predict_log": (predict, "serving.PredictResponse"),
    "classify_log": (classify, "serving.ClassificationResponse"),
    "regress_log": (regress, "serving.RegressionResponse"),
    "multi_inference_log": (multi_inference, "serving.MultiInferenceResponse"),
}


def _replay(model: Model, record: bytes, path: Path) -> None:
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
    run(model, getattr(log, kind).request, message_class(response)())


def _records(file: IO[bytes], path: Path) -> Iterator[bytes]:
    while header := file.read(12):
        (length,) = struct.unpack("<Q", _checked(header, 8, path))
        if length > _MAX_RECORD_BYTES:
            raise _damaged(path)
        yield _checked(file.read(length + 4), length, path)


def _checked(data: bytes, length: int, path: Path) -> bytes:
    import google_crc32c

    if len(data) != length + 4:
        raise _damaged(path)
    body = data[:length]
    crc = google_crc32c.value(body)
    if struct.unpack_from("<I", data, length)[0] != ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF:
        raise _damaged(path)
    return body


def _damaged(path: Path) -> StatusError:
    return StatusError(
        Code.DATA_LOSS, f"{path} is damaged. Please verify your warmup data is in TFRecord format."
    )
