"""`incremental_update` inside the graph: list a log, choose deltas, apply them until the target is reached.

A call answers with its position and a status (`exporter.wire.update_status`). A call for an explicit target
fails with the status as its message, unless the status is `reached`, `passed` or `merged`. A batch of calls
for several targets does not fail: one caller's target must not fail another.

The file has three parts: the update, the listing of a log's directory (an update with nothing to do reads
nothing else), and the turns, which let one call at a time update.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple, replace

from exporter.late_names import tf
from exporter.storage.layout import DELTAS_DIRECTORY, HOLD_FILE, MANIFEST_FILE
from exporter.subgraph.read_delta import Expected, attempt, read_delta
from exporter.subgraph.state import SETTLED, Tensor, UpdateState, assign
from exporter.subgraph.write_delta import (
    DeltaPlaces,
    UpdateTarget,
    position_vector,
    write_rows,
    write_snapshot,
)
from exporter.wire.update_status import ANOTHER_RUNS, UNREADABLE_HOLD, UpdateStatus

NEWEST = -1
"""The `up_to` that asks for the newest published position."""

NO_LIMIT = (1 << 63) - 1

_OCCUPIED = f"{ANOTHER_RUNS}; call again"
"""Clients of 0.1.0 call again on `merged` alone, so this status has to begin with that word."""

_DELTA = "/00[0-9]{18}-00[0-9]{18}"
_POSITION_DIGITS = 20
_NAME_LENGTH = 2 * _POSITION_DIGITS + 1
_NO_DELTA = "0" * _POSITION_DIGITS + "-" + "0" * _POSITION_DIGITS
_NONE = -1
_UNREADABLE = -2
"""Choices of no delta: none can be applied; read a missing one, to prepare the reading."""
_GLOB_CHARACTERS = r"([*?\[\\])"
_STORE = "(?s)[a-z0-9]+://.*"
_PHILOX = 1
_DRAWN_OF_ZEROS = -2204013331526194987
"""The first number that this algorithm draws from a state of zeros; each draw changes the state."""
# Readers wait for 0.7 to 1.7 ms per 100,000 slots (TensorFlow 2.21, one thread). With the default of
# `snapshot_max_rows` 64 M rows are applied at once: at most 1.1 s, and readers have patience for 2.
_SLOTS_A_ROW = 16


class UpdateRules(Struct, frozen=True):
    """The rules by which a base updates itself.

    `log`, string [], is the name of the log's directory. A delta of more than `snapshot_max_rows` rows and
    entries is written in chunks, outside the sequence. A row of an overlay counts a sixteenth: readers wait
    only for its slot, four bytes.
    """

    log: Tensor
    expected: Expected
    snapshot_max_rows: int


class UpdateProgress(Struct, frozen=True):
    """The variables of the loop that applies deltas.

    `choice`, int64 [], is the index of the next delta in the listing; -1 if there is none, -2 to read a
    missing one. `position`, int64 [3], is the position variable's value. `refused`, bool [n], marks the
    deltas that were refused; `refusal` is the first one's reason. `rows` and `deltas` count what was applied;
    `in_chunks` is true if any of it was written in chunks.
    """

    choice: Tensor
    position: Tensor
    refused: Tensor
    refusal: Tensor
    rows: Tensor
    deltas: Tensor
    in_chunks: Tensor

    @property
    def numbers(self) -> Tensor:
        """Return position, step, unfinished target (-1 if none), rows and deltas as one tensor, int64 [5]."""
        return tf.ensure_shape(tf.concat([self.position, [self.rows, self.deltas]], 0), [5])


class Outlook(Struct, frozen=True):
    """The situation in which an update begins: its start, the published deltas, and a limit.

    `limit` is the last position allowed. `explicit` is false if the caller asked for the newest position.
    `is_step` is true if `published` has only the delta from the present position to the wanted one
    (`list_step`).
    """

    start: UpdateProgress
    published: ListedDeltas
    explicit: Tensor
    limit: Tensor
    is_step: Tensor

    @classmethod
    def of(cls, wanted: Tensor, state: UpdateState, rules: UpdateRules, may_step: Tensor) -> Outlook:
        """Add nodes that read the position and list the log, and return the outlook of an update to `wanted`.

        `wanted`, int64 [], is the last position allowed, or `NO_LIMIT` for the newest one. If `may_step`,
        bool [], is true and the delta from the position to an explicit `wanted` is published, only that one
        is listed; otherwise all are.
        """
        position = state.read("position")
        explicit = tf.not_equal(wanted, NO_LIMIT)
        published, is_step = _list(wanted, position, state, rules, may_step & explicit)
        # The hold binds only a call for the newest position: a caller that names a target may go beyond it.
        limit = tf.where(explicit, wanted, published.hold)
        refused = tf.zeros_like(published.ends, tf.bool)
        zero = tf.zeros([], tf.int64)
        choice = _choose(published, limit, position, refused)
        start = UpdateProgress(choice, position, refused, tf.constant(""), zero, zero, tf.constant(False))
        return cls(start, published, explicit, limit, is_step)

    def result(self, end: UpdateProgress) -> tuple[Tensor, Tensor]:
        """Return position, step, unfinished target, rows and deltas at `end`, int64 [5], and the status."""
        return end.numbers, _status(end, self)


def update(up_to: Tensor, state: UpdateState, target: UpdateTarget, rules: UpdateRules) -> tuple[Tensor, ...]:
    """Add the nodes of an update; return position, step, rows, deltas, status and a refusal.

    They are int64 [n], except the status, string [n], and the refusal, string []. `up_to`, int64 [n], has the
    wanted positions, -1 for the newest. The update goes to the smallest of them; the status of rows that want
    another one is `merged`. The refusal is empty, or the message with which the caller has to let the call
    fail: a number below -1 was given, or an explicit target was not reached and every row of the batch asked
    for that target.
    """
    # A batching server may merge calls: the batch goes to the smallest target, and the status asks the other
    # rows' callers to call again. No caller ever gets beyond the position that it asked for.
    valid = tf.reduce_all(up_to >= NEWEST)
    wanted = tf.where(up_to < 0, tf.constant(NO_LIMIT, tf.int64), up_to)
    least = tf.where(valid, tf.reduce_min(wanted), 0)  # no delta ends at 0: nothing is done
    numbers, status = _update_in_turn(least, state, target, rules)
    position, step, unfinished, rows, deltas = tf.unstack(numbers)
    missed = tf.not_equal(least, NO_LIMIT) & ((position < least) | tf.not_equal(unfinished, SETTLED))
    missed &= tf.not_equal(status, _OCCUPIED)
    its_own = tf.equal(wanted, least)
    refusal = tf.where(missed & tf.reduce_all(its_own), status, "")
    refusal = tf.where(valid, refusal, "up_to is a position, or -1 for the newest")
    merged = tf.strings.join(
        [f"{UpdateStatus.MERGED}: with a call for ", tf.strings.as_string(least), "; call again"]
    )
    numbers = (tf.fill(tf.shape(up_to), number) for number in (position, step, rows, deltas))
    return *numbers, tf.where(its_own, status, merged), refusal


def _update_in_turn(
    wanted: Tensor, state: UpdateState, target: UpdateTarget, rules: UpdateRules
) -> tuple[Tensor, Tensor]:
    """Add an update to `wanted`, int64 [] (`NO_LIMIT`: the newest), run by one call at a time.

    Returns the numbers, int64 [5], and the status of `Outlook.result`; if another call is updating, nothing
    is written and the status is `_OCCUPIED`. A call without work does not use the turn, except the first
    call, which sets `warm`.
    """
    outlook = Outlook.of(wanted, state, rules, tf.constant(True))

    def run() -> tuple[Tensor, Tensor]:
        numbers, status = _look_and_follow(wanted, state, target, rules)
        # Last: a first call that fails stays the first, and prepares the rest the next time.
        with tf.control_dependencies([numbers]):
            warmed = assign(state.warm, tf.constant(True))
        with tf.control_dependencies([warmed]):
            return tf.identity(numbers), status

    def take_turn() -> tuple[Tensor, Tensor]:
        occupied = outlook.start.numbers, tf.constant(_OCCUPIED)
        numbers, status = one_at_a_time(state, run, occupied)
        return tf.ensure_shape(numbers, [5]), tf.ensure_shape(status, [])

    has_work = (outlook.start.choice >= 0) | tf.not_equal(outlook.start.position[2], SETTLED)
    # The first call always takes a turn: if it is a warm-up record, the server prepares the whole function
    # before a client's update has to wait for that.
    is_cold = tf.logical_not(state.read("warm"))
    numbers, status = tf.cond(has_work | is_cold, take_turn, lambda: outlook.result(outlook.start))
    return numbers, status


def _look_and_follow(
    wanted: Tensor, state: UpdateState, target: UpdateTarget, rules: UpdateRules
) -> tuple[Tensor, Tensor]:
    """Add the nodes that list deltas and apply them up to `wanted`, int64 [] (`NO_LIMIT`: the newest).

    Returns the numbers, int64 [5], and the status of `Outlook.result`. If the single delta listed for an
    explicit target is refused, the whole log is listed and tried.
    """

    def look(may_step: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        # Read the position and list again, now in the turn: before it, another call may have updated.
        outlook = Outlook.of(wanted, state, rules, may_step)
        end = _follow(outlook, state, target, rules)
        # A single step that was refused may have an alternative: the second round lists the whole log.
        again = outlook.is_step & tf.reduce_any(end.refused)
        return tf.constant(False), again, *outlook.result(end)

    _, _, numbers, status = tf.while_loop(
        lambda _, again, *__: again,
        look,
        [tf.constant(True), tf.constant(True), tf.zeros([5], tf.int64), tf.constant("")],
        parallel_iterations=1,
    )
    return numbers, status


def _list(
    wanted: Tensor, position: Tensor, state: UpdateState, rules: UpdateRules, may_step: Tensor
) -> tuple[ListedDeltas, Tensor]:
    """Add nodes that list the published deltas; return the listing and true, bool [], if it is a single step.

    A single step, the delta from `position`, int64 [3], to `wanted`, is listed if `may_step` is true and it
    is published; otherwise the whole log is listed.
    """
    base = state.read("base")
    step = list_step(base, rules.log, position[0], wanted)
    # With a thousand deltas a look takes 30 us, a listing 4 to 5 ms. It is looked for only where it can be
    # used: in a store each look is a request.
    is_step = tf.cond(
        may_step & (wanted > position[0]), lambda: is_published(step), lambda: tf.constant(False)
    )
    found = tf.cond(
        is_step,
        lambda: [tf.identity(field) for field in astuple(step)],
        lambda: [*astuple(list_published(base, rules.log))],
    )
    return ListedDeltas(*found), is_step


def _choose(published: ListedDeltas, limit: Tensor, position: Tensor, refused: Tensor) -> Tensor:
    """Return the index in `published` of the applicable delta with the greatest end, or -1: int64 [].

    It is -1 if no delta is applicable. Applicable are deltas that are not `refused`, bool [n], begin at or
    before the position, and end beyond it, at most at `limit`, and not before the target of an unfinished
    update. Of equal ends the delta that begins last is chosen.
    """
    fits = (published.starts <= position[0]) & (published.ends > position[0]) & tf.logical_not(refused)
    # After an update that died half-way (position[2]) only a delta that ends at least there overwrites all
    # that it may have written.
    fits &= (published.ends <= limit) & (published.ends >= position[2])
    # Of deltas with one end, `argmax` takes the first, which begins last and is smallest: names descend.
    return tf.where(tf.reduce_any(fits), tf.argmax(tf.where(fits, published.ends, _NONE)), _NONE)


def _follow(outlook: Outlook, state: UpdateState, target: UpdateTarget, rules: UpdateRules) -> UpdateProgress:
    """Add the loop that applies deltas, each time the one with the greatest end, until none applies.

    Returns the progress at the end; a refused delta is not tried again. If there is no delta and the base is
    not `warm`, the loop reads a delta that does not exist, which changes nothing.
    """
    published, start = outlook.published, outlook.start
    # A server prepares how a delta is read when it reads the first one: for 90 ms, beside the 15 that a delta
    # of 100,000 rows takes. So the first call, a warm-up record as a rule, reads one even if there is none.
    is_idle = tf.equal(start.choice, _NONE) & tf.logical_not(state.read("warm"))
    choice = tf.where(is_idle, tf.constant(_UNREADABLE, tf.int64), start.choice)
    first = [*astuple(replace(start, choice=choice))]
    # Index 0 is a delta without a name, which cannot be read.
    ends = tf.concat([tf.zeros([1], tf.int64), published.ends], 0)
    names = tf.concat([[""], published.names], 0)

    def advance(*variables: Tensor) -> list[Tensor]:
        before = UpdateProgress(*variables)
        is_there = before.choice >= 0
        index = tf.where(is_there, before.choice + 1, 0)
        end, name = tf.gather(ends, index), tf.gather(names, index)
        delta = read_delta(published.directory, name, before.position[0], rules.expected)
        places = target.places(delta)
        if places:
            delta = replace(delta, refusal=_without_room(name, delta.refusal, target.full_overlay(places)))
        accepted = tf.equal(delta.refusal, "")
        overlaid = _count_overlaid(target, places)
        waited_for = delta.rows - overlaid + overlaid // _SLOTS_A_ROW + delta.entries
        at_once = waited_for <= rules.snapshot_max_rows

        def write() -> Tensor:
            # The next position depends on the last write, and the call's results on the position: a server
            # runs only what outputs need, so a write that no output depends on would not run.
            under_way = position_vector(before.position[0], before.position[1], end)
            done = position_vector(end, delta.step)
            written = tf.cond(
                at_once,
                lambda: _and_then(write_snapshot(state, target, delta, places, under_way, done), done),
                lambda: _and_then(write_rows(state, target, delta, places, under_way, done), done),
            )
            return tf.ensure_shape(written, [3])

        position = tf.cond(accepted, write, lambda: tf.identity(before.position))
        # A refused delta is not chosen a second time; another one may span it.
        this = tf.equal(tf.range(tf.size(published.ends, tf.int64)), before.choice)
        refused = before.refused | (this & tf.logical_not(accepted))
        after = UpdateProgress(
            choice=_choose(published, outlook.limit, position, refused),
            position=position,
            refused=refused,
            refusal=tf.where(is_there & tf.equal(before.refusal, ""), delta.refusal, before.refusal),
            rows=before.rows + tf.where(accepted, delta.rows, 0),
            deltas=before.deltas + tf.cast(accepted, tf.int64),
            in_chunks=before.in_chunks | (accepted & tf.logical_not(at_once)),
        )
        return [*astuple(after)]

    shapes = [variable.shape for variable in first]
    found = tf.while_loop(
        lambda choice, *_: tf.not_equal(choice, _NONE),
        advance,
        first,
        shape_invariants=shapes,
        parallel_iterations=1,
    )
    return UpdateProgress(*found)


def _without_room(name: Tensor, refusal: Tensor, full: Tensor) -> Tensor:
    """Return the refusal, string [], of the delta `name`: an overlay lacks room, or `refusal` if none does.

    `full` is the text of `UpdateTarget.full_overlay`, empty if there is room; otherwise `refusal` is lost.
    """
    text = " changes more rows of ", full, " overlay has room for"
    said = tf.strings.join([f"{UpdateStatus.OVERLAY}: ", name, *text])
    return tf.where(tf.equal(full, ""), refusal, said)


def _and_then(operation: Tensor, value: Tensor) -> Tensor:
    """Return a copy of the value that is computed only after the operation has run."""
    with tf.control_dependencies([operation]):
        return tf.identity(value)


def _status(end: UpdateProgress, outlook: Outlook) -> Tensor:
    """Return the reason why the update that began with `outlook` stopped at `end`: a status, string [].

    Its first word is an `UpdateStatus`.
    """
    published, explicit, limit = outlook.published, outlook.explicit, outlook.limit
    position, unfinished = end.position[0], end.position[2]
    here, wanted = tf.strings.as_string(position), tf.strings.as_string(limit)
    further = published.ends > position
    begun = published.starts <= position
    beyond = published.ends > limit
    died, still = [f"{UpdateStatus.INTERRUPTED}: an update to "], " died half-way; still at "
    cases = [
        (tf.not_equal(unfinished, SETTLED), [*died, tf.strings.as_string(unfinished), still, here]),
        (explicit & tf.equal(position, limit), [f"{UpdateStatus.REACHED}: ", here]),
        (explicit & (position > limit), [f"{UpdateStatus.PASSED}: at ", here, ", beyond ", wanted]),
        (
            published.unlisted,
            [f"{UpdateStatus.UNLISTED}: ", published.directory, " cannot be listed; at ", here],
        ),
        (tf.reduce_any(end.refused & further & begun), [end.refusal]),
        (tf.logical_not(explicit) & (limit < 0), [f"{UNREADABLE_HOLD}; still at ", here]),
        (
            tf.logical_not(explicit) & tf.reduce_any(further & beyond),
            [f"{UpdateStatus.HOLD}: not beyond ", wanted, "; at ", here],
        ),
        (
            tf.reduce_any(further & begun & beyond),
            [f"{UpdateStatus.INSIDE}: ", wanted, " lies inside a delta; at ", here],
        ),
        (tf.reduce_any(further), [f"{UpdateStatus.GAP}: no delta leads on from ", here]),
        (explicit, [f"{UpdateStatus.UNPUBLISHED}: nothing leads to ", wanted, "; at ", here]),
    ]
    status = tf.strings.join([f"{UpdateStatus.CURRENT}: at ", here])
    for condition, texts in reversed(cases):  # the first case is applied last, and so wins
        status = tf.where(condition, tf.strings.join(texts), status)
    return tf.strings.join([status, tf.where(end.in_chunks, " (rows written in chunks)", "")])


class ListedDeltas(Struct, frozen=True):
    """The deltas in a log's directory, newest first, with a last entry that no update chooses.

    `names` string [n], `starts` and `ends` int64 [n]. `hold`, int64 [], is the position beyond which an
    update to -1 does not go; negative if its file cannot be read. `unlisted`, bool [], is true if it is
    unknown what is published: the model's directory is missing or cannot be read.
    """

    directory: Tensor
    names: Tensor
    starts: Tensor
    ends: Tensor
    hold: Tensor
    unlisted: Tensor


def list_published(base: Tensor, log: Tensor) -> ListedDeltas:
    """Add nodes that list the log `log`, string [], in the model's directory `base`; return its deltas.

    Entries other than deltas and the hold file are ignored. A log that cannot be read counts as empty; if the
    model's directory lists nothing either, `unlisted` is true.
    """
    directory = _log_directory(base, log)
    paths, hold = _list_and_hold(directory)
    ends = tf.strings.substr(tf.strings.join(["/" + _NO_DELTA, paths]), -_NAME_LENGTH - 1, _NAME_LENGTH + 1)
    listed = tf.boolean_mask(ends, tf.strings.regex_full_match(ends, _DELTA))
    names = tf.strings.substr(tf.concat([tf.reverse(listed, [0]), ["/" + _NO_DELTA]], 0), 1, _NAME_LENGTH)
    starts, stops = (
        tf.strings.to_number(tf.strings.substr(names, begin, _POSITION_DIGITS), tf.int64)
        for begin in (0, _POSITION_DIGITS + 1)
    )
    # An empty log and an unreadable one list alike. A model's directory holds at least the version that runs
    # here: if that lists nothing either, the directory was moved or unmounted.
    is_gone = tf.cond(
        tf.size(paths) > 0,
        lambda: tf.constant(False),
        lambda: tf.equal(tf.size(_match(_within(base, "*")[None])), 0),
    )
    return ListedDeltas(directory, names, starts, stops, hold, is_gone)


def list_step(base: Tensor, log: Tensor, start: Tensor, end: Tensor) -> ListedDeltas:
    """Return a listing with only the delta from `start` to `end`, int64 [], whether it is published or not.

    It is of the log `log` in the model's directory `base`. Nothing is read: the hold is `NO_LIMIT`, and
    `unlisted` is false.
    """
    # For a call from `start` to the explicit target `end` the whole log's listing would choose this delta,
    # too; this costs the same however many deltas there are. An explicit target is not subject to the hold.
    digits = (tf.strings.as_string(p, width=_POSITION_DIGITS, fill="0") for p in (start, end))
    return ListedDeltas(
        _log_directory(base, log),
        names=tf.stack([tf.strings.join(list(digits), separator="-"), _NO_DELTA]),
        starts=tf.stack([start, tf.zeros_like(start)]),
        ends=tf.stack([end, tf.zeros_like(end)]),
        hold=tf.constant(NO_LIMIT, tf.int64),
        unlisted=tf.constant(False),
    )


def is_published(step: ListedDeltas) -> Tensor:
    """Add nodes that look for the delta of a `list_step`; return true, bool [], if it is published.

    In a store it is published once its manifest exists, in a file system once its directory does.
    """
    whole = tf.strings.join([_within(step.directory, ""), step.names[0], "/" + MANIFEST_FILE])
    in_store = tf.strings.regex_full_match(step.directory, _STORE)
    path = tf.where(in_store, whole, tf.strings.regex_replace(whole, "/[^/]*$", ""))
    return tf.size(_match(path[tf.newaxis])) > 0


def _log_directory(base: Tensor, log: Tensor) -> Tensor:
    return tf.strings.join([base, DELTAS_DIRECTORY, log], separator="/")


def _list_and_hold(directory: Tensor) -> tuple[Tensor, Tensor]:
    """Return the paths in a log's directory, as `_list_log` does, and the position of the hold, int64 [].

    The hold is `NO_LIMIT` without a hold file, -1 if the file cannot be read.
    """
    path = tf.strings.join([directory, HOLD_FILE], separator="/")

    def held() -> tuple[Tensor, Tensor]:
        # List again, after the hold was read. A rollback publishes its delta first and then moves the hold:
        # an older listing with the new hold would lack that delta, and go on to what was rolled back.
        hold = _read_hold(path)
        with tf.control_dependencies([hold]):
            return _list_log(tf.identity(directory)), hold

    paths = _list_log(directory)
    # The hold is read only where its file is listed: each failed read writes a line into the server's log.
    is_held = tf.reduce_any(tf.equal(paths, path))
    paths, hold = tf.cond(is_held, held, lambda: (paths, tf.constant(NO_LIMIT, tf.int64)))
    return tf.ensure_shape(paths, [None]), hold


def _read_hold(path: Tensor) -> Tensor:
    """Return the position in the hold's file at `path`, int64 []; -1 if it is unreadable or not a number."""
    (position,) = attempt(
        path,
        lambda file: (tf.strings.to_number(tf.strings.strip(tf.io.read_file(file)), tf.int64),),
        (tf.constant(_NONE, tf.int64),),
    )
    return tf.ensure_shape(position, [])


