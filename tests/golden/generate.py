"""Write one of every file that a release leaves on disk, and beside them in plain JSON what they mean.

    python -m tests.golden.generate [DIRECTORY]      without one: tests/golden/<version of this release>

Values come from a seed, ids and times are given, so that two runs write the same bytes, but for
`saved_model.pb`, which TensorFlow has a part in. The folder of a release that is out is never written again:
the next release adds its own, and reads all others (`tests/test_golden.py`).

    train/           full checkpoints, increments, a marker
    forked/          the same of a trainer that was set back: two increments of one name
    deeprec/         a full checkpoint and DeepRec's increment to it
    models/ranker/   a base, a delta of every kind, caches, the hold of a rollback
    models/deeprec/  a base, the delta that DeepRec's increment became, the base that both were merged into
    models/plain/    versions that take no deltas, and the hold of a rollback
    expected.json    what is where
    values.json      what the served variables hold at each position
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MODEL = "tests/golden/model.py"
IDS = itertools.count(1)
NOT_KEPT = (".lock", ".turn", "checked")
"""What says nothing to a later release: a lock; a cache of the inodes of files."""
_token_hex = secrets.token_hex


class Clock:
    """The time at which publications are said to be made."""

    now = 1_750_000_000.0

    def __call__(self) -> float:
        return self.now


def _given_ids(nbytes: int | None = None) -> str:
    """Ids of 16 bytes are written; shorter ones name scratch files, and must differ."""
    return f"{next(IDS):032x}" if nbytes == 16 else _token_hex(nbytes)


clock = Clock()
if __name__ == "__main__":  # before modules of ours are imported, which take hold of them
    time.time = clock
    secrets.token_hex = _given_ids
    secrets.randbits = lambda k: 0x9E3779B97F4A7C15 % (1 << k)

import numpy as np  # noqa: E402

from exporter.publish.delta_log import read_log  # noqa: E402
from exporter.version import __version__  # noqa: E402
from tests.golden.trainer import Trainer, given_id  # noqa: E402
from tests.support.commands import export_model  # noqa: E402
from tests.support.logs import values_at  # noqa: E402


def run(*arguments: object) -> dict[str, Any]:
    """A command, a minute after the one before."""
    clock.now += 60
    ran = export_model(*arguments, "--json")
    if ran.code:
        sys.exit(ran.err)
    document: dict[str, Any] = ran.document
    return document


def plain(values: dict[str, np.ndarray]) -> dict[str, Any]:
    """Values as JSON has them; a float32 survives the way through it bit for bit."""
    return {
        name: [word.decode() for word in value] if value.dtype == object else value.tolist()
        for name, value in values.items()
    }


def ranker(train: Path, model: Path) -> dict[str, Any]:
    """A log with deltas of every kind."""
    trainer, served = Trainer(train), {}

    def export(*options: object) -> None:
        run("--ckpt-dir", train, "--out", model, "--incr", *options)
        served[trainer.step] = trainer.served()

    trainer.save()
    export("--model", f"{MODEL}:serving", "--add=stamp", "--add=digest")
    trainer.train({"users": [1, 5]}, dense="kernel")
    trainer.increment()
    export()
    trainer.train({"items": [0, 3, 4, 6]})
    trainer.increment()
    export()
    run("merge", model)
    trainer.train({"users": [2]}, dense="scale")
    trainer.words[b"blue"] = 3
    trainer.save()
    export()
    trainer.train({"users": [0, 1, 3], "items": [1]}, by=0.01)
    trainer.values["users"][3] += 5
    trainer.increment()
    export("--delta-budget", "change=0.5")
    served[50] = {**served[40], "users": served[40]["users"].copy()}
    served[50]["users"][3] = trainer.values["users"][3]
    trainer.train({"users": [4, 5], "items": [2, 5]})
    trainer.increment()
    export("--delta-dtype", "bfloat16")
    served[60] = rounded(model, 60, served[60])
    trainer.train({"users": [6], "items": [0, 1, 2, 3]})
    trainer.increment()
    export("--delta-dtype", "int8")
    served[70] = rounded(model, 70, served[70])
    run("merge", model, "--from", 40, "--to", 70)
    trainer.train({"users": [7]}, dense="kernel")
    trainer.increment()
    export()
    run("rollback", model, "--to", 40)
    run("resume", model)
    run("rollback", model, "--to", 30)
    served |= {81: served[40], 82: served[80], 83: served[30]}
    return {
        "bases": [{"position": 10, "step": 10, "isolation": "snapshot", "stamp": True, "digest": True}],
        "deltas": [
            {"path": "10-20", "step": 20, "made": "increments", "rows": 2},
            {"path": "10-30", "step": 30, "made": "merge", "rows": 6, "parts": 2},
            {"path": "20-30", "step": 30, "made": "increments", "rows": 4},
            {"path": "30-40", "step": 40, "made": "comparison", "rows": 1},
            {"path": "30-83", "step": 30, "made": "rollback", "rows": 13, "back_to": 30, "before": 82},
            {"path": "40-50", "step": 50, "made": "increments", "rows": 1, "left_out": 3, "only_from": True},
            {"path": "40-70", "step": 70, "made": "merge", "rows": 11, "parts": 3, "rounded": "int8"},
            {"path": "40-81", "step": 40, "made": "rollback", "rows": 12, "back_to": 40, "before": 80},
            {
                "path": "50-60",
                "step": 60,
                "made": "comparison",
                "rows": 7,
                "rounded": "bfloat16",
                "only_from": True,
            },
            {
                "path": "60-70",
                "step": 70,
                "made": "comparison",
                "rows": 10,
                "rounded": "int8",
                "only_from": True,
            },
            {"path": "70-80", "step": 80, "made": "comparison", "rows": 11},
            {"path": "81-82", "step": 80, "made": "resume", "rows": 12, "back_to": 80, "before": 81},
        ],
        "hold": 83,
        "values": {position: plain(values) for position, values in served.items()},
    }


def rounded(model: Path, position: int, trained: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What is served of rows that were sent rounded: near the trainer's, and not the same."""
    found = values_at(read_log(model), position)
    for name, value in trained.items():
        if value.dtype == np.float32:
            np.testing.assert_allclose(found[name], value, atol=0.02)
    assert any((found[name] != value).any() for name, value in trained.items())
    return found


