"""Guess a training graph's inputs and outputs, as suggestions for a person who has to name them.

Inputs are placeholders, without those that tell a Saver its file's name. Outputs are what comes after the
last use of a trained variable: a softmax, sigmoid, top-k or arg-max there, and the logits before it. What
gradients, updates of variables, summaries and Savers compute is no output.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from exporter.graph.deeprec_ops import HANDLE
from exporter.graph.feeds import hands_over_batches
from exporter.graph.keys import VARIABLE_OPS
from exporter.graph.nodes import Endpoint, GraphIndex, closure, data_inputs
from exporter.graph.servable import changes_state
from exporter.wire.protos import Proto

_SAVER = re.compile(
    r"(Save|Restore)(V[23]|Slices?)?|MergeV2Checkpoints|ShardedFile(name|spec)|KvResource(Incr)?Import\w*"
)
_FILE_NAMES = re.compile(r"Identity|PlaceholderWithDefault|StringJoin|Pack|Select(V2)?|StaticRegexFullMatch")
_ANSWERS = ("Softmax", "Sigmoid", "TopKV2", "ArgMax")
_TRAINING = re.compile(r"(.*/)?gradients(_\d+)?/.*|(.*/)?(logistic_loss|softmax_cross_entropy)\w*/.*")
_NO_OUTPUT = re.compile(
    r"\w*Grad\w*|\w*Summary\w*|Print(V2)?|Assert|.*CrossEntropyWithLogits|Shape|Rank|Size"
)


def input_placeholders(index: GraphIndex) -> list[Proto]:
    """The placeholders that may stand for inputs, in the graph's order."""
    nodes = [node for node in index.nodes.values() if node.op.startswith("Placeholder")]
    return [node for node in nodes if not _is_a_savers(index, node.name)]


def likely_outputs(index: GraphIndex) -> list[Endpoint]:
    """Tensors that look like a model's answers, the likeliest first; none if no variable is used."""
    forward = _computed_from_inputs(index)
    values = _variables_values(index)
    using = {
        name
        for name in forward
        if not values.isdisjoint(_sources(index, name)) and index.shape(Endpoint(name, 0)) != ()
    }  # a scalar is a loss with its regularisation
    followed = _before(index, using, forward)
    last = [name for name in using if name not in followed]
    after = _after(index, last, forward)
    ranked = [name for op in _ANSWERS for name in after if index.nodes[name].op == op]
    logits = [name for name in index.nodes if name in last]
    return [Endpoint(name, 0) for name in dict.fromkeys([*ranked, *logits])]


def _is_a_savers(index: GraphIndex, name: str) -> bool:
    """True if a placeholder's value goes nowhere but into the files' names of a Saver."""
    pending, seen, saves = [name], {name}, False
    while pending:
        for reader, _ in index.consumers[pending.pop()]:
            op = index.nodes[reader].op
            if not _SAVER.fullmatch(op) and not _FILE_NAMES.fullmatch(op):
                return False
            saves |= _SAVER.fullmatch(op) is not None
            if reader not in seen and not op.startswith(("Restore", "KvResource")):
                seen.add(reader)
                pending.append(reader)
    return saves


def _computed_from_inputs(index: GraphIndex) -> set[str]:
    """The nodes of the forward pass, the losses behind it too."""
    reached = {
        name
        for name in _after(index, _inputs(index), index.nodes)
        if not (changes_state(index.nodes[name].op) or _NO_OUTPUT.fullmatch(index.nodes[name].op))
        and not _TRAINING.fullmatch(name)
    }
    return reached - _updates(index, reached)


def _updates(index: GraphIndex, nodes: set[str]) -> set[str]:
    """What is computed for nothing but new values of variables."""
    readers = {name: [reader for reader, _ in index.consumers[name]] for name in nodes}
    left = {name: sum(not changes_state(index.nodes[r].op) for r in found) for name, found in readers.items()}
    pending = [name for name, found in readers.items() if found and not left[name]]
    for name in pending:  # grows while it is walked
        for source in _sources(index, name):
            if source in nodes:
                left[source] -= 1
                if not left[source]:
                    pending.append(source)
    return {*pending}


def _variables_values(index: GraphIndex) -> set[str]:
    """Variables, and what is computed from them alone: reads, and partitions put together."""
    variables = [name for name, node in index.nodes.items() if node.op in VARIABLE_OPS or node.op == HANDLE]
    fed = {*_after(index, _inputs(index), index.nodes)}
    return {*_after(index, variables, index.nodes.keys() - fed)}


def _inputs(index: GraphIndex) -> list[str]:
    placeholders = [node.name for node in input_placeholders(index)]
    return placeholders + [name for name, node in index.nodes.items() if hands_over_batches(node.op)]


def _after(index: GraphIndex, start: Iterable[str], among: Iterable[str]) -> list[str]:
    """The given nodes and everything behind them, nearest first."""
    among = {*among}
    return [*closure(start, lambda name: (reader for reader, _ in index.consumers[name] if reader in among))]


def _before(index: GraphIndex, start: Iterable[str], among: set[str]) -> set[str]:
    """Everything that the given nodes are computed from, within `among`."""

    def before(name: str) -> Iterator[str]:
        return (source for source in _sources(index, name) if source in among)

    return {*closure((source for name in start for source in before(name)), before)}


def _sources(index: GraphIndex, name: str) -> Iterator[str]:
    yield from (source.node for source in data_inputs(index.nodes[name]))
