"""A model of as many deltas as wanted, without the time that it takes to train and publish them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from exporter.delta.format import span_name
from exporter.layout import HEAD_FILE, MANIFEST_FILE
from exporter.transfer.head import Head
from exporter.transfer.items import local_items
from tests.support.logs import Trainer
from tests.support.setting import FIRST, Setting, followed


def many_deltas(directory: Path, count: int) -> Trainer:
    """A `Setting` with a delta that leads to step 5000, and copies of it that pass for its parts.

    The head is there that a store has. Everything was published a moment ago, so that nothing is removed.
    """
    setting, last = Setting(directory), 5000
    trainer = followed(directory, (last,), published=last)
    (merger,) = setting.deltas
    document = json.loads((merger / MANIFEST_FILE).read_text())
    for start in range(FIRST, FIRST + count):
        part = setting.log / span_name(start, start + 1)
        shutil.copytree(merger, part)
        told = document | {"from_position": start, "position": start + 1}
        (part / MANIFEST_FILE).write_text(json.dumps(told))
    newest = local_items(setting.model)[-1]
    (setting.model / HEAD_FILE).write_bytes(Head(newest.path, newest.digest, holds={}).encoded())
    return trainer
