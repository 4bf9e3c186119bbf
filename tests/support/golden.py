"""What releases left on disk (`tests/golden`): what it means, and how its training goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.delta.format import ChangeKind, ServedVariable
from exporter.increments.history import read_history
from exporter.increments.increment import Changed, Contents, Increment
from exporter.wire.dtypes import DType
from tests.golden.trainer import given_id
from tests.support.increments import publish
from tests.support.logs import assert_same_bits

GOLDEN = Path(__file__).parents[1] / "golden"


def expected_values(release: Path, name: str) -> dict[int, dict[str, np.ndarray]]:
    """What is served at each position."""
    document = json.loads((release / "values.json").read_text())
    found = {key.partition("@"): values for key, values in document.items()}
    return {
        int(position): {variable: _array(variable, value) for variable, value in values.items()}
        for (model, _, position), values in found.items()
        if model == name
    }


def _array(variable: str, value: Any) -> np.ndarray:
    if variable == "seen-keys":
        return np.array([word.encode() for word in value], object)
    return np.array(value, np.int64 if variable == "seen-values" else np.float32)


def assert_serves(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """The same, bit for bit; of a lookup table the same entries in any order."""
    entries = [
        dict(zip(values["seen-keys"], values["seen-values"], strict=True))
        for values in (found, wanted)
        if "seen-keys" in values
    ]
    assert entries[:1] == entries[1:]
    assert_same_bits(
        *({n: v for n, v in values.items() if not n.startswith("seen")} for values in (found, wanted))
    )


def items_of(values: dict[str, np.ndarray]) -> np.ndarray:
    """The table of items, whose parts are served one by one."""
    return np.concatenate([values[name] for name in sorted(values) if name.startswith("items")])


def train_on(train: Path) -> None:
    """Write the increment from 80 to 90: row 3 of `users` becomes ones."""
    users = ServedVariable("users", DType.FLOAT, (8, 4), ChangeKind.TABLE)

    def fill(writer: BundleWriter) -> Contents:
        writer.add(users.keys[0], np.array([3], np.int64))
        writer.add(users.keys[1], np.ones([1, 4], np.float32))
        return Contents((Changed(users, 1),))

    parent = max(read_history(train).increments, key=lambda stored: stored.increment.to_step).increment
    assert parent.to_step == 80
    draft = Increment(
        id=given_id("later", 1),
        run=parent.run,
        session=parent.session,
        generation=parent.generation,
        parent=parent.id,
        from_step=80,
        to_step=90,
        variables=(),
    )
    publish(train, draft, fill)
