"""A DeepRec trainer and a log of its tables without TensorFlow; a base without a graph, as in `logs`."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from exporter.bundle.variables import write_variables
from exporter.checkpoint.admission import Admission
from exporter.checkpoint.tensor_bundle import BundleWriter, read_catalog
from exporter.delta.format import ChangeKind, Schema, ServedVariable
from exporter.delta.table_changes import ServedTable
from exporter.graph.inference_graph import GraphVariable, InferenceGraph
from exporter.increments.history import identify
from exporter.increments.trained import TrainerVersion
from exporter.mapping.build import build_mapping
from exporter.mapping.mapping_rules import CastRule, MappingRules
from exporter.mapping.mapping_spec import DynamicTable, MappingSpec, RulesDocument, VariableDocument
from exporter.options import ExportRequest, Updates
from exporter.publish.commit import PublishedVersion, Staging, publish_version, reserve_position
from exporter.publish.delta_log import DeltaLog
from exporter.publish.manifest import BaseEntry, ManifestDraft, Origin, tensor_entries
from exporter.tables.geometry import TableGeometry
from exporter.tables.parts import PARTS
from exporter.wire.dtypes import DType
from tests.support.deeprec import Ev, write_full, write_increment
from tests.support.dynamic_values import built_index
from tests.support.logs import write_graph

Row = bytes
Table = dict[int, Row]
"""A table as a Python dict: the bytes of each key's row."""

DEFAULT = np.full((1, 3), 7.5, np.float32)
DIM = 3


