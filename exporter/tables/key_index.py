"""Rows for keys that come and go, from stock operations: the index of a table that is being trained.

    row_keys   int64 [capacity]   the key of each row; for a free row, its last key
    index      hash table         key -> row
    free       int64 [capacity]   a ring of the rows whose keys were removed
    cursors    int64 [3]          rows ever assigned; begin and end of the ring, which only grow
    changed    uint8 [capacity]   1 where a row was assigned to a key since that was last recorded
    removed    hash table         keys that were removed since that was last recorded

A key has a row if the index has it *and* the row names the key: a row that was assigned to two keys (see
below) belongs to the last one, and the other gets another row when it is met again. A row is in use if the
index maps its key to it. Rows are assigned in their order, those of removed keys last and the longest free
first: a step that has looked a key up still writes to the key's row after it was removed.

One caller at a time assigns rows to new keys (`tf.CriticalSection`, that is `MutexLock`); a worker that finds
all of its keys takes no lock. That kernel has a fault: a waiter that is cancelled, because its worker died,
opens the lock that another one holds. Then two keys may get the same row, or one key two rows. The first
costs one gradient and heals as said above, and the key that lost its row is recorded as removed; after the
second, one row stays unused, and so do rows that a worker was taking from keys when it died. They are found
when there is no other row left.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from exporter.errors import UsageError
from exporter.late_names import tf

Tensor = Any
Variable = Any

ABSENT = -1


MakeVariable = Callable[[str, Callable[[], Tensor]], Variable]
"""Makes a variable of this name and initial value that is neither trained nor saved."""


class KeyIndex:
    """Assigns a row to each of up to `capacity` keys; in graphs and eagerly.

    `at_home` is the context in which operations are placed on the index's device. `reset` is called with rows
    that had another key before, and adds the operation that sets them to initial values. With `shared` all
    sessions of a server use the same index; eagerly each object has its own.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        variable: MakeVariable,
        at_home: Callable[[], AbstractContextManager[Any]],
        reset: Callable[[Tensor], Any],
        *,
        shared: bool = True,
    ) -> None:
        if capacity < 1:
            raise UsageError(
                f"dynamic table {name!r} has a capacity of {capacity}", hint="capacity must be at least 1"
            )
        self.name, self.capacity, self._shared = name, capacity, shared
        self._at_home, self._reset = at_home, reset
        self.row_keys = variable("row_keys", lambda: tf.zeros([capacity], tf.int64))
        self.free = variable("free_rows", lambda: tf.zeros([capacity], tf.int64))
        self.cursors = variable("cursors", lambda: tf.zeros([3], tf.int64))
        self.changed = variable("changed", lambda: tf.zeros([capacity], tf.uint8))
        self.is_recorded = variable("is_recorded", lambda: tf.constant(False))
        self.index, self.removed = self._hash_table("index"), self._hash_table("removed")
        self._lock = tf.CriticalSection(shared_name=f"{name}/lock" if shared else None)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The variables of the index: `row_keys`, `free`, `cursors`, `changed`, `is_recorded`."""
        return (self.row_keys, self.free, self.cursors, self.changed, self.is_recorded)

    def locked(self, function: Callable[[], Tensor]) -> Tensor:
        """Run a function under the index's lock and return its result.

        Waits while another caller holds the lock. In a graph this adds the nodes that do so. The function
        itself must not use the lock.
        """
        if tf.executing_eagerly():
            return self._lock.execute(function)
        # `execute` adds to this collection, for locks that share resources; a MetaGraph could not hold it.
        noted = tf.compat.v1.get_default_graph().get_collection_ref("critical_section_executions")
        before = list(noted)
        result = self._lock.execute(function)
        noted[:] = before
        return result

    def find(self, keys: Tensor) -> Tensor:
        """Return the row of each key (int64 [n]): int64 [n], `ABSENT` for keys without a row.

        A key may occur several times. Takes no lock.
        """
        with self._at_home():
            rows = self._lookup(keys)
            # Without the maximum, a gather of row -1 fails on a CPU.
            named = tf.gather(self.row_keys, tf.maximum(rows, 0))
            return tf.where((rows >= 0) & tf.equal(named, keys), rows, tf.constant(ABSENT, tf.int64))

    def find_or_add(self, keys: Tensor) -> Tensor:
        """Return the row of each key (int64 [n], no key twice); a key without a row gets one, under the lock.

        New rows are recorded as changed; a reused row is set to initial values first. Waits while another
        caller holds the lock. Fails with InvalidArgumentError of TensorFlow, when it runs, if the table is
        full.
        """
        found = self.find(keys)
        with self._at_home():
            return tf.cond(
                tf.reduce_any(found < 0), lambda: self.locked(lambda: self._add(keys)), lambda: found
            )

    def remove(self, keys: Tensor, also: Callable[[Tensor], list[Any]]) -> Tensor:
        """Remove keys (int64 [n], no key twice) and free their rows, under the lock.

        Return the number that had a row (int64 scalar). `also` gets the freed rows and returns the operations
        on them, which run before other keys may get these rows. Removed keys are recorded if `is_recorded` is
        true.
        """

        def take_away() -> Tensor:
            rows = self.find(keys)
            gone, rows = tf.boolean_mask(keys, rows >= 0), tf.boolean_mask(rows, rows >= 0)
            # The key first, the ring last: nobody may get the row while `also` still resets it.
            removed = self.index.remove(gone)
            with _after(removed):
                done = [*also(rows), self._note_removed(gone)]
            with _after(*done):
                given, first, last = tf.unstack(self.cursors.read_value())
                count = tf.size(rows, tf.int64)
                places = (last + tf.range(count)) % self.capacity
                freed = self.free.scatter_update(tf.IndexedSlices(rows, places))
            with _after(freed):
                # After the ring's elements: the end of the ring says that they are there.
                counted = self.cursors.assign(tf.stack([given, first, last + count]))
            with _after(counted):
                return tf.identity(count)

        with self._at_home():
            return self.locked(take_away)

    def in_use(self) -> tuple[Tensor, Tensor]:
        """Return the rows in use, int64 ascending, and their keys, int64 in the order of the rows."""
        with self._at_home():
            keys = self.row_keys.read_value()[: self.cursors.read_value()[0]]
            is_used = tf.equal(self._lookup(keys), tf.range(tf.size(keys, tf.int64)))
            return tf.where(is_used)[:, 0], tf.boolean_mask(keys, is_used)

    def is_in_use(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether each of `rows` is in use, bool [n], and the key that it names, int64 [n]."""
        with self._at_home():
            keys = tf.gather(self.row_keys, rows)
            return tf.equal(self._lookup(keys), rows), keys

    def restore(self, keys: Tensor, rows: Tensor, also: Callable[[], list[Any]] = list) -> Any:
        """Add the operation that assigns `rows` to `keys` and removes all other keys; return it.

        `keys` and `rows` are int64 [n], no key and no row twice. The operation runs under the lock. `also`
        adds operations that run before the index has the new rows. The record of removed keys is cleared.
        Fails with InvalidArgumentError of TensorFlow, when it runs, if a row is beyond the capacity.
        """
        fits = tf.debugging.assert_less(
            tf.concat([[tf.constant(-1, tf.int64)], rows], 0),
            tf.constant(self.capacity, tf.int64),
            message=f"{self.name!r} has too little capacity",
        )

        def replace() -> Tensor:
            with _after(*also()):
                # Not `insert`: an import also removes all keys that the checkpoint lacks.
                imported = tf.raw_ops.LookupTableImportV2(
                    table_handle=self.index.resource_handle, keys=keys, values=rows
                )
                named = self.row_keys.assign(tf.scatter_nd(rows[:, tf.newaxis], keys, [self.capacity]))
                forgotten = self.removed.remove(self.removed.export()[0])
            with _after(imported, named, forgotten, *self._restore_free(rows)):
                return tf.constant(0)

        with self._at_home(), _after(fits):
            return self.locked(replace)

    def lay_over(self, keys: Tensor, rows: Tensor, removed: Tensor) -> Any:
        """Add the operation that drops `removed` keys, then assigns `rows` to `keys`, new or existing ones.

        Return it. All are int64 vectors, no key and no row twice; the operation runs under the lock. Other
        keys that have these rows lose them and are recorded as removed if `is_recorded` is true: other
        workers may have met new keys. Rows that become unused are free again.
        """

        def change() -> Tensor:
            left = tf.concat([self.find(removed), self.find(keys)], 0)
            lost = self._others_with(rows, keys)
            given, first, last = tf.unstack(self.cursors.read_value())
            free = tf.gather(self.free, (first + tf.range(last - first)) % self.capacity)
            most = tf.reduce_max(tf.concat([given[tf.newaxis], rows + 1], 0))
            # never assigned so far: free, unless in `rows`
            is_free = tf.cast(tf.range(most) >= given, tf.int64)
            for changed, value in ((free, 1), (tf.boolean_mask(left, left >= 0), 1), (rows, 0)):
                values = tf.fill([tf.size(changed)], tf.constant(value, tf.int64))
                is_free = tf.tensor_scatter_nd_update(is_free, changed[:, tf.newaxis], values)
            # Both read the index as it was before.
            with _after(is_free, lost):
                gone = self.index.remove(removed)
                forgotten = self._forget(lost)
            with _after(gone, *forgotten):
                # Before the index leads to the rows: `find` believes a row only if it names the key.
                named = self.row_keys.scatter_update(tf.IndexedSlices(keys, rows))
            with _after(named):
                inserted = self.index.insert(keys, rows)
            with _after(inserted, *self._set_free(is_free)):
                return tf.constant(0)

        with self._at_home():
            return self.locked(change)

    def take_changed(self) -> Tensor:
        """Return the rows that were assigned to keys since the last call, and clear this record.

        They are int64, ascending.
        """
        with self._at_home():
            rows = tf.where(tf.not_equal(self.changed.read_value(), 0))[:, 0]
            with _after(rows):
                zeros = tf.zeros_like(rows, tf.uint8)
                # Only the rows that were read: others may have been marked meanwhile.
                cleared = self.changed.scatter_update(tf.IndexedSlices(zeros, rows))
            with _after(cleared):
                return tf.identity(rows)

    def take_removed(self) -> Tensor:
        """Return the keys (int64, any order) that were removed since the last call, and clear this record.

        Some may exist again.
        """
        with self._at_home():
            keys, _ = self.removed.export()
            # Only the keys that were read: others may have been removed meanwhile.
            cleared = self.removed.remove(keys)
            with _after(cleared):
                return tf.identity(keys)

    def _lookup(self, keys: Tensor) -> Tensor:
        """Return the row that the hash table has for each key of a vector, `ABSENT` without one.

        The row may name another key.
        """
        return tf.ensure_shape(self.index.lookup(keys), [None])

    def _add(self, keys: Tensor) -> Tensor:
        """Assign a row to each of `keys` that still has none; return the rows of all keys, in their order.

        Only for callers that hold the lock. Free rows are determined anew if too few seem to be left. Fails
        with InvalidArgumentError of TensorFlow, when it runs, if there are too few.
        """
        # A row is complete before the index has it, and is marked as changed afterwards.
        # Once more, under the lock: another worker may have added some of them meanwhile.
        found = self.find(keys)
        new = tf.boolean_mask(keys, found < 0)
        count = tf.size(new, tf.int64)
        with _after(self._find_lost_rows(count)):
            given, first, last = tf.unstack(self.cursors.read_value())
        fresh = tf.minimum(count, self.capacity - given)
        again = count - fresh
        fits = tf.debugging.assert_less_equal(
            again, last - first, message=f"dynamic table {self.name!r} is full: give it more capacity"
        )
        with _after(fits):
            used = tf.gather(self.free, (first + tf.range(again)) % self.capacity)
            rows = tf.concat([given + tf.range(fresh), used], 0)
            lost = self._others_with(rows, new)
        with _after(lost):
            # Rows that were never used have their initial values still.
            ready = [self.row_keys.scatter_update(tf.IndexedSlices(new, rows)), self._reset(used)]
        with _after(*ready):
            counted = self.cursors.assign(tf.stack([given + fresh, first + again, last]))
        with _after(counted):
            inserted = self.index.insert(new, rows)
        with _after(inserted):
            ones = tf.ones_like(rows, tf.uint8)
            marked = self.changed.scatter_update(tf.IndexedSlices(ones, rows))
            forgotten = self._forget(lost)
        with _after(marked, *forgotten):  # no second lookup: others may have changed the index meanwhile
            return tf.tensor_scatter_nd_update(found, tf.where(found < 0), rows)

    def _others_with(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return the keys that lose these rows: an int64 vector, often empty.

        They have one of `rows` now, and are not the key in `keys` to which that row is assigned.
        """
        named = tf.gather(self.row_keys, rows)
        return tf.boolean_mask(named, tf.equal(self._lookup(named), rows) & tf.not_equal(named, keys))

    def _forget(self, keys: Tensor) -> list[Any]:
        """Add and return the operations that remove keys from the index and record them as removed.

        Nothing is recorded if `is_recorded` is false.
        """
        removed = self.index.remove(keys)
        with _after(removed):
            return [removed, self._note_removed(keys)]

    def _find_lost_rows(self, count: Tensor) -> Any:
        """Add the operation that finds free rows anew if fewer than `count` seem to be left; return it.

        `count` is an int64 scalar.
        """
        given, first, last = tf.unstack(self.cursors.read_value())

        def find() -> Tensor:
            with _after(*self._restore_free(self.in_use()[0])):
                return tf.constant(0)

        return tf.cond(count > self.capacity - given + last - first, find, lambda: tf.constant(0))

    def _note_removed(self, keys: Tensor) -> Any:
        """Add the operation that records keys as removed; it records nothing while `is_recorded` is false."""
        # Without a branch: after the caller's worker has died, no function is called any more.
        noted = tf.boolean_mask(keys, tf.fill([tf.size(keys)], self.is_recorded.read_value()))
        return self.removed.insert(noted, tf.zeros_like(noted))

    def _restore_free(self, rows: Tensor) -> list[Any]:
        """Add and return the assignments that free all rows up to the last of `rows`, except `rows`.

        `rows` are int64 [n]. Rows after the last one count as never assigned.
        """
        # With -1, as the maximum of no rows is the lowest int64.
        given = tf.reduce_max(tf.concat([[tf.constant(-1, tf.int64)], rows], 0)) + 1
        is_used = tf.scatter_nd(rows[:, tf.newaxis], tf.ones_like(rows), given[tf.newaxis])
        return self._set_free(1 - is_used)

    def _set_free(self, is_free: Tensor) -> list[Any]:
        """Add and return the assignments after which the rows with a 1 in `is_free` (int64) are free.

        Later rows were never assigned.
        """
        free = tf.where(tf.equal(is_free, 1))[:, 0]
        count, given = tf.size(free, tf.int64), tf.size(is_free, tf.int64)
        rest = tf.zeros([self.capacity - count], tf.int64)
        cursors = tf.stack([given, tf.zeros_like(given), count])
        return [self.free.assign(tf.concat([free, rest], 0)), self.cursors.assign(cursors)]

    def _hash_table(self, part: str) -> Any:
        # Not DenseHashTable, though faster: it reserves two
        # keys, empty and deleted, and here any key is legal.
        return tf.lookup.experimental.MutableHashTable(
            tf.int64,
            tf.int64,
            ABSENT,
            name=f"{self.name}/{part}",
            experimental_is_anonymous=not self._shared,
        )


def _after(*operations: Any) -> AbstractContextManager[Any]:
    """Return a context whose nodes run after these operations.

    Eagerly, operations are None and have run already: then it has no effect.
    """
    there = [each for each in operations if each is not None]
    return tf.control_dependencies(there)  # type: ignore[no-any-return]  # TensorFlow is untyped
