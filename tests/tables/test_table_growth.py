"""A full dynamic table begins a new log by itself, and no server goes back to an earlier step for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from exporter.errors import CheckpointError, TableFull
from exporter.options import ExportRequest, Updates
from exporter.pipeline.full import Exported
from exporter.pipeline.incremental import export_incremental
from exporter.pipeline.watch_loop import is_for_a_person
from exporter.publish.delta_log import read_log
from exporter.tables.geometry import keys_of
from serving.client import ModelClient
from tests.support.agents import Server, agent, process, wait
from tests.support.commands import export_model
from tests.support.deeprec_logs import DeepRecTrainer, served
from tests.support.logs import damage_tensor
from tests.support.publishing import delta_of
from tests.support.served_tables import DEFAULTS, assert_serves, request, trained
from tests.support.updatable import loaded_quickly


@pytest.fixture
def trainer(tmp_path: Path) -> DeepRecTrainer:
    return trained(tmp_path / "train")


BUILDER = """
import tensorflow as tf

from exporter.tables import DynamicTable


def model():
    user, item = (tf.compat.v1.placeholder(tf.int64, [None], name=name) for name in ("user", "item"))
    users, items = DynamicTable("emb/user", 3).lookup(user), DynamicTable("item", 3).lookup(item)
    kernel = tf.compat.v1.get_variable("kernel", [2], use_resource=True)
    return {"user": user, "item": item}, {"users": users, "items": items, "kernel": kernel[None]}
"""


def begin(trainer: DeepRecTrainer, **options: object) -> ExportRequest:
    """Publish a base, and a delta beyond its checkpoint."""
    told = request(trainer, **options)
    export_incremental(told)
    trainer.train()
    trainer.increment()
    delta_of(told)
    return told


def crowd(trainer: DeepRecTrainer, first: int = 10_000) -> Path:
    """An increment with more new keys than there is room for."""
    trainer.step += 1
    trainer.upsert("item", range(first, first + 3_000))
    trainer.kernel = np.array([3, 4], np.float32)
    return trainer.increment()


@pytest.mark.landing
@pytest.mark.parametrize("casts", [(), ("item/values=bfloat16",)])
def test_the_new_base_of_a_watch_holds_the_increments(
    trainer: DeepRecTrainer, casts: tuple[str, ...]
) -> None:
    told = begin(trainer, casts=casts)
    crowd(trainer)
    based = export_incremental(told, is_watching=True)
    assert isinstance(based, Exported)
    assert based.published.manifest.step == trainer.step
    assert based.variables.bytes_linked == 0 < based.variables.bytes_rewritten
    log = read_log(told.out)
    assert (log.at, log.deltas) == (log.base.at, ())
    if not casts:
        assert served(log, defaults=DEFAULTS) == trainer.now()
    with loaded_quickly(based.published.path) as server:
        if not casts:
            assert_serves(server, trainer)
        assert export_incremental(told, is_watching=True).published is None, "all of it is published"
        trainer.train()
        trainer.increment()
        delta = delta_of(told)
        assert delta.compared_bytes == 0, "the increment tells what is new"
        assert server.update()["position"] == delta.at.position
        if not casts:
            assert_serves(server, trainer)
    verified = export_model("verify", told.out)
    assert verified.code == 0, verified.err


@pytest.mark.landing
def test_a_new_base_for_another_reason_holds_the_increments(trainer: DeepRecTrainer) -> None:
    told = replace(begin(trainer), updates=Updates(stamp=True, digest=True))
    based = export_incremental(told, full_on_mismatch=True)
    assert isinstance(based, Exported)
    assert (based.published.manifest.step, read_log(told.out).deltas) == (trainer.step, ())
    with loaded_quickly(based.published.path) as server:
        assert_serves(server, trainer)


def test_nothing_is_laid_over_a_base_that_leads_nobody_back(trainer: DeepRecTrainer) -> None:
    told = request(trainer)
    export_incremental(told)
    crowd(trainer)
    based = export_incremental(told, is_watching=True)
    assert isinstance(based, Exported)
    assert based.published.manifest.step == 10
    assert based.variables.bytes_linked, "its delta comes next"
    delta_of(told, is_watching=True)
    assert served(read_log(told.out), defaults=DEFAULTS) == trainer.now()


def test_a_damaged_increment_is_in_no_base(trainer: DeepRecTrainer) -> None:
    told = replace(begin(trainer), updates=Updates(stamp=True, digest=True))
    before = read_log(told.out).at
    trainer.train()
    damage_tensor(trainer.increment(), "item-sparse_incr_values")
    with pytest.raises(CheckpointError, match="checksum"):
        export_incremental(told, full_on_mismatch=True)
    assert read_log(told.out).at == before
    assert not list(told.out.glob(".staging*"))


def test_keys_that_were_made_to_collide_end_a_watch(trainer: DeepRecTrainer) -> None:
    """No base has room for them, so none is published, again and again, for the sake of it."""
    told = begin(trainer)
    log = read_log(told.out)
    trainer.step += 1
    trainer.upsert("item", keys_of(np.arange(200, dtype=np.uint64)).tolist())
    trainer.increment()
    for _ in range(2):
        with pytest.raises(TableFull, match="200 of a table's keys fall in one place") as refused:
            export_incremental(told, is_watching=True)
        assert "made to collide" in refused.value.hint
        assert "table 'item' is full" in refused.value.message
    assert read_log(told.out).at == log.at
    trainer.save()
    with pytest.raises(TableFull, match=r"'item'.* fall in one place"):
        export_incremental(told, is_watching=True)
    assert (read_log(told.out).at, is_for_a_person(refused.value)) == (log.at, True)
    assert not list(told.out.glob(".staging*"))


@contextmanager
def asking(address: str) -> Iterator[list[int]]:
    """The steps that a server's answers are of, in their order, while others work."""
    steps: list[int] = []
    done = threading.Event()

    def ask() -> None:
        with ModelClient(address, "model") as client:
            while not done.is_set():
                answer = client.predict({"user": [1], "item": [1]}, outputs=["model_step"])
                steps.append(int(np.ravel(answer.outputs["model_step"])[0]))
                done.wait(0.01)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield steps
    finally:
        done.set()
        thread.join()


