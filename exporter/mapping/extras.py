"""Tensors of the checkpoint that are not served: their purposes, and which of them may not be left out.

An object of which a variable is served is served whole. Without one of its variables it computes something
else: with a LoRA adapter, a quantization scale or a prompt left out, the served model never existed. Other
objects are ignored: heads, optimizers, metrics, everything that only training uses. So is state of the same
object that inference does not need and whose kind is known: slots, averages of a served variable, integers
that count, seeds. Moving statistics are judged in `training_variables`. Where only names say which variables
belong together, a variable beside a served one is reported by a note.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec import Struct

from exporter.catalog import Catalog, Extra, ExtraKind, Naming, TensorRef
from exporter.checkpoint.embedding_variables import embedding_variables
from exporter.checkpoint.object_graph import ROOT, SUFFIX, ObjectGraph
from exporter.checkpoint.tensor_bundle import OBJECT_GRAPH
from exporter.errors import CheckpointError, ObjectMismatch, lines_of
from exporter.graph.inference_graph import InferenceGraph
from exporter.mapping.by_layer import stems
from exporter.mapping.mapping_rules import TF_AVERAGE, MappingRules, ServedWhole
from exporter.storage.local_paths import quoted

if TYPE_CHECKING:
    from exporter.mapping.object_matching import ObjectMatches, TrainedObjects

# Never decides what is served: trainers name slots as they like.
# Keras 3 keeps a model's own weights under `optimizer/_trainable_variables`, so these are not slots.
_SLOT_NAME = re.compile(
    r"(^|/)(Adam|Adagrad|AdagradDA|Adadelta|Momentum|RMSProp|Ftrl|Lamb|Nadam|Adamax|Proximal\w*)(_\d+)?(/|$)"
    r"|(^|/)(beta[12]_power|accumulator|momentum|velocity|learning_rate|linear)(_\d+)?$"
    r"|\.OPTIMIZER_SLOT|^training/|(^|/)_?optimizer/(?!_trainable_variables/)"
    r"|(^|/)(optimizer_variables|opt_state)/"
)
# of tf.train.Checkpoint, and of Keras' BackupAndRestore
_COUNTERS = frozenset({"save_counter", "ckpt_saved_epoch", "ckpt_saved_batch"})
_ITERATIONS = frozenset({"global_step", "_iterations", "iterations"})


def classify_extras(catalog: Catalog, used: Collection[str] = ()) -> Iterator[Extra]:
    """Yield every tensor whose name is not in `used`, with its probable purpose, in the catalog's order."""
    embedding = _embedding_kinds(catalog)
    for name, tensor in catalog.tensors.items():
        if name not in used:
            yield Extra(tensor, embedding.get(name) or _kind(name, tensor, catalog))


def _embedding_kinds(catalog: Catalog) -> dict[str, ExtraKind]:
    """Return the purposes of embedding variables' tensors, by the tensor's name.

    Empty if an embedding variable is damaged or cannot be read.
    """
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
    # These before slots: `optimizer/_iterations` is called
    # like one, an average has its owner's shape like one.
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


# Statistics that normalisation keeps for inference, by the last part of their names.
STATISTICS = frozenset(
    f"{kind}_{what}"
    for kind in ("moving", "running", "population", "pop")
    for what in ("mean", "variance", "var")
)
NORMALISING = ("gamma", "beta", "scale", "offset")

_SHOWN = 12
_STATE = re.compile(r"(^|_)(seed|rng|learning_rate|lr|loss_scale|best|patience|rnn_state)(_|$)")
_STATES = re.compile(r"states?(/[0-9]+)*")  # of a recurrent layer, between the batches of an epoch
_AVERAGE = re.compile(
    r"(^|[_/])(ema|average|averaged|avg|moving_average|shadow|polyak|swa|ExponentialMovingAverage)(?=[_/]|$)"
)
# Variables of Keras' metrics, a vector for each.
_METRICS = frozenset(f"{right}_{what}" for right in ("true", "false") for what in ("positives", "negatives"))
_SCOPE = re.compile(r"[/.](?=[^/.]*$)")


def names_of(ref: TensorRef) -> tuple[str, ...]:
    """Return the names by which `--ignore` finds a tensor.

    They are its full name, the path of its object, and the last part of the path.
    """
    path = ref.name.removesuffix(SUFFIX)
    return ref.name, path, _SCOPE.split(path)[-1]


