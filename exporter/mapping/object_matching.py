"""Match served variables to the tensors of an object-based checkpoint, object by object.

A tensor's name is one of many paths through the trainer's objects, so names cannot be compared. Instead both
graphs of objects are walked side by side, from a pair of objects that correspond, along edges of equal names,
like TensorFlow's restore. TensorFlow restores the variables that it finds and ignores the rest; here every
served variable must be found, in one place, with a name that does not contradict it (see `by_layer`), or
nothing is matched.

`--object-path` says which objects correspond. Without it the served model is compared with every object near
the checkpoint's root, and exactly one set of tensors may fit. A graph without objects (a builder that returns
tensors) is matched by the names that its variables had in the trainer's program.
"""

from __future__ import annotations

import difflib
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property

from msgspec import Struct, field
from msgspec.structs import replace

from exporter.catalog import TensorRef
from exporter.checkpoint.object_graph import ROOT, SUFFIX, ObjectGraph, TrackedObject, TrackedVariable
from exporter.errors import AmbiguousRename, MissingTensors, ObjectMismatch, UsageError, lines_of
from exporter.graph.inference_graph import GraphVariable
from exporter.mapping.by_layer import NamedPair, conflicts, stems

_SEARCH_DEPTH = 3  # edges between a checkpoint's root and the model in it
_WRAPPER_DEPTH = 2  # edges between the object that a builder returned and the model in it
_SHOWN = 12
_LAYERS, _WITH_WEIGHTS = "layer-", "layer_with_weights-"
# Edges that count: one more of them in the checkpoint may shift what the others stand for.
_INDEXED = re.compile(r"[0-9]+|layer(_with_weights)?-[0-9]+")
# As Keras' optimizers and models call them.
_TRAINED_LIST = "_trainable_variables"
_SERVED_LIST = "trainable_variables"


class TrainedObjects(Struct, frozen=True, dict=True):
    """The checkpoint's side: its objects, its tensors, and the path to the model that the user gave."""

    objects: ObjectGraph
    tensors: Mapping[str, TensorRef]
    object_path: str | None = None

    @cached_property
    def start(self) -> int | None:
        """The number of the object at `object_path`; None without a path.

        Raises UsageError if no object has this path.
        """
        if self.object_path is None:
            return None
        found = self.objects.at(self.object_path)
        if found is None:
            near = [path for path in self.objects.paths.values() if path.count("/") < _WRAPPER_DEPTH]
            raise UsageError(
                f"--object-path {self.object_path}: the checkpoint has no such object",
                cause=f"near its root are {_listed(filter(None, near))}",
                hint="name one of them, or an object below: --object-path model/tower",
            )
        return found

    @cached_property
    def holding(self) -> frozenset[int]:
        """The numbers of the objects from which some variable or table can be reached."""
        objects = enumerate(self.objects.objects)
        return self.objects.leading_to(number for number, item in objects if item.variable or item.table)

    @cached_property
    def by_name(self) -> Mapping[str, tuple[TrackedVariable, ...]]:
        """The checkpoint's variables by name, each tensor once and without optimizers' slots.

        With `object_path`, only variables below that object. Raises UsageError if no object has this path.
        """
        slots = {slot for item in self.objects.objects for slot in item.slots}
        within = None if self.start is None else self.objects.paths_from(self.start)
        found: dict[str, dict[str, TrackedVariable]] = {}
        for number, item in enumerate(self.objects.objects):
            if item.variable and number not in slots and (within is None or number in within):
                found.setdefault(item.variable.name, {})[item.variable.tensor] = item.variable
        return {name: tuple(variables.values()) for name, variables in found.items()}


class Matched(Struct, frozen=True):
    """The tensor that a variable is restored from, and how it was found."""

    tensor: str
    via: str


class ObjectMatches(Struct, frozen=True):
    """The tensors of variables, by key, and further results of a walk through both graphs of objects.

    `paired` are the trained objects that correspond to served ones with a wanted variable in them, `met` the
    tensors of all variables that the model also has, whether or not its graph reads them; `tables` are the
    names in the checkpoint of hash tables, by their nodes. All are empty if names decided. `wrapped` is the
    trained object that corresponds to a builder's module around models, None if it returned a model.
    """

    found: Mapping[str, Matched]
    paired: frozenset[int] = frozenset()
    met: frozenset[str] = frozenset()
    tables: Mapping[str, str] = {}
    wrapped: int | None = None