def _list_log(directory: Tensor) -> Tensor:
    """Return the paths in a log's directory, string [n], sorted; none if it cannot be read.

    In a file system these are all entries; in a store the hold file and each directory with a manifest.
    """
    # In a file system a delta appears by a rename, whole. A store has no renames: behind `gs://` a delta's
    # directory exists as soon as one of its files does, so its manifest counts, which is written last.
    # Only there: listing `*/<file>` looks into each directory, 144 ms for 1,000 deltas against 3 ms for `*`.
    in_store = tf.strings.regex_full_match(directory, _STORE)
    whole = _within(directory, f"*/{MANIFEST_FILE}")
    patterns = tf.stack([_within(directory, "*"), whole, _within(directory, HOLD_FILE)])
    paths = _match(tf.boolean_mask(patterns, tf.stack([tf.logical_not(in_store), in_store, in_store])))
    return tf.strings.regex_replace(paths, f"/{re.escape(MANIFEST_FILE)}$", "")


def _within(directory: Tensor, pattern: str) -> Tensor:
    """Return the pattern `<directory>/<pattern>` for `MatchingFiles`, with `directory` taken literally."""
    literal = tf.strings.regex_replace(directory, _GLOB_CHARACTERS, r"\\\1")
    return tf.strings.join([literal, pattern], separator="/")


