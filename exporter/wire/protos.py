"""TensorFlow's protocol buffers without importing TensorFlow.

The installed packages `tensorflow` and `tensorflow_serving` ship `*_pb2.py` files that hold serialised
file descriptors. They are read here as data into a private descriptor pool (10 ms), which neither runs
TensorFlow's code (2-4 s) nor meets the default pool that TensorFlow fills when a builder imports it later.
Messages of the two pools are different classes: at the few places where one is handed to TensorFlow it goes
through `SerializeToString`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf import descriptor_pool


_FILES = (
    "tensorflow/core/protobuf/tensor_bundle.proto",
    "tensorflow/core/protobuf/saved_model.proto",
    "tensorflow/core/protobuf/config.proto",
    "tensorflow/core/util/saved_tensor_slice.proto",
)
"""In the order in which they are looked through: an index of tensors needs five small files, a graph all."""
_SERVING_FILES = (
    "tensorflow_serving/apis/prediction_log.proto",
    "tensorflow_serving/apis/get_model_metadata.proto",
    "tensorflow_serving/apis/model_service.proto",
)

Proto = Any
"""A message of the private pool; protobuf makes its class at run time, so there is no static type."""


_BUILDING = threading.RLock()
"""There is one pool, though threads ask for their first messages at once: those of two do not mix."""


def __getattr__(name: str) -> Any:
    """Message classes by their short names: `protos.BundleEntryProto()`."""
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return message_class(name)
    except KeyError:
        raise AttributeError(f"no protocol buffer named {name}") from None


@cache
def message_class(name: str) -> Any:
    """The class of message `tensorflow.<name>`; TF Serving's are called `serving.PredictRequest` and so on.

    Raises:
        KeyError: there is no such message.
    """
    from google.protobuf import message_factory

    files = _SERVING_FILES if name.startswith("serving.") else _FILES
    with _BUILDING:
        for file in files:
            _add_file(_pool(), file)
            with suppress(KeyError):
                return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"tensorflow.{name}"))
    raise KeyError(name)


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    from google.protobuf import descriptor_pool

    return descriptor_pool.DescriptorPool()


def _add_file(pool: descriptor_pool.DescriptorPool, file: str) -> None:
    from google.protobuf import descriptor_pb2

    try:
        pool.FindFileByName(file)
    except KeyError:
        serialized = _descriptor_bytes(file)
        for dependency in descriptor_pb2.FileDescriptorProto.FromString(serialized).dependency:
            _add_file(pool, dependency)
        pool.AddSerializedFile(serialized)


def _descriptor_bytes(file: str) -> bytes:
    module = file.removesuffix(".proto") + "_pb2"
    if file.startswith("google/protobuf/"):
        descriptor = importlib.import_module(module.replace("/", ".")).DESCRIPTOR
        return bytes(descriptor.serialized_pb)
    package, _, rest = module.partition("/")
    for node in ast.walk(ast.parse((package_directory(package) / f"{rest}.py").read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "AddSerializedFile":
            return bytes(ast.literal_eval(node.args[0]))
    raise ImportError(f"{module}.py holds no serialised descriptor")


def all_nodes(graph_def: Proto) -> Iterator[Proto]:
    """The nodes of a graph and of its functions."""
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


@cache
def package_directory(package: str) -> Path:
    """Where a package's files are, without importing it.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    if package == "xla":  # XLA's protos ship inside tensorflow, but name themselves by their own root
        return package_directory("tensorflow") / "compiler" / "xla"
    spec = importlib.util.find_spec(package)  # finds the package's files, does not import it
    if spec is None or spec.origin is None:
        distribution = {"tensorflow_serving": "tensorflow-serving-api"}.get(package, package)
        raise ModuleNotFoundError(f"{package} is not installed: pip install '{distribution}>=2.21,<2.22'")
    return Path(spec.origin).parent
