"""`load_checkpoint`: start a training from the tensors of another checkpoint that fit, and report the others.

    report = load_checkpoint(model, "old/model.keras")            # Keras 3, tf-keras, a tf.Module
    print(report)

    def init_fn(scaffold, session):                               # variables of the session's graph
        load_checkpoint(None, "old/model.ckpt-900", session=session)
    scaffold = tf.compat.v1.train.Scaffold(init_fn=init_fn)

It reads every checkpoint that `export-model` reads. Tensors are matched as for an export if all of them fit,
and by names otherwise (`exporter.mapping.partial`). A tensor of another shape or dtype is never loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from exporter.catalog import Catalog, SliceSpec
from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.object_graph import TrackedVariable
from exporter.checkpoint.tensor_values import read_array
from exporter.errors import MissingTensors, UsageError, lines_of
from exporter.graph.archived_model import keras_places
from exporter.graph.inference_graph import GraphVariable, InferenceGraph
from exporter.graph.object_models import view_objects
from exporter.mapping.mapping_rules import MappingRules, RenameRule
from exporter.mapping.partial import Fit, PartialMapping, fit_partly
from exporter.options import given
from exporter.storage.local_paths import checkpoint_path
from exporter.training.session_hook import require_session
from exporter.wire import protos
from exporter.wire.dtypes import DType

Variable = Any

_SHOWN = 20


class Loaded(Struct, frozen=True):
    """A variable that was loaded, the tensor, and how the two were matched (`name`, `object`, ...)."""

    variable: str
    tensor: str
    via: str


class Skipped(Struct, frozen=True):
    """A variable that keeps its values, and the reason."""

    variable: str
    reason: str


class LoadReport(Struct, frozen=True):
    """The result of `load_checkpoint`.

    `unused` are tensors of the checkpoint that were not loaded into a variable. Optimizer slots, counters and
    the like are not listed.
    """

    checkpoint: Path
    loaded: tuple[Loaded, ...]
    skipped: tuple[Skipped, ...]
    unused: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """True if every variable was loaded."""
        return not self.skipped

    def __str__(self) -> str:
        total = len(self.loaded) + len(self.skipped)
        lines = [f"loaded {len(self.loaded)} of {total} variables from {self.checkpoint}"]
        lines += _some([f"  not {item.variable}: {item.reason}" for item in self.skipped])
        lines += _some([f"  unused {name}" for name in self.unused])
        return "\n".join(lines)


def load_checkpoint(
    target: Any,
    checkpoint: Path | str,
    *,
    session: Any = None,
    renames: Iterable[str] = (),
    object_path: str | None = None,
) -> LoadReport:
    """Load the tensors of a checkpoint that fit into a model or variables; others keep their values.

    Args:
        target: a built model of Keras 3 or tf-keras, a `tf.Module`, or variables. With a session: variables
            of its graph; None for all global ones except the global step.
        checkpoint: a directory (the newest one in it), a prefix or an archive.
        session: the session whose variables are loaded; nothing is added to its graph.
        renames: rules `pattern=name`, a variable's name to the checkpoint's, as `--rename`.
        object_path: the model's place among the objects of an object-based checkpoint; None: it is found.

    Raises:
        MissingTensors: nothing fits at all.
        AmbiguousRename: two rules disagree on a variable.
        UsageError: `target` is none of these, or `session` not a session; the model has no variables yet, a
            rule does not parse, `object_path` names no object, or `checkpoint` is neither a path nor the URL
            of a store.
        CheckpointError: the checkpoint cannot be read. In each of these cases nothing was loaded, except if a
            tensor's bytes are damaged: that is found when it is loaded, after others.
    """
    if session is not None:
        require_session(session)
    catalog = open_checkpoint(given.place("checkpoint", checkpoint, checkpoint_path))
    listed = [renames] if isinstance(renames, str) else renames
    rules = MappingRules(renames=tuple(map(RenameRule.parse, listed)), object_path=object_path)
    found = _eager_target(target) if session is None else _graph_target(target, session.graph)
    if not found.variables:
        raise UsageError("there are no variables to load", hint="build the model first: model.build(...)")
    mapping = fit_partly(found.graph, catalog, rules, found.counted)
    if not mapping.fits:
        raise MissingTensors(
            f"nothing of {catalog.prefix} fits: {len(mapping.misfits)} variables were looked for",
            cause=lines_of(_some([f"{key}: {why}" for key, why in mapping.misfits.items()])),
        )
    for fit in mapping.fits.values():
        _load(fit, catalog, found.variables, session)
    return _report(catalog, mapping)


def _report(catalog: Catalog, mapping: PartialMapping) -> LoadReport:
    return LoadReport(
        catalog.prefix,
        tuple(Loaded(key, fit.tensor.name, fit.via) for key, fit in mapping.fits.items()),
        tuple(Skipped(key, reason) for key, reason in mapping.misfits.items()),
        tuple(ref.name for ref in mapping.unused),
    )


def _some(lines: list[str]) -> list[str]:
    more = [f"  ... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [*lines[:_SHOWN], *more]


# --- the variables to load ---------------------------------------------------------------------------------


class _Target(Struct, frozen=True):
    """The variables to load: a graph to match, each node's variable, and names that a framework numbers."""

    graph: InferenceGraph
    variables: Mapping[str, Variable]
    counted: frozenset[str] = frozenset()


