"""`make isolation`: a million responses beside updates of a mapped base; none of them mixes two positions.

pytest does not collect this by itself; the short form is `test_isolation`. ISOLATION_RESPONSES says how many
responses there are, of `IDS` examples each.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.updatable import WIDE_ROWS, Loaded, constant_everywhere, filled, loaded, updatable_model

RESPONSES = int(os.environ.get("ISOLATION_RESPONSES", "1000000"))
IDS = 16
_READERS = 4
_UPDATE_EVERY_S = 0.02
_OUTPUTS = ("low", "high", "model_position")
_FIRST = 100


@dataclass
class Seen:
    """What readers saw: how many responses, of how many positions, and what must not be."""

    responses: int = 0
    mixed: int = 0
    unknown: int = 0
    positions: int = 0


@pytest.mark.timeout(7200)
def test_no_response_mixes_positions(tmp_path: Path) -> None:
    seen = play(tmp_path, RESPONSES)
    print(seen)
    assert seen.mixed == seen.unknown == 0


def play(
    directory: Path, responses: int, build: Callable[[], Any] = constant_everywhere, *, mapped: bool = True
) -> Seen:
    """Read from several threads while each update sets all values of a base to its own position."""
    model = updatable_model(directory, build, {"ids": [0]}, mapped=mapped)
    tables = sum(variable.is_table for variable in model.schema.variables)
    with loaded(model) as server, ThreadPoolExecutor(_READERS) as pool:
        if mapped:
            assert server.call("incremental_status", probe=[0])["mapped_tables"] == [tables]
        model.publish(_FIRST, _FIRST + 1, filled(model, _FIRST + 1))
        assert server.update()["position"] == _FIRST + 1
        found = [pool.submit(_read, server, -(-responses // _READERS), seed) for seed in range(_READERS)]
        position = _FIRST + 1
        while not all(each.done() for each in found):
            delta = model.publish(position, position + 1, filled(model, position + 1))
            position += 1
            assert server.update(position)["rows"] == tables * WIDE_ROWS
            shutil.rmtree(delta)
            time.sleep(_UPDATE_EVERY_S)
        each = [reader.result() for reader in found]
    return Seen(
        sum(one.responses for one in each),
        sum(one.mixed for one in each),
        sum(one.unknown for one in each),
        position - _FIRST,
    )


def _read(server: Loaded, responses: int, seed: int) -> Seen:
    signature = server.signatures["serving_default"]
    outputs = [signature.outputs[name].name for name in _OUTPUTS]
    call = server.session.make_callable(outputs, [signature.inputs["ids"].name])
    asked = np.random.default_rng(seed).integers(0, WIDE_ROWS, (64, IDS))
    seen = Seen()
    while seen.responses < responses:
        low, high, position = call(asked[seen.responses % len(asked)])
        seen.responses += 1
        seen.unknown += position[0] < 0
        seen.mixed += position[0] >= 0 and not ((low == position).all() and (high == position).all())
    return seen
