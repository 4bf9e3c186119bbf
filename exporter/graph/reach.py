"""Find all that a set of nodes leads to: what it depends on, and the way back for error messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import TypeVar

from msgspec import Struct

from exporter.errors import GraphError
from exporter.graph.control_flow import MERGES, NEXT_ITERATIONS, Pivots
from exporter.graph.nodes import Endpoint, control_inputs, endpoint
from exporter.wire.protos import Proto

_SHOWN_AT_EACH_END = 4

ItemT = TypeVar("ItemT", bound=Hashable)


def closure(start: Iterable[ItemT], following: Callable[[ItemT], Iterable[ItemT]]) -> dict[ItemT, None]:
    """These, and all that `following` leads to from them, nearest first."""
    found = dict.fromkeys(start)
    pending = deque(found)
    while pending:
        for item in following(pending.popleft()):
            if item not in found:
                found[item] = None
                pending.append(item)
    return found


class Reached(Struct, frozen=True):
    """The needed nodes, nearest to the outputs first; `inputs` are theirs without needless control edges.

    `toward_output` leads from each node one step back to what asked for it.
    """

    inputs: Mapping[str, tuple[str, ...]]
    toward_output: Mapping[str, str | None]

    def path(self, name: str) -> str:
        """The way from an output to a node, for an error message; a long one is cut in the middle."""
        steps: list[str] = []
        current: str | None = name
        while current is not None:
            steps.append(current)
            current = self.toward_output[current]
        steps.reverse()
        if len(steps) > 2 * _SHOWN_AT_EACH_END + 1:
            steps = [*steps[:_SHOWN_AT_EACH_END], "...", *steps[-_SHOWN_AT_EACH_END:]]
        return " <- ".join(steps)


def reach(
    nodes: Mapping[str, Proto],
    roots: Iterable[str],
    replaced: Mapping[Endpoint, Endpoint] | None = None,
    given: Collection[Endpoint] = (),
) -> Reached:
    """Everything that the nodes `roots` need; tensors in `replaced` are read from elsewhere.

    What makes the tensors `given` is not looked for.

    Raises:
        GraphError: a node reads from one that the graph lacks.
    """
    pivots = Pivots(nodes)
    replaced = replaced or {}
    inputs: dict[str, tuple[str, ...]] = {}
    toward_output: dict[str, str | None] = dict.fromkeys(roots)
    pending = deque(toward_output)
    while pending:
        name = pending.popleft()
        needed = pivots.needed_inputs(nodes[name])
        if replaced:
            needed = [_redirected(text, replaced) for text in needed]
        inputs[name] = tuple(needed)
        for text in needed:
            tensor = endpoint(text)
            source = tensor.node
            if tensor in given:
                continue
            if source not in nodes:
                raise GraphError(
                    f"{nodes[name].op} {name!r} reads {text!r}, which the graph does not have",
                    cause="the graph is damaged, or was cut by hand",
                    hint="write the .meta again from the training program",
                )
            if source not in toward_output:
                toward_output[source] = name
                pending.append(source)
    return Reached(inputs, toward_output)


def all_before(
    nodes: Mapping[str, Proto], tensors: Iterable[Endpoint], given: Collection[Endpoint] = ()
) -> dict[str, None]:
    """Every node that runs for some tensors, also one that is only waited for, nearest first.

    What makes the tensors `given` is not looked for; names that the graph lacks are passed over.
    """
    found: dict[str, None] = {}
    pending = deque(tensors)
    while pending:
        tensor = pending.popleft()
        if tensor in given or tensor.node in found or tensor.node not in nodes:
            continue
        found[tensor.node] = None
        pending.extend(map(endpoint, nodes[tensor.node].input))
    return found


def _redirected(text: str, replaced: Mapping[Endpoint, Endpoint]) -> str:
    target = replaced.get(endpoint(text))
    return text if target is None else target.as_input


def check_acyclic(nodes: Mapping[str, Proto], reached: Reached) -> None:
    """Refuse a graph whose data flow has a cycle that is no loop.

    Raises:
        GraphError: naming a node on the cycle. TensorFlow would never finish, or not start.
    """
    waits_for = {name: forward_sources(nodes, name, texts) for name, texts in reached.inputs.items()}
    try:
        TopologicalSorter(waits_for).prepare()
    except CycleError as error:
        cycle = [*reversed(error.args[1])]  # it leads from a node to its readers, and ends where it begins
        shown = [*cycle[:_SHOWN_AT_EACH_END], "..."] if len(cycle) > 2 * _SHOWN_AT_EACH_END + 1 else cycle
        raise GraphError(
            f"the graph has a cycle outside of any loop: {' <- '.join(shown)}",
            hint="write the .meta again from the training program",
        ) from None


def forward_sources(nodes: Mapping[str, Proto], name: str, inputs: Iterable[str]) -> set[str]:
    """What a node waits for; the edge from NextIteration to Merge, which closes a loop, is left out."""
    sources = {endpoint(text).node for text in inputs}
    if nodes[name].op in MERGES:
        return {source for source in sources if nodes[source].op not in NEXT_ITERATIONS}
    return sources


def waited_for(nodes: Mapping[str, Proto], names: Iterable[str]) -> list[str]:
    """These nodes, with what it waits for in the place of each NoOp, which groups others."""
    pending, found, seen = [*names], list[str](), set[str]()
    while pending:
        name = pending.pop()
        if name in seen or name not in nodes:
            continue
        seen.add(name)
        if nodes[name].op == "NoOp":
            pending += control_inputs(nodes[name])
        else:
            found.append(name)
    return found
