"""Everything that a trainer, an exporter, an operator and an accident can do to one model, in random order.

The reference is `World.at`: for each position the values that were the trainer's (or, after a rollback, those
of the position that was named) when it was published. It is kept in numpy, from what the trainer was told to
do, and never from what the exporter wrote. After each happening:

* nothing stands at a position but the values of the reference, read from base and deltas anew;
* a command that succeeded left the newest state at the trainer's; one that failed published nothing, and
  ended with an exit code and a message of its own;
* a replica's position never goes back, it passes no hold, and its variables are those of its position;
* a tag names what it named, unless somebody set it, and as long as its log goes on its values can come back.

A world's seed says of which kind its model is: whether tables are mapped, for how many changed rows there is
room, whether rows are in 8 bits, whether the trainer is DeepRec's, or leaves archives, also of a Keras model
made again for each, and whether the graph is a builder's, which imports a module from elsewhere. Where there
is no room for a delta, a base takes its place.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops.lookup_ops import StaticHashTable

import exporter
from exporter.bundle import mapped_tables
from exporter.delta.format import Schema
from exporter.errors import ExportError, NotUpdatable, UsageError
from exporter.pipeline import log_maintenance
from exporter.publish.approval import approve
from exporter.publish.delta_log import DeltaLog, list_deltas, read_log
from exporter.publish.manifest import DeltaOrigin
from exporter.publish.staging import remove_leftovers
from exporter.publish.tags import ListedTag, read_tags
from exporter.publish.versions import version_dirs
from exporter.storage.layout import DEEPREC_INCREMENTS_DIRECTORY, MANIFEST_FILE, TAGS_FILE
from exporter.verify.log import verify_model
from exporter.wire.int8_codes import beside_codes, to_codes, values_of
from tests.support.archive_numpy_trainer import ArchiveNumpyTrainer
from tests.support.commands import Ran, export_small
from tests.support.deeprec_numpy_trainer import DeepRecNumpyTrainer
from tests.support.directory_store import BUCKET, directory_store
from tests.support.failing_calls import ERRORS, NONE, Failure, failing_commands, may_mount
from tests.support.keras_numpy_trainer import NAMES, KerasNumpyTrainer
from tests.support.kills import killed_at
from tests.support.logs import assert_same_bits, values_at
from tests.support.numpy_trainer import NumpyTrainer
from tests.support.threads import at_once
from tests.support.updatable import Loaded, loaded_quickly

tf1 = tf.compat.v1

Values = dict[str, np.ndarray]

USERS, ITEMS = 23, 10
EXIT_CODES = {0, 1, 2, 3, 4, 5, 6}
NEAR = 0.05
NOT_UPDATABLE = {"map_tables": False, "overlay_rows": None, "hot_rows": {}}
LATER = 1e12
"""A time at which every grace period is over."""
BASES = [
    (),
    ("--add=stamp",),
    ("--isolation", "row"),
    ("--isolation", "snapshot=4"),
    ("--add=digest", "--add=stamp"),
]
TABLES = {"user_rows": "s/users", "item_rows": "s/items"}
"""What is served of each table, by the name of the output."""
TAGS = ("prod", "offline-test")
GOLDEN = {"requests": [{"inputs": {"user": [*range(USERS)], "item": [*range(ITEMS)]}}]}


@dataclass(frozen=True)
class Kind:
    """What a model is exported with: the options of mapped tables, of rows in 8 bits, and of hot rows."""

    maps: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    in_8_bits: frozenset[str] = frozenset()
    trainer: type[NumpyTrainer] = NumpyTrainer
    is_hot: bool = False
    is_built: bool = False

    @property
    def has_room(self) -> bool:
        """True if no overlay is ever full."""
        return not self.maps or self.maps[-1] == str(USERS)

    @property
    def is_archived(self) -> bool:
        """True if the trainer's archives say what the graph is."""
        return self.trainer is KerasNumpyTrainer

    def served(self, values: Values) -> Values:
        """The trainer's values as they are served, by the names that they are served under."""
        found = served(values)
        for name in self.in_8_bits:
            codes, scales, _ = to_codes(found[name])
            found[name] = beside_codes(codes, scales)
        return found

    def named(self, values: Values) -> Values:
        """What was read of a publication, by the names of `served`: those of an archive count on."""
        return served({NAMES[it.shape]: it for it in values.values()}) if self.is_archived else values


ALL_IN_8_BITS = (("--cast", "int8"), frozenset(TABLES.values()))
USERS_IN_8_BITS = (("--cast", "s/users=int8"), frozenset({"s/users"}))
KINDS = (
    Kind(("--map-tables", "--overlay-rows", str(USERS))),
    Kind(),
    Kind(("--map-tables", "--overlay-rows", "12")),
    Kind(("--map-tables", "--overlay-rows", "12"), *ALL_IN_8_BITS),
    Kind((), *USERS_IN_8_BITS),
    Kind(("--map-tables",)),
    Kind(trainer=DeepRecNumpyTrainer),
    Kind(("--map-tables", "--overlay-rows", str(USERS)), trainer=DeepRecNumpyTrainer),
    Kind(trainer=ArchiveNumpyTrainer),
    Kind(("--map-tables", "--overlay-rows", "12"), trainer=ArchiveNumpyTrainer),
    Kind(("--map-tables", "--overlay-rows", "12"), is_hot=True),
    Kind(("--map-tables", "--overlay-rows", str(USERS)), *ALL_IN_8_BITS, is_hot=True),
    Kind(is_built=True),
    Kind(trainer=KerasNumpyTrainer),
    Kind(("--map-tables", "--overlay-rows", str(USERS)), trainer=KerasNumpyTrainer),
)
"""With 12 places the overlay of `USERS` rows is soon full, and with a quarter, that of `ITEMS`, too."""


