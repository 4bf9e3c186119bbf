"""TensorFlow's protocol buffers without importing TensorFlow.

The installed `tensorflow` package ships `*_pb2.py` files that hold serialised file descriptors. They are
read here as data into a private descriptor pool (10 ms), which neither runs TensorFlow's code (2-4 s) nor meets the
default pool that TensorFlow fills when a builder imports it later. Messages of the two pools are different
classes: at the few places where one is handed to TensorFlow it goes through `SerializeToString`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FILES = ("tensorflow/core/protobuf/saved_model.proto", "tensorflow/core/protobuf/tensor_bundle.proto")

Proto = Any
"""A message of the private pool; protobuf makes its class at run time, so there is no static type."""


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
    """The class of message `tensorflow.<name>`.

    Raises:
        KeyError: there is no such message.
    """
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"tensorflow.{name}"))


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    spec = importlib.util.find_spec("tensorflow")  # finds the package's files, does not import it
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("tensorflow is not installed: pip install 'tensorflow>=2.21,<2.22'")
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()
    for file in _FILES:
        _add_file(pool, Path(spec.origin).parent.parent, file, added)
    return pool


def _add_file(pool: descriptor_pool.DescriptorPool, site: Path, file: str, added: set[str]) -> None:
    if file in added:
        return
    added.add(file)
    serialized = _descriptor_bytes(site, file)
    for dependency in descriptor_pb2.FileDescriptorProto.FromString(serialized).dependency:
        _add_file(pool, site, dependency, added)
    pool.AddSerializedFile(serialized)


def _descriptor_bytes(site: Path, file: str) -> bytes:
    module = file.removesuffix(".proto") + "_pb2"
    if file.startswith("google/protobuf/"):
        descriptor = importlib.import_module(module.replace("/", ".")).DESCRIPTOR
        return bytes(descriptor.serialized_pb)
    for node in ast.walk(ast.parse((site / f"{module}.py").read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "AddSerializedFile":
            return bytes(ast.literal_eval(node.args[0]))
    raise ImportError(f"tensorflow's {module}.py holds no serialised descriptor")
