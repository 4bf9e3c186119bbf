"""Replace a graph's inputs: fix placeholders to constants, and feed tensors instead of computing them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from exporter.errors import UsageError
from exporter.graph.nodes import Endpoint, GraphIndex, attr_dtype, constant, free_name, new_node, shape_proto
from exporter.storage.local_paths import quoted
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

PLACEHOLDERS = frozenset({"Placeholder", "PlaceholderV2", "PlaceholderWithDefault"})
_WORDS = {"true": True, "false": False, "yes": True, "no": False}
_BATCHED = re.compile(r"TensorBufferTake|\w*Dequeue(Many|UpTo)?\w*|\w*IteratorGetNext\w*|\w*Unstage\w*")
_SPARSE = "DeserializeSparse"  # the operation after an iterator that gives a sparse tensor as one variant


def parse_feeds(index: GraphIndex, feeds: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Return {placeholder: constant in its dtype} from `--feed NAME=VALUE`; `feeds` is {NAME: VALUE}.

    A value that begins with `[` is JSON. A single value fills a known shape. If two names are of one
    placeholder, the last counts. UsageError if a name is not a placeholder's, or if its value does not fit;
    UnknownTensor if the graph lacks the tensor, GraphError if its dtype is unknown.
    """
    return dict(_feed(index, name, text) for name, text in feeds.items())


def _feed(index: GraphIndex, name: str, text: str) -> tuple[str, np.ndarray]:
    tensor = index.resolve(name, "--feed")
    op = index.nodes[tensor.node].op
    if op not in PLACEHOLDERS:
        raise UsageError(
            f"--feed {name}: {tensor.node!r} is a {op}, not a placeholder",
            hint=f"make it an input instead: --input NAME={tensor}",
        )
    dtype, shape = index.dtype(tensor), index.shape(tensor)
    try:
        value = _array(text, dtype)
        if shape and not value.shape and min(shape) >= 0:
            value = np.broadcast_to(value, shape).copy()
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        expected = f"{tensor} is a {dtype.label} of shape {_shown(shape)}"
        raise UsageError(f"--feed {name}={text}: not a value for it", cause=f"{expected}: {error}") from error
    if shape is not None and not _fits(value.shape, shape):
        raise UsageError(
            f"--feed {name}={text}: shape {_shown(value.shape)} does not fit",
            cause=f"{tensor} has shape {_shown(shape)}",
            hint="" if value.shape else f"give a list: --feed {quoted(f'{name}={_listed(value, shape)}')}",
        )
    return tensor.node, value


def _array(text: str, dtype: DType) -> np.ndarray:
    value = json.loads(text) if text.lstrip().startswith("[") else _scalar(text, dtype)
    if dtype is DType.STRING:
        texts = np.asarray(value, dtype=object)
        return np.array([str(text).encode() for text in texts.ravel()], dtype=object).reshape(texts.shape)
    exact = np.asarray(value)
    if not exact.size:
        return exact.astype(dtype.numpy)  # an empty list is of floats, whatever it is for
    if exact.dtype.kind == "f" and dtype.is_integer:
        raise ValueError("a whole number is expected")
    if (exact.dtype.kind == "b") != (dtype is DType.BOOL):
        raise ValueError(
            "true and false are for booleans" if exact.dtype.kind == "b" else "expected true or false"
        )
    if exact.dtype.kind in "iu" and dtype.is_integer:
        least, greatest = dtype.limits
        if exact.min() < least or exact.max() > greatest:
            raise ValueError("the number is out of range")
    return exact.astype(dtype.numpy)


def _scalar(text: str, dtype: DType) -> Any:
    if dtype is DType.STRING:
        return text
    if dtype is DType.BOOL:
        return _WORDS.get(text.lower(), {"1": True, "0": False}.get(text, text))
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return int(text)
    except ValueError:
        return complex(text) if dtype in (DType.COMPLEX64, DType.COMPLEX128) else float(text)


