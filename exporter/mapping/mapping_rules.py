"""The rules of mapping variables to tensors: renames, a table of names, casts, and partitions' row order.

A table of names (`--rename`) is written by hand, or begun by `inspect --unmatched`: two columns
separated by blanks; `#` at the beginning of a line or after a blank begins a comment.

    # variable            tensor
    ranker/hidden/kernel  model/dense_1/w
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Struct, field

from exporter.checkpoint.admission import Admission
from exporter.errors import AmbiguousRename, PartitionStrategyUnknown, UsageError
from exporter.graph.inference_graph import PartitionStrategy
from exporter.storage.files import read_regular
from exporter.storage.local_paths import quoted
from exporter.wire.dtypes import DType
from exporter.wire.json_documents import Text, doc

if TYPE_CHECKING:
    from exporter.catalog import Catalog, SliceSpec, TensorRef
    from exporter.graph.inference_graph import GraphVariable, InferenceGraph
    from exporter.options import ExportRequest


class RowOrder(Struct, frozen=True):
    """The moves of a table's rows, out of `gather_parts` and into `scatter_parts` mod partitions.

    A number 0 means no move.
    """

    gather_parts: int = 0
    scatter_parts: int = 0


_STAYS = RowOrder()


def row_order(
    key: str,
    variables: Iterable[GraphVariable],
    tensor: TensorRef,
    *,
    trained: PartitionStrategy | None,
    served: PartitionStrategy | None,
) -> RowOrder:
    """Return the moves that bring a table's rows from training's order to the order of the graph's lookups.

    `variables` are the table's parts in the graph. `trained` and `served` are the strategies of training and
    of the graph: None means unknown, NONE that the table's parts are never looked up together. Without parts
    on both sides, with the same parts and an unknown strategy, or with `trained` unknown and `served` NONE,
    no rows move. Raises PartitionStrategyUnknown if rows may have to move, and a strategy that matters is
    unknown or parts have other lengths than `mod` gives.
    """
    # TF1's `embedding_lookup` on a partitioned variable defaults to `mod`: row i is row i // n of part i % n,
    # while the parts are stored as contiguous boxes. Served with another number of parts, or whole, the
    # table would give wrong rows without an error. Nothing in a checkpoint says which strategy training used;
    # the trainer's graph does.
    stored_boxes = [part.spec for part in tensor.slices]
    served_boxes = [variable.part for variable in variables if variable.part is not None]
    if not stored_boxes and not served_boxes:  # most variables of most models
        return _STAYS
    stored_parts, served_parts = _parts_of_rows(stored_boxes), _parts_of_rows(served_boxes)
    same_boxes = set(stored_boxes) == set(served_boxes)
    if same_boxes and None in (trained, served):
        return RowOrder()
    if trained is None and stored_parts > 1 and served is PartitionStrategy.NONE:
        return RowOrder()
    _require_strategies(key, trained, served, stored_parts, served_parts)
    was_mod = trained is PartitionStrategy.MOD and stored_parts > 1
    is_mod = served is PartitionStrategy.MOD and served_parts > 1
    if was_mod and is_mod and same_boxes:
        return RowOrder()
    if was_mod:
        _require_mod_lengths(key, stored_boxes, "checkpoint")
    if is_mod:
        _require_mod_lengths(key, served_boxes, "graph")
    return RowOrder(stored_parts if was_mod else 0, served_parts if is_mod else 0)


def _require_strategies(
    key: str,
    trained: PartitionStrategy | None,
    served: PartitionStrategy | None,
    stored_parts: int,
    served_parts: int,
) -> None:
    """Require a known strategy for each side, checkpoint and graph, that has several partitions.

    `stored_parts` and `served_parts` are the numbers of partitions in the checkpoint and in the graph. Raises
    PartitionStrategyUnknown otherwise.
    """
    if trained is None and stored_parts > 1:
        raise PartitionStrategyUnknown(
            f"table {key!r}: {stored_parts} partitions in the checkpoint, {served_parts} in the graph, "
            "and it is not known whether training looked it up by mod or by div",
            cause="under mod, row i lies in partition i % n; under div, partitions are ranges of rows",
            hint=f"put the trainer's .meta beside the checkpoint, or say --partition-strategy {key}=mod|div",
        )
    if served is None and served_parts > 1:
        raise PartitionStrategyUnknown(
            f"table {key!r}: {stored_parts} partitions in the checkpoint, {served_parts} in the graph, which "
            "looks its parts up neither by mod nor by div",
            hint="export with the trainer's own partitioner, so that the table keeps its partitions",
        )


def mod_lengths(rows: int, parts: int) -> list[int]:
    """Return the number of rows of each part under `mod`, in the order of the parts.

    Part p has the rows p, p + parts, p + 2 * parts ...
    """
    return [len(range(part, rows, parts)) for part in range(parts)]


def _parts_of_rows(boxes: list[SliceSpec]) -> int:
    return max(1, len({box.starts[0] for box in boxes if box.starts}))


def _require_mod_lengths(key: str, boxes: list[SliceSpec], where: str) -> None:
    rows = boxes[0].full_shape[0]
    lengths = [box.lengths[0] for box in sorted(boxes, key=lambda box: box.starts)]
    if lengths != mod_lengths(rows, len(boxes)):
        raise PartitionStrategyUnknown(
            f"table {key!r} is looked up by mod, but its partitions in the {where} have {lengths} rows; "
            f"mod over {len(boxes)} partitions needs {mod_lengths(rows, len(boxes))}",
            hint="export with the trainer's own partitioner, so that the table keeps its partitions",
        )


_MAX_BYTES = 64 << 20
_COMMENT = re.compile(r"(^|\s)#.*$")


class Entry(Struct, frozen=True):
    """One line of a table of names."""

    line: int
    tensor: str


class RenameTable(Struct, frozen=True):
    """Tensor names by variable name; `path` is for messages."""

    path: Path
    entries: Mapping[str, Entry]

    @property
    def rules(self) -> tuple[RenameRule, ...]:
        """The table as rules, one for each whole variable name, in the order of the lines."""
        return tuple(
            # Both are literal: a name may hold what means something in a pattern or in a replacement.
            RenameRule(re.compile(re.escape(variable)), entry.tensor.replace("\\", r"\\"))
            for variable, entry in self.entries.items()
        )

    def check(self, graph: InferenceGraph, catalog: Catalog) -> None:
        """Require that the graph has every named variable or table, and the checkpoint every named tensor.

        A typing error would silently leave a variable to other rules. Raises UsageError, which names the
        line, if one is missing. If a dynamic table is named: CheckpointError and subclasses if the
        checkpoint's embedding variables are damaged or cannot be read.
        """
        from exporter.checkpoint.embedding_variables import embedding_variables, find_variable

        variables = {variable.key for variable in graph.variables}
        tables = {table.name for table in graph.dynamic_tables}
        stored = embedding_variables(catalog) if tables & self.entries.keys() else {}
        for name, entry in self.entries.items():
            if name in tables and find_variable(stored, entry.tensor) is not None:
                continue
            if name not in variables | tables:
                raise self._error(entry.line, f"the graph has no variable {name!r}")
            if entry.tensor not in catalog.tensors:
                raise self._error(entry.line, f"{catalog.prefix.name} has no tensor {entry.tensor!r}")

    def _error(self, line: int, what: str) -> UsageError:
        return UsageError(
            f"{self.path}, line {line}: {what}",
            hint="list both sides: export-model inspect DIR --unmatched WHAT",
        )


def read_renames(path: Path) -> RenameTable:
    """Read the table of names in the file `path`.

    Raises:
        UsageError: it cannot be read, has more than 64 MiB, a line has another form, or a variable occurs
            twice; the message names the line.
        CheckpointError: it is a pointer of Git LFS, or cannot be fetched from a store.
    """
    try:
        text = read_regular(path, _MAX_BYTES).decode("utf-8-sig")  # editors on Windows begin files with a BOM
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the table of names {path} cannot be read", cause=str(error)) from error
    return parse_renames(text, path)


def parse_renames(text: str, path: Path) -> RenameTable:
    """Parse a table of names; `path` is for messages.

    Raises UsageError, which names the line, if a line has another form or a variable occurs twice.
    """
    entries: dict[str, Entry] = {}
    for number, line in enumerate(text.splitlines(), 1):
        columns = _COMMENT.sub("", line).split()
        if not columns:
            continue
        if len(columns) != 2:
            raise UsageError(
                f"{path}, line {number}: expected a variable and a tensor, found {len(columns)} columns",
                hint="one 'variable tensor' a line, separated by blanks",
            )
        variable, tensor = columns
        if variable in entries:
            raise UsageError(
                f"{path}, line {number}: {variable!r} is in line {entries[variable].line} already"
            )
        entries[variable] = Entry(number, tensor)
    return RenameTable(path, entries)


_RENAME_EXAMPLE = r"a regular expression and a tensor's name: --rename 'tower/(.*)=ranker/\1'"


class RenameRule(Struct, frozen=True):
    r"""A regular expression for a whole variable name, and the tensor name to use instead (`\1` is a group).

    Rules come only from a request: manifests have their texts, and the names that they gave, but never run
    them.
    """

    pattern: re.Pattern[str]
    replacement: str

    @classmethod
    def parse(cls, text: str) -> RenameRule:
        """Parse a rule `pattern=replacement`, split at the last `=`.

        Raises UsageError if the text has another form, the pattern is not a regular expression, or the
        replacement names a group that the pattern lacks.
        """
        pattern, equals, replacement = text.rpartition("=")
        if not equals or not pattern or not replacement:
            raise UsageError(f"rename rule {text!r} is not of the form PATTERN=NAME", hint=_RENAME_EXAMPLE)
        try:
            compiled = re.compile(pattern)
            compiled.sub(replacement, "")  # parses the replacement, though there is nothing to replace
        except (re.error, IndexError) as error:
            raise UsageError(
                f"rename rule {text!r} does not parse", cause=str(error), hint=_RENAME_EXAMPLE
            ) from error
        return cls(compiled, replacement)

    def apply(self, name: str) -> str | None:
        """Return the tensor name for a variable's name; None if the rule does not match the whole name."""
        match = self.pattern.fullmatch(name)
        return match.expand(self.replacement) if match else None


