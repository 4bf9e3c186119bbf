"""What is damaged stops a publication before anything is seen, or it is told beside what was published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from exporter.delta.spans import FANOUT
from tests.support.commands import export_model
from tests.support.damage import SHARD, flip, truncate
from tests.support.logs import damage_tensor
from tests.support.setting import Setting, followed


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and one delta fewer than are merged at once; the trainer has written one more increment."""
    directory = tmp_path_factory.mktemp("origin")
    steps = range(20, 20 + FANOUT)
    followed(directory, steps, published=steps[-2])
    return directory


@pytest.fixture
def setting(origin: Path, tmp_path: Path) -> Setting:
    shutil.copytree(origin, tmp_path / "copy")
    return Setting(tmp_path / "copy")


def names(setting: Setting) -> set[str]:
    return {delta.name for delta in setting.deltas}


def unreadable_version(setting: Setting) -> None:
    """A version that does not say which log it is of, and a log that nobody may belong to."""
    (setting.model / "deltas" / f"{3:020d}").mkdir()
    (setting.model / "9").mkdir()
    (setting.model / "9" / "manifest.json").write_text("[]")


@dataclass(frozen=True)
class Damage:
    """What is spoilt, and what a publication from increments says of it: its exit code or its warning."""

    name: str
    spoil: Callable[[Setting], object]
    code: int = 0
    warning: str = ""


DAMAGES = [
    Damage("nothing", lambda s: None),
    Damage("hold", lambda s: (s.log / "hold").write_text("soon"), warning="expected a position"),
    Damage("hold is a directory", lambda s: (s.log / "hold").mkdir(), warning="expected a position"),
    Damage(
        "older manifest", lambda s: truncate(s.deltas[2] / "manifest.json"), warning="manifest is damaged"
    ),
    Damage("older values", lambda s: flip(s.deltas[2] / SHARD), warning="is damaged"),
    Damage("older shard", lambda s: (s.deltas[2] / SHARD).unlink(), warning="there is no"),
    Damage("newest manifest", lambda s: truncate(s.deltas[-1] / "manifest.json"), code=6),
    Damage("older version's manifest", unreadable_version),
    Damage("base's manifest", lambda s: truncate(s.base / "manifest.json"), code=6),
    Damage("base's index", lambda s: truncate(s.base / "variables/variables.index")),
    Damage("base's graph", lambda s: truncate(s.base / "saved_model.pb")),
]


@pytest.mark.parametrize("watch", [False, True], ids=["once", "watch"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_a_failure_means_that_nothing_was_published_and_a_document_that_it_was(
    setting: Setting, damage: Damage, watch: bool
) -> None:
    damage.spoil(setting)
    before = names(setting)
    how = ["--watch", "--until", "0"] if watch else []
    command = ["--ckpt-dir", setting.directory / "train", "--out", setting.model, "--incr", "--json", *how]
    ran = export_model(*command)
    new = names(setting) - before
    assert ran.code == damage.code, ran.err
    if damage.code:
        assert (new, ran.out) == (set(), "")
        return
    document = json.loads(ran.out)
    assert Path(document["path"]).name in new
    assert document["position"] == max(int(name.split("-")[1]) for name in new)
    assert bool(document["warnings"]) is bool(damage.warning)
    assert all(damage.warning in warning for warning in document["warnings"]), document["warnings"]
    assert ("warning" in ran.err) is bool(damage.warning)


@pytest.mark.parametrize("watch", [False, True], ids=["once", "watch"])
def test_a_new_base_that_fails_is_told_beside_the_delta_that_is_published(
    setting: Setting, watch: bool
) -> None:
    damage_tensor(setting.base / "variables/variables", "s/users")
    before = names(setting)
    how = ["--watch", "--until", "count=1"] if watch else []
    command = ["--ckpt-dir", setting.directory / "train", "--out", setting.model, "--incr", "--json", *how]
    ran = export_model(*command, "--new-base=merged")
    document = json.loads(ran.out)
    assert Path(document["path"]).name in names(setting) - before
    assert ran.error["message"].startswith(f"{document['path']} is published, but no new base: ")
    assert ran.error["error"] == "NoNewBase"
    assert ran.code == (0 if watch else 1), "a watch goes on; 6 would say that nothing was published"
