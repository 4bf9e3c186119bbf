"""List a log's directory inside the graph; an update with nothing to do reads nothing else."""

from __future__ import annotations

import re

from msgspec import Struct

from exporter.layout import DELTAS_DIRECTORY, HOLD_FILE, MANIFEST_FILE
from exporter.subgraph.read_delta import attempt, first_success
from exporter.subgraph.state import Tensor

NO_LIMIT = (1 << 63) - 1

_DELTA = "/00[0-9]{18}-00[0-9]{18}"
_POSITION_DIGITS = 20
_NAME_LENGTH = 2 * _POSITION_DIGITS + 1
_NO_DELTA = "0" * _POSITION_DIGITS + "-" + "0" * _POSITION_DIGITS
_GLOB_CHARACTERS = r"([*?\[\\])"
_STORE = "(?s)[a-z0-9]+://.*"
_NONE = -1


class ListedDeltas(Struct, frozen=True):
    """What the log's directory lists: names and the positions they stand for, and one entry that never fits.

    `hold` is the position that is not to be passed; negative if its file cannot be read. `unlisted` is true
    if what is published is unknown: the model's directory is not there any more, or cannot be read.
    """

    directory: Tensor
    names: Tensor
    starts: Tensor
    ends: Tensor
    hold: Tensor
    unlisted: Tensor

    @property
    def as_list(self) -> list[Tensor]:
        """The fields in order."""
        return [getattr(self, name) for name in self.__struct_fields__]


def list_published(base: Tensor, log: str) -> ListedDeltas:
    """What the directory of a log holds; whatever is not a delta's name or the hold file is ignored."""
    import tensorflow as tf

    directory = _log_directory(base, log)
    paths, hold = _list_and_hold(directory)
    ends = tf.strings.substr(tf.strings.join(["/" + _NO_DELTA, paths]), -_NAME_LENGTH - 1, _NAME_LENGTH + 1)
    listed = tf.boolean_mask(ends, tf.strings.regex_full_match(ends, _DELTA))
    names = tf.strings.substr(tf.concat([tf.reverse(listed, [0]), ["/" + _NO_DELTA]], 0), 1, _NAME_LENGTH)
    starts, stops = (
        tf.strings.to_number(tf.strings.substr(names, begin, _POSITION_DIGITS), tf.int64)
        for begin in (0, _POSITION_DIGITS + 1)
    )
    # A model's directory holds a version at least: if that too lists nothing, it was moved or unmounted.
    is_gone = tf.cond(
        tf.size(paths) > 0, lambda: tf.constant(False), lambda: tf.equal(tf.size(_list(base)), 0)
    )
    return ListedDeltas(directory, names, starts, stops, hold, is_gone)


def list_step(base: Tensor, log: str, start: Tensor, end: Tensor) -> ListedDeltas:
    """A listing of the delta `start-end` alone, whether it is published or not.

    For a call from `start` to the named position `end` it is what the whole log's listing would choose, at a
    cost that does not depend on how many deltas there are. Such calls do not ask for the hold.
    """
    import tensorflow as tf

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
    """True if the one delta of a `list_step` is there."""
    import tensorflow as tf

    whole = tf.strings.join([_within(step.directory, ""), step.names[0], "/" + MANIFEST_FILE])
    in_store = tf.strings.regex_full_match(step.directory, _STORE)
    path = tf.where(in_store, whole, tf.strings.regex_replace(whole, "/[^/]*$", ""))
    return tf.size(_match(path[tf.newaxis])) > 0


def _log_directory(base: Tensor, log: str) -> Tensor:
    import tensorflow as tf

    return tf.strings.join([base, DELTAS_DIRECTORY, log], separator="/")


def _list(directory: Tensor) -> Tensor:
    """Paths of what is in a directory, in order; none if there is no such directory, or it cannot be read."""
    return _match(_within(directory, "*")[None])


def _list_log(directory: Tensor) -> Tensor:
    """Paths of what is published in a log's directory; as `_list`.

    Where there are no renames, as behind `gs://`, a delta's directory is there as soon as one of its files
    is: what counts is its manifest, which is written last.
    """
    import tensorflow as tf

    in_store = tf.strings.regex_full_match(directory, _STORE)
    whole = _within(directory, f"*/{MANIFEST_FILE}")
    patterns = tf.stack([_within(directory, "*"), whole, _within(directory, HOLD_FILE)])
    paths = _match(tf.boolean_mask(patterns, tf.stack([tf.logical_not(in_store), in_store, in_store])))
    return tf.strings.regex_replace(paths, f"/{re.escape(MANIFEST_FILE)}$", "")


def _within(directory: Tensor, pattern: str) -> Tensor:
    import tensorflow as tf

    literal = tf.strings.regex_replace(directory, _GLOB_CHARACTERS, r"\\\1")
    return tf.strings.join([literal, pattern], separator="/")


def _match(patterns: Tensor) -> Tensor:
    import tensorflow as tf

    (paths,) = attempt(patterns, lambda each: (tf.io.matching_files(each),), (tf.constant([], tf.string),))
    return tf.ensure_shape(paths, [None])


def _list_and_hold(directory: Tensor) -> tuple[Tensor, Tensor]:
    """Paths of what is in a log's directory, and the hold.

    The listing that counts is not older than the hold: a rollback publishes its delta and moves the hold at
    once, and who knew the new hold without the delta would go on to what is taken back.
    """
    import tensorflow as tf

    path = tf.strings.join([directory, HOLD_FILE], separator="/")

    def held() -> tuple[Tensor, Tensor]:
        hold = _read_hold(path)
        with tf.control_dependencies([hold]):
            return _list_log(tf.identity(directory)), hold

    paths = _list_log(directory)
    # Not tried at all where there is no file: each failed read writes a line into the server's log.
    is_held = tf.reduce_any(tf.equal(paths, path))
    paths, hold = tf.cond(is_held, held, lambda: (paths, tf.constant(NO_LIMIT, tf.int64)))
    return tf.ensure_shape(paths, [None]), hold


def _read_hold(path: Tensor) -> Tensor:
    import tensorflow as tf

    (position,) = first_success(
        tf.data.Dataset.from_tensors(path),
        lambda file: (tf.strings.to_number(tf.strings.strip(tf.io.read_file(file)), tf.int64),),
        (tf.constant(_NONE, tf.int64),),
    )
    return tf.ensure_shape(position, [])
