"""Match values without names of their own (Keras' layers, numpy's lists), and check matches by names.

A match is made only where nothing else would fit: by the layer's name and then by the only values in it that
fit, by the order that Keras' own layers keep, by the shapes of the whole list. If two matches fit, neither is
used and an error says so.

Names check a match that was found in another way. An object-based checkpoint is matched by its objects'
edges: `layers/2` is restored into `layers/2`. A program that makes its layers in another order than the
trainer has the same edges, and every shape may fit. Two names agree if they are equal except for the numbers
that a framework appends to a name in use (`dense_4` for `dense`) and for scopes that one of them has in
addition (`dense/kernel`, `net/dense/kernel`). Numbers are not compared, since they count all that a process
made before; but they must grow in the same order.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, Naming, TensorRef
from exporter.errors import NoCertainMatch, lines_of
from exporter.graph.inference_graph import GraphVariable, InferenceGraph
from exporter.storage.local_paths import quoted
from exporter.wire.dtypes import DType

_NUMBER = re.compile(r"_([0-9]+)$")
# names that TensorFlow gives to variables without one
SAYS_NOTHING = re.compile(r"((Sharded)?Variable(_[0-9]+)?)?")


class NamedPair(Struct, frozen=True):
    """A served variable's name and the trained variable's whose values it would get.

    `kind` is dtype and shape.
    """

    served: str
    trained: str
    kind: str


def conflicts(pairs: Iterable[NamedPair]) -> Iterator[str]:
    """Yield, for a person, each reason why the names contradict the pairs; nothing if they agree.

    Names that say nothing (`Variable_3`) are not compared. Two names agree if, without their numbers, the
    shorter is the longer one without some scopes. Among pairs of one kind whose names are equal except for
    numbers, the numbers must grow in the same order on both sides.
    """
    groups: dict[tuple[object, ...], list[NamedPair]] = {}
    for pair in pairs:
        if SAYS_NOTHING.fullmatch(pair.served) or SAYS_NOTHING.fullmatch(pair.trained):
            continue
        served, trained = stems(pair.served), stems(pair.trained)
        if not _agree(served, trained):
            yield f"{pair.served!r} would get the values of {pair.trained!r}"
            continue
        groups.setdefault((served, trained, pair.kind), []).append(pair)
    for group in groups.values():
        group.sort(key=lambda pair: numbers(pair.served))
        for before, after in pairwise(group):
            if numbers(before.trained) > numbers(after.trained):
                yield (
                    f"{before.served!r} would get the values of {before.trained!r}, and "
                    f"{after.served!r} those of {after.trained!r}, which is the reverse order"
                )


def left_over_twins(used: Mapping[str, object], left: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield (left-over name, used name) for names of one kind that are equal except for their numbers.

    `left` and `used` have the kind of each name: dtype and shape. Each name in `left` comes at most once,
    with the last such name in `used`.
    """
    bare = {(_unnumbered(name), kind): name for name, kind in used.items()}
    for name, kind in left.items():
        if (twin := bare.get((_unnumbered(name), kind))) is not None:
            yield name, twin


def _unnumbered(name: str) -> str:
    return "/".join(stems(name)) if "_" in name else name


def stems(name: str) -> tuple[str, ...]:
    """Return the parts of a name without the numbers that a framework appends to names in use."""
    return tuple(_NUMBER.sub("", part) for part in name.split("/"))


def numbers(name: str) -> tuple[int, ...]:
    """Return the numbers that `stems` removes, one for each part of the name, 0 for a part without one.

    Names with equal `stems` have different numbers.
    """
    found = (_NUMBER.search(part) for part in name.split("/"))
    return tuple(int(number[1]) if number else 0 for number in found)


