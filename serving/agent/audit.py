"""Does a replica hold what was published? Checksums of some of its rows, against the same from the files.

The exporter can say what a server must hold at a position, bit by bit, also where deltas were rounded or
left rows out: base and deltas are what it applied. Each audit compares a few chunks that are drawn anew, so
that in time all are, at a cost that does not grow with the model; what differed once is compared each time,
until it is right again.

Deltas do not carry digests of the states that they lead from and to: to keep such a digest costs the exporter
as much again as making the delta (100,000 rows of 64 floats: 220 ms), and a server sixteen times what the
update itself takes (225 ms against 14).
"""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path

import numpy as np
from msgspec import Struct

from exporter.delta.chunk_digest import Chunk
from exporter.errors import ExportError
from exporter.publish.delta_log import read_log
from exporter.publish.served_digests import served_chunks, served_digests
from serving.agent.rollout import Audit
from serving.client import ModelClient

SIGNATURE = "incremental_digest"


class Audited(Struct, frozen=True):
    """What came of an audit. `differing` are chunks that are not what was published.

    `skipped` says why there is no result: the replica moved meanwhile, or the position is not kept any more.
    """

    position: int
    chunks: int = 0
    differing: tuple[Chunk, ...] = ()
    skipped: str = ""


def audit(
    client: ModelClient, model: Path, action: Audit, count: int, suspects: Collection[Chunk] = ()
) -> Audited:
    """Compare `count` chunks of a version that stands at a position, and those that differed before.

    Raises:
        CallFailed (exporter.errors): the server did not answer, or refused.
    """
    if SIGNATURE not in client.metadata(action.version).signatures:
        return Audited(action.position, skipped="it has no digests: publish its base with --with-digest")
    try:
        log = read_log(model)
        if log.lineage != action.lineage:
            return Audited(action.position, skipped="its log has ended")
        every = served_chunks(log)
        drawn = random.sample(range(len(every)), min(count, len(every)))
        numbers = sorted({*drawn, *(number for number, chunk in enumerate(every) if chunk in suspects)})
        expected = served_digests(log, action.position, [every[number] for number in numbers])
    except (OSError, ExportError) as error:
        return Audited(action.position, skipped=str(error))
    if not numbers:
        return Audited(action.position, skipped="it holds nothing that has digests")
    rows = {"rows": np.array(numbers, np.int64)}
    found = client.predict(rows, signature=SIGNATURE, version=action.version).outputs
    stood = {int(at) for name in ("position_before", "position_after") for at in found[name]}
    if stood != {action.position}:
        return Audited(action.position, skipped="it moved meanwhile")
    told = [int(bytes(text)) for text in found["digest"]]
    differing = (
        every[number] for number, mine, its in zip(numbers, expected, told, strict=True) if mine != its
    )
    return Audited(action.position, len(numbers), tuple(differing))
