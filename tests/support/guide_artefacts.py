"""What pages of the guide start with: made once a test run, and copied for every page that names it."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from exporter.checkpoint.tensor_bundle import BundleWriter, read_array, read_catalog
from tests.support import autodist_trainer, estimators
from tests.support.deeprec_models import Trainer as DeepRecTrainer
from tests.support.guide_commands import run_command
from tests.support.guide_pages import ROOT
from tests.support.once import once_a_run

TRAIN = "python examples/ranker/train.py --out"
EXPORT = "export-model --model examples/ranker/model.py:serving --ckpt-dir"


def lay_out(name: str, directory: Path, factory: pytest.TempPathFactory) -> None:
    """Put what the guide calls `name` into a reader's directory."""
    make = MAKERS[name]
    made = once_a_run(factory, f"guide{make.__name__.replace('_', '-')}", partial(make, factory))
    _copy(made / name, directory / name)


def train(directory: Path, out: str, factory: pytest.TempPathFactory) -> str:
    """Run the guide's trainer, which goes on from what is there; what it prints.

    Training is deterministic: what a first, a second run leaves is the same on all pages, and is made once.
    """
    times = len([*(directory / out).glob("*.index")]) + 1
    made = once_a_run(factory, f"guide-trained-{times}", partial(_train_times, factory, times))
    _copy(made / "train", directory / out)
    return (made / "printed").read_text().replace("train/", f"{out}/")


def _train_times(factory: pytest.TempPathFactory, times: int, directory: Path) -> None:
    for _ in range(1, times):
        train(directory, "train", factory)
    (directory / "printed").write_text(_type(f"{TRAIN} train", directory))


def _train(factory: pytest.TempPathFactory, directory: Path) -> None:
    train(directory, "train", factory)


def _ranker(factory: pytest.TempPathFactory, directory: Path) -> None:
    train(directory, "train", factory)
    _type(f"{EXPORT} train --out models/ranker", directory)


def _fresh(factory: pytest.TempPathFactory, directory: Path) -> None:
    """A model that takes deltas, with one published that is rounded."""
    train(directory, "fresh", factory)
    _type(f"{EXPORT} fresh --out models/fresh --incr", directory)
    train(directory, "fresh", factory)
    _type(f"{EXPORT} fresh --out models/fresh --incr --delta-dtype int8", directory)


def _tower(_: pytest.TempPathFactory, directory: Path) -> None:
    _type("python examples/tower/train.py --out train-tower", directory)


def _warmup(_: pytest.TempPathFactory, directory: Path) -> None:
    _type("""echo '{"instances": [{"user": 1, "item": 2}]}' > warmup.jsonl""", directory)


def _requests(_: pytest.TempPathFactory, directory: Path) -> None:
    _type("""echo '{"instances": [{"user": 1, "item": 2}]}' > requests.jsonl""", directory)


def _model_dir(_: pytest.TempPathFactory, directory: Path) -> None:
    estimators.unpack(directory)
    (directory / "wide_deep").rename(directory / "model_dir")


def _saved_model(factory: pytest.TempPathFactory, directory: Path) -> None:
    trained = once_a_run(factory, "autodist", autodist_trainer.train)
    _copy(trained / "saved_model", directory / "saved_model")


def _deeprec(factory: pytest.TempPathFactory, directory: Path) -> None:
    """A full checkpoint, and in DeepRec's format the increment that leads to the next one."""
    train(directory, "deeprec", factory)
    train(directory, "next", factory)
    train(directory, "next", factory)
    before = read_catalog(directory / "deeprec/model.ckpt-200")
    after = read_catalog(directory / "next/model.ckpt-400")
    increments = directory / "deeprec/.incremental_checkpoint"
    increments.mkdir()
    with BundleWriter(increments / "incremental_model.ckpt-400") as writer:
        for name, tensor in after.tensors.items():
            value = read_array(after, tensor)
            if not name.endswith("_embedding"):
                writer.add(name, value)
                continue
            (touched,) = np.nonzero((value != read_array(before, before.tensors[name])).any(axis=1))
            writer.add(f"{name}-sparse_incr_keys", touched)
            writer.add(f"{name}-sparse_incr_values", value[touched])


def _deeprec_tables(_: pytest.TempPathFactory, directory: Path) -> None:
    """A full checkpoint with embedding variables and its `.meta`, and the increment after it."""
    trainer = DeepRecTrainer(directory / "ctr")
    trainer.users = replace(trainer.users, keys=np.arange(1000, 1500))
    trainer.items = replace(trainer.items, keys=np.arange(1, 301))
    trainer.save()
    trainer.train(seed=1)
    trainer.save_increment()


def _tfra(_: pytest.TempPathFactory, directory: Path) -> None:
    for name, family in (("tfra", "saver"), ("tfra-keras", "manager")):
        shutil.copytree(ROOT / "tests" / "fixtures" / "tfra" / "0.8.1" / family, directory / name)


def _type(command: str, directory: Path) -> str:
    examples = directory / "examples"
    examples.symlink_to(ROOT / "examples")
    ran = run_command(command, directory)
    examples.unlink()
    assert ran.code == 0, f"$ {command}\n{ran.out}\n{ran.err}"
    return ran.out


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)


def _orbax(_: pytest.TempPathFactory, directory: Path) -> None:
    with tarfile.open(ROOT / "tests/fixtures/orbax/0.12.8.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    (directory / "managed").rename(directory / "train-jax")
    (directory / "keras").rename(directory / "train-keras")


MAKERS: dict[str, Callable[[pytest.TempPathFactory, Path], None]] = {
    "train": _train,
    "models/ranker": _ranker,
    "fresh": _fresh,
    "models/fresh": _fresh,
    "train-tower": _tower,
    "warmup.jsonl": _warmup,
    "requests.jsonl": _requests,
    "deeprec": _deeprec,
    "ctr": _deeprec_tables,
    "tfra": _tfra,
    "tfra-keras": _tfra,
    "train-jax": _orbax,
    "train-keras": _orbax,
    "model_dir": _model_dir,
    "saved_model": _saved_model,
}
"""`model_dir` is an Estimator's, `saved_model` AutoDist's."""
