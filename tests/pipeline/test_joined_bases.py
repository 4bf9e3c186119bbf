"""Bases of many tables by keys, whose indexes lie in three variables: what servers answer after each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.delta.chunk_digest import chunks, served_digests
from exporter.graph.joined_lookups import LEAST
from exporter.options import ExportRequest, Isolation, Updates
from exporter.pipeline.full import Exported, export
from exporter.pipeline.incremental import export_incremental
from exporter.publish.delta_log import read_log
from tests.support.commands import export_model
from tests.support.deeprec_graphs import DeepRecGraph, deeprec_graph
from tests.support.deeprec_logs import DIM, DeepRecTrainer
from tests.support.joined_tables import is_joined
from tests.support.made_again import assert_made_again
from tests.support.publishing import delta_of
from tests.support.updatable import Loaded, loaded_quickly

NAMES = tuple(f"emb/t{number}" for number in range(LEAST))
ABSENT = 0.25


def build(program: DeepRecGraph) -> tuple[dict[str, str], dict[str, str]]:
    """The rows of all tables, whose keys come in one placeholder each, and the ordinary variable."""
    import tensorflow as tf

    v1 = tf.compat.v1
    for number, name in enumerate(NAMES):
        ids = v1.placeholder(tf.int64, [None], name=f"ids_{number}")
        table = program.embedding_variable(
            name, DIM, parts=3 if number == 0 else 0, initializer=ABSENT, default_value_dim=1
        )
        tf.identity(program.embedding_lookup(table, ids), name=f"rows_{number}")
    kernel = v1.get_variable("kernel", [2])
    tf.identity(kernel[None], name="kernel_out")
    numbers = range(len(NAMES))
    outputs = {f"rows_{n}": f"rows_{n}" for n in numbers} | {"kernel": "kernel_out"}
    return {f"ids_{n}": f"ids_{n}" for n in numbers}, outputs


@pytest.fixture
def trainer(tmp_path: Path) -> DeepRecTrainer:
    made = DeepRecTrainer(tmp_path / "train", names=NAMES, parts={NAMES[0]: 3})
    for number, name in enumerate(NAMES):
        made.upsert(name, range(1, 30 * number + 2))
    made.train()
    made.save()
    return made


def request(trainer: DeepRecTrainer, updates: Updates | None, **options: Any) -> ExportRequest:
    meta = trainer.directory.parent / "graph.meta"
    with deeprec_graph() as program:
        inputs, outputs = build(program)
        program.save_meta(meta)
    out = trainer.directory.parent / "model"
    given = {"model": str(meta), "inputs": inputs, "outputs": outputs, "updates": updates, **options}
    return ExportRequest(trainer.directory, out, **given)


def assert_serves(server: Loaded, trainer: DeepRecTrainer) -> None:
    """Every key that was ever there, and its neighbours, of which each table is asked others."""
    feeds, expected = {}, {}
    absent = np.full(DIM, ABSENT, np.float32).tobytes()
    for number, name in enumerate(NAMES):
        ever = {key for state in trainer.saved.values() for key in state[0][name]} | {*trainer.tables[name]}
        keys = np.array(sorted(ever), np.int64)[number % 3 :]
        keys = np.concatenate([keys, keys + 1, [0, -1, 2**63 - 1, -(2**63)]])
        feeds[f"ids_{number}"] = keys
        expected[f"rows_{number}"] = b"".join(trainer.tables[name].get(key, absent) for key in keys.tolist())
    found = server.predict(**feeds)
    for output, rows in expected.items():
        assert found[output].tobytes() == rows, output
    assert (found["kernel"] == trainer.kernel).all()


def assert_digests(server: Loaded, model: Path) -> None:
    log = read_log(model)
    every = list(chunks(log.schema))
    found = server.call("incremental_digest", rows=np.arange(len(every)))
    assert [int(each) for each in found["digest"]] == served_digests(log.schema, log.state(), every)


@pytest.mark.landing
@pytest.mark.parametrize("isolation", [*Isolation])
def test_deepreces_tables_through_a_logs_life(trainer: DeepRecTrainer, isolation: Isolation) -> None:
    asked = request(trainer, Updates(stamp=True, digest=True, isolation=isolation))
    base = export_incremental(asked)
    assert isinstance(base, Exported)
    assert is_joined(base.published.path)
    first = trainer.now(), trainer.kernel
    with loaded_quickly(base.published.path) as server:
        assert_serves(server, trainer)
        trainer.train(60)
        trainer.increment()
        delta_of(asked)
        server.update()
        assert_serves(server, trainer)
        assert_digests(server, asked.out)
        trainer.train(60)
        for name in NAMES:
            trainer.evict(name, [*trainer.tables[name]][::5])
        trainer.save()
        delta_of(asked)
        server.update()
        assert_serves(server, trainer)
        assert_digests(server, asked.out)
        newest = trainer.tables, trainer.kernel
        assert export_model("rollback", asked.out, "--to", str(base.published.version)).code == 0
        server.update()
        trainer.tables, trainer.kernel = first
        assert_serves(server, trainer)
        assert export_model("resume", asked.out).code == 0
        server.update()
        trainer.tables, trainer.kernel = newest
        assert_serves(server, trainer)
        assert_digests(server, asked.out)
        assert export_model("merge", asked.out).code == 0
        ran = export_model("merge", asked.out, "--rebase")
        assert ran.code == 0, ran.err
        rebased = read_log(asked.out).base.path
        assert_made_again(rebased)
        assert is_joined(rebased)
        with loaded_quickly(rebased) as anew:
            assert_serves(anew, trainer)
            trainer.train(30)
            trainer.increment()
            delta_of(asked)
            for each in (server, anew):
                each.update()
                assert_serves(each, trainer)
                assert_digests(each, asked.out)
        # More keys than one table has room for: a new log, in which its index is larger.
        trainer.step += 1
        trainer.upsert(NAMES[2], range(10_000, 13_000))
        trainer.increment()
        grown = export_incremental(asked, is_watching=True)
        assert isinstance(grown, Exported)
    with loaded_quickly(grown.published.path) as server:
        assert_serves(server, trainer)
        trainer.train(60)
        trainer.increment()
        delta_of(asked)
        server.update()
        assert_serves(server, trainer)
        assert_digests(server, asked.out)
    ran = export_model("verify", asked.out, "--bytes")
    assert ran.code == 0, ran.err


@pytest.mark.landing
def test_a_versions_graph_in_a_base(trainer: DeepRecTrainer) -> None:
    """A plain version of few keys, and a base of more that is made with its graph, and takes deltas."""
    version = export(request(trainer, None)).published.path
    assert is_joined(version)
    trainer.upsert(NAMES[3], range(10_000, 13_000))
    trainer.train(60)
    trainer.save()
    out = trainer.directory.parent / "updatable"
    asked = ExportRequest(trainer.directory, out, model=str(version), updates=Updates(digest=True))
    base = export_incremental(asked)
    assert isinstance(base, Exported)
    assert is_joined(base.published.path)
    with loaded_quickly(base.published.path) as server:
        assert_serves(server, trainer)
        trainer.train(60)
        trainer.evict(NAMES[3], [*trainer.tables[NAMES[3]]][::5])
        trainer.save()
        delta_of(asked)
        server.update()
        assert_serves(server, trainer)
        assert_digests(server, out)
