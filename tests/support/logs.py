"""A trainer and a log without TensorFlow: checkpoints and increments by our writers, a base without a
graph."""

from __future__ import annotations

import math
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from exporter.bundle.variables import write_variables
from exporter.catalog import SliceSpec
from exporter.checkpoint.tensor_bundle import BundleWriter, read_array, read_catalog
from exporter.delta.format import ChangeKind, Schema, ServedVariable, log_name
from exporter.graph.inference_graph import GraphVariable, PartitionStrategy
from exporter.increments.history import CheckpointMarker, identify, read_history
from exporter.increments.increment import Changed, CheckpointId, Contents, Increment
from exporter.increments.trained import TrainerVersion
from exporter.mapping.mapping_rules import CastRule, MappingRules, RenameRule
from exporter.mapping.mapping_spec import MappingSpec, RulesDocument, VariableDocument
from exporter.options import ExportRequest, Updates
from exporter.pipeline.merged_base import FIRST_POSITION
from exporter.publish.commit import PublishedVersion, Staging, publish_version, reserve_position
from exporter.publish.delta_log import DeltaLog
from exporter.publish.manifest import BaseEntry, ManifestDraft, Origin, tensor_entries
from exporter.storage.layout import DEEPREC_INCREMENTS_DIRECTORY, HOLD_DOCUMENT_FILE, UPDATABLE_FILE
from exporter.subgraph.make_updatable import UPDATE_SIGNATURE
from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.tensor_proto import fill
from tests.support.increments import note, publish

Values = Mapping[str, np.ndarray]
TABLES = {"users": (23, 3), "items": (10, 2)}
DENSE = {"kernel": (3, 4), "scale": ()}


def boxes(shape: tuple[int, ...], parts: int) -> list[SliceSpec]:
    """Contiguous ranges of rows, the first ones longer: what `fixed_size_partitioner` makes, and `mod`
    needs."""
    lengths = [len(range(part, shape[0], parts)) for part in range(parts)]
    starts = np.cumsum([0, *lengths]).tolist()
    rest = (0,) * (len(shape) - 1)
    return [SliceSpec(shape, (s, *rest), (n, *shape[1:])) for s, n in zip(starts, lengths, strict=False)]