def kind_of(seed: int) -> Kind:
    """The kind of a world: in every other round of all kinds a builder makes the graph, but for archives'."""
    turn, number = divmod(seed, len(KINDS))
    kind = KINDS[number]
    return replace(kind, is_built=kind.is_built or (turn % 2 == 1 and not kind.is_archived))


def serving() -> tuple[dict[str, Any], dict[str, Any]]:
    """A builder of the graph that serves the variables of `tests.support.numpy_trainer`."""
    user = tf1.placeholder(tf.int64, [None], name="user")
    item = tf1.placeholder(tf.int64, [None], name="item")
    with tf1.variable_scope("s", use_resource=True):
        users, items = tf1.get_variable("users", [USERS, 3]), tf1.get_variable("items", [ITEMS, 2])
        kernel, scale = tf1.get_variable("kernel", [3, 4]), tf1.get_variable("scale", [])
    outputs = {
        "user_rows": tf.gather(users, user),
        "item_rows": tf.gather(items, item),
        "dense": kernel * scale,
    }
    return {"user": user, "item": item}, {name: tf.identity(it, name) for name, it in outputs.items()}


BUILDER = """
import os, sys
from typing import Any
import tensorflow as tf
tf1 = tf.compat.v1
USERS, ITEMS = {users}, {items}

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "src"))

def build():
    from {package}.part import through
    inputs, outputs = serving()
    return inputs, {{name: through(value) for name, value in outputs.items()}}
"""
MODULE = "import tensorflow as tf\n\nEDITED = {edited}\n\ndef through(x):\n    return tf.identity(x)\n"


def with_vocabulary() -> tuple[dict[str, Any], dict[str, Any]]:
    """The same by the names of users, which a table of the builder's has."""
    names = [f"user {number}" for number in range(USERS)]
    inputs, outputs = serving()
    lookup = keras.layers.StringLookup(vocabulary=names, num_oov_indices=0)
    assert lookup.vocabulary_size() == USERS
    name = tf1.placeholder(tf.string, [None], name="name")
    outputs["number"] = tf.identity(lookup(name), "number")
    return {**inputs, "name": name}, outputs


def told(call: Callable[[], Any]) -> Any:
    """What a call returns, or its error by name."""
    try:
        return call()
    except ExportError as error:
        return error


def write_graph(path: Path) -> None:
    """The `.meta` of the same graph."""
    with tf.Graph().as_default():
        serving()
        tf1.train.Saver()
        tf1.train.export_meta_graph(str(path))


@dataclass
class Replica:
    """A server with one version loaded, that asks for updates when it likes."""

    server: Loaded
    schema: Schema
    version: Path
    base: int
    log: int
    position: int
    answers: set[str] = field(default_factory=set)


