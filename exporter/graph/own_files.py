"""Follow the paths that operations read: find the tensors that name files of the version itself.

The loader feeds an asset's path to a constant. It stays the version's own while it is only passed on: by an
operation that does not change it, by a variable that gets no other value, as an argument of a function. Any
other operation may compute another path, so its result does not count; nor does a tensor for which clients
send values, which may be one in the middle of the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from exporter.errors import GraphError
from exporter.graph.nodes import (
    CALLS,
    LOOPS,
    Body,
    attr,
    attr_text,
    called,
    const_texts,
    input_names,
    node_of,
)
from exporter.wire.protos import Proto

# Pack and ConcatV2 are followed separately; other operations on texts may compute another path.
_HANDS_ON = frozenset({"Identity", "Reshape", "ExpandDims", "Squeeze", "StopGradient"})


def unambiguous(function: Proto) -> Body:
    """Return a function's body, or GraphError if two of its nodes have the same name."""
    body = Body.of(function)
    if len(body.by_name) < len(function.node_def):
        raise GraphError(f"function {body.name!r} has two nodes of one name")
    return body


class OwnFiles:
    """Decides which tensors of a graph are certainly paths of the version's own files.

    The nodes `files` of the graph hold such a path each; clients send values for its nodes `fed`.
    """

    def __init__(self, graph_def: Proto, files: Collection[str], fed: Collection[str] = ()) -> None:
        self._graph_def = graph_def
        self._graph = Body(graph_def.node)
        self._library = {function.signature.name: function for function in graph_def.library.function}
        self._files = {*files}
        self._fed = {*fed}

    def needs(self, scope: Body, texts: Iterable[str]) -> set[int] | None:
        """Return the positions of arguments of `scope` that must be own files for `texts` to be own files.

        `texts` are names of tensors in the body `scope`; a tensor is an own file if it certainly is the path
        of a file of the version. Empty if they are own files in any case; None if one may be another path.
        """
        places: set[int] = set()
        pending, seen = [*texts], set[str]()
        while pending:
            text = pending.pop()
            if text in seen:
                continue
            seen.add(text)
            if scope.function is not None and ":" not in text:
                arguments = [each.name for each in scope.function.signature.input_arg]
                if text not in arguments or _has_lists(scope.function):
                    return None
                places.add(arguments.index(text))
            elif (sources := self._sources(text, scope)) is not None:
                pending += sources
            else:
                return None
        return places

    def needs_of_call(self, node: Proto, callee: str, places: Iterable[int], scope: Body) -> set[int] | None:
        """Return the result of `needs` for some inputs of the call `node`: positions of arguments of `scope`.

        The inputs are those for the arguments of the function `callee` at the positions `places`. None also
        if these inputs are not known. GraphError if two nodes of a loop's body have one name.
        """
        inputs, before = input_names(node), CALLS.get(node.op, 0)
        if node.op != callee and not (node.op in CALLS and callee in {each.name for each in called(node)}):
            return None  # an operation that is not known to pass its inputs on as arguments
        needed = self._carried(node, {*places}) if node.op in LOOPS else {*places}
        if needed is None or any(place + before >= len(inputs) for place in needed):
            return None
        return self.needs(scope, [inputs[place + before] for place in needed])

    def is_memory_cache(self, node: Proto, scope: Body) -> bool:
        """True for a CacheDataset with a constant empty file name, which caches in memory."""
        inputs = input_names(node)
        if node.op not in ("CacheDataset", "CacheDatasetV2") or len(inputs) < 2:
            return False
        name = node_of(inputs[1])
        return not self._is_fed(name, scope) and const_texts(scope.by_name.get(name)) == [""]

    def _carried(self, node: Proto, places: set[int]) -> set[int] | None:
        """Return the positions of a loop's arguments that must be own files for `places` to stay own files.

        `places` are positions of the loop's arguments, too, and may be extended in place. None if no
        arguments ensure it in every turn. GraphError if two nodes of the loop's body have one name.
        """
        body = self._library.get(attr(node, "body").func.name)
        if body is None or _has_lists(body):
            return None
        results = [body.ret.get(each.name, "") for each in body.signature.output_arg]
        pending = {*places}
        while pending:  # the results of a turn are the arguments of the next
            place = pending.pop()
            needed = (
                self.needs(unambiguous(body), results[place : place + 1]) if place < len(results) else None
            )
            if needed is None:
                return None
            pending |= needed - places
            places |= needed
        return places

    def _sources(self, text: str, scope: Body) -> list[str] | None:
        """Return the tensors that a path comes from: [] for an own file, None if it may be another path."""
        name = node_of(text)
        node = scope.by_name.get(name)
        if node is None or self._is_fed(name, scope):
            return None
        inputs = input_names(node)
        if scope.function is None and name in self._files:
            return []
        if scope.function is None and node.op == "ReadVariableOp" and inputs:
            return self._assigned(node_of(inputs[0]))
        if node.op == "ConcatV2":
            return inputs[:-1] or None
        return (inputs if node.op == "Pack" else inputs[:1] if node.op in _HANDS_ON else []) or None

    def _is_fed(self, name: str, scope: Body) -> bool:
        return scope.function is None and name in self._fed

    def _assigned(self, handle: str) -> list[str] | None:
        """Return the tensors assigned to the graph's variable with this handle node.

        None if there are none, or if another operation may change the variable.
        """
        node = self._graph.by_name.get(handle)
        if node is None or node.op != "VarHandleOp" or handle in self._fed or not self._is_only_handle(node):
            return None
        assigned = []
        for user in self._graph_def.node:
            inputs = input_names(user)
            places = [at for at, text in enumerate(inputs) if node_of(text) == handle]
            if places == [0] and user.op == "AssignVariableOp":
                assigned += inputs[1:]
            elif places and user.op != "ReadVariableOp":
                return None
        return assigned or None

    def _is_only_handle(self, node: Proto) -> bool:
        """True if no other node, in the graph or a function, makes a handle of the same named variable.

        False for a variable without a shared name.
        """
        shared = attr_text(node, "shared_name")
        bodies = (each.node_def for each in self._graph_def.library.function)
        handles = [
            each
            for nodes in (self._graph_def.node, *bodies)
            for each in nodes
            if each.op == "VarHandleOp"
            and (attr_text(each, "shared_name") == shared or attr(each, "shared_name").placeholder)
        ]
        return bool(shared) and len(handles) == 1


def _has_lists(function: Proto) -> bool:
    """True if an argument or result is a list of tensors: positions of inputs and arguments then differ."""
    arguments = [*function.signature.input_arg, *function.signature.output_arg]
    return any(each.number_attr or each.type_list_attr for each in arguments)
