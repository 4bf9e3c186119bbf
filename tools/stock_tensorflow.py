"""`python -m tools.stock_tensorflow`: what the package knows of TensorFlow, from the one installed here.

Two files of `exporter/wire/` are made:

- `descriptors.binpb`, a `FileDescriptorSet`: the messages of TensorFlow and TensorFlow Serving. Wheels hold
  them in `*_pb2.py` files, read as text here: importing them would fill protobuf's default pool.
- `stock_ops.txt`, a line for each operation: its name, then the names of its attributes, or `?` where they
  are not known. From the generated modules of `tf.raw_ops`, read as text, too.

Run it when the newest supported TensorFlow changes; `tests/test_stock_tensorflow.py` fails until then.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

from google.protobuf import descriptor_pb2

ROOT = Path(__file__).parents[1]
DESCRIPTORS = ROOT / "exporter/wire/descriptors.binpb"
STOCK_OPS = ROOT / "exporter/wire/stock_ops.txt"
FILES = (
    "tensorflow/core/protobuf/tensor_bundle.proto",
    "tensorflow/core/protobuf/saved_model.proto",
    "tensorflow/core/protobuf/config.proto",
    "tensorflow/core/util/saved_tensor_slice.proto",
    "tensorflow_serving/apis/prediction_log.proto",
    "tensorflow_serving/apis/get_model_metadata.proto",
    "tensorflow_serving/apis/model_service.proto",
    "tensorflow_serving/apis/prediction_service.proto",
)
"""With all that they import."""
_RUNTIME = "google/protobuf/"
"""Files that every protobuf runtime has; they are not TensorFlow's."""


def descriptor_set(files: tuple[str, ...] = FILES) -> descriptor_pb2.FileDescriptorSet:
    """The installed packages' files, each after those that it imports.

    Raises:
        ModuleNotFoundError: a package is not installed.
    """
    found: dict[str, descriptor_pb2.FileDescriptorProto] = {}

    def add(name: str) -> None:
        if name in found or name.startswith(_RUNTIME):
            return
        file = descriptor_pb2.FileDescriptorProto.FromString(_serialized(name))
        for dependency in file.dependency:
            add(dependency)
        found[name] = file

    for name in files:
        add(name)
    return descriptor_pb2.FileDescriptorSet(file=found.values())


def stock_ops() -> str:
    """The installed TensorFlow's operations, a line each."""
    root = _package("tensorflow")
    listed = re.findall(
        r"^from tensorflow\.(python\.\S+) import (\w+)",
        (root / "_api/v2/raw_ops/__init__.py").read_text(),
        re.MULTILINE,
    )
    attributes: dict[str, list[str]] = {}
    for module in sorted({module for module, _ in listed}):
        path = root / f"{module.replace('.', '/')}.py"
        attributes |= _attributes(path.read_text()) if path.is_file() else {}
    lines = (" ".join([op, *attributes.get(op, ["?"])]) for op in sorted({op for _, op in listed}))
    return "".join(f"{line}\n" for line in lines)


def _attributes(text: str) -> dict[str, list[str]]:
    helper = r'_apply_op_helper\(\s*"(\w+)"(?:(?!_apply_op_helper).)*?_attrs = (None|\(.*?\))\n'
    named = re.compile(r'"(\w+)"')
    return {op: sorted(set(named.findall(found))) for op, found in re.findall(helper, text, re.DOTALL)}


def _serialized(name: str) -> bytes:
    package, _, rest = name.removesuffix(".proto").partition("/")
    path = _package(package) / f"{rest}_pb2.py"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "AddSerializedFile":
            return bytes(ast.literal_eval(node.args[0]))
    raise ImportError(f"{path} holds no serialised descriptor")


def _package(name: str) -> Path:
    """Where a package's files are. XLA's and TSL's ship inside TensorFlow, under names of their own roots."""
    if name == "xla":
        return _package("tensorflow") / "compiler/xla"
    if name == "tsl":  # until 2.16
        return _package("tensorflow") / "tsl"
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{name} is not installed")
    return Path(spec.origin).parent


if __name__ == "__main__":
    DESCRIPTORS.write_bytes(descriptor_set().SerializeToString(deterministic=True))
    STOCK_OPS.write_text(stock_ops())