class World:
    """One model, its trainer and its replicas; `dice` decides everything."""

    def __init__(self, directory: Path, seed: int, say: Callable[[str], None] = lambda line: None) -> None:
        self.dice = random.Random(seed)
        self.kind = kind_of(seed)
        self.say = say
        self.model, self.graph = directory / "model", directory / "graph.meta"
        write_graph(self.graph)
        package = f"elsewhere_{secrets.token_hex(4)}"  # several worlds of a process have one each
        self.builder, self.module = directory / "code/built.py", directory / f"src/{package}/part.py"
        for path, text in (
            (
                self.builder,
                BUILDER.format(package=package, users=USERS, items=ITEMS) + inspect.getsource(serving),
            ),
            (self.module, MODULE.format(edited=0)),
        ):
            path.parent.mkdir(parents=True)
            path.write_text(text)
        np.save(hot := directory / "hot.npy", np.arange(USERS)[::-3])
        self.hot_rows = {"s/users": str(hot)} if self.kind.is_hot else {}
        hot_words = [word for each in self.hot_rows.items() for word in ("--hot-rows", "=".join(each))]
        self.maps = (*self.kind.maps, *hot_words)
        self.trainer = self.kind.trainer(directory / "train", seed)
        self.at: dict[int, Values] = {}
        self.trained: Values = {}
        self.replicas: list[Replica] = []
        self.stack = ExitStack()
        self.places, self.mounts = [self.model], may_mount()
        self.bucket, self.copies, self.golden = (directory / name for name in ("bucket", "copies", "golden"))
        self.bucket.mkdir()
        self.golden.write_text(json.dumps(GOLDEN))
        environment, _ = self.stack.enter_context(directory_store(self.bucket))
        self.stack.enter_context(patch.dict(os.environ, environment))
        self.commands = failing_commands()
        self.bases_for_room = 0
        self.tags: dict[str, ListedTag] = {}
        self.asked: set[str] = set()
        self.log_of_tags = 0
        self.begin()
        assert self.command(*self._export()).code == 0
        self.account()
        for _ in range(2):
            self.start_replica()

    def close(self) -> None:
        """Stop the replicas."""
        self.stack.close()

    # --- what may happen ---------------------------------------------------------------------------------

    HAPPENINGS: ClassVar[dict[str, int]] = {
        "train": 4,
        "increment": 16,
        "save": 5,
        "end": 3,
        "set_back": 3,
        "abandon": 3,
        "export": 14,
        "export_prefix": 3,
        "export_near": 2,
        "export_rounded": 2,
        "rebase": 2,
        "merge": 2,
        "tidy": 2,
        "rollback": 3,
        "resume": 3,
        "tag": 6,
        "approve": 6,
        "kill": 6,
        "at_once": 3,
        "threads": 3,
        "damage": 8,
        "new_log": 1,
        "update": 16,
        "update_at_once": 3,
        "restart": 3,
        "sicken": 2,
        "fail_calls": 10,
        "set_clock": 5,
        "lose_disk": 2,
        "move": 1,
        "copy": 1,
        "push_and_pull": 3,
        "edit_module": 4,
        "copy_over": 4,
    }

    def step(self) -> str:
        """Let one thing happen, and look at everything; what it was."""
        what = self.dice.choices(list(self.HAPPENINGS), list(self.HAPPENINGS.values()))[0]
        self.say(what)
        getattr(self, what)()
        self._look_at_tags()
        return what

    def train(self) -> None:
        """Change some rows."""
        self.trainer.train(self.dice.randint(1, 6))

    def increment(self) -> None:
        """What was touched since the last increment; now and then nothing."""
        self.dice.choice([self.trainer.train, self.trainer.train, lambda: None])()
        self.trainer.increment()

    def save(self) -> None:
        """A full checkpoint; the hook may die before it notices."""
        self.trainer.train()
        self.trainer.save(notices=self.dice.random() < 0.8)

    def end(self) -> None:
        """The training ends, or is killed, and another session begins, with increments or without them."""
        self.dice.choice([self.trainer.end, self.trainer.kill])()
        self.begin()

    def set_back(self) -> None:
        """Somebody names an older checkpoint; the later ones are left, deleted, or have lost their shards."""
        self.trainer.kill()
        # Nothing in DeepRec's files tells that the full checkpoint is gone that an increment builds on.
        gone = [] if isinstance(self.trainer, DeepRecNumpyTrainer) else ["deleted"]
        self.trainer.set_back(self.dice.choice(["kept", "lost", "lost by itself", *gone]))
        if self.dice.random() < 0.7:
            self.begin()

    def abandon(self) -> None:
        """DeepRec's increments of a branch that was left lie beside a full checkpoint saved since."""
        if isinstance(self.trainer, DeepRecNumpyTrainer):
            self.trainer.abandon()
            self.export()

    def begin(self) -> None:
        """A session begins."""
        restores, saver_first = self.dice.choice([(True, True), (True, False), (False, True)])
        is_live = restores and saver_first and self.dice.random() < 0.3
        self.trainer.begin(restores=restores, saver_first=saver_first, is_live=is_live)

    def export(self) -> None:
        """`--incr`, which must leave the newest state at the trainer's, whatever was before."""
        ran = self.publish()
        self.account()
        if ran.code == 0:
            self.assert_newest_is(self.visible)

    def export_prefix(self) -> None:
        """A prefix publishes the checkpoint that it names, without the increments that follow it."""
        if isinstance(self.trainer, ArchiveNumpyTrainer):
            return
        ran = self.publish("--ckpt-dir", self.trainer.directory / self.trainer.newest().name)
        self.account(alone=True)
        if ran.code == 0:
            self.assert_newest_is(self.kind.served(self.saved_now))

    def export_near(self) -> None:
        """Rows that moved little may wait."""
        self.publish("--delta-budget", f"change={NEAR}")
        self.account(near=True)

    def export_rounded(self) -> None:
        """Rows may be rounded."""
        self.publish("--delta-dtype", self.dice.choice(["bfloat16", "int8"]))
        self.account(near=True)

    def publish(self, *options: object) -> Ran:
        """`--incr`, and a base where there is no room; it is refused for NaN in 8 bits, and by a hold."""
        before = newest_of(self.model)
        ran = self.command(*self._export(), *options)
        if is_full := "the overlay of table" in ran.err:
            assert ran.code == 5, ran.err
            assert not self.kind.has_room, ran.err
            ran = self.command(*self._export(), *options, "--new-base=if-needed")
            self.bases_for_room += ran.code == 0
        if ran.code:
            is_other = is_full or self.kind.is_built  # an older base, taken back, is of an older module
            is_held = is_other and self.is_held(ran)
            # A base, and a comparison, also read the checkpoint below the increments.
            values = (self.trained_now, self.saved_now)
            is_sick = bool(self.kind.in_8_bits) and any(map(self.is_sick, values))
            assert is_held or (is_sick and "cannot be stored in 8 bits" in ran.err), ran.err
            assert newest_of(self.model) == before, ran.err
            if not is_held:
                self.heal()
        return ran

    def is_held(self, ran: Ran) -> bool:
        """True if a command says that a person holds the model, and one does."""
        return self.log.hold.binds and f"{self.model} is held" in ran.err

    def rebase(self) -> None:
        """Base and deltas become a new base, unless the log is held."""
        held = self.log.hold.is_set
        ran = self.command("merge", self.model, "--rebase")
        assert ran.code == 0 or held, ran.err
        self.account()

    def merge(self) -> None:
        """All deltas become one beside them."""
        assert self.command("merge", self.model).code == 0
        self.account()

    def tidy(self) -> None:
        """Retention, long after everything was published."""
        log_maintenance.tidy(self.model, clock=lambda: LATER)
        self.account()
        self.assert_all_lead_on()
        log = self.log
        for base in log.bases if log.approved is not None else ():
            if base.at.position <= (log.approved or 0):
                log.chain(base.at.position, log.approved)

    def rollback(self) -> None:
        """Back to a position that was published."""
        target = self._older()
        if target is None:
            return
        hold = self.log.hold.read()
        ran = self.command(*target)
        self.account()
        if "the overlay of table" in ran.err:
            assert not self.kind.has_room, ran.err
            assert self.log.hold.read() == hold, "servers are held at values that are to go"
        if ran.code == 0:
            assert self.log.hold.read() == self.log.at.position
            to = str(target[-1])
            self.assert_newest_is(self.at[self.tags[to].position if to in self.tags else int(to)])

    def resume(self) -> None:
        """Lift the hold; afterwards the trainer's newest published values are served again."""
        held = self.log.hold.is_set
        ran = self.command("resume", self.model)
        self.account()
        assert ran.code == 0 or (not held and "was accepted" in ran.err), ran.err
        if held:
            self.assert_newest_is(self.trained)
        if self.log.hold.is_canary:  # it is to approve what came back, until it is done without
            assert self.command("resume", self.model, "--lift-canary").code == 0
            self.account()
        assert self.log.hold.read() is None

    def tag(self) -> None:
        """A position gets a name, which may have named another; or the name is deleted."""
        arguments = self._tagging()
        _, _, name, to = arguments
        self.asked.add(str(name))
        assert self.command(*arguments).code == 0
        tagged = {tag.name: tag.position for tag in exporter.tags(self.model)}
        assert tagged.get(str(name)) == {"--delete": None, "@latest": self.log.at.position}.get(str(to), to)

    def sicken(self) -> None:
        """Some rows are no numbers, until they are trained again."""
        self.trainer.train()
        self._set_users(self.dice.sample(range(USERS), 3), np.nan)

    def heal(self) -> None:
        """All rows are numbers again."""
        self.trainer.train()
        if self.trainer.session is not None:
            users = self.trainer.session.variables.values["net/users"]
            self._set_users(np.flatnonzero(~np.isfinite(users).all(axis=1)).tolist(), 0.5)

    def _set_users(self, ids: list[int], value: float) -> None:
        session = self.trainer.session
        if session is not None:
            users = session.variables.values["net/users"].copy()
            users[ids] = value
            session.variables.values["net/users"] = users
            session.variables.touched["net/users"].update(ids)

    def fail_calls(self) -> None:
        """A call on the model's files fails in any command, once or from then on."""
        failure = Failure(
            self.dice.randint(1, self.dice.choice([80, 250, 700])),
            self.dice.choice(ERRORS),
            lasts=self.dice.random() < 0.3,
        )
        self._in_circumstances(str(failure), self._any_command(), failure)

    def set_clock(self) -> None:
        """A command runs with a clock that is wrong: what it publishes is dated so."""
        ahead_s = self.dice.choice([-400, -30, 30, 400, 20 * 365]) * 86400
        self._in_circumstances(f"clock {ahead_s:+} s", self._any_command(), NONE, ahead_s=ahead_s)

    def lose_disk(self) -> None:
        """The model's file system is mounted read-only, where that can be had."""
        if self.mounts:
            self._in_circumstances("read-only", self._any_command(), NONE, is_read_only=True)

    def _in_circumstances(
        self, what: str, arguments: list[object], failure: Failure, **circumstances: Any
    ) -> None:
        before = newest_of(self.model)
        ran, calls = self.commands.run(self.model, failure, *arguments, **circumstances)
        first = ran.err.strip().splitlines()[:1]
        self.say(f"  {what} of {calls}: {self._short(arguments)} -> {ran.code} {' '.join(first)}")
        if ran.code:
            self._assert_well_said(ran)
            new = [{*now} - {*then} for now, then in zip(newest_of(self.model), before, strict=True)]
            assert not any(new) or "is published, but" in ran.err, (ran.err, new)
        self.account()

    def move(self) -> None:
        """The model's directory is renamed; servers load it where it is now."""
        self._go_to(self.model.rename(self._another_place()))

    def copy(self) -> None:
        """The model is copied, and goes on there; the old directory is gone."""
        old, new = self.model, self._another_place()
        shutil.copytree(old, new, symlinks=True)
        self._go_to(new)
        shutil.rmtree(old)

    def push_and_pull(self) -> None:
        """A store, and a copy that is pulled from it, follow the model."""
        url = f"s3://{BUCKET}/{self.model.name}"
        pushed = self.command("push", self.model, url, *self.dice.choice([(), ("--prune",)]))
        if pushed.code:  # the store was pushed to from a history that a rollback or another base left
            assert pushed.code == 5, pushed.err
            shutil.rmtree(self.bucket / self.model.name)
            assert self.command("push", self.model, url).code == 0
        copy = self.copies / self.model.name
        if self.command("pull", url, copy).code:
            shutil.rmtree(copy)
            assert self.command("pull", url, copy).code == 0
        assert_same_bits(self.values_at(read_log(copy)), self.at[self.log.at.position])
        assert read_tags(copy) == read_tags(self.model)
        assert read_log(copy).hold.read() == self.log.hold.read()
        assert verify_model(copy, bytes_=True).problems == ()

    def _another_place(self) -> Path:
        return self.model.with_name(f"model{len(self.places)}")

    def _go_to(self, place: Path) -> None:
        self.model = place
        self.places.append(place)
        self.replicas.clear()
        for _ in range(2):
            self.start_replica()
        self.assert_newest_is(self.at[self.log.at.position])

    def approve(self) -> None:
        """A canary begins, or approves more of what is published, unless a person holds it."""
        log = self.log
        approved = log.approved
        known = {log.base.at.position, *(delta.end for delta in log.deltas)}
        position = self.dice.choice(sorted(at for at in known if approved is None or at >= approved))
        done = approve(log.path, self.model, expected=approved, position=position)
        assert (done is None) is log.hold.binds
        assert self.log.approved == done
        assert done in (None, position)

    def kill(self) -> None:
        """SIGKILL in the midst of any command; then the world goes on."""
        arguments = self._any_command()
        self.say("  " + self._short(arguments))
        killed_at(self.dice.randint(1, 160), run_quietly, self.model, *map(str, arguments))
        self.account()

    def at_once(self) -> None:
        """Two commands at the same time, both of which end by themselves."""
        commands = [self._any_command(), self._any_command()]
        for arguments in commands:
            self.say("  " + self._short(arguments))
        codes = run_together([list(map(str, arguments)) for arguments in commands])
        assert set(codes) <= EXIT_CODES, (commands, codes)
        self.account()

    def threads(self) -> None:
        """Exports in threads of one program: of this model, and of another by a builder, all at once."""
        beside = [self.graph.with_name(name) for name in ("beside", "plain")]
        own = partial(exporter.export_incremental, **self._keywords(self.model, self.served))
        model = None if self.kind.is_archived else with_vocabulary
        other = partial(exporter.export_incremental, **self._keywords(beside[0], model))
        plain = partial(exporter.export, **{**self._keywords(beside[1], model), **NOT_UPDATABLE})
        before = sys.stdout, [*sys.path], StaticHashTable.size
        with patch.object(mapped_tables, "LEAST_BYTES", 1):
            found = at_once([partial(told, call) for call in (own, own, other, other, plain)])
            found.append(told(other))  # after a base, the increments
        assert (sys.stdout, [*sys.path], StaticHashTable.size) == before
        assert not any(isinstance(each, UsageError) for each in found), found
        failed = [isinstance(each, ExportError) for each in found]
        self.say("  " + " ".join(type(each).__name__ for each in found))
        self.account()
        if not all(failed[:2]):
            self.assert_newest_is(self.visible)
        if not self.kind.in_8_bits or not any(map(self.is_sick, (self.trained_now, self.saved_now))):
            assert not failed[4], found[4]
            if self.kind.has_room:
                assert not failed[5], found[5]
                assert_same_bits(self.values_at(read_log(beside[0])), self.visible)
        for directory in beside:
            shutil.rmtree(directory, ignore_errors=True)

    def _keywords(self, out: Path, model: Any) -> dict[str, Any]:
        names = () if model != str(self.graph) else ("user_rows", "item_rows", "dense")
        options: dict[str, Any] = {} if self.kind.is_archived else {"renames": [r"s/(.*)=net/\1"]}
        if names:
            options["inputs"] = {"user": "user:0", "item": "item:0"}
            options["outputs"] = {name: f"{name}:0" for name in names}
        if self.kind.cast:
            options["casts"] = [self.kind.cast[1]]
        if self.kind.maps:
            options["map_tables"] = True
        if len(self.kind.maps) > 1:
            options["overlay_rows"] = int(self.kind.maps[2])
        options["hot_rows"] = self.hot_rows
        return {"ckpt_dir": self.trainer.directory, "out": out, "model": model, **options}

    def damage(self) -> None:
        """A file is damaged, a replica and a command meet it, and it is healed."""
        path = self._any_file()
        if path is None:
            return
        before, arguments, newest = newest_of(self.model), self._any_command(), self.log.base.path
        # What truncates a file that is mapped ends the process: so a copy of it is damaged.
        in_place = not (self.kind.maps and path.is_relative_to(self.model) and ".data-" in path.name)
        with damaged(path, self.dice, in_place=in_place) as how:
            self.say(f"  {how} {path.relative_to(self.model.parent)}")
            self.update(damaged=True)
            ran = self.command(*arguments)
            if ran.code:
                self.assert_only_said(before, ran.err)
            if how == "gone" and path.is_relative_to(self.trainer.directory):
                self.account()  # meanwhile the trainer's newest state was another
            if how == "gone" and path == newest / MANIFEST_FILE:
                self._account_older()
        if how == "gone" and path.name == TAGS_FILE:  # what it named was not kept meanwhile
            path.unlink(missing_ok=True)
            self.tags.clear()
            self.asked.update(TAGS)
        self.account()

    def _account_older(self) -> None:
        """The log of an older base may have gone on: its replicas serve that, and the newest log is as it
        was.
        """
        trained = self.trained
        with suppress(NotUpdatable):
            if self.log.base.path != version_dirs(self.model)[0].path:
                self.account()
                self.trained = trained

    def assert_only_said(self, before: tuple[tuple[str, ...], tuple[str, ...]], said: str) -> None:
        """A command that failed published nothing, or the delta that it names without its base."""
        bases, deltas = newest_of(self.model)
        if "is published, but no new base" not in said:
            assert (bases, deltas) == before, f"{said}\nwas published, though it failed"
            return
        assert bases == before[0] and set(before[1]) <= set(deltas), f"{before} became {bases}, {deltas}"
        (new,) = set(deltas) - set(before[1])
        assert f"{new} is published" in said, f"{new} is new, said was {said}"

    def edit_module(self) -> None:
        """Somebody edits a module that the builder has from elsewhere: no delta fits what is built now."""
        if not self.kind.is_built:
            return
        before, text = newest_of(self.model), self.module.read_text()
        if self.dice.random() < 0.3:
            self.module.write_text(f"{text}# said better\n")
            self.export()
            return
        self.module.write_text(MODULE.format(edited=self.dice.randrange(1, 10**9)))
        ran = self.command(*self._export())
        assert ran.code == 5, ran.err
        assert "part has changed" in ran.err or self.is_held(ran), ran.err
        assert newest_of(self.model) == before, "a delta over another graph"
        if self.dice.random() < 0.5:
            ran = self.command(*self._export(), "--new-base=if-needed")
            assert ran.code == 0 or self.log.hold.binds, ran.err
        if ran.code:
            self.module.write_text(text)
        self.account()
        self.export()

    def copy_over(self) -> None:
        """The trainer copies another checkpoint over the one that the newest base links to, and back."""
        base = self.log.base
        entries = [entry for entry in base.manifest.files if entry.linked is not None]
        entries = [entry for entry in entries if not entry.is_written(base.path, for_sure=False)]
        if not entries or self.kind.maps:
            return
        entry = self.dice.choice(entries)
        path, before, arguments = base.path / entry.path, newest_of(self.model), self._any_command()
        content, was = path.read_bytes(), path.stat()
        is_as_linked = entry.linked is not None and (was.st_ino, was.st_nlink) == (
            entry.linked.inode,
            entry.linked.links,
        )
        if not is_as_linked or not content:  # a copy, or pruned
            return
        try:
            self._write_into(path, bytes(byte ^ 255 for byte in content))
            if self.dice.random() < 0.3:  # as by `rsync -t`
                os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
            self.say(f"  over {path.relative_to(self.model.parent)}")
            assert any(str(path) in error.message for error in verify_model(self.model).problems)
            self.update(damaged=True)
            ran = self.command(*arguments)
            if ran.code:
                self.assert_only_said(before, ran.err)
        finally:
            if path.exists():
                self._write_into(path, content)
        self.account()
        assert verify_model(self.model).problems == ()

    def _write_into(self, path: Path, content: bytes) -> None:
        with path.open("r+b") as file:
            file.write(content)

    def new_log(self) -> None:
        """A base that no delta leads to, with any options; golden requests refuse what is no number."""
        options = ["--new-base=always", "--again", *self.dice.choice(BASES)]
        is_golden = self.dice.random() < 0.5
        if is_golden:
            options += ["--golden", self.golden]
        ran = self.command(*[o for o in self._export() if o != "--incr"], *options)
        is_sick = (is_golden or bool(self.kind.in_8_bits)) and self.is_sick(self.saved_now)
        assert ran.code == (6 if is_sick else 0) or self.log.hold.is_set, ran.err
        self.account()

    def update(self, *, damaged: bool = False) -> None:
        """A replica takes what is published, with or without a target, in whatever time it is given."""
        replica = self.dice.choice(self.replicas)
        target = self.dice.choice([-1, -1, -1, self.dice.choice(list(self.at))])
        timeout_ms = self.dice.choice([0, 0, 0, 1, 3, 10])
        hold = None
        if not damaged and replica.log == self.log.base.entry.log:
            with suppress(ExportError):
                hold = self.log.hold.read()
        with suppress(tf.errors.OpError, ExportError):  # the log, too, may be damaged
            status = replica.server.update(target, timeout_ms=timeout_ms)["status"]
            replica.answers.add(status.partition(":")[0])
            self._assert_room(replica, status)
        before = replica.position
        if timeout_ms:  # it may have died half-way, or may go on; the next one repairs and says where it is
            with suppress(tf.errors.OpError):
                replica.server.update(before)
        if hold is not None and target == -1 and not timeout_ms:
            assert replica.server.position() in {before, *range(hold + 1)}
        self._look_at(replica)

    def _assert_room(self, replica: Replica, status: str) -> bool:
        """Whether there was room: for rows that changed since an older base there may be none beside it."""
        is_full = status.startswith("overlay:")
        assert not is_full or (replica.version != self.log.base.path and not self.kind.has_room), status
        return not is_full

    def update_at_once(self) -> None:
        """Callers with deadlines, all at the same time, on one replica."""
        replica = self.dice.choice(self.replicas)
        deadlines = [self.dice.choice([0, 1, 2, 5, 20]) for _ in range(6)]

        def call(timeout_ms: int) -> None:
            with suppress(tf.errors.OpError):
                replica.server.update(timeout_ms=timeout_ms)

        threads = [threading.Thread(target=call, args=(deadline,)) for deadline in deadlines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        replica.server.update()
        self._look_at(replica)

    def restart(self) -> None:
        """A replica loads the newest base, or its own once more."""
        replica = self.dice.choice(self.replicas)
        if replica.version == self.log.base.path:
            replica.server.reset(self.model)
            replica.position = replica.base
            self._look_at(replica)
        else:
            self.replicas.remove(replica)
            self.start_replica()

    # --- what must hold ----------------------------------------------------------------------------------

    @property
    def trained_now(self) -> Values:
        """What the trainer would restore."""
        return self.trainer.states[self.trainer.newest_state()]

    @property
    def saved_now(self) -> Values:
        """The newest full checkpoint, without the increments after it."""
        return self.trainer.states[self.trainer.newest()]

    @property
    def visible(self) -> Values:
        """What should be served now."""
        return self.kind.served(self.trained_now)

    def of_base(self, step: int | None) -> Values:
        """What a base of a step should hold: a full export knows nothing of increments, one for room does."""
        saved = self.saved_now
        return self.kind.served(saved if step == saved["global_step"] else self.trained_now)

    def is_sick(self, values: Values) -> bool:
        """True if something that is served is no number."""
        return not all(np.isfinite(value).all() for value in served(values).values())

    @property
    def log(self) -> DeltaLog:
        """The newest log, read anew."""
        return read_log(self.model)

    def account(self, *, near: bool = False, alone: bool = False) -> None:
        """Every position that is new holds what it should, and joins the reference.

        `alone`: the full checkpoint was published, without the increments that follow it.
        """
        log = self.log
        found = {log.base.at.position: None, **{delta.end: delta for delta in log.deltas}}

        def now() -> Values:  # asked of what is new alone, as the trainer's only checkpoint may be gone
            return self.kind.served(self.saved_now) if alone else self.visible

        for position in sorted(set(found) - set(self.at)):
            values = {name: np.array(value) for name, value in self.values_at(log, position).items()}
            delta = found[position]
            made = None if delta is None else delta.entry.made
            if made is DeltaOrigin.ROLLBACK:
                assert delta is not None and delta.entry.back_to is not None
                expected = self.at[delta.entry.back_to]
            elif made is DeltaOrigin.RESUME:
                expected = self.trained
            elif delta is None and (taken := log.base.manifest.taken_back) is not None:
                expected = self.at[taken.back_to]
            elif delta is None:
                expected = self.trained = now() if alone else self.of_base(log.base.at.step)
            elif near or not delta.entry.trained.is_exact:
                assert_near(self._in_floats(values), self._in_floats(now()))
                expected = self.trained = values
            else:
                expected = self.trained = now()
            assert_same_bits(values, expected)
            self.at[position] = values
        self.assert_newest_is(self.at[log.at.position])

    def values_at(self, log: DeltaLog, position: int | None = None) -> Values:
        """What base and deltas of a log lead to, by the names of the reference."""
        return self.kind.named(values_at(log, position))

    def assert_newest_is(self, values: Values) -> None:
        """Base and deltas lead to these values."""
        assert_same_bits(self.values_at(self.log), values)

    def _look_at_tags(self) -> None:
        """Tags that nobody was asked to set are as they were, and their values can come back."""
        log, found = self.log, {tag.name: tag for tag in exporter.tags(self.model)}
        for name in {*found, *self.tags} - self.asked:
            was, now = self.tags[name], found[name]
            assert (now.position, now.who, now.when) == (was.position, was.who, was.when)
            assert was.gone or not now.gone or log.number != self.log_of_tags, now
        for tag in found.values():
            if not tag.gone and tag.position >= log.number:
                assert_same_bits(self.values_at(log, tag.position), self.at[tag.position])
        self.tags, self.log_of_tags = found, log.number
        self.asked.clear()

    def assert_all_lead_on(self) -> None:
        """From each base of the log, and each position that retention keeps, deltas lead to the newest."""
        log = self.log
        positions = sorted({base.at.position for base in log.bases} | {delta.end for delta in log.deltas})
        for position in positions[-16:]:
            log.chain(position)

    def finish(self) -> None:
        """In the end all replicas of the newest log have the trainer's values, and nothing is damaged."""
        if self.log.hold.is_set:
            self.resume()
        self.end()
        if self.kind.in_8_bits:
            self.heal()
            self.trainer.save()  # a base, and a comparison, also read the checkpoint below the increments
        self.increment()
        self.export()
        self.assert_newest_is(self.visible)
        for replica in [*self.replicas]:
            status = replica.server.update()["status"]
            if not self._assert_room(replica, status):
                self._look_at(replica)
                self.replicas.remove(replica)
                self.start_replica()
                replica = self.replicas[-1]
                status = replica.server.update()["status"]
            if replica.log == self.log.base.entry.log and not status.startswith(("current", "reached")):
                replica.server.reset(self.model)  # it was further behind than retention keeps
                replica.position = replica.base
                status = replica.server.update()["status"]
                assert status.startswith(("current", "reached")), status
            self._look_at(replica)
            if replica.log == self.log.base.entry.log:
                assert replica.position == self.log.at.position
        assert verify_model(self.model, bytes_=True).problems == ()
        remove_leftovers(self.model)  # as the next publication does; the last may have had nothing to do
        left = [path for path in self.model.iterdir() if path.name.startswith(".staging-")]
        assert not left, left

    def command(self, *arguments: object) -> Ran:
        """Run a command line; if it fails it says so properly."""
        ran = export_small(*arguments)
        first = ran.err.strip().splitlines()[:1]
        self.say(f"  {self._short(arguments)} -> {ran.code} {' '.join(first)}")
        if ran.code:
            self._assert_well_said(ran)
        return ran

    def start_replica(self) -> None:
        """Load the newest base."""
        base = self.log.base
        server = self.stack.enter_context(loaded_quickly(base.path))
        entry, record = base.entry, base.manifest.mapped
        if record is not None and record.directory == str(base.path):
            (mapped,) = server.call("incremental_status", probe=[0])["mapped_tables"]
            assert mapped == len(record.tables) > 0
        self.replicas.append(
            Replica(server, entry.schema, base.path, base.at.position, entry.log, base.at.position)
        )

    def _look_at(self, replica: Replica) -> None:
        position = replica.server.position()
        assert position >= replica.position, f"went back from {replica.position} to {position}"
        replica.position = position
        expected = self.at[position]
        assert_same_bits(self.kind.named(replica.server.values(replica.schema)), expected)
        answer = replica.server.predict(user=np.arange(USERS), item=np.arange(ITEMS))
        rows = self._in_floats(expected)
        for output, table in TABLES.items():
            assert answer[output].tobytes() == rows[table].tobytes(), output

    def _in_floats(self, values: Values) -> Values:
        """What the graph computes with, of what is served."""
        return {**values, **{name: values_of(values[name]) for name in self.kind.in_8_bits}}

    def _assert_well_said(self, ran: Ran) -> None:
        assert ran.code in EXIT_CODES, ran.err
        assert "Traceback" not in ran.err, ran.err
        assert "unexpected" not in ran.err, ran.err

    def _short(self, arguments: Sequence[object]) -> str:
        words = [str(word) for word in arguments if word not in self._export()]
        return " ".join(words) or "--incr"

    def _export(self) -> list[object]:
        tensors = ["user_rows", "item_rows", "dense"]
        names = [
            *("--input", "user=user:0", "--input", "item=item:0"),
            *[part for name in tensors for part in ("--output", f"{name}={name}:0")],
        ]
        return [
            *("--ckpt-dir", self.trainer.directory, "--out", self.model, "--incr"),
            *([] if self.kind.is_archived else ["--model", self.served, "--rename", r"s/(.*)=net/\1"]),
            *(names if self.served == str(self.graph) else []),
            *self.kind.cast,
            *self.maps,
        ]

    @property
    def served(self) -> str | None:
        """What `--model` names; None for an archive's own."""
        if self.kind.is_archived:
            return None
        return f"{self.builder}:build" if self.kind.is_built else str(self.graph)

    def _older(self) -> list[object] | None:
        """A rollback to a position of the log that can still be read, or to one that has a name."""
        reachable: list[object] = [*self._reachable()]
        reachable += [tag.name for tag in self.tags.values() if not tag.gone and tag.name not in self.asked]
        return ["rollback", self.model, "--to", self.dice.choice(reachable)] if reachable else None

    def _reachable(self) -> list[int]:
        """Positions of the log before the newest that can still be read."""
        log = self.log
        older = [position for position in self.at if position < log.at.position]
        reachable = []
        for position in older[-6:]:
            with suppress(ExportError):
                log.state(position)
                log.chain(position)
                reachable.append(position)
        return reachable

    def _tagging(self) -> list[object]:
        """A command that gives a position a name, or deletes one."""
        name = self.dice.choice(TAGS)
        deleted = ["--delete"] if name in self.tags else []
        return ["tag", self.model, name, self.dice.choice(["@latest", *self._reachable(), *deleted])]

    def _any_command(self) -> list[object]:
        candidates: list[list[object]] = [
            self._export(),
            [*self._export(), "--new-base=merged"],
            ["merge", self.model],
            ["merge", self.model, "--rebase"],
            ["resume", self.model],
            self._export(),
            self._tagging(),
        ]
        if self.kind.maps:  # what follows overlays that are full, and options that are said once
            candidates.append([*self._export(), "--new-base=if-needed"])
            candidates.append([word for word in self._export() if word not in self.maps])
        older = self._older()
        if older:
            candidates.append(older)
        chosen = self.dice.choice(candidates)
        if chosen[0] == "tag":
            self.asked.add(str(chosen[2]))
        return chosen

    def _any_file(self) -> Path | None:
        deltas = [path for delta in list_deltas(self.log.path) for path in sorted(delta.path.rglob("*"))]
        bases = [path for child in version_dirs(self.model) for path in sorted(child.path.rglob("*"))]
        train = sorted(self.trainer.directory.rglob("*"))
        others = [self.log.path / "hold", self.model / TAGS_FILE]
        others += sorted((self.log.path / ".state").rglob("*"))
        pool = self.dice.choice([deltas, deltas, bases, train, others])
        files = [path for path in pool if path.is_file()]
        return self.dice.choice(files) if files else None


def served(values: Values) -> Values:
    """The trainer's values by the names that they are served under."""
    return {f"s/{name.removeprefix('net/')}": value for name, value in values.items() if "net/" in name}


def newest_of(model: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of what is published, read without opening anything."""
    bases = sorted(child.path.name for child in version_dirs(model))
    deltas = sorted(str(path.relative_to(model)) for path in model.glob("deltas/*/0*"))
    return tuple(bases), tuple(deltas)


def assert_near(found: Values, expected: Values) -> None:
    """Rows are no further off than the options of the exports allow; what is no number is there exactly."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same_kind = np.isfinite(value) == np.isfinite(found[name])
        assert same_kind.all(), name
        finite = np.isfinite(value)
        off = np.abs(np.where(finite, value, 0) - np.where(finite, found[name], 0))
        largest = np.max(np.where(finite, np.abs(value), 0), initial=0.0)
        assert np.all(off <= NEAR + largest / 64), name


def run_quietly(_: Path, *arguments: str) -> None:
    """A command in a process of its own."""
    export_small(*arguments)


def run_together(commands: list[list[str]]) -> list[int]:
    """Exit codes of commands that run at the same time, each in a process."""
    from tests.support.kills import ended, run

    processes = [run(_exit_with, arguments) for arguments in commands]
    codes = [ended(process) for process in processes]
    return [-1 if code is None else code for code in codes]


def _exit_with(arguments: list[str]) -> None:
    os._exit(export_small(*arguments).code)


@contextmanager
def damaged(path: Path, dice: random.Random, *, in_place: bool = True) -> Iterator[str]:
    """One bit is another, the end is missing, or all of it; afterwards it is as it was, in the same inode.

    Unless `in_place`, it is a copy at its path that is damaged.
    """
    if not in_place:
        aside = path.with_name(f".aside-{secrets.token_hex(4)}")
        path.rename(aside)
        shutil.copyfile(aside, path)
        try:
            with damaged(path, dice) as how:
                yield how
        finally:
            with suppress(FileNotFoundError):  # retention has removed the directory meanwhile
                aside.rename(path)
        return
    is_text = path.suffix == ".json" or path.name in ("hold", "checkpoint")
    was = path.stat()
    how = dice.choice(["cut", "gone"] if is_text else ["flip", "cut", "gone"])
    aside = path.with_name(f".aside-{secrets.token_hex(4)}")
    size = path.stat().st_size
    if how == "gone":
        path.rename(aside)
        try:
            yield how
        finally:
            if path.parent.exists() and not path.exists():
                aside.rename(path)
        return
    content = path.read_bytes()
    handle = os.open(path, os.O_RDWR)
    try:
        if how == "cut":
            os.ftruncate(handle, size // 2)
        elif size:
            at = dice.randrange(size)
            os.pwrite(handle, bytes([content[at] ^ (1 << dice.randrange(8))]), at)
        yield how
    finally:
        os.ftruncate(handle, 0)
        os.pwrite(handle, content, 0)
        os.close(handle)
        if DEEPREC_INCREMENTS_DIRECTORY in path.parts:  # where time tells what was written before what
            os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