CASTS = ("bfloat16", "float16", "int8")


class CastRule(Struct, frozen=True):
    """Variables whose whole name matches are stored as `dtype`."""

    pattern: re.Pattern[str]
    label: str

    @property
    def dtype(self) -> DType:
        """The dtype that matching variables are stored as."""
        return DType.of(self.label)

    @classmethod
    def parse(cls, text: str) -> CastRule:
        """Parse a rule `pattern=bfloat16` (or float16, int8).

        Without a pattern it is for every float variable. Raises UsageError for another type, or if the
        pattern is not a regular expression.
        """
        pattern, _, label = text.rpartition("=")
        if label not in CASTS:
            raise UsageError(
                f"--cast {text!r}: expected bfloat16, float16 or int8, found {label!r}",
                hint="--cast 'embedding.*=bfloat16'",
            )
        try:
            return cls(re.compile(pattern or ".*"), label)
        except re.error as error:
            raise UsageError(f"--cast {text!r}: not a regular expression", cause=str(error)) from error


# The slot name of `tf.train.ExponentialMovingAverage` unless the trainer chose another.
TF_AVERAGE = "ExponentialMovingAverage"


def average_slots(average: str | None) -> tuple[str, ...]:
    """Return the slot names that a value of `--average` looks for, in their order; empty for None."""
    return (TF_AVERAGE, "ema") if average == "ema" else (average,) if average else ()


