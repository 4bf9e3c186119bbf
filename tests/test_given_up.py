"""What another machine began to upload and gave up keeps nobody from merging, whatever bytes it had."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.publish.delta_log import read_log
from tests import test_two_publishers
from tests.support.commands import export_model
from tests.support.logs import Serving, Trainer, assert_same_bits, served_now, values_at
from tests.support.object_stores import Bucket
from tests.support.remote_models import incr, went_on
from tests.test_two_publishers import (  # noqa: F401  fixtures
    BASE,
    Killed,
    counted_writes,
    no_patience,
    trainer,
    url,
    whole,
)


@pytest.mark.parametrize("options", [("--rebase",), ()])
def test_a_merger_that_was_killed_is_made_again_with_other_bytes(
    options: tuple[str, ...],
    trainer: Trainer,  # noqa: F811
    url: str,  # noqa: F811
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(test_two_publishers, "WRITES", (*test_two_publishers.WRITES, "duplicate"))
    command = ("merge", url, *options, "--json")
    shown = f"{BASE}/30/" if options else f"/{10:020d}-{30:020d}/"

    def is_uploading() -> bool:
        return any(shown in key and ".data-" in key for key in bucket.names())

    def before(calls: list[str]) -> bool:
        if is_uploading():
            raise Killed
        return True

    with counted_writes(monkeypatch, before), pytest.raises(Killed):
        export_model(*command, "--task-size", "64B")
    ran = export_model(*command)
    assert ran.code == 0, ran.err
    assert ran.document["position"] == 31
    log = read_log(whole(url, tmp_path / "here"))
    assert_same_bits(values_at(log), served_now(trainer, Serving()))
    assert (log.base.at.position, log.base.at.step) == ((31, 30) if options else (10, 10))
    assert not log.chain(31)
    assert not is_uploading(), "what was given up is removed"
    assert export_model(*command).document["status"] == "nothing_to_do"
    went_on(trainer, 40)
    assert incr(trainer, url).code == 0
    assert_same_bits(values_at(read_log(whole(url, tmp_path / "here"))), served_now(trainer, Serving()))
    assert export_model("merge", url, "--rebase", "--json").document["position"] == 40
