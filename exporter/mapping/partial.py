"""Match the part of another model's checkpoint that fits, for warm starts; not for serving.

If everything fits, `build_mapping` decides. Otherwise each variable is looked up by its name, one by one; in
archives of Keras the name is its layer's and its number in the layer. Names that a framework gives by class
and number (`dense_1`) identify a layer only if both sides have equally many of a shape: then they are matched
in their order, otherwise not at all. Variables without a name are found by their objects' edges. The rest is
left out, with the reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct, field

from exporter.catalog import Catalog, ExtraKind, Naming, TensorRef
from exporter.checkpoint.object_graph import ObjectGraph, read_object_graph
from exporter.errors import MappingError, PartitionStrategyUnknown
from exporter.graph.inference_graph import GraphVariable, InferenceGraph, PartitionStrategy
from exporter.mapping.build import build_mapping
from exporter.mapping.by_layer import SAYS_NOTHING, name_in_layer, numbers, stems
from exporter.mapping.extras import classify_extras
from exporter.mapping.mapping_rules import MappingRules, row_order
from exporter.mapping.object_matching import TrainedObjects, match_objects_partly
from exporter.mapping.tensor_source import group_parts

Parts = tuple[GraphVariable, ...]


class Fit(Struct, frozen=True):
    """A variable (all of its parts) and the tensor that can initialise it; `via` says how it was found."""

    variables: Parts
    tensor: TensorRef
    via: str


class PartialMapping(Struct, frozen=True):
    """The fits by the variables' keys, the reasons why others do not fit, by key, and the unused tensors."""

    fits: Mapping[str, Fit]
    misfits: Mapping[str, str]
    unused: tuple[TensorRef, ...]


def fit_partly(
    graph: InferenceGraph, catalog: Catalog, rules: MappingRules, counted: Collection[str]
) -> PartialMapping:
    """Match the variables that the checkpoint certainly has.

    Return the fits, the reasons why other variables do not fit, and the left-over tensors. `counted` are
    names to which a framework appends numbers, without these: `dense` for `dense_1`.

    Raises:
        AmbiguousRename: two rename rules disagree on a variable.
        UsageError: the rules name an object that does not exist.
        CorruptFile: the checkpoint's graph of objects is damaged.
        CheckpointError: this graph cannot be read.
    """
    try:
        whole = build_mapping(graph, catalog, rules)
    except MappingError as error:
        return _Partial.of(graph, catalog, rules, frozenset(counted), error.message).mapping()
    moved = [source.key for source in whole.sources if source.gather_parts or source.scatter_parts]
    fits = {s.key: Fit(s.variables, s.tensor, s.via) for s in whole.sources if s.key not in moved}
    return PartialMapping(
        fits, dict.fromkeys(moved, "its rows are in another order"), _unused(catalog, fits.values())
    )


def _unused(catalog: Catalog, fits: Collection[Fit]) -> tuple[TensorRef, ...]:
    extras = classify_extras(catalog, {fit.tensor.name for fit in fits})
    return tuple(extra.tensor for extra in extras if extra.kind is ExtraKind.OTHER)


