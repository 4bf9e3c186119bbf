"""TensorFlow's protocol buffers without TensorFlow.

The package ships the descriptors of TensorFlow and TensorFlow Serving as one `FileDescriptorSet`
(`descriptors.binpb`, made by `tools/stock_tensorflow.py`). They are read into a private descriptor pool (2
ms), separate from the default pool that TensorFlow fills when a builder imports it later.

Messages of the two pools are different classes: at the few places where one is passed to TensorFlow it goes
through `SerializeToString`.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf import descriptor_pool


_DESCRIPTORS = Path(__file__).with_name("descriptors.binpb")
# In search order: an index of tensors needs five small files, a graph all.
_FILES = (
    "tensorflow/core/protobuf/tensor_bundle.proto",
    "tensorflow/core/protobuf/saved_model.proto",
    "tensorflow/core/protobuf/config.proto",
    "tensorflow/core/util/saved_tensor_slice.proto",
)
_SERVING_FILES = (
    "tensorflow_serving/apis/prediction_log.proto",
    "tensorflow_serving/apis/get_model_metadata.proto",
    "tensorflow_serving/apis/model_service.proto",
    "tensorflow_serving/apis/prediction_service.proto",
)

MAX_MESSAGE_BYTES = (1 << 31) - 1  # the largest message that readers of protocol buffers accept

Proto = Any  # a message of the private pool; protobuf makes its class at run time, so there is no static type


# Guards the creation of the one pool: threads may need their first messages at once, and messages of two
# pools do not mix.
_BUILDING = threading.RLock()


def __getattr__(name: str) -> Any:
    """Return the message class with a short name: `protos.BundleEntryProto` is `tensorflow.BundleEntryProto`.

    AttributeError if there is none.
    """
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return message_class(name)
    except KeyError:
        raise AttributeError(f"no protocol buffer named {name}") from None


@cache
def message_class(name: str) -> Any:
    """Return the class of message `tensorflow.<name>` in the private pool, memoised; any thread may call it.

    TF Serving's are called `serving.PredictRequest` and so on.

    Raises:
        KeyError: there is no such message.
    """
    files = _SERVING_FILES if name.startswith("serving.") else _FILES
    with _BUILDING:
        for file in files:
            _add_file(_pool(), file)
            with suppress(KeyError):
                return _held(_pool().FindMessageTypeByName(f"tensorflow.{name}"))
    raise KeyError(name)


_HELD: dict[str, Any] = {}  # classes of messages by their full names; see `_held`


def _held(descriptor: Any) -> Any:
    """Return the class of a message, given its descriptor.

    The class, and the classes of all messages in its fields, are kept as long as the process lives.
    """
    # protobuf returns the class of a field's message from a table that Python's collector does not know:
    # while no such message exists, the class is garbage. A collection may let another thread run before it
    # clears the garbage, and a message that this thread makes then has a cleared class: the process died of
    # SIGSEGV in `PyUpb_Descriptor_GetDef` (protobuf 7.36, a server that got a request while loading).
    left = [descriptor]
    while left:
        each = left.pop()
        if each.full_name not in _HELD:
            _HELD[each.full_name] = class_of(each)
            left += [field.message_type for field in each.fields if field.message_type is not None]
    return _HELD[descriptor.full_name]


def class_of(descriptor: Any) -> Any:
    """Return the class of a message of any pool, given its descriptor."""
    from google.protobuf import message_factory

    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(descriptor)
    older: Any = message_factory.MessageFactory(descriptor.file.pool)  # protobuf before 4.22
    return older.GetPrototype(descriptor)


@cache
def service_methods(name: str) -> dict[str, tuple[Any, Any]]:
    """Return {method: (class of its request, class of its response)} of a service of TF Serving.

    `name` follows `tensorflow.serving.`. Memoised. KeyError if there is no such service.
    """
    with _BUILDING:
        for file in _SERVING_FILES:
            _add_file(_pool(), file)
        methods = _pool().FindServiceByName(f"tensorflow.serving.{name}").methods
        return {method.name: (_held(method.input_type), _held(method.output_type)) for method in methods}


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    from google.protobuf import descriptor_pool

    return descriptor_pool.DescriptorPool()


@cache
def _shipped() -> dict[str, Any]:
    """Return {name: FileDescriptorProto} of all shipped files, memoised."""
    from google.protobuf import descriptor_pb2

    files = descriptor_pb2.FileDescriptorSet.FromString(_DESCRIPTORS.read_bytes()).file
    return {file.name: file for file in files}


def _add_file(pool: descriptor_pool.DescriptorPool, name: str) -> None:
    """Add a file to the pool, after all files that it depends on; nothing changes if it is there."""
    left = [] if _is_in(pool, name) else [name]
    while left:
        file = _shipped().get(left[-1]) or _of_the_runtime(left[-1])
        if missing := [each for each in file.dependency if not _is_in(pool, each)]:
            left += missing
            continue
        # several files may have asked for the same import
        if not _is_in(pool, left.pop()):
            # a file is refused until all files that it imports are in the pool
            pool.AddSerializedFile(file.SerializeToString())


def _is_in(pool: descriptor_pool.DescriptorPool, name: str) -> bool:
    with suppress(KeyError):
        pool.FindFileByName(name)
        return True
    return False


def _of_the_runtime(name: str) -> Any:
    """Return the `FileDescriptorProto` of a file that every runtime has, like `google/protobuf/any.proto`."""
    from google.protobuf import descriptor_pb2

    module = importlib.import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
    return descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)


def varint(value: int) -> bytes:
    """Return a non-negative number as protocol buffers encode it: seven bits a byte, lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def all_nodes(graph_def: Proto) -> Iterator[Proto]:
    """Yield the nodes of a graph, then the nodes of its functions, both in the order of the GraphDef."""
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def
