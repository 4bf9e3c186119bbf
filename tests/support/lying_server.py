"""A model server that answers each call truly, but for one lie: a field of one answer is replaced."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np

from exporter.wire.protos import Proto, message_class
from exporter.wire.tensor_proto import fill

Lie = Callable[[Proto], bytes]
"""The bytes that are sent in place of a true answer."""

PREDICTION, MODELS = "/tensorflow.serving.PredictionService", "/tensorflow.serving.ModelService"
TYPES = {
    f"{PREDICTION}/Predict": ("serving.PredictRequest", "serving.PredictResponse"),
    f"{PREDICTION}/Classify": ("serving.ClassificationRequest", "serving.ClassificationResponse"),
    f"{PREDICTION}/Regress": ("serving.RegressionRequest", "serving.RegressionResponse"),
    f"{PREDICTION}/GetModelMetadata": ("serving.GetModelMetadataRequest", "serving.GetModelMetadataResponse"),
    f"{MODELS}/GetModelStatus": ("serving.GetModelStatusRequest", "serving.GetModelStatusResponse"),
    f"{MODELS}/HandleReloadConfigRequest": ("serving.ReloadConfigRequest", "serving.ReloadConfigResponse"),
}
LINEAGE = "12" * 16
HOSTILE_TEXT = "\x1b[2J\x1b]0;owned\x07\r\n# HELP up\nup 1\u202e<script>\u2028"

# The outputs of each signature's true answer.
OUTPUTS: dict[str, dict[str, Any]] = {
    "serving_default": {"y": np.ones([1, 2], np.float32)},
    "incremental_status": {
        "position": np.array([7]),
        "step": np.array([7]),
        "lineage": [LINEAGE.encode()],
        "unsettled": np.array([0]),
        "mapped_tables": np.array([1]),
        "tables_to_map": np.array([1]),
        "overlay_percent": np.array([3]),
    },
    "incremental_update": {
        **{name: np.array([7]) for name in ("position", "step", "rows", "deltas")},
        "status": [b"current"],
    },
    "incremental_digest": {
        "digest": [b"1"],
        "position_before": np.array([7]),
        "position_after": np.array([7]),
    },
    "classify": {},
    "regress": {},
}
_INPUTS = {"incremental_status": "probe", "incremental_update": "up_to", "incremental_digest": "rows"}


def true_answer(path: str, request: Proto) -> Proto:
    """The answer of a server with one version, 7, of a model that takes deltas."""
    answer = message_class(TYPES[path][1])()
    if path.endswith("GetModelStatus"):
        entry = answer.model_version_status.add(version=7, state=30)
        entry.status.error_code, entry.status.error_message = 0, "fine"
        return answer
    if path.endswith("HandleReloadConfigRequest"):
        answer.status.error_message = "fine"
        return answer
    answer.model_spec.name, answer.model_spec.version.value = "m", 7
    if path.endswith("Predict"):
        for name, value in OUTPUTS[request.model_spec.signature_name or "serving_default"].items():
            fill(answer.outputs[name], np.asarray(value, object) if isinstance(value, list) else value)
    elif path.endswith("Classify"):
        answer.result.classifications.add().classes.add(label="a", score=0.5)
    elif path.endswith("Regress"):
        answer.result.regressions.add(value=0.5)
    else:
        answer.metadata["signature_def"].Pack(_signatures())
    return answer


def _signatures() -> Proto:
    found = message_class("serving.SignatureDefMap")()
    for name, outputs in OUTPUTS.items():
        signature = found.signature_def[name]
        kind = name if name in ("classify", "regress") else "predict"
        signature.method_name = f"tensorflow/serving/{kind}"
        _info(
            signature.inputs[_INPUTS.get(name, "x")], 9 if name in _INPUTS else 1 if kind == "predict" else 7
        )
        for output, value in outputs.items():
            _info(signature.outputs[output], 7 if isinstance(value, list) else 9 if len(value) == 1 else 1)
    return found


def _info(info: Proto, dtype: int) -> None:
    info.name, info.dtype = "t:0", dtype
    info.tensor_shape.dim.add().size = -1


class LyingServer:
    """`lie` is told instead of the answer to calls of `path`, and to those of a signature if one is named."""

    def __init__(self) -> None:
        self.address = ""
        self.path = self.signature = ""
        self.lie: Lie | None = None
        self.told = 0
        self._lock = threading.Lock()

    def answer(self, path: str, content: bytes) -> bytes:
        request = message_class(TYPES[path][0]).FromString(content)
        found = true_answer(path, request)
        signature = request.model_spec.signature_name if path.endswith("Predict") else ""
        if self.lie is None or path != self.path or (self.signature and signature != self.signature):
            return bytes(found.SerializeToString())
        with self._lock:
            self.told += 1
        return self.lie(found)


@contextmanager
def lying_server() -> Iterator[LyingServer]:
    """Run one on a loopback port."""
    lying = LyingServer()
    served = grpc.server(ThreadPoolExecutor(4))
    methods: dict[str, dict[str, Any]] = {}
    for path in TYPES:
        _, service, method = path.split("/")
        methods.setdefault(service, {})[method] = grpc.unary_unary_rpc_method_handler(
            lambda content, _, path=path: lying.answer(path, content)
        )
    served.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(name, handlers) for name, handlers in methods.items()]
    )
    lying.address = f"127.0.0.1:{served.add_insecure_port('127.0.0.1:0')}"
    served.start()
    try:
        yield lying
    finally:
        served.stop(0).wait()


def lies(path: str, signature: str) -> Iterator[tuple[str, Lie]]:
    """Yield each lie about an answer, with its name: garbage, and every field replaced by each odd value."""
    for name, content in _GARBAGE.items():
        yield name, lambda _, content=content: content
    request = message_class(TYPES[path][0])()
    if path.endswith("Predict"):
        request.model_spec.signature_name = signature
    truth = true_answer(path, request)
    for steps, number in _places(truth):
        yield f"{'.'.join(map(str, steps))} {number}", lambda found, s=steps, n=number: _told(found, s, n)
    for name in truth.outputs if path.endswith("Predict") else ():
        for said, tensor in _tensors().items():
            yield f"{name} {said}", lambda found, n=name, t=tensor: _with_tensor(found, n, t)
    if path.endswith("GetModelMetadata"):
        inner = _signatures()
        for steps, number in _places(inner):
            yield (
                f"{'.'.join(map(str, steps))} {number}",
                lambda found, s=steps, n=number: _packed(found, s, n),
            )


_GARBAGE = {
    "nothing": b"",
    "no message": b"\xff" * 40,
    "a text": b"HTTP/1.1 200 OK\r\n\r\n",
    "nested without end": b"\x0a\x80\x01" * 500,
    "a length beyond its end": b"\x0a\xff\xff\xff\xff\x07",
}
_BY_KIND: dict[str, tuple[Any, ...]] = {
    "int": (-1, 0, 99, (1 << 31) - 1, -(1 << 31)),
    "long": (-1, 0, (1 << 63) - 1, -(1 << 63)),
    "float": (float("nan"), float("inf")),
    "bool": (True,),
    "text": ("", HOSTILE_TEXT, "x" * 70_000, "999"),
    "bytes": (b"", b"\xff\xfe", b"\x1b[2J" * 10, b"9" * 5000),
}


def _kind(field: Any) -> str:
    if field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
        return "long"
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return "float"
    if field.cpp_type == field.CPPTYPE_BOOL:
        return "bool"
    if field.cpp_type == field.CPPTYPE_STRING:
        return "bytes" if field.type == field.TYPE_BYTES else "text"
    return "int"


def _places(message: Proto, steps: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield the steps to each field that is set, with the numbers of its odd values; -1 clears it."""
    for field, value in message.ListFields():
        yield (*steps, field.name), -1
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if is_map and field.message_type.fields_by_name["value"].message_type is not None:
            for key in sorted(value):
                yield from _places(value[key], (*steps, field.name, key))
        elif field.message_type is not None and isinstance(value, type(message).__mro__[-2]):
            yield from _places(value, (*steps, field.name))
        elif field.message_type is not None and not is_map:
            for at, each in enumerate(value):
                yield from _places(each, (*steps, field.name, at))
        elif not is_map:
            for number in range(len(_BY_KIND[_kind(field)])):
                yield (*steps, field.name), number


