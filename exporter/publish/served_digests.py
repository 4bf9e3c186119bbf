"""What a server must answer to `incremental_digest`, computed from what is published: base and deltas."""

from __future__ import annotations

from collections.abc import Sequence

from exporter.delta.chunk_digest import Chunk, chunk_digest, chunks
from exporter.delta.format import ChangeKind
from exporter.publish.delta_log import DeltaLog


def served_chunks(log: DeltaLog) -> list[Chunk]:
    """The chunks of a log's variables; a chunk's index is its number."""
    return list(chunks(log.schema))


def served_digests(log: DeltaLog, position: int, wanted: Sequence[Chunk]) -> list[int]:
    """The digests of chunks in a server that stands at a position, signed 64-bit integers.

    Raises:
        PositionUnknown: no base leads there any more.
        CheckpointError: what is published is damaged.
    """
    names = {chunk.variable for chunk in wanted}
    state = log.state(position, only=names)
    state.check(names)
    variables = {variable.name: variable for variable in log.schema.variables}
    found = []
    for chunk in wanted:
        if variables[chunk.variable].kind is ChangeKind.TABLE:
            rows = state.rows(chunk.variable, chunk.start, chunk.stop)
        else:
            whole = state.whole(chunk.variable)
            rows = whole[chunk.start : chunk.stop] if whole.ndim else whole
        found.append(chunk_digest(rows))
    return found
