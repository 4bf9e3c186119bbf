"""Make a graph that was traced with one batch size answer requests of any size, or declare that size.

An `input_fn` whose batches have a fixed size leaves that size all over a graph: in targets of Reshapes, in
initial states, in the ranges by which a lookup in parts puts rows back. Which numbers are the batch, and
whether rows keep apart, is found by experiment (`experiment.py`). What it cannot open stays at its size, and
says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import Struct

from exporter.errors import few
from exporter.graph.batch.experiment import Experiment, Failed, fixed_reshapes, fixed_sizes
from exporter.graph.batch.laboratory import Ends, NoLaboratory
from exporter.graph.functions import reachable
from exporter.graph.inference_graph import Effect
from exporter.graph.nodes import all_before, endpoint
from exporter.graph.outside import effect_in
from exporter.graph.session import RunFailed, graph_session
from exporter.limited.worker import Ended, NotStarted
from exporter.wire.protos import Proto

MEMORY_BYTES = 4 << 30
CPU_SECONDS, STEP_SECONDS = 20, 120.0
"""The limits of one run in the experiment."""

_MOST_LISTED = 3  # nodes in a note


class BatchSize(Struct, frozen=True):
    """The numbers of rows that the signatures accept, and notes for the user."""

    only: int | None = None  # the one number that the served graph accepts, None for any
    notes: tuple[str, ...] = ()
    traced: int | None = None  # the one number that the source graph accepts, None if it accepts others
    opened: tuple[str, ...] = ()  # the nodes whose numbers follow the request now, found by experiment
    library: Mapping[str, Proto] | None = None  # the graph's functions, None if they are as before


class Filling(Struct, frozen=True):
    """The operations that fill lookup tables, the handles that they write, and files by path's node."""

    operations: Sequence[str] = ()
    files: Mapping[str, Path] = {}


def settle_batch(
    nodes: dict[str, Proto],
    ends: Sequence[Ends],
    library: Mapping[str, Proto],
    batch: int | None,
    filling: Filling,
) -> BatchSize:
    """Make the numbers in `nodes` that fix the batch size follow the request, if an experiment finds them.

    `nodes` is changed in place, and changed functions are in the result's `library`. The experiment runs the
    graph in a process of its own, for up to minutes. `ends` are the tensors of the signatures, `library` the
    graph's functions by name; `filling` says how lookup tables are filled. `batch` is the batch size of the
    graph's input pipeline; None: requests may be of any size already and nothing is run, unless a Reshape of
    the only input by rows leaves no length open, or a constant may say how many rows there are. If the
    experiment is impossible or fails, a known size stays, and a note says why. GraphError if the graph calls
    a function that it lacks, or has an unknown type number.
    """
    reshapes, sizes = list[str](), list[int]()
    if batch is None:
        if len(ends) == 1 and len(ends[0].batched()) == 1:
            reshapes, sizes = fixed_reshapes(nodes, ends[0]), fixed_sizes(nodes, ends[0])
        if not reshapes and not sizes:
            return BatchSize()
    if find_spec("tensorflow") is None:
        how = "where TensorFlow is installed, the same command finds out whether it may have any"
        return _only(batch, "there is no TensorFlow here to try others", how)
    if reason := _harmful(nodes, library, filling):
        return _only(batch, f"{reason}, so that it is not tried with others")

    def experiment(rows: int) -> Experiment:
        return Experiment(nodes, ends, library, rows, filling.operations, filling.files)

    limits: Any = {"memory_bytes": MEMORY_BYTES, "cpu_seconds": CPU_SECONDS, "step_seconds": STEP_SECONDS}
    try:
        with graph_session(**limits) as session:
            if batch is None:
                batch = experiment(1).traced_rows(session, reshapes, sizes)
            if batch is None:
                return BatchSize()
            tried = experiment(batch)
            slots = tried.run(session)
            if not slots:
                return BatchSize()
            opened = tried.opened(nodes, slots)
    except Failed as failed:
        where = f"{nodes[failed.node].op} {failed.node!r}" if failed.node in nodes else repr(failed.node)
        return _only(batch, f"{where} {failed}" if failed.node else str(failed))
    except NoLaboratory as error:
        return _only(batch, f"it was not tried with others: {error}")
    except RunFailed as error:
        return _only(batch, f"it cannot be run: {error}")
    except NotStarted as error:
        return _only(batch, f"no process to try others can be started: {error}")
    except Ended as ended:
        reason = f"came to no end in {ended.limit}" if ended.limit else f"ended {ended.how}"
        return _only(batch, f"a trial with others {reason}")
    nodes.update(opened.nodes)
    names = [*dict.fromkeys(slot.node for slot in sorted(slots))]
    note = (
        "requests may have any number of rows, as an experiment found: "
        f"training's batch of {batch} was made dynamic in {few(names, _MOST_LISTED)}"
    )
    return BatchSize(None, (note,), batch, tuple(names), opened.library)


def _harmful(nodes: Mapping[str, Proto], library: Mapping[str, Proto], filling: Filling) -> str:
    """Return the reason why this program must not run a graph, a clause; "" if the graph is harmless.

    Only operations that fill tables may read files. GraphError if the graph calls a function that it lacks,
    or has an unknown type number.
    """
    loading = all_before(nodes, map(endpoint, filling.operations))
    bodies = [("", nodes.values())]
    bodies += [(name, library[name].node_def) for name in sorted(reachable(nodes.values(), library))]
    for name, body in bodies:
        for node in body:
            effect = effect_in(node, library)
            if effect is not None and not (effect is Effect.READS and not name and node.name in loading):
                return f"{node.op} {node.name!r} {effect.value}"
    return ""


def _only(batch: int | None, reason: str, how: str = "") -> BatchSize:
    """Return `batch` as the only size that a graph keeps, with a note of the `reason` and `how` to change it.

    If `batch` is None, the result allows any size and has no note.
    """
    if batch is None:
        return BatchSize()
    rows = "1 row" if batch == 1 else f"{batch} rows"
    how = how or (
        "for any size, write the .meta of a graph without a fixed batch (no drop_remainder), or use a builder"
    )
    note = f"only requests of {rows} are answered, and the signatures say so: {reason}; {how}"
    return BatchSize(batch, (note,), batch)
