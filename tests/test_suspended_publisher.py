"""A publisher suspended in mid-publication, while others reveal, go on, and remove what it published."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.layout import HEAD_FILE
from exporter.publish.delta_log import read_log
from exporter.storage.objects import ObjectWriter
from exporter.transfer.items import stored_model
from exporter.transfer.push import parse, remove_stored
from tests import test_two_publishers
from tests.support.commands import export_model
from tests.support.logs import Serving, Trainer, assert_same_bits, served_now, values_at
from tests.support.object_stores import Bucket
from tests.support.remote_models import incr, went_on
from tests.test_two_publishers import (  # noqa: F401  fixtures
    BASE,
    counted_writes,
    no_patience,
    trainer,
    url,
    whole,
)

DELTA = f"deltas/{10:020d}/{30:020d}-{40:020d}"


@pytest.mark.parametrize("later", [0, 1])
def test_what_was_removed_meanwhile_does_not_come_back(
    later: int,
    trainer: Trainer,  # noqa: F811
    url: str,  # noqa: F811
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Right before its manifest is shown, and right after."""
    monkeypatch.setattr(test_two_publishers, "WRITES", (*test_two_publishers.WRITES, "copy_if_there"))
    happened = []

    def before(calls: list[str]) -> bool:
        """The head is replaced twice: to reserve, and to commit. What follows shows what is published."""
        if happened:
            return len(happened) > 1
        heads = [number for number, call in enumerate(calls, 1) if call == f"replace {BASE}/{HEAD_FILE}"]
        if len(heads) == 2 and len(calls) == heads[-1] + later:
            happened.append("begun")
            overtakes()
            happened.append("ended")
        return True

    def overtakes() -> None:
        went_on(trainer, 50)
        assert incr(trainer, url).code == 0
        assert export_model("merge", url).code == 0
        store, place = ObjectWriter(parse(url)), parse(url)
        remove_stored(store, place, stored_model(store, place), DELTA)  # as retention does, in its time
        assert not bucket.keys(f"{BASE}/{DELTA}/")

    went_on(trainer, 40)
    with counted_writes(monkeypatch, before):
        ran = incr(trainer, url)
    assert ran.code == 0, ran.err
    assert happened == ["begun", "ended"]
    assert not bucket.keys(f"{BASE}/{DELTA}/")
    log = read_log(whole(url, tmp_path / "here"))
    assert_same_bits(values_at(log), served_now(trainer, Serving()))
