"""`python -m tools.server_ops`: which TensorFlow brought which operation, attribute and type.

It asks the registries of the wheels' C++ libraries, each in an environment of its own
(`tests/support/environments.py`), and writes `exporter/wire/server_ops.txt`. A type counts if a kernel for
CPUs takes it. Run it when the newest supported TensorFlow changes, or another server is to be told apart.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from exporter.wire.protos import message_class
from exporter.wire.stock_ops import attribute_text, is_stock, type_name
from tests.support.environments import SERVERS
from tests.support.stock_loaders import StockLoader

SERVER_OPS = Path(__file__).parents[1] / "exporter/wire/server_ops.txt"
_CPU = ("CPU", "DEFAULT")


class Op(NamedTuple):
    """An operation of one TensorFlow: its attributes' defaults, and the types that some may be."""

    defaults: dict[str, str]
    types: dict[str, frozenset[str]]


def registry(version: str) -> dict[str, Op]:
    """The operations that a TensorFlow's servers run on CPUs."""
    from tensorflow.core.framework.kernel_def_pb2 import KernelList

    with StockLoader(version) as loader:
        found = {key: base64.b64decode(text) for key, text in loader.ask({"registry": True}).items()}
    kernels: dict[str, list[Any]] = {}
    for kernel in KernelList.FromString(found["kernels"]).kernel:
        if kernel.device_type in _CPU and not kernel.label:
            kernels.setdefault(kernel.op, []).append(kernel)
    ops = message_class("OpList").FromString(found["ops"]).op
    return {op.name: _op(op, kernels.get(op.name, [])) for op in ops if is_stock(op.name)}


def _op(definition: Any, kernels: list[Any]) -> Op:
    types = {}
    for each in definition.attr:
        found = set(each.allowed_values.list.type) or None
        taken = [c.allowed_values.list.type for k in kernels for c in k.constraint if c.name == each.name]
        if kernels and len(taken) >= len(kernels):  # a kernel that does not name it takes all
            run = {number for numbers in taken for number in numbers}
            found = run if found is None else found & run
        if found is not None:
            types[each.name] = frozenset(map(type_name, found))
    return Op({each.name: attribute_text(each.default_value) for each in definition.attr}, types)


def lines(registries: dict[str, dict[str, Op]]) -> Iterator[str]:
    """A line for each thing that not all of them have, with the first that had it, oldest first."""
    versions = [*registries]
    for before, version in pairwise(versions):
        for name, op in sorted(registries[version].items()):
            old = registries[before].get(name)
            if old is None:
                yield f"{_minor(version)} {name}"
                continue
            for key, default in op.defaults.items():
                if key not in old.defaults:
                    yield f"{_minor(version)} {name}.{key} {default}"
                elif key in old.types and (new := op.types.get(key, frozenset()) - old.types[key]):
                    yield f"{_minor(version)} {name}.{key} {' '.join(sorted(new))}"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


if __name__ == "__main__":
    SERVER_OPS.write_text("".join(f"{line}\n" for line in lines({name: registry(name) for name in SERVERS})))