def match_objects(
    wanted: Mapping[str, GraphVariable],
    served: ObjectGraph | None,
    trained: TrainedObjects,
    renamed: Mapping[str, str],
    tables: Iterable[str] = (),
) -> ObjectMatches:
    """Return the tensor of each variable in `wanted`, by its key, with further results of the walk.

    `renamed` has the trainer's name where the user gave one. `tables` are nodes of hash tables, which are
    matched as well. `served` is None for a graph without objects, which is matched by names.

    Raises:
        MissingTensors: a variable has no tensor.
        AmbiguousRename: several objects, or several variables of a name, fit.
        ObjectMismatch: names contradict the match, or a layer more shifts numbered names.
        UsageError: the object of `--object-path` does not exist.
    """
    found = {}
    for key, name in renamed.items():
        tensor = _tensor_named(name, trained)
        if key in wanted and tensor is not None:
            found[key] = Matched(tensor, "rename")
    rest = {key: variable for key, variable in wanted.items() if key not in found}
    nodes = frozenset(tables)
    if served is not None and (rest or nodes):
        walked = _Search(rest, served, trained, renamed, nodes).best()
        if walked is not None:
            walk, tensors = walked
            found |= {key: Matched(tensor, "object") for key, tensor in tensors.items()}
            is_module = walk.served_path == "" and _SERVED_LIST not in served.objects[ROOT].children
            wrapped = trained.objects.at(walk.trained_path) if is_module else None
            return ObjectMatches(found, walk.paired, _tensors_met(walk, trained), walk.tables, wrapped)
    return ObjectMatches(found | _by_name(rest, served, trained, renamed))


def match_objects_partly(
    wanted: Mapping[str, GraphVariable], served: ObjectGraph, trained: TrainedObjects
) -> dict[str, str]:
    """Return {variable's key: tensor} for as many variables in `wanted` as one walk finds.

    A walk begins at a pair of objects, one of each side. Empty if no walk finds any, or if two walks find the
    most, but different tensors. Raises UsageError if the object of `--object-path` does not exist.
    """
    search = _Search(wanted, served, trained, {})
    starts = [(ours, theirs) for ours in search._served_roots() for theirs in search._trained_roots()]
    found = [tensors for pair in starts if (tensors := search._tensors(search._walk(*pair)))]
    most = max(map(len, found), default=0)
    best = {tuple(tensors.items()) for tensors in found if len(tensors) == most}
    return dict(best.pop()) if len(best) == 1 else {}


def _tensors_met(walk: _Walk, trained: TrainedObjects) -> frozenset[str]:
    objects = trained.objects.objects
    variables = (objects[number].variable for numbers in walk.met.values() for number in numbers)
    return frozenset(variable.tensor for variable in variables if variable)


def _tensor_named(name: str, trained: TrainedObjects) -> str | None:
    """Return the name of the tensor that a person named by `name`.

    This is a tensor's name, an object's path, or a variable's name. None if there is no such tensor, or
    several variables have the name. Raises UsageError if the object of `--object-path` does not exist.
    """
    for tensor in (name, f"{name}{SUFFIX}"):
        if tensor in trained.tensors:
            return tensor
    number = trained.objects.at(name)
    variable = trained.objects.objects[number].variable if number is not None else None
    if variable is not None:
        return variable.tensor
    candidates = trained.by_name.get(name, ())
    return candidates[0].tensor if len(candidates) == 1 else None


def _by_name(
    wanted: Mapping[str, GraphVariable],
    served: ObjectGraph | None,
    trained: TrainedObjects,
    renamed: Mapping[str, str],
) -> dict[str, Matched]:
    found, missing = {}, []
    for key, variable in wanted.items():
        names = [renamed[key]] if key in renamed else [key, variable.node]
        candidates = next((trained.by_name[name] for name in names if name in trained.by_name), ())
        if len(candidates) > 1:
            raise AmbiguousRename(
                f"{len(candidates)} variables of the checkpoint are called {candidates[0].name!r}",
                cause=f"they are {_listed(_place(candidate) for candidate in candidates)}",
                hint="name the model's object with --object-path PATH, or the tensor: "
                f"--rename '{re.escape(key)}={_place(candidates[-1])}'",
            )
        if candidates:
            found[key] = Matched(candidates[0].tensor, "name")
        else:
            missing.append(key)
    if missing:
        raise _missing(missing, wanted, trained)
    if served is not None:
        _refuse_left_over_twins(found, wanted, trained)
    return found