@dataclass
class DeepRecTrainer:
    """Tables by keys, how often each key was seen, one ordinary variable; and the files that it leaves.

    Increments hold what was touched since the last full save. Keys go when a full checkpoint is saved.
    """

    directory: Path
    names: tuple[str, ...] = ("emb/user", "item")
    parts: Mapping[str, int] = field(default_factory=lambda: {"emb/user": 3})
    seed: int = 0
    step: int = 10
    records_freqs: bool = False
    has_codes: bool = False
    tables: dict[str, Table] = field(default_factory=dict)
    freqs: dict[str, dict[int, int]] = field(default_factory=dict)
    touched: dict[str, set[int]] = field(default_factory=dict)
    saved: dict[int, tuple[dict[str, Table], dict[str, dict[int, int]], np.ndarray]] = field(
        default_factory=dict
    )
    kernel: np.ndarray = field(default_factory=lambda: np.zeros(2, np.float32))

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        for name in self.names:
            self.tables.setdefault(name, {})
            self.freqs.setdefault(name, {})

    def upsert(self, name: str, keys: Iterable[int]) -> None:
        """Give keys new rows, among them bit patterns that compare oddly; with `has_codes` finite ones."""
        odd = [0.0, -0.0, 1.5] if self.has_codes else [0.0, -0.0, np.nan, 1.5]
        for key in keys:
            row = self.rng.choice([*odd, float(self.rng.normal())], size=DIM)
            self.tables[name][key] = row.astype(np.float32).tobytes()
            self.freqs[name][key] = self.freqs[name].get(key, 0) + 1
            self.touched.setdefault(name, set()).add(key)

    def train(self, keys: int = 20) -> None:
        """Some steps: new keys and known ones of every table, and the ordinary variable."""
        self.step += int(self.rng.integers(1, 4))
        self.kernel = self.rng.normal(size=2).astype(np.float32)
        for name in self.names:
            known = list(self.tables[name])
            old = self.rng.choice(known, min(len(known), keys // 2), replace=False).tolist() if known else []
            self.upsert(name, [*old, *self.rng.integers(0, 1 << 62, keys - len(old)).tolist()])

    def evict(self, name: str, keys: Iterable[int]) -> None:
        """Forget keys; the next full checkpoint lacks them."""
        for key in keys:
            self.tables[name].pop(key, None)
            self.freqs[name].pop(key, None)
            self.touched.get(name, set()).discard(key)

    def save(self) -> Path:
        """A full checkpoint of now; what is touched from here on is in the increments after it."""
        tables = {name: self.ev(name, self.tables[name]) for name in self.names}
        prefix = write_full(
            self.directory / f"model.ckpt-{self.step}",
            tables,
            parts=self.parts,
            dense={"kernel": self.kernel},
            slots={f"{name}/Adagrad": ev for name, ev in tables.items()},
            step=self.step,
        )
        (self.directory / "checkpoint").write_text(f'model_checkpoint_path: "{prefix.name}"\n')
        copied = {name: dict(table) for name, table in self.tables.items()}
        freqs = {name: dict(counts) for name, counts in self.freqs.items()}
        self.saved[self.step] = (copied, freqs, self.kernel)
        self.touched = {}
        return prefix

    def increment(self) -> Path:
        """What was touched since the last full checkpoint."""
        tables = {
            name: self.ev(name, {key: self.tables[name][key] for key in sorted(keys)})
            for name, keys in self.touched.items()
            if keys
        }
        return write_increment(
            self.directory, self.step, tables, parts=self.parts, dense={"kernel": self.kernel}
        )

    def restart(self) -> None:
        """Begin again at the last full checkpoint; what came after it is forgotten, its files stay."""
        step = max(self.saved)
        tables, freqs, self.kernel = self.saved[step]
        self.tables = {name: dict(table) for name, table in tables.items()}
        self.freqs = {name: dict(counts) for name, counts in freqs.items()}
        self.touched = {}

    def ev(self, name: str, table: Table) -> Ev:
        keys = np.array(list(table), np.int64)
        values = np.frombuffer(b"".join(table.values()), np.float32).reshape(-1, DIM)
        freqs = np.array([self.freqs[name][key] for key in table], np.int64)
        return Ev(keys, values, None, freqs if self.records_freqs else None)

    def now(self) -> dict[str, Table]:
        """What is served once everything is published."""
        return {name: dict(table) for name, table in self.tables.items()}


def request(trainer: DeepRecTrainer, model: Path, **options: object) -> ExportRequest:
    return ExportRequest(ckpt_dir=trainer.directory, out=model, **options)  # type: ignore[arg-type]


def publish_base(
    trainer: DeepRecTrainer,
    model: Path,
    *,
    head_room: float = 0.25,
    casts: tuple[str, ...] = (),
    admission: Admission | None = None,
) -> PublishedVersion:
    """What `--incr` does the first time, but for the graph: the tables laid out by their index alone."""
    prefix = trainer.directory / f"model.ckpt-{trainer.step}"
    place, lineage = reserve_position(model, trainer.step), secrets.token_hex(16)
    rules, admission = MappingRules(casts=tuple(map(CastRule.parse, casts))), admission or Admission()
    dynamic = tuple(DynamicTable(name, "int64", "float32", DIM, len(DEFAULT)) for name in trainer.names)
    with Staging(model) as staging:
        laid_out = staging.path.with_name("laid-out") / "model.ckpt"
        variables = _lay_out(trainer, laid_out, head_room, admission)
        graph = InferenceGraph("a test", None, variables)
        mapping = build_mapping(graph, read_catalog(laid_out), rules)
        report = write_variables(mapping, staging.path)
        write_graph(staging.path, place.position, trainer.step, lineage)
        spec = MappingSpec(
            tuple(map(VariableDocument.of, variables)),
            {},
            RulesDocument.of(rules),
            dtypes={source.key: source.cast.label for source in mapping.sources if source.cast},
            dynamic=dynamic,
            min_freq=admission.min_freq,
            max_age_steps=admission.max_age_steps,
        )
        stored = [(each, each.as_stored(v).shape) for each in mapping.sources for v in each.variables]
        schema = Schema.of(
            ServedVariable(
                each.key, each.dtype, shape, ChangeKind.DENSE if each.key == "kernel" else ChangeKind.TABLE
            )
            for each, shape in stored
        )
        trained = TrainerVersion(identify(prefix, trainer.step))
        draft = ManifestDraft(
            tensors=tensor_entries(report.catalog),
            source=Origin.of(prefix),
            exporter="0",
            step=trainer.step,
            lineage=lineage,
            incremental=BaseEntry.of(place.position, schema, spec, trained, Updates()),
        )
        return publish_version(staging, draft, place)


def _lay_out(
    trainer: DeepRecTrainer, prefix: Path, head_room: float, admission: Admission
) -> tuple[GraphVariable, ...]:
    """A bundle of the tables' four variables and the ordinary one."""
    prefix.parent.mkdir(parents=True)
    found = [GraphVariable("kernel", "kernel", DType.FLOAT, trainer.kernel.shape)]
    with BundleWriter(prefix) as writer:
        writer.add("kernel", trainer.kernel)
        for name in trainer.names:
            ev = trainer.ev(name, trainer.tables[name])
            for part, array in zip(PARTS, _variables(ev, head_room, admission), strict=True):
                writer.add(f"{name}/{part}", array)
                key = f"{name}/{part}"
                found.append(GraphVariable(key, key, DType.of(array.dtype.name), array.shape))
    return tuple(found)


def _variables(ev: Ev, head_room: float, admission: Admission) -> tuple[np.ndarray, ...]:
    rows = len(ev.keys)
    geometry = TableGeometry.for_keys(rows, head_room, len(DEFAULT))
    served = np.flatnonzero(np.broadcast_to(admission.enough(ev.freqs), rows))
    seeds, slots = built_index(geometry, ev.keys[served], served)
    keys, values = np.full(geometry.capacity, -1, np.int64), np.zeros((geometry.capacity, DIM), np.float32)
    keys[:rows], values[:rows] = ev.keys, ev.values
    keys[geometry.cursor_row] = rows
    values[geometry.first_default :] = DEFAULT
    return seeds, slots, keys, values


def served(
    log: DeltaLog, position: int | None = None, *, defaults: np.ndarray | None = None
) -> dict[str, Table]:
    """What the log's tables hold at a position, read as a server would find it.

    `defaults` are the default rows of a table that has several.
    """
    state = log.state(position)
    found = {}
    for table in log.base.entry.mapping_spec.dynamic:
        read = ServedTable.of(table, log.schema, state)
        rows, keys = read.live()
        assert np.array_equal(read.find(keys), rows), "a key that has a row is found"
        absent = np.setdiff1d(np.concatenate([keys + 1, keys - 1, [-1, 0]]), keys)
        assert (read.find(absent) == -1).all()
        values = state.rows_at(table.keys[3], rows)
        first = read.geometry.first_default
        default = state.rows(table.keys[3], first, first + table.defaults).astype(np.float32)
        if defaults is None:
            assert default.tobytes() == DEFAULT.tobytes()
        elif table.defaults > 1:
            assert default.tobytes() == defaults.tobytes()
        found[table.name] = {key: row.tobytes() for key, row in zip(keys.tolist(), values, strict=True)}
    return found


def train_on(trainer: DeepRecTrainer, what: str) -> None:
    """Train new keys, then write an `increment`; or evict keys of both tables and `save` a checkpoint."""
    trainer.train(keys=60)
    if what == "increment":
        trainer.increment()
        return
    trainer.evict("emb/user", [*list(trainer.tables["emb/user"])[::5], -1])
    trainer.evict("item", list(trainer.tables["item"])[::2])
    trainer.save()
