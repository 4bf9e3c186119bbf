"""A disk that is full at any step of a command: a named error, nothing half-published, then a run that works.

The disk has room for no further block, then for one, and so on until the command succeeds; and the same with
names of files, of which a file system has a number, too.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from exporter.errors import Exit
from exporter.publish.delta_log import read_log
from exporter.publish.versions import version_dirs
from exporter.transfer.pull import pull
from exporter.verify.log import verify_model
from tests.support import deeprec_logs
from tests.support.budget import THOROUGH
from tests.support.commands import Ran, export_model, export_small
from tests.support.deeprec_logs import DeepRecTrainer
from tests.support.directory_store import BUCKET, reached
from tests.support.logs import values_at
from tests.support.machines import files
from tests.support.mapped_models import MappedModel
from tests.support.publishing import hidden
from tests.support.setting import followed
from tests.support.small_disks import SmallDisk, small_disk

URL = f"s3://{BUCKET}/model"
_MOST_STEPS = 1 << 20 if THOROUGH else 12


@dataclass(frozen=True)
class Case:
    """What is there before, and a command, in which `@` is the directory; the model that it changes."""

    make: Callable[[Path], object]
    command: str
    model: str = "model"
    run: Callable[..., Ran] = export_model


def _log(directory: Path) -> None:
    """Published 10, 20 and 30; the trainer is at 40."""
    followed(directory, (20, 30, 40), published=30)


def _with(*commands: str) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        _log(directory)
        for command in commands:
            assert _typed(command, directory).code == 0, command

    return make


def _tables(directory: Path) -> None:
    trainer = DeepRecTrainer(directory / "train")
    trainer.train()
    trainer.save()
    deeprec_logs.publish_base(trainer, directory / "model")
    trainer.train()
    trainer.increment()


def _hot(directory: Path) -> None:
    MappedModel(directory)
    np.save(directory / "hot.npy", np.random.default_rng(3).permutation(20_000)[:1500])


_INCR = "--ckpt-dir @/train --out @/model --incr"
CASES = {
    "export": Case(_log, _INCR),
    "export with a budget": Case(_log, f"{_INCR} --delta-budget 12100B"),
    "export of rounded rows": Case(_log, f"{_INCR} --delta-dtype int8"),
    "export of keys": Case(_tables, _INCR),
    "merge": Case(_log, "merge @/model"),
    "rebase": Case(_log, "merge @/model --rebase"),
    "tag": Case(_log, "tag @/model prod 20"),
    "rollback": Case(_log, "rollback @/model --to 20"),
    "resume": Case(_with("rollback @/model --to 20"), "resume @/model"),
    "push": Case(_with("tag @/model prod 20", "rollback @/model --to 20"), f"push @/model {URL}"),
    "pull": Case(
        _with("tag @/model prod 20", "rollback @/model --to 20", f"push @/model {URL}"),
        f"pull {URL} @/copy",
        "copy",
    ),
    "pull of a merged base": Case(
        _with(f"push @/model {URL}", f"pull {URL} @/copy", "merge @/model --rebase", f"push @/model {URL}"),
        f"pull {URL} @/copy",
        "copy",
    ),
    "rollback in a store": Case(_with(f"push @/model {URL}"), f"rollback {URL} --to 20", URL),
    "export to a store": Case(_with(f"push @/model {URL}"), f"--ckpt-dir @/train --out {URL} --incr", URL),
    "hot rows": Case(
        _hot,
        "--ckpt-dir @/train --model @/model.py:build --out @/model --map-tables --hot-rows emb=@/hot.npy",
        run=export_small,
    ),
}


def _typed(command: str, directory: Path, run: Callable[..., Ran] = export_model) -> Ran:
    return run(*command.replace("@", str(directory)).split(), "--json")


@dataclass
class Setting:
    """What a case made, on a small disk; with a bucket that has room."""

    case: Case
    disk: SmallDisk
    origin: Path
    scratch: Path

    @property
    def here(self) -> Path:
        return self.disk.path / "here"

    def anew(self) -> None:
        """Everything is as the case made it."""
        for path in (self.disk.path / "tmp", self.here, self.scratch / "bucket"):
            shutil.rmtree(path, ignore_errors=True)
        (self.disk.path / "tmp").mkdir()
        shutil.copytree(self.origin / "here", self.here, symlinks=True)
        shutil.copytree(self.origin / "bucket", self.scratch / "bucket")

    def run(self) -> Ran:
        return _typed(self.case.command, self.here, self.case.run)

    @property
    def model(self) -> Path:
        """The model as a path; of one in the store a copy, as its readers would have it."""
        if self.case.model != URL:
            return self.here / self.case.model
        shutil.rmtree(copy := self.scratch / "read", ignore_errors=True)
        pull(URL, copy)
        return copy

    def seen(self) -> dict[str, object]:
        """What servers would follow, and its values; nothing that they see is damaged."""
        model = self.model
        if not model.is_dir() or not (versions := version_dirs(model)):
            return {}
        found = verify_model(model, bytes_=True)
        assert found.problems == ()
        if found.at is None:
            return {"version": max(each.version for each in versions)}
        log = read_log(model)
        values = {name: value.tobytes() for name, value in values_at(log).items()}
        return {"position": log.at.position, "hold": log.hold.content(), "values": values}

    def published(self) -> dict[str, bytes | None]:
        """All that readers may see: names, and the bytes that depend on no clock."""
        found = files(self.model)
        return {name: None if name.endswith(("json", "pb", ".id")) else found[name] for name in sorted(found)}


@pytest.fixture(params=CASES)
def setting(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Setting]:
    case, origin = CASES[request.param], tmp_path / "origin"
    for path in (origin / "bucket", tmp_path / "bucket"):
        path.mkdir(parents=True)
    with small_disk(tmp_path / "disk") as disk:
        (disk.path / "here").mkdir()
        with reached(origin / "bucket", monkeypatch):
            case.make(disk.path / "here")
        shutil.move(disk.path / "here", origin / "here")
        monkeypatch.setattr(tempfile, "tempdir", str(disk.path / "tmp"))
        with reached(tmp_path / "bucket", monkeypatch):
            yield Setting(case, disk, origin, tmp_path)


@pytest.mark.landing
@pytest.mark.parametrize("what", ["blocks", "files"])
def test_a_disk_that_is_full_at_any_step(setting: Setting, what: str) -> None:
    setting.anew()
    before, used = setting.seen(), setting.disk.used
    done = setting.run()
    assert done.code == 0, done.err
    after, expected = setting.seen(), setting.published()
    needed = [now - then for now, then in zip(setting.disk.used, used, strict=True)][what == "files"]
    failed = 0
    for room in range(0, 1 << 20, max(1, needed // _MOST_STEPS)):
        setting.anew()
        setting.disk.leave(**{what: room})
        ran = setting.run()
        setting.disk.leave()
        if ran.code == 0:
            assert setting.published() == expected
            if room > needed:
                break
            continue
        failed += 1
        said = f"with room for {room} {what}: {ran.err}"
        assert (ran.code, ran.error["error"]) == (Exit.FAILURE, "DiskFull"), said
        seen = setting.seen()
        # A pull brings one publication after another, each of them whole, as `seen` has verified.
        assert seen in (before, after) or setting.case.command.startswith("pull"), said
        if setting.model.is_dir() and not setting.case.command.startswith(
            "pull"
        ):  # the next one goes on with it
            assert hidden(setting.model) == [], said
        assert setting.run().code == 0, said
        assert setting.seen() == after, said
        assert setting.published() == expected, said
    assert failed
