"""Find everything that a set of nodes depends on, and a path back to the outputs for error messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from exporter.errors import GraphError
from exporter.graph.control_flow import MERGES, NEXT_ITERATIONS, Pivots
from exporter.graph.nodes import Endpoint, endpoint
from exporter.wire.protos import Proto

_SHOWN_AT_EACH_END = 4


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
    nodes: Mapping[str, Proto], tensors: Iterable[str], given: Collection[Endpoint] = ()
) -> dict[str, None]:
    """Every node that runs for some tensors, also one that is only waited for, nearest first.

    What makes the tensors `given` is not looked for; names that the graph lacks are passed over.
    """
    found: dict[str, None] = {}
    pending = deque(tensors)
    while pending:
        tensor = endpoint(pending.popleft())
        if tensor in given or tensor.node in found or tensor.node not in nodes:
            continue
        found[tensor.node] = None
        pending.extend(nodes[tensor.node].input)
    return found


def _redirected(text: str, replaced: Mapping[Endpoint, Endpoint]) -> str:
    target = replaced.get(endpoint(text))
    return text if target is None else target.as_input


def check_acyclic(nodes: Mapping[str, Proto], reached: Reached) -> None:
    """Refuse a graph whose data flow has a cycle that is no loop.

    Raises:
        GraphError: naming a node on the cycle. TensorFlow would never finish, or not start.
    """
    waits_for = {name: _forward_sources(nodes, reached, name) for name in reached.inputs}
    readers: dict[str, list[str]] = {name: [] for name in waits_for}
    for name, sources in waits_for.items():
        for source in sources:
            readers[source].append(name)
    left = {name: len(sources) for name, sources in waits_for.items()}
    ready = [name for name, count in left.items() if not count]
    while ready:
        name = ready.pop()
        del left[name]
        for reader in readers[name]:
            left[reader] -= 1
            if not left[reader]:
                ready.append(reader)
    if left:
        raise GraphError(
            f"the graph has a cycle outside of any loop: {_a_cycle(waits_for, left)}",
            hint="write the .meta again from the training program",
        )


def _forward_sources(nodes: Mapping[str, Proto], reached: Reached, name: str) -> set[str]:
    """What a node waits for; the edge from NextIteration to Merge, which closes a loop, is left out."""
    sources = {endpoint(text).node for text in reached.inputs[name]}
    if nodes[name].op in MERGES:
        return {source for source in sources if nodes[source].op not in NEXT_ITERATIONS}
    return sources


def _a_cycle(waits_for: Mapping[str, set[str]], stuck: Mapping[str, int]) -> str:
    """Follow stuck nodes to stuck nodes until one comes again."""
    name, steps = next(iter(stuck)), dict[str, None]()
    while name not in steps:
        steps[name] = None
        name = next(source for source in sorted(waits_for[name]) if source in stuck)
    cycle = [*steps]
    cycle = cycle[cycle.index(name) :]
    return " <- ".join([*cycle[:_SHOWN_AT_EACH_END], "..."] if len(cycle) > 8 else [*cycle, name])
