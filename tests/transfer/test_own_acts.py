"""What a copy made by itself, against whatever its store publishes meanwhile: it never stops a pull.

Servers have the values of one published state at each moment, nothing that was taken back here while the hold
binds, and at the end what the store says.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest

from exporter.publish.delta_log import read_log
from exporter.publish.model import Model
from exporter.publish.signing import Signer, Trust
from exporter.publish.versions import in_force
from exporter.transfer import pull as pulling
from exporter.transfer.items import Item, end_of
from exporter.transfer.pull import Pulled, pull
from exporter.transfer.push import plan_push
from tests.support.budget import THOROUGH
from tests.support.commands import export_model
from tests.support.key_pairs import key_pair
from tests.support.logs import Serving, assert_same_bits, publish_base, served_now, values_at
from tests.support.machines import Machine, grow_old, machine_in, pushed, take_back
from tests.support.publishers import Killed
from tests.support.remote_models import incr, went_on
from tests.support.replicas import Replica, bits_of


def typed(*words: object) -> None:
    ran = export_model(*words, "--json")
    assert ran.code == 0, ran.err


class Life:
    """A store, a trainer that publishes to it, and a copy with its servers."""

    def __init__(self, machine: Machine, url: str, directory: Path) -> None:
        self.trainer, self.url, self.copy = machine.trainer, url, directory / "copy"
        self._directory, self._published = directory, 0
        pushed(machine.model, url)
        pull(url, self.copy)
        log = read_log(self.copy)
        self.trained = {bits_of(values_at(log, position)): position for position in (10, 20, 30)}
        self.first = Replica(self.copy)
        self.first.follow()

    def train(self, *steps: int) -> None:
        for step in steps:
            went_on(self.trainer, step)
            self.note()
            ran = incr(self.trainer, self.url)
            assert ran.code == 0, ran.err

    def note(self) -> None:
        self.trained[bits_of(served_now(self.trainer, Serving()))] = self.trainer.step

    def begin_log(self, step: int) -> None:
        """A base of another log is published."""
        publisher = self._directory / f"publisher-{step}"
        pull(self.url, publisher)
        self.trainer.train()
        self.trainer.step, self.trainer.parent, self.trainer.touched = step, None, {}
        self.trainer.save()
        self.note()
        publish_base(self.trainer, Serving(), publisher)
        pushed(publisher, self.url)

    def pull(self, limit: int = 1000) -> tuple[str, ...]:
        """Pull twice, and let servers follow: one that goes on, and one that starts; what waits."""
        for _ in range(2):
            done = pull(self.url, self.copy, prune=True)
        late = Replica(self.copy)
        for replica in (self.first, late):
            replica.passed.clear()
            replica.follow()
            steps = [self.trained.get(bits) for bits in replica.passed]
            assert None not in steps, f"{steps}: one of these states was never published"
            assert max([step for step in steps if step is not None], default=0) <= limit, steps
        return done.waiting

    def obey(self) -> Pulled:
        """Type what each pull proposes, until nothing waits, or nothing helps yet."""
        for _ in range(4):
            done = pull(self.url, self.copy, prune=True)
            if not done.way_on:
                return done
            ran = export_model(*shlex.split(done.way_on)[1:])
            assert ran.code == 0 and "nothing to do" not in ran.out, (done, ran.out, ran.err)
        raise AssertionError(f"nothing leads past {done.waiting}")

    def end(self) -> None:
        """All holds go; the trainer goes on, and a person merges as the page says."""
        for place in (self.copy, self.url):
            ran = export_model("resume", place, "--lift-canary", "--json")
            assert ran.code == 0 or "is held at" in ran.error["message"] or "accepted" in ran.error["message"]
        self.pull()
        typed("resume", self.copy, "--lift-canary", "--lift-only")
        self.pull()
        self.train(60)
        self.obey()
        self.pull()
        grow_old(self.copy)
        assert self.pull() == ()
        late = Replica(self.copy)
        late.follow()
        for replica in (self.first, late):
            assert self.trained[replica.bits] == 60
        assert_same_bits(values_at(read_log(self.copy)), served_now(self.trainer, Serving()))


def by_canary(life: Life, to: int = 20) -> None:
    take_back(life.copy, to)


def by_operator(life: Life, to: int = 20) -> None:
    typed("rollback", life.copy, "--to", to)


def then(first: Callable[[Life], None], *commands: tuple[str, ...]) -> Callable[[Life], None]:
    def act(life: Life) -> None:
        first(life)
        for name, *options in commands:
            typed(name, life.copy, *options)

    return act


def nothing(life: Life) -> None:
    pass


ACTS: Mapping[str, tuple[Callable[[Life], None], int]] = {
    "a canary's rollback": (by_canary, 20),
    "a canary's rollback to the base": (lambda life: by_canary(life, 10), 10),
    "a canary's rollback, resumed": (then(by_canary, ("resume",)), 20),
    "a canary's rollback, accepted": (then(by_canary, ("resume", "--lift-only")), 20),
    "an operator's rollback": (by_operator, 20),
    "an operator's rollbacks": (then(by_operator, ("rollback", "--to", "10")), 10),
    "an operator's rollback, resumed": (then(by_operator, ("resume",)), 1000),
    "an operator's rollback, accepted": (then(by_operator, ("resume", "--lift-only")), 1000),
    "a merger": (then(nothing, ("merge",)), 1000),
    "a merger of a rollback": (then(by_operator, ("resume",), ("merge",)), 1000),
    "a base": (then(nothing, ("merge", "--rebase")), 1000),
    "a base of a rollback": (then(by_operator, ("resume", "--lift-only"), ("merge", "--rebase")), 1000),
}
"""What a copy does, and the last step that its servers may have then."""


def merged_and_forgotten(life: Life) -> None:
    life.train(40)
    typed("merge", life.url)
    publisher = life.copy.with_name("publisher")
    pull(life.url, publisher)
    for delta in read_log(publisher).deltas:
        if delta.start > 10 or delta.end < 40:
            shutil.rmtree(delta.path)
    pushed(publisher, life.url, prune=True)


EVENTS: Mapping[str, Callable[[Life], None]] = {
    "nothing": nothing,
    "the next step": lambda life: life.train(31),
    "the step after": lambda life: life.train(32),
    "two steps": lambda life: life.train(40, 50),
    "a merger": lambda life: typed("merge", life.url),
    "the next step, merged": lambda life: (life.train(31), typed("merge", life.url))[0],
    "the step after, merged": lambda life: (life.train(32), typed("merge", life.url))[0],
    "two steps, merged": lambda life: (life.train(40, 50), typed("merge", life.url))[0],
    "a merger, its parts gone": merged_and_forgotten,
    "a base": lambda life: typed("merge", life.url, "--rebase"),
    "the next step, as a base": lambda life: (life.train(31), typed("merge", life.url, "--rebase"))[0],
    "a later step, as a base": lambda life: (life.train(40), typed("merge", life.url, "--rebase"))[0],
    "another log, at the next step": lambda life: life.begin_log(31),
    "another log": lambda life: life.begin_log(40),
    "the same rollback": lambda life: typed("rollback", life.url, "--to", 20),
    "another rollback": lambda life: typed("rollback", life.url, "--to", 10),
    "a rollback and its resumption": lambda life: (
        typed("rollback", life.url, "--to", 10),
        typed("resume", life.url),
    )[0],
    "a tag": lambda life: typed("tag", life.url, "prod", 20),
}


@pytest.mark.landing
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("act", list(ACTS) if THOROUGH else list(ACTS)[:2])
def test_nothing_that_a_copy_did_stops_a_pull(
    act: str, event: str, machine: Machine, url: str, tmp_path: Path
) -> None:
    life = Life(machine, url, tmp_path)
    does, limit = ACTS[act]
    does(life)
    life.pull(limit)
    EVENTS[event](life)
    is_canarys = "canary" in act and ("another log" in event or ("as a base" in event and "," in act))
    life.pull(1000 if is_canarys else limit)  # only deltas can wait for a canary's hold
    life.end()


@pytest.mark.parametrize(
    ("act", "event"),
    [
        ("an operator's rollback", "two steps"),
        ("an operator's rollback, resumed", "the step after, merged"),
        ("a canary's rollback to the base", "the next step, merged"),
        ("a merger of a rollback", "the step after, merged"),
        ("a base", "a base"),
        ("an operator's rollback", "another log, at the next step"),
    ],
)
def test_these_in_the_first_tier(act: str, event: str, machine: Machine, url: str, tmp_path: Path) -> None:
    test_nothing_that_a_copy_did_stops_a_pull(act, event, machine, url, tmp_path)


@pytest.mark.landing
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("act", list(ACTS) if THOROUGH else list(ACTS)[4:6])
def test_what_a_pull_proposes_leads_on(
    act: str, event: str, machine: Machine, url: str, tmp_path: Path
) -> None:
    life = Life(machine, url, tmp_path)
    ACTS[act][0](life)
    life.pull()
    EVENTS[event](life)
    newest = read_log(life.copy).at.position
    done = life.obey()
    assert not done.waiting or max(map(end_of, done.waiting)) <= newest, "only the store can go on"
    life.end()


def test_a_base_is_proposed_where_a_merger_would_begin_after_what_was_taken_back(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    life = Life(machine, url, tmp_path)
    typed("merge", url, "--rebase")
    life.pull()
    life.train(40)
    life.pull()
    by_operator(life, 20)
    life.train(50)
    assert pull(url, life.copy).way_on == f"export-model merge {url} --rebase"
    assert life.obey().waiting == ()


@pytest.mark.parametrize(
    "act",
    [
        "an operator's rollback",
        "an operator's rollback, resumed",
        "an operator's rollback, accepted",
        "a canary's rollback",
        "a canary's rollback, resumed",
        "a merger of a rollback",
    ],
)
def test_a_rollback_of_the_store_reaches_a_copy_that_has_used_its_number(
    act: str, machine: Machine, url: str, tmp_path: Path
) -> None:
    life = Life(machine, url, tmp_path)
    ACTS[act][0](life)
    life.pull()
    typed("rollback", url, "--to", 10, "--reason", "NaN")
    for _ in range(2):
        assert life.pull(10) == ()
    found = Model.read(life.copy)
    assert found.held_by is not None
    assert (found.held_by.url, found.held_by.why, found.held_by.values_of) == (url, "NaN", 10)
    refused = export_model("resume", life.copy, "--json")
    assert f"export-model resume {url}" in refused.error["hint"]
    typed("resume", url)
    life.pull(ACTS[act][1])
    if not read_log(life.copy).hold.is_set:
        assert life.trained[life.first.bits] == 30, "what the store resumed"
    life.end()


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_signed_rollback_of_the_store_reaches_it_too(is_resumed: bool, url: str, tmp_path: Path) -> None:
    """One that ends before the copy's newest position may be an old one that somebody has put back."""
    private, public = key_pair(tmp_path)
    trust, copy, first = Trust.of([public], "ranker"), tmp_path / "copy", tmp_path / "one"
    with in_force(first / "model", Signer.of(str(private), "ranker")):
        pushed(machine_in(first).model, url)
    pull(url, copy, trust=trust)
    typed("rollback", copy, "--to", 20, "--unsigned")
    if is_resumed:
        typed("resume", copy, "--unsigned")
    typed("rollback", url, "--to", 10, "--sign-key", private)
    done = pull(url, copy, trust=trust)
    assert bool(done.untrusted) is is_resumed
    if is_resumed:
        again = done.untrusted[0].hint.partition("export-model ")[2]
        typed(*shlex.split(again), "--sign-key", private)
        done = pull(url, copy, trust=trust)
    assert not done.untrusted and done.repeated
    log = read_log(copy)
    assert_same_bits(values_at(log), values_at(log, 10))
    done = pull(url, copy, trust=trust)
    assert (done.untrusted, done.repeated, done.waiting) == ((), "", ())
    assert Model.read(copy).hold == log.at.position


