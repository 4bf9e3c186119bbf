"""Find by experiment which numbers of a graph are its batch size, and whether its rows keep apart.

The graph is run as its author left it, at its size, with random rows and variables. Its answers must not
depend on the other rows of a request. Then it is run with other numbers of rows: where that fails, numbers
near the failing node that may be the batch size are made to follow the request, one kind after the other,
until requests of 1, 7, the size itself and twice the size and one rows get the answers that each row got.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from msgspec import Struct

from exporter.graph.batch.laboratory import Ends, Population, laboratory, populations, stranger
from exporter.graph.batch.slots import (
    DECLARED,
    CannotOpen,
    Counter,
    Opened,
    Slot,
    opened,
    rows_are_equal,
    slots_of,
)
from exporter.graph.functions import reachable
from exporter.graph.nodes import (
    ENTERS,
    SWITCHES,
    all_before,
    attr,
    attr_dtype,
    closure,
    const_value,
    data_inputs,
    endpoint,
    node_of,
    readers_of,
    shape_of,
)
from exporter.graph.servable import called_functions
from exporter.graph.session import GraphSession, RunFailed
from exporter.wire import protos
from exporter.wire.dtypes import Array, is_floating
from exporter.wire.protos import Proto

_MOST_RUNS = 200
_SECONDS = 300.0  # of all attempts: far more than they take, even on a busy machine
_NEAREST = 24  # numbers near a failing node that are tried
_TOLERANCE = (
    1e-4  # of a row's answer, or of a usual row's: kernels round in another order with other numbers of rows
)
_COARSE = 2e-2  # of floats of 16 bits
_LEAST = 1e-2  # below which answers are compared as if they were as great
_MIXES = "gives a row another answer if other rows of the request change"


class Failed(Exception):
    """A graph cannot be opened; its text says why, `node` where, "" if it is not one node."""

    def __init__(self, node: str, reason: str, size: int = 0) -> None:
        super().__init__(reason)
        self.node, self.size = node, size  # the number of rows that were asked, 0 for the graph's own


class _Trial(Struct, frozen=True):
    """Random rows for one signature, and the graph's answers to them at its own size, by tensor."""

    population: Population
    answers: Mapping[str, Array]