def _match(patterns: Tensor) -> Tensor:
    """Return the paths that match any of `patterns`, string [n], sorted; none if that cannot be read."""
    (paths,) = attempt(patterns, lambda each: (tf.io.matching_files(each),), (tf.constant([], tf.string),))
    return tf.ensure_shape(paths, [None])


def _count_overlaid(target: UpdateTarget, places: DeltaPlaces) -> Tensor:
    """Return the number of a delta's rows that go into overlays, int64 []; 0 if the delta is refused.

    `places` is a result of `target.places`; a table with two overlays counts once.
    """
    # A table that two variables hold has two overlays.
    tables = target.layout.overlays
    sizes = {tables[overlay]: tf.size(found.rows, tf.int64) for overlay, found in places.items()}
    return tf.add_n([tf.constant(0, tf.int64), *sizes.values()])


def one_at_a_time(
    state: UpdateState, part: Callable[[], Sequence[Tensor]], occupied: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Add nodes that run `part` unless another call runs it; return the results of `part`, else `occupied`.

    `occupied` has a value of the same dtype for each result. All reads of `part` come after its call has the
    turn.

    No call waits, since each waiting call would block a thread of the server: a call either gets the turn or
    returns `occupied` at once. While nothing is updated, a turn costs nothing.
    """
    # A turn is the life of an anonymous iterator, which nobody iterates: `holder` has its name, and a call
    # that finds an iterator of that name knows that another call has the turn. The iterator's deleter is a
    # tensor of the call's. When that tensor is freed, the iterator no longer exists
    # (tensorflow/core/framework/resource_mgr.h, `ResourceDeleter`). TensorFlow frees it when the last
    # operation that the call started has ended, also if the call failed or was cancelled. Names are not used
    # twice, so an iterator that was deleted stays deleted.
    #
    # Four alternatives fall short. A cancelled waiter of a `MutexLock` unlocks it, whichever call holds it
    # (mutex_ops.cc, `AcquireAsync`). A `BatchFunction` looks into its queue each millisecond, and each call
    # that waits in it holds a thread (shared_batch_scheduler.h, `ThreadLogic`). With its adaptive scheduler
    # it starts 128 threads, runs two batches at once if the clock is set back while one is added, and may use
    # a scheduler that was deleted with its model (adaptive_shared_batch_scheduler.h, `CallbackWrapper`). The
    # constructor of a `GeneratorDataset`, whose last function could release the turn, makes the C library map
    # each tensor of 128 KiB and more anew, for all models of the process (generator_dataset_op.cc, 2.21 on).
    function = tf.compat.v1.wrap_function(part, [])
    dtypes = [output.dtype for output in function.outputs]

    def call(_: Tensor) -> tuple[Tensor, ...]:
        # A function of its own, because TensorFlow optimizes the function of a dataset, which takes seconds
        # for a large one, but leaves those that it calls as they are (`GraphEditor.function`, `as_written`).
        return tuple(
            tf.raw_ops.StatefulPartitionedCall(args=function.captured_inputs, Tout=dtypes, f=function)
        )

    kind = {"output_types": [tf.int64], "output_shapes": [tf.TensorShape([])]}
    iterator, deleter = tf.raw_ops.AnonymousIteratorV2(**kind)
    name = tf.raw_ops.IteratorToStringHandle(resource_handle=iterator)
    before = state.read("holder")[0]
    (is_held,) = attempt(
        before,
        lambda other: (_exists(other, kind),),
        (tf.constant(False),),
        condition=lambda other: tf.not_equal(other, ""),
    )
    # All that may fail or be cancelled comes before or after the few operations that acquire the turn.
    with tf.control_dependencies([name, is_held, *occupied]):
        is_taken = _take(state, name, before, is_held)
    # A filter and a fallback element instead of `tf.cond`: servers with `enable_mlir_graph_optimization` fail
    # at what grappler makes of the branches.
    own = tf.data.Dataset.from_tensors(is_taken).filter(tf.identity).map(call)
    either = own.concatenate(tf.data.Dataset.from_tensors(tuple(occupied))).take(1)
    found: Sequence[Tensor] = either.get_single_element()
    # Without a name the next call does not look for an iterator: a server logs each that it does not find.
    with tf.control_dependencies(found):
        nameless = _write_if(is_taken, state.holder, tf.constant(""))
    with tf.control_dependencies([nameless]):
        ended = tf.raw_ops.DeleteIterator(handle=iterator, deleter=deleter)
    with tf.control_dependencies([ended]):
        return [tf.identity(each) for each in found]


def _exists(name: Tensor, kind: Mapping[str, Any]) -> Tensor:
    """Add a lookup of the iterator `name`, string []; return true, bool [].

    The lookup fails when run if no iterator has that name. `kind` has the iterator's `output_types` and
    `output_shapes`.
    """
    found = tf.raw_ops.IteratorFromStringHandleV2(string_handle=name, **kind)
    with tf.control_dependencies([found]):
        return tf.constant(True)


def _take(state: UpdateState, name: Tensor, before: Tensor, is_held: Tensor) -> Tensor:
    """Add a test-and-set that makes `name` the holder; return true, bool [], if this call now has the turn.

    `holder` is set only if it is still `before`, that holder's iterator no longer exists (`is_held` is
    false), and no other call is between these operations.
    """
    # A call between the first operation and the last keeps all others out. These operations cannot be
    # cancelled: they are a straight line of kernels that only compute.
    # The first is a test-and-set: a stock operation of every TensorFlow from 1.15 on that changes a variable
    # under a lock, and whose result depends on its old value, with a shape that TensorFlow 2 can infer.
    drawn = tf.raw_ops.StatefulUniformFullInt(
        resource=state.turn, algorithm=tf.constant(_PHILOX, tf.int64), shape=[1], dtype=tf.int64
    )
    is_alone = tf.equal(drawn[0], _DRAWN_OF_ZEROS)
    with tf.control_dependencies([drawn]):
        is_free = tf.equal(state.read("holder")[0], before) & tf.logical_not(is_held) & is_alone
    written = _write_if(is_free, state.holder, name)
    with tf.control_dependencies([written]):
        left = _write_if(is_alone, state.turn, tf.constant(0, tf.int64))
    with tf.control_dependencies([left]):
        return tf.identity(is_free)


def _write_if(condition: Tensor, variable: Tensor, value: Tensor) -> Tensor:
    """Add the operation that sets element 0 of a variable to the scalar `value` if `condition`; return it.

    `variable` is the variable's handle.
    """
    # A scatter without indices writes nothing. No `tf.cond`, see `one_at_a_time`.
    first = tf.range(tf.cast(condition, tf.int32))
    values = tf.fill(tf.shape(first), value)
    return tf.raw_ops.ResourceScatterUpdate(resource=variable, indices=first, updates=values)