def test_a_copy_that_is_further_back_than_its_store_stays(machine: Machine, url: str, tmp_path: Path) -> None:
    life = Life(machine, url, tmp_path)
    by_operator(life, 10)
    typed("rollback", url, "--to", 20)
    before = read_log(life.copy).at
    life.pull(10)
    assert read_log(life.copy).at == before
    life.end()


def test_a_copy_that_went_on_with_others_values_is_not_pushed(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    life = Life(machine, url, tmp_path)
    by_operator(life)
    life.train(40)
    typed("merge", url)
    life.pull()
    typed("resume", life.copy)
    refused = export_model("push", life.copy, url, "--json")
    assert (refused.code, refused.error["error"]) == (5, "PositionMoved"), refused.err
    with pytest.raises(Exception, match="took back"):
        plan_push(life.copy, url)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_rollback_while_something_arrives(
    is_killed: bool, machine: Machine, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was on its way must not be taken for what was there before."""
    life = Life(machine, url, tmp_path)
    life.train(40)
    announce = pulling._Pull._announce

    def interrupted(job: pulling._Pull, item: Item) -> None:
        announce(job, item)
        if is_killed:
            raise Killed
        if not read_log(life.copy).hold.is_set:
            by_operator(life)

    with monkeypatch.context() as patch:
        patch.setattr(pulling._Pull, "_announce", interrupted)
        with pytest.raises(Killed) if is_killed else nullcontext():
            pull(url, life.copy)
    if is_killed:
        by_operator(life)
    life.pull(20)
    life.end()


def test_a_merger_of_a_copy_leads_nobody_past_a_rollback_of_its_store(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    """The rollback begins where deltas of the store do; the copy merges others."""
    life = Life(machine, url, tmp_path)
    typed("merge", life.copy)
    typed("rollback", url, "--to", 20)
    pull(url, life.copy)
    late = Replica(life.copy)
    late.follow()
    assert [life.trained[bits] for bits in late.passed] == [10, 20, 20]
    life.end()