def _graph_target(variables: Iterable[Variable] | None, graph: Any) -> _Target:
    import tensorflow as tf

    v1 = tf.compat.v1
    if variables is None:
        with graph.as_default():
            step = v1.train.get_global_step()
            variables = [variable for variable in v1.global_variables() if variable is not step]
    listed = _variables_in(variables)
    described = tuple(_of_graph(variable) for variable in listed)
    nodes = {item.node: variable for item, variable in zip(described, listed, strict=True)}
    return _Target(_graph(described), nodes)


def _of_graph(variable: Variable) -> GraphVariable:
    shape, info = tuple(variable.shape.as_list()), variable._get_save_slice_info()
    part = SliceSpec(tuple(info.full_shape), tuple(info.var_offset), tuple(info.var_shape)) if info else None
    key = info.full_name if info else variable.op.name
    return GraphVariable(variable.op.name, key, _dtype(variable), shape, part)


def _eager_target(target: Any) -> _Target:
    """Return the eager variables of `target` (a model, a module or variables) as a graph to match.

    The graph of a model or module has its objects, too, and Keras' paths to them.
    """
    import tensorflow as tf

    is_keras = hasattr(target, "weights") and hasattr(target, "layers")
    listed = getattr(target, "weights" if is_keras else "variables", target)
    nodes = {_node(variable): variable for variable in _variables_in(listed)}
    if not is_keras and not isinstance(target, tf.Module):
        names = {node: _name(variable) for node, variable in nodes.items()}
        return _Target(_graph(_described(nodes, names)), nodes)
    view = view_objects(target, _tracked(nodes))
    paths = {
        item.variable.tensor: view.objects.paths[number]
        for number, item in enumerate(view.objects.objects)
        if item.variable and number in view.objects.paths
    }
    described = _described(nodes, {node: view.names.get(node) or _name(nodes[node]) for node in nodes}, paths)
    places = keras_places(target, _node)
    layers = {item.key: places[item.node] for item in described if item.node in places}
    classes = {type(item).__name__ for item in tf.train.TrackableView(target).descendants()}
    graph = InferenceGraph("", protos.MetaGraphDef(), described, objects=view.objects, layers=layers)
    return _Target(graph, nodes, frozenset(map(_snake_case, classes)))


def _variables_in(target: Any) -> list[Variable]:
    """Return the variables in an iterable; UsageError if it is not one, or has other objects."""
    try:
        listed = [*target]
    except TypeError:
        listed = [None]
    if not all(hasattr(each, "assign") for each in listed):
        hint = "load_checkpoint(model, checkpoint), or with session=: load_checkpoint(None, checkpoint, ...)"
        raise given.wrong("target", target, "a model, a tf.Module or a list of variables", hint)
    return listed


def _described(
    variables: Mapping[str, Variable], names: Mapping[str, str], paths: Mapping[str, str] | None = None
) -> tuple[GraphVariable, ...]:
    """Return the descriptions of `variables`, which are by node; `names` and `paths` are by node, too.

    Each is under its name; if several have one name, each of them under its object's path, if `paths` has it.
    """
    taken = [*names.values()]
    unique = {n: (paths or {}).get(n, name) if taken.count(name) > 1 else name for n, name in names.items()}
    return tuple(
        GraphVariable(node, unique[node], _dtype(variable), tuple(int(size) for size in variable.shape))
        for node, variable in variables.items()
    )


def _graph(variables: tuple[GraphVariable, ...]) -> InferenceGraph:
    return InferenceGraph("", protos.MetaGraphDef(), variables)


def _tracked(nodes: Mapping[str, Variable]) -> Callable[[Any], TrackedVariable | None]:
    def variable_of(item: Any) -> TrackedVariable | None:
        node = _node(item)
        return TrackedVariable(_name(item), node) if node in nodes else None

    return variable_of


def _node(item: Any) -> str:
    """Return a variable's identifier, the same for a Keras 3 variable and the TensorFlow variable in it."""
    return f"variable-{id(getattr(item, '_value', item))}"


def _name(variable: Variable) -> str:
    return str(getattr(variable, "path", None) or variable.name.partition(":")[0])


def _dtype(variable: Variable) -> DType:
    dtype = variable.dtype
    return DType.of(dtype) if isinstance(dtype, str) else DType(dtype.base_dtype.as_datatype_enum)


def _snake_case(name: str) -> str:
    """Return the name of a class as Keras writes and numbers it: `dense` for `Dense`.

    Source: `to_snake_case`, keras/src/utils/naming.py.
    """
    separated = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", separated).lower()


# --- loading -----------------------------------------------------------------------------------------------


def _load(fit: Fit, catalog: Catalog, variables: Mapping[str, Variable], session: Any) -> None:
    whole = read_array(catalog, fit.tensor)  # verifies checksums in formats that have them
    for part in fit.variables:
        value, variable = whole[_box(part)], variables[part.node]
        if session is None:
            variable.assign(value)
        else:  # as Variable.load does: the graph may be finalized, and this adds nothing to it
            session.run(variable.initializer, {variable.initializer.inputs[1]: value})


def _box(variable: GraphVariable) -> tuple[slice, ...]:
    if variable.part is None:
        return ()
    spans: Iterator[tuple[int, int]] = zip(variable.part.starts, variable.part.lengths, strict=True)
    return tuple(slice(start, start + length) for start, length in spans)
