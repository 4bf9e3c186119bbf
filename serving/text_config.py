"""Read the small configuration files of TF Serving's binary: protocol buffers in text form.

    server_key: "-----BEGIN PRIVATE KEY-----\\n..."
    client_verify: true

The installed package lacks the messages of three of them, so they are defined here (sources:
tensorflow_serving/config/ssl_config.proto and monitoring_config.proto, session_bundle_config.proto).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from exporter.errors import UsageError
from exporter.storage.files import read_regular
from exporter.wire.protos import Proto, class_of, message_class

_LARGEST = 16 << 20
_PACKAGE = "tensorflow.serving"
_FIELDS: dict[str, dict[str, str]] = {
    "SSLConfig": {
        "server_key": "string",
        "server_cert": "string",
        "custom_ca": "string",
        "client_verify": "bool",
    },
    "PrometheusConfig": {"enable": "bool", "path": "string"},
    "MonitoringConfig": {"prometheus_config": "PrometheusConfig"},
    "BatchingParameters": {
        "max_batch_size": "Int64Value",
        "batch_timeout_micros": "Int64Value",
        "max_enqueued_batches": "Int64Value",
        "num_batch_threads": "Int64Value",
        "thread_pool_name": "StringValue",
        "allowed_batch_sizes": "repeated int64",
        "pad_variable_length_inputs": "bool",
        "enable_large_batch_splitting": "BoolValue",
        "max_execution_batch_size": "Int64Value",
    },
}
_SCALARS = {"string": "TYPE_STRING", "bool": "TYPE_BOOL", "int64": "TYPE_INT64"}


def read_text_config(option: str, path: Path, message: str, *, is_secret: bool = False) -> Proto:
    """Read a message of protocol buffers in text form from a file, and return it.

    Args: option: the option that names the file, for errors. path: the file, of at most 16 MiB. message: the
    message's name, as for `message_class`, or a name that this module defines. is_secret: errors give only
    the place of a mistake, not the text there.

    Raises:
        UsageError: the file cannot be read, is too long, or has other content.
        LfsPointer: it is a pointer of Git LFS.
    """
    from google.protobuf import text_format

    kind = message.rpartition(".")[2]
    hint = f"write it as TF Serving's {kind} in text form"
    try:
        text = read_regular(path, _LARGEST).decode()
        found = _classes()[message] if message in _FIELDS else message_class(message)
        return text_format.Parse(text, found())
    except OSError as error:
        cause = error.strerror or str(error)
        raise UsageError(f"{option} {path} cannot be read", cause=cause, hint=hint) from None
    except text_format.ParseError as error:
        cause = f"line {error.GetLine()}, column {error.GetColumn()}" if is_secret else f"line {error}"
        raise UsageError(f"{option} {path} is not a valid {kind}", cause=cause, hint=hint) from None
    except ValueError:
        raise UsageError(
            f"{option} {path} is not a valid {kind}", cause="it is not UTF-8", hint=hint
        ) from None


@cache
def _classes() -> dict[str, Any]:
    from google.protobuf import descriptor_pb2, descriptor_pool, wrappers_pb2

    field, wrappers = descriptor_pb2.FieldDescriptorProto, wrappers_pb2.DESCRIPTOR
    file = descriptor_pb2.FileDescriptorProto(name="text_config.proto", package=_PACKAGE, syntax="proto3")
    file.dependency.append(wrappers.name)
    for name, fields in _FIELDS.items():
        made = file.message_type.add(name=name)
        # Any numbers will do: text form has the fields' names alone.
        for number, (key, kind) in enumerate(fields.items(), 1):
            repeated, _, one = kind.rpartition(" ")
            label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            added = made.field.add(name=key, number=number, label=label)
            if one in _SCALARS:
                added.type = getattr(field, _SCALARS[one])
            else:
                package = _PACKAGE if one in _FIELDS else wrappers.package
                added.type, added.type_name = field.TYPE_MESSAGE, f".{package}.{one}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(wrappers.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return {name: class_of(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _FIELDS}
