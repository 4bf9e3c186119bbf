"""What takes the room on a model's disk is told, and the proposed command frees what it says."""

from __future__ import annotations

import os
import re
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

from exporter.publish.room import Room
from exporter.publish.versions import version_dirs
from exporter.transfer.pull import pull
from exporter.transfer.push import plan_push, push
from tests.support.commands import export_model
from tests.support.incidents import type_it
from tests.support.logs import Serving
from tests.support.remote_models import incr, published_log, went_on
from tests.support.setting import followed

HOUR = timedelta(hours=1)


def backdated(model: Path) -> None:
    """As if all were published an hour ago: no server loads what was superseded since."""
    for manifest in model.glob("**/manifest.json"):
        created = datetime.now(timezone.utc).replace(microsecond=0) - HOUR
        told = f'"created": "{created.isoformat().replace("+00:00", ".000000Z")}"'
        manifest.write_text(re.sub('"created": "[^"]*"', told, manifest.read_text(), count=1))


def test_old_versions_go_where_the_model_is_published_and_then_here(tmp_path: Path, url: str) -> None:
    trainer, model = followed(tmp_path, serving=Serving(parts=2, cast=True)), tmp_path / "model"
    for step in (20, 30):
        went_on(trainer, step)
        assert incr(trainer, str(model)).code == 0
        assert export_model("merge", model, "--rebase").code == 0
    went_on(trainer, 40)
    assert incr(trainer, str(model)).code == 0
    backdated(model)
    push(plan_push(model, url))
    copy = tmp_path / "copy"
    pull(url, copy)
    for manifest in copy.glob("**/manifest.json"):
        os.utime(manifest, (time.time() - 3600, time.time() - 3600))
    there = Room.of(copy)
    assert (len(there.own), there.deltas) == (3, 3)
    assert there.spare == there.own[0] > 0
    assert "(3 versions, 3 deltas)" in there.text
    assert there.text.endswith(" of it are of 1 old version that no server needs")
    done = type_it(there.command(url), tmp_path)
    assert done.returncode == 0, done.stderr
    pull(url, copy, prune=True)
    assert [each.version for each in version_dirs(copy)] == [40, 30]
    assert Room.of(copy).spare == 0


def test_else_it_is_told_what_other_files_there_are(tmp_path: Path) -> None:
    model = published_log(tmp_path, 20)
    there = Room.of(model)
    assert (len(there.own), there.deltas, there.spare) == (1, 1, 0)
    assert 0 < there.taken <= there.used <= there.size
    assert re.search(
        r"there other files take \S+ \w+, this model \S+ \w+ \(1 version, 1 delta\)$", there.text
    )
    shown = type_it(there.command(model), tmp_path)
    assert (shown.returncode, bool(shown.stdout)) == (0, True), shown.stderr