class Member(Struct, frozen=True):
    """A variable of an object: its name in the object, its tensor, and the name that the program gave it."""

    name: str
    tensor: TensorRef
    trained_name: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which `--ignore` finds the variable.

        They are its name in its object, the `names_of` its tensor, and the program's name for it.
        """
        return self.name, *names_of(self.tensor), self.trained_name

    @property
    def label(self) -> str:
        """The variable's name for a person: the program's, else its tensor's without the suffix."""
        return self.trained_name or self.tensor.name.removesuffix(SUFFIX)


class LeftOut(Struct, frozen=True):
    """A variable that is not served, and a served one of the same object (None: only further inside)."""

    member: Member
    beside: Member | None
    place: str


def whole_objects(
    trained: TrainedObjects,
    matches: ObjectMatches,
    used: Collection[str],
    graph: InferenceGraph,
    rules: MappingRules,
) -> tuple[ServedWhole, list[str]]:
    """Require that a checkpoint's objects are served whole.

    Return the tensors that may be left out, with the paths of objects that are served without a variable of
    their own, and a list of at most one note. `matches` are the objects that correspond to the model's,
    `used` the names of the tensors that are served. The note names left-out variables if tensors were found
    by names, or if their object corresponds to a module around models. Raises ObjectMismatch if a variable of
    a served object is not served for no known reason, UsageError if the object of `--object-path` does not
    exist.
    """
    before, used = rules.whole, frozenset(used)
    known, stayed = _known_names(graph), frozenset(() if before is None else before.beside)
    beside, containers, left, noted = set[str](), set[str](), list[LeftOut](), list[LeftOut]()
    for number, members, served in _served_objects(trained, matches, used, before):
        path = trained.objects.paths[number]
        if served is None:
            containers.add(path)
        for member in members:
            name = member.tensor.name
            if name in used:
                continue
            is_met = name in matches.met | stayed
            is_known = is_met or (not matches.met and stems(member.trained_name) in known)
            if is_known or rules.ignores(member.names) or _is_state(member, members, used):
                beside.add(name)
            elif served is None and number == matches.wrapped:
                noted.append(LeftOut(member, served, path or "."))
            else:
                left.append(LeftOut(member, served, path))
    # The recipe of a base that an older release published does not have this, either.
    by_names = before is None and not matches.met
    if left and not by_names:
        raise _not_whole(left)
    beside |= {item.member.tensor.name for item in (*left, *noted)}
    found = ServedWhole(tuple(sorted(beside)), tuple(sorted(containers)))
    noted += left if left and left[0].beside else []
    return found, [_note_on(noted)] if noted else []


def _served_objects(
    trained: TrainedObjects, matches: ObjectMatches, used: frozenset[str], before: ServedWhole | None
) -> Iterator[tuple[int, list[Member], Member | None]]:
    """Yield (number, variables, a served variable) of each object that is served.

    The number is the object's in the checkpoint. The third is None for a container of models, as it was known
    `before` or is found now. While iterating, raises UsageError if the object of `--object-path` does not
    exist.
    """
    for number, members in _members(trained).items():
        served = next((member for member in members if member.tensor.name in used), None)
        if served is not None:
            yield number, [*members, *_members_inside(trained, number, used)], served
        elif number in matches.paired or (before and trained.objects.paths[number] in before.objects):
            yield number, members, None


def ignorable(catalog: Catalog, objects: ObjectGraph | None) -> Iterator[str]:
    """Yield the names by which `--ignore` finds the variables of a checkpoint, some more than once.

    `objects` is None for a checkpoint by names.
    """
    for ref in catalog.tensors.values():
        yield from names_of(ref)
    if objects is not None:
        from exporter.mapping.object_matching import TrainedObjects

        for members in _members(TrainedObjects(objects, catalog.tensors)).values():
            for member in members:
                yield from member.names


