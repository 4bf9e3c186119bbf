"""The shipped descriptors and operations of TensorFlow, against the installed TensorFlow."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from exporter.wire.stock_ops import attribute_text, late_ops
from tools import stock_tensorflow

ROOT = Path(__file__).parents[1]
MADE_FROM = "2.21."
"""The TensorFlow that the files were made from: the newest that is supported."""

newest = pytest.mark.skipif(
    not version("tensorflow").startswith(MADE_FROM), reason=f"the files are those of TensorFlow {MADE_FROM}"
)


def fields(
    messages: Iterable[descriptor_pb2.DescriptorProto], scope: str
) -> Iterator[tuple[str, int, int, int, str]]:
    for message in messages:
        name = f"{scope}.{message.name}"
        for field in message.field:
            yield name, field.number, field.type, field.label, field.type_name
        yield from fields(message.nested_type, name)


def known(files: Any) -> set[tuple[str, int, int, int, str]]:
    return {found for file in files for found in fields(file.message_type, file.package)}


def shipped() -> Any:
    return descriptor_pb2.FileDescriptorSet.FromString(stock_tensorflow.DESCRIPTORS.read_bytes()).file


@newest
def test_the_descriptors_are_those_of_the_installed_packages() -> None:
    made = stock_tensorflow.descriptor_set()
    assert list(made.file) == list(shipped()), "python -m tools.stock_tensorflow"


def test_every_field_of_the_installed_tensorflow_is_known() -> None:
    """An older TensorFlow has a part of these messages; none of its fields has become another."""
    installed = stock_tensorflow.descriptor_set(
        tuple(name for name in stock_tensorflow.FILES if name.startswith("tensorflow/"))
    )
    assert known(installed.file) - known(shipped()) == set()


@newest
def test_what_came_late_has_the_default_that_the_installed_tensorflow_says() -> None:
    from tensorflow.python.framework import op_def_registry

    checked = 0
    for op, attributes in late_ops().attributes.items():
        definition = op_def_registry.get(op)
        defaults = {each.name: each.default_value for each in definition.attr} if definition else {}
        for name, grown in attributes.items():
            for each in grown:
                if each.default and name in defaults:
                    assert each.default == attribute_text(defaults[name]), f"{op}.{name}"
                    checked += 1
    assert checked > 200


@newest
def test_the_operations_are_those_of_the_installed_tensorflow() -> None:
    assert stock_tensorflow.STOCK_OPS.read_text() == stock_tensorflow.stock_ops()


def test_every_operation_of_the_installed_tensorflow_is_known() -> None:
    from exporter.wire.stock_ops import is_stock, stock_attributes

    for line in stock_tensorflow.stock_ops().splitlines():
        op, *attributes = line.split()
        assert is_stock(op)
        assert attributes == ["?"] or set(attributes) <= (stock_attributes(op) or set()), op


USED = """
from exporter.wire import protos
model = protos.SavedModel()
node = model.meta_graphs.add().graph_def.node.add(name="x", op="Placeholder")
node.attr["dtype"].type = 1
protos.message_class("serving.GetModelMetadataResponse")().metadata["m"].Pack(
    protos.message_class("serving.SignatureDefMap")())
protos.message_class("ConfigProto"), protos.message_class("SavedTensorSlices"), protos.BundleEntryProto
protos.service_methods("PredictionService"), protos.service_methods("ModelService")
"""
TRAINED = """
import tensorflow as tf
graph = tf.compat.v1.GraphDef.FromString(model.meta_graphs[0].graph_def.SerializeToString())
with tf.Graph().as_default():
    tf.graph_util.import_graph_def(graph, name="")
"""


@pytest.mark.landing
@pytest.mark.parametrize(
    "code", [USED + TRAINED, "import tensorflow\n" + USED + TRAINED], ids=["before", "after"]
)
def test_messages_beside_tensorflow(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=300)


def test_messages_without_tensorflow() -> None:
    without = "import sys; sys.modules.update(tensorflow=None, tensorflow_serving=None)\n"
    subprocess.run([sys.executable, "-c", without + USED], check=True, cwd=ROOT, timeout=300)