class Experiment:
    """A graph of a fixed batch size that is to answer requests of any.

    `ends` are the tensors of its signatures, `library` its functions by name, `batch` the fixed size;
    `filling` are the operations that fill its lookup tables, `files` the files that these read, by the nodes
    of their paths. NoLaboratory if it cannot be run without its checkpoint; GraphError if it calls a function
    that it lacks, or has an unknown type number.
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
        loading = all_before(nodes, map(endpoint, filling))
        before = {name: None for one in ends for name in all_before(nodes, one.outputs, one.inputs)}
        running = [nodes[name] for name in before if name not in loading]
        bodies = {name: library[name].node_def for name in sorted(reachable(running, library))}
        places = [("", node) for node in running] + [(name, n) for name, body in bodies.items() for n in body]
        self._slots: dict[tuple[str, str], list[Slot]] = {}
        for scope, node in places:
            if found := [*slots_of(node, batch, scope)]:
                self._slots[scope, node.name] = found
        self._bodies = {name: {node.name: node for node in body} for name, body in bodies.items()}
        self._bodies[""] = dict(self._laboratory.nodes)
        self._calls: dict[str, list[tuple[str, str]]] = {}
        for scope, body in self._bodies.items():
            for name, node in body.items():
                for function in called_functions(node) & self._bodies.keys():
                    self._calls.setdefault(function, []).append((scope, name))
        self._readers = readers_of(nodes.values())
        self._runs = 0

    def opened(self, nodes: Mapping[str, Proto], slots: Iterable[Slot]) -> Opened:
        """Return `nodes` and the graph's functions, changed so that `slots` follow the rows of a request.

        `nodes` are those of the experiment or of the served graph; changed nodes and functions are copies.
        CannotOpen if a slot cannot be made to follow the rows.
        """

        def counters(one: Ends) -> list[Counter]:
            shapes = [Counter(shape, is_shape=True) for _, _, shape in one.sparse]
            return [*map(Counter, one.batched()), *shapes]

        counting = [(all_before(nodes, one.outputs, one.inputs), counters(one)) for one in self._ends]
        return opened(nodes, self._library, slots, counting)

    def run(self, session: GraphSession) -> frozenset[Slot]:
        """Run the graph with many sizes of requests and return the slots to open so that any size is right.

        The first length of a shape that an attribute merely declares is always among them. Empty if nothing
        has to be opened: requests may have any size already. `session` loses the graph that it had. The
        search for slots ends within about 300 seconds.

        Raises:
            Failed: the graph cannot be run, mixes rows, or draws random numbers, or no slots make other sizes
                right.
            RunFailed: the graph does not run with other numbers in place of random ones.
            Ended: a run exceeded its limits, or the session's process ended otherwise.
        """
        try:
            self._open(session, Opened(dict(self._laboratory.nodes), dict(self._library)))
        except RunFailed as error:
            raise Failed(error.node, f"cannot be run: {error}") from None
        trials = [trial for one in self._ends for trial in self._asked(session, one)]
        # what an attribute declares can be left open at no risk
        declared = {slot for found in self._slots.values() for slot in found if slot.what in DECLARED}
        return self._search(session, trials, frozenset(slot for slot in declared if slot.at == 0))

    def traced_rows(
        self, session: GraphSession, reshapes: Sequence[str], candidates: Sequence[int]
    ) -> int | None:
        """Return the number of rows that fits a Reshape's constant target, else the first fitting candidate.

        `reshapes` are nodes, tried in order, as `fixed_reshapes` returns them; a number of rows fits if it
        makes the Reshape's input as large as its target. `candidates` are numbers of rows, tried in order;
        one fits if the graph answers a request of it with as many rows, but no request of one row less or
        more. None if none fits. RunFailed if the graph cannot be opened, Ended if a run exceeds its limits.
        The graph must have exactly one signature.
        """
        nodes = self._laboratory.nodes
        self._open(session, Opened(dict(nodes), dict(self._library)))
        (ends,) = self._ends
        for name in reshapes:
            given, target = data_inputs(nodes[name])
            sizes = list[int]()
            target_shape = const_value(nodes[target.node])
            total = 0 if target_shape is None else math.prod(target_shape.ravel().tolist())
            for population in populations(nodes, ends, self._laboratory.heights, 2, []):
                try:
                    values = (session.run([str(given)], population.feeds(np.arange(n))) for n in (1, 2))
                    sizes = [value.size for (value,) in values]
                    break
                except RunFailed:
                    continue
            if sizes and sizes[1] == 2 * sizes[0] > 0 and total % sizes[0] == 0:
                return total // sizes[0]
        for rows in candidates:
            if self._takes(session, rows) and not any(self._takes(session, rows + by) for by in (-1, 1)):
                return rows
        return None

    def _takes(self, session: GraphSession, rows: int) -> bool:
        """True if each output of the graph has `rows` rows for a request of `rows` rows.

        The first random request that the graph accepts decides; False if it accepts none. Ended if a run
        exceeds its limits.
        """
        (ends,) = self._ends
        files, outputs = [*self._files.values()], [*map(str, ends.outputs)]
        for population in populations(self._laboratory.nodes, ends, self._laboratory.heights, rows, files):
            with suppress(RunFailed):
                found = session.run(outputs, population.feeds(np.arange(rows)))
                return all(value.shape[:1] == (rows,) for value in found)
        return False

    def _open(self, session: GraphSession, graph: Opened) -> None:
        self._runs += 1
        graph_def = protos.message_class("GraphDef")()
        graph_def.node.extend(graph.nodes.values())
        graph_def.library.function.extend(graph.library.values())
        for node in protos.all_nodes(graph_def):
            node.device = ""
            node.attr.pop("_class", None)
        session.open(graph_def, plain=True)
        files = {f"{node}:0": np.array(str(path).encode(), object) for node, path in self._files.items()}
        session.run([], files, [*self._laboratory.assigning, *self._filling])

    # --- the graph as its author left it ---

    def _asked(self, session: GraphSession, ends: Ends) -> list[_Trial]:
        """Return random rows for a signature with their answers at the graph's own size, ordinary rows first.

        Failed if the graph refuses all rows or gives all the same answer, mixes rows, or draws random
        numbers; RunFailed if it does not run with other numbers in place of random ones; Ended if a run
        exceeds its limits.
        """
        files, heights = [*self._files.values()], self._laboratory.heights
        failure, count = Failed("", "no requests could be made up"), 2 * self._batch + 1
        for population in populations(self._laboratory.nodes, ends, heights, count, files):
            try:
                trial = self._answered(session, ends, population)
            except RunFailed as error:
                failure = Failed(error.node, f"does not run at its own size: {error}")
                continue
            if any(len(each) == count and (each != each[:1]).any() for each in trial.answers.values()):
                self._draws_nothing(session, ends, trial)
                return [trial, *self._rarely(session, ends, population)]
            failure = Failed("", "random rows all get the same answer, which shows nothing")
        raise failure

    def _rarely(self, session: GraphSession, ends: Ends, population: Population) -> Iterator[_Trial]:
        """Yield trials of unusual rows, which a graph may treat differently, without rows that it refuses.

        `population` has ordinary rows, from which the unusual ones are made. During the iteration: Failed if
        the graph mixes these rows, Ended if a run exceeds its limits.
        """
        for strange in stranger(population, self._batch):
            with suppress(RunFailed):
                yield self._answered(session, ends, strange)

    def _draws_nothing(self, session: GraphSession, ends: Ends, trial: _Trial) -> None:
        """Raise Failed if answers depend on random numbers, however rarely.

        `trial` has the rows to request. The numbers that the graph draws are replaced by their extremes, one
        operation at a time. RunFailed if the graph does not run with these, Ended if a run exceeds its
        limits.
        """
        nodes, inside, rows = self._laboratory.nodes, self._in_branches(), np.arange(self._batch)
        before = all_before(nodes, ends.outputs, ends.inputs)
        drawing = [f"{name}:0" for name in before if nodes[name].op in _DRAWN and name not in inside]
        if not drawing:
            return
        feeds = trial.population.feeds(rows)
        outputs = [*map(str, ends.outputs)]
        expected, drawn = session.run(outputs, feeds), session.run(drawing, feeds)
        for name, values in zip(drawing, drawn, strict=True):
            for extreme in _DRAWN[nodes[endpoint(name).node].op]:
                found = session.run(outputs, {**feeds, name: np.full_like(values, extreme)})
                if not all(map(_close, expected, found)):
                    raise Failed(endpoint(name).node, "draws random numbers")

    def _answered(self, session: GraphSession, ends: Ends, population: Population) -> _Trial:
        tensors = [*dict.fromkeys([*map(str, ends.outputs), *self._behind(ends)])]
        count = 2 * self._batch + 1
        orders = np.random.default_rng(count).permutation(count), np.arange(count)[::-1]  # row 0 may be empty
        straight = self._in_chunks(session, tensors, population, np.arange(count))
        mixed = [(rows, self._in_chunks(session, tensors, population, rows)) for rows in orders]
        answers = {}
        for name in tensors:
            answers[name] = self._by_rows(name, straight[name])
            for rows, found in mixed:
                again = self._by_rows(name, found[name])
                expected = answers[name][rows] if len(answers[name]) == count else answers[name]
                if not _close(expected, again):
                    raise self._mixing(session, ends, population, name)
            if is_floating(again) and not np.isfinite(again.astype(np.float64)).any():
                raise Failed(endpoint(name).node, "is not a number with random variables")
        return _Trial(population, answers)

    def _behind(self, ends: Ends) -> Iterator[str]:
        """Yield the tensors of floats, such as scores, from which outputs of other types are computed.

        A class may stay the same while its scores change. Tensors in TF1 loops and branches are left out; a
        tensor may be yielded more than once.
        """
        nodes, inside = self._laboratory.nodes, self._in_branches()
        for output in ends.outputs:
            if output.node in nodes and not _is_float(nodes[output.node]):
                before = all_before(nodes, [output], ends.inputs)
                shown = (name for name in before if nodes[name].op in _SCORES and _is_float(nodes[name]))
                yield from (f"{name}:0" for name in shown if name not in inside)

    def _in_branches(self) -> Mapping[str, None]:
        """Return the nodes in, and behind, TF1 loops and branches, whose values cannot always be fetched."""
        loops = (name for name, node in self._laboratory.nodes.items() if node.op in ENTERS | SWITCHES)
        return closure(loops, lambda name: (reader.name for reader in self._readers.get(name, ())))

    def _in_chunks(
        self, session: GraphSession, tensors: Sequence[str], population: Population, rows: Array
    ) -> dict[str, list[Array]]:
        """Return {tensor: its values for these rows}, one value for each request of the graph's own size.

        `rows` are numbers of rows of the population. The last request repeats the last row until it is full.
        RunFailed if the graph refuses a request, Ended if a run exceeds its limits.
        """
        found: dict[str, list[Array]] = {name: [] for name in tensors}
        for start in range(0, len(rows), self._batch):
            places = np.minimum(np.arange(start, start + self._batch), len(rows) - 1)
            values = session.run(tensors, population.feeds(rows[places]))
            for name, value in zip(tensors, values, strict=True):
                found[name].append(value)
        return found

    def _by_rows(self, name: str, chunks: Sequence[Array]) -> Array:
        """Return the answers of the tensor `name` by rows, joined from its values for successive requests.

        The shape is [2 * size + 1, k, ...], where each row of a request has k rows of the tensor. A tensor
        has no rows if its first length is not a multiple of the graph's own size: then the value for the
        first request is returned alone. RunFailed if shapes differ between requests; Failed if the values of
        a tensor without rows do.
        """
        first = chunks[0]
        if any(chunk.shape != first.shape for chunk in chunks):  # as where nothing is for an empty last row
            node = endpoint(name).node
            raise RunFailed("", f"{node!r} has {first.shape} once, another shape at another time", node)
        if first.ndim and first.shape[0] and first.shape[0] % self._batch == 0:
            each = first.shape[0] // self._batch
            found = np.concatenate(chunks).reshape(-1, each, *first.shape[1:])
            return found[: 2 * self._batch + 1]
        if not all(_close(first, chunk) for chunk in chunks):
            raise Failed(endpoint(name).node, "does not keep the rows of a request apart")
        return first

    def _mixing(self, session: GraphSession, ends: Ends, population: Population, output: str) -> Failed:
        """Return the failure at the first node whose rows change when other rows of the request do.

        The failure is at the tensor `output`, whose rows change, if no such node is found. Runs the graph
        three times; Ended if a run exceeds its limits.
        """
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
        self, session: GraphSession, trials: Sequence[_Trial], chosen: frozenset[Slot]
    ) -> frozenset[Slot]:
        """Return slots, `chosen` among them, that make the answers of all sizes right.

        It opens the graph at most 200 times and ends within about 300 seconds. If it finds no such slots, it
        raises Failed: the first failure that no slots remove, or else the last one met. Ended if a run
        exceeds its limits.
        """
        until, stuck = time.monotonic() + _SECONDS, None
        failure = self._failure(session, trials, chosen)
        if failure is None:
            return chosen
        choices = [(failure, chosen, self._moves(failure, chosen))]
        while choices and self._runs < _MOST_RUNS and time.monotonic() < until:
            failure, chosen, moves = choices[-1]
            more = next(moves, None)
            if more is None:
                stuck = stuck or failure
                choices.pop()
                continue
            found = self._failure(session, trials, chosen | more)
            if found is None:
                return chosen | more
            if (found.node, found.size) != (failure.node, failure.size):
                choices.append((found, chosen | more, self._moves(found, chosen | more)))
        raise stuck or failure

    def _moves(self, failure: Failed, chosen: frozenset[Slot]) -> Iterator[frozenset[Slot]]:
        """Yield the sets of slots to try next: for each slot near a failure its whole kind, then that slot.

        The kind is that of `_kind`. The last sets are the nearest 2, 3 and up to 24 slots. Slots in `chosen`
        are left out.
        """
        before = closure([*self._places(failure.node)], self._sources)
        near = [slot for place in before for slot in self._slots.get(place, ()) if slot not in chosen]
        near = near[:_NEAREST]
        seen = {frozenset[Slot]()}
        kinds = self._kinds(chosen)
        for slot in near:
            for more in (kinds[self._kind(slot)], frozenset([slot])):
                if more not in seen:
                    seen.add(more)
                    yield more
        for last in range(2, len(near) + 1):
            yield frozenset(near[:last])

    def _places(self, node: str) -> Iterator[tuple[str, str]]:
        """Yield (function, node) for each node that an error may mean by the name `node`.

        The function is "" for the graph. In an error the name of a function's node follows that of the call,
        after a slash: nodes of functions come first, then the graph's calls with such a name.
        """
        if node in self._bodies[""]:
            yield "", node
            return
        inner = [(scope, name) for scope, body in self._bodies.items() for name in body if scope]
        yield from (place for place in inner if f"/{node}".endswith(f"/{place[1]}"))
        yield from (("", name) for name in self._bodies[""] if node.startswith(f"{name}/"))

    def _sources(self, place: tuple[str, str]) -> Iterator[tuple[str, str]]:
        """Yield (function, node) of the nodes that a node reads, then all nodes of functions that it calls.

        `place` is such a pair, too; the function is "" for the graph. For an argument of a function the nodes
        that call this function are yielded.
        """
        scope, name = place
        node = self._bodies[scope][name]
        for text in node.input:
            source = node_of(text)
            if not text.startswith("^") and source in self._bodies[scope]:
                yield scope, source
            elif scope:  # an argument
                yield from self._calls.get(scope, ())
        for function in sorted(called_functions(node) & self._bodies.keys()):
            yield from ((function, inner) for inner in self._bodies[function])

    def _kinds(self, chosen: frozenset[Slot]) -> dict[object, frozenset[Slot]]:
        kinds: dict[object, set[Slot]] = {}
        for found in self._slots.values():
            for slot in found:
                if slot not in chosen:
                    kinds.setdefault(self._kind(slot), set()).add(slot)
        return {kind: frozenset(slots) for kind, slots in kinds.items()}

    def _kind(self, slot: Slot) -> object:
        """Return a value that is equal for slots of one kind, which a graph reads in the same way.

        For instance the slots of many features that are looked up alike.
        """
        reader = next(iter(self._readers.get(slot.node, ())), None) if not slot.scope else None
        inputs: list[str] = [] if reader is None else [tensor.node for tensor in data_inputs(reader)]
        place = inputs.index(slot.node) if slot.node in inputs else -1
        return slot[2:], slot.scope, self._bodies[slot.scope][slot.node].op, reader and reader.op, place

    def _failure(
        self, session: GraphSession, trials: Sequence[_Trial], slots: frozenset[Slot]
    ) -> Failed | None:
        """Open the graph with these slots and return its first failure; None if the answers are right.

        Requests of at most four sizes are tried with the rows of all trials. Ended if a run exceeds its
        limits.
        """
        try:
            self._open(session, self.opened(self._laboratory.nodes, slots))
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


def fixed_reshapes(nodes: Mapping[str, Proto], ends: Ends) -> list[str]:
    """Return the Reshapes behind a signature's inputs whose constant targets fix all lengths.

    Those nearest to the inputs come first.
    """
    asked, found = _asked_from(nodes, ends), []
    for name in asked:
        inputs = data_inputs(nodes[name]) if nodes[name].op == "Reshape" else []
        if len(inputs) == 2 and inputs[0].node in asked:
            target = const_value(nodes.get(inputs[1].node))
            if target is not None and target.size and (target > 0).all():
                found.append(name)
    return found


def fixed_sizes(nodes: Mapping[str, Proto], ends: Ends) -> list[int]:
    """Return at most 8 numbers of rows, above 1, that constants make or keep, greatest first.

    One of them may be a batch size that no input shows. GraphError for an unknown type number.
    """
    asked, found = _asked_from(nodes, ends), dict[int, None]()
    for name, node in nodes.items():
        inputs = data_inputs(node)
        if (at := _SIZED.get(node.op)) is not None and at < len(inputs):
            value = const_value(nodes.get(inputs[at].node))
            if value is not None and value.size and value.dtype.kind == "i":
                found[int(value.ravel()[0])] = None
        for tensor in inputs if name in asked else ():
            source = nodes.get(tensor.node)
            if source is not None and source.op == "Const":
                shape = shape_of(attr(source, "value").tensor.tensor_shape) or ()
                if len(shape) > 1 and min(shape) > 0 and rows_are_equal(source, 0):
                    found[shape[0]] = None
    return sorted((size for size in found if size > 1), reverse=True)[:_MOST_SIZES]


def _asked_from(nodes: Mapping[str, Proto], ends: Ends) -> Mapping[str, None]:
    """Return the nodes of a signature's inputs and all nodes that depend on them, as keys, inputs first."""
    readers = readers_of(nodes.values())
    return closure((t.node for t in ends.inputs), lambda name: (r.name for r in readers.get(name, ())))