def _refuse_left_over_twins(
    found: Mapping[str, Matched], wanted: Mapping[str, GraphVariable], trained: TrainedObjects
) -> None:
    """Raise ObjectMismatch if the checkpoint has more variables of a kind, which may shift names' numbers.

    `found` has the tensor of each variable that was matched, `wanted` the variables; both are by key.
    """
    used = {match.tensor for match in found.values()}
    known = {(stems(key), wanted[key].full_shape): key for key in found}
    for name, variables in trained.by_name.items():
        for variable in variables:
            ref = trained.tensors.get(variable.tensor)
            twin = known.get((stems(name), ref.shape)) if ref else None
            if twin is not None and variable.tensor not in used:
                raise ObjectMismatch(
                    f"the checkpoint has {name!r} beside what the model has, of the same shape as {twin!r}",
                    cause="with a layer more or less, numbered names stand for other layers",
                )


class _Walk(Struct, frozen=True):
    """Two objects walked side by side: trained variables met, by served one, and trained edges in excess.

    `paired` are the trained objects that were met from served ones with a wanted variable in them; `tables`
    are the names of trained tables, by the served table's node.
    """

    served_path: str
    trained_path: str
    met: Mapping[int, tuple[int, ...]]
    excess: tuple[str, ...]
    paired: frozenset[int]
    tables: Mapping[str, str]

    @property
    def label(self) -> str:
        """The path, for a person, of the checkpoint's object at which the walk began; "." for the root."""
        return self.trained_path or "."