def _members(trained: TrainedObjects) -> dict[int, list[Member]]:
    """Return the variables that each object holds itself or in lists, by the object's number.

    Optimizers and all below are left out. A variable that is an attribute of one object is not also a member
    of the objects that list it. Raises UsageError if the object of `--object-path` does not exist.
    """
    objects = trained.objects.objects
    slots = {slot for item in objects for slot in item.slots}
    reached = _reached(trained)
    own: dict[int, dict[int, str]] = {}
    for number in reached:
        for edge, child in objects[number].children.items():
            if objects[child].variable and not edge.isdecimal():
                own.setdefault(number, {}).setdefault(child, edge)
    named = {child for children in own.values() for child in children}
    for number in reached:
        for listed, path in _in_lists_of(trained.objects, number):
            if listed not in named:
                own.setdefault(number, {}).setdefault(listed, path)
    found: dict[int, list[Member]] = {}
    for number, children in own.items():
        for child, edge in children.items():
            variable = objects[child].variable
            if variable is not None and child not in slots and variable.tensor in trained.tensors:
                member = Member(edge, trained.tensors[variable.tensor], variable.name)
                found.setdefault(number, []).append(member)
    return found


def _reached(trained: TrainedObjects) -> list[int]:
    """Return the numbers of the model's objects, ascending, without optimizers and objects only in them.

    Raises UsageError if the object of `--object-path` does not exist.
    """
    objects, optimizers = trained.objects.objects, trained.objects.optimizers
    start = ROOT if trained.start is None else trained.start
    reached, pending = {start}, [start]
    while pending:
        for child in objects[pending.pop()].children.values():
            if child not in reached and child not in optimizers:
                reached.add(child)
                pending.append(child)
    return sorted(reached)


def _in_lists_of(objects: ObjectGraph, number: int) -> Iterator[tuple[int, str]]:
    """Yield number and path of each variable in lists that an object holds, and in lists inside these.

    Nothing for an object that is a list itself.
    """
    if not _is_list(objects, number):
        for edge, child in objects.objects[number].children.items():
            for path, listed in _listed_in(objects, child, edge):
                yield listed, path


def _members_inside(trained: TrainedObjects, number: int, served: Collection[str]) -> list[Member]:
    """Return the variables of objects inside an object with served variables, like an adapter in a layer.

    Empty if a variable inside is `served` (names of tensors), too: an object that holds layers may hold
    others for training. Counts and metrics are left out.
    """
    objects, found = trained.objects, list[Member]()
    pending, seen = [number], {number, *objects.optimizers}
    while pending:
        holder = pending.pop()
        for child in objects.objects[holder].children.values():
            if child in seen:
                continue
            seen.add(child)
            pending.append(child)
            variable = objects.objects[child].variable
            if variable is None or holder == number or variable.tensor not in trained.tensors:
                continue
            if variable.tensor in served:
                return []
            ref = trained.tensors[variable.tensor]
            path = ref.name.removesuffix(SUFFIX)
            if ref.dtype.is_floating and ref.shape and _SCOPE.split(path)[-1] not in _METRICS:
                found.append(Member(path, ref, variable.name))
    return found


def _is_list(objects: ObjectGraph, number: int) -> bool:
    children = objects.objects[number].children
    return bool(children) and all(edge.isdecimal() for edge in children)


def _listed_in(objects: ObjectGraph, number: int, path: str) -> Iterator[tuple[str, int]]:
    """Yield path and number of each variable in the list with this number, and in lists inside it.

    Nothing for another object. `path` is the list's own path, with which the paths begin.
    """
    pending, seen = [(path, number)], {number}
    while pending:
        path, number = pending.pop()
        if _is_list(objects, number):
            for edge, child in objects.objects[number].children.items():
                if objects.objects[child].variable:
                    yield f"{path}/{edge}", child
                elif child not in seen:
                    seen.add(child)
                    pending.append((f"{path}/{edge}", child))


def _known_names(graph: InferenceGraph) -> frozenset[tuple[str, ...]]:
    """Return the `stems` of the names of all variables of the model, whether or not its graph reads them."""
    objects = graph.objects.objects if graph.objects is not None else ()
    names = (item.variable.name for item in objects if item.variable)
    return frozenset(map(stems, (*names, *graph.layers)))


