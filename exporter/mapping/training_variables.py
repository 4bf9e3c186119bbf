"""Add what a kept training graph restores, beside what is served, to one bundle."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from exporter.errors import MissingTensors
from exporter.graph.training_graph import TrainingGraph
from exporter.mapping.build import TensorSource, VariableMapping, check_fits

_SHOWN = 10
_SERVED = "serve"


def with_training(mapping: VariableMapping, training: TrainingGraph) -> VariableMapping:
    """The mapping with every tensor that the training graph restores, as it is stored.

    A tensor that both need is stored once. Where they need different values of one name (averages, casts,
    rows in another order) the served variable gets another name: a serving graph is restored by any.

    Raises:
        MissingTensors: the checkpoint lacks some.
        ShapeMismatch: a tensor of another shape or dtype than the training graph's variable.
    """
    tensors = mapping.catalog.tensors
    missing = [name for name in training.tensors if name not in tensors or not tensors[name].is_complete]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise MissingTensors(
            f"the training graph {training.tag!r} of {training.source} restores {len(missing)} tensors that "
            f"{mapping.catalog.prefix.name} lacks",
            cause=", ".join(missing[:_SHOWN]) + more,
            hint="name the checkpoint that this graph saved, or leave --train-tag out",
        )
    for variable in training.variables:
        check_fits(f"{variable.key} of the training graph", variable, tensors[variable.key])
    taken = {*training.tensors, *(source.key for source in mapping.sources)}
    served = [
        source if _is_shared(source) or source.key not in training.tensors else _renamed(source, taken)
        for source in mapping.sources
    ]
    present = {source.key for source in served}
    kept = (name for name in training.tensors if name not in present)
    alone = [TensorSource(name, (), tensors[name], via="the training graph") for name in kept]
    return replace(mapping, sources=(*served, *alone))


def _is_shared(source: TensorSource) -> bool:
    return source.is_verbatim and source.key == source.tensor.name


def _renamed(source: TensorSource, taken: Collection[str]) -> TensorSource:
    key = source.key
    while key in taken:
        key = f"{_SERVED}/{key}"
    return replace(source, key=key)