class _Partial(Struct, frozen=True):
    """Both sides by name: `served` has the name of each variable, `trained` the tensors of each name."""

    graph: InferenceGraph
    catalog: Catalog
    objects: ObjectGraph | None
    wanted: Mapping[str, Parts]
    served: Mapping[str, str]
    trained: Mapping[str, Sequence[TensorRef]]
    rules: MappingRules
    counted: frozenset[str]
    whole_error: str
    misfits: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        graph: InferenceGraph,
        catalog: Catalog,
        rules: MappingRules,
        counted: frozenset[str],
        whole_error: str,
    ) -> _Partial:
        wanted = group_parts(graph.variables)
        objects = read_object_graph(catalog)
        served = {key: key for key in wanted}
        trained: dict[str, list[TensorRef]] = defaultdict(list)
        if objects is not None:
            for name, variables in TrainedObjects(
                objects, catalog.tensors, rules.object_path
            ).by_name.items():
                trained[name] = [catalog.tensors[v.tensor] for v in variables if v.tensor in catalog.tensors]
        elif catalog.naming is Naming.LAYERS:
            served |= {
                key: name_in_layer(places[-1]) for key, places in graph.layers.items() if key in wanted
            }
            for ref in catalog.tensors.values():
                trained[name_in_layer(ref)].append(ref)
        elif catalog.naming is Naming.NAMES:
            trained |= {name: [ref] for name, ref in catalog.tensors.items()}
        return cls(graph, catalog, objects, wanted, served, trained, rules, counted, whole_error)

    def mapping(self) -> PartialMapping:
        found: dict[str, tuple[TensorRef, str]] = {}
        for key, name in self.served.items():
            new = self.rules.renamed(key)
            if new is not None:
                self._take(key, new, "rename", found)
            elif self.counted.isdisjoint(stems(name)):
                self._take(key, name, "name", found)
        found |= self._counted(found)
        found |= self._by_objects(found)
        fits = {}
        for key, (ref, via) in found.items():
            reason = self._why_not(key, ref, [other for other, (it, _) in found.items() if it is ref])
            if reason:
                self.misfits[key] = reason
            else:
                fits[key] = Fit(self.wanted[key], ref, via)
        misfits = {key: self.misfits.get(key) or self._missing(key) for key in self.wanted if key not in fits}
        return PartialMapping(fits, misfits, _unused(self.catalog, fits.values()))

    def _take(self, key: str, name: str, via: str, found: dict[str, tuple[TensorRef, str]]) -> None:
        refs = self.trained.get(name) or [ref for ref in [self.catalog.tensors.get(name)] if ref]
        if len(refs) == 1:
            found[key] = (refs[0], via)
        elif refs:
            self.misfits[key] = f"the checkpoint has {len(refs)} variables called {name!r}"

    def _counted(self, found: Collection[str]) -> dict[str, tuple[TensorRef, str]]:
        """Match the tensors of layers that a framework named by class and number, in the numbers' order.

        Return, by the variable's key, the tensor and "number" (or "name", for a tensor of another shape);
        `found` are the keys matched before. Adds reasons to `misfits` where the numbers are not equal on both
        sides.
        """
        stored: dict[tuple[object, ...], list[str]] = defaultdict(list)
        for name, refs in self.trained.items():
            for ref in refs:
                stored[stems(name), ref.dtype, ref.shape].append(name)
        groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
        for key, name in self.served.items():
            if key not in found and key not in self.misfits and not self.counted.isdisjoint(stems(name)):
                groups[stems(name), self.wanted[key][0].dtype, self.wanted[key][0].full_shape].append(key)
        taken: dict[str, tuple[TensorRef, str]] = {}
        for group, keys in groups.items():
            names = stored[group]
            if not names:
                for key in keys:
                    self._take(key, self.served[key], "name", taken)  # of another shape, which is reported
            elif len(names) != len(keys) or len({*names}) != len(names):
                reason = (
                    f"the checkpoint has {len(names)} of its kind and the model {len(keys)}: numbered names "
                    f"may stand for other layers ({', '.join(names[:5])})"
                )
                self.misfits.update(dict.fromkeys(keys, reason))
            else:
                keys.sort(key=lambda key: numbers(self.served[key]))
                pairs = zip(keys, sorted(names, key=numbers), strict=True)
                taken |= {key: (self.trained[name][0], "number") for key, name in pairs}
        return taken

    def _by_objects(self, found: Mapping[str, object]) -> dict[str, tuple[TensorRef, str]]:
        """Match variables whose names identify nothing, by the edges to them on both sides.

        Return, by the variable's key, the tensor and "object", without keys in `found` or with a misfit;
        empty without objects on both sides. Raises UsageError if the object of `--object-path` does not
        exist.
        """
        if self.objects is None or self.graph.objects is None:
            return {}
        trained = TrainedObjects(self.objects, self.catalog.tensors, self.rules.object_path)
        unnamed = {
            r.name for name, refs in self.trained.items() if SAYS_NOTHING.fullmatch(name) for r in refs
        }
        heads = {key: parts[0] for key, parts in self.wanted.items()}
        walked = match_objects_partly(heads, self.graph.objects, trained)
        rest = {key: name for key, name in walked.items() if key not in found and key not in self.misfits}
        return {key: (self.catalog.tensors[name], "object") for key, name in rest.items() if name in unnamed}

    def _why_not(self, key: str, ref: TensorRef, claimants: Sequence[str]) -> str:
        variable = self.wanted[key][0]
        if ref.shape != variable.full_shape:
            return f"its shape is {list(variable.full_shape)}, in the checkpoint {list(ref.shape)}"
        if ref.dtype != variable.dtype:
            return f"it is {variable.dtype.label}, in the checkpoint {ref.dtype.label}"
        if len(claimants) > 1:
            return f"{', '.join(claimants)} would all get the values of {ref.name!r}"
        if not ref.is_complete:
            return "parts of it are not in the checkpoint"
        # A ShardedVariable: TensorFlow 2 looks ids up by div.
        trained = PartitionStrategy.DIV if self.objects is not None and ref.slices else None
        try:
            order = row_order(key, self.wanted[key], ref, trained=trained, served=None)
        except PartitionStrategyUnknown as error:
            return error.message
        return "its rows are in another order" if order.gather_parts or order.scatter_parts else ""

    def _missing(self, key: str) -> str:
        if not self.trained:  # a list without names
            return self.whole_error
        return f"the checkpoint has no {self.rules.renamed(key) or self.served[key]!r}"