def _is_state(member: Member, beside: Iterable[Member], used: Collection[str]) -> bool:
    """True for a variable that is state of training: a count, a seed, a layer's state, an average.

    An average counts only if its variable is served, a moving statistic only beside served parameters of a
    normalising layer. `beside` are all variables of the object, `used` the names of the served tensors.
    """
    ref = member.tensor
    leaf = _SCOPE.split(member.name)[-1].strip("_")
    if (ref.shape == () and ref.dtype.is_integer) or _STATE.search(leaf) or _STATES.fullmatch(member.name):
        return True
    served = [other for other in beside if other.tensor.name in used]
    if leaf in STATISTICS:
        return any(other.name.strip("_") in NORMALISING for other in served)
    bare = {_AVERAGE.sub("", name).strip("_/") for name in (member.name, member.trained_name)}
    return bool(_AVERAGE.search(member.name) or _AVERAGE.search(member.trained_name)) and any(
        other.tensor.shape == ref.shape and bare & {other.name.strip("_"), other.trained_name}
        for other in served
    )


def _not_whole(left: list[LeftOut]) -> ObjectMismatch:
    first = left[0]
    lines = [
        f"{item.member.tensor.name.removesuffix(SUFFIX)} {_kind_of(item.member.tensor)}, called "
        f"{item.member.label!r}, "
        + (f"beside {item.beside.label!r}" if item.beside else f"in {item.place!r}")
        for item in left[:_SHOWN]
    ]
    more = [f"... and {len(left) - _SHOWN} more"] if len(left) > _SHOWN else []
    several = f" and {len(left) - 1} more" if len(left) > 1 else ""
    return ObjectMismatch(
        f"the model lacks {first.member.label!r}{several}, which the checkpoint has in a served object",
        cause=lines_of([*lines, *more]),
        hint=_way_out([(item.member.label, item.member.name) for item in left]),
    )


def _kind_of(ref: TensorRef) -> str:
    return f"{ref.dtype.label}{list(ref.shape)}"


def _way_out(left: list[tuple[str, str]]) -> str:
    """Return the hint for left-out variables, each given by (label, name for `--ignore`)."""
    build = "build the model with what the trainer's has"
    if any("lora" in label for label, _ in left):
        build = "call enable_lora in the builder, with the trainer's rank"
    names = dict.fromkeys(re.escape(name) for _, name in left)
    options = " ".join(f"--ignore {quoted(name)}" for name in [*names][:_SHOWN])
    return f"{build}; or, if it is meant that they are not served: {options}"


def left_out_by_names(
    catalog: Catalog, used: Collection[str], graph: InferenceGraph, rules: MappingRules
) -> Iterator[str]:
    """Yield at most one note, on variables that are not served but are in the scope of a served one.

    Nothing for a checkpoint without names. `used` are the names of the tensors that are served. While
    iterating, raises ObjectMismatch if the file says that both are of one layer, as Keras 2's files do.
    """
    if catalog.naming is not Naming.NAMES:  # of layers and lists all values have to fit anyway
        return
    served: dict[tuple[str, str], list[Member]] = {}
    for name in used:
        ref = catalog.tensors[name]
        served.setdefault(_place(ref), []).append(Member(names_of(ref)[-1], ref))
    known, rows = _known_names(graph), _embedding_kinds(catalog)
    left: list[LeftOut] = []
    for extra in classify_extras(catalog, used):
        ref = extra.tensor
        beside = served.get(_place(ref)) if _SCOPE.search(ref.name) else None
        if beside is None or extra.kind is not ExtraKind.OTHER or ref.name in rows or _HALF.search(ref.name):
            continue
        member = Member(names_of(ref)[-1], ref)
        is_known = stems(ref.name) in known or rules.ignores(member.names)
        if not is_known and not _is_state(member, beside, used):
            largest = max(beside, key=lambda other: other.tensor.elements)
            left.append(LeftOut(member, largest, ref.owner))
    if owned := [item for item in left if item.place]:
        raise _not_whole(owned)
    if left:
        yield _note_on(left)


def _note_on(left: list[LeftOut]) -> str:
    """Return the note on variables that may be missing; at least one is needed, the first one is named."""
    first = left[0]
    beside = first.beside.label if first.beside else first.place
    more = f", and {len(left) - 1} more like it" if len(left) > 1 else ""
    return (
        f"{first.member.label!r} of the checkpoint is not served, {beside!r} beside it is{more}: if they are "
        "of one layer, what is served is not the model that was trained"
    )


_HALF = re.compile(r"-(keys|values)$")


def _place(ref: TensorRef) -> tuple[str, str]:
    """Return the owner and the scope of a tensor, each "" if there is none.

    Variables of one layer have both in common.
    """
    scope = _SCOPE.search(ref.name)
    return ref.owner, ref.name[: scope.start()] if scope else ""