@dataclass
class Trainer:
    """Values by the trainer's own names, and the files that a trainer leaves.

    `parts` is in how many `mod` partitions tables are stored; 1 is whole.
    """

    directory: Path
    parts: int = 1
    seed: int = 0
    step: int = 10
    values: dict[str, np.ndarray] = field(default_factory=dict)
    touched: dict[str, set[int]] = field(default_factory=dict)
    run: str = field(default_factory=lambda: secrets.token_hex(16))
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    parent: str | CheckpointId | None = None
    parent_step: int = 0
    generation: int = 1
    saved: dict[CheckpointId, dict[str, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.directory.mkdir(parents=True, exist_ok=True)
        for name, shape in {**TABLES, **DENSE}.items():
            self.values[f"net/{name}"] = self.rng.normal(size=shape).astype(np.float32)
            self.values[f"net/{name}/average"] = self.rng.normal(size=shape).astype(np.float32)
            if shape:
                self.values[f"net/{name}/Adagrad"] = self.rng.normal(size=shape).astype(np.float32)

    def train(self, rows: int = 4) -> None:
        """Change some rows of every table and the dense variables; bit patterns that compare oddly
        included."""
        self.step += int(self.rng.integers(1, 4))
        for name, value in self.values.items():
            new = value.copy()
            if name.split("/")[1] in TABLES:
                ids = self.rng.choice(len(value), min(rows, len(value)), replace=False)
                new[ids] = self.rng.choice(
                    [0.0, -0.0, np.nan, 1.5, float(self.rng.normal())], size=(len(ids), value.shape[1])
                )
                self.touched.setdefault(name, set()).update(ids.tolist())
            elif self.rng.random() < 0.5:
                new = self.rng.normal(size=value.shape).astype(np.float32)
                self.touched.setdefault(name, set())
            self.values[name] = new

    def save(self, *, is_equal: bool = False) -> CheckpointId:
        """A full checkpoint of now."""
        prefix = self.directory / f"model.ckpt-{self.step}"
        self.write(prefix)
        (self.directory / "checkpoint").write_text(f'model_checkpoint_path: "{prefix.name}"\n')
        saved = identify(prefix, self.step)
        self.saved[saved] = dict(self.values)
        if isinstance(self.parent, str):
            marker = CheckpointMarker(
                checkpoint=saved, run=self.run, after=self.parent, is_equal=is_equal, session=self.session
            )
            note(self.directory, marker)
        else:  # increments lead on from the last checkpoint before the first of them
            self.parent, self.parent_step, self.touched = saved, self.step, {}
        return saved

    def write(self, prefix: Path) -> None:
        """A bundle of the values of now, as the trainer partitions them."""
        with BundleWriter(prefix) as writer:
            writer.add("global_step", np.array(self.step, np.int64))
            for name, value in self.values.items():
                if self.is_table(name) and self.parts > 1:
                    for box in boxes(value.shape, self.parts):
                        rows = slice(box.starts[0], box.starts[0] + box.lengths[0])
                        writer.add(name, value[rows], box)
                else:
                    writer.add(name, value)

    def increment(self) -> None:
        """Everything touched since the last increment."""
        assert self.parent is not None
        if not self.touched or self.step <= self.parent_step:
            return
        draft = Increment(
            id=secrets.token_hex(16),
            run=self.run,
            session=self.session,
            generation=self.generation,
            parent=self.parent,
            from_step=self.parent_step,
            to_step=self.step,
            variables=(),
        )
        publish(self.directory, draft, self._fill)
        self.parent, self.parent_step, self.touched = draft.id, self.step, {}

    def go_back(self, to: CheckpointId) -> None:
        """Restart from an older full checkpoint, as another run, which saves what it restored."""
        self.values = dict(self.saved[to])
        self.step, self.touched = to.step, {}
        self.run, self.session, self.parent = secrets.token_hex(16), secrets.token_hex(16), None
        self.generation = read_history(self.directory).generation + 1
        self.save()

    def repartition(self, parts: int) -> None:
        """Restart with tables in another number of parts, which moves rows under `mod`: a run of its own."""
        self.parts, self.step = parts, self.step + 1
        self.run, self.session, self.parent = secrets.token_hex(16), secrets.token_hex(16), None
        self.generation = read_history(self.directory).generation + 1
        self.save()

    def is_table(self, name: str) -> bool:
        return name.split("/")[1] in TABLES

    def _fill(self, writer: BundleWriter) -> Contents:
        changed = []
        for name, rows in sorted(self.touched.items()):
            kind = ChangeKind.TABLE if self.is_table(name) else ChangeKind.DENSE
            variable = ServedVariable(name, DType.FLOAT, self.values[name].shape, kind)
            if kind is ChangeKind.TABLE:
                ids = np.array(sorted(rows), np.int64)
                writer.add(variable.keys[0], ids)
                writer.add(variable.keys[1], self.values[name][ids])
            else:
                writer.add(variable.keys[0], self.values[name][np.newaxis, ...])
            changed.append(Changed(variable, max(1, len(rows))))
        return Contents(tuple(changed))


@dataclass(frozen=True)
class Serving:
    """How the model is served: tables in so many `mod` parts, averages or raw values, tables cast or not.

    `dense` names tables that the graph reads as a whole.
    """

    parts: int = 1
    average: bool = False
    cast: bool = False
    dense: frozenset[str] = frozenset()

    def mapping_spec(self) -> MappingSpec:
        strategies = {f"s/{name}": PartitionStrategy.MOD for name in TABLES}
        trained = {f"net/{name}": PartitionStrategy.MOD for name in TABLES}
        rules = MappingRules(
            renames=(RenameRule.parse(r"s/(.*)=net/\1"),),
            average="average" if self.average else None,
            casts=(CastRule.parse("s/(users|items)=bfloat16"),) if self.cast else (),
            trained=trained,
        )
        variables = tuple(map(VariableDocument.of, self._variables()))
        return MappingSpec(
            variables,
            strategies,
            RulesDocument.of(rules),
            renamed={v.key: new for v in variables if (new := rules.renamed(v.key))},
            dtypes={v.key: cast.label for v in variables if (cast := rules.cast(v.key))},
        )

    def schema(self) -> Schema:
        mapping_spec = self.mapping_spec()
        dtypes = {source.key: source.dtype for source in mapping_spec.sources()}
        return Schema.of(
            ServedVariable(v.served_name, dtypes[v.key], v.shape, self._kind(v))
            for v in mapping_spec.variables
        )

    def _variables(self) -> list[GraphVariable]:
        found = []
        for name, shape in TABLES.items():
            parts = boxes(shape, self.parts) if self.parts > 1 else [None]
            for number, box in enumerate(parts):
                own = box.lengths if box else shape
                found.append(GraphVariable(f"s/{name}/{number}", f"s/{name}", DType.FLOAT, own, box))
        return found + [GraphVariable(f"s/{n}", f"s/{n}", DType.FLOAT, s) for n, s in DENSE.items()]

    def _kind(self, variable: GraphVariable) -> ChangeKind:
        name = variable.key.removeprefix("s/")
        return ChangeKind.TABLE if name in TABLES and name not in self.dense else ChangeKind.DENSE


def publish_base(trainer: Trainer, serving: Serving, model: Path) -> PublishedVersion:
    """What `--incr` does the first time, but for the graph, of which only what `rebase` changes is there."""
    mapping_spec, prefix = serving.mapping_spec(), trainer.directory / f"model.ckpt-{trainer.step}"
    catalog = read_catalog(prefix)
    place, lineage = reserve_position(model, catalog.step), secrets.token_hex(16)
    with Staging(model) as staging:
        report = write_variables(mapping_spec.mapping(catalog), staging.path)
        write_graph(staging.path, place.position, catalog.step or 0, lineage)
        draft = ManifestDraft(
            tensors=tensor_entries(report.catalog),
            source=Origin.of(prefix),
            exporter="0",
            step=catalog.step,
            lineage=lineage,
            incremental=BaseEntry.of(
                place.position,
                serving.schema(),
                mapping_spec,
                TrainerVersion(identify(prefix, catalog.step or 0)),
                Updates(),
            ),
        )
        return publish_version(staging, draft, place)


def write_graph(bundle: Path, position: int, step: int, lineage: str) -> None:
    saved_model = protos.SavedModel(saved_model_schema_version=1)
    meta_graph = saved_model.meta_graphs.add()
    meta_graph.meta_info_def.tags.append("serve")
    meta_graph.signature_def[UPDATE_SIGNATURE].outputs["position"].name = "incremental/position:0"
    node = meta_graph.graph_def.node.add(name=f"incremental/{FIRST_POSITION}", op="Const")
    fill(node.attr["value"].tensor, np.array([position, step, -1], np.int64))
    for name, text in (("log", log_name(position)), ("lineage", lineage)):
        node = meta_graph.graph_def.node.add(name=f"incremental/{name}", op="Const")
        fill(node.attr["value"].tensor, np.asarray(text, object))
    (bundle / "saved_model.pb").write_bytes(saved_model.SerializeToString())
    (bundle / UPDATABLE_FILE).parent.mkdir()
    (bundle / UPDATABLE_FILE).write_text("{}")


def request(trainer: Trainer, model: Path) -> ExportRequest:
    return ExportRequest(ckpt_dir=trainer.directory, out=model)


def served_now(trainer: Trainer, serving: Serving) -> dict[str, np.ndarray]:
    """What a full export of the trainer's values of now would serve, by another way than comparison goes."""
    with tempfile.TemporaryDirectory() as scratch:
        trainer.write(Path(scratch) / "now-1")
        mapping = serving.mapping_spec().mapping(read_catalog(Path(scratch) / "now-1"))
        catalog = write_variables(mapping, Path(scratch) / "bundle").catalog
        found = {}
        for variable in serving.mapping_spec().variables:
            value = read_array(catalog, catalog.tensors[variable.key])
            if variable.part is not None:
                first, count = variable.part.starts[0], variable.part.lengths[0]
                value = value[first : first + count]
            found[variable.served_name] = value
        return found


def values_at(log: DeltaLog, position: int | None = None) -> dict[str, np.ndarray]:
    state = log.state(position)
    return {
        v.name: state.rows(v.name, 0, v.shape[0]) if v.kind is ChangeKind.TABLE else state.whole(v.name)
        for v in log.schema.variables
    }


def damage_tensor(prefix: Path, name: str) -> None:
    """Flip one bit of a tensor's first value in a bundle; the index still tells of the right one."""
    catalog = read_catalog(prefix)
    ref = catalog.tensors[name]
    extent = next(extent for extent in ref.extents if extent.size)
    path = catalog.path_of(extent)
    content = bytearray(path.read_bytes())
    content[extent.offset] ^= 1
    path.unlink()  # it may be a link to the trainer's own
    path.write_bytes(content)


def assert_same_bits(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        differing = np.flatnonzero(
            np.frombuffer(found[name].tobytes(), np.uint8) != np.frombuffer(value.tobytes(), np.uint8)
        )
        assert not len(differing), f"{name}: {len(differing)} of {math.prod(value.shape)} values differ"


def set_hold(log: DeltaLog, position: int | None) -> None:
    """Hold the log at a position, or with None no more, as a person would with an editor."""
    (log.path / HOLD_DOCUMENT_FILE).unlink(missing_ok=True)
    if position is None:
        log.hold.path.unlink(missing_ok=True)
    else:
        log.path.mkdir(parents=True, exist_ok=True)
        log.hold.path.write_text(f"{position}\n")


def save_increment(trainer: Trainer, *, keys: type = np.int64) -> Path:
    """Everything since the last full save; rows in the order in which a hash table might give them."""
    prefix = trainer.directory / DEEPREC_INCREMENTS_DIRECTORY / f"incremental_model.ckpt-{trainer.step}"
    prefix.parent.mkdir(exist_ok=True)
    with BundleWriter(prefix) as writer:
        writer.add("global_step", np.array(trainer.step, np.int64))
        for name, value in trainer.values.items():
            if not trainer.is_table(name):
                writer.add(name, value)
            elif trainer.touched.get(name):
                save_rows(writer, trainer, name, np.array(list(trainer.touched[name]), np.int64), keys)
    return prefix


def save_rows(writer: BundleWriter, trainer: Trainer, name: str, ids: np.ndarray, keys: type) -> None:
    value = trainer.values[name]
    parts = boxes(value.shape, trainer.parts) if trainer.parts > 1 else [None]
    for number, box in enumerate(parts):
        start, count = (box.starts[0], box.lengths[0]) if box else (0, len(value))
        local = ids[(ids >= start) & (ids < start + count)] - start
        prefix = f"{name}/part_{number}" if box else name
        writer.add(f"{prefix}-sparse_incr_keys", local.astype(keys))
        writer.add(f"{prefix}-sparse_incr_values", value[local + start])