@pytest.mark.landing
def test_no_replica_goes_back_while_tables_grow(trainer: DeepRecTrainer, tmp_path: Path) -> None:
    """A watch, two servers and an agent, over two new bases: the steps that are answered only rise."""
    builder = tmp_path / "builder.py"
    builder.write_text(BUILDER)
    told = begin(trainer, model=f"{builder}:model")
    options = ("--ckpt-dir", trainer.directory, "--model", f"{builder}:model", "--out", told.out)
    with ExitStack() as stack:
        servers = [Server(told.out, stack=stack).start() for _ in range(2)]
        watch = (*options, "--incr", "--watch", "--interval", "0.05", "--add=stamp")
        watching = stack.enter_context(process(*watch, module="exporter"))
        stack.enter_context(agent(told.out, *(server.address for server in servers)))
        seen = [stack.enter_context(asking(server.address)) for server in servers]
        for number in range(2):
            crowd(trainer, 10_000 * (number + 1))
            wait(lambda: watching.poll() is not None or all(trainer.step in steps[-1:] for steps in seen))
            trainer.train()
            trainer.increment()
            wait(lambda: watching.poll() is not None or all(trainer.step in steps[-1:] for steps in seen))
        assert watching.poll() is None
        assert len([child for child in told.out.iterdir() if child.name.isdecimal()]) == 3
    for steps in seen:
        assert steps == sorted(steps)
    assert served(read_log(told.out), defaults=DEFAULTS) == trainer.now()