def _listed(value: np.ndarray, shape: tuple[int, ...]) -> str:
    """Return the text to type for a tensor of one value: `[1.0]`, one pair of brackets per dimension."""
    item = value.item()
    text = json.dumps(item.decode() if isinstance(item, bytes) else item, default=str)
    return "[" * len(shape) + text + "]" * len(shape)


def _fits(shape: tuple[int, ...], declared: tuple[int, ...]) -> bool:
    return len(shape) == len(declared) and all(
        want in (-1, size) for size, want in zip(shape, declared, strict=True)
    )


def _shown(shape: tuple[int, ...] | None) -> str:
    return "any" if shape is None else "[" + ", ".join("?" if size < 0 else str(size) for size in shape) + "]"


def fix_constants(index: GraphIndex, nodes: dict[str, Proto], feeds: Mapping[str, np.ndarray]) -> None:
    """Replace the nodes named in `feeds` by constants of these values, in `nodes`, in place.

    GraphError if a node's dtype is unknown.
    """
    for name, value in feeds.items():
        nodes[name] = constant(name, value, index.dtype(Endpoint(name, 0)))


def cut_inputs(
    index: GraphIndex, nodes: dict[str, Proto], inputs: Mapping[Endpoint, str]
) -> dict[Endpoint, Endpoint]:
    """Add a placeholder to `nodes`, named after its alias, for each input that the graph computes.

    `inputs` is {tensor: alias}. The placeholder's name is made unique, and characters that a name cannot have
    become `_`. Returns {input: its placeholder}, without inputs that are placeholders. GraphError if an
    input's dtype is unknown.
    """
    replaced: dict[Endpoint, Endpoint] = {}
    for tensor, alias in inputs.items():
        if nodes[tensor.node].op in PLACEHOLDERS:
            continue
        name = free_name(
            nodes, re.sub(r"[^A-Za-z0-9_./-]", "_", alias).lstrip("_/-") or f"{tensor.node}/input"
        )
        nodes[name] = new_node(name, "Placeholder", dtype=index.dtype(tensor))
        nodes[name].attr["shape"].shape.CopyFrom(shape_proto(served_shape(index, tensor)))
        replaced[tensor] = Endpoint(name, 0)
    return replaced


def hands_over_batches(op: str) -> bool:
    """True for an operation by which an input pipeline passes batches to a training graph."""
    return op == _SPARSE or _BATCHED.fullmatch(op) is not None


def served_shape(index: GraphIndex, tensor: Endpoint) -> tuple[int, ...] | None:
    """Return a tensor's shape, with -1 for unknown lengths and for the fixed batch size of an input pipeline.

    None if its rank is unknown.
    """
    shape = index.shape(tensor)
    if shape and _BATCHED.fullmatch(index.nodes[tensor.node].op):
        return (-1, *shape[1:])
    return shape


def pipeline_batches(index: GraphIndex) -> set[int]:
    """Return the batch sizes that a training graph's input pipeline fixes; empty if it fixes none.

    GraphError for an unknown type number.
    """
    sizes = set()
    for name, node in index.nodes.items():
        if _BATCHED.fullmatch(node.op):
            shapes = (index.shape(Endpoint(name, at)) for at in range(len(index.output_dtypes(node) or ())))
            sizes |= {shape[0] for shape in shapes if shape and shape[0] > 0}
    return sizes


def mode_switches(graph_def: Proto, feeds: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return {placeholder: "false"} for booleans that may switch training on.

    These are all boolean placeholders with a default value, and those whose value in `feeds` has nothing but
    true. GraphError for an unknown type number.
    """
    defaults = (node for node in graph_def.node if node.op == "PlaceholderWithDefault")
    found = {node.name: "false" for node in defaults if attr_dtype(node, "dtype") is DType.BOOL}
    return found | {
        name: "false" for name, value in feeds.items() if value.dtype == np.bool_ and np.all(value)
    }