# Operations that make, or keep, as many rows as the first number of an input says, and which input that is.
_SIZED = {"Fill": 0, "Tile": 1, "BroadcastTo": 1, "Slice": 2}
_MOST_SIZES = 8
# Operations whose floats are scores, or lead to them.
_SCORES = frozenset(
    {"BiasAdd", "MatMul", "Add", "AddV2", "AddN", "Softmax", "Sigmoid", "Mul", "BatchMatMulV2"}
)


# Operations that draw numbers, and about the least and the greatest of them.
_DRAWN = {
    "RandomUniform": (0.0, 1 - 2.0**-7),
    "RandomStandardNormal": (-9.0, 9.0),
    "TruncatedNormal": (-1.9, 1.9),
}


def _is_float(node: Proto) -> bool:
    dtype = attr_dtype(node, "T") if "DstT" not in node.attr else attr_dtype(node, "DstT")
    return dtype is not None and dtype.is_floating


def _close(expected: Array, found: Array) -> bool:
    """True if two arrays have the same shape, dtype and values; floats may differ by rounding.

    A float may differ by 1e-4 (of 16 bits by 2e-2) of the greatest magnitude in its row, of the median row's
    greatest, or of 0.01, whichever is the most. NaN equals NaN.
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    if not is_floating(expected):
        return np.array_equal(expected, found)
    tolerance = _COARSE if expected.dtype.itemsize < 4 else _TOLERANCE
    rows = expected.reshape(len(expected) if expected.ndim else 1, -1).astype(np.float64)
    others = found.reshape(rows.shape).astype(np.float64)
    greatest = np.abs(np.where(np.isfinite(rows), rows, 0)).max(1, initial=0)
    scale = np.maximum(greatest, max(_LEAST, np.median(greatest) if greatest.size else 0))
    differ = ~((rows == others) | (np.isnan(rows) & np.isnan(others)))
    with np.errstate(invalid="ignore"):
        return not (differ & ~(np.abs(rows - others) <= tolerance * scale[:, np.newaxis])).any()
