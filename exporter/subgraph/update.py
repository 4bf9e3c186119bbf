"""`incremental_update` inside the graph: list deltas, choose, read, check and apply until the target is
reached.

A status is `<word>: <why>`; the words:

    reached      the wanted position (several deltas may have been applied on the way)
    current      nothing is published beyond the position
    passed       the wanted position lies behind: nothing was done
    hold         the log is held; -1 does not go beyond that
    gap          deltas lead further, but none of them begins at or before the position
    inside       the wanted position lies between the ends of the deltas that lead on
    unpublished  nothing is published that leads as far as wanted
    unlisted     the log's directory is gone or cannot be read: what is published is unknown
    merged       call again: another update runs, or a batching server merged the call with one for a
                 smaller target
    interrupted  an earlier update died half-way, and no delta leads as far as it was going
    damaged, format, lineage, schema, range, only-from, rows, finite
                 why the first delta was refused, if nothing else led on

With an explicit target everything but `reached`, `passed` and `merged` is an error that carries the status,
unless the call was merged with calls for something else: these are not to fail by it.
"""

from __future__ import annotations

from msgspec import Struct

from exporter.subgraph.list_deltas import NO_LIMIT, ListedDeltas, is_published, list_published, list_step
from exporter.subgraph.read_delta import Expected, read_delta
from exporter.subgraph.state import SETTLED, Tensor, UpdateState, assign
from exporter.subgraph.turns import one_at_a_time
from exporter.subgraph.write_delta import UpdateTarget, position_vector, write_rows, write_snapshot

NEWEST = -1
"""The `up_to` that asks for whatever is published."""

_NONE = -1
_OCCUPIED = "merged: another update runs; call again"
"""Clients of 0.1.0 know this word for "call again", and take any that they do not know for a refusal."""


class UpdateRules(Struct, frozen=True):
    """How updates are done: `log` names a directory, deltas of more rows than the limit go by chunks."""

    log: str
    expected: Expected
    snapshot_max_rows: int


class UpdateProgress(Struct, frozen=True):
    """Where an update stands: the loop's variables. `choice` is the next delta's index, -1 for none."""

    choice: Tensor
    position: Tensor
    refused: Tensor
    refusal: Tensor
    rows: Tensor
    deltas: Tensor
    in_chunks: Tensor

    @property
    def as_list(self) -> list[Tensor]:
        """The variables in order."""
        return [getattr(self, name) for name in self.__struct_fields__]


class Outlook(Struct, frozen=True):
    """The situation that an update finds; `limit` is how far it may go.

    `explicit` is false if it is to go as far as it can. `is_step` is true if only the delta was looked for
    that leads from the position to the wanted one.
    """

    start: UpdateProgress
    published: ListedDeltas
    explicit: Tensor
    limit: Tensor
    is_step: Tensor

    @classmethod
    def of(cls, wanted: Tensor, state: UpdateState, rules: UpdateRules, may_step: Tensor) -> Outlook:
        """Read the position, and list the log as far as need be."""
        import tensorflow as tf

        position = state.read_position()
        explicit = tf.not_equal(wanted, NO_LIMIT)
        published, is_step = _list(wanted, position, state, rules, may_step & explicit)
        limit = tf.where(explicit, wanted, published.hold)
        refused = tf.zeros_like(published.ends, tf.bool)
        zero = tf.zeros([], tf.int64)
        choice = _choose(published, limit, position, refused)
        start = UpdateProgress(choice, position, refused, tf.constant(""), zero, zero, tf.constant(False))
        return cls(start, published, explicit, limit, is_step)

    def result(self, end: UpdateProgress) -> tuple[Tensor, Tensor]:
        """Position, step, unfinished target, rows and deltas (int64 [5]); why the update stopped there."""
        import tensorflow as tf

        numbers = tf.concat([end.position, [end.rows, end.deltas]], 0)
        return tf.ensure_shape(numbers, [5]), _status(end, self)