def _agree(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """True if the shorter of two names, given by `stems`, is the longer one without some of its scopes."""
    shorter, longer = sorted((one, other), key=len)
    rest = iter(longer)
    # `in` consumes `rest`: the parts must come in the same order.
    return shorter[-1] == longer[-1] and all(part in rest for part in shorter)


_NORMALISED = ("gamma", "beta", "moving_mean", "moving_variance")
_RECURRENT = ("kernel", "recurrent_kernel", "bias")
# The order in which Keras' layers keep values that may be of one shape, by the layer's class.
_ORDERS = {
    "batch_normalization": _NORMALISED,
    "layer_normalization": _NORMALISED[:2],
    "group_normalization": _NORMALISED[:2],
    "lstm_cell": _RECURRENT,
    "gru_cell": _RECURRENT,
    "simple_rnn_cell": _RECURRENT,
}

# Names that are not values of a layer, or that files of some versions of Keras lack.
_NO_LAYER = re.compile(r"^metrics/|(^|/)(optimizer|optimizer_weights|seed_generator(_[0-9]+)?)/")

# Values of layers: tables by keys, which some layers store, have names of their own.
_LAYERS_VALUE = re.compile(r"(^|/)vars/[^/]+$")

_DIRECTION = re.compile(r"(?:^|/)(forward|backward)_[^/]+/")
_SHOWN = 6


def match_unnamed(
    graph: InferenceGraph, catalog: Catalog, named: Iterable[str] = (), *, by_order: bool = False
) -> dict[str, str]:
    """Return {variable: tensor}, both by name, in a catalog without tensors named after variables.

    `named` are variables that rename rules cover; they are left out. With `by_order`, arrays of equal shape
    in a list are in the order of the graph's variables. A legacy Keras file is matched by its layers, else by
    its numbered names. In a newer Keras file a variable whose own name a tensor has is left out. Empty if
    there is nothing to match in these ways. Raises NoCertainMatch if a match would be a guess.
    """
    wanted = {variable.key: variable for variable in graph.variables}
    open_ = {key: v for key, v in wanted.items() if key not in catalog.tensors and key not in {*named}}
    if catalog.naming is Naming.NAMES:
        rest = {key: v for key, v in wanted.items() if key not in {*named}}
        owned = _by_owner(wanted, catalog, graph.layers)
        if owned is not None:
            return {key: name for key, name in owned.items() if key in rest}
        return _by_number(rest, catalog)
    if not open_:
        return {}
    if catalog.naming is Naming.ORDER:
        return _by_order(list(wanted.values()), list(catalog.tensors.values()), by_order)
    values = {name: ref for name, ref in catalog.tensors.items() if _LAYERS_VALUE.search(name)}
    catalog = replace(catalog, tensors=values)
    if graph.layers:
        return _by_path(open_, graph.layers, catalog)
    found = _by_layer(open_, catalog)
    if not {*named}:
        _refuse_left_over_twins(found, catalog)
    return found


def _by_owner(
    wanted: Mapping[str, GraphVariable], catalog: Catalog, places: Mapping[str, tuple[TensorRef, ...]]
) -> dict[str, str] | None:
    """Match a legacy file's tensors by the layers that own them.

    Return {variable: tensor}, both by name. Keras named variables in its own ways over time:
    `conv2d_1_1/kernel` in the layer `conv2d_1`, `lstm_1/kernel` or `lstm_1/lstm_cell_4/kernel` in `lstm_1`,
    in Keras 3.0 `kernel` alone. `wanted` are the graph's variables by key; `places` has, by variable, its
    places in a weights file, which name the inner model that owns a variable. None if graph and file have
    different layers, or if a layer has several tensors with the same last part of the name and the same shape
    (the two directions of a Bidirectional layer count as different).
    """
    owners = {key: at[0].owner.partition("/")[0] for key, at in places.items() if at[0].owner}
    stored: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for ref in catalog.tensors.values():
        if ref.owner:
            inner = ref.name.partition("/")[2]
            like = ref.owner, _direction(inner), _last(ref.name), *_kind(ref)
            stored[like].append(ref.name)
    layers = {owners.get(key, key.partition("/")[0]) for key in wanted}
    if not stored or layers != {owner for owner, *_ in stored}:
        return None
    found: dict[str, str] = {}
    taken: set[str] = set()
    for key, variable in wanted.items():
        inner = key.partition("/")[2]
        layer = owners.get(key, key.partition("/")[0])
        names = stored.get((layer, _direction(inner), _last(key), *_kind(variable)), [])
        if len(names) != 1 or names[0] in taken:
            return None
        found[key] = names[0]
        taken.add(names[0])
    return found


def _direction(name: str) -> str:
    """Return `forward` or `backward` for the name of a variable in a Bidirectional layer; "" for others."""
    found = _DIRECTION.search(name)
    return found[1] if found else ""


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _by_number(wanted: Mapping[str, GraphVariable], catalog: Catalog) -> dict[str, str]:
    """Match the tensors of layers named by class and number, in the order of the numbers.

    Return {variable: tensor}; variables are left out if the file has no tensor of their kind, or one for
    several of them. Empty for files without owners of tensors. Raises NoCertainMatch if the file has several
    tensors of a kind, but not as many as the graph.
    """
    stored: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for ref in catalog.tensors.values():
        if ref.owner:
            # only in legacy files do tensors have both owners and names
            like = stems(ref.name), *_kind(ref)
            stored[like].append(ref.name)
    if not stored:
        return {}
    served: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for key, variable in wanted.items():
        like = stems(key), *_kind(variable)
        served[like].append(key)
    found: dict[str, str] = {}
    for group, keys in served.items():
        # `dense_3/kernel` and `dense_4/kernel` are `dense/kernel` and `dense_1/kernel` of another process,
        # whose numbers count all layers it made before, if both sides have equally many of one shape.
        names = stored.get(group, [])
        if len(names) == len(keys):
            found |= zip(sorted(keys, key=numbers), sorted(names, key=numbers), strict=True)
        elif len(names) > 1:
            raise NoCertainMatch(
                f"the checkpoint has {len(names)} tensors for {len(keys)} variables of the same kind",
                cause=f"{', '.join(names[:_SHOWN])} for {', '.join(keys[:_SHOWN])}; with a layer more or "
                "less, numbered names stand for other layers",
            )
    return found


def _by_path(
    open_: Mapping[str, GraphVariable], layers: Mapping[str, tuple[TensorRef, ...]], catalog: Catalog
) -> dict[str, str]:
    """Match the tensors as Keras itself would load them; return {variable: tensor}.

    `open_` are the variables to match, by key. `layers` has, by variable, the places where Keras looks for
    its value; the last one counts. Variables without such a place are left out. Raises NoCertainMatch if the
    layers' names or number differ.
    """
    stored = {name: ref for name, ref in catalog.tensors.items() if not _NO_LAYER.search(name)}
    places = (place for several in layers.values() for place in several)
    expected = {place.name: place for place in places if not _NO_LAYER.search(place.name)}
    _refuse_other_structure(stored, expected)
    found = {key: layers[key][-1].name for key in open_ if key in layers}
    _refuse_other_names((expected[name], stored[name]) for name in found.values() if name in stored)
    return found


def _refuse_other_structure(stored: Mapping[str, TensorRef], expected: Mapping[str, TensorRef]) -> None:
    """Raise NoCertainMatch unless model (`expected`) and archive (`stored`) have values of the same names.

    Otherwise the numbers of layers may stand for other layers.
    """
    more, fewer = stored.keys() - expected.keys(), expected.keys() - stored.keys()
    if not more and not fewer:
        return
    texts = [
        f"{what}: {', '.join(_described(refs[name]) for name in sorted(names)[:_SHOWN])}"
        for what, refs, names in (
            ("in the checkpoint alone", stored, more),
            ("in the model alone", expected, fewer),
        )
        if names
    ]
    raise NoCertainMatch(
        f"the model has {len(expected)} values and the checkpoint {len(stored)}: layers differ",
        cause="; ".join(texts),
        hint="" if fewer else _or_ignored(more),
    )


def _or_ignored(names: Iterable[str]) -> str:
    """Return the hint for values, given by name, that only the checkpoint has."""
    options = " ".join(f"--ignore {quoted(re.escape(name))}" for name in sorted(names)[:_SHOWN])
    return (
        "build the model with what the trainer's has; or, if they are not meant to be served, and are the "
        f"last of their layer: {options}"
    )


def _refuse_other_names(pairs: Iterable[tuple[TensorRef, TensorRef]]) -> None:
    """Raise NoCertainMatch unless layers' names agree, given (the model's, the checkpoint's) tensors."""
    named = (
        NamedPair(own.owner, other.owner, str(_kind(own)))
        for own, other in pairs
        if own.owner and other.owner
    )
    found = [*dict.fromkeys(conflicts(named))]
    if found:
        raise NoCertainMatch(
            "layers of the model and of the checkpoint that would belong together have other names",
            cause=lines_of(found[:_SHOWN]),
            hint="build the layers in the trainer's order and by its names, or list the pairs: --rename FILE",
        )


def _by_layer(open_: Mapping[str, GraphVariable], catalog: Catalog) -> dict[str, str]:
    """Match tensors by layers' names: `hidden/kernel` is a value of the only layer called `hidden`.

    Return {variable: tensor}. `open_` are the variables to match, by key; variables in scopes without a layer
    are left out. Raises NoCertainMatch if two scopes look like one layer, a scope like several, or a layer's
    values differ.
    """
    groups: dict[str, list[TensorRef]] = defaultdict(list)
    for ref in catalog.tensors.values():
        if ref.owner and not _NO_LAYER.search(ref.name):
            groups[_group(ref.name)].append(ref)
    scopes: dict[str, list[GraphVariable]] = defaultdict(list)
    for key, variable in open_.items():
        scopes[key.rpartition("/")[0]].append(variable)
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for scope, variables in scopes.items():
        group = _group_of(scope, groups)
        if group is None:
            continue
        if group in taken:
            raise NoCertainMatch(
                f"{taken[group]!r} and {scope!r} both look like the layer {groups[group][0].owner!r}"
            )
        taken[group] = scope
        found |= _within(scope, variables, groups[group])
    return found


def _refuse_left_over_twins(found: Mapping[str, str], catalog: Catalog) -> None:
    """Raise NoCertainMatch if the checkpoint has more layers of a kind, which may shift names' numbers.

    `found` has the tensor of each variable that was matched.
    """
    taken = {_group(name) for name in found.values()}
    used = {(stems(ref.owner), *_kind(ref)) for ref in catalog.tensors.values() if _group(ref.name) in taken}
    for ref in catalog.tensors.values():
        is_layer = ref.owner and not _NO_LAYER.search(ref.name)
        if is_layer and _group(ref.name) not in taken and (stems(ref.owner), *_kind(ref)) in used:
            raise NoCertainMatch(
                f"the checkpoint has the layer {ref.owner!r} beside what the graph has, of the same kind",
                cause="with a layer more or less, numbered names stand for other layers",
            )


def _group_of(scope: str, groups: Mapping[str, Sequence[TensorRef]]) -> str | None:
    """Return the only group of `groups` whose layer's name fits the scope; None if there is none.

    A name fits if it equals the scope, else if it ends with `/<scope>`, else if the scope ends with
    `/<name>`; only the first of these rules that any group meets counts. Raises NoCertainMatch if several
    groups meet it.
    """
    fits_in: tuple[Callable[[str], bool], ...] = (
        lambda owner: owner == scope,
        lambda owner: bool(scope) and owner.endswith(f"/{scope}"),
        lambda owner: scope.endswith(f"/{owner}"),
    )
    for fits in fits_in:
        found = [group for group, refs in groups.items() if fits(refs[0].owner)]
        if len(found) > 1:
            names = ", ".join(f"{groups[group][0].owner!r} ({group})" for group in found)
            raise NoCertainMatch(f"the variables of {scope!r} could be those of several layers: {names}")
        if found:
            return found[0]
    return None


def _within(scope: str, variables: list[GraphVariable], refs: list[TensorRef]) -> dict[str, str]:
    """Match the tensors of one layer with its variables; return {variable: tensor}.

    They are matched by shape if no two are alike, else in the order of Keras' layers. `scope` is the layer's
    name in the graph. Raises NoCertainMatch if the values differ, or two of one shape cannot be told apart.
    """
    if Counter(map(_kind, variables)) != Counter(map(_kind, refs)):
        raise NoCertainMatch(
            f"the layer {scope!r} has other values in the graph than in the checkpoint",
            cause=f"graph: {_listed(variables)}; checkpoint: {', '.join(map(_described, refs))}",
        )
    if max(Counter(map(_kind, refs)).values()) == 1:
        by_kind = {_kind(ref): ref.name for ref in refs}
        return {variable.key: by_kind[_kind(variable)] for variable in variables}
    refs = sorted(refs, key=_number)
    leaves = {_last(variable.key): variable for variable in variables}
    base, group = (_NUMBER.sub("", _last(path)) for path in (refs[0].owner, _group(refs[0].name)))
    order = [leaf for leaf in _ORDERS.get(group) or _ORDERS.get(base) or () if leaf in leaves]
    ordered = [leaves[leaf] for leaf in order]
    if len(order) != len(refs) or list(map(_kind, ordered)) != list(map(_kind, refs)):
        raise NoCertainMatch(
            f"the layer {scope!r} has values of one shape, and nothing says which is which",
            cause=f"graph: {_listed(variables)}; checkpoint: {', '.join(map(_described, refs))}",
        )
    return {variable.key: ref.name for variable, ref in zip(ordered, refs, strict=True)}


def _number(ref: TensorRef) -> tuple[int, str]:
    leaf = _last(ref.name)
    return (int(leaf), "") if leaf.isdecimal() else (-1, leaf)


def _by_order(variables: list[GraphVariable], refs: list[TensorRef], is_order_known: bool) -> dict[str, str]:
    """Match the tensors of a list with the graph's variables, in their order; return {variable: tensor}.

    Raises NoCertainMatch if number, shapes or dtypes differ, or if two tensors have one shape and dtype,
    unless `is_order_known`: then the list is in the order of the graph's variables.
    """
    if len(variables) != len(refs):
        raise NoCertainMatch(
            f"the list has {len(refs)} arrays and the graph {len(variables)} variables",
            cause=f"list: {', '.join(map(_described, refs[:_SHOWN]))}; graph: {_listed(variables)}",
        )
    for position, (variable, ref) in enumerate(zip(variables, refs, strict=True)):
        if _kind(variable) != _kind(ref):
            raise NoCertainMatch(
                f"array {position} of the list is {_described(ref)}, "
                f"variable {position} of the graph is {_listed([variable])}",
                cause="the list is of another model, or in another order",
            )
    alike = [kind for kind, count in Counter(map(_kind, refs)).items() if count > 1]
    if alike and not is_order_known:
        dtype, shape = alike[0]
        same = [variable for variable in variables if _kind(variable) == (dtype, shape)]
        raise NoCertainMatch(
            f"only the list's order tells {len(same)} arrays of {dtype.label}{list(shape)} apart",
            cause=f"they would be {_listed(same)}, in this order",
            hint="if the list was saved in the order of the graph's variables: --by-order",
        )
    return {variable.key: ref.name for variable, ref in zip(variables, refs, strict=True)}


def _kind(value: GraphVariable | TensorRef) -> tuple[DType, tuple[int, ...]]:
    shape = value.full_shape if isinstance(value, GraphVariable) else value.shape
    return value.dtype, shape


def _group(name: str) -> str:
    """Return the path of the object that holds a value: `layers/dense_1` for `layers/dense_1/vars/0`."""
    return name.rpartition("/")[0].removesuffix("vars").rstrip("/")


def name_in_layer(ref: TensorRef) -> str:
    """Return the owner's name and the value's number: `tower/hidden/0` for `layers/dense_1/vars/0`.

    A tensor without an owner keeps its name.
    """
    return f"{ref.owner}/{_last(ref.name)}" if ref.owner else ref.name


def _described(ref: TensorRef) -> str:
    owner = f" of {ref.owner!r}" if ref.owner else ""
    return f"{ref.name} {ref.dtype.label}{list(ref.shape)}{owner}"


def _listed(variables: Sequence[GraphVariable]) -> str:
    texts = [f"{v.key} {v.dtype.label}{list(v.full_shape)}" for v in variables[:_SHOWN]]
    return ", ".join(texts) + (", ..." if len(variables) > _SHOWN else "")
