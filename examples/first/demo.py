"""A version and a delta from a trainer's checkpoints, in a few seconds and without TensorFlow."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.commands import Words, run, show, workspace

HERE = Path(__file__).parent
SIGNATURE: Words = ["--input", "user=user:0", "--input", "item=item:0", "--output", "click=click:0"]


def main() -> int:
    """Run the demonstration; 0, as a command that fails ends this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in DIR and leave everything there")
    options = parser.parse_args()
    with workspace(options.keep) as directory:
        os.chdir(directory)
        demonstrate()
    return 0


def demonstrate() -> None:
    """Export, compare and publish in the working directory, with checkpoints as a trainer leaves them."""
    begun = time.monotonic()
    print("A first look, without TensorFlow: what a trainer left after 300 and after 320 steps")
    checkpoints, model = Path("train"), Path("models/clicks")
    checkpoints.mkdir(parents=True)
    _trained(300, checkpoints)

    print("\n1. A version: the trainer's own graph, cut down to what serves, over its data")
    export: Words = ["export-model", "--ckpt-dir", checkpoints, *SIGNATURE, "--out"]
    _typed([*export, "models/plain"])

    print("\n2. What the next 20 steps changed")
    _trained(320, checkpoints)
    first, second = (checkpoints / f"model.ckpt-{step}" for step in (300, 320))
    _typed(["export-model", "diff", first, second])

    print("\n3. A delta: only the changed rows, for servers that run already")
    shutil.copytree(HERE / "models", "models", dirs_exist_ok=True)
    print("   # models/clicks/300 takes deltas; it is shipped, because --incr needs TensorFlow to make one")
    _typed([*export, model, "--incr"])
    _typed(["export-model", "history", model])
    print(f"   {time.monotonic() - begun:.1f} s for four commands")


def _trained(step: int, checkpoints: Path) -> None:
    for file in (HERE / "checkpoints").glob(f"model.ckpt-{step}.*"):
        shutil.copy(file, checkpoints)


def _typed(command: Words) -> None:
    show(command)
    print(textwrap.indent(run(command).rstrip(), "   "), flush=True)


if __name__ == "__main__":
    sys.exit(main())
