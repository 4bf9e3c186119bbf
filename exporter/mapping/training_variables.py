"""Variables of a kept training graph, and the check for batch normalisation in training mode.

A model in inference mode normalises by statistics that the trainer averaged over its batches. If these are in
the checkpoint but not served, while gamma or beta beside them are, the graph normalises each request by its
own batch: answers depend on the other rows of a request. Normalisation without moving statistics (by
instance, by layer, by group) stores no such statistics in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, Naming
from exporter.checkpoint.object_graph import SUFFIX, read_object_graph
from exporter.errors import MissingTensors, TrainingModeServed, few
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.training_graph import TrainingGraph
from exporter.mapping.build import VariableMapping, check_fits
from exporter.mapping.extras import NORMALISING, STATISTICS
from exporter.mapping.mapping_rules import TF_AVERAGE
from exporter.mapping.tensor_source import TensorSource

_STATISTICS_SHOWN = 3


class Unserved(Struct, frozen=True):
    """A moving statistic that is not served, and a variable of its layer that is."""

    statistic: str
    beside: str


def check_batch_statistics(
    graph: InferenceGraph, catalog: Catalog, sources: Iterable[TensorSource], switches: Mapping[str, str]
) -> None:
    """Require that the moving statistics in a checkpoint are served with the layers that they belong to.

    Without them a graph normalises each request by its own batch, as in training. `sources` has the source of
    each served variable. `switches` are placeholders, with the values that would choose inference, for the
    hint.

    Raises:
        TrainingModeServed: some are not; names the first of them, and nodes that normalise.
        CorruptFile: the checkpoint's graph of objects is damaged.
        CheckpointError: this graph cannot be read.
    """
    found = [*unserved_statistics(graph, catalog, sources)]
    if not found:
        return
    first = found[0]
    more = f"; {len(found) - 1} more like it" if len(found) > 1 else ""
    norms = ", ".join(graph.training.batch_norms[:_STATISTICS_SHOWN])
    feeds = " ".join(f"--feed {name}={value}" for name, value in switches.items())
    raise TrainingModeServed(
        f"the graph serves {first.beside!r} without the moving statistic {first.statistic!r}{more}",
        cause=f"the graph normalises each request by its own batch, as in training{norms and f': {norms}'}",
        hint=f"serve the graph in inference mode: {feeds}" if feeds else "",
    )


def unserved_statistics(
    graph: InferenceGraph, catalog: Catalog, sources: Iterable[TensorSource]
) -> Iterator[Unserved]:
    """Yield each moving statistic of a served layer that is not served, with a served variable beside it.

    `sources` has the source of each served variable. While iterating, raises CorruptFile if the checkpoint's
    graph of objects is damaged, CheckpointError if it cannot be read.
    """
    names = _names(catalog)
    served = _served_names(graph, names, sources)
    known = {name: None for aliases in names.values() for name in aliases}
    if catalog.naming is not Naming.NAMES:  # the file numbers a layer's values, the model names them
        known |= dict.fromkeys(graph.layers)
    for name in known:
        scope, slash, leaf = name.rpartition("/")
        if leaf in STATISTICS and name not in served:
            beside = next((s for kind in NORMALISING if (s := f"{scope}{slash}{kind}") in served), None)
            if beside is not None:
                yield Unserved(name, beside)
    computed = {node.name for node in graph.meta_graph.graph_def.node} if graph.training.batch_norms else ()
    for name in known:  # an average of what the graph computes is stored under the node's name
        scope, _, leaf = name.rpartition("/")
        if leaf == TF_AVERAGE and "moments" in scope.split("/") and scope in computed and name not in served:
            yield Unserved(name, scope)


def _served_names(
    graph: InferenceGraph, names: Mapping[str, Iterable[str]], sources: Iterable[TensorSource]
) -> set[str]:
    """Return all names of the served variables; variables that only a switched-off branch reads are left out.

    `names` has the names of each tensor, by its name. The names of averaged variables are included.
    """
    served = set[str]()
    for source in sources:
        if not all(variable.node in graph.training.idle for variable in source.variables):
            own = names.get(source.tensor.name, (source.tensor.name,))
            served |= {source.key, *own}
            if source.via == "average":
                served |= {name.rpartition("/")[0] for name in own}
    return served


def _names(catalog: Catalog) -> dict[str, tuple[str, ...]]:
    """Return {tensor: its names}: its own without the suffix, then the program's name for the variable.

    The program's names are read only if the checkpoint has moving statistics or an optimizer's list of
    variables. Raises CorruptFile if the checkpoint's graph of objects is damaged, CheckpointError if it
    cannot be read.
    """
    names: dict[str, tuple[str, ...]]
    names = {name: (name.removesuffix(SUFFIX),) for name in catalog.tensors}
    if any(own[0].rpartition("/")[2] in STATISTICS for own in names.values()) or any(
        "_trainable_variables/" in name for name in names
    ):
        objects = read_object_graph(catalog)
        for item in objects.objects if objects is not None else ():
            if item.variable is not None and item.variable.name and item.variable.tensor in names:
                names[item.variable.tensor] = (*names[item.variable.tensor], item.variable.name)
    return names


_SHOWN = 10
_SERVED = "serve"


def with_training(mapping: VariableMapping, training: TrainingGraph) -> VariableMapping:
    """Return the mapping with every tensor that the training graph restores added, in its stored form.

    A tensor that both graphs need is stored once. If they need different values of one name (averages, casts,
    rows in another order) the served variable gets another name: a serving graph can restore any name.

    Raises:
        MissingTensors: the checkpoint lacks some.
        ShapeMismatch: a tensor of another shape or dtype than the training graph's variable.
    """
    tensors = mapping.catalog.tensors
    missing = [name for name in training.tensors if name not in tensors or not tensors[name].is_complete]
    if missing:
        raise MissingTensors(
            f"the training graph {training.tag!r} of {training.source} restores {len(missing)} tensors that "
            f"{mapping.catalog.prefix.name} lacks",
            cause=few(missing, _SHOWN),
            hint="name the checkpoint that this graph saved, or leave --train-tag out",
        )
    for variable in training.variables:
        check_fits(f"{variable.key} of the training graph", variable, tensors[variable.key])
    taken = {*training.tensors, *(source.key for source in mapping.sources)}
    served = [
        source
        if source.key not in training.tensors or (source.is_verbatim and source.key == source.tensor.name)
        else _renamed(source, taken)
        for source in mapping.sources
    ]
    present = {source.key for source in served}
    kept = (name for name in training.tensors if name not in present)
    alone = [TensorSource(name, (), tensors[name], via="the training graph") for name in kept]
    return replace(mapping, sources=(*served, *alone))


def _renamed(source: TensorSource, taken: Collection[str]) -> TensorSource:
    key = source.key
    while key in taken:
        key = f"{_SERVED}/{key}"
    return replace(source, key=key)