class ServedWhole(Struct, frozen=True, omit_defaults=True):
    """The content of served objects and layers in a checkpoint besides the variables that are served."""

    beside: Annotated[tuple[Text, ...], doc("their tensors that may be left out")] = ()
    objects: Annotated[
        tuple[Text, ...], doc("paths of objects that are served without a variable of their own")
    ] = ()


class MappingRules(Struct, frozen=True):
    """The rules that variables are mapped to tensors by.

    `average` is the slot name of moving averages to serve instead of raw weights, "ema" for TensorFlow's own.
    With `by_order`, a list of values without names is in the order of the graph's variables. `strategies` has
    the partition strategies of training that the user names, `trained` those of the trainer's graph.
    `object_path` is the path of the served model in an object-based checkpoint. `tensors` has, by variable,
    the names found among the objects of another checkpoint of the same trainer. `names` and `dtypes` have, by
    whole names, the results of renames and casts of an earlier export. Variables that match `ignored` may be
    left out, though they belong to a served object; `whole` has all others that may, None if unknown.
    """

    renames: tuple[RenameRule, ...] = ()
    average: str | None = None
    casts: tuple[CastRule, ...] = ()
    by_order: bool = False
    strategies: Mapping[str, PartitionStrategy] = field(default_factory=dict)
    trained: Mapping[str, PartitionStrategy] = field(default_factory=dict)
    object_path: str | None = None
    tensors: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[re.Pattern[str], ...] = ()
    whole: ServedWhole | None = None

    def ignores(self, names: Iterable[str]) -> bool:
        """True if a variable with these names may be left out.

        One of the names matches `--ignore`, or is the name of a tensor that was left out before.
        """
        known = self.whole.beside if self.whole is not None else ()
        return any(name in known or any(p.fullmatch(name) for p in self.ignored) for name in names)

    def renamed(self, key: str) -> str | None:
        """Return the tensor name that the rename rules give a variable.

        Without a matching rule, the name that an earlier export gave; None if there is none. Raises
        AmbiguousRename if rules disagree.
        """
        names = {new for rule in self.renames if (new := rule.apply(key)) is not None}
        if len(names) > 1:
            raise AmbiguousRename(
                f"variable {key!r}: rename rules disagree: {', '.join(sorted(map(repr, names)))}"
            )
        return names.pop() if names else self.names.get(key)

    def cast(self, key: str) -> DType | None:
        """Return the dtype that the first matching cast rule stores a float variable in.

        Without a matching rule, the dtype of an earlier export; None if there is none. The caller has to know
        that the variable is of a float type: `cast_for`.
        """
        ruled = next((rule.label for rule in self.casts if rule.pattern.fullmatch(key)), self.dtypes.get(key))
        return DType.of(ruled) if ruled else None


