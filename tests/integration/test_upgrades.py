"""A model goes from one release of this package to another and back: updated, rolled back, merged.

The code of an earlier release is that of the commit with which its files came to `tests/golden`, or of its
tag; it runs with this environment's libraries. Where the history is missing, as in a shallow clone, the test
is skipped, and says which release it is about.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.publish.delta_log import read_log
from exporter.version import __version__
from tests.support.commands import export_model
from tests.support.golden import GOLDEN, assert_serves, expected_values, items_of, train_on
from tests.support.logs import assert_same_bits, values_at
from tests.support.once import once_a_run
from tests.support.updatable import loaded

ROOT = Path(__file__).parents[2]
EARLIER = sorted(
    path.name for path in GOLDEN.iterdir() if path.name[0].isdigit() and path.name != __version__
)
Run = Callable[..., None]


def this_release(*words: object) -> None:
    ran = export_model(*words)
    assert ran.code == 0, ran.err


def maintain(run: Run, release: Path, train: Path, model: Path) -> dict[int, dict[str, Any]]:
    """Let a release lift the hold, publish a delta, go back to 50, merge; the values at each new position."""
    known = expected_values(release, "ranker")
    run("resume", model)
    train_on(train)
    trained = {**known[80], "users": known[80]["users"].copy()}
    trained["users"][3] = 1
    run("--ckpt-dir", train, "--out", model, "--incr")
    run("rollback", model, "--to", "50")
    run("merge", model)
    run("verify", model, "--bytes")
    *_, lifted, published, back = sorted({delta.end for delta in read_log(model).deltas})
    return {lifted: known[80], published: trained, back: known[50]}


def code_of(release: str) -> bytes:
    """A release's packages as a tar file; the test is skipped where git does not have them."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True).stdout

    try:
        added = git("log", "--diff-filter=A", "--format=%H", "--", f"tests/golden/{release}/expected.json")
        tagged = git("tag", "--list", f"v{release}", release).decode().split()
        commit = (tagged or added.decode().split())[-1]
        return git("archive", commit, "exporter", "serving")
    except (subprocess.CalledProcessError, OSError, IndexError) as error:
        pytest.skip(f"release {release}: its code is not in the history of this clone ({error})")


def run_release(code: Path, *words: object) -> None:
    """Run a command of a release's own code."""
    command = "import sys; from exporter.cli import main; sys.argv[0] = 'export-model'; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", command, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"},
        cwd=code,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def assert_answers(model: Path, positions: dict[int, dict[str, Any]]) -> None:
    """A server that loaded the base is led through these positions, and answers as the values say."""
    users, items = np.arange(8), np.arange(7)
    with loaded(model / "10") as server:
        for position, values in sorted(positions.items()):
            assert server.update(position)["position"] == position
            found = server.predict(user=users, item=items, word=["red"] * 8)
            assert_same_bits({"row": found["row"]}, {"row": items_of(values)})
            scores = (values["users"] * values["kernel"]).sum(axis=1) * values["scale"]
            np.testing.assert_allclose(found["score"], scores, rtol=1e-5)


@pytest.mark.parametrize("earlier", EARLIER)
def test_this_release_goes_on_with_a_model_of_an_earlier_one(earlier: str, tmp_path: Path) -> None:
    train, model = tmp_path / "train", tmp_path / "model"
    shutil.copytree(GOLDEN / earlier / "train", train)
    shutil.copytree(GOLDEN / earlier / "models/ranker", model)
    for position, values in maintain(this_release, GOLDEN / earlier, train, model).items():
        assert_serves(values_at(read_log(model), position), values)


def generate(directory: Path) -> None:
    command = [sys.executable, "-m", "tests.golden.generate", str(directory / "made")]
    subprocess.run(command, check=True, cwd=ROOT)


@pytest.mark.landing
@pytest.mark.parametrize("earlier", EARLIER)
def test_an_earlier_release_goes_on_with_a_model_of_this_one(
    earlier: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """And this one goes on with what the earlier left."""
    with tarfile.open(fileobj=io.BytesIO(code_of(earlier))) as archive:
        archive.extractall(tmp_path / "code", filter="data")
    made = once_a_run(tmp_path_factory, "golden-of-this-release", generate) / "made"
    work = Path(shutil.copytree(made, tmp_path / "work"))
    train, model = work / "train", work / "models/ranker"
    positions = maintain(partial(run_release, tmp_path / "code"), made, train, model)
    for position, values in positions.items():
        assert_serves(values_at(read_log(model), position), values)
    this_release("resume", model)
    resumed = read_log(model).deltas[-1].end
    trained = positions[sorted(positions)[1]]
    assert_serves(values_at(read_log(model), resumed), trained)
    assert_answers(model, positions | {resumed: trained})