def update(up_to: Tensor, state: UpdateState, target: UpdateTarget, rules: UpdateRules) -> tuple[Tensor, ...]:
    """Position, step, rows, deltas (int64) and status (string), each [n] as `up_to`; a refusal, string [].

    The refusal is empty, or the status with which the call is to fail: an explicit target was not reached,
    and no row wanted anything else.
    """
    import tensorflow as tf

    valid = tf.reduce_all(up_to >= NEWEST)
    wanted = tf.where(up_to < 0, tf.constant(NO_LIMIT, tf.int64), up_to)
    least = tf.where(valid, tf.reduce_min(wanted), 0)  # no delta leads to 0: nothing is done
    numbers, status = _update_in_turn(least, state, target, rules)
    position, step, unfinished, rows, deltas = tf.unstack(numbers)
    missed = tf.not_equal(least, NO_LIMIT) & ((position < least) | tf.not_equal(unfinished, SETTLED))
    missed &= tf.not_equal(status, _OCCUPIED)
    its_own = tf.equal(wanted, least)
    refusal = tf.where(missed & tf.reduce_all(its_own), status, "")
    refusal = tf.where(valid, refusal, "up_to is a position, or -1 for the newest")
    merged = tf.strings.join(["merged: with a call for ", tf.strings.as_string(least), "; call again"])
    numbers = (tf.fill(tf.shape(up_to), number) for number in (position, step, rows, deltas))
    return *numbers, tf.where(its_own, status, merged), refusal


def _update_in_turn(
    wanted: Tensor, state: UpdateState, target: UpdateTarget, rules: UpdateRules
) -> tuple[Tensor, Tensor]:
    """See `Outlook.result`. A call with nothing to do needs no turn."""
    import tensorflow as tf

    outlook = Outlook.of(wanted, state, rules, tf.constant(True))

    def run() -> tuple[Tensor, Tensor]:
        numbers, status = _look_and_follow(wanted, state, target, rules)
        with tf.control_dependencies([numbers]):
            warmed = assign(state.warm, tf.constant(True))
        with tf.control_dependencies([warmed]):
            return tf.identity(numbers), status

    def take_turn() -> tuple[Tensor, Tensor]:
        occupied = outlook.result(outlook.start)[0], tf.constant(_OCCUPIED)
        numbers, status = one_at_a_time(state.turn, run, occupied)
        return tf.ensure_shape(numbers, [5]), tf.ensure_shape(status, [])

    has_work = (outlook.start.choice >= 0) | tf.not_equal(outlook.start.position[2], SETTLED)
    # The first call has its turn in any case, so that warming it up prepares all of it.
    is_cold = tf.logical_not(state.read_warm())
    numbers, status = tf.cond(has_work | is_cold, take_turn, lambda: outlook.result(outlook.start))
    return numbers, status


