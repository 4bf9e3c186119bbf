"""A base that begins at the trainer's increments holds what the trainer has then, however tables lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.bundle.variables import write_variables
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.delta.layered_state import LayeredState
from exporter.delta.row_reader import served_in
from exporter.errors import CorruptFile
from exporter.increments.history import identify
from exporter.increments.trained import TrainerVersion
from exporter.options import Updates
from exporter.pipeline.newest_base import merge_increments
from exporter.pipeline.trainer_state import read_trainer
from exporter.publish.delta_log import read_log
from exporter.publish.manifest import BaseEntry
from exporter.storage.layout import VARIABLES_PREFIX
from tests.support.agents import Published, publishing
from tests.support.commands import export_model
from tests.support.logs import Serving, Trainer, served_now


class Base:
    """A full checkpoint as it is staged, two increments later."""

    def __init__(self, directory: Path, trainer: Trainer, serving: Serving) -> None:
        self.trainer, self.serving, self.bundle, self.scratch = (
            trainer,
            serving,
            directory / "1",
            directory / "s",
        )
        trainer.save()
        prefix = trainer.directory / f"model.ckpt-{trainer.step}"
        spec, schema = serving.mapping_spec(), serving.schema()
        write_variables(spec.mapping(read_catalog(prefix)), self.bundle)
        trained = TrainerVersion(identify(prefix, trainer.step))
        self.entry = BaseEntry.of(trainer.step, schema, spec, trained, Updates())
        for _ in range(2):
            trainer.train()
            trainer.increment()
        self.state = read_trainer(prefix, spec, schema, trained)
        self.scratch.mkdir()


@pytest.mark.parametrize("trained_parts", [1, 3])
@pytest.mark.parametrize(
    "serving",
    [Serving(), Serving(parts=2), Serving(cast=True), Serving(dense=frozenset({"items"}))],
    ids=["plain", "in parts", "cast", "read whole"],
)
def test_what_is_served_is_what_is_trained(tmp_path: Path, trained_parts: int, serving: Serving) -> None:
    base = Base(tmp_path, Trainer(tmp_path / "train", trained_parts), serving)
    written = merge_increments(base.entry, base.state, base.bundle, base.scratch)
    assert written == read_catalog(base.bundle / VARIABLES_PREFIX)
    readers = (each for source in base.entry.mapping_spec.sources() for each in served_in(written, source))
    state = LayeredState({each.name: each for each in readers})
    state.check(state.stored)
    for name, value in served_now(base.trainer, serving).items():
        found = state.whole(name)
        assert found.tobytes() == value.tobytes() and found.shape == value.shape, name


def test_a_damaged_checkpoint_is_found_while_it_is_merged(tmp_path: Path) -> None:
    base = Base(tmp_path, Trainer(tmp_path / "train"), Serving())
    staged = read_catalog(base.bundle / VARIABLES_PREFIX)
    extent = staged.tensors["s/users"].extents[0]
    with staged.path_of(extent).open("r+b") as shard:
        shard.seek(extent.offset)
        (byte,) = shard.read(1)
        shard.seek(extent.offset)
        shard.write(bytes([byte ^ 1]))
    with pytest.raises(CorruptFile):
        merge_increments(base.entry, base.state, base.bundle, base.scratch)


@pytest.mark.landing
def test_a_new_log_begins_at_the_increments_in_a_store_as_at_a_path(tmp_path: Path, url: str) -> None:
    local = Published(tmp_path)
    trainer, pulled = local.trainer, tmp_path / "pulled"
    stored = [*publishing(trainer.directory, Path("URL"), local.graph), "--incr"]
    stored[stored.index("URL")] = url
    for _ in range(2):
        assert export_model(*stored).code == 0
        local.publish()
    other = ("--cast", "s/users=bfloat16", "--new-base=if-needed")
    for arguments in (stored, local.arguments()):
        done = export_model(*arguments, *other, "--json")
        assert done.code == 0, done.err
        assert "bytes_rewritten" in done.document, "a base"
    assert export_model("pull", url, pulled).code == 0
    assert read_log(pulled).at.step == read_log(local.model).at.step
    assert export_model("diff", pulled, local.model, "--exit-code").code == 0
    assert export_model("verify", pulled, "--bytes").code == 0


def test_a_new_log_of_a_prefix_begins_at_the_checkpoint_that_is_named(tmp_path: Path) -> None:
    local = Published(tmp_path)
    for _ in range(2):
        local.publish()
    served = read_log(local.model).at
    named = local.trainer.directory / "model.ckpt-10"
    directory = str(local.trainer.directory)
    arguments = [str(named) if word == directory else word for word in local.arguments()]
    done = export_model(*arguments, "--cast", "s/users=bfloat16", "--new-base=if-needed", "--json")
    assert done.code == 0, done.err
    log = read_log(local.model)
    assert (log.at.step, log.at.position) == (10, served.position + 1)
