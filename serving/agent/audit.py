"""Compare a replica's values with the published ones: checksums of some rows, from the server and the files.

A position determines every bit that a server holds, also where deltas were rounded or omitted rows, because
base and deltas are exactly what the server applied. Each audit compares a few randomly chosen chunks, so that
in time it covers all of them, at a cost that does not grow with the model. A chunk that differed is compared
in each audit until it is right again.

Deltas carry no digests of the states before and after them. Such a digest would double the cost of making a
delta (100,000 rows of 64 floats: 220 ms), and multiply the cost of an update by sixteen (225 ms against 14
ms).
"""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path

import numpy as np
from msgspec import Struct

from exporter.delta.chunk_digest import Chunk, chunks, served_digests
from exporter.errors import ExportError
from exporter.publish.delta_log import read_log
from serving.agent.rollout import Audit
from serving.client import ModelClient, Prediction

SIGNATURE = "incremental_digest"


class Audited(Struct, frozen=True):
    """The result of an audit. `differing` lists the chunks that differ from the published ones.

    `chunks` is the number of chunks compared. `skipped` says why there is no result, for example because the
    replica moved during the audit; else it is empty.
    """

    position: int
    chunks: int = 0
    differing: tuple[Chunk, ...] = ()
    skipped: str = ""


def audit(
    client: ModelClient, model: Path, action: Audit, count: int, suspects: Collection[Chunk] = ()
) -> Audited:
    """Compare random chunks of a served version with the published files, and return the result.

    `count` random chunks are compared, all if there are fewer, and the `suspects`, chunks that differed
    before; suspects that the log lacks are ignored. `client` is of the server, `model` is the model's
    directory, `action` has the version, its position and lineage. If the files cannot be read, the log has
    another lineage, the version has no digests, or the replica moved, the result has the reason in `skipped`.
    CallFailed if the server does not respond or refuses.
    """
    if SIGNATURE not in client.metadata(action.version).signatures:
        return Audited(
            action.position, skipped="it does not compute digests: publish its base with --add digest"
        )
    try:
        log = read_log(model)
        if log.lineage != action.lineage:
            return Audited(action.position, skipped="its log has ended")
        every = list(chunks(log.schema))
        drawn = random.sample(range(len(every)), min(count, len(every)))
        numbers = sorted({*drawn, *(number for number, chunk in enumerate(every) if chunk in suspects)})
        wanted = [every[number] for number in numbers]
        state = log.state(action.position, only={chunk.variable for chunk in wanted})
        expected = served_digests(log.schema, state, wanted)
    except (OSError, ExportError) as error:
        return Audited(action.position, skipped=str(error))
    if not numbers:
        return Audited(action.position, skipped="it has no variables with digests")
    rows = {"rows": np.array(numbers, np.int64)}

    def compared(answer: Prediction) -> Audited:
        found = answer.outputs
        stood = {int(at) for name in ("position_before", "position_after") for at in found[name]}
        if stood != {action.position}:
            return Audited(action.position, skipped="it moved during the audit")
        served = [int(bytes(text)) for text in found["digest"]]
        pairs = zip(numbers, expected, served, strict=True)
        differing = tuple(every[number] for number, mine, its in pairs if mine != its)
        return Audited(action.position, len(numbers), differing)

    return client.predict_as(compared, rows, signature=SIGNATURE, version=action.version)