class _Search(Struct, frozen=True, dict=True):
    """The search for the pair of objects that correspond."""

    wanted: Mapping[str, GraphVariable]
    served: ObjectGraph
    trained: TrainedObjects
    renamed: Mapping[str, str]
    tables: frozenset[str] = frozenset()
    numbers: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        by_node = {
            item.variable.tensor: number
            for number, item in enumerate(self.served.objects)
            if item.variable is not None
        }
        for key, variable in self.wanted.items():
            if variable.node in by_node:
                self.numbers[key] = by_node[variable.node]

    def best(self) -> tuple[_Walk, dict[str, str]] | None:
        """Return the only walk that fits, and its tensors by the variable's key.

        None if no objects of the graphs correspond. Raises AmbiguousRename if several walks fit,
        ObjectMismatch if names contradict the walk, MissingTensors if it does not find all wanted variables,
        UsageError if the object of `--object-path` does not exist. If a shape or dtype differs, the walk is
        returned all the same.
        """
        partial: list[tuple[_Walk, dict[str, str]]] = []
        for start in self._served_roots():
            walks = [self._walk(start, candidate) for candidate in self._trained_roots()]
            found = [(walk, self._tensors(walk)) for walk in walks if walk.met or walk.tables]
            complete = [(walk, tensors) for walk, tensors in found if len(tensors) == len(self.wanted)]
            if complete:
                return self._only(complete)
            partial += [(walk, tensors) for walk, tensors in found if tensors]
        if not partial:
            return None
        walk, tensors = max(partial, key=lambda entry: len(entry[1]))
        missing = [key for key in self.wanted if key not in tensors]
        raise _missing(missing, self.wanted, self.trained, at=walk.label)

    @cached_property
    def _leading(self) -> frozenset[int]:
        """The numbers of the served objects from which a wanted variable or table can be reached."""
        return self.served.leading_to({*self.numbers.values(), *self._table_numbers})

    @cached_property
    def _table_numbers(self) -> frozenset[int]:
        objects = self.served.objects
        return frozenset(number for number, item in enumerate(objects) if item.table in self.tables)

    def _served_roots(self) -> Iterator[int]:
        """Yield the numbers of the served objects from which all wanted variables and tables can be reached.

        Only objects near the root, at most two edges away, are tried; the root comes first.
        """
        for number, path in self.served.paths.items():
            # Paths come in the order of their depth.
            if path.count("/") + bool(path) > _WRAPPER_DEPTH:
                return
            below = self.served.paths_from(number)
            if all(wanted in below for wanted in (*self.numbers.values(), *self._table_numbers)):
                yield number

    def _trained_roots(self) -> list[int]:
        if self.trained.start is not None:
            return [self.trained.start]
        objects, found, level = self.trained.objects.objects, {ROOT: None}, [ROOT]
        for _ in range(_SEARCH_DEPTH):
            level = [
                child
                for number in level
                for child in objects[number].children.values()
                if child not in self.trained.objects.optimizers
            ]
            found |= dict.fromkeys(level)
        return [number for number in found if number in self.trained.holding]

    def _walk(self, served: int, trained: int) -> _Walk:
        ours, theirs = self.served.objects, self.trained.objects.objects
        met: dict[int, list[int]] = {}
        tables: dict[str, str] = {}
        excess: list[str] = []
        # Breadth first: of several ways to a variable, the shortest is met first.
        seen, pending = {(served, trained)}, deque([(served, trained)])
        while pending:
            pair = pending.popleft()
            one, other = ours[pair[0]], theirs[pair[1]]
            if pair[1] in self.trained.objects.optimizers:
                continue
            if one.variable and other.variable:
                met.setdefault(pair[0], []).append(pair[1])
            if one.table in self.tables and other.table:
                tables[one.table] = other.table
            for name, child in _edges_to_follow(one, other):
                if name in one.children:
                    following = (one.children[name], child)
                    if following not in seen:
                        seen.add(following)
                        pending.append(following)
                elif _INDEXED.fullmatch(name) and child in self.trained.holding:
                    excess.append(f"{self.trained.objects.paths.get(pair[1], '?')}/{name}".lstrip("/"))
        paths = self.served.paths.get(served, "?"), self.trained.objects.paths.get(trained, "?")
        paired = frozenset(theirs for ours, theirs in seen if ours in self._leading)
        variables = {number: tuple(others) for number, others in met.items()}
        walk = _Walk(*paths, variables, tuple(excess), paired, tables)
        return self._with_optimizer_list(served, walk)

    def _with_optimizer_list(self, served: int, walk: _Walk) -> _Walk:
        """Return the walk with further variables, from the list that an optimizer keeps of its variables.

        `served` is the number of the model's object at which the walk began. The walk itself if it met no
        variable or all wanted ones, or if no optimizer's list has the length of the model's list and agrees
        with the variables that were met.
        """
        # A subclassed model of Keras 3 does not track layers in lists and dicts for TensorFlow; its optimizer
        # keeps all trainable variables in the model's own order. That order is used if both lists have the
        # same length and it agrees with the walk wherever the walk met a variable.
        own = self.served.at(_SERVED_LIST, served)
        if own is None or not walk.met or len(self._tensors(walk)) == len(self.wanted):
            return walk
        ours = [*self.served.objects[own].children.values()]
        for optimizer in self.trained.objects.optimizers:
            listed = self.trained.objects.at(_TRAINED_LIST, optimizer)
            if listed is None:
                continue
            theirs = [*self.trained.objects.objects[listed].children.values()]
            pairs = [*zip(ours, theirs, strict=False)]
            agrees = all(walk.met.get(one, (other,)) == (other,) for one, other in pairs)
            if len(ours) == len(theirs) and agrees:
                return replace(walk, met={**{one: (other,) for one, other in pairs}, **walk.met})
        return walk

    def _tensors(self, walk: _Walk) -> dict[str, str]:
        objects = self.trained.objects.objects
        found = {}
        for key, number in self.numbers.items():
            # Of several, the first: `_problems` objects if they are of different tensors.
            variable = objects[walk.met[number][0]].variable if number in walk.met else None
            if variable is not None and variable.tensor in self.trained.tensors:
                found[key] = variable.tensor
        return found

    def _only(self, complete: Collection[tuple[_Walk, dict[str, str]]]) -> tuple[_Walk, dict[str, str]]:
        fitting: dict[tuple[str, ...], tuple[_Walk, dict[str, str]]] = {}
        most = max(len(walk.tables) for walk, _ in complete)
        refused: list[tuple[bool, _Walk, dict[str, str], list[str]]] = []
        for walk, tensors in complete:
            if len(walk.tables) < most:
                continue
            problems, fits = [*self._problems(walk)], self._fits(tensors)
            if fits and not problems:
                fitting.setdefault((*tensors.values(), *walk.tables.values()), (walk, tensors))
            else:
                refused.append((fits, walk, tensors, problems))
        if len(fitting) > 1:
            raise AmbiguousRename(
                f"{len(fitting)} objects of the checkpoint fit the model equally well",
                cause=f"they are {_listed(walk.label for walk, _ in fitting.values())}",
                hint="say which one to serve: --object-path PATH",
            )
        if fitting:
            return next(iter(fitting.values()))
        fits, walk, tensors, problems = max(refused, key=lambda entry: (entry[0], -len(entry[3])))
        if not problems:
            return walk, tensors  # a shape or a dtype is wrong: the caller's comparison reports which
        raise ObjectMismatch(
            f"the model and the checkpoint's object {walk.label!r} do not correspond",
            cause=lines_of(problems[:_SHOWN]),
            hint="build the model as the trainer did; if names alone were changed, say so: "
            "--rename 'PATTERN=TRAINED NAME'",
        )

    def _fits(self, tensors: Mapping[str, str]) -> bool:
        refs = ((self.wanted[key], self.trained.tensors[name]) for key, name in tensors.items())
        return all(v.full_shape == ref.shape and v.dtype == ref.dtype for v, ref in refs)

    def _problems(self, walk: _Walk) -> Iterator[str]:
        """Yield each objection, for a person, to a walk that found all variables; nothing if it is right."""
        objects = self.trained.objects.objects
        pairs = []
        for key, number in self.numbers.items():
            variables = [objects[other].variable for other in walk.met[number]]
            places = {variable.tensor: variable for variable in variables if variable}
            if len(places) > 1:
                yield f"{key!r} is both {_listed(map(_place, places.values()))} there"
            own = self.served.objects[number].variable
            theirs = next(iter(places.values()))
            variable = self.wanted[key]
            name = self.renamed.get(key, own.name if own else key)
            kind = f"{variable.dtype.label}{list(variable.full_shape)}"
            pairs.append(NamedPair(name, theirs.name, kind))
        yield from conflicts(pairs)
        for path in walk.excess:
            yield f"the checkpoint has {path!r}, the model has nothing there"