def deeprec(train: Path, model: Path) -> dict[str, Any]:
    """A delta from DeepRec's increment, and both merged into another base."""
    trainer = Trainer(train)

    def few(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: value for name, value in values.items() if name.startswith(("items", "scale"))}

    trainer.save()
    first = ["--ckpt-dir", train, "--out", model, "--incr"]
    run(*first, "--model", f"{MODEL}:ranking", "--isolation", "row", "--requests=none")
    served = trainer.served()
    trainer.train({"users": [0, 7], "items": [2, 6]}, dense="scale")
    trainer.deeprec_increment()
    run(*first)
    run("merge", model, "--rebase")
    base = {"position": 10, "step": 10, "isolation": "row", "stamp": False, "digest": False}
    return {
        "bases": [base, {**base, "position": 20, "step": 20}],
        "deltas": [{"path": "10-20", "step": 20, "made": "increments", "rows": 2}],
        "hold": None,
        "values": {10: plain(few(served)), 20: plain(few(trainer.served()))},
    }


def forked(train: Path) -> dict[str, Any]:
    """A trainer that was set back, and came by the same steps again."""
    trainer = Trainer(train)
    saved = trainer.save()
    trainer.train({"users": [1]})
    trainer.increment()
    trainer.restart(saved)
    trainer.train({"users": [2]})
    trainer.increment()
    trainer.save()
    increments = [
        {"id": given_id("increment", 1020), "session": given_id("session", 1), "generation": 1},
        {"id": given_id("increment", 2020), "session": given_id("session", 2), "generation": 2},
    ]
    marker = {"checkpoint": "model.ckpt-20", "after": given_id("increment", 2020), "is_equal": True}
    return {"increments": increments, "marker": marker}


def versions(train: Path, model: Path) -> dict[str, Any]:
    """Versions that take no deltas."""
    for step in (10, 40):
        run("--ckpt-dir", train / f"model.ckpt-{step}", "--out", model, "--model", f"{MODEL}:serving")
    run("rollback", model, "--to", 10)
    return {
        "versions": [10, 40, 41],
        "hold": 41,
        "taken_back": {"made": "rollback", "back_to": 10, "before": 40},
    }


def write(directory: Path) -> None:
    """All of it."""
    models, values = directory / "models", {}
    expected: dict[str, dict[str, Any]] = {
        "ranker": ranker(directory / "train", models / "ranker"),
        "deeprec": deeprec(directory / "deeprec", models / "deeprec"),
        "forked": forked(directory / "forked"),
        "plain": versions(directory / "train", models / "plain"),
    }
    for name, found in expected.items():
        for position, served in found.pop("values", {}).items():
            values[f"{name}@{position}"] = served
    for path in [*directory.rglob("*")]:
        if path.name in NOT_KEPT:
            path.unlink()
    (directory / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    lines = [f'"{name}": {json.dumps(value)}' for name, value in values.items()]
    (directory / "values.json").write_text("{" + ",\n ".join(lines) + "}\n")


if __name__ == "__main__":
    os.chdir(ROOT)  # the model is named from here, whoever asks
    target = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else HERE / __version__
    with tempfile.TemporaryDirectory() as scratch:
        write(Path(scratch, "new"))
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(Path(scratch, "new"), target)
