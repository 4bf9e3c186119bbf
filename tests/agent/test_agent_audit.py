"""An audit tells what a server really holds: rounded, filtered and partitioned rows, restarts, moves."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from msgspec import structs

from exporter.delta.chunk_digest import Chunk, chunks
from exporter.errors import CallFailed
from exporter.options import DeltaDtype, ExportRequest, Updates
from exporter.pipeline import log_maintenance
from exporter.pipeline.incremental import export_incremental
from exporter.publish.delta_log import read_log
from serving.agent.audit import Audited, audit
from serving.agent.rollout import Audit
from serving.client import ModelClient
from serving.server import ModelServer
from serving.server_options import ServerOptions
from serving.updates import read_incremental_status, update
from tests.support.numpy_trainer import NumpyTrainer

PARTITIONED = """
import tensorflow as tf

tf1 = tf.compat.v1

def serving():
    user = tf1.placeholder(tf.int64, [None], name="user")
    with tf1.variable_scope("net", use_resource=True):
        parts = tf1.fixed_size_partitioner(3)
        users = tf1.get_variable("users", [23, 3], partitioner=parts)
        items = tf1.get_variable("items", [10, 2])
        kernel, scale = tf1.get_variable("kernel", [3, 4]), tf1.get_variable("scale", [])
    rows = tf1.nn.embedding_lookup(users, user, partition_strategy="div")
    dense = kernel * scale + 0 * rows[0, 0]
    return {"user": user}, {"rows": rows, "item": tf.gather(items, user % 10), "dense": dense}
"""
MOST = 1000


class World:
    """A trainer whose deltas are published, as a caller likes, and a server that is asked."""

    def __init__(self, directory: Path) -> None:
        (directory / "model.py").write_text(PARTITIONED)
        self.trainer = NumpyTrainer(directory / "train", 3)
        self.trainer.begin(restores=False, saver_first=False, is_live=False)
        self.request = ExportRequest(
            directory / "train",
            directory / "ranker",
            model=f"{directory}/model.py:serving",
            updates=Updates(digest=True),
        )
        export_incremental(self.request)

    @property
    def model(self) -> Path:
        return self.request.out

    def publish(self, **how: object) -> None:
        self.trainer.train()
        self.trainer.increment()
        done = export_incremental(structs.replace(self.request, updates=None, **how))
        assert done.published is not None

    def server(self) -> ModelServer:
        return ModelServer(self.model, name="ranker", options=ServerOptions(poll_seconds=0.05))

    def audit(self, client: ModelClient) -> Audited:
        """Of all chunks, at the position where the server stands now."""
        log = read_log(self.model)
        at = position_of(client, log.base.at.position)
        return audit(client, self.model, Audit(log.base.at.position, log.lineage, at), MOST)


def position_of(client: ModelClient, version: int) -> int:
    found = read_incremental_status(client, version)
    assert found is not None
    return found.position


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


HOW: dict[str, dict[str, object]] = {
    "exact": {},
    "bfloat16": {"delta_dtype": DeltaDtype.BFLOAT16},
    "int8": {"delta_dtype": DeltaDtype.INT8},
    "filtered": {"min_change": 0.7},
    "filtered and rounded": {"min_change": 0.7, "delta_dtype": DeltaDtype.INT8},
}


@pytest.mark.landing
def test_what_is_served_is_what_the_files_say_however_deltas_were_made(world: World) -> None:
    """At each position on the way, of partitions too, and after a merger, a rollback and a resumption."""
    with world.server() as server, ModelClient(server.address, "ranker") as client:
        server.wait_available(60)

        def is_right() -> None:
            found = world.audit(client)
            assert (found.skipped, found.differing) == ("", ())
            assert found.chunks >= 6, "three partitions, a table, two dense variables"

        is_right()
        for how in (*HOW.values(), HOW["int8"], HOW["exact"]):
            world.publish(**how)
            update(client)
            is_right()
        behind = position_of(client, read_log(world.model).base.at.position)
        for how in HOW.values():
            world.publish(**how)
        log_maintenance.merge(world.model)
        is_right()  # where it stood, though a merger leads past it
        update(client)
        is_right()
        log_maintenance.rollback(world.model, behind)
        update(client)
        is_right()
        log_maintenance.resume(world.model)
        update(client)
        is_right()
        with world.server() as restarted, ModelClient(restarted.address, "ranker") as other:
            restarted.wait_available(60)
            found = world.audit(other)
            assert (found.skipped, found.differing) == ("", ()), "it came by the merger, not by its parts"


@pytest.mark.landing
def test_a_server_that_moves_or_restarts_meanwhile_is_never_called_wrong(world: World) -> None:
    """Positions change between the reading of the files, the calls, and the chunks."""
    stop, audits, problems = threading.Event(), [], []
    server = world.server()
    server.wait_available(60)

    def keep_auditing() -> None:
        while not stop.is_set():
            try:
                with ModelClient(server.address, "ranker", deadline_s=5.0) as client:
                    audits.append(world.audit(client))
            except CallFailed as error:
                problems.append(error)

    thread = threading.Thread(target=keep_auditing)
    thread.start()
    try:
        for round_ in range(3):
            for how in HOW.values():
                world.publish(**how)
                with ModelClient(server.address, "ranker") as client:
                    update(client)
            if round_ == 1:
                log_maintenance.merge(world.model)
                server.stop()
                server = world.server()
                server.wait_available(60)
        seen = len(audits)
        while len(audits) < seen + 3:
            stop.wait(0.05)
    finally:
        stop.set()
        thread.join(60)
        server.stop()
    assert not [found for found in audits if found.differing]
    assert [found for found in audits if found.chunks]
    assert {problem.code for problem in problems} <= {
        "UNAVAILABLE",
        "CANCELLED",
        "NOT_FOUND",
        "DEADLINE_EXCEEDED",
    }


def test_what_differed_before_is_compared_again_whatever_else_is_drawn(world: World) -> None:
    with world.server() as server, ModelClient(server.address, "ranker") as client:
        server.wait_available(60)
        log = read_log(world.model)
        every = list(chunks(log.schema))
        action = Audit(log.base.at.position, log.lineage, log.at.position)
        assert audit(client, world.model, action, 1).chunks == 1
        assert audit(client, world.model, action, 0, every).chunks == len(every)
        assert audit(client, world.model, action, MOST, every[:2]).chunks == len(every), "none is asked twice"
        gone = Chunk("of another schema", 0, 1)
        assert audit(client, world.model, action, 1, (gone,)).chunks == 1