def _edges_to_follow(served: TrackedObject, trained: TrackedObject) -> Iterator[tuple[str, int]]:
    """Return (name, number of the object at its end) for each edge of the trained object that a walk follows.

    Edges `layer_with_weights-<n>` are left out if both objects have the same edges `layer-<n>`, but different
    edges `layer_with_weights-<n>`: these numbers then count other layers.
    """
    # Keras counts all layers of a functional model, and besides those that have weights. A table of TFRA has
    # weights and the `dynamic_embedding` in its place has none, which moves the second count alone.
    layers = _beginning(served, _LAYERS)
    is_same = bool(layers) and layers == _beginning(trained, _LAYERS)
    counted = _beginning(trained, _WITH_WEIGHTS)
    moved = counted if is_same and counted != _beginning(served, _WITH_WEIGHTS) else frozenset()
    return ((name, child) for name, child in trained.children.items() if name not in moved)


def _beginning(item: TrackedObject, text: str) -> frozenset[str]:
    return frozenset(name for name in item.children if name.startswith(text))


def _missing(
    missing: list[str], wanted: Mapping[str, GraphVariable], trained: TrainedObjects, at: str | None = None
) -> MissingTensors:
    names = [*trained.by_name]
    lines = []
    for key in missing[:_SHOWN]:
        near = difflib.get_close_matches(key, names, n=2, cutoff=0.5)
        known = "; ".join(f"{name!r} at {_place(trained.by_name[name][0])}" for name in near)
        shape = f"{wanted[key].dtype.label}{list(wanted[key].full_shape)}"
        lines.append(f"{key} {shape}: {'nearest ' + known if known else 'nothing has a similar name'}")
    if len(missing) > _SHOWN:
        lines.append(f"... and {len(missing) - _SHOWN} more")
    where = "the checkpoint" if at is None else f"the checkpoint's object {at!r}, which fits best,"
    return MissingTensors(
        f"{len(missing)} of {len(wanted)} variables were not found in {where}",
        cause=lines_of(lines),
        hint="build the model as the trainer did, or name the tensors: --rename 'pattern=path of its object'",
    )


def _place(variable: TrackedVariable) -> str:
    return variable.tensor.removesuffix(SUFFIX)


def _listed(names: Iterable[str]) -> str:
    shown = [*names]
    return ", ".join(map(repr, shown[:_SHOWN])) + (", ..." if len(shown) > _SHOWN else "")
