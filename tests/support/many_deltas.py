"""A model of as many deltas as wanted, without the time that it takes to train and publish them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from exporter.delta.format import span_name
from exporter.delta.spans import FANOUT, Span
from exporter.storage.layout import HEAD_FILE, MANIFEST_FILE
from exporter.transfer.head import Head
from exporter.transfer.items import local_items
from tests.support.logs import Trainer
from tests.support.setting import FIRST, Setting, followed

LAST = 5000


def many_deltas(directory: Path, count: int) -> Trainer:
    """A `Setting` with a delta that leads to step 5000, and copies of it that pass for its parts.

    The head is there that a store has. Everything was published a moment ago, so that nothing is removed.
    """
    trainer = followed(directory, (LAST,), published=LAST)
    _copy(Setting(directory), (Span(start, start + 1) for start in range(FIRST, FIRST + count)))
    return trainer


def merged_deltas(directory: Path, count: int) -> Trainer:
    """As `many_deltas`: the newest ones, all that merging made of them, and one for what was before."""
    setting, before = Setting(directory), LAST - count
    trainer = followed(directory, (LAST,), published=LAST)
    (whole,) = setting.deltas
    sizes = [FANOUT**power for power in range(5) if FANOUT**power <= count]
    spans = [
        Span(start, start + size, merged_count=size)
        for size in sizes
        for start in range(before, LAST - size + 1, size)
    ]
    _copy(setting, (Span(FIRST, before, merged_count=FANOUT * sizes[-1]), *spans))
    shutil.rmtree(whole)
    _put_head(setting)
    return trainer


def _copy(setting: Setting, spans: Iterable[Span]) -> None:
    """Let copies of the model's delta pass for these."""
    (whole,) = setting.deltas
    document = json.loads((whole / MANIFEST_FILE).read_text())
    for span in spans:
        path = setting.log / span_name(span.start, span.end)
        shutil.copytree(whole, path)
        told = document | {"from_position": span.start, "position": span.end}
        told["incremental"] = document["incremental"] | {"parts": span.merged_count}
        (path / MANIFEST_FILE).write_text(json.dumps(told))
    _put_head(setting)


def _put_head(setting: Setting) -> None:
    newest = local_items(setting.model)[-1]
    (setting.model / HEAD_FILE).write_bytes(Head(newest.path, newest.digest, holds={}).encoded())