def parse_rules(request: ExportRequest) -> MappingRules:
    """Return the rules about names and layouts in a request; table files of names are not read here.

    Raises:
        UsageError: a rule does not parse.
    """
    strategies = {}
    for name, text in request.partition_strategies.items():
        if text not in (PartitionStrategy.MOD.value, PartitionStrategy.DIV.value):
            raise UsageError(f"--partition-strategy {name}={text}: expected mod or div")
        strategies[name] = PartitionStrategy(text)
    return MappingRules(
        renames=tuple(map(RenameRule.parse, request.renames)),
        average=request.average,
        by_order=request.by_order,
        casts=tuple(map(CastRule.parse, request.casts)),
        strategies=strategies,
        object_path=request.object_path,
        ignored=parse_ignored(request.ignored),
    )


def parse_ignored(texts: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    """Compile the regular expressions of `--ignore`, in their order.

    Raises:
        UsageError: one does not parse.
    """
    found = []
    for text in texts:
        try:
            found.append(re.compile(text))
        except re.error as error:
            raise UsageError(
                f"--ignore {text!r} is not a regular expression",
                cause=str(error),
                hint=f"for a name as it is written: --ignore {quoted(re.escape(text))}",
            ) from error
    return tuple(found)


def parse_admission(request: ExportRequest) -> Admission:
    """Return the filter of keys in a request.

    Raises:
        UsageError: a number is negative.
    """
    for option, count in (
        ("--keys min-freq", request.min_freq),
        ("--keys max-age-steps", request.max_age_steps),
    ):
        if count is not None and count < 0:
            raise UsageError(f"{option} {count}: expected 0 or more")
    return Admission(request.min_freq, request.max_age_steps)