def _changed(message: Proto, steps: tuple[Any, ...], number: int) -> None:
    for step in steps[:-1]:
        message = (
            getattr(message, step) if isinstance(step, str) and hasattr(message, step) else message[step]
        )
    field = message.DESCRIPTOR.fields_by_name[steps[-1]]
    message.ClearField(field.name)
    if number < 0:
        return
    value = _BY_KIND[_kind(field)][number]
    if isinstance(getattr(message, field.name), bool | int | float | str | bytes):
        if field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64):
            value = abs(value)
        setattr(message, field.name, value)
    else:
        getattr(message, field.name).extend([value] * 3)


def _told(found: Proto, steps: tuple[Any, ...], number: int) -> bytes:
    _changed(found, steps, number)
    return bytes(found.SerializeToString())


def _packed(found: Proto, steps: tuple[Any, ...], number: int) -> bytes:
    inner = copy.deepcopy(_signatures())
    _changed(inner, steps, number)
    found.metadata["signature_def"].Pack(inner)
    return bytes(found.SerializeToString())


def _with_tensor(found: Proto, name: str, tensor: Proto) -> bytes:
    found.outputs[name].CopyFrom(tensor)
    return bytes(found.SerializeToString())


def _tensors() -> dict[str, Proto]:
    """Tensors that no model server sends."""
    made = message_class("TensorProto")

    def of(sizes: tuple[int, ...], **fields: Any) -> Proto:
        tensor = made(**fields)
        for size in sizes:
            tensor.tensor_shape.dim.add().size = size
        return tensor

    return {
        "fills a gigabyte": of((1 << 28,), dtype=1, float_val=[1.0]),
        "fills a gigabyte with texts": of((1 << 25,), dtype=7, string_val=[b"x"]),
        "fills all memory": of((1 << 31, 1 << 31), dtype=9),
        "sizes whose product overflows": of((1 << 62, 1 << 62), dtype=9),
        "of size zero": of((0,), dtype=9),
        "large and empty": of((1 << 62, 0), dtype=9),
        "a scalar": of((), dtype=9, int64_val=[7]),
        "a negative size": of((-2,), dtype=9),
        "texts": of((1,), dtype=7, string_val=[b"\xff\xfe"]),
        "a hostile text": of((1,), dtype=7, string_val=[HOSTILE_TEXT.encode()]),
        "a number of 5000 digits": of((1,), dtype=7, string_val=[b"9" * 5000]),
        "not a number": of((1,), dtype=1, float_val=[float("nan")]),
        "infinite": of((1,), dtype=2, double_val=[float("inf")]),
        "complex": of((1,), dtype=8, scomplex_val=[1.0, 1.0]),
        "a resource": of((1,), dtype=20),
        "a variant": of((1,), dtype=21),
        "quantised": of((1,), dtype=11, int_val=[1]),
        "of no type": of((1,), dtype=9999),
        "of many dimensions": of((1,) * 300, dtype=9, int64_val=[1]),
        "content of half a value": of((1,), dtype=9, tensor_content=b"abc"),
        "the largest number": of((1,), dtype=9, int64_val=[(1 << 63) - 1]),
        "the least number": of((1,), dtype=9, int64_val=[-(1 << 63)]),
    }
