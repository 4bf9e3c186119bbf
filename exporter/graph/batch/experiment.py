"""Find by experiment which numbers of a graph are its batch size, and whether its rows keep apart.

The graph is run as its author left it, at its size, with random rows and variables. Its answers must not
depend on the other rows of a request. Then it is run with other numbers of rows: where that fails, numbers
near the failing node that may be the batch size are made to follow the request, one kind after the other,
until requests of 1, 7, the size itself and twice the size and one rows get the answers that each row got.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct

from exporter.graph.batch.laboratory import Ends, Population, laboratory, populations
from exporter.graph.batch.slots import DECLARED, CannotOpen, Counter, Opening, Slot, slots_of
from exporter.graph.nodes import (
    ENTERS,
    SWITCHES,
    all_before,
    attr_dtype,
    closure,
    data_inputs,
    endpoint,
    readers_of,
)
from exporter.graph.session import GraphSession, RunFailed
from exporter.wire import protos
from exporter.wire.dtypes import Array, is_floating
from exporter.wire.protos import Proto

_MOST_RUNS = 400
_SECONDS = 60.0  # of all attempts
_NEAREST = 24  # numbers near a failing node that are tried
_TOLERANCE = 1e-4  # of the greatest answer: kernels round in another order with other numbers of rows
_COARSE = 2e-2  # of floats of 16 bits
_MIXES = "gives a row another answer if other rows of the request change"


class Failed(Exception):
    """A graph cannot be opened; its text says why, `node` where, "" if it is not one node."""

    def __init__(self, node: str, reason: str, size: int = 0) -> None:
        super().__init__(reason)
        self.node, self.size = node, size  # the number of rows that were asked, 0 for the graph's own


class _Trial(Struct, frozen=True):
    """Random rows for one signature, and what the graph answered to each at its own size, by tensor."""

    population: Population
    answers: Mapping[str, Array]


class Experiment:
    """A graph of a fixed batch size that is to answer requests of any.

    `filling` are the operations that fill its lookup tables, `files` the files that these read, by the nodes
    of their paths. NoLaboratory if it cannot be run without its checkpoint.
    """

    def __init__(
        self,
        nodes: Mapping[str, Proto],
        ends: Sequence[Ends],
        library: Mapping[str, Proto],
        batch: int,
        filling: Sequence[str],
        files: Mapping[str, Path],
    ) -> None:
        self._ends, self._library, self._batch = ends, library, batch
        self._filling, self._files = filling, files
        written = [tensor.node for name in filling for tensor in data_inputs(nodes[name])]
        self._laboratory = laboratory(nodes, written)
        self._slots: dict[str, list[Slot]] = {}
        loading = all_before(nodes, map(endpoint, filling))
        for one in ends:
            for name in all_before(nodes, one.outputs, one.inputs):
                if name not in loading and (found := [*slots_of(nodes[name], batch)]):
                    self._slots[name] = found
        self._readers = readers_of(nodes.values())
        self._opening = self._opener(self._laboratory.nodes)
        self._runs = 0

    def opened(self, nodes: Mapping[str, Proto], slots: Iterable[Slot]) -> dict[str, Proto]:
        """These nodes, where slots follow the request."""
        return self._opener(nodes).open(slots)

    def _opener(self, nodes: Mapping[str, Proto]) -> Opening:
        def counters(one: Ends) -> list[Counter]:
            shapes = [Counter(shape, is_shape=True) for _, _, shape in one.sparse]
            return [*map(Counter, one.batched()), *shapes]

        return Opening(nodes, [(all_before(nodes, e.outputs, e.inputs), counters(e)) for e in self._ends])

    def run(self, session: GraphSession) -> frozenset[Slot]:
        """The slots to open; none if requests may have any size as it is.

        Raises:
            Failed: rows are mixed, or no slots make the graph answer requests of other sizes.
            Ended: a run exceeded its limits.
        """
        try:
            self._open(session, self._laboratory.nodes)
        except RunFailed as error:
            raise Failed(error.node, f"cannot be run: {error}") from None
        trials = [self._asked(session, one) for one in self._ends]
        # what an attribute declares can be left open at no risk
        declared = {slot for found in self._slots.values() for slot in found if slot.what in DECLARED}
        return self._search(session, trials, frozenset(slot for slot in declared if slot.at == 0))

    def _open(self, session: GraphSession, nodes: Mapping[str, Proto]) -> None:
        self._runs += 1
        graph_def = protos.message_class("GraphDef")()
        graph_def.node.extend(nodes.values())
        graph_def.library.function.extend(self._library.values())
        for node in protos.all_nodes(graph_def):
            node.device = ""
            node.attr.pop("_class", None)
        session.open(graph_def, plain=True)
        files = {f"{node}:0": np.array(str(path).encode(), object) for node, path in self._files.items()}
        session.run([], files, [*self._laboratory.assigning, *self._filling])

    # --- the graph as its author left it ---

    def _asked(self, session: GraphSession, ends: Ends) -> _Trial:
        """The answers at the graph's own size; Failed if it gives none, or mixes rows."""
        files, heights = [*self._files.values()], self._laboratory.heights
        failure = Failed("", "no requests could be made up")
        for population in populations(self._laboratory.nodes, ends, heights, 2 * self._batch + 1, files):
            try:
                return self._answered(session, ends, population)
            except RunFailed as error:
                failure = Failed(error.node, f"does not run at its own size: {error}")
        raise failure

    def _answered(self, session: GraphSession, ends: Ends, population: Population) -> _Trial:
        tensors = [*dict.fromkeys([*map(str, ends.outputs), *self._behind(ends)])]
        count = 2 * self._batch + 1
        rows = np.random.default_rng(count).permutation(count)
        straight = self._in_chunks(session, tensors, population, np.arange(count))
        mixed = self._in_chunks(session, tensors, population, rows)
        answers = {}
        for name in tensors:
            answers[name], again = (self._by_rows(name, found[name]) for found in (straight, mixed))
            expected = answers[name][rows] if len(answers[name]) == count else answers[name]
            if not _close(expected, again):
                raise self._mixing(session, ends, population, name)
            if is_floating(again) and not np.isfinite(again.astype(np.float64)).any():
                raise Failed(endpoint(name).node, "is not a number with random variables")
        return _Trial(population, answers)

    def _behind(self, ends: Ends) -> Iterator[str]:
        """Yield the floats from which outputs of other types are made: a class hides what scores show."""
        nodes, inside = self._laboratory.nodes, self._in_branches()
        for output in ends.outputs:
            if output.node in nodes and not _is_float(nodes[output.node]):
                before = all_before(nodes, [output], ends.inputs)
                shown = (name for name in before if nodes[name].op in _SCORES and _is_float(nodes[name]))
                yield from (f"{name}:0" for name in shown if name not in inside)

    def _in_branches(self) -> Mapping[str, None]:
        """The nodes in, and behind, loops and branches, whose values cannot always be fetched."""
        loops = (name for name, node in self._laboratory.nodes.items() if node.op in ENTERS | SWITCHES)
        return closure(loops, lambda name: (reader.name for reader in self._readers.get(name, ())))

    def _in_chunks(
        self, session: GraphSession, tensors: Sequence[str], population: Population, rows: Array
    ) -> dict[str, list[Array]]:
        """The values of tensors for these rows, as many at a time as the graph takes."""
        found: dict[str, list[Array]] = {name: [] for name in tensors}
        for start in range(0, len(rows), self._batch):
            places = np.minimum(np.arange(start, start + self._batch), len(rows) - 1)
            values = session.run(tensors, population.feeds(rows[places]))
            for name, value in zip(tensors, values, strict=True):
                found[name].append(value)
        return found

    def _by_rows(self, name: str, chunks: Sequence[Array]) -> Array:
        """The rows of an answer in chunks; the first chunk if it does not depend on the request."""
        first = chunks[0]
        if first.ndim and first.shape[0] and first.shape[0] % self._batch == 0:
            each = first.shape[0] // self._batch
            found = np.concatenate(chunks).reshape(-1, each, *first.shape[1:])
            return found[: 2 * self._batch + 1]
        if not all(_close(first, chunk) for chunk in chunks):
            raise Failed(endpoint(name).node, "does not keep the rows of a request apart")
        return first

    def _mixing(self, session: GraphSession, ends: Ends, population: Population, output: str) -> Failed:
        """The failure at the first node whose rows change when other rows of the request do."""
        nodes, inside, size = self._laboratory.nodes, self._in_branches(), self._batch
        asked = closure(
            (tensor.node for tensor in ends.inputs),
            lambda name: (r.name for r in self._readers.get(name, ())),
        )
        before = all_before(nodes, [endpoint(output)], ends.inputs)
        names = [f"{name}:0" for name in before if name in asked and name not in inside]
        half = size // 2
        rows, others = np.arange(size), np.concatenate([np.arange(half), np.arange(size, 2 * size - half)])
        found = Failed(endpoint(output).node, _MIXES)
        try:
            first, same, changed = (session.run(names, population.feeds(r)) for r in (rows, rows, others))
        except RunFailed:
            return found
        failures = {}
        for name, one, again, other in zip(names, first, same, changed, strict=True):
            if not _close(one, again):
                failures[endpoint(name).node] = "draws random numbers"
            elif one.shape[:1] == (size,) and not _close(one[:half], other[:half]):
                failures[endpoint(name).node] = _MIXES
        for name, reason in failures.items():
            if failures.keys().isdisjoint(all_before(nodes, data_inputs(nodes[name]), ends.inputs)):
                return Failed(name, reason)
        return found

    # --- other sizes ---

    def _search(
        self, session: GraphSession, trials: Sequence[_Trial], opened: frozenset[Slot]
    ) -> frozenset[Slot]:
        """The slots, `opened` among them, that make all sizes right; Failed where no slot helps."""
        until, stuck = time.monotonic() + _SECONDS, None
        failure = self._failure(session, trials, opened)
        if failure is None:
            return opened
        choices = [(failure, opened, self._moves(failure, opened))]
        while choices and self._runs < _MOST_RUNS and time.monotonic() < until:
            failure, opened, moves = choices[-1]
            more = next(moves, None)
            if more is None:
                stuck = stuck or failure
                choices.pop()
                continue
            found = self._failure(session, trials, opened | more)
            if found is None:
                return opened | more
            if (found.node, found.size) != (failure.node, failure.size):
                choices.append((found, opened | more, self._moves(found, opened | more)))
        raise stuck or failure

    def _moves(self, failure: Failed, opened: frozenset[Slot]) -> Iterator[frozenset[Slot]]:
        """Yield sets of slots to open next: near the failure, each with others of its kind, then alone."""
        nodes = self._laboratory.nodes
        if failure.node not in nodes:
            return
        before = closure(
            [failure.node], lambda name: (t.node for t in data_inputs(nodes[name]) if t.node in nodes)
        )
        near = [slot for name in before for slot in self._slots.get(name, ()) if slot not in opened][
            :_NEAREST
        ]
        seen = {frozenset[Slot]()}
        kinds = self._kinds(opened)
        for slot in near:
            for more in (kinds[self._kind(slot)], frozenset([slot])):
                if more not in seen:
                    seen.add(more)
                    yield more
        for last in range(2, len(near) + 1):
            yield frozenset(near[:last])

    def _kinds(self, opened: frozenset[Slot]) -> dict[object, frozenset[Slot]]:
        kinds: dict[object, set[Slot]] = {}
        for found in self._slots.values():
            for slot in found:
                if slot not in opened:
                    kinds.setdefault(self._kind(slot), set()).add(slot)
        return {kind: frozenset(slots) for kind, slots in kinds.items()}

    def _kind(self, slot: Slot) -> object:
        """Equal for slots that are read in the same way: a graph looks up many features alike."""
        reader = next(iter(self._readers.get(slot.node, ())), None)
        inputs: list[str] = [] if reader is None else [tensor.node for tensor in data_inputs(reader)]
        place = inputs.index(slot.node) if slot.node in inputs else -1
        return slot[1:], self._laboratory.nodes[slot.node].op, None if reader is None else reader.op, place

    def _failure(
        self, session: GraphSession, trials: Sequence[_Trial], opened: frozenset[Slot]
    ) -> Failed | None:
        """The first failure of the graph with these slots opened; None if all answers are right."""
        try:
            self._open(session, self._opening.open(opened))
        except CannotOpen as error:
            return Failed(str(error), "has a number that cannot follow the request")
        except RunFailed as error:
            return Failed(error.node, f"cannot take other numbers: {error}")
        count = 2 * self._batch + 1
        for size in dict.fromkeys((7 if self._batch != 7 else 5, count, 1, self._batch)):
            rows = np.random.default_rng(size).permutation(count)[np.arange(size) % count]
            for trial in trials:
                try:
                    found = session.run([*trial.answers], trial.population.feeds(rows))
                except RunFailed as error:
                    return Failed(error.node, f"does not take {size} rows: {error}", size)
                for (name, answers), value in zip(trial.answers.items(), found, strict=True):
                    expected = answers
                    if len(answers) == count:
                        expected = answers[rows].reshape(-1, *answers.shape[2:])
                    if expected.shape != value.shape:
                        return Failed(endpoint(name).node, f"does not give {size} rows", size)
                    if not _close(expected, value):
                        reason = f"gives a row another answer in a request of {size} rows"
                        return Failed(endpoint(name).node, reason, size)
        return None


# Operations whose floats are scores, or lead to them.
_SCORES = frozenset(
    {"BiasAdd", "MatMul", "Add", "AddV2", "AddN", "Softmax", "Sigmoid", "Mul", "BatchMatMulV2"}
)


def _is_float(node: Proto) -> bool:
    dtype = attr_dtype(node, "T") if "DstT" not in node.attr else attr_dtype(node, "DstT")
    return dtype is not None and dtype.is_floating


def _close(expected: Array, found: Array) -> bool:
    """True if two arrays are equal, floats up to rounding; NaN equals NaN."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    if not is_floating(expected):
        return np.array_equal(expected, found)
    tolerance = _COARSE if expected.dtype.itemsize < 4 else _TOLERANCE
    left, right = expected.astype(np.float64), found.astype(np.float64)
    finite = np.abs(left[np.isfinite(left)])
    return np.allclose(left, right, rtol=0, atol=tolerance * max(1e-3, finite.max(initial=0)), equal_nan=True)