def _look_and_follow(
    wanted: Tensor, state: UpdateState, target: UpdateTarget, rules: UpdateRules
) -> tuple[Tensor, Tensor]:
    """See `Outlook.result`; the whole log is listed where a single step does not do, or is refused."""
    import tensorflow as tf

    def look(may_step: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        outlook = Outlook.of(wanted, state, rules, may_step)  # what was true before the turn may not be now
        end = _follow(outlook, state, target, rules)
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
    """What is published, and whether that is the one delta from the position to the wanted one."""
    import tensorflow as tf

    base = state.read_base()
    step = list_step(base, rules.log, position[0], wanted)
    # Not looked for where it is not asked for: in a store each look is a request.
    is_step = tf.cond(
        may_step & (wanted > position[0]), lambda: is_published(step), lambda: tf.constant(False)
    )
    found = tf.cond(
        is_step,
        lambda: [tf.identity(field) for field in step.as_list],
        lambda: list_published(base, rules.log).as_list,
    )
    return ListedDeltas(*found), is_step


def _choose(published: ListedDeltas, limit: Tensor, position: Tensor, refused: Tensor) -> Tensor:
    """The index of the delta that leads furthest, not beyond `limit`; -1 if none leads on."""
    import tensorflow as tf

    fits = (published.starts <= position[0]) & (published.ends > position[0]) & tf.logical_not(refused)
    fits &= (published.ends <= limit) & (published.ends >= position[2])
    # The first of equals is the one that begins last: names are in descending order.
    return tf.where(tf.reduce_any(fits), tf.argmax(tf.where(fits, published.ends, _NONE)), _NONE)


def _follow(outlook: Outlook, state: UpdateState, target: UpdateTarget, rules: UpdateRules) -> UpdateProgress:
    """Apply one delta after the other, each time the one that leads furthest."""
    import tensorflow as tf

    published, first = outlook.published, outlook.start

    def advance(*variables: Tensor) -> list[Tensor]:
        before = UpdateProgress(*variables)
        end = tf.gather(published.ends, before.choice)
        name = tf.gather(published.names, before.choice)
        delta = read_delta(published.directory, name, before.position[0], rules.expected)
        accepted = tf.equal(delta.refusal, "")
        at_once = delta.rows + delta.entries <= rules.snapshot_max_rows

        def write() -> Tensor:
            under_way = position_vector(before.position[0], before.position[1], end)
            done = position_vector(end, delta.step)
            written = tf.cond(
                at_once,
                lambda: _and_then(write_snapshot(state, target, delta, under_way, done), done),
                lambda: _and_then(write_rows(state, target, delta, under_way, done), done),
            )
            return tf.ensure_shape(written, [3])

        position = tf.cond(accepted, write, lambda: tf.identity(before.position))
        this = tf.equal(tf.range(tf.size(published.ends, tf.int64)), before.choice)
        refused = before.refused | (this & tf.logical_not(accepted))
        return UpdateProgress(
            choice=_choose(published, outlook.limit, position, refused),
            position=position,
            refused=refused,
            refusal=tf.where(tf.equal(before.refusal, ""), delta.refusal, before.refusal),
            rows=before.rows + tf.where(accepted, delta.rows, 0),
            deltas=before.deltas + tf.cast(accepted, tf.int64),
            in_chunks=before.in_chunks | (accepted & tf.logical_not(at_once)),
        ).as_list

    return UpdateProgress(
        *tf.while_loop(
            lambda choice, *_: choice >= 0,
            advance,
            first.as_list,
            shape_invariants=[variable.shape for variable in first.as_list],
            parallel_iterations=1,
        )
    )


def _and_then(operation: Tensor, value: Tensor) -> Tensor:
    import tensorflow as tf

    with tf.control_dependencies([operation]):
        return tf.identity(value)


def _status(end: UpdateProgress, outlook: Outlook) -> Tensor:
    """Why the update stopped: the first of these that is so."""
    import tensorflow as tf

    published, explicit, limit = outlook.published, outlook.explicit, outlook.limit
    position, unfinished = end.position[0], end.position[2]
    here, wanted = tf.strings.as_string(position), tf.strings.as_string(limit)
    further = published.ends > position
    begun = published.starts <= position
    beyond = published.ends > limit
    cases = [
        (
            tf.not_equal(unfinished, SETTLED),
            [
                "interrupted: an update to ",
                tf.strings.as_string(unfinished),
                " died half-way; still at ",
                here,
            ],
        ),
        (explicit & tf.equal(position, limit), ["reached: ", here]),
        (explicit & (position > limit), ["passed: at ", here, ", beyond ", wanted]),
        (published.unlisted, ["unlisted: ", published.directory, " cannot be listed; at ", here]),
        (tf.reduce_any(end.refused & further & begun), [end.refusal]),
        (tf.logical_not(explicit) & (limit < 0), ["hold: its file cannot be read; still at ", here]),
        (
            tf.logical_not(explicit) & tf.reduce_any(further & beyond),
            ["hold: not beyond ", wanted, "; at ", here],
        ),
        (tf.reduce_any(further & begun & beyond), ["inside: ", wanted, " lies inside a delta; at ", here]),
        (tf.reduce_any(further), ["gap: no delta leads on from ", here]),
        (explicit, ["unpublished: nothing leads to ", wanted, "; at ", here]),
    ]
    status = tf.strings.join(["current: at ", here])
    for condition, texts in reversed(cases):
        status = tf.where(condition, tf.strings.join(texts), status)
    return tf.strings.join([status, tf.where(end.in_chunks, " (rows written in chunks)", "")])
