"""Sort the tensors that inference does not need by kind, for reports."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from enum import Enum

from msgspec import Struct

from exporter.catalog import Catalog, TensorRef
from exporter.checkpoint.embedding_variables import embedding_variables
from exporter.checkpoint.object_graph import SUFFIX
from exporter.checkpoint.tensor_bundle import OBJECT_GRAPH
from exporter.errors import CheckpointError

TF_AVERAGE = "ExponentialMovingAverage"
"""The slot name of `tf.train.ExponentialMovingAverage` unless the trainer chose another."""


class ExtraKind(Enum):
    """What an ignored tensor was for, in the report's words."""

    SLOT = "optimizer slot"
    GLOBAL_STEP = "global step"
    MOVING_AVERAGE = "moving average"
    COUNTER = "counter"
    BOOKKEEPING = "embedding bookkeeping"
    OBJECT_GRAPH = "object graph"
    OTHER = "other"


class Extra(Struct, frozen=True):
    """A tensor of the checkpoint that inference does not need."""

    tensor: TensorRef
    kind: ExtraKind


_SLOT_NAME = re.compile(
    r"(^|/)(Adam|Adagrad|AdagradDA|Adadelta|Momentum|RMSProp|Ftrl|Lamb|Nadam|Adamax|Proximal\w*)(_\d+)?(/|$)"
    r"|(^|/)(beta[12]_power|accumulator|momentum|velocity|learning_rate|linear)(_\d+)?$"
    r"|\.OPTIMIZER_SLOT|^training/|(^|/)_?optimizer/(?!_trainable_variables/)",
)
_COUNTERS = frozenset({"save_counter", "ckpt_saved_epoch", "ckpt_saved_batch"})
_ITERATIONS = frozenset({"global_step", "_iterations", "iterations"})


def classify_extras(catalog: Catalog, used: Collection[str] = ()) -> Iterator[Extra]:
    """Every tensor that is not `used`, with what it was probably for."""
    embedding = _embedding_kinds(catalog)
    for name, tensor in catalog.tensors.items():
        if name not in used:
            yield Extra(tensor, embedding.get(name) or _kind(name, tensor, catalog))


def _embedding_kinds(catalog: Catalog) -> dict[str, ExtraKind]:
    """What the tensors of embedding variables are for; those of damaged ones are judged by name."""
    try:
        variables = embedding_variables(catalog)
    except CheckpointError:
        return {}
    kinds: dict[str, ExtraKind] = {}
    for variable in variables.values():
        for part in variable.parts:
            rows = {part.keys.name, part.values.name}
            for name in part.tensor_names:
                own = ExtraKind.OTHER if name in rows else ExtraKind.BOOKKEEPING
                kinds[name] = own if variable.slot_of is None else ExtraKind.SLOT
    return kinds


def _kind(name: str, tensor: TensorRef, catalog: Catalog) -> ExtraKind:
    if name == OBJECT_GRAPH:
        return ExtraKind.OBJECT_GRAPH
    parent, _, leaf = name.removesuffix(SUFFIX).rpartition("/")
    if leaf in _ITERATIONS and tensor.shape == ():
        return ExtraKind.GLOBAL_STEP
    if leaf in _COUNTERS:
        return ExtraKind.COUNTER
    if leaf == TF_AVERAGE or "/ExponentialMovingAverage" in name:
        return ExtraKind.MOVING_AVERAGE
    owner = catalog.tensors.get(parent)
    if owner is not None and owner.shape == tensor.shape and leaf in ("ema", "average", "avg"):
        return ExtraKind.MOVING_AVERAGE
    of, is_list, _ = f"{parent}/".rpartition("/_variables/")
    if is_list and f"{of}/_iterations{SUFFIX}" in catalog.tensors:  # a Keras optimizer, whatever holds it
        return ExtraKind.SLOT
    if _SLOT_NAME.search(name) or (owner is not None and tensor.shape in (owner.shape, ())):
        return ExtraKind.SLOT
    return ExtraKind.OTHER
